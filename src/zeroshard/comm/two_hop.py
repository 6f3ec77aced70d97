"""Collectives of replicated shard groups: one hop inside the group, one hop between the replicas.

[Note: two hops] There are R replicas of a shard group of W ranks. Every replica holds all shards, and
rank s of each group holds the same shard (HSDP, MiCS). The *inner* communicator connects the W ranks of
one replica. The *outer* one connects the R ranks that hold the same shard. Units, gradient buffers and
the optimizer see a group of W ranks.

What a rank sends on each hop, in elements; S' is S, rounded up to a multiple of R:

================  ===========  ================
collective        inner        outer
================  ===========  ================
all_gather        N - S        0
reduce_scatter    N - S        2 (S' - S' / R)
all_gather_small  (W - 1) R K  (R - 1) K
broadcast         (W - 1) K    (R - 1) K
================  ===========  ================

Only the source sends on the outer hop of a broadcast, and only one rank of each replica on the inner hop.

*A reduction* has three parts: the inner reduce-scatter, the outer reduce-scatter of the shard, and the
outer all-gather of its result. Each element is summed over replicas by one rank, and the others receive
its bits. So replicas are bit-equal with every transport, also if a transport adds in an order of its own.
If every replica gathered R shards and added them itself, a rank would send (R - 1) S: as much with two
replicas, R / 2 times as much with more. A 16-bit sum is rounded after each hop.

*Order.* The outer collectives of a rank start in the order in which it called the reductions, whatever
order it waits in, and all parts of one reduction start before those of the next (ADR 0004, ADR 0018). The
outer hop can start when the inner one has ended. So a wait for any handle first starts the outer hops of
all reductions that were called before it, oldest first. A rank that is blocked in a collective has
therefore done its part of every earlier one, and no ring of ranks can wait for each other. Collectives
that are queued on a device block no rank. There the parts are queued one behind the other, on a stream of
their own, when the reduction is called.

Letters: W ranks share a unit, R replicas; N padded elements of the unit, S = N // W; K elements of a
small vector or of a broadcast tensor.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Any

import torch
from torch import Tensor

from zeroshard.comm.collectives import Comm, Handle, check_source, queues_on_device
from zeroshard.comm.recorder import Recorder
from zeroshard.comm.scratch import KeepsScratch, Scratch
from zeroshard.device.accelerator import AcceleratorOps, on_stream
from zeroshard.device.choice import ops_of
from zeroshard.errors import DistributedError, UsageError


class TwoHopComm(KeepsScratch):
    """The collectives of a shard group that has replicas. See [Note: two hops].

    ``inner`` connects the ranks that share a unit, ``outer`` the ranks of all replicas that hold the same
    shard. ``rank`` and ``size`` are the inner ones. Each hop is recorded by its own communicator;
    ``recorder`` is that of the inner one. Broadcasts are recorded only by the outer communicator whose
    ranks send them, so histories of the outer hop are comparable inside one outer group only.

    ``close`` and ``abort`` end both hops. A reduction in flight can be waited for after ``close`` only if
    its outer hop had started.

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
        self.inner = inner
        self.outer = outer
        self.size = inner.size
        self.rank = inner.rank
        self.replicas = outer.size
        self.hops = (inner, outer)
        self.recorder: Recorder = inner.recorder
        self.transport = " + ".join(dict.fromkeys((inner.transport, outer.transport)))
        self.queues_on_device = queues_on_device(inner) and queues_on_device(outer)
        self._scratch = Scratch()
        self._unsent: deque[_Reduction] = deque()  # their outer hop has not started; oldest first
        self._queue: _DeviceQueue | None = None
        self._broken: BaseException | None = None  # ended the outer hop of a reduction

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of all replicas, in the order of the rows of :meth:`all_gather_small`.

        They lie on the grid of a :class:`~zeroshard.core.mesh.Mesh`.
        """
        columns: Any = self.inner
        own = columns.ranks[self.rank]
        rows = getattr(self.outer, "ranks", (own,))
        return tuple(row + column - own for row in rows for column in columns.ranks)

    def all_gather(self, full_N: Tensor, shard_S: Tensor, *, name: str) -> Handle:
        """The inner all-gather: this replica has all shards."""
        handle = self.inner.all_gather(full_N, shard_S, name=name)
        return _Later(self, self._unsent[-1], handle) if self._unsent else handle

    def reduce_scatter(self, out_S: Tensor, full_N: Tensor, *, name: str) -> Handle:
        """Sum over the W ranks of each replica, then over the R replicas. ``out_S`` is equal on all."""
        inner = self.inner.reduce_scatter(out_S, full_N, name=name)
        if self.queues_on_device and out_S.device.type != "cpu":
            if self._queue is None:
                self._queue = _DeviceQueue(out_S.device)
            return self._queue.add(self, inner, out_S, full_N, name)
        reduction = _Reduction(self, inner, out_S, name)
        self._unsent.append(reduction)
        return reduction

    def all_gather_small(self, vector_K: Tensor, *, name: str) -> Tensor:
        """``[R * W, K]``: the vectors of all ranks. Row ``r * W + s`` is that of rank s of replica r.

        So every rank's flags are seen. A number that replicas have in common, such as the norm of a
        shard's gradient, is in R rows: the sum over all rows is R times the sum over the shards.
        """
        self.send_through(None)
        rows_RK = self.outer.all_gather_small(vector_K, name=name)
        rows_W = self.inner.all_gather_small(rows_RK.view(-1), name=name)
        rows_WRK = rows_W.view(self.size, self.replicas, vector_K.numel())
        return rows_WRK.transpose(0, 1).flatten(0, 1)

    def broadcast(self, tensor: Tensor, src: int, *, name: str) -> Handle:
        """The tensor of rank ``src``, for all ranks of all replicas. Below W: a rank of replica 0.

        ``src`` is numbered as the rows of :meth:`all_gather_small`. The outer hop has ended on return.
        """
        check_source(src, self.size * self.replicas)
        self.send_through(None)
        replica, column = divmod(src, self.size)
        if column == self.rank:
            handle = self.outer.broadcast(tensor, replica, name=name)
            handle.wait()
        return self.inner.broadcast(tensor, column, name=name)

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory that the inner hop can send from. The outer hop sends 1/W of it."""
        return self.inner.allocate(numel, dtype=dtype, device=device)

    def send_through(self, last: _Reduction | None) -> None:
        """Start the outer hop of every reduction up to ``last`` (None: of all). Waits for the inner hops.

        Raises what the transports raise. From then on every call that needs the outer hop raises:
        this rank has left the order of the outer collectives.
        """
        if self._broken is not None and (last is None or not last.is_sent):
            raise self._broken_error()
        while self._unsent and (last is None or not last.is_sent):
            try:
                self._unsent.popleft().send()
            except BaseException as error:
                self._broken = error
                raise

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
        return _CopyBack(self._add_and_gather(padded, name), sum_S, space, self._scratch)

    def _add_and_gather(self, sum_S: Tensor, name: str) -> Handle:
        """In place: each replica adds one part, and gathers the parts that the others added."""
        part = sum_S.view(self.replicas, sum_S.numel() // self.replicas)[self.outer.rank]
        handle = self.outer.reduce_scatter(part, sum_S, name=name)
        handle.wait()
        return self.outer.all_gather(sum_S, part, name=name)

    def _broken_error(self) -> BaseException:
        if isinstance(self._broken, Exception):
            return self._broken
        error = DistributedError(
            f"A {type(self._broken).__name__} ended a reduction between its two hops, so the replicas "
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


class _Reduction:
    """A reduction in flight that blocks the host. :meth:`send` waits for the inner hop."""

    __slots__ = ("_comm", "_inner", "_name", "_out_S", "_outer", "is_sent")

    def __init__(self, comm: TwoHopComm, inner: Handle, out_S: Tensor, name: str) -> None:
        self._comm = comm
        self._inner: Handle | None = inner  # it keeps full_N alive
        self._outer: Handle | None = None
        self._out_S: Tensor | None = out_S
        self._name = name
        self.is_sent = False

    def send(self) -> None:
        inner, self._inner = self._inner, None
        out_S, self._out_S = self._out_S, None
        assert inner is not None
        assert out_S is not None
        inner.wait()
        self._outer = self._comm.add_replicas(out_S, self._name)
        self.is_sent = True

    def wait(self) -> None:
        self._comm.send_through(self)
        outer, self._outer = self._outer, None
        if outer is not None:
            outer.wait()


class _Later:
    """The handle of a collective that was called after ``last``."""

    __slots__ = ("_comm", "_handle", "_last")

    def __init__(self, comm: TwoHopComm, last: _Reduction, handle: Handle) -> None:
        self._comm = comm
        self._last = last
        self._handle = handle

    def wait(self) -> None:
        self._comm.send_through(self._last)
        self._handle.wait()


class _CopyBack:
    """A collective on a padded copy of ``target_S``."""

    __slots__ = ("_handle", "_scratch", "_space", "_target_S")

    def __init__(self, handle: Handle, target_S: Tensor, space: Tensor, scratch: Scratch) -> None:
        self._handle: Handle | None = handle
        self._target_S = target_S
        self._space = space
        self._scratch = scratch

    def wait(self) -> None:
        handle, self._handle = self._handle, None
        if handle is None:
            return
        handle.wait()
        self._target_S.copy_(self._space[: self._target_S.numel()])
        self._scratch.give(self._space)
        del self._target_S, self._space


class _DeviceQueue:
    """A stream on which the hops of reductions run one behind the other.

    Scratch memory is allocated and used on this stream only, so it can be reused at once.
    """

    def __init__(self, device: torch.device) -> None:
        ops = ops_of(device)
        assert isinstance(ops, AcceleratorOps), f"{device} has no streams"
        self.ops = ops
        self.stream = ops.new_stream()
        self.unwaited: set[_Queued] = set()

    def add(
        self, comm: TwoHopComm, inner: Handle, out_S: Tensor, full_N: Tensor, name: str
    ) -> Handle:
        """Queue the outer hop behind the inner one. The current stream waits for nothing."""
        with on_stream(self.stream):
            inner.wait()
            outer = comm.add_replicas(out_S, name)
            outer.wait()
            event = self.ops.event()
            event.record(self.stream)
        return _Queued(self, event, (out_S, full_N))


class _Queued:
    """A reduction in flight on a device. Keeps its buffers from the allocator until the wait."""

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
