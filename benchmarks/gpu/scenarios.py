"""Programs whose streams are easily in the wrong order, to be run under PyTorch's sanitizer.

The sanitizer (``TORCH_CUDA_SANITIZER=1``) raises an error when work on one stream uses memory that
another stream may still write. It sees only operators of PyTorch. Each scenario trains a few steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import hardware
import torch
from checks import run_check
from sharded import opened_group, over_collectives
from torch import Tensor
from trainers import SYSTEMS, Job, Trainer, batches

from zeroshard import zero

STEPS = 3


@dataclass(frozen=True)
class Program:
    """A trainer and its batches; ``loss(i)`` is the loss of batch ``i``."""

    trainer: Trainer
    data: list[tuple[Tensor, Tensor]]

    @property
    def engine(self) -> Any:
        return self.trainer.engine

    def loss(self, number: int) -> Tensor:
        return self.trainer.forward(*self.data[number % len(self.data)])

    def step(self, number: int) -> None:
        self.trainer.backward(self.loss(number))
        self.trainer.step()


def plain(program: Program) -> None:
    for number in range(STEPS):
        program.step(number)


def evaluation(program: Program) -> None:
    """A forward without gradients between steps."""
    for number in range(STEPS):
        program.step(number)
        with torch.no_grad():
            program.loss(number + 1)


def edits(program: Program) -> None:
    """Parameters are edited between steps."""
    weight = next(program.engine.module.parameters())
    for number in range(STEPS):
        program.step(number)
        with zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
            weight.mul_(0.99)


def gradients(program: Program) -> None:
    """Gradients are read and replaced between backward and step."""
    weight = next(program.engine.module.parameters())
    for number in range(STEPS):
        program.trainer.backward(program.loss(number))
        found = zero.safe_get_full_grad(weight)
        zero.safe_set_full_grad(weight, found * 0.5)
        program.trainer.step()


def second_backward(program: Program) -> None:
    """Two losses, one after the other, before one step."""
    for number in range(STEPS):
        program.trainer.backward(program.loss(number))
        program.trainer.backward(program.loss(number + 1))
        program.trainer.step()


def moved(program: Program) -> None:
    """The state goes to the host and back between steps."""
    for number in range(STEPS):
        program.step(number)
        program.engine.offload_states(non_blocking=True)
        program.engine.reload_states(non_blocking=True)


def moved_on_a_side_stream(program: Program) -> None:
    """The same on another stream than training."""
    for number in range(STEPS):
        program.step(number)
        with side_stream(program.data[0][0].device):
            program.engine.offload_states(non_blocking=True)
            program.engine.reload_states(non_blocking=True)


def on_a_side_stream(program: Program) -> None:
    """Whole steps on another stream than the engine was built on."""
    with side_stream(program.data[0][0].device):
        plain(program)


@contextlib.contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Work inside runs on a stream of its own, after earlier and before later work."""
    if device.type != "cuda":
        yield
        return
    outer, inner = torch.cuda.current_stream(), torch.cuda.Stream()
    inner.wait_stream(outer)
    with torch.cuda.stream(inner):
        yield
    outer.wait_stream(inner)


SCENARIOS: dict[str, Callable[[Program], None]] = {
    program.__name__.replace("_", " "): program
    for program in (
        plain, evaluation, edits, gradients, second_backward, moved, moved_on_a_side_stream,
        on_a_side_stream,
    )
}  # fmt: skip


def jobs(job: Job, group: str) -> Iterable[tuple[str, Job]]:
    """The settings of a group: state on the device, in host memory, or parameters there too."""
    if group == "device":
        return ((f"stage {stage}", replace(job, stage=stage)) for stage in (0, 2, 3))
    if group == "parameters":
        return [("stage 3, parameters on the host",
                 replace(job, stage=3, offload="cpu", offloads_params=True))]  # fmt: skip
    late = {"delayed_update": True}
    return [
        ("stage 1, state on the host", replace(job, stage=1, offload="cpu")),
        ("stage 3, state on the host", replace(job, stage=3, offload="cpu")),
        ("stage 2, delayed update", replace(job, stage=2, offload="cpu", placing=late)),
    ]


def scenarios(job: Job, *, group: str, only: Iterable[str] = tuple(SCENARIOS)) -> dict[str, Any]:
    """Run every scenario in every setting of the group. Returns by name "", or what was found."""
    found: dict[str, str] = {}
    with opened_group(job.device):
        for setting, chosen in jobs(job, group):
            for name in only:
                found[f"{setting}: {name}"] = run_check(_run, chosen, SCENARIOS[name])
    return {"checks": found}


def _run(job: Job, scenario: Callable[[Program], None]) -> str:
    """Over collectives if parameters are sharded. The engine is closed right after the last step."""
    trainer = over_collectives(job) if job.stage == 3 else SYSTEMS["ZeroShard"](job)
    try:
        scenario(Program(trainer, batches(job.shape, 1, job.device, count=2)))
    finally:
        trainer.close()
    hardware.synchronize(job.device)
    return ""
