"""Over which ranks ``zero.Init`` shards what it builds, and whether an engine's mesh has the same ones.

Ranks that differ along ``tensor`` or ``pipeline`` build other parameters. So each set of ranks that
builds the same ones shards among itself, and gets the values of its first rank.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from zeroshard.comm.env import current_rank_info
from zeroshard.comm.layer_calls import ranks_of
from zeroshard.comm.mesh_objects import mesh_sources
from zeroshard.config import Config
from zeroshard.config.mesh_keys import mesh_from_config
from zeroshard.core.mesh import HOLDERS, Mesh
from zeroshard.core.mesh_sources import resolve_mesh
from zeroshard.errors import UnsupportedError, UsageError
from zeroshard.zero.sharded_parameter import owner_of

_PARTS = ("tensor", "pipeline")


def mesh_of_parts(config: Config | None, mpu: Any, mesh: Any) -> Mesh | None:
    """The mesh that the arguments of ``zero.Init`` name, if its ranks build different parameters.

    Raises:
        UnsupportedError: the engine shall cut the model over tensor ranks, which needs whole layers.
        ConfigError: what names a mesh disagrees, or does not fit the number of ranks.
        UsageError: an object cannot be read as a mesh.
    """
    named = None if config is None else mesh_from_config(config)
    sources = ([] if named is None else [named]) + list(mesh_sources(mesh=mesh, mpu=mpu))
    if not sources:
        return None
    resolved = resolve_mesh(sources, current_rank_info().world_size)
    if resolved.origins["tensor"].startswith("tensor_parallel."):
        raise UnsupportedError(
            f"zero.Init: the mesh is {resolved.mesh.text} (tensor: {resolved.origins['tensor']}), and "
            "this key lets the engine cut the layers over tensor ranks, which needs whole layers. Build "
            'the model on the meta device instead: with torch.device("meta"). That needs no memory '
            "either, and the values are the same on every mesh."
        )
    return resolved.mesh if any(getattr(resolved.mesh, dim) > 1 for dim in _PARTS) else None


def check_group(group: Any, mesh: Mesh) -> None:
    """Check that ``data_parallel_group=`` has the ranks that build the same parameters.

    Raises:
        UsageError: it has others.
    """
    if group is None:
        return
    ranks = ranks_of(group)
    own = mesh.group(current_rank_info().rank, HOLDERS)
    if ranks != own:
        raise UsageError(
            f"zero.Init got a data_parallel_group of the ranks {list(ranks)}, but the mesh is "
            f"{mesh.text}, in which the ranks {list(own)} build the same parameters. Pass the group of "
            "these, or leave it out."
        )


def check_built_for(model: nn.Module, mesh: Mesh) -> None:
    """Check that a model that was built under ``zero.Init`` was sharded over ranks with the same parts.

    Raises:
        UnsupportedError: it was sharded over ranks that have other parts of the model on ``mesh``.
    """
    wanted = tuple(getattr(mesh, dim) for dim in _PARTS)
    if wanted == (1, 1):
        return
    for owner in filter(None, map(owner_of, model.parameters())):
        context: Any = getattr(owner, "context", None)
        built_on: Mesh = getattr(context, "mesh", None) or Mesh()
        if tuple(getattr(built_on, dim) for dim in _PARTS) != wanted:
            raise UnsupportedError(
                "the model was built under zero.Init, which has sharded its parameters over "
                f"{'all ranks' if built_on == Mesh() else built_on.text}, and the mesh is {mesh.text}, "
                "whose tensor and pipeline ranks have other parts. Pass the same mesh to zero.Init, as "
                "mesh=, mpu= or in its configuration, if the program cuts the model by itself. Else "
                'build the model without zero.Init, or on the meta device (with torch.device("meta")), '
                "which needs no memory either."
            )


def check_whole(model: nn.Module) -> None:
    """Check that a model that the engine shall cut over tensor ranks has whole layers.

    Raises:
        UnsupportedError: it was built under ``zero.Init``.
    """
    if any(owner_of(param) is not None for param in model.parameters()):
        raise UnsupportedError(
            "the model was built under zero.Init, which has sharded its parameters, and a plan cuts "
            "whole layers over tensor ranks. Build it without zero.Init, or on the meta device (with "
            'torch.device("meta")), which needs no memory either.'
        )
