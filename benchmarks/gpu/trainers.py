"""How is each system told to train the same model on one GPU?

Every function builds one system from the same bf16 values: bf16 compute, fp32 master, AdamW with the
same numbers and torch's fused kernel, gradients clipped at norm 1.0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from shapes import Shape
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
CLIP = 1.0


class Embedding(nn.Embedding):
    """A table that is also the output layer: small values, so that training begins calmly."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


class Block(nn.Module):
    """Attention and MLP, pre-norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        batch, length, width = x_BTD.shape
        qkv = self.qkv(self.norm1(x_BTD)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        hidden = functional.gelu(self.up(self.norm2(x_BTD)), approximate="tanh")
        result: Tensor = x_BTD + self.down(hidden)
        return result


class GPT(nn.Module):
    """Returns the mean cross entropy of the next token. ``recompute``: block inputs are kept only."""

    def __init__(self, shape: Shape, *, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = Embedding(shape.vocabulary, shape.width)
        self.place = Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        places = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.embed(tokens_BT) + self.place(places)
        for block in self.blocks:
            kept = self.recompute and torch.is_grad_enabled()
            x_BTD = checkpoint(block, x_BTD, use_reentrant=False) if kept else block(x_BTD)
        logits = functional.linear(self.norm(x_BTD), self.embed.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets_BT.flatten())


def build(shape: Shape, device: str, *, dtype: torch.dtype, recompute: bool = False) -> GPT:
    """A model whose values depend on shape, device and dtype alone. ``meta``: no values yet."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return GPT(shape, recompute=recompute)
    finally:
        torch.set_default_dtype(before)


def batches(shape: Shape, rows: int, device: str, count: int = 4) -> list[tuple[Tensor, Tensor]]:
    """``count`` pairs ``[rows, context]`` of tokens, as frequent as words in a text, and successors."""
    generator = torch.Generator().manual_seed(1)
    size = (count, rows, shape.context + 1)
    text = (shape.vocabulary ** torch.rand(size, generator=generator, dtype=torch.float64)).long()
    return [(row[:, :-1].to(device), row[:, 1:].to(device)) for row in text.sub_(1)]


@dataclass(frozen=True)
class Trainer:
    """One training step in three parts."""

    forward: Callable[[Tensor, Tensor], Tensor]
    backward: Callable[[Tensor], Any]
    step: Callable[[], Any]
    close: Callable[[], Any] = lambda: None
    values: Callable[[], dict[str, Tensor]] = (
        dict  # copies of all masters by name: rounding hides nothing
    )
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
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
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

    return Trainer(engine, engine.backward, engine.step, engine.close, values, engine)


def plain(job: Job) -> Trainer:
    """A loop as a careful person writes it: fp32 masters beside the parameters, one fused AdamW.

    In fp32 the parameters are their own masters.
    """
    model = build(job.shape, job.device, dtype=_dtype(job), recompute=job.recompute)
    params: list[Tensor] = list(model.parameters())
    wide = job.precision == "fp32"
    masters: list[Tensor] = params if wide else [nn.Parameter(p.detach().float()) for p in params]
    optimizer = torch.optim.AdamW(masters, fused=True, **ADAMW)

    def step() -> None:
        if not wide:
            for master, param in zip(masters, params, strict=True):
                assert param.grad is not None
                master.grad, param.grad = param.grad.float(), None
        nn.utils.clip_grad_norm_(masters, CLIP, foreach=False if job.bitwise else None)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not wide:
            with torch.no_grad():
                torch._foreach_copy_(params, masters)

    def values() -> dict[str, Tensor]:
        names = [name for name, _ in model.named_parameters()]
        return {name: m.detach().clone() for name, m in zip(names, masters, strict=True)}

    return Trainer(model, Tensor.backward, step, values=values)


def fsdp2(job: Job) -> Trainer:
    """FSDP2 on one GPU: fp32 shards, bf16 parameters, one group per block, not resharded."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    _open_group(job.device)
    model = build(job.shape, job.device, dtype=torch.bfloat16, recompute=job.recompute).float()
    more: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()} if job.offload else {}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for part in (*model.blocks, model):
        fully_shard(part, mp_policy=policy, reshard_after_forward=bool(job.offload), **more)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Trainer(model, Tensor.backward, step, _close_group)


def deepspeed(job: Job) -> Trainer:
    """DeepSpeed, torch's fused AdamW unless state is offloaded (then its own CPU Adam)."""
    with contextlib.redirect_stdout(None):
        import deepspeed as library  # type: ignore[import-not-found,unused-ignore]

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
