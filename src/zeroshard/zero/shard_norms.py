"""Norms of what this rank updates, measured for all units together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from zeroshard.optim import native_adam
from zeroshard.optim.fragment_norms import norms_of
from zeroshard.zero.gradients import Norms

if TYPE_CHECKING:
    from zeroshard.zero.optimizer_shard import OptimizerShard


def all_norms(shards: Sequence[OptimizerShard]) -> Norms:
    """2-norms of this rank's fragments of this step's gradients.

    Those of a gradient in a store were measured when it was stored. The others are measured together.
    """
    found: Norms = []
    here: list[tuple[OptimizerShard, Tensor]] = []
    for shard in shards:
        buffer = shard.buffer
        if buffer.norms is not None:
            found += buffer.norms
            continue
        grad_R = buffer.reduced_N if shard.is_whole else buffer.peek()
        assert grad_R is not None, "GradReducer.finish() comes before the norm"
        if buffer.is_stored:  # its memory is needed for the next one
            found += shard.measure(grad_R)
        else:
            here.append((shard, grad_R))
    return found + measure(here)


def measure(gradients: Sequence[tuple[OptimizerShard, Tensor]]) -> Norms:
    """2-norms of this rank's fragments of gradients ``[R]`` of the shards."""
    cuts = [shard.measured_cuts() for shard, _ in gradients]
    places = [[place for _, place in found] for found in cuts]
    norms = norms_of(
        [(grad_R, of_it) for (_, grad_R), of_it in zip(gradients, places, strict=True)],
        native_adam.norms(),
    )
    positions = [
        shard.unit.positions[index]
        for (shard, _), found in zip(gradients, cuts, strict=True)
        for index, _ in found
    ]
    return [*zip(positions, norms, strict=True)]
