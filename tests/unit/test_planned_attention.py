"""Attention on fake CPU tensors takes the operations that it takes on real ones, so plans hold for it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

FUSED = "aten::_scaled_dot_product_flash_attention_for_cpu"


class Operations(TorchDispatchMode):
    """``names`` of the operations that were called, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.prim.device.default:  # fake tensors are asked for their device
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def operations(*, fake: bool, mask: str, dropout: float, causal: bool, grad: bool) -> list[str]:
    with FakeTensorMode() if fake else contextlib.nullcontext(), Operations() as found:
        query, key, value = (torch.zeros(1, 2, 8, 4, requires_grad=grad) for _ in range(3))
        bias = {
            "none": None,
            "bool": torch.ones(1, 1, 8, 8, dtype=torch.bool),
            "float": torch.zeros(1, 1, 8, 8),
            "learned": torch.zeros(1, 2, 8, 8, requires_grad=grad),
        }[mask]
        result = nn.functional.scaled_dot_product_attention(
            query, key, value, bias, dropout_p=dropout, is_causal=causal
        )
        if grad:
            result.sum().backward()
    return found.names


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float", "learned"])
def test_fake_attention_takes_the_operations_of_real_attention(mask, dropout, grad):
    bias, causal = ("none", True) if mask == "causal" else (mask, False)
    real, fake = (
        operations(fake=fake, mask=bias, dropout=dropout, causal=causal, grad=grad)
        for fake in (False, True)
    )
    assert fake == real
    learned = mask == "learned" and grad
    assert (FUSED in real) == (dropout == 0 and not learned)  # otherwise it keeps its scores
