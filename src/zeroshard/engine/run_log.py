"""The record of a run: JSON lines in the run's folder, from which ``zeroshard report`` makes a page.

Rank 0 writes one file for each engine. The first line describes the run, one line follows for each step
and for each warning of the library, and the last line says how it ended. A thread writes the lines
(:mod:`zeroshard.engine.monitors`), so that a process that is killed loses the last step at most.

Of the environment only the variables that change behaviour are written
(:func:`zeroshard.launch.env.variables_of_behaviour`), and no secrets of the configuration.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from zeroshard.engine.monitors import Worker
from zeroshard.engine.sinks import Sink
from zeroshard.engine.step_stream import StepEvent

FACTS_EVERY = 100
"""Steps between two lines about memory and traffic."""
_NUMBERS = itertools.count()  # of the engines of this process


class JsonLines(Sink):
    """A file of JSON lines. It is made with the first line. ``path()`` makes its folder."""

    def __init__(self, path: Callable[[], Path], first: Callable[[], Mapping[str, Any]]) -> None:
        self._path, self._first = path, first
        self._file: TextIO | None = None

    def open(self) -> None:
        """See :class:`Sink`."""
        self._file = self._path().open("w", encoding="utf-8", buffering=1)  # by lines
        self.write(self._first())

    def write(self, line: Any) -> None:
        """Append one line. Numbers that are not finite become null."""
        assert self._file is not None
        self._file.write(json.dumps(_finite(line), default=str, separators=(",", ":")) + "\n")

    def close(self) -> None:
        """See :class:`Sink`."""
        if self._file is not None:
            self._file.close()


class RunLog:
    """Records one engine. ``facts()`` makes what lines about its memory and traffic say."""

    def __init__(self, lines: JsonLines, facts: Callable[[], Mapping[str, Any]]) -> None:
        self._worker = Worker(lines, "the record of the run")
        self._facts = facts
        self._step = 0
        self._warnings = _Warnings(self)
        logging.getLogger("zeroshard").addHandler(self._warnings)

    def note_step(self, event: StepEvent) -> None:
        """Add a line with the values of a step."""
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
        logging.getLogger("zeroshard").removeHandler(self._warnings)
        if self._step:
            self._note_facts("end", reason=reason)

    def close(self) -> None:
        """Wait until all lines are written."""
        self._worker.close()

    def _note_facts(self, kind: str, **more: str) -> None:
        self._worker.put({
            "kind": kind, "step": self._step, "time_s": time.time(), **more, **self._facts()
        })  # fmt: skip


class _Warnings(logging.Handler):
    """Passes warnings of the library to the record."""

    def __init__(self, run_log: RunLog) -> None:
        super().__init__(logging.WARNING)
        self._run_log = run_log

    def emit(self, record: logging.LogRecord) -> None:
        self._run_log.note_incident(record.getMessage())


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
