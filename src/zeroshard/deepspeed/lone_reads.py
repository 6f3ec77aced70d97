"""What does a program get that reads sharded values on one rank alone?

NaN in their place, in memory and in the files that it writes, and an error in the log that names its line
and what to do. Its training goes on.
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


class LonelyReads:
    """Asked before each read of one engine's parameters that gathers: is it this rank's alone?"""

    def __init__(self, readers: LoneReadCheck, rank: int) -> None:
        self._readers = readers
        self._rank = rank
        self._said: set[str] = set()  # lines of the program

    def __call__(self, unit: str) -> bool:
        """Waits for the other ranks, unless one of them is known not to come. Says so in the log."""
        why = self._readers.alone(unit)
        line = _line_of_program() if why else ""
        if why and line not in self._said:
            self._said.add(line)
            logger.error(
                "rank %d alone reads sharded parameters in %s (the first: unit %r; %s). No rank has all "
                "of their values: this one gets NaN instead, and so does every file that it writes of "
                "them. Training goes on. For the weights call engine.save_pretrained(folder) or "
                "engine.save_16bit_model(folder) on every rank; or read them on every rank, or inside "
                "deepspeed.zero.GatheredParameters(params), which every rank enters.",
                self._rank, line, unit, why,
            )  # fmt: skip
        return bool(why)


def _line_of_program() -> str:
    """Where the program is: file, line and function, innermost. Other libraries count as the program."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"


def _is_library(file: str) -> bool:
    """Ours, torch's or Python's own?"""
    return file.startswith(_OWN) or (file.startswith(_PYTHON) and "-packages" not in file)
