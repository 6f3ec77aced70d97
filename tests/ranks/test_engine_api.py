"""All ways to build, call and close an engine."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from functools import partial

import pytest
import torch
from loops import (
    CASE,
    STAGES,
    adamw,
    assert_close,
    assert_same,
    config_for,
    data,
    loss_of,
    open_engine,
    own_data,
    plain,
    train,
    trained,
    weights,
)
from torch import nn
from torch.utils.data import TensorDataset
from zeroshard_testing import on_ranks

import zeroshard
from zeroshard.deepspeed.engine import GETTERS
from zeroshard.errors import UsageError

NAMED = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-3}}}

# ---------------------------------------------------------------------- initialize


def test_a_misspelt_name_of_an_engine_is_an_error_with_the_nearest_one():
    engine, *_ = zeroshard.initialize(model=CASE.build(), config=config_for())
    name = next(iter(engine.module._modules))
    with engine:
        with pytest.raises(AttributeError, match=r"'Engine' .* 'stepp'\. Did you mean 'step'"):
            engine.stepp()
        with pytest.raises(AttributeError, match=f"Its model has one: engine.module.{name}$"):
            getattr(engine, name)
        with pytest.raises(AttributeError, match=r"has no attribute '_stepp'$"):
            engine._stepp()


@pytest.mark.full
def test_a_type_checker_finds_a_misspelt_name_of_an_engine(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import zeroshard\n\nengine: zeroshard.Engine\nengine.stepp()\n")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), str(program)],
        capture_output=True, text=True, timeout=500, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert '"Engine" has no attribute "stepp"' in done.stdout, done.stdout + done.stderr
    assert "callable" not in done.stdout


def test_initialize_returns_engine_optimizer_loader_and_schedule():
    model = CASE.build()
    optimizer = adamw(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    dataset = TensorDataset(torch.zeros(9, 23), torch.zeros(9, 23))
    engine, *rest = zeroshard.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=schedule,
        training_data=dataset,
        config=config_for(),
    )
    with engine:
        assert rest[0] is optimizer is engine.optimizer
        assert rest[1] is engine.training_dataloader
        assert rest[2] is schedule is engine.lr_scheduler
        assert [len(x) for x, _ in rest[1]] == [3, 3, 3]


@pytest.mark.parametrize("form", ["object", "callable", "class", "config"])
def test_every_form_of_optimizer_trains_alike(form):
    model = CASE.build()
    given = {
        "object": lambda: adamw(model.parameters()),
        "callable": lambda: adamw,
        "class": lambda: partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, weight_decay=0.01),
        "config": lambda: {
            "type": "AdamW",
            "params": {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.01},
        },
    }[form]()
    with open_engine(3, model=model, optimizer=given) as engine:
        assert isinstance(engine.optimizer, torch.optim.AdamW)
        train(engine, data(3))
        assert_close(weights(engine), plain(), rtol=1e-6)


@on_ranks(2)
def test_an_object_acts_instead_of_what_the_configuration_names():
    model = CASE.build()
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(sgd, step_size=1, gamma=0.5)
    named = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}
    config = config_for(1, **NAMED, scheduler=named)
    with zeroshard.Engine(model, config=config, optimizer=sgd, lr_scheduler=schedule) as engine:
        assert engine.optimizer is sgd and engine.lr_scheduler is schedule
        assert (
            GETTERS["optimizer_name"](engine) == "SGD"
            and GETTERS["optimizer_params"](engine) is None
        )
        assert engine.loaded.raw["optimizer"] == NAMED["optimizer"]
        train(engine, own_data(engine, 1))
        assert engine.get_lr() == [0.25]
        told = [
            line
            for line in engine.loaded.notices
            if "the object that the program passed is used" in line
        ]
    assert [line.partition(":")[0] for line in told] == ["optimizer", "scheduler"]
    assert '"AdamW"' in told[0] and '"WarmupDecayLR"' in told[1]


@pytest.mark.parametrize("form", ["none", "empty", "generator", "list", "named"])
def test_model_parameters_may_be_any_iterable(form):
    model = CASE.build()
    given = {
        "none": lambda: None,
        "empty": list,
        "generator": model.parameters,
        "list": lambda: list(model.parameters()),
        "named": model.named_parameters,
    }[form]()
    engine, optimizer, _, _ = zeroshard.initialize(
        model=model, model_parameters=given, config=config_for(**NAMED)
    )
    with engine:
        assert len(optimizer.param_groups) == 1
        assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))


@pytest.mark.parametrize("named", [False, True])
def test_model_parameters_may_be_groups_with_their_own_options(named):
    model = CASE.build()
    groups = [
        {"params": (p for p in model.parameters() if p.ndim > 1), "weight_decay": 0.5},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "lr": 0.25},
    ]
    keys = NAMED if named else {}
    engine, optimizer, _, _ = zeroshard.initialize(
        model=model,
        optimizer=None if named else torch.optim.SGD,
        model_parameters=groups,
        config=config_for(**keys),
    )
    with engine:
        assert [g["weight_decay"] for g in optimizer.param_groups] == [0.5, 0.0]
        assert optimizer.param_groups[1]["lr"] == 0.25
        train(engine, data(1))


@pytest.mark.parametrize("form", ["config", "path", "string path", "text", "config_params", "args"])
def test_the_configuration_may_come_in_any_form(form, tmp_path):
    config = config_for(2, **NAMED)
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    arguments = {
        "config": {"config": config},
        "path": {"config": path},
        "string path": {"config": str(path)},
        "text": {"config": json.dumps(config)},
        "config_params": {"config_params": config},
        "args": {"args": argparse.Namespace(deepspeed_config=str(path), local_rank=7)},
    }[form]
    engine, *_ = zeroshard.initialize(model=CASE.build(), **arguments)
    with engine:
        assert engine.config == config
        assert engine.settings.zero_optimization.stage == 2
        if form == "args":
            assert arguments["args"].local_rank == 0


@pytest.mark.parametrize("form", ["object", "callable", "class", "config"])
def test_every_form_of_schedule_is_followed(form):
    model = CASE.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    given = {
        "object": lambda: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        "callable": lambda: partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5),
        "class": lambda: torch.optim.lr_scheduler.ConstantLR,
        "config": lambda: None,
    }[form]()
    keys = {"scheduler": {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}}
    with open_engine(
        model=model, optimizer=optimizer, lr_scheduler=given, **(keys if form == "config" else {})
    ) as engine:
        train(engine, data(1))
        assert engine.get_lr() == ([1 / 3] if form == "class" else [0.5])


@on_ranks(2)
def test_training_data_is_split_over_the_ranks():
    rank = torch.distributed.get_rank()
    dataset = TensorDataset(torch.arange(11))
    engine, _, loader, _ = zeroshard.initialize(
        model=CASE.build(), optimizer=adamw, training_data=dataset, config=config_for()
    )
    with engine:
        mine = [x for (batch,) in loader for x in batch.tolist()]
        both = [None, None]
        torch.distributed.all_gather_object(both, mine)
        assert len(mine) == 6  # padded: both have as many
        assert set(both[0]) | set(both[1]) == set(range(11))
        assert mine == both[rank]


def test_training_data_follows_batch_size_drop_last_and_collate_fn():
    engine, _, loader, _ = zeroshard.initialize(
        model=CASE.build(),
        optimizer=adamw,
        training_data=list(range(11)),
        collate_fn=tuple,
        config=config_for(dataloader_drop_last=True),
    )
    with engine:
        assert [type(batch) for batch in loader] == [tuple] * 3
        assert {len(batch) for batch in loader} == {3}


def test_an_engine_without_optimizer_runs_the_model():
    with open_engine(3, optimizer=None) as engine:
        ((x, _),) = data(1)[0]
        with torch.no_grad():
            assert torch.equal(engine(x), CASE.build()(x))
        assert engine.get_lr() == []


# ---------------------------------------------------------------------- backward, accumulation

MICROS = 4


def counted(engine, micros):
    for batch in micros:
        engine.backward(loss_of(engine, batch))
        engine.step()


def declared(engine, micros):
    """Accelerate: the boundary is set before every backward, and step() called only there."""
    for at, batch in enumerate(micros):
        engine.set_gradient_accumulation_boundary(at == MICROS - 1)
        engine.backward(loss_of(engine, batch))
        if at == MICROS - 1:
            engine.step()


def divided_by_caller(engine, micros):
    """Transformers' Trainer divides the loss itself."""
    for batch in micros:
        engine.backward(loss_of(engine, batch) / MICROS, scale_wrt_gas=False)
        engine.step()


def unmanaged(engine, micros):
    for batch in micros:
        engine.backward(loss_of(engine, batch))
    engine.step()


def plain_backward(engine, micros):
    for batch in micros:
        loss_of(engine, batch).backward()
        engine.step()


def no_sync_and_one_step(engine, micros):
    """PyTorch's idiom: only the last backward is outside of ``no_sync``, and step() is called once."""
    for batch in micros[:-1]:
        with engine.no_sync():
            engine.backward(loss_of(engine, batch))
    engine.backward(loss_of(engine, micros[-1]))
    engine.step()


def no_sync_around_all_but_one(engine, micros):
    with engine.no_sync():
        for batch in micros[:-1]:
            loss_of(engine, batch).backward()
    loss_of(engine, micros[-1]).backward()
    engine.step()


def no_sync_and_every_step(engine, micros):
    for batch in micros[:-1]:
        with engine.no_sync():
            engine.backward(loss_of(engine, batch))
        engine.step()
    counted(engine, micros[-1:])


LOOPS = {
    loop.__name__: loop
    for loop in (
        counted,
        declared,
        divided_by_caller,
        unmanaged,
        plain_backward,
        no_sync_and_one_step,
        no_sync_around_all_but_one,
        no_sync_and_every_step,
    )
}


def accumulated(stage, name, **keys):
    with open_engine(
        stage,
        gradient_accumulation_steps=MICROS,
        managed_gradient_accumulation=name != "unmanaged",
        **keys,
    ) as engine:
        for micros in own_data(engine, 3, MICROS):
            LOOPS[name](engine, micros)
            assert engine.is_gradient_accumulation_boundary() == (name in ("declared", "unmanaged"))
        assert (engine.global_steps, engine.skipped_steps) == (3, 0)
        return weights(engine)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_every_accumulation_loop_gives_the_same_bits(stage):
    """The division by 4 is exact, so it does not matter where it happens."""
    expected = accumulated(stage, "counted")
    assert_close(expected, plain(micros=MICROS, world=2))
    for name in LOOPS:
        assert_same(accumulated(stage, name), expected)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_every_accumulation_loop_agrees_in_bf16(stage):
    """Sums are fp32 wherever they are made, also where more backwards come than were announced."""
    expected = accumulated(stage, "counted", bf16={"enabled": True})
    for name in ("declared", "unmanaged", "plain_backward", "no_sync_and_one_step"):
        assert_same(accumulated(stage, name, bf16={"enabled": True}), expected)


@pytest.mark.parametrize("first", ["engine", "plain"])
def test_mixing_both_kinds_of_backward_in_one_accumulated_step_raises(first):
    with open_engine(gradient_accumulation_steps=2) as engine:
        ((a, b),) = data(1, 2)
        calls = [lambda x: engine.backward(loss_of(engine, x)),
                 lambda x: loss_of(engine, x).backward()]  # fmt: skip
        calls = calls if first == "engine" else calls[::-1]
        calls[0](a)
        engine.step()
        with pytest.raises(UsageError, match="were mixed in one step"):
            calls[1](b)


@on_ranks(2)
def test_mixing_them_without_accumulation_is_fine():
    with open_engine(2) as engine:
        for (batch,) in own_data(engine, 3):
            engine.backward(loss_of(engine, batch) / 2)
            (loss_of(engine, batch) / 2).backward()
            engine.step()
        assert_close(weights(engine), plain(world=2))


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_two_losses_with_two_backwards_are_one_sum(stage):
    with open_engine(stage) as engine:
        for (batch,) in own_data(engine, 3):
            out = engine(batch[0])
            first, second = out.square().mean(), out.sin().mean()
            engine.backward(first, retain_graph=True)
            engine.backward(second)
            engine.step()
        two = weights(engine)
    with open_engine(stage) as engine:
        for (batch,) in own_data(engine, 3):
            out = engine(batch[0])
            engine.backward(out.square().mean() + out.sin().mean())
            engine.step()
        assert_close(two, weights(engine))


def test_backward_returns_the_divided_loss():
    with open_engine(gradient_accumulation_steps=4, fp16={"enabled": True, "loss_scale": 8}) as e:
        x = data(1)[0][0][0].half()
        loss = e(x).float().square().mean()
        assert e.backward(loss).item() == loss.item() / 4


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_zero_grad_begins_the_step_anew(stage):
    expected = trained(stage, steps=2, micros=2)
    with open_engine(stage, gradient_accumulation_steps=2) as engine:
        first, second = own_data(engine, 2, 2)
        train(engine, [first])
        counted(engine, second[1:])  # a micro-batch that is thrown away
        engine.zero_grad()
        train(engine, [second])
        assert engine.global_steps == 2
        assert_same(weights(engine), expected)


# ---------------------------------------------------------------------- several engines


@pytest.mark.parametrize("stages", [(0, 3), (1, 2), (3, 3)])
@on_ranks(2)
def test_two_engines_trained_alternately_equal_each_alone(stages):
    alone = [trained(stage) for stage in stages]
    with open_engine(stages[0]) as one, open_engine(stages[1]) as two:
        for (batch,) in own_data(one, 3):
            for engine in (one, two):
                engine.backward(loss_of(engine, batch))
            for engine in (two, one):
                engine.step()
        assert_same(weights(one), alone[0])
        assert_same(weights(two), alone[1])


@pytest.mark.parametrize("micros", [1, 2])
@pytest.mark.parametrize("kind", ["engine", "plain"])
@on_ranks(2)
def test_one_summed_loss_trains_two_engines(kind, micros):
    keys = {"gradient_accumulation_steps": micros}
    alone = [trained(stage, micros=micros) for stage in (0, 3)]
    with open_engine(0, **keys) as one, open_engine(3, **keys) as two:
        for batches in own_data(one, 3, micros):
            for batch in batches:
                loss = loss_of(one, batch) + loss_of(two, batch)
                one.backward(loss) if kind == "engine" else loss.backward()
                one.step()
                two.step()
        assert_same(weights(one), alone[0])
        assert_same(weights(two), alone[1])


# ---------------------------------------------------------------------- exceptions and the end


class Trips(nn.Module):
    """Raises at a given point and time."""

    def __init__(self):
        super().__init__()
        self.inner = CASE.build()
        self.trip = ""

    def forward(self, x):
        x = self.inner.blocks[0](self.inner.inp(x))
        if self.trip == "forward":
            raise KeyError("in forward")
        if self.trip == "backward":
            x.register_hook(self.fall)
        for block in self.inner.blocks[1:]:
            x = block(x)
        return self.inner.out(x)

    @staticmethod
    def fall(_grad):
        raise KeyError("in backward")


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_training_goes_on_after_an_exception(stage, where):
    model = Trips()
    with open_engine(stage, model=model) as engine:
        first, *rest = own_data(engine, 3)
        train(engine, [first])
        model.trip = where
        with pytest.raises(KeyError, match=f"in {where}"):
            engine.backward(loss_of(engine, first[0]))
        model.trip = ""
        train(engine, rest)
        after = weights(engine)
    expected = trained(stage)
    assert_same({name.removeprefix("inner."): value for name, value in after.items()}, expected)


@on_ranks(2)
def test_an_exception_in_forward_keeps_earlier_micro_batches():
    model = Trips()
    with open_engine(2, model=model, gradient_accumulation_steps=2) as engine:
        ((a, b),) = own_data(engine, 1, 2)
        counted(engine, [a])
        model.trip = "forward"
        with pytest.raises(KeyError):
            engine(a[0])
        model.trip = ""
        counted(engine, [b])
        after = {name.removeprefix("inner."): full for name, full in weights(engine).items()}
    assert_same(after, trained(2, steps=1, micros=2))


@on_ranks(2)
def test_an_exception_in_backward_begins_the_step_anew():
    model = Trips()
    with open_engine(2, model=model, gradient_accumulation_steps=2) as engine:
        ((a, b),) = own_data(engine, 1, 2)
        counted(engine, [a])
        model.trip = "backward"
        with pytest.raises(KeyError):
            engine.backward(loss_of(engine, b))
        with pytest.raises(UsageError, match="that raised an exception"):
            engine.step()
        model.trip = ""
        counted(engine, [a, b])
        assert engine.global_steps == 1
        after = {name.removeprefix("inner."): full for name, full in weights(engine).items()}
    assert_same(after, trained(2, steps=1, micros=2))


@pytest.mark.parametrize("stage", STAGES)
def test_close_may_come_twice_and_whole_parameters_stay(stage):
    engine = open_engine(stage)
    train(engine, data(1))
    before = weights(engine)
    engine.close()
    engine.close()
    if stage < 3:
        assert_same({n: p.detach() for n, p in engine.module.named_parameters()}, before)


def test_a_closed_model_trains_under_a_new_engine():
    model = CASE.build()
    with open_engine(1, model=model) as engine:
        train(engine, data(2))
    with open_engine(2, model=model, optimizer=torch.optim.SGD) as engine:
        train(engine, data(1))


# ---------------------------------------------------------------------- reading


@on_ranks(2)
def test_batch_sizes_and_their_changes():
    with open_engine(2, gradient_accumulation_steps=2) as engine:
        assert engine.train_batch_size() == 3 * 2 * 2
        assert engine.train_micro_batch_size_per_gpu() == 3
        assert engine.gradient_accumulation_steps() == 2
        assert GETTERS["get_batch_info"](engine) == (12, 3, 2)
        train(engine, own_data(engine, 1, 2))
        engine.set_train_batch_size(24)
        assert GETTERS["get_batch_info"](engine) == (24, 3, 4)
        train(engine, own_data(engine, 1, 4))
        assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (2, 6, 36)
        engine.set_train_micro_batch_size(5)
        assert GETTERS["get_batch_info"](engine) == (40, 5, 4)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_last_step_tells_norms_lr_and_scale(stage):
    model = CASE.build()
    for batch in [data(1, rank=r, world=2)[0][0] for r in range(2)]:
        (loss_of(model, batch) / 2).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    with open_engine(stage, gradient_clipping=norm / 4) as engine:
        assert engine.get_global_grad_norm() is None
        assert engine.last_step is None
        assert not engine.was_step_applied()
        engine.backward(loss_of(engine, own_data(engine, 1)[0][0]))
        assert engine.get_global_grad_norm() is None
        engine.step()
        last = engine.last_step
        assert engine.get_global_grad_norm() == last.grad_norm == pytest.approx(norm, rel=1e-6)
        assert last.grad_norm_clipped == pytest.approx(norm / 4, rel=1e-5)
        assert (last.lr, last.lrs, last.loss_scale, last.skipped) == (1e-2, (1e-2,), 1.0, False)
        assert engine.was_step_applied()


def test_the_engine_is_a_module_and_does_not_answer_for_its_model():
    model = CASE.build()
    model.generate = lambda: "text"
    with open_engine(model=model) as engine:
        assert isinstance(engine, nn.Module)
        assert engine.module.generate() == "text"
        assert len(list(engine.parameters())) == len(list(model.parameters()))
        with pytest.raises(AttributeError, match="no attribute 'generate'"):
            _ = engine.generate


def test_train_and_eval_reach_the_model_and_return_the_engine():
    with open_engine() as engine:
        assert engine.eval() is engine
        assert not engine.module.training
        assert engine.train() is engine
        assert engine.module.training


def test_getters_answer_from_the_configuration():
    with open_engine(
        2,
        **NAMED,
        scheduler={"type": "WarmupLR"},
        bf16={"enabled": True},
        steps_per_print=float("inf"),
        zero_optimization={"reduce_bucket_size": 1000},
    ) as engine:
        answers = {
            "zero_optimization": True,
            "zero_optimization_stage": 2,
            "zero_optimization_partition_gradients": True,
            "zero_optimization_partition_weights": False,
            "zero_reduce_bucket_size": 1000,
            "zero_overlap_comm": engine.settings.zero_optimization.overlap_comm,
            "zero_offload_param": None,
            "gradient_clipping": 0.0,
            "steps_per_print": float("inf"),
            "fp16_enabled": False,
            "bfloat16_enabled": True,
            "dynamic_loss_scale": False,
            "loss_scale": 1.0,
            "get_data_types": (torch.bfloat16, torch.float32),
            "optimizer_name": "AdamW",
            "scheduler_name": "WarmupLR",
            "get_data_parallel_rank": 0,
            "get_type": ["AdamW"],
            "get_mom": [(0.9, 0.999)],
            "wall_clock_breakdown": False,
        }
        assert {name: GETTERS[name](engine) for name in answers} == answers


def test_every_zero_key_has_a_getter():
    with open_engine(1) as engine:
        section = engine.settings.zero_optimization
        for key in type(section).model_fields:
            if key != "stage":
                assert GETTERS[f"zero_{key}"](engine) == getattr(section, key)


def test_strangers_may_hang_attributes_on_the_engine():
    with open_engine(lr_scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1)) as engine:
        engine._is_accelerate_prepared = True
        engine.lr_scheduler = None  # then it is not stepped here
        train(engine, data(2))
        assert engine.get_lr() == [1e-2]
