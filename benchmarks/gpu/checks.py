"""Compares ZeroShard on this device, with one rank, bit for bit with a plain PyTorch loop."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
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

OFFLOAD_LIMIT = 1e-3
Curve = tuple[list[Tensor], dict[str, Tensor]]  # losses of the steps, masters after the last


def checks(job: Job) -> dict[str, Any]:
    """Run all checks, also after a failure. Returns by name "" for a check that holds, else what was
    found."""
    found: dict[str, str] = {}
    with same_bits_each_time(job):
        for precision in ("fp32", "bf16"):
            base = replace(job, precision=precision, bitwise=True)
            reference = curve(plain(base), base)
            found[f"{precision} plain loop twice"] = difference(reference, curve(plain(base), base))
            for stage in range(4):
                own = replace(base, stage=stage)
                found[f"{precision} stage {stage} = plain loop"] = run_check(
                    _compare_with_plain, reference, own
                )
        found["bf16 stage 3 built under Init"] = run_check(_init, replace(job, stage=3))
        for stage in (0, 3):
            half = replace(job, stage=stage)
            found[f"fp16 stage {stage} skips an overflow"] = run_check(_overflow, half)
        for stage in (1, 3):
            own = replace(job, precision="bf16", bitwise=True, stage=stage)
            found[f"bf16 stage {stage} with state in host memory"] = run_check(_offloaded, own)
            found[f"bf16 stage {stage} moved to the host and back"] = run_check(
                _offload_and_reload, own
            )
            found[f"bf16 stage {stage} reads 1 GiB at once after its update on the host"] = (
                run_check(_read_at_once, own)
            )
    return {"checks": found}


@contextlib.contextmanager
def same_bits_each_time(job: Job) -> Iterator[None]:
    """Kernels inside have the same bits in every run."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    # On a CPU all are. (The mask of this one is made on the host, which a pretended device reports.)
    with nullcontext() if job.pretended else sdpa_kernel(SDPBackend.MATH):
        yield


def _offloaded(job: Job) -> str:
    """Losses with the update in host memory differ only by rounding: CPU and GPU round the last bits
    differently."""
    on_gpu, on_host = (curve(zeroshard(j), j)[0] for j in (job, replace(job, offload="cpu")))
    worst = max(
        abs(float(a) - float(b)) / abs(float(a)) for a, b in zip(on_gpu, on_host, strict=True)
    )
    return "" if worst <= OFFLOAD_LIMIT else f"losses differ by {worst:.1e}"


def _offload_and_reload(job: Job) -> str:
    """``offload_states`` frees device memory. After ``reload_states`` training continues bit for bit."""
    curves, findings = [], []
    for moves in (False, True):
        trainer = zeroshard(job)
        data = batches(job.shape, 2, job.device)
        losses = []
        for number in range(job.steps):
            loss = trainer.forward(*data[number % len(data)])
            trainer.backward(loss)
            trainer.step()
            losses.append(loss.detach().clone())
            del loss
            if moves and number == job.steps // 2:
                before = _allocated_nbytes(job.device)
                trainer.engine.offload_states()
                freed = before - _allocated_nbytes(job.device)
                state = sum(r.measured for r in trainer.engine.memory_report().rows if r.planned)
                if job.device.startswith("cuda") and freed < 0.9 * state:
                    findings.append(f"{freed} bytes were freed, {state} moved")
                trainer.engine.reload_states()
        curves.append((losses, trainer.values()))
        trainer.close()
    return "; ".join(filter(None, [difference(*curves), *findings]))


def _read_at_once(job: Job) -> str:
    """A parameter that the host has updated is read by a forward before its copy can have arrived.

    The copy takes tens of milliseconds, so a stream that does not wait for it reads old values.
    """
    from zeroshard import Engine

    width = 1 << (14 if job.device.startswith("cuda") and not job.pretended else 5)
    model = torch.nn.Linear(width, 2 * width, bias=False, device=job.device, dtype=torch.bfloat16)
    place = {"device": "cpu", "pin_memory": True}
    zero = {"stage": job.stage, "offload_optimizer": place}
    if job.stage == 3:
        zero["offload_param"] = place
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "bf16": {"enabled": True},
        "zero_optimization": zero,
    }
    x = torch.ones(1, width, device=job.device, dtype=torch.bfloat16)
    outputs = []
    with Engine(model, config=config, device=job.device) as engine:
        for _ in range(3):
            before = engine(x)
            engine.backward(before.float().sum())
            engine.step()
            with torch.no_grad():
                at_once = engine(x)
                if job.device.startswith("cuda"):
                    torch.cuda.synchronize()
                outputs.append((before.detach(), at_once, engine(x)))
    if any(torch.equal(before, after) for before, _, after in outputs):
        return "an update changed nothing"
    stale = sum(not torch.equal(at_once, after) for _, at_once, after in outputs)
    return (
        f"{stale} of {len(outputs)} forwards read parameters before they had arrived"
        if stale
        else ""
    )


def _allocated_nbytes(device: str) -> int:
    return torch.cuda.memory_allocated() if device.startswith("cuda") else 0


def run_check(check: Callable[..., str], *given: Any) -> str:
    """The finding of a check. An exception is a finding too, so that the next checks run."""
    try:
        return check(*given)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _compare_with_plain(wanted: Curve, job: Job) -> str:
    return difference(wanted, curve(zeroshard(job), job))


def curve(trainer: Trainer, job: Job, data: Sequence[tuple[Tensor, Tensor]] = ()) -> Curve:
    """Losses and masters after ``job.steps`` steps on ``data``, by default two batches in turn."""
    data, losses = data or batches(job.shape, 2, job.device), []
    for number in range(job.steps):
        loss = trainer.forward(*data[number % len(data)])
        trainer.backward(loss)
        trainer.step()
        losses.append(loss.detach().clone())
    values = trainer.values()
    trainer.close()
    return losses, values


def difference(wanted: Curve, found: Curve) -> str:
    """The first step whose loss differs; if none does, the masters that differ; "" if all bits are
    equal."""
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
    """A model built under ``zero.Init`` on the device trains like one that was built unsharded."""
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
        curves.append(curve(zeroshard_trainer(engine), replace(job, steps=3)))
    return difference(curves[0], curves[1])


def _overflow(job: Job) -> str:
    """A step with an infinite loss is skipped: the loss scale halves, parameters do not change."""
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
