"""The record of a run: JSON lines in the run's folder, from which ``zeroshard report`` makes a page.

Rank 0 writes one file for each engine. The first line describes the run, one line follows for each step
and for each warning of the library, and the last line says how it ended. A thread writes the lines
(:mod:`zeroshard.metrics.monitors`), so that a process that is killed loses the last step at most.

Of the environment only the variables that change behaviour are written
(:func:`zeroshard.run.run_folder.variables_of_behaviour`), and no secrets of the configuration.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from zeroshard.core.files import for_this_user
from zeroshard.errors import in_short
from zeroshard.metrics.monitors import Worker
from zeroshard.metrics.sinks import Sink
from zeroshard.metrics.step_stream import StepEvent

_logger = logging.getLogger("zeroshard")  # of nearly all warnings of the library

FACTS_EVERY = 100
"""Steps between two lines about memory and traffic."""
_NUMBERS = itertools.count()  # of the engines of this process


class JsonLines(Sink):
    """A file of JSON lines. It is made with the first line. ``path()`` makes its folder."""

    def __init__(self, path: Callable[[], Path]) -> None:
        self._path = path
        self._file: TextIO | None = None

    def open(self) -> None:
        self._file = open(  # noqa: SIM115 - until close()
            self._path(), "w", encoding="utf-8", buffering=1, opener=for_this_user
        )

    def write(self, line: Any) -> None:
        """Append one line. Numbers that are not finite become null."""
        assert self._file is not None
        self._file.write(json.dumps(_finite(line), default=str, separators=(",", ":")) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class RunLog:
    """Records one engine. ``first()`` makes the first line; ``facts()`` what lines about its memory and
    traffic say.

    Nothing that lives longer refers to it, so that an engine that is dropped is freed.
    """

    def __init__(self, lines: JsonLines, first: Callable[[], Mapping[str, Any]]) -> None:
        weak = weakref.ref(self)
        self._worker = Worker(lines, "the record of the run", before_exit=partial(_end, weak))
        self._first = first
        self.facts: Callable[[], Mapping[str, Any]] = dict
        self._step = 0
        self._has_ended = False
        self._warnings = _Warnings(weak)
        _logger.addFilter(self._warnings)
        weakref.finalize(self, _forget, self._warnings, self._worker).atexit = False

    def note_step(self, event: StepEvent) -> None:
        """Add a line with the values of a step."""
        if not self._step:
            self._worker.put(self._first())
        self._step = event.step
        self._worker.put({
            "kind": "step", "step": event.step, "samples": event.samples, "time_s": event.time_s,
            **event.values,
        })  # fmt: skip
        if event.step % FACTS_EVERY == 0:
            self._note_facts("facts")

    def note_incident(self, text: str) -> None:
        """Add a line with something that a user should know, in words. None before the first step."""
        if self._step:
            self._worker.put({
                "kind": "incident", "step": self._step, "time_s": time.time(), "text": text
            })  # fmt: skip

    def end(self, reason: str = "") -> None:
        """Add the last line. ``reason``: the error that ends the run."""
        _logger.removeFilter(self._warnings)
        if self._step and not self._has_ended:
            self._has_ended = True
            self._note_facts("end", reason=reason)

    def close(self) -> None:
        """Wait until all lines are written."""
        self._worker.close()

    def _note_facts(self, kind: str, **more: str) -> None:
        self._worker.put({
            "kind": kind, "step": self._step, "time_s": time.time(), **more, **self.facts()
        })  # fmt: skip


class _Warnings(logging.Filter):
    """Passes warnings of the library to the record.

    Not a handler: with one, Python would not print warnings of a program that configures no logging.
    """

    def __init__(self, run_log: weakref.ref[RunLog]) -> None:
        super().__init__()
        self._run_log = run_log

    def filter(self, record: logging.LogRecord) -> bool:
        """True: every record goes on."""
        if record.levelno >= logging.WARNING:
            note_in(self._run_log, record.getMessage())
        return True


def note_in(run_log: weakref.ref[RunLog], text: str) -> None:
    """Add an incident, if the record is still there."""
    if (found := run_log()) is not None:
        found.note_incident(text)


def _end(run_log: weakref.ref[RunLog]) -> None:
    """The process ends, and the program has not closed the engine."""
    if (found := run_log()) is not None:
        error = getattr(sys, "last_value", None)  # of an exception that nothing has caught
        found.end("" if error is None else in_short(error))


def _forget(warnings: logging.Filter, worker: Worker) -> None:
    _logger.removeFilter(warnings)
    worker.end()


def file_name(attempt: int, pid: int) -> str:
    """The name of an engine's file: attempt of the launcher, process, number in the process."""
    return f"steps-{attempt}-{pid}-{next(_NUMBERS)}.jsonl"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(held) for key, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(held) for held in value]
    return value
