"""The ``zeroshard plan`` command: what a run needs, before it is started."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zeroshard.cli.telling import AsJson, errors_told, note
from zeroshard.core.texts import size_text
from zeroshard.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from zeroshard.planner.gpu_kernels import Target
    from zeroshard.planner.make_plan import Asked
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


DOES_NOT_FIT = 3
SAMPLES = 8
"""Of each rank in a step, if a search has no configuration."""


class PlannedDevice(str, Enum):
    """The device whose operations are planned."""

    cpu = "cpu"
    cuda = "cuda"


class Aim(str, Enum):
    """What ``--fit`` looks for."""

    speed = "speed"
    memory = "memory"


ModelName = Annotated[
    str | None,
    typer.Argument(
        help="A folder or config.json of Transformers, a type of its models, module:function, "
        "script.py:function, or a script.py that defines plan_entry()."
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        help="The configuration of the run (JSON). Default: bf16, AdamW, stage 3, micro-batch 1."
    ),
]
NumRanks = Annotated[int, typer.Option(min=1, help="Number of ranks.")]
RanksPerNode = Annotated[
    int | None,
    typer.Option(min=1, help="Ranks of a node. Default: those of --machine, or one node."),
]
MicroBatch = Annotated[
    str | None,
    typer.Option(help='Samples of a micro-batch, or "max": the most that fit --memory.'),
]
SampleLength = Annotated[int | None, typer.Option(min=1, help="Tokens of a sample.")]


def device_gib(text: str) -> float:
    """GiB that tensors may take on a device.

    A number, with GiB or Gi (or MiB, TiB) or without, is for tensors. With GB or G (MB, TB) it is what a
    card is called: of its decimal bytes CUDA and NCCL take :data:`TAKEN_NBYTES`. Upper and lower case are
    equal.

    >>> device_gib("73"), device_gib("73 Gi"), round(device_gib("80G"), 2) == round(device_gib("80gb"), 2)
    (73.0, 73.0, True)
    """
    found = re.fullmatch(r"\s*(\S+?)\s*(?:([mgt])(i?)b?)?\s*", text, re.IGNORECASE)
    try:
        size = float(found[1] if found else text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a size: give GiB for tensors (73, 73GiB), or what the card is called "
            "(80GB or 80G)."
        ) from None
    if not found or not found[2]:
        return size
    power = "mgt".index(found[2].lower()) + 2
    if found[3]:
        return size * float(1024 ** (power - 3))
    left_nbytes = size * 1000.0**power - TAKEN_NBYTES
    if left_nbytes <= 0:
        raise typer.BadParameter(
            f"{text!r} is a card of which nothing is left for tensors: CUDA and NCCL take "
            f"{TAKEN_NBYTES / 1e9:g} GB. Give GiB for tensors as a number (73) or with GiB."
        )
    return left_nbytes / 2**30


TAKEN_NBYTES = 1_200_000_000
"""Of a card: its context, and two communicators of NCCL, as the machine files assume."""
DeviceMemory = Annotated[
    float | None,
    typer.Option(
        parser=device_gib,
        metavar="SIZE",
        help="Memory of one device: GiB for tensors (73, 73GiB), or what the card is called (80GB, 80G).",
    ),
]
FitAim = Annotated[
    Aim | None,
    typer.Option(
        help="Find stage, offload, activation checkpointing and micro-batch that fit --memory: the "
        "fastest, or those with the smallest peak."
    ),
]
FitAxes = Annotated[
    str | None,
    typer.Option(
        metavar="AXES",
        help='The axes of the mesh that --fit may choose: "tensor", for all sizes that divide the '
        'ranks and a node, "tensor=1,4", for these, "pipeline", "expert", or several of them, '
        '"tensor,pipeline". Default: the mesh stays.',
    ),
]
MachineName = Annotated[
    str | None,
    typer.Option(
        help="Predict the time of a step on this machine: a100, h100, h200, rtx4090, or a TOML file."
    ),
]
TargetDevice = Annotated[
    PlannedDevice | None,
    typer.Option(
        help="Plan the operations of this kind of device. Default: that of --machine, or the CPU."
    ),
]
MeasuredFile = Annotated[
    str | None,
    typer.Option(
        "--measure",
        metavar="FILE.toml",
        help="Measure this machine's CPU, collectives and disk into this file, and plan nothing.",
    ),
]
PageFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Also write a page with figures into this file."),
]
TraceFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Also write the step as a trace for chrome://tracing and Perfetto into this file.",
    ),
]
OnlyCheck = Annotated[
    bool,
    typer.Option(
        "--check",
        help="Exit with 3 if the run does not fit --memory, and do not look for changes.",
    ),
]


def plan_command(
    model: ModelName = None,
    config: ConfigFile = None,
    ranks: NumRanks = 1,
    ranks_per_node: RanksPerNode = None,
    batch: MicroBatch = None,
    seq: SampleLength = None,
    memory: DeviceMemory = None,
    fit: FitAim = None,
    fit_axes: FitAxes = None,
    machine: MachineName = None,
    target: TargetDevice = None,
    measured: MeasuredFile = None,
    html: PageFile = None,
    trace: TraceFile = None,
    as_json: AsJson = False,
    check: OnlyCheck = False,
    verbose: Verbose = False,
) -> None:
    """Say what a run needs in memory and traffic, without running it. Nothing is downloaded."""
    if measured is not None:
        _measure(measured, model)
        return
    if model is None:
        note("MODEL is missing. Example: zeroshard plan ./my-model --config ds.json")
        raise typer.Exit(2)
    if check and memory is None and machine is None:
        note("--check compares with --memory, which is not given, nor is --machine.")
        raise typer.Exit(2)
    given = _config(config, ranks, searched=fit is not None)
    if target is None and machine is None and ranks > (os.cpu_count() or 1):
        note(
            f"planned for {ranks} CPU ranks, more than this machine has processors. If they are GPUs, "
            "give --target cuda, or the --machine."
        )
    # They import torch and more, and only this command needs them.
    from zeroshard.config.machine_file import load_machine
    from zeroshard.planner.make_plan import Asked

    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does, for module:function
    with errors_told():
        _refuse_together(fit, fit_axes, batch, html, trace)
        priced = None if machine is None else load_machine(machine)
        kind: Target | None = None if target is None else target.value
        asked = Asked(model, given, ranks, seq, memory, priced, kind, ranks_per_node)
    if fit is not None:
        _search(asked, fit, fit_axes, as_json=as_json, verbose=verbose)
    else:
        with progress(verbose=verbose) as told:
            found = _planned(asked, batch, html, trace, told, with_changes=not check)
        _tell(found, as_json=as_json, verbose=verbose)
        if check and not found.fits:
            raise typer.Exit(DOES_NOT_FIT)


def _config(path: Path | None, ranks: int, *, searched: bool) -> Path | dict[str, Any]:
    """The configuration of the run; without a file a small one. ``searched``: without stage and batch."""
    if path is not None:
        return path
    base: dict[str, Any] = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}}
    if searched:
        note(f"no --config is given: bf16, AdamW, {SAMPLES} samples of each rank in a step")
        return base | {"train_batch_size": SAMPLES * ranks}
    note("no --config is given: bf16, AdamW, stage 3, micro-batch 1")
    return base | {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}


def _refuse_together(
    fit: Aim | None, fit_axes: str | None, batch: str | None, html: Path | None, trace: Path | None
) -> None:
    """Refuse options that do not go together."""
    if fit is None:
        if fit_axes is not None:
            raise UsageError("--fit-axes says what --fit may choose, which is not given.")
        return
    if html is not None or trace is not None:
        raise UsageError(
            "--html and --trace are of one plan, and --fit makes several. Leave them out, and "
            "plan the configuration that it prints with them."
        )
    if batch is not None:
        raise UsageError("--fit chooses the micro-batch. Leave --batch out.")


def _search(
    asked: Asked,
    aim: Aim,
    fit_axes: str | None,
    *,
    as_json: bool,
    verbose: bool,
) -> None:
    """Print the configuration that fits. Ends the command."""
    from zeroshard.planner.axes import read_axes
    from zeroshard.planner.fit import fit
    from zeroshard.planner.plan_text import plan_console, show_fit

    # The model's own prints are no part of the answer, which may be JSON.
    with errors_told(), contextlib.redirect_stdout(sys.stderr), progress(verbose=verbose) as told:
        axes = None if fit_axes is None else read_axes(fit_axes)
        searched = fit(asked, aim=aim.value, axes=axes, audience=told)
    if as_json:
        print(json.dumps(searched.as_dict(), indent=1))
    else:
        show_fit(searched, plan_console(), verbose=verbose)
    raise typer.Exit(0 if searched.chosen is not None else DOES_NOT_FIT)


def _planned(
    asked: Asked,
    batch: str | None,
    html: Path | None,
    trace: Path | None,
    told: Audience,
    *,
    with_changes: bool,
) -> Plan:
    """One plan, of which the files that were asked for are written.

    ``with_changes``: also look for changes that make it fit, which costs several more simulations.
    """
    from zeroshard.planner import changes
    from zeroshard.planner.make_plan import make_plan

    with_events = trace is not None
    # The model's own prints are no part of the answer, which may be JSON.
    with errors_told(), contextlib.redirect_stdout(sys.stderr):
        if batch == "max":
            found = changes.plan_of_largest_batch(asked, with_events=with_events, audience=told)
        else:
            samples = None if batch is None else _samples(batch)
            told.begins("the run as it is configured")
            found = make_plan(asked, micro_batch=samples, with_events=with_events)
            told.ended(found)
            if with_changes:
                found = changes.with_changes(found, asked, audience=told)
        _write(found, html, trace)
    return found


def _tell(found: Plan, *, as_json: bool, verbose: bool) -> None:
    from zeroshard.planner.plan_text import plan_console, show

    if as_json:
        print(json.dumps(found.as_dict(), indent=1))
    else:
        show(found, plan_console(), verbose=verbose)


def _write(found: Plan, html: Path | None, trace: Path | None) -> None:
    """Write the files that were asked for."""
    from zeroshard.planner.trace import trace as trace_of
    from zeroshard.report.plan_page import plan_page

    if html is not None:
        html.write_text(plan_page(found.as_dict(), found.config), encoding="utf-8")
    if trace is not None:
        trace.write_text(json.dumps(trace_of(found)), encoding="utf-8")


def _measure(path: str, model: str | None) -> None:
    from zeroshard.planner.measure import measure

    with errors_told():
        if model is not None:
            raise UsageError(
                f"--measure plans nothing, and the model {model} was given. Measure first, then plan "
                f"with --machine {path}."
            )
        machine = measure(Path(path))
    print(f"{path}: {machine.name}. Plan with --machine {path}")


def _samples(batch: str) -> int:
    if not batch.isascii() or not batch.isdigit() or int(batch) < 1:
        raise UsageError(
            f'--batch is {batch!r}, which is not a number of samples. Give a number from 1, or "max".'
        )
    return int(batch)
