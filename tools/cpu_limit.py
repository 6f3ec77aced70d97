"""Runs a command, says how much CPU time it and all its descendants took, and fails if that is too much.

    python tools/cpu_limit.py 1500 python -m pytest tests

Wall time of tests depends on what else the machine does; CPU time hardly does. The limit is in seconds
of a reference processor: a fixed piece of interpreted code is timed first, and the limit grows or shrinks
with it. Descendants whose parents have ended are counted too (Linux only). The exit code is the
command's; 1 if the command succeeded and the limit was exceeded.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time

REFERENCE_S = 0.084
"""CPU seconds of :func:`_interpreted_work` on the reference processor (AMD EPYC 9004, Python 3.11)."""

_PR_SET_CHILD_SUBREAPER = 36  # <sys/prctl.h>


def main(limit_s: float, command: list[str]) -> int:
    """Run ``command``; ``limit_s``: CPU seconds of the reference processor."""
    scale = min(_cpu_s_of_interpreted_work() for _ in range(5)) / REFERENCE_S
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    begin_s = time.monotonic()
    process = subprocess.Popen(command)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, _: process.send_signal(n))
    code = process.wait()
    _collect_orphans()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    used_s = used.ru_utime + used.ru_stime
    is_over = used_s > limit_s * scale
    print(
        f"CPU time: {used_s:.0f} s, limit {limit_s * scale:.0f} s ({limit_s:.0f} s x {scale:.2f} for "
        f"this processor); wall time {time.monotonic() - begin_s:.0f} s",
        flush=True,
    )
    if is_over:
        print(
            "The tests take too much CPU time. Make the new ones cheaper, or move whole tables to "
            "`make test-full` (CONTRIBUTING.md, 'What tests may cost').",
            file=sys.stderr,
        )
    return code or int(is_over)


def _collect_orphans(grace_s: float = 10.0) -> None:
    """Wait for descendants whose parents have ended; after ``grace_s`` the rest is left running."""
    deadline_s = time.monotonic() + grace_s
    while time.monotonic() < deadline_s:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            time.sleep(0.05)


def _cpu_s_of_interpreted_work() -> float:
    begin_s = time.process_time()
    table: dict[int, int] = {}
    for number in range(1_000_000):
        key = number & 1023
        table[key] = table.get(key, 0) + number
    return time.process_time() - begin_s


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
