"""Runs small programs that may hang, and says how they ended. Nothing of them survives.

Each process is in a session of its own, so that its children end with it. A probe that does not answer is
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
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Kind = Literal["ok", "hang", "wrong", "failed", "absent"]

_POLL_S = 0.02


@dataclass(frozen=True)
class Outcome:
    """How a probe ended. ``text``: in words. ``found``: what it printed as JSON.

    "wrong": the values of a collective were not the right ones. "absent": the program is not installed.
    """

    kind: Kind
    text: str
    found: Mapping[str, Any] = field(default_factory=dict)
    output: str = ""


def run(
    commands: Sequence[Sequence[str]], *, limit_s: float, environ: Mapping[str, str]
) -> Outcome:
    """Run processes together, one per rank, until all have ended, one has failed, or time is up."""
    with tempfile.TemporaryDirectory(prefix="zeroshard-doctor-") as folder:
        started: list[subprocess.Popen[bytes]] = []
        try:
            for rank, command in enumerate(commands):
                with (
                    open(f"{folder}/{rank}.out", "wb") as out,
                    open(f"{folder}/{rank}.err", "wb") as err,
                ):
                    started.append(
                        subprocess.Popen(
                            command,
                            stdout=out,
                            stderr=err,
                            stdin=subprocess.DEVNULL,
                            start_new_session=True,
                            env=dict(environ),
                        )
                    )
            failed = _wait(started, limit_s)
        except FileNotFoundError as error:
            return Outcome("absent", f"{error.filename} is not installed")
        finally:
            _kill(started)
        outputs = [
            Path(folder, f"{rank}.out").read_text(errors="replace") for rank in range(len(commands))
        ]
        if failed is None:
            return Outcome("hang", f"no answer in {limit_s:g} s", output=outputs[0])
        if failed >= 0:
            error_text = Path(folder, f"{failed}.err").read_text(errors="replace")
            code = started[failed].returncode
            return Outcome(
                "failed", _last_line(error_text) or f"exit code {code}", output=outputs[0]
            )
    return Outcome("ok", "ok", output=outputs[0])


def _wait(started: Sequence[subprocess.Popen[bytes]], limit_s: float) -> int | None:
    """-1: all ended well; the number of one that failed; None: time is up."""
    end = time.monotonic() + limit_s
    while True:
        codes = [process.poll() for process in started]
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        if failed is not None:
            return failed
        if None not in codes:
            return -1
        if time.monotonic() > end:
            return None
        time.sleep(_POLL_S)


def _kill(started: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in started:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


def collectives(
    ranks: int, backend: str, *, limit_s: float, environ: Mapping[str, str], wrong_rank: int = -1
) -> Outcome:
    """Exchange tensors between ``ranks`` new processes and check the values.

    ``wrong_rank`` sends other values than it should, for tests.
    """
    with tempfile.TemporaryDirectory(prefix="zeroshard-doctor-") as folder:
        commands = [
            [
                sys.executable, "-m", "zeroshard.doctor.exchange",
                str(rank), str(ranks), f"{folder}/store", backend, str(int(rank == wrong_rank)),
            ]
            for rank in range(ranks)
        ]  # fmt: skip
        outcome = run(commands, limit_s=limit_s, environ={**environ, "OMP_NUM_THREADS": "1"})
    if outcome.kind != "ok":
        return outcome
    try:
        found = json.loads(outcome.output.splitlines()[-1])
    except (ValueError, IndexError):
        return Outcome("failed", "its output cannot be read", output=outcome.output)
    if found["wrong"]:
        return Outcome("wrong", f"wrong values in {', '.join(found['wrong'])}", found)
    return Outcome("ok", "values ok", found)


def gpus(*, limit_s: float, environ: Mapping[str, str]) -> tuple[Outcome, list[dict[str, str]]]:
    """The GPUs that ``nvidia-smi`` lists: name, memory in MiB and driver."""
    fields = ("name", "memory.total", "driver_version")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    path = environ.get("PATH", os.defpath)
    program = next(
        (f"{d}/nvidia-smi" for d in path.split(":") if os.access(f"{d}/nvidia-smi", os.X_OK)), None
    )
    if program is None:
        return Outcome("absent", "nvidia-smi is not installed"), []
    outcome = run([[program, *command[1:]]], limit_s=limit_s, environ=environ)
    if outcome.kind != "ok":
        return outcome, []
    rows = [
        [cell.strip() for cell in line.split(",")] for line in outcome.output.splitlines() if line
    ]
    if any(len(row) != len(fields) or not row[1].isdigit() for row in rows):
        return Outcome("failed", f"its answer begins with {outcome.output[:60]!r}"), []
    return outcome, [dict(zip(fields, row, strict=True)) for row in rows]


def addresses(host: str, *, limit_s: float, environ: Mapping[str, str]) -> tuple[bool, list[str]]:
    """Whether the name service answered, and the addresses of a host."""
    program = (
        "import socket, sys\n"
        "try: found = {row[4][0] for row in socket.getaddrinfo(sys.argv[1], None)}\n"
        "except OSError: found = set()\n"
        "print(*sorted(found))"
    )
    outcome = run([[sys.executable, "-c", program, host]], limit_s=limit_s, environ=environ)
    return outcome.kind == "ok", outcome.output.split()
