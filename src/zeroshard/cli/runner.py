"""``deepspeed.launcher.runner.main``, for programs that call it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import typer

from zeroshard.cli.launch import request_from, standalone
from zeroshard.errors import LaunchError
from zeroshard.launch.launch_plan import check_request
from zeroshard.launch.resource_pool import launcher_environment

_UsageError: Any = typer.BadParameter.__base__  # also of unknown and missing options


def main(args: Sequence[str] | None = None) -> None:
    """Run ``deepspeed [flags] script args`` in a child process, and return when it has ended.

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
    """Whether there is anything to run: False after ``--help``, which is answered here.

    Raises:
        LaunchError: flags are unknown or contradict each other.
    """
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
