"""How is each system told to train the same model on one GPU?

Every function builds one system from the same bf16 values: bf16 compute, fp32 master, AdamW with the
same numbers and torch's fused kernel, gradients clipped at norm 1.0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # what both kinds of benchmarks share lies there

import systems
import torch
from models import GPT, text
from shapes import Shape
from systems import CLIP, ClippedStep, MasterStep
from torch import Tensor, nn

ADAMW: dict[str, Any] = {**systems.ADAMW, "lr": 1e-4}


def new_model(shape: Shape, *, recompute: bool = False) -> GPT:
    """A model whose embedding is also its head, where and in which dtype torch makes tensors now."""
    return GPT(shape, tied=True, recompute=recompute)


def build(shape: Shape, device: str, *, dtype: torch.dtype, recompute: bool = False) -> GPT:
    """A model whose values depend on shape, device and dtype alone. ``meta``: no values yet."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return new_model(shape, recompute=recompute)
    finally:
        torch.set_default_dtype(before)


def batches(shape: Shape, rows: int, device: str, count: int = 4) -> list[tuple[Tensor, Tensor]]:
    """``count`` pairs ``[rows, context]`` of tokens and their successors, on the device."""
    pairs = text(shape, rows, count, seed=1)
    return [(tokens.to(device), targets.to(device)) for tokens, targets in pairs]


@dataclass(frozen=True)
class Trainer(systems.Trainer):
    """One training step in three parts. ``values``: copies of all masters, rounding hides nothing."""

    values: Callable[[], dict[str, Tensor]] = dict
    engine: Any = None


@dataclass(frozen=True)
class Job:
    """What is trained, where and how; ``offload``: the device of optimizer state, "" for the GPU."""

    system: str
    stage: int
    shape: Shape
    device: str = "cuda"
    precision: str = "bf16"
    offload: str = ""
    recompute: bool = False
    bitwise: bool = False  # norms by the kernel that gives ZeroShard's bits, not by the fastest
    folder: str = "/tmp"
    extra: dict[str, Any] = field(default_factory=dict)


def zeroshard_config(job: Job) -> dict[str, Any]:
    """The configuration; offloading is asked for like in DeepSpeed."""
    zero: dict[str, Any] = {"stage": job.stage}
    if job.offload:
        zero["offload_optimizer"] = {"device": job.offload, "pin_memory": True}
        if job.offload == "nvme":
            zero["offload_optimizer"]["nvme_path"] = job.folder
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": systems.adamw_config(ADAMW),
        "gradient_clipping": CLIP,
        "zero_optimization": zero,
    }
    if job.precision != "fp32":
        config[job.precision] = {"enabled": True}
    return {**config, **job.extra}


def refusal(job: Job) -> str:
    """Why the library does not take this configuration, in its own words; "" if it does."""
    from zeroshard import Engine
    from zeroshard.errors import ConfigError, UnsupportedError

    try:
        Engine(nn.Linear(64, 64), config=zeroshard_config(job), device=job.device).close()
    except (ConfigError, UnsupportedError) as error:
        return str(error)
    return ""


def zeroshard(job: Job) -> Trainer:
    """ZeroShard. Large models come into being unit by unit."""
    from zeroshard import Engine

    where = "meta" if job.offload else job.device
    model = build(job.shape, where, dtype=_dtype(job), recompute=job.recompute)
    engine = Engine(model, config=zeroshard_config(job), device=job.device)

    return zeroshard_trainer(engine)


def zeroshard_trainer(engine: Any) -> Trainer:
    """The three parts of an engine."""
    from zeroshard.zero import safe_get_full_fp32_param

    def values() -> dict[str, Tensor]:
        found = {n: safe_get_full_fp32_param(p) for n, p in engine.module.named_parameters()}
        return {name: value for name, value in found.items() if value is not None}

    return Trainer(engine, engine.backward, engine.step, engine.close, values=values, engine=engine)


def plain(job: Job) -> Trainer:
    """A loop as a careful person writes it: fp32 masters beside the parameters, one fused AdamW.

    In fp32 the parameters are their own masters.
    """
    model = build(job.shape, job.device, dtype=_dtype(job), recompute=job.recompute)
    params: list[Tensor] = list(model.parameters())
    wide = job.precision == "fp32"
    masters: list[Tensor] = params if wide else [nn.Parameter(p.detach().float()) for p in params]
    optimizer = torch.optim.AdamW(masters, fused=True, **ADAMW)
    foreach = False if job.bitwise else None
    step: ClippedStep = (
        ClippedStep(masters, optimizer, foreach=foreach)
        if wide
        else MasterStep(params, masters, optimizer, foreach=foreach)
    )

    def values() -> dict[str, Tensor]:
        names = [name for name, _ in model.named_parameters()]
        return {name: m.detach().clone() for name, m in zip(names, masters, strict=True)}

    return Trainer(model, Tensor.backward, step, values=values)


def fsdp2(job: Job) -> Trainer:
    """FSDP2 on one GPU: fp32 shards, bf16 parameters, one group per block, not resharded."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    _open_group(job.device)
    model = build(job.shape, job.device, dtype=torch.bfloat16, recompute=job.recompute).float()
    more: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()} if job.offload else {}
    systems.shard_with_fsdp2(model, reshard=bool(job.offload), **more)
    return Trainer(model, Tensor.backward, systems.fused_step(model, ADAMW), _close_group)


def deepspeed(job: Job) -> Trainer:
    """DeepSpeed, torch's fused AdamW unless state is offloaded (then its own CPU Adam)."""
    library = systems.import_deepspeed()
    _open_group(job.device)
    model = build(job.shape, job.device, dtype=torch.bfloat16, recompute=job.recompute)
    config = zeroshard_config(job) | {
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
    }
    config["zero_optimization"] |= {"overlap_comm": False, "contiguous_gradients": True}
    optimizer = None
    if not job.offload:
        del config["optimizer"]
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    engine, *_ = library.initialize(
        model=model, model_parameters=list(model.parameters()), optimizer=optimizer,
        config=config, dist_init_required=False,
    )  # fmt: skip
    return Trainer(engine, engine.backward, engine.step, engine.destroy)


SYSTEMS: dict[str, Callable[[Job], Trainer]] = {
    "plain": plain,
    "FSDP2": fsdp2,
    "DeepSpeed": deepspeed,
    "ZeroShard": zeroshard,
}


def _dtype(job: Job) -> torch.dtype:
    """Of the model before any system has it; fp16 runs start from the values that bf16 runs have."""
    return torch.float32 if job.precision == "fp32" else torch.bfloat16


def _open_group(device: str) -> None:
    """A process group of one, without a port."""
    import torch.distributed as dist

    backend = "nccl" if device == "cuda" else "gloo"
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)


def _close_group() -> None:
    import torch.distributed as dist

    dist.destroy_process_group()
