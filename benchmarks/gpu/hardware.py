"""Imports everything, and measures the peak bandwidths and the matmul throughput of this machine."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
from trainers import Job

import zeroshard
from zeroshard.memory.host_limits import host_limits

_PACKAGES = (
    *("zeroshard", "torch", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "pydantic"),
    "deepspeed",
)


def synchronize(device: str) -> None:
    """Wait for the GPU. On a CPU it does nothing."""
    if device == "cuda":
        torch.cuda.synchronize()


def peaks(device: str) -> dict[str, int]:
    """Peak bytes of the caching allocator; empty on a CPU."""
    if device != "cuda":
        return {}
    return {
        "allocated_nbytes": torch.cuda.max_memory_allocated(),
        "reserved_nbytes": torch.cuda.max_memory_reserved(),
    }


class Timeline:
    """Timestamps on the GPU, or on the host if there is no GPU. Only :meth:`ms` waits."""

    def __init__(self, job: Job) -> None:
        self._cuda = job.device == "cuda" and not job.pretended
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Record a timestamp after all work issued so far."""
        if not self._cuda:
            self._marks.append(1e3 * time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append(event)

    def ms(self) -> list[float]:
        """Milliseconds between consecutive timestamps."""
        if not self._cuda:
            return [b - a for a, b in zip(self._marks, self._marks[1:], strict=False)]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in zip(self._marks, self._marks[1:], strict=False)]


def machine(job: Job, *, scale: float = 1.0) -> dict[str, Any]:
    """Names, versions and measured peaks. ``scale``: share of the full sizes."""
    numel = int(scale * 2**28)
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "zeroshard": zeroshard.__version__,
        "cores": os.cpu_count(),
        "host_free_nbytes": host_limits().free_nbytes or 0,
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "host_stream_gb_s": _host_stream(numel // 4),
    }
    if job.device != "cuda":
        return found
    free, total = torch.cuda.mem_get_info()
    found |= {
        "gpu": torch.cuda.get_device_name(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "cuda": torch.version.cuda,
        "gpu_free_nbytes": free,
        "gpu_total_nbytes": total,
        "gpu_stream_gb_s": _gpu_stream(numel),
        "matmul_bf16_tflops": _matmul(int(8192 * scale)),
    }
    return found | _pcie(numel)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _best_s(work: Callable[[], Any], device: str, times: int = 5) -> float:
    """Seconds of the fastest of ``times`` runs, after one warm-up run."""
    seconds = []
    for _ in range(times + 1):
        synchronize(device)
        begin_s = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - begin_s)
    return min(seconds[1:])


def _host_stream(numel: int) -> float:
    """Triad in fp32 over all threads: two reads and one write, GB/s."""
    a, b, c = (torch.ones(numel) for _ in range(3))
    return 12 * numel / _best_s(lambda: torch.add(b, c, alpha=3.0, out=a), "cpu") / 1e9


def _gpu_stream(numel: int) -> float:
    """The same on the GPU."""
    a, b, c = (torch.ones(numel, device="cuda") for _ in range(3))
    return 12 * numel / _best_s(lambda: torch.add(b, c, alpha=3.0, out=a), "cuda") / 1e9


def _matmul(size: int) -> float:
    """Square bf16 matrices, TFLOP/s."""
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    b = torch.randn_like(a)
    out = torch.empty_like(a)

    def work() -> None:
        for _ in range(10):
            torch.mm(a, b, out=out)

    return 10 * 2 * size**3 / _best_s(work, "cuda") / 1e12


def _pcie(nbytes: int) -> dict[str, float]:
    """GB/s of copies between pinned host memory and the GPU: each direction, and both at once."""
    host = torch.empty(2, nbytes, dtype=torch.uint8, pin_memory=True)
    gpu = torch.empty(2, nbytes, dtype=torch.uint8, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]

    def h2d() -> None:
        with torch.cuda.stream(streams[0]):
            gpu[0].copy_(host[0], non_blocking=True)

    def d2h() -> None:
        with torch.cuda.stream(streams[1]):
            host[1].copy_(gpu[1], non_blocking=True)

    def both() -> None:
        h2d()
        d2h()

    return {
        "pcie_to_gpu_gb_s": nbytes / _best_s(h2d, "cuda") / 1e9,
        "pcie_to_host_gb_s": nbytes / _best_s(d2h, "cuda") / 1e9,
        "pcie_both_gb_s": 2 * nbytes / _best_s(both, "cuda") / 1e9,
    }
