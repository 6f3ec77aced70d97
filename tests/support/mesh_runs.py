"""One small model on any mesh: its cut, its engine, its training, its whole state, and plain training."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import zeroshard
from zeroshard import Engine
from zeroshard.core.mesh import Mesh
from zeroshard.parallel.tensor_plan import neighbours
from zeroshard.zero import safe_get_full_fp32_param, safe_get_full_optimizer_state

WORDS, WIDTH, INNER, LENGTH = 21, 12, 22, 5  # 22 columns over four tensor ranks: 6, 6, 6, 4
SAMPLES, MICRO_BATCHES = 16, 2
LR, CLIP = 1e-2, 0.3
MOMENTS = ("exp_avg", "exp_avg_sq")
SPLITS = {2: ["2"], 3: ["1", "2"], 4: ["1", "2", "3"]}
"""Where the model of ``depth`` 2 is cut, by number of pipeline stages."""


class Block(nn.Module):
    """A residual perceptron with dropout that counts its forwards.

    ``recompute``: "reentrant" or "other" activation checkpointing, or "".
    """

    def __init__(self, dropout: float, recompute: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.recompute = recompute
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def reset_parameters(self) -> None:
        self.seen.zero_()

    def inner(self, x_BTD: Tensor) -> Tensor:
        return x_BTD + self.drop(self.down(torch.tanh(self.up(self.norm(x_BTD)))))

    def forward(self, x_BTD: Tensor) -> Tensor:
        self.seen += 1
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.inner, x_BTD, use_reentrant=self.recompute == "reentrant")
        return self.inner(x_BTD)


def build(
    dtype: torch.dtype = torch.float32, *, dropout: float = 0.0, recompute: str = "", depth: int = 2
) -> nn.Sequential:
    """Embedding, ``depth`` blocks, head; the same values on every rank."""
    torch.manual_seed(11)
    blocks = [Block(dropout, recompute) for _ in range(depth)]
    return nn.Sequential(
        nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, WORDS, bias=False)
    ).to(dtype)


def loss_of(logits_BTV: Tensor, words_BT: Tensor) -> Tensor:
    """Mean loss of the next word, in fp32 or more."""
    logits = logits_BTV if logits_BTV.dtype == torch.float64 else logits_BTV.float()
    return F.cross_entropy(logits.flatten(0, 1), words_BT.roll(-1, 1).flatten())


def micro_batches(step: int, dp_rank: int, dp_size: int) -> list[tuple[Tensor, Tensor]]:
    """Those of one data-parallel rank: its share of a global batch that does not depend on the mesh."""
    generator = torch.Generator().manual_seed(300 + step)
    words = torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=generator)
    return [(part, part) for part in words.chunk(dp_size)[dp_rank].chunk(MICRO_BATCHES)]


def open_engine(
    mesh: Mesh,
    stage: int,
    *,
    model: nn.Sequential | None = None,
    cut: dict[str, Any] | None = None,
    zero: dict[str, Any] | None = None,
    **keys: Any,
) -> Engine:
    """An engine on ``mesh`` that clips. ``cut``: arguments of ``zeroshard.parallel.pipeline``."""
    made: nn.Module = model if model is not None else build()
    if mesh.tensor > 1:
        plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
        group = neighbours(mesh.tensor)
        for block in made.children():
            if isinstance(block, Block):
                parallelize_module(block, group, plan)
    if mesh.pipeline > 1:
        # GPipe also runs fewer micro-batches than there are stages.
        schedule = "1F1B" if mesh.pipeline <= MICRO_BATCHES else "GPipe"
        defaults = {"split": SPLITS[mesh.pipeline], "schedule": schedule, "loss_fn": loss_of}
        made = zeroshard.parallel.pipeline(made, **{**defaults, **(cut or {})})
    config = {
        "train_micro_batch_size_per_gpu": max(1, SAMPLES // MICRO_BATCHES // mesh.dp_size),
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 1e-2, "eps": 1e-3}},
        "gradient_clipping": CLIP,
        "unit_min_numel": 1,
        **keys,
        "zero_optimization": {"stage": stage, **(zero or {})},
    }
    engine = Engine(made, config=config, mesh=mesh)
    torch.manual_seed(50 + engine.dp_rank)  # dropout
    return engine


def train(engine: Engine, steps: int) -> list[float]:
    """Train on this rank's share of the global batches. Returns the norms of gradients."""
    norms = []
    for _ in range(steps):
        feed = micro_batches(engine.global_steps, engine.dp_rank, engine.dp_size)
        if engine.mesh.pipeline > 1:
            engine.train_batch(iter(feed))
        else:
            for words, labels in feed:
                engine.backward(loss_of(engine(words), labels))
                engine.step()
        norms.append(float(engine.last_step.grad_norm))
    return norms


def everything(engine: Engine) -> dict[str, Tensor]:
    """The whole tensors of this rank's pipeline stages by name: values, masters, moments, step counts,
    buffers. Collective."""
    found = {name: value.clone() for name, value in engine.iter_full_params()}
    for name, param in engine.module.named_parameters():
        found[f"{name} master"] = safe_get_full_fp32_param(param).clone()
        for key in (*MOMENTS, "step"):
            value = safe_get_full_optimizer_state(param, key)
            assert value is not None
            found[f"{name} {key}"] = value.clone()
    return found | {name: buffer.clone() for name, buffer in engine.module.named_buffers()}


def differences(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """The names in ``actual`` whose values differ in any bit."""
    return [
        name
        for name, value in actual.items()
        if name not in expected or not torch.equal(value, expected[name])
    ]


def plain_training(
    steps: int, dtype: torch.dtype = torch.float64
) -> tuple[dict[str, Tensor], list[float]]:
    """Parameters and norms of plain PyTorch in one process, on the same global batches."""
    model = build(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=1e-2, eps=1e-3)
    norms = []
    for step in range(steps):
        for words, labels in micro_batches(step, 0, 1):
            (loss_of(model(words), labels) / MICRO_BATCHES).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}, norms
