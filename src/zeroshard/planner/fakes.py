"""What a simulation pretends: tensors without values, and what models and pipelines ask others for.

Transformers reads the positions of tokens to find out whether rows hold several samples. Without values
it has to make a mask of all pairs of tokens, which a run with one sample in each row does not make, and
with which attention takes another kernel (:func:`rows_as_in`). Sequence ranks exchange tokens for heads
around attention (:func:`sequence_attention`). A pipeline stage learns the shapes of its inputs from a
message of the stage before, and a simulated rank gets none (:func:`stage_inputs`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from zeroshard.comm.simulation import lone_group
from zeroshard.core.mesh import Mesh
from zeroshard.engine.pipeline_batches import named_inputs, names_in
from zeroshard.errors import UsageError
from zeroshard.parallel.pipeline_stage import Boundary, as_tensors
from zeroshard.parallel.split import PipelineModel, StageModule
from zeroshard.parallel.whole_copy import cast_parameters
from zeroshard.precision.policy import Policy
from zeroshard.sequence.all_to_all import gathered
from zeroshard.sequence.token_positions import PositionExchange, TokenPositions, sample_numbers
from zeroshard.zero.materialize import exchange
from zeroshard.zero.sharded_parameter import owner_of


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """All tensors that are made inside are fake ones.

    :meth:`torch.nn.Module.to` exchanges fake parameters, and torch refuses that for tensors with weak
    references. All results of a fake mode have one, and so have parameters that ``zero.Init`` has
    sharded. So inside, the exchange is that of :func:`~zeroshard.zero.materialize.exchange`. Without it
    no model could be planned that converts itself while it is built, such as PEFT's.

    :func:`torch.nn.init.trunc_normal_` draws until all values are in bounds, which needs values. Inside,
    it draws twice. Without it no vision transformer of Transformers could be planned.

    :func:`torch.nn.functional.grouped_mm` multiplies any dtype on CPUs and GPUs, but its shapes are known
    for bf16 only. Inside, they are known for all. Without it no experts of Transformers could be planned
    in fp32 and fp16.
    """
    with (
        mock.patch.object(torch._meta_registrations, "_meta_grouped_mm_common", _grouped_in_bf16),
        mock.patch.object(torch.utils, "swap_tensors", _exchange),
        mock.patch.object(torch.nn.init, "_no_grad_trunc_normal_", _drawn_twice),
        FakeTensorMode() as fake,
    ):
        yield fake


@torch.no_grad()
def _drawn_twice(
    tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None
) -> Tensor:
    """Allocates what torch does if some of the first values are out of bounds."""
    first = tensor.normal_(mean, std, generator=generator)
    outside = (first < a) | (first > b)
    again = torch.empty_like(first).normal_(mean, std, generator=generator)
    return tensor.copy_(torch.where(outside, again, first))


_grouped = torch._meta_registrations._meta_grouped_mm_common


def _grouped_in_bf16(mat_a: Tensor, mat_b: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The shape of the product that torch gives for bf16, in the dtype of the two."""
    dtype = mat_a.dtype
    if dtype != mat_b.dtype or dtype not in (torch.float32, torch.float16):
        found: Tensor = _grouped(mat_a, mat_b, *args, **kwargs)
        return found
    made: Tensor = _grouped(mat_a.bfloat16(), mat_b.bfloat16(), *args, **kwargs)
    return made.to(dtype)


def _exchange(param: nn.Parameter, other: Tensor) -> None:
    owner = owner_of(param)
    # As in a run, a parameter that zero.Init has sharded is whole while it is converted.
    converted = owner is not None and param.dtype != other.dtype
    if converted and not owner.ensure_writable(param, ()):  # type: ignore[union-attr]
        raise UsageError(
            f"a parameter that zero.Init has sharded is converted from {param.dtype} to {other.dtype} "
            "after it was built. Its values are not on this rank. Build the model in the dtype in which "
            "the configuration trains."
        )
    exchange(param, other)


_FINDS = "find_packed_sequence_indices"


@contextlib.contextmanager
def rows_as_in(inputs: Any) -> Iterator[None]:
    """Inside, models of Transformers take rows for one sample each, unless ``inputs`` have several.

    ``inputs``: of the model, with values. Positions without values are those of one sample. Does nothing
    for programs that have not imported Transformers.
    """
    own = inputs.get("position_ids") if isinstance(inputs, Mapping) else None
    if "transformers" not in sys.modules or _are_packed(own):
        yield
        return
    from transformers import masking_utils

    if not hasattr(masking_utils, _FINDS):  # before packed rows were looked for
        yield
        return
    with mock.patch.object(masking_utils, _FINDS, return_value=None):
        yield


def _are_packed(positions: Any) -> bool:
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.is_meta:
        return False
    return bool(sample_numbers(positions).any())


SPREAD = ("sdpa", "flash_attention_2", "flash_attention_3")
"""Implementations of attention that sequence ranks can share, of those that Transformers knows."""


@contextlib.contextmanager
def sequence_attention(mesh: Mesh, rank: int) -> Iterator[None]:
    """Inside, models of Transformers attend over the sequence ranks of ``rank``, as in a run.

    A model that wraps its attention itself needs nothing. The process group is the simulation's.
    """
    if mesh.sequence == 1 or find_spec("transformers") is None:
        yield
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from zeroshard.sequence.attention import register, unregister

    group = lone_group(mesh.group(rank, {"sequence"}))
    try:
        for name in SPREAD:
            if name in ALL_ATTENTION_FUNCTIONS:
                register(name, group).positions = _Positions(group)
        yield
    finally:
        unregister()


def as_cut(inputs: Any, mesh: Mesh) -> Any:
    """A micro-batch of one rank's tokens as a rank of a pipeline has it after the cut of sequences."""
    if mesh.sequence == 1 or not isinstance(inputs, Mapping) or "labels" not in inputs:
        return inputs
    made = {name: value for name, value in inputs.items() if name != "labels"}
    made.setdefault("position_ids", torch.empty_like(made["input_ids"]))
    return {**made, "shift_labels": inputs["labels"]}


class _Positions(PositionExchange):
    """Says where tokens are without reading positions: rows are one sample each."""

    def _gather(
        self, _query: Tensor, _key: Tensor, position_ids: Tensor | None, *_: Any
    ) -> TokenPositions | None:
        if position_ids is None:
            return None
        all_PRt = gathered(position_ids.to(torch.int64), self.group, "positions")
        return TokenPositions(all_PRt.transpose(0, 1).flatten(1), is_packed=False)


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
    is_cast = policy.autocast is not None
    with torch.autocast(device.type, policy.autocast) if is_cast else contextlib.nullcontext():
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
