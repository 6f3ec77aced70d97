"""Collectives of one shard group whose ranks are on several nodes: one hop inside, one hop between nodes.

[Note: nested hops] W = I O ranks share a unit: O nodes of I ranks. The *inner* communicator connects the
ranks of a node, the *outer* one the ranks at the same place in all nodes. The rank at place s of node o
owns shard ``s O + o``. So the ranks at place s own neighbouring shards, together the *node part*
``full_N[s M : (s + 1) M]``, M = N / I, and both hops read and write memory in place. So the number of a
rank's shard is not its position among the ranks in order, which is ``o I + s``. Rows of small vectors and
sources of broadcasts are numbered by position, as in every other communicator.

What a rank sends on each hop, in elements:

==================  ==============  ==============
collective          inner           outer
==================  ==============  ==============
all_gather          N - M           M - S
gather_from_node    N - M           0
reduce_scatter      N - M           M - S
all_gather_small    (I - 1) O K     (O - 1) K
broadcast           (I - 1) K       (O - 1) K
==================  ==============  ==============

One hop over all ranks sends N - S elements, of which (O - 1) N / O leave the node: I times as many.

A sum is added in the order of ranks inside each node, then in the order of nodes. In 16 bit it is rounded
after each hop. Both hops keep one order of calls (:mod:`zeroshard.comm.hops`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from zeroshard.comm.collectives import Comm, Handle, check_source
from zeroshard.comm.hops import TwoHops


class NestedComm(TwoHops):
    """The collectives of a shard group over several nodes. See [Note: nested hops].

    ``rank`` is the number of the shard that this rank owns. ``recorder`` is that of the inner hop.
    """

    def __init__(self, inner: Comm, outer: Comm) -> None:
        super().__init__(inner, outer)
        self.size = inner.size * outer.size
        self.rank = inner.rank * outer.size + outer.rank

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks, in order. They lie on a grid."""
        inner: Any = self.inner
        outer: Any = self.outer
        own = inner.ranks[inner.rank]
        return tuple(place + node - own for node in outer.ranks for place in inner.ranks)

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

    def all_gather_small(self, vector_K: Tensor, *, name: str) -> Tensor:
        """``[W, K]``: the vectors of all ranks, in order."""
        self.send_through(None)
        rows_OK = self.outer.all_gather_small(vector_K, name=name)
        rows_I = self.inner.all_gather_small(rows_OK.view(-1), name=name)
        rows_IOK = rows_I.view(self.inner.size, self.outer.size, vector_K.numel())
        return rows_IOK.transpose(0, 1).flatten(0, 1)

    def broadcast(self, tensor: Tensor, src: int, *, name: str) -> Handle:
        """The tensor of the ``src``-th of all ranks. The outer hop has ended on return."""
        check_source(src, self.size)
        self.send_through(None)
        node, place = divmod(src, self.inner.size)
        if place == self.inner.rank:
            self.outer.broadcast(tensor, node, name=name).wait()
        return self.inner.broadcast(tensor, place, name=name)
