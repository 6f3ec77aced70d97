"""A small network whose blocks torch's own plan cuts over a tensor group, and its plain training."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

WORDS, WIDTH, LENGTH, BATCH = 24, 16, 6, 12
CLIP = 0.5


class Block(nn.Module):
    """A norm and two linear layers, of which a plan cuts the inner width."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Network(nn.Module):
    """Embedding, blocks and head."""

    def __init__(self, inner: int, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(inner) for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.checkpointed = checkpointed

    def forward(self, words: Tensor) -> Tensor:
        x = self.emb(words)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


def network(inner: int, dtype: torch.dtype, **options: bool) -> Network:
    """The same values on every rank."""
    torch.manual_seed(7)
    return Network(inner, **options).to(dtype)


def samples(step: int) -> Tensor:
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(0, WORDS, (BATCH, LENGTH), generator=generator)


def loss_of(logits: Tensor, words: Tensor) -> Tensor:
    """Mean loss of the next word."""
    return F.cross_entropy(logits.flatten(0, 1), words.roll(-1, 1).flatten())


def cut(model: Network, tensor: int, *, sequence: bool = False) -> Network:
    """Cut the blocks over the tensor groups of a mesh whose inner dimension has ``tensor`` ranks."""
    sizes = (dist.get_world_size() // tensor, tensor)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data_shard", "tensor"))["tensor"]
    local = {"use_local_output": False}  # local tensors would lose the sizes of an uneven cut
    plan = {"up": ColwiseParallel(**local), "down": RowwiseParallel()}
    if sequence:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1), **local),
            "down": RowwiseParallel(output_layouts=Shard(1), **local),
        }
        whole = {"use_local_output": True}
        split = PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=False
        )
        parallelize_module(model.blocks[0], mesh, split)
        head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate(), **whole)
        parallelize_module(model, mesh, {"head": head})
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model


def plain_training(
    inner: int, dtype: torch.dtype, steps: int
) -> tuple[dict[str, Tensor], list[float]]:
    """Parameters and norms of plain PyTorch on the global batches."""
    model = network(inner, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    for step in range(steps):
        words = samples(step)
        loss_of(model(words), words).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}, norms


def whole(tensor: Tensor) -> Tensor:
    """The global tensor. Collective for a DTensor."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
