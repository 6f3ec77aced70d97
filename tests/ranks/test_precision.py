"""Every number is stored, summed, sent and updated in the dtype that the configuration requests."""

from __future__ import annotations

import math

import pytest
import torch
from loops import (
    CASE,
    STAGES,
    Explode,
    adamw,
    assert_close,
    assert_same,
    data,
    loss_of,
    open_engine,
    own_data,
    plain,
    train,
    trained,
    weights,
)
from support.covering import some_stages
from support.parity import (
    Scale,
    assert_bit_equal,
    assert_close_trajectory,
    engine_run,
    make_batches,
    reference_run,
    sgd,
)
from torch import nn
from zeroshard_testing import on_ranks

import zeroshard
from zeroshard.engine import optimizer_step
from zeroshard.errors import LossScaleError, UsageError

FP16, BF16 = {"enabled": True}, {"enabled": True}

# ---------------------------------------------------------------------- fp16: the loss scale


def overflowing(steps, at):
    """Two ranks' batches; on rank 1 those of the steps ``at`` overflow in fp16."""
    batches = make_batches(CASE, steps=steps, world=2)
    for step in at:
        x, y = batches[step][0][1]
        batches[step][0][1] = (x * 60000, y)
    return batches


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_gradients_whose_sum_over_ranks_overflows_in_fp16_are_averaged(stage):
    """40,000 on each rank: fp16 ends at 65,504."""
    keys = {"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": 1,
            "fp16": {"enabled": True, "loss_scale": 1.0}, "gradient_clipping": 1.0,
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}  # fmt: skip
    with zeroshard.Engine(nn.Linear(8, 1, bias=False), config=keys) as engine:
        engine.backward(engine(torch.full((1, 8), 40000.0 / 2**6).half()).sum() * 2**6)
        engine.step()
        assert engine.skipped_steps == 0
        assert float(engine.get_global_grad_norm()) == pytest.approx(40000 * 8**0.5, rel=1e-5)


RULES = {
    "default": {"window": 3, "hysteresis": 2},
    "consecutive": {"window": 4, "hysteresis": 2, "consecutive": True},
    "eager": {"window": 2, "hysteresis": 1},
    "floor": {"window": 100, "hysteresis": 1, "minimum": 16.0, "value": 128.0},
}


@pytest.mark.parametrize("rule", RULES)
@on_ranks(2)
def test_the_loss_scale_follows_the_rule_when_one_rank_overflows(rule):
    """Every stage skips the same steps, on both ranks, and keeps the same bits."""
    at = (1, 2, 8) if rule == "floor" else (1, 2, 3, 8, 9)

    def scale():
        return Scale(**{"value": 256.0, **RULES[rule]})

    batches = overflowing(12, at)
    expected = reference_run(
        CASE, sgd(), batches, precision="fp16", scale=scale(), reduce_dtype=torch.float16, clip=0.5
    )
    assert [i for i, skipped in enumerate(expected.skipped) if skipped] == list(at)
    runs = [
        engine_run(CASE, sgd(), batches, stage=s, precision="fp16", scale=scale(), clip=0.5)
        for s in STAGES
    ]
    for run in runs:
        assert (run.skipped, run.scales) == (expected.skipped, expected.scales)
        assert_bit_equal(run, runs[0])
    assert_close(runs[0].params, expected.params, rtol=2e-2)


@pytest.mark.smoke
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_static_scale_stays_and_skips(stage):
    batches = overflowing(4, (1,))
    scale = Scale(dynamic=False, value=64.0)
    run = engine_run(CASE, sgd(), batches, stage=stage, precision="fp16", scale=scale)
    assert run.scales == [64.0] * 4
    assert run.skipped == [False, True, False, False]


class BadBias(nn.Linear):
    """The gradient of its bias alone is not finite: with two ranks, in the shard of the second."""

    bad = False

    def forward(self, x):
        bias = Explode.apply(self.bias) if self.bad else self.bias
        return nn.functional.linear(x, self.weight, bias)


def fragile():
    torch.manual_seed(0)
    return nn.Sequential(*(BadBias(23, 23) for _ in range(4)))


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_at_the_floor_the_first_bad_parameter_is_named(stage):
    model = fragile()
    fp16 = {**FP16, "initial_scale_power": 2, "hysteresis": 1, "min_loss_scale": 2}
    with open_engine(stage, model=model, fp16=fp16) as engine:
        first, second, third = own_data(engine, 3)
        train(engine, [first])
        for bad in (model[3], model[1]):
            bad.bad = engine.global_rank == 1
        train(engine, [second])  # 4 -> 2
        with pytest.raises(LossScaleError) as caught:
            train(engine, [third])
        assert str(caught.value) == (
            "Non-finite gradients for 2 steps up to step 3, and the loss scale 2 is at its "
            "minimum, so lowering it cannot help. All losses were finite, so a number became "
            "infinite or NaN in backward. First bad gradient: '1.bias'. If the model was "
            'trained in bf16 before, train it in bf16. Otherwise check the loss, or lower "fp16": '
            '{"min_loss_scale"}.'
        )
        assert engine.skipped_steps == 2


@on_ranks(2)
def test_training_can_go_on_after_the_floor():
    model = fragile()
    fp16 = {**FP16, "initial_scale_power": 1, "hysteresis": 1, "min_loss_scale": 2}
    with open_engine(2, model=model, fp16=fp16) as engine:
        first, second = own_data(engine, 2)
        model[2].bad = True
        with pytest.raises(LossScaleError):
            train(engine, [first])
        model[2].bad = False
        before = weights(engine)
        train(engine, [second])
        assert not engine.last_step.skipped
        assert not torch.equal(weights(engine)["2.weight"], before["2.weight"])


def late(monkeypatch):
    """As on a GPU: the host does not read the overflow flag during the step."""
    monkeypatch.setattr(optimizer_step, "read_flag", lambda _flag: None)


WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}
HALVING = {"type": "ExponentialLR", "params": {"gamma": 0.5}}  # computes from the group's rate


@pytest.mark.parametrize(("fused", "schedule"), [(True, WARMUP), (True, HALVING), (False, WARMUP)])
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_skip_that_the_host_learns_late_changes_nothing(stage, fused, schedule):
    runs = []
    for is_late in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if is_late:
                late(patch)
            keys = {
                "fp16": {**FP16, "initial_scale_power": 6, "hysteresis": 1},
                "scheduler": schedule,
            }
            optimizer = {"type": "AdamW", "params": {"lr": 0.1, "fused": fused}}
            with open_engine(stage, optimizer=optimizer, **keys) as engine:
                lrs = []
                for step, ((x, y),) in enumerate(own_data(engine, 5)):
                    x = x * 60000 if step in (1, 2) and engine.global_rank else x
                    engine.backward(loss_of(engine, (x, y)))
                    engine.step()
                    lrs.append((engine.last_step.lr, engine.last_step.loss_scale))
                lrs.append(engine.get_lr())
                assert engine.skipped_steps == 2
                runs.append((lrs, weights(engine)))
    assert runs[0][0] == runs[1][0]
    assert_same(runs[1][1], runs[0][1])


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_floor_that_the_host_learns_late_still_names_the_parameter(stage):
    model = fragile()
    fp16 = {**FP16, "initial_scale_power": 1, "hysteresis": 1, "min_loss_scale": 2}
    optimizer = {"type": "AdamW", "params": {"lr": 0.1}}
    with pytest.MonkeyPatch.context() as patch:
        late(patch)
        with open_engine(stage, model=model, fp16=fp16, optimizer=optimizer) as engine:
            first, second = own_data(engine, 2)
            model[2].bad = engine.global_rank == 0
            train(engine, [first])
            model[2].bad = False
            with pytest.raises(LossScaleError, match=r"First bad gradient: '2\.bias'"):
                train(engine, [second])


def test_plain_backward_in_fp16_needs_the_scale():
    expected = trained(1, fp16=FP16)
    with open_engine(1, fp16=FP16) as engine:
        steps = own_data(engine, 3)
        with pytest.raises(UsageError, match="without loss scaling"):
            loss_of(engine, steps[0][0]).backward()
        for (batch,) in steps:
            engine.scale(loss_of(engine, batch)).backward()
            engine.step()
        assert_same(weights(engine), expected)


@on_ranks(2)
def test_fp16_autocast_scales_the_loss_too():
    keys = {
        "torch_autocast": {"enabled": True, "dtype": "float16"},
        "fp16": {"initial_scale_power": 3, "hysteresis": 1},
    }
    with open_engine(3, **keys) as engine:
        (good,), (bad,) = own_data(engine, 2)
        for x, y in (good, (bad[0] * 1e30 if engine.global_rank else bad[0], bad[1])):
            engine.backward(loss_of(engine, (x, y)))
            engine.step()
        assert engine.last_step.loss_scale == 8.0
        assert engine.last_step.skipped
        assert float(engine.scaler.scale) == 4.0


def test_auto_cast_casts_floating_inputs_only():
    seen = []

    class Looks(nn.Linear):
        def forward(self, x, ids=None, extra=()):
            seen.extend(t.dtype for t in (x, ids, *extra))
            return super().forward(x)

    with open_engine(model=Looks(3, 3), fp16={**FP16, "auto_cast": True}) as engine:
        x = torch.ones(2, 3)
        engine(x, ids=torch.ones(2, dtype=torch.int64), extra=[x.double()])
    assert seen == [torch.float16, torch.int64, torch.float16]


# ---------------------------------------------------------------------- not finite elsewhere


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_bf16_skips_what_is_not_finite(stage):
    with open_engine(stage, bf16={**BF16, "check_grad_overflow": True}) as engine:
        ((x, y),) = own_data(engine, 1)[0]
        before = weights(engine)
        engine.backward(loss_of(engine, (x * torch.nan if engine.global_rank else x, y)))
        engine.step()
        assert engine.last_step.skipped
        assert math.isnan(engine.last_step.grad_norm)
        assert_same(weights(engine), before)


@pytest.mark.parametrize(
    ("keys", "section"),
    [({"bf16": {**BF16, "check_grad_overflow": False}}, {}), ({}, {"compute_grad_norm": False})],
)
@on_ranks(2)
def test_where_nothing_is_looked_for_nan_acts_as_in_plain_pytorch(keys, section):
    for stage in some_stages(STAGES):
        with open_engine(stage, zero_optimization=section, **keys) as engine:
            ((x, y),) = own_data(engine, 1)[0]
            engine.backward(loss_of(engine, (x * torch.nan if engine.global_rank else x, y)))
            engine.step()
            assert not engine.last_step.skipped
            assert all(value.isnan().all() for value in weights(engine).values())


@on_ranks(2)
def test_an_infinite_gradient_is_clipped_as_in_plain_pytorch():
    """clip_grad_norm_ multiplies by 0: what is finite becomes 0, what is not becomes nan."""
    model, twin = fragile().bfloat16(), fragile().bfloat16()
    model[1].bad = twin[1].bad = True
    bf16 = {**BF16, "check_grad_overflow": False, "bf16_master_weights_and_grads": True}
    with open_engine(
        2,
        model=model,
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
        gradient_clipping=1.0,
        bf16=bf16,
    ) as engine:
        train(engine, own_data(engine, 1))
        after = weights(engine)
    assert engine.last_step.grad_norm == math.inf
    for x, y in [data(1, rank=r, world=2)[0][0] for r in range(2)]:
        (loss_of(twin, (x.bfloat16(), y.bfloat16())) / 2).backward()
    torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
    torch.optim.SGD(twin.parameters(), 0.1).step()
    for name, param in twin.named_parameters():
        assert torch.equal(after[name], param) or (after[name].isnan() == param.isnan()).all(), name


# ---------------------------------------------------------------------- dtypes


def sent_dtypes(engine):
    """Dtypes in which gradients were sent."""
    return {entry.dtype for entry in engine._watch.recorder.traffic() if "reduce" in entry.op}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, torch.float32),
        ({"bf16": BF16}, torch.bfloat16),
        ({"fp16": FP16}, torch.float16),
        ({"bf16": BF16, "communication_data_type": "fp32"}, torch.float32),
        ({"fp16": FP16, "communication_data_type": "bf16"}, torch.bfloat16),
        ({"communication_data_type": "bf16"}, torch.bfloat16),
    ],
)
@on_ranks(2)
def test_gradients_travel_in_the_dtype_asked_for(keys, expected):
    for stage in some_stages(STAGES):
        with open_engine(stage, **keys) as engine:
            train(engine, own_data(engine, 1))
            assert sent_dtypes(engine) == {expected}


@on_ranks(2)
def test_fp32_reduction_of_bf16_gradients_rounds_nothing():
    batches = make_batches(CASE, steps=3, world=2)
    expected = reference_run(CASE, sgd(), batches, precision="bf16")
    runs = [
        engine_run(
            CASE, sgd(), batches, stage=stage, precision="bf16",
            config={"communication_data_type": "fp32"},
        )
        for stage in STAGES
    ]  # fmt: skip
    for run in runs:
        assert_bit_equal(run, runs[0])
    assert_same(runs[0].params, expected.params)
    assert_close_trajectory(runs[0], expected, rtol=1e-6)


@pytest.mark.parametrize(("word", "dtype"), [(None, torch.float32), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_micro_batches_are_summed_in_the_dtype_asked_for(stage, word, dtype):
    keys = {"bf16": BF16, "data_types": {"grad_accum_dtype": word}}
    with open_engine(stage, gradient_accumulation_steps=3, **keys) as engine:
        ((first, second, _),) = own_data(engine, 1, 3)
        for batch in (first, second):
            engine.backward(loss_of(engine, batch))
            engine.step()
        held = [
            tensor
            for buffer in engine.runtime.reducer.buffers
            for tensor in (buffer.grads_N, buffer.reduced_S)
            if tensor is not None
        ]
        assert {tensor.dtype for tensor in held} == {dtype}


class Routed(nn.Module):
    """A router that wants fp32 and a rotary table, as in a transformer with experts."""

    def __init__(self):
        super().__init__()
        self.body = CASE.build()
        self.router = nn.Linear(23, 23, bias=False)
        self.register_buffer("inv_freq", 1 / 10000 ** (torch.arange(23) / 23))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))

    def forward(self, x):
        gate = self.router(x.float() * self.inv_freq.float()).sigmoid()
        return self.body(x) * gate.to(x.dtype)


def routed():
    torch.manual_seed(0)
    return Routed()


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_kept_parameters_and_buffers_stay_fp32_to_the_bit(stage):
    model, table = routed(), routed().inv_freq
    with open_engine(stage, model=model, bf16=BF16, keep_fp32=["*router*"]) as engine:
        assert torch.equal(model.inv_freq, table)  # no rounding, DeepSpeed #5812
        train(engine, own_data(engine, 2))
        after = weights(engine)
        dtypes = {name: value.dtype for name, value in after.items()}
        assert {n for n, d in dtypes.items() if d == torch.float32} == {"router.weight"}
        assert model.inv_freq.dtype == torch.float32
        rounded = after["router.weight"].bfloat16().float()
        assert not torch.equal(after["router.weight"], rounded)
        assert sent_dtypes(engine) == {torch.float32, torch.bfloat16}


@pytest.mark.parametrize(
    ("kept", "expected"),
    [("auto", torch.bfloat16), (["inv_*"], torch.float32), (["other"], torch.bfloat16)],
)
def test_buffers_are_cast_only_on_request_and_not_the_kept_ones(kept, expected):
    model = routed()
    types = {"buffer_dtype": "bf16", "keep_in_fp32_modules": kept}
    with open_engine(model=model, bf16=BF16, data_types=types):
        assert model.inv_freq.dtype == expected
        assert model.seen.dtype == torch.int64


def test_the_model_itself_may_name_buffers_to_keep():
    model = routed()
    model._keep_in_fp32_modules = ["inv_freq"]
    with open_engine(model=model, bf16=BF16, data_types={"buffer_dtype": "bf16"}):
        assert model.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("dtype", ["bfloat16", None])
def test_autocast_on_one_rank_equals_plain_autocast(dtype):
    keys = {"torch_autocast": {"enabled": True, "dtype": dtype}, "communication_data_type": "fp32"}
    model = CASE.build()
    optimizer = adamw(model.parameters())
    for (batch,) in data(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = CASE.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: p.detach() for name, p in model.named_parameters()}
    for stage in some_stages(STAGES):
        with open_engine(stage, **keys) as engine:
            train(engine, data(3))
            assert_same(weights(engine), expected)


@pytest.mark.parametrize(
    ("listed", "low"),
    [
        (None, {"weight", "bias"}),
        ([], set()),
        (["torch.nn.modules.normalization.LayerNorm"], {"norm.weight", "norm.bias"}),
    ],
)
@on_ranks(2)
def test_only_gradients_of_listed_modules_travel_in_the_autocast_dtype(listed, low):
    section = {"enabled": True, "dtype": "bf16"}
    if listed is not None:
        section["lower_precision_safe_modules"] = listed
    with open_engine(3, torch_autocast=section) as engine:
        sent = {
            slot.fqn: unit.row.reduce for unit in engine.runtime.units for slot in unit.layout.slots
        }
        for name, dtype in sent.items():
            is_norm = "norm" in name
            is_low = bool(low) and is_norm == ("norm.weight" in low)
            assert dtype == (torch.bfloat16 if is_low else torch.float32), name
        names = [unit.name for unit in engine.runtime.units]
        assert len(set(names)) == len(names)
        train(engine, own_data(engine, 1))
        assert sent_dtypes(engine) == {sent[n] for n in sent}


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_bf16_master_and_states_keep_no_fp32_copy(stage):
    section = {"enabled": True, "bf16_master_weights_and_grads": True,
               "bf16_optimizer_states": True}  # fmt: skip
    with open_engine(stage, optimizer={"type": "AdamW"}, bf16=section) as engine:
        train(engine, own_data(engine, 2))
        rows = {row.category: row.measured for row in engine.memory_report().rows}
        assert rows["master"] == 0
        moments = {
            value.dtype
            for state in engine.optimizer.state.values()
            for name, value in state.items()
            if name != "step"
        }
        assert moments == {torch.bfloat16}


@on_ranks(2)
def test_bf16_master_with_fp32_moments():
    section = {"enabled": True, "bf16_master_weights_and_grads": True}
    runs = []
    for stage in STAGES:
        with open_engine(stage, optimizer={"type": "AdamW"}, bf16=section) as engine:
            train(engine, own_data(engine, 2))
            runs.append(weights(engine))
            states = [s["exp_avg"].dtype for s in engine.optimizer.state.values()]
            assert set(states) == {torch.float32}
    for run in runs[1:]:
        assert_same(run, runs[0])


# ---------------------------------------------------------------------- clipping and the mean


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(3)
def test_clipping_uses_the_norm_over_all_ranks(stage):
    with open_engine(stage, gradient_clipping=0.05) as engine:
        train(engine, own_data(engine, 3))
        assert engine.last_step.grad_norm > 0.05
        assert engine.last_step.grad_norm_clipped == pytest.approx(0.05, rel=1e-4)
        assert_close(weights(engine), plain(world=3, clip=0.05))


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_the_gradients_of_ranks_may_be_summed(stage):
    def slow(params):
        return torch.optim.SGD(params, lr=0.05)

    def fast(params):
        return torch.optim.SGD(params, lr=0.1)

    with open_engine(stage, optimizer=slow, gradient_allreduce_op="sum") as engine:
        train(engine, own_data(engine, 2))
        assert_close(weights(engine), plain(fast, steps=2, world=2))


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_without_the_norm_training_is_the_same(stage):
    with open_engine(stage, zero_optimization={"compute_grad_norm": False}) as engine:
        train(engine, own_data(engine, 3))
        assert engine.last_step.grad_norm is None
        assert engine.last_step.grad_norm_clipped is None
        assert engine.get_global_grad_norm() is None
        without = weights(engine)
    assert_same(without, trained(stage))


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_unused_parameters_are_named_if_they_may_not_be(stage):
    model = CASE.build()
    model.spare = nn.Parameter(torch.ones(5))
    zero = {"ignore_unused_parameters": False}
    with open_engine(stage, model=model, zero_optimization=zero) as engine:
        with pytest.raises(UsageError, match="1 trainable parameters got no gradient on any rank"):
            train(engine, own_data(engine, 1))


def test_the_table_of_dtypes_says_what_is_done():
    with open_engine(bf16=BF16, keep_fp32=["*norm*"]) as engine:
        assert engine.dtypes.splitlines()[0] == "precision: bf16"
        assert "float32 throughout     *norm*" in engine.dtypes
