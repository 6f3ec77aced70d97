"""Attention over tokens that ranks share: of a program's own model, and of Transformers models.

Transformers looks up the function of an attention by name, in one table for all models. The function that
is replaced there exchanges tokens and heads around the one that was there before. For letters see
:mod:`.all_to_all`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeroshard.comm.layer_calls import announce, is_real_cpu, ranks_of
from zeroshard.comm.mesh_objects import text_config
from zeroshard.errors import UnsupportedError, UsageError
from zeroshard.sequence.all_to_all import (
    all_to_all,
    check_heads,
    gathered,
    heads_to_tokens,
    tokens_to_heads,
)
from zeroshard.sequence.token_positions import PositionExchange


class DistributedAttention(nn.Module):
    """``local_attention`` over all tokens, for a rank that has a part of them.

    The interface is DeepSpeed's. ``local_attention(query, key, value, *args, **kwargs)`` sees all tokens
    of some heads and returns the shape of its query. ``sequence_process_group``: the ranks that have the
    tokens of one sequence, in their order. ``scatter_idx``: the dimension of heads; ``gather_idx``: that
    of tokens, of tensors with 4 dimensions. Key and value may have fewer heads than ranks: each is then
    on several ranks, next to its query heads. ``sp_stream`` and ``num_kv_heads`` have no effect.

    Raises:
        UsageError: the dimensions are not two of 4, tensors have other shapes, or heads do not divide. On
        CPU ranks also: ranks have unequal shapes; on every rank then.
    """

    def __init__(
        self,
        local_attention: Callable[..., Tensor],
        sequence_process_group: dist.ProcessGroup,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
    ) -> None:
        super().__init__()
        if len({scatter_idx, gather_idx}) != 2 or not {scatter_idx, gather_idx} < {0, 1, 2, 3}:
            raise UsageError(
                f"DistributedAttention: scatter_idx {scatter_idx} and gather_idx {gather_idx} must be "
                "two dimensions of a tensor with 4: that of heads and that of tokens, such as 2 and 1."
            )
        if sequence_process_group is None or not callable(local_attention):
            raise UsageError(
                f"DistributedAttention got the function {local_attention!r} and the group "
                f"{sequence_process_group!r}. It needs a function of query, key and value, and the "
                "process group of the ranks that share a sequence."
            )
        self.local_attn = local_attention
        self.group = sequence_process_group
        self.heads, self.tokens = scatter_idx, gather_idx
        announce(self.group)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_dim_idx: Any = 0,
        rotary_pos_emb: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """The attention of this rank's tokens. The result has the shape of ``query``.

        ``batch_dim_idx`` is not needed. Programs for DeepSpeed before it had this argument, such as
        Megatron-DeepSpeed, pass the first of ``args`` in its place. Rotate query and key before this
        call, by the positions of the whole sequence.
        """
        if batch_dim_idx is not None and not isinstance(batch_dim_idx, int):
            args = (batch_dim_idx, *args)
        if rotary_pos_emb is not None:
            raise UsageError(
                "DistributedAttention got rotary_pos_emb. Rotate query and key before the call: a rank "
                "knows the positions of its own tokens."
            )
        self._check_shapes(query, key, value)
        size = self.group.size()
        copies = check_heads(query.shape[self.heads], key.shape[self.heads], size)
        if copies > 1:
            key, value = (x.repeat_interleave(copies, self.heads) for x in (key, value))
        whole = (
            all_to_all(x, self.group, cut=self.heads, join=self.tokens) for x in (query, key, value)
        )
        result = self.local_attn(*whole, *args, **kwargs)
        return all_to_all(result, self.group, cut=self.tokens, join=self.heads).contiguous()

    def _check_shapes(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        shapes = [tuple(x.shape) for x in (query, key, value)]
        dims = (self.heads, self.tokens)
        if min(map(len, shapes)) <= max(dims) or any(key.shape[d] != value.shape[d] for d in dims):
            raise UsageError(
                f"DistributedAttention: query, key and value have the shapes {shapes[0]}, {shapes[1]} "
                f"and {shapes[2]}. Dimension {self.heads} must be the heads and {self.tokens} the "
                "tokens, of which key and value have equally many."
            )
        if not is_real_cpu(query):
            return
        own = torch.tensor([n for shape in shapes for n in shape])
        seen = gathered(own, self.group, "shapes of attention").tolist()
        ranks = ranks_of(self.group)
        for rank, found in zip(ranks, seen, strict=True):
            if found != seen[0]:
                raise UsageError(
                    f"DistributedAttention over the ranks {', '.join(map(str, ranks))}: the sizes of "
                    f"query, key and value are {found} on rank {rank}, and {seen[0]} on rank {ranks[0]}. "
                    "Ranks that share a sequence have equally many of its tokens: pad it to a multiple "
                    "of the ranks, and choose samples by engine.dp_rank."
                )


WITHOUT_POSITIONS = frozenset({"sdpa"})
"""Implementations that get a mask where others find packed samples and windows by themselves."""


class SequenceAttention:
    """Attention over the sequence ranks in ``group``, by the function ``core`` named ``name``.

    It is called as Transformers calls it: query ``[B, H, t, D]``, key and value ``[B, K, t, D]``, and
    returns ``[B, t, H, D]``. ``off_in_eval``: modules in eval mode get whole sequences, which ``core``
    computes alone. ``num_tokens``: those of a whole sequence, if it is always the same.
    """

    def __init__(
        self,
        name: str,
        core: Callable[..., tuple[Tensor, Any]],
        group: dist.ProcessGroup,
        *,
        off_in_eval: bool = False,
        num_tokens: int | None = None,
    ) -> None:
        self.name, self.core, self.group = name, core, group
        self.off_in_eval, self.num_tokens = off_in_eval, num_tokens
        self.positions = PositionExchange(group)
        announce(group)

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """As Transformers' functions. The attention weights in the result are those of ``core``, or None.

        Raises:
            UsageError: on every rank of the group: heads or tokens do not fit, or positions are missing.
        """
        alone = query.device.type == "meta" or (self.off_in_eval and not module.training)
        if alone or not ranks_of(self.group):  # on the meta device only shapes are asked for
            return self.core(module, query, key, value, attention_mask, *args, **kwargs)
        size = self.group.size()
        copies = check_heads(query.shape[1], key.shape[1], size)
        self._check_length(query.shape[2] * size)
        is_causal = kwargs.get("is_causal")
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        ids, window = kwargs.get("position_ids"), kwargs.get("sliding_window")
        if is_causal and ids is None:
            raise UsageError(
                f"the attention of {type(module).__name__} got no position_ids. A rank with a part of a "
                "sequence needs them. Pass position_ids to the model; if the model does not hand them to "
                "its attention, it cannot train with sequence parallelism."
            )
        found = self.positions.of(
            module, query, key, ids if is_causal else None, attention_mask, window
        )
        if copies > 1:
            key, value = (x.repeat_interleave(copies, 1) for x in (key, value))
        query, key, value = tokens_to_heads((query, key, value), self.group)
        mask = None
        if found is not None:
            kwargs["position_ids"] = found.all_RT
            if self.name in WITHOUT_POSITIONS:
                mask = found.mask(window)
        with _head_ratio(module, query.shape[1] // key.shape[1]):
            result, weights = self.core(module, query, key, value, mask, *args, **kwargs)
        return heads_to_tokens(result, self.group), weights

    def _check_length(self, tokens: int) -> None:
        if self.num_tokens not in (None, tokens):
            raise UsageError(
                f"a batch has {tokens} tokens, but attention was registered with seq_length "
                f"{self.num_tokens} and seq_length_is_variable=False. Pad to that length, or say that it "
                "is variable."
            )


@contextlib.contextmanager
def _head_ratio(module: Any, count: int) -> Iterator[None]:
    """``module`` has ``count`` query heads for each key/value head, inside the ``with`` block."""
    before = getattr(module, "num_key_value_groups", None)
    if before in (None, count):
        yield
        return
    module.num_key_value_groups = count
    try:
        yield
    finally:
        module.num_key_value_groups = before


def register(
    name: str,
    group: dist.ProcessGroup,
    *,
    off_in_eval: bool = False,
    num_tokens: int | None = None,
) -> SequenceAttention:
    """Let all models whose attention is ``name`` share their tokens over the ranks in ``group``.

    ``name``: an implementation that Transformers knows, such as ``"sdpa"`` or ``"flash_attention_2"``.
    :func:`unregister` undoes it. The other arguments: see :class:`SequenceAttention`.

    Raises:
        UnsupportedError: the implementation makes its mask from the tokens of one rank.
        UsageError: Transformers does not know it.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if group is None:
        raise UsageError(
            f"register({name!r}, None): pass the process group of the ranks that share a sequence, such "
            "as grid['sequence'].get_group()."
        )
    if name in ("eager", "flex_attention"):
        raise UnsupportedError(
            f"the attention implementation {name!r} cannot be spread over sequence ranks: its mask is "
            "made before, from the tokens of one rank. Load the model with attn_implementation='sdpa' or "
            "'flash_attention_2'."
        )
    if name not in ALL_ATTENTION_FUNCTIONS:
        raise UsageError(
            f"Transformers knows no attention implementation {name!r}. It knows "
            f"{', '.join(sorted(ALL_ATTENTION_FUNCTIONS.keys()))}."
        )
    before = ALL_ATTENTION_FUNCTIONS[name]
    core = before.core if isinstance(before, SequenceAttention) else before
    made = SequenceAttention(name, core, group, off_in_eval=off_in_eval, num_tokens=num_tokens)
    ALL_ATTENTION_FUNCTIONS.register(name, made)
    return made


def check_attention(model: nn.Module, size: int) -> None:
    """Check that a model of Transformers attends over ``size`` sequence ranks, before it trains on them.

    Of other models nothing is known, nor of those that have a ``DistributedAttention``.
    """
    hub = sys.modules.get("transformers.modeling_utils")
    name = getattr(text_config(getattr(model, "config", None)), "_attn_implementation", None)
    if hub is None or not isinstance(name, str):
        return
    function = hub.ALL_ATTENTION_FUNCTIONS.get(name)
    spread = isinstance(function, SequenceAttention) and ranks_of(function.group)
    found = len(spread) if spread else 1
    if found == size or any(isinstance(module, DistributedAttention) for module in model.modules()):
        return
    if found == 1:
        raise UsageError(
            f"the mesh has {size} sequence ranks, but the attention {name!r} of the model is not spread "
            "over them: with a part of the tokens, each rank would attend to these only. Call "
            f"zeroshard.sequence.register({name!r}, group), or DeepSpeed's "
            "UlyssesSPAttentionHF.register_with_transformers(), before initialize(). Of eager attention "
            "load the model with attn_implementation='sdpa' first."
        )
    raise UsageError(
        f"the attention {name!r} of the model is spread over {found} sequence ranks, but the mesh has "
        f"{size}, so batches and gradients would be divided by the wrong number. Pass the mpu that "
        f'registered it to initialize(), or write "sequence_parallel_size": {found} in the '
        "configuration; or call zeroshard.sequence.unregister() if ranks do not share sequences any more."
    )


def unregister() -> None:
    """Give every implementation of Transformers its own function back."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name, function in list(ALL_ATTENTION_FUNCTIONS.items()):
        if isinstance(function, SequenceAttention):
            ALL_ATTENTION_FUNCTIONS.register(name, function.core)
