"""Saves and ends a run between two steps, after a signal that asks it to make room."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from zeroshard.errors import UsageError
from zeroshard.session.comm_session import CommSession
from zeroshard.watchdog.stop_agreement import StopAgreement
from zeroshard.watchdog.stop_signals import StopSignals

logger = logging.getLogger("zeroshard")

MARKER = "preempted"
"""Name of the file in the directory of checkpoints that tells a preempted run from a finished one."""

ClientState = Callable[[], Mapping[str, Any]]


def check_can_save_in(save_dir: str | PathLike[str]) -> None:
    """Make the directory, and check that this process may write into it: after a signal it is too late.

    Raises:
        UsageError: it cannot be made, or written into.
    """
    try:
        Path(save_dir).mkdir(parents=True, exist_ok=True)
        may_write = os.access(save_dir, os.W_OK | os.X_OK)
    except OSError as error:
        raise UsageError(
            f"preemption: {str(save_dir)!r} cannot be used as a directory of checkpoints: "
            f"{error.strerror}. Nothing could be saved after a signal. Give another save_dir."
        ) from error
    if not may_write:
        raise UsageError(
            f"preemption: this process may not write into {str(save_dir)!r}, so nothing could be saved "
            "after a signal. Give another save_dir, or change its permissions."
        )


class Preemption:
    """What one engine does after a signal. ``happened``: all ranks have stopped, or are to stop, here.

    ``save_dir``: the engine saves there and ends the process. None: the program does both.
    """

    def __init__(self, watch: CommSession) -> None:
        self._signals = StopSignals()
        try:
            self._agreement: StopAgreement = watch.stop_agreement(self._signals)
        except BaseException:
            self._signals.close()
            raise
        self._forwards = 0  # of an evaluation since the last step
        self.happened = False
        self.save_dir: Path | None = None
        self._client_state: ClientState = dict

    def save_in(self, save_dir: str | PathLike[str], client_state: ClientState | None) -> None:
        """Save there after a signal.

        Raises:
            UsageError: see :func:`check_can_save_in`.
        """
        check_can_save_in(save_dir)
        self.save_dir = Path(save_dir)
        self._client_state = client_state or dict
        (self.save_dir / MARKER).unlink(missing_ok=True)

    def after_step(self, engine: Any) -> None:
        """A point: the end of a step."""
        self._forwards = 0
        self._at(engine, 0)

    def before_forward(self, engine: Any) -> None:
        """A point, unless the forward is one inside a step."""
        accumulation = engine.accumulation
        if accumulation.micro_steps or accumulation.divided or accumulation.uncounted:
            return
        self.before_batch(engine, training=torch.is_grad_enabled() and engine.module.training)

    def before_batch(self, engine: Any, *, training: bool) -> None:
        """A point: no step is running. ``training``: the next forward begins one."""
        if training:
            self._at(engine, math.inf)
            return
        self._forwards += 1
        self._at(engine, self._forwards)

    def _at(self, engine: Any, number: float) -> None:
        if self.happened or not self._agreement.stops_at((engine.global_steps, number)):
            return
        self.happened = True
        if engine.is_main_rank:
            plan = (
                f"saving in {str(self.save_dir)!r}" if self.save_dir else "the program is to save"
            )
            logger.warning(
                "preempted by %s: all ranks stop after step %d, %s",
                self._agreement.asked, engine.global_steps, plan,
            )  # fmt: skip
        if self.save_dir is not None:
            self._save_and_end(engine, self.save_dir)

    def _save_and_end(self, engine: Any, save_dir: Path) -> None:
        """Save, and end this process with exit code 0.

        Raises:
            SystemExit: always, unless the save fails.
        """
        engine.save_checkpoint(save_dir, client_state=self._client_state())
        engine.wait_for_checkpoint()
        if engine.is_main_rank:
            words = {"signal": self._agreement.asked, "step": engine.global_steps}
            (save_dir / MARKER).write_text(json.dumps(words) + "\n")
        engine.close()
        raise SystemExit(0)

    def close(self) -> None:
        """Restore the handlers of before."""
        self._signals.close()
