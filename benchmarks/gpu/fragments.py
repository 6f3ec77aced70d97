"""Measures memory that the allocator holds and no tensor uses, after many steps at stage 3.

Units of different sizes are gathered and freed in each step. What lies between blocks of other sizes may
be of no use until the end.
"""

from __future__ import annotations

from typing import Any

import hardware
import torch
from sharded import opened_group, over_collectives
from trainers import Job, batches


def fragments(job: Job, *, steps: int, settles: int) -> dict[str, Any]:
    """Bytes after ``steps`` steps over collectives; peaks and calls of the driver after the first
    ``settles``.

    ``unused``: what the allocator holds beyond tensors between two steps, which is room for gathered
    units and activations. ``lost``: what it holds beyond the peak of tensors, which is of no use.
    """
    with opened_group(job.device):
        trainer = over_collectives(job)
        data = batches(job.shape, 1, job.device)
        before: dict[str, int] = {}
        for number in range(steps):
            if number == settles:
                before = _memory(job)
                if job.device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
            loss = trainer.forward(*data[number % len(data)])
            trainer.backward(loss)
            trainer.step()
            del loss
        found, peaks = _memory(job), hardware.peaks(job.device)
        trainer.close()
    lost = peaks["reserved_nbytes"] - peaks["allocated_nbytes"] if peaks else 0
    calls = {name: found.pop(name) - before[name] for name in _CALLS if name in before}
    return {**found, "lost": lost, **calls}


_CALLS = ("num_device_alloc", "num_device_free", "num_alloc_retries")


def _memory(job: Job) -> dict[str, int]:
    """What tensors use and the allocator holds now, and the calls of the driver so far."""
    if job.device != "cuda":
        return {"allocated": 0, "reserved": 0, "unused": 0}
    hardware.synchronize(job.device)
    used, held = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    stats = torch.cuda.memory_stats()
    calls = {name: int(stats.get(name, 0)) for name in _CALLS}
    return {"allocated": used, "reserved": held, "unused": held - used, **calls}
