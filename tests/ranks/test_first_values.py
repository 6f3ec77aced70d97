"""A model on the meta device starts with the same values on every mesh."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support import pipeline_models
from support.tensor_models import PLANS, tiny_gpt
from torch import nn
from zeroshard_testing import on_ranks

from zeroshard import Engine, initialize, zero
from zeroshard.core.mesh import Mesh
from zeroshard.errors import ConfigError, UnsupportedError
from zeroshard.parallel import pipeline
from zeroshard.parallel.initial_values import draw_values

MESHES = {
    "data 4": Mesh(data_shard=4),
    "tensor 2 x data 2": Mesh(data_shard=2, tensor=2),
    "tensor 4": Mesh(tensor=4),
    "replicate 2 x shard 2": Mesh(data_replicate=2, data_shard=2),
}


def config(stage: int, **keys) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "unit_min_numel": 1,
        "zero_optimization": {"stage": stage},
        **keys,
    }


def start_of(engine: Engine) -> dict[str, torch.Tensor]:
    with engine:
        return {name: values.clone() for name, values in engine.iter_full_params()}


def on_meta(make) -> nn.Module:
    with torch.device("meta"):
        return make()


def check_equal(found: dict[str, torch.Tensor], expected: nn.Module, *, some: bool = False) -> None:
    wanted = dict(expected.named_parameters())
    assert found.keys() <= wanted.keys() if some else found.keys() == wanted.keys()
    for name, values in found.items():
        assert torch.equal(values, wanted[name]), name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(4)
def test_every_layout_starts_equal(stage, tied):
    expected = on_meta(lambda: tiny_gpt(tied=tied))
    draw_values(expected, 11)
    for mesh in MESHES.values():
        model = on_meta(lambda: tiny_gpt(tied=tied))
        torch.manual_seed(11 if dist.get_rank() == 0 or mesh.tensor > 1 else 12)
        state = torch.get_rng_state()
        plan = PLANS["vocabulary"] if mesh.tensor > 1 else None
        engine, *_ = initialize(model=model, config=config(stage), mesh=mesh, plan=plan)
        assert torch.equal(torch.get_rng_state(), state)
        check_equal(start_of(engine), expected)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(4)
def test_a_pipeline_starts_as_one_process(stage):
    expected = on_meta(lambda: pipeline_models.Decoder().double())
    draw_values(expected, 11)
    cut = pipeline(
        on_meta(lambda: pipeline_models.Decoder().double()),
        split=["layers.3"],
        order=pipeline_models.ORDER,
        loss_fn=pipeline_models.loss_fn,
    )
    torch.manual_seed(11 + dist.get_rank())
    keys = {"parallel": {"pipeline": 2}, "gradient_accumulation_steps": 2}
    engine = Engine(cut, config=config(stage, **keys), optimizer=pipeline_models.adamw)
    found = start_of(engine)
    names = [None] * 4
    dist.all_gather_object(names, sorted(found))
    assert {*names[0], *names[3]} == dict(expected.named_parameters()).keys()
    check_equal(found, expected, some=True)


class HeadFirst(nn.Module):
    """The module that is drawn last in the model's order belongs to the first unit."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6)
        self.head.weight = self.embed.weight


@on_ranks(1)
def test_a_shared_parameter_has_the_values_of_its_first_module():
    expected = on_meta(HeadFirst)
    draw_values(expected, 3)
    for units in (["head"], ["embed", "head"]):
        torch.manual_seed(3)
        engine = Engine(on_meta(HeadFirst), config=config(1, units=units))
        check_equal(start_of(engine), expected)


# ---------------------------------------------------------------------- zero.Init


@on_ranks(4)
def test_a_model_built_under_zero_init_can_have_replicas():
    asked = config(3, parallel={"data_replicate": 2})
    for named in ({"config": asked}, {"config": config(3), "mesh": Mesh(1, 2, 2)}):
        torch.manual_seed(5)
        with zero.Init(**named):
            model = tiny_gpt()
        engine = Engine(model, config=asked)
        assert engine.mesh.text == "data_replicate 2 x data_shard 2"
        check_equal(start_of(engine), tiny_gpt())


class Mpu:
    """Two model-parallel ranks."""

    def get_model_parallel_world_size(self) -> int:
        return 2

    def get_data_parallel_world_size(self) -> int:
        return 1


@on_ranks(2)
def test_zero_init_takes_ranks_with_other_parameters_and_refuses_to_cut():
    for named in (
        {"config": config(3), "mpu": Mpu()},
        {"config": config(3, parallel={"tensor": 2})},
        {"config": config(3), "mesh": Mesh(pipeline=2)},
    ):
        torch.manual_seed(dist.get_rank())
        with zero.Init(**named):
            layer = nn.Linear(8, 4 + dist.get_rank())
        torch.manual_seed(dist.get_rank())
        expected = nn.Linear(8, 4 + dist.get_rank())
        with zero.GatheredParameters(layer.weight):
            assert torch.equal(layer.weight, expected.weight)
    asked = config(3, tensor_parallel={"autotp_size": 2})
    with pytest.raises(
        UnsupportedError, match=r"\(tensor: tensor_parallel.autotp_size\).*on the meta"
    ):
        zero.Init(config=asked)
    with zero.Init(config=config(3, parallel={"tensor": 2})):
        whole = tiny_gpt()
    with pytest.raises(UnsupportedError, match=r"a plan cuts whole layers"):
        initialize(model=whole, config=config(3, parallel={"tensor": 2}), plan="auto")
    with pytest.raises(ConfigError, match="both give the same size"):
        zero.Init(config=config(3, parallel={"tensor": 1}), mpu=Mpu())
