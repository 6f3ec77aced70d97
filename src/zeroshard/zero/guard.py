"""What happens when somebody reads a parameter whose bytes are not here?

A parameter that is sharded, or whose values are still in flight, keeps its true shape, dtype and numel
but has no readable storage: a CPU kernel on it would be a segmentation fault. Its class is therefore
switched to :class:`ShardedParameter` while it is away and back when it is full. Metadata is answered as
usual; any other operation works on full values that are gathered for the reader, with gradients flowing
back to the parameter; writes raise, because they could not be kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from zeroshard.errors import ShardedAccess


class Owner(Protocol):
    """Whoever holds the bytes of a sharded parameter."""

    name: str

    def read(self, param: nn.Parameter) -> Tensor:
        """A private full copy of the parameter's values. Collective: every rank must read."""
        ...

    def admit(self, param: nn.Parameter) -> bool:
        """Make the parameter itself full, if it may be written now (during construction)."""
        ...


owners: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Parameter -> its :class:`Owner`. Weak: it keeps neither models nor engines alive."""


def owner_of(param: Tensor) -> Owner | None:
    """The owner of a parameter, or None for a parameter that nobody shards."""
    owner: Owner | None = owners.get(param)
    return owner


_T = torch.Tensor
_METADATA: frozenset[Any] = frozenset(
    [getattr(_T, name).__get__ for name in (
        "shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad", "grad_fn", "is_leaf",
        "is_sparse", "is_meta", "is_cuda", "is_cpu", "is_quantized", "is_nested", "names", "_version",
        "nbytes", "itemsize", "is_mps", "is_xpu", "is_mkldnn", "retains_grad", "_base", "output_nr",
        "_backward_hooks", "_post_accumulate_grad_hooks", "is_sparse_csr", "name", "_grad", "volatile",
        "is_xla", "is_vulkan", "is_ipu", "is_maia", "is_mtia",
    ) if hasattr(_T, name)]
    + [getattr(_T, name).__set__ for name in (
        "requires_grad", "grad", "names", "_backward_hooks", "_post_accumulate_grad_hooks", "_grad")
       if hasattr(_T, name)]
    + [_T.grad.__delete__]  # type: ignore[attr-defined]
    + [getattr(_T, name) for name in (
        "size", "numel", "nelement", "dim", "ndimension", "element_size", "stride", "storage_offset",
        "is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_inference", "is_shared",
        "is_same_size", "get_device", "__len__", "requires_grad_", "register_hook",
        "register_post_accumulate_grad_hook", "retain_grad", "has_names", "is_pinned", "is_conj",
        "is_neg", "sparse_dim", "dense_dim", "type", "__hash__", "_is_view",
    ) if hasattr(_T, name)]
    + [torch.is_floating_point, torch.is_complex, torch.numel, torch.is_same_size, torch.is_signed,
       torch.is_inference, torch.is_conj, torch.is_neg]
)  # fmt: skip

_ADDRESSES = frozenset([_T.untyped_storage, _T.data_ptr, _T.storage])
_DATA_SET = _T.data.__set__  # type: ignore[attr-defined]
_WRITES = frozenset([_DATA_SET, _T.set_, _T.resize_, _T.share_memory_])


class ShardedParameter(nn.Parameter):
    """A parameter whose full values are not on this rank right now. Never constructed: switched to."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            # ``type()`` without argument names the tensor type; with one it is a cast, that is a read.
            if func in _METADATA and not (func is _T.type and (len(args) > 1 or kwargs)):
                return func(*args, **kwargs)
            sharded = list(_sharded_in((args, kwargs)))
            if all(owner is not None and owner.admit(param) for param, owner in sharded):
                if not any(isinstance(param, ShardedParameter) for param, _ in sharded):
                    return func(*args, **kwargs)
            _refuse_writes(func, args, kwargs)
            copies = {id(param): _full_value(param, owner) for param, owner in sharded}
            args, kwargs = _replaced((args, kwargs), copies)
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """An ordinary parameter with the full values."""
        if id(self) not in memo:
            with torch.no_grad():
                values = _full_value(self, owner_of(self))
            memo[id(self)] = nn.Parameter(values, self.requires_grad)
        copy: nn.Parameter = memo[id(self)]
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__deepcopy__({}).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Metadata only: printing happens on one rank, and reading would need them all."""
        owner = owner_of(self)
        return (
            f"ShardedParameter(shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"unit={owner.name if owner else 'closed'!r})"
        )


class _ReadFull(torch.autograd.Function):
    """Full values of a sharded parameter as a tensor of the graph: the gradient reaches the parameter."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, values: Tensor) -> Tensor:
        return values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


def _full_value(param: nn.Parameter, owner: Owner | None) -> Tensor:
    if owner is None:
        raise ShardedAccess(
            f"a parameter of shape {tuple(param.shape)} was read after its engine was closed. Its "
            "shards are gone. Read what you need before engine.close(), for instance with "
            "engine.iter_full_params()."
        )
    values = owner.read(param)
    if torch.is_grad_enabled() and param.requires_grad:
        full: Tensor = _ReadFull.apply(param, values)  # type: ignore[no-untyped-call]
        return full
    return values


def _refuse_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    name = getattr(func, "__name__", "")
    if func in _ADDRESSES:
        target, what = args[0], f"asked for its address ({name})"
    elif func in _WRITES or name == "__setitem__" or _is_inplace(name):
        target, what = args[0] if args else None, f"written in place ({name})"
    elif any(True for _ in _sharded_in(kwargs.get("out"))):
        target, what = kwargs["out"], f"written as out= of {name}"
    else:
        return
    if not isinstance(target, ShardedParameter):
        return
    owner = owner_of(target)
    where = f"unit {owner.name!r}" if owner else "a closed engine"
    raise ShardedAccess(
        f"a sharded parameter of shape {tuple(target.shape)} in {where} was {what}; the change could "
        "not be kept, since its values are spread over the ranks. Write inside `with "
        "zeroshard.zero.GatheredParameters(param, modifier_rank=0):`, or use "
        "zeroshard.zero.safe_set_full_fp32_param(param, value)."
    )


def _is_inplace(name: str) -> bool:
    if name.startswith("__"):
        return name.startswith("__i") and name not in ("__index__", "__invert__", "__int__", "__iter__")
    return name.endswith("_")


def _sharded_in(tree: Any) -> Iterator[tuple[ShardedParameter, Owner | None]]:
    if isinstance(tree, ShardedParameter):
        yield tree, owner_of(tree)
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _sharded_in(item)
    elif isinstance(tree, dict):
        yield from _sharded_in(list(tree.values()))


def _replaced(tree: Any, copies: dict[int, Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return copies.get(id(tree), tree)
    if isinstance(tree, dict):
        return {key: _replaced(value, copies) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_replaced(item, copies) for item in tree)
    return tree


def hide(params: Iterable[nn.Parameter]) -> None:
    """The values go away: from now on reads are served by the owner."""
    for param in params:
        param.__class__ = ShardedParameter


def show(params: Iterable[nn.Parameter]) -> None:
    """The values are here: plain parameters again, with nothing on the hot path."""
    for param in params:
        param.__class__ = nn.Parameter
