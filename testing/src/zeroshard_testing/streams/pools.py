"""``torch.cuda.MemPool`` of the pretended machine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from zeroshard_testing.streams.machine import Machine


class MemPool:
    """``torch.cuda.MemPool``. The machine knows it by its number."""

    _numbers = itertools.count(1)

    def __init__(
        self, allocator: Any = None, use_on_oom: bool = False, no_split: bool = False
    ) -> None:
        del use_on_oom, no_split
        self.allocator = allocator
        self.number = next(self._numbers)

    @property
    def id(self) -> tuple[int, int]:
        """The name that torch's allocator has for it."""
        return (0, self.number)


def pools_of(machine: Machine) -> dict[str, Any]:
    """What ``torch.cuda`` has for pools. In ``use_mem_pool`` only the calling thread uses the pool."""

    @contextmanager
    def use_mem_pool(pool: MemPool, device: Any = None) -> Iterator[None]:
        del device
        thread = machine.thread()
        before, thread.pool = thread.pool, pool.number
        try:
            yield
        finally:
            thread.pool = before

    return {"MemPool": MemPool, "use_mem_pool": use_mem_pool}
