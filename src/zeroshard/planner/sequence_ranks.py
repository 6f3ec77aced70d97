"""Attention of a planned model over sequence ranks, which exchange tokens for heads around it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from zeroshard.comm.simulation import lone_group
from zeroshard.core.mesh import Mesh
from zeroshard.sequence.all_to_all import gathered
from zeroshard.sequence.token_positions import PositionExchange, TokenPositions

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

    from zeroshard.sequence.transformers_attention import register, unregister

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
