"""What is wrong with experts that ranks share is the same error on every rank, before any exchange."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import expert_models as tiny
from support.covering import each_value
from support.expert_models import Setting
from support.expert_runs import opened, trained
from torch import nn
from zeroshard_testing import on_ranks

import zeroshard
from zeroshard.core.mesh import Mesh
from zeroshard.errors import ConfigError, UnsupportedError, UsageError
from zeroshard.experts.marks import mark
from zeroshard.parallel import MoE, pipeline
from zeroshard.zero import (
    GatheredParameters,
    safe_get_full_fp32_param,
    safe_set_full_fp32_param,
)

ONE = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def refusal(model: nn.Module, mesh: Mesh | None = None, **keys: Any) -> str:
    """The error of ``initialize``."""
    with pytest.raises((UsageError, ConfigError, UnsupportedError)) as caught:
        zeroshard.initialize(model=model, config={**ONE, **keys}, mesh=mesh)
    return str(caught.value)


def marked(name: str | None) -> nn.Module:
    layer = nn.Linear(4, 4)
    for param in layer.parameters():
        mark(param, 2)
        if name is not None:
            param.group_name = name
    return layer


class Twice(nn.Module):
    """Two stages that use one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = First()
        self.last = First(self.first.moe)


class First(nn.Module):
    def __init__(self, moe: MoE | None = None) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.moe = MoE(4, nn.Linear(4, 4), 2, 2) if moe is None else moe

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.moe(self.mix(x))[0]


class Own(MoE):
    """A layer of a program's own, whose constructor does not call that of ``MoE``."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.ep_size, self.experts = 2, nn.ModuleList([nn.Linear(4, 4)])


@on_ranks(2)
def test_what_does_not_fit_is_refused_on_every_rank():
    assert "'0' is a Own, which is derived from MoE" in refusal(nn.Sequential(Own()))
    layer = MoE(4, nn.Linear(4, 4), 4, 2)
    with pytest.raises(UsageError, match="ran before its ranks were connected"):
        layer(torch.zeros(3, 4))
    with pytest.raises(UsageError, match="cannot be divided into groups of 4"):
        MoE(4, nn.Linear(4, 4), 4, 4)
    one = nn.Sequential(MoE(4, nn.Linear(4, 4), 4, 1))
    assert "has ep_size 1, but the mesh has 2" in refusal(one, parallel={"expert": 2})
    assert "is in no MoE layer" in refusal(marked(None))
    assert "'ep_size_N'" in refusal(marked("mine"))
    wrong = refusal(one, parallel={"expert": 4})
    assert "expert 4 (parallel.expert)" in wrong
    assert "use a size that divides it" in wrong
    layers = refusal(one, expert_parallel={"autoep_size": 2, "load_balance_coeff": 0.1})
    assert "routers and experts are those of the model" in layers


@on_ranks(4)
def test_experts_in_two_stages_or_over_replicas_are_refused():
    replicas = Mesh(data_replicate=2, data_shard=2)
    wide = refusal(nn.Sequential(MoE(4, nn.Linear(4, 4), 4, 4)), replicas)
    assert "ep_size 4: the mesh is data_replicate 2 x data_shard 2" in wide
    hpz = {"stage": 3, "zero_hpz_partition_size": 2}
    both = refusal(nn.Sequential(First()), replicas, zero_optimization=hpz)
    assert "zero_hpz_partition_size: 2, with data_replicate 2: replicas have two hops" in both
    stages = pipeline(Twice(), split=["last"], order=["first", "last"], loss_fn=nn.MSELoss())
    assert "in several pipeline stages" in refusal(
        stages, Mesh(pipeline=2, data_shard=2), gradient_accumulation_steps=2
    )


@on_ranks(2)
def test_experts_that_were_loaded_or_trained_keep_their_numbers():
    """Copies of one expert may become those of another place; after that they may not."""

    def moved(change: Callable[[MoE], object]) -> None:
        layer = MoE(4, nn.Linear(4, 4), 4, 2)
        change(layer)
        layer.move_to(1 - layer.place)

    moved(lambda layer: None)
    with pytest.raises(UsageError, match="made, loaded or trained part"):
        moved(lambda layer: layer.load_state_dict(layer.state_dict()))
    with opened(Setting(depth=1), 2, 1) as engine:
        layer = engine.module.blocks[0].moe
    layer.makes_experts = False
    with pytest.raises(UsageError, match="made, loaded or trained part"):
        layer.move_to(1 - layer.place)


@on_ranks(2)
def test_a_copy_of_a_layer_has_its_connection_until_the_engine_is_closed():
    with opened(Setting(depth=1), 2, 1) as engine:
        twin = copy.deepcopy(engine.module.blocks[0].moe.deepspeed_moe._link)
        assert twin.group is engine.module.blocks[0].moe.deepspeed_moe.ep_group
        net = engine.module
    with pytest.raises(UsageError, match="ran before its ranks were connected"):
        net(tiny.batches(Setting(), 1)[0, 0, 0])


@on_ranks(2)
def test_deepspeeds_groups_know_the_experts():
    from zeroshard import deepspeed
    from zeroshard.deepspeed import groups

    net = nn.Sequential(nn.Linear(4, 4), First())
    engine, *_ = deepspeed.initialize(model=net, config={**ONE, "zero_optimization": {"stage": 1}})
    assert (engine.has_moe_layers, engine.num_experts) == (True, [2])
    assert groups._get_expert_parallel_world_size("ep_size_2") == 2
    assert groups._get_expert_parallel_rank("ep_size_2") == engine.global_rank
    assert groups._get_expert_parallel_group("ep_size_2").size() == 2
    assert groups._get_expert_data_parallel_world_size("ep_size_2") == 1
    assert groups._get_expert_data_parallel_rank("ep_size_2") == 0
    split = deepspeed_groups(net)
    assert [group.get("moe", False) for group in split] == [False, True]
    engine.destroy()


def deepspeed_groups(net: nn.Module) -> list[dict[str, Any]]:
    from zeroshard.deepspeed import experts

    whole = {"params": list(net.parameters()), "name": "all", "lr": 0.5}
    found = experts.split_params_into_different_moe_groups_for_optimizer(whole)
    assert found[1]["name"] == "ep_size_2"
    assert found[1]["lr"] == 0.5
    assert all(map(experts.is_moe_param, found[1]["params"]))
    assert len(found[1]["params"]) == 2
    assert not any(map(experts.is_moe_param, found[0]["params"]))
    return found


@pytest.mark.parametrize(
    ("stage", "ep_size", "replicas"),
    each_value([(s, e, r) for s in range(4) for e in (2, 4) for r in (1, 2) if e * r < 8]),
)
@on_ranks(4)
def test_experts_are_edited_by_the_ranks_that_have_them(stage, ep_size, replicas):
    """One rank cannot edit those of all. What the refusal advises reaches masters."""
    mesh = Mesh(data_replicate=replicas, data_shard=4 // replicas)
    with opened(Setting(depth=1), ep_size, stage, mesh=mesh) as engine:
        named = dict(engine.module.named_parameters())
        experts = [name for name in named if "deepspeed_experts" in name]
        for rank in range(4):
            with pytest.raises(UnsupportedError, match=f"experts that {ep_size} ranks share"):
                GatheredParameters(named.values(), modifier_rank=rank)
        with GatheredParameters(named["head.weight"], modifier_rank=3):
            named["head.weight"].data.fill_(dist.get_rank())
        for name in experts:
            shape = safe_get_full_fp32_param(named[name]).shape
            safe_set_full_fp32_param(named[name], torch.full(shape, float(number_of(name) + 1)))
        trained(engine, Setting(depth=1), steps=1)
        found = {name: param.clone() for name, param in engine.iter_full_params()}
    assert experts
    for name in experts:
        torch.testing.assert_close(
            found[name], torch.full_like(found[name], number_of(name) + 1), rtol=0, atol=2e-2
        )
    torch.testing.assert_close(
        found["head.weight"], torch.full_like(found["head.weight"], 3), rtol=0, atol=2e-2
    )


def number_of(name: str) -> int:
    """The number of an expert in its layer."""
    return int(name.partition("deepspeed_experts.")[2].partition(".")[0])
