"""Reports of one optimizer step, and of the bytes that each rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from zeroshard.core.ledger import RESTING, TEMPORARY, TRANSPORT, Key, Ledger
from zeroshard.core.tiers import TIERS, Tier
from zeroshard.device.choice import read
from zeroshard.device.ops import HostFlag


def learning_rates(groups: Iterable[Mapping[str, Any]]) -> tuple[float, ...]:
    """Of param groups; 0.0 of a group that has none, as those of some optimizers that choose it."""
    rates = [group.get("lr") for group in groups]
    return tuple(0.0 if rate is None else float(rate) for rate in rates)


@dataclass(frozen=True, repr=False)
class StepReport:
    """Numbers of one optimizer step. Tensors stay on the device until a property is read.

    A property raises the diagnosis of a rank that was lost before its number was known.
    """

    step: int  # counted from 1
    lrs: tuple[float, ...]  # one per param group, as used by this step; 0.0: the group has none
    _norm: Tensor | None  # 0-dim, before clipping; None if not computed
    _clip: Tensor | None  # 0-dim factor, at most 1
    _scale: Tensor  # 0-dim loss scale that this step's gradients carried
    _skipped: HostFlag | Tensor | bool  # a flag while the host does not know it
    _loss: Tensor | None = None  # fp64 [2]: sums over ranks of weighted losses, and of weights
    _next_scale: Tensor | None = None  # 0-dim loss scale after this step; None: as before

    def __repr__(self) -> str:
        """The numbers. Waits for the device, as its properties do."""
        names = ("step", "lr", "loss", "grad_norm", "loss_scale", "skipped")
        return f"StepReport({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    @property
    def lr(self) -> float:
        """Learning rate of the first param group, as used by this step."""
        return self.lrs[0] if self.lrs else 0.0

    @cached_property
    def grad_norm(self) -> float | None:
        """2-norm of the averaged, unscaled gradient before clipping."""
        return None if self._norm is None else float(read(self._norm))

    @cached_property
    def grad_norm_clipped(self) -> float | None:
        """2-norm of the gradient after clipping, as the optimizer used it."""
        if self._norm is None or self._clip is None:
            return self.grad_norm
        return float(read(self._norm * self._clip))

    @cached_property
    def loss(self) -> float | None:
        """Mean loss of the step's micro-batches over all ranks that have a loss.

        None if no rank knows its loss: the program called ``loss.backward()`` itself.
        """
        total, weight = (0.0, 0.0) if self._loss is None else read(self._loss)
        return total / weight if weight else None

    @cached_property
    def loss_scale(self) -> float:
        """Factor on the loss of this step; 1 without loss scaling."""
        return float(read(self._scale))

    def tensors(self) -> list[Tensor]:
        """What :meth:`values_of` needs of the device."""
        known = (self._loss, self._norm, self._norm if self._clip is None else self._clip)
        scale = self._scale if self._next_scale is None else self._next_scale
        return [scale, *(each for each in known if each is not None)]

    def values_of(self, numbers: Sequence[float]) -> dict[str, float]:
        """The values of monitors by name, from the numbers of :meth:`tensors`.

        The loss scale is that after the step, as in DeepSpeed's monitors.
        """
        scale, *rest = numbers
        values = {"loss_scale": scale}
        if self._loss is not None:
            total, weight, *rest = rest
            if weight:
                values["train_loss"] = total / weight
        if self._norm is not None:
            norm, clip = rest
            values["grad_norm"] = norm
            values["grad_norm_clipped"] = norm if self._clip is None else norm * clip
        return values

    @cached_property
    def skipped(self) -> bool:
        """True if the gradient was not finite and nothing was updated."""
        return bool(self._skipped)


OUTSIDE = ("activations", "peak")
"""Memory of the device that the engine does not hold, at most at the starts of backwards that were looked
at; and the most that was in use of the device, or on a CPU by the process."""


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Bytes of one category on one rank. ``planned`` is None for temporaries, which have no plan."""

    category: str
    planned: int | None
    measured: int
    tier: str = Tier.DEVICE.name


@dataclass(frozen=True)
class MemoryReport:
    """Planned and measured bytes per category and tier, for each rank in the report."""

    ranks: Mapping[int, tuple[MemoryRow, ...]]
    notes: tuple[str, ...] = ()
    """What the engine chose by the memory of the ranks, in words."""

    @property
    def rows(self) -> tuple[MemoryRow, ...]:
        """Rows of the lowest rank: all categories on the device, then other tiers in use."""
        return self.ranks[min(self.ranks)]

    def __str__(self) -> str:
        """A table in MiB: one line per rank and category, two columns for each tier in use; notes."""
        used = {row.tier for rows in self.ranks.values() for row in rows}
        tiers = [tier.name for tier in TIERS.values() if tier.name in used]
        heads = "".join(f"{f'{tier} planned':>18}{'measured':>12}" for tier in tiers)
        lines = [f"{'rank':>4}  {'category':<12}{heads}  (MiB)"]
        for rank, rows in sorted(self.ranks.items()):
            cells = {(row.category, row.tier): row for row in rows}
            for category in dict.fromkeys(row.category for row in rows):
                line = f"{rank:>4}  {category:<12}"
                for tier in tiers:
                    line += _cells(cells.get((category, tier)))
                lines.append(line.rstrip())
        return "\n".join([*lines, *self.notes])


def _cells(row: MemoryRow | None) -> str:
    if row is None:
        return f"{'':>30}"
    planned = "" if row.planned is None else f"{row.planned / 2**20:.2f}"
    return f"{planned:>18}{row.measured / 2**20:>12.2f}"


def memory_rows(planned: Mapping[Key, int], measured: Mapping[Key, int]) -> tuple[MemoryRow, ...]:
    """Categories with a plan, then peaks; tiers other than the device only if in use."""
    rows = []
    for tier in TIERS.values():
        for name in (*RESTING, *TEMPORARY):
            plan = planned[name, tier] if name in RESTING else None
            if tier is Tier.DEVICE or plan or measured[name, tier]:
                rows.append(MemoryRow(name, plan, measured[name, tier], tier.name))
    rows += [MemoryRow(name, None, measured[name, Tier.DEVICE]) for name in OUTSIDE]
    return tuple(rows)


_OUTSIDE_KEYS: list[Key] = [(name, Tier.DEVICE) for name in OUTSIDE]


def _keys(categories: Sequence[str]) -> list[Key]:
    return [(name, tier) for tier in TIERS.values() for name in categories]


def rows_from_vector(vector: Sequence[float]) -> tuple[MemoryRow, ...]:
    """The inverse of :func:`vector_of`."""
    keys = _keys(RESTING)
    planned = dict(zip(keys, map(int, vector), strict=False))
    rest = map(int, vector[len(keys) :])
    keys = [*_keys((*RESTING, *TEMPORARY)), *_OUTSIDE_KEYS]
    measured = dict(zip(keys, rest, strict=True))
    return memory_rows(planned, measured)


def vector_of(planned: Mapping[Key, int], measured: Mapping[Key, int]) -> list[float]:
    """Planned and measured bytes as numbers that ranks can exchange."""
    return [
        *(float(planned[key]) for key in _keys(RESTING)),
        *(float(measured[key]) for key in (*_keys((*RESTING, *TEMPORARY)), *_OUTSIDE_KEYS)),
    ]


def measured_nbytes(
    ledger: Ledger, transport_nbytes: int, outside: Mapping[str, int]
) -> dict[Key, int]:
    """Bytes held now, and peaks of temporaries.

    ``transport_nbytes``: the most that the communicators held. ``outside``: see :data:`OUTSIDE`.
    """
    measured = {key: ledger.nbytes(*key) for key in _keys(RESTING)}
    measured |= {key: ledger.peak(*key) for key in _keys(TEMPORARY)}
    for tier in TIERS.values():  # gradients exist only from backward to step
        measured["gradients", tier] = ledger.peak("gradients", tier)
    measured[TRANSPORT, Tier.DEVICE] = transport_nbytes
    measured |= {(name, Tier.DEVICE): outside[name] for name in OUTSIDE}
    return measured
