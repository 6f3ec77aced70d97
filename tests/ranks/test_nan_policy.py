"""``trust.nan_policy``: what follows a step whose gradient is not finite."""

from __future__ import annotations

import contextlib
import itertools
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import STAGES, Explode, assert_same, loss_of, open_engine, own_data, weights
from support import pipeline_models as models
from support import tensor_models
from support.covering import covering
from torch import Tensor, nn
from zeroshard_testing import on_ranks

from zeroshard import Engine, initialize
from zeroshard.core.mesh import Mesh
from zeroshard.engine import optimizer_step
from zeroshard.errors import LossScaleError, NonFiniteError
from zeroshard.parallel import pipeline

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
}
ROWS = covering(
    list(itertools.product(STAGES, PRECISIONS, ("error", "skip", "rollback"), (False, True)))
)


def opened(stage: int, precision: str, policy: str | None, **keys: Any) -> Engine:
    trust = {} if policy is None else {"trust": {"nan_policy": policy}}
    optimizer = {"type": "AdamW", "params": {"lr": 0.05}}
    return open_engine(stage, optimizer=optimizer, **PRECISIONS[precision], **trust, **keys)


@contextlib.contextmanager
def outcome_known_late(late: bool):
    """``late``: as on a GPU, the host reads the flag of a step at the next one."""
    with pytest.MonkeyPatch.context() as patch:
        if late:
            patch.setattr(optimizer_step, "read_flag", lambda _flag: None)
        yield


def step(engine: Engine, batch: Any, *, bad: bool = False) -> None:
    x, y = batch
    engine.backward(loss_of(engine, (x * torch.nan if bad else x, y)))
    engine.step()


@pytest.mark.parametrize(("stage", "precision", "policy", "late"), ROWS)
@on_ranks(2)
def test_one_rank_has_a_bad_loss_in_the_third_of_four_steps(
    stage, precision, policy, late, tmp_path
):
    """The result is that of a run without the steps that are left out."""
    with opened(stage, precision, policy) as engine:
        batches = [micros[0] for micros in own_data(engine, 4)]
        for at in (0, 3) if policy == "rollback" else (0, 1, 3):
            step(engine, batches[at])
        expected = weights(engine)
    with outcome_known_late(late), opened(stage, precision, policy) as engine:
        step(engine, batches[0])
        engine.save_checkpoint(tmp_path / "run", "first")
        step(engine, batches[1])
        caught = pytest.raises(NonFiniteError) if policy == "error" else contextlib.nullcontext()
        with caught as found:
            step(engine, batches[2], bad=engine.global_rank == 1)
            if late:
                step(engine, batches[3])
        if policy == "error":
            assert str(found.value).startswith(
                "The gradient of step 3 is not finite. The loss of rank 1 was not finite. First bad "
                "gradient: 'inp.weight'. Nothing was updated."
            )
        if late and policy == "error":
            engine.step()  # the gradient of the fourth step is there
        elif not late or policy == "rollback":  # which dropped that gradient
            step(engine, batches[3])
        assert engine.get_lr() == [0.05]
        assert engine.global_steps == {"error": 4, "skip": 4, "rollback": 2}[policy]
        assert engine.skipped_steps == (0 if policy == "rollback" else 1)
        assert_same(weights(engine), expected)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_a_run_goes_back_at_most_max_rollbacks_times_and_needs_a_checkpoint(stage, tmp_path):
    trust = {"nan_policy": "rollback", "max_rollbacks": 2}
    with open_engine(stage, trust=trust) as engine:
        (good,), (other,) = own_data(engine, 2)
        with pytest.raises(NonFiniteError, match="has not saved or loaded a checkpoint yet"):
            step(engine, good, bad=True)
        engine.save_checkpoint(tmp_path)
    with open_engine(stage, trust=trust) as engine:
        engine.load_checkpoint(tmp_path)  # a checkpoint that it loads will do
        start = weights(engine)
        for _ in range(2):
            step(engine, good)
            step(engine, other, bad=engine.global_rank == 0)
            assert_same(weights(engine), start)
        with pytest.raises(NonFiniteError, match=r"gone back to a checkpoint 2 times"):
            step(engine, other, bad=True)


@on_ranks(2)
def test_the_loader_goes_on_after_a_rollback(tmp_path):
    x = torch.arange(64.0).view(16, 4)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "trust": {"nan_policy": "rollback"},
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
    }
    dataset = torch.utils.data.TensorDataset(x)
    engine, _, loader, _ = initialize(model=nn.Linear(4, 1), config=config, training_data=dataset)
    with engine:
        engine.save_checkpoint(tmp_path)
        seen = []
        for at, (batch,) in enumerate(loader):
            seen.append(batch)
            engine.backward(engine(batch).mean() * (torch.nan if at == 1 else 1.0))
            engine.step()
        assert len(seen) == 4
        assert len({float(batch[0, 0]) for batch in seen}) == 4
        assert engine.global_steps == 2


@on_ranks(2)
def test_the_cause_is_told_as_far_as_it_is_known():
    with opened(2, "bf16", None) as engine:
        ((batch,),) = own_data(engine, 1)
        for own_backward in (False, True):
            loss = Explode.apply(loss_of(engine, batch))
            loss.backward() if own_backward else engine.backward(loss)
            with pytest.raises(NonFiniteError) as found:
                engine.step()
            text = str(found.value)
            if own_backward:
                assert "losses are not known, because the program called backward()" in text
            else:
                assert "All losses were finite, so a number became infinite or NaN" in text


@pytest.mark.parametrize(
    ("keys", "is_error"),
    [
        ({}, True),
        ({"bf16": {"enabled": True}}, True),
        ({"bf16": {"enabled": True, "check_grad_overflow": True}}, False),
        ({"fp16": {"enabled": True}}, False),
        ({"bf16": {"enabled": True, "check_grad_overflow": True},
          "trust": {"nan_policy": "error"}}, True),
    ],
)  # fmt: skip
@on_ranks(2)
def test_what_holds_without_the_key(keys, is_error, tmp_path):
    with open_engine(3, **keys) as engine:
        ((batch,),) = own_data(engine, 1)
        before = weights(engine)
        seen: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("zeroshard").addHandler(handler)
        try:
            with pytest.raises(NonFiniteError) if is_error else contextlib.nullcontext():
                step(engine, batch, bad=engine.global_rank == 1)
        finally:
            logging.getLogger("zeroshard").removeHandler(handler)
        told = [text for text in seen if "The loss of rank 1 was not finite" in text]
        assert len(told) == (0 if is_error or engine.global_rank else 1)
        assert_same(weights(engine), before)


@on_ranks(2)
def test_in_fp16_an_overflow_of_finite_losses_is_skipped_whatever_the_policy():
    with opened(2, "fp16", "error") as engine:
        ((batch,),) = own_data(engine, 1)
        engine.backward(Explode.apply(loss_of(engine, batch)))
        engine.step()
        assert engine.skipped_steps == 1
        fp16 = {"fp16": {"enabled": True, "initial_scale_power": 0, "hysteresis": 1}}
    with open_engine(2, **fp16, trust={"nan_policy": "error"}) as engine:
        engine.backward(Explode.apply(loss_of(engine, batch)))
        with pytest.raises(LossScaleError, match="All losses were finite"):
            engine.step()


@on_ranks(2)
def test_a_good_step_sends_nothing_more_and_a_bad_one_one_message():
    with opened(2, "fp32", "skip") as engine, opened(2, "fp32", None) as plain:
        ((batch,),) = own_data(engine, 1)
        sent = []
        for each in (engine, plain):
            step(each, batch)
            before = small_messages(each)
            step(each, batch)
            sent.append(small_messages(each) - before)
        assert sent == [1, 1]
        before = small_messages(engine)
        step(engine, batch, bad=True)
        step(engine, batch, bad=True)  # a second one in a row is counted only
        assert small_messages(engine) - before == 3
        assert engine.skipped_steps == 2


def small_messages(engine: Engine) -> int:
    return sum(entry.calls for entry in engine._watch.recorder.entries("gather_small").values())


def infinite(logits: Tensor, labels: Tensor) -> Tensor:
    return models.loss_fn(logits, labels) * float("inf")


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(4)
def test_the_last_stage_of_a_pipeline_is_named(stage):
    made = pipeline(
        models.Decoder().double(),
        split=["layers.3"], order=models.ORDER, loss_fn=models.loss_fn,
    )  # fmt: skip
    config = models.config(stage, parallel={"pipeline": 2})
    with Engine(made, config=config, optimizer=models.adamw) as engine:
        engine.train_batch(models.data(1, engine.dp_rank))
        engine.module.loss_fn = infinite if engine.dp_rank == 1 else models.loss_fn
        with pytest.raises(NonFiniteError) as found:
            engine.train_batch(models.data(1, engine.dp_rank))
        assert "step 2 is not finite. The loss of rank 3 was not finite" in str(found.value)
        assert "First bad gradient: 'embed.weight'" in str(found.value)
        engine.module.loss_fn = models.loss_fn
        engine.train_batch(models.data(1, engine.dp_rank))


@on_ranks(4)
def test_the_ranks_of_a_tensor_group_are_named():
    from torch.distributed.device_mesh import init_device_mesh

    from zeroshard.parallel.tensor_plan import tensor_parallel

    model = tensor_models.tiny_gpt()
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    tensor_parallel(model, grid, tensor_models.PLANS["vocabulary"])
    config = {"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": 3}}
    mesh = Mesh(data_shard=2, tensor=2)
    with Engine(model, config=config, optimizer=models.adamw, mesh=mesh) as engine:
        ids, labels = tensor_models.tokens(engine.dp_rank)
        loss = tensor_models.loss_of(engine(ids), labels)
        engine.backward(loss * (torch.nan if engine.dp_rank == 1 else 1.0))
        with pytest.raises(NonFiniteError, match=r"The loss of ranks 2,3 was not finite"):
            engine.step()
    assert dist.get_world_size() == 4
