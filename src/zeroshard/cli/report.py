"""The ``zeroshard report`` command: one HTML page about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zeroshard.cli.runs import RunArgument, recorded_run
from zeroshard.cli.telling import errors_told


def report_command(
    run: RunArgument = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write. Default: report.html in that folder."),
    ] = None,
) -> None:
    """Make one HTML page of a run: curves, memory, traffic, times, configuration, incidents.

    The page has no scripts and loads nothing.
    """
    from zeroshard.errors import UsageError
    from zeroshard.report.page import make_page

    with errors_told():
        folder = recorded_run(run)
        target = output or folder / "report.html"
        page = make_page(folder)
        try:
            target.write_text(page, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{target} cannot be written: {error}") from error
    print(f"{target}  ({len(page.encode()) / 1000:.0f} kB)")
