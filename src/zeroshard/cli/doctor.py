"""The ``zeroshard doctor`` command: says whether this machine can train."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from zeroshard.cli.telling import AsJson, errors_told


def doctor_command(
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", min=1, help="Ranks on this host; default: one per GPU, or 2."),
    ] = None,
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="Hosts of the run.")] = 1,
    disk: Annotated[Path, typer.Option("--disk", help="A folder for offloaded state.")] = Path("."),
    fix_env: Annotated[
        bool, typer.Option("--fix-env", help="Print only shell lines that help now.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Examine this machine: memory, cores, limits, disk, network, and exchanges between processes.

    Exit code 0: nothing is wrong; 1: warnings; 2: a run will fail.
    """
    from zeroshard.doctor import examination

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends probes, too
    with errors_told():
        found = examination.examine(ranks, disk, nodes)
    if as_json:
        print(examination.as_json(found))
    elif fix_env:
        for fix in dict.fromkeys(finding.fix for finding in found.findings if finding.fix):
            print(fix)
    else:
        for line in examination.lines(found):
            print(line)
    raise typer.Exit(found.exit_code)
