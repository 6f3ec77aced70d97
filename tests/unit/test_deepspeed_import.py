"""Checkpoints of DeepSpeed are read bit for bit. Wrong files are refused, and no code in them runs.

The directories are made here, with the same files, keys and cuts as those of real runs.
tests/compat/test_deepspeed_checkpoints.py reads those of real runs, if DeepSpeed is installed.
"""

from __future__ import annotations

import os
import sys
import types
from argparse import Namespace
from enum import Enum
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.deepspeed_files import (
    GROUPS,
    KEYS,
    OPTIONS,
    SHAPES,
    Run,
    check_values,
    deepspeed_classes,
    first_moment,
    model_file,
    optim_file,
    value,
    write,
)
from torch.serialization import get_safe_globals

from zeroshard.checkpoint.boxes import Box
from zeroshard.checkpoint.deepspeed.files import is_deepspeed
from zeroshard.checkpoint.deepspeed.reader import DeepSpeedReader
from zeroshard.checkpoint.deepspeed.unpickle import load_plain
from zeroshard.checkpoint.reader import full
from zeroshard.errors import CheckpointError

assert deepspeed_classes  # a fixture

SHARDED = [(stage, ranks) for stage in (1, 2, 3) for ranks in (1, 2, 3, 5, 16)]


# ---------------------------------------------------------------------- what is read


@pytest.mark.smoke
@pytest.mark.parametrize(("stage", "ranks"), SHARDED)
def test_masters_and_moments_come_back(tmp_path, deepspeed_classes, stage, ranks):
    run = Run(stage, ranks)
    saved = DeepSpeedReader(write(tmp_path, run, deepspeed_classes))
    check_values(saved, run)
    assert set(saved.parameters) == set(SHAPES)
    for name, parameter in saved.parameters.items():
        assert parameter.trained
        assert parameter.shape == SHAPES[name]
        assert name in GROUPS[parameter.group]
        assert parameter.scalars == {"step": ("F32", 3.0)}
        assert {key: t.dtype for key, t in parameter.tensors.items()} == dict.fromkeys(KEYS, "F32")
    assert saved.left_behind == []


@pytest.mark.parametrize("written", ["Stage(3)", "getattr(Stage, 'weights')"])
def test_a_stage_comes_back_in_both_forms_that_pythons_write(
    tmp_path, deepspeed_classes, monkeypatch, written
):
    stage = deepspeed_classes.Stage
    form = (stage, (3,)) if written == "Stage(3)" else (getattr, (stage, "weights"))
    monkeypatch.setattr(stage, "__reduce_ex__", lambda _self, _protocol: form)
    run = Run(3, 2, optim={"other": stage(3)})
    check_values(DeepSpeedReader(write(tmp_path, run, deepspeed_classes)), run)


def test_a_member_of_another_enum_is_a_placeholder_that_names_it(tmp_path):
    name = "a_module_of_nobody"
    module = types.ModuleType(name)
    module.Colour = Enum("Colour", {"red": 1}, module=name)
    module.Colour.__reduce_ex__ = lambda self, _protocol: (getattr, (type(self), self.name))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, module)
        torch.save({"colour": module.Colour.red}, tmp_path / "file.pt")
    found = load_plain(tmp_path / "file.pt", {})["colour"]
    with pytest.raises(CheckpointError, match=r"an object of type a_module_of_nobody\.Colour"):
        int(found)


def test_getattr_reads_nothing_but_members_of_enums(tmp_path):
    """``getattr`` of a known class would be a way to its methods, and from there to any code."""
    torch.save({"it": _Reduced(getattr, (Namespace, "__init__"))}, tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match="cannot be read without running code"):
        load_plain(tmp_path / "file.pt", {})


class _Reduced:
    def __init__(self, call, arguments):
        self.form = call, arguments

    def __reduce_ex__(self, _protocol):
        return self.form


@pytest.mark.parametrize("align", [4, 8])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_aligned_parameters_have_gaps_between_them(tmp_path, deepspeed_classes, align, ranks):
    run = Run(2, ranks, align=align)
    check_values(DeepSpeedReader(write(tmp_path, run, deepspeed_classes)), run)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_piece_of_any_run_comes_back(tmp_path_factory, deepspeed_classes, data):
    dims = st.lists(st.integers(0, 5), max_size=3).map(tuple)
    shapes = data.draw(st.dictionaries(st.sampled_from("abcdefgh"), dims, min_size=2))
    cut = data.draw(st.integers(1, len(shapes) - 1))
    names = list(shapes)
    run = Run(
        data.draw(st.sampled_from([1, 2, 3])),
        data.draw(st.integers(1, 6)),
        shapes=shapes,
        groups=[names[:cut], names[cut:]],
        align=data.draw(st.sampled_from([1, 4])),
        sub_group=data.draw(st.integers(1, 4)),
    )
    saved = DeepSpeedReader(write(tmp_path_factory.mktemp("run"), run, deepspeed_classes))
    name = data.draw(st.sampled_from(names))
    numel = prod(shapes[name])
    begin = data.draw(st.integers(0, numel))
    out = torch.full((data.draw(st.integers(0, numel - begin)),), float("nan"))
    saved.fill(name, "exp_avg", begin, out)
    expected = first_moment(value(name, shapes[name])).reshape(-1)
    assert torch.equal(out, expected[begin : begin + out.numel()])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_part_that_a_tensor_rank_has_comes_back(tmp_path, deepspeed_classes, stage):
    run = Run(stage, 3, shapes={"w": (6, 10), "b": (7,)}, groups=[["w", "b"]])
    saved = DeepSpeedReader(write(tmp_path, run, deepspeed_classes))
    whole = value("w", (6, 10))
    for box, expected in (
        (Box((0, 5), (6, 5)), whole[:, 5:]),
        (Box((3, 0), (3, 10)), whole[3:]),
        (Box((0, 0), (6, 10)), whole),
    ):
        flat = expected.reshape(-1)
        for begin, end in ((0, len(flat)), (3, len(flat) - 4)):
            out = torch.empty(end - begin)
            saved.fill("w", "value", begin, out, box)
            assert torch.equal(out, flat[begin:end])
    saved.close()


@pytest.mark.parametrize("kind", ["list", "flat"])
def test_stage_0_with_masters(tmp_path, deepspeed_classes, kind):
    run = Run(0, kind=kind, groups=[list(SHAPES)])
    saved = DeepSpeedReader(write(tmp_path, run, deepspeed_classes))
    check_values(saved, run)
    assert saved.shared()["scaler"] == {
        "scale": 2048.0, "step": 3, "last_overflow": 1, "budget": 1
    }  # fmt: skip


def test_stage_0_without_masters_has_the_module_s_values(tmp_path, deepspeed_classes):
    run = Run(0, kind="torch", groups=[list(SHAPES)])
    saved = DeepSpeedReader(write(tmp_path, run, deepspeed_classes))
    check_values(saved, run, ("exp_avg", "exp_avg_sq"))
    found = full(saved, "embed.weight")
    assert torch.equal(found, value("embed.weight", (11, 7)).bfloat16())


@pytest.mark.parametrize("kind", ["list", "flat", "torch"])
def test_stage_0_with_two_groups_needs_their_names(tmp_path, deepspeed_classes, kind):
    run = Run(0, kind=kind)
    path = write(tmp_path, run, deepspeed_classes)
    with pytest.raises(CheckpointError, match="names of the trained parameters by group"):
        DeepSpeedReader(path)
    saved = DeepSpeedReader(path, groups=GROUPS)
    check_values(saved, run, ("exp_avg", "exp_avg_sq"))
    assert saved.parameters["gain"].group == 1


@pytest.mark.parametrize(
    "groups",
    [
        [GROUPS[1], GROUPS[0]],
        [GROUPS[0], [*GROUPS[1][:2], "nobody"]],
        [GROUPS[0], [*GROUPS[1], "up.bias"]],
        [[*GROUPS[0], *GROUPS[1]]],
    ],
)
@pytest.mark.parametrize("kind", ["list", "flat", "torch"])
def test_stage_0_refuses_groups_of_another_model(tmp_path, deepspeed_classes, groups, kind):
    path = write(tmp_path, Run(0, kind=kind), deepspeed_classes)
    if kind == "torch" and groups[0] == GROUPS[1]:
        return  # nothing but the state's shapes tells: see left_behind
    with pytest.raises(CheckpointError, match=r"group"):
        DeepSpeedReader(path, groups=groups)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_tied_weights_are_one_parameter_with_two_names(tmp_path, deepspeed_classes, stage):
    run = Run(stage, 2, tied={"lm_head.weight": "embed.weight"}, groups=[list(SHAPES)])
    saved = DeepSpeedReader(write(tmp_path, run, deepspeed_classes))
    check_values(saved, run)
    assert saved.parameters["embed.weight"].aliases == ("lm_head.weight",)
    assert "lm_head.weight" not in saved.parameters


def test_empty_parameters_are_not_tied(tmp_path, deepspeed_classes):
    """They have one address, by which DeepSpeed knows tied weights."""
    frozen = {"a": (0, 3), "b": (5, 0)}
    run = Run(2, 1, frozen=frozen, model={"shared_params": {"b": "a"}})
    saved = DeepSpeedReader(write(tmp_path, run, deepspeed_classes))
    assert saved.parameters["a"].aliases == ()
    assert full(saved, "b").shape == (5, 0)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_frozen_parameters_come_back_as_they_were_computed_with(tmp_path, deepspeed_classes, stage):
    frozen = {"base.weight": (5, 3), "base.bias": (1,)}
    saved = DeepSpeedReader(write(tmp_path, Run(stage, 3, frozen=frozen), deepspeed_classes))
    for name, shape in frozen.items():
        parameter = saved.parameters[name]
        assert not parameter.trained
        assert parameter.group is None
        assert set(parameter.tensors) == {"value"}
        assert torch.equal(full(saved, name), value(name, shape).bfloat16())


def test_frozen_parameters_may_have_been_left_out(tmp_path, deepspeed_classes):
    run = Run(3, 2, model={"frozen_param_shapes": None, "frozen_param_fragments": None})
    check_values(DeepSpeedReader(write(tmp_path, run, deepspeed_classes)), run)


def test_buffers_are_the_rank_s_own_at_stage_3_and_rank_0_s_below(tmp_path, deepspeed_classes):
    below = DeepSpeedReader(write(tmp_path / "2", Run(2, 3), deepspeed_classes))
    assert [int(below.buffers(rank)["seen"]) for rank in range(4)] == [5, 5, 5, 5]
    own = DeepSpeedReader(write(tmp_path / "3", Run(3, 3), deepspeed_classes))
    assert [int(own.buffers(rank)["seen"]) for rank in range(4)] == [5, 6, 7, 5]


def test_a_run_that_never_stepped_has_masters_alone(tmp_path, deepspeed_classes):
    run = Run(2, 2, state=False)
    saved = DeepSpeedReader(write(tmp_path, run, deepspeed_classes))
    check_values(saved, run, ("value",))
    assert set(saved.parameters["gain"].tensors) == {"value"}
    assert saved.parameters["gain"].scalars == {}


def test_an_engine_without_an_optimizer_saves_weights(tmp_path, deepspeed_classes):
    path = write(tmp_path, Run(0, groups=[], model={"optimizer": None}), deepspeed_classes)
    saved = DeepSpeedReader(path)
    assert torch.equal(full(saved, "gain"), value("gain", (1,)).bfloat16())
    assert saved.parameters["gain"].trained


def test_state_of_an_elastic_checkpoint_is_a_list(tmp_path, deepspeed_classes):
    run = Run(2, 3)
    path = write(tmp_path, run, deepspeed_classes)
    for rank in range(3):
        file = path / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        whole = torch.load(file, weights_only=False)
        inner = whole["optimizer_state_dict"]
        base = inner["base_optimizer_state"]["state"]
        leans = [master.numel() for master in inner["single_partition_of_fp32_groups"]]
        inner["base_optimizer_state"] = [
            {key: base[at][key][: leans[at]].clone() for key in ("exp_avg", "exp_avg_sq")}
            for at in range(2)
        ]
        inner["base_optimizer_state_step"] = 7
        torch.save(whole, file)
    saved = DeepSpeedReader(path)
    check_values(saved, run)
    assert saved.parameters["gain"].scalars == {"step": ("F32", 7)}
    assert saved.shared()["groups"] == [{}, {}]  # the new run's options stay


def test_a_step_that_the_group_counts_is_each_parameter_s(tmp_path, deepspeed_classes):
    run = Run(1, 2)
    path = write(tmp_path, run, deepspeed_classes)
    edit_optims(
        path, lambda w: [row.update(step=9) for row in w["base_optimizer_state"]["param_groups"]]
    )
    edit_optims(
        path, lambda w: [row.pop("step") for row in w["base_optimizer_state"]["state"].values()]
    )
    saved = DeepSpeedReader(path)
    assert saved.parameters["gain"].scalars == {"step": ("F32", 9)}
    assert "step" not in saved.shared()["groups"][0]


def test_a_step_of_a_state_is_believed_before_its_group_s(tmp_path, deepspeed_classes):
    path = write(tmp_path, Run(3, 2, step=4), deepspeed_classes)
    edit_optims(
        path, lambda w: [row.update(step=0) for row in w["optimizer_state_dict"]["param_groups"]]
    )
    assert DeepSpeedReader(path).parameters["gain"].scalars == {"step": ("F32", 4)}


def test_a_group_that_never_stepped_has_no_step(tmp_path, deepspeed_classes):
    path = write(tmp_path, Run(2, 2, state=False), deepspeed_classes)
    edit_optims(
        path, lambda w: [row.update(step=0) for row in w["base_optimizer_state"]["param_groups"]]
    )
    assert DeepSpeedReader(path).parameters["gain"].scalars == {}


def test_other_state_of_the_run_is_left_behind_and_said(tmp_path, deepspeed_classes):
    path = write(tmp_path, Run(2, 2, model={"random_ltd": {"at": 1}}), deepspeed_classes)
    assert DeepSpeedReader(path).left_behind == ["the state of 'random_ltd'"]


def edit_optims(path, edit, ranks=None):
    for file in sorted(path.glob("*optim_states.pt"))[slice(ranks)]:
        whole = torch.load(file, weights_only=False)
        edit(whole["optimizer_state_dict"])
        torch.save(whole, file)


def test_state_of_another_shape_is_left_behind_and_said(tmp_path, deepspeed_classes):
    path = write(tmp_path, Run(1, 2), deepspeed_classes)

    def add(wrapper):
        wrapper["base_optimizer_state"]["state"][0]["worker_error"] = torch.zeros(1000)

    edit_optims(path, add)
    saved = DeepSpeedReader(path)
    assert set(saved.parameters["embed.weight"].tensors) == set(KEYS)
    (text,) = saved.left_behind
    assert "worker_error" in text


def test_counters_groups_scaler_and_schedule(tmp_path, deepspeed_classes):
    run = Run(2, 2)
    run.scaler = {
        "cur_scale": 512.0, "cur_iter": 30, "last_overflow_iter": 28, "cur_hysteresis": 1,
        "dynamic": True, "scale_window": 1000, "dtype": torch.half,
    }  # fmt: skip
    found = DeepSpeedReader(write(tmp_path, run, deepspeed_classes)).shared()
    assert found["counters"] == {"global_steps": 3, "global_samples": 24, "skipped_steps": 1}
    assert found["groups"] == [{**OPTIONS, "lr": 0.1}, {**OPTIONS, "lr": 0.2}]
    assert found["scaler"] == {"scale": 512.0, "step": 30, "last_overflow": 28, "budget": 1}
    assert found["scheduler"] == {"last_batch_iteration": 2}
    assert found["client_state"] == {}


def test_what_was_not_saved_is_missing(tmp_path, deepspeed_classes):
    run = Run(2, 2, model={"lr_scheduler": None})
    saved = DeepSpeedReader(write(tmp_path, run, deepspeed_classes))
    assert set(saved.shared()) == {"counters", "groups", "client_state"}
    assert saved.ranks() == []


def test_client_state_is_the_program_s_own(tmp_path, deepspeed_classes):
    mine = {
        "epoch": 3,
        "args": Namespace(lr=0.1, names=["a"]),
        "best": np.float64(0.25),
        "flag": np.bool_(True),
        "seen": {"at": torch.arange(3), 7: (1, None)},
    }
    path = write(tmp_path, Run(3, 2, client_state=mine), deepspeed_classes)
    found = DeepSpeedReader(path).shared()["client_state"]
    assert found.keys() == mine.keys()
    assert found["args"] == mine["args"]
    assert found["best"] == 0.25
    assert type(found["best"]) is float
    assert found["flag"] is True
    assert torch.equal(found["seen"]["at"], torch.arange(3))
    assert found["seen"][7] == (1, None)


def test_state_returned_is_the_caller_s_own(tmp_path, deepspeed_classes):
    path = write(tmp_path, Run(2, client_state={"a": torch.zeros(3)}), deepspeed_classes)
    saved = DeepSpeedReader(path)
    saved.shared()["client_state"]["a"].fill_(1)
    saved.shared()["groups"][0]["lr"] = 5
    saved.buffers(0)["seen"].fill_(9)
    assert torch.equal(saved.shared()["client_state"]["a"], torch.zeros(3))
    assert saved.shared()["groups"][0]["lr"] == 0.1
    assert int(saved.buffers(0)["seen"]) == 5


def test_only_what_is_asked_for_is_read(tmp_path, deepspeed_classes):
    shapes = {"big": (4096, 4096), "small": (3,)}
    run = Run(2, shapes=shapes, groups=[list(shapes)], state=False)
    path = write(tmp_path, run, deepspeed_classes)
    before = resident_nbytes()
    saved = DeepSpeedReader(path)
    out = torch.empty(1000)
    saved.fill("big", "value", 5_000_000, out)
    grown = resident_nbytes() - before
    assert torch.equal(out, value("big", (4096, 4096)).view(-1)[5_000_000:5_001_000])
    assert grown < 8 << 20  # of 64 MiB


def resident_nbytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_reading_needs_no_deepspeed_and_leaves_torch_s_list_alone(tmp_path, deepspeed_classes):
    path = write(tmp_path, Run(2, 2), deepspeed_classes)
    before = get_safe_globals()
    with pytest.MonkeyPatch.context() as patch:
        for name in [n for n in sys.modules if n.partition(".")[0] == "deepspeed"]:
            patch.delitem(sys.modules, name)
        DeepSpeedReader(path)
        assert not [n for n in sys.modules if n.partition(".")[0] == "deepspeed"]
    assert get_safe_globals() == before


def test_a_tag_of_deepspeed_is_known_by_its_files(tmp_path, deepspeed_classes):
    for stage in (0, 1, 3):
        run = Run(stage, 2, groups=[list(SHAPES)])
        assert is_deepspeed(write(tmp_path / str(stage), run, deepspeed_classes))
    assert not is_deepspeed(tmp_path)
    assert not is_deepspeed(tmp_path / "nowhere")
    (tmp_path / "manifest.json").write_text("{}")
    assert not is_deepspeed(tmp_path)


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize(("stage", "file"), [(2, optim_file), (3, optim_file), (3, model_file)])
def test_a_rank_without_its_file_is_named(tmp_path, deepspeed_classes, stage, rank, file):
    path = write(tmp_path, Run(stage, 3), deepspeed_classes)
    file(path, rank).unlink()
    with pytest.raises(CheckpointError, match=rf"^[^ ]* lacks .*R = {rank}\. .*copy all files"):
        DeepSpeedReader(path)


def test_all_ranks_without_their_files_are_named(tmp_path, deepspeed_classes):
    path = write(tmp_path, Run(2, 2), deepspeed_classes)
    for file in path.glob("*optim*"):
        file.unlink()
    with pytest.raises(CheckpointError, match="R = 0, 1"):
        DeepSpeedReader(path)


@pytest.mark.parametrize("kind", ["optim", "model"])
def test_files_of_a_larger_run_are_refused(tmp_path, deepspeed_classes, kind):
    path = write(tmp_path, Run(3, 3), deepspeed_classes)
    left = [f for f in path.glob("*rank_2_*") if kind in f.name]
    kept = {file.name: file.read_bytes() for file in left}
    for file in path.iterdir():
        file.unlink()
    write(tmp_path, Run(3, 2), deepspeed_classes)
    for name, data in kept.items():
        (path / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=r"3 ranks, but the run had 2: .*rank_2"):
        DeepSpeedReader(path)


def test_files_of_two_runs_of_one_size_are_refused(tmp_path, deepspeed_classes):
    path = write(tmp_path / "a", Run(2, 2), deepspeed_classes)
    other = write(tmp_path / "b", Run(2, 2, step=torch.tensor(4.0)), deepspeed_classes)
    optim_file(path, 1).write_bytes(optim_file(other, 1).read_bytes())
    with pytest.raises(CheckpointError, match=r"3\.0 in the file of rank 0 and 4\.0 .*rank 1"):
        DeepSpeedReader(path)


def test_model_files_of_two_steps_are_refused(tmp_path, deepspeed_classes):
    path = write(tmp_path / "a", Run(3, 2), deepspeed_classes)
    other = write(tmp_path / "b", Run(3, 2, model={"global_steps": 8}), deepspeed_classes)
    model_file(path, 1).write_bytes(model_file(other, 1).read_bytes())
    with pytest.raises(CheckpointError, match=r"step 3.* rank 1 of step 8"):
        DeepSpeedReader(path)


def test_two_prefixes_for_one_rank_are_refused(tmp_path, deepspeed_classes):
    path = write(tmp_path, Run(2, 2), deepspeed_classes)
    write(tmp_path, Run(2, 2, bf16=False), deepspeed_classes)
    with pytest.raises(CheckpointError, match="different saves under one tag"):
        DeepSpeedReader(path)


def test_files_of_two_stages_are_refused(tmp_path, deepspeed_classes):
    path = write(tmp_path, Run(2, 2), deepspeed_classes)
    write(tmp_path, Run(3, 2), deepspeed_classes)
    with pytest.raises(CheckpointError, match="different saves under one tag"):
        DeepSpeedReader(path)


def test_another_partition_count_is_refused(tmp_path, deepspeed_classes):
    path = write(tmp_path, Run(2, 2, optim={"partition_count": [2, 1]}), deepspeed_classes)
    with pytest.raises(CheckpointError, match=r"\[2, 1\] parts.* 2 ranks"):
        DeepSpeedReader(path)


@pytest.mark.parametrize(
    "name",
    [
        "mp_rank_01_model_states.pt",
        "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt",
        "layer_03-model_00-model_states.pt",
        "layer_0_expert_3_mp_rank_01_model_states.pt",
        "expp_rank_0_mp_rank_01_optim_states.pt",
        "expert_3_mp_rank_00_model_states.pt",
    ],
)
def test_files_of_other_parallelism_are_refused_by_name(tmp_path, deepspeed_classes, name):
    path = write(tmp_path, Run(2, 2), deepspeed_classes)
    (path / name).touch()
    with pytest.raises(CheckpointError, match=f"parallelism.*{name}.*not supported"):
        DeepSpeedReader(path)


@pytest.mark.parametrize(
    ("seen", "keys"),
    [
        ("mp_world_size 2", {"mp_world_size": 2}),
        ("tp_degree 4", {"checkpoint_parallel_dimensions": {"tp_degree": 4}}),
        ("ds_autoep_layers", {"ds_autoep_layers": []}),
    ],
)
def test_other_parallelism_is_refused_by_its_keys(tmp_path, deepspeed_classes, seen, keys):
    path = write(tmp_path, Run(2, 2, model=keys), deepspeed_classes)
    with pytest.raises(CheckpointError, match=rf"parallelism \({seen}\)"):
        DeepSpeedReader(path)


def test_a_directory_without_model_files_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="one tag, such as global_step1000"):
        DeepSpeedReader(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be opened"):
        DeepSpeedReader(tmp_path / "nowhere")


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "optim"])
def test_a_file_that_was_cut_off_is_named(tmp_path, deepspeed_classes, name, part):
    path = write(tmp_path, Run(2, 2), deepspeed_classes)
    file = optim_file(path, 1) if name == "optim" else path / name
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * part)])
    with pytest.raises(CheckpointError, match=f"{file.name}.*truncated"):
        DeepSpeedReader(path)


def test_files_of_the_format_before_zip_are_refused(tmp_path, deepspeed_classes):
    path = write(tmp_path, Run(2, 1), deepspeed_classes)
    file = path / "mp_rank_00_model_states.pt"
    content = torch.load(file, weights_only=False)
    torch.save(content, file, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=file.name):
        DeepSpeedReader(path)


@pytest.mark.parametrize("stage", [1, 3])
def test_masters_that_were_on_nvme_are_not_in_the_files(tmp_path, deepspeed_classes, stage):
    path = write(tmp_path, Run(stage, 2, state=False), deepspeed_classes)
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"

    def empty(wrapper):
        wrapper[key] = [torch.empty(0) for _ in wrapper[key]]

    edit_optims(path, empty)
    with pytest.raises(CheckpointError, match=r"0 elements .*NVMe"):
        DeepSpeedReader(path)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("more", [-1, 1])
def test_masters_of_another_size_than_the_shapes_are_refused(
    tmp_path, deepspeed_classes, stage, more
):
    path = write(tmp_path, Run(stage, 2, groups=[list(SHAPES)], sub_group=9), deepspeed_classes)
    file = path / "mp_rank_00_model_states.pt" if stage == 1 else model_file(path, 0)
    content = torch.load(file, weights_only=False)
    content["param_shapes"][0]["up.bias"] = torch.Size([5 + more * 5])
    torch.save(content, file)
    with pytest.raises(CheckpointError, match=r"elements for 6 parameters from 'embed\.weight' on"):
        DeepSpeedReader(path)


@pytest.mark.parametrize(
    "masters", [torch.zeros(4, device="meta"), torch.ones(4).to_sparse(), "none"], ids=str
)
def test_masters_that_are_no_plain_tensors_are_refused(tmp_path, deepspeed_classes, masters):
    run = Run(2, 1, shapes={"a": (4,)}, groups=[["a"]], state=False)
    run.optim = {"single_partition_of_fp32_groups": [masters]}
    with pytest.raises(CheckpointError, match="does not have the layout of DeepSpeed"):
        DeepSpeedReader(write(tmp_path, run, deepspeed_classes))


def test_gaps_go_forward(tmp_path, deepspeed_classes):
    gaps = [[-77, 77, 0], [0, 0, 0]]
    run = Run(2, 1, optim={"param_alignment_paddings": gaps})
    with pytest.raises(CheckpointError, match="overlapping elements"):
        DeepSpeedReader(write(tmp_path, run, deepspeed_classes))


def test_frozen_pieces_of_another_size_are_refused(tmp_path, deepspeed_classes):
    path = write(tmp_path, Run(3, 2, frozen={"base": (5,)}), deepspeed_classes)
    content = torch.load(model_file(path, 1), weights_only=False)
    content["frozen_param_fragments"]["base"] = torch.empty(0, dtype=torch.bfloat16)
    torch.save(content, model_file(path, 1))
    with pytest.raises(CheckpointError, match=r"'base' .*\[3, 0\] elements, not of 3"):
        DeepSpeedReader(path)


def test_weights_of_stage_3_without_an_optimizer_are_not_in_the_files(tmp_path, deepspeed_classes):
    path = write(tmp_path, Run(3, 1, model={"param_shapes": None}), deepspeed_classes)
    optim_file(path, 0).unlink()
    with pytest.raises(CheckpointError, match="without an optimizer"):
        DeepSpeedReader(path)


JUNK = [
    None, 3, -1, "text", [], [3], ["text"], {}, {"a": 1}, (), 2.5, torch.zeros(2), [torch.zeros(2)],
    [{"a": torch.zeros(1)}], {"embed.weight": "gone"}, [[1], [2]], torch.zeros(2, device="meta"),
    [torch.zeros(2).to_sparse()] * 2, {"state": {}, "param_groups": []},
]  # fmt: skip


@pytest.mark.parametrize(("stage", "every"), [(0, 3), (2, 3), (3, 1)])  # the next key gets the next
def test_junk_under_any_key_ends_in_an_error_or_in_values(
    tmp_path, deepspeed_classes, stage, every
):
    run = Run(stage, 1, groups=[list(SHAPES)])
    write(tmp_path, run, deepspeed_classes)
    for file in tmp_path.iterdir():
        whole = torch.load(file, weights_only=False)
        for table in (whole, whole.get("optimizer_state_dict", {}), whole.get("optimizer") or {}):
            for at, (key, kept) in enumerate(list(table.items())):
                for junk in JUNK[at % every :: every]:
                    table[key] = junk
                    torch.save(whole, file)
                    read_all(tmp_path)
                del table[key]
                torch.save(whole, file)
                read_all(tmp_path)
                table[key] = kept
        torch.save(whole, file)
    check_values(DeepSpeedReader(tmp_path), run)


def read_all(path):
    """Everything of a directory, or a CheckpointError."""
    try:
        saved = DeepSpeedReader(path)
        for name, parameter in saved.parameters.items():
            for key in parameter.tensors:
                full(saved, name, key)
        saved.shared()
        saved.buffers(0)
    except CheckpointError:
        pass


# ---------------------------------------------------------------------- nothing runs


class Payload:
    """Unpickled by ``pickle``, it makes a file."""

    def __init__(self, kind, mark):
        self.kind, self.mark = kind, mark

    def __reduce__(self):
        if self.kind == "os.system":
            return os.system, (f"touch {self.mark}",)
        if self.kind == "open":
            return open, (str(self.mark), "w")
        if self.kind == "eval":
            return eval, (f"open({str(self.mark)!r}, 'w')",)
        return Path.touch, (Path(self.mark),)


KINDS = ["os.system", "open", "eval", "Path.touch"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["client_state", "model", "optim", "module", "config"])
def test_code_in_a_file_does_not_run(tmp_path, deepspeed_classes, kind, place):
    mark = tmp_path / "mark"
    payload = Payload(kind, mark)
    keys = {
        "client_state": {"client_state": {"x": {"y": [payload]}}},
        "model": {"model": {"lr_scheduler": payload}},
        "optim": {"optim": {"loss_scaler": payload}},
        "module": {"model": {"module": {"x": payload}}},
        "config": {"model": {"ds_config": payload}},
    }[place]
    path = write(tmp_path / "tag", Run(2, 2, **keys), deepspeed_classes)
    try:
        shared = DeepSpeedReader(path).shared(allow_pickle=True)
        repr(shared)
    except CheckpointError as error:
        assert "states.pt" in str(error)
        assert kind != "os.system" or "refers to posix.system" in str(error)
    else:
        assert kind != "os.system"
    assert not mark.exists()
    if kind != "Path.touch":  # the payload is what it says it is
        torch.load(
            next(f for f in sorted(path.iterdir()) if b"mark" in f.read_bytes()), weights_only=False
        )
        assert mark.exists()


class Unknown:
    """A class of the program."""

    def __init__(self):
        self.number = 3


@pytest.mark.parametrize(
    ("keys", "file"),
    [
        ({"model": {"lr_scheduler": {"a": [Unknown()]}}}, "mp_rank_00_model_states.pt"),
        ({"optim": {"loss_scaler": Unknown()}}, "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        ({"optim": {"overflow": Unknown}}, "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"),
    ],
)
def test_an_object_where_it_matters_is_refused_with_file_and_class(
    tmp_path, deepspeed_classes, keys, file
):
    path = write(tmp_path, Run(2, 2, **keys), deepspeed_classes)
    with pytest.raises(
        CheckpointError, match=rf"{file} contains an object of type .*\.Unknown.*plain data"
    ):
        DeepSpeedReader(path)


def test_an_object_of_the_program_is_refused_when_it_is_used(tmp_path, deepspeed_classes):
    run = Run(2, 2, client_state={"mine": Unknown(), "array": np.zeros(3), "epoch": 4})
    saved = DeepSpeedReader(write(tmp_path, run, deepspeed_classes))
    check_values(saved, run)
    state = saved.shared()["client_state"]
    assert state["epoch"] == 4
    assert "Unknown" in repr(state)
    mine = state["mine"]
    for use in (
        lambda: mine.number, lambda: mine(), lambda: mine[0], lambda: list(mine), lambda: len(mine),
        lambda: bool(mine), lambda: float(mine), lambda: 3 in mine, lambda: state["array"].sum(),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=r"model_states\.pt contains an object of type"):
            use()


def test_an_object_in_the_module_is_left_behind_and_said(tmp_path, deepspeed_classes):
    run = Run(2, 2)
    path = write(tmp_path, run, deepspeed_classes)
    file = path / "mp_rank_00_model_states.pt"
    content = torch.load(file, weights_only=False)
    content["module"]["layer._extra_state"] = Unknown()
    torch.save(content, file)
    saved = DeepSpeedReader(path)
    check_values(saved, run)
    (text,) = saved.left_behind
    assert "layer._extra_state" in text
