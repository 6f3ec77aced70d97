"""Attention of a program's own model over tokens that ranks share. For letters see :mod:`.all_to_all`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from zeroshard.comm.layer_calls import announce
from zeroshard.errors import UsageError
from zeroshard.sequence.all_to_all import all_to_all, check_heads


class DistributedAttention(nn.Module):
    """``local_attention`` over all tokens, for a rank that has a part of them.

    The interface is DeepSpeed's. ``local_attention(query, key, value, *args, **kwargs)`` sees all tokens
    of some heads and returns the shape of its query. ``sequence_process_group``: the ranks that have the
    tokens of one sequence, in their order. ``scatter_idx``: the dimension of heads; ``gather_idx``: that
    of tokens, of tensors with 4 dimensions. Key and value may have fewer heads than ranks: each is then
    on several ranks, next to its query heads. ``sp_stream`` has no effect.

    Raises:
        UsageError: the dimensions are not two of 4, or heads do not divide.
    """

    def __init__(
        self,
        local_attention: Callable[..., Tensor],
        sequence_process_group: dist.ProcessGroup,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
    ) -> None:
        super().__init__()
        if len({scatter_idx, gather_idx}) != 2 or not {scatter_idx, gather_idx} < {0, 1, 2, 3}:
            raise UsageError(
                f"DistributedAttention: scatter_idx {scatter_idx} and gather_idx {gather_idx} must be "
                "two dimensions of a tensor with 4: that of heads and that of tokens, such as 2 and 1."
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
        batch_dim_idx: int = 0,
        rotary_pos_emb: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """The attention of this rank's tokens. The result has the shape of ``query``.

        ``batch_dim_idx`` is not needed. Rotate query and key before this call, by the positions of the
        whole sequence.
        """
        del batch_dim_idx
        if rotary_pos_emb is not None:
            raise UsageError(
                "DistributedAttention got rotary_pos_emb. Rotate query and key before the call: a rank "
                "knows the positions of its own tokens."
            )
        size = self.group.size()
        copies = check_heads(query.shape[self.heads], key.shape[self.heads], size)
        if copies > 1:
            key, value = (x.repeat_interleave(copies, self.heads) for x in (key, value))
        whole = (
            all_to_all(x, self.group, cut=self.heads, join=self.tokens) for x in (query, key, value)
        )
        result = self.local_attn(*whole, *args, **kwargs)
        return all_to_all(result, self.group, cut=self.tokens, join=self.heads).contiguous()
