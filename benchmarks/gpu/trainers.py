"""Builds every system so that all train the same model on one GPU.

All start from the same bf16 values. They compute in bf16, keep fp32 masters, use AdamW with the same
hyperparameters and torch's fused kernel, and clip gradients at norm 1.0.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # modules that CPU and GPU benchmarks share

import systems
import torch
from models import GPT, text
from shapes import Shape
from systems import CLIP, ClippedStep, MasterStep
from torch import Tensor, nn

ADAMW: dict[str, Any] = {**systems.ADAMW, "lr": 1e-4}


def new_model(shape: Shape, *, recompute: bool = False) -> GPT:
    """A model with tied embedding and head, on the current default device and in the default dtype."""
    return GPT(shape, tied=True, recompute=recompute)


def build(shape: Shape, device: str, *, dtype: torch.dtype, recompute: bool = False) -> GPT:
    """A model whose values depend only on shape, device and dtype. On ``meta`` it has no values."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = new_model(shape, recompute=recompute)
    finally:
        torch.set_default_dtype(before)
    if device != "meta":
        draw_by_name(model)
    return model


def draw_by_name(model: nn.Module, prefix: str = "") -> None:
    """Give each module the values that ZeroShard gives it on the meta device with seed 0.

    They depend on the seed and the module's name. A tied parameter gets those of its first module.
    """
    from zeroshard.parallel.initial_values import seed_of

    drawn: set[int] = set()
    for name, part in model.named_modules(prefix=prefix):
        own = {id(param) for param in part._parameters.values() if param is not None}
        if hasattr(part, "reset_parameters") and drawn.isdisjoint(own):
            torch.manual_seed(seed_of(0, name))
            with torch.no_grad():
                part.reset_parameters()
        drawn |= own


def batches(shape: Shape, rows: int, device: str, count: int = 4) -> list[tuple[Tensor, Tensor]]:
    """``count`` pairs ``[rows, context]`` of tokens and their successors, on the device."""
    pairs = text(shape, rows, count, seed=1)
    return [(tokens.to(device), targets.to(device)) for tokens, targets in pairs]


@dataclass(frozen=True)
class Trainer(systems.Trainer):
    """One training step in three parts. ``values`` returns copies of all masters, unrounded."""

    values: Callable[[], dict[str, Tensor]] = dict
    engine: Any = None


@dataclass(frozen=True)
class Job:
    """What is trained, where and how.

    ``offload``: the device of optimizer state; "" is the GPU. ``ratio``: the share of it that goes there.
    ``placing``: more keys of ``offload_optimizer``. ``offloads_params``: with ``offload``, parameters go
    there too. ``pretended``: ``device`` is the
    pretended one of :mod:`zeroshard_testing.streams`.
    """

    system: str
    stage: int
    shape: Shape
    device: str = "cuda"
    precision: str = "bf16"
    offload: str = ""
    ratio: float = 1.0
    placing: dict[str, Any] = field(default_factory=dict)
    offloads_params: bool = False
    pretended: bool = False
    steps: int = 10  # of a check
    recompute: bool = False
    bitwise: bool = False  # compute norms with the kernel that has the same bits as ZeroShard
    folder: str = "/tmp"
    extra: dict[str, Any] = field(default_factory=dict)


def zeroshard_config(job: Job) -> dict[str, Any]:
    """The configuration. The keys of offload are those of DeepSpeed."""
    zero: dict[str, Any] = {"stage": job.stage}
    if job.offload:
        place: dict[str, Any] = {"device": job.offload, "pin_memory": True}
        if job.offload == "nvme":
            place["nvme_path"] = job.folder
        share = {"ratio": job.ratio} if job.ratio < 1 else {}
        zero["offload_optimizer"] = {**place, **share, **job.placing}
        if job.offloads_params:
            zero["offload_param"] = place
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": systems.adamw_config(ADAMW),
        "gradient_clipping": CLIP,
        "zero_optimization": zero,
    }
    if job.precision != "fp32":
        config[job.precision] = {"enabled": True}
    return {**config, **job.extra}


def zeroshard(job: Job) -> Trainer:
    """ZeroShard. With offload the model is built on the meta device and materialized unit by unit."""
    from zeroshard import Engine

    where = "meta" if job.offload else job.device
    model = build(job.shape, where, dtype=dtype_of(job), recompute=job.recompute)
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
    """A plain PyTorch loop: fp32 masters of the parameters, one fused AdamW.

    In fp32 the parameters are their own masters.
    """
    model = build(job.shape, job.device, dtype=dtype_of(job), recompute=job.recompute)
    params: list[Tensor] = list(model.parameters())
    is_fp32 = job.precision == "fp32"
    masters: list[Tensor] = (
        params if is_fp32 else [nn.Parameter(p.detach().float()) for p in params]
    )
    optimizer = torch.optim.AdamW(masters, fused=True, **ADAMW)
    foreach = False if job.bitwise else None
    step: ClippedStep = (
        ClippedStep(masters, optimizer, foreach=foreach)
        if is_fp32
        else MasterStep(params, masters, optimizer, foreach=foreach)
    )

    def values() -> dict[str, Tensor]:
        names = [name for name, _ in model.named_parameters()]
        return {name: m.detach().clone() for name, m in zip(names, masters, strict=True)}

    return Trainer(model, Tensor.backward, step, values=values)


def fsdp2(job: Job) -> Trainer:
    """FSDP2 on one GPU: fp32 shards, bf16 parameters, one group per block, not resharded.

    With offload, groups are resharded. The model then comes from the meta device: each group gets its
    values on the GPU and moves to host memory before the next one, as ZeroShard's units do.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy

    _open_group(job.device, with_host=bool(job.offload))
    if not job.offload:
        model = build(job.shape, job.device, dtype=torch.bfloat16, recompute=job.recompute).float()
        systems.shard_with_fsdp2(model, reshard=False)
    else:
        model = build(job.shape, "meta", dtype=torch.bfloat16, recompute=job.recompute)
        more: dict[str, Any] = {
            "reshard": True,
            "offload_policy": CPUOffloadPolicy(pin_memory=job.device == "cuda"),
        }
        names = {module: name for name, module in model.named_modules()}
        shared = [module for module in model.children() if module is not model.blocks]
        for module in shared:
            _materialize(names[module], module, job.device)
        for block in model.blocks:
            _materialize(names[block], block, job.device)
            systems.shard_group_with_fsdp2(block, **more)
        systems.shard_group_with_fsdp2(model, **more)
    return Trainer(model, Tensor.backward, systems.fused_step(model, ADAMW), _close_group)


def _materialize(name: str, module: nn.Module, device: str) -> None:
    """Give a module of the meta device the values of :func:`draw_by_name`, then fp32 copies."""
    module.to_empty(device=device)
    draw_by_name(module, name)
    module.float()


def deepspeed(job: Job) -> Trainer:
    """DeepSpeed with torch's fused AdamW; with offload, its CPU Adam."""
    os.environ |= ALONE  # DeepSpeed reads them, although the group is there
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


def dtype_of(job: Job) -> torch.dtype:
    """The dtype in which the model is built. fp16 runs start from the same values as bf16 runs."""
    return torch.float32 if job.precision == "fp32" else torch.bfloat16


ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
"""The environment variables of a launcher that starts one rank."""


def _open_group(device: str, *, with_host: bool = False) -> None:
    """Open a process group of one rank, without a port.

    ``with_host``: also for tensors in host memory, as the norm of offloaded gradients needs.
    """
    import torch.distributed as dist

    on_gpu = "cpu:gloo,cuda:nccl" if with_host else "nccl"
    backend = on_gpu if device == "cuda" else "gloo"
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)


def _close_group() -> None:
    import torch.distributed as dist

    dist.destroy_process_group()
