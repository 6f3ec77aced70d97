"""Records one training step with PyTorch's profiler, and computes how much of the copies overlaps."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import hardware
from sharded import opened_group, over_collectives
from torch.profiler import ProfilerActivity, profile
from trainers import SYSTEMS, Job, batches

Span = tuple[float, float]  # begin and end, in microseconds
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def trace(job: Job, *, file: str, warm_up: int = 3) -> dict[str, Any]:
    """Write the trace of one step to ``file`` (gzip) and return how busy the streams were.

    Without offload the step gathers and reduces over a process group of one rank.
    """
    gathers = job.stage == 3 and not job.offload
    with opened_group(job.device) if gathers else nullcontext():
        trainer = over_collectives(job) if gathers else SYSTEMS[job.system](job)
        (data,) = batches(job.shape, 1, job.device, count=1)

        def step() -> None:
            loss = trainer.forward(*data)
            trainer.backward(loss)
            trainer.step()

        for _ in range(warm_up):
            step()
        hardware.synchronize(job.device)
        with profile(activities=[ProfilerActivity.CPU, *_on_device(job)]) as recorded:
            step()
            hardware.synchronize(job.device)
        trainer.close()
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    plain = file.removesuffix(".gz")
    recorded.export_chrome_trace(plain)
    text = Path(plain).read_bytes()
    Path(file).write_bytes(gzip.compress(text))
    Path(plain).unlink()
    return {"built": Path(file).name, **busy(json.loads(text)["traceEvents"])}


def _on_device(job: Job) -> list[ProfilerActivity]:
    return [ProfilerActivity.CUDA] if job.device == "cuda" and not job.pretended else []


def busy(events: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Milliseconds from the first to the last work of the GPU, in which kernels compute, in which data is
    moved (copies and collectives), and in which both happen at the same time."""
    spans: dict[str, list[Span]] = defaultdict(list)
    for event in events:
        if event.get("cat") in _DEVICE_WORK:
            moves = event["cat"] == "gpu_memcpy" or "nccl" in event.get("name", "").lower()
            span = (float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0)))
            spans["moves" if moves else "computes"].append(span)
    found = {kind: _length(_merged(spans[kind])) for kind in ("computes", "moves")}
    together = _length(_merged([*spans["computes"], *spans["moves"]]))
    every = [edge for of_kind in spans.values() for span in of_kind for edge in span]
    return {
        "step_of_gpu_ms": (max(every) - min(every)) / 1e3 if every else 0.0,
        "computes_ms": found["computes"] / 1e3,
        "moves_ms": found["moves"] / 1e3,
        "both_ms": (found["computes"] + found["moves"] - together) / 1e3,
    }


def _merged(spans: Iterable[Span]) -> list[Span]:
    """The union of the spans, in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def _length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)
