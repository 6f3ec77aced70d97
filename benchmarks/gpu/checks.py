"""Are the numbers right on this device? Bit for bit against a plain PyTorch loop, with one rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from trainers import (
    SYSTEMS,
    Job,
    Trainer,
    batches,
    new_model,
    plain,
    zeroshard,
    zeroshard_config,
    zeroshard_trainer,
)

STEPS = 10
OFFLOAD_LIMIT = 1e-3
Curve = tuple[list[Tensor], dict[str, Tensor]]  # losses of the steps, masters after the last


def checks(job: Job) -> dict[str, Any]:
    """Each check by name: "" where it holds, else what was found. Stops at no failure."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    found: dict[str, str] = {}
    with sdpa_kernel(SDPBackend.MATH):
        for precision in ("fp32", "bf16"):
            base = replace(job, precision=precision, bitwise=True)
            reference = _curve(plain(base), base)
            found[f"{precision} plain loop twice"] = difference(
                reference, _curve(plain(base), base)
            )
            for stage in range(4):
                own = replace(base, stage=stage)
                found[f"{precision} stage {stage} = plain loop"] = _tried(_same, reference, own)
        found["bf16 stage 3 built under Init"] = _tried(_init, replace(job, stage=3))
        for stage in (0, 3):
            half = replace(job, stage=stage)
            found[f"fp16 stage {stage} skips an overflow"] = _tried(_overflow, half)
        for stage in (1, 3):
            own = replace(job, precision="bf16", bitwise=True, stage=stage)
            found[f"bf16 stage {stage} with state in host memory"] = _tried(_offloaded, own)
            found[f"bf16 stage {stage} moved to the host and back"] = _tried(_there_and_back, own)
    return {"checks": found}


def _offloaded(job: Job) -> str:
    """Losses with the update in host memory stay close: its last bits are the CPU's, not the GPU's."""
    near, far = (_curve(zeroshard(j), j)[0] for j in (job, replace(job, offload="cpu")))
    worst = max(abs(float(a) - float(b)) / abs(float(a)) for a, b in zip(near, far, strict=True))
    return "" if worst <= OFFLOAD_LIMIT else f"losses differ by {worst:.1e}"


def _there_and_back(job: Job) -> str:
    """``offload_states`` frees the device, and training goes on bit for bit after ``reload_states``."""
    curves, findings = [], []
    for moves in (False, True):
        trainer = zeroshard(job)
        data = batches(job.shape, 2, job.device)
        losses = []
        for number in range(STEPS):
            loss = trainer.forward(*data[number % len(data)])
            trainer.backward(loss)
            trainer.step()
            losses.append(loss.detach().clone())
            del loss
            if moves and number == STEPS // 2:
                before = _held_nbytes(job.device)
                trainer.engine.offload_states()
                freed = before - _held_nbytes(job.device)
                state = sum(r.measured for r in trainer.engine.memory_report().rows if r.planned)
                if job.device.startswith("cuda") and freed < 0.9 * state:
                    findings.append(f"{freed} bytes were freed, {state} moved")
                trainer.engine.reload_states()
        curves.append((losses, trainer.values()))
        trainer.close()
    return "; ".join(filter(None, [difference(*curves), *findings]))


def _held_nbytes(device: str) -> int:
    return torch.cuda.memory_allocated() if device.startswith("cuda") else 0


def _tried(check: Callable[..., str], *given: Any) -> str:
    """An exception is a finding: the checks after it still run."""
    try:
        return check(*given)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _same(wanted: Curve, job: Job) -> str:
    return difference(wanted, _curve(zeroshard(job), job))


def _curve(trainer: Trainer, job: Job, steps: int = STEPS) -> Curve:
    data = batches(job.shape, 2, job.device)
    losses = []
    for number in range(steps):
        loss = trainer.forward(*data[number % len(data)])
        trainer.backward(loss)
        trainer.step()
        losses.append(loss.detach().clone())
    values = trainer.values()
    trainer.close()
    return losses, values


def difference(wanted: Curve, found: Curve) -> str:
    """The first step whose loss differs, else the masters that do; "" if all bits are equal."""
    for number, (a, b) in enumerate(zip(wanted[0], found[0], strict=True), 1):
        if not torch.equal(a, b):
            return f"loss of step {number}: {float(a)!r} and {float(b)!r}"
    if wanted[1].keys() != found[1].keys():
        return f"other parameters: {sorted(wanted[1].keys() ^ found[1].keys())[:3]}"
    differing = [
        name for name, value in wanted[1].items() if not torch.equal(value, found[1][name])
    ]
    return f"{len(differing)} masters differ, first {differing[0]!r}" if differing else ""


def _init(job: Job) -> str:
    """A model built sharded, on the device, trains like one that was built whole."""
    from zeroshard import Engine, zero

    config = zeroshard_config(job)
    curves = []
    for sharded in (False, True):
        torch.manual_seed(0)
        with ExitStack() as stack:
            if sharded:
                stack.enter_context(zero.Init(config_dict_or_path=config))
            stack.enter_context(torch.device(job.device))
            model = new_model(job.shape)
        engine = Engine(model, config=config, device=job.device)
        curves.append(_curve(zeroshard_trainer(engine), job, 3))
    return difference(curves[0], curves[1])


def _overflow(job: Job) -> str:
    """An infinite loss is skipped, halves the scale and leaves no trace in the parameters."""
    scale = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    job = replace(job, precision="fp16", extra={"fp16": scale})
    trainer = SYSTEMS["ZeroShard"](job)
    data = batches(job.shape, 2, job.device)[0]
    losses: list[float] = []

    def step(factor: float = 1.0) -> None:
        loss = trainer.forward(*data)
        trainer.backward(loss * factor)
        trainer.step()
        losses.append(float(loss.detach()))

    for _ in range(3):
        step()
    before, engine = trainer.values(), trainer.engine
    step(math.inf)
    applied, after, scale_after = engine.was_step_applied(), trainer.values(), engine.scaler.scale
    findings = {
        "the step was applied": applied,
        "parameters changed": any(not torch.equal(before[name], after[name]) for name in before),
        f"the loss scale is {float(scale_after):g}, not 128": float(scale_after) != 128,
    }
    for _ in range(3):
        step()
    findings["a loss is not finite"] = not all(map(math.isfinite, losses))
    findings["the loss does not fall"] = losses[-1] >= losses[0]
    findings[f"{engine.skipped_steps} steps count as skipped"] = engine.skipped_steps != 1
    trainer.close()
    return "; ".join(text for text, wrong in findings.items() if wrong)
