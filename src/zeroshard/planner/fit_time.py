"""Searches the configuration with the smallest predicted time of a step, by few simulations.

A kind is a stage, with or without offload and checkpointing, on a number of tensor ranks. One simulation
of each kind that may win gives its bytes and the events of its step. How both grow with the micro-batch
is the same for kinds with the same activations, so it is read from two simulations that differ in one
sample: the peak of each phase is a line, and so are the work of each operation and the bytes of each
collective of a layer. Those of the engine do not depend on the micro-batch. With this, hundreds of
candidates are timed without simulating them.

What cannot win is not simulated. A kind whose states alone are too large does not fit; they follow from
those of another stage. Offload and checkpointing add work and take none away, so a kind whose time cannot
be below that of the same kind without them is left out if something faster fits. Kinds with the same
activations and the same number of tensor ranks do the same operations, whatever they gather and reduce:
what these take is the least for all of them, with or without checkpointing. The winner is simulated, and
so is the next larger micro-batch; if one of them is not what the lines said, the next best candidate is
the winner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from zeroshard.config.machine_file import MachineFile, Values
from zeroshard.core.tiers import Tier
from zeroshard.errors import UsageError
from zeroshard.planner.candidates import (
    STRATEGIES,
    Candidate,
    Fit,
    Judged,
    Strategy,
    StrategyKind,
    candidates_of,
)
from zeroshard.planner.least_states import least_states_nbytes, offloadable_nbytes
from zeroshard.planner.plan import Plan
from zeroshard.planner.simulate import Simulation
from zeroshard.planner.step_log import Begun, Ended, Operation, StepEvent, is_of_layers
from zeroshard.planner.step_time import Prices, step_seconds
from zeroshard.planner.work import Work, along

LOW, HIGH = 2, 3
"""Samples of the micro-batches between which lines are drawn. With one sample some operations differ."""


SAME = 0.99
"""The part of the time of a stage's operations that those of other stages take for certain."""


def kinds_of(tensor: int | None, *, can_checkpoint: bool = True) -> list[StrategyKind]:
    """Every kind of a number of tensor ranks, after those that it adds to. Of equally fast ones the first
    is chosen."""
    choices = (False, True) if can_checkpoint else (False,)
    return [
        StrategyKind(strategy, on, tensor)
        for on in choices
        for group in STRATEGIES
        for strategy in group
    ]


def less_than(kind: StrategyKind) -> list[StrategyKind]:
    """The kinds that ``kind`` adds one thing to: offload or checkpointing."""
    own, found = kind.strategy, []
    if kind.checkpointing:
        found.append(kind._replace(checkpointing=False))
    if own.params:
        found.append(kind._replace(strategy=replace(own, params=False)))
    elif own.optimizer:
        found.append(kind._replace(strategy=replace(own, optimizer=False)))
    return found


def with_less_offload(kind: StrategyKind) -> list[StrategyKind]:
    """The kinds of the same stage that offload less."""
    less = [
        replace(kind.strategy, params=False),
        replace(kind.strategy, params=False, optimizer=False),
    ]
    return [kind._replace(strategy=own) for own in less if own != kind.strategy]


@dataclass(frozen=True)
class Growth:
    """How a step grows with each sample of the micro-batch. By phase: bytes; by operation: work.

    ``layers``: by the bytes of a collective of layers with ``LOW`` samples, those with ``HIGH``.
    """

    phases: Mapping[str, int]
    works: Mapping[Work, Work]
    layers: Mapping[int, int]

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
            _grown_layers(low.events, high.events),
        )

    def at(self, size: int) -> _GrownStep:
        """A step with ``size`` samples."""
        return _GrownStep(self, (size - LOW) / (HIGH - LOW))


@dataclass(frozen=True)
class _GrownStep:
    """What a step with ``LOW`` samples does with another number. ``part``: 0 with LOW, 1 with HIGH."""

    growth: Growth
    part: float

    def work(self, low: Work) -> Work:
        """An operation."""
        high = self.growth.works.get(low)
        return low if high is None else along(low, high, self.part)

    def nbytes(self, begun: Begun) -> int:
        """A collective."""
        low = begun.nbytes
        if not is_of_layers(begun.key):
            return low
        return max(0, round(low + self.part * (self.growth.layers.get(low, low) - low)))


def _grown(work: Work) -> Work:
    """``HIGH`` samples instead of ``LOW``, if all of an operation grows with them."""
    nothing = Work(work.op, work.kind, 0, work.dtype, 0, 0, 0, 0)
    return along(nothing, work, HIGH / LOW)


def _grown_layers(low: Sequence[StepEvent], high: Sequence[StepEvent]) -> dict[int, int]:
    before, after = (
        [e.nbytes for e in events if isinstance(e, Begun) and is_of_layers(e.key)]
        for events in (low, high)
    )
    if len(before) != len(after):  # other operations: all of it grows
        return {nbytes: nbytes * HIGH // LOW for nbytes in before}
    return dict(zip(before, after, strict=True))


def _works(events: Sequence[StepEvent]) -> list[Work]:
    return [e.work for e in events if isinstance(e, Operation) and e.phase != "step"]


def without_engine(found: Simulation, *, with_update: bool) -> Simulation:
    """A step without collectives of the engine, and without its update if that is not wanted.

    Collectives that layers call stay.
    """
    kept: list[StepEvent] = []
    starts = []
    for at, event in enumerate(found.events):
        if at in found.starts:
            starts.append(len(kept))
        if isinstance(event, Operation):
            if event.phase != "step" or with_update:
                kept.append(event)
        elif isinstance(event, (Begun, Ended)) and is_of_layers(event.key):
            kept.append(event)
    return replace(found, events=tuple(kept), starts=tuple(starts))


@dataclass
class _Known:
    """A kind that was simulated with ``size`` samples. ``whole``: the samples of a step, and its largest
    micro-batch. By size: ``peaks`` of simulations; ``seconds`` of what fits or may fit, and of ``whole``,
    which is the fastest if memory is no limit."""

    plan: Plan
    growth: Growth | None
    size: int
    whole: int
    peaks: dict[int, int] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)

    def peak_nbytes(self, size: int) -> int:
        """The peak with ``size`` samples: of a simulation, or on a line.

        A step of one micro-batch may keep no sums of gradients, so their bytes do not count in it.
        """
        if size in self.peaks:
            return self.peaks[size]
        if self.growth is None:
            return self.plan.peak_nbytes
        moments = self.plan.simulation.moments
        spared = self.plan.simulation.nbytes("gradients") if size == self.whole else 0
        known = [at for at in self.peaks.items() if at[0] != self.whole]
        known = sorted(known, key=lambda at: abs(at[0] - size))[:2]
        if len(known) == 2:
            (near, nbytes), (far, other) = known
            return round(nbytes + (size - near) * (other - nbytes) / (far - near)) - spared
        added = size - self.size
        line_nbytes = max(
            moment.device_nbytes + added * self.growth.phases.get(name, 0)
            for name, moment in moments.items()
        )
        return line_nbytes - spared


class _Search:
    """What is known of every kind and candidate."""

    def __init__(
        self,
        simulated: Callable[[Candidate], Plan],
        machine: MachineFile,
        samples: Mapping[int | None, int],
        kinds: Sequence[StrategyKind],
    ) -> None:
        self._simulated = simulated
        self._machine = machine
        self._samples = samples
        self._rank = {kind: at for at, kind in enumerate(kinds)}
        self.plans: dict[Candidate, Plan] = {}
        self.known: dict[StrategyKind, _Known] = {}
        self.left_out: dict[
            StrategyKind, float
        ] = {}  # seconds that no candidate of the kind is below
        self._free_s: dict[StrategyKind, float] = {}  # the same, if memory were no limit
        self.too_large: dict[StrategyKind, int] = {}  # the least bytes of its states
        self.untimed: dict[StrategyKind, str] = {}
        self._growth: dict[tuple[int | None, bool], Growth] = {}
        self._model_s: dict[tuple[int | None, bool], float] = {}  # of operations that all stages do
        self.simulations = 0

    def candidates(self, kind: StrategyKind) -> list[Candidate]:
        """Those of a kind, by increasing micro-batch."""
        return candidates_of(kind, self._samples[kind.tensor])

    def look_at(self, kinds: Sequence[StrategyKind]) -> None:
        """Look at the kinds of a number of tensor ranks, first at one that is likely to be fast."""
        best = min(self.fitting(), key=lambda at: at[:2], default=None)
        likely = Strategy(2) if best is None else best[2].strategy
        for kind in sorted(kinds, key=lambda kind: kind.strategy != likely or kind.checkpointing):
            least_nbytes, limit_nbytes = self._least_nbytes(kind)
            if least_nbytes > limit_nbytes:
                self.too_large[kind] = least_nbytes
            else:
                self.look(kind)

    def _least_nbytes(self, kind: StrategyKind) -> tuple[int, int]:
        """Bytes that all candidates of the kind hold, as far as is known, and the limit."""
        found, limit_nbytes = 0, 0
        for other, known in self.known.items():
            plan = known.plan
            tensor = kind.tensor or plan.mesh.tensor
            nbytes = least_states_nbytes(
                plan.simulation, other.strategy.stage, kind.strategy, tensor
            )
            found, limit_nbytes = max(found, nbytes), limit_of_plan(plan)
        return found, limit_nbytes

    def look(self, kind: StrategyKind) -> None:
        """Simulate a kind with few samples and time its candidates, unless none can be the fastest.

        Raises:
            UsageError: the machine file lacks a number, and no kind could be timed before.
        """
        least_s, free_s = self._least_s(kind)
        if least_s >= self._best_s():
            self.left_out[kind], self._free_s[kind] = least_s, free_s
            return
        try:
            found = self._look(kind)
            ways = self.candidates(kind)
            for own in ways:
                fits = found.peak_nbytes(own.micro_batch) <= limit_of_plan(found.plan)
                if fits or own == ways[-1]:
                    found.seconds[own.micro_batch] = self._seconds(found, own)
            self._note_model(kind, found, ways[-1])
        except UsageError as error:
            if not self.known:
                raise
            self.untimed[kind] = str(error).partition(", which")[0]
            return
        self.known[kind] = found

    def _look(self, kind: StrategyKind) -> _Known:
        strategy, on, tensor = kind
        if self._samples[tensor] == 1:
            return _Known(self._run(Candidate(strategy, on, 1, 1, tensor)), None, 1, 1)
        low = self._run(Candidate(strategy, on, LOW, 2, tensor))
        if (tensor, on) not in self._growth:
            high = self._run(Candidate(strategy, on, HIGH, 2, tensor))
            self._growth[tensor, on] = Growth.between(low.simulation, high.simulation)
        return _Known(low, self._growth[tensor, on], LOW, self._samples[tensor])

    def _note_model(self, kind: StrategyKind, known: _Known, largest: Candidate) -> None:
        """Note what the model alone takes with the largest micro-batch, which is the fastest."""
        stage, found = kind.strategy.stage, known.plan.simulation
        on_device = found.updated.tier == Tier.DEVICE.name
        # a higher stage updates less on a rank than stage 0, and as much as other higher ones
        model = without_engine(found, with_update=stage > 0 and on_device)
        seconds = SAME * self._seconds(known, largest, model)
        key = kind.tensor, kind.checkpointing
        self._model_s[key] = max(self._model_s.get(key, 0.0), seconds)

    def _run(self, candidate: Candidate) -> Plan:
        self.simulations += 1
        return self._simulated(candidate)

    def simulate(self, candidate: Candidate) -> None:
        """Replace what is estimated of a candidate by a simulation."""
        plan = self.plans[candidate] = self._run(candidate)
        known, size = self.known[candidate.kind], candidate.micro_batch
        known.peaks[size] = plan.peak_nbytes
        assert plan.time is not None  # a machine was given
        known.seconds[size] = plan.time.total_s

    def _seconds(self, known: _Known, own: Candidate, found: Simulation | None = None) -> float:
        """Seconds of a candidate's step. ``found``: the step that counts; None: that of its kind."""
        grown = None if known.growth is None else known.growth.at(own.micro_batch)
        chosen = known.plan.simulation if found is None else found
        return step_seconds(chosen, self._machine, micro_batches=own.accumulation, grown=grown)

    def _least_s(self, kind: StrategyKind) -> tuple[float, float]:
        """What no candidate of the kind takes less than, and the same if memory were no limit.

        By what kinds take that it adds to or shares work with.
        """
        model = ((kind.tensor, on) for on in (False, kind.checkpointing))
        free_s = max(self._model_s.get(key, 0.0) for key in model)
        for parent in less_than(kind):
            if parent in self.left_out:
                free_s = max(free_s, self._free_s[parent])
            elif parent in self.known:
                known = self.known[parent]
                added_s = self._offload_s(kind, parent, known)
                free_s = max(free_s, min(known.seconds.values()) + added_s)
        least_s = free_s
        for parent in with_less_offload(kind):
            if parent in self.known:
                known = self.known[parent]
                added_s = self._offload_s(kind, parent, known)
                least_s = max(least_s, self._fastest_s(kind, parent, known) + added_s)
        return least_s, free_s

    def _fastest_s(self, kind: StrategyKind, parent: StrategyKind, known: _Known) -> float:
        """The least seconds of a kind, with micro-batches that fit with more offload."""
        spared = offloadable_nbytes(known.plan.simulation, kind.strategy)
        limit_nbytes = limit_of_plan(known.plan) + spared
        for own in self.candidates(parent):
            size = own.micro_batch
            if known.peak_nbytes(size) <= limit_nbytes and size not in known.seconds:
                known.seconds[size] = self._seconds(known, own)
        ways = [s for size, s in known.seconds.items() if known.peak_nbytes(size) <= limit_nbytes]
        return min(ways, default=min(known.seconds.values()))

    def _offload_s(self, kind: StrategyKind, parent: StrategyKind, known: _Known) -> float:
        """What the update in host memory takes more than on the device; 0 if that is not known."""
        if kind.strategy.optimizer == parent.strategy.optimizer:
            return 0.0
        found = known.plan.simulation
        prices = Prices(Values(self._machine), found.mesh.world_size)
        away = replace(found.updated, tier=Tier.HOST.name)
        try:
            here_s, there_s = prices.update_s(found.updated), prices.update_s(away)
            return max(0.0, sum(prices.copies_s(away)) + there_s - here_s)
        except UsageError:
            return 0.0

    def fitting(self) -> Iterator[tuple[float, int, Candidate]]:
        """Seconds, number and candidate, of those that fit as far as is known."""
        for kind, known in self.known.items():
            at = self._rank[kind]
            for own in self.candidates(kind):
                if known.peak_nbytes(own.micro_batch) <= limit_of_plan(known.plan):
                    if own.micro_batch not in known.seconds:  # a simulation moved the line
                        known.seconds[own.micro_batch] = self._seconds(known, own)
                    yield known.seconds[own.micro_batch], at, own

    def _best_s(self) -> float:
        return min((seconds for seconds, _, _ in self.fitting()), default=float("inf"))

    def after(self, own: Candidate) -> Candidate | None:
        """The candidate with the next larger micro-batch."""
        ways = self.candidates(own.kind)
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
            if best_s == float("inf"):  # the smallest is told
                peak_nbytes = self.known[best.kind].peak_nbytes(best.micro_batch)
                again += [kind for kind, least in self.too_large.items() if least < peak_nbytes]
            if todo:
                self.simulate(todo[0])
            elif again:
                self.left_out.pop(again[0], None)
                self.too_large.pop(again[0], None)
                self.look(again[0])
            else:
                return None if best_s == float("inf") else best


def limit_of_plan(plan: Plan) -> int:
    """The limit of a plan in a search, which has one."""
    assert plan.limit_nbytes is not None
    return plan.limit_nbytes


def search_by_time(
    simulated: Callable[[Candidate], Plan],
    base: Mapping[str, Any],
    machine: MachineFile,
    *,
    samples: Mapping[int | None, int],
    can_checkpoint: bool,
) -> Fit:
    """The candidate with the smallest predicted time of a step among those that fit.

    ``simulated`` gives a candidate's plan with its time. ``samples``: of one rank in a step, by number of
    tensor ranks; None: as the configuration says.

    Raises:
        UsageError: the machine file lacks a number that every step needs.
    """
    groups = [kinds_of(tensor, can_checkpoint=can_checkpoint) for tensor in samples]
    kinds = [kind for group in groups for kind in group]
    search = _Search(simulated, machine, samples, kinds)
    for group in groups:
        search.look_at(group)
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
    if kind in search.too_large:
        why = (
            f"does not fit: its states alone take {search.too_large[kind] / 2**30:.2f} GiB or more"
        )
        return Judged(own, None, None, False, why)
    if kind in search.left_out:
        least_s = search.left_out[kind]
        why = f"takes {1e3 * least_s:.4g} ms or more: other kinds that do no more work take this"
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
        best_s = search.known[chosen.kind].seconds[chosen.micro_batch]
        why = f"slower by {seconds / best_s - 1:.1%}"
    return Judged(own, peak_nbytes, seconds, own in search.plans, why)
