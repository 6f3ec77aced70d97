"""The argument of the commands that read what a run has recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zeroshard.cli.telling import note

_HELP = (
    "The folder of a run, or a directory of such folders, of which {} is taken. Default: the directory "
    "where runs are recorded if trust.dump_dir names none."
)

RunArgument = Annotated[Path | None, typer.Argument(help=_HELP.format("the newest run"))]
RunningArgument = Annotated[
    Path | None, typer.Argument(help=_HELP.format("the newest run that is running"))
]
EndedArgument = Annotated[
    Path | None, typer.Argument(help=_HELP.format("the newest run that has ended"))
]


def recorded_run(run: Path | None, *, living: bool | None = None) -> Path:
    """The folder of the run that a user names.

    ``living``: rather one whose processes still run, or one whose processes have ended.

    Raises:
        UsageError: there is none.
    """
    from zeroshard.errors import UsageError
    from zeroshard.run.run_folder import default_root, find_run

    try:
        return find_run(default_root() if run is None else run, note, living=living)
    except FileNotFoundError as error:
        raise UsageError(str(error)) from error
