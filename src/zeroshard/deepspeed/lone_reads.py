"""Answers a lone read: one rank alone reads sharded values.

The program gets NaN instead of the values, in memory and in the files that it writes. One error in the
log names the line that reads, and the remedy. Training goes on (ADR 0011).
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

import torch

import zeroshard
from zeroshard.deepspeed.logs import logger
from zeroshard.watchdog.lone_reads import LoneReadCheck

_OWN = tuple(path + os.sep for path in (*zeroshard.__path__, *torch.__path__))
_PYTHON = sysconfig.get_paths()["stdlib"] + os.sep


class LoneReads:
    """Called before each gathering read of one engine's parameters: does this rank read alone?"""

    def __init__(self, readers: LoneReadCheck, rank: int) -> None:
        self._readers = readers
        self._rank = rank
        self._said: set[str] = set()  # lines of the program that were reported

    def __call__(self, unit: str) -> bool:
        """Whether this rank reads ``unit`` alone. Waits for the other ranks, unless one will not come.

        A lone read is logged once for each line of the program.
        """
        why = self._readers.alone(unit)
        line = _line_of_program() if why else ""
        if why and line not in self._said:
            self._said.add(line)
            logger.error(
                "rank %d alone reads sharded parameters in %s (the first: unit %r; %s). One rank "
                "does not have all of their values, so it reads NaN, and files that it writes "
                "from them contain NaN. Training continues. To get the weights, call "
                "engine.save_pretrained(folder) or engine.save_16bit_model(folder) on every rank; "
                "or read them on every rank, or inside deepspeed.zero.GatheredParameters(params) "
                "on every rank.",
                self._rank, line, unit, why,
            )  # fmt: skip
        return bool(why)


def _line_of_program() -> str:
    """File, line and function of the innermost frame outside of ZeroShard, torch and Python's library."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"


def _is_library(file: str) -> bool:
    """Whether the file belongs to ZeroShard, torch or Python's standard library."""
    return file.startswith(_OWN) or (file.startswith(_PYTHON) and "-packages" not in file)
