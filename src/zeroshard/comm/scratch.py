"""Buffers for incoming messages that a communicator keeps and uses again."""

from __future__ import annotations

import torch
from torch import Tensor

_CPU = torch.device("cpu")


class Scratch:
    """Flat buffers that are reused; at most as many as were ever in flight at once."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self.nbytes = self.peak_nbytes = 0

    def take(self, dtype: torch.dtype, numel: int, device: torch.device = _CPU) -> Tensor:
        """A buffer of at least ``numel`` elements on ``device``: the smallest free one, or a new one."""
        same = [t for t in self._free if t.dtype == dtype and t.device == device]
        fits = [t for t in same if t.numel() >= numel]
        if fits:
            best = min(fits, key=Tensor.numel)
            self._free = [t for t in self._free if t is not best]
            return best
        stale = next(iter(same), None)
        if stale is not None:  # too small for this run's units: free it
            self._free = [t for t in self._free if t is not stale]
            self.nbytes -= stale.nbytes
        fresh = torch.empty(numel, dtype=dtype, device=device)
        self.nbytes += fresh.nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
        return fresh

    def give(self, buffer: Tensor) -> None:
        self._free.append(buffer)


class KeepsScratch:
    """What a communicator with a :class:`Scratch` says of its memory."""

    _scratch: Scratch

    @property
    def scratch_nbytes(self) -> int:
        """Bytes kept for incoming chunks, on the device of the reduced tensors."""
        return self._scratch.nbytes

    @property
    def scratch_peak_nbytes(self) -> int:
        """The most of them so far."""
        return self._scratch.peak_nbytes
