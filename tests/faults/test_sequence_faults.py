"""A sequence rank that dies while the others exchange tokens and heads is named by them."""

from __future__ import annotations

import os
import time

import pytest
import torch.distributed as dist
from kit import config
from support import sequence_models as tiny
from support.sequence_models import Setting
from torch.distributed.device_mesh import init_device_mesh
from zeroshard_testing.ranks import run_ranks

import zeroshard
from zeroshard import sequence

pytest.importorskip("transformers")


def trains(where: str) -> tuple[str, str, float]:
    """Class, text and seconds of the error of a rank whose partner ends in the second forward."""
    group = init_device_mesh("cpu", (2,), mesh_dim_names=("sequence",)).get_group()
    spread = sequence.register("sdpa", group)
    setting = Setting(kv_heads=2)
    keys = config(1, train_micro_batch_size_per_gpu=tiny.SAMPLES, parallel={"sequence": 2})
    keys |= {"optimizer": {"type": "AdamW"}}
    engine, *_ = zeroshard.initialize(model=tiny.model(setting), config=keys)
    own = sequence.split_batch(tiny.batches(setting, 1)[0][0][0], group)
    labels = own.pop("shift_labels")
    began = time.monotonic()
    try:
        for step in range(3):
            if step == 1 and dist.get_rank() == 1:
                core = spread.core
                spread.core = lambda *a, **k: os._exit(3) if where == "forward" else core(*a, **k)
            logits = engine(**own).logits
            if step == 1 and dist.get_rank() == 1 and where == "backward":
                os._exit(3)
            tiny.cross_entropy(logits, labels).backward()
            engine.step()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    finally:
        sequence.unregister()
    raise AssertionError("no error")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_rank_that_dies_between_the_exchanges_is_named(where):
    (name, text, seconds), _ = run_ranks(trains, 2, where, expect_death={1: 3}, timeout=60)
    assert name == "RankLost", text
    assert "rank 1" in text and "tokens and heads" in text
    assert seconds < 15.0
