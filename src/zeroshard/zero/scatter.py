"""Turns whole parameters into flat shards, without a whole unit in memory.

It works piece by piece. Rank 0's values are copied into a small buffer in the order of the layout and
broadcast, and every rank keeps what belongs to its shard. Letters as in :mod:`zeroshard.zero.unit`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeroshard.comm.collectives import Comm
from zeroshard.core.layout import Slot, UnitLayout

PIECE_NUMEL = 2**22
"""Elements per broadcast. Bounds the memory that construction needs besides shards and one parameter."""


def scatter(
    layout: UnitLayout,
    values: Sequence[tuple[Slot, Tensor]],
    *,
    dtype: torch.dtype,
    device: torch.device,
    comm: Comm,
    name: str,
    source: int,
) -> Tensor:
    """This rank's shard ``[S]`` of parameters that every rank holds whole, with rank ``source``'s values.

    Collective. ``values``: in the order of the layout, on one device; slots that are not given become
    zero, as padding is. A layout that fits into one piece takes one broadcast, however many parameters it
    has.
    """
    begin, end = layout.shard_range(comm.rank)
    if layout.full_numel > PIECE_NUMEL:
        shard_S = torch.zeros(layout.shard_numel, dtype=dtype, device=device)
        scatterer = ParamScatterer(layout, shard_S, begin, comm=comm, name=name, source=source)
        for slot, value in values if comm.rank == source else ():
            scatterer.add(slot, value)
        scatterer.finish()
        return shard_S
    if comm.rank == source:
        full_N = _joined(layout, values, dtype).to(device)
    else:
        full_N = torch.empty(layout.full_numel, dtype=dtype, device=device)
    comm.broadcast(full_N, source, name=name).wait()
    return full_N[begin:end].clone()


def _joined(
    layout: UnitLayout, values: Sequence[tuple[Slot, Tensor]], dtype: torch.dtype
) -> Tensor:
    """``full_N`` on the device of the values."""
    if not values:
        return torch.zeros(layout.full_numel, dtype=dtype)
    first = values[0][1]
    gaps: dict[int, Tensor] = {}
    parts: list[Tensor] = []
    at = 0
    for slot, value in values:
        if gap := slot.start - at:
            if gap not in gaps:
                gaps[gap] = first.new_zeros(gap)
            parts.append(gaps[gap])
        parts.append(value.reshape(-1))
        at = slot.start + value.numel()
    parts.append(first.new_zeros(layout.full_numel - at))
    return torch.cat(parts, out=first.new_empty(layout.full_numel, dtype=dtype))


class ParamScatterer:
    """Broadcasts the parameters of one layout in pieces. Each rank keeps a ``part`` of the flat whole.

    ``part`` is ``full_N[begin : begin + len(part)]`` and complete after :meth:`finish`; padding is zero.
    :meth:`add` takes parameters in the order of the layout, in any dtype, on any device. ``device``:
    where ranks exchange pieces; default: where ``part`` is. Collective. The values of rank ``source`` are
    used.
    """

    def __init__(
        self,
        layout: UnitLayout,
        part: Tensor,
        begin: int,
        *,
        comm: Comm,
        name: str,
        source: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self.layout = layout
        self.part = part
        self.begin, self.end = begin, begin + len(part)
        self.comm = comm
        self.name = name
        self.source = source
        self._low = 0  # the position in full_N where the current piece begins
        self._piece = torch.zeros(
            min(PIECE_NUMEL, layout.full_numel), dtype=part.dtype, device=device or part.device
        )

    def add(self, slot: Slot, values: Tensor) -> None:
        """Add the next parameter, of shape ``slot.shape``."""
        flat = values.detach().reshape(-1)
        at = slot.start
        while at < slot.stop:
            self._send_until(at)
            stop = min(slot.stop, self._low + len(self._piece))
            self._piece[at - self._low : stop - self._low].copy_(
                flat[at - slot.start : stop - slot.start]
            )
            at = stop

    def finish(self) -> None:
        """Broadcast what is left."""
        self._send_until(self.layout.full_numel)

    def _send_until(self, position: int) -> None:
        """Broadcast pieces until the current one contains ``position``."""
        while self._low < self.layout.full_numel and position >= self._low + len(self._piece):
            low, high = self._low, self._low + len(self._piece)
            self.comm.broadcast(self._piece, self.source, name=self.name).wait()
            begin, end = max(self.begin, low), min(self.end, high)
            if begin < end:
                self.part[begin - self.begin : end - self.begin].copy_(
                    self._piece[begin - low : end - low]
                )
            self._low = high
            rest = min(len(self._piece), self.layout.full_numel - high)
            self._piece = self._piece[:rest].zero_()
