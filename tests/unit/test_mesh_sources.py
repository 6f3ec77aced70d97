"""What each source says about the mesh, and the errors of those that fit no mesh."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mesh_cases import CASES, Case, accelerate, device_mesh, dtensors, keys, mpu, source
from torch import nn

from zeroshard.comm.mesh_objects import AXES, mesh_from_model, mesh_sources
from zeroshard.config import load_config
from zeroshard.core.mesh import DIMS, Mesh
from zeroshard.core.mesh_sources import (
    Claim,
    MeshSource,
    nearest_mesh,
    resolve_mesh,
)
from zeroshard.errors import ConfigError, UsageError, ZeroShardError

ONE: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0}


def resolved(world_size: int, *sources: MeshSource | None) -> Mesh:
    given = [one for one in sources if one is not None]
    return resolve_mesh(given, world_size).mesh


# Errors


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_wrong_mesh_is_answered_with_its_message(case: Case) -> None:
    with pytest.raises(ZeroShardError) as caught:
        case.call()
    assert str(caught.value) == case.text
    assert type(caught.value) is case.error


def test_there_are_enough_wrong_meshes() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 50


# Sources


def test_without_sources_all_ranks_are_data_parallel() -> None:
    found = resolve_mesh([], 6)
    assert found.mesh == Mesh(data_shard=6)
    assert set(found.origins.values()) == {"default"}


def test_the_configuration_says_nothing_by_default() -> None:
    assert keys() is None
    off = {"tensor_parallel": {"autotp_size": 0, "tp": {"tp_size": 1}}, "sequence_parallel_size": 1}
    assert keys(**off, expert_parallel={"enabled": False, "autoep_size": 8}) is None
    assert keys(expert_parallel={"autoep_size": 1}) is None


def test_each_key_of_the_configuration_is_read() -> None:
    assert resolved(
        32, keys(pipeline=2, tensor=2, sequence=2, data_replicate=2, data_shard="auto", expert=1)
    ) == Mesh(2, 2, 2, 2, 2)
    assert resolved(8, keys(tensor_parallel={"autotp_size": 4})) == Mesh(data_shard=2, tensor=4)
    assert resolved(8, keys(tensor_parallel={"tp": {"tp_size": 8}})) == Mesh(tensor=8)
    assert resolved(8, keys(data_parallel_size=4, sequence_parallel_size=2)) == Mesh(
        data_shard=4, sequence=2
    )
    assert resolved(8, keys(data_parallel_size=8, data_replicate=2)) == Mesh(
        data_replicate=2, data_shard=4
    )
    expert = keys(expert_parallel={"enabled": True, "autoep_size": 4})
    assert expert is not None and expert.sizes == {"expert": 4}


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"autoep_size": "four"}, 'autoep_size: must be a whole number, not "four"'),
        ({"autoep_size": 0}, "autoep_size: must be greater than 0, not 0"),
        ({"autoep_size": 1.5}, "autoep_size: must be a whole number, not 1.5"),
        ({"autoep_size": True}, "autoep_size: must be a whole number, not true"),
        ({"autoep_siz": 2}, 'autoep_siz: no such key. Did you mean "autoep_size"?'),
        ({"autoep_size": 2, "enabled": "yes"}, 'enabled: must be true or false, not "yes"'),
        ({"autoep_size": 2, "top_k": 1}, 'top_k: 1 is asked for, and only "auto" is possible'),
        ({"enabled": True, "route_norm": True}, "route_norm: true is asked for, and only null"),
        (
            {"autoep_size": 2, "expert_tensor_parallel_size": 2},
            "expert_tensor_parallel_size: 2 is asked for, and only 1 is possible: stacked experts",
        ),
    ],
)
def test_the_keys_of_expert_parallelism_are_checked(section: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({**ONE, "expert_parallel": section}, world_size=4)
    assert str(caught.value).splitlines()[1].startswith(f"  expert_parallel.{says}")


def test_keys_of_expert_parallelism_that_is_off_do_not_matter() -> None:
    for section in ({"enabled": False, "autoep_size": 2, "top_k": 1}, {"top_k": 1}):
        assert load_config({**ONE, "expert_parallel": section}, world_size=4).mesh is not None
    loaded = load_config(
        {**ONE, "expert_parallel": {"autoep_size": 2, "comm_num_sm": 3}}, world_size=4
    )
    assert any("expert_parallel.comm_num_sm" in notice for notice in loaded.notices)


@pytest.mark.parametrize(
    ("names", "shape", "mesh"),
    [
        (DIMS, (2, 2, 2, 2, 2), Mesh(2, 2, 2, 2, 2)),
        (("pp", "dp_replicate", "dp_shard", "cp", "tp"), (1, 2, 2, 1, 2), Mesh(1, 2, 2, 1, 2)),
        (("pp", "dp_replicate", "fsdp", "tp"), (2, 2, 2, 2), Mesh(2, 2, 2, 1, 2)),
        (("pipe", "data", "model"), (2, 3, 2), Mesh(pipeline=2, data_shard=3, tensor=2)),
        (("data_parallel", "sequence_parallel"), (2, 4), Mesh(data_shard=2, sequence=4)),
        (("fsdp", "tp"), (4, 2), Mesh(data_shard=4, tensor=2)),
        (("replicate", "shard"), (2, 4), Mesh(data_replicate=2, data_shard=4)),
        (("dp", "ep"), (4, 1), Mesh(data_shard=4)),
        (("tp",), (4,), Mesh(tensor=4)),
    ],
)
def test_a_device_mesh_is_read_by_its_names(
    names: tuple[str, ...], shape: tuple[int, ...], mesh: Mesh
) -> None:
    ranks = torch.arange(mesh.world_size).reshape(shape)
    assert resolved(mesh.world_size, source(mesh=device_mesh(names, ranks.tolist()))) == mesh


def test_expert_ranks_are_placed_by_the_mesh_of_experts_only() -> None:
    found = source(mesh=device_mesh(("dp", "ep"), [[0, 1], [2, 3]]))
    assert found.sizes == {"expert": 2}
    assert found.placements == ()


def test_dimensions_in_another_order_are_right_if_the_ranks_are() -> None:
    ranks = torch.arange(8).reshape(2, 2, 2).permute(2, 0, 1)
    found = source(mesh=device_mesh(("tp", "pp", "dp"), ranks.tolist()))
    assert resolved(8, found) == Mesh(pipeline=2, data_shard=2, tensor=2)


def test_fsdp_includes_the_sequence() -> None:
    found = source(mesh=device_mesh(("fsdp",), list(range(8))))
    assert resolved(8, found, keys(sequence=2)) == Mesh(data_shard=4, sequence=2)


def test_dp_includes_copies() -> None:
    found = source(mesh=device_mesh(("dp", "tp"), [[0, 1], [2, 3], [4, 5], [6, 7]]))
    mesh = Mesh(data_replicate=2, data_shard=2, tensor=2)
    assert resolved(8, found, keys(data_replicate=2)) == mesh


@pytest.mark.parametrize("ranks", [[0, 1], [6, 7]])
def test_a_part_of_a_mesh_is_checked_against_the_whole(ranks: list[int]) -> None:
    found = source(mesh=device_mesh(("tp",), ranks))
    assert resolved(8, found) == Mesh(data_shard=4, tensor=2)


def test_a_mesh_and_mesh_param_and_accelerate() -> None:
    mesh = Mesh(pipeline=2, data_shard=2, tensor=2)
    assert resolved(8, source(mesh=mesh)) == mesh
    assert resolved(8, source(mesh_param=(4, 2))) == Mesh(data_shard=4, sequence=2)
    sizes = accelerate(dp_replicate_size=2, dp_shard_size=2, tp_size=2)
    assert resolved(8, source(mesh=sizes)) == Mesh(data_replicate=2, data_shard=2, tensor=2)
    assert resolved(8, source(mesh=accelerate(sp_size=2))) == Mesh(data_shard=4, sequence=2)
    assert mesh_sources(mesh=accelerate()) == ()


def test_the_class_of_accelerate_is_recognized() -> None:
    pytest.importorskip("accelerate")
    from accelerate.parallelism_config import ParallelismConfig

    found = source(mesh=ParallelismConfig(tp_size=2, dp_shard_size=4))
    assert found.sizes == {"tensor": 2, "data_shard": 4}


def test_an_mpu_is_read_by_its_getters() -> None:
    megatron = {
        "tensor_model": [4, 5],
        "model": [0, 1, 4, 5],
        "pipeline_model": [1, 5],
        "data": [5, 7],
    }
    mesh = Mesh(pipeline=2, data_shard=2, tensor=2)
    assert resolved(8, mpu(megatron, rank=5)) == mesh
    old = {"model": [2, 3], "data": [1, 3, 5, 7]}
    assert resolved(8, mpu(old, rank=3)) == Mesh(data_shard=4, tensor=2)
    ulysses = {"sequence": [0, 1], "data": [0, 2]}
    assert resolved(4, mpu(ulysses)) == Mesh(data_shard=2, sequence=2)
    assert mpu({"expert_model": [0, 1]}).sizes == {"expert": 2}


def test_an_mpu_may_refuse_the_old_name_of_its_tensor_ranks() -> None:
    """Megatron's does in a pipeline, beside the new name."""

    def refuse() -> int:
        raise AssertionError("only without a pipeline")

    sizes = SimpleNamespace(
        get_tensor_model_parallel_world_size=lambda: 1,
        get_pipeline_model_parallel_world_size=lambda: 2,
        get_model_parallel_world_size=refuse,
    )
    assert resolved(2, source(mpu=sizes)) == Mesh(pipeline=2)
    del sizes.get_tensor_model_parallel_world_size
    with pytest.raises(UsageError, match="only without a pipeline"):
        source(mpu=sizes)


def test_an_mpu_may_have_sizes_only() -> None:
    sizes = SimpleNamespace(get_model_parallel_world_size=lambda: 2)
    assert resolved(4, source(mpu=sizes)) == Mesh(data_shard=2, tensor=2)


def test_the_meshes_of_parameters_are_read_once_each() -> None:
    one = device_mesh(("dp", "tp"), [[0, 1], [2, 3]])
    found = mesh_from_model(dtensors(one, one, device_mesh(None, [0, 1])))
    assert found is not None
    assert len(found.placements) == 2
    assert resolved(4, found) == Mesh(data_shard=2, tensor=2)
    assert mesh_from_model(nn.Linear(2, 2)) is None


def test_sources_that_were_read_before_are_passed_on() -> None:
    read = mesh_sources(mesh=Mesh(data_shard=2), mesh_param=(2, 1))
    assert mesh_sources(mesh=read) == read
    assert mesh_sources() == mesh_sources(model=nn.Linear(1, 1)) == mesh_sources(mesh=()) == ()


def test_several_sources_may_agree() -> None:
    layout = device_mesh(("dp", "tp"), [[0, 1], [2, 3]])
    found = resolve_mesh(
        [
            keys(tensor=2) or pytest.fail("the key is given"),
            *mesh_sources(mesh=layout, mpu=None, mesh_param=(2, 1), model=dtensors(layout)),
        ],
        4,
    )
    assert found.mesh == Mesh(data_shard=2, tensor=2)
    assert found.origins["tensor"] == "'tp' of the device mesh of the parameter w0"
    assert found.origins["data_shard"] == "'dp' of mesh="
    assert found.origins["pipeline"] == "default"


def test_every_name_of_a_device_mesh_stands_for_dimensions() -> None:
    assert {dim for dims in AXES.values() for dim in dims} == {*DIMS, "expert"}
    for dims in AXES.values():
        assert list(dims) == sorted(dims, key=[*DIMS, "expert"].index)


@pytest.mark.parametrize("world_size", [1, 7, 12, 5040])
def test_the_nearest_mesh_has_all_ranks(world_size: int) -> None:
    wanted = {"pipeline": 5, "data_replicate": 3, "sequence": 2, "tensor": 8, "data_shard": 11}
    assert nearest_mesh(wanted, world_size).world_size == world_size


def test_a_claim_about_no_ranks_is_refused_when_it_is_made() -> None:
    with pytest.raises(ZeroShardError):
        Claim(("tensor",), 0, "me")


# In a configuration


def test_batches_are_divided_by_the_data_parallel_size() -> None:
    config = {
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": 3,
        "parallel": {"tensor": 2},
    }
    loaded = load_config(config, world_size=4)
    assert loaded.config.gradient_accumulation_steps == 2
    assert loaded.mesh is not None and loaded.mesh.mesh == Mesh(data_shard=2, tensor=2)
    assert loaded.config.parallel.data_shard == 2
    assert loaded.origins["parallel.data_shard"] == "derived"
    assert loaded.origins["parallel.tensor"] == "config"
    with pytest.raises(
        ConfigError, match=r"not divisible by data-parallel size \(mesh data_shard 2"
    ):
        load_config({"train_batch_size": 3, "parallel": {"tensor": 2}}, world_size=4)


def test_the_program_and_the_configuration_must_agree() -> None:
    sources = mesh_sources(mesh=device_mesh(("dp", "tp"), [[0, 1], [2, 3]]))
    loaded = load_config(ONE, world_size=4, mesh_sources=sources)
    assert loaded.config.parallel.tensor == 2
    assert loaded.origins["parallel.tensor"] == "'tp' of mesh="
    with pytest.raises(ConfigError) as caught:
        load_config({**ONE, "parallel": {"tensor": 4}}, world_size=4, mesh_sources=sources)
    assert "tensor: parallel.tensor is 4, but 'tp' of mesh= is 2; both" in str(caught.value)


def test_the_mesh_is_part_of_what_ranks_compare() -> None:
    (other,) = mesh_sources(mesh=Mesh(data_shard=2, tensor=2))
    with_mesh = load_config(ONE, world_size=4, mesh_sources=[other])
    assert with_mesh.fingerprint() != load_config(ONE, world_size=4).fingerprint()


def test_a_mesh_that_does_not_fit_hides_no_other_problem() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"train_batch_size": 3, "parallel": {"data_shard": 3}, "stge": 1}, world_size=4)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3  # and none about the batch, which cannot be checked
    assert lines[1].startswith("  mesh: data_shard 3 (parallel.data_shard) = 3 ranks, but 4")


def test_auto_is_allowed_for_every_size() -> None:
    auto = dict.fromkeys(("pipeline", "tensor", "sequence", "expert", "data_replicate"), "auto")
    loaded = load_config({**ONE, "parallel": {**auto, "data_shard": "auto"}}, world_size=4)
    assert loaded.mesh is not None and loaded.mesh.mesh == Mesh(data_shard=4)
    assert {loaded.origins[f"parallel.{dim}"] for dim in DIMS} == {"auto"}
    assert loaded.notices == ()


def test_a_model_is_built_before_the_mesh_is_known() -> None:
    config = {"data_parallel_size": 2, "parallel": {"tensor": 2}}
    assert load_config(config, world_size=4, for_training=False).mesh is None
