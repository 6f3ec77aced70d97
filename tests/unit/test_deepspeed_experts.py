"""Checkpoints of DeepSpeed with layers of experts: each is found under its number in the layer."""

from __future__ import annotations

import shutil

import pytest
import torch
from support.deepspeed_experts import AT, BUFFER, DENSE, ExpertRun, write_experts
from support.deepspeed_files import KEYS, deepspeed_classes, optim_file, value

from zeroshard.checkpoint.deepspeed.reader import DeepSpeedReader
from zeroshard.checkpoint.reader import full
from zeroshard.checkpoint.zero_to_fp32 import export_checkpoint
from zeroshard.errors import CheckpointError
from zeroshard.experts.marks import matched_groups

assert deepspeed_classes  # a fixture

RUNS = [
    (stage, ranks, ep_size, far, chunks)
    for stage in (1, 2)
    for ranks, ep_size, far, chunks in (
        (2, 2, False, 1), (4, 2, False, 1), (4, 2, True, 2), (3, 1, False, 1), (6, 2, True, 1),
    )
]  # fmt: skip


def check(saved, run, keys=tuple(KEYS)):
    assert set(saved.parameters) == set(run.all_shapes)
    for name, shape in run.all_shapes.items():
        for key in keys:
            assert torch.equal(full(saved, name, key), KEYS[key](value(name, shape))), (name, key)


@pytest.mark.parametrize(("stage", "ranks", "ep_size", "far", "chunks"), RUNS)
def test_masters_and_moments_of_all_experts_come_back(
    tmp_path, deepspeed_classes, stage, ranks, ep_size, far, chunks
):
    run = ExpertRun(stage, ranks, ep_size=ep_size, far=far, chunks=chunks, align=4)
    saved = DeepSpeedReader(write_experts(tmp_path, run, deepspeed_classes))
    check(saved, run)
    assert saved.left_behind == []
    assert list(saved.parameters)[: len(DENSE)] == list(DENSE)
    for name, parameter in saved.parameters.items():
        assert (parameter.group > 0) == (AT in name)
        assert parameter.scalars == {"step": ("F32", 3.0)}
    buffers = saved.buffers(0)
    assert len(buffers) == 1 + sum(run.layers)
    assert torch.equal(buffers[f"0.{AT}3.scale"], torch.full(BUFFER, 3.0))
    assert [group.get("moe", False) for group in saved.shared()["groups"]] == [False] + [
        True
    ] * chunks


@pytest.mark.parametrize(("ranks", "ep_size", "chunks"), [(2, 2, 1), (4, 2, 2)])
def test_stage_0_has_an_optimizer_for_each_place(
    tmp_path, deepspeed_classes, ranks, ep_size, chunks
):
    run = ExpertRun(0, ranks, ep_size=ep_size, kind="torch", chunks=chunks)
    saved = DeepSpeedReader(write_experts(tmp_path, run, deepspeed_classes))
    check(saved, run, ("exp_avg", "exp_avg_sq"))
    for name, shape in run.all_shapes.items():
        assert torch.equal(full(saved, name), value(name, shape).bfloat16())


def test_weights_are_exported(tmp_path, deepspeed_classes):
    run = ExpertRun(1, 2)
    saved = DeepSpeedReader(write_experts(tmp_path / "tag", run, deepspeed_classes))
    export_checkpoint(saved, tmp_path / "out")
    from safetensors.torch import load_file

    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == run.all_shapes.keys() | saved.buffers(0).keys()


def test_a_missing_a_strange_and_an_exchanged_file_are_refused(tmp_path, deepspeed_classes):
    run = ExpertRun(2, 4)
    good = write_experts(tmp_path / "good", run, deepspeed_classes)

    def copied(name):
        return shutil.copytree(good, tmp_path / name)

    lacks = copied("lacks")
    (lacks / "layer_1_expert_1_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(
        CheckpointError, match=r"lacks the file layer_1_expert_1_.*num_experts \[4, 2\]"
    ):
        DeepSpeedReader(lacks)
    more = copied("more")
    first = more / "layer_0_expert_0_mp_rank_00_model_states.pt"
    shutil.copy(first, more / "layer_2_expert_0_mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="has the file layer_2_expert_0"):
        DeepSpeedReader(more)
    other = copied("other")
    torch.save({"head": torch.zeros(1)}, other / "layer_0_expert_0_mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="has 'head', which is not a tensor of one expert"):
        DeepSpeedReader(other)
    # Ranks 0 and 2 have the same experts, and other parts of them.
    swapped = copied("swapped")
    shutil.copy(optim_file(good, 2), optim_file(swapped, 0))
    shutil.copy(optim_file(good, 0), optim_file(swapped, 2))
    with pytest.raises(CheckpointError, match="is not of rank 0"):
        DeepSpeedReader(swapped)
    mixed = copied("mixed")
    shutil.copy(first, mixed / "expp_rank_0_mp_rank_00_optim_states.pt")
    with pytest.raises(
        CheckpointError, match=r"expp_rank_0_.*is of stage 0, and the others are not"
    ):
        DeepSpeedReader(mixed)
    old = copied("old")
    shutil.copy(first, old / "expert_0_mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="the file expert_0_mp_rank_00"):
        DeepSpeedReader(old)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"num_experts": 4}, "without a number of the layer"),
        ({"ds_autoep_layers": [{}]}, "AutoEP"),
    ],
)
def test_other_kinds_of_experts_are_refused(tmp_path, deepspeed_classes, model, said):
    run = ExpertRun(1, 2)
    run.model |= model
    with pytest.raises(CheckpointError, match=said):
        DeepSpeedReader(write_experts(tmp_path, run, deepspeed_classes))


def test_parts_of_a_group_without_experts_are_refused(tmp_path, deepspeed_classes):
    run = ExpertRun(1, 4, optim={"partition_count": [2, 2]})
    with pytest.raises(CheckpointError, match="is split into"):
        DeepSpeedReader(write_experts(tmp_path, run, deepspeed_classes))


def experts(name, **options):
    return {"moe": True, "name": name, **options}


@pytest.mark.parametrize(
    ("saved", "own", "found"),
    [
        ([{"lr": 1}, experts("a", lr=1)], [{"lr": 9}], [[0], [0]]),
        ([{"lr": 1}, experts("a", lr=1), experts("a", lr=1)], [{}, experts("a")], [[0], [1], [1]]),
        ([{"lr": 1}, experts("a"), experts("b"), {}], [{}, {}, experts("a")], None),
        ([{"lr": 1}, {"lr": 2}, experts("a", lr=2)], [{}, {}], [[0], [1], [1]]),
        ([{"lr": 1}], [{"lr": 3}, experts("a", lr=3)], [[0, 1]]),
        ([{"lr": 1}], [{"lr": 3}, experts("a", lr=4)], None),
        ([{"lr": 1}, {"lr": 1}], [{"lr": 3}], None),
        ([], [{"lr": 3}], None),
    ],
)
def test_groups_of_experts_find_the_group_that_they_were_made_from(saved, own, found):
    assert matched_groups(saved, own) == found
