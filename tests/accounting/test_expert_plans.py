"""Plans of ranks that share experts: states and messages by arithmetic, and as in a real run."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zeroshard_testing import on_ranks

from zeroshard.core.mesh import Mesh
from zeroshard.experts.dispatch import all_tokens_here
from zeroshard.parallel import MoE
from zeroshard.planner import Simulation, simulate
from zeroshard.planner.assumptions import SharedLayers, said_of_experts
from zeroshard.planner.simulate import observe

WIDTH, INNER, EXPERTS, LAYERS, TOKENS, K = 64, 128, 8, 2, 24, 2
ONE = 2 * WIDTH * INNER  # elements of an expert
BATCH = torch.empty(TOKENS, WIDTH, device="meta"), None


class Expert(nn.Module):
    """Nothing in it is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, ep_size: int, drops: bool, mesh: Mesh | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            MoE(
                WIDTH, Expert, EXPERTS, ep_size, k=K, drop_tokens=drops, top2_2nd_expert_sampling=False,
                capacity_factor=1.0, min_capacity=1, mesh=mesh,
            )
            for _ in range(LAYERS)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)[0]
        return x


def settings(stage: int, **keys: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": TOKENS,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
        "transport": "p2p",
        **keys,
    }


@cache
def simulated(
    ranks: int, ep_size: int, stage: int, *, drops: bool = False, replicas: int = 1
) -> Simulation:
    mesh = Mesh(data_replicate=replicas, data_shard=ranks // replicas)
    return simulate(
        lambda: Net(ep_size, drops), settings(stage), BATCH, mesh=mesh, rank=1,
        loss_fn=lambda y, _: y.square().mean(),
    )  # fmt: skip


@pytest.mark.parametrize(("ranks", "ep_size"), [(8, 4), (8, 8), (4, 2)])
@pytest.mark.parametrize("stage", [3, 1])
def test_experts_are_sharded_over_the_ranks_that_have_the_same(ranks, ep_size, stage):
    found = simulated(ranks, ep_size, stage)
    own, gates = LAYERS * ONE * EXPERTS // ep_size, LAYERS * WIDTH * EXPERTS
    assert found.params_numel == own + gates
    experts, dense = own * ep_size // ranks, gates // ranks
    whole = 1 if stage == 3 else ranks // ep_size
    assert found.nbytes("parameters") == 4 * (
        experts * whole + dense * (1 if stage == 3 else ranks)
    )
    assert found.experts == (
        SharedLayers(LAYERS, EXPERTS, EXPERTS // ep_size, ep_size, ranks // ep_size, own, False),
    )
    assert found.mesh.expert == ep_size


@pytest.mark.parametrize("drops", [False, True])
def test_messages_are_those_of_tokens_and_of_places(drops):
    ranks, ep_size = 8, 4
    found = simulated(ranks, ep_size, 3, drops=drops)
    rows = [row for row in found.traffic if row.op == "all_to_all"]
    assert {row.group for row in rows} == {f"{ep_size} that share experts"}
    # Tokens and results, in forward and backward, but for the gradient of the batch. With a capacity
    # each expert gets all its places.
    moved = (4 * LAYERS - 1) * TOKENS * K * WIDTH * 4 * (ep_size - 1) // ep_size
    sizes = 0 if drops else LAYERS * EXPERTS * 8 * (ep_size - 1) // ep_size
    assert sum(row.sent_nbytes for row in rows) == moved + sizes
    groups = {row.group for row in found.traffic if row.op == "reduce_scatter"}
    assert groups == {"all ranks", f"same of {ep_size} parts of experts"}


def test_the_worst_case_holds_the_tokens_of_all_ranks():
    even = simulated(8, 4, 3)
    with all_tokens_here():
        worst = simulated.__wrapped__(8, 4, 3)
    # Beside even tokens, at least the inputs and outputs of both layers of an expert for the others.
    more = 3 * TOKENS * K * 4 * (WIDTH + INNER)
    forward = [found.moments["forward"].device_nbytes for found in (even, worst)]
    assert forward[1] - forward[0] > LAYERS * more
    assert worst.nbytes("parameters") == even.nbytes("parameters")
    lines = said_of_experts(list(even.experts), lambda: 3 << 30)
    assert lines[0].startswith("4 ranks share the 8 experts of 2 layer(s): a rank has 2 of each")
    assert "one rank computes those of 4 ranks: its peak is 3.00 GiB" in lines[1]
    assert said_of_experts([], None) == []


@pytest.mark.parametrize(("replicas", "holders"), [(1, 4), (2, 2), (4, 4)])
@pytest.mark.parametrize("stage", [3, 1])
def test_replicas_share_experts_only_if_each_has_them_once(stage, replicas, holders):
    """Eight ranks, of which two share a layer."""
    found = simulated(8, 2, stage, replicas=replicas)
    own = LAYERS * ONE * EXPERTS // 2
    dense = LAYERS * WIDTH * EXPERTS
    state = own // (holders if stage == 3 else 1) + dense // (8 // replicas if stage == 3 else 1)
    assert found.nbytes("parameters") == 4 * state
    assert [each.holders for each in found.experts] == [holders]


def test_tensor_ranks_hold_parts_of_experts_that_a_plan_names():
    mesh, at = Mesh(data_shard=2, tensor=2), "layers.*.deepspeed_moe.experts.deepspeed_experts.*"
    found = simulate(
        lambda: Net(2, True, mesh), settings(1), BATCH, mesh=mesh, rank=3,
        loss_fn=lambda y, _: y.square().mean(),
        plan={f"{at}.up": "colwise", f"{at}.down": "rowwise"},
    )  # fmt: skip
    own = LAYERS * ONE * EXPERTS // 2 // 2
    assert found.nbytes("parameters") == 4 * (own + LAYERS * WIDTH * EXPERTS)
    assert [each.numel for each in found.experts] == [own]


@pytest.mark.parametrize(("drops", "replicas"), [(False, 1), (True, 1), (True, 2)])
@on_ranks(4)
def test_a_run_holds_what_its_plan_says(drops, replicas):
    """States to the byte; with a capacity also what travels, and the peak."""
    torch.manual_seed(0)
    batch = torch.randn(TOKENS, WIDTH), None
    real = observe(
        lambda: Net(2, drops), settings(3, parallel={"data_replicate": replicas}), batch,
        loss_fn=lambda y, _: y.square().mean(),
    )  # fmt: skip
    state = [(row.category, row.tier, row.planned, row.measured) for row in real.memory]
    assert all(planned in (None, measured) for *_, planned, measured in state)
    if torch.distributed.get_rank() != 1:
        return
    sent = {(r.group, r.op, r.name): r.sent_nbytes for r in real.traffic if r.name != "layers"}
    torch.distributed.destroy_process_group()
    plan = simulated(4, 2, 3, drops=drops, replicas=replicas)
    for category in ("parameters", "gradients", "master", "optimizer"):
        assert plan.nbytes(category) == real.nbytes(category), category
    planned = {(r.group, r.op, r.name): r.sent_nbytes for r in plan.traffic if r.name != "layers"}
    assert planned == sent
    if drops:
        assert plan.peak_nbytes == pytest.approx(real.peak_nbytes, rel=0.02)
