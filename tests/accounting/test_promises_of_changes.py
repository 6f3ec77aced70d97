"""What the error of a failed allocation says that a change frees, against plans with and without it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.covering import sampled

pytest.importorskip("transformers")
from plan_check import Case, Size, build, settings
from plan_check import _batch as batch_of

from zeroshard.core.mesh import Mesh
from zeroshard.engine.remedies import Remedy, changes, smaller_batches
from zeroshard.planner.changes import changed_keys, merged
from zeroshard.planner.fit import calm_collector
from zeroshard.planner.model_source import loss_of
from zeroshard.planner.simulate import simulate
from zeroshard.planner.simulated import Simulation

TOLERANCE = 0.02
SIZE = Size(width=64, layers=3, words=256, batch=4, tokens=32)
CASES = {
    "gpt2, stage 0, bf16": (Case("gpt2", 0, False, ranks=4, size=SIZE), True),
    "llama, stage 1": (Case("llama", 1, False, ranks=4, size=SIZE), False),
    "gpt2, stage 3": (Case("gpt2", 3, False, ranks=4, size=SIZE), False),
}


def planned(case: Case, bf16: bool, line: str = "{}") -> Simulation:
    keys = {"bf16": {"enabled": bf16}, "unit_min_numel": 1}
    config = merged({**settings(case), **keys}, changed_keys(line))
    size = replace(case.size, batch=config["train_micro_batch_size_per_gpu"])
    changed = replace(case, size=size, checkpointed=not line.startswith("{"))
    return simulate(
        build(changed), config, batch_of(changed), mesh=Mesh(data_shard=case.ranks), rank=0,
        loss_fn=loss_of,
    )  # fmt: skip


@pytest.mark.parametrize("name", sampled([*CASES], every=3))
def test_a_change_frees_at_least_what_is_said(name):
    with calm_collector():
        case, bf16 = CASES[name]
        before = planned(case, bf16)
        run = replace(before.run, has_host=True)
        said: list[Remedy] = [*changes(run), list(smaller_batches(run))[-1]]
        frees = {
            each.line: before.peak_nbytes - planned(case, bf16, each.line).peak_nbytes
            for each in said
            if each.freed_nbytes > 0
        }
    for each in said:
        if each.line in frees:
            real = frees[each.line]
            assert each.freed_nbytes <= (1 + TOLERANCE) * real, each.line
            if each.text.startswith("the optimizer"):
                assert each.freed_nbytes == real
            elif "zero_optimization" in each.line:
                assert each.freed_nbytes >= 0.5 * real, each.line
    assert len(frees) >= 4
