"""Blocks whose matrices are units of one group: one launch in each direction, no copied gradient."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import pytest
import torch
from scenarios import Block, Run, Scenario, cuda, in_child, prepare
from stepwise import report
from torch import nn
from zeroshard_testing import on_ranks

from zeroshard.comm.process_group import JointHandle
from zeroshard.zero import GatheredParameters, grad_ledger, reduce
from zeroshard.zero.grad_buckets import GradLaunch
from zeroshard.zero.gradients import GradBuffer
from zeroshard.zero.unit import UnitState

RANKS = 4
SIZES = {"block_max_numel": 2000, "unit_max_numel": 600}
BLOCKS = ("1", "2")


def opened(watch, stage: int = 3):
    run = Run(Scenario(stage, "none", "whole_blocks", RANKS), "cuda", watch)
    return run, run.open(**SIZES)


def launches(trained) -> Counter[tuple[str, str]]:
    """How often each collective was started so far, by kind and name."""
    found: Counter[tuple[str, str]] = Counter()
    for recorder in {comm.recorder for comm in trained._watch.comms}:
        for op in ("all_gather", "reduce_scatter"):
            for name, entry in recorder.entries(op).items():
                found[op, name] += entry.calls
    return found


def step_of(stage: int) -> tuple[Counter[tuple[str, str]], list[str], str]:
    """What the second step starts, the units whose gradient is not copied in it, and the findings."""
    adopted = []
    with cuda(RANKS) as watch:
        run, trained = opened(watch, stage)
        run.step(trained)
        before, usual = launches(trained), GradBuffer.adopt

        def adopt(buffer, grad):
            adopted.append(buffer.unit.name)
            usual(buffer, grad)

        with mock.patch.object(GradBuffer, "adopt", adopt):
            run.step(trained)
        made = launches(trained) - before
        trained.close()
        return made, adopted, report(watch)


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(1, group=False)
def test_a_block_is_one_launch_in_each_direction_and_its_matrices_are_not_copied(stage):
    prepare()
    made, adopted, found = in_child(lambda: step_of(stage))
    assert not found
    assert all(made["reduce_scatter", name] == 1 for name in BLOCKS)
    # Behind the last reductions of backward nothing is computed: at stage 2 each has its own launch.
    assert made["reduce_scatter", "1.up"] == made["reduce_scatter", "1.down"] == (stage == 2)
    assert not made["reduce_scatter", "2.up"]
    assert {"1.up", "1.down", "2.up", "2.down"} <= {*adopted}
    if stage == 3:
        assert made["all_gather", "1"] == 2  # for forward and for backward
        assert made["all_gather", "2"] in (1, 2)  # the last one may stay for backward
        assert not any(name.startswith(("1.", "2.")) for _, name in made)


def one_by_one(buffers):
    """A policy of buckets: each unit has its own launch."""
    return [GradLaunch((buffer,)) for buffer in buffers]


def with_policy() -> tuple[Counter[tuple[str, str]], str]:
    with cuda(RANKS) as watch:
        run, trained = opened(watch)
        trained.runtime.reducer.policy = one_by_one
        run.step(trained)
        made = launches(trained)
        trained.close()
        return made, report(watch)


@on_ranks(1, group=False)
def test_another_policy_of_buckets_reduces_each_matrix_alone():
    prepare()
    made, found = in_child(with_policy)
    assert not found
    matrices = [f"{block}.{name}" for block in BLOCKS for name in ("up", "down")]
    assert [made["reduce_scatter", name] for name in matrices] == [1] * 4


def without_memory() -> tuple[set[UnitState], list[bool], str]:
    """The units of a block after one of them got no memory, and the findings after another step."""
    with cuda(RANKS) as watch:
        run, trained = opened(watch)
        run.step(trained)
        (group,) = trained._hooks.prefetcher.wrapped_modules[1].groups
        failing = mock.Mock(resize=mock.Mock(side_effect=torch.OutOfMemoryError("no memory")))
        with mock.patch.object(group.units[-1], "_memory", failing):
            with pytest.raises(torch.OutOfMemoryError):
                trained(run.batch())
        after = {each.state for each in group.units}, [each.is_allocated for each in group.units]
        run.step(trained)
        trained.close()
        return *after, report(watch)


@on_ranks(1, group=False)
def test_without_memory_for_all_of_a_block_none_of_it_is_gathered():
    prepare()
    states, allocated, found = in_child(without_memory)
    assert states == {UnitState.SHARDED}
    assert not any(allocated)
    assert not found


class Halving(Block):
    """A block that halves its matrices in forward."""

    def forward(self, x_BD):
        with torch.no_grad():
            self.up.weight.mul_(0.5)
            self.down.weight.mul_(0.5)
        return super().forward(x_BD)


def halved() -> tuple[list[float], list[float], str]:
    """The largest values of the matrices of a block before a forward and after it, and the findings."""
    torch.manual_seed(0)
    net = nn.Sequential(Halving(), Halving())
    with cuda(RANKS) as watch:
        run = Run(Scenario(3, "none", "whole_blocks", RANKS), "cuda", watch)
        trained = run.open(net, **SIZES)
        matrices = [net[0].up.weight, net[0].down.weight]

        def largest() -> list[float]:
            with GatheredParameters(matrices):
                return [float(matrix.detach().cpu().abs().max()) for matrix in matrices]

        before = largest()
        with torch.no_grad():
            trained(run.batch())
        after = largest()
        trained.close()
        return before, after, report(watch)


@on_ranks(1, group=False)
def test_what_a_forward_writes_into_a_block_stays():
    prepare()
    before, after, found = in_child(halved)
    assert after == [value / 2 for value in before]
    assert not found


def test_everyone_who_waits_for_a_launch_that_failed_hears_of_it():
    class Failing:
        def wait(self):
            raise ConnectionError("lost")

    handle = JointHandle(Failing())
    for _ in range(2):
        with pytest.raises(ConnectionError):
            handle.wait()


def test_a_wait_is_made_once():
    class Counted:
        waits = 0

        def wait(self):
            self.waits += 1

    counted = Counted()
    handle = JointHandle(counted)
    handle.wait()
    handle.wait()
    assert counted.waits == 1


def waits_of_a_step() -> tuple[int, int, str]:
    """How often a step waits for launches of several tensors, how many it starts, and the findings."""
    with cuda(RANKS) as watch:
        run, trained = opened(watch)
        run.step(trained)
        before = launches(trained)
        with mock.patch.object(
            JointHandle, "wait", autospec=True, side_effect=JointHandle.wait
        ) as wait:
            run.step(trained)
        made = launches(trained) - before
        trained.close()
        return (
            wait.call_count,
            sum(made[op, name] for op, name in made if name in BLOCKS),
            report(watch),
        )


@on_ranks(1, group=False)
def test_all_units_of_a_block_wait_for_their_launch_at_once():
    prepare()
    waits, started, found = in_child(waits_of_a_step)
    assert not found
    assert waits == started


def in_ledger(buffer) -> list[int]:
    """The bytes that the ledger knows of a buffer, by category."""
    return [
        buffer.ledger.live[category, "device"].get(buffer.name, 0)
        for category in grad_ledger.CATEGORIES
    ]


def misreported() -> tuple[int, list[str], str]:
    """How often bytes of a launch were reported without a look at them, the units for which they were
    wrong, and the findings."""
    calls, wrong = [], []

    def checked(usual):
        def report_known(buffers, nbytes):
            usual(buffers, nbytes)
            calls.append(len(buffers))
            held = [in_ledger(buffer) for buffer in buffers]
            grad_ledger.report(buffers)
            pairs = zip(buffers, held, strict=True)
            wrong.extend(buffer.name for buffer, known in pairs if buffer.reported != known)

        return report_known

    with cuda(RANKS) as watch:
        run, trained = opened(watch)
        begun, ended = checked(reduce.report_begun), checked(reduce.report_ended)
        with (
            mock.patch.object(reduce, "report_begun", begun),
            mock.patch.object(reduce, "report_ended", ended),
        ):
            run.step(trained)
            trained.backward(run.loss(trained))
            trained.backward(run.loss(trained))  # a sum: its bytes are looked at
            trained.step()
        trained.close()
        return len(calls), wrong, report(watch)


@on_ranks(1, group=False)
def test_what_a_launch_holds_is_known_without_a_look():
    prepare()
    calls, wrong, found = in_child(misreported)
    assert calls >= 2 * len(BLOCKS)
    assert not wrong
    assert not found
