"""What did the last step do, and who holds how many bytes?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from zeroshard.core.ledger import RESTING, TEMPORARY


class HostFlag:
    """A 0-dim flag on its way to the host. Reading waits for what made it, not for later work."""

    def __init__(self, flag: Tensor) -> None:
        self._flag, self._arrival = flag, None
        if flag.is_cuda:
            self._flag = torch.empty((), dtype=flag.dtype, pin_memory=True)
            self._flag.copy_(flag, non_blocking=True)
            self._arrival = torch.cuda.Event()
            self._arrival.record()

    def __bool__(self) -> bool:
        if self._arrival is not None:
            self._arrival.synchronize()
        return bool(self._flag)


@dataclass(frozen=True)
class StepReport:
    """Numbers of one optimizer step. Tensors stay on the device until somebody reads them."""

    step: int  # counted from 1
    lrs: tuple[float, ...]  # one per param group, as used by this step
    _norm: Tensor | None  # 0-dim, before clipping; None if not computed
    _clip: Tensor | None  # 0-dim factor, at most 1
    _scale: Tensor  # 0-dim loss scale that this step's gradients carried
    _found_inf: HostFlag | None  # None where nothing is checked

    @property
    def lr(self) -> float:
        """Learning rate of the first param group, as used by this step."""
        return self.lrs[0] if self.lrs else 0.0

    @cached_property
    def grad_norm(self) -> float | None:
        """2-norm of the averaged, unscaled gradient before clipping."""
        return None if self._norm is None else float(self._norm)

    @cached_property
    def grad_norm_clipped(self) -> float | None:
        """The same after clipping: what the optimizer saw."""
        if self._norm is None or self._clip is None:
            return self.grad_norm
        return float(self._norm * self._clip)

    @cached_property
    def loss_scale(self) -> float:
        """Factor on the loss of this step (1 without fp16)."""
        return float(self._scale)

    @cached_property
    def skipped(self) -> bool:
        """True if the gradient was not finite and nothing was updated."""
        return self._found_inf is not None and bool(self._found_inf)


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Bytes of one category on one rank. ``planned`` is None for temporaries: only bounded."""

    category: str
    planned: int | None
    measured: int


@dataclass(frozen=True)
class MemoryReport:
    """Planned and measured bytes per category, for each rank that was asked."""

    ranks: Mapping[int, tuple[MemoryRow, ...]]

    @property
    def rows(self) -> tuple[MemoryRow, ...]:
        """Rows of the lowest rank in the report."""
        return self.ranks[min(self.ranks)]

    def __str__(self) -> str:
        header = f"{'rank':>4}  {'category':<12}{'planned MiB':>14}{'measured MiB':>14}"
        lines = [header]
        for rank, rows in sorted(self.ranks.items()):
            for row in rows:
                planned = "" if row.planned is None else f"{row.planned / 2**20:.2f}"
                lines.append(
                    f"{rank:>4}  {row.category:<12}{planned:>14}{row.measured / 2**20:>14.2f}"
                )
        return "\n".join(lines)


def memory_rows(planned: Mapping[str, int], measured: Mapping[str, int]) -> tuple[MemoryRow, ...]:
    """Resting categories with their plan, then the peaks of temporaries."""
    resting = [MemoryRow(name, planned[name], measured[name]) for name in RESTING]
    return (*resting, *(MemoryRow(name, None, measured[name]) for name in TEMPORARY))


def rows_from_vector(vector: Sequence[float]) -> tuple[MemoryRow, ...]:
    """Inverse of :func:`vector_of`."""
    count = len(RESTING)
    planned = dict(zip(RESTING, map(int, vector[:count]), strict=True))
    names = (*RESTING, *TEMPORARY)
    measured = dict(zip(names, map(int, vector[count:]), strict=True))
    return memory_rows(planned, measured)


def vector_of(planned: Mapping[str, int], measured: Mapping[str, int]) -> list[float]:
    """Plan and measurement as numbers that ranks can exchange."""
    return [float(planned[n]) for n in RESTING] + [
        float(measured[n]) for n in (*RESTING, *TEMPORARY)
    ]
