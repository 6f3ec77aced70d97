"""A mistake in what a run or a transport holds is found by the comparison of plans and runs.

Each mistake is made on purpose. The comparison is that of ``test_plans_and_runs.py``.
"""

from __future__ import annotations

import pickle
from typing import Any
from unittest import mock

import plan_check
import pytest
from torch import Tensor, nn
from zeroshard_testing import run_ranks

from zeroshard.comm import planned
from zeroshard.zero import optimizer
from zeroshard.zero.init import Init
from zeroshard.zero.optimizer_shard import OptimizerShard

pytest.importorskip("transformers")
CASE = plan_check.Case("gpt2", 2, False)


def leaking_activations() -> Any:
    """Each step keeps what the layer norms have given."""
    kept, forward = [], nn.LayerNorm.forward

    def leaky(self: nn.LayerNorm, x: Tensor) -> Tensor:
        y = forward(self, x)
        kept.append(y.detach())
        return y

    return mock.patch.object(nn.LayerNorm, "forward", leaky)


def copying_masters_twice() -> Any:
    """A copy of each fp32 master is kept, which nothing needs."""
    kept, make = [], optimizer.make_optimizer_shard

    def twice(*args: Any, **options: Any) -> OptimizerShard:
        shard = make(*args, **options)
        kept.extend(fragment.value.detach().clone() for fragment in shard.fragments)
        return shard

    return mock.patch.object(optimizer, "make_optimizer_shard", twice)


MISTAKES = {"activations": leaking_activations, "masters": copying_masters_twice}


def observe(mistake: str, case: plan_check.Case, folder: str, path: str) -> None:
    with MISTAKES[mistake]():
        plan_check._observe(case, folder, path, lockstep=False)


@pytest.fixture(scope="module")
def plan() -> Any:
    return plan_check.planned(CASE)


@pytest.mark.parametrize(
    ("mistake", "phases"), [("activations", {"backward"}), ("masters", {"forward", "step"})]
)
def test_memory_that_a_run_keeps_by_mistake_is_above_the_plan(mistake, phases, plan, tmp_path):
    run_ranks(observe, 2, mistake, CASE, str(tmp_path), str(tmp_path / "found"))
    real = pickle.loads((tmp_path / "found.0").read_bytes())  # our own file
    off = plan_check.offs(real, plan)
    assert {phase for phase, part in off.items() if part < -plan_check.TOLERANCE} >= phases, off


def test_windows_that_a_plan_forgets_are_in_the_run():
    case = plan_check.Case("gpt2", 3, False, transport="shm")
    with mock.patch.dict(planned.PLANNED, {"shm": planned.PlannedComm}):
        real, plan = plan_check.run_and_plan(case)
    found = plan_check.differences(real, plan)
    assert any(line.startswith("('transport', 'device')") for line in found), found


def construct(sharded: bool) -> int:
    case = plan_check.Case("gpt2", 3, False, size=plan_check.DEEP)
    if sharded:
        return plan_check._constructed(case)
    with mock.patch.object(Init, "__enter__", lambda self: self):
        return plan_check._constructed(case)


def test_a_model_that_is_not_sharded_while_it_is_built_needs_more_than_the_bound():
    case = plan_check.Case("gpt2", 3, False, size=plan_check.DEEP)
    bound = plan_check.init_row(case)["bound_nbytes"]
    assert max(run_ranks(construct, 2, True)) <= bound
    assert min(run_ranks(construct, 2, False)) > bound
