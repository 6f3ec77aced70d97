"""Gradients that are used without a copy. Two parameters whose gradients share memory get copies."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from zeroshard_testing import on_ranks

from zeroshard import Engine
from zeroshard.zero.gradients import GradBuffer


class Hold(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * 1 if x is None else x @ self.weight.view(64, 64)


class Pair(nn.Module):
    """``a + b.view(...)``: autograd hands both gradients out in one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Hold(64, 64), Hold(4096), Hold(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(x @ (self.a.weight + self.b.weight.view(64, 64)))


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_ranks(2)
def test_gradients_in_one_memory_are_kept_apart(stage):
    adopted, plain = [], Pair()
    adopt, GradBuffer.adopt = GradBuffer.adopt, lambda self, g: (adopted.append(1), adopt(self, g))
    try:
        model = Pair()
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "units": ["Hold"],
            "prescale_gradients": True,
            "gradient_clipping": 0.1,
            "zero_optimization": {"stage": stage},
        }
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        reference = torch.optim.SGD(plain.parameters(), lr=0.1)
        with Engine(model, config=config, optimizer=optimizer) as engine:
            for _ in range(3):
                x = torch.ones(2, 64)
                engine.backward(engine(x).square().mean())
                engine.step()
                reference.zero_grad()
                plain(x).square().mean().backward()
                for p in plain.parameters():
                    p.grad = p.grad.clone()
                nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
                reference.step()
            for (name, full), expected in zip(
                engine.iter_full_params(), plain.parameters(), strict=True
            ):
                torch.testing.assert_close(full, expected.detach(), msg=name)
    finally:
        GradBuffer.adopt = adopt
    assert adopted, "no gradient was taken as it is: the test shows nothing"


@on_ranks(1)
def test_memory_that_somebody_else_holds_is_not_taken():
    config = {
        "train_batch_size": 1,
        "units": ["Hold"],
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 2},
    }
    with Engine(Pair(), config=config) as engine:
        buffer = next(b for b in engine.runtime.reducer.buffers if b.unit.name == "a")
        alone, shared, part = torch.ones(64, 64), torch.ones(64, 64), torch.ones(8192)
        other = shared.view(-1)
        assert buffer._is_whole(alone)
        assert not buffer._is_whole(shared)
        del other
        assert buffer._is_whole(shared)
        assert not buffer._is_whole(part[:4096].view(64, 64))
        assert not buffer._is_whole(alone.bfloat16())
        assert not buffer._is_whole(alone.requires_grad_())
