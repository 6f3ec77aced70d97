"""Memory bandwidth of this machine, for a given number of threads.

It is the best of several copies and triads over arrays that are much larger than the caches. Bytes are
counted as STREAM counts them: those that the program reads and writes. The cache line that a store
fetches first is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable


def measure(nbytes: int = 256 * 2**20, repeats: int = 8, *, threads: int = 1) -> dict[str, float]:
    """GB/s of ``copy`` (a = b), ``triad`` (a = b + s c) and the better of both.

    With one thread the clock is CPU time, so that other programs count only as far as they use the
    memory bus. With more threads it is wall time.
    """
    import torch

    clock = time.process_time if threads == 1 else time.perf_counter
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        a, b, c = (torch.ones(nbytes // 4) for _ in range(3))
        copy = _best(lambda: a.copy_(b), repeats, clock)
        triad = _best(lambda: torch.add(b, c, alpha=3.0, out=a), repeats, clock)
    finally:
        torch.set_num_threads(before)
    found = {"copy": 2 * nbytes / copy / 1e9, "triad": 3 * nbytes / triad / 1e9}
    found["best"] = max(found.values())
    return {name: float(f"{value:.3g}") for name, value in found.items()}


def _best(call: Callable[[], object], repeats: int, clock: Callable[[], float]) -> float:
    seconds = []
    for _ in range(repeats):
        begin = clock()
        call()
        seconds.append(clock() - begin)
    return min(seconds)
