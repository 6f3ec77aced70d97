"""Keeps the launcher's report of a run that failed in the run's folder, for ``zeroshard explain``.

The launcher does not read the configuration of the program. If that names another directory
(``trust.dump_dir``), rank 0 writes the path of the folder into :func:`pointer`. The launcher removes it.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from zeroshard.core.files import write_for_this_user
from zeroshard.run.exit_report import ExitReport
from zeroshard.run.run_folder import RUN_ID_VARIABLE, default_root, make_run_folder, run_id

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
