"""Programs that use DeepSpeed's pipelines run unedited, with the numbers of plain PyTorch."""

from __future__ import annotations

import contextlib
import importlib
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from programs import EXAMPLES
from zeroshard_testing.ranks import run_ranks

from zeroshard.deepspeed.helpers import set_random_seed
from zeroshard.deepspeed.install import DIRECTORY

ALEXNET = EXAMPLES / "pipeline_alexnet" / "train.py"
GPT = Path(__file__).with_name("pipelined_gpt.py")


@contextlib.contextmanager
def deepspeed_is_ours() -> Iterator[None]:
    """``import deepspeed`` imports ZeroShard. Afterwards it is forgotten."""
    try:
        with mock.patch.object(sys, "path", [str(DIRECTORY), *sys.path]):
            importlib.invalidate_caches()
            yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
            del sys.modules[name]


# ---------------------------------------------------------------------- AlexNet


def alexnet(options: list[str]) -> list[float]:
    """Losses of the program on this rank."""
    with deepspeed_is_ours(), mock.patch.object(sys, "argv", ["train.py", *options]):
        program = runpy.run_path(str(ALEXNET))
        args = program["parse_arguments"]()
        set_random_seed(args.seed)
        return program["train_pipe"](args, program["drawn"](64, args.seed))


def plain_alexnet(options: list[str], steps: int, batch: int) -> list[float]:
    """The same samples in the same order, in one process."""
    with deepspeed_is_ours(), mock.patch.object(sys, "argv", ["train.py", *options]):
        program = runpy.run_path(str(ALEXNET))
        args = program["parse_arguments"]()
        set_random_seed(args.seed)
        net, data = program["AlexNet"](args.width), program["drawn"](64, args.seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.0)
    losses = []
    for step in range(steps):
        picked = [data[at % len(data)] for at in range(step * batch, (step + 1) * batch)]
        x, y = (torch.stack(part) for part in zip(*picked, strict=True))
        loss = torch.nn.functional.cross_entropy(net(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(("ranks", "stages"), [(2, 2), (4, 2), (3, 3)])
def test_alexnet_trains_like_one_process(ranks, stages, tmp_path):
    config = tmp_path / "ds_config.json"
    copies = ranks // stages
    config.write_text(
        f'{{"train_micro_batch_size_per_gpu": {8 // copies}, "gradient_accumulation_steps": 4,'
        f' "zero_optimization": {{"stage": {stages}}},'
        ' "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}'
    )
    options = ["--deepspeed_config", str(config), "--steps", "4", "--width", "4"]
    options += ["--stages", str(stages)]
    expected = plain_alexnet(options, 4, 32)
    for losses in run_ranks(alexnet, ranks, options, timeout=60):
        assert losses == pytest.approx(expected, rel=2e-5)
    assert expected[-1] < expected[0]


# ---------------------------------------------------------------------- GPT with a tied embedding


def gpt(options: list[str]) -> dict[str, Any]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with deepspeed_is_ours():
            program = runpy.run_path(str(GPT))
            return program["main"](options) if options else program["plain"](4)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("ranks", "stages", "stage", "more"),
    [(2, 1, 3, []), (2, 2, 1, []), (4, 2, 3, ["--interval", "1"]), (4, 4, 2, [])],
)
def test_a_tied_gpt_trains_like_one_process(ranks, stages, stage, more, tmp_path):
    with deepspeed_is_ours():
        program = runpy.run_path(str(GPT))
    count = program["BATCH"] // program["MICRO_BATCH"] // (ranks // stages)
    config = program["write_config"](tmp_path / "config.json", stage, count)
    options = ["--deepspeed_config", str(config), "--stages", str(stages), *more]
    expected = gpt([])
    seen: set[str] = set()
    for rank, found in enumerate(run_ranks(gpt, ranks, options, timeout=60)):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-12)
        assert found["tested"] == pytest.approx(expected["tested"], rel=1e-12)
        at = rank // (ranks // stages)
        assert found["stage"] == (stages, at == 0, at == stages - 1)
        seen |= set(found["params"])
        for name, value in found["params"].items():
            error = (value - expected["params"][name]).abs().max()
            assert error <= 1e-12 * expected["params"][name].abs().max(), name
    assert seen == set(expected["params"])
