"""Checks ZeroShard on one GPU and measures it beside other libraries.

    python benchmarks/gpu/run.py --part 1                # nine minutes: checks; then --part 2, --part 3
    python benchmarks/gpu/run.py --only offload --minutes 20
    python benchmarks/gpu/run.py --merge a.json b.json --out all.json
    python benchmarks/gpu/run.py --rehearse              # tiny models on a CPU, to test the program

Every turn of every system is a process of its own (``worker.py``). Prints tables and writes
``benchmarks/results/<date>-gpu-part-1.json`` after each turn. See README.md in this folder.
"""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import steps
import wheels
from results import Results, merged, write
from turns import Bench

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def arguments() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true", help="only list the steps and the parts")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "--only", nargs="+", choices=list(steps.STEPS), metavar="STEP", help="some of the steps"
    )
    chosen.add_argument("--part", type=int, help="the steps of one part, counted from 1")
    chosen.add_argument("--merge", nargs="+", type=Path, metavar="FILE",
                        help="only join these files of results in --out")  # fmt: skip
    parser.add_argument("--minutes", type=float, default=steps.PART_S / 60,
                        help="for everything together; default: %(default)g")  # fmt: skip
    parser.add_argument("--rehearse", nargs="?", choices=["cpu", "pretended"], const="cpu",
                        default="", help="tiny models without a GPU; not written")  # fmt: skip
    parser.add_argument("--systems", nargs="+", default=(), help='as plain "ZeroShard stage 3"')
    parser.add_argument("--wheels", type=Path, help="install these first: see wheels.py")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "zeroshard-gpu"),
                        help="for compiled extensions and for state on disk")  # fmt: skip
    parser.add_argument(
        "--out", type=Path, help="default: benchmarks/results/<date>-gpu[-part-<number>].json"
    )
    return parser.parse_args()


def main() -> int:
    """Parse the arguments, check, measure, print and write. Returns the exit code."""
    given = arguments()
    if given.part is not None and given.part not in steps.PARTS:
        print(f"--part {given.part}: there are parts 1 to {len(steps.PARTS)}.", file=sys.stderr)
        return 2
    if given.list:
        listing()
        return 0
    if given.merge:
        return merge(given.merge, given.out)
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.wheels:
        wheels.activate(given.wheels, given.folder / "packages")
    if absent := wheels.absent():
        print(wheels.how_to_get(absent), file=sys.stderr)
        return 2
    if not given.rehearse and not has_cuda():
        print("benchmarks/gpu needs a CUDA GPU, and PyTorch finds none here; nothing was measured.",
              file=sys.stderr)  # fmt: skip
        return 2
    names = [name for name, step in steps.STEPS.items() if step.by_default]
    chosen = names if given.part is None else steps.PARTS[given.part]
    # Always with the first step: results need versions and hardware.
    wanted = {"import", *(given.only or chosen)}
    return measure(given, [name for name in steps.STEPS if name in wanted])


def merge(paths: list[Path], out: Path | None) -> int:
    """Write the steps of several files of results into one. Returns the exit code: 2 if it cannot."""
    if out is None:
        print("--merge needs --out: the file to write.", file=sys.stderr)
        return 2
    try:
        content, source = merged(paths)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    write(out, content)
    for name, path in source.items():
        step = content["steps"][name]
        errors = sum("error" in row for row in step["rows"])
        wrong = len(steps.failed(step["rows"]))
        gpu = step["machine"].get("gpu", "no GPU")
        print(f"{name:<12}{len(step['rows']):>4} rows, {errors} errors, {wrong} checks do not hold; "
              f"{gpu}, {path.name}")  # fmt: skip
    for name, turns in content["unfinished"].items():
        print(f"{name:<12}{len(turns):>4} turns of a step that did not end")
    return 0


def listing() -> None:
    """Print the steps with their seconds on one H100, and the parts."""
    for name, step in steps.STEPS.items():
        note = "" if step.by_default else "; only with --only"
        print(f"{name:<12}{step.seconds:>5.0f} s  {step.title}{note}")
    for number, part in steps.PARTS.items():
        print(f"--part {number}:  {' '.join(part)}")


def has_cuda() -> bool:
    """Whether there is a GPU. Does not allocate GPU memory, because turns need all of it."""
    import torch

    return torch.cuda.is_available()


def measure(given: argparse.Namespace, chosen: list[str]) -> int:
    """Run the steps one after the other, each within its time. Returns 1 if a check does not hold."""
    import tables  # needs a package

    console = tables.make_console()
    part = "" if given.part is None else f"-part-{given.part}"
    path = given.out or RESULTS / f"{datetime.date.today().isoformat()}-gpu{part}.json"
    results = Results(None if given.rehearse else path)
    bench = Bench(
        given.folder, given.rehearse, given.systems, given.folder if given.rehearse else path.parent,
        say=lambda text: console.print(text, style="dim", highlight=False),
    )  # fmt: skip
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the running turn is killed on the way
    ends_s, wrong = time.monotonic() + 60 * given.minutes, 0
    for name, limit_s in steps.limits(chosen, 60 * given.minutes):
        step = steps.STEPS[name]
        left_s = ends_s - time.monotonic()
        if left_s < steps.MIN_TURN_S:
            console.print(f"{name}: not started, no time is left. --only {name} runs it.")
            continue
        console.rule(f"{name}: {step.title} (at most {min(limit_s, left_s):.0f} s)")
        bench.allow(min(limit_s, left_s))
        bench.note = lambda title, answer, name=name: results.turn(name, title, answer)
        rows = step.run(bench)
        results.finish(name, rows, bench.machine)
        tables.show(console, rows)
        wrong += len(steps.failed(rows))
        if any(row.get("error") == steps.OUT_OF_TIME for row in rows):
            console.print(f"{name} ran out of its time: --only {name} gives it more.")
    print("A rehearsal: its numbers mean nothing and were not written." if given.rehearse
          else f"written: {path}")  # fmt: skip
    return 1 if wrong else 0


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
