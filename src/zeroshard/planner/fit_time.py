"""Searches the configuration with the smallest predicted time of a step, by few simulations.

A kind is a stage, with or without offload and checkpointing. One simulation of each kind that may win
gives its bytes and the events of its step. How both grow with the micro-batch is the same for kinds with
the same activations, so it is read from two simulations that differ in one sample: the peak of each phase
is a line, and the work of each operation too. Collectives do not depend on the micro-batch. With this,
hundreds of candidates are timed without simulating them.

Offload and checkpointing add work and take none away. So a kind whose time cannot be below that of the
same kind without them is left out if something faster fits. The winner is simulated, and so is the next
larger micro-batch; if one of them is not what the lines said, the next best candidate is the winner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from zeroshard.config.machine_file import MachineFile, Values
from zeroshard.core.tiers import Tier
from zeroshard.errors import UsageError
from zeroshard.planner.candidates import STRATEGIES, Candidate, Fit, Judged, Strategy
from zeroshard.planner.plan import Plan
from zeroshard.planner.simulate import Simulation
from zeroshard.planner.step_log import Operation, StepEvent
from zeroshard.planner.step_time import Prices, step_time
from zeroshard.planner.work import Work, along

LOW, HIGH = 2, 3
"""Samples of the micro-batches between which lines are drawn. With one sample some operations differ."""


class StrategyKind(NamedTuple):
    """What candidates have in common that differ in the micro-batch only."""

    strategy: Strategy
    checkpointing: bool


KINDS = [
    StrategyKind(strategy, on) for on in (False, True) for group in STRATEGIES for strategy in group
]
"""Every kind after those that it adds to. Of equally fast ones the first is chosen."""


def less_than(kind: StrategyKind) -> list[StrategyKind]:
    """The kinds that ``kind`` adds one thing to: offload or checkpointing."""
    own, found = kind.strategy, []
    if kind.checkpointing:
        found.append(StrategyKind(own, False))
    if own.params:
        found.append(StrategyKind(replace(own, params=False), kind.checkpointing))
    elif own.optimizer:
        found.append(StrategyKind(replace(own, optimizer=False), kind.checkpointing))
    return found


@dataclass(frozen=True)
class Growth:
    """How a step grows with each sample of the micro-batch. By phase: bytes; by operation: work."""

    phases: Mapping[str, int]
    works: Mapping[Work, Work]

    @classmethod
    def between(cls, low: Simulation, high: Simulation) -> Growth:
        """From the same kind with ``LOW`` and ``HIGH`` samples."""
        before, after = _works(low.events), _works(high.events)
        same = [w.op for w in before] == [w.op for w in after]
        pairs = zip(before, after, strict=True) if same else ()
        return cls(
            {
                name: moment.device_nbytes - low.moments[name].device_nbytes
                for name, moment in high.moments.items()
            },
            dict(pairs) if same else {work: _grown(work) for work in before},
        )

    def events(self, low: Sequence[StepEvent], size: int) -> list[StepEvent]:
        """The events of a step with ``LOW`` samples as they are with ``size``."""
        part = (size - LOW) / (HIGH - LOW)
        made: dict[Work, Work] = {}
        found: list[StepEvent] = []
        for event in low:
            if not isinstance(event, Operation) or event.work not in self.works:
                found.append(event)
                continue
            work = event.work
            if work not in made:
                made[work] = along(work, self.works[work], part)
            found.append(Operation(event.phase, made[work]))
        return found


def _grown(work: Work) -> Work:
    """``HIGH`` samples instead of ``LOW``, if all of an operation grows with them."""
    nothing = Work(work.op, work.kind, 0, work.dtype, 0, 0, 0, 0)
    return along(nothing, work, HIGH / LOW)


def _works(events: Sequence[StepEvent]) -> list[Work]:
    return [e.work for e in events if isinstance(e, Operation) and e.phase != "step"]


@dataclass
class _Known:
    """A kind that was simulated with ``size`` samples. By size: ``peaks`` of simulations; ``seconds`` of
    what fits, and of the largest micro-batch, which is the fastest if memory is no limit."""

    plan: Plan
    growth: Growth | None
    size: int
    peaks: dict[int, int] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)

    def peak_nbytes(self, size: int) -> int:
        """The peak with ``size`` samples: of a simulation, or on a line."""
        if size in self.peaks:
            return self.peaks[size]
        if self.growth is None:
            return self.plan.peak_nbytes
        known = sorted(self.peaks.items(), key=lambda at: abs(at[0] - size))[:2]
        if len(known) == 2:
            (near, nbytes), (far, other) = known
            return round(nbytes + (size - near) * (other - nbytes) / (far - near))
        moments = self.plan.simulation.moments
        added = size - self.size
        return max(
            moment.device_nbytes + added * self.growth.phases.get(name, 0)
            for name, moment in moments.items()
        )


class _Search:
    """What is known of every kind and candidate."""

    def __init__(
        self, simulated: Callable[[Candidate], Plan], machine: MachineFile, samples: int
    ) -> None:
        self._simulated = simulated
        self._machine = machine
        self._samples = samples
        self.sizes = [size for size in range(1, samples + 1) if samples % size == 0]
        self.plans: dict[Candidate, Plan] = {}
        self.known: dict[StrategyKind, _Known] = {}
        self.left_out: dict[
            StrategyKind, float
        ] = {}  # seconds that no candidate of the kind is below
        self.untimed: dict[StrategyKind, str] = {}
        self._growth: dict[bool, Growth] = {}
        self.simulations = 0

    def candidates(self, kind: StrategyKind) -> list[Candidate]:
        """Those of a kind, by increasing micro-batch."""
        return [Candidate(*kind, size, self._samples // size) for size in self.sizes]

    def look(self, kind: StrategyKind) -> None:
        """Simulate a kind with few samples and time its candidates, unless none can be the fastest.

        Raises:
            UsageError: the machine file lacks a number, and no kind could be timed before.
        """
        least_s, best_s = self._least_s(kind), self._best_s()
        if least_s >= best_s:
            self.left_out[kind] = least_s
            return
        try:
            found = self._look(kind)
            for own in self.candidates(kind):
                fits = found.peak_nbytes(own.micro_batch) <= limit_of_plan(found.plan)
                if fits or own.micro_batch == self.sizes[-1]:
                    found.seconds[own.micro_batch] = self._seconds(found, own)
        except UsageError as error:
            if not self.known:
                raise
            self.untimed[kind] = str(error).partition(", which")[0]
            return
        self.known[kind] = found

    def _look(self, kind: StrategyKind) -> _Known:
        if self._samples == 1:
            return _Known(self._run(Candidate(*kind, 1, 1)), None, 1)
        low = self._run(Candidate(*kind, LOW, 2))
        on = kind.checkpointing
        if on not in self._growth:
            high = self._run(Candidate(*kind, HIGH, 2))
            self._growth[on] = Growth.between(low.simulation, high.simulation)
        return _Known(low, self._growth[on], LOW)

    def _run(self, candidate: Candidate) -> Plan:
        self.simulations += 1
        return self._simulated(candidate)

    def simulate(self, candidate: Candidate) -> None:
        """Replace what is estimated of a candidate by a simulation."""
        plan = self.plans[candidate] = self._run(candidate)
        known, size = self.known[_kind(candidate)], candidate.micro_batch
        known.peaks[size] = plan.peak_nbytes
        assert plan.time is not None  # a machine was given
        known.seconds[size] = plan.time.total_s

    def _seconds(self, known: _Known, own: Candidate) -> float:
        found = known.plan.simulation
        if known.growth is not None:
            events = tuple(known.growth.events(found.events, own.micro_batch))
            found = replace(found, events=events)
        time = step_time(found, self._machine, samples=1, tokens=0, micro_batches=own.accumulation)
        return time.total_s

    def _least_s(self, kind: StrategyKind) -> float:
        """What no candidate of the kind takes less than, by the kinds that it adds to."""
        found = 0.0
        for parent in less_than(kind):
            if parent in self.left_out:
                found = max(found, self.left_out[parent])
            elif parent in self.known:
                known = self.known[parent]
                added = 0.0
                if kind.strategy.optimizer and not parent.strategy.optimizer:
                    added = self._offload_s(known.plan.simulation)
                found = max(found, min(known.seconds.values()) + added)
        return found

    def _offload_s(self, found: Simulation) -> float:
        """What the update in host memory takes more than on the device; 0 if that is not known."""
        prices = Prices(Values(self._machine), found.mesh.world_size)
        away = replace(found.updated, tier=Tier.HOST.name)
        try:
            here_s, there_s = prices.update_s(found.updated), prices.update_s(away)
            return max(0.0, sum(prices.copies_s(away)) + there_s - here_s)
        except UsageError:
            return 0.0

    def fitting(self) -> Iterator[tuple[float, int, Candidate]]:
        """Seconds, number and candidate, of those that fit as far as is known."""
        for at, (kind, known) in enumerate(self.known.items()):
            for own in self.candidates(kind):
                if known.peak_nbytes(own.micro_batch) <= limit_of_plan(known.plan):
                    if own.micro_batch not in known.seconds:  # a simulation moved the line
                        known.seconds[own.micro_batch] = self._seconds(known, own)
                    yield known.seconds[own.micro_batch], at, own

    def _best_s(self) -> float:
        return min((seconds for seconds, _, _ in self.fitting()), default=float("inf"))

    def after(self, own: Candidate) -> Candidate | None:
        """The candidate with the next larger micro-batch."""
        ways = self.candidates(_kind(own))
        return next((way for way in ways if way.micro_batch > own.micro_batch), None)

    def smallest(self) -> Candidate:
        """The candidate with the smallest peak."""
        every = [(self.known[kind], own) for kind in self.known for own in self.candidates(kind)]
        return min(every, key=lambda at: at[0].peak_nbytes(at[1].micro_batch))[1]

    def settle(self) -> Candidate | None:
        """The fastest candidate that fits, simulated like the next larger one; None if nothing fits."""
        while True:
            best_s, _, best = min(
                self.fitting(), key=lambda at: at[:2], default=(float("inf"), 0, self.smallest())
            )
            todo = [own for own in (best, self.after(best)) if own and own not in self.plans]
            if best_s == float("inf"):
                todo = [] if best in self.plans else [best]
            again = [kind for kind, least_s in self.left_out.items() if least_s < best_s]
            if todo:
                self.simulate(todo[0])
            elif again:
                del self.left_out[again[0]]
                self.look(again[0])
            else:
                return None if best_s == float("inf") else best


def _kind(own: Candidate) -> StrategyKind:
    return StrategyKind(own.strategy, own.checkpointing)


def limit_of_plan(plan: Plan) -> int:
    """The limit of a plan in a search, which has one."""
    assert plan.limit_nbytes is not None
    return plan.limit_nbytes


def search_by_time(
    simulated: Callable[[Candidate], Plan],
    base: Mapping[str, Any],
    machine: MachineFile,
    *,
    samples: int,
    can_checkpoint: bool,
) -> Fit:
    """The candidate with the smallest predicted time of a step among those that fit.

    ``simulated`` gives a candidate's plan with its time. ``samples``: of one rank in a step.

    Raises:
        UsageError: the machine file lacks a number that every step needs.
    """
    search = _Search(simulated, machine, samples)
    kinds = [kind for kind in KINDS if can_checkpoint or not kind.checkpointing]
    for kind in kinds:
        search.look(kind)
    chosen = search.settle()
    best = chosen or search.smallest()
    judged = [
        _judged(search, kind, own, chosen) for kind in kinds for own in search.candidates(kind)
    ]
    after = None if chosen is None else search.after(chosen)
    larger = next((each for each in judged if each.candidate == after), None)
    return Fit(
        "speed", chosen, search.plans[best], best.config(base), judged, larger, search.simulations,
        f"The order of speed is that of predicted steps on {machine.name}.",
    )  # fmt: skip


def _judged(
    search: _Search, kind: StrategyKind, own: Candidate, chosen: Candidate | None
) -> Judged:
    """Why a candidate was not chosen."""
    if kind in search.untimed:
        return Judged(own, None, None, False, f"not timed: {search.untimed[kind]}")
    if kind in search.left_out:
        least_s = search.left_out[kind]
        why = f"takes {1e3 * least_s:.4g} ms or more: it adds work to a kind that takes this"
        return Judged(own, None, None, False, why)
    known, size = search.known[kind], own.micro_batch
    peak_nbytes, seconds = known.peak_nbytes(size), known.seconds.get(size)
    over = peak_nbytes - limit_of_plan(known.plan)
    if own == chosen:
        why = "chosen"
    elif over > 0:
        why = f"does not fit: {over / 2**30:.2f} GiB too much"
    elif chosen is None or seconds is None:
        why = "fits"
    else:
        best_s = search.known[_kind(chosen)].seconds[chosen.micro_batch]
        why = f"slower by {seconds / best_s - 1:.1%}"
    return Judged(own, peak_nbytes, seconds, own in search.plans, why)
