"""What commands share: how they tell a mistake, and the option for JSON."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from zeroshard.errors import ZeroShardError

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextlib.contextmanager
def errors_told() -> Iterator[None]:
    """A context in which ZeroShard's errors and OSError end the command with 2, without a traceback."""
    try:
        yield
    except (ZeroShardError, OSError) as error:
        print(f"zeroshard: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


def note(text: str) -> None:
    """Print a line that is no part of the command's output."""
    print(f"zeroshard: {text}", file=sys.stderr)


def open_standard_streams() -> None:
    """Open the null device in place of standard streams that the caller has closed (``>&-``).

    The next file would get the number of such a stream, and what ranks print would be written to it.
    """
    if None not in (sys.stdin, sys.stdout, sys.stderr):
        return
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
