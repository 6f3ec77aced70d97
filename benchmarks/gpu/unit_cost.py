"""Measures what sharding costs the host: microseconds for each unit, beside the plain loop and FSDP2.

The model has many blocks of small layers, so a GPU has nothing to do for most of a step, and the time of
a step is what the host needs to queue it. Torch's fake process group plays eight ranks, because FSDP2
leaves collectives out on one rank; both systems then lack what a launch of NCCL costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import hardware
import host_cost
import torch.distributed as dist
from systems import Build, engine_trainer, fsdp2, plain, zeroshard_config
from torch.testing._internal.distributed.fake_pg import FakeStore
from trainers import Job

RANKS = host_cost.RANKS


def zeroshard_on(device: str) -> Build:
    """ZeroShard at stage 3 with one unit for each block."""

    def build(model: Any, micro_batches: int) -> Any:
        from zeroshard import Engine

        config = zeroshard_config(3, micro_batches, units=["Block"], unit_min_numel=0)
        engine = Engine(model, config=config, device=device)
        return engine_trainer(engine, engine.close)

    return build


def builders(device: str) -> dict[str, Callable[[Any], Any]]:
    """How each system is built from a model."""
    lines = {
        "plain": plain(fused=True),
        "FSDP2": fsdp2(True),
        "ZeroShard": zeroshard_on(device),
    }
    return {name: lambda model, build=build: build(model, 1) for name, build in lines.items()}


def units(job: Job, *, depth: int, width: int, rounds: int) -> dict[str, Any]:
    """Median microseconds of one block by phase of the step, and in all, for the system of the job."""
    opens = not dist.is_initialized()
    if opens:
        dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    found = host_cost.measure(
        [job.system], depth=depth, width=width, warm_up=3, rounds=rounds, burst=5,
        builders=builders(job.device), device=job.device, clock=time.perf_counter,
        settle=lambda: hardware.synchronize(job.device),
    )  # fmt: skip
    if opens:
        dist.destroy_process_group()
    us = host_cost.middle(found)[job.system]
    return {"us_per_unit": {phase: us[phase] for phase in (*host_cost.PHASES, "all")}}
