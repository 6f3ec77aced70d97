"""The ``zeroshard init`` command: asks four questions and writes a configuration that fits."""

from __future__ import annotations

import contextlib
import json
import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zeroshard.cli.plan import DOES_NOT_FIT
from zeroshard.cli.telling import errors_told, note
from zeroshard.errors import UsageError

if TYPE_CHECKING:
    from zeroshard.config.machine_file import MachineFile
    from zeroshard.planner.candidates import Fit

SAMPLES_PER_GPU = 8
"""Of a step, if nothing says how many."""


class Precision(str, Enum):
    """What the model computes in."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


def init_command(
    model: Annotated[
        str | None,
        typer.Option(
            help="A folder or config.json of Transformers, a type of its models, module:function or "
            "script.py:function."
        ),
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="Number of GPUs. Default: 8.")] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="GiB of memory of one GPU, or its name: a100, h100, h200, rtx4090. Default: 80."
        ),
    ] = None,
    precision: Annotated[Precision | None, typer.Option(help="Default: bf16.")] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1, help="Samples of a step, on all GPUs together. Default: 8 for each GPU."
        ),
    ] = None,
    seq: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens of a sample. Default: 1024, or as many as the model takes."
        ),
    ] = None,
    output: Annotated[Path, typer.Option(help="The file to write.")] = Path("zeroshard.json"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace that file.")] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Ask nothing: use the options and the defaults.")
    ] = False,
) -> None:
    """Write a configuration for a model and GPUs: stage, offload and micro-batch are planned to fit."""
    with errors_told():
        if output.exists() and not overwrite:
            raise UsageError(f"{output} exists already. Give --overwrite, or another --output.")
        if not output.parent.is_dir():
            raise UsageError(f"{output} cannot be written: there is no folder {output.parent}.")
        if model is None and yes:
            raise UsageError("--yes asks nothing, and --model is not given.")
    if not yes:
        model = model or typer.prompt("Model (a folder, config.json, or script.py:function)")
        gpus = gpus or typer.prompt("GPUs", default=8, type=int)
        memory = memory or typer.prompt("Memory of one GPU (GiB, or its name)", default="80")
        precision = precision or typer.prompt("Precision", default="bf16", type=Precision)
    assert model is not None
    ranks = gpus or 8
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does, for module:function
    note("planning, which takes a minute or more for a large model")
    # The model's own prints are no part of the answer.
    with errors_told(), contextlib.redirect_stdout(sys.stderr):
        if ranks < 1:
            raise UsageError(f"GPUs: {ranks}. Give a number from 1.")
        gib, machine = _memory(memory or "80")
        from zeroshard.planner.fit import fit

        base = _base(precision or Precision.bf16, batch or SAMPLES_PER_GPU * ranks)
        found = fit(
            model, base, aim="speed", ranks=ranks, length=seq, memory_gib=gib, machine=machine,
            target="cuda",
        )  # fmt: skip
        if found.chosen is not None:
            output.write_text(json.dumps(found.config, indent=2) + "\n", encoding="utf-8")
    _tell(found, output, model, ranks, memory or "80", seq)
    raise typer.Exit(0 if found.chosen is not None else DOES_NOT_FIT)


def _memory(given: str) -> tuple[float | None, MachineFile | None]:
    """GiB, or the machine of that name.

    Raises:
        ConfigError: it is neither.
    """
    from zeroshard.config.machine_file import load_machine

    with contextlib.suppress(ValueError):
        return float(given), None
    return None, load_machine(given)


def _base(precision: Precision, batch: int) -> dict[str, Any]:
    """The configuration before stage, offload and micro-batch are chosen."""
    config: dict[str, Any] = {
        "train_batch_size": batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "weight_decay": 0.01}},
        "gradient_clipping": 1.0,
    }
    if precision is not Precision.fp32:
        config[precision.value] = {"enabled": True}
    return config


def _tell(found: Fit, output: Path, model: str, ranks: int, memory: str, seq: int | None) -> None:
    """Print what was chosen and the next commands."""
    from zeroshard.core.sizes import size_text

    peak = size_text(found.plan.peak_nbytes)
    limit = size_text(found.plan.limit_nbytes or 0)
    if found.chosen is None:
        print(
            f"Nothing fits {limit}: the smallest of {found.count} configurations needs {peak} on each "
            f"GPU. {output} was not written. Use more GPUs, or shorter samples (--seq)."
        )
        return
    print(f"{output}: {found.chosen.text}")
    print(
        f"Peak memory of a GPU: {peak} of {limit}, as planned. The learning rate is yours to choose."
    )
    if found.chosen.checkpointing:
        print("Add to the program: model.gradient_checkpointing_enable()")
    limit_option = (
        f"--memory {memory}" if memory.replace(".", "").isdigit() else f"--machine {memory}"
    )
    length = "" if seq is None else f" --seq {seq}"
    print(f"Train:   zeroshard launch --nproc {ranks} train.py")
    print(
        f"Details: zeroshard plan {model} --config {output} --ranks {ranks} {limit_option}{length}"
    )
