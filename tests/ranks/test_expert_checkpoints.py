"""Checkpoints of ranks that share experts: other numbers of ranks continue them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import expert_models as tiny
from support.covering import each_value
from support.expert_models import Setting
from support.expert_runs import CUT, opened
from zeroshard_testing import run_ranks

from zeroshard.comm.env import current_rank_info
from zeroshard.core.mesh import Mesh

SETTING = Setting(micro=1, residual=True)


def run(
    steps: slice, ep_size: int, stage: int, root: Path, replicas: int = 1, tensor: int = 1
) -> None:
    """Train some of the steps of 4 data ranks, on any number of ranks; load before, and save after.

    ``tensor``: ranks that share each expert.
    """
    words_SDBT = tiny.batches(SETTING, 4)[:, 0]
    data = current_rank_info().world_size // tensor
    mesh = Mesh(data_replicate=replicas, data_shard=data // replicas, tensor=tensor)
    count = {"gradient_accumulation_steps": 4 // data}
    with opened(SETTING, ep_size, stage, mesh=mesh, plan=CUT, **count) as engine:
        if steps.start:
            engine.load_checkpoint(root, str(steps.start))
            assert engine.global_steps == steps.start
        for words_DBT in words_SDBT[steps]:
            for words in words_DBT[engine.dp_rank :: engine.dp_size]:
                engine.backward(tiny.loss_of(engine(words), words))
                engine.step()
        if steps.stop < tiny.STEPS:
            engine.save_checkpoint(root, str(steps.stop))
        else:
            expected = tiny.in_one_process(SETTING, 4).params
            found = dict(engine.iter_full_params())
            assert found.keys() <= expected.keys()
            for name, param in found.items():
                torch.testing.assert_close(param.detach(), expected[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("saved", "loaded", "stages"),
    each_value(
        [
            (saved, loaded, stages)
            for saved, loaded in (
                ((4, 2, 2), (2, 1, 1)), ((4, 2, 1), (4, 2, 2)), ((4, 2, 2), (4, 4, 1)),
                ((4, 2, 1, 2), (4, 2, 2)), ((4, 4, 1), (4, 2, 1, 2)),
            )
            for stages in ((3, 1), (1, 3), (2, 0), (0, 2))
        ]
    ),
)  # fmt: skip
def test_other_axes_continue(saved, loaded, stages, tmp_path):
    """Ranks, ``ep_size``, replicas; ranks that share each expert, if they are named."""
    for (ranks, ep_size, *axes), steps, stage in zip(
        (saved, loaded), (slice(0, 2), slice(2, 3)), stages, strict=True
    ):
        run_ranks(run, ranks, steps, ep_size, stage, tmp_path, *axes)


@pytest.mark.parametrize(
    ("saved", "loaded", "stages"),
    each_value(
        [
            (saved, loaded, stages)
            for saved, loaded in (
                ((4, 2), (2, 1)), ((4, 4), (4, 2)), ((2, 1), (4, 4)), ((4, 2), (1, 1)),
                ((1, 1), (2, 2)), ((2, 2), (4, 2)),
            )
            for stages in ((3, 1), (1, 3), (2, 0), (0, 2))
        ]
    ),
)  # fmt: skip
def test_other_ranks_continue(saved, loaded, stages, tmp_path):
    run_ranks(run, saved[0], slice(0, 2), saved[1], stages[0], tmp_path)
    run_ranks(run, loaded[0], slice(2, 3), loaded[1], stages[1], tmp_path)
