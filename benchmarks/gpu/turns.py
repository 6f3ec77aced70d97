"""Runs every task in a process of its own, within a time limit, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MARK = "RESULT "
MIN_TURN_S = 12.0  # with less time left no turn starts: a process needs this time to start
OUT_OF_TIME = "out of time"
Answer = dict[str, Any]
_KILL_WITH_PARENT = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True)
class Line:
    """One system in one setting. ``params``: with offload, parameters are offloaded too."""

    system: str
    stage: int = 0
    precision: str = "bf16"
    params: bool = False

    @property
    def name(self) -> str:
        staged = self.system in ("DeepSpeed", "ZeroShard")
        name = f"{self.system} stage {self.stage}" if staged else self.system
        return f"{name} with parameters" if self.params else name

    @property
    def installed(self) -> bool:
        return self.system != "DeepSpeed" or importlib.util.find_spec("deepspeed") is not None


@dataclass(frozen=True)
class Ended:
    """How a process ended. ``code``: None if it was killed at its limit."""

    out: str
    err: str
    code: int | None


def run_process(command: Sequence[str], env: dict[str, str], limit_s: float) -> Ended:
    """Run a process. At the limit, or if this process ends, it and all its children are killed."""
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=limit_s)
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        _kill_group(process.pid)
        out, err = process.communicate()
        code = None
    finally:
        process.kill()
        _kill_group(process.pid)
    return Ended(out, err, code)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def begin_turn() -> None:
    """Called first in the process of a turn. It gets a process group, and ends if its parent ends.

    If host memory runs out, the kernel shall end this process, not the one that writes the results.
    """
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_KILL_WITH_PARENT, signal.SIGKILL)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


@dataclass
class Bench:
    """Runs turns within the time limit of the current step.

    ``rehearsal``: "" on a GPU, "cpu", or "pretended" for the pretended device of
    :mod:`zeroshard_testing.streams`. ``machine``: the measured hardware. ``note``: called after each
    turn.
    """

    folder: Path
    rehearsal: str = ""
    systems: Sequence[str] = ()
    artifacts: Path = Path()
    say: Callable[[str], None] = print
    note: Callable[[str, Answer], None] = lambda _title, _answer: None
    machine: Answer = field(default_factory=dict)
    _ends_s: float = 0.0

    def allow(self, seconds: float) -> None:
        """Give all turns from now on this time together."""
        self._ends_s = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return self._ends_s - time.monotonic()

    @property
    def extensions(self) -> Path:
        """Where peers compile their extensions."""
        return self.folder / "torch_extensions"

    def chosen(self, lines: Iterable[Line]) -> list[Line]:
        """The lines that the user chose: all, or some by system or by system and stage."""
        return [
            line
            for line in lines
            if not self.systems or line.system in self.systems or line.name in self.systems
        ]

    def shape(self, name: str) -> str:
        return "tiny" if self.rehearsal else name

    def numel(self, number: int) -> int:
        """A number of elements, small in a rehearsal."""
        return 2**14 if self.rehearsal else number

    def turn(
        self, task: str, line: Line, shape: str, *, sanitized: bool = False, limit_s: float = 1e9,
        allocator: str | None = None, options: dict[str, Any] | None = None, **given: Any,
    ) -> Answer:  # fmt: skip
        """The answer of the process, or ``{"error": ...}``. A failure of the process does not end
        the run. ``sanitized``: under PyTorch's sanitizer of CUDA streams. ``allocator``: its
        settings, if not those that all systems have; "": torch's own."""
        if self.left_s < MIN_TURN_S:
            return {"error": OUT_OF_TIME}
        pretended = self.rehearsal == "pretended" and line.system == "ZeroShard"
        job = {
            "system": line.system, "stage": line.stage, "precision": line.precision,
            "offloads_params": line.params, "shape": self.shape(shape),
            "device": "cpu" if self.rehearsal and not pretended else "cuda",
            "pretended": pretended, "folder": str(self.folder), "options": options or {},
            "steps": 3 if self.rehearsal else 10, **given,
        }  # fmt: skip
        title = f"{task} {line.name} {line.precision} {shape}"
        self.say(f"  {title}")
        remove_locks(self.extensions)
        command = [sys.executable, str(ROOT / "benchmarks/gpu/worker.py"), task, json.dumps(job)]
        env = environment(os.environ, self.extensions, sanitized=sanitized and not self.rehearsal)
        if allocator is not None:
            env["PYTORCH_ALLOC_CONF"] = allocator or "expandable_segments:False"
        if self.rehearsal:
            env |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        ended = run_process(command, env, min(self.left_s, limit_s))
        answer = answer_of(ended)
        self.note(title, answer)
        return answer


def environment(
    before: os._Environ[str] | dict[str, str], extensions: Path, *, sanitized: bool = False
) -> dict[str, str]:
    """The environment of a turn, the same for all systems.

    Segments of the allocator can grow, so that memory is not lost between blocks of different sizes.
    """
    paths = [str(ROOT / "src"), str(ROOT / "testing/src"), before.get("PYTHONPATH", "")]
    env = {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        **before,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TORCH_EXTENSIONS_DIR": str(extensions),
    }
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCH_CUDA_SANITIZER"):
        env.pop(name, None)  # every turn is a run of its own
    return {**env, "TORCH_CUDA_SANITIZER": "1"} if sanitized else env


def remove_locks(extensions: Path) -> None:
    """Delete the locks of builds that were killed. PyTorch would wait for them for ever."""
    for lock in extensions.glob("**/lock"):
        lock.unlink(missing_ok=True)


def answer_of(ended: Ended) -> Answer:
    """The JSON after the last mark. If there is none, an error with the last line of the process."""
    for line in reversed(ended.out.splitlines()):
        if line.startswith(MARK):
            answer: Answer = json.loads(line.removeprefix(MARK))
            return answer
    if ended.code is None:
        return {"error": OUT_OF_TIME}
    last = (ended.err.strip().splitlines() or ["no message"])[-1]
    if ended.code == -signal.SIGKILL:
        last = "killed, probably because host memory ran out"
    return {"error": f"exit code {ended.code}: {last[:200]}"}
