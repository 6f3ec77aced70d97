"""Finds out which slots of a host can be used. ``python -m zeroshard.launch.usable 0,1``.

Each slot is tried in a process of its own: a device that does not answer may block it. On a host without
accelerators a slot is a share of the cores, and can be used. ``--check-slot`` replaces the trial by a
command of the user.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from zeroshard.launch.rank_env import devices_of
from zeroshard.launch.supervisor import signal_group

SLOT_VARIABLE = "ZEROSHARD_SLOT"
TRIAL_S, ANSWER_S = 60.0, 120.0
"""Seconds that a slot has for its trial, and a host for its answer."""

_TRIAL = """
import torch
from zeroshard.device.choice import accelerator_type
kind = accelerator_type()
values = torch.ones(1 << 20, device=kind)
assert float((values + values).sum()) == 2 << 20
"""
_SAID = re.compile(rb"usable slots: ([0-9,]*)$", re.MULTILINE)


def usable_slots(
    slots: Sequence[int], command: str | None, limit_s: float = TRIAL_S
) -> tuple[int, ...]:
    """Those of ``slots`` that can be used on this host. ``command``: of the user; None: try devices."""
    if command is None:
        from zeroshard.device.choice import accelerator_type

        if accelerator_type() is None:
            return tuple(slots)
    with ThreadPoolExecutor(len(slots) or 1) as pool:
        good = pool.map(lambda slot: _is_usable(slot, command, limit_s), slots)
        return tuple(slot for slot, is_good in zip(slots, good, strict=True) if is_good)


def ask_hosts(
    commands: Mapping[str, Sequence[str]], limit_s: float = ANSWER_S
) -> dict[str, tuple[int, ...] | None]:
    """Run the command of each host, which prints its usable slots. None: it did not, or not in time."""
    with ThreadPoolExecutor(len(commands) or 1) as pool:
        said = pool.map(lambda words: _said(words, limit_s), commands.values())
        return dict(zip(commands, said, strict=True))


def _said(words: Sequence[str], limit_s: float) -> tuple[int, ...] | None:
    with suppress(OSError):
        code, out = _run(words, None, limit_s)
        found = _SAID.search(out)
        if code == 0 and found is not None:
            return tuple(int(slot) for slot in found[1].split(b",") if slot)
    return None


def _is_usable(slot: int, command: str | None, limit_s: float) -> bool:
    env = {**os.environ, SLOT_VARIABLE: str(slot)}
    env["CUDA_VISIBLE_DEVICES"] = devices_of((slot,), os.environ) or str(slot)
    words = [sys.executable, "-c", _TRIAL] if command is None else ["sh", "-c", command]
    return _run(words, env, limit_s)[0] == 0


def _run(words: Sequence[str], env: Mapping[str, str] | None, limit_s: float) -> tuple[int, bytes]:
    """Exit code and output. After ``limit_s`` the process and what it has started are killed."""
    process = subprocess.Popen(
        list(words),
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=limit_s)
        return process.returncode, out
    except subprocess.TimeoutExpired:
        signal_group(0, process, signal.SIGKILL)
        process.communicate()
        return -int(signal.SIGKILL), b""


def main(words: Sequence[str]) -> None:
    """Print the usable ones of the slots in ``words[0]``; ``words[1]``: the command of the user."""
    slots = [int(slot) for slot in words[0].split(",")]
    found = usable_slots(slots, words[1] if len(words) > 1 else None)
    print(f"usable slots: {','.join(map(str, found))}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
