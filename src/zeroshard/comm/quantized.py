"""Sums of gradients that travel in 4 bits per element (qgZ of ZeRO++, arXiv 2306.10209, section 3.3).

Every rank rounds its gradient, sends each slice to the rank that adds it up, and adds what it received in
fp32, in the order of ranks. With nodes there are two such hops: the sum of a node is rounded again before
it leaves the node. So an element is rounded once per hop, however many ranks there are. In a ring it
would be rounded at every rank.

This is another computation than a sum of gradients: see :mod:`zeroshard.comm.wire` for the error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zeroshard.comm.collectives import DONE, Comm, Handle
from zeroshard.comm.nested import NestedComm
from zeroshard.comm.wire import from_wire, to_wire

BITS = 4
"""Of each element of a gradient, as in DeepSpeed."""


class QuantizedSums:
    """A communicator that reduces in 4 bits, and does everything else as ``comm`` does.

    ``comm`` has one hop, or is a :class:`~zeroshard.comm.nested.NestedComm`. ``gaps``: ``(begin, end)``
    of the padding of the gradients, whose contents are undefined and must not be rounded with others.
    """

    def __init__(self, comm: Comm, gaps: Sequence[tuple[int, int]] = ()) -> None:
        self._comm = comm
        self._gaps = gaps
        self.size = comm.size
        self.rank = comm.rank
        self.transport = comm.transport
        self.recorder = comm.recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def all_gather(self, full_N: Tensor, shard_S: Tensor, *, name: str) -> Handle:
        """See :class:`~zeroshard.comm.collectives.Comm`. Exact."""
        return self._comm.all_gather(full_N, shard_S, name=name)

    def all_gather_small(self, vector_K: Tensor, *, name: str) -> Tensor:
        """See :class:`~zeroshard.comm.collectives.Comm`. Exact."""
        return self._comm.all_gather_small(vector_K, name=name)

    def broadcast(self, tensor: Tensor, src: int, *, name: str) -> Handle:
        """See :class:`~zeroshard.comm.collectives.Comm`. Exact."""
        return self._comm.broadcast(tensor, src, name=name)

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Plain memory, since not it is sent."""
        return torch.empty(numel, dtype=dtype, device=device)

    def close(self) -> None:
        """See :class:`~zeroshard.comm.collectives.Comm`."""
        self._comm.close()

    def reduce_scatter(self, out_S: Tensor, full_N: Tensor, *, name: str) -> Handle:
        """The sum over all ranks of what they sent. ``out_S`` may lie inside ``full_N``."""
        comm = self._comm
        if not full_N.numel():
            return DONE
        for begin, end in self._gaps:
            full_N[begin:end].zero_()
        if not isinstance(comm, NestedComm):
            return _summed(comm, out_S, full_N, name)
        part_M = out_S.new_empty(full_N.numel() // comm.inner.size, dtype=_wide(out_S))
        comm.free_hop(comm.inner)
        first = _summed(comm.inner, part_M, full_N, name)
        second = partial(_summed, comm.outer, out_S, part_M, name)
        return comm.in_parts(first, second, comm.outer, (full_N, out_S, part_M))


def _wide(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


def _summed(comm: Any, out: Tensor, full: Tensor, name: str) -> Handle:
    """Start the reduce-scatter of ``full`` over one hop."""
    rows = full.view(comm.size, -1)
    sent = to_wire(rows, BITS)
    received = torch.empty_like(sent)
    handle = comm.all_to_all(received.view(-1), sent.view(-1), name=name)

    def add() -> None:
        total = out.new_zeros(out.shape, dtype=_wide(out))
        term = torch.empty_like(total)
        for row in received.unbind():
            total += from_wire(row, term, BITS)
        out.copy_(total)

    return Then(handle, add)


class Then:
    """Does one thing more after the wait for ``handle``."""

    __slots__ = ("_after", "_handle")

    def __init__(self, handle: Handle, after: Callable[[], None]) -> None:
        self._handle: Handle | None = handle
        self._after: Callable[[], None] | None = after

    def wait(self) -> None:
        """See :class:`~zeroshard.comm.collectives.Handle`."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        handle.wait()
        after, self._after = self._after, None
        if after is not None:
            after()
