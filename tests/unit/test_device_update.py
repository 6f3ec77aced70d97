"""Engines update what is in device memory in one pass. Triton's interpreter runs it on the host."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch
from kit import engine
from torch import nn
from zeroshard_testing import on_ranks

from zeroshard.optim import triton_check
from zeroshard.optim.optimizers import Lion
from zeroshard.zero import updaters

pytest.importorskip("triton", reason="Triton has wheels for Linux on x86-64 only")

from zeroshard_testing.triton_interpreter import interpreted

OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, fused=True),
    "SGD, momentum": lambda params: torch.optim.SGD(
        params, lr=1e-2, momentum=0.9, dampening=0.1, fused=True
    ),
    "Lion": lambda params: Lion(params, lr=1e-3),
}


@pytest.fixture(scope="module", autouse=True)
def launches():
    """CPU ranks count as devices in these tests. The launches of all of them, in order."""
    with interpreted(also_on_cpu=True) as found:
        yield found


@pytest.fixture(autouse=True)
def _each_test_begins_without_launches(launches):
    launches.clear()


class Pair(nn.Module):
    """Two layers, the second of which can be left out. Sizes are multiples of 64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)
        self.rare = nn.Linear(64, 64)

    def forward(self, x, rare=False):
        x = self.second(self.first(x).tanh())
        return (self.rare(x) if rare else x).float().square().mean()


def batch(seed, dtype):
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def step(trained, seed, *, rare=False):
    dtype = next(trained.module.parameters()).dtype
    loss = trained(batch(seed, dtype), rare)
    trained.backward(loss)
    trained.step()
    return loss.detach()


def values(trained):
    """Parameters, masters and optimizer state."""
    optimizer = trained.runtime.optimizer
    found = [param.detach().clone() for param in trained.module.parameters()]
    for shard in optimizer.shards:
        found.append(shard.flat(lambda chunk: chunk.master_C).clone())
        for fragment in shard.fragments:
            found += [value.clone() for value in optimizer.state_of(fragment).values()]
    return found


def same_bits(some, others):
    return len(some) == len(others) and all(map(torch.equal, some, others))


def train(program, *, one_pass, stage=2, precision="fp32", optimizer="AdamW", **keys):
    """What ``program(engine)`` returns, and all values after it."""
    keys["compile_update"] = one_pass
    with engine(Pair(), stage, precision, optimizer=OPTIMIZERS[optimizer], **keys) as trained:
        return program(trained), values(trained)


def compare(program, **keys):
    """Run a program with the pass and with the optimizer's own step. Both must give the same bits."""
    found, wanted = (train(program, one_pass=one_pass, **keys) for one_pass in (True, False))
    assert found[0] == wanted[0]
    assert same_bits(found[1], wanted[1])


def three_steps(trained):
    losses = []
    for at in range(3):
        if at == 2:
            with torch.no_grad():
                trained.module.first.weight.mul_(1.5)  # an edit
        losses.append(float(step(trained, at)))
    return losses


def two_steps(trained):
    return [float(step(trained, at)) for at in range(2)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_has_the_bits_of_the_optimizers_own_step(launches, optimizer, precision):
    compare(three_steps, precision=precision, optimizer=optimizer)
    assert launches


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_every_stage(launches, stage):
    compare(three_steps, stage=stage, precision="bf16")
    assert launches


def test_one_rank_launches_once_for_all_units_and_once_for_their_steps(launches):
    def program(trained):
        three_steps(trained)
        launches.clear()
        step(trained, 3)
        return [launch.kernel for launch in launches]

    assert train(program, one_pass=True, precision="bf16")[0] == ["count", "update"]


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_two_ranks(stage):
    """Units that are all-gathered after their update are updated one by one."""
    with interpreted(also_on_cpu=True) as launches:
        found = train(two_steps, one_pass=True, stage=stage, precision="bf16")
        with engine(Pair(), stage, "bf16", optimizer=OPTIMIZERS["AdamW"]) as trained:
            step(trained, 0, rare=True)
            launches.clear()
            step(trained, 1, rare=True)
            names = [launch.kernel for launch in launches]
            units = len(trained.runtime.optimizer.shards)
    wanted = train(two_steps, one_pass=False, stage=stage, precision="bf16")
    assert found[0] == wanted[0]
    assert same_bits(found[1], wanted[1])
    assert names == ["count", "update"] * (units if stage == 1 else 1)
    assert units > 1


def test_parameters_without_gradient_are_left_out():
    def program(trained):
        return [float(step(trained, at, rare=at in (1, 2, 4))) for at in range(5)]

    compare(program, precision="bf16")


def test_no_temporary_memory(launches):
    """The ledger counts what an update lends. The pass lends nothing, also in the first step."""

    def program(trained):
        lent = []
        lend = trained.runtime.ledger.lend
        trained.runtime.ledger.lend = lambda owner, nbytes, *tier: (
            lent.append(owner),
            lend(owner, nbytes, *tier),
        )[1]
        three_steps(trained)
        tables = trained.runtime.ledger.live["scratch", "device"]
        return lent.count("update"), {name: n for name, n in tables.items() if "tables" in name}

    (lent, tables), _ = train(program, one_pass=True, precision="bf16")
    assert lent == 0
    assert list(tables) == ["tables of the update of all units"]
    assert 0 < sum(tables.values()) < 3 * 64 * 65  # less than one byte per element
    (lent, tables), _ = train(program, one_pass=False, precision="bf16")
    assert lent > 0
    assert tables == {}


def test_the_state_of_the_first_step_is_that_of_the_optimizer():
    def program(trained):
        step(trained, 0)
        state = trained.runtime.optimizer.inner.state_dict()["state"]
        return [
            [(name, value.dtype, value.shape, value.stride()) for name, value in state[at].items()]
            for at in state
        ]

    for optimizer in OPTIMIZERS:
        compare(program, optimizer=optimizer, precision="bf16")


def test_a_step_that_the_device_skips_changes_nothing():
    def program(trained):
        step(trained, 0, rare=True)
        before = values(trained)
        trained.backward(trained(batch(1, torch.bfloat16), True))
        optimizer = trained.runtime.optimizer
        optimizer.sync_edits()
        trained.runtime.reducer.finish()
        for _ in optimizer.update(torch.tensor(1.0), found_inf=torch.tensor(1.0)):
            pass
        return same_bits(before, values(trained))

    unchanged, _ = train(program, one_pass=True, precision="bf16")
    assert unchanged


def test_state_that_was_replaced_moved_or_loaded_is_followed(tmp_path):
    def program(trained):
        losses = [float(step(trained, 0)), float(step(trained, 1))]
        state = trained.runtime.optimizer.inner.state
        for value in state.values():
            value.update({name: tensor.clone() * 0.5 for name, tensor in value.items()})
        losses.append(float(step(trained, 2)))
        trained.offload_states()
        trained.reload_states()
        losses.append(float(step(trained, 3)))
        trained.save_checkpoint(str(tmp_path), tag="here")
        losses.append(float(step(trained, 4)))
        trained.load_checkpoint(str(tmp_path), tag="here")
        losses.append(float(step(trained, 4)))
        assert losses[-1] == losses[-2]
        return losses

    compare(program, precision="bf16")


def test_options_that_change_between_steps_are_followed(launches):
    def program(trained):
        group = trained.runtime.optimizer.inner.param_groups[0]
        losses = []
        for at in range(3):
            group["lr"], group["weight_decay"], group["betas"] = (
                0.01 / (at + 1),
                0.1 * at,
                (0.5, 0.9),
            )
            losses.append(float(step(trained, at)))
        return losses

    compare(program, precision="bf16")
    assert len({str(sorted(launch.constants.items())) for launch in launches}) == 2


def test_hooks_and_amsgrad_bring_back_the_optimizers_own_step(launches):
    def program(trained):
        inner = trained.runtime.optimizer.inner
        step(trained, 0)
        launches.clear()
        handle = inner.register_step_post_hook(lambda *_: None)
        step(trained, 1)
        without = len(launches)
        handle.remove()
        step(trained, 2)
        return without, len(launches) > 0

    assert train(program, one_pass=True)[0] == (0, True)


def test_the_key_compile_update_keeps_it_out(launches):
    train(three_steps, one_pass=False, precision="bf16")
    assert launches == []


def test_where_triton_is_broken_the_optimizers_own_step_runs(monkeypatch, caplog, launches):
    def broken(_device):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(triton_check, "Launcher", broken)
    triton_check.ready.cache_clear()
    with caplog.at_level(logging.WARNING, "zeroshard"):
        found = train(three_steps, one_pass=True)
    triton_check.ready.cache_clear()
    assert launches == []
    assert same_bits(found[1], train(three_steps, one_pass=False)[1])
    assert caplog.text.count("Triton failed (RuntimeError: no compiler)") == 1


@pytest.mark.parametrize("change", ["dtype", "strides"])
def test_unusual_state_runs_through_the_optimizers_own_step(launches, change):
    """Moments in another dtype are refused by torch's kernel; others it takes."""

    def program(trained):
        step(trained, 0)
        optimizer = trained.runtime.optimizer
        for value, state in optimizer.inner.state.items():
            if change == "strides" and value.dim() == 2:
                state["exp_avg"] = state["exp_avg"].t().contiguous().t()
            elif change == "dtype":
                state["exp_avg"] = state["exp_avg"].double()
        launches.clear()
        ran = []
        own = updaters.OwnStep.step
        updaters.OwnStep.step = lambda self, inputs: ran.append(self)
        try:
            step(trained, 1)
        finally:
            updaters.OwnStep.step = own
        return bool(ran), len(launches)

    assert train(program, one_pass=True)[0] == (True, 0)


def test_the_kernel_of_an_optimizer_without_a_device_form_is_not_asked(monkeypatch, launches):
    from zeroshard.zero import turns

    real = turns.kernel_of

    def without_form(*args, **kwargs):
        return dataclasses.replace(real(*args, **kwargs), device_form=None)

    monkeypatch.setattr(turns, "kernel_of", without_form)
    train(three_steps, one_pass=True)
    assert launches == []
