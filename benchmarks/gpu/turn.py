"""What does one process do for the GPU protocols? One task, alone on the GPU; its answer is JSON.

    python benchmarks/gpu/turn.py train '{"system": "plain", "stage": 0, "shape": "1.5B"}'

A process of its own per turn keeps one system's memory, hooks and crashes away from the next.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA: for the bitwise checks

import audit
import checks
import limits
import torch
from shapes import SHAPES
from torch import Tensor
from trainers import SYSTEMS, Job, batches, refusal

MARK = "RESULT "


class Timeline:
    """Moments on the device, or on the host where there is none; nothing waits until :meth:`ms`."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """A moment behind everything issued so far."""
        if not self._cuda:
            self._marks.append(1e3 * time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append(event)

    def ms(self) -> list[float]:
        """Milliseconds between neighbouring moments."""
        if not self._cuda:
            return [b - a for a, b in zip(self._marks, self._marks[1:], strict=False)]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in zip(self._marks, self._marks[1:], strict=False)]


def train(job: Job, *, rows: int = 1, warm_up: int = 5, steps: int = 10) -> dict[str, Any]:
    """Times, memory and losses of ``steps`` steps after ``warm_up`` steps."""
    trainer = SYSTEMS[job.system](job)
    data = batches(job.shape, rows, job.device)
    losses: list[Tensor] = []

    def step(number: int, line: Timeline | None = None) -> None:
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
    limits.synchronize(job.device)
    if job.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    line, cpu_s, wall_s = Timeline(job.device), time.process_time(), time.perf_counter()
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
        **limits.peaks(job.device),
    }
    trainer.close()
    return result


def probe(job: Job) -> dict[str, Any]:
    """Does the library take the configuration?"""
    return {"refused": refusal(job)}


TASKS: dict[str, Callable[..., dict[str, Any]]] = {
    "train": train,
    "probe": probe,
    "audit": audit.audit,
    "checks": checks.checks,
    "machine": limits.machine,
}


def main(task: str, given: str) -> None:
    """Do it and print the answer as the last line."""
    arguments = json.loads(given)
    options = arguments.pop("options", {})
    arguments["shape"] = SHAPES[arguments["shape"]]
    try:
        answer = TASKS[task](Job(**arguments), **options)
    except torch.cuda.OutOfMemoryError as error:
        answer = {"error": f"out of memory: {str(error).partition('.')[0]}"}
    sys.stderr.flush()
    print("\n" + MARK + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
