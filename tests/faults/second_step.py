"""Rank 3 of four fails in its second step, and each rank says what it was told."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

QUICK = {"first_report_s": 1.0, "frozen_s": 2.0, "grace_s": 5.0}
"""For the section ``trust``."""
FAILING = 3


def outcome_of(
    make_engine: Callable[[], Any], step: Callable[[Any], None], prepare: Callable[[Any], None]
) -> tuple[str, str, float]:
    """Class and text of the error, and the seconds. ``prepare``: lets the engine's next step fail."""
    os.environ["ZEROSHARD_STALL_S"] = "1"
    begun_s = time.monotonic()
    try:
        with make_engine() as trained:
            step(trained)
            begun_s = time.monotonic()
            if dist.get_rank() == FAILING:
                prepare(trained)
            for _ in range(3):
                step(trained)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begun_s
    finally:
        del os.environ["ZEROSHARD_STALL_S"]
    raise AssertionError("nothing failed")


def fail(fault: str) -> None:
    """Die, or raise."""
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise KeyError("a mistake of the program")
