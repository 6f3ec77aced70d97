"""Two ranks on pretended devices compute the bits of two CPU ranks. No GPU is needed.

Each rank is a process with pretended devices. Collectives are those of the model of NCCL; gloo exchanges
their values.
"""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from scenarios import (
    CHUNK_NUMEL,
    PROGRAMS,
    QUERIES,
    WIDTH,
    Run,
    Scenario,
    engine,
    is_allowed,
    model,
    zero_section,
)
from stepwise import batch, loss_of, report
from support.covering import each_value
from torch import nn
from zeroshard_testing import on_ranks
from zeroshard_testing.streams import pretend_cuda

from zeroshard.core import tiers
from zeroshard.errors import UsageError
from zeroshard.optim import native_adam

RANKS = 2
OFFLOADS = ("none", "optimizer", "delayed", "disk", "parameters", "all disk")
TRIALS = [
    ("plain", "fp32", "always"),
    ("accumulation", "bf16", "never"),
    ("whole_blocks", "bf16", "never"),
    ("gradients", "fp16", "never"),
    ("two_backwards", "fp32", "always"),
    ("edits", "bf16", "always"),
    ("evaluation", "fp32", "never"),
    ("offload_states", "fp32", "always"),
    ("background_save", "fp32", "never"),
    ("stream_per_step", "bf16", "always"),
    ("exception_in_backward", "fp32", "never"),
]
"""Program, precision, and what queries answer."""


def both(scenario: Scenario, folder: str) -> tuple[Run, Run, str]:
    """The scenario on the CPU and on this rank's pretended device, and what was found there."""
    rank = dist.get_rank()
    runs = []
    own = {"DS_ACCELERATOR": "", "LOCAL_RANK": str(rank)}
    with mock.patch.object(tiers, "CHUNK_NUMEL", CHUNK_NUMEL):
        run = Run(scenario, "cpu", None, rank=rank, folder=f"{folder}/cpu")
        PROGRAMS[scenario.program](run)
        runs.append(run)
        with (
            mock.patch.dict(os.environ, own),
            pretend_cuda(devices=RANKS, query=QUERIES[scenario.query]) as watch,
            watch.ranks(),
        ):
            torch.cuda.set_device(rank)
            run = Run(scenario, "cuda", watch, rank=rank, folder=f"{folder}/device")
            PROGRAMS[scenario.program](run)
            runs.append(run)
            found = report(watch)
    return runs[0], runs[1], found


ALL = [
    (stage, offload, *trial)
    for stage in range(4)
    for offload in OFFLOADS
    for trial in TRIALS
    if is_allowed(Scenario(stage, offload, "plain"))
]
CASES: dict[tuple[int, str], list[tuple[str, str, str]]] = {}
"""Some of the trials for each stage and offload: every trial runs at every stage and every offload."""
for stage, offload, *trial in each_value(ALL):
    CASES.setdefault((stage, offload), []).append(tuple(trial))


@pytest.mark.parametrize(("stage", "offload"), CASES)
@on_ranks(RANKS, timeout=180)
def test_values_are_those_of_two_cpu_ranks(stage, offload, tmp_path):
    native_adam.prepare()
    native_adam.wait()
    for program, precision, query in CASES[stage, offload]:
        scenario = Scenario(stage, offload, program, RANKS, precision, query)
        for name in ("cpu", "device"):
            (tmp_path / program / name).mkdir(parents=True, exist_ok=True)
        on_cpu, on_device, found = both(scenario, str(tmp_path / program))
        assert found == "", f"{scenario}:\n{found}"
        assert on_device.values == on_cpu.values, str(scenario)
        assert len(on_device.values) > 1000


class Edited(nn.Linear):
    """A layer that writes into its weight in forward so that PyTorch does not count it."""

    def forward(self, x_BD):
        self.weight.data[0].mul_(0.5)  # in the part of rank 0
        return super().forward(x_BD)


def lost_edit(folder: str, offload: str) -> str:
    """The error of a training in which an edit is lost."""
    net = nn.Sequential(*list(model())[:3], Edited(WIDTH, WIDTH))
    with engine(net, 3, "fp32", zero_optimization=zero_section(offload, folder)) as trained:
        trained.backward(loss_of(trained, batch(0, "cuda", "fp32")))
        trained._update.norm_before_step()  # what the ranks tell each other in the step stays true
        with pytest.raises(UsageError) as error:
            trained.step()
            trained(batch(1, "cuda", "fp32"))
    return str(error.value)


@pytest.mark.parametrize("offload", ["parameters", "all disk"])
@on_ranks(RANKS)
def test_an_edit_that_one_rank_lost_is_the_same_error_on_both(offload, tmp_path):
    native_adam.prepare()
    native_adam.wait()
    rank, texts = dist.get_rank(), [""] * RANKS
    own = {"DS_ACCELERATOR": "", "LOCAL_RANK": str(rank)}
    with mock.patch.dict(os.environ, own), pretend_cuda(devices=RANKS) as watch, watch.ranks():
        torch.cuda.set_device(rank)
        text = lost_edit(str(tmp_path), offload)
    dist.all_gather_object(texts, text)
    assert texts == [text] * RANKS
    assert "parameters of '3' were written inside forward" in text
