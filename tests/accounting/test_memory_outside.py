"""The rows of ``memory_report()`` that are not of the engine: activations and peak."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor, nn
from zeroshard_testing import on_ranks

from zeroshard import Engine
from zeroshard.memory.host_limits import read_rss_nbytes

NUMEL, LAYERS = 4 * 2**20, 12
TENSOR_NBYTES = 4 * NUMEL
ACTIVATIONS_NBYTES = LAYERS * TENSOR_NBYTES
SLACK_NBYTES = 16 * 2**20
"""8 % of the activations, for modules that a first step imports, threads and the allocator."""
CONFIG = {
    "train_micro_batch_size_per_gpu": 1, "unit_min_numel": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}  # fmt: skip


class Sigmoids(nn.Module):
    """A chain in which each layer keeps its result, and nothing else, for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for _ in range(LAYERS):
            x = x.sigmoid()
        return x.mean()


@on_ranks(2)
def test_activations_and_peak_are_what_the_test_allocates():
    x = torch.zeros(NUMEL) + 1
    with Engine(Sigmoids(), config=CONFIG) as engine:
        nothing = {row.category: row.measured for row in engine.memory_report().rows}
        assert nothing["activations"] == 0
        Path("/proc/self/clear_refs").write_text("5")  # the peak of tests before in this process
        before = read_rss_nbytes(os.getpid())
        assert before is not None
        for _ in range(2):
            engine.backward(engine(x))
            engine.step()
        ranks = engine.memory_report(all_ranks=True).ranks
        own = engine.memory_report().rows
    assert sorted(ranks) == [0, 1] and ranks[engine.global_rank] == own
    for rows in ranks.values():
        found = {row.category: row.measured for row in rows if row.tier == "device"}
        assert abs(found["activations"] - ACTIVATIONS_NBYTES) < SLACK_NBYTES
    grown = {row.category: row.measured for row in own}["peak"] - before
    # a backward holds all results and at most two gradients
    least, most = ACTIVATIONS_NBYTES, ACTIVATIONS_NBYTES + 2 * TENSOR_NBYTES
    assert least - SLACK_NBYTES < grown < most + SLACK_NBYTES
