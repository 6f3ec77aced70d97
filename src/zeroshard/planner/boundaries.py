"""What crosses from one pipeline stage to the next, found by running the whole model once.

In a real run a stage learns the shapes of its inputs from a message of the stage before. A simulated rank
gets no messages. So the whole model runs forward before the rank keeps its own stages of another one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from zeroshard.engine.pipeline_inputs import named_inputs, names_in
from zeroshard.errors import UsageError
from zeroshard.parallel.pipeline_stage import Boundary, as_tensors
from zeroshard.parallel.split import PipelineModel, StageModule
from zeroshard.parallel.whole_copy import cast_parameters
from zeroshard.precision.policy import Policy


def stage_inputs(
    model: PipelineModel, inputs: Any, policy: Policy
) -> Mapping[int, Sequence[Boundary]]:
    """The inputs of each pipeline stage but the first, for a micro-batch with these ``inputs``.

    ``model`` has all stages and is changed: its parameters get the dtypes of ``policy``. Their values,
    and those of ``inputs``, are not read if they are fake or on the meta device.
    """
    cast_parameters(model, policy)
    device = next(model.parameters()).device
    value = tree_map_only(torch.Tensor, lambda t: t.to(device), inputs)
    found = {}
    with _precision(policy, device):
        if model.input_names is not None:
            return _named_inputs(model, value, model.input_names)
        for stage, pieces in enumerate(model.pieces_of_stages()):
            if stage:
                found[stage] = [Boundary.of(tensor) for tensor in as_tensors(value, stage - 1)]
            given = value if isinstance(value, tuple) else (value,)
            value = StageModule(pieces)(*given)
    return found


def _named_inputs(
    model: PipelineModel, inputs: Any, names: Sequence[str]
) -> Mapping[int, Sequence[Boundary]]:
    """Those of a model with a forward of its own: hidden states, and the inputs of the micro-batch."""
    if isinstance(inputs, Mapping):
        aside = ("labels", "shift_labels")
        inputs = {name: value for name, value in inputs.items() if name not in aside}
    given = named_inputs(inputs, names)
    if given is None:
        raise UsageError(
            f"the micro-batch of the pipeline does not have inputs of its model, which are tensors named "
            f"{', '.join(names)}. Give a mapping of inputs by name."
        )
    hidden: dict[int, Tensor] = {}

    def noted(stage: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        every = (*args, *kwargs.values())
        hidden[stage] = next(x for x in every if isinstance(x, Tensor) and x.is_floating_point())
        return forward(*args, **kwargs)

    for stage, pieces in enumerate(model.stages):
        if stage:
            block: Any = model.get_submodule(pieces[0])
            block.forward = partial(noted, stage, block.forward)  # the model is not used afterwards
    bits, tensors = given
    model(**dict(zip(names_in(bits, names), tensors, strict=True)))
    sent = [Boundary.of(tensor) for tensor in tensors]
    return {stage: [Boundary.of(hidden[stage]), *sent] for stage in sorted(hidden)}


def _precision(policy: Policy, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    if policy.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=policy.autocast)
