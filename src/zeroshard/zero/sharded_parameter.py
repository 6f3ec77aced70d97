"""Parameters that are sharded: reads give full values or an error, writes raise.

[Note: sharded parameters] A parameter that is sharded, or whose values are still in flight, keeps its
shape, dtype and numel; its values are elsewhere. Its class is :class:`ShardedParameter` during that time
and is switched back when the parameter is full, so a full parameter costs nothing (ADR 0002). Metadata is
answered as usual. Any other operation runs on full values that are gathered for it, and gradients flow
back to the parameter. Writes raise, because they could not be kept.

A few C++ functions never consult the class. The memory that they find is a placeholder: one NaN, expanded
to the parameter's shape. Without it they would crash the process (a CPU kernel on a freed storage is a
segmentation fault) or take old bytes for values.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import get_gradient_edge

from zeroshard.comm.dtensors import KINDS, global_of, local_of, marked_like, set_local
from zeroshard.errors import ShardedAccess
from zeroshard.zero import functorch
from zeroshard.zero.attached import Attached
from zeroshard.zero.function_kinds import (
    ADDRESSES,
    AUTOGRAD,
    CASTS,
    DATA_SET,
    LAYOUT,
    LIKE,
    METADATA,
    written,
)


class Owner(Protocol):
    """What holds the values of a sharded parameter: a unit or a bucket."""

    @property
    def name(self) -> str:
        """The name that messages use."""
        ...

    @property
    def order(self) -> int:
        """A number from :func:`count_owner`."""
        ...

    def index(self, param: Tensor) -> int:
        """The parameter's index among those of this owner."""
        ...

    def read(self, param: nn.Parameter) -> Tensor | None:
        """A private full copy of the parameter's values. Collective: every rank must read.

        None: this rank reads alone, and the program may do so (ADR 0011).
        """
        ...

    def is_collective_read(self, fact: bool) -> bool:
        """Whether ``fact`` is true on every rank. Collective."""
        ...

    def ensure_writable(self, param: nn.Parameter, beside: Collection[Tensor]) -> bool:
        """Make the parameter itself full, if it may be written now (during construction).

        ``beside``: all tensors of the same operation. None of them may be sharded to make space.
        """
        ...

    def values_version(self, param: nn.Parameter) -> int | None:
        """A number that changes with the parameter's values; None: it is not known."""
        ...


owners: Attached[Tensor, Callable[[], Owner | None]] = Attached()
"""Maps a parameter to a function that gives its :class:`Owner`, or None when that is gone.

The function is a weak reference if the owner refers to the parameter. A strong one would keep both
alive.
"""


_Param = TypeVar("_Param", bound=Tensor)
_orders = itertools.count()


def count_owner() -> int:
    """A number for a new owner: the same on every rank, since all create owners in one order."""
    return next(_orders)


def in_order(params: Iterable[_Param]) -> list[_Param]:
    """Each parameter once, in an order that is the same on every rank: collectives follow it.

    The order of a program may differ between ranks (a Python set has another one in each process).
    Parameters without owner come first.
    """
    unique = list({id(param): param for param in params}.values())
    return sorted(unique, key=_place) if len(unique) > 1 else unique


def _place(param: Tensor) -> tuple[int, int]:
    owner = owner_of(param)
    return (-1, 0) if owner is None else (owner.order, owner.index(param))


def owner_of(param: Tensor) -> Owner | None:
    """The owner of a parameter, or None for a parameter that is not managed by ZeRO."""
    reference = owners.get(param)
    return None if reference is None else reference()


_listed: Attached[Tensor, bool] = Attached()


def list_on_request(params: Iterable[nn.Parameter]) -> None:
    """Make ``detach()`` of these parameters give a :class:`StateEntry` while they are sharded.

    ``state_dict()`` obtains all of its entries by ``detach()``. This is for programs in which one rank
    lists names and shapes alone. ``detach()`` of other parameters gives values, and every rank has to
    call it.
    """
    for param in params:
        _listed[param] = True


# ---------------------------------------------------------------------- sharded and full


def nan_placeholder(like: Tensor, device: torch.device | None = None) -> Tensor:
    """A placeholder for ``like``: one NaN (the lowest number where the dtype has none), expanded.

    For a DTensor it is one for its local tensor.
    """
    dtype = like.dtype
    if dtype.is_floating_point or dtype.is_complex:
        nothing: float = float("nan")
    else:
        nothing = 0 if dtype == torch.bool else torch.iinfo(dtype).min
    shape, device = local_of(like).shape, device or like.device
    if isinstance(like, FakeTensor):  # a fake mode remembers no operation with a NaN
        return torch.empty((), dtype=dtype, device=device).expand(shape)
    return torch.full((), nothing, dtype=dtype, device=device).expand(shape)


_FAKE: type[Tensor] = FakeTensor  # the class of fake parameters; mypy knows no class of both


def mark_sharded(
    params: Sequence[nn.Parameter], placeholders: Sequence[Tensor] | None = None
) -> None:
    """Put placeholders into the parameters. From now on their owner serves reads."""
    for param, nothing in zip(params, placeholders or map(nan_placeholder, params), strict=True):
        if type(param) in KINDS:
            set_local(param, nothing)
            param.__class__ = sharded_dtensor(type(param))
        elif type(param) is not _FAKE:  # no values to guard, and it must keep its class
            param.data = nothing
            param.__class__ = ShardedParameter


def mark_unsharded(
    params: Sequence[nn.Parameter], views: Sequence[Tensor], kinds: Sequence[type[nn.Parameter]]
) -> None:
    """Make the parameters plain ones with the values in ``views``.

    ``kinds``: the classes that the parameters were built with, nearly always ``nn.Parameter``. ``views``
    of DTensors are their local tensors.
    """
    for param, view, kind in zip(params, views, kinds, strict=True):
        if type(param) is not _FAKE:
            param.__class__ = kind
        if type(param) in KINDS:
            set_local(param, view)
        else:
            param.data = view


_T = torch.Tensor
_NEW_PARAMETER = nn.Parameter.__new__.__code__


# ---------------------------------------------------------------------- the classes


class ShardedParameter(nn.Parameter):
    """A parameter whose full values are not on this rank. Never constructed: the class is switched to."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            # ``type()`` without argument gives the name of the tensor type; with one it is a cast.
            if func in METADATA or (func is _T.type and len(args) == 1 and not kwargs):
                return func(*args, **kwargs)
            _make_writable(_tensors_in((args, kwargs), Tensor))
            away = in_order(_tensors_in((args, kwargs), ShardedParameter))
            if not away:
                return func(*args, **kwargs)
            if args and (answer := _without_values(func, *args, **kwargs)) is not None:
                return answer
            if func == DATA_SET and _is_no_edit(*args):
                return None
            _refuse_memory(func, args, kwargs)
            asks = func in AUTOGRAD
            stand_in = get_gradient_edge if asks else _full_value
            stand_ins: dict[int, Any] = {id(param): stand_in(param) for param in away}
        # Outside the block above: backward recomputes forwards, which may read other parameters.
        args, kwargs = _replaced((args, kwargs), stand_ins)
        if asks:
            return _call_read_only(func, args, kwargs, [], [])
        sources = [_source_of(param) for param in away]
        return _call_read_only(func, args, kwargs, list(stand_ins.values()), sources)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """An ordinary parameter with the full values."""
        if id(self) not in memo:
            with torch.no_grad():
                memo[id(self)] = nn.Parameter(_full_value(self), self.requires_grad)
        copy: nn.Parameter = memo[id(self)]
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch.no_grad():
            values = _read(self)
        if values is None:
            values = _placeholder_of(self)  # a file then stores one number for the parameter
        if not isinstance(self, StateEntry):
            values = nn.Parameter(values, self.requires_grad)
        return values.__reduce_ex__(protocol)

    def set_(self, *args: Any, **kwargs: Any) -> Tensor:
        """As any write: raise unless it can be made full. ``Tensor.set_`` does not consult the class."""
        _make_writable([self, *_tensors_in((args, kwargs), Tensor)])
        if type(self) is nn.Parameter:
            return self.set_(*args, **kwargs)
        raise _lost_write(self, "given other memory (set_)")

    def detach(self) -> Tensor:
        """``Tensor.detach``, but ``nn.Parameter(self)`` needs a result of the class of ``self``."""
        asking = sys._getframe(1)
        if asking.f_code is not _NEW_PARAMETER or asking.f_locals.get("cls") is not nn.Parameter:
            return super().detach()
        if (owner := owner_of(self)) is not None:
            owner.ensure_writable(self, [self])
        if type(self) is nn.Parameter:
            return nn.Parameter(self, requires_grad=False)  # shares the memory
        raise ShardedAccess(
            f"{_described(self)} was passed to nn.Parameter(), which makes a parameter in the "
            "same memory, but it has no memory for its values. Use "
            "nn.Parameter(param.detach().clone()) to get its values."
        )

    def as_subclass(self, cls: type[Tensor]) -> Tensor:  # type: ignore[override]
        """Gather first. ``Tensor.as_subclass`` would not consult the class."""
        return self.view_as(self).as_subclass(cls)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Metadata only. Printing happens on one rank, and reading values would need all of them."""
        owner = owner_of(self)
        return (
            f"ShardedParameter(shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"unit={owner.name if owner else 'closed'!r})"
        )

    __format__ = object.__format__  # type: ignore[assignment]


class _ReadsOfDTensor:
    """DTensor's own methods, which do not consult the class, for a DTensor without its local values."""

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        """The gathered local tensor. Collective over the ranks that hold the same part."""
        return _full_value(self).to_local(grad_placements=grad_placements)  # type: ignore

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The global tensor. Collective over all ranks that hold parts."""
        return _full_value(self).full_tensor(grad_placements=grad_placements)  # type: ignore

    def redistribute(self, *args: Any, **kwargs: Any) -> Tensor:
        """The gathered DTensor with other placements."""
        return _full_value(self).redistribute(*args, **kwargs)  # type: ignore


@functools.cache
def sharded_dtensor(kind: type[Tensor]) -> type[nn.Parameter]:
    """The class of a DTensor of class ``kind`` whose local values are not on this rank.

    A read gathers the local values and runs on a DTensor of them.
    """
    if issubclass(kind, ShardedParameter):
        return kind
    made = type("ShardedDTensor", (_ReadsOfDTensor, ShardedParameter, kind), {})
    KINDS.add(made)
    return made


class StateEntry(ShardedParameter):
    """What ``detach()`` gives after :func:`list_on_request`: shape and dtype, and values when read.

    Detaching gathers nothing. So one rank may list a ``state_dict()`` alone, as programs do that save on
    rank 0, and may look for shared memory. Reading a value is collective, as any other read is, and gives
    the parameter's values at the time of the read, since a detached tensor shares memory with its
    parameter. The entry is on the device ``meta``, where tensors have no memory: C++ functions that never
    consult the class raise instead of giving a value.
    """

    @staticmethod
    def of(param: nn.Parameter, part: Callable[[Tensor], Tensor] = torch.detach) -> Tensor:
        """The entry of a sharded parameter, or a view of another entry."""
        entry = part(torch.empty(param.shape, dtype=param.dtype, device="meta"))
        entry.__class__ = StateEntry
        owner = _OwnerOfEntry(param, part)
        owners[entry] = lambda: owner
        return entry

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:  # type: ignore[override]
        """An ordinary tensor with the full values."""
        if id(self) not in memo:
            with torch.no_grad():
                memo[id(self)] = _full_value(self)
        copy: Tensor = memo[id(self)]
        return copy


class _OwnerOfEntry:
    """The owner of a :class:`StateEntry`: asks the owner of the entry's parameter."""

    def __init__(self, param: nn.Parameter, part: Callable[[Tensor], Tensor]) -> None:
        self.param, self.part = param, part

    @property
    def order(self) -> int:
        owner = owner_of(self.param)
        return owner.order if owner else -1

    def index(self, param: Tensor) -> int:
        """See :class:`Owner`."""
        owner = owner_of(self.param)
        return owner.index(self.param) if owner else 0

    @property
    def name(self) -> str:
        owner = owner_of(self.param)
        return owner.name if owner else "closed"

    def read(self, param: nn.Parameter) -> Tensor | None:
        """See :class:`Owner`."""
        if isinstance(self.param, ShardedParameter):
            values = _read(self.param)
            return None if values is None else self.part(values.detach())
        return self.part(self.param.detach().clone())

    def is_collective_read(self, fact: bool) -> bool:
        """See :class:`Owner`."""
        owner = owner_of(self.param)
        return owner.is_collective_read(fact) if owner else fact

    def ensure_writable(self, param: nn.Parameter, beside: Collection[Tensor]) -> bool:
        """See :class:`Owner`. An entry cannot be written."""
        return False

    def values_version(self, param: nn.Parameter) -> int | None:
        """See :class:`Owner`."""
        owner = owner_of(self.param)
        return owner.values_version(self.param) if owner else None


class ReadOnlyCopy(Tensor):
    """Full values of a sharded parameter, or a view of them: ``param.data`` or ``param[0]``.

    In plain PyTorch a program can edit the parameter through them, and finds the new values in them after
    a step. Here the edit would be lost and the values be old, so both raise. A clone may be written, and
    keeps its values. ``source``: the parameter and the version of the values; None: not known.
    """

    source: _Source | None = None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(True for _ in _tensors_in((args, kwargs), ShardedParameter)):
            # The parameter is gathered first; the call with its copy comes here again.
            return ShardedParameter.__torch_function__(func, types, args, kwargs)
        copies = list(_tensors_in((args, kwargs), cls))
        if func not in METADATA and func not in ADDRESSES:
            for copy in copies:
                _check_age(copy)
            for targets, how in written(func, args, kwargs):
                for copy in _tensors_in(targets, cls):
                    raise _lost_write(copy, how)
        with torch._C.DisableTorchFunctionSubclass():
            return _call_read_only(func, args, kwargs, copies, [copy.source for copy in copies])

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        _check_age(self)
        return without_guard(self).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        _check_age(self)
        return without_guard(self).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        _check_age(self)
        return repr(without_guard(self))

    def __format__(self, spec: str) -> str:
        _check_age(self)
        return format(without_guard(self), spec)


def without_guard(copy: Tensor) -> Tensor:
    """The same values as an ordinary tensor, which may be written."""
    return copy.as_subclass(Tensor) if isinstance(copy, ReadOnlyCopy) else copy


class _ReadFull(torch.autograd.Function):
    """Puts full values of a sharded parameter into the graph, so that the gradient reaches it."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, values: Tensor) -> Tensor:
        return values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class _ReadAlone(torch.autograd.Function):
    """Puts NaN into the graph for values that this rank reads alone. Backward through it raises."""

    @staticmethod
    def forward(ctx: Any, param: nn.Parameter, nothing: Tensor) -> Tensor:
        ctx.what = _described(param)
        return nothing

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        raise ShardedAccess(
            f"the loss of this rank depends on NaN that replace the values of {ctx.what}. Only "
            "this rank read it in a forward (see its log). Read the parameter on every rank."
        )


def _full_value(param: nn.Parameter) -> Tensor:
    """The values for one operation. NaN of the same shape if this is an allowed lone read (ADR 0011)."""
    with functorch.suspended():
        values = _read(param)
        full = values
        if full is None:
            full = _placeholder_of(param).clone(memory_format=torch.contiguous_format)
        if type(param) in KINDS:
            full = global_of(param, full)
        if not (torch.is_grad_enabled() and param.requires_grad):
            return full
        into_graph: Any = _ReadAlone if values is None else _ReadFull
        of_graph: Tensor = into_graph.apply(param, full)
        return marked_like(of_graph, param) if type(param) in KINDS else of_graph


def _read(param: nn.Parameter) -> Tensor | None:
    owner = owner_of(param)
    if owner is None:
        raise ShardedAccess(
            f"a parameter of shape {tuple(param.shape)} was read after its engine was closed. Its "
            "shards were freed. Read what you need before engine.close(), for instance with "
            "engine.iter_full_params()."
        )
    return owner.read(param)


def _placeholder_of(param: nn.Parameter) -> Tensor:
    """A placeholder on the device on which the parameter's full values would be."""
    return nan_placeholder(param, _home(param).device)


def _home(param: nn.Parameter) -> nn.Parameter:
    """The parameter of an entry, or of a view of an entry; any other parameter itself."""
    owner = owner_of(param)
    return _home(owner.param) if isinstance(owner, _OwnerOfEntry) else param


def _is_no_edit(param: Any, values: Any) -> bool:
    """Whether ``param.data = values`` changes nothing. The answer is the same on every rank.

    Collective, unless shape, dtype, device or layout differ or ``values`` is ``param``.
    """
    if values is param:
        return True
    if type(param) is not ShardedParameter or not isinstance(values, Tensor):
        return False
    asked = ("shape", "dtype", "device", "layout")
    if any(getattr(values, name) != getattr(param, name) for name in asked):
        return False
    owner = owner_of(param)
    with torch.no_grad():
        if isinstance(values, ShardedParameter):
            values = _full_value(values)
        own = None if owner is None else owner.read(param)
        if owner is None or own is None:  # a lone read: what other ranks assign is not known
            return False
        return owner.is_collective_read(_same_bits(own, values))


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape and dtype have the same bits. (So 0.0 and -0.0 differ.)"""
    one, other = (tensor.detach().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(one, other)


def _make_writable(used: Iterable[Tensor]) -> None:
    """Make the parameters among the tensors of an operation full, if they may be written now."""
    used = list(used)
    for param in in_order(param for param in used if isinstance(param, ShardedParameter)):
        if (owner := owner_of(param)) is not None:
            owner.ensure_writable(param, used)


def _refuse_memory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a call that writes a sharded parameter or asks for its address."""
    if func in ADDRESSES and isinstance(args[0], ShardedParameter):
        raise ShardedAccess(
            f"{_described(args[0])} has no memory for its values, so it has no address "
            f"({func.__name__}). {_WAYS_OUT}"
        )
    for targets, how in written(func, args, kwargs):
        for param in _tensors_in(targets, ShardedParameter):
            raise _lost_write(param, how)


def _without_values(func: Any, param: Any, *args: Any, **kwargs: Any) -> Any:
    """The answer to a call that needs only shape, dtype and device of the parameter, else None."""
    if not isinstance(param, ShardedParameter):
        return None
    if func in LAYOUT or func in LIKE:
        twin = torch.empty(param.shape, dtype=param.dtype, device="meta")
        if func in LIKE:
            kwargs = {"device": _home(param).device, **kwargs}
        return func(twin, *args, **kwargs)
    if func in CASTS and "memory_format" not in kwargs and not isinstance(param, StateEntry):
        nothing = torch.empty(0, dtype=param.dtype, device=param.device)
        if not any(True for _ in _tensors_in((args, kwargs), ShardedParameter)):
            return param if func(nothing, *args, **kwargs) is nothing else None
    if func is _T.detach and param in _listed:
        return StateEntry.of(param)
    return _of_entry(func, param, *args, **kwargs) if isinstance(param, StateEntry) else None


def _of_entry(func: Any, entry: StateEntry, *args: Any, **kwargs: Any) -> Any:
    """The address of an entry, or an entry for a view of it; None for any other call."""
    if func in ADDRESSES:  # allowed: a tensor on the device meta has no memory
        return func(entry, *args, **kwargs)
    if func is _T.view or (func is _T.__getitem__ and isinstance(args[0], int)):
        return StateEntry.of(entry, lambda whole: func(whole, *args))
    return None


def _call_read_only(
    func: Any,
    args: Any,
    kwargs: Any,
    copies: Sequence[Tensor],
    sources: Sequence[_Source | None],
) -> Any:
    """Call ``func``. Raise if it writes into one of ``copies``, and guard results that share memory.

    ``sources``: of the copies.
    """
    if func is _T.__iter__:  # the tensors that it yields must be guarded
        return iter(_call_read_only(_T.unbind, args, kwargs, copies, sources))
    before = [_version(copy) for copy in copies]
    result = func(*args, **kwargs)
    for copy, version in zip(copies, before, strict=True):
        if _version(copy) != version:
            raise _lost_write(copy, f"written by {getattr(func, '__name__', func)}")
    addresses = dict(zip(map(_address, copies), sources, strict=True))
    for tensor in _tensors_in(result, Tensor):
        if type(tensor) is Tensor and (address := _address(tensor)) in addresses:
            tensor.__class__ = ReadOnlyCopy
            assert isinstance(tensor, ReadOnlyCopy)
            tensor.source = addresses[address]
    return result


class _Source(NamedTuple):
    """Whose values a copy has, and their version."""

    param: weakref.ref[nn.Parameter]
    version: int | None


def _source_of(param: nn.Parameter) -> _Source:
    owner = owner_of(param)
    param = _home(param)
    return _Source(weakref.ref(param), None if owner is None else owner.values_version(param))


def _check_age(copy: ReadOnlyCopy) -> None:
    """Raise if the parameter has other values by now, which an alias has in plain PyTorch."""
    if copy.source is None or copy.source.version is None:
        return
    param = copy.source.param()
    owner = None if param is None else owner_of(param)
    now = None if param is None or owner is None else owner.values_version(param)
    if now is not None and now != copy.source.version:
        raise ShardedAccess(
            f"a tensor of shape {tuple(copy.shape)} was read that was taken from a sharded parameter "
            f"(.data, detach(), a view) before the parameter was updated. In plain PyTorch it has the "
            "new values; here it has those of its time. Take it again from the parameter, or clone() "
            "it at once to keep the values of that time."
        )


def _version(tensor: Tensor) -> int:
    """A number that grows with every write. Tensors made in inference mode have none: 0."""
    return 0 if tensor.is_inference() else tensor._version


def _address(tensor: Tensor) -> int | None:
    """Equal for tensors that share memory. None: the tensor has no address."""
    if tensor.layout is not torch.strided or functorch.is_wrapped(tensor):
        return None
    address: int = tensor.untyped_storage()._cdata
    return address


def _lost_write(target: Tensor, how: str) -> ShardedAccess:
    return ShardedAccess(
        f"{_described(target)} was {how}; the change would be lost, because the values are "
        f"sharded over the ranks. {_WAYS_OUT}"
    )


_WAYS_OUT = (
    "Write inside `with zeroshard.zero.GatheredParameters(param, modifier_rank=0):`, or use "
    "zeroshard.zero.safe_set_full_fp32_param(param, value). To change a copy, clone() it."
)


def _described(target: Tensor) -> str:
    shape = tuple(target.shape)
    if not isinstance(target, ShardedParameter):
        return f"a view of shape {shape} into a sharded parameter"
    owner = owner_of(target)
    where = f"unit {owner.name!r}" if owner else "a closed engine"
    return f"a sharded parameter of shape {shape} in {where}"


def _tensors_in(tree: Any, kind: type[Tensor]) -> Iterator[Any]:
    if isinstance(tree, kind):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _tensors_in(item, kind)
    elif isinstance(tree, dict):
        yield from _tensors_in(list(tree.values()), kind)


def _replaced(tree: Any, copies: Mapping[int, Any]) -> Any:
    if isinstance(tree, Tensor):
        return copies.get(id(tree), tree)
    if isinstance(tree, dict):
        return {key: _replaced(value, copies) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        items = [_replaced(item, copies) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return tree
