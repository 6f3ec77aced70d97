"""A checkpoint of any mesh loads into any other, bit for bit: tensors, moments, step counts, buffers,
generators."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from simulated_ranks import (
    ALIASES,
    MESHES,
    MODEL,
    SimulatedRank,
    save_all,
    simulate,
    values,
)

from zeroshard.checkpoint import rng
from zeroshard.checkpoint.manifest import MANIFEST, SavedParameter
from zeroshard.checkpoint.reader import CheckpointReader, full
from zeroshard.checkpoint.restore import needed_files

NAMES = [fqn for _, params in MODEL for fqn in params]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """One directory with a checkpoint of every mesh. The first one writes the frozen weights."""
    root = tmp_path_factory.mktemp("layouts") / "run"
    for name, mesh in MESHES.items():
        save_all(simulate(mesh), root, name.replace(" ", "_"))
    return root


def opened(root: Path, name: str) -> CheckpointReader:
    return CheckpointReader(root / name.replace(" ", "_"))


@pytest.mark.parametrize("target", MESHES)
@pytest.mark.parametrize("saved", MESHES)
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


@pytest.mark.parametrize("target", MESHES)
@pytest.mark.parametrize("saved", MESHES)
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


@pytest.mark.parametrize("target", MESHES)
@pytest.mark.parametrize("saved", MESHES)
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
