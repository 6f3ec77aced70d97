"""Commands that start runs: ``zeroshard launch``, and ``deepspeed.launcher.runner.main`` for programs.

``zeroshard compat`` lets other launchers of a shell find ZeroShard as ``deepspeed``.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from inspect import Parameter, Signature
from typing import Annotated, Any

import typer

from zeroshard.deepspeed.install import DIRECTORY, rivals, winner
from zeroshard.errors import LaunchError
from zeroshard.launch.hosts import launcher_environment
from zeroshard.launch.launch_plan import check_request
from zeroshard.launch.launcher import launch
from zeroshard.launch.options import LaunchRequest, Option, declared


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


# All words after the script are arguments of the script.
CONTEXT = {"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}


def request_from(values: Mapping[str, Any]) -> LaunchRequest:
    """The request for the parameters of a parsed command line, by name."""
    own = {field.name for field in fields(LaunchRequest)}
    given = {name: value for name, value in values.items() if name in own}
    given["args"] = tuple(given["args"] or ())
    given["as_deepspeed"] = str(DIRECTORY) if given["as_deepspeed"] else ""
    return LaunchRequest(**given)


def launch_command(**values: Any) -> None:
    """Run SCRIPT on all ranks. They are on this node, the hosts of a hostfile, or a SLURM job's nodes.

    If a rank fails, the command prints the reason, prints the first traceback once, and ends with the
    exit code of that rank.
    """
    request = request_from(values)
    if request.as_deepspeed and not request.quiet:
        warn_of_winner()
    try:
        code = launch(request)
    except LaunchError as error:
        print(f"zeroshard: {error}", file=sys.stderr)
        code = 2
    if code and request.end_by_signal:
        sys.stdout.flush()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)
    raise typer.Exit(code)


def _parameters() -> list[Parameter]:
    """The parameters from which typer makes the command line."""
    program = Annotated[str, typer.Argument(help="The training program.")]
    args = Annotated[list[str] | None, typer.Argument(help="The arguments of the program.")]
    kind = Parameter.KEYWORD_ONLY
    found = [
        Parameter("script", kind, annotation=program),
        Parameter("args", kind, default=None, annotation=args),
    ]
    for name, type_, default, option in declared():
        annotation = Annotated[type_, _typer_option(option)]  # type: ignore[valid-type]
        found.append(Parameter(name, kind, default=default, annotation=annotation))
    return found


def _typer_option(option: Option) -> Any:
    return typer.Option(
        *option.names,
        help=option.help,
        metavar=option.metavar,
        hidden=option.hidden,
        callback=_refuse(option.refused) if option.refused else None,
    )


def _refuse(reason: str) -> Callable[[Any], None]:
    """The callback of an option that is refused with ``reason``."""

    def check(value: Any) -> None:
        if value:
            raise typer.BadParameter(reason)

    return check


# typer reads the signature and the annotations of a command.
launch_command.__signature__ = Signature(_parameters())  # type: ignore[attr-defined]
launch_command.__annotations__ = {p.name: p.annotation for p in _parameters()}

standalone = typer.Typer(add_completion=False, rich_markup_mode=None)
standalone.command(context_settings=CONTEXT)(launch_command)


_UsageError: Any = typer.BadParameter.__base__  # also of unknown and missing options


def main(args: Sequence[str] | None = None) -> None:
    """``deepspeed.launcher.runner.main``: run ``deepspeed [flags] script args`` in a child process.

    Returns when it has ended.

    Raises:
        LaunchError: flags are unknown or contradict each other. Raised before anything is started.
        SystemExit: the run ended with this exit code, which is not 0.
    """
    words = list(sys.argv[1:] if args is None else args)
    if not _check(words):
        return
    launcher = [sys.executable, "-m", "zeroshard.cli.main", "launch", "--as-deepspeed"]
    command = [*launcher, "--pass_local_rank", *words]
    with subprocess.Popen(command, env=launcher_environment()) as running:
        try:
            code = running.wait()
        except BaseException:
            running.terminate()  # its ranks end with it
            raise
    if code:
        raise SystemExit(code)


def _check(words: list[str]) -> bool:
    """Whether there is anything to run: False after ``--help``, which is answered here."""
    try:
        context = typer.main.get_command(standalone).make_context(
            "deepspeed", [*words]
        )  # click empties it
    except typer.Exit:
        return False
    except _UsageError as error:
        raise LaunchError(f"deepspeed: {error.format_message()}") from None
    check_request(request_from(context.params))
    return True
