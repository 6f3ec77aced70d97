"""Random numbers after a resume: the same as without interruption, and different ones on new ranks."""

from __future__ import annotations

import itertools
import json
import random
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from zeroshard.checkpoint.json_state import decode, encode
from zeroshard.checkpoint.rng import (
    mesh_text,
    predecessor,
    rng_state,
    rng_state_for,
    set_rng_state,
)
from zeroshard.core.mesh import Mesh
from zeroshard.device import accelerator
from zeroshard.errors import CheckpointError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def same_randomness_as_before():
    before = rng_state(CPU)
    yield
    set_rng_state(before, CPU)


def seed_all(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def draw():
    """Numbers from each generator; an odd count, so that halves of normal pairs are left over."""
    torch_numbers = [
        torch.rand(()).item(),
        torch.randn(3).tolist(),
        torch.normal(0.0, 1.0, (1,)).item(),
    ]
    return {
        "torch": torch_numbers,
        "python": [random.random(), random.gauss(0, 1)],
        "numpy": [
            np.random.rand(),
            np.random.standard_normal(),
            np.random.standard_normal(3).tolist(),
        ],
    }


def saved_by(seeds):
    """States of ranks with these seeds, each in the middle of its stream."""
    states = []
    for seed in seeds:
        seed_all(seed)
        draw()
        states.append(rng_state(CPU))
    return states


def draws_after(state):
    seed_all(12345)
    set_rng_state(state, CPU)
    return draw()


def through_json(state):
    form, tensors = encode(state, where="rng")
    return decode(json.loads(json.dumps(form, allow_nan=False)), tensors, where="rng")


def test_the_same_numbers_come_after_a_resume():
    seed_all(3)
    draw()
    state = through_json(rng_state(CPU))
    expected = draw()
    assert draws_after(state) == expected


def test_a_state_is_a_copy():
    state = rng_state(CPU)
    expected = draw()
    draw()
    assert draws_after(state) == expected


def test_a_state_is_mostly_tensors():
    form, tensors = encode(rng_state(CPU), where="rng")
    assert len(json.dumps(form)) < 1000
    assert sum(t.nbytes for t in tensors.values()) < 20_000


def test_a_generator_that_was_not_saved_is_left_alone(monkeypatch):
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "numpy")
        state = rng_state(CPU)
    assert "numpy" not in state
    np.random.seed(7)
    expected = np.random.rand()
    np.random.seed(7)
    set_rng_state(state, CPU)
    assert np.random.rand() == expected


SHORT = torch.zeros(3, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("part", "damage"),
    [
        *itertools.product(["torch", "python", "numpy"], [None, {}, 3]),
        ("torch", SHORT),
        ("python", {"version": 3, "words": SHORT, "gauss": None}),
        ("numpy", {"bit_generator": "MT19937", "state": {"key": SHORT.numpy(), "pos": 1}}),
    ],
    ids=str,
)
def test_a_damaged_state_is_an_error(part, damage):
    with pytest.raises(CheckpointError, match=f"state of the {part} random generator does not fit"):
        set_rng_state({**rng_state(CPU), part: damage}, CPU)


def test_another_kind_of_numpy_generator_is_an_error():
    state = rng_state(CPU)
    state["numpy"] = {**state["numpy"], "bit_generator": "PCG64"}
    with pytest.raises(CheckpointError, match="numpy random generator does not fit"):
        set_rng_state(state, CPU)


# ---------------------------------------------------------------------- other world sizes


def test_a_rank_that_was_saved_goes_on():
    saved = saved_by([1, 2, 3])
    assert all(rng_state_for(rank, saved) is saved[rank] for rank in range(3))


def test_new_ranks_get_numbers_of_their_own():
    saved = saved_by([1, 2])
    draws = [draws_after(rng_state_for(rank, saved)) for rank in range(7)]
    for part in ("torch", "python", "numpy"):
        assert len({str(d[part]) for d in draws}) == 7


def test_new_ranks_get_the_same_numbers_at_every_resume():
    first, second = saved_by([1, 2]), [through_json(s) for s in saved_by([1, 2])]
    for rank in (2, 3):
        a, b = rng_state_for(rank, first), rng_state_for(rank, second)
        assert draws_after(a) == draws_after(b)
        assert draws_after(through_json(a)) == draws_after(b)


def test_new_ranks_depend_on_how_far_the_run_was():
    early = saved_by([1, 2])
    late = []
    for state in early:
        draws_after(state)
        late.append(rng_state(CPU))
    a, b = draws_after(rng_state_for(2, early)), draws_after(rng_state_for(2, late))
    assert all(a[part] != b[part] for part in a)


@pytest.mark.parametrize("saved_seeds", [[5], [5, 5, 5]], ids=str)
def test_states_that_all_ranks_share_stay_shared(saved_seeds):
    saved = saved_by(saved_seeds)
    draws = [draws_after(rng_state_for(rank, saved)) for rank in range(5)]
    assert all(d == draws[0] for d in draws)


def test_one_shared_generator_stays_shared_beside_others_that_are_not():
    saved = saved_by([5, 6])
    saved[1]["python"] = saved[0]["python"]
    draws = [draws_after(rng_state_for(rank, saved)) for rank in range(4)]
    assert len({str(d["python"]) for d in draws}) == 1
    assert len({str(d["torch"]) for d in draws}) == 4


# ---------------------------------------------------------------------- another device


class FakeDevice:
    """The interface of torch's module of a device, with a state of 16 bytes."""

    def __init__(self):
        self.state = torch.zeros(16, dtype=torch.uint8)
        self.seeds = []

    def get_rng_state(self, device):
        return self.state.clone()

    def set_rng_state(self, state, device):
        self.state = state

    def manual_seed(self, seed):
        self.seeds.append(seed)


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeDevice()
    nowhere = SimpleNamespace(device_index=lambda index: nullcontext())
    pretended = {**vars(torch), "get_device_module": lambda device: fake, "accelerator": nowhere}
    monkeypatch.setattr(accelerator, "torch", SimpleNamespace(**pretended))
    return fake


CUDA = torch.device("cuda", 0)


def test_the_devices_generator_is_saved_too(cuda):
    cuda.state.fill_(7)
    state = through_json(rng_state(CUDA))
    cuda.state = torch.zeros(16, dtype=torch.uint8)
    set_rng_state(state, CUDA)
    assert cuda.state.tolist() == [7] * 16
    assert cuda.seeds == []


def test_a_device_without_saved_state_is_seeded_from_what_was_saved(cuda):
    for seeds in ([1], [1], [2]):
        (state,) = saved_by(seeds)
        set_rng_state(state, CUDA)
    assert cuda.seeds[0] == cuda.seeds[1] != cuda.seeds[2]


def test_a_devices_state_is_no_matter_on_the_cpu(cuda):
    seed_all(4)
    state = rng_state(CUDA)
    expected = draw()
    assert draws_after(state) == expected


def test_new_ranks_seed_their_device(cuda):
    saved = []
    for fill in (1, 2):
        cuda.state.fill_(fill)
        saved.append(rng_state(CUDA))
    for rank in (2, 3, 4, 2):
        set_rng_state(through_json(rng_state_for(rank, saved)), CUDA)
    assert len(set(cuda.seeds)) == 3
    assert cuda.seeds[0] == cuda.seeds[3]
    assert max(cuda.seeds) < 2**63


# -- on a mesh -------------------------------------------------------------------------------------


def predecessors(mesh: Mesh, saved: Mesh) -> list[tuple[int, bool, int]]:
    dp_ranks = [saved.dp_rank(rank) for rank in range(saved.world_size)]
    found = [predecessor(rank, mesh, mesh_text(saved), dp_ranks) for rank in range(mesh.world_size)]
    return [(before.rank, before.is_same, before.dp_rank) for before in found]


def test_on_an_equal_mesh_every_rank_continues_itself():
    for mesh in (Mesh(), Mesh(data_shard=4), Mesh(pipeline=2, data_shard=2, tensor=2)):
        found = predecessors(mesh, mesh)
        assert [(rank, same) for rank, same, _ in found] == [
            (rank, True) for rank in range(mesh.world_size)
        ]


def test_on_another_mesh_generators_follow_the_samples():
    """The ranks of a tensor group continue one rank, so they draw the same numbers."""
    pipeline, tensor = Mesh(pipeline=2, data_shard=2), Mesh(data_shard=2, tensor=2)
    assert predecessors(tensor, pipeline) == [
        (0, False, 0), (0, False, 0), (1, False, 1), (1, False, 1)
    ]  # fmt: skip
    assert predecessors(pipeline, tensor) == [
        (0, False, 0), (2, False, 1), (0, False, 0), (2, False, 1)
    ]  # fmt: skip
    assert predecessors(Mesh(), tensor) == [(0, False, 0)]


def test_more_samples_than_before_continue_the_saved_ones_in_turn():
    found = predecessors(Mesh(data_shard=4), Mesh(data_shard=2, tensor=2))
    assert found == [(0, False, 0), (2, False, 1), (0, False, 2), (2, False, 3)]
    before = predecessor(3, Mesh(data_shard=4), "data_shard 2 x tensor 2", [0, 0, 1, 1])
    assert before.firsts == (0, 2)
    assert before.read_ranks == {0, 2}


def test_replicas_are_no_other_mesh_because_each_has_samples_of_its_own():
    assert mesh_text(Mesh(data_replicate=2, data_shard=2)) == ""
    found = predecessors(Mesh(data_replicate=2, data_shard=2), Mesh(data_shard=4))
    assert [(rank, same) for rank, same, _ in found] == [(rank, True) for rank in range(4)]
