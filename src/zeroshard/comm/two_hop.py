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
order it waits in: see :mod:`zeroshard.comm.hops`.

Letters: W ranks share a unit, R replicas; N padded elements of the unit, S = N // W; K elements of a
small vector or of a broadcast tensor.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from zeroshard.comm.collectives import Comm, Handle, check_source
from zeroshard.comm.hops import TwoHops
from zeroshard.comm.scratch import Scratch
from zeroshard.errors import UsageError


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
