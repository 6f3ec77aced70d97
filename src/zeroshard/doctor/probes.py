"""Runs small programs that may hang, and says how they ended. Nothing of them survives.

Each program is in a session of its own, so that its children end with it. A probe that does not answer is
a result, not a fault of the doctor.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal

from zeroshard.doctor.facts import Disk

Kind = Literal["ok", "hang", "wrong", "failed", "absent", "untried"]

_END_S = 5.0  # that a killed process may take to end


@dataclass(frozen=True)
class ProbeOutcome:
    """How a probe ended. ``text``: in words. ``found``: what it printed as JSON.

    "wrong": the values of a collective were not the right ones. "absent": the program is not installed.
    "untried": there was no time left for it.
    """

    kind: Kind
    text: str
    found: Mapping[str, Any] = field(default_factory=dict)
    output: str = ""


def run(command: Sequence[str], *, limit_s: float, environ: Mapping[str, str]) -> ProbeOutcome:
    """Run a program until it ends or time is up."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        # A signal that came while the process is made would leave it behind: nobody has it yet.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        restore = partial(signal.pthread_sigmask, signal.SIG_SETMASK, before)
        try:
            process = subprocess.Popen(
                command,
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=dict(environ),
                preexec_fn=restore,  # noqa: PLW1509 - the doctor has one thread
            )
        except OSError as error:
            restore()
            if not isinstance(error, FileNotFoundError):
                raise
            return ProbeOutcome("absent", f"{error.filename} is not installed")
        try:
            restore()
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return ProbeOutcome("hang", f"no answer in {limit_s:.0f} s", output=_read(out))
        finally:  # also if a signal ends this process: the command makes an exception of it
            _kill(process)
        if code:
            return ProbeOutcome(
                "failed", _last_line(_read(err)) or f"exit code {code}", output=_read(out)
            )
        return ProbeOutcome("ok", "ok", output=_read(out))


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the whole session. A process that waits in the kernel may stay; it is not waited for."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


def collectives(
    ranks: int, backend: str, *, limit_s: float, environ: Mapping[str, str], wrong_rank: int = -1
) -> ProbeOutcome:
    """Exchange tensors between ``ranks`` new processes and check the values.

    ``wrong_rank`` sends other values than it should, for tests.
    """
    with tempfile.TemporaryDirectory(prefix="zeroshard-doctor-") as folder:
        words = [str(ranks), f"{folder}/store", backend, str(wrong_rank)]
        outcome = run(
            [sys.executable, "-m", "zeroshard.doctor.exchange", *words],
            limit_s=limit_s,
            environ={**environ, "OMP_NUM_THREADS": "1"},
        )
    if outcome.kind != "ok":
        return outcome
    try:
        found = json.loads(outcome.output.splitlines()[-1])
    except (ValueError, IndexError):
        return ProbeOutcome("failed", "its output cannot be read", output=outcome.output)
    if found["wrong"]:
        return ProbeOutcome("wrong", f"wrong values in {', '.join(found['wrong'])}", found)
    return ProbeOutcome("ok", "values ok", found)


def gpus(
    *, limit_s: float, environ: Mapping[str, str]
) -> tuple[ProbeOutcome, list[dict[str, str]]]:
    """The GPUs that ``nvidia-smi`` lists: name, memory in MiB and driver."""
    fields = ("name", "memory.total", "driver_version")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    path = environ.get("PATH", os.defpath)
    program = next(
        (f"{d}/nvidia-smi" for d in path.split(":") if os.access(f"{d}/nvidia-smi", os.X_OK)), None
    )
    if program is None:
        return ProbeOutcome("absent", "nvidia-smi is not installed"), []
    outcome = run([program, *command[1:]], limit_s=limit_s, environ=environ)
    if outcome.kind != "ok":
        return outcome, []
    rows = [
        [cell.strip() for cell in line.split(",")] for line in outcome.output.splitlines() if line
    ]
    if any(len(row) != len(fields) or not row[1].isdigit() for row in rows):
        return ProbeOutcome("failed", f"its answer begins with {outcome.output[:60]!r}"), []
    return outcome, [dict(zip(fields, row, strict=True)) for row in rows]


def addresses(host: str, *, limit_s: float, environ: Mapping[str, str]) -> tuple[bool, list[str]]:
    """Whether the name service answered, and the addresses of a host."""
    program = (
        "import socket, sys\n"
        "try: found = {row[4][0] for row in socket.getaddrinfo(sys.argv[1], None)}\n"
        "except OSError: found = set()\n"
        "print(*sorted(found))"
    )
    outcome = run([sys.executable, "-c", program, host], limit_s=limit_s, environ=environ)
    return outcome.kind == "ok", outcome.output.split()


def disk(path: Path, *, limit_s: float, environ: Mapping[str, str]) -> tuple[str, Disk | None]:
    """The disk below a folder; or why it cannot be used. A dead mount lets every call hang."""
    program = (
        "import dataclasses, json, pathlib, sys\n"
        "from zeroshard.doctor.facts import disk_of\n"
        "found = disk_of(pathlib.Path(sys.argv[1]))\n"
        "print(json.dumps(found and dataclasses.asdict(found)))"
    )
    command = [sys.executable, "-c", program, str(path)]
    outcome = run(command, limit_s=limit_s, environ=environ)
    if outcome.kind != "ok":
        return outcome.text, None
    found = json.loads(outcome.output)
    return ("", Disk(**found)) if found else ("nothing can be written there", None)
