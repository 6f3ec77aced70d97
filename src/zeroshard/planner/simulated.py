"""What a simulation of one rank found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zeroshard.comm.simulation import Histories, Message, diverged
from zeroshard.core.ledger import TEMPORARY
from zeroshard.core.mesh import Mesh
from zeroshard.engine.remedies import Run
from zeroshard.errors import UsageError
from zeroshard.metrics.step_report import MemoryRow
from zeroshard.planner.allocations import Holding, Moment
from zeroshard.planner.assumptions import SharedLayers
from zeroshard.planner.checkpoint_phases import CheckpointNeeds
from zeroshard.planner.prices import Updated
from zeroshard.planner.step_log import StepEvent


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a rank's collectives of one kind over one group move in one optimizer step.

    ``group``: "all ranks", "tensor", "shards" (a shard group), "replicas"... ``name``: the unit, or what
    is exchanged; "layers" for collectives that layers call. ``numel``: elements of the full tensors.
    ``sent_numel``: of these, what this rank sends to others, and ``sent_nbytes``: its bytes.
    """

    group: str
    op: str
    name: str
    calls: int
    numel: int
    sent_numel: int
    sent_nbytes: int


@dataclass(frozen=True)
class Simulation:
    """One rank of a run that was simulated.

    ``params_numel``: parameters that this rank works with, of which stage 3 keeps a shard between uses.
    ``memory``: rows as :meth:`zeroshard.Engine.memory_report` gives them: planned and counted bytes per
    category and tier. ``activations_nbytes``: the most bytes that all else held during the last step:
    activations, temporaries of operations, gradients before they are in a buffer. ``traffic``
    and ``messages`` are of the last step. ``bubble``: the part of a step in which ranks of the pipeline
    wait, if stages take equally long, a backward twice as long as a forward, and messages no time.
    ``in_flight``: the most micro-batches that this rank keeps activations of, counted once per pipeline
    stage. ``moments``: of each phase, the moment at which the device holds the most; "init" is
    everything before the first step. ``largest``: the largest storages at the highest of these moments of
    the last step. ``units``: their names. ``events``: what the rank held in the last step, and what it
    did if that was asked for, in order. ``updated``: what its update reads and writes. ``communicators``:
    that this rank would open on NCCL, besides the program's own. ``file_nbytes``: what its swap files
    reserve. ``swapped``: bytes that the step reads from them and writes. ``together``: of each phase, the
    most bytes of device and host memory at one time; they are one memory on CPU ranks. ``run``: what a
    failed allocation would know of it. ``kept``: names of the units that stage 3 has not freed after a
    forward, so that their backward does not gather them again. ``starts``: of each micro-batch, how many
    events come before it. ``histories``: the collectives of the last step over each group, in order, as
    hashes. ``checkpoint``: what saving and loading need, if that was asked for; then there are moments
    "save" and "load" too. ``experts``: those that ranks share.
    """

    mesh: Mesh
    rank: int
    params_numel: int
    memory: tuple[MemoryRow, ...]
    activations_nbytes: int
    traffic: tuple[Traffic, ...]
    messages: tuple[Message, ...]
    bubble: float
    in_flight: int
    moments: Mapping[str, Moment]
    largest: tuple[Holding, ...]
    units: tuple[str, ...]
    events: tuple[StepEvent, ...]
    updated: Updated
    communicators: int
    file_nbytes: int
    swapped: tuple[int, int]
    together: Mapping[str, int]
    run: Run
    starts: tuple[int, ...] = ()
    checkpoint: CheckpointNeeds | None = None
    kept: tuple[str, ...] = ()
    histories: Histories = field(default_factory=dict)
    experts: tuple[SharedLayers, ...] = ()

    @property
    def peak_nbytes(self) -> int:
        """The most bytes of everything on the device at one time of the last step."""
        return highest(self.moments)[1].device_nbytes

    @property
    def states_nbytes(self) -> int:
        """Bytes of parameters, gradients, masters and optimizer state on the device."""
        rows = [row for row in self.memory if row.category not in TEMPORARY]
        return sum(row.measured for row in rows if row.tier == "device")

    def nbytes(self, category: str, tier: str = "device") -> int:
        """Counted bytes of a category. Those of gradients and temporaries are peaks."""
        return sum(r.measured for r in self.memory if (r.category, r.tier) == (category, tier))

    def moved_numel(self, group: str, op: str) -> int:
        """Elements of the full tensors of all collectives ``op`` over ``group`` in a step."""
        return sum(row.numel for row in self.traffic if (row.group, row.op) == (group, op))


OUTSIDE_STEP = ("init", "save", "load")
"""Phases that are not of a step."""


def highest(moments: Mapping[str, Moment]) -> tuple[str, Moment]:
    """The phase of a step whose peak is highest, and that moment."""
    phases = [item for item in moments.items() if item[0] not in OUTSIDE_STEP]
    return max(phases, key=lambda item: item[1].device_nbytes)


def check_order(of_ranks: Sequence[Simulation]) -> None:
    """Check that simulated ranks call the same collectives over the groups that they share."""
    wrong = diverged({found.rank: found.histories for found in of_ranks})
    if wrong:
        raise UsageError(
            f"{wrong[0]}. The ranks of a run would wait for each other there. Let all ranks make the "
            "same calls of the engine, in the same order."
        )
