"""Runs one task of the GPU steps alone on the GPU, and prints the result as JSON.

    python benchmarks/gpu/worker.py train '{"system": "plain", "stage": 0, "shape": "1.5B"}'

Every turn is a separate process, so that memory, hooks and crashes of one system do not affect the next.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA: for the bitwise checks

import audit
import checks
import fragments
import hardware
import host_rates
import nccl_memory
import planned
import prebuild
import ranks
import scenarios
import timeline
import torch
import unit_cost
import update
from shapes import SHAPES
from torch import Tensor
from trainers import SYSTEMS, Job, batches
from turns import MARK, begin_turn

from zeroshard.errors import ZeroShardError


def train(
    job: Job, *, rows: int = 1, warm_up: int = 5, steps: int = 10, limit_nbytes: int = 0
) -> dict[str, Any]:
    """Times, memory and losses of ``steps`` steps after ``warm_up`` steps.

    ``limit_nbytes``: the most that the allocator may reserve; 0: all of the GPU.
    """
    if limit_nbytes:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_nbytes / total))
    trainer = SYSTEMS[job.system](job)
    data = batches(job.shape, rows, job.device)
    losses: list[Tensor] = []

    def step(number: int, line: hardware.Timeline | None = None) -> None:
        loss = trainer.forward(*data[number % len(data)])
        if line is not None:
            line.mark()
        trainer.backward(loss)
        if line is not None:
            line.mark()
        trainer.step()
        if line is not None:
            line.mark()
        losses.append(loss.detach())

    for number in range(warm_up):
        step(number)
    hardware.synchronize(job.device)
    if job.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    line, cpu_s, wall_s = hardware.Timeline(job), time.process_time(), time.perf_counter()
    line.mark()
    for number in range(warm_up, warm_up + steps):
        step(number, line)
    spans = line.ms()
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    forward, backward, update = spans[0::3], spans[1::3], spans[2::3]
    result = {
        "step_ms": [sum(parts) for parts in zip(forward, backward, update, strict=True)],
        "forward_ms": statistics.median(forward),
        "backward_ms": statistics.median(backward),
        "update_ms": statistics.median(update),
        "wall_ms": 1e3 * wall_s / steps,
        "host_cpu_ms": 1e3 * cpu_s / steps,
        "losses": [float(loss) for loss in losses],
        **hardware.peaks(job.device),
    }
    trainer.close()
    return result


TASKS: dict[str, Callable[..., dict[str, Any]]] = {
    "train": train,
    "audit": audit.audit,
    "checks": checks.checks,
    "communicators": nccl_memory.communicators,
    "fragments": fragments.fragments,
    "host": host_rates.host,
    "machine": hardware.machine,
    "plan": planned.plan,
    "prebuild": prebuild.prebuild,
    "ranks": ranks.ranks,
    "registered": nccl_memory.registered,
    "scenarios": scenarios.scenarios,
    "trace": timeline.trace,
    "units": unit_cost.units,
    "update": update.update,
}


OVER_COLLECTIVES = {
    "fragments": 1,
    "ranks": 1,
    "scenarios": 1,
    "trace": 1,
    "units": unit_cost.RANKS,
}
"""Tasks that open a process group, and its number of ranks. On the pretended device it is a model of
NCCL."""


def run(task: str, job: Job, options: dict[str, Any]) -> dict[str, Any]:
    """The answer of a task. A refusal of ZeroShard and a lack of GPU memory are answers too."""
    try:
        return TASKS[task](job, **options)
    except torch.cuda.OutOfMemoryError as error:
        return {"error": f"out of GPU memory: {str(error).partition('.')[0]}"}
    except ZeroShardError as error:
        return {"error": f"refused: {error}"}


def on_pretended_device(task: str, job: Job, options: dict[str, Any]) -> dict[str, Any]:
    """The same on a device that is only pretended, with what it found about the streams."""
    from zeroshard_testing.streams import pretend_cuda

    ranks = OVER_COLLECTIVES.get(task)
    with pretend_cuda() as watch, nullcontext() if ranks is None else watch.world(ranks):
        answer = run(task, job, options)
    return {**answer, "findings": [str(finding) for finding in watch.findings]}


def main(task: str, given: str) -> None:
    """Run the task and print the result as the last line."""
    begin_turn()
    arguments = json.loads(given)
    options = arguments.pop("options", {})
    arguments["shape"] = SHAPES[arguments["shape"]]
    job = Job(**arguments)
    answer = (on_pretended_device if job.pretended else run)(task, job, options)
    sys.stderr.flush()
    print("\n" + MARK + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
