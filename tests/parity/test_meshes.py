"""What training on a mesh is combined with: 16 bit, offload, recomputed blocks, odd numbers of ranks,
models on the meta device, edits, exports, loaders, uneven batches. The numbers are those of one plain
process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support.covering import covering, each_value
from support.edge_case_models import Case
from support.mesh_runs import (
    CLIP,
    LENGTH,
    LR,
    MICRO_BATCHES,
    WORDS,
    build,
    differences,
    everything,
    loss_of,
    micro_batches,
    open_engine,
    plain_training,
    train,
)
from support.parity import Scale, Trajectory, reference_run
from torch import Tensor, nn
from torch.utils.data import Dataset
from zeroshard_testing import on_ranks, run_ranks

import zeroshard
from zeroshard import Engine
from zeroshard.core.mesh import Mesh
from zeroshard.data.batches import loader_for
from zeroshard.errors import UnevenBatches
from zeroshard.parallel.initial_values import draw_values
from zeroshard.zero import safe_set_full_fp32_param, safe_set_full_optimizer_state

PIPELINE = Mesh(pipeline=2, data_shard=2)
TENSOR = Mesh(data_shard=2, tensor=2)
REPLICAS = Mesh(data_replicate=2, data_shard=2)
THREE = Mesh(pipeline=2, data_shard=2, tensor=2)
PIPELINE_REPLICAS = Mesh(pipeline=2, data_replicate=2, data_shard=2)
STEPS = 4


def check(engine: Engine, steps: int = STEPS) -> None:
    """The numbers are those of one plain process in fp64."""
    expected, norms = plain_training(steps)
    assert min(norms) > CLIP
    assert train(engine, steps) == pytest.approx(norms, rel=1e-14)
    for name, value in engine.iter_full_params():
        error = (value - expected[name]).abs().max() / expected[name].abs().max()
        assert error <= 1e-12, (name, float(error))


# -- recomputed blocks -----------------------------------------------------------------------------


def recomputes(mesh: Mesh, stage: int, kind: str) -> None:
    with open_engine(mesh, stage, model=build(torch.float64, recompute=kind)) as engine:
        check(engine)


@pytest.mark.parametrize(
    ("stage", "mesh", "kind"),
    each_value([*itertools.product((0, 1, 2, 3), (PIPELINE, TENSOR), ("reentrant", "other"))]),
    ids=str,
)
@on_ranks(4)
def test_recomputed_blocks_give_the_same_numbers(stage, mesh, kind):
    recomputes(mesh, stage, kind)


@pytest.mark.parametrize(("stage", "kind"), [(1, "other"), (3, "reentrant")])
@on_ranks(8, timeout=100)
def test_recomputed_blocks_give_the_same_numbers_in_three_dimensions(stage, kind):
    recomputes(THREE, stage, kind)


# -- three ranks, replicas of pipelines ------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(3)
def test_three_ranks(stage):
    """Three stages, or parts of 8, 8 and 6 columns."""
    with open_engine(Mesh(pipeline=3), stage, model=build(torch.float64)) as engine:
        check(engine)
    with open_engine(Mesh(tensor=3), stage, model=build(torch.float64)) as engine:
        check(engine)


@pytest.mark.parametrize(
    ("stage", "outer"),
    [*((stage, "bucket") for stage in (0, 1, 2, 3)), (2, "boundary"), (3, "boundary")],
)
@on_ranks(8, timeout=100)
def test_replicas_of_a_pipeline(stage, outer):
    """Also the elements that a rank sends on each of the two hops of its stage in one step."""
    zero, model = {"hierarchy": {"outer_reduce": outer}}, build(torch.float64)
    with open_engine(PIPELINE_REPLICAS, stage, model=model, zero=zero) as engine:
        check(engine)
        recorders = {recorder.group.split()[0]: recorder for recorder in engine._watch.recorders}
        for recorder in recorders.values():
            recorder.reset_traffic()
        train(engine, 1)
        for unit in engine.runtime.units:
            unit.wait_for_unshard()
        N = sum(unit.layout.full_numel for unit in engine.runtime.units)
        S, reductions = N // 2, MICRO_BATCHES if stage >= 2 else 1
        inside, between = recorders["holders"].sent_numel, recorders["replicas"].sent_numel
        assert inside["reduce_scatter"] == reductions * (N - S)
        if stage < 3:
            assert inside["all_gather"] == N - S
        passed = 1 if outer == "boundary" else reductions
        sent = {op: numel for op, numel in between.items() if numel}
        assert sent == dict.fromkeys(("reduce_scatter", "all_gather"), passed * S / 2)


# -- offload ---------------------------------------------------------------------------------------


def offloads(mesh: Mesh, stage: int, folder: Any, **options: Any) -> None:
    disk = {"device": "nvme", "nvme_path": str(folder)}
    kept: dict[str, Tensor] | None = None
    for where in ({}, {"device": "cpu"}, disk):
        zero: dict[str, Any] = {"offload_optimizer": where} if where else {}
        if where and stage == 3:
            zero["offload_param"] = where
        with open_engine(mesh, stage, zero=zero, **options) as engine:
            train(engine, 2)
            found = everything(engine)
        if kept is None:
            kept = found
        assert len(found) > 4
        assert differences(found, kept) == [], (zero, options)


@pytest.mark.parametrize(
    ("stage", "gather", "bf16"),
    covering(
        [
            (stage, gather, bf16)
            for stage, gather, bf16 in itertools.product(
                (1, 2, 3), ("micro_batch", "step"), (False, True)
            )
            if stage == 3 or gather == "micro_batch"
        ]
    ),
)
@on_ranks(4)
def test_offload_changes_no_bit_of_a_pipeline(stage, gather, bf16, tmp_path):
    offloads(PIPELINE, stage, tmp_path, cut={"gather": gather}, bf16={"enabled": bf16})


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("mesh", [TENSOR, REPLICAS], ids=lambda mesh: mesh.text)
@on_ranks(4)
def test_offload_changes_no_bit_on_four_ranks(mesh, stage, tmp_path):
    offloads(mesh, stage, tmp_path, bf16={"enabled": True})


@pytest.mark.parametrize(("mesh", "stage"), [(THREE, 3), (PIPELINE_REPLICAS, 1)], ids=str)
@on_ranks(8, timeout=100)
def test_offload_changes_no_bit_on_eight_ranks(mesh, stage, tmp_path):
    """Four ranks show each of the two dimensions at both stages."""
    offloads(mesh, stage, tmp_path)


# -- 16 bit ----------------------------------------------------------------------------------------


def adamw(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=LR, weight_decay=1e-2, eps=1e-3)


def in_one_process(precision: str, dp_size: int, scale: Scale) -> Trajectory:
    """Plain PyTorch: 16-bit gradients of each share and micro-batch, which are added in fp32."""
    case = Case(
        build=build,
        make_batch=lambda *_: (),
        loss=lambda model, batch: loss_of(model(batch[0]), batch[1]),
        config={},
    )
    batches = [
        [
            [micro_batches(step, rank, dp_size)[micro] for rank in range(dp_size)]
            for micro in range(MICRO_BATCHES)
        ]
        for step in range(STEPS)
    ]
    return reference_run(case, adamw, batches, clip=CLIP, precision=precision, scale=scale)  # type: ignore[arg-type]


def check_16_bit(mesh: Mesh, stage: int, precision: str, rtol: float, **cut: Any) -> None:
    scale = Scale(dynamic=False, value=256.0 if precision == "fp16" else 1.0)
    expected = in_one_process(precision, mesh.dp_size, scale)
    keys: dict[str, Any] = {precision: {"enabled": True}, "communication_data_type": "fp32"}
    if precision == "fp16":
        keys["fp16"]["loss_scale"] = 256
    with open_engine(mesh, stage, cut=cut, **keys) as engine:
        assert train(engine, STEPS) == pytest.approx(expected.grad_norms, rel=rtol)
        for name, value in everything(engine).items():
            if name.endswith(" master"):
                wanted = expected.masters[name.removesuffix(" master")]
                error = float((value - wanted).abs().max() / wanted.abs().max())
                assert error <= rtol, (name, error)


@pytest.mark.parametrize(
    ("stage", "precision", "mesh", "when"),
    each_value(
        [
            (stage, precision, mesh, when)
            for stage, precision in itertools.product((0, 1, 2, 3), ("bf16", "fp16"))
            for mesh, when in ((PIPELINE, "micro_batch"), (PIPELINE, "step"), (TENSOR, ""))
            if stage >= 2 or when != "step"
        ]
    ),
    ids=str,
)
@on_ranks(4)
def test_16_bit_on_four_ranks(stage, precision, mesh, when):
    """A stage computes what one process computes; tensor ranks round their parts of a sum."""
    cut = {"gather": when, "reduce": when} if when == "step" else {}
    check_16_bit(mesh, stage, precision, 1e-6 if mesh == PIPELINE else 1e-2, **cut)


@pytest.mark.parametrize(("stage", "precision"), [(1, "bf16"), (3, "fp16")])
@on_ranks(8, timeout=100)
def test_16_bit_in_three_dimensions(stage, precision):
    check_16_bit(THREE, stage, precision, 1e-2)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(8, timeout=100)
def test_an_overflow_of_one_stage_is_a_skipped_step_on_all_ranks(stage):
    """Also if a part of one tensor rank is all that overflows."""
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    with open_engine(THREE, stage, fp16=fp16) as engine:
        train(engine, 1)
        before = everything(engine)
        (up,) = (p for name, p in engine.module.named_parameters() if "up.weight" in name)
        if engine.global_rank == 5:  # of the second stage
            up.register_hook(lambda grad: grad * float("inf"))
        train(engine, 1)
        assert engine.skipped_steps == 1
        assert engine.last_step.skipped
        assert float(engine.scaler.scale) == 128.0
        after = everything(engine)
        assert differences(after, before) == [name for name in after if name.endswith("seen")]


RULES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
    "sums in bf16": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
    "bf16 master": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    "norms in fp32": {
        "bf16": {"enabled": True}, "data_types": {"keep_in_fp32_modules": ["*norm*"]}
    },
    "prescaled": {"prescale_gradients": True, "gradient_predivide_factor": 2.0},
    "warm-up": {
        "scheduler": {
            "type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 0.02}
        }
    },
}  # fmt: skip


def under_every_rule(mesh: Mesh, stage: int) -> dict[str, tuple[dict[str, Tensor], list[Any]]]:
    found = {}
    for name, keys in RULES.items():
        with open_engine(mesh, stage, **keys) as engine:
            norms = train(engine, 3)
            last = engine.last_step
            counts = [engine.global_samples, engine.micro_steps, last.lr, last.loss_scale]
            values = {fqn: value.clone() for fqn, value in engine.iter_full_params()}
            found[name] = values, [*norms, *counts]
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_two_stages_give_the_bits_of_one_rank(stage):
    """Without data-parallel ranks no sum is formed in another order, under any rule of precision."""
    (alone,) = run_ranks(under_every_rule, 1, Mesh(), stage)
    parts = run_ranks(under_every_rule, 2, Mesh(pipeline=2), stage)
    for name, (values, numbers) in alone.items():
        assert differences(parts[0][name][0] | parts[1][name][0], values) == [], name
        assert parts[0][name][0].keys() | parts[1][name][0].keys() == values.keys()
        for part in parts:
            assert part[name][1] == pytest.approx(numbers, rel=1e-6), name


# -- reads, edits and exports ----------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(8, timeout=100)
def test_edits_of_whole_tensors_reach_all_parts_in_three_dimensions(stage):
    shapes = {name: param.shape for name, param in build().named_parameters()}
    with open_engine(THREE, stage, bf16={"enabled": True}) as engine:
        train(engine, 1)
        wanted = {}
        for name, param in engine.module.named_parameters():
            value = torch.arange(float(shapes[name].numel())).view(shapes[name]) / 64
            safe_set_full_fp32_param(param, value)
            safe_set_full_optimizer_state(param, value + 1, "exp_avg")
            wanted |= {
                name: value.bfloat16(), f"{name} master": value, f"{name} exp_avg": value + 1
            }  # fmt: skip
        assert differences(wanted, everything(engine)) == []
        engine.offload_states()
        engine.reload_states()
        assert differences(wanted, everything(engine)) == []


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(4)
def test_exports_have_whole_tensors(stage, tmp_path):
    for mesh in (TENSOR, REPLICAS):
        with open_engine(mesh, stage, bf16={"enabled": True}) as engine:
            train(engine, 1)
            engine.save_16bit_model(str(tmp_path), f"{mesh.tensor}.safetensors")
            expected = everything(engine)
            if engine.global_rank == 0:
                found = load_file(tmp_path / f"{mesh.tensor}.safetensors")
                assert {name for name, _ in build().named_parameters()} <= found.keys()
                assert differences(found, expected) == []


# -- the meta device -------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(4)
def test_a_pipeline_on_the_meta_device_starts_with_the_values_of_one_process(stage):
    """Equal layers of two stages differ, and only the seed of rank 0 counts."""
    with torch.device("meta"):
        plain, halves, whole = build(), build(), build()
    draw_values(plain, 7)
    expected = dict(plain.named_parameters())
    assert not torch.equal(expected["1.up.weight"], expected["2.up.weight"])
    one = zeroshard.parallel.pipeline(whole, split=["2"], loss_fn=loss_of)
    for mesh, model in ((PIPELINE, halves), (Mesh(data_shard=4), one)):
        torch.manual_seed(7 + dist.get_rank())
        with open_engine(mesh, stage, model=model) as engine:
            found = dict(engine.iter_full_params())
            assert len(found) == len(expected) // mesh.pipeline
            assert differences(found, expected) == []


# -- loaders of the engine -------------------------------------------------------------------------


class Words(Dataset):
    """Sample ``i`` is words and its number."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, at: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(at)
        return torch.randint(0, WORDS, (LENGTH,), generator=draw), torch.tensor(at)


def fit(engine: Engine, loader: Iterator[Any], steps: int) -> list[int]:
    seen: list[int] = []
    for words, numbers in itertools.islice(loader, steps):
        engine.backward(loss_of(engine(words), words))
        engine.step()
        seen += numbers.tolist()
    return seen


@pytest.mark.parametrize("mesh", [TENSOR, REPLICAS], ids=lambda mesh: mesh.text)
@on_ranks(4)
def test_the_position_in_the_data_is_saved_and_shared_out_on_another_mesh(mesh, tmp_path):
    """Shuffled data and dropout: 3 + 3 steps are 6 to the bit, and each sample is used once."""
    keys = {"gradient_accumulation_steps": 1, "train_micro_batch_size_per_gpu": 4}

    def opened(on: Mesh) -> tuple[Engine, Iterator[Any]]:
        engine = open_engine(on, 2, model=build(dropout=0.1), **keys)
        engine.training_dataloader = loader_for(engine, Words())
        return engine, engine.training_dataloader

    engine, loader = opened(mesh)
    with engine:
        batches = iter(loader)
        first = fit(engine, batches, 3)
        engine.save_checkpoint(tmp_path)
        second = fit(engine, batches, 3)
        expected = everything(engine)
    engine, loader = opened(mesh)
    with engine:
        engine.load_checkpoint(tmp_path)
        assert fit(engine, iter(loader), 3) == second
        assert differences(everything(engine), expected) == []
    engine, loader = opened(Mesh(data_shard=4))
    with engine:
        engine.load_checkpoint(tmp_path)
        rest = fit(engine, iter(loader), 99)
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, (first, rest))
    firsts = [numbers for numbers, _ in everyone]
    if mesh.tensor > 1:
        assert firsts[::2] == firsts[1::2]
        firsts = firsts[::2]
    used = itertools.chain(*firsts, *(numbers for _, numbers in everyone))
    assert sorted(used) == list(range(96))


# -- uneven batches --------------------------------------------------------------------------------


def batch(at: int, dp_rank: int) -> Tensor:
    draw = torch.Generator().manual_seed(10 * at + dp_rank)
    return torch.randint(0, WORDS, (2, LENGTH), generator=draw)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(4)
def test_tensor_groups_with_different_numbers_of_batches(stage):
    """The mean of a step is over the data-parallel ranks that have a batch."""
    counts = (2, 4)
    plain = build(torch.float64)
    optimizer = adamw(list(plain.named_parameters()))
    for at in range(max(counts)):
        there = [batch(at, rank) for rank, count in enumerate(counts) if at < count]
        for words in there:
            (loss_of(plain(words), words) / len(there)).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    keys = {"uneven": "join", "gradient_accumulation_steps": 1}
    with open_engine(TENSOR, stage, model=build(torch.float64), **keys) as engine:
        own = [batch(at, engine.dp_rank) for at in range(counts[engine.dp_rank])]
        for words in engine.batches(own):
            engine.backward(loss_of(engine(words), words))
            engine.step()
        expected = dict(plain.named_parameters())
        for name, value in engine.iter_full_params():
            error = (value - expected[name]).abs().max() / expected[name].abs().max()
            assert error <= 1e-12, (name, float(error))


@pytest.mark.parametrize("uneven", ["error", "join"])
@on_ranks(4)
def test_a_tensor_group_with_different_numbers_of_batches_is_an_error_on_all_ranks(uneven):
    keys = {"uneven": uneven, "gradient_accumulation_steps": 1}
    with open_engine(TENSOR, 1, **keys) as engine:
        own = [batch(at, engine.dp_rank) for at in range(2 if engine.global_rank == 3 else 3)]
        text = "rank 3 has no batch 2, but another one of the ranks 2, 3 does"
        with pytest.raises(UnevenBatches, match=text):
            for words in engine.batches(own):
                engine.backward(loss_of(engine(words), words))
                engine.step()
        assert engine.global_steps == 2
