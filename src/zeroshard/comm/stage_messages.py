"""Messages between the ranks of a pipeline, recorded as collectives are.

A *channel* is all that one rank of a pipeline sends to another one, in order. Each of the two has a
:class:`~zeroshard.comm.recorder.Recorder` of the channel. The sender records a message when it starts to
send it, the receiver when it starts to receive it. torch matches the messages of a channel by their
order, so both records are equal as far as both have come. The watchdog can then follow a channel as a
group of two ranks: it sees that a rank waits for message 7, and that the other rank has started 6.

Messages of CPU ranks on one host go through shared memory (:mod:`zeroshard.comm.shm`), others
through torch's process group. What a message costs the host besides: one record, and two assignments
around its wait.

[Note: postponed receives] A receive whose shapes have not arrived yet is *postponed*: it starts at the
latest when somebody waits for it. torch's schedules ask for a receive long before they need it, and must
not wait for the sender then. As messages match by their order, all later receives of the channel are
postponed behind it, and start in the order in which they were asked for. This cannot block: the sender
starts all its messages in that order, and does not wait for one before it starts the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.comm.collectives import Handle
from zeroshard.comm.recorder import Item, Recorder
from zeroshard.comm.shm import ShmLink


class Channel(NamedTuple):
    """The two ends of a channel, as global ranks."""

    source: int
    target: int

    @property
    def name(self) -> str:
        """The same on both ends."""
        return f"messages from rank {self.source} to rank {self.target}"


def channels_of(ranks: Sequence[int], rank: int) -> list[Channel]:
    """The channels of ``rank`` with its neighbours in a pipeline of ``ranks``, which are in a ring.

    >>> [(channel.source, channel.target) for channel in channels_of([0, 2, 4], 2)]
    [(0, 2), (2, 0), (2, 4), (4, 2)]
    """
    at, size = ranks.index(rank), len(ranks)
    others = sorted({ranks[at - 1], ranks[(at + 1) % size]} - {rank})
    found = [
        channel for other in others for channel in (Channel(other, rank), Channel(rank, other))
    ]
    return sorted(found)


@dataclass(slots=True, eq=False)
class _Line:
    """One channel, as this rank uses it.

    ``at``: the peer in the process group. ``link``: through shared memory; None: through the process
    group. ``postponed``: the receives of [Note: postponed receives] that have not started.
    """

    recorder: Recorder
    peer: int
    at: int
    link: ShmLink | None
    sends: bool
    postponed: deque[_Postponed] = field(default_factory=deque)

    def record(self, name: str, tensor: Tensor) -> Item:
        """Record one message. To be called right before it starts."""
        numel = tensor.numel()
        entry = self.recorder.entries("message")[name]
        return self.recorder.enter(entry, tensor, numel, numel if self.sends else 0)


class _Operation(dist.P2POp):
    """What torch's schedules start by calling its attribute ``op``.

    torch's constructor looks up ranks that are known here, which takes longer than all else.
    """

    def __new__(cls, *_: Any) -> _Operation:
        return object.__new__(cls)

    def __init__(
        self, op: Callable[..., Any], tensor: Tensor, group: dist.ProcessGroup, line: _Line
    ) -> None:
        self.op = op
        self.tensor = tensor
        self.group = group
        self.peer, self.group_peer, self.tag = line.peer, line.at, 0


class StageMessages:
    """The messages of this rank in the process group of its pipeline.

    ``recorders``: of each channel that this rank is an end of. All tensors of a message have one name.
    ``links``: of the channels whose messages go through shared memory.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        recorders: Mapping[Channel, Recorder],
        links: Mapping[Channel, ShmLink] | None = None,
    ) -> None:
        self.group = group
        self.recorders = dict(recorders)
        rank = dist.get_rank()
        self._to: dict[int, _Line] = {}
        self._from: dict[int, _Line] = {}
        for channel, recorder in self.recorders.items():
            sends = channel.source == rank
            peer = channel.target if sends else channel.source
            at, link = dist.get_group_rank(group, peer), (links or {}).get(channel)
            line = _Line(recorder, peer, at, link, sends)
            (self._to if sends else self._from)[peer] = line
        self._arriving: list[tuple[Recorder, Item]] = []

    @classmethod
    def unwatched(cls, group: dist.ProcessGroup) -> StageMessages:
        """With recorders in private memory."""
        channels = channels_of(dist.get_process_group_ranks(group), dist.get_rank())
        return cls(group, {channel: Recorder(channel.name) for channel in channels})

    def sends(self, name: str, tensors: Sequence[Tensor], target: int) -> list[dist.P2POp]:
        """The operations that send ``tensors``, for torch to start."""
        line, group = self._to[target], self.group
        made: list[dist.P2POp] = []
        for tensor in tensors:
            if tensor.device.type == "cpu":
                start = partial(self._start_send, line, name)
                made.append(_Operation(start, tensor, group, line))
            else:  # torch batches those that it knows, and a wait does not block the host
                made.append(dist.P2POp(dist.isend, tensor, target, group))
                line.record(name, tensor)
        return made

    def receives(self, name: str, tensors: Sequence[Tensor], source: int) -> list[dist.P2POp]:
        """The operations that receive into ``tensors``, for torch to start."""
        line, group = self._from[source], self.group
        made: list[dist.P2POp] = []
        for tensor in tensors:
            if tensor.device.type == "cpu":
                start = partial(self._receive_in_turn, line, name)
                made.append(_Operation(start, tensor, group, line))
            else:
                made.append(dist.P2POp(dist.irecv, tensor, source, group))
                self._arriving.append((line.recorder, line.record(name, tensor)))
        return made

    def receives_later(
        self, name: str, shapes: Shapes, make: Callable[[], Sequence[Tensor]], source: int
    ) -> list[dist.P2POp]:
        """The operation that receives into the tensors of ``make()``, which is called after ``shapes``
        have arrived. Only on the CPU. See [Note: postponed receives].
        """
        line = self._from[source]
        start = partial(self._postpone, line, name, shapes, make)
        operation: dist.P2POp = _Operation(start, shapes.packet, self.group, line)
        return [operation]

    def send(self, name: str, tensor: Tensor, target: int, tag: int) -> Handle:
        """Start to send a tensor now."""
        return self._start_send(self._to[target], name, tensor, tag=tag)

    def receive(self, name: str, tensor: Tensor, source: int) -> Handle:
        """Start to receive into a tensor, as soon as all receives before it have started."""
        return self._receive_in_turn(self._from[source], name, tensor)

    def receive_shapes(self, name: str, packet: Tensor, source: int, tag: int) -> Shapes:
        """Start to receive shapes, as soon as all receives before it have started."""
        line, shapes = self._from[source], Shapes(packet)

        def start() -> list[Handle]:
            shapes.message = self._start_receive(line, name, packet, tag)
            return []

        shapes.started = _in_turn(line, start, None)
        return shapes

    def note_arrivals(self) -> None:
        """On a device: note that what was received so far has arrived when the stream reaches this."""
        if self._arriving:
            for recorder, item in self._arriving:
                recorder.note_pending(item)
            self._arriving.clear()

    def forget_postponed(self) -> None:
        """Forget receives that never started, after a step that ended in the middle."""
        for line in self._from.values():
            line.postponed.clear()

    def abort(self) -> None:
        """Make the waits for messages through shared memory fail now, here and on the other ends."""
        for line in (*self._to.values(), *self._from.values()):
            if line.link is not None:
                line.link.abort()

    def close(self) -> None:
        """Send nothing more, and remove the files of the recordings."""
        for line in (*self._to.values(), *self._from.values()):
            if line.link is not None:
                line.link.close()
        for recorder in self.recorders.values():
            recorder.close()

    # What torch calls with ``group`` and the peer by name. Both are those of the line.

    def _start_send(
        self, line: _Line, name: str, tensor: Tensor, *, tag: int = 0, **_: Any
    ) -> Handle:
        item = line.record(name, tensor)
        if line.link is not None:
            return line.link.send(item, tensor)
        return _Message(self.group.send([_real(tensor)], line.at, tag), line.recorder, item)

    def _receive_in_turn(
        self, line: _Line, name: str, tensor: Tensor, *, tag: int = 0, **_: Any
    ) -> Handle:
        if not line.postponed:
            return self._start_receive(line, name, tensor, tag)
        return _in_turn(line, lambda: [self._start_receive(line, name, tensor, tag)], None)

    def _postpone(
        self,
        line: _Line,
        name: str,
        shapes: Shapes,
        make: Callable[[], Sequence[Tensor]],
        _packet: Tensor,
        *,
        tag: int = 0,
        **_: Any,
    ) -> _Postponed:
        def start() -> list[Handle]:
            return [self._start_receive(line, name, tensor, tag) for tensor in make()]

        return _in_turn(line, start, shapes)

    def _start_receive(self, line: _Line, name: str, tensor: Tensor, tag: int) -> Handle:
        item = line.record(name, tensor)
        if line.link is not None:
            return line.link.receive(item, tensor)
        return _Message(self.group.recv([_real(tensor)], line.at, tag), line.recorder, item)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _in_turn(line: _Line, start: Callable[[], list[Handle]], shapes: Shapes | None) -> _Postponed:
    """Start a receive after those that are postponed, now if there is none and it needs no shapes."""
    made = _Postponed(line.postponed, start, shapes)
    made.queue.append(made)
    if len(made.queue) == 1 and (shapes is None or shapes.have_arrived):
        made.start_in_turn()
    return made


@dataclass(slots=True, eq=False)
class Shapes:
    """Shapes on their way. ``packet``: their contents, after :meth:`wait`."""

    packet: Tensor
    have_arrived: bool = False
    message: Handle | None = None  # once it has started
    started: _Postponed | None = None

    def wait(self) -> None:
        """Return when they have arrived."""
        if not self.have_arrived:
            if self.message is None:
                assert self.started is not None
                self.started.start_in_turn()
            assert self.message is not None
            self.message.wait()
            self.have_arrived = True


@dataclass(slots=True, eq=False)
class _Postponed:
    """One receive of [Note: postponed receives]. ``queue``: of its channel, with this receive."""

    queue: deque[_Postponed]
    _start: Callable[[], list[Handle]]
    _shapes: Shapes | None
    _messages: list[Handle] | None = None

    def start_in_turn(self) -> None:
        """Start this receive after all that are before it, and then those that need not wait."""
        while self.queue and (self._messages is None or self.queue[0]._can_start):
            first = self.queue[0]
            if first._shapes is not None:
                first._shapes.wait()
            self.queue.popleft()
            first._messages = first._start()

    @property
    def _can_start(self) -> bool:
        return self._shapes is None or self._shapes.have_arrived

    def wait(self) -> None:
        """Return when all its tensors have arrived."""
        if self._messages is None:
            self.start_in_turn()
        assert self._messages is not None
        for message in self._messages:
            message.wait()


@dataclass(slots=True, eq=False)
class _Message:
    """A message in flight."""

    _work: Any
    _recorder: Recorder
    _item: Item

    def wait(self) -> None:
        """Return when it was sent, or has arrived."""
        recorder = self._recorder
        began_s = recorder.begin_wait(self._item)
        try:
            self._work.wait()
        finally:
            recorder.end_wait(self._item, began_s)
        recorder.note_waited(self._item)
