"""Pipelines whose ranks share the tokens of sequences train as one process does, at every stage."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit import config
from support import sequence_models as tiny
from support.covering import each_value
from support.sequence_models import Run, Setting
from torch.distributed.device_mesh import init_device_mesh
from zeroshard_testing import on_ranks

import zeroshard
from zeroshard import sequence
from zeroshard.core.mesh import Mesh
from zeroshard.errors import UsageError
from zeroshard.parallel import pipeline

pytest.importorskip("transformers")

STAGES = (0, 1, 2, 3)
MESH = Mesh(pipeline=2, sequence=2)


@contextlib.contextmanager
def opened(
    setting: Setting, stage: int, *, mesh: Mesh = MESH, own_loss: bool = False, **keys: Any
) -> Iterator[tuple[zeroshard.Engine, dist.ProcessGroup]]:
    """An engine over ``mesh``, and the sequence group of this rank."""
    sizes = (mesh.pipeline, mesh.data_shard, mesh.sequence)
    grid = init_device_mesh("cpu", sizes, mesh_dim_names=("pipeline", "data", "sequence"))
    group = grid["sequence"].get_group()
    sequence.register("sdpa", group)

    def loss_of(output: Any, labels: torch.Tensor) -> torch.Tensor:
        loss = tiny.cross_entropy(output.logits, labels)
        return sequence.mean_over_tokens(loss, (labels != -100).sum(), group)

    net = pipeline(
        tiny.model(setting), split=["model.layers.1"], loss_fn=None if own_loss else loss_of
    )
    asked = config(
        stage,
        train_micro_batch_size_per_gpu=tiny.SAMPLES,
        gradient_accumulation_steps=setting.micro,
        gradient_clipping=tiny.CLIP,
        optimizer={"type": "AdamW", "params": {"lr": tiny.LR, "weight_decay": 0.01}},
        **keys,
    )
    engine, *_ = zeroshard.initialize(model=net, config=asked, mesh=grid)
    try:
        yield engine, group
    finally:
        sequence.unregister()
        engine.close()


def trained(
    engine: zeroshard.Engine,
    setting: Setting,
    steps: slice = slice(0, tiny.STEPS),
    group: dist.ProcessGroup | None = None,
) -> Run:
    """Every rank passes whole micro-batches; with ``group`` it has cut them before."""
    run = Run([], [], {})
    for step in tiny.batches(setting, engine.dp_size)[steps]:
        own = [micro[engine.dp_rank] for micro in step]
        if group is not None:
            own = [sequence.split_batch(batch, group) for batch in own]
        run.losses.append(float(engine.train_batch(iter(own))))
        run.norms.append(engine.get_global_grad_norm())
    run.params = {name: param.detach().clone() for name, param in engine.iter_full_params()}
    return run


def assert_equal(found: Run, expected: Run, tolerance: float = 1e-12) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=tolerance)
    assert found.norms == pytest.approx(expected.norms, rel=tolerance)
    assert min(found.norms) > tiny.CLIP  # clipping is active
    assert found.params.keys() <= expected.params.keys()
    for name, param in found.params.items():
        torch.testing.assert_close(param, expected.params[name], rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("stage", "packed", "cut"),
    each_value([(s, p, c) for s in STAGES for p in (False, True) for c in (False, True)]),
)
@on_ranks(4)
def test_pipeline_2_x_sequence_2_equals_one_process(stage, packed, cut):
    setting = Setting(kv_heads=2, micro=3, packed=packed)
    with opened(setting, stage) as (engine, group):
        assert engine.mesh.text == "pipeline 2 x sequence 2"
        assert engine.train_batch_size() == tiny.SAMPLES * setting.micro
        found = trained(engine, setting, group=group if cut else None)
    assert_equal(found, tiny.in_one_process(setting, 1))


@pytest.mark.parametrize("stage", (1, 3))
@on_ranks(8, timeout=180)
def test_pipeline_2_x_data_2_x_sequence_2_equals_one_process(stage):
    setting = Setting(kv_heads=4, micro=2)
    with opened(setting, stage, mesh=Mesh(pipeline=2, data_shard=2, sequence=2)) as (engine, _):
        found = trained(engine, setting)
    assert_equal(found, tiny.in_one_process(setting, 2))


@on_ranks(4)
def test_the_models_own_loss_is_the_mean_over_all_tokens():
    """It is computed in fp32. Half of the first sample's tokens have no label, all on one rank."""
    setting = Setting(kv_heads=2, micro=2)
    with opened(setting, 2, own_loss=True) as (engine, _):
        found = trained(engine, setting)
        step = tiny.batches(setting, 1)[0]
        evaluated = float(engine.eval_batch(iter([micro[0] for micro in step])))
    expected = tiny.in_one_process(setting, 1)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.norms == pytest.approx(expected.norms, rel=1e-5)
    assert 0 < evaluated < found.losses[0]


@on_ranks(2)
def test_one_stage_with_sequence_ranks_equals_one_process():
    setting = Setting(kv_heads=2, micro=2)
    with opened(setting, 3, mesh=Mesh(sequence=2)) as (engine, _):
        found = trained(engine, setting)
    assert_equal(found, tiny.in_one_process(setting, 1))


def test_checkpoints_pass_between_pipelines_with_sequences_and_other_ranks(tmp_path):
    from zeroshard_testing import run_ranks

    run_ranks(_saved, 4, tmp_path)
    run_ranks(_loaded, 2, tmp_path)


SAVED = Setting(kv_heads=2, micro=2)


def _saved(root: Any) -> None:
    with opened(SAVED, 3) as (engine, _):
        trained(engine, SAVED, slice(0, 2))
        engine.save_checkpoint(root)


def _loaded(root: Any) -> None:
    with opened(SAVED, 1, mesh=Mesh(sequence=2)) as (engine, _):
        engine.load_checkpoint(root)
        found = trained(engine, SAVED, slice(2, 3))
    expected = tiny.in_one_process(SAVED, 1)
    assert found.losses == pytest.approx(expected.losses[2:], rel=1e-12)
    for name, param in found.params.items():
        torch.testing.assert_close(param, expected.params[name], rtol=0, atol=1e-12)


@on_ranks(4)
def test_a_batch_that_cannot_be_cut_is_the_same_error_on_every_rank():
    setting = Setting(kv_heads=2, micro=2)
    whole = [micro[0] for micro in tiny.batches(setting, 1)[0]]
    odd = [{key: value[:, 1:] for key, value in batch.items()} for batch in whole]
    with opened(setting, 1) as (engine, _):
        with pytest.raises(
            UsageError, match="rank 0 got a micro-batch that cannot be cut over seq"
        ):
            engine.train_batch(iter(odd))


@pytest.mark.parametrize("odd_rank", (1, 3), ids=("first stage", "last stage"))
@on_ranks(4)
def test_later_micro_batches_that_differ_are_the_same_error_on_every_rank(odd_rank):
    """Every micro-batch of every step and of an evaluation is compared, and a step after it trains."""
    setting = Setting(kv_heads=2, micro=2)
    whole = [micro[0] for micro in tiny.batches(setting, 1)[0]]
    is_odd, first = dist.get_rank() == odd_rank, odd_rank - 1
    with opened(setting, 1) as (engine, group):
        engine.train_batch(iter(whole))
        other = [whole[0], {**whole[1], "input_ids": whole[1]["input_ids"] + is_odd}]
        differ = f"rank {odd_rank} got other micro-batches for this step than rank {first}"
        for call in (engine.train_batch, engine.eval_batch):
            with pytest.raises(UsageError, match=differ):
                call(iter(other))
        swapped = whole[::-1] if is_odd else whole
        with pytest.raises(UsageError, match=differ):
            engine.train_batch(iter(swapped))
        cut = sequence.split_batch(whole[1], group)
        mixed = [whole[0], cut if is_odd else whole[1]]
        with pytest.raises(
            UsageError, match=f"Rank {odd_rank} got 1 whole micro-b.* {first} got 2"
        ):
            engine.train_batch(iter(mixed))
        turned = [cut, whole[0]] if is_odd else [whole[0], cut]  # as many, at other places
        with pytest.raises(UsageError, match=differ):
            engine.train_batch(iter(turned))
        short = whole[:1] if is_odd else whole
        with pytest.raises(UsageError, match=f"rank {odd_rank} has 1 of the 2 micro-batches"):
            engine.train_batch(iter(short))
        engine.train_batch(iter(whole))
