"""Logging under DeepSpeed's names."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable

from zeroshard.comm.env import current_rank_info

logger = logging.getLogger("DeepSpeed")
"""Programs set its level. It writes to standard output, as ZeroShard's logger does."""


class LoggerFactory:
    """Makes loggers that write to standard output."""

    @staticmethod
    def create_logger(name: str | None = None, level: int = logging.WARNING) -> logging.Logger:
        """A logger with one handler, also if it is requested several times."""
        made = logging.getLogger(name)
        made.setLevel(level)
        made.propagate = False
        if not made.handlers:
            handler = logging.StreamHandler(sys.stdout)
            form = (
                "[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s"
            )
            handler.setFormatter(logging.Formatter(form))
            made.addHandler(handler)
        return made


if not logger.handlers:
    LoggerFactory.create_logger(logger.name, logger.level or logging.INFO)


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Log on the given ranks. None, or -1 among them: on all ranks."""
    chosen = list(ranks) if ranks is not None else [-1]
    rank = current_rank_info().rank
    if -1 in chosen or rank in chosen:
        logger.log(level, "[Rank %d] %s", rank, message)


_said: set[str] = set()


def log_dist_once(
    message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO
) -> None:
    """:func:`log_dist`, at most once per process for each message."""
    if message not in _said:
        _said.add(message)
        log_dist(message, ranks, level)


def get_current_level() -> int:
    """The level of the logger."""
    return logger.level


def set_log_level_from_string(
    log_level_str: str, custom_logger: logging.Logger | None = None
) -> None:
    """Set a level by its name.

    Raises:
        ValueError: there is no level of this name.
    """
    level = logging.getLevelName(log_level_str.upper())
    if not isinstance(level, int):
        raise ValueError(
            f"{log_level_str!r} is not a log level. Use debug, info, warning or error."
        )
    (custom_logger or logger).setLevel(level)
