"""Experts that several ranks share: their process groups, and their flags in a step.

Their units are sharded over the ranks that hold the same experts, fewer than those that hold the rest of
the model (ADR 0019). The layers send tokens between the ranks that share them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from zeroshard.core.layout import is_split
from zeroshard.engine.draft import Draft
from zeroshard.experts.layer import MoE
from zeroshard.experts.placement import expert_layers
from zeroshard.parallel.split import PipelineModel
from zeroshard.session.comm_session import CommSession
from zeroshard.zero.gradients import GradBuffer
from zeroshard.zero.mesh_norm import ExpertParts, OtherHolders
from zeroshard.zero.unit import Unit


def agreed_layers(draft: Draft) -> dict[str, str]:
    """What all ranks must share of the layers with experts, for the plan that they compare.

    Ranks that route otherwise would send messages of other sizes, or train another model. Of the experts
    of a rank those with the same position are compared. The stages of a pipeline have other layers.
    """
    if isinstance(draft.model, PipelineModel):
        return {}
    slots = {
        slot.fqn: (slot.shape, spec.trainable) for spec in draft.specs for slot in spec.layout.slots
    }
    settings, shapes, frozen = {}, {}, {}
    for name, layer in expert_layers(draft.model).items():
        if not isinstance(layer, MoE):
            settings[name] = f"{layer.all_experts} experts on {layer.ep_size} ranks"
            continue
        settings[name] = layer.settings
        if layer.ep_size > 1:
            shapes[name], frozen[name] = _of_experts(f"{name}." if name else "", layer, slots)
    return {
        **_by_value("experts of", settings),
        **_by_value("shapes (they must be equal) of a rank's experts of", shapes),
        **_by_value(
            "frozen parameters (freeze the same ones in all) of a rank's experts of", frozen
        ),
    }


def _by_value(about: str, values: Mapping[str, str]) -> dict[str, str]:
    """One field for all layers that have the same value: a model may have a hundred of them."""
    names: dict[str, list[str]] = {}
    for name, value in values.items():
        names.setdefault(value, []).append(name)
    more = {value: f" and {len(found) - 1} more layers" for value, found in names.items()}
    return {
        f"{about} {found[0]!r}{more[value] if len(found) > 1 else ''}": value
        for value, found in names.items()
    }


def _of_experts(
    prefix: str, layer: MoE, slots: Mapping[str, tuple[Sequence[int], bool]]
) -> tuple[str, str]:
    """The shapes of the parameters of each expert of this rank, and the names of frozen ones."""
    shapes, frozen = [], []
    for number, expert in layer.deepspeed_moe.experts.deepspeed_experts.named_children():
        inner = f"{prefix}deepspeed_moe.experts.deepspeed_experts.{number}."
        leaves = [leaf for leaf, _ in expert.named_parameters() if inner + leaf in slots]
        own = [(leaf, *slots[inner + leaf]) for leaf in leaves]
        shapes.append(", ".join(f"{leaf} {[*shape]}" for leaf, shape, _ in own))
        frozen.append(", ".join(leaf for leaf, _, trained in own if not trained))
    return _once(shapes), _once(frozen)


def _once(texts: Sequence[str]) -> str:
    """Equal texts are written once: a layer may have hundreds of experts."""
    return (
        (texts[0] or "none") if len({*texts}) == 1 else "; ".join(each or "none" for each in texts)
    )


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


def with_experts(
    others: OtherHolders,
    draft: Draft,
    watch: CommSession,
    units: Sequence[Unit],
    buffers: Sequence[GradBuffer],
) -> OtherHolders:
    """``others``, and what the exchange of a step needs to know of experts."""
    over_replicas = names_over_replicas(draft)
    positions = {
        position
        for unit in units
        for position, slot in zip(unit.positions, unit.layout.slots, strict=True)
        if slot.fqn in over_replicas
    }
    return replace(
        others,
        positions=others.positions | positions,
        experts=_expert_parts(draft, watch, buffers),
    )


def names_over_replicas(draft: Draft) -> set[str]:
    """The parameters of experts of which there is one sharded copy, though there are replicas."""
    return {
        slot.fqn
        for spec in draft.specs
        if spec.experts > 1 and draft.mesh.expert_replicas(spec.experts) == 1
        for slot in spec.layout.slots
    }


def _expert_parts(
    draft: Draft, watch: CommSession, buffers: Sequence[GradBuffer]
) -> list[ExpertParts]:
    sizes = {spec.name: spec.experts for spec in draft.specs}
    rank = draft.rank_info.rank
    return [
        ExpertParts(
            comm,
            torch.tensor(draft.mesh.same_experts(rank, size), device=draft.device),
            [
                sizes[buffer.unit.name] == size and not is_split(slot, "expert")
                for buffer in buffers
                for slot in buffer.unit.layout.slots
            ],
        )
        for size, comm in sorted(watch.experts.items())
    ]
