"""DTensors of fused layers: each tensor rank has a part of every matrix that the layer joins.

A fused layer has the weights of several in one, such as q, k and v, one after another along the axis that
is cut. Torch's placements cannot say that a rank has the first part of each. So such a DTensor has the
placement ``Shard``, and its class knows the sizes of the matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from zeroshard.errors import UsageError


class FusedDTensor(DTensor):
    """A DTensor over one dimension of a mesh, whose local tensor joins a part of each fused matrix.

    ``full_tensor()`` and ``detach()`` are as for any DTensor. Torch's own functions take local tensors
    for neighbours, so a *result* of one, such as ``2 * weight``, has its global values in the order of
    the ranks.
    """

    fused_sizes: tuple[int, ...]
    """Sizes of the matrices along the axis that is cut. Each divides by the number of ranks."""

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The global tensor in the order of the model. Collective."""
        whole = DTensor.redistribute(self, placements=[Replicate()])
        return in_model_order(
            whole.to_local(grad_placements=grad_placements),
            self.fused_sizes,
            self.placements[0].dim,  # type: ignore[attr-defined]
            self.device_mesh.size(),
        )

    def detach(self) -> Tensor:
        """The same values without their graph."""
        values: Tensor = super().detach()
        return mark_fused(values, self.fused_sizes) if type(values) is DTensor else values

    def redistribute(
        self, device_mesh: Any = None, placements: Any = None, **kwargs: Any
    ) -> DTensor:
        """Whole on each rank, which is the only other placement there is. Collective.

        Raises:
            UsageError: for another placement.
        """
        wanted = tuple(placements or self.placements)
        if wanted == tuple(self.placements):
            return self
        if device_mesh not in (None, self.device_mesh) or wanted != (Replicate(),):
            raise UsageError(
                f"redistribute(placements={list(wanted)}) of a weight that joins matrices of the sizes "
                f"{list(self.fused_sizes)}: each tensor rank has a part of every one of them, which "
                "torch's placements cannot say. Use placements=[Replicate()] or full_tensor()."
            )
        return DTensor.from_local(
            self.full_tensor(**kwargs), self.device_mesh, [Replicate()], run_check=False
        )


def mark_fused(tensor: Any, sizes: Sequence[int]) -> FusedDTensor:
    """The DTensor itself, as one whose local tensor joins parts of matrices of these ``sizes``."""
    tensor.__class__ = FusedDTensor
    tensor.fused_sizes = tuple(sizes)
    return tensor  # type: ignore[no-any-return]


def in_model_order(whole: Tensor, sizes: Sequence[int], axis: int, parts: int) -> Tensor:
    """Matrix after matrix along ``axis``, from ``parts`` local tensors that were joined.

    >>> in_model_order(torch.tensor([0, 1, 4, 2, 3, 5]), (4, 2), 0, 2)
    tensor([0, 1, 2, 3, 4, 5])
    """
    pieces = whole.split([size // parts for _ in range(parts) for size in sizes], axis)
    count = len(sizes)
    return torch.cat(
        [pieces[part * count + at] for at in range(count) for part in range(parts)], axis
    )
