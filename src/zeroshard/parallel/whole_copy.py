"""Copies of models without values: tensors on the meta device, layers as they were before they were cut.

A layer that is cut over tensor ranks has hooks and a forward that start collectives. A copy that only
shows shapes must not start any. So :func:`note_uncut` notes what a layer was, on the layer itself, and
:func:`whole_copy` puts it back in the copy. The residual stream of a cut model has the shapes of the
whole model, unless it is cut over the sequence.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from zeroshard.comm.dtensors import KINDS, global_of, local_of, note_kinds
from zeroshard.errors import UnsupportedError
from zeroshard.precision.policy import Policy

_NOTE = "_zeroshard_uncut"
"""Attribute of a cut layer, and of a module whose numbers of heads are divided."""


_NO_COPY = object()
"""Stands for the forward of a cut layer in a copy: it knows process groups, which cannot be copied."""


@dataclass
class _Uncut:
    """A module before it was cut. ``forward``: an attribute of the module itself, not of its class."""

    pre_hooks: frozenset[int]
    hooks: frozenset[int]
    forward: Any
    by_sequence: bool
    counts: dict[str, int] = field(default_factory=dict)


def note_uncut(module: nn.Module, *, by_sequence: bool, counts: Mapping[str, int]) -> None:
    """Note what a module is before a plan cuts it, or before ``counts`` of it are divided.

    ``by_sequence``: the plan cuts the residual stream over the sequence.
    """
    note = module.__dict__.get(_NOTE)
    if note is None:
        note = module.__dict__[_NOTE] = _Uncut(
            pre_hooks=frozenset(module._forward_pre_hooks),
            hooks=frozenset(module._forward_hooks),
            forward=module.__dict__.get("forward"),
            by_sequence=by_sequence,
        )
    note.counts.update(counts)


def check_can_copy(model: nn.Module) -> None:
    """Check that every cut layer of a model was cut by ZeroShard, and none over the sequence."""
    note_kinds(model.parameters())
    for name, module in model.named_modules():
        note = module.__dict__.get(_NOTE)
        if note is not None and note.by_sequence:
            raise UnsupportedError(
                f"{name!r} is cut over tensor ranks by a plan that cuts the residual stream over the "
                "sequence, and the forward of such a model cannot be followed. Pass order= to "
                'pipeline(), or use a plan without the style "sequence".'
            )
        parts = [
            leaf for leaf, param in module.named_parameters(recurse=False) if type(param) in KINDS
        ]
        if parts and note is None:
            raise UnsupportedError(
                f"'{name}.{parts[0]}' is a DTensor, and its layer was not cut by "
                "zeroshard.parallel.tensor_parallel(). The forward of such a model cannot be followed. "
                "Pass the plain model to tensor_parallel() first, or pass order= to pipeline()."
            )


def whole_copy(
    model: nn.Module, *, requires_grad: bool = False
) -> tuple[nn.Module, dict[int, Any]]:
    """A copy of a model whose tensors are on the meta device and have their global shapes.

    Also returns the copy's tensors, by the ids of the model's own. ``requires_grad``: of its
    floating-point parameters.
    """
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        like = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        if isinstance(tensor, nn.Parameter):
            like = nn.Parameter(like, requires_grad=requires_grad and like.is_floating_point())
        memo[id(tensor)] = like
    tensors = dict(memo)
    for module in model.modules():
        note, forward = module.__dict__.get(_NOTE), module.__dict__.get("forward")
        if note is not None and forward is not note.forward:
            memo[id(forward)] = _NO_COPY
    copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        note = module.__dict__.pop(_NOTE, None)
        if note is not None:
            _undo(module, note)
    return copied, tensors


def cast_parameters(model: nn.Module, policy: Policy, name: str = "") -> None:
    """Give a copy's parameters the dtypes that an engine gives them. ``name``: of the copied module."""
    note_kinds(model.parameters())
    for prefix, module in model.named_modules(prefix=name):
        for leaf, param in module._parameters.items():
            if param is None:
                continue
            dtype = policy.row_for(f"{prefix}.{leaf}".lstrip("."), param.dtype, module).param
            if dtype != param.dtype:
                local = local_of(param)
                cast = local.detach().to(dtype)
                values = cast if local is param else global_of(param, cast)
                module._parameters[leaf] = nn.Parameter(values, requires_grad=param.requires_grad)


def _undo(module: nn.Module, note: _Uncut) -> None:
    module.__dict__.pop("_distribute_module_applied", None)  # torch cuts no module twice
    module.__dict__.pop("forward", None)
    if note.forward is not None:
        module.__dict__["forward"] = note.forward
    for hooks, before in (
        (module._forward_pre_hooks, note.pre_hooks),
        (module._forward_hooks, note.hooks),
    ):
        for key in [key for key in hooks if key not in before]:
            del hooks[key]
    for attribute, count in note.counts.items():
        setattr(module, attribute, count)
