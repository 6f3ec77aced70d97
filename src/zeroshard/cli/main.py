"""The ``zeroshard`` command.

Each command imports what it needs when it runs, so that ``zeroshard --help`` does not import torch.
"""

from __future__ import annotations

import atexit
import os
import platform
import signal
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from zeroshard.cli.ckpt import ckpt
from zeroshard.cli.init import init_command
from zeroshard.cli.launch import CONTEXT, compat_command, launch_command
from zeroshard.cli.plan import plan_command
from zeroshard.cli.runs import explain_command, report_command, stacks_command
from zeroshard.cli.telling import AsJson, errors_told, open_standard_streams

main = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="ZeRO training for PyTorch.",
)
main.command("init")(init_command)
main.command("launch", context_settings=CONTEXT)(launch_command)
main.command("compat")(compat_command)
main.command("report")(report_command)
main.command("explain")(explain_command)
main.command("plan")(plan_command)
main.command("stacks")(stacks_command)
main.add_typer(ckpt, name="ckpt")


def _print_version(asked: bool) -> None:
    if asked:
        version_command()
        raise typer.Exit


@main.callback()
def main_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the versions and exit."
        ),
    ] = False,
) -> None:
    """ZeRO training for PyTorch."""


@main.command("config")
def config_command(
    source: Annotated[str, typer.Argument(help="A DeepSpeed configuration file (JSON).")],
    world_size: Annotated[
        int,
        typer.Option(
            "--world-size",
            "--world_size",
            min=1,
            help="Number of ranks. Batch sizes are computed for it.",
        ),
    ] = 1,
) -> None:
    """Print every resolved value of a configuration, and where each value comes from."""
    from zeroshard.config import Hardware, load_config

    def hardware() -> Hardware:  # imports torch; called only if needed
        from zeroshard.comm.env import RankInfo, local_device
        from zeroshard.precision.hardware import hardware_of

        return hardware_of(local_device(RankInfo()))

    with errors_told():
        loaded = load_config(Path(source), world_size=world_size, hardware=hardware)
    print(loaded.table())
    for notice in loaded.notices:
        print(notice, file=sys.stderr)


@main.command("version")
def version_command() -> None:
    """Print the versions of ZeroShard, torch and Python."""
    words = [f"{name} {_version(name)}" for name in ("zeroshard", "torch")]
    print(", ".join([*words, f"Python {platform.python_version()}"]))


@main.command("doctor")
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


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def run() -> None:
    """The program ``zeroshard``.

    A process that has planned ends without freeing its objects one by one: for those of torch and
    Transformers this takes over a second of CPU time.
    """
    open_standard_streams()
    try:
        main()
    except SystemExit as leaving:
        if "zeroshard.planner" not in sys.modules or not isinstance(leaving.code, int):
            raise
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(leaving.code)


if __name__ == "__main__":
    run()
