"""The ``zeroshard launch`` command: makes a :class:`LaunchRequest` from options and runs it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from inspect import Parameter, Signature
from typing import Annotated, Any

import typer

from zeroshard.cli.compat import warn_of_winner
from zeroshard.deepspeed.install import DIRECTORY
from zeroshard.errors import LaunchError
from zeroshard.launch.launcher import launch
from zeroshard.launch.options import LaunchRequest, Option, declared

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
