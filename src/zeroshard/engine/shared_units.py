"""Units that other ranks hold than the rest of the model: those tied over pipeline stages, and experts.

A tied unit is sharded over all ranks of the pipeline ranks that have it (ADR 0019). It is gathered when a
step begins, before the schedule, and its gradient is reduced at the end of the step, after those of all
other units. So its holders, which run the schedule at different places, never wait for each other inside
it. All ranks have their tied units in the same order.

Units of experts are sharded over the ranks that hold the same experts, fewer than those that hold the
rest of the model. The layers send tokens between the ranks that share them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from zeroshard.comm.collectives import Comm
from zeroshard.core.layout import is_split
from zeroshard.core.texts import rank_ranges
from zeroshard.device.choice import read
from zeroshard.engine.draft import Draft
from zeroshard.engine.unit_plan import UnitSpec
from zeroshard.errors import UsageError
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


def other_holders(
    draft: Draft, watch: CommSession, units: Sequence[Unit], buffers: Sequence[GradBuffer]
) -> OtherHolders:
    """What the exchange of a step needs to know of tied units and of experts."""
    names = _tied_names(draft)
    apart = {*names, *names_over_replicas(draft)}
    places = {
        slot.fqn: at
        for at, slot in enumerate(slot for buffer in buffers for slot in buffer.unit.layout.slots)
    }
    mesh, rank = draft.mesh, draft.rank_info.rank
    return OtherHolders(
        hops=[
            (watch.ties[tie], torch.tensor(mesh.tied_group(rank, tie), device=draft.device))
            if tie in watch.ties
            else None
            for tie in tied_ranks(draft.model)
        ],
        flags=[places.get(name) for name in names],
        positions=frozenset(
            position
            for unit in units
            for position, slot in zip(unit.positions, unit.layout.slots, strict=True)
            if slot.fqn in apart
        ),
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


def gathers_of(spec: UnitSpec, watch: CommSession) -> Comm:
    """The communicator that gathers a unit: that of the ranks that hold it."""
    if spec.experts > 1:
        return watch.experts[spec.experts]
    return watch.ties[spec.tie] if spec.tie else watch.gathers


def reductions_of(spec: UnitSpec, watch: CommSession) -> Comm:
    """The communicator that reduces the gradients of a unit."""
    if spec.experts > 1:
        return watch.experts[spec.experts]
    return watch.ties[spec.tie] if spec.tie else watch.reductions


def tied_ranks(model: nn.Module) -> list[tuple[int, ...]]:
    """The sets of several pipeline ranks that hold a tied parameter; the same on all ranks."""
    return model.tied_ranks if isinstance(model, PipelineModel) else []


def _tied_names(draft: Draft) -> list[str]:
    """The parameters that are tied over several pipeline ranks; the same list on all ranks."""
    model = draft.model
    if not isinstance(model, PipelineModel):
        return []
    return [name for name in model.ties if len(model.holders_of(name)) > 1]


def check_options(draft: Draft, watch: CommSession) -> None:
    """Check that all holders of each tied parameter update it with the same options. Collective.

    Each of them updates a part of it, so other options would give a parameter of two kinds. To be called
    before the optimizer gets fragments instead of parameters.

    Raises:
        UsageError: they differ; the same on every rank.
    """
    names = _tied_names(draft)
    if not names:
        return
    found = dict(_options(draft))
    codes = [_code(found[name]) if name in found else -1.0 for name in names]
    own = torch.tensor(codes, dtype=torch.float64, device=draft.device)
    rows = watch.world.all_gather_small(own, name="options of tied parameters")
    if is_fake(rows):  # a simulation has no other ranks
        return
    for name, of_ranks in zip(names, read(rows.t()), strict=True):
        holders = {rank: code for rank, code in enumerate(of_ranks) if code >= 0}
        first = next(iter(holders.values()), None)
        if odd := [rank for rank, code in holders.items() if code != first]:
            raise UsageError(
                f"parameter {name!r} is tied over pipeline stages, and the optimizer has other options "
                f"(learning rate, weight decay...) for it on {rank_ranges(odd)} than on "
                f"rank {next(iter(holders))}. Each of these ranks updates a part of it. Choose param "
                "groups by the names of parameters, which are equal on all ranks, and not by modules."
            )


def _options(draft: Draft) -> Iterator[tuple[str, str]]:
    names = {id(param): name for name, param in draft.model.named_parameters()}
    for group in draft.optimizer.param_groups if draft.optimizer is not None else ():
        text = repr(options_in_words(group))
        for param in group["params"]:
            if id(param) in names:
                yield names[id(param)], text


def _code(text: str) -> float:
    """A number that a message in fp64 carries exactly."""
    return float(int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big"))


_NOT_OPTIONS = ("params", "param_names")


def groups_in_words(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """The options of all param groups of a pipeline, whose ranks make their optimizers by themselves.

    All stages need the same groups: a checkpoint has one list of options, and says for each parameter
    which entry is its own.
    """
    groups = optimizer.param_groups
    count = "number of param groups (a pipeline stage without parameters of a group needs it empty)"
    return {
        "class of the optimizer": type(optimizer).__name__,
        count: str(len(groups)),
        **{
            f"{name} of param group {at}": text
            for at, group in enumerate(groups)
            for name, text in options_in_words(group).items()
        },
    }


def options_in_words(group: Mapping[str, Any]) -> dict[str, str]:
    """The options of a param group whose values can be compared between ranks, by name.

    Left out are objects that are neither numbers, texts, tensors nor lists of these: their texts may
    contain addresses. Waits for the device if an option is a tensor there.
    """
    words = {name: _words(group[name]) for name in sorted(group) if name not in _NOT_OPTIONS}
    return {name: text for name, text in words.items() if text is not None}


def _words(value: Any) -> str | None:
    if isinstance(value, Tensor):  # its text has the device, which differs between ranks
        return f"tensor {value.tolist()!r}"
    if isinstance(value, (list, tuple)):
        parts = [_words(each) for each in value]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    return None
