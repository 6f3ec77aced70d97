"""Attention as image models write it: its width in an attribute, norms over heads, dropout inside."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from zeroshard_testing import on_ranks

from zeroshard.comm.dtensors import fused_sizes
from zeroshard.comm.fused_dtensors import mark_fused
from zeroshard.parallel.tensor_plan import apply_plan, neighbours


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, drop: float) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.attn_dim = heads, width // heads, width
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.q_norm, self.k_norm = nn.LayerNorm(self.head_dim), nn.LayerNorm(self.head_dim)
        self.attn_drop, self.proj_drop = nn.Dropout(drop), nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        drop = self.attn_drop.p if self.training else 0.0
        y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, dropout_p=drop)
        y = y.transpose(1, 2).reshape(batch, length, self.attn_dim)
        return self.proj_drop(self.proj(y))


class Block(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(16), Attention(16, 4, drop)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.norm(x))


def image_model(drop: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(drop) for _ in range(2))).double()
    with torch.no_grad():  # norms begin with ones, which would hide a mistake
        for param in model.parameters():
            param.add_(torch.randn_like(param), alpha=0.1)
    return model


def gradient(param: nn.Parameter) -> Tensor:
    assert param.grad is not None
    if fused_sizes(param):
        return mark_fused(param.grad, fused_sizes(param)).full_tensor()
    return param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad


@on_ranks(2)
def test_the_width_of_heads_and_the_norms_over_them_are_those_of_this_rank():
    plain, cut = image_model(), image_model()
    made = apply_plan(cut, neighbours(2), "auto").plan
    assert {count.attribute: count.own for count in made.heads} == {"num_heads": 2, "attn_dim": 8}
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    expected, found = plain(x), cut(x)
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    expected.square().sum().backward()
    found.square().sum().backward()
    own = dict(cut.named_parameters())
    for name, param in plain.named_parameters():
        assert torch.allclose(gradient(own[name]), param.grad, rtol=0, atol=1e-11), name


@pytest.mark.parametrize("training", [True, False])
@on_ranks(2)
def test_dropout_differs_inside_the_heads_and_is_equal_outside(training):
    cut = image_model(0.4).train(training)
    apply_plan(cut, neighbours(2), "auto")
    torch.manual_seed(1)
    x = torch.ones(3, 5, 16, dtype=torch.float64)
    out = cut(x)
    other = [torch.empty_like(out) for _ in range(2)]
    dist.all_gather(other, out.detach())
    assert torch.equal(*other)
    assert torch.allclose(out, image_model()(x), rtol=0, atol=1e-12) is not training
