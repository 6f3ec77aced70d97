"""Pipeline schedules as lists of actions, and what they cost: pure arithmetic.

A model is cut into stages. Stage ``s`` is on pipeline rank ``s % ranks``, so each rank has ``per_rank``
stages. A schedule says in which order a rank runs the forwards and backwards of its stages. Letters:
``p`` ranks, ``v`` stages per rank, ``M`` micro-batches.

GPipe: Huang et al., 2019 (arXiv 1811.06965). 1F1B and Interleaved1F1B: Narayanan et al., 2021 (arXiv
2104.04473). LoopedBFS: Lamy-Poirier, 2022 (arXiv 2211.05953).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

FORWARD, BACKWARD = "F", "B"


class Action(NamedTuple):
    """One forward or backward of one micro-batch through one stage."""

    kind: str
    stage: int
    micro_batch: int


Actions = list[Action]


def stages_of(rank: int, ranks: int, per_rank: int) -> range:
    """The stages of a pipeline rank, in the order of forward.

    >>> list(stages_of(1, ranks=4, per_rank=2))
    [1, 5]
    """
    return range(rank, ranks * per_rank, ranks)


def settled_after(schedule: str, stages: int, ranks: int) -> int | None:
    """The micro-batches of a step after which each does and holds what the one before does.

    None: not known. With 1F1B the first stage of P holds P of them, and then runs a forward and a
    backward in turns.

    >>> settled_after("1F1B", stages=4, ranks=4)
    5
    """
    if ranks == 1:
        return 2
    return ranks + 1 if schedule == "1F1B" and stages == ranks else None


def _gpipe(rank: int, _ranks: int, _per_rank: int, micro_batches: int) -> Actions:
    return [Action(kind, rank, m) for kind in (FORWARD, BACKWARD) for m in range(micro_batches)]


def _looped_bfs(rank: int, ranks: int, per_rank: int, micro_batches: int) -> Actions:
    stages, order = stages_of(rank, ranks, per_rank), range(micro_batches)
    forwards = [Action(FORWARD, stage, m) for stage in stages for m in order]
    backwards = [Action(BACKWARD, s, m) for s in reversed(stages) for m in reversed(order)]
    return forwards + backwards


def _one_f_one_b(rank: int, ranks: int, _per_rank: int, micro_batches: int) -> Actions:
    forwards = [Action(FORWARD, rank, m) for m in range(micro_batches)]
    backwards = [Action(BACKWARD, rank, m) for m in range(micro_batches)]
    return _alternating(forwards, backwards, before=ranks - 1 - rank)


def _interleaved(rank: int, ranks: int, per_rank: int, micro_batches: int) -> Actions:
    """Micro-batches run in rounds: a round goes through one stage of a rank before the next one."""
    round_size = micro_batches // rounds_of(ranks, micro_batches)
    stages = stages_of(rank, ranks, per_rank)

    def through(kind: str, ordered: Sequence[int]) -> Iterator[Action]:
        for begin in range(0, micro_batches, round_size):
            for stage in ordered:
                yield from (Action(kind, stage, m) for m in range(begin, begin + round_size))

    forwards, backwards = through(FORWARD, stages), through(BACKWARD, stages[::-1])
    before = (per_rank - 1) * round_size + 2 * (ranks - 1 - rank)
    return _alternating(list(forwards), list(backwards), before=before)


def _alternating(forwards: Actions, backwards: Actions, *, before: int) -> Actions:
    """``before`` forwards, then a forward and a backward in turns, then the remaining backwards."""
    before = min(before, len(forwards))
    steady = zip(forwards[before:], backwards, strict=False)
    rest = backwards[len(forwards) - before :]
    return [*forwards[:before], *(action for pair in steady for action in pair), *rest]


def rounds_of(ranks: int, micro_batches: int) -> int:
    """The rounds of Interleaved1F1B, each with at least as many micro-batches as there are ranks."""
    return max(1, micro_batches // ranks)


@dataclass(frozen=True)
class PipelineSchedule:
    """One row of :data:`SCHEDULES`. ``several``: a rank may have more than one stage."""

    name: str
    several: bool
    actions_of_rank: Callable[[int, int, int, int], Actions]

    def actions(self, ranks: int, per_rank: int, micro_batches: int) -> list[Actions]:
        """The actions of every rank, in order.

        >>> [action.kind for action in SCHEDULES["1F1B"].actions(2, 1, 3)[0]]
        ['F', 'F', 'B', 'F', 'B', 'B']
        """
        of_rank = self.actions_of_rank
        return [of_rank(rank, ranks, per_rank, micro_batches) for rank in range(ranks)]

    def refusal(self, ranks: int, per_rank: int, micro_batches: int) -> str:
        """Why the schedule cannot run with these numbers, and what to change; "" if it can."""
        if per_rank > 1 and not self.several:
            return (
                f"the schedule {self.name} runs one stage per rank, but {ranks * per_rank} stages on "
                f"{ranks} pipeline ranks are {per_rank} per rank. Choose Interleaved1F1B or LoopedBFS, "
                f"or cut the model into {ranks} stages"
            )
        if self.name == "1F1B" and micro_batches < ranks:
            return (
                f"the schedule 1F1B needs at least as many micro-batches as stages, but there are "
                f"{micro_batches} micro-batches and {ranks} stages. Set "
                f"gradient_accumulation_steps to {ranks} or more, or choose GPipe"
            )
        rounds = rounds_of(ranks, micro_batches)
        if self.name == "Interleaved1F1B" and micro_batches % rounds:
            return (
                f"the schedule Interleaved1F1B runs {micro_batches} micro-batches on {ranks} ranks in "
                f"{rounds} rounds, which must be of equal length. Set gradient_accumulation_steps to a "
                f"multiple of {ranks}, or choose LoopedBFS"
            )
        return ""


SCHEDULES: Mapping[str, PipelineSchedule] = {
    row.name: row
    for row in (
        PipelineSchedule("GPipe", several=False, actions_of_rank=_gpipe),
        PipelineSchedule("1F1B", several=False, actions_of_rank=_one_f_one_b),
        PipelineSchedule("Interleaved1F1B", several=True, actions_of_rank=_interleaved),
        PipelineSchedule("LoopedBFS", several=True, actions_of_rank=_looped_bfs),
    )
}


SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""torch's schedules that compute gradients of inputs and of weights at different times. Not offered."""


def live(actions: Sequence[Action]) -> int:
    """The largest number of forwards whose backward has not run: how many activations a rank keeps.

    GPipe: M. LoopedBFS: v M. 1F1B: at most p - rank.

    >>> [live(actions) for actions in SCHEDULES["1F1B"].actions(4, 1, 8)]
    [4, 3, 2, 1]
    """
    return max(accumulate(1 if action.kind == FORWARD else -1 for action in actions), default=0)


def idle(actions_of_ranks: Sequence[Actions], stages: int) -> float:
    """The part of a step in which ranks wait, found by playing the actions through.

    A forward takes 1, a backward 2, a message 0. Ranks count equally.

    Raises:
        ValueError: the lists block each other, or an action is missing.
    """
    ended: dict[Action, float] = {}
    at, now = [0] * len(actions_of_ranks), [0.0] * len(actions_of_ranks)
    while any(at[r] < len(actions) for r, actions in enumerate(actions_of_ranks)):
        progress = False
        for rank, actions in enumerate(actions_of_ranks):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                needed = _needed(action, stages)
                if any(other not in ended for other in needed):
                    break
                begin = max([now[rank], *(ended[other] for other in needed)])
                now[rank] = ended[action] = begin + (1 if action.kind == FORWARD else 2)
                at[rank] += 1
                progress = True
        if not progress:
            raise ValueError("the ranks wait for each other without end")
    busy = sum(1 if action.kind == FORWARD else 2 for action in ended)
    return 1 - busy / (max(now) * len(now))


def _needed(action: Action, stages: int) -> list[Action]:
    kind, stage, micro_batch = action
    if kind == FORWARD:
        return [Action(FORWARD, stage - 1, micro_batch)] if stage else []
    own = Action(FORWARD, stage, micro_batch)
    return [own, Action(BACKWARD, stage + 1, micro_batch)] if stage + 1 < stages else [own]
