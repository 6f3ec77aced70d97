"""The numbers that the host reads from the device in each step, as one vector.

float64 ``[2 + L + C]``: the factor of the gradients; whether the step is skipped; if shards are stored
outside the device (L = 1, else 0), the number of one of which an edit was lost, counted from 1; for each
of C chunks, whether the program edited its parameter. One copy per step, behind the gradients, so no
thread waits for the device where it could compute.

The number of the shard travels with the norm of the gradient (:mod:`zeroshard.zero.clip`), so that all
ranks raise the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from zeroshard.device.copy_streams import CopyHandle, CopyStreams
from zeroshard.errors import UsageError


class WatchedShard(Protocol):
    """A unit's shard outside the device, and whether its full parameters were edited in a hidden way."""

    name: str

    def take_edited(self) -> Tensor | None:
        """0-dim bool on the device: was there such an edit since the last call? None: it was not used."""


class WatchedChunk(Protocol):
    """A chunk whose parameter is on the device, and in host memory for its update."""

    def prints(self) -> tuple[Tensor, Tensor]:
        """Fingerprints of the parameter on the device: now, and when it was equal to the host's copy."""


class StepNumbers:
    """The vector of one engine. See the module.

    ``take(numel, dtype)`` gives host memory. ``shards`` may grow until the first step.
    """

    def __init__(
        self,
        streams: CopyStreams,
        take: Callable[[int, torch.dtype], Tensor],
        shards: Sequence[WatchedShard],
    ) -> None:
        self._streams = streams
        self._take = take
        self._shards = shards
        self._chunks: list[WatchedChunk] = []
        self.lost_on_any_rank: Tensor | None = None  # 0-dim: the number, largest of all ranks
        self._lost: list[Tensor | None] = []  # on this rank since the last step, by shard
        self._host: Tensor | None = None
        self._step: object = None
        self._arrival: CopyHandle | None = None

    def watch(self, chunk: WatchedChunk) -> int:
        """Compare the chunk's parameter in each step. Returns its number for :meth:`is_edited`."""
        self._chunks.append(chunk)
        return len(self._chunks) - 1

    def lost_edit(self, device: torch.device) -> Tensor | None:
        """``[1]`` on ``device``: the number of a shard of which this rank has lost an edit; 0: none.

        Since the last step; counted from 1. None: every shard is stored on the device.
        """
        if not self._shards:
            return None
        now = [shard.take_edited() for shard in self._shards]
        before = self._lost or [None] * len(now)
        self._lost = [
            new if old is None else old if new is None else old | new
            for old, new in zip(before, now, strict=True)
        ]
        found = [(at, lost) for at, lost in enumerate(self._lost, 1) if lost is not None]
        if not found:
            return torch.zeros(1, dtype=torch.float64, device=device)
        return torch.stack([at * lost.double() for at, lost in found]).amax().view(1)

    def send(self, step: object, factor: Tensor, found_inf: Tensor | None) -> None:
        """Start copying the numbers. Only the first call for a ``step`` does, which is any new object.

        ``factor``: 0-dim. ``found_inf``: 0-dim, 1 if the step is skipped; None if it is not.
        """
        if step is self._step:
            return
        self._step = step
        no = torch.zeros((), dtype=torch.bool, device=factor.device)
        skipped = no if found_inf is None else found_inf != 0
        parts = [torch.stack([factor.double(), skipped.double()])]
        if self._shards:
            assert self.lost_on_any_rank is not None, "the norm is exchanged first"
            parts.append(self.lost_on_any_rank.view(1))
        self.lost_on_any_rank, self._lost = None, []
        if self._chunks:
            now, then = zip(*(chunk.prints() for chunk in self._chunks), strict=True)
            parts.append((torch.stack(now) != torch.stack(then)).double())
        numbers = torch.cat(parts)
        if self._host is None:
            self._host = self._take(numbers.numel(), torch.float64)
        self._arrival = self._streams.d2h(numbers, self._host)

    def wait(self) -> None:
        """Block this thread until the numbers are on the host.

        Raises:
            UsageError: an edit was lost.
        """
        assert self._arrival is not None
        self._arrival.synchronize()
        assert self._host is not None
        if self._shards and (lost := int(self._host[2])):
            raise UsageError(
                f"parameters of {self._shards[lost - 1].name!r} were written inside forward or backward, "
                "on at least one rank, in a way that PyTorch does not count, such as "
                "param.data.mul_(...). They are stored in host memory or on disk (offload_param), so the "
                "values are lost. Write them in place under torch.no_grad(), or inside "
                "zeroshard.zero.GatheredParameters(params, modifier_rank=0)."
            )

    @property
    def factor(self) -> float:
        """The factor by which updates multiply gradients. Valid after :meth:`wait`, as all below."""
        assert self._host is not None
        return float(self._host[0])

    @property
    def is_skipped(self) -> bool:
        """Whether the gradient of the step was not finite on some rank."""
        assert self._host is not None
        return bool(self._host[1])

    def is_edited(self, chunk: int) -> bool:
        """Whether the program wrote into the chunk's parameter since it was copied to the device."""
        assert self._host is not None
        return bool(self._host[2 + bool(self._shards) + chunk])


def numbers_numel(shards: int, chunks: int) -> int:
    """Elements of the vector."""
    return 2 + bool(shards) + chunks
