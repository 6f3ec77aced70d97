"""The file of results. It is written after every turn, so a run that is cut off keeps what it has."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path
from typing import Any

Answer = dict[str, Any]
FORMAT = 2


class Results:
    """One JSON file: under ``steps`` the rows of each step, with date, machine and versions.

    Steps of earlier runs stay in the file until they are run again. ``unfinished`` has the answers of the
    step that is running. ``path=None``: nothing is written.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.content: dict[str, Any] = {"format": FORMAT, "steps": {}, "unfinished": {}}
        if path is not None and path.exists():
            old = json.loads(path.read_text())
            if old.get("format") == FORMAT:
                self.content["steps"] = old["steps"]

    def turn(self, step: str, title: str, answer: Answer) -> None:
        """Keep the answer of one turn until its step has ended."""
        self.content["unfinished"].setdefault(step, []).append({"turn": title, **answer})
        self._write()

    def finish(self, step: str, rows: list[Answer], machine: Answer) -> None:
        """Keep the rows of a step instead of its turns."""
        self.content["unfinished"].pop(step, None)
        self.content["steps"][step] = {"date": now(), "machine": machine, "rows": rows}
        self._write()

    def _write(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_suffix(".new")
        fresh.write_text(json.dumps(self.content, indent=1) + "\n")
        os.replace(fresh, self.path)


def now() -> str:
    """The date and time in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
