"""In which places can state rest, and how is each told to ZeroShard, and to DeepSpeed?"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from systems import (
    Build,
    System,
    Trainer,
    adamw_config,
    deepspeed_config,
    engine_trainer,
    import_deepspeed,
    zeroshard_config,
)
from training import Line

ROOM_NBYTES = 6 * 10**9
"""What all lines and files of the protocol may take on the disk together."""

STATE_NBYTES, PARAM_NBYTES = 12, 2
"""Of an element: fp32 master and two moments; a bf16 parameter, and a bf16 gradient as well."""

_CPU, _DISK = "cpu", "nvme"


@dataclass(frozen=True)
class Place:
    """Where the parts of one line rest. ``reference``: the line without offload that it is held
    against."""

    stage: int
    optimizer: str = ""
    param: str = ""
    delayed: bool = False

    @property
    def name(self) -> str:
        if self.optimizer == self.param != "":
            return f"ZeroShard stage {self.stage}, all {self.param}"
        parts = [f"ZeroShard stage {self.stage}"]
        parts += [f"optimizer {self.optimizer}"] if self.optimizer else []
        parts += [f"parameters {self.param}"] if self.param else []
        return ", ".join([*parts, "delayed"] if self.delayed else parts)

    @property
    def reference(self) -> str:
        return Place(self.stage).name

    def keys(self, directory: str) -> dict[str, Any]:
        """The section ``zero_optimization``."""
        found: dict[str, Any] = {"stage": self.stage}
        for key, device in (("offload_optimizer", self.optimizer), ("offload_param", self.param)):
            if device:
                found[key] = {"device": device}
            if device == _DISK:
                found[key]["nvme_path"] = directory
        if self.delayed:
            found["offload_optimizer"]["delayed_update"] = True
        return found

    def theory(self, numel: int) -> dict[str, int]:
        """Bytes that a rank with ``numel`` elements of each unit's state moves in a step. Only a delayed
        update has a bus on CPU ranks: else the device's memory is the host's. Gradients go where their
        update finds its state."""
        optimizer = (STATE_NBYTES + PARAM_NBYTES) * numel if self.optimizer == _DISK else 0
        param = PARAM_NBYTES * numel if self.param == _DISK else 0
        bus = PARAM_NBYTES * numel if self.delayed else 0
        return {
            "read_nbytes": optimizer + 3 * param,  # for forward, backward and update
            "written_nbytes": optimizer + param,
            "down_nbytes": bus,
            "up_nbytes": bus,
        }


PLACES = [
    Place(2),
    Place(2, _CPU),
    Place(2, _CPU, delayed=True),
    Place(2, _DISK),
    Place(3),
    Place(3, _CPU),
    Place(3, param=_CPU),
    Place(3, _DISK),
    Place(3, _DISK, _DISK),
]


def lines(directory: str, *, peers: bool = True) -> list[Line]:
    """``directory``: on the disk. Lines that would use one it cannot be say why."""
    why_not = no_disk(directory)
    found = []
    for place in PLACES:
        uses_disk = _DISK in (place.optimizer, place.param)
        system = offload_line(place.stage, place.name, place.keys(directory), late=place.delayed)
        found.append(replace(system, excuse=why_not) if uses_disk and why_not else system)
    return [Line(system) for system in [*found, *(_peers() if peers else [])]]


def no_disk(directory: str) -> str:
    """Why the directory cannot stand for a disk; empty if it can."""
    from zeroshard.offload.disk_check import filesystem_of, free_nbytes

    if not os.path.isdir(directory):
        return f"{directory} is no directory: --disk DIR names one on a disk"
    kind = filesystem_of(directory, Path("/proc/self/mounts").read_text())
    if kind in ("tmpfs", "ramfs"):
        return f"{directory} is a {kind}, which is memory: --disk DIR names one on a disk"
    if (free := free_nbytes(directory)) < ROOM_NBYTES:
        return f"{directory} has {free / 1e9:.1f} GB free and {ROOM_NBYTES / 1e9:.1f} are needed"
    return ""


def _peers() -> list[System]:
    """DeepSpeed with its own optimizer for host memory, which compiles itself at first use."""
    found = [deepspeed_cpu_line(stage) for stage in (2, 3)]
    why_not = "" if found[0].absent else _no_cpu_adam()
    return [replace(system, excuse=why_not) for system in found]


def _no_cpu_adam() -> str:
    """Build DeepSpeed's CPUAdam, or find its build. Why there is none; empty if there is one."""
    code = "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "DS_ACCELERATOR": "cpu"},
            capture_output=True, text=True, timeout=150, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return (
            "DeepSpeed's CPUAdam did not compile in 150 s, or a build that was killed left its lock"
        )
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return f"DeepSpeed's CPUAdam cannot be built here: {last[:200]}" if done.returncode else ""


# ---------------------------------------------------------------------- systems


def offloaded(stage: int, zero: Mapping[str, Any]) -> Build:
    """ZeroShard with this section ``zero_optimization``; bytes are counted."""

    def build(model: Any, micro_batches: int) -> Trainer:
        from zeroshard import Engine

        keys = zeroshard_config(stage, micro_batches, zero_optimization=dict(zero))
        engine = Engine(model, config=keys)
        trainer = engine_trainer(engine, engine.close)
        return replace(trainer, moved=lambda: engine.runtime.stores.moved_nbytes)

    return build


def deepspeed_cpu(stage: int) -> Build:
    """DeepSpeed's offload to host memory, with the optimizer that it chooses for that (CPUAdam)."""

    def build(model: Any, micro_batches: int) -> Trainer:
        library = import_deepspeed()
        config = {**deepspeed_config(stage, micro_batches), "optimizer": adamw_config()}
        config["zero_optimization"] |= {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
        config["zero_force_ds_cpu_optimizer"] = True
        engine, *_ = library.initialize(model=model, config=config, dist_init_required=False)
        return engine_trainer(engine, engine.destroy)

    return build


def offload_line(stage: int, name: str, zero: Mapping[str, Any], *, late: bool) -> System:
    """One place of ZeroShard's state. ``late``: it trains with parameters of the step before."""
    words = ", ".join(
        f"{key} {value['device']}" for key, value in zero.items() if key.startswith("offload")
    )
    return System(
        name, "ZeroShard auto", "zeroshard", offloaded(stage, zero), words or "no offload",
        stage=stage, transport="auto", compared=not late,
    )  # fmt: skip


def deepspeed_cpu_line(stage: int) -> System:
    """One stage of DeepSpeed with optimizer state in host memory."""
    return System(
        f"DeepSpeed stage {stage}, optimizer cpu", "DeepSpeed", "deepspeed", deepspeed_cpu(stage),
        "CPUAdam compiled at first use, pin_memory off, buckets of 5e6", stage=stage,
    )  # fmt: skip
