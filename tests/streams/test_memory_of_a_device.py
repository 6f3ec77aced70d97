"""On a device that is too small, each change that the error prints makes the run fit, offload too."""

from __future__ import annotations

import re
from typing import Any

import kit
import pytest
import torch
from support.covering import sampled
from support.remedies import Chain, applied
from torch import nn
from zeroshard_testing import on_ranks
from zeroshard_testing.streams import pretend_cuda

from zeroshard import Engine
from zeroshard.engine.out_of_memory import LESS_ON_HOST
from zeroshard.errors import HostMemoryError

WIDTH, DEPTH = 64, 8


def trained(
    config: dict[str, Any], tokens: int, ranks: int, line: str | None, device_nbytes: int
) -> tuple[str, int]:
    """Two steps with one change: what is told if memory is missing, and the peak in bytes."""
    model = Chain(WIDTH, DEPTH)
    changed = applied(line, config, model)
    told = ""
    with pretend_cuda(device_nbytes=device_nbytes) as watch, watch.world(ranks):
        try:
            with Engine(model, config=changed, device="cuda") as engine:
                rows = tokens * engine.train_micro_batch_size_per_gpu()
                for _ in range(2 * engine.gradient_accumulation_steps()):
                    x_TD = torch.ones(rows, WIDTH, dtype=torch.bfloat16, device="cuda")
                    engine.backward(engine(x_TD).float().square().mean())
                    engine.step()
        except (HostMemoryError, torch.OutOfMemoryError) as error:
            told = f"{type(error).__name__}: {error}"
        assert not watch.findings, "\n".join(map(str, watch.findings))
        return told, watch.peak_nbytes


SCENARIOS = {
    "before memory is allocated": (0, 1, 16, 1, 0.6),
    "in the update": (0, 1, 16, 1, 0.97),
    "in forward, before there are moments": (1, 1, 256, 4, 0.7),
    "in forward": (3, 1, 256, 4, 0.85),
    "in backward, before there are moments": (2, 2, 1024, 1, 0.8),
}
"""Stage, ranks, tokens, micro-batch, and the part of the peak that the device has."""


@pytest.mark.parametrize("scenario", sampled([*SCENARIOS], every=2))
@on_ranks(1, group=False, timeout=250)
def test_each_printed_change_makes_the_run_fit(scenario):
    stage, ranks, tokens, micro_batch, part = SCENARIOS[scenario]
    config = kit.config(
        stage,
        "bf16",
        optimizer={"type": "AdamW", "params": {"lr": 1e-3}},
        train_micro_batch_size_per_gpu=micro_batch,
    )
    told, peak = trained(config, tokens, ranks, None, 1 << 30)
    assert not told
    limit = int(part * peak)
    told, _ = trained(config, tokens, ranks, None, limit)
    assert ("does not fit" if "allocated" in scenario else f", {scenario.split(',')[0]}") in told
    assert "none of them alone" not in told
    assert f"--memory {limit / 2**30:.6g} --target cuda" in told
    lines = re.findall(r"^ +(\{.*\}|model\..*\(\))$", told, re.MULTILINE)
    assert any("offload" in line for line in lines), told
    for line in lines:
        again, peak = trained(config, tokens, ranks, line, limit)
        assert not again, f"{line}\n{told}\n{again}"
        assert 0 < peak <= limit


@on_ranks(1, group=False)
def test_a_device_gives_no_more_memory_than_it_has():
    with pretend_cuda(device_nbytes=1000) as watch:
        held = torch.empty(600, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 500 bytes"):
            torch.empty(500, dtype=torch.uint8, device="cuda")
        storage = torch.empty(0, dtype=torch.uint8, device="cuda").untyped_storage()
        with pytest.raises(torch.OutOfMemoryError):
            storage.resize_(500)
        assert (storage.nbytes(), watch.live_nbytes) == (0, 600)
        assert torch.cuda.mem_get_info() == (400, 1000)
        del held
        torch.empty(1000, dtype=torch.uint8, device="cuda")
        assert watch.peak_nbytes == 1000


class HostIsFull(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."
        )


@on_ranks(1, group=False)
def test_changes_for_the_device_are_not_printed_if_the_host_is_full():
    with pretend_cuda() as watch, watch.world(1):
        model = nn.Sequential(nn.Linear(8, 8), HostIsFull())
        with kit.engine(model, 1) as engine, pytest.raises(RuntimeError) as caught:
            engine(torch.ones(2, 8, device=engine.device))
    assert caught.value.args[0].endswith(LESS_ON_HOST)
    assert "could not be allocated, in forward of '1'" in caught.value.args[0]
    assert "zeroshard plan" not in caught.value.args[0]
