"""How is each system told to train the same model in the same way?

Every function here builds one system on one rank, in its best configuration for this setting, from
the same fp32 model: AdamW with the same numbers and torch's fused kernel, gradients clipped at 1.0,
bf16 compute, fp32 master, gradients reduced in bf16 unless the text says otherwise.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from models import GPT
from torch import Tensor, nn

ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
CLIP = 1.0


@dataclass(frozen=True)
class Trainer:
    """One training step in three parts."""

    forward: Callable[[Tensor, Tensor], Tensor]
    backward: Callable[[Tensor], Any]
    step: Callable[[], Any]
    close: Callable[[], Any] = lambda: None


@dataclass(frozen=True)
class System:
    """One line of the table. ``library``: the package that must be installed."""

    name: str
    family: str
    library: str
    build: Callable[[GPT], Trainer]
    setting: str
    trains: bool = True

    @property
    def version(self) -> str | None:
        """The installed version; None if the library is missing."""
        try:
            return importlib.metadata.version(self.library)
        except importlib.metadata.PackageNotFoundError:
            return None


def floor(model: GPT) -> Trainer:
    """Forward and backward of the bf16 model: no exchange, no update. Nobody can be below it."""
    model.bfloat16()
    return Trainer(model, Tensor.backward, lambda: model.zero_grad(set_to_none=True))


def ddp(model: GPT) -> Trainer:
    """DDP keeps fp32 parameters, computes under bf16 autocast and all-reduces fp32 gradients."""
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def forward(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss: Tensor = wrapped(tokens, targets)
            return loss

    return Trainer(forward, Tensor.backward, _clipped_step(model, optimizer))


def fsdp2(reshard: bool) -> Callable[[GPT], Trainer]:
    """FSDP2: fp32 shards, bf16 parameters, bf16 reductions, one group per block."""

    def build(model: GPT) -> Trainer:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy, reshard_after_forward=reshard)
        fully_shard(model, mp_policy=policy, reshard_after_forward=reshard)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
        return Trainer(model, Tensor.backward, _clipped_step(model, optimizer))

    return build


def _clipped_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def deepspeed(stage: int) -> Callable[[GPT], Trainer]:
    """DeepSpeed with the best keys found for this size, see benchmarks/README.md."""

    def build(model: GPT) -> Trainer:
        with contextlib.redirect_stdout(None):
            import deepspeed as library

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "gradient_clipping": CLIP,
            "zero_optimization": {
                "stage": stage,
                "overlap_comm": False,
                "contiguous_gradients": True,
                "reduce_bucket_size": 5_000_000,
                "allgather_bucket_size": 5_000_000,
            },
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
        }
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
        engine, *_ = library.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )
        return Trainer(engine, engine.backward, engine.step, engine.destroy)

    return build


def zeroshard(stage: int, transport: str) -> Callable[[GPT], Trainer]:
    """ZeroShard; ``stock``: collectives of gloo, ``p2p``: tagged sends and receives over gloo."""

    def build(model: GPT) -> Trainer:
        from zeroshard import Engine

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
            "bf16": {"enabled": True},
            "gradient_clipping": CLIP,
            "zero_optimization": {"stage": stage},
            "steps_per_print": 10**9,
            "transport": transport,
        }
        engine = Engine(model, config=config)
        return Trainer(engine, engine.backward, engine.step, engine.close)

    return build


def catalogue() -> list[System]:
    """Every line of the comparison, in the order of the table."""
    fsdp_setting = "fp32 shards, bf16 reductions, reshard_after_forward as named"
    own_setting = "bf16 reductions, defaults"
    return [
        System("forward + backward", "floor", "torch", floor, "bf16, one rank by itself", False),
        System("DDP", "DDP", "torch", ddp, "fp32 parameters and reductions, bf16 autocast"),
        System("FSDP2, not resharded", "FSDP2", "torch", fsdp2(False), fsdp_setting),
        System("FSDP2, resharded", "FSDP2", "torch", fsdp2(True), fsdp_setting),
        *(
            System(
                f"DeepSpeed stage {stage}", "DeepSpeed", "deepspeed", deepspeed(stage),
                "bf16 reductions, overlap_comm off, buckets of 5e6",
            )
            for stage in (1, 2, 3)
        ),
        *(
            System(
                f"ZeroShard stage {stage}, {transport}", f"ZeroShard {transport}", "zeroshard",
                zeroshard(stage, transport), own_setting,
            )
            for transport in ("stock", "p2p")
            for stage in (0, 1, 2, 3)
        ),
    ]  # fmt: skip


def prepare_process() -> None:
    """What some systems read from the environment before they are imported."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # peers under newer names of torch
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("DS_BUILD_OPS", "0")
