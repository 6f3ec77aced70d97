"""Twenty engines, one after the other, each release all of their resources."""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path

import pytest
import torch
from census import Stack, everything_alive, micro_step, stack_config
from peak import give_back, resident_nbytes
from support.covering import sampled
from torch import nn
from zeroshard_testing import on_ranks

from zeroshard import Engine
from zeroshard.errors import ShardedAccess

STAGES = (0, 1, 2, 3)
MIB = 2**20


def live_and_die(model: nn.Module, stage: int, save_dir: Path | None = None) -> Engine:
    engine = Engine(model, config=stack_config(stage))
    micro_step(engine)
    engine.step()
    if save_dir is not None:
        engine.save_checkpoint(save_dir)
    engine.close()
    return engine


def hooks_of(model: nn.Module) -> int:
    """All hooks and attributes that were attached to the modules and parameters."""
    on_modules = sum(
        len(getattr(module, name))
        for module in model.modules()
        for name in vars(module)
        if name.endswith("_hooks") or name.endswith("_hooks_with_kwargs")
    )
    on_params = sum(
        len(getattr(p, name) or ())
        for p in model.parameters()
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
    )
    return on_modules + on_params


@pytest.mark.parametrize("stage", sampled([3, 0], every=2))
@on_ranks(2)
def test_twenty_engines_in_a_row_leave_memory_flat(stage):
    """Tensor memory is equal to the byte. Resident memory grows by less than 1 MB, because every process
    group leaves its addresses in the store and a little memory in gloo's threads. If each engine leaked
    a tensor, that would add up to 30 MB.
    """
    give_back()  # from here on the allocator keeps no freed memory
    for _ in range(30):  # until the arenas of all threads exist
        live_and_die(Stack(), stage)
    give_back()
    tensors, resident = sum(everything_alive().values()), resident_nbytes()
    for _ in range(20):
        live_and_die(Stack(), stage)
    give_back()
    assert sum(everything_alive().values()) == tensors
    assert resident_nbytes() - resident < MIB


def alive_nbytes(limit: int) -> int:
    """Bytes of all tensors. gloo's thread frees those of a collective a moment after its wait, so up to
    a second is given to come under ``limit``; what is kept stays above it.
    """
    end = time.monotonic() + 1
    while (found := sum(everything_alive().values())) > limit and time.monotonic() < end:
        time.sleep(0.02)
    return found


@pytest.mark.parametrize(
    ("stage", "transport"),
    sampled(
        [
            (3, "shm"),
            (0, "shm"),
            (1, "p2p"),
            (3, "p2p"),
            (2, "shm"),
            (1, "shm"),
            (0, "stock"),
            (3, "stock"),
        ],
        every=3,
    ),
)
@on_ranks(2)
def test_many_steps_leave_memory_flat(stage, transport):
    """No additional tensor, message buffer or megabyte of memory is kept.

    The stock transport needs twice the steps, until torch's log of its own collectives is full. The slack
    for each step is the same. Shared memory may contain one more
    set of gradients, allocated when another rank was late to read, for any number of steps.
    """
    steps = 200 if transport == "stock" else 100
    late = sum(p.numel() * 2 for p in Stack().parameters()) if transport == "shm" else 0
    config = {**stack_config(stage), "transport": transport}
    with Engine(Stack(), config=config) as engine:
        for step in range(steps):
            micro_step(engine)
            engine.step()
            if step == 1:
                tensors, scratch = sum(everything_alive().values()), engine._watch.scratch_nbytes
            if step == steps // 2:  # arenas are warm
                give_back()
                resident = resident_nbytes()
        slack = late + 5 * steps  # a few numbers on their way
        assert alive_nbytes(tensors + slack) <= tensors + slack
        assert engine._watch.scratch_nbytes <= scratch + slack
        give_back()
        # Later each rank may allocate such a set, and reads that of the other: both are resident.
        grown = resident_nbytes() - resident
        assert grown < 2 * late + MIB * steps // 200, (grown, late)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_closed_engine_leaves_no_hook_on_the_model(stage):
    model = Stack()
    before = hooks_of(model)
    engine = Engine(model, config=stack_config(stage))
    assert hooks_of(model) > before
    micro_step(engine)
    engine.step()
    engine.close()
    assert hooks_of(model) == before


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_closing_frees_state_at_once_although_engine_and_model_live_on(stage, tmp_path):
    before = everything_alive()
    model = Stack()
    engine = live_and_die(model, stage, save_dir=tmp_path if stage else None)
    left = sum(nbytes for key, nbytes in everything_alive().items() if key not in before)
    whole = 2 * sum(p.numel() for p in model.parameters())
    assert left <= (0 if stage == 3 else whole) + 4096
    assert engine.last_step.grad_norm > 0


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_the_garbage_collector_frees_an_engine_and_its_model_closed_or_not(stage, closed):
    model = Stack()
    engine = Engine(model, config=stack_config(stage))
    micro_step(engine)
    engine.step()
    params = [weakref.ref(p) for p in model.parameters()]
    units = [weakref.ref(unit) for unit in engine.runtime.units]
    if closed:
        engine.close()
    else:
        engine._watch.close()  # threads and sockets are not the collector's business
    del model, engine
    gc.collect()
    assert not any(reference() is not None for reference in (*params, *units))


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_ranks(2)
def test_a_whole_model_goes_on_after_its_engine_and_takes_another(stage):
    model = Stack()
    live_and_die(model, stage)
    x = torch.ones(1, 384, dtype=torch.bfloat16)
    y = model(x)
    y.float().sum().backward()
    assert model.out.weight.grad is not None
    model.zero_grad()
    live_and_die(model, stage)


@on_ranks(2)
def test_shards_are_gone_with_their_engine_and_reading_says_so():
    model = Stack()
    live_and_die(model, 3)
    with pytest.raises(ShardedAccess, match="closed"):
        model.out.weight.sum()
