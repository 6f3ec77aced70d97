"""Breaks runs in many ways, and compares what their restarts lead to with the undisturbed run.

    python benchmarks/restarts.py [--kinds KIND ...] [--out FILE]

Every case is one ``zeroshard launch --max-restarts`` of ``restart_program.py``. With the same ranks the
last weights must be equal bit for bit. With fewer ranks they may differ by rounding, at most 1e-12 in
fp64. Every step must have had the samples of the undisturbed run, so none is lost or used twice. After a
case nothing may be left: processes, files in ``/dev/shm``, listening ports.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from machine import describe

HERE = Path(__file__).parent
STEPS, SAVE_EVERY = 12, 3
SAMPLES = 60  # of an epoch, as in the program
TOLERANCE = 1e-12
"""The greatest accepted difference of a weight after a change of the number of ranks."""

_RUN_ID = f"restarts-{os.getpid()}"
_LAUNCH = """
import runpy
from zeroshard.launch import restart

restart.FIRST_WAIT_S = 0.2  # seconds; five of a user's
runpy.run_module("zeroshard.launch", run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True)
class Case:
    """One run. ``kind`` names its group; ``worlds``: the expected numbers of ranks of its attempts."""

    kind: str
    ranks: int
    stage: int
    faults: tuple[dict[str, Any], ...]
    worlds: tuple[int, ...]

    @property
    def is_elastic(self) -> bool:
        """Whether the number of ranks changes."""
        return len(set(self.worlds)) > 1


@dataclass
class Outcome:
    """What a case led to. ``problems``: empty if everything is as it must be."""

    case: Case
    seconds: float
    worlds: list[int]
    resumed_at: list[int]
    sha256: str
    difference: float
    problems: list[str]


def _same(kind: str, *faults: tuple[int, int, int], ranks: int = 2, stage: int = 3) -> Case:
    """A case whose attempts have equally many ranks. A fault: attempt, step, rank."""
    name = {"rank 0 killed": "kill", "killed in a save": "save"}.get(kind, kind)
    listed = tuple(
        {"attempt": attempt, "step": step, "rank": rank, "kind": name}
        for attempt, step, rank in faults
    )
    return Case(kind, ranks, stage, listed, (ranks,) * (len(faults) + 1))


def _in_save(point: str, step: int, rank: int, ranks: int = 2) -> Case:
    fault = {"attempt": 0, "step": step, "rank": rank, "kind": "save", "point": point}
    return Case("killed in a save", ranks, 3, (fault,), (ranks, ranks))


def _fewer(stage: int, *lost: tuple[int, int, int]) -> Case:
    """Three ranks, of which some are lost. A loss: step, rank, slot of this rank."""
    faults = tuple(
        {"attempt": number, "step": step, "rank": rank, "kind": "slot", "slot": slot}
        for number, (step, rank, slot) in enumerate(lost)
    )
    return Case("fewer ranks", 3, stage, faults, tuple(range(3, 2 - len(lost), -1)))


CASES = (
    _same("kill", (0, 7, 1)),
    _same("kill", (0, 4, 1), (1, 8, 1)),
    _same("kill", (0, 2, 1), stage=1),
    _same("kill", (0, 10, 2), (1, 11, 1), ranks=3, stage=2),
    _same("stop", (0, 5, 1)),
    _same("stop", (0, 8, 0)),
    _same("stop", (0, 3, 1), stage=2),
    _same("stop", (0, 6, 2), ranks=3),
    _same("raise", (0, 4, 1)),
    _same("raise", (0, 9, 0)),
    _same("raise", (0, 5, 0), (1, 7, 1), stage=1),
    _same("raise", (0, 1, 2), ranks=3),
    _same("rank 0 killed", (0, 7, 0)),
    _same("rank 0 killed", (0, 1, 0), stage=2),
    _same("rank 0 killed", (0, 5, 0), (1, 11, 0)),
    _same("rank 0 killed", (0, 8, 0), ranks=3, stage=0),
    _in_save("half", 3, 1),
    _in_save("written", 6, 0),
    _in_save("committed", 6, 0),
    _in_save("manifest", 9, 0, ranks=3),
    _fewer(3, (4, 1, 1), (8, 1, 2)),
    _fewer(3, (7, 2, 2), (10, 0, 0)),
    _fewer(2, (5, 0, 0), (7, 1, 2)),
    _fewer(1, (2, 1, 1)),
)
KINDS = tuple(dict.fromkeys(case.kind for case in CASES))


def run_case(case: Case, folder: Path, undisturbed: dict[str, Any]) -> Outcome:
    """Run a case in the new directory ``folder``, and judge it by the ``undisturbed`` run."""
    before, began_s = _shared_memory(), time.monotonic()
    code, out = start(case, folder)
    seconds = time.monotonic() - began_s
    problems = [f"exit code {code}: {out[-1500:]}"] if code else []
    firsts, samples = read_logs(folder)
    worlds = [firsts[attempt][0]["world"] for attempt in sorted(firsts)]
    if worlds != [*case.worlds]:
        problems.append(f"attempts had {worlds} ranks, and not {[*case.worlds]}")
    weights = _read(folder / "weights.json")
    difference = _difference(weights, undisturbed["weights"])
    dropout = _dropout(case)
    if difference > TOLERANCE or (dropout and weights != undisturbed["weights"]):
        problems.append(f"weights differ by {difference:.3g}")
    if samples != undisturbed["samples"]:
        problems.append("samples of steps differ")
    problems += list(_left(folder, firsts, before))
    resumed = [firsts[attempt][0]["from"] for attempt in sorted(firsts)]
    return Outcome(
        case, round(seconds, 1), worlds, resumed, weights.get("sha256", ""), difference, problems
    )


def undisturbed_run(case: Case, folder: Path) -> dict[str, Any]:
    """Weights and samples of the same run without faults."""
    plain = Case(case.kind, case.ranks, case.stage, (), (case.ranks,) * len(case.worlds))
    plain = (
        plain if not case.is_elastic else Case(case.kind, case.ranks, case.stage, (), case.worlds)
    )
    code, out = start(plain, folder)
    if code:
        raise RuntimeError(f"the undisturbed run failed: {out[-3000:]}")
    samples = read_logs(folder)[1]
    used = [number for step in samples.values() for number in step]
    for epoch in range(len(used) // SAMPLES):
        assert sorted(used[epoch * SAMPLES :][:SAMPLES]) == [*range(SAMPLES)], f"epoch {epoch}"
    return {"weights": _read(folder / "weights.json"), "samples": samples}


def start(case: Case, folder: Path) -> tuple[int, str]:
    """Run the launcher in ``folder``. Returns its exit code and what it printed."""
    folder.mkdir(parents=True)
    given = {
        "stage": case.stage,
        "dropout": _dropout(case),
        "steps": STEPS,
        "save_every": SAVE_EVERY,
        "faults": case.faults,
    }
    words = ["--nproc", str(case.ranks), "--max-restarts", "4", "--grace-s", "2"]
    words += ["--checkpoint-dir", str(folder / "ckpt")]
    if case.is_elastic:
        words += ["--min-ranks", "1"]
        words += ["--check-slot", f"test ! -e '{folder}'/broken-$ZEROSHARD_SLOT"]
    program = [str(HERE / "restart_program.py"), str(folder), json.dumps(given)]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "ZEROSHARD_"))}
    with (folder / "output.txt").open("w+") as output:
        done = subprocess.run(
            [sys.executable, "-c", _LAUNCH, *words, *program],
            env={
                **clean,
                "TMPDIR": str(folder),
                "OMP_NUM_THREADS": "1",
                "ZEROSHARD_RUN_ID": f"{_RUN_ID}-{folder.name}",
            },
            check=False,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=300,
        )
        output.seek(0)
        return done.returncode, output.read()


def read_logs(folder: Path) -> tuple[dict[int, list[dict[str, Any]]], dict[int, list[int]]]:
    """The first line of each rank by attempt; and the samples of each step, sorted.

    A step that was done again counts as it was done last: the earlier one is not in the weights.
    """
    firsts: dict[int, list[dict[str, Any]]] = defaultdict(list)
    steps: dict[int, tuple[int, list[int]]] = {}
    for path in sorted(folder.glob("samples-*.jsonl")):
        attempt = int(path.stem.split("-")[1])
        first, *lines = [json.loads(line) for line in path.read_text().splitlines()]
        firsts[attempt].append(first)
        for step, used in lines:
            last, found = steps.get(step, (-1, []))
            if attempt >= last:
                steps[step] = (attempt, [*(found if attempt == last else []), *used])
    return firsts, {step: sorted(used) for step, (_, used) in sorted(steps.items())}


def _dropout(case: Case) -> float:
    return 0.0 if case.is_elastic else 0.2


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _difference(weights: dict[str, Any], others: dict[str, Any]) -> float:
    """The largest difference of a weight; infinite if there are none."""
    pairs = zip(weights.get("values", []), others["values"], strict=False)
    each = [abs(a - b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True)]
    return max(each, default=float("inf"))


def _left(folder: Path, firsts: dict[int, list[dict[str, Any]]], before: set[str]) -> Iterator[str]:
    """What a run must not leave."""
    if pids := [pid for pid in _processes(str(folder)) if pid != os.getpid()]:
        yield f"processes are left: {pids}"
    # Only those with the id of this run: other runs of the machine come and go.
    names = {name for name in _shared_memory() - before if _RUN_ID in name}
    if names:
        yield f"files in /dev/shm are left: {sorted(names)}"
    for port in {int(first["port"]) for ranks in firsts.values() for first in ranks}:
        with socket.socket() as probe:
            probe.settimeout(0.2)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                yield f"something still listens at port {port}"


def _processes(mark: str) -> list[int]:
    """The processes with ``mark`` in their command or environment."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                text = (path / "environ").read_bytes() + (path / "cmdline").read_bytes()
            except OSError:
                continue
            if mark.encode() in text:
                found.append(int(path.name))
    return found


def _shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def run_cases(cases: Sequence[Case], home: Path) -> Iterator[Outcome]:
    """Run the cases one after another, each beside its undisturbed run."""
    known: dict[tuple[int, int, bool], dict[str, Any]] = {}
    for number, case in enumerate(cases):
        key = (case.ranks, case.stage, case.is_elastic)
        if key not in known:
            known[key] = undisturbed_run(case, home / f"undisturbed-{len(known)}")
        yield run_case(case, home / f"case-{number}", known[key])


def main() -> None:
    """Run, print a line for each case, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    machine, rows = describe(), []
    with tempfile.TemporaryDirectory(prefix="zeroshard-restarts-") as home:
        for outcome in run_cases([c for c in CASES if c.kind in given.kinds], Path(home)):
            case = outcome.case
            verdict = "; ".join(outcome.problems) or "met"
            print(
                f"{case.kind:<17} stage {case.stage}, ranks {' -> '.join(map(str, outcome.worlds))}, "
                f"from step {outcome.resumed_at}, {outcome.seconds:.0f} s, "
                f"difference {outcome.difference:.1e}: {verdict}",
                flush=True,
            )
            rows.append(asdict(outcome))
            if given.out:  # after each case: the whole takes a quarter of an hour
                text = {"machine": machine, "steps": STEPS, "save_every": SAVE_EVERY, "cases": rows}
                given.out.write_text(json.dumps(text, indent=1) + "\n")
    good = sum(not row["problems"] for row in rows)
    print(f"{good} of {len(rows)} met")
    sys.exit(good != len(rows))


if __name__ == "__main__":
    main()
