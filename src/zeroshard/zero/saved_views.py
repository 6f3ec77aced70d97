"""Tells views of a unit's storage that autograd has saved from tensors that a program keeps.

A unit that is freed after its forward leaves views of its storage in the graph (``F.linear`` saves
``weight.t()``). Autograd compares their versions before it reads them, and the unit is full by then. Any
other tensor on the storage may be read at any time, so the storage must not be freed under it. Both
count as uses of the storage. So the first forward of a module counts the views that autograd saves, in
hooks on saved tensors. Later forwards only look up their number of new uses. Another number, as of
another branch, means one storage that is not freed, and that the next forward counts again.

In a backward, these hooks also see a read of a unit that is not full, because backward has not come
through an output of its module: the program uses a tensor that the module did not return. The call is
entered then. Such a module keeps its hooks in every forward. They take about ten microseconds for each
saved tensor, so other modules have none.

Torch makes another tensor of what a hook returns. An ``autograd.Function`` that has saved a parameter
would miss its attributes (``weight.ds_status``, ``weight.main_grad``), so ``ctx.saved_tensors`` puts the
parameter itself in its place again.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from zeroshard.memory.storage import has_more_uses, uses

if TYPE_CHECKING:
    from zeroshard.zero.prefetch import WrappedModule
    from zeroshard.zero.unit import Unit

    Enter = Callable[["WrappedModule", Any, int], None]

_autograd: Any = torch._C._autograd
_is_alias_of: Callable[[Tensor, Tensor], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]
_top: Callable[[bool], Any] = _autograd._top_saved_tensors_default_hooks


class SavedViews:
    """Keeps ``unit.expected_uses`` up to date for the calls of one engine's modules.

    :meth:`begin` and :meth:`end` enclose a forward that may record a graph, and :func:`forget_views`
    follows its backward. ``enter(wrapped, call, number)``: make the module full, because node ``number``
    of backward reads its parameters.
    """

    def __init__(self, modules: Iterable[WrappedModule], enter: Enter) -> None:
        self._enter = enter
        self._of_param = {
            id(param): (wrapped, unit)
            for wrapped in modules
            for unit in wrapped.sharded
            for param in unit.params
        }
        self._of_storage: dict[int, tuple[WrappedModule, Unit]] = {}
        self._counts: dict[int, int] = {}  # views saved while a forward counts, by storage
        self._leaves: Counter[int] = Counter()  # by id, how often a parameter itself was saved
        # By id of a call, how many Python objects referred to each of its parameters before.
        self._references: dict[int, list[int]] = {}
        self.kept: str | None = None  # of a module whose forward left a parameter somewhere
        self._counting: object | None = None  # the call whose hooks are on
        self._counter: WrappedModule | None = None  # its module
        me = weakref.ref(self)  # a graph must not keep an engine alive

        def pack(tensor: Tensor) -> _Packed:
            own = me()
            reader = None if own is None else own._reader(tensor)
            kept = tensor if tensor.is_leaf else tensor.detach()
            return _Packed(kept, _version(kept, reader), reader)

        def unpack(packed: _Packed) -> Tensor:
            own = me()
            if packed.reader is not None and own is not None:
                own._before_read(*packed.reader)
            tensor = packed.checked()
            if isinstance(tensor, nn.Parameter):
                _unpacked.params.append(tensor)
            return tensor

        self._pack, self._unpack = pack, unpack

    def begin(self, wrapped: WrappedModule, call: object) -> list[int] | None:
        """Count the views that are saved from now on, if the module's are not known.

        Returns the counts so far; None if it is not counted.
        """
        if not wrapped.counts_views:
            return None
        self._references[id(call)] = self._referring(wrapped)
        top = _top(True)
        if top is None:
            if not _autograd._saved_tensors_hooks_is_enabled():
                return None
            self._counting, self._counter = call, wrapped
            _autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)
        elif top[0] is not self._pack:
            return None  # the program's hooks hold what is saved
        for unit in wrapped.sharded:
            self._of_storage[unit.storage_id] = wrapped, unit
        return [self._counts.setdefault(unit.storage_id, 0) for unit in wrapped.sharded]

    def end(self, wrapped: WrappedModule, call: object, before: list[int] | None) -> list[int]:
        """Expect the views that the call has saved. Returns their numbers, by unit.

        ``kept`` becomes the name of a parameter if more refer to the call's than before: if hooks of the
        program have kept it for backward, no hook of the engine sees when it is read.
        """
        references = self._references.pop(id(call), None)
        if self.kept is None and references is not None:
            # One more is torch's: a tensor that its graph holds refers to its Python object.
            more = zip(self._referring(wrapped), references, strict=True)
            if any(now > then + 1 for now, then in more):
                self.kept = wrapped.sharded[0].layout.slots[0].fqn
        saved = []
        for at, unit in enumerate(wrapped.sharded):
            known = unit.expected_uses + unit.param_uses
            if before is not None:
                has_more_uses(
                    unit.storage_id,
                    known + self._counts.get(unit.storage_id, before[at]) - before[at],
                )
            found = uses(unit.storage_id) - known
            number = unit.saved_of.get(found, 0 if found <= 0 else None)
            if number is None:
                number = 0
                if before is not None:
                    number = self._counts.get(unit.storage_id, before[at]) - before[at]
                    unit.saved_of[found] = number
                else:
                    wrapped.counts_views = True
            unit.expected_uses += number
            saved.append(number)
        if before is not None:
            wrapped.counts_views = wrapped.is_read_aside
            self.stop(call)
        return saved

    def _referring(self, wrapped: WrappedModule) -> list[int]:
        """How many Python objects beside our own refer to each parameter."""
        params = (param for unit in wrapped.sharded for param in unit.params)
        return [sys.getrefcount(param) - self._leaves[id(param)] for param in params]

    def stop(self, call: object | None = None) -> None:
        """Remove the hooks of ``call``; None: of any call, because an exception has ended it."""
        if self._counting is None or (call is not None and call is not self._counting):
            return
        self._counting = self._counter = None
        self._counts.clear()
        self._leaves.clear()
        self._of_storage.clear()
        top = _top(True)
        if top is not None and top[0] is self._pack:
            _autograd._pop_saved_tensors_default_hooks()

    def _reader(self, tensor: Tensor) -> tuple[WrappedModule, Unit, Any] | None:
        """The unit whose values a saved tensor is, and its running call; None: it is of no unit."""
        found = self._of_param.get(id(tensor))
        if found is None:
            if not torch._C._has_storage(tensor):
                return None
            address = tensor.untyped_storage()._cdata
            found = self._of_storage.get(address)
            if found is None or found[1].storage_id != address:  # it may be another one by now
                return None
            self._counts[address] += 1
        wrapped, unit = found
        self._leaves[id(tensor)] += tensor.is_leaf
        if not unit.is_full and self._counter is not None:
            self._counter.is_read_aside = True  # it uses the parameter without its module
        return wrapped, unit, wrapped.running[-1] if wrapped.running else None

    def _before_read(self, wrapped: WrappedModule, unit: Unit, call: Any) -> None:
        """Backward is about to read values of the unit."""
        if unit.is_full:
            return
        node = torch._C._current_autograd_node()
        if node is not None:
            wrapped.is_read_aside = wrapped.counts_views = True
            self._enter(wrapped, call, node._sequence_nr())


class _Unpacked(threading.local):
    """The parameters that hooks have given to the ``ctx.saved_tensors`` that this thread reads."""

    def __init__(self) -> None:
        self.params: deque[nn.Parameter] = deque(maxlen=0)  # outside of such a read none is kept


_unpacked = _Unpacked()
_saved_tensors: Any = BackwardCFunction.saved_tensors


def _with_parameters(ctx: Any) -> tuple[Tensor | None, ...]:
    """``ctx.saved_tensors``, in which each parameter is the object that the function has saved."""
    outer, params = _unpacked.params, deque[nn.Parameter]()
    _unpacked.params = params
    try:
        tensors: tuple[Tensor | None, ...] = _saved_tensors.__get__(ctx)
    finally:
        _unpacked.params = outer
    if not params:
        return tensors
    return tuple(
        params.popleft() if params and _is_same(tensor, params[0]) else tensor for tensor in tensors
    )


def _is_same(tensor: Tensor | None, param: nn.Parameter) -> bool:
    return tensor is not None and tensor.shape == param.shape and _is_alias_of(tensor, param)


BackwardCFunction.saved_tensors = property(_with_parameters)  # type: ignore[assignment]


class _Packed(NamedTuple):
    """A saved tensor, its version, and whose values it is."""

    tensor: Tensor
    version: int
    reader: tuple[WrappedModule, Unit, Any] | None

    def checked(self) -> Tensor:
        """The tensor, if nobody has written it: autograd compares no versions where hooks are."""
        tensor, version = self.tensor, _version(self.tensor, self.reader)
        if version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: [{tensor.type()} {list(tensor.shape)}] is at version {version}; "
                f"expected version {self.version} instead."
            )
        return tensor


def _version(tensor: Tensor, reader: tuple[WrappedModule, Unit, Any] | None) -> int:
    """The version of the values: for a parameter it does not depend on the state of its unit."""
    if reader is not None and isinstance(tensor, nn.Parameter):
        return reader[1].values_version(tensor)
    return tensor._version


def forget_views(units: Sequence[Unit], saved: Sequence[int]) -> None:
    """Expect no more the views of a call, because backward has freed them."""
    for unit, number in zip(units, saved, strict=False):
        unit.expected_uses -= number
