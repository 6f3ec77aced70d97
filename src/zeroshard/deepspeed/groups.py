"""Process groups under DeepSpeed's names (``deepspeed.utils.groups``), answered from a mesh.

The functions answer for the mesh of the engine that was built last; without an engine, all ranks are
data-parallel. A group of one rank is None. DeepSpeed calls tensor parallelism *model* parallelism, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch.distributed as dist

from zeroshard.core.mesh import BATCH, HOLDERS, Mesh
from zeroshard.deepspeed.collectives import get_rank, get_world_group, get_world_size
from zeroshard.errors import UsageError

TENSOR, SEQUENCE, PIPELINE = frozenset({"tensor"}), frozenset({"sequence"}), frozenset({"pipeline"})
ALONE: frozenset[str] = frozenset()
"""No dimension: a group of one rank."""

OPENED = (TENSOR, SEQUENCE, BATCH, HOLDERS, PIPELINE, PIPELINE | TENSOR, ALONE)
"""The groups that have a process group."""


def getters(
    dims: frozenset[str], of: Callable[[Any], MeshGroups] = lambda self: self
) -> tuple[Callable[..., Any], Callable[..., int], Callable[..., int]]:
    """Three methods for the group along ``dims``: process group, number of ranks, this rank's number.

    ``of``: the groups of the object that has the methods.
    """

    def group(self: Any) -> Any:
        """The process group. See :meth:`MeshGroups.group`."""
        return of(self).group(dims)

    def size(self: Any) -> int:
        """Number of ranks in the group."""
        return of(self).size(dims)

    def rank(self: Any) -> int:
        """This rank's number in the group."""
        return of(self).rank_in(dims)

    return group, size, rank


class MeshGroups:
    """The groups of one rank in a mesh. It answers as an ``mpu``.

    ``process_groups``: ranks -> process group. All ranks have the default process group.
    """

    def __init__(
        self, mesh: Mesh, rank: int, process_groups: dict[tuple[int, ...], Any] | None = None
    ) -> None:
        self.mesh, self._rank = mesh, rank
        self._process_groups = {} if process_groups is None else process_groups

    @classmethod
    def open(cls, mesh: Mesh) -> MeshGroups:
        """The groups of this rank in ``mesh``. Collective, unless all parallelism is data parallelism.

        Equal groups are opened once, for all meshes.
        """
        found = cls(mesh, get_rank(), _opened_here())
        # Layers may share their experts among fewer ranks than the mesh has for them.
        for size in [size for size in range(2, mesh.expert + 1) if mesh.expert % size == 0]:
            found._open_all(mesh.expert_groups(size))
            found._open_all(mesh.same_expert_groups(size))
        if mesh.is_data_only:
            return found
        for dims in OPENED:
            own = found.ranks(dims)
            if len(own) == mesh.world_size or own in found._process_groups:
                continue
            if len(own) == 1:
                found._process_groups[own] = dist.new_group([*own], use_local_synchronization=True)
                continue
            # All ranks open all groups. Torch would name a group that only its members open by the
            # number of groups that a rank is in, which may differ: Accelerate makes one of a few ranks.
            found._open_all(mesh.groups(dims))
        return found

    def _open_all(self, groups: list[tuple[int, ...]]) -> None:
        """Open a process group for each of ``groups``, unless this rank's exists. Collective."""
        if next(ranks for ranks in groups if self._rank in ranks) in self._process_groups:
            return
        for ranks in groups:
            made = dist.new_group(list(ranks))
            if self._rank in ranks:
                self._process_groups[ranks] = made

    def ranks(self, dims: Collection[str]) -> tuple[int, ...]:
        """The ranks that differ from this one only in ``dims``; this one is among them."""
        return self.mesh.group(self._rank, dims)

    def size(self, dims: Collection[str]) -> int:
        """Number of ranks in the group along ``dims``."""
        return len(self.ranks(dims))

    def rank_in(self, dims: Collection[str]) -> int:
        """This rank's number in the group along ``dims``."""
        return self.ranks(dims).index(self._rank)

    def group(self, dims: Collection[str]) -> Any:
        """The process group along ``dims``.

        If all parallelism is data parallelism, the other groups are None, as in DeepSpeed. In other
        meshes a rank that is alone has a process group too, because torch takes None for all ranks.
        """
        if self.mesh.is_data_only and not BATCH.issubset(dims):
            return None
        ranks = self.ranks(dims)
        return (
            get_world_group() if len(ranks) == self.mesh.world_size else self._process_groups[ranks]
        )

    get_data_parallel_group, get_data_parallel_world_size, get_data_parallel_rank = getters(BATCH)
    (get_sequence_data_parallel_group, get_sequence_data_parallel_world_size,
     get_sequence_data_parallel_rank) = getters(HOLDERS)  # fmt: skip
    (get_tensor_model_parallel_group, get_tensor_model_parallel_world_size,
     get_tensor_model_parallel_rank) = getters(TENSOR)  # fmt: skip
    (get_sequence_parallel_group, get_sequence_parallel_world_size,
     get_sequence_parallel_rank) = getters(SEQUENCE)  # fmt: skip
    get_pipe_parallel_group, get_pipe_parallel_world_size, get_pipe_parallel_rank = getters(
        PIPELINE
    )
    get_model_parallel_group = get_tensor_model_parallel_group
    get_model_parallel_world_size = get_tensor_model_parallel_world_size
    get_model_parallel_rank = get_tensor_model_parallel_rank

    def get_expert_parallel_world_size(self, group_name: str = "") -> int:
        """How many ranks share the experts of a layer: N of ``ep_size_N``, or those of the mesh."""
        return self._expert_size(group_name)

    def get_expert_parallel_rank(self, group_name: str = "") -> int:
        """This rank's number among the ranks that share the experts."""
        return self.mesh.expert_place(self._rank, self._expert_size(group_name))

    def get_expert_parallel_group(self, group_name: str = "") -> Any:
        """The process group of the ranks that share the experts.

        Raises:
            UsageError: no layer has experts that so many ranks share. (DeepSpeed: an assertion.)
        """
        size = self._expert_size(group_name)
        return self._of_ranks(self.mesh.expert_group(self._rank, size), size)

    def get_expert_data_parallel_world_size(self, group_name: str = "") -> int:
        """How many ranks hold the same experts."""
        return len(self._same_experts(group_name))

    def get_expert_data_parallel_rank(self, group_name: str = "") -> int:
        """This rank's number among the ranks that hold the same experts."""
        return self._same_experts(group_name).index(self._rank)

    def get_expert_data_parallel_group(self, group_name: str = "") -> Any:
        """The process group of the ranks that hold the same experts.

        Raises:
            UsageError: as :meth:`get_expert_parallel_group`.
        """
        return self._of_ranks(self._same_experts(group_name), self._expert_size(group_name))

    def _same_experts(self, group_name: str) -> tuple[int, ...]:
        size = self._expert_size(group_name)
        return self.mesh.same_experts(self._rank, size) if size > 1 else self.ranks(HOLDERS)

    def _expert_size(self, group_name: str) -> int:
        _, found, size = group_name.rpartition("ep_size_")
        return int(size) if found and size.isdecimal() else self.mesh.expert

    def _of_ranks(self, ranks: tuple[int, ...], size: int) -> Any:
        """The process group of ``ranks``. Never None, which torch takes for all ranks."""
        if len(ranks) == self.mesh.world_size:
            return get_world_group()
        if len(ranks) == 1 and ranks not in self._process_groups:
            self._process_groups[ranks] = dist.new_group([*ranks], use_local_synchronization=True)
        if ranks not in self._process_groups:
            raise UsageError(
                f"there is no process group of {size} ranks that share experts: the mesh is "
                f"{self.mesh.text}, with {self.mesh.expert} expert rank(s). Ask after initialize(), for "
                "the group_name of a MoE layer of the model, such as ep_size_2."
            )
        return self._process_groups[ranks]


_opened: dict[
    int, tuple[Any, dict[tuple[int, ...], Any]]
] = {}  # of the default group that exists now


def _opened_here() -> dict[tuple[int, ...], Any]:
    """The process groups that were opened since the default one was."""
    world = get_world_group()
    if world is None:
        return {}
    if id(world) not in _opened:
        _opened.clear()  # those of a default group that was destroyed went with it
        _opened[id(world)] = world, {}
    return _opened[id(world)][1]


_current: list[tuple[Any, MeshGroups]] = []  # at most one: the default group, and the mesh in use


def use(mesh: Mesh) -> MeshGroups:
    """Make this the mesh that the functions below answer for. Collective, as :meth:`MeshGroups.open`."""
    found = MeshGroups.open(mesh)
    is_plain = mesh.is_data_only and mesh.expert == 1
    _current[:] = [] if is_plain else [(get_world_group(), found)]
    return found


def current() -> MeshGroups:
    """The mesh in use; all ranks are data-parallel if there is none."""
    if _current and _current[0][0] is get_world_group():
        return _current[0][1]
    return MeshGroups(Mesh(data_shard=get_world_size()), get_rank())


def __getattr__(name: str) -> Any:
    if name == "mpu":
        groups = current()
        return None if groups.mesh.is_data_only else groups
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _asking(getter: Callable[..., Any]) -> Callable[..., Any]:
    """A function that asks the mesh in use. DeepSpeed's functions have more arguments, without effect.

    Only the getters for experts take an argument, ``ep_size_N``: the name of a group of DeepSpeed.
    """
    takes_name = "expert" in getter.__name__

    def answer(group_name: str = "", *_: Any, **__: Any) -> Any:
        return getter(current(), group_name) if takes_name else getter(current())

    answer.__doc__ = getter.__doc__
    return answer


for _name in [name for name in vars(MeshGroups) if name.startswith("get_")]:
    globals()[f"_{_name}"] = _asking(getattr(MeshGroups, _name))
    if _name.startswith(("get_data_", "get_model_", "get_tensor_")):
        globals()[_name] = globals()[f"_{_name}"]


def _get_broadcast_src_rank(*_: Any, **__: Any) -> int:
    """The first of the ranks that hold the same parameters as this one."""
    return current().ranks(HOLDERS)[0]
