"""Tensors of ``optimizer.param_groups`` between steps: they can be read, and refuse writes.

A write there would change a master, but not the parameter, which on other ranks and in 16 bits is other
memory; the next step would lose it. Inside ``step``, its hooks, and ``train`` and ``eval`` of the
optimizer the same objects are plain tensors. Only their class changes (see
:class:`~zeroshard.zero.optimizer_shard.OwnedFragment`), so that an update has no cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from zeroshard.errors import UsageError

_ASSIGNS = {
    *("__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ifloordiv__", "__imod__"),
    *("__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__setitem__"),
}
_KEEPS = {"requires_grad_", "share_memory_", "rename_"}  # end with "_" and write no values
_VALUES = {"data", "T", "mT", "H", "mH", "real", "imag"}  # attributes with the tensor's values
_SHAPES = {
    *("numel", "nelement", "size", "dim", "ndimension", "stride", "element_size", "get_device"),
    *("is_floating_point", "is_complex", "is_contiguous", "storage_offset", "__len__", "type"),
}


class MasterPiece(Tensor):
    """A fragment of a master that refuses writes with a :class:`UsageError`.

    ``settle``: called before values are read, if an update may have changed them before its step.
    """

    settle: Callable[[], None] | None = None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """Run ``func`` on plain tensors. Results that share memory refuse writes too."""
        kwargs = kwargs or {}
        if any(issubclass(kind, PagedPiece) for kind in types) and not _asks_shape(func):
            raise UsageError(
                'a tensor of optimizer.param_groups was used whose values are on disk ("nvme"), and in '
                "memory only inside the optimizer's step(). Read them with "
                "zeroshard.zero.safe_get_full_fp32_param(param). A step hook that reads or writes "
                'parameters needs "device": "cpu" or none.'
            )
        target = kwargs.get("out", args[0] if args and _writes(func, args) else None)
        targets = target if isinstance(target, (list, tuple)) else [target]
        if any(isinstance(each, MasterPiece) for each in targets):
            raise UsageError(
                "a tensor of optimizer.param_groups was written (by "
                f"{getattr(func, '__name__', func)}). It is this rank's piece of a master: the other "
                "ranks and the parameter would keep the old values. Write in a step hook "
                "(optimizer.register_step_post_hook) or in the optimizer's step(), train() or eval(), "
                "after which the engine publishes the values; or write the parameter itself, inside "
                "zeroshard.zero.GatheredParameters or with safe_set_full_fp32_param, and a gradient "
                "with safe_set_full_grad."
            )
        settle = next((piece.settle for piece in _pieces(args) if piece.settle is not None), None)
        if settle is not None and not _asks_shape(func):
            settle()
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            memory = {t.untyped_storage()._cdata for t in _pieces(args)}
            return _guarded(result, memory, settle)


class PagedPiece(MasterPiece):
    """A piece whose memory holds other values while its page is closed: only its shape can be read."""


def _asks_shape(func: Callable[..., Any]) -> bool:
    name, owner = getattr(func, "__name__", ""), getattr(func, "__self__", None)
    if name in ("__get__", "__set__"):
        return getattr(owner, "__name__", "") not in _VALUES
    return name in _SHAPES


def _writes(func: Callable[..., Any], args: Any) -> bool:
    """Whether ``func`` changes its first argument, or gives it a gradient."""
    name, owner = getattr(func, "__name__", ""), getattr(func, "__self__", None)
    if name == "__set__":
        attribute = getattr(owner, "__name__", "")
        return attribute == "data" or (attribute == "grad" and args[1] is not None)
    in_place = name.endswith("_") and not name.endswith("__") and name not in _KEEPS
    return in_place or name in _ASSIGNS


def _pieces(args: Iterable[Any]) -> Iterable[MasterPiece]:
    for arg in args:
        if isinstance(arg, MasterPiece):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from _pieces(arg)


def _guarded(result: Any, memory: set[int], settle: Callable[[], None] | None) -> Any:
    if isinstance(result, (list, tuple)):
        return type(result)(_guarded(item, memory, settle) for item in result) if memory else result
    if type(result) is not Tensor or not memory or result.layout is not torch.strided:
        return result
    if result.untyped_storage()._cdata not in memory:
        return result
    piece = result.as_subclass(MasterPiece)
    if settle is not None:
        piece.settle = settle
    return piece
