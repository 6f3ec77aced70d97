"""Communicators of two hops: parts of a collective that start in one order.

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

Letters: W ranks share a unit; N padded elements of the unit, S = N // W; K elements of a small vector or
of a broadcast tensor.

[Note: two hops] :class:`TwoHopComm`. There are R replicas of a shard group of W ranks. Every replica
holds all shards, and rank s of each group holds the same shard (HSDP, MiCS). The *inner* communicator
connects the W ranks of one replica. The *outer* one connects the R ranks that hold the same shard. Units,
gradient buffers and the optimizer see a group of W ranks. S' is S, rounded up to a multiple of R.

*A reduction* has three parts: the inner reduce-scatter, the outer reduce-scatter of the shard, and the
outer all-gather of its result. Each element is summed over replicas by one rank, and the others receive
its bits. So replicas are bit-equal with every transport, also if a transport adds in an order of its own.
If every replica gathered R shards and added them itself, a rank would send (R - 1) S: as much with two
replicas, R / 2 times as much with more. A 16-bit sum is rounded after each hop.

[Note: nested hops] :class:`NestedComm`. W = I O ranks share a unit: O nodes of I ranks. The *inner*
communicator connects the ranks of a node, the *outer* one the ranks at the same place in all nodes. The
rank at place s of node o owns shard ``s O + o``. So the ranks at place s own neighbouring shards,
together the *node part* ``full_N[s M : (s + 1) M]``, M = N / I, and both hops read and write memory in
place. So the number of a rank's shard is not its position among the ranks in order, which is ``o I + s``.
Rows of small vectors and sources of broadcasts are numbered by position, as in every other communicator.
One hop over all ranks sends N - S elements, of which (O - 1) N / O leave the node: I times as many. A sum
is added in the order of ranks inside each node, then in the order of nodes, and in 16 bit rounded after
each hop.

What a rank sends on each hop, in elements:

==================  ===========  ================  ===========  ===========
                    two hops                       nested hops
collective          inner        outer             inner        outer
==================  ===========  ================  ===========  ===========
all_gather          N - S        0                 N - M        M - S
gather_from_node                                   N - M        0
reduce_scatter      N - S        2 (S' - S' / R)   N - M        M - S
all_gather_small    (W - 1) R K  (R - 1) K         (I - 1) O K  (O - 1) K
broadcast           (W - 1) K    (R - 1) K         (I - 1) K    (O - 1) K
==================  ===========  ================  ===========  ===========

Only the source sends on the outer hop of a broadcast, and only one rank of each replica or node on the
inner hop.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zeroshard.comm.collectives import (
    DONE,
    Comm,
    Handle,
    KeepsScratch,
    Scratch,
    Then,
    check_source,
    queues_on_device,
)
from zeroshard.comm.recorder import Recorder
from zeroshard.device.accelerator import AcceleratorOps, on_stream
from zeroshard.device.choice import ops_of
from zeroshard.errors import DistributedError, UsageError


class TwoHops(KeepsScratch):
    """The part of a communicator of two hops that keeps the order. Each hop records its own calls.

    ``close`` and ``abort`` end both hops. A collective in flight can be waited for after ``close`` only
    if its second part had started.
    """

    def __init__(self, inner: Comm, outer: Comm) -> None:
        super().__init__()
        self.inner = inner
        self.outer = outer
        self.hops = (inner, outer)
        self.recorder: Recorder = inner.recorder
        self.transport = " + ".join(dict.fromkeys((inner.transport, outer.transport)))
        self.queues_on_device = queues_on_device(inner) and queues_on_device(outer)
        self._unsent: deque[_InParts] = deque()  # their second part has not started; oldest first
        self._queue: _DeviceQueue | None = None
        self._broken: BaseException | None = None  # ended a collective between its parts

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory that the inner hop can send from. The outer hop sends less."""
        return self.inner.allocate(numel, dtype=dtype, device=device)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of both hops, in order. They lie on a grid."""
        inner: Any = self.inner
        own = inner.ranks[inner.rank]
        outer = getattr(self.outer, "ranks", (own,))
        return tuple(row + column - own for row in outer for column in inner.ranks)

    def all_gather_small(self, vector_K: Tensor, *, name: str) -> Tensor:
        """The vectors of all ranks, as rows in the order of :attr:`ranks`, so that every flag is seen.

        A number that replicas have in common, such as the norm of a shard's gradient, is in R rows: the
        sum over all rows is R times the sum over the shards.
        """
        self.send_through(None)
        inner, outer = self.inner, self.outer
        rows_OK = outer.all_gather_small(vector_K, name=name)
        rows_I = inner.all_gather_small(rows_OK.view(-1), name=name)
        rows_IOK = rows_I.view(inner.size, outer.size, vector_K.numel())
        return rows_IOK.transpose(0, 1).flatten(0, 1)

    def broadcast(self, tensor: Tensor, src: int, *, name: str) -> Handle:
        """The tensor of the ``src``-th of :attr:`ranks`. The outer hop has ended on return."""
        inner, outer = self.inner, self.outer
        check_source(src, inner.size * outer.size)
        self.send_through(None)
        row, column = divmod(src, inner.size)
        if column == inner.rank:
            handle = outer.broadcast(tensor, row, name=name)
            handle.wait()
        return inner.broadcast(tensor, column, name=name)

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


@dataclass(slots=True, eq=False)
class _InParts:
    """A collective in flight that blocks the host. :meth:`send` waits for the first part."""

    _comm: TwoHops
    _first: Handle | None  # it keeps its buffers alive
    _second: Callable[[], Handle] | None
    hop: Comm
    _started: Handle | None = None
    is_sent: bool = False

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


@dataclass(slots=True, eq=False)
class _Later:
    """The handle of a collective that was called after ``last``."""

    _comm: TwoHops
    _last: _InParts
    _handle: Handle

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


class TwoHopComm(TwoHops):
    """The collectives of a shard group that has replicas. See [Note: two hops].

    ``inner`` connects the ranks that share a unit, ``outer`` the ranks of all replicas that hold the same
    shard. ``rank`` and ``size`` are the inner ones. Each hop is recorded by its own communicator;
    ``recorder`` is that of the inner one. Broadcasts are recorded only by the outer communicator whose
    ranks send them, so histories of the outer hop are comparable inside one outer group only.

    Raises:
        UsageError: the inner communicator has one rank, so nothing would be sharded.
    """

    def __init__(self, inner: Comm, outer: Comm) -> None:
        if inner.size == 1:
            raise UsageError(
                f"data_replicate {outer.size} with data_shard 1: a shard group of one rank shards "
                f"nothing. Use data_shard {outer.size} with data_replicate 1; stage 0 keeps the whole "
                "model on every rank."
            )
        super().__init__(inner, outer)
        self.size = inner.size
        self.rank = inner.rank
        self.replicas = outer.size

    def all_gather(self, full_N: Tensor, shard_S: Tensor, *, name: str) -> Handle:
        """The inner all-gather: this replica has all shards."""
        return self.in_order(self.inner.all_gather(full_N, shard_S, name=name))

    def reduce_scatter(self, out_S: Tensor, full_N: Tensor, *, name: str) -> Handle:
        """Sum over the W ranks of each replica, then over the R replicas. ``out_S`` is equal on all."""
        inner = self.inner.reduce_scatter(out_S, full_N, name=name)
        add = partial(self.add_replicas, out_S, name)
        return self.in_parts(inner, add, self.outer, (out_S, full_N))

    def reduce_between(self, out_S: Tensor, sum_P: Tensor, *, name: str) -> Handle:
        """Sum over the R replicas, in place: ``out_S`` is ``sum_P``."""
        assert out_S.data_ptr() == sum_P.data_ptr()
        return self.in_parts(None, partial(self.add_replicas, out_S, name), self.outer, (out_S,))

    def add_replicas(self, sum_S: Tensor, name: str) -> Handle:
        """Replace ``sum_S`` by its sum over the replicas. Waits for the first of two collectives.

        If R does not divide S, this works on a copy.
        """
        numel = sum_S.numel()
        part_numel = -(-numel // self.replicas)
        if part_numel * self.replicas == numel:
            return self._add_and_gather(sum_S, name)
        space = self._scratch.take(sum_S.dtype, part_numel * self.replicas, sum_S.device)
        padded = space[: part_numel * self.replicas]
        padded[:numel].copy_(sum_S)
        padded[numel:].zero_()
        scratch = self._scratch

        def copy_back() -> None:
            sum_S.copy_(space[:numel])
            scratch.give(space)

        return Then(copy_back, self._add_and_gather(padded, name))

    def _add_and_gather(self, sum_S: Tensor, name: str) -> Handle:
        """In place: each replica adds one part, and gathers the parts that the others added."""
        part = sum_S.view(self.replicas, sum_S.numel() // self.replicas)[self.outer.rank]
        handle = self.outer.reduce_scatter(part, sum_S, name=name)
        handle.wait()
        return self.outer.all_gather(sum_S, part, name=name)


class NestedComm(TwoHops):
    """The collectives of a shard group over several nodes. See [Note: nested hops].

    ``rank`` is the number of the shard that this rank owns. ``recorder`` is that of the inner hop.
    """

    def __init__(self, inner: Comm, outer: Comm) -> None:
        super().__init__(inner, outer)
        self.size = inner.size * outer.size
        self.rank = inner.rank * outer.size + outer.rank

    def node_part(self, full_N: Tensor) -> Tensor:
        """``[M]``: the shards of the ranks at this rank's place in all nodes."""
        return full_N.view(self.inner.size, -1)[self.inner.rank]

    def all_gather(self, full_N: Tensor, shard_S: Tensor, *, name: str) -> Handle:
        """The outer hop fills the node part of ``full_N``, the inner hop the rest."""
        return self.gather_through(full_N, self.node_part(full_N), shard_S, name=name)

    def gather_through(
        self, full_N: Tensor, part_M: Tensor, shard_S: Tensor, *, name: str
    ) -> Handle:
        """As :meth:`all_gather`, with the node part in ``part_M``. ``shard_S`` may be a slice of it."""
        self.free_hop(self.outer)
        first = self.outer.all_gather(part_M, shard_S, name=name)
        second = partial(self.inner.all_gather, full_N, part_M, name=name)
        return self.in_parts(first, second, self.inner, (full_N, part_M, shard_S))

    def gather_from_node(self, full_N: Tensor, part_M: Tensor, *, name: str) -> Handle:
        """Fill ``full_N`` from the node parts that the ranks of the node have. Nothing leaves it."""
        self.free_hop(self.inner)
        return self.in_order(self.inner.all_gather(full_N, part_M, name=name))

    def reduce_scatter(self, out_S: Tensor, full_N: Tensor, *, name: str) -> Handle:
        """Sum over the ranks of the node, into the node part of ``full_N``, then over the nodes."""
        part_M = self.node_part(full_N)
        self.free_hop(self.inner)
        first = self.inner.reduce_scatter(part_M, full_N, name=name)
        second = partial(self.outer.reduce_scatter, out_S, part_M, name=name)
        return self.in_parts(first, second, self.outer, (full_N, out_S))

    def reduce_between(self, out_S: Tensor, sum_P: Tensor, *, name: str) -> Handle:
        """Sum over the nodes. ``sum_P`` is the sum of a node part."""
        self.free_hop(self.outer)
        return self.in_order(self.outer.reduce_scatter(out_S, sum_P, name=name))
