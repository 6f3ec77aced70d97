"""Pickles a model for another process: without values, and as it was before tensor ranks cut it."""

from __future__ import annotations

import functools
import io
import pickle
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.parallel.whole_copy import uncut
from zeroshard.zero.sharded_parameter import owner_of

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


MOST_NBYTES = 256 << 20
"""Of a model without values. One that is larger holds data, of which no copy should be made."""


class NotDescribable(Exception):
    """The run cannot be described to another process. The text says why."""


class _Limited(io.BytesIO):
    def write(self, data: Any, /) -> int:
        if self.tell() + len(data) > MOST_NBYTES:
            raise ValueError(f"it holds more than {MOST_NBYTES >> 20} MiB besides tensors")
        return super().write(data)


def empty(
    sizes: tuple[int, ...], dtype: torch.dtype, requires_grad: bool, is_parameter: bool
) -> Any:
    """A tensor without values, in a copy of a model."""
    made = torch.empty(sizes, dtype=dtype)
    if is_parameter:
        return nn.Parameter(made, requires_grad=requires_grad)
    return made.requires_grad_(requires_grad)


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """Stands for a hook of the engine in a copy of its model."""


def _hook_of_nothing() -> Any:
    return _nothing


def pickled(value: Any) -> bytes:
    """A model, or what holds modules: with :func:`empty` tensors of global shapes, and layers uncut.

    Raises:
        NotDescribable: a part of it cannot be pickled.
    """
    # Classes of a script, which no other process can import, are pickled with their code.
    from cloudpickle import CloudPickler

    ours = {id(hook) for hook in _hooks_of(value) if _is_ours(hook)}
    whole: list[nn.Module] = []  # kept alive, because a pickler knows objects by their ids

    class Pickler(CloudPickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if id(obj) in ours:
                return _hook_of_nothing, ()
            if isinstance(obj, nn.Module) and (before := uncut(obj)) is not obj:
                whole.append(before)
                return before.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            if isinstance(obj, Tensor):
                kept = isinstance(obj, nn.Parameter) or owner_of(obj) is not None
                return empty, (tuple(obj.shape), obj.dtype, obj.requires_grad, kept)
            return super().reducer_override(obj)

    out = _Limited()
    try:
        Pickler(out, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception as error:  # whatever objects of the program raise
        first = str(error).partition("\n")[0]
        raise NotDescribable(
            f"the model cannot be pickled ({type(error).__name__}: {first})"
        ) from error
    return out.getvalue()


def _hooks_of(value: Any) -> Iterator[Any]:
    for module in value.modules() if isinstance(value, nn.Module) else ():
        for name in _HOOKS:
            yield from getattr(module, name, {}).values()


def _is_ours(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    if isinstance(hook, types.MethodType):
        hook = type(hook.__self__)
    return str(getattr(hook, "__module__", "")).startswith("zeroshard.")
