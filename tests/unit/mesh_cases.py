"""Wrong descriptions of a mesh, each with the whole text of its error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from zeroshard.comm.mesh_objects import AXES, mesh_from_mpu, mesh_sources
from zeroshard.config.mesh_keys import mesh_from_config
from zeroshard.config.schema import Config
from zeroshard.config.sections import ParallelConfig
from zeroshard.core.mesh import Mesh
from zeroshard.core.mesh_sources import MeshSource, resolve_mesh
from zeroshard.errors import ConfigError, UsageError

SIZE = "the size of {} must be a whole number of at least 1, because it counts ranks."
ORDER = (
    "Parameters would be sharded over ranks that hold different values. Make the groups with the "
    "dimensions in the order pipeline, data_replicate, data_shard, sequence, tensor."
)
NO_MESH = (
    "which does not say how many ranks there are along each dimension. Pass a torch DeviceMesh with "
    "mesh_dim_names, a zeroshard.core.mesh.Mesh, or a ParallelismConfig of Accelerate."
)
BOTH = "both give the same size, so make them equal, or leave one of them out"


def keys(**sections: Any) -> MeshSource | None:
    """What a configuration says. Names of ``parallel``'s keys are its keys, others are top-level keys."""
    sizes = {
        name: sections.pop(name) for name in list(sections) if name in ParallelConfig.model_fields
    }
    return mesh_from_config(Config.model_validate({"parallel": sizes, **sections}))


def device_mesh(names: Sequence[str] | None, ranks: Any) -> Any:
    """What :mod:`zeroshard.comm.mesh_objects` reads of a torch ``DeviceMesh``."""
    return SimpleNamespace(mesh_dim_names=names, mesh=torch.tensor(ranks))


def mpu(groups: dict[str, list[int]], rank: int = 0, **sizes: Any) -> MeshSource:
    """The source of an ``mpu``. ``groups``: word -> ranks; ``sizes`` replace their numbers."""
    made = SimpleNamespace()
    for word, ranks in groups.items():
        size = sizes.get(word, len(ranks))
        at = ranks.index(rank) if rank in ranks else 0
        for what, answer in (("world_size", size), ("rank", at), ("group", ranks)):
            setattr(made, f"get_{word}_parallel_{what}", lambda answer=answer: answer)
    return mesh_from_mpu(made, rank=rank, ranks_of=lambda ranks: ranks)


def accelerate(**sizes: Any) -> Any:
    names = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
    return SimpleNamespace(**{**dict.fromkeys(names, 1), **sizes})


def dtensors(*meshes: Any) -> nn.Module:
    """A model whose parameters look like DTensors on these device meshes."""
    model = nn.Module()
    for at, one in enumerate(meshes):
        param: Any = nn.Parameter(torch.zeros(2))
        param.device_mesh, param.placements = one, ()
        model.register_parameter(f"w{at}", param)
    return model


@dataclass(frozen=True)
class Case:
    """``call()`` raises ``error`` with ``text``."""

    name: str
    call: Callable[[], Any]
    text: str
    error: type[Exception] = UsageError


def read(name: str, call: Callable[[], Any], text: str) -> Case:
    """A source that cannot be read."""
    return Case(name, call, text)


def resolving(
    name: str,
    world_size: int,
    sources: Callable[[], Sequence[MeshSource | None]],
    text: str,
    error: type[Exception] = ConfigError,
) -> Case:
    """Sources that fit no mesh, if every dimension were implemented."""

    def call() -> Any:
        given = [source for source in sources() if source is not None]
        return resolve_mesh(given, world_size)

    return Case(name, call, text, error)


def source(**arguments: Any) -> MeshSource:
    (found,) = mesh_sources(**arguments)
    return found


CASES: tuple[Case, ...] = (
    # What cannot be read
    read(
        "mesh_is_a_number",
        lambda: mesh_sources(mesh=4),
        f"mesh is a int, {NO_MESH}",
    ),
    read(
        "mesh_is_a_pair",
        lambda: mesh_sources(mesh=(2, 2)),
        f"mesh is a tuple, {NO_MESH} A pair of sizes is mesh_param=.",
    ),
    read(
        "mesh_is_a_dict",
        lambda: mesh_sources(mesh={"tensor": 2}),
        f"mesh is a dict, {NO_MESH}",
    ),
    read(
        "device_mesh_without_names",
        lambda: mesh_sources(mesh=device_mesh(None, [[0, 1], [2, 3]])),
        "mesh= is a device mesh of shape (2, 2) without names, so it is unknown what its dimensions are "
        'for. Pass names: init_device_mesh(device, shape, mesh_dim_names=("data", "tensor")).',
    ),
    read(
        "device_mesh_with_an_unknown_name",
        lambda: mesh_sources(mesh=device_mesh(("dp", "rows"), [[0, 1], [2, 3]])),
        "mesh= has the dimension 'rows', whose purpose is unknown. ZeroShard knows the names "
        f"{', '.join(AXES)}. Use one of them.",
    ),
    read(
        "device_mesh_with_two_names_for_tensor",
        lambda: mesh_sources(mesh=device_mesh(("tp", "model"), [[0, 1], [2, 3]])),
        "mesh= has the dimensions 'tp' and 'model', which are both tensor. Give each dimension one name.",
    ),
    read(
        "device_mesh_with_dp_and_dp_shard",
        lambda: mesh_sources(mesh=device_mesh(("dp", "dp_shard"), [[0, 1], [2, 3]])),
        "mesh= has the dimensions 'dp' and 'dp_shard', which are both data_shard. Give each dimension "
        "one name.",
    ),
    read(
        "device_mesh_with_sp_and_cp",
        lambda: mesh_sources(mesh=device_mesh(("cp", "sp"), [[0, 1], [2, 3]])),
        "mesh= has the dimensions 'cp' and 'sp', which are both sequence. Give each dimension one name.",
    ),
    read(
        "parameters_on_a_mesh_without_names",
        lambda: mesh_sources(model=dtensors(device_mesh(None, [[0, 1], [2, 3]]))),
        "the device mesh of the parameter w0 is a device mesh of shape (2, 2) without names, so it is "
        "unknown what its dimensions are for. Pass names: init_device_mesh(device, shape, "
        'mesh_dim_names=("data", "tensor")).',
    ),
    read(
        "parameters_on_a_mesh_with_an_unknown_name",
        lambda: mesh_sources(model=dtensors(device_mesh(("x",), [0, 1]))),
        "the device mesh of the parameter w0 has the dimension 'x', whose purpose is unknown. ZeroShard "
        f"knows the names {', '.join(AXES)}. Use one of them.",
    ),
    read(
        "mesh_param_is_a_number",
        lambda: mesh_sources(mesh_param=4),
        "mesh_param is 4, but must be a pair of sizes: (data-parallel size, sequence-parallel size), "
        "such as (4, 1).",
    ),
    read(
        "mesh_param_of_three",
        lambda: mesh_sources(mesh_param=(2, 2, 2)),
        "mesh_param is (2, 2, 2), but must be a pair of sizes: (data-parallel size, sequence-parallel "
        "size), such as (4, 1).",
    ),
    read(
        "mesh_param_with_zero",
        lambda: mesh_sources(mesh_param=(4, 0)),
        f"mesh_param[1] is 0: {SIZE.format('sequence')}",
    ),
    read(
        "mesh_param_with_a_fraction",
        lambda: mesh_sources(mesh_param=(2.0, 1)),
        f"mesh_param[0] is 2.0: {SIZE.format('data_replicate x data_shard')}",
    ),
    read(
        "mesh_param_with_a_flag",
        lambda: mesh_sources(mesh_param=(4, True)),
        f"mesh_param[1] is True: {SIZE.format('sequence')}",
    ),
    read(
        "mesh_with_a_negative_size",
        lambda: mesh_sources(mesh=Mesh(tensor=-2)),
        f"mesh= is -2: {SIZE.format('tensor')}",
    ),
    read(
        "accelerate_with_a_size_of_zero",
        lambda: mesh_sources(mesh=accelerate(tp_size=0)),
        f"ParallelismConfig.tp_size is 0: {SIZE.format('tensor')}",
    ),
    read(
        "accelerate_with_a_size_to_be_found",
        lambda: mesh_sources(mesh=accelerate(dp_shard_size=-1)),
        f"ParallelismConfig.dp_shard_size is -1: {SIZE.format('data_shard')}",
    ),
    read(
        "accelerate_with_cp_and_sp",
        lambda: mesh_sources(mesh=accelerate(cp_size=2, sp_size=2)),
        "ParallelismConfig has cp_size 2 and sp_size 2: both divide the sequence over ranks. Use one of "
        "them.",
    ),
    read(
        "mpu_without_getters",
        lambda: mesh_sources(mpu=object()),
        "mpu is a object without any getter of a size, so it says nothing about the ranks. It needs "
        "methods such as get_data_parallel_world_size() and get_model_parallel_world_size().",
    ),
    read(
        "mpu_with_a_size_of_none_ranks",
        lambda: mpu({"model": [0, 1]}, model=0),
        f"mpu.get_model_parallel_world_size() is 0: {SIZE.format('tensor')}",
    ),
    read(
        "mpu_with_a_word_for_a_size",
        lambda: mpu({"data": [0, 1]}, data="two"),
        "mpu.get_data_parallel_world_size() is 'two': "
        f"{SIZE.format('data_replicate x data_shard')}",
    ),
    read(
        "mpu_whose_getter_fails",
        lambda: mesh_sources(mpu=SimpleNamespace(get_data_parallel_world_size=lambda: 1 // 0)),
        "mpu.get_data_parallel_world_size() failed with ZeroDivisionError: integer division or modulo by "
        "zero. It is asked when the engine is built, so make the groups before.",
    ),
    read(
        "mpu_whose_group_is_larger_than_its_size",
        lambda: mpu({"tensor_model": [0, 1, 2]}, tensor_model=2),
        "mpu.get_tensor_model_parallel_group() has the ranks [0, 1, 2], but "
        "mpu.get_tensor_model_parallel_world_size() is 2. Return the group of that size.",
    ),
    read(
        "mpu_whose_rank_is_in_another_group",
        lambda: mpu({"pipe": [1, 3]}),
        "mpu.get_pipe_parallel_group() has the ranks [1, 3], so its member 0 is rank 1, but "
        "mpu.get_pipe_parallel_rank() is 0 on rank 0. Return this rank's place in its own group.",
    ),
    read(
        "mpu_whose_rank_is_outside",
        lambda: mesh_sources(
            mpu=SimpleNamespace(
                get_data_parallel_world_size=lambda: 2, get_data_parallel_rank=lambda: 2
            )
        ),
        "mpu.get_data_parallel_rank() is 2, and mpu.get_data_parallel_world_size() is 2: the rank must "
        "be a whole number below the size.",
    ),
    # Sources that disagree
    resolving(
        "tensor_in_two_keys",
        8,
        lambda: [keys(tensor=2, tensor_parallel={"autotp_size": 4})],
        f"tensor: parallel.tensor is 2, but tensor_parallel.autotp_size is 4; {BOTH}",
    ),
    resolving(
        "both_keys_of_deepspeed",
        8,
        lambda: [keys(tensor_parallel={"autotp_size": 2, "tp": {"tp_size": 4}})],
        "tensor: tensor_parallel.autotp_size is 2, but tensor_parallel.tp.tp_size is 4; " + BOTH,
    ),
    resolving(
        "sequence_in_two_keys",
        8,
        lambda: [keys(sequence=4, sequence_parallel_size=2)],
        f"sequence: parallel.sequence is 4, but sequence_parallel_size is 2; {BOTH}",
    ),
    resolving(
        "expert_in_two_keys",
        8,
        lambda: [keys(expert=4, expert_parallel={"enabled": True, "autoep_size": 2})],
        f"expert: parallel.expert is 4, but expert_parallel.autoep_size is 2; {BOTH}",
    ),
    resolving(
        "configuration_and_device_mesh",
        4,
        lambda: [keys(tensor=4), source(mesh=device_mesh(("dp", "tp"), [[0, 1], [2, 3]]))],
        f"tensor: parallel.tensor is 4, but 'tp' of mesh= is 2; {BOTH}",
    ),
    resolving(
        "a_size_of_1_is_a_size",
        4,
        lambda: [keys(tensor=1), source(mesh=device_mesh(("dp", "tp"), [[0, 1], [2, 3]]))],
        f"tensor: parallel.tensor is 1, but 'tp' of mesh= is 2; {BOTH}",
    ),
    resolving(
        "mesh_param_and_configuration",
        8,
        lambda: [keys(sequence_parallel_size=4), source(mesh_param=(4, 2))],
        f"sequence: sequence_parallel_size is 4, but mesh_param[1] is 2; {BOTH}",
    ),
    resolving(
        "mesh_param_and_data_parallel_size",
        8,
        lambda: [keys(data_parallel_size=8), source(mesh_param=(4, 2))],
        "data_replicate x data_shard: data_parallel_size is 8, but mesh_param[0] is 4; " + BOTH,
    ),
    resolving(
        "mpu_and_accelerate",
        8,
        lambda: [source(mesh=accelerate(tp_size=4)), mpu({"model": [0, 1]})],
        "tensor: ParallelismConfig.tp_size is 4, but mpu.get_model_parallel_world_size() is 2; "
        + BOTH,
    ),
    resolving(
        "two_words_of_an_mpu",
        8,
        lambda: [mpu({"tensor_model": [0, 1], "slice": [0, 1, 2, 3]})],
        "tensor: mpu.get_tensor_model_parallel_world_size() is 2, but "
        f"mpu.get_slice_parallel_world_size() is 4; {BOTH}",
    ),
    resolving(
        "parameters_on_two_meshes",
        8,
        lambda: [
            source(model=dtensors(device_mesh(("tp",), [0, 1]), device_mesh(None, [0, 1, 2, 3])))
        ],
        "tensor: 'tp' of the device mesh of the parameter w0 is 2, but the device mesh of the "
        f"parameter w1 is 4; {BOTH}",
    ),
    resolving(
        "three_sources_and_two_dimensions",
        8,
        lambda: [keys(tensor=2, pipeline=2), source(mesh=Mesh(data_shard=8))],
        f"pipeline: parallel.pipeline is 2, but mesh= is 1; {BOTH}\n"
        f"tensor: parallel.tensor is 2, but mesh= is 1; {BOTH}",
    ),
    # Sizes that do not multiply
    resolving(
        "too_many_factors",
        8,
        lambda: [keys(pipeline=2, tensor=2, data_shard=3)],
        "mesh: pipeline 2 (parallel.pipeline) x data_shard 3 (parallel.data_shard) x tensor 2 "
        "(parallel.tensor) = 12 ranks, but 8 were started; the nearest sizes that fit are pipeline 2 x "
        "data_shard 2 x tensor 2, or start 12 ranks",
    ),
    resolving(
        "too_few_data_parallel_ranks",
        8,
        lambda: [keys(tensor=2, data_parallel_size=2)],
        "mesh: data_shard 2 (data_parallel_size) x tensor 2 (parallel.tensor) = 4 ranks, but 8 were "
        "started; the nearest sizes that fit are data_shard 4 x tensor 2",
    ),
    resolving(
        "tensor_does_not_divide",
        8,
        lambda: [keys(tensor=3)],
        "mesh: tensor 3 (parallel.tensor) needs a multiple of 3 ranks, but 8 were started; the nearest "
        "sizes that fit are data_shard 2 x tensor 4, or start 9 ranks",
    ),
    resolving(
        "no_rank_is_left_for_data",
        4,
        lambda: [keys(tensor_parallel={"autotp_size": 8})],
        "mesh: tensor 8 (tensor_parallel.autotp_size) needs 8 ranks, but 4 were started: none is left "
        "for data; the nearest sizes that fit are tensor 4, or start 8 ranks",
    ),
    resolving(
        "one_rank",
        1,
        lambda: [source(mesh=accelerate(tp_size=2))],
        "mesh: tensor 2 (ParallelismConfig.tp_size) needs 2 ranks, but 1 was started: none is left for "
        "data; the nearest sizes that fit are data_shard 1, or start 2 ranks",
    ),
    resolving(
        "pipeline_times_tensor",
        12,
        lambda: [keys(pipeline=4, tensor=2)],
        "mesh: pipeline 4 (parallel.pipeline) x tensor 2 (parallel.tensor) needs a multiple of 8 ranks, "
        "but 12 were started; the nearest sizes that fit are pipeline 3 x data_shard 2 x tensor 2, or "
        "start 16 ranks",
    ),
    resolving(
        "copies_do_not_divide_the_data_parallel_size",
        8,
        lambda: [keys(data_replicate=3, data_parallel_size=8)],
        "data_replicate x data_shard: data_parallel_size is 8, which is not divisible by data_replicate "
        "3 (parallel.data_replicate); correct one of them",
    ),
    resolving(
        "data_parallel_size_is_another_product",
        8,
        lambda: [keys(data_replicate=2, data_shard=2, data_parallel_size=8)],
        "data_replicate x data_shard: data_parallel_size is 8, but data_replicate 2 x data_shard 2 = 4; "
        "correct one of them",
    ),
    resolving(
        "model_ranks_of_an_mpu_are_another_product",
        8,
        lambda: [mpu({"slice": [0, 1], "pipe": [0, 4], "model": [0, 1]})],
        "pipeline x tensor: mpu.get_model_parallel_world_size() is 2, but pipeline 2 x tensor 2 = 4; "
        "correct one of them",
    ),
    # Ranks in another order
    resolving(
        "tensor_outside_of_data",
        4,
        lambda: [source(mesh=device_mesh(("tp", "dp"), [[0, 1], [2, 3]]))],
        "mesh= has the ranks [[0, 1], [2, 3]] along tensor and data_replicate x data_shard, but the mesh "
        f"data_shard 2 x tensor 2 has [[0, 2], [1, 3]] there. {ORDER}",
        UsageError,
    ),
    resolving(
        "ranks_shuffled",
        4,
        lambda: [source(mesh=device_mesh(("dp",), [0, 2, 1, 3]))],
        "mesh= has the ranks [0, 2, 1, 3] along data_replicate x data_shard, but the mesh data_shard 4 "
        f"has [0, 1, 2, 3] there. {ORDER}",
        UsageError,
    ),
    resolving(
        "ranks_from_another_group",
        4,
        lambda: [source(mesh=device_mesh(("tp",), [0, 2]))],
        "mesh= has the ranks [0, 2] along tensor, but the mesh data_shard 2 x tensor 2 has [0, 1] there. "
        f"{ORDER}",
        UsageError,
    ),
    resolving(
        "ranks_beyond_the_world",
        2,
        lambda: [source(mesh=device_mesh(("dp",), [2, 3]))],
        "mesh= has the ranks [2, 3] along data_replicate x data_shard, but the mesh data_shard 2 has "
        f"[0, 1] there. {ORDER}",
        UsageError,
    ),
    resolving(
        "groups_of_an_mpu_in_another_order",
        4,
        lambda: [mpu({"model": [1, 3], "data": [0, 1]}, rank=1)],
        "mpu.get_data_parallel_group() has the ranks [0, 1] along data_replicate x data_shard, but the "
        f"mesh data_shard 2 x tensor 2 has [0, 2] there. {ORDER}",
        UsageError,
    ),
    resolving(
        "many_ranks_are_not_all_printed",
        16,
        lambda: [source(mesh=device_mesh(("dp",), list(reversed(range(16)))))],
        "mesh= has the ranks [15, 14, 13, 12, 11, 10, 9, 8, ...] along data_replicate x data_shard, but "
        f"the mesh data_shard 16 has [0, 1, 2, 3, 4, 5, 6, 7, ...] there. {ORDER}",
        UsageError,
    ),
)
