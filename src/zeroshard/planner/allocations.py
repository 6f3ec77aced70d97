"""Counts the memory of a simulated rank: what the ledger knows, and everything else.

The ledger has what the engine holds. Everything else is activations, temporaries of operations and
gradients on their way, which only torch's dispatcher sees: :class:`Allocations` follows the storages of
the tensors that operations return until they are freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from zeroshard.core.ledger import Ledger


class Allocations(TorchDispatchMode):
    """While it is entered, follows the storages of fake tensors that operations return.

    Costs some microseconds for each operation. ``note(func, args, result)`` gets every call.
    """

    def __init__(self, note: Callable[[Any, tuple[Any, ...], Any], None]) -> None:
        super().__init__()
        self._note = note
        self._sizes: dict[int, int] = {}  # bytes by address of a storage that lives
        self._refs: dict[int, weakref.ref[Any]] = {}
        self._live = 0
        self._resized: set[int] = set()  # addresses of storages whose sizes the ledger knows
        self._ledger: Ledger | None = None
        self.activations_nbytes = 0
        self.peak_nbytes = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation and follow what it returns."""
        result = func(*args, **(kwargs or {}))
        self._note(func, args, result)
        for value in result if isinstance(result, (list, tuple)) else (result,):
            if type(value) is FakeTensor:
                self._follow(value)
        return result

    def measure(self, ledger: Ledger, resized: Iterable[Tensor]) -> None:
        """Measure peaks from now on.

        ``resized``: tensors whose storages change their size. The ledger has their bytes ("gathered").
        """
        for tensor in resized:
            key = tensor.untyped_storage()._cdata
            self._forget(key)
            self._resized.add(key)
        self._ledger = ledger
        self.activations_nbytes = self.peak_nbytes = 0
        self._look()

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes or key in self._resized:
            return
        self._sizes[key] = nbytes = storage.nbytes()
        self._refs[key] = weakref.ref(storage, lambda _: self._forget(key))
        self._live += nbytes
        if self._ledger is not None:
            self._look()

    def _forget(self, key: int) -> None:
        self._live -= self._sizes.pop(key, 0)
        self._refs.pop(key, None)

    def _look(self) -> None:
        """Compare with the peaks. Storages that are resized are neither in ``_live`` nor subtracted."""
        ledger = self._ledger
        assert ledger is not None
        known, on_device = ledger.totals(but="gathered")
        others = self._live - known
        gathered = ledger.nbytes("gathered")
        self.activations_nbytes = max(self.activations_nbytes, others)
        self.peak_nbytes = max(self.peak_nbytes, others + on_device + gathered)
