"""Runs the largest planned micro-batch, and one more sample, under a real limit of memory.

    python tools/batch_limits.py                                # ten configurations, ten minutes
    python tools/batch_limits.py --out benchmarks/results/F.json

For each configuration a limit is drawn halfway between what four and what five samples need: as planned,
and what a first run without a limit had beside its plan, such as stacks of threads and arenas of malloc.
Two ranks then train under this limit: with the largest micro-batch that fits by the plan, which must
run, and with one sample more, which must end in the error that says what memory was held.

The limit is ``RLIMIT_DATA`` above what the process has while a small engine is open. It counts private
writable memory. ``RLIMIT_AS`` also counts address space that is only reserved: mapped libraries and
arenas of malloc, gigabytes that change from run to run. ``RLIMIT_DATA`` does not count windows of shared
memory, so the ranks communicate through p2p. Needs Transformers.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import resource
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from plan_check import (
    BLOCK_NBYTES,
    LARGE,
    SMALL,
    Case,
    _batch,
    build,
    planned,
    return_all_blocks,
    settings,
    swap_folder,
)
from zeroshard_testing.ranks import run_ranks

import zeroshard
from zeroshard.planner.changes import largest_batch
from zeroshard.planner.simulated import highest

TOLD = "could not be allocated"
"""Words of the error, which also has the memory of the rank at that moment."""

SIZE = replace(LARGE, tokens=256)
LONG = replace(LARGE, tokens=512)
"""For checkpointed runs, so that a sample is more than what is not planned."""
SAMPLES = 4
CASES = [
    Case("gpt2", 0, False, size=SIZE),
    Case("gpt2", 1, False, size=SIZE),
    Case("gpt2", 2, True, size=LONG),
    Case("gpt2", 3, False, size=SIZE),
    Case("gpt2", 3, True, "cpu", size=LONG),
    Case("llama", 1, True, size=LONG),
    Case("llama", 2, False, "cpu", size=SIZE),
    Case("llama", 3, False, size=SIZE),
    Case("bert", 2, False, size=SIZE),
    Case("t5", 3, False, size=SIZE),
]


def peak_nbytes(case: Case, samples: int) -> int:
    """Planned bytes of a rank in device and host memory, which are one on a CPU rank."""
    moment = highest(planned(replace(case, size=replace(case.size, batch=samples))).moments)[1]
    in_host = sum(nbytes for (_, tier), nbytes in moment.held.items() if tier == "host")
    return int(moment.device_nbytes + in_host)


def data_nbytes() -> int:
    """What ``RLIMIT_DATA`` counts of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmData")).split()[1])


def _train_within(case: Case, limit_nbytes: int | None, folder: str) -> int:
    """Train while this rank may have ``limit_nbytes`` more than with a small engine that is open.

    ``limit_nbytes``: None: any number. Returns the bytes that the process has more afterwards, without
    those that the engine counts.
    """
    return_all_blocks()
    with _engine(replace(case, size=SMALL), folder) as engine:  # imports, threads, compiled kernels
        _steps(engine, replace(case, size=SMALL))
        gc.collect()
        return_all_blocks()
        before = data_nbytes()
    dist.barrier()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if limit_nbytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (before + limit_nbytes, hard))
    try:
        with _engine(case, folder) as engine:
            _steps(engine, case)
            gc.collect()
            return_all_blocks()
            counted: int = engine.runtime.ledger.totals()[0] + engine._watch.scratch_nbytes
            return max(0, data_nbytes() - before - counted)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _engine(case: Case, folder: str) -> Any:
    return zeroshard.Engine(build(case)(), config=settings(case, folder))


def _steps(engine: Any, case: Case) -> None:
    size = replace(case.size, batch=engine.train_micro_batch_size_per_gpu())
    batch, _ = _batch(replace(case, size=size))
    for _ in range(2 * engine.gradient_accumulation_steps()):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        del loss


def run(case: Case, samples: int, limit_nbytes: int | None) -> list[Any]:
    """What :func:`_train_within` returns or raises on each rank, with ``samples`` in a micro-batch."""
    case = replace(case, size=replace(case.size, batch=samples))
    with swap_folder() as folder:
        given = (case, limit_nbytes, folder)
        found: list[Any] = run_ranks(
            _train_within, case.ranks, *given, timeout=700, keep_exceptions=True
        )
    return found


def ends(case: Case, samples: int, limit_nbytes: int) -> list[str]:
    """How the ranks end with ``samples`` in a micro-batch: "", or the text of the error."""
    found = run(case, samples, limit_nbytes)
    return ["" if isinstance(each, int) else f"{type(each).__name__}: {each}" for each in found]


def unplanned_nbytes(case: Case) -> int:
    """What a rank has beside what is planned, in a run without a limit; the mean of the ranks."""
    found: list[int] = run(case, SAMPLES, None)
    return sum(found) // len(found)


def row_of(case: Case) -> dict[str, Any]:
    """The planned largest micro-batch of a case under a limit, and how it and the next one end."""
    beside = unplanned_nbytes(case)
    planned_nbytes = (peak_nbytes(case, SAMPLES) + peak_nbytes(case, SAMPLES + 1)) // 2
    samples, next_nbytes = largest_batch(lambda count: peak_nbytes(case, count), planned_nbytes)
    limit_nbytes = planned_nbytes + beside
    fits, next_one = ends(case, samples, limit_nbytes), ends(case, samples + 1, limit_nbytes)
    return {
        "case": case.name, "size": asdict(case.size), "limit_nbytes": limit_nbytes,
        "unplanned_nbytes": beside, "samples": samples,
        "planned_nbytes": peak_nbytes(case, samples), "next_planned_nbytes": next_nbytes,
        "runs": not any(fits), "next_is_told": any(TOLD in text for text in next_one),
        "ends": fits, "next_ends": [text.partition("\n")[0] for text in next_one],
    }  # fmt: skip


def _write(path: Path | None, rows: list[dict[str, Any]]) -> None:
    if path is not None:
        date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        kept = {"date": date, "torch": torch.__version__, "rows": rows}
        path.write_text(json.dumps(kept, indent=1) + "\n")


def main() -> None:
    """Try all cases. Exit code 1: the answer of a case does not run, or one more sample does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    given = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(BLOCK_NBYTES)  # ranks inherit it, engines leave it
    rows = []
    for case in CASES:
        rows.append(row_of(case))
        row = rows[-1]
        print(
            f"{row['case']:46} limit {row['limit_nbytes'] / 1e6:6.1f} MB, of which "
            f"{row['unplanned_nbytes'] / 1e6:4.1f} unplanned: {row['samples']} samples "
            f"{'run' if row['runs'] else 'DO NOT RUN'}, one more "
            f"{'ends with its reason' if row['next_is_told'] else 'DOES NOT'}",
            flush=True,
        )
    _write(given.out, rows)
    sys.exit(not all(row["runs"] and row["next_is_told"] for row in rows))


if __name__ == "__main__":
    main()
