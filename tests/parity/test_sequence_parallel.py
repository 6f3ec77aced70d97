"""Ranks that share the tokens of a sequence train as one process does, at every stage and mesh."""

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

pytest.importorskip("transformers")

STAGES = (0, 1, 2, 3)


@contextlib.contextmanager
def opened(
    setting: Setting,
    sizes: dict[str, int],
    *,
    stage: int,
    dtype: torch.dtype = torch.float64,
    net: Any = None,
    **keys: Any,
) -> Iterator[tuple[zeroshard.Engine, dist.ProcessGroup]]:
    """An engine over a mesh of ``sizes``, and the sequence group; attention is spread over it."""
    grid = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    group = grid["sequence"].get_group()
    sequence.register("sdpa", group)
    net = tiny.model(setting, dtype) if net is None else net
    asked = config(
        stage,
        train_micro_batch_size_per_gpu=tiny.SAMPLES,
        gradient_accumulation_steps=setting.micro,
        gradient_clipping=tiny.CLIP,
        optimizer={"type": "AdamW", "params": {"lr": tiny.LR, "weight_decay": 0.01}},
        **keys,
    )
    plan = "auto" if "tensor" in sizes else None
    engine, *_ = zeroshard.initialize(model=net, config=asked, mesh=grid, plan=plan)
    try:
        yield engine, group
    finally:
        sequence.unregister()
        engine.close()


def trained(
    engine: zeroshard.Engine, group: dist.ProcessGroup, setting: Setting, steps: int = tiny.STEPS
) -> Run:
    """Train on this rank's tokens. Every rank gets the batch of its data rank, and cuts it."""
    run = Run([], [], {})
    for number, step in enumerate(tiny.batches(setting, engine.dp_size)[:steps]):
        for micro in step:
            own = sequence.split_batch(micro[engine.dp_rank], group, check=number == 0)
            labels = own.pop("shift_labels")
            loss = tiny.cross_entropy(engine(**own).logits, labels)
            loss = sequence.mean_over_tokens(loss, (labels != -100).sum(), group)
            engine.backward(loss)
            engine.step()
        run.losses.append(float(engine.last_step.loss))
        run.norms.append(engine.get_global_grad_norm())
    run.params = {name: param.clone() for name, param in engine.iter_full_params()}
    return run


def assert_equal(found: Run, expected: Run, tolerance: float = 1e-12) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=tolerance)
    assert found.norms == pytest.approx(expected.norms, rel=tolerance)
    assert min(found.norms) > tiny.CLIP  # clipping is active
    assert found.params.keys() == expected.params.keys()
    for name, param in found.params.items():
        torch.testing.assert_close(param, expected.params[name], rtol=0, atol=tolerance)


def check(setting: Setting, sizes: dict[str, int], stage: int, **keys: Any) -> None:
    with opened(setting, sizes, stage=stage, **keys) as (engine, group):
        assert engine.dp_size == sizes["data"]
        assert engine.train_batch_size() == tiny.SAMPLES * sizes["data"] * setting.micro
        found = trained(engine, group, setting)
    assert_equal(found, tiny.in_one_process(setting, sizes["data"]))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_two_sequence_ranks_equal_one_process(stage, packed):
    check(Setting(kv_heads=1 if packed else 4, packed=packed), {"data": 1, "sequence": 2}, stage)


@pytest.mark.parametrize(
    ("shape", "kv_heads", "packed", "stage"),
    each_value(
        [
            (shape, kv_heads, packed, stage)
            for shape, kv_heads, packed in (
                ((2, 2), 2, True), ((1, 4), 2, False), ((1, 4), 1, True), ((2, 2), 4, False),
                ((1, 4), 4, True),
            )
            for stage in (3, 0, 1, 2)
        ]
    ),
)  # fmt: skip
@on_ranks(4)
def test_four_ranks_in_data_and_sequence_equal_one_process(shape, kv_heads, packed, stage):
    sizes = {"data": shape[0], "sequence": shape[1]}
    check(Setting(kv_heads=kv_heads, packed=packed), sizes, stage)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(4)
def test_sequence_and_tensor_ranks_equal_one_process(stage):
    check(Setting(kv_heads=4), {"data": 1, "sequence": 2, "tensor": 2}, stage)


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_a_sliding_window_reaches_over_the_border_of_ranks(stage):
    check(Setting(kv_heads=2, window=5, packed=True), {"data": 1, "sequence": 2}, stage)


HOST = {"offload_optimizer": {"device": "cpu"}}


@pytest.mark.full
@pytest.mark.parametrize(
    ("stage", "keys"),
    [
        (1, {"zero_optimization": HOST}),
        (3, {"zero_optimization": {**HOST, "offload_param": {"device": "cpu"}}}),
        (2, {"transport": "stock"}),
    ],
)
@on_ranks(4)
def test_accumulation_offload_and_transport_change_nothing(stage, keys):
    check(Setting(kv_heads=2, micro=2, packed=True), {"data": 2, "sequence": 2}, stage, **keys)


@pytest.mark.full
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_checkpointed_layers_exchange_again_and_give_the_same(stage):
    setting = Setting(kv_heads=2, packed=True)
    net = tiny.model(setting)
    net.gradient_checkpointing_enable({"use_reentrant": False})
    with opened(setting, {"data": 1, "sequence": 2}, stage=stage, net=net) as (engine, group):
        found = trained(engine, group, setting)
    assert_equal(found, tiny.in_one_process(setting, 1))


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_16_bit_parameters_train_near_fp64(stage):
    setting, sizes = Setting(kv_heads=2), {"data": 1, "sequence": 2}
    keys = {"bf16": {"enabled": True}}
    with opened(setting, sizes, stage=stage, dtype=torch.float32, **keys) as (engine, group):
        found = trained(engine, group, setting)
    expected = tiny.in_one_process(setting, 1)
    assert found.losses == pytest.approx(expected.losses, rel=2e-2)
    assert found.norms == pytest.approx(expected.norms, rel=5e-2)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_sum_gives_gradients_as_often_as_there_are_sequence_ranks(stage):
    setting, sizes = Setting(), {"data": 1, "sequence": 2}
    keys = {"sequence_parallel_gradient": "sum"}
    with opened(setting, sizes, stage=stage, **keys) as (engine, group):
        found = trained(engine, group, setting, steps=1)
    expected = tiny.in_one_process(setting, 1)
    assert found.norms == pytest.approx([2 * expected.norms[0]], rel=1e-12)


@on_ranks(4)
def test_a_model_under_zero_init_equals_one_process():
    setting, sizes = Setting(kv_heads=2, packed=True), {"data": 2, "sequence": 2}
    with zeroshard.zero.Init(config_dict_or_path={"zero_optimization": {"stage": 3}}):
        net = tiny.model(setting)
    with opened(setting, sizes, stage=3, net=net) as (engine, group):
        found = trained(engine, group, setting)
    assert_equal(found, tiny.in_one_process(setting, sizes["data"]))


@pytest.mark.full
@pytest.mark.parametrize(
    ("shape", "stage"), [((2, 4), 3), ((4, 2), 1), ((2, 4), 0), ((2, 2, 2), 3)]
)
@on_ranks(8)
def test_eight_ranks_equal_one_process(shape, stage):
    sizes = dict(zip(("data", "sequence", "tensor"), shape, strict=False))
    check(Setting(kv_heads=2, packed=True), sizes, stage)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_a_checkpoint_goes_from_sequence_ranks_to_data_ranks_and_back(stage, tmp_path):
    setting, shared = Setting(), {"data": 1, "sequence": 2}
    steps = tiny.batches(setting, 1)
    with opened(setting, shared, stage=stage) as (engine, group):
        trained(engine, group, setting, steps=1)
        engine.save_checkpoint(tmp_path, tag="shared")
    asked = config(
        stage,
        train_micro_batch_size_per_gpu=tiny.SAMPLES,
        gradient_clipping=tiny.CLIP,
        optimizer={"type": "AdamW", "params": {"lr": tiny.LR, "weight_decay": 0.01}},
    )
    alone, *_ = zeroshard.initialize(model=tiny.model(setting), config=asked)
    alone.load_checkpoint(tmp_path, tag="shared")
    batch = steps[1][0][0]
    out = alone(input_ids=batch["input_ids"], position_ids=batch["position_ids"])
    alone.backward(tiny.cross_entropy(out.logits, tiny.shifted(batch["labels"])))
    alone.step()
    alone.save_checkpoint(tmp_path, tag="alone")
    alone.close()
    with opened(setting, shared, stage=stage) as (engine, group):
        engine.load_checkpoint(tmp_path, tag="alone")
        own = sequence.split_batch(steps[2][0][0], group)
        labels = own.pop("shift_labels")
        loss = tiny.cross_entropy(engine(**own).logits, labels)
        engine.backward(sequence.mean_over_tokens(loss, (labels != -100).sum(), group))
        engine.step()
        params = {name: param.clone() for name, param in engine.iter_full_params()}
    expected = tiny.in_one_process(setting, 1)
    for name, param in params.items():
        torch.testing.assert_close(param, expected.params[name], rtol=0, atol=1e-12)
