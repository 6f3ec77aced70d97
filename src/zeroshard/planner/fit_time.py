"""Searches the configuration with the smallest predicted time of a step, by few simulations.

A kind is a stage, with or without offload and checkpointing, on a mesh. One simulation of each kind that
may win gives its bytes and the events of its step. How both grow with the micro-batch is the same for
kinds with the same activations, so it is read from two simulations that differ in one sample: the peak of
each phase is a line, and so are the work of each operation and the bytes of each collective of a layer.
Those of the engine do not depend on the micro-batch. With this, hundreds of candidates are timed without
simulating them. Of a pipeline, one rank of each stage has these lines, with the micro-batches that the
schedule 1F1B has in flight there.

What cannot win is not simulated. A kind whose states alone are too large does not fit; they follow from
those of another stage. Offload and checkpointing add work and take none away, so a kind whose time cannot
be below that of the same kind without them is left out if something faster fits. Kinds with the same
activations on the same mesh do the same operations, whatever they gather and reduce:
what these take is the least for all of them, with or without checkpointing. The winner is simulated, and
so is the next larger micro-batch; if one of them is not what the lines said, the next best candidate is
the winner. If nothing fits by the lines, those that are too large by no more than the lines are known to
be off are simulated, the fastest first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from zeroshard.config.machine_file import MachineFile, Values
from zeroshard.core.texts import gib_text
from zeroshard.core.tiers import Tier
from zeroshard.errors import UsageError
from zeroshard.planner.candidates import (
    STRATEGIES,
    Candidate,
    Fit,
    Judged,
    Sizes,
    Strategy,
    StrategyKind,
    next_larger,
    possible,
    refused_by_schedule,
)
from zeroshard.planner.growth import (
    HIGH,
    LOW,
    Growth,
    least_states_nbytes,
    offloadable_nbytes,
    without_engine,
)
from zeroshard.planner.plan import Plan
from zeroshard.planner.prices import Grown, Prices
from zeroshard.planner.simulated import Simulation
from zeroshard.planner.step_time import stage_seconds

NEAR, NEAR_OF_ONE = 0.05, 0.2
"""How much of a peak that lines give may be too much: of several samples, and of one, for which torch
takes other operations."""

MOST_NEAR = 8
"""Simulations of candidates that lines put this little above the limit, where nothing is below it."""

SAME = 0.99
"""The part of the time of a stage's operations that those of other stages take for certain."""


def kinds_of(sizes: Sizes, *, can_checkpoint: bool = True) -> list[StrategyKind]:
    """Every kind of a mesh, after those that it adds to. Of equally fast ones the first is chosen."""
    choices = (False, True) if can_checkpoint else (False,)
    return [
        StrategyKind(strategy, on, sizes)
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


@dataclass
class _Known:
    """A kind that was simulated with ``size`` samples. ``whole``: the samples of a step. ``growths``: of
    each pipeline stage; None: not known. By size: ``peaks`` of simulations; ``seconds`` of what fits or
    may fit, and of what is the fastest if memory is no limit."""

    plan: Plan
    growths: Sequence[Growth] | None
    size: int
    whole: int
    peaks: dict[int, int] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)

    def peak_nbytes(self, size: int) -> int:
        """The peak with ``size`` samples: of a simulation, or on a line.

        A stage that runs all its forwards before its first backward may keep no sums of gradients beside
        the activations of all of them, so their bytes do not count in it. So does a step of one
        micro-batch.
        """
        if size in self.peaks:
            return self.peaks[size]
        if self.growths is None:
            return self.plan.peak_nbytes
        stages, count = self.plan.of_stages, self.whole // size
        spared = [
            found.nbytes("gradients") if count == len(stages) - at else 0
            for at, found in enumerate(stages)
        ]
        known = [at for at in self.peaks.items() if self.whole // at[0] != len(stages)]
        known = sorted(known, key=lambda at: abs(at[0] - size))[:2]
        if len(known) == 2:
            (near, nbytes), (far, other) = known
            line = round(nbytes + (size - near) * (other - nbytes) / (far - near))
            return line - spared[0]
        added = size - self.size
        return max(
            moment.device_nbytes + added * growth.phases.get(name, 0) - less
            for found, growth, less in zip(stages, self.growths, spared, strict=True)
            for name, moment in found.moments.items()
        )


class _Search:
    """What is known of every kind and candidate."""

    def __init__(
        self,
        simulated: Callable[[Candidate], Plan],
        machine: MachineFile,
        samples: Mapping[Sizes, int],
        kinds: Sequence[StrategyKind],
    ) -> None:
        self._simulated = simulated
        self._machine = machine
        self._samples = samples
        self._rank = {kind: at for at, kind in enumerate(kinds)}
        self.plans: dict[Candidate, Plan] = {}
        self.known: dict[StrategyKind, _Known] = {}
        # Seconds that no candidate of the kind is below, and the same if memory were no limit.
        self.left_out: dict[StrategyKind, tuple[float, float]] = {}
        self.too_large: dict[StrategyKind, int] = {}  # the least bytes of its states
        self.untimed: dict[StrategyKind, str] = {}
        self._growths: dict[tuple[Sizes, bool], Sequence[Growth]] = {}
        self._model_s: dict[tuple[Sizes, bool], float] = {}  # of operations that all stages do
        self.simulations = 0
        self._tried_near = 0

    def candidates(self, kind: StrategyKind) -> list[Candidate]:
        """Those of a kind that can run, by increasing micro-batch."""
        return possible(kind, self._samples[kind.sizes])

    def look_at(self, kinds: Sequence[StrategyKind]) -> None:
        """Look at the kinds of a mesh, first at one that is likely to be fast."""
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
            tensor = kind.sizes.tensor or plan.mesh.tensor
            nbytes = least_states_nbytes(
                plan.of_stages, other.strategy.stage, kind.strategy, tensor,
                kind.sizes.pipeline or 1, kind.sizes.expert or plan.mesh.expert,
            )  # fmt: skip
            found, limit_nbytes = max(found, nbytes), limit_of_plan(plan)
        return found, limit_nbytes

    def look(self, kind: StrategyKind) -> None:
        """Simulate a kind with few samples and time its candidates, unless none can be the fastest.

        Raises:
            UsageError: the machine file lacks a number, and no kind could be timed before.
        """
        least_s, free_s = self._least_s(kind)
        if least_s >= self._best_s():
            self.left_out[kind] = least_s, free_s
            return
        try:
            found = self._look(kind)
            ways = self.candidates(kind)
            for own in ways:
                fits = found.peak_nbytes(own.micro_batch) <= limit_of_plan(found.plan)
                if fits or own in _fastest(ways):
                    found.seconds[own.micro_batch] = self._seconds(found, own)
            self._note_model(kind, found, _fastest(ways))
        except UsageError as error:
            if not self.known:
                raise
            self.untimed[kind] = str(error).partition(", which")[0]
            return
        self.known[kind] = found

    def _look(self, kind: StrategyKind) -> _Known:
        strategy, on, sizes = kind
        whole, stages = self._samples[sizes], sizes.pipeline or 1
        if whole == 1:
            return _Known(self._run(Candidate(strategy, on, 1, 1, sizes)), None, 1, 1)
        count = stages + 1  # with more, a stage holds no more
        low = self._run(Candidate(strategy, on, LOW, count, sizes))
        if (sizes, on) not in self._growths:
            high = self._run(Candidate(strategy, on, HIGH, count, sizes))
            self._growths[sizes, on] = list(map(Growth.between, low.of_stages, high.of_stages))
        return _Known(low, self._growths[sizes, on], LOW, whole)

    def _note_model(self, kind: StrategyKind, known: _Known, fastest: Sequence[Candidate]) -> None:
        """Note what the model alone takes. ``fastest``: one of these is, if memory is no limit."""
        stage = kind.strategy.stage
        on_device = known.plan.simulation.updated.tier == Tier.DEVICE.name
        # a higher stage updates less on a rank than stage 0, and as much as other higher ones
        with_update = stage > 0 and on_device
        model = [without_engine(found, with_update=with_update) for found in known.plan.of_stages]
        seconds = SAME * min(self._seconds(known, own, model) for own in fastest)
        key = kind.sizes, kind.checkpointing
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

    def _seconds(
        self, known: _Known, own: Candidate, stages: Sequence[Simulation] | None = None
    ) -> float:
        """Seconds of a candidate's step. ``stages``: the step that counts; None: that of its kind."""
        chosen = known.plan.of_stages if stages is None else stages
        grown: list[Grown | None] = [None] * len(chosen)
        if known.growths is not None:
            grown = [growth.at(own.micro_batch) for growth in known.growths]
        count = own.accumulation
        return stage_seconds(chosen, self._machine, micro_batches=count, grown=grown)

    def _least_s(self, kind: StrategyKind) -> tuple[float, float]:
        """What no candidate of the kind takes less than, and the same if memory were no limit.

        By what kinds take that it adds to or shares work with.
        """
        model = ((kind.sizes, on) for on in (False, kind.checkpointing))
        free_s = max(self._model_s.get(key, 0.0) for key in model)
        for parent in less_than(kind):
            if parent in self.left_out:
                free_s = max(free_s, self.left_out[parent][1])
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
        spared = max(offloadable_nbytes(own, kind.strategy) for own in known.plan.of_stages)
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
        prices = Prices(Values(self._machine), known.plan.mesh.world_size)
        here = [found.updated for found in known.plan.of_stages]
        away = [replace(updated, tier=Tier.HOST.name) for updated in here]
        try:
            here_s = max(map(prices.update_s, here))
            there_s = max(sum(prices.copies_s(own)) + prices.update_s(own) for own in away)
            return max(0.0, there_s - here_s)
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
        return next_larger(own, self.candidates(own.kind))

    def smallest(self) -> Candidate:
        """The candidate with the smallest peak."""
        every = [(self.known[kind], own) for kind in self.known for own in self.candidates(kind)]
        return min(every, key=lambda at: at[0].peak_nbytes(at[1].micro_batch))[1]

    def near(self) -> Candidate | None:
        """The fastest of those that were not simulated and may fit although their lines say no."""
        found = []
        for kind, known in self.known.items():
            limit_nbytes = limit_of_plan(known.plan)
            for own in self.candidates(kind):
                over = known.peak_nbytes(own.micro_batch) / limit_nbytes - 1
                if own not in self.plans and over <= (
                    NEAR_OF_ONE if own.micro_batch == 1 else NEAR
                ):
                    found.append((over, self._seconds(known, own), own))
        left = MOST_NEAR - self._tried_near
        nearest = sorted(found, key=lambda at: at[0])[: max(left, 0)]
        return min(nearest, key=lambda at: at[1])[2] if nearest else None

    def settle(self) -> Candidate | None:
        """The fastest candidate that fits, simulated like the next larger one; None if nothing fits."""
        while True:
            best_s, _, best = min(
                self.fitting(), key=lambda at: at[:2], default=(float("inf"), 0, self.smallest())
            )
            fits = best_s < float("inf")
            if todo := self._not_simulated(best, self.after(best) if fits else None):
                self.simulate(todo[0])
            elif again := self._worth_a_look(best, best_s):
                self.left_out.pop(again[0], None)
                self.too_large.pop(again[0], None)
                self.look(again[0])
            elif fits:
                return best
            elif (near := self.near()) is not None:
                self._tried_near += 1
                self.simulate(near)
            else:
                return None

    def _not_simulated(self, *candidates: Candidate | None) -> list[Candidate]:
        return [own for own in candidates if own is not None and own not in self.plans]

    def _worth_a_look(self, best: Candidate, best_s: float) -> list[StrategyKind]:
        """Kinds that were passed over and may be better than the best: faster; smaller if none fits."""
        again = [kind for kind, (least_s, _) in self.left_out.items() if least_s < best_s]
        if best_s == float("inf"):  # the smallest is told
            peak_nbytes = self.known[best.kind].peak_nbytes(best.micro_batch)
            again += [kind for kind, least in self.too_large.items() if least < peak_nbytes]
        return again


def _fastest(ways: Sequence[Candidate]) -> Sequence[Candidate]:
    """One of these is the fastest of a kind, if memory is no limit.

    Larger micro-batches are faster, but a pipeline waits longer for fewer ones.
    """
    return ways if (ways[-1].sizes.pipeline or 1) > 1 else ways[-1:]


def limit_of_plan(plan: Plan) -> int:
    """The limit of a plan in a search, which has one."""
    assert plan.limit_nbytes is not None
    return plan.limit_nbytes


def search_by_time(
    simulated: Callable[[Candidate], Plan],
    base: Mapping[str, Any],
    machine: MachineFile,
    *,
    samples: Mapping[Sizes, int],
    can_checkpoint: bool,
) -> Fit:
    """The candidate with the smallest predicted time of a step among those that fit.

    ``simulated`` gives a candidate's plan with its time. ``samples``: of one rank in a step, by mesh.

    Raises:
        UsageError: the machine file lacks a number that every step needs.
    """
    groups = [kinds_of(sizes, can_checkpoint=can_checkpoint) for sizes in samples]
    kinds = [kind for group in groups for kind in group]
    search = _Search(simulated, machine, samples, kinds)
    for group in groups:
        search.look_at(group)
    chosen = search.settle()
    best = chosen or search.smallest()
    judged = [
        _judged(search, kind, own, chosen) for kind in kinds for own in search.candidates(kind)
    ]
    judged += refused_by_schedule(kinds, samples)
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
        why = f"does not fit: its states alone take {gib_text(search.too_large[kind])} or more"
        return Judged(own, None, None, False, why)
    if kind in search.left_out:
        least_s, _ = search.left_out[kind]
        why = f"takes {1e3 * least_s:.4g} ms or more: other kinds that do no more work take this"
        return Judged(own, None, None, False, why)
    known, size = search.known[kind], own.micro_batch
    peak_nbytes, seconds = known.peak_nbytes(size), known.seconds.get(size)
    over = peak_nbytes - limit_of_plan(known.plan)
    if own == chosen:
        why = "chosen"
    elif over > 0:
        why = f"does not fit: {gib_text(over)} too much"
    elif chosen is None or seconds is None:
        why = "fits"
    else:
        best_s = search.known[chosen.kind].seconds[chosen.micro_batch]
        why = f"slower by {seconds / best_s - 1:.1%}"
    return Judged(own, peak_nbytes, seconds, own in search.plans, why)
