"""Measures what offload asks of the host: page-locking of memory, and the update on its cores."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from trainers import ADAMW, Job

from zeroshard.device.pinned import HostArena, cores, touch_pages
from zeroshard.memory.host_memory import aligned_bytes
from zeroshard.optim import native_adam
from zeroshard.optim.fused_update import FusedFragment, Spans, threads_for


def host(job: Job, *, nbytes: int, numel: int) -> dict[str, Any]:
    """Rates of page-locking ``nbytes``, and elements per second of an update of ``numel`` elements."""
    return {"facts": {**_locking(job, nbytes), **_updates(numel)}}


def _locking(job: Job, nbytes: int) -> dict[str, Any]:
    """GB/s of ZeroShard's arena, of its parts, and of torch's allocator for page-locked memory.

    An arena's pages are touched on all cores before the driver locks them.
    """
    untouched = [aligned_bytes(nbytes)]
    touching = _rate(nbytes, lambda: touch_pages(untouched.pop()))  # and freeing them
    found: dict[str, Any] = {"touching pages GB/s": touching}
    arenas: list[HostArena] = []
    found["page-locking GB/s"] = _rate(nbytes, lambda: arenas.append(HostArena(nbytes, pin=True)))
    found["is page-locked"] = arenas[0].is_pinned
    found["unlocking GB/s"] = _rate(nbytes, arenas[0].close)
    if job.device == "cuda" and not job.pretended:
        kept: list[torch.Tensor] = []

        def lock() -> None:
            kept.append(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))

        found["page-locking of torch GB/s"] = _rate(nbytes, lock)
    return found


def _rate(nbytes: int, work: Callable[[], Any]) -> float:
    begin_s = time.perf_counter()
    work()
    return nbytes / (time.perf_counter() - begin_s) / 1e9


def _updates(numel: int, times: int = 3) -> dict[str, Any]:
    """Elements per second of AdamW with bf16 parameters: ZeroShard's compiled update, and torch's."""
    master, exp_avg, exp_avg_sq = (torch.full((numel,), 0.01) for _ in range(3))
    low, grad = (torch.full((numel,), 0.01, dtype=torch.bfloat16) for _ in range(2))
    step = torch.ones(())
    threads = threads_for(numel, cores(), omp=torch.get_num_threads())
    found: dict[str, Any] = {"threads of an update": threads}
    if (compiled := native_adam.wait()) is None:
        found["compiled update"] = "there is none: no compiler, or it differs from torch here"
    else:
        spans = Spans([FusedFragment(0, 0, master, exp_avg, exp_avg_sq, step, low)])
        group = {**ADAMW, "decoupled_weight_decay": True, "maximize": False}

        def update() -> None:
            compiled.update(spans, [grad], 1.0, [group], threads=threads)

        found["compiled update elements/s"] = _best(numel, update, times)
    param = torch.nn.Parameter(master)
    param.grad = exp_avg
    optimizer = torch.optim.AdamW([param], fused=True, **ADAMW)
    found["fused AdamW of torch elements/s"] = _best(numel, optimizer.step, times)
    return found


def _best(numel: int, work: Callable[[], Any], times: int) -> float:
    """The rate of the fastest run after one that warms up."""
    work()
    seconds = []
    for _ in range(times):
        begin_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin_s)
    return numel / min(seconds)
