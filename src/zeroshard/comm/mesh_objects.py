"""Reads what a program's objects say about the mesh: device meshes, an ``mpu``, sizes of other libraries.

The objects are recognized by their attributes, so that no library has to be imported. Each function makes
a :class:`~zeroshard.core.mesh_sources.MeshSource`, without a collective. :func:`text_config` reads the
configuration of a Transformers model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from zeroshard.comm.dtensors import HEAD_DIMS
from zeroshard.core.mesh import DIMS, Mesh
from zeroshard.core.mesh_sources import BATCH_DIMS, Claim, MeshSource, RankPlacement
from zeroshard.errors import UnsupportedError, UsageError

_SHARD_AND_SEQUENCE = ("data_shard", "sequence")

AXES: Mapping[str, tuple[str, ...]] = {
    **{dim: (dim,) for dim in DIMS},
    **dict.fromkeys(("pp", "pipe", "pipeline_parallel"), ("pipeline",)),
    **dict.fromkeys(("dp_replicate", "replicate"), ("data_replicate",)),
    **dict.fromkeys(("dp_shard", "shard"), ("data_shard",)),
    **dict.fromkeys(("dp", "data", "data_parallel", "batch"), BATCH_DIMS),
    **dict.fromkeys(("fsdp", "dp_shard_cp", "dp_shard_sp"), _SHARD_AND_SEQUENCE),
    **dict.fromkeys(("dp_cp", "dp_sp", "loss"), (*BATCH_DIMS, "sequence")),
    **dict.fromkeys(("sp", "cp", "sequence_parallel", "context_parallel"), ("sequence",)),
    **dict.fromkeys(("tp", "model", "tensor_parallel", "model_parallel"), ("tensor",)),
    **dict.fromkeys(("expert", "ep", "expert_parallel"), ("expert",)),
}
"""Name of a dimension in a device mesh -> the dimensions of our mesh that it runs along.

The names are ours, and those of torchtitan, Accelerate, Transformers and DeepSpeed. ``dp`` and ``data``
are all data-parallel ranks, and ``fsdp`` shards over ``sequence``, too.
"""

_GETTERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("tensor_model", ("tensor",)),
    ("slice", ("tensor",)),
    ("pipeline_model", ("pipeline",)),
    ("pipe", ("pipeline",)),
    ("data", BATCH_DIMS),
    ("sequence", ("sequence",)),
    ("context", ("sequence",)),
    ("expert_model", ("expert",)),
)
"""Word in the getters of an ``mpu`` -> dimensions. Several words for the same ones must agree."""

_ACCELERATE = {
    "dp_replicate_size": "data_replicate",
    "dp_shard_size": "data_shard",
    "tp_size": "tensor",
    "cp_size": "sequence",
    "sp_size": "sequence",
}


def mesh_sources(
    *, mesh: Any = None, mpu: Any = None, mesh_param: Any = None, model: Any = None
) -> tuple[MeshSource, ...]:
    """All that the arguments of a program say about the mesh. None: not given.

    ``mesh``: a :class:`~zeroshard.core.mesh.Mesh`, a torch ``DeviceMesh``, a ``ParallelismConfig`` of
    Accelerate, or sources that were read before. The other arguments: see the functions below.

    Raises:
        UsageError: an argument cannot be read as a source.
    """
    found: list[MeshSource | None] = []
    if isinstance(mesh, (list, tuple)) and all(isinstance(one, MeshSource) for one in mesh):
        found += mesh
    elif mesh is not None:
        found.append(_mesh_argument(mesh))
    if mpu is not None:
        found.append(mesh_from_mpu(mpu))
    if mesh_param is not None:
        found.append(mesh_from_mesh_param(mesh_param))
    if isinstance(model, nn.Module):
        found += [getattr(model, "mesh_source", None), mesh_from_model(model)]
    return tuple(source for source in found if source is not None)


def _mesh_argument(mesh: Any) -> MeshSource | None:
    if isinstance(mesh, Mesh):
        return mesh_from_mesh(mesh)
    if hasattr(mesh, "mesh_dim_names"):
        return mesh_from_device_mesh(mesh)
    if hasattr(mesh, "dp_shard_size") and hasattr(mesh, "tp_size"):
        return mesh_from_parallelism_config(mesh)
    hint = " A pair of sizes is mesh_param=." if isinstance(mesh, (list, tuple)) else ""
    raise UsageError(
        f"mesh is a {type(mesh).__name__}, which does not say how many ranks there are along each "
        "dimension. Pass a torch DeviceMesh with mesh_dim_names, a zeroshard.core.mesh.Mesh, or a "
        f"ParallelismConfig of Accelerate.{hint}"
    )


def mesh_from_mesh(mesh: Mesh) -> MeshSource:
    """All sizes of one of our own meshes, those of 1, too."""
    dims = (*DIMS, "expert") if mesh.expert > 1 else DIMS
    return MeshSource("mesh=", tuple(Claim((dim,), getattr(mesh, dim), "mesh=") for dim in dims))


def _ranks_of(device_mesh: Any) -> np.ndarray[Any, Any]:
    """The ranks of a device mesh, in its shape. A fake mode does not hide them."""
    with unset_fake_temporarily():
        ranks: np.ndarray[Any, Any] = device_mesh.mesh.numpy()
    return ranks


def mesh_from_device_mesh(device_mesh: Any, name: str = "mesh=") -> MeshSource:
    """The sizes and the order of the ranks of a torch ``DeviceMesh``.

    Its dimensions have names of :data:`AXES`. It may contain some of the ranks only, such as those of one
    tensor group. ``name``: whose it is, for messages.

    Raises:
        UsageError: it has no names, an unknown name, or two names for the same dimension.
    """
    names, shape = device_mesh.mesh_dim_names, tuple(_ranks_of(device_mesh).shape)
    if not names:
        raise UsageError(
            f"{name} is a device mesh of shape {shape} without names, so it is unknown what its "
            'dimensions are for. Pass names: init_device_mesh(device, shape, mesh_dim_names=("data", '
            '"tensor")).'
        )
    if unknown := [axis for axis in names if axis not in AXES]:
        raise UsageError(
            f"{name} has the dimension {unknown[0]!r}, whose purpose is unknown. ZeroShard knows the "
            f"names {', '.join(AXES)}. Use one of them."
        )
    axes = tuple(AXES[axis] for axis in names)
    taken: dict[str, str] = {}
    for axis, dims in zip(names, axes, strict=True):
        for dim in dims:
            if dim in taken:
                raise UsageError(
                    f"{name} has the dimensions {taken[dim]!r} and {axis!r}, which are both {dim}. "
                    "Give each dimension one name."
                )
            taken[dim] = axis
    said = [f"{axis!r} of {name}" for axis in names]
    return _of_axes(name, said, axes, shape, _ranks_of(device_mesh).flatten().tolist())


def _of_axes(
    name: str,
    said: Sequence[str],
    axes: Sequence[tuple[str, ...]],
    shape: Sequence[int],
    ranks: Sequence[int],
) -> MeshSource:
    claims = tuple(
        Claim(dims, size, who) for who, dims, size in zip(said, axes, shape, strict=True)
    )
    dense = [at for at, dims in enumerate(axes) if dims != ("expert",)]
    if any(size > 1 for at, size in enumerate(shape) if at not in dense):
        return MeshSource(name, claims)  # experts divide the same ranks in another way
    kept, sizes = tuple(axes[at] for at in dense), tuple(shape[at] for at in dense)
    return MeshSource(name, claims, (RankPlacement(name, kept, sizes, tuple(ranks)),))


def mesh_from_mesh_param(mesh_param: Any) -> MeshSource:
    """DeepSpeed's pair: data-parallel size and sequence-parallel size.

    Raises:
        UsageError: it is not a pair of whole numbers of at least 1.
    """
    if not isinstance(mesh_param, (list, tuple)) or len(mesh_param) != 2:
        raise UsageError(
            f"mesh_param is {mesh_param!r}, but must be a pair of sizes: (data-parallel size, "
            "sequence-parallel size), such as (4, 1)."
        )
    data, sequence = mesh_param
    return MeshSource(
        "mesh_param",
        (
            Claim(BATCH_DIMS, data, "mesh_param[0]"),
            Claim(("sequence",), sequence, "mesh_param[1]"),
        ),
    )


def mesh_from_parallelism_config(config: Any) -> MeshSource | None:
    """The sizes of Accelerate's ``ParallelismConfig``; None if all are 1. Its sizes of 1 are defaults.

    Raises:
        UsageError: ``cp_size`` and ``sp_size`` are both above 1, or a size is not a number of ranks.
        UnsupportedError: ``cp_size`` is above 1.
    """
    claims = []
    for attribute, dim in _ACCELERATE.items():
        size = getattr(config, attribute, None)
        if size is not None and size != 1:
            claims.append(Claim((dim,), size, f"ParallelismConfig.{attribute}"))
    if [claim.dims for claim in claims].count(("sequence",)) > 1:
        raise UsageError(
            f"ParallelismConfig has cp_size {config.cp_size} and sp_size {config.sp_size}: both divide "
            "the sequence over ranks. Use one of them."
        )
    if getattr(config, "cp_size", 1) not in (None, 1):
        raise UnsupportedError(
            f"ParallelismConfig has cp_size {config.cp_size}, which means ring attention, and ZeroShard "
            'has none. Use sp_size with sp_backend="deepspeed": ranks then exchange tokens and heads.'
        )
    return MeshSource("ParallelismConfig", tuple(claims)) if claims else None


def mesh_from_model(model: nn.Module) -> MeshSource | None:
    """The device meshes on which the DTensor parameters of a model live; None if there are none.

    A mesh of one dimension without a name is one of tensor parallelism.

    Raises:
        UsageError: a device mesh has unknown names, or several dimensions without names.
    """
    found: dict[int, MeshSource] = {}
    for name, param in model.named_parameters():
        device_mesh = getattr(param, "device_mesh", None)
        if device_mesh is None or id(device_mesh) in found or not hasattr(param, "placements"):
            continue
        if (
            device_mesh.mesh_dim_names == HEAD_DIMS
        ):  # q of the same layer is on the whole tensor group
            continue
        of = f"the device mesh of the parameter {name}"
        ranks = _ranks_of(device_mesh)
        if device_mesh.mesh_dim_names is None and ranks.ndim == 1:
            source = _of_axes(of, [of], [("tensor",)], ranks.shape, ranks.tolist())
        else:
            source = mesh_from_device_mesh(device_mesh, of)
        found[id(device_mesh)] = source
    if not found:
        return None
    sources = found.values()
    return MeshSource(
        "the parameters of the model",
        tuple(claim for source in sources for claim in source.claims),
        tuple(placement for source in sources for placement in source.placements),
    )


def mesh_from_mpu(
    mpu: Any, *, rank: int | None = None, ranks_of: Callable[[Any], Iterable[int]] | None = None
) -> MeshSource:
    """What the getters of an ``mpu`` say: sizes, this rank's place, and the ranks of its groups.

    The getters are ``get_<word>_parallel_world_size()``, ``..._rank()`` and ``..._group()``. The word is
    ``data``, ``tensor_model`` (or ``slice``), ``model``, ``pipeline_model`` (or ``pipe``), ``sequence``
    (or ``context``), or ``expert_model``. Not all need exist. ``model`` is the tensor group if there are
    no getters of that; else all ranks with the same data, or nothing if it raises. ``rank`` and
    ``ranks_of(group)`` default to those of ``torch.distributed``.

    Raises:
        UsageError: there is no getter of a size, a getter fails, or getters contradict each other.
    """
    own = rank if rank is not None else _own_rank()
    reader = _MpuReader(mpu, own, ranks_of or _ranks_of_group)
    for word, dims in _GETTERS:
        reader.read(word, dims)
    if reader.has(("tensor",)):
        reader.read("model", ("pipeline", "tensor"), may_fail=True)
    else:
        reader.read("model", ("tensor",))
    if not reader.claims:
        raise UsageError(
            f"mpu is a {type(mpu).__name__} without any getter of a size, so it says nothing about the "
            "ranks. It needs methods such as get_data_parallel_world_size() and "
            "get_model_parallel_world_size()."
        )
    return MeshSource("mpu", tuple(reader.claims), tuple(reader.placements))


def _own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _ranks_of_group(group: Any) -> list[int]:
    return list(dist.get_process_group_ranks(group))


class _MpuReader:
    """Collects what the getters of one ``mpu`` say."""

    def __init__(self, mpu: Any, own: int, ranks_of: Callable[[Any], Iterable[int]]) -> None:
        self.claims: list[Claim] = []
        self.placements: list[RankPlacement] = []
        self._mpu, self._own, self._ranks_of = mpu, own, ranks_of

    def has(self, dims: tuple[str, ...]) -> bool:
        return any(claim.dims == dims for claim in self.claims)

    def read(self, word: str, dims: tuple[str, ...], *, may_fail: bool = False) -> None:
        """Add what ``get_<word>_parallel_*`` say. ``may_fail``: nothing is added if the size raises."""
        getter = f"get_{word}_parallel_world_size"
        try:
            size = self._call(getter)
        except UsageError:
            if may_fail:  # Megatron's of a pipeline: it has the name for programs without one
                return
            raise
        if size is None:
            return
        self.claims.append(Claim(dims, size, f"mpu.{getter}()"))
        at = self._call(f"get_{word}_parallel_rank")
        group = self._call(f"get_{word}_parallel_group")
        if at is not None and not (isinstance(at, int) and 0 <= at < size):
            raise UsageError(
                f"mpu.get_{word}_parallel_rank() is {at!r}, and mpu.{getter}() is {size}: the rank must "
                "be a whole number below the size."
            )
        if group is None or dims == ("expert",):
            return  # without a group there is nothing to send to
        name = f"mpu.get_{word}_parallel_group()"
        ranks = tuple(self._ranks_of(group))
        if len(ranks) != size:
            raise UsageError(
                f"{name} has the ranks {list(ranks)}, but mpu.{getter}() is {size}. Return the group "
                "of that size."
            )
        if at is not None and ranks[at] != self._own:
            raise UsageError(
                f"{name} has the ranks {list(ranks)}, so its member {at} is rank {ranks[at]}, but "
                f"mpu.get_{word}_parallel_rank() is {at} on rank {self._own}. Return this rank's place "
                "in its own group."
            )
        self.placements.append(RankPlacement(name, (dims,), (size,), ranks))

    def _call(self, name: str) -> Any:
        getter = getattr(self._mpu, name, None)
        if getter is None:
            return None
        try:
            return getter()
        except Exception as error:
            raise UsageError(
                f"mpu.{name}() failed with {type(error).__name__}: {error}. It is asked when the engine "
                "is built, so make the groups before."
            ) from error


def text_config(config: Any) -> Any:
    """The part of a model's configuration that describes its language model; ``config`` itself if none.

    A model of several modalities has a configuration for each. If several of them describe a language
    model, there is none of the whole.
    """
    get = getattr(config, "get_text_config", None)
    if get is None:
        return config
    try:
        return get()
    except ValueError:  # an encoder and a decoder have one each
        return config
