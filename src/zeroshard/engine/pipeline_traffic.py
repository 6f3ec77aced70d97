"""Chooses how often a pipeline gathers parameters and reduces gradients, where a program says ``auto``.

``step`` moves fewer elements than ``micro_batch`` and holds more of them ([Traffic and memory in a
stage](docs/pipeline.md)). ``auto`` takes what moves least among what fits into the memory of every rank.
Every rank chooses from the facts of all ranks, so all choose the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import product

import torch
from torch._subclasses.fake_tensor import is_fake

from zeroshard.comm.host import host_number
from zeroshard.core.ledger import Key
from zeroshard.core.stages import Stage, UnitBytes, state_nbytes
from zeroshard.core.tiers import Tier
from zeroshard.device.choice import ops_of, read
from zeroshard.engine.draft import Draft
from zeroshard.errors import UsageError
from zeroshard.memory.host_limits import gib, host_limits
from zeroshard.offload.capacity_check import demand_of
from zeroshard.parallel.split import AUTO, GATHER, PipelineModel
from zeroshard.session.comm_session import CommSession

SPARE = 0.5
"""The part of the free memory that is left to activations, messages and the program."""


@dataclass(frozen=True)
class RankMemory:
    """What the choice needs to know of one rank.

    ``place``: a number of the memory that the rank uses; ranks with the same number share it.
    ``free_nbytes``: bytes free there; 0: unknown. ``needed_nbytes``: bytes that the engine has yet to
    allocate there in any case. ``gathered_nbytes``: what ``gather="step"`` holds more, and
    ``summed_nbytes`` what ``reduce="step"`` holds more; both are upper bounds. ``gathered_numel`` and
    ``reduced_numel``: elements of one gather and of one reduction of all units; 0 where the ZeRO stage
    leaves no choice.
    """

    place: int
    free_nbytes: int
    needed_nbytes: int
    gathered_nbytes: int
    summed_nbytes: int
    gathered_numel: int
    reduced_numel: int

    def more_nbytes(self, gather: str, reduce: str) -> int:
        """Bytes that this choice holds more than ``micro_batch`` for both."""
        by_gather = self.gathered_nbytes if gather == "step" else 0
        return by_gather + (self.summed_nbytes if reduce == "step" else 0)

    def moved_numel(self, gather: str, reduce: str, micro_batches: int) -> int:
        """The most elements that this choice gathers and reduces in a step."""
        gathers = 1 if gather == "step" else 2 * micro_batches
        reductions = 1 if reduce == "step" else micro_batches
        return gathers * self.gathered_numel + reductions * self.reduced_numel


@dataclass(frozen=True)
class PipelineTraffic:
    """How often a pipeline gathers and reduces. ``reason``: that of ``auto`` in words; else ""."""

    gather: str
    reduce: str
    reason: str = ""

    @property
    def lines(self) -> tuple[str, ...]:
        """The reason as lines of text; none without a choice."""
        return (self.reason,) if self.reason else ()


def choose_traffic(
    gather: str,
    reduce: str,
    ranks: Sequence[RankMemory],
    *,
    micro_batches: int,
    limit_nbytes: int | None,
) -> PipelineTraffic:
    """The choice of all ranks. ``ranks``: facts of every one of them, in the same order everywhere.

    ``limit_nbytes``: the most bytes that a choice may hold more on each rank. None: what is to be
    allocated must leave :data:`SPARE` of the free memory.

    >>> rank = RankMemory(0, free_nbytes=100, needed_nbytes=10, gathered_nbytes=30, summed_nbytes=30,
    ...                   gathered_numel=8, reduced_numel=8)
    >>> found = choose_traffic("auto", "auto", [rank], micro_batches=4, limit_nbytes=None)
    >>> found.gather, found.reduce
    ('step', 'micro_batch')
    """
    if AUTO not in (gather, reduce):
        return PipelineTraffic(gather, reduce)
    pairs: list[tuple[str, str]] = [*product(_choices(gather), _choices(reduce))]
    fitting = [pair for pair in pairs if _fits(pair, ranks, limit_nbytes)]

    def cost(pair: tuple[str, str]) -> tuple[int, int]:
        moved = sum(rank.moved_numel(*pair, micro_batches=micro_batches) for rank in ranks)
        return moved, sum(rank.more_nbytes(*pair) for rank in ranks)

    # If nothing fits, what holds least. The caller's own choice of the other one may not fit either.
    chosen = min(fitting or pairs[-1:], key=cost)
    return PipelineTraffic(*chosen, _in_words(gather, reduce, chosen, ranks, limit_nbytes))


def _choices(asked: str) -> Sequence[str]:
    """What may be chosen, the one that holds least last."""
    return GATHER if asked == AUTO else (asked,)


def _fits(pair: tuple[str, str], ranks: Sequence[RankMemory], limit_nbytes: int | None) -> bool:
    if limit_nbytes is not None:
        return all(rank.more_nbytes(*pair) <= limit_nbytes for rank in ranks)
    sharing: dict[int, list[RankMemory]] = defaultdict(list)
    for rank in ranks:
        sharing[rank.place].append(rank)
    return all(
        sum(rank.needed_nbytes + rank.more_nbytes(*pair) for rank in there)
        <= (1 - SPARE) * min(rank.free_nbytes for rank in there)
        for there in sharing.values()
    )


def _in_words(
    gather: str,
    reduce: str,
    chosen: tuple[str, str],
    ranks: Sequence[RankMemory],
    limit_nbytes: int | None,
) -> str:
    named = zip(("gather", "reduce"), (gather, reduce), chosen, strict=True)
    choice = " and ".join(f'{name} "{found}"' for name, asked, found in named if asked == AUTO)
    more = max(rank.more_nbytes(*chosen) for rank in ranks)
    most = max(rank.more_nbytes("step", "step") for rank in ranks)
    if limit_nbytes is not None:
        against = f"auto_limit_nbytes is {gib(limit_nbytes)}"
    elif any(not rank.free_nbytes for rank in ranks):
        against = "a rank does not know how much memory is free"
    else:
        against = (
            f"at least {gib(min(rank.free_nbytes for rank in ranks))} were free, {SPARE:.0%} of which "
            f"stay free for activations, and ranks had up to "
            f"{gib(max(rank.needed_nbytes for rank in ranks))} of states to allocate"
        )
    return (
        f"auto chose {choice} for the pipeline: it holds up to {gib(more)} more per rank than "
        f'"micro_batch", where "step" for both holds {gib(most)}; {against}.'
    )


def facts_of(
    draft: Draft, watch: CommSession, plan: Sequence[UnitBytes], stage: Stage
) -> RankMemory:
    """The facts of this rank.

    Units that are tied over stages are left out: they are gathered and reduced once per step in any case.
    """
    planned = state_nbytes(plan, stage, watch.gathers.rank)
    rows = zip(draft.specs, plan, strict=True)
    own = [(spec, row) for spec, row in rows if spec.pipeline_stage is not None]
    shares = draft.mesh.pipeline > 1 and watch.gathers.size > 1
    gathered = [(s, row) for s, row in own if stage.shards_params and shares]
    reduced = [s for s, _ in own if s.trainable and stage.shards_grads]
    place, free_nbytes, needed_nbytes = _room(planned, draft.device, draft.rank_info.rank)
    return RankMemory(
        place=place,
        free_nbytes=free_nbytes,
        needed_nbytes=needed_nbytes,
        gathered_nbytes=sum(row.param_nbytes * s.layout.full_numel for s, row in gathered),
        summed_nbytes=sum(s.row.grad_accum.itemsize * s.layout.full_numel for s in reduced),
        gathered_numel=sum(s.layout.full_numel for s, _ in gathered),
        reduced_numel=sum(s.layout.full_numel for s in reduced),
    )


def _room(planned: Mapping[Key, int], device: torch.device, rank: int) -> tuple[int, int, int]:
    """The memory that this rank uses (see :class:`RankMemory`), its free bytes, and those needed."""
    if device.type == "cpu":
        needed_nbytes = demand_of(planned, on_cpu=True).host_nbytes
        return host_number(), host_limits().free_nbytes or 0, needed_nbytes
    on_device = sum(nbytes for (_, tier), nbytes in planned.items() if tier is Tier.DEVICE)
    return rank, ops_of(device).free_nbytes(), on_device


def agreed_traffic(
    model: PipelineModel,
    draft: Draft,
    watch: CommSession,
    plan: Sequence[UnitBytes],
    stage: Stage,
) -> PipelineTraffic:
    """What the pipeline does, the same on every rank. Collective if ``model`` asks for auto.

    Raises:
        UsageError: auto without a limit in a simulation, where no memory can be asked.
    """
    asked, limit_nbytes = (model.gather, model.reduce), model.auto_limit_nbytes
    if AUTO not in asked:
        return PipelineTraffic(*asked)
    own = facts_of(draft, watch, plan, stage)
    row_K = torch.tensor(astuple(own), dtype=torch.float64).to(draft.device)
    rows = watch.world.all_gather_small(row_K, name="facts for auto")
    if not is_fake(rows):
        ranks = [RankMemory(*map(int, row)) for row in read(rows)]
    elif limit_nbytes is not None:
        ranks = [own]
    else:
        raise UsageError(
            'gather="auto" or reduce="auto" in a simulation: it has one rank of many and no memory, so '
            'it does not know what fits. Name "step" or "micro_batch", or pass auto_limit_nbytes=.'
        )
    micro_batches = draft.loaded.config.gradient_accumulation_steps or 1
    return choose_traffic(*asked, ranks, micro_batches=micro_batches, limit_nbytes=limit_nbytes)
