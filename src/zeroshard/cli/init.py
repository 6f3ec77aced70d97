"""The ``zeroshard init`` command: asks four questions and writes a configuration that fits."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from zeroshard.cli.plan import DOES_NOT_FIT, SAMPLES, Verbose, device_gib, progress
from zeroshard.cli.telling import errors_told
from zeroshard.errors import UsageError

if TYPE_CHECKING:
    from zeroshard.planner.candidates import Fit
    from zeroshard.planner.plan import Audience

T = TypeVar("T")

GPUS, MEMORY = 8, "80GB"
"""If nothing says how many."""


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
        typer.Option(help="Of one GPU: 80GB, a100, h200, ..., or GiB for tensors. Default: 80GB."),
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
    verbose: Verbose = False,
) -> None:
    """Write a configuration for a model and GPUs: stage, offload and micro-batch are planned to fit."""
    with errors_told():
        _refuse(output, overwrite, model, asks=not yes)
    asks = not yes
    answers = Answers(
        _answer(model, asks, "Model (a folder, config.json, or script.py:function)", None, str),
        _answer(gpus, asks, "GPUs", GPUS, int),
        _answer(
            memory, asks, "Memory of one GPU (80GB, GiB for tensors, or its name)", MEMORY, str
        ),
        seq,
    )
    chosen = _answer(precision, asks, "Precision", Precision.bf16, Precision)
    base = _base(chosen, batch or SAMPLES * answers.gpus)
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does, for module:function
    # The model's own prints are no part of the answer.
    with (
        errors_told(),
        contextlib.redirect_stdout(sys.stderr),
        progress(verbose=verbose) as audience,
    ):
        found = _search(answers, base, audience)
        if found.chosen is not None:
            output.write_text(json.dumps(found.config, indent=2) + "\n", encoding="utf-8")
    print(_told(found, output, answers))
    raise typer.Exit(0 if found.chosen is not None else DOES_NOT_FIT)


def _refuse(output: Path, overwrite: bool, model: str | None, *, asks: bool) -> None:
    """Refuse a file that is there, one whose folder is not, and a model that nobody names."""
    if output.exists() and not overwrite:
        raise UsageError(f"{output} exists already. Give --overwrite, or another --output.")
    if not output.parent.is_dir():
        raise UsageError(f"{output} cannot be written: there is no folder {output.parent}.")
    if model is None and not asks:
        raise UsageError("--yes needs --model.")


@dataclass(frozen=True)
class Answers:
    """The answers. ``memory``: of one GPU, a size or its name. ``seq``: tokens; None: of the model."""

    model: str
    gpus: int
    memory: str
    seq: int | None

    @property
    def gib(self) -> float | None:
        """GiB for tensors of one GPU; None: ``memory`` is a name."""
        with contextlib.suppress(typer.BadParameter):
            return device_gib(self.memory)
        return None


def _answer(
    given: T | None, asks: bool, question: str, default: T | None, kind: Callable[[str], T]
) -> T:
    """The option, or else the answer of the user, or the default."""
    if given is not None:
        return given
    shown: Any = default.value if isinstance(default, Enum) else default
    return kind(typer.prompt(question, default=shown, type=kind) if asks else shown)


def _search(run: Answers, base: dict[str, Any], audience: Audience) -> Fit:
    # They import torch and more, which a mistake in the options does not need.
    from zeroshard.config.machine_file import load_machine
    from zeroshard.planner.fit import fit, sharing_sizes
    from zeroshard.planner.make_plan import Asked

    if run.gpus < 1:
        raise UsageError(f"GPUs: {run.gpus}. Give a number from 1.")
    machine = load_machine(run.memory) if run.gib is None else None
    sharing = sharing_sizes(run.model, run.gpus, machine) if run.gpus > 1 else ()
    asked = Asked(run.model, base, run.gpus, run.seq, run.gib, machine, target="cuda")
    axes = {"expert": sharing} if sharing else None
    return fit(asked, aim="speed", axes=axes, audience=audience)


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


def _told(found: Fit, output: Path, run: Answers) -> str:
    """What was chosen, and the next commands."""
    from zeroshard.core.texts import gib_text
    from zeroshard.planner.planned_batch import BATCH

    peak = gib_text(found.plan.peak_nbytes)
    limit = gib_text(found.plan.limit_nbytes or 0)
    if found.chosen is None:
        return (
            f"Nothing fits {limit}: the smallest of {found.count} configurations needs {peak} on each "
            f"GPU. {output} was not written. Use more GPUs, or shorter samples (--seq)."
        )
    memory = (
        f"--machine {run.memory}" if run.gib is None else f"--memory {run.memory} --target cuda"
    )
    length = "" if run.seq is None else f" --seq {run.seq}"
    batch = [
        f"Planned for {line} (--seq)." for line in found.plan.assumed if line.startswith(BATCH)
    ]
    lines = [
        f"{output}: {found.chosen.text}",
        f"Peak memory of a GPU: {peak} of {limit}, as planned. Set the learning rate yourself.",
        *batch,
        f"Train:   zeroshard launch --nproc {run.gpus} train.py",
        f"Details: zeroshard plan {run.model} --config {output} --ranks {run.gpus} {memory}{length}",
    ]
    if (sharing := found.chosen.sizes.expert) is not None:
        lines.insert(1, _told_of_experts(sharing))
    if found.chosen.checkpointing:
        lines.insert(-2, "Add to the program: model.gradient_checkpointing_enable()")
    return "\n".join(lines)


def _told_of_experts(sharing: int) -> str:
    """``sharing``: GPUs that share the experts of a layer; 1: none do."""
    if sharing == 1:
        return (
            "Experts: not shared, each GPU computes those that its tokens need. Where GPUs share them "
            "(parallel.expert) a GPU holds fewer, and tokens travel: zeroshard plan --fit-axes expert."
        )
    return (
        f"Experts: {sharing} GPUs share those of a layer (parallel.expert): each has 1/{sharing} of "
        "them, and tokens travel between GPUs."
    )
