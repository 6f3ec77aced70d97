"""Writes down, in order, what a simulated rank does in one step: operations, collectives, memory."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from zeroshard.comm.collectives import RecordedComm
from zeroshard.comm.entries import Entry
from zeroshard.comm.recorder import Recorder
from zeroshard.comm.simulation import CallLog, Histories
from zeroshard.comm.stage_messages import StageMessages
from zeroshard.planner.allocations import Allocations, Held
from zeroshard.planner.work import Work, work_of
from zeroshard.zero.unit import Unit


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of torch. ``phase``: "forward", "backward" or "step". ``module``: "" if not known."""

    phase: str
    work: Work
    module: str = ""


@dataclass(frozen=True, slots=True)
class Begun:
    """A collective that starts. ``key``: the same for its :class:`Ended`, and in every step.

    ``op``: "all_gather", "reduce_scatter"... ``nbytes``: of the whole tensor. ``ranks``: of the group.
    Of a message between pipeline stages ``op`` is :data:`MESSAGE`, and ``ranks`` sender and receiver.
    """

    key: str
    op: str
    nbytes: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """The device waits for the collective with this key that was begun last."""

    key: str


MESSAGE = "message"
"""The operation of a message between pipeline stages."""

StepEvent: TypeAlias = Operation | Begun | Ended | Held


@dataclass
class _Order:
    """Collectives over one group: how many, and a hash of their names, sizes and dtypes in order."""

    name: str
    ranks: tuple[int, ...]
    calls: int = 0
    hash: Any = field(default_factory=partial(hashlib.blake2b, digest_size=8))


@dataclass
class StepLog:
    """Events of a step, from the dispatcher and the recorders, and what layers call.

    The memory of the last step and the order of collectives are always logged, operations and collectives
    if they are asked for.
    """

    calls: CallLog = field(default_factory=CallLog)
    events: list[StepEvent] = field(default_factory=list)
    starts: list[int] = field(
        default_factory=list
    )  # of each micro-batch: the number of events before
    kept: set[str] = field(default_factory=set)  # units that are gathered when a backward begins
    _orders: dict[int, _Order] = field(default_factory=dict)  # by id of the recorder
    _watch: Allocations | None = None  # knows the phase
    _ranks: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by id of the recorder

    def begin_memory(self, watch: Allocations) -> None:
        """Log what the device holds from now on."""
        watch.looked = self.events.append

    def begin_order(self, comms: Sequence[RecordedComm]) -> None:
        """Follow the order of the collectives of these communicators from now on."""
        several = [comm for comm in comms if len(comm.ranks) > 1]
        self._orders = {
            id(comm.recorder): _Order(comm.recorder.group, comm.ranks) for comm in several
        }
        for comm in several:
            comm.recorder.listener = self

    def histories(self) -> Histories:
        """The collectives so far over each group, in order, as hashes."""
        return {(o.name, o.ranks): f"{o.calls}-{o.hash.hexdigest()}" for o in self._orders.values()}

    def begin(
        self,
        comms: Sequence[RecordedComm],
        watch: Allocations,
        messages: StageMessages | None = None,
    ) -> None:
        """Log operations from now on, with what these communicators do. ``watch`` knows the phase.

        ``messages``: between pipeline stages.
        """
        listened = [(comm.recorder, comm.ranks) for comm in comms]
        if messages is not None:
            listened += [(made, tuple(channel)) for channel, made in messages.recorders.items()]
        self._ranks = {id(recorder): tuple(ranks) for recorder, ranks in listened}
        for recorder, _ in listened:
            recorder.listener = self
        self._watch = watch

    def begin_micro_batch(self) -> None:
        """The forward of a micro-batch begins."""
        self.starts.append(len(self.events))

    def begin_backward(self, units: Sequence[Unit]) -> None:
        """A backward begins. Those of ``units`` that are gathered now were kept from a forward."""
        self.kept.update(unit.name for unit in units if unit.is_allocated and not unit.resident)

    def note(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Log a call of the dispatcher."""
        called = self.calls.note(func, args, result)
        if self._watch is None:
            return
        if called is not None:
            self._note_layer(*called, work_of(func, args, result))
        elif func.namespace == "aten":
            work, module = work_of(func, args, result), self._watch.here().module
            self.events.append(Operation(self._watch.phase, work, module))

    def _note_layer(self, op: str, ranks: tuple[int, ...], work: Work) -> None:
        """A collective that a layer calls, and whose result the next operation reads."""
        key = f"{op}{_OF_LAYERS}"
        self.events += [Begun(key, op, work.largest_nbytes, ranks), Ended(key)]

    def entered(self, recorder: Recorder, entry: Entry) -> None:
        """A collective of the engine starts."""
        assert entry.dtype is not None  # set when it was entered
        if (order := self._orders.get(id(recorder))) is not None:
            order.calls += 1
            order.hash.update(f"{entry.op} {entry.name} {entry.numel} {entry.dtype}\n".encode())
        if self._watch is None:
            return
        op, size = entry.op.partition(" ")[0], entry.dtype.itemsize
        ranks = self._ranks[id(recorder)]
        self.events.append(Begun(_key(recorder, entry), op, entry.numel * size, ranks))

    def finished(self, recorder: Recorder, entry: Entry) -> None:
        """The device waits for a collective of the engine."""
        if self._watch is None:
            return
        self.events.append(Ended(_key(recorder, entry)))


_OF_LAYERS = " of layers"


def is_of_layers(key: str) -> bool:
    """Whether the key is of a collective that a layer calls, not the engine."""
    return key.endswith(_OF_LAYERS)


def _key(recorder: Recorder, entry: Entry) -> str:
    return f"{recorder.group}: {entry.op} {entry.name}"
