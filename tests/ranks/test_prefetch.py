"""At stage 3 the next module is gathered while a module runs, whatever the sizes are."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from zeroshard_testing import on_ranks

from zeroshard import Engine

WIDTH, DEPTH = 16, 4
BLOCK_NUMEL = WIDTH * WIDTH


class Notes(torch.autograd.Function):
    """The identity. Calls ``note("backward")`` in its backward."""

    @staticmethod
    def forward(ctx, x, note):
        ctx.note = note
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.note("backward")
        return grad, None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.note = lambda phase: None

    def forward(self, x):
        self.note("forward")
        return Notes.apply(x @ self.weight, self.note)


class Model(nn.Module):
    """Blocks, and a parameter of the root that is larger than all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(2 * DEPTH * WIDTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x):
        x = x + self.table[: len(x)]
        for block in self.blocks:
            x = block(x)
        return x


def gathered_neighbours(**zero: int) -> dict[str, list[bool]]:
    """By direction: whether the block that comes next was gathered or on its way, at each block but the
    last, in the second step."""
    model = Model()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "units": ["Block"],
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **zero},
    }
    found: dict[str, list[bool]] = {"forward": [], "backward": []}
    with Engine(model, config=config) as engine:
        by_module = {id(w.module): w for w in engine.runtime.prefetcher.wrapped_modules}

        def watch(at: int) -> None:
            def note(phase: str) -> None:
                later = at + 1 if phase == "forward" else at - 1
                if 0 <= later < DEPTH:
                    units = by_module[id(model.blocks[later])].sharded
                    found[phase].append(all(unit.is_allocated for unit in units))

            model.blocks[at].note = note

        for step in range(2):
            if step == 1:
                for at in range(DEPTH):
                    watch(at)
            engine.backward(engine(torch.randn(2, WIDTH)).pow(2).mean())
            engine.step()
    return found


@pytest.mark.parametrize("numel", [1, BLOCK_NUMEL, 10**9])
@on_ranks(2)
def test_the_next_module_is_gathered_whatever_its_size(numel):
    found = gathered_neighbours(stage3_prefetch_bucket_size=numel)
    assert found == {"forward": [True] * (DEPTH - 1), "backward": [True] * (DEPTH - 1)}


@pytest.mark.parametrize("numel", [1, BLOCK_NUMEL, 2 * BLOCK_NUMEL])
@on_ranks(2)
def test_the_limit_of_gathered_elements_does_not_hold_back_the_next_module(numel):
    found = gathered_neighbours(stage3_max_live_parameters=numel)
    assert found == {"forward": [True] * (DEPTH - 1), "backward": [True] * (DEPTH - 1)}


@pytest.mark.parametrize("key", ["stage3_prefetch_bucket_size", "stage3_max_live_parameters"])
@on_ranks(2)
def test_without_room_nothing_is_prefetched(key):
    found = gathered_neighbours(**{key: 0}, stage3_max_reuse_distance=0)
    assert found == {"forward": [False] * (DEPTH - 1), "backward": [False] * (DEPTH - 1)}
