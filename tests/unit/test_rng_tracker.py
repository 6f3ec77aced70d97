"""Streams of random numbers of tensor ranks, as Megatron's programs use them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from zeroshard import deepspeed
from zeroshard.errors import UsageError

checkpointing = deepspeed.checkpointing
tracker = checkpointing.get_cuda_rng_tracker()
SEED = 1234


@pytest.fixture(autouse=True)
def forgotten():
    yield
    checkpointing.configure(None)
    tracker.reset()


def be_tensor_rank(rank: int, name: str = "model") -> None:
    """The program's mpu says so, and it seeds."""
    mpu = {
        f"get_{name}_parallel_rank": lambda: rank,
        f"get_{name}_parallel_world_size": lambda: 2,
    }
    checkpointing.configure(SimpleNamespace(**mpu))
    checkpointing.model_parallel_cuda_manual_seed(SEED)


def drawn() -> list[float]:
    with tracker.fork():
        return torch.rand(4).tolist()


@pytest.mark.parametrize("name", ["model", "slice", "tensor_model"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_tensor_rank_has_numbers_of_its_own_and_those_that_all_draw(rank, name):
    be_tensor_rank(rank, name)
    own = torch.Generator().manual_seed(SEED + 2718 + rank)
    common = torch.Generator().manual_seed(SEED)
    for _ in range(2):
        assert drawn() == torch.rand(4, generator=own).tolist()
        assert torch.rand(4).tolist() == torch.rand(4, generator=common).tolist()


def test_a_block_that_raises_leaves_the_default_generator_as_it_was():
    be_tensor_rank(0)
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), tracker.fork():
        torch.rand(4)
        raise ZeroDivisionError
    assert torch.equal(torch.get_rng_state(), before)


def test_a_stream_that_is_seeded_again_begins_anew():
    be_tensor_rank(1)
    first = drawn()
    checkpointing.model_parallel_reconfigure_tp_seed(SEED)
    assert drawn() == first
    checkpointing.model_parallel_cuda_manual_seed(SEED)
    assert drawn() == first


@pytest.mark.parametrize("kind", ["checkpoint", "non_reentrant_checkpoint"])
def test_activations_are_computed_again_with_the_numbers_of_forward(kind):
    def block(x: Tensor) -> Tensor:
        with tracker.fork():
            return torch.nn.functional.dropout(x * x, 0.5)

    def gradient(checkpointed: bool) -> tuple[Tensor, list[float]]:
        be_tensor_rank(0)
        x = torch.arange(1.0, 65.0, requires_grad=True)
        y = getattr(checkpointing, kind)(block, x) if checkpointed else block(x)
        drawn()  # the next layer
        y.sum().backward()
        assert bool((x.grad[y == 0] == 0).all())
        return x.grad, drawn()

    (found, after), (expected, after_plain) = gradient(True), gradient(False)
    assert torch.equal(found, expected)
    assert after == after_plain  # backward has moved no stream


def test_saved_streams_continue():
    be_tensor_rank(1)
    saved = tracker.get_states()
    expected = drawn()
    tracker.set_states(saved)
    assert drawn() == expected


def test_a_tensor_rank_that_loads_the_streams_of_another_one_gets_different_numbers():
    be_tensor_rank(0)
    saved = tracker.get_states()
    of_other = drawn()
    be_tensor_rank(1)
    before = torch.get_rng_state()
    found = []
    for _ in range(2):
        tracker.set_states(saved)
        found.append(drawn())
    assert found[0] == found[1] != of_other
    assert torch.equal(torch.get_rng_state(), before)


def test_streams_that_are_not_there_or_there_twice_are_named():
    assert tracker.get_states() == {}
    with pytest.raises(UsageError, match=r"no stream 'model-parallel-rng'.*manual_seed"):
        drawn()
    tracker.add("mine", 5)
    with pytest.raises(UsageError, match=r"add\('mine', 6\)"):
        tracker.add("mine", 6)
    with pytest.raises(UsageError, match="a stream with the seed 5"):
        tracker.add("other", 5)
    with pytest.raises(UsageError, match="It has 'mine'"):
        drawn()
