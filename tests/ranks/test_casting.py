"""``engine.half()``, ``engine.cuda()`` and ``engine.to(...)`` change nothing that is trained."""

from __future__ import annotations

import pytest
import torch
from loops import STAGES, assert_same, data, loss_of, open_engine, own_data, train, weights
from support.covering import some_stages
from torch import Tensor, nn
from zeroshard_testing import on_ranks

from zeroshard import Engine
from zeroshard.engine.offload_states import check_keeps
from zeroshard.errors import UsageError

BF16 = {"bf16": {"enabled": True}}
CASTS = {
    torch.float16: [lambda e: e.half(), lambda e: e.to(torch.float16),
                    lambda e: e.type("torch.HalfTensor")],
    torch.bfloat16: [lambda e: e.bfloat16(), lambda e: e.to(dtype=torch.bfloat16)],
    torch.float32: [lambda e: e.float(), lambda e: e.to("cpu", torch.float32)],
    torch.float64: [lambda e: e.double(), lambda e: e.to(torch.zeros(1, dtype=torch.float64))],
}  # fmt: skip


def memory(engine: Engine) -> list[tuple[int, torch.dtype, type]]:
    """The identity, dtype and class of each parameter."""
    return [(id(param), param.dtype, type(param)) for param in engine.module.parameters()]


@on_ranks(2)
def test_casts_to_the_same_dtype_change_nothing_and_others_are_refused():
    for stage in some_stages(STAGES):
        for keys in ({}, BF16):
            with open_engine(stage, **keys) as plain:
                train(plain, own_data(plain, 3))
                expected = weights(plain)
            with open_engine(stage, **keys) as engine:
                own = next(engine.module.parameters()).dtype
                batches = own_data(engine, 3)
                for step in batches:  # before the first step, and after training
                    before = memory(engine)
                    for dtype, calls in CASTS.items():
                        for call in calls:
                            if dtype == own:
                                assert call(engine) is engine
                            else:
                                with pytest.raises(UsageError, match=f"cannot be cast to {dtype}"):
                                    call(engine)
                    assert memory(engine) == before
                    train(engine, [step])
                assert_same(weights(engine), expected)


@on_ranks(2)
def test_other_devices_are_refused_and_training_goes_on():
    for stage in some_stages(STAGES):
        with open_engine(stage) as engine:
            for call in (engine.cuda, lambda e=engine: e.cuda(1), lambda e=engine: e.to("meta")):
                with pytest.raises(UsageError, match="this engine was built for cpu"):
                    call()
            with pytest.raises(UsageError, match="this engine was built for cpu"):
                engine._apply(lambda held: held.to("meta"))  # xpu(), mtia() and their like
            with pytest.raises(UsageError, match="would delete the trained values"):
                engine.to_empty(device="cpu")
            with pytest.raises(UsageError, match=r"engine\.share_memory\(\)"):
                engine.share_memory()
            train(engine, own_data(engine, 1))


class Normed(nn.Module):
    """Has buffers of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


@on_ranks(2)
def test_buffers_follow_a_cast_as_in_any_module():
    with open_engine(3, model=Normed(), **BF16) as engine:
        engine.bfloat16()
        assert engine.module.norm.running_mean.dtype == torch.bfloat16
        assert engine.module.norm.num_batches_tracked.dtype == torch.int64
        kept = engine.module.norm.running_mean
        with pytest.raises(UsageError, match=r"cannot be cast to torch\.float16"):
            engine.half()
        assert engine.module.norm.running_mean is kept
        engine.backward(engine(torch.ones(2, 4, dtype=torch.bfloat16)).float().sum())


@on_ranks(2)
def test_a_closed_engine_is_not_cast():
    engine = open_engine(2)
    engine.close()
    with pytest.raises(UsageError, match="closed"):
        engine.float()


def test_a_device_that_is_another_one_is_found_whatever_was_called():
    with pytest.raises(UsageError, match="cannot move to meta"):
        check_keeps(lambda held: held.to("meta"), [torch.zeros(1)], torch.device("cpu"))
    check_keeps(lambda held: held.to("cpu"), [torch.zeros(1)], torch.device("cpu"))


@on_ranks(2)
def test_an_input_that_was_not_cast_is_named_as_the_cause():
    with open_engine(3, **BF16) as engine, pytest.raises(RuntimeError) as found:
        loss_of(engine, data(1)[0][0])
    assert "same dtype" in str(found.value)
    assert "inputs are as the program passes them" in str(found.value)
    assert "x.to(torch.bfloat16)" in str(found.value)
