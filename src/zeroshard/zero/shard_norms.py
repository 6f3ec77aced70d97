"""Norms of what this rank updates, measured for all units together."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zeroshard.optim import native_adam
from zeroshard.optim.fragment_norms import norms_of
from zeroshard.zero.gradients import Norms

Cuts = list[tuple[int, tuple[int, int]]]
"""Of fragments: the parameter's position in the model, and begin and end in the gradient."""


def measure(gradients: Sequence[tuple[Cuts, Tensor]]) -> Norms:
    """2-norms of the fragments of some gradients ``[R]``."""
    norms = norms_of(
        [(grad_R, [place for _, place in cuts]) for cuts, grad_R in gradients],
        native_adam.norms(),
    )
    positions = [position for cuts, _ in gradients for position, _ in cuts]
    return [*zip(positions, norms, strict=True)]
