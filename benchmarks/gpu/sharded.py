"""Makes one rank do what several do: collectives of a process group, and units that must be gathered."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch.distributed as dist
from trainers import SYSTEMS, Job, Trainer

from zeroshard.engine import build
from zeroshard.zero.unit import Unit


@contextlib.contextmanager
def opened_group(device: str) -> Iterator[None]:
    """A process group of one rank, unless there is one."""
    if dist.is_initialized():
        yield
        return
    store = dist.HashStore()  # type: ignore[attr-defined]
    backend = "nccl" if device.startswith("cuda") else "gloo"
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def over_collectives(job: Job) -> Trainer:
    """ZeroShard's trainer, with the collectives of the process group also on one rank.

    At stage 3 its units are not resident: they are gathered and resharded as on several ranks.
    """
    job = replace(job, extra={**job.extra, "transport": "stock"})

    def make(*given: Any, resident: bool, **more: Any) -> Unit:
        return Unit(*given, resident=resident and job.stage < 3, **more)

    with mock.patch.object(build, "Unit", make):
        return SYSTEMS["ZeroShard"](job)
