"""A small model with fused q|k|v and gate|up in one weight each, and fewer key/value heads than heads."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from support.tensor_models import VOCAB
from zeroshard import Engine
from zeroshard.comm.dtensors import fused_sizes
from zeroshard.comm.fused_dtensors import mark_fused
from zeroshard.zero import safe_get_full_optimizer_state

WIDTH, HEADS, KEY_HEADS, HEAD, HIDDEN = 16, 4, 2, 4, 12
LR, CLIP = 1e-2, 0.05

PLAN = {
    "blocks.*.qkv_proj": "colwise_fused",
    "blocks.*.o": "rowwise",
    "blocks.*.gate_up": "colwise_fused:12,12",
    "blocks.*.down": "rowwise",
    "embed": "vocab",
    "head": "colwise_gather",
}


class Conv1D(nn.Module):
    """A linear layer with the weight ``[in, out]``, as that of Transformers."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.2)
        self.bias = nn.Parameter(torch.randn(nf) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return y.view(*x.shape[:-1], self.nf)


class Block(nn.Module):
    """Attention and a gated MLP. ``conv``: the fused layers are Conv1D."""

    def __init__(self, conv: bool) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = HEADS, KEY_HEADS
        rows = (HEADS + 2 * KEY_HEADS) * HEAD
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv_proj = Conv1D(rows, WIDTH) if conv else nn.Linear(WIDTH, rows, bias=False)
        self.o = Conv1D(WIDTH, HEADS * HEAD) if conv else nn.Linear(HEADS * HEAD, WIDTH)
        self.gate_up = Conv1D(2 * HIDDEN, WIDTH) if conv else nn.Linear(WIDTH, 2 * HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length = x.shape[:2]
        qkv = self.qkv_proj(self.norm(x)).view(batch, length, -1, HEAD).transpose(1, 2)
        q, k, v = qkv.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, -1))
        gate, up = self.gate_up(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class FusedGPT(nn.Module):
    """Two blocks, an embedding and a head, which may be tied."""

    def __init__(self, *, conv: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(conv) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def fused_gpt(**options: bool) -> FusedGPT:
    """A model in float64, equal in every process that passes the same arguments."""
    torch.manual_seed(0)
    return FusedGPT(**options).double()


def everything(engine: Engine) -> dict[str, Tensor]:
    """Full parameters and first moments by name. Collective."""
    found = {name: full.detach().clone() for name, full in engine.iter_full_params()}
    for name, param in engine.module.named_parameters():
        moment = safe_get_full_optimizer_state(param, "exp_avg")
        assert moment is not None
        found[f"{name} exp_avg"] = moment.clone()
    return found


def settings(stage: int, **keys: Any) -> dict[str, Any]:
    """A configuration for AdamW."""
    return {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_clipping": CLIP,
        "unit_min_numel": 1,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "eps": 1e-3, "weight_decay": 1e-2}},
        **keys,
    }


def whole_gradient(param: nn.Parameter) -> Tensor:
    """The global gradient. Autograd's gradient of a fused weight is a DTensor that does not know it."""
    assert param.grad is not None
    if fused_sizes(param):
        return mark_fused(param.grad, fused_sizes(param)).full_tensor()
    return param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
