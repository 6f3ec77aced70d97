"""All ranks train in the precision that "auto" resolves to, however the model was built."""

from __future__ import annotations

import logging
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from loops import CASE, assert_same, config_for, open_engine, own_data, train, weights
from zeroshard_testing import on_ranks

import zeroshard
from zeroshard.config import Hardware
from zeroshard.engine import build, draft
from zeroshard.errors import RankMismatch
from zeroshard.precision import hardware as native

FAST = Hardware(bf16=True, fp16=True, because="this CPU has AMX-BF16")
SLOW = Hardware(bf16=False, fp16=False, because="this CPU has no bf16 instructions")
AUTO = {"bf16": {"enabled": "auto"}}


def trained(hardware: Hardware, stage: int, *, built_sharded: bool = False, **keys):
    answer = {"hardware_of": lambda device: hardware}
    with mock.patch.multiple(draft, **answer), mock.patch.multiple(build, **answer):
        config = config_for(stage, **keys)
        with zeroshard.zero.Init(config=config, enabled=built_sharded):
            model = CASE.build()
        with open_engine(stage, model=model, **keys) as engine:
            dtypes = {param.dtype for param in engine.module.parameters()}
            train(engine, own_data(engine, 2))
            return dtypes, weights(engine)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_auto_trains_as_if_the_answer_had_been_written(stage):
    for hardware, dtype in ((FAST, torch.bfloat16), (SLOW, torch.float32)):
        written = {"bf16": {"enabled": hardware.bf16}}
        dtypes, expected = trained(hardware, stage, **written)
        assert dtypes == {dtype}
        for built_sharded in (False, True):
            dtypes, found = trained(hardware, stage, built_sharded=built_sharded, **AUTO)
            assert dtypes == {dtype}
            assert_same(found, expected)


@on_ranks(2)
def test_ranks_on_unlike_hardware_are_told_which_key_to_write():
    mine = FAST if dist.get_rank() else SLOW
    with mock.patch.object(draft, "hardware_of", lambda device: mine):
        with pytest.raises(RankMismatch, match=r"bf16\.enabled"):
            open_engine(3, **AUTO)


@on_ranks(2)
def test_rank_0_alone_says_once_that_a_precision_is_slow():
    native._tell_once.cache_clear()
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("zeroshard")
    logger.addHandler(handler)
    try:
        for _ in range(2):
            trained(SLOW, 2, bf16={"enabled": True})
        trained(SLOW, 2, **AUTO)
    finally:
        logger.removeHandler(handler)
    told = [line for line in lines if "times as long as in fp32" in line]
    assert len(told) == (1 if dist.get_rank() == 0 else 0)
