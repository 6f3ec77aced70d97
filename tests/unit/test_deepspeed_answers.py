"""Small functions and methods under DeepSpeed's names give what programs read from them."""

from __future__ import annotations

import copy
import json
import logging
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from zeroshard_testing import on_ranks

from zeroshard import deepspeed
from zeroshard.deepspeed import activations, experts, helpers
from zeroshard.errors import ConfigError, UnsupportedError, UsageError
from zeroshard.zero import GatheredParameters

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
}


def opened(stage, **zero):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    keys = {**CONFIG, "zero_optimization": {"stage": stage, **zero}}
    engine, optimizer, *_ = deepspeed.initialize(model=model, config=keys)
    return engine, optimizer


def step(engine, seed):
    generator = torch.Generator().manual_seed(10 * seed + engine.global_rank)
    engine.backward(engine(torch.randn(4, 8, generator=generator)).square().mean())
    engine.step()


# -- the optimizer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [None, "cpu"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_a_state_that_was_taken_from_an_optimizer_can_be_loaded_into_it(stage, where):
    """Training goes on from it as it went on at the time."""
    zero = {} if where is None else {"offload_optimizer": {"device": where}}
    ends = []
    for goes_back in (False, True):
        engine, optimizer = opened(stage, **zero)
        for at in range(2):
            step(engine, at)
        state = copy.deepcopy(optimizer.state_dict())
        values = {name: value.clone() for name, value in engine.iter_full_params()}
        if goes_back:
            for at in range(10, 13):
                step(engine, at)
            params = dict(engine.module.named_parameters())
            with GatheredParameters([*params.values()], modifier_rank=0), torch.no_grad():
                for name, param in params.items() if engine.global_rank == 0 else ():
                    param.copy_(values[name])
            optimizer.load_state_dict(state)
        for at in range(2, 4):
            step(engine, at)
        ends.append([value.clone() for _, value in engine.iter_full_params()])
        engine.destroy()
    assert all(map(torch.equal, *ends))


@on_ranks(1, group=False)
def test_a_group_that_comes_late_ends_the_next_step():
    engine, optimizer = opened(2)
    assert repr(optimizer).startswith(f"{type(optimizer).__name__}(AdamW (")
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(UsageError, match="param group"):
        step(engine, 0)
    engine.destroy()


# -- checkpoints -------------------------------------------------------------------------------------


@on_ranks(1, group=False)
def test_checkpoints_become_weights_of_either_dtype(tmp_path):
    engine, _ = opened(2)
    step(engine, 0)
    engine.save_checkpoint(tmp_path / "saved")
    values = {name: value.clone() for name, value in engine.iter_full_params()}
    engine.destroy()
    convert = deepspeed.utils.zero_to_fp32
    convert.convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "saved", tmp_path / "fp32")
    found = torch.load(tmp_path / "fp32" / "pytorch_model.bin", weights_only=True)
    assert found.keys() == values.keys()
    assert all(torch.equal(found[name], values[name]) for name in values)
    to_dtype = convert.convert_zero_checkpoint_to_state_dict
    to_dtype(tmp_path / "saved", tmp_path / "also")
    again = torch.load(tmp_path / "also" / "pytorch_model.bin", weights_only=True)
    assert all(torch.equal(again[name], values[name]) for name in values)
    with pytest.raises(UnsupportedError, match="pass safe_serialization=True"):
        to_dtype(tmp_path / "saved", tmp_path / "bf16", torch.bfloat16)
    to_dtype(tmp_path / "saved", tmp_path / "bf16", torch.bfloat16, safe_serialization=True)
    narrow = load_file(tmp_path / "bf16" / "model.safetensors")
    assert all(torch.equal(narrow[name], values[name].bfloat16()) for name in values)


def test_files_of_module_states_are_found(tmp_path):
    names = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in (0, 2, 10)]
    for name in names:
        (tmp_path / name).touch()
    find = deepspeed.utils.zero_to_fp32.get_model_state_files
    assert find(str(tmp_path)) == [str(tmp_path / name) for name in names]


def test_a_checkpoint_engine_of_torch_keeps_files_apart(tmp_path):
    from zeroshard.deepspeed.checkpoint_files import CheckpointCommitInfo, TorchCheckpointEngine

    info, engine = CheckpointCommitInfo("a", str(tmp_path), True), TorchCheckpointEngine()
    assert engine.create(info) is None
    engine.save({"x": torch.ones(2)}, str(tmp_path / "x.pt"))
    assert torch.equal(engine.load(str(tmp_path / "x.pt"))["x"], torch.ones(2))
    assert engine.commit(info) is True


# -- collectives -------------------------------------------------------------------------------------


@on_ranks(2)
def test_collectives_of_several_tensors():
    comm, rank = deepspeed.comm, dist.get_rank()
    outs = [torch.zeros(2, 3), torch.zeros(4)]
    own = [torch.full((1, 3), 1.0 + rank), torch.full((2,), 10.0 + rank)]
    work = comm.all_gather_coalesced(outs, own, async_op=True)
    work.wait()
    assert work.is_completed()
    assert torch.equal(outs[0], torch.tensor([[1.0] * 3, [2.0] * 3]))
    assert torch.equal(outs[1], torch.tensor([10.0, 10.0, 11.0, 11.0]))
    summed = torch.full((2,), 1.0 + rank)
    comm.inference_all_reduce(summed)
    assert torch.equal(summed, torch.full((2,), 3.0))
    assert comm.has_all_gather_into_tensor() is True
    assert comm.log_summary(return_dict=True) == {}


# -- experts -----------------------------------------------------------------------------------------


def test_groups_of_an_optimizer_are_made_of_parameters_or_of_groups():
    layer = deepspeed.moe.layer.MoE(4, nn.Linear(4, 4), 2)
    net = nn.Sequential(nn.Linear(4, 4), layer)
    of_experts = {name for name, p in net.named_parameters() if experts.is_moe_param(p)}
    assert len(of_experts) == 4
    dense, expert = experts.configure_moe_param_groups([*net.parameters()])
    assert [experts.is_moe_param_group(group) for group in (dense, expert)] == [False, True]
    assert len(dense["params"]) + len(expert["params"]) == len([*net.parameters()])
    assert experts.configure_moe_param_groups([dense, expert]) == [dense, expert]
    again = experts.configure_moe_param_groups([{"params": [*net.parameters()], "lr": 0.5}])
    assert [group["lr"] for group in again] == [0.5, 0.5]
    for at, param in enumerate(net.parameters()):
        param.grad = None if at == 0 else torch.full_like(param, float(at))
    shared, own = experts.split_params_grads_into_shared_and_expert_params(net.parameters())
    assert len(own) == 4 and len(shared) == len([*net.parameters()]) - 5


# -- numbers and settings ----------------------------------------------------------------------------


def test_norms():
    assert helpers.get_global_norm([3.0, 4.0]) == 5.0
    param = nn.Parameter(torch.zeros(4))
    param.grad = torch.full((4,), 2.0)
    assert float(helpers.clip_grad_norm_([param], 1.0, mpu=None)) == 4.0
    assert param.grad.norm().item() == pytest.approx(1.0, rel=1e-5)
    alone = SimpleNamespace(get_model_parallel_world_size=lambda: 1)
    assert float(helpers.clip_grad_norm_([param], 1.0, mpu=alone)) == pytest.approx(1.0, rel=1e-5)
    two = SimpleNamespace(get_model_parallel_world_size=lambda: 2)
    with pytest.raises(UnsupportedError, match="with 2 model-parallel ranks"):
        helpers.clip_grad_norm_([param], 1.0, mpu=two)


def test_memory_is_logged_only_if_that_is_asked_for(caplog):
    with caplog.at_level(logging.INFO, logger=helpers.logger.name):
        helpers.logger.addHandler(caplog.handler)
        try:
            helpers.see_memory_usage("before")
            assert not caplog.records
            helpers.see_memory_usage("after", force=True)
        finally:
            helpers.logger.removeHandler(caplog.handler)
    assert caplog.messages[-1].startswith("after; ") and "GiB" in caplog.messages[-1]


def test_a_range_of_a_profiler_changes_no_answer():
    @helpers.instrument_w_nvtx
    def doubled(x, *, more=0):
        return 2 * x + more

    assert doubled(3, more=1) == 7 and doubled.__name__ == "doubled"


def test_a_directory_is_made_for_a_file(tmp_path):
    helpers.ensure_directory_exists(str(tmp_path / "a" / "b" / "file.txt"))
    assert (tmp_path / "a" / "b").is_dir() and not (tmp_path / "a" / "b" / "file.txt").exists()


def test_elastic_sections():
    from zeroshard.deepspeed import config_model

    section = {"enabled": True, "model_parallel_size": 2}
    assert config_model.elasticity_enabled({"elasticity": section})
    assert not config_model.elasticity_enabled({})
    with pytest.raises(
        ConfigError, match="model_parallel_size: 2: batch sizes are computed for data"
    ):
        config_model.compute_elastic_config({"elasticity": section})


def test_partitioned_activations_alone_configure_nothing(monkeypatch):
    monkeypatch.setattr(activations, "_settings", {})
    activations.partition_activations_in_checkpoint(True)
    assert activations._settings["partition"] is True
    assert not activations.is_configured()
    activations.set_num_layers(4)
    activations.reset()
    activations.configure(None, partition_activations=False)
    assert activations.is_configured()


def test_timers_are_written_in_one_line(caplog):
    timers = deepspeed.utils.timer.SynchronizedWallClockTimer()
    for name in ("a", "b"):
        timers(name).start()
        timers(name).stop(record=True)
    assert timers.get_timers().keys() == {"a", "b"}
    timers.log(["a", "b", "c"], ranks=[-1])
    (said,) = caplog.messages
    assert "time (ms) | a: " in said and " | b: " in said and "c: " not in said
    speed = deepspeed.utils.timer.ThroughputTimer(None, 1)
    speed.update_epoch_count()
    assert speed.epoch_count == 1


def test_the_cpu_answers_as_an_accelerator(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    device = deepspeed.accelerator.get_accelerator.__wrapped__()
    tensor = torch.ones(2)
    assert device.pin_memory(tensor) is tensor and device.is_pinned(tensor)
    assert (device.random(), device.amp()) == (torch.random, torch.amp)
    assert device.lazy_call(lambda: 5) == 5
    assert device.get_compile_backend() in device.get_supported_compile_backends()
    assert device.visible_devices_envs() == ["CUDA_VISIBLE_DEVICES"]
    assert device.default_generator(0) is torch.default_generator
    assert device.initial_seed() == torch.initial_seed()
    assert device.set_device(0) is None
    assert 0 < device.memory_allocated() <= device.total_memory()
    assert device.memory_stats()["allocated_bytes.all.current"] > 0
    with device.device(0):
        assert device.op_builder_dir() == "deepspeed.ops.op_builder"


def test_a_configuration_that_a_program_reads():
    found = deepspeed.DeepSpeedConfig({**CONFIG, "pipeline": {"activation_checkpoint_interval": 2}})
    assert found.train_micro_batch_size_per_gpu == 4
    assert found.pipeline["activation_checkpoint_interval"] == 2
    assert json.dumps(found._param_dict)
