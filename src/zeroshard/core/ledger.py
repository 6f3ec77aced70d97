"""Who owns which bytes right now?

Units, buckets and optimizers report every allocation and release themselves; nothing is inferred by
patching torch. The memory report and the accounting tests read it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

RESTING = ("parameters", "gradients", "master", "optimizer")
"""Categories of the ZeRO formula: what a rank holds between two phases of a step."""

TEMPORARY = ("gathered", "buckets", "scratch")
"""Categories that exist only inside a phase; their peaks are bounded and listed."""


@dataclass
class Ledger:
    """Live and peak bytes per category and owner on this rank."""

    live: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    peak: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _total: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def hold(self, category: str, owner: str, nbytes: int) -> None:
        """``owner`` now holds ``nbytes`` in ``category`` (replacing what it held; 0 releases)."""
        owners = self.live[category]
        change = nbytes - owners.get(owner, 0)
        if not change:
            return
        if nbytes:
            owners[owner] = nbytes
        else:
            del owners[owner]
        self._total[category] = total = self._total[category] + change
        self.peak[category] = max(self.peak[category], total)

    @contextmanager
    def lend(self, owner: str, nbytes: int) -> Iterator[None]:
        """``owner`` holds ``nbytes`` of scratch memory inside the block."""
        self.hold("scratch", owner, nbytes)
        try:
            yield
        finally:
            self.hold("scratch", owner, 0)

    def nbytes(self, category: str) -> int:
        """Live bytes of a category."""
        return self._total[category]
