"""Reports to the ledger what the gradient buffers of one engine hold. Letters as in ``zero/unit.py``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from zeroshard.core.tiers import Tier

if TYPE_CHECKING:
    from zeroshard.core.ledger import Ledger

CATEGORIES = ("gradients", "buckets", "scratch")
GRADIENTS, BUCKETS, SCRATCH = range(3)
_TRANSIENT = (BUCKETS, BUCKETS, SCRATCH, GRADIENTS, GRADIENTS, GRADIENTS)
_KEPT = (GRADIENTS,) * 6
"""The category of each tensor of a buffer, in the order of :meth:`HoldsGrads.flats`."""
_NOTHING = [0, 0, 0]


class HoldsGrads(Protocol):
    """A gradient buffer. ``reported``: bytes in each of :data:`CATEGORIES` that the ledger knows."""

    name: str
    ledger: Ledger
    transient: bool
    tier: Tier
    reported: list[int]

    def flats(self) -> tuple[Tensor | None, ...]:
        """The local sum, input and result of the reduction in flight, the sum of a node, the reduced
        gradient, the whole."""
        ...


def report(buffers: Iterable[HoldsGrads]) -> None:
    """Report the bytes held by buffers that changed at the same time."""
    on_device: list[list[tuple[str, int]]] = [[], [], []]
    ledger: Ledger | None = None
    for buffer in buffers:
        ledger = buffer.ledger
        held, seen = [0, 0, 0], []
        for kind, flat in zip(
            _TRANSIENT if buffer.transient else _KEPT, buffer.flats(), strict=True
        ):
            if flat is not None:
                memory = flat.untyped_storage()
                if (address := memory._cdata) not in seen:  # slices of one storage count once
                    seen.append(address)
                    held[kind] += memory.nbytes()
        before, buffer.reported = buffer.reported, held
        if held == before:
            continue
        if held[GRADIENTS] != before[GRADIENTS] and buffer.tier is not Tier.DEVICE:
            ledger.hold(CATEGORIES[GRADIENTS], buffer.name, held[GRADIENTS], buffer.tier)
            before[GRADIENTS] = held[GRADIENTS]
        for kind, nbytes in enumerate(held):
            if nbytes != before[kind]:
                on_device[kind].append((buffer.name, nbytes))
    if ledger is not None:
        for category, changed in zip(CATEGORIES, on_device, strict=True):
            if changed:
                ledger.hold_all(category, changed)


def report_empty(buffers: Iterable[HoldsGrads]) -> None:
    """Report that buffers hold nothing."""
    filled = [buffer for buffer in buffers if buffer.reported != _NOTHING]
    for buffer in filled:
        if buffer.tier is not Tier.DEVICE:
            buffer.ledger.hold(CATEGORIES[GRADIENTS], buffer.name, 0, buffer.tier)
            buffer.reported[GRADIENTS] = 0
    for kind, category in enumerate(CATEGORIES):
        if changed := [(buffer.name, 0) for buffer in filled if buffer.reported[kind]]:
            filled[0].ledger.hold_all(category, changed)
    for buffer in filled:
        buffer.reported = [0, 0, 0]


def report_new(buffer: HoldsGrads, nbytes: int) -> None:
    """Report a local sum in memory that nothing else of the buffer has."""
    kind = BUCKETS if buffer.transient else GRADIENTS
    buffer.reported[kind] += nbytes
    tier = Tier.DEVICE if kind else buffer.tier
    buffer.ledger.hold_all(CATEGORIES[kind], [(buffer.name, buffer.reported[kind])], tier)


def report_begun(buffers: Sequence[HoldsGrads], result_nbytes: Sequence[int]) -> None:
    """Report reductions into new memory. Their inputs are the local sums that were reported."""
    for buffer, nbytes in zip(buffers, result_nbytes, strict=True):
        buffer.reported[SCRATCH] += nbytes
    changed = [(buffer.name, buffer.reported[SCRATCH]) for buffer in buffers]
    buffers[0].ledger.hold_all(CATEGORIES[SCRATCH], changed)


def report_ended(buffers: Sequence[HoldsGrads], result_nbytes: Sequence[int]) -> None:
    """Report that the results of reductions are the reduced gradients. Nothing else is left."""
    ledger = buffers[0].ledger
    on_device = []
    for buffer, nbytes in zip(buffers, result_nbytes, strict=True):
        buffer.reported = [nbytes, 0, 0]
        if buffer.tier is Tier.DEVICE:
            on_device.append((buffer.name, nbytes))
        else:
            ledger.hold(CATEGORIES[GRADIENTS], buffer.name, nbytes, buffer.tier)
    freed = [(buffer.name, 0) for buffer in buffers]
    ledger.hold_all(CATEGORIES[BUCKETS], freed)
    ledger.hold_all(CATEGORIES[SCRATCH], freed)
    ledger.hold_all(CATEGORIES[GRADIENTS], on_device)
