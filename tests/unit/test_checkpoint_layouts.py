"""A checkpoint of any mesh loads into any other, bit for bit: tensors, moments, step counts, buffers,
generators."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from simulated_ranks import (
    ALIASES,
    MESHES,
    MODEL,
    EnginePart,
    SimulatedRank,
    on_threads,
    save_all,
    simulate,
    values,
)
from support.covering import sampled
from typer.testing import CliRunner

from zeroshard.checkpoint import export, reader, rng
from zeroshard.checkpoint.manifest import MANIFEST, VALUE, SavedParameter
from zeroshard.checkpoint.reader import CheckpointReader, full
from zeroshard.checkpoint.restore import digests_to_compare, needed_files, refuse_other_frozen
from zeroshard.checkpoint.save_decisions import Options
from zeroshard.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from zeroshard.cli.main import main
from zeroshard.comm.agreement import ControlGroup
from zeroshard.core.layout import UnitLayout
from zeroshard.errors import CheckpointError

NAMES = [fqn for _, params in MODEL for fqn in params]


LOADS = sampled([*itertools.product(MESHES, MESHES)], every=5)
"""Of six meshes, each is saved and loaded in every fifth pair."""


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """One directory with a checkpoint of every mesh. The first one writes the frozen weights."""
    root = tmp_path_factory.mktemp("layouts") / "run"
    for name, mesh in MESHES.items():
        save_all(simulate(mesh), root, name.replace(" ", "_"))
    return root


def opened(root: Path, name: str) -> CheckpointReader:
    return CheckpointReader(root / name.replace(" ", "_"))


@pytest.mark.parametrize(("saved", "target"), LOADS)
def test_every_layout_loads_into_every_layout(root, saved, target):
    with opened(root, saved) as source:
        for rank in simulate(MESHES[target], filled=False):
            assert rank.wrong() != []
            rank.load(source)
            assert rank.wrong() == [], (saved, target, rank.rank)


@pytest.mark.parametrize("name", MESHES)
def test_a_checkpoint_has_whole_tensors_with_their_names(root, name):
    with opened(root, name) as source:
        assert list(source.parameters) == NAMES
        for fqn, tensors in values().items():
            saved = source.parameters[fqn]
            assert saved.aliases == tuple(ALIASES.get(fqn, ()))
            for tensor, expected in tensors.items() if saved.numel else ():
                assert list(saved.tensors) == list(tensors)
                assert torch.equal(full(source, fqn, tensor), expected)
        assert source.verify() == []


@pytest.mark.parametrize("name", MESHES)
def test_each_element_is_written_once(root, name):
    """The files have no more bytes than the tensors, headers and padding."""
    with opened(root, name) as source:
        for parameter in source.parameters.values():
            for tensor in parameter.tensors.values():
                parts = tensor.parts(parameter.shape)
                assert sum(f.numel for _, fs in parts for f in fs) == parameter.numel


@pytest.mark.parametrize("name", MESHES)
def test_only_a_mesh_needs_version_2(root, name):
    head = json.loads((root / name.replace(" ", "_") / MANIFEST).read_text())
    assert head["version"] == (1 if MESHES[name].is_data_only else 2)
    assert ("boxes" in json.dumps(head)) == (MESHES[name].tensor > 1)


def test_frozen_weights_are_written_once_for_all_layouts(root):
    """Their digest does not depend on the layout, so later saves refer to the first one's files."""
    assert len([path for path in root.iterdir() if path.name.startswith("frozen-")]) == 1
    for name in MESHES:
        with opened(root, name) as source:
            files = [file.name for file in source.manifest.files if "frozen-" in file.name]
            assert [file.rpartition("/")[2] for file in files] == [
                "rank-00000-of-00001.safetensors"
            ]


def digests(parameters: Mapping[str, SavedParameter]) -> dict[str, str]:
    return {fqn: p.digest.sum for fqn, p in parameters.items() if p.digest is not None}


def test_digests_are_those_of_whole_tensors(root):
    found = []
    for name in MESHES:
        with opened(root, name) as source:
            found.append(digests(source.parameters))
    assert found[0]
    assert all(other == found[0] for other in found)


@pytest.mark.parametrize(("saved", "target"), LOADS)
def test_a_rank_opens_only_the_files_that_it_said_it_needs(root, saved, target):
    mesh = MESHES[target]
    for rank in simulate(mesh, filled=False):
        with opened(root, saved) as source:
            before = rng.predecessor(rank.rank, mesh, source.mesh, source.dp_ranks)
            needed = needed_files(source.manifest, rank.local, before.rank, before.read_ranks)
            rank.load(source)
            source.probe(before.rank)
            assert {*source._open} <= needed
            if saved == target and mesh.tensor > 1:
                assert len(needed) < len(source.manifest.files)


@pytest.mark.parametrize(("saved", "target"), LOADS)
def test_buffers_and_generators_follow_stages_and_samples(root, saved, target):
    mesh, dp_size = MESHES[target], MESHES[saved].dp_size
    with opened(root, saved) as source:
        for rank in range(mesh.world_size):
            before = rng.predecessor(rank, mesh, source.mesh, source.dp_ranks)
            found = source.buffers(before.rank)
            expected = SimulatedRank(mesh, rank).buffers()
            assert expected.keys() <= found.keys()
            dp_rank = mesh.dp_rank(rank) % dp_size
            assert found["mean"].item() == dp_rank
            if mesh.dp_rank(rank) < dp_size:
                state = source.ranks()[before.rank]["rng"]["torch"]
                assert torch.equal(state, torch.Generator().manual_seed(dp_rank).get_state())


# ---------------------------------------------------------------------- frozen weights, tools


@pytest.mark.parametrize("frozen", ["always", "reference"])
@pytest.mark.parametrize("name", ["tp 4 x dp 2", "pp 2 x dp 2 x tp 2"])
def test_frozen_boxes_are_saved_and_their_digests_compared(root, tmp_path, name, frozen):
    mesh = MESHES[name]
    path = save_all(simulate(mesh), tmp_path, frozen, options=Options(frozen=frozen))
    with CheckpointReader(path) as source, opened(root, "one rank") as first:
        assert digests(source.parameters) == digests(first.parameters)
        base = source.parameters["blocks.1.base"]
        assert (VALUE in base.tensors) == (frozen == "always")
        ranks = simulate(MESHES["replicate 2 x shard 4"])
        names = {fqn: fqn for fqn in values()}
        parts = [digests_to_compare(rank.local, source.parameters, names) for rank in ranks]
        refuse_other_frozen(parts, source.parameters, names, path=path)
        if frozen == "always":
            assert parts == [{}] * 8
            assert torch.equal(full(source, "blocks.1.base"), values()["blocks.1.base"][VALUE])
            return
        (unit,) = [unit for unit in ranks[0].local.units if unit.name == "blocks.1.frozen"]
        unit.shard_S[5] += 1
        parts[0] = digests_to_compare(ranks[0].local, source.parameters, names)
        with pytest.raises(CheckpointError, match=r"has other ones: 'blocks\.1\.base'"):
            refuse_other_frozen(parts, source.parameters, names, path=path)


def ckpt(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["ckpt", *map(str, words)])
    assert result.exit_code == code, result.output
    return result.output


def test_the_tools_show_compare_and_export_whole_tensors(root, tmp_path, monkeypatch):
    copy = Path(shutil.copytree(root, tmp_path / "run"))
    rows = json.loads(ckpt("ls", copy, "--json"))
    numel = sum(tensors[VALUE].numel() for tensors in values().values())
    assert {row["tag"] for row in rows} == {name.replace(" ", "_") for name in MESHES}
    assert {(row["numel"], row["state"]) for row in rows} == {(numel, "complete")}
    mesh, plain = copy / "pp_2_x_dp_2_x_tp_2", copy / "one_rank"
    shown = json.loads(ckpt("show", mesh, "--json"))
    assert shown["mesh"] == "pipeline 2 x data_shard 2 x tensor 2"
    assert "mesh" not in json.loads(ckpt("show", plain, "--json"))
    assert {row["name"]: row["shape"] for row in shown["parameters"]} == {
        fqn: list(tensors[VALUE].shape) for fqn, tensors in values().items()
    }
    assert "every byte is what was saved" in ckpt("verify", mesh)
    monkeypatch.setattr(reader, "PIECE_NUMEL", 100)
    assert json.loads(ckpt("diff", mesh, plain, "--json")) == []
    monkeypatch.setattr(export, "PIECE_NBYTES", 256)
    ckpt("export", mesh, "--out", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    for fqn, tensors in values().items():
        assert torch.equal(found[fqn], tensors[VALUE])
    state = get_fp32_state_dict_from_zero_checkpoint(str(copy), mesh.name)
    assert torch.equal(state["tied"], values()["embed"][VALUE])
    assert state.keys() == {*found, "tied"}
    ckpt("prune", copy, "--keep", 1, "--yes")
    assert len(json.loads(ckpt("ls", copy, "--json"))) <= 2


def test_a_change_of_one_element_in_one_box_is_a_difference(root, tmp_path):
    ranks = simulate(MESHES["tp 4 x dp 2"])
    _, slot, value, _ = next(f for f in ranks[5].fragments() if f[1].fqn == "blocks.2.down.weight")
    with torch._C.DisableTorchFunctionSubclass():  # the optimizer's tensors refuse writes
        value.view(-1)[0] += 1
    path = save_all(ranks, tmp_path, "changed", options=Options(frozen="always"))
    found = json.loads(ckpt("diff", root / "one_rank", path, "--json", code=1))
    assert [(row["name"], row["part"]) for row in found] == [(slot.fqn, VALUE)]


# ---------------------------------------------------------------------- saves that go wrong


def test_ranks_that_describe_a_tensor_differently_are_refused(tmp_path):
    """For instance two stages that name a layer alike."""
    for name, what in (("blocks.0.norm", "parameter"), ("mean", "buffer")):
        ranks = simulate(MESHES["pp 4 x dp 2"])
        for rank in ranks[2:4]:
            if what == "buffer":
                rank.buffers = lambda: {"mean": torch.zeros(3)}
                continue
            unit = rank.local.units[0]
            slots = list(unit.layout.slots)
            slots[0] = replace(slots[0], fqn=name)
            unit.layout = UnitLayout(tuple(slots), unit.layout.full_numel, unit.layout.num_shards)
        errors = on_threads(ranks, lambda rank, group: rank.save(tmp_path, "odd", group))
        assert len({str(error) for error in errors}) == 1
        assert f"{what} {name!r} is" in str(errors[0])
        assert not (tmp_path / "odd").exists()


@pytest.mark.parametrize("everyone", [True, False])
def test_parts_that_nobody_or_two_save_are_refused(tmp_path, everyone):
    """A wrong rule of who counts cannot make a checkpoint that lacks a part of the model."""
    ranks = simulate(MESHES["tp 4 x dp 2"])
    for rank in ranks:
        rank.local = replace(
            rank.local, counts=lambda slot: everyone or slot.fqn != "blocks.1.norm"
        )
    errors = on_threads(ranks, lambda rank, group: rank.save(tmp_path, "odd", group))
    assert len({str(error) for error in errors}) == 1
    assert isinstance(errors[0], CheckpointError)
    assert ("overlap" if everyone else "blocks.1.norm") in str(errors[0])
    assert not (tmp_path / "odd").exists()


@pytest.mark.parametrize("point", ["made", "reserved", "half", "written"])
def test_a_save_that_fails_on_one_rank_leaves_nothing(tmp_path, point):
    def save(rank: SimulatedRank, group: ControlGroup) -> None:
        def at(here: str) -> None:
            if here == point and rank.rank == 3:
                raise OSError(28, "No space left on device")

        rank.save(tmp_path, "odd", group, at=at)

    errors = on_threads(simulate(MESHES["pp 2 x dp 2 x tp 2"]), save)
    assert len({str(error) for error in errors}) == 1
    assert "rank 3" in str(errors[0])
    assert "No space left on device" in str(errors[0])
    assert [path.name for path in tmp_path.iterdir()] == []


# ---------------------------------------------------------------------- savers and loaders of engines


@pytest.fixture
def same_randomness_as_before():
    before = rng.rng_state(torch.device("cpu"))
    yield
    rng.set_rng_state(before, torch.device("cpu"))


@pytest.mark.parametrize("target", ["pp 4 x dp 2", "tp 4 x dp 2", "one rank"])
def test_an_engine_loads_the_stages_of_another_one(tmp_path, same_randomness_as_before, target):
    """Names, buffers and frozen weights are compared over all stages."""
    source = simulate(MESHES["pp 2 x dp 2 x tp 2"])
    assert (
        on_threads(source, lambda rank, group: EnginePart(rank, group).save(tmp_path, "a"))
        == [None] * 8
    )
    ranks = simulate(MESHES[target], filled=False)

    def load(rank: SimulatedRank, group: ControlGroup) -> None:
        part = EnginePart(rank, group)
        for buffer in part.module.buffers():
            buffer.zero_()
        found = part.load(tmp_path, "a")
        assert found.client_state == {"note": "a"}
        assert found.counters is not None
        assert found.counters.global_steps == 3
        assert rank.wrong() == []
        for name, expected in rank.buffers().items():
            assert torch.equal(part.module.get_buffer(name), expected)

    assert on_threads(ranks, load) == [None] * len(ranks)


def test_a_name_that_no_stage_has_is_refused_on_all_ranks(tmp_path, same_randomness_as_before):
    """Each stage lacks the names of the others, which is no reason. A name that all lack is one."""
    mesh = MESHES["pp 4 x dp 2"]
    on_threads(simulate(mesh), lambda rank, group: EnginePart(rank, group).save(tmp_path, "a"))
    ranks = simulate(mesh, filled=False)
    for rank in ranks:
        if rank.mesh.coordinate(rank.rank)["pipeline"] == 3:  # the last stage has no head
            kept = [unit for unit in rank.local.units if not unit.name.startswith("head")]
            rank.local = replace(rank.local, units=kept)
    errors = on_threads(ranks, lambda rank, group: EnginePart(rank, group).load(tmp_path, "a"))
    assert len({str(error) for error in errors}) == 1
    assert "the model does not have 'head', 'gain'" in str(errors[0])


def test_frozen_weights_of_every_stage_are_compared(tmp_path, same_randomness_as_before):
    mesh = MESHES["pp 4 x dp 2"]

    def save(rank: SimulatedRank, group: ControlGroup) -> None:
        part = EnginePart(rank, group)
        part.saver.save(tmp_path, "a", {}, part.state, save_latest=True, exclude_frozen=True)

    assert on_threads(simulate(mesh), save) == [None] * 8
    for odd in (False, True):
        ranks = simulate(mesh)
        for unit in ranks[7].local.units if odd else ():
            unit.shard_S += 1
        errors = on_threads(ranks, lambda rank, group: EnginePart(rank, group).load(tmp_path, "a"))
        if odd:
            assert len({str(error) for error in errors}) == 1
            assert "has other ones: 'blocks.3.base'" in str(errors[0])
        else:
            assert errors == [None] * 8
