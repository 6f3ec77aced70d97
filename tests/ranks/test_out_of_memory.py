"""What a failed allocation says: bytes of this rank, and changes that free memory when they are made."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import kit
import pytest
import torch
import torch.distributed as dist
from support.covering import sampled
from support.remedies import Chain, Limited, applied
from torch import Tensor, nn
from zeroshard_testing import on_ranks

from zeroshard import Engine
from zeroshard.comm.collectives import CommMemory
from zeroshard.memory.storage import resize

DEPTH = 12
TOO_LARGE = 1 << 50


class Greedy(torch.autograd.Function):
    """Allocates more than there is, in forward or in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, phase: str) -> Tensor:
        ctx.phase = phase
        return x + torch.empty(TOO_LARGE, dtype=torch.uint8).sum() if phase == "forward" else x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        if ctx.phase == "backward":
            torch.empty(TOO_LARGE, dtype=torch.uint8)
        return grads[0], None


class GreedyNet(nn.Module):
    def __init__(self, phase: str) -> None:
        super().__init__()
        self.linear, self.phase = nn.Linear(8, 8), phase

    def forward(self, x: Tensor) -> Tensor:
        return Greedy.apply(self.linear(x), self.phase).sum()


@pytest.mark.parametrize("phase", ["forward", "backward", "the update"])
@on_ranks(1)
def test_a_failed_allocation_tells_what_the_rank_holds(phase):
    model = GreedyNet(phase)
    with kit.engine(model, 1) as engine, pytest.raises(RuntimeError) as caught:
        if phase == "the update":
            engine._update.run = lambda *_: torch.empty(TOO_LARGE, dtype=torch.uint8)
        engine.backward(engine(torch.ones(2, 8)))
        engine.step()
    text = caught.value.args[0]
    assert "DefaultCPUAllocator: can't allocate memory" in text  # programs look for this
    assert f"rank 0 when {2**30:,}.0 MiB could not be allocated, in {phase}, step 1" in text
    assert re.search(r"^  parameters, device +0\.0 +0\.0 +0\.0$", text, re.MULTILINE)
    assert text.count("ZeroShard: the memory of rank") == 1


@on_ranks(1)
def test_other_errors_keep_their_text():
    with kit.engine(nn.Linear(8, 8), 1) as engine:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
            engine(torch.ones(2, 7))
        assert "ZeroShard" not in str(caught.value)


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 MiB. GPU 0 has...")


@on_ranks(1)
def test_a_forward_that_ends_in_the_middle_is_told_with_its_place():
    """Two and a half of eight blocks had run. Forward needs 3.2 times as much, backward a block more."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)), Failing())
    model.extend(nn.Linear(8, 8) for _ in range(5))
    with kit.engine(
        nn.ModuleDict({"blocks": model}), 1, train_micro_batch_size_per_gpu=64
    ) as engine:
        engine.module.forward = lambda x: model(x)
        engine.memory_baseline.activations = lambda _: 2**40
        with pytest.raises(torch.OutOfMemoryError) as caught:
            engine(torch.ones(64, 8))
    text = str(caught.value)
    assert "in forward of 'blocks.2', step 1" in text
    assert "31% of the blocks had run, so a whole forward would hold about 3,355,443.2 MiB" in text
    assert '{"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 8}' in text


SCENARIOS = {
    "states at stage 0": (0, 2, 96, 0.8),
    "states at stage 1": (1, 2, 96, 0.9),
    "activations at stage 0": (0, 2048, 32, 0.4),
    "activations at stage 2": (2, 2048, 32, 0.4),
    "activations at stage 3": (3, 2048, 32, 0.6),
    "both at stage 1": (1, 512, 96, 0.75),
}
"""Stage, micro-batch, width, and the part of the peak for which there is memory."""


def trained(config: dict[str, Any], width: int, line: str | None, memory: Limited) -> str | None:
    """Two steps with one change. Returns what is told if memory is missing."""
    model = Chain(width, DEPTH)
    changed = applied(line, config, model)
    batch = torch.ones(changed["train_micro_batch_size_per_gpu"], width)
    with memory:
        # Copied inside, since memory is followed from there on.
        for param in model.parameters():
            param.data = param.data.clone()
        with Engine(model, config={**changed, "transport": "p2p"}) as engine:
            engine.memory_baseline.activations = lambda _: (
                memory._live - engine.runtime.ledger.totals()[1]
            )
            try:
                for _ in range(2 * changed.get("gradient_accumulation_steps", 1)):
                    engine.backward(engine(batch).square().mean())
                    engine.step()
            except torch.OutOfMemoryError as error:
                memory.limit = float("inf")
                return str(error)
    return None


@pytest.mark.parametrize("scenario", sampled([*SCENARIOS], every=2))
@on_ranks(2)
def test_a_run_that_did_not_fit_fits_with_each_printed_change(scenario):
    stage, micro_batch, width, part = SCENARIOS[scenario]
    config = kit.config(
        stage,
        optimizer={"type": "AdamW", "params": {"lr": 1e-3}},
        train_micro_batch_size_per_gpu=micro_batch,
    )
    free = Limited()
    assert trained(config, width, None, free) is None
    told = trained(config, width, None, Limited(part * free.peak))
    assert told is not None
    given = [re.findall(r"frees about [0-9.]+ MiB\n +(.+)", told)]
    dist.broadcast_object_list(
        given
    )  # ranks hold different parts, and may be told different changes
    (lines,) = given
    assert lines, told
    for line in lines:
        again = trained(config, width, line, Limited(part * free.peak))
        assert again is None, f"{line}\n{told}\n{again}"


@on_ranks(2)
def test_a_program_may_go_on_after_a_gather_that_had_no_memory():
    """As programs do that look for a batch size: the unit that got no memory stays sharded."""
    model = Chain(16, DEPTH)
    x = torch.ones(2, 16)
    expected = model(x).detach()
    calls: list[int] = []

    def refusing(_memory: CommMemory, flat: Tensor, nbytes: int) -> None:
        if nbytes:
            calls.append(nbytes)
            if len(calls) == 5:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 MiB.")
        resize(flat, nbytes)

    with kit.engine(model, 3) as engine, mock.patch.object(CommMemory, "resize", refusing):
        with pytest.raises(torch.OutOfMemoryError, match="ZeroShard: the memory of rank"):
            engine(x)
        assert torch.equal(engine(x).detach(), expected)
        engine.backward(engine(x).square().mean())
        engine.step()
