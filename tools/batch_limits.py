"""Runs the largest planned micro-batch, and one more sample, under a real limit of memory.

    python tools/batch_limits.py                                # ten configurations, ten minutes
    python tools/batch_limits.py --out benchmarks/results/F.json
    python tools/batch_limits.py --remedies                     # what the error prints is applied

For each configuration a limit is drawn halfway between what four and what five samples need: as planned,
and what a first run without a limit had beside its plan, such as stacks of threads and arenas of malloc.
Two ranks then train under this limit: with the largest micro-batch that fits by the plan, which must
run, and with one sample more, which must end in the error that says what memory was held. With
``--remedies`` each change that this error prints is then applied as printed, and must make the run fit.

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
import re
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from plan_check import (
    BLOCK_NBYTES,
    DEEP,
    LARGE,
    SMALL,
    Case,
    Size,
    _batch,
    build,
    planned,
    return_all_blocks,
    settings,
    swap_folder,
)

import zeroshard
from zeroshard.engine import simulated_changes
from zeroshard.planner.changes import merged
from zeroshard.planner.largest_batch import largest_batch
from zeroshard.planner.simulate import highest
from zeroshard.testing.ranks import run_ranks

TOLD = "could not be allocated"
"""Words of the error, which also has the memory of the rank at that moment."""

OFFERED = 3
"""Changes that the error prints, if so many are enough."""

UNSURE = "none of them alone is sure"
"""Words of it where no change alone may be enough."""

PATIENT = {"simulate_changes_s": 600}
"""The section ``trust``: this machine may be slow."""

SIMULATED = "each simulated"
"""Words of it if the changes were simulated."""

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
WIDER, DEEPER = (
    replace(DEEP, tokens=128),
    Size(width=384, layers=16, words=512, batch=4, tokens=96),
)
REMEDIED = [
    Case("llama", 0, False, size=WIDER),
    Case("bert", 0, False, size=WIDER),
    Case("gpt2", 1, False, ranks=3, size=DEEPER),
    Case("t5", 1, False, ranks=3, size=DEEPER),
    Case("llama", 2, False, ranks=3, size=DEEPER),
]
"""Runs whose changes are applied. States are a large part, so that a higher stage frees enough too."""


def peak_nbytes(case: Case, samples: int) -> int:
    """Planned bytes of a rank in device and host memory, which are one on a CPU rank."""
    moment = highest(planned(replace(case, size=replace(case.size, batch=samples))).moments)[1]
    in_host = sum(nbytes for (_, tier), nbytes in moment.held.items() if tier == "host")
    return int(moment.device_nbytes + in_host)


def data_nbytes() -> int:
    """What ``RLIMIT_DATA`` counts of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmData")).split()[1])


def _train_within(
    case: Case, limit_nbytes: int | None, folder: str, changes: Mapping[str, Any] | None = None
) -> int:
    """Train while this rank may have ``limit_nbytes`` more than with a small engine that is open.

    ``limit_nbytes``: None: any number. ``changes``: to the configuration. Returns the bytes that the
    process has more afterwards, without those that the engine counts.
    """
    return_all_blocks()
    with _engine(replace(case, size=SMALL), folder) as engine:  # imports, threads, compiled kernels
        _steps(engine, SMALL)
        gc.collect()
        return_all_blocks()
        before = data_nbytes()
    dist.barrier()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if limit_nbytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (before + limit_nbytes, hard))
    try:
        with _engine(case, folder, changes or {}) as engine:
            _steps(engine, case.size)
            gc.collect()
            return_all_blocks()
            counted: int = engine.runtime.ledger.totals()[0] + engine._watch.scratch_nbytes
            return max(0, data_nbytes() - before - counted)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _engine(case: Case, folder: str, changes: Mapping[str, Any] = MappingProxyType({})) -> Any:
    simulated_changes.asked.clear()  # processes of ranks are used again
    config = merged(settings(case, folder), {"trust": PATIENT, **changes})
    return zeroshard.Engine(build(case)(), config=config)


def _steps(engine: Any, size: Size) -> None:
    batch, _ = _batch(replace(size, batch=engine.train_micro_batch_size_per_gpu()))
    for _ in range(2 * engine.gradient_accumulation_steps()):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        del loss


def run(
    case: Case, samples: int, limit_nbytes: int | None, changes: Mapping[str, Any] | None = None
) -> list[Any]:
    """What :func:`_train_within` returns or raises on each rank, with ``samples`` in a micro-batch."""
    case = replace(case, size=replace(case.size, batch=samples))
    with swap_folder() as folder:
        given = (case, limit_nbytes, folder, changes)
        found: list[Any] = run_ranks(
            _train_within, case.ranks, *given, timeout=700, keep_exceptions=True
        )
    return found


def ends(
    case: Case, samples: int, limit_nbytes: int, changes: Mapping[str, Any] | None = None
) -> list[str]:
    """How the ranks end with ``samples`` in a micro-batch: "", or the text of the error."""
    found = run(case, samples, limit_nbytes, changes)
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


def remedies_row(case: Case) -> dict[str, Any]:
    """The changes that the error of one sample too much prints, and how a run with each of them ends.

    Those of the first rank that printed simulated ones, or else of the first rank.
    """
    less, more = (peak_nbytes(case, count) for count in (SAMPLES, SAMPLES + 1))
    beside, told = unplanned_nbytes(case), ""
    for parts in (6, 4, 3, 2):  # as little is missing as ends the run: more changes are enough
        if not told:
            limit_nbytes = more - (more - less) // parts + beside
            found = ends(case, SAMPLES + 1, limit_nbytes)
            texts = [text for text in found if TOLD in text]
            told = next((text for text in texts if SIMULATED in text), texts[0] if texts else "")
    if not told:
        sys.exit(
            f"{case.name}: {SAMPLES + 1} samples fit in {limit_nbytes} bytes, planned are {more}"
        )
    lines = [] if UNSURE in told else re.findall(r"^  \d\. .*\n     (.*)$", told, re.MULTILINE)
    rows = []
    for line in lines:
        checkpointed = case.checkpointed or "gradient_checkpointing_enable" in line
        changes = json.loads(line) if line.startswith("{") else {}
        changed = replace(case, checkpointed=checkpointed)
        rows.append({"line": line, "ends": ends(changed, SAMPLES + 1, limit_nbytes, changes)})
    return {
        "case": case.name, "size": asdict(case.size), "limit_nbytes": limit_nbytes, "remedies": rows,
        "simulated": SIMULATED in told,
    }  # fmt: skip


def try_remedies(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """The rows of all cases, which are printed too."""
    rows = []
    for case in cases:
        rows.append(remedies_row(case))
        for each in rows[-1]["remedies"]:
            fits = "fits" if not any(each["ends"]) else f"DOES NOT FIT: {each['ends']}"
            print(f"{case.name:48} {each['line']:90} {fits}", flush=True)
    return rows


def _write(path: Path | None, rows: list[dict[str, Any]]) -> None:
    if path is not None:
        date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        kept = {"date": date, "torch": torch.__version__, "rows": rows}
        path.write_text(json.dumps(kept, indent=1) + "\n")


def main() -> None:
    """Try all cases. Exit code 1: the answer of a case does not run, or one more sample does.

    With ``--remedies``: a case has fewer than three changes, not simulated ones, or one does not fit.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    parser.add_argument(
        "--remedies", action="store_true", help="apply what the error prints instead"
    )
    given = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(BLOCK_NBYTES)  # ranks inherit it, engines leave it
    if given.remedies:
        found = try_remedies(REMEDIED)
        _write(given.out, found)
        simulated = all(row["simulated"] for row in found)
        each_fits = not any(any(each["ends"]) for row in found for each in row["remedies"])
        sys.exit(
            not (simulated and each_fits and all(len(row["remedies"]) == OFFERED for row in found))
        )
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
