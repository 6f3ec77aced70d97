"""The ``zeroshard compat`` command: lets other launchers of a shell find ZeroShard as ``deepspeed``."""

from __future__ import annotations

import shlex
import sys
from typing import Annotated

import typer

from zeroshard.deepspeed.install import DIRECTORY, rivals, winner


def compat_command(
    path: Annotated[
        bool, typer.Option("--path", help="Print only the directory to put on PYTHONPATH.")
    ] = False,
) -> None:
    """Print shell commands that make `import deepspeed` import ZeroShard: eval "$(zeroshard compat)".

    Afterwards `accelerate launch`, `torchrun` and `deepspeed` in this shell use ZeroShard.
    """
    warn_of_winner()
    for rival in rivals([""]):
        print(
            f"zeroshard: {str(rival)!r} is imported instead of ZeroShard by programs in this "
            "directory, because the directory of a program comes before PYTHONPATH. Rename it.",
            file=sys.stderr,
        )
    if path:
        print(DIRECTORY)
        return
    print(f'export PYTHONPATH={shlex.quote(str(DIRECTORY))}"${{PYTHONPATH:+:$PYTHONPATH}}"')
    print(f'export PATH={shlex.quote(str(DIRECTORY / "bin"))}":$PATH"')


def warn_of_winner() -> None:
    """Print a warning if another ``deepspeed`` is found before ZeroShard's, whatever PYTHONPATH is."""
    if found := winner():
        print(
            f"zeroshard: 'import deepspeed' imports {found}, although ZeroShard is first on "
            "PYTHONPATH. Remove what puts it before PYTHONPATH, probably a .pth file in "
            "site-packages.",
            file=sys.stderr,
        )
