"""Counts the bytes that each owner holds on this rank.

Units, buckets, optimizers and stores report what they allocate and release; torch is not patched. The
memory report and the accounting tests read the counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from zeroshard.core.tiers import Tier

RESTING = ("parameters", "gradients", "master", "optimizer")
"""Categories of the ZeRO formula: what a rank holds between two phases of a step."""

TRANSPORT = "transport"
"""What the communicators of a rank hold: windows of shared memory, buffers for incoming chunks."""

TEMPORARY = ("gathered", "buckets", "scratch", TRANSPORT)
"""Categories that exist only inside a phase. Their peaks are bounded and reported.

A ledger has nothing of the transport, which is asked itself.
"""

Key = tuple[str, Tier]
"""A category and a tier."""


@dataclass
class Ledger:
    """Live and peak bytes per category, tier and owner on this rank.

    Keys have the name of a tier, not the tier: Python keeps the hash of a text, and a step makes about
    ten calls for each unit.
    """

    live: dict[tuple[str, str], dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    _peak: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    _total: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))

    def hold(self, category: str, owner: str, nbytes: int, tier: Tier = Tier.DEVICE) -> None:
        """Record that ``owner`` now holds ``nbytes`` in ``category`` (0: nothing)."""
        self.hold_all(category, [(owner, nbytes)], tier)

    def hold_all(
        self, category: str, held: Iterable[tuple[str, int]], tier: Tier = Tier.DEVICE
    ) -> None:
        """Record what some owners hold now. The peak counts what they hold together at the end."""
        key = category, tier.name
        owners, total = self.live[key], self._total[key]
        for owner, nbytes in held:
            if owner in owners:
                total -= owners[owner]
                if not nbytes:
                    del owners[owner]
            if nbytes:
                owners[owner] = nbytes
                total += nbytes
        self._total[key] = total
        if total > self._peak[key]:  # noqa: PLR1730  (max() is a call)
            self._peak[key] = total

    @contextmanager
    def lend(self, owner: str, nbytes: int, tier: Tier = Tier.DEVICE) -> Iterator[None]:
        """Record that ``owner`` holds ``nbytes`` of scratch memory inside the block."""
        self.hold("scratch", owner, nbytes, tier)
        try:
            yield
        finally:
            self.hold("scratch", owner, 0, tier)

    def count_peak(self, category: str, nbytes: int, tier: Tier = Tier.DEVICE) -> None:
        """Record that one operation, which is about to start, holds ``nbytes`` until it ends.

        Only the peak can show them, so this costs less than :meth:`lend`.
        """
        key = category, tier.name
        if (held := self._total[key] + nbytes) > self._peak[key]:
            self._peak[key] = held

    def nbytes(self, category: str, tier: Tier = Tier.DEVICE) -> int:
        """Live bytes of a category."""
        return self._total[category, tier.name]

    def peak(self, category: str, tier: Tier = Tier.DEVICE) -> int:
        """The most bytes that the category has held."""
        return self._peak[category, tier.name]

    def totals(self, *, but: str = "") -> tuple[int, int]:
        """Live bytes in all tiers, and those on the device, without the category ``but``."""
        device = Tier.DEVICE.name
        counted = [(tier, held) for (name, tier), held in self._total.items() if name != but]
        return sum(n for _, n in counted), sum(n for tier, n in counted if tier == device)

    def held(self) -> dict[tuple[str, str], int]:
        """Live bytes by category and name of a tier; a copy."""
        return dict(self._total)
