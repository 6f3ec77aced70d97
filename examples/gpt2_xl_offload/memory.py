"""How much memory did all ranks hold together, at most?

Each rank looks at itself a few times a second. Proportional memory (PSS) counts a page that several ranks
share, such as torch's code, once over all of them, so that the ranks of a host may be summed.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

PERIOD_S = 0.2


def resident_nbytes() -> int:
    """PSS of this process now."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


class Sampler:
    """Keeps this rank's largest PSS of every fifth of a second, counted on the host's clock."""

    def __init__(self) -> None:
        self._held: dict[int, int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="memory", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.is_set():
            self._note()
            self._over.wait(PERIOD_S / 2)  # twice in each slice: none stays empty

    def _note(self) -> None:
        held, now = resident_nbytes(), int(time.time() / PERIOD_S)
        self._held[now] = max(held, self._held.get(now, 0))

    def peaks(self) -> tuple[int, int]:
        """Bytes that all ranks held at one time, at most: seen, and an upper bound. Collective.

        Seen: the largest sum over one slice of a fifth of a second. What comes and goes within a
        slice on two ranks may be missed or counted together; the sum of each rank's own peak cannot
        be exceeded by any slice.
        """
        self._note()
        mine = dict(self._held)  # the thread goes on
        rows = [mine]
        if dist.is_initialized():
            rows = [{} for _ in range(dist.get_world_size())]
            dist.all_gather_object(rows, mine)
        first, last = max(map(min, rows)), min(map(max, rows))
        sums = [sum(_at(row, slice_) for row in rows) for slice_ in range(first, last + 1)]
        return max(sums), sum(max(row.values()) for row in rows)


def _at(row: dict[int, int], slice_: int) -> int:
    """A rank's bytes in a slice; a busy interpreter leaves some out, and the last ones hold."""
    return next(row[at] for at in range(slice_, min(row) - 1, -1) if at in row)
