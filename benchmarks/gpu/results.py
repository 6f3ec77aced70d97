"""The file of results. It is written after every turn, so a run that is cut off keeps what it has.

Several runs may write a file each; :func:`merged` makes one of them.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Sequence
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
        if self.path is not None:
            write(self.path, self.content)


def write(path: Path, content: Answer) -> None:
    """Replace the file in one step, so that a reader never sees a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(fresh, path)


def read(path: Path) -> Answer:
    """The content of a file of results.

    Raises:
        ValueError: it is none of this format, or cannot be read. The text names the file.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path} has no results of format {FORMAT}")
    return content


def merged(paths: Sequence[Path]) -> tuple[Answer, dict[str, Path]]:
    """The steps of several files as one content, and for each step the file that it is from.

    Of a step that several files have, the newest counts. Turns of a step that no file has finished are
    kept as unfinished.

    Raises:
        ValueError: see :func:`read`.
    """
    steps: dict[str, Answer] = {}
    unfinished: dict[str, list[Answer]] = {}
    source: dict[str, Path] = {}
    for path in paths:
        content = read(path)
        for name, step in content["steps"].items():
            if name not in steps or step["date"] > steps[name]["date"]:
                steps[name], source[name] = step, path
        for name, turns in content["unfinished"].items():
            unfinished.setdefault(name, []).extend(turns)
    left = {name: turns for name, turns in unfinished.items() if name not in steps}
    return {"format": FORMAT, "steps": steps, "unfinished": left}, source


def now() -> str:
    """The date and time in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
