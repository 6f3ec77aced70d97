"""Updates that begin before the norm is known (``super_offload``) change no bit of training."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
from kit import DTYPES, engine
from support.bus import a_bus_between
from torch import nn
from zeroshard_testing import on_ranks

from zeroshard.errors import UsageError
from zeroshard.offload.async_update import EarlyUpdate
from zeroshard.optim import native_adam
from zeroshard.zero import (
    GatheredParameters,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)

STEPS = 5
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
HOST = {"offload_optimizer": {"device": "cpu"}}
EARLY = {"offload_optimizer": {"device": "cpu", "super_offload": True}}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16), nn.Linear(16, 4))


class Run:
    """One training: its engine, and what the program has read."""

    def __init__(self, stage: int, precision: str, zero: dict, **keys) -> None:
        keys = {"optimizer": ADAMW, **keys}
        self.net = model()
        self.precision = precision
        self.engine = engine(self.net, stage, precision, zero_optimization=zero, **keys)
        self.read: list[torch.Tensor] = []
        self.rank = self.engine.global_rank
        self.settled: list[bool] = []

    @property
    def early(self):
        return self.engine.runtime.optimizer.early

    def loss(self, at: int, size: float = 1.0) -> torch.Tensor:
        x_BD = torch.linspace(-1, 1, 48).view(3, 16).roll(7 * self.rank + at) * (1 + at / 4) * size
        return self.engine(x_BD.to(DTYPES[self.precision])).float().square().mean()

    def keep(self, *found: torch.Tensor | None) -> None:
        self.read += [torch.tensor(-1.0) if f is None else f.detach().clone() for f in found]

    def end(self) -> list[torch.Tensor]:
        """All of the state."""
        for param in self.net.parameters():
            self.keep(safe_get_full_fp32_param(param))
            for name in ("exp_avg", "exp_avg_sq", "step"):
                self.keep(safe_get_full_optimizer_state(param, name))
        self.keep(*(full for _, full in self.engine.iter_full_params()))
        self.engine.close()
        return self.read


def train(program, zero: dict, stage: int, precision: str, **keys) -> tuple[list, Run]:
    """What ``program(run)`` leaves, with the update on the worker thread."""
    native_adam.prepare()
    native_adam.wait()
    settle = EarlyUpdate.settle
    with a_bus_between() if zero else contextlib.nullcontext():
        run = Run(stage, precision, zero, **keys)

        def settled(early, transfer):
            run.settled.append(settle(early, transfer))
            return run.settled[-1]

        with run.engine, mock.patch.object(EarlyUpdate, "settle", settled):
            program(run)
            return run.end(), run


def check(program, stage: int, precision: str = "bf16", **keys) -> Run:
    """The program leaves the same bits with and without early updates, and without offload."""
    plain, _ = train(program, {}, stage, precision, **keys)
    late, _ = train(program, HOST, stage, precision, **keys)
    found, run = train(program, EARLY, stage, precision, **keys)
    for other in (plain, late):
        assert len(other) == len(found)
        for at, (left, right) in enumerate(zip(other, found, strict=True)):
            assert torch.equal(left.nan_to_num(nan=-7.0), right.nan_to_num(nan=-7.0)), at
    return run


def steps(run: Run, *sizes: float, between=None, at: int = 2) -> None:
    """A step for each size of the input. ``between`` backward and step ``at``."""
    for number, size in enumerate(sizes):
        run.engine.backward(run.loss(number, size))
        if number == at and between is not None:
            if run.early is not None:
                run.engine.runtime.optimizer._worker.wait()  # so that the new values are there
            between(run)
        run.engine.step()
        run.keep(torch.tensor(float(run.engine.get_global_grad_norm() or 0.0)))


PLAIN = (1.0,) * STEPS


# ---------------------------------------------------------------------- clipping, overflow, sums


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_nothing_is_clipped_and_every_update_begins_in_backward(stage, precision):
    run = check(lambda run: steps(run, *PLAIN), stage, precision, gradient_clipping=1e6)
    chunks = 3  # one for each unit
    assert run.early.begun if run.early else True
    assert run.settled == [True] * chunks * (STEPS - 1)  # the first step makes the state


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_everything_is_clipped_and_fewer_and_fewer_steps_begin_early(stage):
    run = check(lambda run: steps(run, *PLAIN * 2), stage, gradient_clipping=1e-3)
    assert run.settled == [False] * 3 * 3  # in the steps 2, 4 and 8


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_some_steps_are_clipped(stage):
    sizes = (1.0, 1.0, 6.0, 1.0, 1.0, 1.0)
    run = check(lambda run: steps(run, *sizes), stage, gradient_clipping=1.0)
    # The first step makes the state, the third is clipped, and the fourth waits for the norm.
    assert run.settled == [True] * 3 + [False] * 3 + [True] * 3 * 2


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_an_overflow_is_taken_back(stage):
    sizes = (1.0, 1.0, 1e9, 1.0, 1.0, 1.0)
    keys = {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}}
    found = []

    def program(run):
        steps(run, *sizes)
        found.append(run.engine.skipped_steps)

    run = check(program, stage, "fp16", **keys)
    assert found == [1, 1, 1]
    assert True in run.settled


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_sums_of_micro_batches(stage):
    def program(run):
        for number in range(9):
            run.engine.backward(run.loss(number))
            run.engine.step()

    run = check(program, stage, gradient_accumulation_steps=3)
    assert run.settled == [True] * 3 * 2


@pytest.mark.parametrize("name", ["SGD", "Lion", "Adam without a library"])
@on_ranks(2)
def test_other_optimizers(name):
    params = {"SGD": {"lr": 0.1, "momentum": 0.9}, "Lion": {"lr": 1e-2}}
    section = {"type": name, "params": params[name]} if name in params else ADAMW
    compiles = name in params
    for precision in ("fp32", "bf16"):  # in fp32 a pass could overwrite the gradient
        run = check(
            lambda run: steps(run, 1.0, 1.0, 6.0, 1.0, 1.0),
            2, precision, optimizer=section, gradient_clipping=1.0, compile_update=compiles,
        )  # fmt: skip
        assert True in run.settled
        assert False in run.settled


# ---------------------------------------------------------------------- between backward and step


def scale_gradients(run):
    for param in run.net.parameters():
        param.grad.mul_(0.5)


def drop_a_gradient(run):
    run.net[0].weight.grad = None


def clip_in_the_program(run):
    run.keep(torch.nn.utils.clip_grad_norm_(run.net.parameters(), 0.5))


def read_gradients(run):
    run.keep(*(safe_get_full_grad(param) for param in run.net.parameters()))


def set_a_gradient(run):
    safe_set_full_grad(run.net[2].weight, torch.full((16, 24), 0.25))


def read_state(run):
    for param in run.net.parameters():
        run.keep(safe_get_full_fp32_param(param), safe_get_full_optimizer_state(param, "exp_avg"))


def read_the_dict(run):
    for state in list(run.engine.basic_optimizer.state.values()):
        run.keep(state["exp_avg"], state["step"])


def look_up_in_the_dict(run):
    state = run.engine.basic_optimizer.state
    for key in list(state):
        run.keep(state[key]["exp_avg_sq"])


def write_through_the_dict(run):
    state = run.engine.basic_optimizer.state
    for key in list(state):
        state[key]["exp_avg"].zero_()


def read_state_dict(run):
    for state in run.engine.basic_optimizer.state_dict()["state"].values():
        run.keep(state["exp_avg"])


def read_groups(run):
    for group in run.engine.basic_optimizer.param_groups:
        run.keep(*(param.double().sum() for param in group["params"]))


def set_state(run):
    safe_set_full_optimizer_state(run.net[3].weight, torch.full((4, 16), 0.125), "exp_avg_sq")


def set_a_master(run):
    safe_set_full_fp32_param(run.net[0].weight, torch.full((24, 16), 0.375))


def edit_a_parameter(run):
    with GatheredParameters(run.net[2].weight, modifier_rank=0), torch.no_grad():
        run.net[2].weight.mul_(0.75)


def change_the_learning_rate(run):
    run.engine.basic_optimizer.param_groups[0]["lr"] *= 0.5


def register_a_hook(run):
    run.engine.basic_optimizer.register_step_post_hook(lambda *_: None)


def a_second_backward(run):
    run.engine.backward(run.loss(7))


def drop_all_gradients(run):
    run.engine.zero_grad()
    run.engine.backward(run.loss(3))


def move_state(run):
    run.engine.offload_states()
    run.engine.reload_states()


def fail_in_backward(run):
    loss = run.loss(5)
    handle = run.net[0].weight.register_hook(lambda _grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.engine.backward(loss)
    handle.remove()
    run.engine.zero_grad()
    run.engine.backward(run.loss(2))


def evaluate(run):
    with torch.no_grad():
        run.keep(run.loss(4))


ACTIONS = (
    scale_gradients, drop_a_gradient, clip_in_the_program, read_gradients, set_a_gradient, read_state,
    read_the_dict, look_up_in_the_dict, write_through_the_dict, read_state_dict, read_groups, set_state,
    set_a_master, edit_a_parameter, change_the_learning_rate, register_a_hook, a_second_backward,
    drop_all_gradients, move_state, fail_in_backward, evaluate,
)  # fmt: skip
LOCAL = (read_the_dict, look_up_in_the_dict, write_through_the_dict, read_state_dict, read_groups)
"""What they read differs between layouts, not between early and late updates."""


SHOWN = (
    scale_gradients, read_the_dict, read_groups, change_the_learning_rate, register_a_hook,
    drop_all_gradients, set_a_master, evaluate,
)  # fmt: skip
"""What `make test` runs: one for each way in which an early update is taken back."""


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_what_a_program_does_between_backward_and_step(stage):
    do_between(stage, SHOWN)


@pytest.mark.full
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_what_else_a_program_does_between_backward_and_step(stage, part):
    do_between(stage, [action for action in ACTIONS if action not in SHOWN][part::4])


def do_between(stage, actions):
    for action in actions:

        def program(run, action=action):
            steps(run, *PLAIN[:4], between=action)

        late, _ = train(program, HOST, stage, "bf16")
        found, run = train(program, EARLY, stage, "bf16")
        assert all(map(torch.equal, late, found)), action.__name__
        if action not in LOCAL:
            plain, _ = train(program, {}, stage, "bf16")
            assert all(map(torch.equal, plain, found)), action.__name__
        assert True in run.settled
        if action is evaluate:  # only this reads nothing that an update writes
            assert run.settled == [True] * 3 * 3
        else:
            assert len(run.settled) < 3 * 3 or False in run.settled, action.__name__


@pytest.mark.parametrize("stage", [1, 2])
@on_ranks(2)
def test_a_parameter_that_is_edited_in_place(stage):
    """Nobody tells the engine. The device sees it when the step is made."""

    def edit(run):
        with torch.no_grad():
            run.net[2].weight.mul_(0.75)

    run = check(lambda run: steps(run, *PLAIN, between=edit), stage)
    assert False in run.settled


@on_ranks(2)
def test_a_checkpoint_between_backward_and_step_has_the_state_before_it(tmp_path):
    for zero in (HOST, EARLY):
        steps_of = lambda run: steps(  # noqa: E731
            run, *PLAIN, between=lambda run: run.engine.save_checkpoint(tmp_path, tag="between")
        )
        train(steps_of, zero, 2, "bf16")

        def load(run):
            run.engine.load_checkpoint(tmp_path, tag="between")

        loaded, _ = train(load, {}, 2, "bf16")
        two, _ = train(lambda run: steps(run, *PLAIN[:2]), {}, 2, "bf16")
        assert all(map(torch.equal, loaded, two[2:]))


@on_ranks(2)
def test_a_write_through_a_kept_tensor_is_an_error():
    def program(run):
        steps(run, 1.0, 1.0)
        held = safe_get_local_optimizer_state(run.net[0].weight, "exp_avg")
        for at in range(3):  # the read made one step wait for the norm
            run.engine.backward(run.loss(at))
            run.engine.runtime.optimizer._worker.wait()
            held.zero_()
            run.engine.step()
            run.engine.eval()
            run.loss(at)
            run.engine.train()

    train(program, HOST, 2, "bf16")
    with pytest.raises(UsageError, match="through a tensor that it had kept"):
        train(program, EARLY, 2, "bf16")


# ---------------------------------------------------------------------- memory


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@on_ranks(2)
def test_memory_for_the_old_state_is_what_is_planned_and_can_be_limited(precision):
    units = {}
    for limit in (None, 400, 100, 0):
        zero = {"offload_optimizer": {**EARLY["offload_optimizer"], "super_offload_numel": limit}}
        rows = []

        def program(run, rows=rows):
            steps(run, *PLAIN)
            early = run.early
            run.engine.runtime.optimizer.wait_for_worker()
            units[limit] = len(run.settled) / (STEPS - 1)
            if early is None:
                return
            kept = [t for tensors in early._kept.values() for t in tensors]
            planned = run.engine.runtime.ledger.live["scratch", "host"][
                "state before early updates"
            ]
            taken = sum(t.nbytes for t in kept if t.numel() > 1)  # step counts are not planned
            padding = 512 * 8 * units[limit]  # has no optimizer state
            assert taken <= planned <= taken + padding

        train(program, zero, 2, precision)
    assert units == {None: 3, 400: 2, 100: 1, 0: 0}
