"""Attributes and methods of engine, optimizer and parameters that programs written for DeepSpeed use."""

from __future__ import annotations

import argparse
import copy
import inspect
import io
import logging
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from zeroshard_testing import on_ranks

from zeroshard import deepspeed
from zeroshard.deepspeed import api_table, logs
from zeroshard.engine import initialize
from zeroshard.errors import ConfigError, ShardedAccess, UnsupportedError, UsageError


def config(stage: int = 3, **keys: object) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
        **keys,
    }


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 1))


def batch(number: int, rank: int) -> torch.Tensor:
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * number + rank))


def loss_of(engine: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (engine(x).float() - x.sum(1, keepdim=True)).square().mean()


def train_step(engine, number: int = 0) -> torch.Tensor:
    loss = loss_of(engine, batch(number, engine.global_rank))
    engine.backward(loss)
    engine.step()
    return loss


def values(engine) -> torch.Tensor:
    return torch.cat([full.flatten().clone() for _, full in engine.iter_full_params()])


# ---------------------------------------------------------------------- initialize


@pytest.mark.smoke
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_every_member_of_the_table_is_there(stage):
    schedule = {"type": "WarmupLR", "params": {}}
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=model(), config=config(stage, scheduler=schedule)
    )
    train_step(engine)
    owners = {"engine": engine, "optimizer": optimizer, "scheduler": scheduler}
    if stage == 3:
        owners["parameter"] = next(engine.parameters())
    for row in api_table.MEMBERS:
        owner, name = row.path.split(".")
        if row.verdict in ("works", "accepted") and owner in owners:
            getattr(owners[owner], name)
    assert isinstance(engine, deepspeed.DeepSpeedEngine) and isinstance(engine, nn.Module)
    assert isinstance(optimizer, deepspeed.DeepSpeedOptimizer)
    assert isinstance(optimizer, torch.optim.Optimizer)
    engine.destroy()


@on_ranks(2)
def test_members_that_are_refused_say_why():
    engine, optimizer, _, _ = deepspeed.initialize(model=model(), config=config())
    for row in api_table.MEMBERS:
        owner, name = row.path.split(".")
        if row.verdict in ("refused", "later") and name != "set_data_post_process_func":
            with pytest.raises(AttributeError, match=rf"{owner}\.{name} is") as raised:
                getattr({"engine": engine, "optimizer": optimizer}[owner], name)
            assert row.why in str(raised.value)
    with pytest.raises(UnsupportedError, match="collate_fn"):
        engine.set_data_post_process_func(print)
    with pytest.raises(AttributeError, match="'Sequential' object has no attribute 'nonsense'"):
        engine.nonsense
    engine.destroy()


@on_ranks(1)
def test_the_configuration_may_come_by_three_ways_but_by_one_at_once():
    args = argparse.Namespace(deepspeed_config=config(), local_rank=-1)
    for keywords in ({"config": config()}, {"config_params": config()}, {"args": args}):
        engine, *_ = deepspeed.initialize(model=model(), **keywords)
        engine.destroy()
    assert args.local_rank == 0
    with pytest.raises(UsageError, match="given 2 times"):
        deepspeed.initialize(args, model=model(), config=config())


@on_ranks(1)
def test_the_engine_s_config_is_the_dict_and_nobody_writes_into_it():
    given = config(
        2,
        steps_per_print=float("inf"),
        train_batch_size="auto",
        gradient_clipping="auto",
        fp16={"enabled": False},
        bf16={"enabled": False},
        aio={"thread_count": 1},
        zero_allow_untested_optimizer=True,
    )
    given["zero_optimization"] |= {
        "reduce_bucket_size": 5e8,
        "offload_optimizer": {"device": "none", "nvme_path": None},
        "offload_param": {"device": "none", "nvme_path": None},
    }
    before = copy.deepcopy(given)
    engine, *_ = deepspeed.initialize(model=model(), config_params=given)
    assert given == before
    assert engine.config == given
    assert engine.config["zero_optimization"]["stage"] == 2
    assert engine.zero_reduce_bucket_size() == 500_000_000
    engine._is_accelerate_prepared = True
    assert engine._is_accelerate_prepared
    engine.destroy()


@on_ranks(1)
def test_signatures_that_libraries_inspect():
    saves = inspect.signature(deepspeed.DeepSpeedEngine.save_checkpoint).parameters
    assert "exclude_frozen_parameters" in saves
    loads = [*inspect.signature(deepspeed.DeepSpeedEngine.load_checkpoint).parameters]
    assert loads[:4] == ["self", "load_dir", "tag", "load_module_strict"]
    assert [*inspect.signature(deepspeed.initialize).parameters][:6] == [
        "args", "model", "optimizer", "model_parameters", "training_data", "lr_scheduler",
    ]  # fmt: skip
    assert "adamw_mode" in inspect.signature(deepspeed.ops.adam.DeepSpeedCPUAdam).parameters


@on_ranks(2)
def test_an_optimizer_and_a_schedule_may_be_functions():
    seen = []

    def schedule(optimizer):
        seen.append(optimizer)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    settings = config(1)
    del settings["optimizer"]
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=model(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.5),
        lr_scheduler=schedule,
        model_parameters=(p for p in []),
        config=settings,
    )
    assert seen == [optimizer.optimizer] and type(seen[0]) is torch.optim.AdamW
    train_step(engine)
    assert scheduler.get_last_lr() == engine.get_lr() == [0.25]
    engine.lr_scheduler = None  # Lightning steps it itself
    train_step(engine)
    assert engine.get_lr() == [0.25]
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(2)
def test_without_an_optimizer_there_is_none_and_the_engine_runs_the_model(stage):
    """At stage 3 an object with the hooks is in its place, as in DeepSpeed. Programs remove the hooks to
    generate."""
    settings = config(stage)
    del settings["optimizer"]
    engine, optimizer, _, scheduler = deepspeed.initialize(model=model(), config=settings)
    assert scheduler is None and engine.basic_optimizer is None
    assert optimizer is engine.optimizer
    assert optimizer is (engine.parameter_offload if stage == 3 else None)
    with torch.no_grad():
        assert engine(batch(0, 0)).shape == (2, 1)
    engine.destroy()


@on_ranks(1)
def test_what_fails_in_deepspeed_and_should_not():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.inner = nn.Linear(6, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * self.scale

    schedule = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 0, "total_num_steps": 9}}
    net = Scaled()
    groups = [{"params": []}, {"params": list(net.parameters()), "lr": 0.1}]
    settings = config(3, scheduler=schedule)
    engine, *_ = deepspeed.initialize(model=net, model_parameters=groups, config=settings)
    train_step(engine)
    engine.destroy()
    shared = next(net.parameters())
    with pytest.raises(
        (ConfigError, UsageError, ValueError), match="more than one parameter group"
    ):
        deepspeed.initialize(
            model=net,
            model_parameters=[{"params": [shared]}, {"params": [shared]}],
            config=config(3),
        )


@on_ranks(2)
def test_several_engines_print_one_table_and_a_line_each():
    initialize._told.clear()
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("zeroshard")
    logger.addHandler(handler)
    level = logger.level
    try:
        for stage in (3, 3, 1, 0):
            engine, *_ = deepspeed.initialize(
                model=model(), config={**config(stage), "own": 1, "log_level": "debug"}
            )
            engine.destroy()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    told = {
        "ZeRO stage": len([line for line in lines if line.startswith("ZeRO stage")]),
        "table": len([line for line in lines if line.startswith("key ")]),
        "unknown": len([line for line in lines if line.startswith("unknown keys, ignored: own")]),
    }
    first = deepspeed.comm.get_rank() == 0
    assert told == {"ZeRO stage": 4 * first, "table": 1 * first, "unknown": 1 * first}
    assert len(lines) <= 10 * first


@on_ranks(1)
def test_who_answers_is_logged():
    logs._said.clear()
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger = deepspeed.utils.logger
    level = logger.level  # a Trainer before may have chosen another
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        engine, *_ = deepspeed.initialize(model=model(), config=config())
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert (
        f"DeepSpeed info: version={api_table.VERSION}, provided by ZeroShard" in stream.getvalue()
    )
    engine.destroy()


# ---------------------------------------------------------------------- loops


def plain_loop(engine) -> None:
    for number in range(4):
        engine.backward(loss_of(engine, batch(number, engine.global_rank)))
        engine.step()


def plain_backward(engine) -> None:
    for number in range(4):
        loss_of(engine, batch(number, engine.global_rank)).backward()
        engine.step()


def accelerate_loop(engine) -> None:
    for number in range(4):
        engine.set_gradient_accumulation_boundary(is_boundary=number % 2 == 1)
        engine.backward(loss_of(engine, batch(number, engine.global_rank)))
        if number % 2 == 1:
            engine.step()


def trainer_loop(engine) -> None:
    for number in range(4):
        engine.set_gradient_accumulation_boundary(is_boundary=number % 2 == 1)
        loss = loss_of(engine, batch(number, engine.global_rank)) / 2
        engine.backward(loss, scale_wrt_gas=False)
        if number % 2 == 1:
            engine.step()


def through_the_optimizer(engine) -> None:
    for number in range(4):
        engine.optimizer.backward(loss_of(engine, batch(number, engine.global_rank)))
        engine.optimizer.step()


@pytest.mark.smoke
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_all_ways_to_write_the_loop_give_one_result(stage):
    results = []
    loops = (plain_loop, plain_backward, accelerate_loop, trainer_loop, through_the_optimizer)
    for loop in loops:
        settings = config(stage, gradient_accumulation_steps=2)
        engine, *_ = deepspeed.initialize(model=model(), config=settings)
        loop(engine)
        assert engine.global_steps == 2
        results.append(values(engine))
        engine.destroy()
    for result in results[1:]:
        assert torch.equal(result, results[0])


@on_ranks(2)
def test_two_engines_in_one_process_do_not_know_of_each_other():
    first, *_ = deepspeed.initialize(model=model(), config=config(3))
    second, *_ = deepspeed.initialize(model=model(), config=config(1))
    for number in range(2):
        train_step(first, number)
        train_step(second, number)
    torch.testing.assert_close(values(first), values(second))
    second.destroy()
    first.destroy()


# ---------------------------------------------------------------------- the optimizer


@on_ranks(2)
def test_the_optimizer_s_view_of_the_engine():
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model(), config=config(3, fp16={"enabled": True, "initial_scale_power": 4})
    )
    assert hasattr(optimizer, "overflow") and optimizer.overflow is False
    loss = engine(batch(0, engine.global_rank).half()).float().sum()
    engine.backward(loss * float("inf"))
    engine.step()
    assert optimizer.overflow is True and not engine.was_step_applied()
    engine.backward(engine(batch(0, engine.global_rank).half()).float().sum())
    engine.step()
    assert optimizer.overflow is False
    assert optimizer.cur_scale == optimizer.loss_scale == engine.loss_scale() == 16.0
    assert optimizer.dynamic_loss_scale and optimizer.clip_grad == 1.0
    assert optimizer._global_grad_norm == engine.get_global_grad_norm() > 0
    optimizer.param_groups[0]["lr"] = 0.125
    assert engine.get_lr() == [0.125] and optimizer.get_lr() == 0.125
    optimizer.set_lr(0.25)
    assert engine.get_lr() == [0.25]
    masters = optimizer.single_partition_of_fp32_groups
    assert all(t.dtype == torch.float32 for t in masters)
    assert set(optimizer.state_dict()) == {"state", "param_groups"}
    assert type(optimizer) is deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3
    with pytest.raises(TypeError, match="save_checkpoint"):
        pickle.dumps(optimizer)
    engine.destroy()


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_its_operations_are_counted_and_it_trains_on(stage):
    losses = []
    for counted in (False, True):
        engine, *_ = deepspeed.initialize(model=model(), config=config(stage, unit_min_numel=1))
        profiler = deepspeed.profiling.flops_profiler.FlopsProfiler(engine.module, engine)
        losses.append([train_step(engine, 0).item()])
        if counted:
            profiler.start_profile()
        losses[-1].append(train_step(engine, 1).item())
        if counted:
            profiler.stop_profile()
            layers = 6 * 10 + 10 * 1  # of the input to the first no gradient is asked
            assert profiler.get_total_flops() == 2 * 2 * (layers + layers + 10 * 1)
            assert profiler.get_total_params() == 6 * 10 + 10 + 10 + 1
        losses[-1].append(train_step(engine, 2).item())
        engine.destroy()
    assert losses[0] == losses[1]


@on_ranks(1)
def test_a_schedule_of_torch_can_be_built_over_it():
    engine, optimizer, _, _ = deepspeed.initialize(model=model(), config=config(2))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    train_step(engine)
    schedule.step()
    assert engine.get_lr() == [0.005]
    engine.destroy()


@pytest.mark.parametrize(
    ("stage", "precision", "kind"),
    [
        (0, "bf16", "BF16_Optimizer"),
        (0, "fp16", "FP16_Optimizer"),
        (1, "bf16", "DeepSpeedZeroOptimizer"),
        (3, "bf16", "DeepSpeedZeroOptimizer_Stage3"),
    ],
)
@on_ranks(1)
def test_its_class_is_the_one_that_programs_look_for(stage, precision, kind):
    settings = config(stage, **{precision: {"enabled": True}})
    engine, optimizer, *_ = deepspeed.initialize(model=model(), config=settings)
    assert type(optimizer).__name__ == kind
    engine.destroy()


@on_ranks(2)
def test_adam_of_deepspeed_trains_like_torch_s_and_keeps_the_schedule_s_groups():
    results = []
    for make in (
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
        lambda p: deepspeed.ops.adam.FusedAdam(p, lr=0.01, weight_decay=0.1),
        lambda p: deepspeed.ops.adam.DeepSpeedCPUAdam(p, lr=0.01, weight_decay=0.1),
        # what Accelerate does under offload: groups of the user's optimizer in a new one
        lambda p: deepspeed.ops.adam.DeepSpeedCPUAdam(
            torch.optim.AdamW(p, lr=0.01, weight_decay=0.1).param_groups, lr=3.0
        ),
    ):
        settings = config(2)
        del settings["optimizer"]
        net = model()
        engine, *_ = deepspeed.initialize(
            model=net, optimizer=make(net.parameters()), config=settings
        )
        assert type(engine.basic_optimizer) is torch.optim.AdamW
        for number in range(3):
            train_step(engine, number)
        results.append(values(engine))
        engine.destroy()
    assert all(torch.equal(result, results[0]) for result in results[1:])


# ---------------------------------------------------------------------- whole by request


def seen(params) -> list[str]:
    return [param.ds_status.name for param in params]


@on_ranks(2)
def test_parameters_stay_whole_from_all_gather_to_partition():
    plain, *_ = deepspeed.initialize(model=model(), config=config(unit_min_numel=1))
    for number in range(3):
        train_step(plain, number)
    expected = values(plain)
    plain.destroy()
    engine, *_ = deepspeed.initialize(model=model(), config=config(unit_min_numel=1))
    params = list(engine.module.parameters())
    first = params[0]
    train_step(engine, 0)
    assert seen(params) == ["NOT_AVAILABLE"] * 4 and first.ds_active_sub_modules == set()
    first.all_gather()
    first.all_gather()  # is whole already
    before = first.detach().clone()
    assert seen(params[:2]) == ["AVAILABLE"] * 2 and type(first) is nn.Parameter
    train_step(engine, 1)  # forward, backward and step leave it whole, with new values
    if engine.global_rank == 0:
        read_alone = first.detach().clone()
        assert not torch.equal(read_alone, before)
    first.partition()
    assert seen(params) == ["NOT_AVAILABLE"] * 4
    first.partition()  # is sharded already
    train_step(engine, 2)
    assert torch.equal(values(engine), expected)
    with pytest.raises(UsageError, match="free_data=False"):
        first.partition(free_data=False)
    engine.destroy()


@on_ranks(2)
def test_a_list_is_gathered_and_partitioned_in_any_order():
    engine, *_ = deepspeed.initialize(model=model(), config=config(unit_min_numel=1))
    params = list(engine.module.parameters())
    handle = params[0].all_gather(param_list=params, async_op=True)
    handle.wait()
    assert seen(params) == ["AVAILABLE"] * 4
    params[0].partition(param_list=params[:1])
    assert seen(params) == ["AVAILABLE"] * 4  # its unit contains another requested parameter
    params[0].partition(param_list=params[1:3], has_been_updated=False)
    assert seen(params) == ["NOT_AVAILABLE"] * 2 + ["AVAILABLE"] * 2
    params[3].partition()
    assert seen(params) == ["NOT_AVAILABLE"] * 4
    with deepspeed.zero.GatheredParameters(params):
        params[0].all_gather()
        params[0].partition()
        assert seen(params) == ["AVAILABLE"] * 4
    assert seen(params) == ["NOT_AVAILABLE"] * 4
    engine.destroy()


@on_ranks(2)
def test_written_values_are_kept_if_partition_is_told():
    engine, *_ = deepspeed.initialize(model=model(), config=config(unit_min_numel=1))
    weight, bias = list(engine.module.parameters())[:2]
    weight.all_gather()
    weight.data.copy_(torch.arange(60.0).view(10, 6) + engine.global_rank)
    weight.partition(has_been_updated=True)
    assert torch.equal(weight.detach(), torch.arange(60.0).view(10, 6))  # rank 0's
    master = deepspeed.utils.safe_get_full_fp32_param(weight)
    assert torch.equal(master, torch.arange(60.0).view(10, 6))
    bias.all_gather()
    bias.data.add_(1)
    with pytest.raises(ShardedAccess, match="changed inside GatheredParameters"):
        bias.partition()
    assert seen([weight, bias]) == ["NOT_AVAILABLE"] * 2
    train_step(engine)
    engine.destroy()


@on_ranks(2)
def test_parameters_without_an_engine_are_gathered_too():
    with deepspeed.zero.Init(config_dict_or_path=config()):
        net = model()
    weight = net[0].weight
    weight.all_gather()
    weight.data.fill_(2.0)
    weight.partition(has_been_updated=True)
    assert seen([weight]) == ["NOT_AVAILABLE"] and bool((weight.detach() == 2).all())
    weight.all_gather()
    engine, *_ = deepspeed.initialize(model=net, config=config())
    weight.partition()
    train_step(engine)
    weight.all_gather()
    engine.destroy()
    weight.partition()  # no engine owns it any more


# ---------------------------------------------------------------------- parameters


@on_ranks(2)
def test_attributes_of_sharded_parameters():
    status = deepspeed.zero.ZeroParamStatus
    net = model()
    engine, *_ = deepspeed.initialize(model=net, config=config(3))
    params = list(net.parameters())
    assert len({p.ds_id for p in params}) == len(params)
    for param in params:
        assert (param.ds_numel, param.ds_shape) == (param.numel(), param.shape)
        assert param.ds_status is status.NOT_AVAILABLE
        assert param.ds_tensor.numel() == param.partition_numel() <= param.ds_numel
        assert param.ds_summary()["ds_shape"] == tuple(param.shape)
        assert param.ds_process_group is None and param.ds_persist is False
    held = torch.tensor([p.partition_numel() for p in params])
    deepspeed.comm.all_reduce(held, prof=True, log_name="held")
    assert held.tolist() == [p.ds_numel for p in params]
    with deepspeed.zero.GatheredParameters(params):
        assert all(p.ds_status is status.AVAILABLE for p in params)
        assert [p.ds_summary()["status"] for p in params] == ["AVAILABLE"] * len(params)
        assert all(hasattr(p, "ds_id") for p in params)
    assert params[0].ds_status is status.NOT_AVAILABLE
    assert deepspeed.runtime.zero.partition_parameters.is_zero_param(params[0])
    engine.destroy()


@on_ranks(1)
def test_one_rank_has_the_attributes_too():
    net = model()
    engine, *_ = deepspeed.initialize(model=net, config=config(3))
    assert [p.partition_numel() for p in net.parameters()] == [p.numel() for p in net.parameters()]
    with deepspeed.zero.GatheredParameters(net.parameters(), modifier_rank=0):
        net[0].bias.data.zero_()
    assert pickle.loads(pickle.dumps(net[0].weight)).shape == net[0].weight.shape
    engine.destroy()


@on_ranks(2)
def test_a_copy_is_an_ordinary_parameter():
    net = model()
    engine, *_ = deepspeed.initialize(model=net, config=config(3))
    twin = copy.deepcopy(net)
    assert not any(hasattr(p, "ds_id") for p in twin.parameters())
    assert torch.equal(torch.cat([p.flatten() for p in twin.parameters()]).detach(), values(engine))
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_ranks(2)
def test_below_stage_3_parameters_are_ordinary(stage):
    net = model()
    engine, *_ = deepspeed.initialize(model=net, config=config(stage))
    assert not any(hasattr(p, "ds_id") for p in net.parameters())
    engine.destroy()


@on_ranks(2)
def test_init_marks_parameters_and_the_engine_takes_them():
    with deepspeed.zero.Init(config_dict_or_path=config(3)):
        net = model()
    for param in net.parameters():
        assert param.ds_shape == param.shape
        assert param.ds_summary()["ds_numel"] == param.numel()
        assert param.ds_status is deepspeed.zero.ZeroParamStatus.NOT_AVAILABLE
    ids = [p.ds_id for p in net.parameters()]
    engine, *_ = deepspeed.initialize(model=net, config=config(3))
    assert [p.ds_id for p in net.parameters()] == ids
    whole, *_ = deepspeed.initialize(model=model(), config=config(3))
    assert torch.equal(values(engine), values(whole))
    whole.destroy()
    engine.destroy()


@on_ranks(2)
def test_init_takes_a_live_configuration_full_of_auto():
    settings = config(3, train_batch_size="auto", gradient_accumulation_steps="auto")
    settings |= {
        "train_micro_batch_size_per_gpu": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
    }
    before = copy.deepcopy(settings)
    with deepspeed.zero.Init(config_dict_or_path=settings):
        net = model()
    assert settings == before
    assert all(hasattr(p, "ds_id") for p in net.parameters())
    assert net[0].weight.dtype == torch.float32


@on_ranks(2)
def test_init_may_be_nested_shard_a_model_now_and_be_left_by_an_error():
    with deepspeed.zero.Init(config_dict_or_path=config(3)):
        with deepspeed.zero.Init(config_dict_or_path=config(3)):
            inner = nn.Linear(3, 3)
        outer = nn.Linear(3, 3)
    assert hasattr(inner.weight, "ds_id") and hasattr(outer.weight, "ds_id")
    net = model()
    deepspeed.zero.Init(module=net, config_dict_or_path=config(3))
    assert all(hasattr(p, "ds_id") for p in net.parameters())
    with pytest.raises(KeyError), deepspeed.zero.Init(config_dict_or_path=config(3)):
        raise KeyError
    assert not hasattr(nn.Linear(2, 2).weight, "ds_id")


@on_ranks(2)
def test_a_group_of_one_rank_is_refused():
    alone = [deepspeed.comm.new_group([rank]) for rank in range(2)][deepspeed.comm.get_rank()]
    with pytest.raises(UsageError, match="nothing would be sharded"):
        deepspeed.zero.Init(data_parallel_group=alone, config_dict_or_path=config(3))
    # Megatron's pretrain_gpt.py enters the block at every stage, also in a pipeline.
    for number, enabled in ((1, True), (3, False)):
        with deepspeed.zero.Init(
            data_parallel_group=alone, config_dict_or_path=config(number), enabled=enabled
        ):
            made = nn.Linear(3, 3)
        assert made.weight.numel() == 9


@on_ranks(2)
def test_an_engine_may_be_built_inside_init():
    with deepspeed.zero.Init(config_dict_or_path=config(3)):
        engine, *_ = deepspeed.initialize(model=model(), config=config(3))
        train_step(engine)
        later = nn.Linear(4, 4)
    assert hasattr(later.weight, "ds_id")
    train_step(engine, 1)
    other, *_ = deepspeed.initialize(model=model(), config=config(3))
    for number in range(2):
        train_step(other, number)
    assert torch.equal(values(engine), values(other))
    engine.destroy()
    other.destroy()


@on_ranks(2)
def test_gathering_takes_whatever_programs_pass():
    gather = deepspeed.zero.GatheredParameters
    net = model()
    engine, *_ = deepspeed.initialize(model=net, config=config(3))
    buffer = torch.ones(2)
    first = next(net.parameters())
    for params in (
        first, (p for p in net.parameters()), {first, buffer}, [], (), [buffer], [first, first],
        list(nn.Linear(2, 2).parameters()),
    ):  # fmt: skip
        with gather(params, modifier_rank=0):
            pass
    with gather(net.parameters(), modifier_rank=0):
        if engine.global_rank == 0:
            first.data.fill_(0.5)
    assert bool((values(engine)[: first.numel()] == 0.5).all())
    with gather([first]), gather(net.parameters(), fwd_module=net):
        assert float(first.detach()[0, 0]) == 0.5
    with pytest.raises(ShardedAccess), gather([first]):
        first.data.fill_(2.0)
    with gather(first, enabled=False):
        assert first.ds_status is deepspeed.zero.ZeroParamStatus.NOT_AVAILABLE
    engine.destroy()


@on_ranks(2)
def test_generation_without_hooks():
    engine, *_ = deepspeed.initialize(model=model(), config=config(3))
    with deepspeed.zero.unwrap_model_for_generation(engine) as net, torch.no_grad():
        for _ in range(1 + 2 * engine.global_rank):  # ranks need not keep step
            net(batch(0, 0))
    train_step(engine)
    engine.destroy()


def take_hooks_off(engine) -> None:
    """Remove the hooks, like programs that generate with all parameters unsharded."""
    offload = engine.optimizer.parameter_offload
    assert not list(offload.module.ds_external_parameters())
    for param in offload.module.parameters():
        param.ds_active_sub_modules.clear()
    for hook in (*offload.forward_hooks, *offload.backward_hooks):
        hook.remove()
    offload.forward_hooks, offload.backward_hooks = [], []


def put_hooks_back(engine) -> None:
    offload = engine.optimizer.parameter_offload
    assert offload.param_coordinator.is_invalid_trace()
    offload._register_deepspeed_module(offload.module)


@on_ranks(2)
def test_hooks_taken_off_for_generation_come_back_and_every_unit_is_gathered_once():
    alone, *_ = deepspeed.initialize(model=model(), config=config(3, unit_min_numel=1))
    engine, *_ = deepspeed.initialize(model=model(), config=config(3, unit_min_numel=1))
    train_step(alone), train_step(engine)
    with deepspeed.zero.GatheredParameters(engine.parameters()), torch.no_grad():
        take_hooks_off(engine)
        assert not any(m._forward_pre_hooks for m in engine.module.modules())
        before = engine.runtime.prefetcher._places  # the recorded orders of use
        for _ in range(1 + 2 * engine.global_rank):  # ranks need not keep step
            engine.module(batch(0, 0))
        assert engine.runtime.prefetcher._places is before
        put_hooks_back(engine)
    for number in (1, 2):
        train_step(alone, number), train_step(engine, number)
    assert torch.equal(values(engine), values(alone))
    alone.destroy(), engine.destroy()


@on_ranks(2)
def test_an_engine_without_its_hooks_does_not_train_in_silence():
    engine, *_ = deepspeed.initialize(model=model(), config=config(3))
    offload = engine.optimizer.parameter_offload
    take_hooks_off(engine)
    with deepspeed.zero.GatheredParameters(engine.parameters()):
        engine.backward(loss_of(engine, batch(0, engine.global_rank)))
    with pytest.raises(UsageError, match="there is no gradient"):
        engine.step()
    engine.zero_grad()
    with pytest.raises(UsageError, match="not the engine's model"):
        offload._register_deepspeed_module(nn.Linear(1, 1))
    put_hooks_back(engine)
    train_step(engine)
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 2])
@on_ranks(1)
def test_below_stage_3_there_are_no_hooks_to_take_off(stage):
    engine, optimizer, *_ = deepspeed.initialize(model=model(), config=config(stage))
    assert not hasattr(optimizer, "parameter_offload")
    engine.destroy()


@on_ranks(1)
def test_the_optimizer_tells_how_the_loss_is_scaled():
    keys = {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 50}}
    engine, optimizer, *_ = deepspeed.initialize(model=model(), config=config(1, **keys))
    told = optimizer.loss_scale_config
    assert (told.dynamic_loss_scale, told.cur_scale, told.scale_window) == (True, 16.0, 50)
    engine.destroy()
    engine, optimizer, *_ = deepspeed.initialize(model=model(), config=config(1))
    told = optimizer.loss_scale_config
    assert (told.use_grad_scaling, told.cur_scale, told.scale_window) == (False, 1.0, None)
    engine.destroy()


class Tiled(nn.Module):
    """An MLP over a sequence, in three pieces."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.mlp = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        tiled = deepspeed.runtime.sequence_parallel.ulysses_sp.TiledMLP
        params = list(self.mlp.parameters())
        h = tiled.apply(
            lambda mlp, piece: mlp(piece), self.mlp, x[:, None].expand(-1, 7, -1), 3, params
        )
        return self.head(h).mean(1)


@on_ranks(2)
def test_a_tiled_mlp_trains_alike_at_every_stage():
    found = []
    for stage in (0, 2, 3):
        engine, *_ = deepspeed.initialize(
            model=Tiled(), config=config(stage, unit_min_numel=1, units=["Linear"])
        )
        for number in range(3):
            train_step(engine, number)
        found.append(values(engine))
        engine.destroy()
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@on_ranks(1)
def test_external_parameters_need_no_registration_but_have_to_be_parameters():
    register = deepspeed.zero.register_external_parameter
    net = nn.Linear(2, 2)
    register(net, net.weight)
    deepspeed.runtime.zero.partition_parameters.unregister_external_parameter(net, net.weight)
    with pytest.raises(RuntimeError, match=r"not a torch.nn.Parameter"):
        register(net, torch.ones(2))
    with pytest.raises(RuntimeError, match=r"not a torch.nn.Module"):
        register(net.weight, net.weight)


@on_ranks(1)
def test_leaf_modules_become_one_unit():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.up(x))

    def units(mark: object) -> int:
        net = nn.Sequential(Block(), Block())
        mark(net)
        engine, *_ = deepspeed.initialize(
            model=net, config=config(3, unit_min_numel=1, unit_max_numel=5000)
        )
        count = len(engine.runtime.units)
        engine.destroy()
        return count

    utils = deepspeed.utils
    whole = units(lambda net: utils.set_z3_leaf_modules(net, [Block]))
    assert whole < units(lambda net: None)
    assert whole == units(lambda net: utils.set_z3_leaf_modules(net, ["Block"]))
    assert whole == units(lambda net: utils.set_z3_leaf_modules_by_name(net, ["0", "1"]))
    net = nn.Sequential(Block())
    assert utils.set_z3_leaf_modules_by_suffix(net, ["up", "no"], False) == ([net[0].up], ["no"])
    assert utils.get_z3_leaf_modules(net) == [net[0].up]
    assert utils.unset_z3_leaf_modules(net, [nn.Linear]) == [net[0].up, net[0].down]
    assert utils.get_z3_leaf_modules(net) == []
    with pytest.raises(UsageError, match="no module of the classes"):
        utils.set_z3_leaf_modules(net, ["Nothing"])


# ---------------------------------------------------------------------- states


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_module_states_come_and_go(stage):
    engine, *_ = deepspeed.initialize(model=model(), config=config(stage))
    state = {k: v.clone() for k, v in engine.module_state_dict().items()}
    before = values(engine)
    train_step(engine)
    assert not torch.equal(values(engine), before)
    engine.load_module_state_dict({"module": state})
    assert torch.equal(values(engine), before)
    engine.module[0].bias.requires_grad_(False)
    assert "0.bias" not in engine.module_state_dict(exclude_frozen_parameters=True)
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_one_engine_saves_and_loads_at_once(stage, tmp_path):
    engine, *_ = deepspeed.initialize(model=model(), config=config(stage))
    train_step(engine)
    engine.save_checkpoint(str(tmp_path), client_state={"epoch": 3})
    assert (tmp_path / "latest").read_text().strip() == "global_step1"
    before = values(engine)
    train_step(engine, 1)
    path, client_state = engine.load_checkpoint(str(tmp_path), None, load_module_strict=False)
    assert path.endswith("global_step1") and client_state == {"epoch": 3}
    assert torch.equal(values(engine), before) and engine.global_steps == 1
    engine.destroy()


@on_ranks(2)
def test_consolidated_weights_are_on_rank_0_alone():
    settings = config(3)
    settings["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    engine, *_ = deepspeed.initialize(model=model(), config=settings)
    assert engine.zero_gather_16bit_weights_on_model_save() is True
    state = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=False)
    assert (state is None) == (engine.global_rank != 0)
    engine.destroy()


# ---------------------------------------------------------------------- small parts of an engine


@on_ranks(1)
def test_modes_return_the_engine_and_reach_the_module():
    engine, *_ = deepspeed.initialize(model=model(), config=config(1))
    assert engine.eval() is engine and not engine.module.training
    assert engine.train() is engine and engine.module.training
    engine.compile(backend="eager")
    assert engine.is_compiled
    with pytest.raises(UnsupportedError, match="DeepCompile"):
        engine.compile(schedule=[])
    engine.timers("mine").start()
    engine.timers("mine").stop()
    assert engine.get_wall_clock_timers()["mine"] >= 0
    assert engine.monitor.enabled is False
    engine.monitor.write_events([("a", 1.0, 1)])
    engine.destroy()


@on_ranks(1)
def test_events_of_the_program_reach_the_monitors(tmp_path):
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    engine, *_ = deepspeed.initialize(model=model(), config=config(1, csv_monitor=section))
    assert engine.monitor.enabled
    engine.monitor.write_events([("Mine/value", 2.5, 7)])
    engine.destroy()
    texts = [path.read_text() for path in tmp_path.rglob("*.csv")]
    assert any("2.5" in text for text in texts)


@on_ranks(2)
def test_reductions_can_be_put_together():
    engine, *_ = deepspeed.initialize(
        model=model(), config=config(1, gradient_accumulation_steps=2)
    )
    with engine.coalesce_grad_reduction():
        engine.backward(loss_of(engine, batch(0, engine.global_rank)))
    engine.backward(loss_of(engine, batch(1, engine.global_rank)))
    engine.step()
    other, *_ = deepspeed.initialize(model=model(), config=config(1, gradient_accumulation_steps=2))
    for number in range(2):
        train_step(other, number)
    torch.testing.assert_close(values(engine), values(other))
    engine.destroy()
    other.destroy()


@on_ranks(2)
def test_collectives_under_torch_s_names():
    comm = deepspeed.comm
    rank, world = comm.get_rank(), comm.get_world_size()
    assert (world, comm.get_local_rank(), comm.is_initialized()) == (2, rank, True)
    tensor = torch.full((2,), float(rank))
    comm.all_reduce(tensor, op=comm.ReduceOp.SUM, prof=False, log_name="x", debug="y")
    assert tensor.tolist() == [1.0, 1.0]
    out = torch.empty(4)
    comm.all_gather_into_tensor(out, torch.full((2,), float(rank)))
    assert out.tolist() == [0, 0, 1, 1]
    part = torch.empty(2)
    comm.reduce_scatter_tensor(part, torch.arange(4.0))
    assert part.tolist() == [4.0 * rank, 4.0 * rank + 2]
    pair = [torch.ones(1), torch.full((1,), 3.0)]
    comm.all_reduce_coalesced(pair)
    assert [t.item() for t in pair] == [2.0, 6.0]
    work = comm.all_reduce_coalesced(pair, async_op=True)
    assert work.wait() and [t.item() for t in pair] == [4.0, 12.0]
    group = comm.new_group([0, 1])
    assert comm.get_all_ranks_from_group(group) == [0, 1] and comm.get_global_rank(group, 1) == 1
    comm.barrier()
    mesh = comm.initialize_mesh_device((2,), ("dp",))
    assert mesh.size() == 2
    groups = deepspeed.utils.groups
    assert groups._get_data_parallel_world_size() == 2
    assert groups._get_sequence_parallel_world_size() == 1


@pytest.mark.parametrize("numel", [2, 6, 7])
@on_ranks(3)
def test_a_partitioned_tensor_comes_back_whole(numel):
    comm, Parts = deepspeed.comm, deepspeed.runtime.utils.PartitionedTensor
    x = torch.arange(numel, dtype=torch.float32).view(-1, 1)
    parts = Parts(x, comm.get_world_group())
    assert parts.local_size()[0] in (numel // 3, -(-numel // 3))
    assert torch.equal(parts.full(), x) and parts.full_size() == [numel, 1]
    again = Parts.from_meta(parts.to_meta(), parts.data(), comm.get_world_group())
    assert torch.equal(again.full(), x)
    other = parts.to_meta()
    other[4] += 1  # of another rank
    with pytest.raises(UsageError, match="description belongs to rank"):
        Parts.from_meta(other, parts.data(), comm.get_world_group())


@on_ranks(3)
def test_flat_groups_are_filled_from_their_owners():
    rank, group = deepspeed.comm.get_rank(), deepspeed.comm.get_world_group()
    flat = torch.zeros(6)
    parts = list(flat.chunk(3))
    parts[rank].fill_(rank + 1)
    deepspeed.runtime.utils.all_gather_dp_groups([flat], [parts], [group], 2, 100)
    assert flat.tolist() == [1, 1, 2, 2, 3, 3]


@on_ranks(2, group=False)
def test_accelerate_learns_which_backend_was_started():
    import sys

    fake = SimpleNamespace(PartialState=SimpleNamespace(_shared_state={"backend": None}))
    before = sys.modules.get("accelerate.state")
    sys.modules["accelerate.state"] = fake
    try:
        deepspeed.comm.init_distributed(dist_backend=None)
        assert fake.PartialState._shared_state["backend"] == "gloo"
        fake.PartialState._shared_state["backend"] = "nccl"
        deepspeed.init_distributed()  # started already: nothing to do, nothing to say
        assert fake.PartialState._shared_state["backend"] == "nccl"
        fake.PartialState._shared_state["backend"] = None
        assert deepspeed.comm.is_initialized()  # Accelerate does not call it if a group exists
        assert fake.PartialState._shared_state["backend"] == "gloo"
    finally:
        del sys.modules["accelerate.state"]
        if before is not None:
            sys.modules["accelerate.state"] = before
        torch.distributed.destroy_process_group()
