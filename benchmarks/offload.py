"""A9: the cost of offload to host memory and to disk, and the disk bandwidth that offload reaches.

Compares steps with offload to steps without it, and the bytes that they move to the formula. Compares
``Pager.walk`` through pages on disk to a plain loop of the same system calls.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from comparability import Row, statistics
from interleaving import Clock, Say, WorkerGroup, alternating, running
from models import GPTTask, Shape
from systems import ADAMW, CLIP
from tiers import OFFLOAD_SETTINGS, deepspeed_cpu_line, disk_problem, lines
from training import Line, RunLength, TrainingSession, compare

TITLE = "A9  steps with state in host memory or on disk: 2 ranks, 128 tokens each"
DISK_TITLE = "A9  the disk: 64 pages of 24 MiB read, and written back, 1 process"
ZEROSHARD = "ZeroShard, Pager.walk"
MIB = 2**20

PAGE_NBYTES, PAGES = 24 * MIB, 64
BLOCK_NBYTES, AHEAD = 8 * MIB, 3
"""Of the plain loop. Its blocks are as large as those of ``SwapFile``. Reads are three blocks ahead of
writes."""

RAW = {f"raw O_DIRECT loop, {threads} threads": threads for threads in (2, 4, 8)}
"""Threads of each plain loop. ``SwapFile`` uses four. The best number depends on the disk, so the best
loop of a round counts."""

STEP_ROUNDS, DISK_ROUNDS = 5, 3


# ---------------------------------------------------------------------- steps


@dataclass(frozen=True)
class OffloadJob:
    """Train with the line of this title."""

    line: str
    task: GPTTask
    directory: str

    def prepare(self) -> None:
        """Nothing: the measured memory includes what the system opens."""

    def open(self, rank: int) -> TrainingSession:
        """Build the system on this rank."""
        found = {line.title: line for line in lines(self.directory, peers=False)}
        found |= {system.name: Line(system) for system in (deepspeed_cpu_line(s) for s in (2, 3))}
        trainer = found[self.line].system.build(self.task.model(), 1)
        return TrainingSession(trainer, self.task.data(rank, 8), 1)


def run(say: Say, *, smoke: bool, rounds: int | None = None, directory: str) -> dict[str, Any]:
    """One row per setting, with the bytes that a rank moves in a step: counted, and by the formula."""
    shape = Shape(vocabulary=256, width=64, layers=2, heads=2, context=16) if smoke else Shape()
    task = GPTTask(shape)
    length = RunLength(2, 2, 1) if smoke else RunLength(3, rounds or STEP_ROUNDS, 3)
    make = partial(_job, task=task, directory=directory)
    rows = compare("a9", lines(directory, peers=not smoke), task, length, say, job=make)
    parameters = sum(p.numel() for p in task.model().parameters())
    settings = {setting.name: setting for setting in OFFLOAD_SETTINGS}
    for row in rows:
        if (setting := settings.get(row["name"])) is not None and "moved_nbytes" in row:
            row["reference"] = setting.reference
            row["theory_nbytes"] = setting.theory(parameters // row["ranks"])
    return {
        "title": TITLE,
        "settings": {
            "task": asdict(task),
            "parameters": parameters,
            "micro_batches": 1,
            "threads_per_rank": 1,
            "adamw": ADAMW,
            "clip": CLIP,
            "directory": directory,
            "warm_up_steps": length.warm_up,
            "rounds": length.rounds,
            "steps_per_turn": length.burst,
        },
        "rows": rows,
    }


def _job(line: Line, *, task: GPTTask, directory: str) -> OffloadJob:
    return OffloadJob(line.title, task, directory)


# ---------------------------------------------------------------------- the disk by itself


@dataclass(frozen=True)
class DiskJob:
    """Pages on disk, and a file of the same size for the plain loop."""

    directory: str
    pages: int
    page_nbytes: int

    def prepare(self) -> None:
        """Nothing."""

    def open(self, rank: int) -> DiskSession:
        """Write both files once: blocks that were never written are not read from the disk."""
        del rank
        return DiskSession(self)


class DiskSession:
    """``turn(name)`` reads and writes all pages once. It returns CPU and wall seconds."""

    def __init__(self, job: DiskJob) -> None:
        from zeroshard.offload.pager import Pager, slot_sizes
        from zeroshard.offload.swap_file import SwapFile

        self._file = SwapFile(job.directory)
        self._pager = Pager(self._file, slot_sizes([job.page_nbytes] * job.pages))
        self._pages = [self._pager.page(job.page_nbytes) for _ in range(job.pages)]
        self._raw = RawLoop(job.directory, job.pages * job.page_nbytes)
        for page in self._pager.walk(self._pages):
            page.bytes.random_()

    def turn(self, request: str) -> dict[str, float]:
        """One pass of the pager or of the plain loop."""
        clock = Clock()
        if request == ZEROSHARD:
            for _ in self._pager.walk(self._pages):
                pass
        else:
            self._raw.turn(RAW[request])
        cpu, wall = clock.read()
        return {"cpu": cpu, "wall": wall, "direct": float(self._file.direct and self._raw.direct)}

    def close(self) -> None:
        """Free both files."""
        self._pager.close()
        self._file.close()
        self._raw.close()


class RawLoop:
    """The plain loop: threads that read and write blocks of one file, each through its own buffer."""

    def __init__(self, directory: str, nbytes: int) -> None:
        from zeroshard.core.files import turn_direct
        from zeroshard.memory.host_memory import aligned_bytes, allocate, memory_at, open_unnamed

        self._fd, _ = open_unnamed(directory)
        self.direct = turn_direct(self._fd)
        allocate(self._fd, 0, nbytes)
        self._offsets = range(0, nbytes, BLOCK_NBYTES)
        self._nbytes = nbytes
        tensors = [aligned_bytes(BLOCK_NBYTES).random_() for _ in range(max(RAW.values()))]
        self._memory = [memory_at(tensor.data_ptr(), BLOCK_NBYTES) for tensor in tensors]
        self._tensors = tensors
        self._run(((offset, True) for offset in self._offsets), threads=4)

    def turn(self, threads: int) -> None:
        """Read every block. Write it ``AHEAD`` blocks later."""
        self._run(self._orders(), threads)

    def _orders(self) -> Iterator[tuple[int, bool]]:
        blocks = list(self._offsets)
        for at in range(len(blocks) + AHEAD):
            if at < len(blocks):
                yield blocks[at], False
            if at >= AHEAD:
                yield blocks[at - AHEAD], True

    def _run(self, orders: Iterator[tuple[int, bool]], threads: int) -> None:
        lock, failures = threading.Lock(), list[BaseException]()

        def serve(memory: memoryview) -> None:
            try:
                while True:
                    with lock:
                        order = next(orders, None)
                    if order is None or failures:
                        return
                    offset, writes = order
                    part = memory[: min(BLOCK_NBYTES, self._nbytes - offset)]
                    call = os.pwritev if writes else os.preadv
                    moved = call(self._fd, [part], offset)
                    if moved != len(part):
                        raise OSError(f"{moved} of {len(part)} bytes were moved at {offset}")
            except BaseException as error:
                failures.append(error)

        running = [
            threading.Thread(target=serve, args=(memory,)) for memory in self._memory[:threads]
        ]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        if failures:
            raise failures[0]

    def close(self) -> None:
        """Free the file."""
        os.close(self._fd)


def run_disk(say: Say, *, smoke: bool, rounds: int | None = None, directory: str) -> dict[str, Any]:
    """The pager and the plain loops in turns, in one process.

    A row per loop has its times. ``share_of_raw``: bandwidth of the pager ÷ that of the best plain loop
    of the same round.
    """
    pages, page_nbytes = (8, MIB) if smoke else (PAGES, PAGE_NBYTES)
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in (ZEROSHARD, *RAW)}
    error, problem = "", disk_problem(directory)
    if not problem:
        group = WorkerGroup("the disk", DiskJob(directory, pages, page_nbytes), ranks=1)
        with running([group], say):
            for number, kind in alternating(list(found), 1 if smoke else rounds or DISK_ROUNDS):
                say(f"round {number + 1}: {kind}")
                found[kind].extend(group.turn(kind))
        error = group.error
    unavailable = {"absent": problem} if problem else {"error": error}
    failed = bool(problem or error)
    rows: list[Row] = [
        {"name": kind, **(unavailable if failed else _disk_row(records, 2 * pages * page_nbytes))}
        for kind, records in found.items()
    ]
    result = {
        "title": DISK_TITLE,
        "settings": {"directory": directory, "pages": pages, "page_nbytes": page_nbytes},
        "rows": rows,
    }
    if not failed:
        rounds_of_raw = zip(*(found[kind] for kind in RAW), strict=True)
        best = [min(record["wall"] for record in raw) for raw in rounds_of_raw]
        pairs = zip(best, found[ZEROSHARD], strict=True)
        result["share_of_raw"] = statistics([raw / own["wall"] for raw, own in pairs])
    return result


def _disk_row(records: list[dict[str, float]], nbytes: int) -> Row:
    wall = statistics([1000 * record["wall"] for record in records])
    return {
        "cpu_ms": statistics([1000 * record["cpu"] for record in records]),
        "wall_ms": wall,
        "gb_per_s": float(f"{nbytes / wall['median'] / 1e6:.3g}"),
        "direct": all(record["direct"] for record in records),
    }
