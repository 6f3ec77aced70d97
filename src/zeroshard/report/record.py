"""Reads the records of a run: the files ``steps-*.jsonl`` in its folder.

:mod:`zeroshard.metrics.run_log` writes them. A process that was killed may leave an incomplete last line,
which is left out with a note. Anything else that cannot be read is an error: a page never shows part of a
record as the whole.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeroshard.errors import UsageError
from zeroshard.run.run_folder import RECORD_FORMAT

Points = list[tuple[int, float]]
"""Pairs (step, value)."""

_NO_VALUES = ("kind", "step", "samples", "time_s")

_KEYS_OF_FIRST = (
    "time_s", "attempt", "host", "world_size", "mesh", "versions", "device", "transport", "dtypes",
    "stage", "accumulation", "train_batch_size", "model", "parameters", "units", "config",
    "environment", "notes",
)  # fmt: skip
_KEYS_OF_ROWS = {
    "memory": ("category", "planned", "measured", "tier"),
    "traffic": ("op", "calls", "payload_numel", "sent_nbytes", "waited_s"),
}
"""What a page reads of the first line, and of each row of the lines about memory and traffic."""


@dataclass
class RunRecord:
    """What one engine recorded.

    ``first``: the line about the run. ``values``: by name, the steps at which it is known, and numbers;
    those that were not finite as NaN. ``facts``: the newest line about memory and traffic, after
    ``steps_of_facts`` steps. ``reason``: why the run ended; None: there is no last line, "": nothing
    failed.
    """

    path: Path
    first: Mapping[str, Any]
    values: dict[str, Points] = field(default_factory=dict)
    incidents: list[tuple[int, float, str]] = field(default_factory=list)  # step, time, text
    facts: Mapping[str, Any] = field(default_factory=dict)
    num_steps: int = 0
    steps_of_facts: int = 0
    last_step: int = 0
    last_s: float = 0.0
    reason: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        """The model, and the attempt if a launcher restarted the run."""
        attempt = self.first["attempt"]
        return f"{self.first['model']}{f', attempt {attempt}' if attempt else ''}"

    @property
    def ending(self) -> str:
        """How the run ended, in words."""
        if self.reason is None:
            return "no last line: it runs still, or its process was killed"
        return self.reason or "ended without an error"

    @property
    def seconds(self) -> float:
        """From the start of the record to its last line."""
        return max(0.0, self.last_s - float(self.first["time_s"]))


def read_records(folder: Path) -> list[RunRecord]:
    """All records in a run's folder, the oldest first.

    Raises:
        UsageError: there is none, or one cannot be read.
    """
    paths = sorted(folder.glob("steps-*.jsonl"))
    if not paths:
        raise UsageError(
            f"{folder} has no record of steps (steps-*.jsonl). Rank 0 writes one from its first step on, "
            "unless trust.report is false."
        )
    return sorted((read_record(path) for path in paths), key=lambda each: each.first["time_s"])


def read_record(path: Path) -> RunRecord:
    """Read one file.

    Raises:
        UsageError: it cannot be read; the text has file and line.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    lines = _lines(path, text)
    first = next(lines, None)
    if first is None or first.get("kind") != "run":
        raise UsageError(
            f"{path} is not the record of a run: its first line does not describe one. It is empty, "
            "or its beginning is missing."
        )
    if first.get("format") != RECORD_FORMAT:
        raise UsageError(
            f"{path} has format {first.get('format')!r}, and this release reads format {RECORD_FORMAT}. "
            "Use the release that wrote it."
        )
    if absent := [key for key in _KEYS_OF_FIRST if key not in first]:
        raise UsageError(
            f"{path}, line 1 is damaged: it lacks {', '.join(absent)}, so the run is not described. "
            "Copy the file again."
        )
    record = RunRecord(path, first, last_s=float(first["time_s"]))
    for number, line in enumerate(lines, 2):
        try:
            _add(record, line)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"{path}, line {number} is damaged: {type(error).__name__}: {error} in "
                f"{json.dumps(line)[:60]!r}. Copy the file again, or remove the line."
            ) from error
    if not text.endswith("\n"):
        record.notes.append("The last line is incomplete: the process was killed while it wrote.")
    return record


def _lines(path: Path, text: str) -> Iterator[dict[str, Any]]:
    lines = text.split("\n")
    for number, line in enumerate(lines[:-1], 1):  # what follows the last newline is no line
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            found = error
        if not isinstance(found, dict) or "kind" not in found:
            raise UsageError(
                f"{path}, line {number} is damaged: {line[:60]!r} is not a JSON object with a kind. "
                "Copy the file again, or remove the line."
            )
        yield found


def _add(record: RunRecord, line: Mapping[str, Any]) -> None:
    kind = line["kind"]
    record.last_s = float(line["time_s"])
    record.last_step = max(record.last_step, int(line["step"]))
    if kind == "step":
        record.num_steps += 1
        for name, value in line.items():
            if name not in _NO_VALUES:
                number = math.nan if value is None else float(value)
                record.values.setdefault(name, []).append((int(line["step"]), number))
    elif kind == "incident":
        record.incidents.append((int(line["step"]), record.last_s, str(line["text"])))
    elif kind in ("facts", "end"):
        for name, keys in _KEYS_OF_ROWS.items():
            for row in line[name]:
                tuple(row[key] for key in keys)  # KeyError: a page would lack it
        record.facts, record.steps_of_facts = line, record.num_steps
        if kind == "end":
            record.reason = str(line["reason"])


def evidence(folder: Path) -> list[tuple[str, str]]:
    """Names and texts of the diagnoses of stalls that ranks left in a run's folder."""
    found = []
    for path in sorted(folder.glob("hang-*.json")):
        try:
            text = json.loads(path.read_text())["diagnosis"]["text"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            text = f"cannot be read ({type(error).__name__})"
        found.append((path.name, str(text)))
    return found


def quantiles(points: Sequence[tuple[int, float]]) -> tuple[float, float, float]:
    """10 %, 50 % and 90 % of the finite values; NaN if there are none."""
    values = sorted(value for _, value in points if math.isfinite(value))
    if not values:
        return (math.nan,) * 3
    return tuple(values[round(part * (len(values) - 1))] for part in (0.1, 0.5, 0.9))  # type: ignore[return-value]
