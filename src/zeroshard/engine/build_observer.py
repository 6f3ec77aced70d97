"""Decides what a run reports, and collects the facts in its record."""

from __future__ import annotations

import os
import platform
import socket
import time
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake

from zeroshard.core.mesh import DIMS
from zeroshard.device.choice import ops_of
from zeroshard.engine.build_runtime import ZeroRuntime
from zeroshard.engine.draft import Draft
from zeroshard.metrics.observe import Observer
from zeroshard.metrics.run_log import JsonLines, RunLog, file_name, note_in
from zeroshard.metrics.step_stream import StepStream
from zeroshard.run.run_folder import RECORD_FORMAT, attempt, make_run_folder, variables_of_behaviour
from zeroshard.session.comm_session import CommSession
from zeroshard.version import __version__
from zeroshard.watchdog.settings import WatchdogSettings

PEAK_TFLOPS: Sequence[tuple[str, float]] = (
    ("H100 PCIe", 756),
    ("H100 NVL", 835),
    ("H100", 989),
    ("H200", 989),
    ("B200", 2250),
    ("A100", 312),
    ("L40S", 362),
    ("L4", 121),
    ("A10G", 70),
    ("RTX 4090", 165),
    ("RTX 3090", 71),
    ("MI300X", 1307),
    ("MI250X", 383),
)
"""TFLOP/s of dense products in bf16 or fp16 by a part of the device's name: the makers' data sheets. The
first one that fits counts."""


def make_observer(draft: Draft, runtime: ZeroRuntime, watch: CommSession) -> Observer:
    """The reporter of finished steps. Only the main rank sends events and keeps a record."""
    settings = draft.loaded.config
    run_log = _run_log(draft, runtime, watch)
    sends = draft.rank_info.is_main_rank and not is_simulated()
    make_stream = partial(
        StepStream,
        ops=ops_of(draft.device),
        recorders=watch.recorders,
        dp_size=draft.mesh.dp_size,
        world_size=draft.rank_info.world_size,
        flops_per_token=6.0 * _num_parameters(runtime),
        peak_flops=1e12 * draft.rank_info.world_size * _peak_tflops(draft),
    )
    return Observer(
        settings,
        recorders=watch.recorders,
        ledger=runtime.ledger,
        monitors=draft.monitors,
        run_log=run_log,
        make_stream=make_stream if sends else None,
        is_main_rank=draft.rank_info.is_main_rank,
        disk=partial(getattr, runtime.stores, "timeline") if runtime.stores.uses_disk else None,
    )


def is_simulated() -> bool:
    """Whether a planner builds this engine: its tensors have no values."""
    return is_fake(torch.empty(0))


def _run_log(draft: Draft, runtime: ZeroRuntime, watch: CommSession) -> RunLog | None:
    trust = draft.loaded.config.trust
    if not (trust.report and draft.rank_info.is_main_rank) or is_simulated():
        return None

    def path() -> Path:
        settings = WatchdogSettings.from_config(trust).with_environment()
        return make_run_folder(settings.dump_dir) / file_name(attempt(), os.getpid())

    run_log = RunLog(JsonLines(path), partial(_first_line, draft, runtime, watch))
    if watch.session_watch is not None and watch.session_watch.pace is not None:
        weak = weakref.ref(run_log)
        watch.session_watch.pace.listeners.append(lambda found: note_in(weak, found[1]))
    return run_log


def _first_line(draft: Draft, runtime: ZeroRuntime, watch: CommSession) -> dict[str, Any]:
    """What is known of the run when it starts."""
    mesh, settings = draft.mesh, draft.loaded.config
    dims = (*DIMS, "expert")
    return {
        "kind": "run",
        "format": RECORD_FORMAT,
        "time_s": time.time(),
        "attempt": attempt(),
        "host": socket.gethostname(),
        "rank": draft.rank_info.rank,
        "world_size": draft.rank_info.world_size,
        "mesh": {name: getattr(mesh, name) for name in dims if hasattr(mesh, name)},
        "versions": {
            "zeroshard": __version__, "torch": torch.__version__, "python": platform.python_version()
        },
        "device": ops_of(draft.device).product(),
        "transport": watch.gathers.transport,
        "registered_memory": watch.memory_line,
        "dtypes": draft.policy.table(),
        "stage": int(settings.zero_optimization.stage),
        "accumulation": settings.gradient_accumulation_steps,
        "train_batch_size": settings.train_batch_size,
        "model": type(draft.model).__name__,
        "parameters": _num_parameters(runtime),
        "units": len(runtime.units),
        "config": [list(row) for row in draft.loaded.rows()],
        "environment": variables_of_behaviour(),
        "notes": list(runtime.traffic.lines),
    }  # fmt: skip


def _num_parameters(runtime: ZeroRuntime) -> int:
    """Elements of this rank's stage of a pipeline, before they are cut over data ranks."""
    return sum(slot.numel for unit in runtime.units for slot in unit.layout.slots)


def _peak_tflops(draft: Draft) -> float:
    """Of one device in the dtype that the model computes in; 0: not known."""
    computes = draft.policy.autocast or draft.policy.param
    if computes not in (torch.bfloat16, torch.float16):
        return 0.0
    name = ops_of(draft.device).product()
    return next((tflops for part, tflops in PEAK_TFLOPS if part in name), 0.0)
