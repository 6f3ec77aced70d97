"""Messages between the ranks of a pipeline, recorded as collectives are.

A *channel* is all that one rank of a pipeline sends to another one, in order. Each of the two has a
:class:`~zeroshard.comm.recorder.Recorder` of the channel. The sender records a message when it starts to
send it, the receiver when it starts to receive it. torch matches the messages of a channel by their
order, so both records are equal as far as both have come. The watchdog can then follow a channel as a
group of two ranks: it sees that a rank waits for message 7, and that the other rank has started 6.

What a message costs the host besides torch's own call: one record, and two assignments around its wait.

[Note: postponed receives] A receive whose shapes have not arrived yet is *postponed*: it starts at the
latest when somebody waits for it. torch's schedules ask for a receive long before they need it, and must
not wait for the sender then. As messages match by their order, all later receives of the channel are
postponed behind it, and start in the order in which they were asked for. This cannot block: the sender
starts all its messages in that order, and does not wait for one before it starts the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from zeroshard.comm.recorder import Item, Recorder


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


class StageMessages:
    """The messages of this rank in the process group of its pipeline.

    ``recorders``: of each channel that this rank is an end of. All tensors of a message have one name.
    """

    def __init__(self, group: dist.ProcessGroup, recorders: Mapping[Channel, Recorder]) -> None:
        self.group = group
        self.recorders = dict(recorders)
        self._rank = dist.get_rank()
        self._entries = {
            channel: each.entries("message") for channel, each in self.recorders.items()
        }
        self._arriving: list[tuple[Recorder, Item]] = []
        self._postponed: dict[Channel, deque[_Postponed]] = {c: deque() for c in self.recorders}

    @classmethod
    def unwatched(cls, group: dist.ProcessGroup) -> StageMessages:
        """With recorders in private memory."""
        channels = channels_of(dist.get_process_group_ranks(group), dist.get_rank())
        return cls(group, {channel: Recorder(channel.name) for channel in channels})

    def sends(self, name: str, tensors: Sequence[Tensor], target: int) -> list[dist.P2POp]:
        """The operations that send ``tensors``, for torch to start."""
        return self._operations(dist.isend, name, tensors, target, Channel(self._rank, target))

    def receives(self, name: str, tensors: Sequence[Tensor], source: int) -> list[dist.P2POp]:
        """The operations that receive into ``tensors``, for torch to start."""
        return self._operations(dist.irecv, name, tensors, source, Channel(source, self._rank))

    def receives_later(
        self, name: str, shapes: Shapes, make: Callable[[], Sequence[Tensor]], source: int
    ) -> list[dist.P2POp]:
        """The operation that receives into the tensors of ``make()``, which is called after ``shapes``
        have arrived. Only on the CPU. See [Note: postponed receives].
        """
        channel = Channel(source, self._rank)
        operation = dist.P2POp(dist.irecv, shapes.packet, source, self.group)
        operation.op = partial(self._postpone, channel, name, shapes, make)
        return [operation]

    def send(self, name: str, tensor: Tensor, target: int, tag: int) -> _Message:
        """Start to send a tensor now."""
        channel = Channel(self._rank, target)
        return self._start(
            dist.isend, channel, name, tensor, group=self.group, tag=tag, group_dst=self._at(target)
        )

    def receive_shapes(self, name: str, packet: Tensor, source: int, tag: int) -> Shapes:
        """Start to receive shapes, as soon as all receives before it have started."""
        channel = Channel(source, self._rank)
        shapes = Shapes(packet)
        where = {"group": self.group, "tag": tag, "group_src": self._at(source)}

        def start() -> list[_Message]:
            shapes.message = self._start(dist.irecv, channel, name, packet, **where)
            return []

        shapes.started = self._in_turn(channel, start, None)
        return shapes

    def note_arrivals(self) -> None:
        """On a device: note that what was received so far has arrived when the stream reaches this."""
        for recorder, item in self._arriving:
            recorder.note_pending(item)
        self._arriving.clear()

    def forget_postponed(self) -> None:
        """Forget receives that never started, after a step that ended in the middle."""
        for each in self._postponed.values():
            each.clear()

    def close(self) -> None:
        """Remove the files of the recordings."""
        for recorder in self.recorders.values():
            recorder.close()

    def _at(self, rank: int) -> int:
        return dist.get_group_rank(self.group, rank)

    def _operations(
        self, call: Any, name: str, tensors: Sequence[Tensor], peer: int, channel: Channel
    ) -> list[dist.P2POp]:
        made = [dist.P2POp(call, tensor, peer, self.group) for tensor in tensors]
        for each in made:
            if each.tensor.device.type == "cpu":
                # torch's schedules start an operation by calling its attribute ``op``.
                start = self._start if call is dist.isend else self._start_receive
                each.op = partial(start, call, channel, name)
            else:  # torch batches those that it knows, and a wait does not block the host
                recorder, item = self._record(channel, name, each.tensor)
                if call is dist.irecv:
                    self._arriving.append((recorder, item))
        return made

    def _record(self, channel: Channel, name: str, tensor: Tensor) -> tuple[Recorder, Item]:
        recorder, numel = self.recorders[channel], tensor.numel()
        sent = numel if channel.source == self._rank else 0
        return recorder, recorder.enter(self._entries[channel][name], tensor, numel, sent)

    def _start(
        self, call: Any, channel: Channel, name: str, tensor: Tensor, **where: Any
    ) -> _Message:
        recorder, item = self._record(channel, name, tensor)
        if call is dist.isend and "group_src" in where:  # torch names the peer so in mixed batches
            where["group_dst"] = where.pop("group_src")
        return _Message(call(tensor, **where), recorder, item)

    def _start_receive(
        self, call: Any, channel: Channel, name: str, tensor: Tensor, **where: Any
    ) -> _Message | _Postponed:
        if not self._postponed[channel]:
            return self._start(call, channel, name, tensor, **where)
        return self._in_turn(
            channel, lambda: [self._start(call, channel, name, tensor, **where)], None
        )

    def _postpone(
        self,
        channel: Channel,
        name: str,
        shapes: Shapes,
        make: Callable[[], Sequence[Tensor]],
        _packet: Tensor,
        **where: Any,
    ) -> _Postponed:
        def start() -> list[_Message]:
            return [self._start(dist.irecv, channel, name, t, **where) for t in make()]

        return self._in_turn(channel, start, shapes)

    def _in_turn(
        self, channel: Channel, start: Callable[[], list[_Message]], shapes: Shapes | None
    ) -> _Postponed:
        """Start a receive after those that are postponed, now if there is none and it needs no shapes."""
        made = _Postponed(self._postponed[channel], start, shapes)
        made.queue.append(made)
        if len(made.queue) == 1 and (shapes is None or shapes.have_arrived):
            made.start_in_turn()
        return made


class Shapes:
    """Shapes on their way. ``packet``: their contents, after :meth:`wait`."""

    def __init__(self, packet: Tensor) -> None:
        self.packet = packet
        self.have_arrived = False
        self.message: _Message | None = None  # once it has started
        self.started: _Postponed | None = None

    def wait(self) -> None:
        """Return when they have arrived."""
        if not self.have_arrived:
            if self.message is None:
                assert self.started is not None
                self.started.start_in_turn()
            assert self.message is not None
            self.message.wait()
            self.have_arrived = True


class _Postponed:
    """One receive of [Note: postponed receives]. ``queue``: of its channel, with this receive."""

    __slots__ = ("_messages", "_shapes", "_start", "queue")

    def __init__(
        self,
        queue: deque[_Postponed],
        start: Callable[[], list[_Message]],
        shapes: Shapes | None,
    ) -> None:
        self.queue = queue
        self._start = start
        self._shapes = shapes
        self._messages: list[_Message] | None = None

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


class _Message:
    """A message in flight."""

    __slots__ = ("_item", "_recorder", "_work")

    def __init__(self, work: Any, recorder: Recorder, item: Item) -> None:
        self._work = work
        self._recorder = recorder
        self._item = item

    def wait(self) -> None:
        """Return when it was sent, or has arrived."""
        recorder = self._recorder
        began_s = recorder.begin_wait(self._item)
        try:
            self._work.wait()
        finally:
            recorder.end_wait(self._item, began_s)
