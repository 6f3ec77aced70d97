"""What commands share: how they tell a mistake, and the option for JSON."""

from __future__ import annotations

import contextlib
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
