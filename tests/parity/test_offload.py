"""Does it change any bit where state rests: on the device, in host memory, on disk?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compare import CASES, trained

from zeroshard import Engine
from zeroshard.core import tiers
from zeroshard.errors import UsageError
from zeroshard.native import adam
from zeroshard.testing import on_ranks
from zeroshard.testing.parity import assert_bit_equal
from zeroshard.zero import (
    GatheredParameters,
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_optimizer_state,
)

CHUNK_NUMEL = 192
"""Small enough that the parameters of these models are cut on disk."""


def stores(path: Path, stage: int) -> dict[str, dict]:
    """Every place where something of this stage can rest, as DeepSpeed's keys say it."""
    disk = {"device": "nvme", "nvme_path": str(path)}
    found = {
        "optimizer in host memory": {"offload_optimizer": {"device": "cpu"}},
        "half of it": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
        "optimizer on disk": {"offload_optimizer": disk},
        "a third in each": {"offload_optimizer": {**disk, "ratio": 0.67, "max_in_cpu": 700}},
    }
    if stage == 3:
        found |= {
            "parameters in host memory": {"offload_param": {"device": "cpu"}},
            "parameters on disk": {"offload_param": disk},
            "some parameters on disk": {"offload_param": {**disk, "max_in_cpu": 1500}},
            "all on disk": {"offload_optimizer": disk, "offload_param": disk},
            "all in host memory": {
                "offload_optimizer": {"device": "cpu"},
                "offload_param": {"device": "cpu"},
            },
        }
    return found


def check_stores(
    path: Path, name: str, precision: str, accumulation: int, *, stages: tuple[int, ...], world: int
) -> None:
    tiers.CHUNK_NUMEL = CHUNK_NUMEL
    for stage in stages:
        plain = trained(name, precision, accumulation, stage=stage, world=world)
        for store, keys in stores(path, stage).items():
            config = {"zero_optimization": keys}
            run = trained(name, precision, accumulation, stage=stage, world=world, config=config)
            try:
                assert_bit_equal(run, plain)
            except AssertionError as error:
                raise AssertionError(f"stage {stage}, {store}: {error}") from error


@pytest.mark.parametrize("name", CASES)
@on_ranks(2)
def test_no_store_changes_a_bit_on_two_ranks(name, tmp_path):
    check_stores(tmp_path, name, "bf16", 1, stages=(3,), world=2)


@pytest.mark.parametrize(("precision", "accumulation"), [("fp32", 1), ("bf16", 3), ("fp16", 1)])
@pytest.mark.parametrize("name", ["transformer", "tied", "lora"])
@on_ranks(2)
def test_no_store_changes_a_bit_at_any_stage_and_precision(name, precision, accumulation, tmp_path):
    check_stores(tmp_path, name, precision, accumulation, stages=(1, 2, 3), world=2)


@pytest.mark.parametrize("name", ["transformer", "experts"])
@on_ranks(3)
def test_no_store_changes_a_bit_on_three_ranks(name, tmp_path):
    check_stores(tmp_path, name, "bf16", 1, stages=(1, 3), world=3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@on_ranks(1)
def test_no_store_changes_a_bit_on_one_rank(precision, tmp_path):
    check_stores(tmp_path, "transformer", precision, 1, stages=(1, 2, 3), world=1)


def bits_of_training(keys: dict, *, steps: int = 6) -> dict[str, torch.Tensor]:
    """Parameters, masters and moments after a few steps of the fused AdamW that config names."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(96, 200), torch.nn.Tanh(), torch.nn.Linear(200, 7))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "units": ["Linear"],
        "bf16": {"enabled": True},
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, **keys},
    }
    with Engine(model, config=config) as engine:
        for step in range(steps):
            generator = torch.Generator().manual_seed(10 * step + engine.global_rank)
            x = torch.randn(4, 96, generator=generator).bfloat16()
            engine.backward(engine(x).float().square().mean())
            engine.step()
            if (
                step == 3
            ):  # an edit of a sharded parameter reaches parameter and master wherever they are
                with GatheredParameters(model[0].weight, modifier_rank=0):
                    if engine.global_rank == 0:
                        model[0].weight.data[3].mul_(2)
        found = {name: full.clone() for name, full in engine.iter_full_params()}
        for name, param in model.named_parameters():
            found[f"{name} master"] = safe_get_full_fp32_param(param)
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"{name} {key}"] = safe_get_full_optimizer_state(param, key)
        return found


@on_ranks(2)
def test_the_compiled_update_gives_the_same_bits_in_every_store(tmp_path):
    adam.prepare()
    adam.wait()  # else it would step in at some later step
    tiers.CHUNK_NUMEL = 4096
    plain = bits_of_training({})
    for store, keys in stores(tmp_path, 3).items():
        found = bits_of_training(keys)
        assert found.keys() == plain.keys()
        for name, value in plain.items():
            assert torch.equal(found[name], value), f"{store}: {name}"


@on_ranks(2)
def test_values_on_disk_are_read_and_written_like_any_others(tmp_path):
    tiers.CHUNK_NUMEL = 4096
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    model = torch.nn.Linear(96, 200)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_optimizer": disk, "offload_param": disk},
    }
    with Engine(model, config=config) as engine:
        engine.backward(engine(torch.ones(4, 96).bfloat16()).float().square().mean())
        engine.step()
        value = torch.arange(96 * 200).view(200, 96).float()
        safe_set_full_fp32_param(model.weight, value)
        safe_set_full_optimizer_state(model.weight, value / 2, "exp_avg")
        local = safe_get_local_fp32_param(model.weight)
        begin = engine.global_rank * engine.runtime.units[0].layout.shard_numel
        assert torch.equal(local, value.view(-1)[begin : begin + len(local)])
        assert torch.equal(safe_get_full_fp32_param(model.weight), value)
        assert torch.equal(safe_get_full_optimizer_state(model.weight, "exp_avg"), value / 2)
        assert torch.equal(dict(engine.iter_full_params())["weight"], value.bfloat16())
        safe_set_local_optimizer_state(model.weight, torch.zeros_like(local), "exp_avg")
        assert not safe_get_full_optimizer_state(model.weight, "exp_avg").any()
        with pytest.raises(UsageError, match="state on disk"):
            engine.optimizer.state_dict()
