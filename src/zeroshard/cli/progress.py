"""What ``zeroshard plan`` and ``zeroshard init`` tell while they simulate."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from zeroshard.cli.telling import note
from zeroshard.core.sizes import size_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from zeroshard.planner.plan import Audience, Plan

LONG_S = 10.0
LONG = "planning: a large model takes minutes (--verbose shows each simulation)"
"""What is told after so many seconds where there is no terminal."""

Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        help="Print details, and each simulation even without a terminal.",
    ),
]


@contextlib.contextmanager
def progress(*, verbose: bool) -> Iterator[Audience]:
    """Tell of simulations on standard error: one line for each, and on a terminal what runs now.

    If standard error is no terminal and ``verbose`` is not set, one line tells that it takes long, and
    another one what the first simulation found.
    """
    if not (verbose or sys.stderr.isatty()):
        with _told_if_long():
            yield _Brief()
        return
    from rich.console import Console

    console = Console(stderr=True, highlight=False, emoji=False, markup=False)
    with console.status("zeroshard: reading the model") as status:
        yield _Told(console, status)


@contextlib.contextmanager
def _told_if_long() -> Iterator[None]:
    timer = threading.Timer(LONG_S, note, [LONG])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class _Brief:
    """Tells of the first simulation alone, if it took long."""

    def __init__(self) -> None:
        self._began_s: float | None = time.monotonic()
        self._what = ""

    def begins(self, what: str) -> None:
        self._what = what

    def ended(self, plan: Plan | None) -> None:
        began_s, self._began_s = self._began_s, None
        if began_s is not None and time.monotonic() - began_s > LONG_S:
            note(f"the first simulation: {self._what}: {_found(plan)}; more may follow")


class _Told:
    """Prints a line for each simulation that has ended."""

    def __init__(self, console: Console, status: Status) -> None:
        self._console, self._status = console, status
        self._count, self._what, self._began_s = 0, "", 0.0

    def begins(self, what: str) -> None:
        self._count, self._what, self._began_s = self._count + 1, what, time.monotonic()
        self._status.update(f"zeroshard: simulation {self._count}: {what}")

    def ended(self, plan: Plan | None) -> None:
        took_s = time.monotonic() - self._began_s
        self._console.print(
            f"zeroshard: simulation {self._count}: {self._what}: {_found(plan)} ({took_s:.0f} s)",
            soft_wrap=True,
        )


def _found(plan: Plan | None) -> str:
    if plan is None:
        return "not possible"
    verdict = {True: ", fits", False: ", does not fit", None: ""}[plan.fits]
    return f"peak {size_text(plan.peak_nbytes)}{verdict}"
