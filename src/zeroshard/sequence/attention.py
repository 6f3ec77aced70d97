"""Attention of a program's own model over tokens that ranks share. For letters see :mod:`.all_to_all`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeroshard.comm.layer_calls import announce, is_real_cpu, ranks_of
from zeroshard.errors import UsageError
from zeroshard.sequence.all_to_all import all_to_all, check_heads, gathered


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
