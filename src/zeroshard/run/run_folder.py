"""The folder of a run: what ``zeroshard report``, ``stacks`` and ``explain`` read.

A run is what one command starts: all ranks, and all attempts of a launcher that restarts them. On one
host its ranks share one folder. Ranks of other hosts have a folder of the same name there, unless the
directory is shared. Files of one process have its number in their names, so that processes never write
the same file.

The launcher keeps its report of a run that failed there (:func:`keep_exit`). It does not read the
configuration of the program. If that names another directory (``trust.dump_dir``), rank 0 writes the path
of the folder into :func:`pointer`. The launcher removes it.
"""

from __future__ import annotations

import contextlib
import functools
import getpass
import json
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from zeroshard.core.files import is_mine, write_for_this_user
from zeroshard.core.texts import without_secrets
from zeroshard.run.exit_report import ExitReport
from zeroshard.run.recordings import pid_space

RUN_ID_VARIABLE = "ZEROSHARD_RUN_ID"
"""The name of the run's folder. ``zeroshard launch`` sets it for all hosts and attempts."""
ATTEMPT_VARIABLE = "ZEROSHARD_ATTEMPT"
"""Tells the ranks the number of their attempt, from 0."""
RECORD_FORMAT = 1
"""Of the files steps-*.jsonl (:mod:`zeroshard.report.record`)."""
KEPT_RUNS = 50
"""Runs that stay in the default directory when another begins."""
_UNKNOWN_S = 86_400.0
"""For how long a run of another container stays that has written nothing more."""


def default_root() -> Path:
    """The directory of the folders of all runs, if the configuration names none; one per user.

    It is in the directory for temporary files, where others may make what has its name: a link, or a
    directory that they can write. Then it is in the user's cache.
    """
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container without an entry for this user
        user = str(os.getuid()) if hasattr(os, "getuid") else "user"
    usual = Path(tempfile.gettempdir()) / f"zeroshard-runs-{_plain(user)}"
    return usual if _is_own(usual) else Path.home() / ".cache" / "zeroshard" / "runs"


def _is_own(folder: Path) -> bool:
    """Whether it is a directory that only this user can write, or nothing yet."""
    try:
        about = folder.lstat()
    except FileNotFoundError:
        return True
    return stat.S_ISDIR(about.st_mode) and is_mine(about) and not about.st_mode & 0o022


def new_run_id(pid: int | None = None) -> str:
    """A name for a run that begins now: time (UTC), host, process: ``20260131-235959-node1-4711``."""
    now = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return f"{now}-{_plain(socket.gethostname())}-{os.getpid() if pid is None else pid}"


def run_id(environ: Mapping[str, str] | None = None) -> str:
    """The name of this process's run.

    Without a launcher of ours: ranks of one host have the same parent, for example torchrun. Its number
    and the time at which it started name the run. A process that is no rank is a run of its own.
    """
    env = os.environ if environ is None else environ
    if given := env.get(RUN_ID_VARIABLE):
        return _plain(given)
    return _own_run_id("RANK" in env or "LOCAL_RANK" in env)


def attempt(environ: Mapping[str, str] | None = None) -> int:
    """The number of this attempt of the run, from 0: a launcher that restarts counts them."""
    env = os.environ if environ is None else environ
    given = env.get(ATTEMPT_VARIABLE, "")
    return int(given) if given.isdecimal() else 0


def run_folder(dump_dir: str | None, environ: Mapping[str, str] | None = None) -> Path:
    """The folder of this process's run, or of the one with these variables. It is not made here.

    ``dump_dir``: the directory of the folders (``trust.dump_dir``, ``ZEROSHARD_DUMP_DIR``); None: one per
    user in the directory for temporary files.
    """
    return (Path(dump_dir) if dump_dir else default_root()) / run_id(environ)


def make_run_folder(dump_dir: str | None, environ: Mapping[str, str] | None = None) -> Path:
    """Make :func:`run_folder`, which only this user can read.

    In the default directory only the newest :data:`KEPT_RUNS` runs stay, and those of which a process
    lives.

    Raises:
        OSError: it cannot be written.
    """
    folder = run_folder(dump_dir, environ)
    is_new = not folder.exists()
    if dump_dir is None:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if is_new and dump_dir is None:
        folder.parent.chmod(0o700)
        _remove_oldest(folder.parent)
    return folder


def find_run(
    path: Path, say: Callable[[str], None] = lambda _text: None, *, living: bool | None = None
) -> Path:
    """The folder of a run from what a user names: that folder, or a directory of such folders.

    Of several runs of this user the one that was written last; ``living``: of those whose processes run,
    or do not run, if there is one. ``say`` gets a line if another user's run in the directory is newer.

    Raises:
        FileNotFoundError: there is no run; the text says what was looked for.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not a directory. Give the folder of a run.")
    if _is_run(path):
        return path
    runs = [(each, each.stat()) for each in path.iterdir() if _is_run(each)]
    own = _own(path, runs)
    asked = own if living is None else [run for run in own if _may_live(run[0]) is living]
    found, about = max(asked or own, key=lambda run: run[1].st_mtime)
    newer = [run for run in runs if not is_mine(run[1]) and run[1].st_mtime > about.st_mtime]
    if newer:
        say(
            f"{found.name} is your newest run in {path}. {len(newer)} newer ones of other users are left "
            "out: give a folder to see one of them."
        )
    return found


def _own(path: Path, runs: list[tuple[Path, os.stat_result]]) -> list[tuple[Path, os.stat_result]]:
    own = [run for run in runs if is_mine(run[1])]
    if runs and not own:
        raise FileNotFoundError(
            f"{path} holds no run of yours. It holds {len(runs)} of other users: give the folder of one."
        )
    if not own:
        raise FileNotFoundError(
            f"{path} holds no run: no file of steps, ranks or hangs in it or in its folders. A run "
            "is recorded in trust.dump_dir from its first step on, unless trust.report is false."
        )
    return own


def _is_run(folder: Path) -> bool:
    patterns = ("steps-*.jsonl", "ranks*.json", "hang-*.json", "exit-*.json")
    return folder.is_dir() and any(
        next(folder.glob(pattern), None) is not None for pattern in patterns
    )


@functools.cache
def _own_run_id(is_rank: bool) -> str:
    if not is_rank:
        return new_run_id()
    parent, now = os.getppid(), time.time()
    began_s = _began_s(parent)
    day = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now if began_s is None else began_s))
    return f"{day}-{_plain(socket.gethostname())}-{parent}"


def _began_s(pid: int) -> float | None:
    """When a process of this host started, in whole seconds since 1970, the same for every reader."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        lines = Path("/proc/stat").read_text().splitlines()
        boot_s = int(next(line for line in lines if line.startswith("btime")).split()[1])
        return float(boot_s + ticks // os.sysconf("SC_CLK_TCK"))
    return None


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip(".-") or "run"


def _remove_oldest(root: Path) -> None:
    runs = [each for each in root.iterdir() if not each.is_symlink() and _is_run(each)]
    runs.sort(key=lambda each: each.stat().st_mtime)
    for old in runs[:-KEPT_RUNS]:
        if not _may_live(old):
            shutil.rmtree(old, ignore_errors=True)


def _may_live(run: Path) -> bool:
    """Whether a process has the number of the run's launcher or of one of its ranks.

    It may be another process by now. Then the run stays until a later one begins. Numbers of another
    container say nothing here: its run stays for a day after it has last written something.
    """
    pids, here = {run.name.rpartition("-")[2]}, f"pid:[{pid_space()}]"
    for file in run.glob("ranks*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            processes = [row["process"] for row in json.loads(file.read_text())["ranks"]]
            pids |= {str(process["pid"]) for process in processes}
            if not all(str(process.get("space", here)).endswith(here) for process in processes):
                newest_s = max(each.stat().st_mtime for each in run.iterdir())
                if time.time() - newest_s < _UNKNOWN_S:
                    return True
    return any(pid.isdecimal() and _exists(int(pid)) for pid in pids)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's, or no number of a process
        return True
    return True


_DUMP_DIR = "ZEROSHARD_DUMP_DIR"


@dataclass(frozen=True)
class KeptExit:
    """What one launcher said about its ranks. ``at``: seconds since 1970. ``root``: the first cause."""

    attempt: int
    host: str
    at: float
    lines: tuple[str, ...]
    root: int | None
    consequence: bool
    trace: str
    exitcode: int


def pointer(environ: Mapping[str, str]) -> Path | None:
    """The file that says where the folder of this run is; None if no launcher of ours started it."""
    return default_root() / f"{run_id(environ)}.folder" if environ.get(RUN_ID_VARIABLE) else None


def point_to(folder: Path, environ: Mapping[str, str]) -> None:
    """Tell this run's launcher that the run's folder is ``folder``. Quiet if that cannot be written."""
    path = pointer(environ)
    if path is not None and folder.parent != path.parent:
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_for_this_user(path, str(folder.resolve()))


def keep_exit(report: ExitReport, attempt: int, environ: Mapping[str, str]) -> Path | None:
    """Write ``exit-HOST-ATTEMPT.json`` if a rank failed. ``environ``: that of the ranks.

    Returns the folder of the run if ranks have left records there.
    """
    path = pointer(environ)
    folder: Path | None = None
    with contextlib.suppress(OSError):
        if path is not None and path.exists():
            folder = Path(path.read_text())
            path.unlink()
    if not report.exitcode or report.interrupted:
        return None
    host = socket.gethostname()
    with contextlib.suppress(OSError):
        folder = folder or make_run_folder(environ.get(_DUMP_DIR) or None, environ)
        kept = KeptExit(
            attempt, host, time.time(), report.lines, report.root, report.consequence, report.trace,
            report.exitcode,
        )  # fmt: skip
        path = folder / f"exit-{host}-{attempt}.json"
        write_for_this_user(path, json.dumps(asdict(kept), indent=1))
        return folder if any(folder.glob("ranks*.json")) else None
    return None


def read_exits(folder: Path, damaged: list[str]) -> list[KeptExit]:
    """The reports of the newest attempt, causes first. ``damaged``: gets a line for each bad file."""
    found = []
    for path in sorted(folder.glob("exit-*.json")):
        try:
            kept = KeptExit(**json.loads(path.read_text()))
            found.append(kept)
        except (OSError, ValueError, TypeError) as error:
            damaged.append(f"{path}: {error}")
    newest = max((each.attempt for each in found), default=0)
    return sorted((e for e in found if e.attempt == newest), key=lambda e: (e.consequence, e.at))


_BEHAVIOUR = re.compile(
    r"(NCCL|TORCH|GLOO|OMP|MKL|ZEROSHARD|PYTORCH)_|CUDA_LAUNCH_BLOCKING$|CUDA_VISIBLE_DEVICES$"
)
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|PASS$|PASS_|CREDENTIAL", re.IGNORECASE)


def variables_of_behaviour(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that change what a run does, sorted by name; secrets are hidden.

    A name tells a secret, or an address with a user and a password in the value.

    >>> variables_of_behaviour({"NCCL_DEBUG": "INFO", "HOME": "/h", "TORCH_TOKEN": "x"})
    {'NCCL_DEBUG': 'INFO', 'TORCH_TOKEN': '(hidden)'}
    """
    return {
        name: "(hidden)" if _SECRET.search(name) else without_secrets(value)
        for name, value in sorted((os.environ if env is None else env).items())
        if _BEHAVIOUR.match(name)
    }
