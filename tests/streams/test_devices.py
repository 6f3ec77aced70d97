"""A rank uses its own device, on every thread. No GPU is needed."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
from kit import adamw, config
from scenarios import WIDTH, cuda, model, zero_section
from zeroshard_testing import on_ranks

from zeroshard import Engine


@pytest.mark.parametrize("named", [None, "cuda", torch.device("cuda"), "cuda:1"])
@pytest.mark.parametrize("offload", ["none", "optimizer"])
@on_ranks(1, group=False)
def test_the_second_rank_of_a_host_uses_the_second_device_only(offload, named):
    own = torch.device("cuda", 1)
    keys = config(2, "bf16")
    keys["zero_optimization"] |= zero_section(offload, "")
    second = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "1", "DS_ACCELERATOR": ""}
    with mock.patch.dict(os.environ, second), cuda() as watch:
        with Engine(model(), config=keys, optimizer=adamw, device=named) as engine:
            assert engine.device == own
            for _ in range(2):
                x_BD = torch.ones(2, WIDTH, dtype=torch.bfloat16, device=own)
                engine.backward(engine(x_BD).float().square().mean())
                engine.step()
            assert {param.device for param in engine.module.parameters()} == {own}
        found = "\n".join(map(str, watch.findings))
        assert "thread" not in {finding.kind for finding in watch.findings}, found
        assert torch.cuda.max_memory_allocated(0) == 0


@pytest.mark.parametrize("asynchronous", [False, True])
@on_ranks(1, group=False)
def test_a_checkpoint_leaves_the_device_through_page_locked_memory(asynchronous, tmp_path):
    keys = config(2, "bf16", checkpoint={"asynchronous": asynchronous})
    with cuda() as watch:
        with Engine(model(), config=keys, optimizer=adamw, device="cuda") as engine:
            before = {name: value.clone() for name, value in engine.module.named_parameters()}
            engine.save_checkpoint(tmp_path)
            engine.wait_for_checkpoint()
            engine.backward(engine(torch.ones(2, WIDTH).bfloat16().cuda()).float().mean())
            engine.step()
            engine.load_checkpoint(tmp_path)
            for name, value in engine.module.named_parameters():
                assert torch.equal(value, before[name]), name
        kinds = {finding.kind for finding in watch.findings}
        assert not kinds & {"unpinned", "unpin"}, "\n".join(map(str, watch.findings))
