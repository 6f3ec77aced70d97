"""What a run is compared with before it allocates is never more than what it needs."""

from __future__ import annotations

import functools
from unittest import mock

import pytest
import torch
from census import WIDTH, Stack, stack_config

from zeroshard.core.mesh import Mesh
from zeroshard.core.tiers import Tier
from zeroshard.engine import build_runtime, out_of_memory
from zeroshard.planner.simulate import simulate


@pytest.mark.parametrize(("stage", "transport"), [(1, "p2p"), (2, "shm"), (3, "p2p"), (3, "shm")])
def test_a_run_needs_at_least_what_is_compared_with_free_memory(stage, transport):
    """So no run is refused that would fit."""
    config = {**stack_config(stage), "transport": transport}
    model = functools.partial(Stack, depth=4)
    batch = torch.empty(2, WIDTH, dtype=torch.bfloat16), None
    with mock.patch.object(build_runtime, "new_nbytes", wraps=out_of_memory.new_nbytes) as compared:
        plan = simulate(
            model, config, batch, mesh=Mesh(data_shard=2), rank=0, loss_fn=lambda y, _: y.sum()
        )
    ((planned, _, _, passing),) = [call.args for call in compared.call_args_list]
    states = sum(nbytes for (_, tier), nbytes in planned.items() if tier is Tier.DEVICE)
    root = 2 * (WIDTH * WIDTH + WIDTH)
    assert passing >= 2 * root * (max(stage, 1) - 1) + root  # 2 bytes an element
    assert 0.75 * plan.peak_nbytes < states + passing <= plan.peak_nbytes
