"""Ranks in a grid with named axes, and messages between pipeline stages, under DeepSpeed's names.

Ranks are numbered in row-major order: ranks that are neighbours on the last axis follow each other.
"""

from __future__ import annotations

import weakref
from collections import namedtuple
from collections.abc import Sequence
from itertools import product
from typing import Any

from torch import Tensor

from zeroshard.core.mesh import BATCH, Mesh
from zeroshard.deepspeed import collectives as comm
from zeroshard.deepspeed.collectives import get_rank, get_world_size
from zeroshard.deepspeed.groups import PIPELINE, TENSOR, MeshGroups, current, getters
from zeroshard.errors import UsageError

MODEL = PIPELINE | TENSOR
"""Ranks that differ only in these dimensions hold one copy of the model together."""


class ProcessTopology:
    """A grid of ranks. ``axes``: names, outermost first. ``dims``: sizes, in the same order.

    Raises:
        UsageError: the numbers of names and sizes differ, a name occurs twice, or a size is below 1.

    >>> grid = ProcessTopology(axes=["pipe", "data"], dims=[2, 3])
    >>> grid.get_rank(pipe=1, data=2), grid.get_coord(4).data, grid.get_axis_list("data", 1)
    (5, 1, [1, 4])
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes, self.dims = list(axes), [int(size) for size in dims]
        if len(self.axes) != len(self.dims) or len(set(self.axes)) != len(self.axes):
            raise UsageError(
                f"a topology has one size for each axis and no axis twice, not axes {self.axes} with "
                f"sizes {self.dims}."
            )
        if any(size < 1 for size in self.dims):
            raise UsageError(f"the sizes of a topology must be at least 1, not {self.dims}.")
        coordinate: Any = namedtuple("ProcessCoord", self.axes)  # type: ignore[misc]
        places = product(*map(range, self.dims))
        self.ProcessCoord = coordinate
        self.mapping: dict[Any, int] = {
            coordinate(*place): rank for rank, place in enumerate(places)
        }
        self._coordinates = list(self.mapping)

    def __str__(self) -> str:
        return str(self.mapping)

    def world_size(self) -> int:
        """The number of ranks."""
        return len(self._coordinates)

    def get_axis_names(self) -> list[str]:
        """The names of the axes, outermost first."""
        return self.axes

    def get_dim(self, axis: str) -> int:
        """The size of an axis; 0 if there is no such axis."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_rank(self, **coord_kwargs: int) -> int:
        """The rank at a position on every axis.

        Raises:
            UsageError: an axis is missing or unknown, or there is no such position.
        """
        if coord_kwargs.keys() != set(self.axes):
            raise UsageError(
                f"get_rank() needs one position on each of the axes {self.axes}, not on "
                f"{sorted(coord_kwargs)}. filter_match() finds the ranks for some of them."
            )
        at = self.ProcessCoord(**coord_kwargs)
        if at not in self.mapping:
            raise UsageError(f"get_rank(): {at} is outside the sizes {self.dims} of {self.axes}.")
        return self.mapping[at]

    def get_coord(self, rank: int) -> Any:
        """The position of a rank: a named tuple with one field for each axis.

        Raises:
            UsageError: there is no such rank.
        """
        if not 0 <= rank < self.world_size():
            raise UsageError(f"get_coord(): rank {rank} is not one of {self.world_size()} ranks.")
        return self._coordinates[rank]

    def get_rank_repr(
        self,
        rank: int,
        omit_axes: Sequence[str] = ("data", "pipe"),
        inner_sep: str = "_",
        outer_sep: str = "-",
    ) -> str:
        """The position of a rank on the axes that are not omitted, for file names: ``model_01``."""
        at = self.get_coord(rank)._asdict()
        kept = [axis for axis in self.axes if axis not in omit_axes]
        return outer_sep.join(f"{axis}{inner_sep}{at[axis]:02d}" for axis in kept)

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Lists of the ranks that differ on ``axis`` only; empty if there is no such axis."""
        if axis not in self.axes:
            return []
        found: dict[tuple[Any, ...], list[int]] = {}
        skipped = self.axes.index(axis)
        for rank, at in enumerate(self._coordinates):
            found.setdefault(at[:skipped] + at[skipped + 1 :], []).append(rank)
        return list(found.values())

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """The ranks at the given positions on some axes, in order."""
        return [
            rank
            for rank, at in enumerate(self._coordinates)
            if all(getattr(at, axis) == index for axis, index in filter_kwargs.items())
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """The ranks at position ``idx`` on one axis, in order."""
        return self.filter_match(**{axis: idx})


class PipeDataParallelTopology(ProcessTopology):
    """Pipeline stages, each on ``num_dp`` data-parallel ranks."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data"], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Pipeline stages, data-parallel ranks and ``num_mp`` tensor-parallel ranks, innermost."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])


_DIM_OF = {"pipe": "pipeline", "data": "data_shard", "model": "tensor"}


def mesh_of(topology: ProcessTopology) -> Mesh:
    """The mesh that numbers the ranks as ``topology`` does.

    Raises:
        UsageError: it has axes other than pipe, data and model, or another order of them.
    """
    order = [axis for axis in _DIM_OF if axis in topology.axes]
    if topology.axes != order:
        raise UsageError(
            f"the topology has the axes {topology.axes}; a grid is made of the axes pipe, data and "
            "model, in this order, because the ranks are numbered so. Give them in this order."
        )
    sizes = zip(topology.axes, topology.dims, strict=True)
    return Mesh(**{_DIM_OF[axis]: size for axis, size in sizes})


def _groups(grid: PipelineParallelGrid) -> MeshGroups:
    return grid._groups


class PipelineParallelGrid:
    """This rank's place in a topology, and its process groups. It can be passed as ``mpu``.

    ``topology``: default that of the current mesh. *slice* is tensor parallelism, and *model* are all
    ranks that hold one copy of the model together. Collective if there are several kinds of groups: every
    rank makes the grid.

    Raises:
        UsageError: the topology has another number of ranks than ``process_group``, or other axes than
            pipe, data and model.
    """

    def __init__(self, topology: ProcessTopology | None = None, process_group: Any = None) -> None:
        self.global_rank, self.world_size = get_rank(), get_world_size(process_group)
        if topology is None:
            mesh = current().mesh
            topology = PipeModelDataParallelTopology(mesh.pipeline, mesh.tensor, mesh.dp_size)
        if topology.world_size() != self.world_size:
            raise UsageError(
                f"the topology has {topology.world_size()} ranks ({topology.axes} = "
                f"{topology.dims}), but the process group has {self.world_size}. Give sizes whose "
                "product is the number of ranks."
            )
        self._topo = topology
        self._groups = MeshGroups.open(mesh_of(topology))
        mesh = self._groups.mesh
        self.pipe_parallel_size, self.data_parallel_size = mesh.pipeline, mesh.dp_size
        self.model_parallel_size = self.slice_parallel_size = mesh.tensor
        self.stage_id, self.data_parallel_id = self.get_stage_id(), self.get_data_parallel_id()
        self.is_slice_parallel = mesh.tensor > 1

    def topology(self) -> ProcessTopology:
        """The grid of all ranks."""
        return self._topo

    def get_global_rank(self) -> int:
        """This rank's number among all ranks."""
        return self.global_rank

    get_pipe_parallel_group, get_pipe_parallel_world_size, get_stage_id = getters(PIPELINE, _groups)
    get_data_parallel_group, get_data_parallel_world_size, get_data_parallel_id = getters(
        BATCH, _groups
    )
    (get_model_parallel_group, get_model_parallel_world_size,
     get_model_parallel_rank) = getters(MODEL, _groups)  # fmt: skip
    (get_slice_parallel_group, get_slice_parallel_world_size,
     get_slice_parallel_rank) = getters(TENSOR, _groups)  # fmt: skip
    get_pipe_parallel_rank, get_data_parallel_rank = get_stage_id, get_data_parallel_id

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """The rank of stage ``stage_id`` at this rank's place on the other axes, or at ``kwargs``."""
        at = self._topo.get_coord(self.global_rank)._asdict()
        return self._topo.get_rank(**{**at, "pipe": stage_id, **kwargs})

    def _along(self, axis: str) -> list[int]:
        """The ranks of the group of this rank along an axis of the topology."""
        groups = self._topo.get_axis_comm_lists(axis)
        own = (ranks for ranks in groups if self.global_rank in ranks)
        return next(own, [self.global_rank])

    @property
    def pp_group(self) -> list[int]:
        """The ranks of this rank's pipeline, by stage."""
        return self._along("pipe")

    @property
    def dp_group(self) -> list[int]:
        """The ranks with the same part of the model."""
        return self._along("data")

    @property
    def slice_group(self) -> list[int]:
        """The ranks of the tensor group."""
        return self._along("model")

    @property
    def pipe_groups(self) -> list[list[int]]:
        """The ranks of every pipeline."""
        return self._topo.get_axis_comm_lists("pipe")

    @property
    def dp_groups(self) -> list[list[int]]:
        """Every group of ranks with the same part of the model."""
        return self._topo.get_axis_comm_lists("data")

    pp_proc_group = property(get_pipe_parallel_group)
    dp_proc_group = property(get_data_parallel_group)
    slice_proc_group = property(get_slice_parallel_group)
    ds_model_proc_group = property(get_model_parallel_group)
    ds_model_rank = property(get_model_parallel_rank)
    ds_model_world_size = property(get_model_parallel_world_size)

    @property
    def p2p_groups(self) -> list[list[int]]:
        """For each rank: it, and the rank of the next stage. After the last stage comes the first."""
        pairs = {}
        for ranks in self._topo.get_axis_comm_lists("pipe"):
            following = [*ranks[1:], ranks[0]]
            pairs.update({one: [one, other] for one, other in zip(ranks, following, strict=True)})
        return [pairs[rank] for rank in sorted(pairs)]


# ---------------------------------------------------------------------- messages
# For programs (``deepspeed.runtime.pipe.p2p``). Both calls wait. The instructions of the engine have
# messages of their own, so the two do not mix.

_grids: list[weakref.ref[Any]] = []  # the last one is in use; engines keep them alive


def init_process_groups(grid: Any) -> None:
    """Use the topology of ``grid``. The engine of a ``PipelineModule`` does this."""
    _grids[:] = [weakref.ref(grid)]


def _rank_of(stage: int, call: str) -> int:
    grid = _grids[-1]() if _grids else None
    if grid is None:
        raise UsageError(
            f"p2p.{call}() before there is a pipeline: build the engine of a PipelineModule first, or "
            "call p2p.init_process_groups(grid)."
        )
    rank: int = grid.stage_to_global(stage)
    return rank


def send(tensor: Tensor, dest_stage: int, async_op: bool = False) -> Any:
    """Send a tensor to a stage of this pipeline. ``async_op``: return a handle instead of waiting."""
    target = _rank_of(dest_stage, "send")
    return (comm.isend if async_op else comm.send)(tensor.contiguous(), dst=target)


def recv(tensor: Tensor, src_stage: int, async_op: bool = False) -> Any:
    """Receive into a tensor from a stage of this pipeline. ``async_op``: as in :func:`send`."""
    source = _rank_of(src_stage, "recv")
    return (comm.irecv if async_op else comm.recv)(tensor, src=source)


def can_send_recv() -> bool:
    """True: sends and receives work everywhere."""
    return True
