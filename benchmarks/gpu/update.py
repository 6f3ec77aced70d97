"""Compares the update in one pass with the optimizer's own step, and measures its bandwidth."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

import hardware
import torch
from checks import curve, difference, run_check
from models import Stack
from trainers import SYSTEMS, Job, zeroshard_config, zeroshard_trainer

from zeroshard import Engine

UPDATE_NBYTES = 30
"""Per element of one pass in bf16: gradient 2; parameter, master and two moments read and written."""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-3, "weight_decay": 0.1},
    "Adam": {"lr": 1e-3},
    "SGD": {"lr": 1e-2, "momentum": 0.9},
    "Lion": {"lr": 1e-4, "weight_decay": 0.1},
}


def update(job: Job, *, numel: int) -> dict[str, Any]:
    """By optimizer, "" if both ways give the same bits, else what differs; and times of both ways."""
    found = {}
    for kind, params in OPTIMIZERS.items():
        for precision in ("bf16", "fp32"):
            section = {"optimizer": {"type": kind, "params": params}}
            case = replace(job, stage=1, precision=precision, extra=section)
            found[f"{kind} {precision}: one pass = own step"] = run_check(_same, case)
    more = {
        f"AdamW of {numel:.1e} elements, {way}": speed(job, numel, compiles)
        for way, compiles in (("in one pass", True), ("own step", False))
    }
    return {"checks": found, "more": more}


def _same(job: Job) -> str:
    curves = []
    for compiles in (True, False):
        way = replace(job, extra={**job.extra, "compile_update": compiles})
        curves.append(curve(SYSTEMS["ZeroShard"](way), way))
    return difference(*curves)


def speed(job: Job, numel: int, compiles: bool) -> dict[str, float]:
    """Milliseconds of ``engine.step()`` and GB/s of one pass over ``numel`` elements at stage 1."""
    width = 4096 if numel > 2**25 else 64
    job = replace(job, stage=1, precision="bf16", extra={"compile_update": compiles})
    with torch.device(job.device):
        model = Stack(width, max(1, numel // width**2)).bfloat16()
    engine = Engine(model, config=zeroshard_config(job), device=job.device)
    trainer = zeroshard_trainer(engine)
    x = torch.randn(1, width, device=job.device, dtype=torch.bfloat16)
    times = []
    for _ in range(2 + job.steps):
        trainer.backward(trainer.forward(x, torch.zeros_like(x)))
        line = hardware.Timeline(job)
        line.mark()
        trainer.step()
        line.mark()
        times += line.ms()
    trainer.close()
    ms = median(times[2:])
    updated = sum(param.numel() for param in model.parameters())
    return {"step_ms": ms, "gb_s": UPDATE_NBYTES * updated / ms / 1e6}
