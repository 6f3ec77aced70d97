"""What a plan of a run contains: its memory, its traffic and its time, as data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, Protocol

from zeroshard.core.mesh import Mesh
from zeroshard.core.tiers import Tier
from zeroshard.planner.allocations import Held, Moment
from zeroshard.planner.assumptions import NOT_MODELLED, PROCESS_NBYTES
from zeroshard.planner.gpu_kernels import Target
from zeroshard.planner.simulated import OUTSIDE_STEP, Simulation, highest
from zeroshard.planner.step_log import StepEvent
from zeroshard.planner.step_time import StepTime


@dataclass(frozen=True)
class StageNeeds:
    """What one rank of a pipeline stage needs. ``in_flight``: micro-batches whose activations it keeps.

    ``sent_numel`` and ``sent_nbytes``: what it sends to other stages in a step. ``kept_units``: as for a
    plan.
    """

    rank: int
    parameters: int
    states_nbytes: int
    peak_nbytes: int
    in_flight: int
    sent_numel: int
    sent_nbytes: int
    kept_units: tuple[str, ...]


@dataclass(frozen=True)
class Change:
    """A change with which the run fits, by a simulation of it.

    ``line``: of the configuration as JSON, or of the program. ``peak_nbytes``: with it, and
    ``freed_nbytes``: how much lower that is. ``slowdown``: how much longer a step takes, as a part of it;
    ``predicted``: on the machine of the plan, otherwise it is assumed.
    """

    text: str
    line: str
    peak_nbytes: int
    freed_nbytes: int
    slowdown: float
    predicted: bool


@dataclass(frozen=True)
class Plan:
    """What one rank of a run needs. ``limit_nbytes``: device memory of a rank; None: not given.

    ``own_batch``: the batch came with the model. ``stages``: one rank of each pipeline stage; none
    without a pipeline. ``simulation`` is of the one with the highest peak.
    ``time``: the seconds of a step; None: no machine was given. ``stage_times``: of each of ``stages``.
    ``of_stages``: their simulations; without a pipeline, that of rank 0. ``target``: the kind of device
    whose operations were planned.
    ``one_more_nbytes``: the peak with one more sample in the micro-batch; None: not asked for.
    ``peak_phase`` and ``peak_nbytes``: the highest peak on the device, ``init`` included; on a serial
    machine, which is a CPU, of device and host together, as they are one memory there. ``assumed``: what
    the planner chose itself. ``changes``: each makes the run fit; None: they were not looked for.
    ``ranks_per_node``: None: not given. ``config``: key, value and origin of every key, without secrets.
    """

    model: str
    mesh: Mesh
    stage: int
    micro_batch: int
    limit_nbytes: int | None
    simulation: Simulation
    assumed: tuple[str, ...]
    not_modelled: tuple[str, ...] = NOT_MODELLED
    one_more_nbytes: int | None = None
    own_batch: bool = False
    time: StepTime | None = None
    target: Target = "cpu"
    stages: tuple[StageNeeds, ...] = ()
    stage_times: tuple[StepTime, ...] = ()
    of_stages: tuple[Simulation, ...] = ()
    changes: tuple[Change, ...] | None = None
    ranks_per_node: int | None = None
    config: tuple[tuple[str, str, str], ...] = ()

    @property
    def peaks(self) -> Mapping[str, int]:
        """The most bytes of each phase that count for the limit."""
        found = self.simulation
        if self.time is not None and self.time.serial:
            return found.together
        return {name: moment.device_nbytes for name, moment in found.moments.items()}

    @property
    def peak_phase(self) -> str:
        """The phase with the highest peak."""
        return max(self.peaks, key=self.peaks.__getitem__)

    @property
    def peak_nbytes(self) -> int:
        """The most bytes at one time that count for the limit."""
        return max(self.peaks.values())

    @property
    def step_phase(self) -> str:
        """The phase of a step with the highest peak."""
        peaks = {name: nbytes for name, nbytes in self.peaks.items() if name not in OUTSIDE_STEP}
        return max(peaks, key=peaks.__getitem__)

    @property
    def spare_nbytes(self) -> int | None:
        """The limit minus the peak; negative if the run does not fit."""
        return None if self.limit_nbytes is None else self.limit_nbytes - self.peak_nbytes

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within the limit; None without a limit."""
        spare = self.spare_nbytes
        return None if spare is None else spare >= 0

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON. Sizes in bytes, traffic in elements."""
        found = self.simulation
        name, top = highest(found.moments)
        read, written = found.swapped
        return {
            "model": self.model, "target": self.target, "parameters": found.params_numel,
            "mesh": self.mesh.text_with_experts, "ranks": self.mesh.world_size, "rank": found.rank,
            "ranks_per_node": self.ranks_per_node,
            "stage": self.stage, "micro_batch": self.micro_batch,
            "fits": self.fits, "limit_nbytes": self.limit_nbytes,
            "spare_nbytes": self.spare_nbytes, "peak_nbytes": self.peak_nbytes,
            "one_more_nbytes": self.one_more_nbytes,
            "process_nbytes": PROCESS_NBYTES,
            "peak_phase": self.peak_phase, "states_nbytes": found.states_nbytes,
            "step_peak": {
                "phase": name, "op": top.op, "module": top.module, "unit": self.unit_of(top),
                "line": top.line, "nbytes": self.peaks[self.step_phase],
            },
            "memory": [asdict(row) for row in found.memory],
            "phases": {name: _moment(moment) for name, moment in found.moments.items()},
            "timeline": columns(timeline(found.events)),
            "largest": [asdict(holding) for holding in found.largest],
            "pipeline_stages": self._stages_as_dicts(),
            "kept_units": list(found.kept),
            "traffic": [asdict(row) for row in found.traffic],
            "disk": {
                "file_nbytes": found.file_nbytes, "read_nbytes": read, "written_nbytes": written,
            },
            "changes": None if self.changes is None else list(map(asdict, self.changes)),
            "checkpoint": None if found.checkpoint is None else asdict(found.checkpoint),
            "time": None if self.time is None else self.time.as_dict(),
            "assumed": list(self.assumed), "not_modelled": list(self.not_modelled),
        }  # fmt: skip

    def _stages_as_dicts(self) -> list[dict[str, Any]]:
        times = [
            {"compute_s": each.timing.compute_s, "waits_s": each.timing.stages_s}
            for each in self.stage_times
        ]
        return [
            asdict(stage) | (times[at] if times else {}) for at, stage in enumerate(self.stages)
        ]

    def unit_of(self, moment: Moment) -> str:
        """The unit in which a moment is; "" if it is in none."""
        units = sorted(self.simulation.units, key=len, reverse=True)
        at = moment.module
        return next((u for u in units if at == u or at.startswith(f"{u}.")), "")


def _moment(moment: Moment) -> dict[str, Any]:
    held = [
        {"category": category, "tier": tier, "nbytes": nbytes}
        for (category, tier), nbytes in moment.held.items()
        if nbytes
    ]
    return {
        "device_nbytes": moment.device_nbytes, "activations_nbytes": moment.activations_nbytes,
        "op": moment.op, "module": moment.module, "line": moment.line, "held": held,
    }  # fmt: skip


MOMENTS = 240
"""Moments of a timeline."""


def timeline(events: Iterable[StepEvent], count: int = MOMENTS) -> list[tuple[int, Held]]:
    """The highest of each of ``count`` runs of consecutive allocations, with its number in the step.

    A run ends where a phase does, so there may be some more.
    """
    all_held = [event for event in events if isinstance(event, Held)]
    size = max(1, math.ceil(len(all_held) / count))
    found: list[tuple[int, Held]] = []
    begin = 0
    for at, held in enumerate(all_held):
        last = at + 1 == len(all_held)
        if last or at + 1 - begin == size or all_held[at + 1].phase != held.phase:
            highest = max(range(begin, at + 1), key=lambda n: all_held[n].device_nbytes)
            found.append((highest, all_held[highest]))
            begin = at + 1
    return found


def columns(points: list[tuple[int, Held]]) -> dict[str, Any]:
    """A timeline as columns of equal length, for JSON.

    ``held``: bytes of each category of the device, and ``away`` of those in other tiers, by
    "category, tier". What no category has is ``others``.
    """
    device = Tier.DEVICE.name
    keys = list(dict.fromkeys(key for _, held in points for key, n in held.held.items() if n))
    return {
        "allocation": [at for at, _ in points],
        "phase": [held.phase for _, held in points],
        "device_nbytes": [held.device_nbytes for _, held in points],
        "others": [held.activations_nbytes for _, held in points],
        "held": {
            category: [held.held.get((category, tier), 0) for _, held in points]
            for category, tier in keys
            if tier == device
        },
        "away": {
            f"{category}, {tier}": [held.held.get((category, tier), 0) for _, held in points]
            for category, tier in keys
            if tier != device
        },
    }


def blocks(points: list[tuple[int, Held]]) -> str:
    """A timeline as one character for each moment, eight heights up to the peak.

    A space separates phases.
    """
    top = max((held.device_nbytes for _, held in points), default=0) or 1
    heights = [(held.phase, min(7, 8 * held.device_nbytes // top)) for _, held in points]
    phases = (run for _, run in groupby(heights, key=itemgetter(0)))
    return " ".join("".join("▁▂▃▄▅▆▇█"[height] for _, height in run) for run in phases)


class Audience(Protocol):
    """Is told of each simulation when it begins and when it has ended."""

    def begins(self, what: str) -> None:
        """A simulation begins. ``what``: the configuration that is simulated, in words."""

    def ended(self, plan: Plan | None) -> None:
        """The simulation that began last has ended. None: the configuration is not possible."""


class Silent:
    """An audience that tells nobody."""

    def begins(self, what: str) -> None:
        """Nothing is told."""

    def ended(self, plan: Plan | None) -> None:
        """Nothing is told."""


SILENT = Silent()
