"""The ``zeroshard report`` command: one HTML page about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zeroshard.cli.telling import errors_told, note


def report_command(
    run: Annotated[
        Path | None,
        typer.Argument(
            help="The folder of a run, or a directory of such folders: the run written last. "
            "Default: the directory where runs are recorded if trust.dump_dir names none."
        ),
    ] = None,
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
    from zeroshard.run.run_folder import default_root, find_run

    with errors_told():
        try:
            folder = find_run(default_root() if run is None else run, note)
        except FileNotFoundError as error:
            raise UsageError(str(error)) from error
        target = output or folder / "report.html"
        page = make_page(folder)
        try:
            target.write_text(page, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{target} cannot be written: {error}") from error
    print(f"{target}  ({len(page.encode()) / 1000:.0f} kB)")
