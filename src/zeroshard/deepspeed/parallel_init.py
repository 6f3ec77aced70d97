"""Sequence and tensor ranks under DeepSpeed's names, before an engine exists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeroshard.comm.env import current_rank_info
from zeroshard.comm.mesh_objects import mesh_from_model, text_config
from zeroshard.core.mesh import Mesh
from zeroshard.deepspeed import groups
from zeroshard.deepspeed.logs import logger
from zeroshard.errors import UnsupportedError, UsageError
from zeroshard.parallel.tensor_plan import neighbours, tensor_parallel
from zeroshard.sequence.all_to_all import check_heads
from zeroshard.sequence.attention import register
from zeroshard.session.join import join_ranks

_NO_STATE = ("linear_attention", "chunked_attention", "mamba", "recurrent", "conv")
"""Kinds of layers that mix tokens outside of attention, or in pieces that a rank's part cannot show."""


def initialize_sequence_parallel(sequence_parallel_size: int, tensor: int = 1) -> groups.MeshGroups:
    """Divide the ranks into groups of ``sequence_parallel_size`` neighbours. Collective.

    Returns the groups, an ``mpu`` for ``initialize``. ``tensor``: tensor ranks, next to each other.

    Raises:
        UsageError: the ranks cannot be divided so.
    """
    join_ranks()
    world = current_rank_info().world_size
    size = sequence_parallel_size
    if type(size) is not int or size < 1 or world % (size * tensor):
        beside = f" and {tensor} tensor ranks" if tensor > 1 else ""
        raise UsageError(
            f"sequence_parallel_size is {size!r}{beside}, but {world} rank(s) were started, which cannot "
            "be divided into groups of that size. Use a divisor of the number of ranks."
        )
    return groups.use(Mesh(data_shard=world // (size * tensor), sequence=size, tensor=tensor))


class UlyssesSPAttentionHF:
    """DeepSpeed's name for the attention of Transformers models over sequence ranks."""

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str | None,
        sequence_parallel_size: int,
        micro_batch_size: int | None = None,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> groups.MeshGroups | None:
        """Spread the attention of Transformers models over sequence ranks. Collective.

        ``model_name_or_path``: the model, or where its configuration is. ``core_attn_implementation``:
        the implementation that the model was, or will be, loaded with; None: that of its configuration.
        ``seq_length``: tokens of a whole sequence, checked if ``seq_length_is_variable`` is false;
        ``max_length`` is its old name. ``micro_batch_size`` is not needed. ``disable_in_eval``: a model
        in eval mode gets whole sequences.

        Returns an ``mpu`` for ``initialize``; None if ``sequence_parallel_size`` is 1.

        Raises:
            UsageError: sizes do not fit, or the model uses another implementation.
            UnsupportedError: the implementation is ``eager``, or layers mix tokens outside of attention.
        """
        _check_size(sequence_parallel_size)
        if sequence_parallel_size == 1:
            return None
        if max_length is not None:
            logger.warning("max_length is an old name of seq_length; pass seq_length")
        tokens = seq_length if seq_length is not None else max_length
        _check_length(tokens, sequence_parallel_size, is_variable=seq_length_is_variable)
        config = _config_of(model_name_or_path)
        name = _implementation(config, core_attn_implementation)
        cut = mesh_from_model(model_name_or_path) if _is_model(model_name_or_path) else None
        tensor = 1 if cut is None else cut.sizes.get("tensor", 1)
        _check_layers(config, sequence_parallel_size, tensor)
        mpu = initialize_sequence_parallel(sequence_parallel_size, tensor)
        if "/" in name:  # a kernel of the hub, which Transformers registers when it is first used
            from transformers.modeling_flash_attention_utils import lazy_import_flash_attention

            lazy_import_flash_attention(name)
        register(
            name,
            mpu.get_sequence_parallel_group(),
            off_in_eval=disable_in_eval,
            num_tokens=None if seq_length_is_variable else tokens,
        )
        return mpu


def _check_size(size: object) -> None:
    if type(size) is not int or size < 1:
        raise UsageError(
            f"sequence_parallel_size is {size!r}, but must be a whole number of at least 1: the ranks "
            "that share one sequence."
        )


def _check_length(tokens: int | None, size: int, *, is_variable: bool) -> None:
    """Check the length of a whole sequence, if it is always the same."""
    if is_variable:
        return
    if type(tokens) is not int:
        given = "is missing" if tokens is None else f"is {tokens!r}"
        raise UsageError(
            f"seq_length_is_variable is False, but seq_length {given}. Pass the number of tokens of a "
            "whole sequence."
        )
    if tokens % size:
        raise UsageError(
            f"seq_length is {tokens}, which {size} sequence ranks cannot divide. Pad sequences to a "
            "multiple."
        )


def _is_model(given: Any) -> bool:
    return isinstance(given, nn.Module)


def _config_of(given: Any) -> Any:
    if hasattr(given, "config"):
        return given.config
    if _is_model(given):
        raise UsageError(
            f"model_name_or_path is a {type(given).__name__} without a config, which models of "
            "Transformers have. For other models use zeroshard.sequence.DistributedAttention."
        )
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(given)


def _implementation(config: Any, asked: str | None) -> str:
    used = getattr(config, "_attn_implementation", None)
    if asked is not None and used not in (None, asked):
        raise UsageError(
            f"core_attn_implementation is {asked!r}, but the model uses {used!r}, so its attention would "
            f"see the tokens of one rank. Load it with attn_implementation={asked!r}."
        )
    if (name := asked or used) is None:
        raise UsageError(
            "core_attn_implementation is None, and the configuration of the model names none either. "
            "Pass the one that the model is loaded with, such as 'sdpa'."
        )
    return str(name)


def _check_layers(config: Any, size: int, tensor: int) -> None:
    text = text_config(config)
    kinds = sorted({str(kind) for kind in getattr(text, "layer_types", None) or ()})
    if mixing := [kind for kind in kinds if kind.startswith(_NO_STATE)]:
        raise UnsupportedError(
            f"layers of the kinds {', '.join(mixing)} mix tokens by themselves, so each rank would start "
            "anew at its own tokens. Models with attention over all tokens, or over a sliding window, "
            "can train with sequence parallelism."
        )
    heads = getattr(text, "num_attention_heads", None)
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if isinstance(heads, int) and isinstance(kv_heads, int):
        check_heads(heads // tensor, max(1, kv_heads // tensor), size)


# ---------------------------------------------------------------------- tensor ranks


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
