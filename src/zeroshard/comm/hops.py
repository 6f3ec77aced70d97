"""What communicators of two hops have in common: parts of a collective that start in one order.

A collective has a first part on one hop and a second part on the other one, or has one part only. The
second part can start when the first one has ended. *Order*: the collectives of each hop start in the
order in which a rank called them, whatever order it waits in (ADR 0004, ADR 0018). Therefore

* a wait for any handle first starts the second parts of all collectives that were called before it,
  oldest first;
* a call whose first part is on a hop first starts the second parts that are still to come on that hop,
  and all before them.

A rank that is blocked in a collective has done its part of every earlier one, so no ring of ranks can
wait for each other. Collectives that are queued on a device block no rank. There the parts are queued one
behind the other, on a stream of their own, when the collective is called.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zeroshard.comm.collectives import DONE, Comm, Handle, queues_on_device
from zeroshard.comm.recorder import Recorder
from zeroshard.comm.scratch import KeepsScratch, Scratch
from zeroshard.device.accelerator import AcceleratorOps, on_stream
from zeroshard.device.choice import ops_of
from zeroshard.errors import DistributedError, UsageError


class TwoHops(KeepsScratch):
    """The part of a communicator of two hops that keeps the order. Each hop records its own calls.

    ``close`` and ``abort`` end both hops. A collective in flight can be waited for after ``close`` only
    if its second part had started.
    """

    def __init__(self, inner: Comm, outer: Comm) -> None:
        self.inner = inner
        self.outer = outer
        self.hops = (inner, outer)
        self.recorder: Recorder = inner.recorder
        self.transport = " + ".join(dict.fromkeys((inner.transport, outer.transport)))
        self.queues_on_device = queues_on_device(inner) and queues_on_device(outer)
        self._scratch = Scratch()
        self._unsent: deque[_InParts] = deque()  # their second part has not started; oldest first
        self._queue: _DeviceQueue | None = None
        self._broken: BaseException | None = None  # ended a collective between its parts

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory that the inner hop can send from. The outer hop sends less."""
        return self.inner.allocate(numel, dtype=dtype, device=device)

    def reduce_inside(self, out_P: Tensor, full_N: Tensor, *, name: str) -> Handle:
        """The first hop of a reduction alone. ``out_P``, P = N / I: the sum over the I ranks inside."""
        self.free_hop(self.inner)
        return self.in_order(self.inner.reduce_scatter(out_P, full_N, name=name))

    def reduce_between(self, out_S: Tensor, sum_P: Tensor, *, name: str) -> Handle:
        """The second hop alone, of a sum over the ranks of a node. ``sum_P`` is overwritten."""
        raise NotImplementedError

    def in_parts(
        self,
        first: Handle | None,
        second: Callable[[], Handle],
        hop: Comm,
        buffers: tuple[Tensor, ...],
    ) -> Handle:
        """The handle of a collective whose ``first`` part has started.

        ``second`` starts the second part, on ``hop``. ``first``: None if nothing comes before it but what
        the current stream has queued. ``buffers``: memory of both parts; not empty.
        """
        if self.queues_on_device and buffers[0].device.type != "cpu":
            if self._queue is None:
                self._queue = _DeviceQueue(buffers[0].device)
            return self._queue.add(first, second, buffers)
        parts = _InParts(self, first or DONE, second, hop)
        self._unsent.append(parts)
        return parts

    def in_order(self, handle: Handle) -> Handle:
        """``handle`` of one part only, whose wait starts what was called before it."""
        return _Later(self, self._unsent[-1], handle) if self._unsent else handle

    def free_hop(self, hop: Comm) -> None:
        """Start the second parts that are to come on ``hop``, before another collective starts there."""
        last = next((parts for parts in reversed(self._unsent) if parts.hop is hop), None)
        if last is not None:
            self.send_through(last)

    def send_through(self, last: _InParts | None) -> None:
        """Start the second parts up to that of ``last`` (None: all). Waits for the first parts.

        Raises what the transports raise. From then on every call that needs a second part raises:
        this rank has left the order of the collectives.
        """
        if self._broken is not None and (last is None or not last.is_sent):
            raise self._broken_error()
        while self._unsent and (last is None or not last.is_sent):
            try:
                self._unsent.popleft().send()
            except BaseException as error:
                self._broken = error
                raise

    def _broken_error(self) -> BaseException:
        if isinstance(self._broken, Exception):
            return self._broken
        error = DistributedError(
            f"A {type(self._broken).__name__} ended a collective between its two hops, so other ranks "
            "wait for this rank. Close the engine on every rank and build a new one."
        )
        error.__cause__ = self._broken
        return error

    def abort(self) -> None:
        """Make every blocked wait fail now, in both hops. Called by the watchdog's thread."""
        for hop in (self.inner, self.outer):
            abort = getattr(hop, "abort", None)
            if abort is not None:
                abort()

    def close(self) -> None:
        """Close both communicators, and free the scratch memory."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.outer.close)
            stack.callback(self.inner.close)
        self._scratch = Scratch()
        self._queue = None
        # An error refers to the frames in which it was raised, and they to the tensors of a backward: a
        # graph in C++ with hooks, which Python's garbage collection cannot find its way through.
        if self._unsent or self._broken is not None:
            self._unsent.clear()
            self._broken = UsageError(
                "a collective in two hops was waited for on a closed communicator, between its hops. "
                "Wait for it before the engine is closed."
            )


class _InParts:
    """A collective in flight that blocks the host. :meth:`send` waits for the first part."""

    __slots__ = ("_comm", "_first", "_second", "_started", "hop", "is_sent")

    def __init__(
        self, comm: TwoHops, first: Handle, second: Callable[[], Handle], hop: Comm
    ) -> None:
        self._comm = comm
        self._first: Handle | None = first  # it keeps its buffers alive
        self._second: Callable[[], Handle] | None = second
        self._started: Handle | None = None
        self.hop = hop
        self.is_sent = False

    def send(self) -> None:
        first, self._first = self._first, None
        second, self._second = self._second, None
        assert first is not None
        assert second is not None
        first.wait()
        self._started = second()
        self.is_sent = True

    def wait(self) -> None:
        self._comm.send_through(self)
        started, self._started = self._started, None
        if started is not None:
            started.wait()


class _Later:
    """The handle of a collective that was called after ``last``."""

    __slots__ = ("_comm", "_handle", "_last")

    def __init__(self, comm: TwoHops, last: _InParts, handle: Handle) -> None:
        self._comm = comm
        self._last = last
        self._handle = handle

    def wait(self) -> None:
        self._comm.send_through(self._last)
        self._handle.wait()


class _DeviceQueue:
    """A stream on which the parts of collectives run one behind the other.

    Scratch memory is allocated and used on this stream only, so it can be reused at once.
    """

    def __init__(self, device: torch.device) -> None:
        ops = ops_of(device)
        assert isinstance(ops, AcceleratorOps), f"{device} has no streams"
        self.ops = ops
        self.stream = ops.new_stream()
        self.unwaited: set[_Queued] = set()

    def add(
        self, first: Handle | None, second: Callable[[], Handle], buffers: tuple[Tensor, ...]
    ) -> Handle:
        """Queue the second part behind the first one. The current stream waits for nothing."""
        if first is None:
            self.stream.wait_stream(self.ops.current_stream())
        with on_stream(self.stream):
            if first is not None:
                first.wait()
            last = second()
            last.wait()
            event = self.ops.event()
            event.record(self.stream)
        return _Queued(self, event, buffers)


class _Queued:
    """A collective in flight on a device. Keeps its buffers from the allocator until the wait."""

    __slots__ = ("_buffers", "_event", "_queue")

    def __init__(self, queue: _DeviceQueue, event: Any, buffers: tuple[Tensor, ...]) -> None:
        self._queue: _DeviceQueue | None = queue
        self._event = event
        self._buffers = buffers
        queue.unwaited.add(self)  # also if the caller drops the handle

    def wait(self) -> None:
        queue, self._queue = self._queue, None
        if queue is not None:
            queue.ops.current_stream().wait_event(self._event)
            queue.unwaited.discard(self)
            self._buffers = ()
