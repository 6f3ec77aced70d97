"""Describes a run for another process: its model without values, the shapes of its batch, its keys.

The other process simulates changes of the run (:mod:`zeroshard.planner.failed_run`). It needs a process
of its own, since this one takes part in a process group and may have no memory left.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zeroshard.config.resolve import WATCHERS
from zeroshard.core.mesh import Mesh
from zeroshard.zero.input_shapes import Unknown
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


class NotDescribable(Exception):
    """The run cannot be described. The text says why."""


@dataclass(frozen=True)
class RunDescription:
    """What a simulation of a data-parallel run needs.

    ``model``: pickled: the module with :func:`empty` tensors, and the class and the defaults of the
    optimizer; None if the configuration names it. ``inputs``: args and kwargs of the last forward, as
    :func:`~zeroshard.zero.input_shapes.shapes_of` gives them. ``path``: where modules are found.
    """

    model: bytes
    inputs: tuple[tuple[Any, ...], Mapping[str, Any]]
    config: Mapping[str, Any]
    micro_batch: int
    accumulation: int
    mesh: Mesh
    rank: int
    on_gpu: bool
    dtype: torch.dtype
    path: tuple[str, ...]


def describe(engine: Any) -> RunDescription:
    """The run of an engine.

    Raises:
        NotDescribable: it has a pipeline, tensor ranks or no optimizer; its batch holds unknown objects;
            or a part of the model cannot be pickled.
    """
    if not engine.mesh.is_data_only:
        raise NotDescribable(f"the mesh is {engine.mesh.text}")
    inputs = engine._hooks.input_shapes
    if inputs is None:
        raise NotDescribable("no forward with gradients has begun")
    unknown = [leaf for leaf in tree_leaves(list(inputs)) if isinstance(leaf, Unknown)]
    if unknown:
        raise NotDescribable(f"the model got an object of class {unknown[0].kind}")
    config = {key: value for key, value in engine.loaded.raw.items() if key not in WATCHERS}
    if engine.device.type == "cpu" and engine.world_size > 1:
        config["transport"] = engine.transport
    if engine.optimizer is None:
        raise NotDescribable("it has no optimizer")
    named = engine.settings.optimizer is not None
    optimizer = None if named else (type(engine.optimizer), engine.optimizer.defaults)
    return RunDescription(
        pickled(engine.module, optimizer),
        inputs,
        config,
        engine.train_micro_batch_size_per_gpu(),
        engine.accumulation.steps,
        engine.mesh,
        engine.global_rank,
        engine.device.type != "cpu",
        torch.get_default_dtype(),
        tuple(sys.path),
    )


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


def pickled(model: nn.Module, optimizer: tuple[type, Mapping[str, Any]] | None) -> bytes:
    """The field ``model`` of a description.

    Raises:
        NotDescribable: a part of the model cannot be pickled.
    """
    # Classes of a script, which no other process can import, are pickled with their code.
    from cloudpickle import CloudPickler

    ours = {id(hook) for hook in _hooks_of(model) if _is_ours(hook)}

    class Pickler(CloudPickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if id(obj) in ours:
                return _hook_of_nothing, ()
            if isinstance(obj, Tensor):
                kept = isinstance(obj, nn.Parameter) or owner_of(obj) is not None
                return empty, (tuple(obj.shape), obj.dtype, obj.requires_grad, kept)
            return super().reducer_override(obj)

    out = io.BytesIO()
    try:
        Pickler(out, protocol=pickle.HIGHEST_PROTOCOL).dump((model, optimizer))
    except Exception as error:  # whatever objects of the program raise
        first = str(error).partition("\n")[0]
        raise NotDescribable(
            f"the model cannot be pickled ({type(error).__name__}: {first})"
        ) from error
    return out.getvalue()


def _hooks_of(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        for name in _HOOKS:
            yield from getattr(module, name, {}).values()


def _is_ours(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    if isinstance(hook, types.MethodType):
        hook = type(hook.__self__)
    return str(getattr(hook, "__module__", "")).startswith("zeroshard.")
