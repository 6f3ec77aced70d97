"""DTensor parameters on a mesh: plain PyTorch's numbers at every stage, and no silent disagreement."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.tensor_networks import (
    CLIP,
    cut,
    loss_of,
    network,
    plain_training,
    samples,
    whole,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from zeroshard_testing import on_ranks

import zeroshard
from zeroshard.core.mesh import Mesh
from zeroshard.errors import ConfigError, RankDivergence, UnsupportedError, UsageError
from zeroshard.zero import (
    GatheredParameters,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
)

STEPS = 4


def engine_on(model, stage: int, tensor: int, **keys):
    size = dist.get_world_size() // tensor
    zero = {"stage": stage, **keys.pop("zero", {})}
    config = {
        "train_micro_batch_size_per_gpu": 12 // size,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 1e-2}},
        "gradient_clipping": CLIP,
        "unit_min_numel": 1,
        "zero_optimization": zero,
        **keys,
    }
    return zeroshard.Engine(model, config=config, mesh=Mesh(data_shard=size, tensor=tensor))


def train(engine, steps: int = STEPS) -> list[float]:
    norms = []
    for step in range(steps):
        words = samples(step).chunk(engine.dp_size)[engine.dp_rank]
        engine.backward(loss_of(engine(words), words))
        engine.step()
        norms.append(float(engine.last_step.grad_norm))
    return norms


def global_params(engine) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.iter_full_params()}


def error_of(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert actual.keys() == expected.keys()
    return max(
        float((actual[n] - expected[n]).abs().max() / expected[n].abs().max()) for n in expected
    )


def check_parity(stage: int, tensor: int, inner: int, *, sequence: bool = False, **options) -> None:
    expected, norms = plain_training(inner, torch.float64, STEPS)
    keys = options.pop("keys", {})
    model = cut(network(inner, torch.float64, **options), tensor, sequence=sequence)
    with engine_on(model, stage, tensor, **keys) as engine:
        found = train(engine)
        assert error_of(global_params(engine), expected) <= 1e-12
    assert found == pytest.approx(norms, rel=1e-14)


@pytest.mark.parametrize("inner", [32, 33], ids=["even", "uneven"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(4)
def test_four_steps_are_those_of_one_plain_process(stage, inner):
    check_parity(stage, 2, inner)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(4)
def test_gradients_that_are_partial_sums_are_added(stage):
    check_parity(stage, 2, 32, sequence=True)


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(4)
def test_checkpointed_blocks_give_the_same_numbers(stage):
    check_parity(stage, 2, 32, checkpointed=True)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(3)
def test_a_tensor_group_of_all_ranks(stage):
    check_parity(stage, 3, 32)  # 11, 11 and 10 columns


@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(4)
def test_offload_changes_no_bit(stage, device, tmp_path):
    where = (
        {"device": device, "nvme_path": str(tmp_path)} if device == "nvme" else {"device": device}
    )
    zero = {"offload_optimizer": where} | ({"offload_param": where} if stage == 3 else {})
    kept = []
    for keys in ({}, {"zero": zero}):
        with engine_on(cut(network(32, torch.float32), 2), stage, 2, **keys) as engine:
            train(engine)
            kept.append(global_params(engine))
    assert all(torch.equal(kept[0][name], kept[1][name]) for name in kept[0])


@pytest.mark.parametrize("mode", ["bf16", "fp16"])
@on_ranks(4)
def test_stages_agree_in_16_bit(mode):
    kept = []
    for stage in (1, 2, 3):
        model = cut(network(32, torch.float32), 2)
        with engine_on(model, stage, 2, **{mode: {"enabled": True}}) as engine:
            train(engine)
            kept.append(global_params(engine))
    for other in kept[1:]:
        assert all(torch.equal(kept[0][name], other[name]) for name in other)


@on_ranks(4)
def test_an_overflow_on_one_rank_skips_the_step_on_all():
    model = cut(network(32, torch.float32), 2)
    with engine_on(model, 2, 2, fp16={"enabled": True, "initial_scale_power": 8}) as engine:
        before = global_params(engine)
        words = samples(0).chunk(2)[engine.dp_rank]
        loss = loss_of(engine(words), words)
        engine.backward(loss * (float("inf") if engine.dp_rank == 1 else 1.0))
        engine.step()
        assert engine.skipped_steps == 1
        assert all(
            torch.equal(before[name], value) for name, value in global_params(engine).items()
        )


# ---------------------------------------------------------------------- reading and writing


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(4)
def test_full_means_global(stage):
    reference = network(33, torch.float64)
    expected = {name: param.detach() for name, param in reference.named_parameters()}
    words = samples(0)
    loss_of(reference(words), words).backward()
    model = cut(network(33, torch.float64), 2)
    with engine_on(model, stage, 2, gradient_clipping=0.0) as engine:
        part = words.chunk(2)[engine.dp_rank]
        engine.backward(loss_of(engine(part), part))
        for (name, param), plain in zip(model.named_parameters(), reference.parameters()):
            assert torch.equal(safe_get_full_fp32_param(param), expected[name])
            torch.testing.assert_close(safe_get_full_grad(param), plain.grad)
        engine.step()
        for param in model.parameters():
            assert safe_get_full_optimizer_state(param, "exp_avg").shape == param.shape
        for name, param in model.named_parameters():
            safe_set_full_fp32_param(param, expected[name] + 1)
        assert error_of(global_params(engine), {n: v + 1 for n, v in expected.items()}) == 0.0


@on_ranks(4)
def test_every_way_of_reading_a_sharded_dtensor_gives_its_values():
    model = cut(network(32, torch.float64), 2)
    expected = network(32, torch.float64).blocks[1].up.weight.detach()
    with engine_on(model, 3, 2):
        weight = model.blocks[1].up.weight
        assert isinstance(weight, DTensor) and weight.shape == expected.shape
        assert torch.equal(weight.full_tensor(), expected)
        assert torch.equal(whole(weight.sum()), expected.sum())
        assert torch.equal(whole(model.state_dict()["blocks.1.up.weight"]), expected)
        part = weight.to_local()
        assert torch.equal(part, expected.chunk(2)[dist.get_rank() % 2])
        with GatheredParameters(weight):
            assert torch.equal(weight.full_tensor(), expected)
        assert "ShardedParameter" in repr(weight)


@on_ranks(4)
def test_copies_start_from_the_values_of_the_first_rank_of_the_group():
    model = network(32, torch.float64)
    with torch.no_grad():
        model.blocks[0].norm.weight.fill_(1.0 + dist.get_rank())
    with engine_on(cut(model, 2), 2, 2) as engine:
        assert torch.equal(global_params(engine)["blocks.0.norm.weight"], torch.ones(16).double())


# ---------------------------------------------------------------------- disagreement


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(4)
def test_another_order_of_modules_in_a_tensor_group_is_an_error(stage):
    model = cut(network(32, torch.float64), 2)
    with engine_on(model, stage, 2) as engine:
        model.blocks = torch.nn.ModuleList(
            [model.blocks[at] for at in ((0, 2, 1) if dist.get_rank() % 2 else (0, 1, 2))]
        )
        words = samples(0).chunk(2)[engine.dp_rank]
        engine.backward(loss_of(engine(words), words))
        with pytest.raises(
            RankDivergence, match=r"ranks 0,1, which are one tensor group, ran modules"
        ):
            engine.step()


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(4)
def test_other_samples_in_a_tensor_group_are_an_error(stage):
    with engine_on(cut(network(32, torch.float64), 2), stage, 2) as engine:
        words = samples(0).chunk(4)[dist.get_rank()]
        engine.backward(loss_of(engine(words), words))
        with pytest.raises(UsageError, match=r"got different gradients of '.*' \(norms"):
            engine.step()


@on_ranks(4)
def test_other_samples_in_a_tensor_group_are_found_with_16_bit_gradients_too():
    model = cut(network(32, torch.float32), 2)
    with engine_on(model, 2, 2, bf16={"enabled": True}) as engine:
        words = samples(0).chunk(4)[dist.get_rank()]
        engine.backward(loss_of(engine(words), words))
        with pytest.raises(UsageError, match="different gradients"):
            engine.step()


@on_ranks(2)
def test_one_rank_cannot_edit_what_it_does_not_hold():
    with engine_on(cut(network(32, torch.float64), 2), 3, 2) as engine:
        with pytest.raises(UnsupportedError, match="safe_set_full_fp32_param"):
            GatheredParameters(list(engine.module.parameters()), modifier_rank=0)


@on_ranks(2)
def test_parts_of_other_sizes_than_torch_would_cut_are_refused():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    rows = 8 if dist.get_rank() == 0 else 16  # torch.chunk gives each rank 12 of 24
    head = torch.nn.Linear(16, 24, bias=False)
    part = DTensor.from_local(
        torch.ones(rows, 16), mesh, [Shard(0)], run_check=False, shape=(24, 16), stride=(16, 1)
    )
    head.weight = torch.nn.Parameter(part)
    with pytest.raises(
        UnsupportedError, match=r"'weight' is a DTensor of shape \(24, 16\) of which"
    ):
        zeroshard.Engine(head, config={"train_micro_batch_size_per_gpu": 1}, mesh=Mesh(tensor=2))


@on_ranks(2)
def test_a_model_built_under_zero_init_is_refused():
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    model = cut(network(32, torch.float32), 2)
    with zeroshard.zero.Init(config=config):
        model.head = torch.nn.Linear(16, 24, bias=False)
    with pytest.raises(
        UnsupportedError, match=r"over all ranks.*tensor and pipeline ranks have other parts.*meta"
    ):
        engine_on(model, 3, 2)


@on_ranks(4)
def test_a_model_that_does_not_fit_the_mesh_is_refused():
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_shard", "tensor"))
    model = network(32, torch.float64)
    with pytest.raises(ConfigError, match="= 3 ranks, but 4 were started"):
        zeroshard.Engine(model, config={"train_batch_size": 12}, mesh=Mesh(tensor=3))

    def refused(placement, mesh, kind, match, sizes=Mesh(data_shard=2, tensor=2)):
        head = torch.nn.Linear(16, 24, bias=False).double()
        made = distribute_tensor if not isinstance(placement, Partial) else DTensor.from_local
        head.weight = torch.nn.Parameter(made(head.weight.detach(), mesh, [placement]))
        with pytest.raises(kind, match=match):
            zeroshard.Engine(head, config={"train_micro_batch_size_per_gpu": 1}, mesh=sizes)

    refused(Shard(0), both["data_shard"], UsageError, r"which train on different data")
    refused(Shard(0), both["tensor"], ConfigError, "both give the same size", Mesh(data_shard=4))
    refused(Partial(), both["tensor"], UnsupportedError, r"placement P\(sum\)")
