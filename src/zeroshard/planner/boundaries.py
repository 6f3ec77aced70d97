"""What crosses from one pipeline stage to the next, found by running the whole model once.

In a real run a stage learns the shapes of its inputs from a message of the stage before. A simulated rank
gets no messages. So the whole model runs forward before the rank keeps its own stages of another one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from zeroshard.comm.dtensors import global_of, local_of, note_kinds
from zeroshard.parallel.pipeline_stage import Boundary, as_tensors
from zeroshard.parallel.split import PipelineModel, StageModule
from zeroshard.precision.policy import Policy


def stage_inputs(
    model: PipelineModel, inputs: Any, policy: Policy
) -> Mapping[int, Sequence[Boundary]]:
    """The inputs of each pipeline stage but the first, for a micro-batch with these ``inputs``.

    ``model`` has all stages and is changed: its parameters get the dtypes of ``policy``. Their values,
    and those of ``inputs``, are not read if they are fake or on the meta device.
    """
    _cast_parameters(model, policy)
    device = next(model.parameters()).device
    value = tree_map_only(torch.Tensor, lambda t: t.to(device), inputs)
    found = {}
    with _precision(policy, device):
        for stage, pieces in enumerate(model.pieces_of_stages()):
            if stage:
                found[stage] = [Boundary.of(tensor) for tensor in as_tensors(value, stage - 1)]
            given = value if isinstance(value, tuple) else (value,)
            value = StageModule(pieces)(*given)
    return found


def _cast_parameters(model: nn.Module, policy: Policy) -> None:
    note_kinds(model.parameters())
    for prefix, module in model.named_modules():
        for leaf, param in module._parameters.items():
            if param is None:
                continue
            fqn = f"{prefix}.{leaf}" if prefix else leaf
            dtype = policy.row_for(fqn, param.dtype, module).param
            if dtype != param.dtype:
                local = local_of(param)
                cast = local.detach().to(dtype)
                values = cast if local is param else global_of(param, cast)
                module._parameters[leaf] = nn.Parameter(values, requires_grad=param.requires_grad)


def _precision(policy: Policy, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    if policy.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=policy.autocast)
