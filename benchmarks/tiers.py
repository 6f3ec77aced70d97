"""The settings of A9: the tier of optimizer state and parameters, as configurations of the libraries."""

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

NEEDED_DISK_NBYTES = 6 * 10**9
"""Free space that all lines and files of the protocol together may need on the disk."""

STATE_NBYTES, PARAM_NBYTES = 12, 2
"""Bytes per element: fp32 master and two moments; a bf16 parameter. A bf16 gradient is as large as a
parameter."""

_CPU, _DISK = "cpu", "nvme"


@dataclass(frozen=True)
class OffloadSetting:
    """The tiers of one line: "" is device memory. ``reference``: the name of the line of the same stage
    without offload."""

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
        return OffloadSetting(self.stage).name

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
        """Bytes that a rank moves in a step, by direction. ``numel``: elements that the rank owns.

        On CPU ranks device memory is host memory, and only a delayed update copies between them.
        Gradients are stored in the same tier as the optimizer state.
        """
        optimizer = (STATE_NBYTES + PARAM_NBYTES) * numel if self.optimizer == _DISK else 0
        param = PARAM_NBYTES * numel if self.param == _DISK else 0
        bus = PARAM_NBYTES * numel if self.delayed else 0
        return {
            "read_nbytes": optimizer + 3 * param,  # for forward, backward and update
            "written_nbytes": optimizer + param,
            "down_nbytes": bus,
            "up_nbytes": bus,
        }


OFFLOAD_SETTINGS = [
    OffloadSetting(2),
    OffloadSetting(2, _CPU),
    OffloadSetting(2, _CPU, delayed=True),
    OffloadSetting(2, _DISK),
    OffloadSetting(3),
    OffloadSetting(3, _CPU),
    OffloadSetting(3, param=_CPU),
    OffloadSetting(3, _DISK),
    OffloadSetting(3, _DISK, _DISK),
]


def lines(directory: str, *, peers: bool = True) -> list[Line]:
    """All lines of A9. If ``directory`` cannot be used as a disk, lines that need a disk give the
    reason."""
    problem = disk_problem(directory)
    found = []
    for setting in OFFLOAD_SETTINGS:
        uses_disk = _DISK in (setting.optimizer, setting.param)
        system = offload_line(
            setting.stage, setting.name, setting.keys(directory), delayed=setting.delayed
        )
        found.append(replace(system, unavailable=problem) if uses_disk and problem else system)
    return [Line(system) for system in [*found, *(_peers() if peers else [])]]


def disk_problem(directory: str) -> str:
    """Why the directory cannot be used as a disk; empty if it can."""
    from zeroshard.core.files import filesystem_of, free_nbytes

    if not os.path.isdir(directory):
        return f"{directory} is not a directory: --disk DIR names one on a disk"
    kind = filesystem_of(directory, Path("/proc/self/mounts").read_text())
    if kind in ("tmpfs", "ramfs"):
        return f"{directory} is a {kind}, which is memory: --disk DIR names one on a disk"
    if (free := free_nbytes(directory)) < NEEDED_DISK_NBYTES:
        return f"{directory} has {free / 1e9:.1f} GB free and {NEEDED_DISK_NBYTES / 1e9:.1f} are needed"
    return ""


def _peers() -> list[System]:
    """DeepSpeed with its CPU optimizer, which is compiled at first use."""
    found = [deepspeed_cpu_line(stage) for stage in (2, 3)]
    problem = "" if found[0].absent else _cpu_adam_problem()
    return [replace(system, unavailable=problem) for system in found]


def _cpu_adam_problem() -> str:
    """Compile DeepSpeed's CPUAdam, or find the compiled one. Returns why there is none; empty if there is
    one."""
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
    """ZeroShard with this section ``zero_optimization``. Bytes moved are counted."""

    def build(model: Any, micro_batches: int) -> Trainer:
        from zeroshard import Engine

        keys = zeroshard_config(stage, micro_batches, zero_optimization=dict(zero))
        engine = Engine(model, config=keys)
        trainer = engine_trainer(engine, engine.close)
        return replace(trainer, moved=lambda: engine.runtime.stores.moved_nbytes)

    return build


def deepspeed_cpu(stage: int) -> Build:
    """DeepSpeed's offload to host memory, with the optimizer that it chooses for it (CPUAdam)."""

    def build(model: Any, micro_batches: int) -> Trainer:
        library = import_deepspeed()
        config = {**deepspeed_config(stage, micro_batches), "optimizer": adamw_config()}
        config["zero_optimization"] |= {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
        config["zero_force_ds_cpu_optimizer"] = True
        engine, *_ = library.initialize(model=model, config=config, dist_init_required=False)
        return engine_trainer(engine, engine.destroy)

    return build


def offload_line(stage: int, name: str, zero: Mapping[str, Any], *, delayed: bool) -> System:
    """One offload setting of ZeroShard. ``delayed``: it trains with the parameters of the previous
    step."""
    words = ", ".join(
        f"{key} {value['device']}" for key, value in zero.items() if key.startswith("offload")
    )
    return System(
        name, "ZeroShard auto", "zeroshard", offloaded(stage, zero), words or "no offload",
        stage=stage, transport="auto", compared=not delayed,
    )  # fmt: skip


def deepspeed_cpu_line(stage: int) -> System:
    """One stage of DeepSpeed with optimizer state in host memory."""
    return System(
        f"DeepSpeed stage {stage}, optimizer cpu", "DeepSpeed", "deepspeed", deepspeed_cpu(stage),
        "CPUAdam compiled at first use, pin_memory off, buckets of 5e6", stage=stage,
    )  # fmt: skip
