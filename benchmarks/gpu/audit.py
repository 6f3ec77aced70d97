"""Detects where a training step makes the host wait for the GPU, or the allocator call the driver.

There are three methods, because none detects everything. PyTorch's sync debug mode names each operation
that waits, but does not know explicit waits for events and streams. While the GPU runs a sleep kernel,
every wait shows in the time that the host needs. The allocator counts its calls to the driver.
"""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trainers import SYSTEMS, Job, Trainer, batches

import zeroshard

_WAITS = "synchronizing CUDA operation"  # part of the text of PyTorch's warning and error
_SLEEP_CYCLES = 2_000_000_000  # about a second: longer than the host needs for a step
_DRIVER_CALLS = ("num_device_alloc", "num_device_free", "num_alloc_retries")
Phase = tuple[str, Callable[[], Any]]


def audit(job: Job, *, rows: int = 1) -> dict[str, Any]:
    """Driver calls in steps 4 to 10, then the waits of one step.

    The batch is on the GPU and no loss is read, so that every wait comes from the system itself.
    """
    trainer = SYSTEMS[job.system](job)
    data = batches(job.shape, rows, job.device, count=1)[0]
    for _ in range(3):
        _step(trainer, data)
    before = _driver_calls(job.device)
    for _ in range(7):
        _step(trainer, data)
    found: dict[str, Any] = {"driver_calls_after_step_3": _since(before, job.device)}
    if job.device != "cuda" or job.pretended:  # a pretended device does not sleep
        _step(trainer, data)
        trainer.close()
        return found
    found["during_sleep"] = _during_sleep(trainer, data)
    found["waits"] = _named_waits(trainer, data)
    found["first_error"] = _first_error(trainer, data)
    return found


def _phases(trainer: Trainer, data: tuple[Tensor, Tensor]) -> list[Phase]:
    loss: list[Tensor] = []
    return [
        ("forward", lambda: loss.append(trainer.forward(*data))),
        ("backward", lambda: trainer.backward(loss[0])),
        ("step", trainer.step),
    ]


def _step(trainer: Trainer, data: tuple[Tensor, Tensor]) -> None:
    for _, call in _phases(trainer, data):
        call()


def _driver_calls(device: str) -> dict[str, int]:
    if device != "cuda":
        return {}
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    calls = {name: int(stats.get(name, 0)) for name in _DRIVER_CALLS}
    if hasattr(torch.cuda, "host_memory_stats"):
        host = torch.cuda.host_memory_stats()
        calls |= {name: int(host.get(name, 0)) for name in ("num_host_alloc", "num_host_free")}
    return calls


def _since(before: dict[str, int], device: str) -> dict[str, int]:
    return {name: count - before[name] for name, count in _driver_calls(device).items()}


def _during_sleep(trainer: Trainer, data: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """Host milliseconds per phase while the GPU sleeps, and whether the phase waited for the sleep
    to end."""
    torch.cuda.synchronize()
    sleep_ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
    torch.cuda._sleep(_SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    sleep_ended.record()
    found: dict[str, Any] = {}
    for name, call in _phases(trainer, data):
        begin_s = time.perf_counter()
        call()
        found[f"{name}_ms"] = 1e3 * (time.perf_counter() - begin_s)
        found[f"{name}_waited"] = bool(sleep_ended.query())  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    return found


def _named_waits(trainer: Trainer, data: tuple[Tensor, Tensor]) -> list[dict[str, Any]]:
    """Every wait of one step that PyTorch detects, with the stack frames."""
    found: list[dict[str, Any]] = []
    phase = ""

    def note(message: Any, *_: Any, **__: Any) -> None:
        if _WAITS in str(message):
            found.append({"phase": phase, "frames": frames_of(traceback.extract_stack())})

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for name, call in _phases(trainer, data):
                phase = name
                call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return found


def _first_error(trainer: Trainer, data: tuple[Tensor, Tensor]) -> dict[str, Any] | None:
    """The phase and frames of the first wait, None if there is none. If there is one, the system is
    unusable afterwards."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    phase = ""
    try:
        for name, call in _phases(trainer, data):
            phase = name
            call()
    except RuntimeError as error:
        if _WAITS not in str(error):
            raise
        return {"phase": phase, "frames": frames_of(traceback.extract_tb(error.__traceback__))}
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return None


def frames_of(stack: traceback.StackSummary) -> list[str]:
    """The frames inside ZeroShard, outermost first. If there is none: the innermost frame that is
    not of this file."""
    named = [
        (f.filename, f"{f.lineno} in {f.name}: {f.line}")
        for f in stack
        if not f.filename.endswith(("audit.py", "warnings.py"))
    ]
    package = Path(zeroshard.__file__).parent  # the package, not another folder named zeroshard
    own = [
        f"{Path(file).relative_to(package.parent).as_posix()}:{text}"
        for file, text in named
        if Path(file).is_relative_to(package)
    ]
    return own or [f"{file}:{text}" for file, text in named[-1:]]
