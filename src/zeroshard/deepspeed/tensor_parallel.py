"""DeepSpeed's functions for tensor parallelism before an engine exists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeroshard.comm.env import current_rank_info
from zeroshard.errors import UnsupportedError, UsageError
from zeroshard.parallel.tensor_plan import neighbours, tensor_parallel
from zeroshard.session.join import join_ranks


def tp_model_init(
    model: nn.Module,
    tp_size: int,
    dtype: torch.dtype | None,
    config: Any = None,
    *,
    tp_group: dist.ProcessGroup | None = None,
) -> nn.Module:
    """Cast ``model`` to ``dtype`` and cut it over groups of ``tp_size`` neighbouring ranks. Collective.

    The signature is DeepSpeed's. How layers are cut is derived from the model: see
    :func:`zeroshard.parallel.tensor_parallel`. Returns the same model; pass it to ``initialize`` with
    ``tp_size`` tensor ranks in the configuration. ``tp_group``: the tensor ranks of this rank, instead of
    ``tp_size`` neighbours. ``config``: read only to refuse what ZeroShard does not do.

    Raises:
        UsageError: the ranks cannot be divided into groups of ``tp_size``, or the model cannot be cut.
        UnsupportedError: ``config`` says how layers are cut.
    """
    _check_config(config)
    join_ranks()
    mesh = _mesh(tp_size) if tp_group is None else tp_group
    if tp_group is not None and tp_group.size() != tp_size:
        raise UsageError(
            f"tp_model_init: tp_size = {tp_size}, but tp_group has {tp_group.size()} ranks. Pass the "
            "group of this rank's tensor ranks."
        )
    if dtype is not None:
        model.to(dtype)
    return model if mesh is None else tensor_parallel(model, mesh, "auto")


_HOW = ("partition_config", "preset_model", "injection_policy_tuple", "vocab_parallel_lm_head")
"""Keys of DeepSpeed's section ``tensor_parallel`` that say how layers are cut."""


def _check_config(config: Any) -> None:
    """``config``: DeepSpeed's configuration, as Transformers passes it, or its section."""
    whole = dict(config or {})
    inner = whole.get("tensor_parallel")
    section = inner if isinstance(inner, Mapping) else whole
    if keys := [key for key in _HOW if section.get(key) not in (None, False)]:
        raise UnsupportedError(
            f"tp_model_init(config=...) has the keys {keys}, and ZeroShard derives from the model how it "
            "is cut. Leave them out, or call zeroshard.parallel.tensor_parallel() with a plan."
        )


def _mesh(tp_size: int) -> DeviceMesh | None:
    """The tensor ranks of this rank; None for groups of one."""
    world = current_rank_info().world_size
    if type(tp_size) is not int or tp_size < 1 or world % tp_size:
        raise UsageError(
            f"tp_model_init: tp_size = {tp_size!r}, but {world} rank(s) were started, which cannot be "
            "divided into groups of that size. Use a divisor of the number of ranks."
        )
    return neighbours(tp_size) if tp_size > 1 else None


def set_autotp_mode(training: bool = False) -> None:
    """Accepted, without effect: a cut model trains and evaluates alike."""
    del training
