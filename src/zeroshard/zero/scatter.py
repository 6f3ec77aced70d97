"""How do whole parameters become flat shards without a whole unit in memory?

Piece by piece: rank 0's values are put into a small buffer in the order of the layout, sent to all, and
every rank keeps what lies in its own part. Letters as in :mod:`zeroshard.zero.unit`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeroshard.comm.collectives import Comm
from zeroshard.core.layout import Slot, UnitLayout

PIECE_NUMEL = 2**22
"""Elements sent at a time: bounds what construction needs beside shards and one parameter."""


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
    """The own shard of parameters that are all here, with the values of rank ``source``. Collective.

    ``values``: in the order of the layout, on one device; a place that is not given becomes zero, like
    padding. What fits in one piece goes in one pass, whatever the number of parameters.
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
    """``full_N``, on the device of the values."""
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
    """Deals the parameters of one layout to the ranks; each keeps a ``part`` of the flat whole.

    ``part``: what this rank keeps, ``full_N[begin : begin + len(part)]``; it is complete after
    ``finish``, padding is zero. ``put`` takes parameters in the order of the layout, in any dtype, on
    any device. ``device``: where the ranks exchange pieces, default where ``part`` is. Collective; the
    values of rank ``source`` win.
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
        self._low = 0  # where the piece in hand begins
        self._piece = torch.zeros(
            min(PIECE_NUMEL, layout.full_numel), dtype=part.dtype, device=device or part.device
        )

    def add(self, slot: Slot, values: Tensor) -> None:
        """The next parameter, of ``slot.shape``."""
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
        """Send the rest."""
        self._send_until(self.layout.full_numel)

    def _send_until(self, position: int) -> None:
        """Send pieces until the one in hand contains ``position``."""
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
