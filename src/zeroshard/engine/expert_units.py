"""Experts that several ranks share: their process groups, and their flags in a step.

Their units are sharded over the ranks that hold the same experts, fewer than those that hold the rest of
the model (ADR 0019). The layers send tokens between the ranks that share them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zeroshard.engine.draft import Draft
from zeroshard.experts.placement import expert_layers
from zeroshard.session.comm_session import CommSession
from zeroshard.zero.gradients import GradBuffer
from zeroshard.zero.mesh_norm import ExpertParts


def connect_experts(draft: Draft, watch: CommSession) -> None:
    """Open the groups in which layers send tokens to experts. Collective if there are any."""
    rank, mesh = draft.rank_info.rank, draft.mesh
    groups = {
        size: watch.open_group(mesh.expert_groups(size), rank, draft.device)
        for size in draft.expert_sizes
    }
    watch.watch_layers(groups.values())
    for layer in expert_layers(draft.model).values():
        layer.connect(groups.get(layer.ep_size))
        watch.leave.append(layer.disconnect)


def expert_parts(
    draft: Draft, watch: CommSession, buffers: Sequence[GradBuffer]
) -> list[ExpertParts]:
    """What the exchange of a step needs to know of experts."""
    sizes = {spec.name: spec.experts for spec in draft.specs}
    rank = draft.rank_info.rank
    return [
        ExpertParts(
            comm,
            torch.tensor(draft.mesh.expert_holders(rank, size), device=draft.device),
            [
                sizes[buffer.unit.name] == size and slot.block is None
                for buffer in buffers
                for slot in buffer.unit.layout.slots
            ],
        )
        for size, comm in sorted(watch.experts.items())
    ]
