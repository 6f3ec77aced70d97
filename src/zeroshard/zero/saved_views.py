"""Tells views of a unit's storage that autograd has saved from tensors that a program keeps.

A unit that is freed after its forward leaves views of its storage in the graph (``F.linear`` saves
``weight.t()``). Autograd compares their versions before it reads them, and the unit is full by then. Any other tensor on the storage may be read at any time, so the storage must not be freed under it. Both
count as uses of the storage. So the first forward of a module counts the views that autograd saves, in
hooks on saved tensors. Later forwards only look up their number of new uses. Another number, as of
another branch, means one storage that is not freed, and that the next forward counts again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from zeroshard.memory.storage import uses

if TYPE_CHECKING:
    from zeroshard.zero.prefetch import WrappedModule
    from zeroshard.zero.unit import Unit

_autograd: Any = torch._C._autograd
_top: Callable[[bool], Any] = _autograd._top_saved_tensors_default_hooks


def _unpack(packed: tuple[Tensor, int]) -> Tensor:
    """The saved tensor, if nobody has written it: autograd compares no versions where hooks are."""
    tensor, version = packed
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: [{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; "
            f"expected version {version} instead."
        )
    return tensor


class SavedViews:
    """Keeps ``unit.expected_uses`` up to date for the calls of one engine's modules.

    :meth:`begin` and :meth:`end` enclose a forward that may record a graph, and :meth:`done` follows its
    backward.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}  # views saved while a forward counts, by storage
        self._counting: object | None = None  # the call whose hooks are on
        self._hook = self._pack  # one object, to be recognized

    def begin(self, wrapped: WrappedModule, call: object) -> list[int] | None:
        """Count the views that are saved from now on, if the module's are not known.

        Returns the counts so far; None if it is not counted.
        """
        if not wrapped.counts_views:
            return None
        top = _top(True)
        if top is None:
            if not _autograd._saved_tensors_hooks_is_enabled():
                return None
            self._counting = call
            _autograd._push_saved_tensors_default_hooks(self._hook, _unpack)
        elif top[0] is not self._hook:
            return None  # the program's hooks hold what is saved
        return [self._counts.setdefault(unit.storage_id, 0) for unit in wrapped.sharded]

    def end(self, wrapped: WrappedModule, call: object, before: list[int] | None) -> list[int]:
        """Expect the views that the call has saved. Returns their numbers, by unit."""
        saved = []
        for at, unit in enumerate(wrapped.sharded):
            found = uses(unit.storage_id) - unit.expected_uses - unit.param_uses
            number = unit.saved_of.get(found, 0 if found <= 0 else None)
            if number is None:
                number = 0
                if before is not None:
                    number = self._counts.get(unit.storage_id, 0) - before[at]
                    unit.saved_of[found] = number
                else:
                    wrapped.counts_views = True
            unit.expected_uses += number
            saved.append(number)
        if before is not None:
            wrapped.counts_views = False
            self.stop(call)
        return saved

    def stop(self, call: object | None = None) -> None:
        """Remove the hooks of ``call``; None: of any call, because an exception has ended it."""
        if self._counting is None or (call is not None and call is not self._counting):
            return
        self._counting = None
        self._counts.clear()
        top = _top(True)
        if top is not None and top[0] is self._hook:
            _autograd._pop_saved_tensors_default_hooks()

    def _pack(self, tensor: Tensor) -> tuple[Tensor, int]:
        if tensor.is_leaf:
            return tensor, tensor._version
        if torch._C._has_storage(tensor):
            address = tensor.untyped_storage()._cdata
            if address in self._counts:
                self._counts[address] += 1
        return tensor.detach(), tensor._version


def done(units: Sequence[Unit], saved: Sequence[int]) -> None:
    """Expect no more the views of a call, because backward has freed them."""
    for unit, number in zip(units, saved, strict=False):
        unit.expected_uses -= number


def can_count(units: Sequence[Unit]) -> bool:
    """Whether the units have memory."""
    return bool(units) and not any(isinstance(unit.full_N, FakeTensor) for unit in units)
