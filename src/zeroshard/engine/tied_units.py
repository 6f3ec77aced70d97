"""Units that are tied over pipeline stages: their communicators, their flags, and their options.

Such a unit is sharded over all ranks of the pipeline ranks that have it (ADR 0019). It is gathered when a
step begins, before the schedule, and its gradient is reduced at the end of the step, after those of all
other units. So its holders, which run the schedule at different places, never wait for each other inside
it. All ranks have their tied units in the same order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from zeroshard.comm.collectives import Comm
from zeroshard.comm.flight_recorder import rank_ranges
from zeroshard.device.choice import read
from zeroshard.engine.draft import Draft
from zeroshard.engine.optimizer_step import is_fake
from zeroshard.engine.param_groups import options_in_words
from zeroshard.engine.unit_plan import UnitSpec
from zeroshard.errors import UsageError
from zeroshard.parallel.split import PipelineModel
from zeroshard.session.comm_session import CommSession
from zeroshard.zero.gradients import GradBuffer
from zeroshard.zero.mesh_norm import OtherHolders
from zeroshard.zero.unit import Unit


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


def tied_parts(
    draft: Draft, watch: CommSession, units: Sequence[Unit], buffers: Sequence[GradBuffer]
) -> OtherHolders:
    """What the exchange of a step needs to know of tied units."""
    names = _names(draft)
    if not names:
        return OtherHolders()
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
            if slot.fqn in names
        ),
    )


def tied_ranks(model: nn.Module) -> list[tuple[int, ...]]:
    """The sets of several pipeline ranks that hold a tied parameter; the same on all ranks."""
    return model.tied_ranks if isinstance(model, PipelineModel) else []


def _names(draft: Draft) -> list[str]:
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
    names = _names(draft)
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
