"""Parameters that are DTensors: the local part that a unit stores, and its place in the global tensor.

A unit holds the local tensor of each DTensor, as it holds plain parameters. The DTensor object stays the
module's parameter. Its local tensor is exchanged where plain parameters exchange ``.data``, because
assigning ``.data`` of a DTensor does not change its local tensor.

Importing torch's DTensor takes half a second, and most runs have none. So it is looked up, not imported.
A program that has DTensors has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from zeroshard.core.layout import Slot, SlotBlock
from zeroshard.core.mesh import DIMS, Mesh
from zeroshard.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

KINDS: set[type[Tensor]] = set()
"""The classes of DTensors in the models of this process: see :func:`note_kinds`. Nearly always empty."""


JOIN = "_join_parts"
"""Attribute of a plain parameter that is a part of a tensor: joins those of all ranks. Collective."""


PART_MARKS = ("tensor_model_parallel", "model_parallel")
"""Attributes of a plain parameter that a program has cut over tensor ranks by itself: Megatron's and that
of gpt-neox and DeepSpeed. One of them is true."""

_PLACE_MARKS = ("partition_dim", "partition_stride")


HEAD_DIMS = ("kv_heads", "kv_copies")
"""Names of a mesh of one tensor group for key/value heads that are fewer than its ranks.

Ranks that differ in the second dimension hold the same heads.
"""


def note_kinds(params: Iterable[Tensor]) -> None:
    """Add the classes of DTensors among ``params`` to :data:`KINDS`."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    if module is not None:
        KINDS.update(type(param) for param in params if isinstance(param, module.DTensor))


def has_dtensor(types: Iterable[type]) -> bool:
    """Whether the class of a DTensor is among ``types``."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(issubclass(kind, module.DTensor) for kind in types)


def is_part(param: Any) -> bool:
    """Whether the program says that ``param`` is one tensor rank's part, and it is no DTensor."""
    return type(param) not in KINDS and any(getattr(param, mark, False) for mark in PART_MARKS)


def copy_part_marks(source: Tensor, target: Tensor) -> None:
    """Mark ``target`` as the part that ``source`` is. A deep copy of a parameter has no attributes."""
    for mark in (*PART_MARKS, *_PLACE_MARKS):
        if hasattr(source, mark):
            setattr(target, mark, getattr(source, mark))


def clear_part_marks(param: Tensor) -> None:
    """Let ``param`` be no part any more."""
    for mark in PART_MARKS:
        param.__dict__.pop(mark, None)


def local_of(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor; any other tensor itself. No autograd, no communication."""
    return tensor._local_tensor if type(tensor) in KINDS else tensor  # type: ignore[attr-defined]


def set_local(param: Tensor, local: Tensor) -> None:
    """Exchange the local tensor of a DTensor. ``local`` must not be a view in the sense of autograd.

    A custom autograd function that calls ``to_local()`` would otherwise find a view that was changed in
    place: pass ``view.data``.
    """
    param._local_tensor = local  # type: ignore[attr-defined]


def global_of(param: Any, local: Tensor) -> DTensor:
    """A DTensor with the placements of ``param`` and other local values, for instance fp32 ones."""
    from torch.distributed.tensor import DTensor

    made = DTensor.from_local(
        local,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
    fused: DTensor = marked_like(made, param)
    return fused


def marked_like(made: Any, param: Any) -> Any:
    """``made``, a DTensor with the placements of ``param``, marked as fused if ``param`` is."""
    if not fused_sizes(param):
        return made
    from zeroshard.comm.fused_dtensors import mark_fused

    return mark_fused(made, fused_sizes(param))


def fused_sizes(param: Any) -> tuple[int, ...]:
    """The sizes of the matrices that ``param`` joins along the axis that is cut; () if it is one matrix.

    See :class:`zeroshard.comm.fused_dtensors.FusedDTensor`.
    """
    return getattr(param, "fused_sizes", ())


def whole_of(param: Tensor, local: Tensor) -> Tensor:
    """The global tensor of ``param`` from this rank's ``local`` values; ``local`` for a plain parameter.

    Collective over the ranks that hold its parts: a tensor group, or those that share experts.
    """
    if (join := getattr(param, JOIN, None)) is not None:
        joined: Tensor = join(local)
        return joined
    return global_of(param, local).full_tensor() if type(param) in KINDS else local


def local_part(slot: Slot, values: Tensor) -> Tensor:
    """The part of the global tensor ``values`` that this rank holds of the slot's parameter."""
    if slot.block is None:
        return values
    if slot.block.runs:
        runs = [values.narrow(slot.block.axis, *run) for run in slot.block.runs]
        return torch.cat(runs, slot.block.axis)
    begins = zip(slot.block.start, slot.shape, strict=True)
    return values[tuple(slice(begin, begin + size) for begin, size in begins)]


def local_grad(param: Any, grad: Any) -> Tensor:
    """The local part of a gradient, cut as the parameter is.

    A gradient that is a partial sum is added over the tensor group here; one that is whole is cut. So a
    rank's gradient is complete but for the sum over the ranks that hold the same part.
    """
    if grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    local: Tensor = grad._local_tensor
    return local


def is_copy(param: Any, ranks: Sequence[int]) -> bool:
    """Whether the parameter is a DTensor of which exactly the ranks ``ranks`` hold this rank's part.

    They are a tensor group that holds all of it, or the ranks of a group that share key/value heads. Of
    plain parameters: whether :func:`add_over` noted these ranks.
    """
    if type(param) not in KINDS:
        return getattr(param, _ADDED_OVER, None) == tuple(ranks)
    mesh: DeviceMesh = param.device_mesh
    if mesh.ndim != 1 and mesh.mesh_dim_names != HEAD_DIMS:
        return False
    own = dist.get_process_group_ranks(mesh.get_group(mesh.ndim - 1))
    return own == list(ranks) and bool(param.placements[-1].is_replicate())


def is_addend(param: Any, grad: Any) -> bool:
    """Whether a DTensor gradient is an addend of a sum over the ranks of :func:`is_copy`."""
    *others, last = grad.placements
    return bool(last.is_partial("sum")) and tuple(others) == param.placements[:-1]


def head_copies(params: Iterable[Tensor]) -> tuple[int, ...]:
    """How many ranks share key/value heads, for each such number among ``params``, in order."""
    found = [p.device_mesh for p in params if type(p) in KINDS]  # type: ignore[attr-defined]
    return tuple(sorted({mesh.size(1) for mesh in found if mesh.mesh_dim_names == HEAD_DIMS}))


_ADDENDS = "_gradients_are_addends"
_ADDED_OVER = "_gradients_added_over"


def add_over(param: Tensor, ranks: Sequence[int]) -> None:
    """Note that all gradients of a plain parameter are addends of a sum over ``ranks``, which hold it."""
    setattr(param, _ADDENDS, True)
    setattr(param, _ADDED_OVER, tuple(ranks))


def mark_addends(param: Any, adds: bool) -> None:
    """Note whether the gradients of ``param`` are addends of a sum over the ranks with the same part.

    If layers share it, they are if those of one layer are.
    """
    setattr(param, _ADDENDS, adds or bool(addends_of(param)))


def addends_of(param: Any) -> bool | None:
    """What :func:`mark_addends` noted; None: nothing."""
    return getattr(param, _ADDENDS, None)


def block_of(fqn: str, param: Any, mesh: Mesh, rank: int) -> SlotBlock | None:
    """The place of a parameter in its global tensor; None for a parameter that is not a DTensor.

    Raises:
        UsageError: the DTensor's device mesh does not fit ``mesh``, or it is cut over data ranks.
        UnsupportedError: a placement that a unit cannot store.
    """
    if type(param) not in KINDS:
        return None
    from torch.distributed.tensor import Replicate, Shard

    start, extent = [0] * param.dim(), list(param.shape)
    largest = list(param.shape)
    split: set[str] = set()
    joined = 0
    runs: tuple[tuple[int, int], ...] = ()
    for at, placement in enumerate(param.placements):
        size = param.device_mesh.size(at)
        if size == 1 or isinstance(placement, Replicate):
            continue
        if type(placement) is not Shard:
            raise UnsupportedError(
                f"parameter {fqn!r} is a DTensor with placement {placement}. Units store parameters that "
                "are cut along one axis or replicated. Use Shard or Replicate."
            )
        dim = _dim_of(fqn, param, at, mesh, rank)
        axis = placement.dim % param.dim()
        if start[axis] or extent[axis] != param.shape[axis]:
            raise UnsupportedError(
                f"parameter {fqn!r} is a DTensor that two dimensions of its mesh cut along axis {axis}. "
                "Cut each axis once."
            )
        place = param.device_mesh.get_local_rank(at)
        chunk = -(-param.shape[axis] // size)  # torch cuts as torch.chunk does
        start[axis] = min(place * chunk, param.shape[axis])
        extent[axis] = min(chunk, param.shape[axis] - start[axis])
        largest[axis] = chunk
        split.add(dim)
        if sizes := fused_sizes(param):
            joined, runs = axis, runs_of(sizes, size, place)
            start[axis] = runs[0][0]
    held = tuple(param._local_tensor.shape)
    if tuple(extent) != held:
        raise UnsupportedError(
            f"parameter {fqn!r} is a DTensor of shape {tuple(param.shape)} of which this rank holds "
            f"{held}. Cut as torch.chunk cuts, it would hold {tuple(extent)}, and ZeroShard derives from "
            "this where each part lies. Cut the whole tensor with distribute_tensor()."
        )
    names = param.device_mesh.mesh_dim_names
    copy = param.device_mesh.get_local_rank(1) if split and names == HEAD_DIMS else 0
    return SlotBlock(
        tuple(param.shape), tuple(start), frozenset(split), prod(largest), joined, runs, copy
    )


def runs_of(sizes: Sequence[int], parts: int, index: int) -> tuple[tuple[int, int], ...]:
    """``(begin, extent)`` of part ``index`` of ``parts`` of each matrix. Sizes divide by ``parts``.

    >>> runs_of((8, 4, 4), 2, 1)
    ((4, 4), (10, 2), (14, 2))
    """
    begins = [*accumulate(sizes, initial=0)]
    return tuple(
        (begin + index * (size // parts), size // parts)
        for begin, size in zip(begins, sizes, strict=False)
    )


def _dim_of(fqn: str, param: Any, at: int, mesh: Mesh, rank: int) -> str:
    """The dimension of ``mesh`` whose group is that of dimension ``at`` of the DTensor's device mesh."""
    if param.device_mesh.mesh_dim_names == HEAD_DIMS:
        with unset_fake_temporarily():  # a device mesh reads its own numbers
            ranks = tuple(param.device_mesh.mesh.flatten().tolist())
    else:
        ranks = tuple(dist.get_process_group_ranks(param.device_mesh.get_group(at)))
    for dim in DIMS:
        if mesh.group(rank, {dim}) == ranks:
            if dim != "tensor":
                raise UsageError(
                    f"parameter {fqn!r} is a DTensor that is cut over the ranks {list(ranks)}, which "
                    f"train on different data ({dim}). ZeroShard shards parameters over these ranks "
                    "itself. Pass the model before fully_shard() or distribute_module() over them."
                )
            return dim
    raise UsageError(
        f"parameter {fqn!r} is a DTensor that is cut over the ranks {list(ranks)}, but the mesh is "
        f"{mesh.text}, where the tensor group of rank {rank} is {list(mesh.group(rank, {'tensor'}))}. "
        'Set "parallel": {"tensor": N} or mesh= to the mesh that the model was cut with.'
    )


def groups_over(params: Iterable[Tensor], ranks: Sequence[int]) -> list[dist.ProcessGroup]:
    """The process groups over exactly ``ranks`` in the device meshes of DTensors, each once."""
    meshes = {id(p.device_mesh): p.device_mesh for p in params if type(p) in KINDS}  # type: ignore[attr-defined]
    found = [mesh.get_group(at) for mesh in meshes.values() for at in range(mesh.ndim)]
    own = [g for g in found if tuple(dist.get_process_group_ranks(g)) == tuple(ranks)]
    return list(dict.fromkeys(own))


def distributed(params: Sequence[Tensor]) -> list[int]:
    """The positions of the DTensors among ``params``."""
    return [at for at, param in enumerate(params) if type(param) in KINDS]
