"""Launches ``phase_program.py`` and gathers what a user can see of it, while it runs and afterwards."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from phase_program import Plan
from phase_table import ALONE_S
from warm_python import WarmPython

from zeroshard.checkpoint.directory import newest_first
from zeroshard.checkpoint.reader import CheckpointReader
from zeroshard.errors import CheckpointError, UsageError
from zeroshard.run.run_folder import find_run
from zeroshard.watchdog.dead_run import explain_run

PROGRAM = Path(__file__).with_name("phase_program.py")
LIMIT_S = 150.0
"""A launch that has not ended by then hangs."""
_NUMBERS = itertools.count()


@dataclass
class Seen:
    """What was seen of a launch.

    ``code``: its exit code; None: it had to be killed. ``said``: the lines of the launcher. ``logs``: the
    outputs of the ranks. ``begun``: when the fault of a phase began, in seconds since 1970.
    ``named_s``, ``ended_s``: seconds from the newest fault until a line named its rank, and until the
    launch ended.
    ``cause``: the ranks that `zeroshard explain` names. ``left``: processes and files that are left.
    ``whole``: the newest checkpoint, if it is complete; "": none is. ``losses``: mean loss of each step.
    """

    code: int | None
    said: list[str]
    logs: dict[int, str]
    begun: dict[str, float]
    named_s: float | None
    ended_s: float
    cause: tuple[int, ...] | None = None
    explained: str = ""
    left: list[str] = field(default_factory=list)
    whole: str = ""
    losses: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        """For a test that fails."""
        named = "never" if self.named_s is None else f"{self.named_s:.1f} s"
        lines = [
            f"code {self.code}, named after {named}, ended after {self.ended_s:.1f} s",
            *self.said,
        ]
        for rank, log in self.logs.items():
            lines += [f"--- log of rank {rank}", *log.splitlines()[-12:]]
        return "\n".join(
            [*lines, "--- explain", self.explained, f"left: {self.left}, {self.whole!r}"]
        )


def launch(plan: Plan) -> Seen:
    """Run the program to its end."""
    folder = Path(plan.folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tmp").mkdir()
    run_id = f"phases-{os.getpid()}-{next(_NUMBERS)}"
    lines: list[str] = []
    command = [sys.executable, "-m", "zeroshard.launch", "--nproc", "2", "--quiet"]
    command += ["--stop-s", "3", "--alone-s", str(ALONE_S), "--enable_each_rank_log", "logs"]
    command += [str(PROGRAM), json.dumps(asdict(plan))]
    env = _environment(folder, run_id)
    # A rank that waits for others to join knows them by the variables they were started with, and a copy
    # of another process has those of that process.
    is_warm = "join" not in plan.faults or len(plan.faults) > 1
    process = WarmPython(command, cwd=folder, env=env, warm_ranks=is_warm)
    with contextlib.closing(process):
        reader = threading.Thread(target=lambda: lines.extend(iter(process.stderr.readline, "")))
        reader.start()
        named_at = _wait(process, plan, lines)
        ended_at, code = time.time(), process.returncode
        process.kill()  # ends the ranks of a launcher that hangs, too
        reader.join(30)
    begun = _begun(folder)
    newest = max(begun.values(), default=ended_at)
    seen = Seen(
        code,
        [line[11:].rstrip() for line in lines if line.startswith("zeroshard: ")],
        _logs(folder),
        begun,
        None if named_at is None else max(0.0, named_at - newest),
        ended_at - newest,
    )
    seen.losses = _losses(folder)
    seen.left = _left(folder, run_id)
    seen.whole = _newest_whole(folder / "checkpoints")
    try:
        run = explain_run(find_run(folder / "runs"))
        seen.cause, seen.explained = run.cause, f"{run.cause}: {run.why}"
    except (UsageError, FileNotFoundError) as error:
        seen.explained = str(error)
    return seen


def _environment(folder: Path, run_id: str) -> Mapping[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "ZEROSHARD_"))}
    folders = (str(PROGRAM.parent), str(PROGRAM.parent.parent), os.environ.get("PYTHONPATH"))
    path = os.pathsep.join(filter(None, folders))
    return clean | {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder / "tmp"),
        "ZEROSHARD_DUMP_DIR": str(folder / "runs"),
        "ZEROSHARD_RUN_ID": run_id,
        "ZEROSHARD_STALL_S": "1",
    }


def _wait(process: WarmPython, plan: Plan, lines: list[str]) -> float | None:
    """Wait for the end. When the first line came that names the rank with the fault; None: none did."""
    named = re.compile(rf"\b[Rr]anks? (?:0[-,])?{plan.at}\b")
    folder, until = Path(plan.folder), time.time() + LIMIT_S
    named_at = None
    while process.poll() is None and time.time() < until:
        if named_at is None and (folder / "begun").exists():
            texts = [*lines, *_logs(folder).values()]
            named_at = time.time() if any(map(named.search, texts)) else None
        time.sleep(0.05)
    if named_at is None and any(map(named.search, [*lines, *_logs(folder).values()])):
        return time.time()
    return named_at


def _begun(folder: Path) -> dict[str, float]:
    try:
        rows = [line.split() for line in (folder / "begun").read_text().splitlines()]
    except FileNotFoundError:
        return {}
    return {phase: float(at) for at, phase in rows}


def _logs(folder: Path) -> dict[int, str]:
    found = {}
    for rank in range(2):
        with contextlib.suppress(FileNotFoundError):
            text = (folder / "logs" / f"rank{rank}.log").read_text(errors="replace")
            found[rank] = re.sub(rf"^\[rank{rank}\]: ?", "", text, flags=re.MULTILINE)
    return found


def _losses(folder: Path) -> list[float]:
    """The mean over both ranks; empty if one has not come to its end."""
    try:
        rows = [json.loads((folder / f"losses-{rank}").read_text()) for rank in range(2)]
        return [(a + b) / 2 for a, b in zip(*rows, strict=True)]
    except (FileNotFoundError, ValueError):
        return []


def _left(folder: Path, run_id: str) -> list[str]:
    """Processes of the ranks that still run, and files in shared memory. Both have a second to go."""
    until = time.monotonic() + 1.0
    while True:
        files = [str(path) for path in Path("/dev/shm").glob(f"zeroshard-{run_id}-*")]
        pids = [int(path.read_text()) for path in folder.glob("pid-*")]
        left = [*files, *(f"process {pid}" for pid in pids if _runs(pid))]
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def _newest_whole(root: Path) -> str:
    if not root.exists():
        return ""
    try:
        tag = newest_first(root)[0]
        with CheckpointReader(root / tag) as saved:
            return "" if saved.verify() else tag
    except (CheckpointError, IndexError):
        return ""
