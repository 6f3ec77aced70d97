"""Finds what a test leaves behind: environment variables, threads, open files, a process group, switches.

It takes a snapshot before and one after the test, and describes the difference in words.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_OPEN_FILES = Path("/proc/self/fd")
_VOLATILE = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}  # set by pytest and by an import

# Setters are called only if the value changed: the last one imports torch's compiler, which takes 6 s.
_SWITCHES: dict[Callable[[], Any], Callable[[Any], Any]] = {
    torch.get_default_dtype: torch.set_default_dtype,
    torch.is_grad_enabled: torch.set_grad_enabled,
    torch.get_num_threads: torch.set_num_threads,
    torch.are_deterministic_algorithms_enabled: torch.use_deterministic_algorithms,
}


_ONCE = frozenset({"zeroshard-compile"})  # one thread per process, started by its first engine


@dataclass(frozen=True)
class Snapshot:
    """The state that the tests of a process share."""

    environ: Mapping[str, str]
    threads: frozenset[threading.Thread]
    files: Counter[str]
    process_group: bool
    switches: Mapping[str, Any]


def snapshot() -> Snapshot:
    """The state now. Takes about 0.1 ms. Open files are known only on Linux."""
    return Snapshot(
        environ={k: v for k, v in os.environ.items() if k not in _VOLATILE},
        threads=frozenset(t for t in threading.enumerate() if t.name not in _ONCE),
        files=_open_files(),
        process_group=dist.is_available() and dist.is_initialized(),
        switches={switch.__name__: switch() for switch in _SWITCHES},
    )


def leaks(before: Snapshot, after: Snapshot, *, grace_s: float = 0.0) -> list[str]:
    """The differences, one sentence each; empty if the test cleaned up.

    Threads that are about to end get ``grace_s`` seconds to do so, and may close files until then.
    """
    found = []
    for name in sorted(before.environ.keys() | after.environ.keys()):
        old, new = before.environ.get(name), after.environ.get(name)
        if old != new:
            found.append(f"environment variable {name} is {new!r}, was {old!r}")
    deadline_s = time.monotonic() + grace_s
    more_threads, more_files = after.threads - before.threads, after.files - before.files
    for thread in more_threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
        if thread.is_alive():
            found.append(f"thread {thread.name!r} still runs")
    if more_threads and more_files:
        more_files &= _open_files() - before.files
    for path, count in sorted(more_files.items()):
        found.append(f"{path} is open {count} time(s) more than before")
    if after.process_group and not before.process_group:
        found.append("a process group is still initialised")
    for name, value in after.switches.items():
        if value != before.switches[name]:
            found.append(f"torch.{name}() is {value}, was {before.switches[name]}")
    return found


def restore(before: Snapshot) -> None:
    """Restore what can be restored, so that a test that leaks does not make the next ones fail."""
    for name in os.environ.keys() - before.environ.keys() - _VOLATILE:
        del os.environ[name]
    for name, value in before.environ.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    for switch, restore_switch in _SWITCHES.items():
        if switch() != before.switches[switch.__name__]:
            restore_switch(before.switches[switch.__name__])
    if dist.is_available() and dist.is_initialized() and not before.process_group:
        dist.destroy_process_group()


def _open_files() -> Counter[str]:
    """Open regular files by path. Pipes and sockets are those of the rank pool and the process group."""
    found: Counter[str] = Counter()
    if not _OPEN_FILES.exists():
        return found
    for name in os.listdir(_OPEN_FILES):
        try:
            target = os.readlink(_OPEN_FILES / name)
        except OSError:  # closed by now: the descriptor of listdir itself
            continue
        if target.startswith("/") and not target.startswith(("/dev/", "/proc/")):
            found[target] += 1
    return found
