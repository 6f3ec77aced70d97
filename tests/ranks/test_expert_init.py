"""Experts that ranks share, in models that are built under ``zero.Init``: a rank keeps only its own."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import expert_models as tiny
from support.expert_models import WIDTH, Setting
from support.expert_runs import opened, trained
from torch import nn
from zeroshard_testing import on_ranks

import zeroshard
from zeroshard.core.mesh import Mesh
from zeroshard.errors import UnsupportedError
from zeroshard.parallel import MoE
from zeroshard.zero import GatheredParameters, Init
from zeroshard.zero.param_bucket import BucketedParameter
from zeroshard.zero.sharded_parameter import owner_of

STAGE_3 = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}


def shard_numels(net: nn.Module) -> dict[bool, int]:
    """Elements that this rank keeps, of experts (True) and of the rest, by bucket once each."""
    found = {False: {}, True: {}}
    for name, param in net.named_parameters():
        owner = owner_of(param)
        assert isinstance(owner, BucketedParameter), name
        assert owner.is_sharded, name
        found["deepspeed_experts" in name][owner.bucket] = owner.bucket.shard_S.numel()
    return {kind: sum(buckets.values()) for kind, buckets in found.items()}


@pytest.mark.parametrize("ep_size", [2, 4])
@on_ranks(4)
def test_the_results_are_those_of_one_process(ep_size):
    setting = Setting(residual=True)
    with Init(config=STAGE_3, dtype=torch.float64):
        # In fp64 from the start: the same first values as elsewhere, cast.
        net = tiny.model(setting, ep_size, dtype=torch.float32)
    kept = shard_numels(net)
    one = sum(
        p.numel() for p in tiny.model(setting, 4).blocks[0].moe.deepspeed_moe.experts.parameters()
    )
    # A rank has a quarter of all experts, with some elements of padding.
    assert 2 * one <= kept[True] <= 2.5 * one
    with opened(setting, ep_size, 3, net=net) as engine:
        run = trained(engine, setting)
    expected = tiny.in_one_process(setting, 4)
    assert run.norms == pytest.approx(expected.norms, rel=1e-12)
    for name, param in run.params.items():
        torch.testing.assert_close(param, expected.params[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("names_mesh", [True, False])
@on_ranks(4)
def test_replicas_build_the_experts_that_they_share(names_mesh):
    """Also if only the engine learns of the replicas: it shards the parameters anew."""
    setting, mesh = Setting(), Mesh(data_replicate=2, data_shard=2)
    known = mesh if names_mesh else None
    with Init(config=STAGE_3, dtype=torch.float64, mesh=known):
        net = tiny.model(setting, 2, dtype=torch.float32, mesh=known)
    with opened(setting, 2, 3, net=net, mesh=mesh) as engine:
        run = trained(engine, setting)
    expected = tiny.in_one_process(setting, 4)
    assert run.norms == pytest.approx(expected.norms, rel=1e-12)
    for name, param in run.params.items():
        torch.testing.assert_close(param, expected.params[name], rtol=0, atol=1e-12)


class Large(nn.Module):
    """An expert that counts how many of its kind are alive."""

    alive = most = 0

    def __init__(self) -> None:
        super().__init__()
        Large.alive += 1
        Large.most = max(Large.most, Large.alive)
        self.line = nn.Linear(WIDTH, WIDTH)

    def __del__(self) -> None:
        Large.alive -= 1


@on_ranks(2)
def test_experts_of_other_ranks_are_dropped_one_by_one():
    gc.disable()
    with Init(config=STAGE_3):
        outer = nn.Linear(WIDTH, WIDTH)
        layer = MoE(WIDTH, Large, 8, 2)
    assert Large.most <= 5
    assert Large.alive == 4
    gc.enable()
    del outer, layer


@on_ranks(2)
def test_initializers_reach_experts_inside_the_block():
    """Also in a block inside another one, and after the layer was built."""
    with Init(config=STAGE_3), Init(config=STAGE_3):
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), MoE(WIDTH, nn.Linear(WIDTH, WIDTH), 4, 2))
        for param in net.parameters():
            nn.init.constant_(param, 0.5)
    for name, param in net.named_parameters():
        ranks = 1 if "deepspeed_experts" in name else 2  # that have the same
        assert owner_of(param).context.comm.size == ranks, name
    engine, *_ = zeroshard.initialize(
        model=net, config={**STAGE_3, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    )
    with engine:
        for name, param in engine.iter_full_params():
            assert bool((param == 0.5).all()), name


def stacked(size: int, *, init: bool) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = transformers.MixtralConfig(
        vocab_size=31, hidden_size=16, intermediate_size=12, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(2)
    if not init:
        return transformers.MixtralForCausalLM(sizes)
    with Init(config={**STAGE_3, "parallel": {"expert": size}}):
        return transformers.MixtralForCausalLM(sizes)


@on_ranks(4)
def test_stacked_experts_of_transformers_are_cut():
    plain = dict(stacked(2, init=False).named_parameters())
    net = stacked(2, init=True)
    keys = {
        **STAGE_3,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "parallel": {"expert": 2},
    }
    engine, *_ = zeroshard.initialize(model=net, config=keys)
    with engine:
        cut = next(
            p for n, p in engine.module.named_parameters() if n.endswith("experts.down_proj")
        )
        assert len(cut) == 2
        for name, param in engine.iter_full_params():
            assert torch.equal(param, plain[name]), name


@on_ranks(4)
def test_edits_of_one_rank_do_not_reach_its_experts_alone():
    """Before ``initialize``: rank 0 has no expert of ranks 1 and 3."""
    with Init(config=STAGE_3):
        net = tiny.model(Setting(depth=1), 2, dtype=torch.float32)
    experts = [param for name, param in net.named_parameters() if "deepspeed_experts" in name]
    for rank in range(4):
        with pytest.raises(UnsupportedError, match="of experts that 2 ranks share"):
            GatheredParameters(experts, modifier_rank=rank)
    with GatheredParameters(net.head.weight, modifier_rank=3):
        net.head.weight.data.fill_(dist.get_rank())
    with GatheredParameters([net.head.weight, *experts]):
        assert bool((net.head.weight == 3).all())
        assert all(param.numel() for param in experts)
