"""Runs a module over a long sequence piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class TiledMLP:
    """An MLP over pieces of the sequence. Each piece is recomputed in backward."""

    @staticmethod
    def apply(
        fn: Callable[[nn.Module, Tensor], Tensor],
        self: nn.Module,
        x: Tensor,
        shards: int,
        compute_params: Iterable[nn.Parameter] | None = None,
    ) -> Tensor:
        """``fn(self, x)`` for ``x [..., T, H]``, cut along ``T`` into ``shards`` pieces.

        ``fn`` treats each position by itself. Between forward and backward only ``x`` and the result are
        in memory; while they run, also the activations of one piece. ``compute_params`` is not needed.
        """
        pieces = torch.chunk(x, shards, dim=-2)
        done = [checkpoint(fn, self, piece, use_reentrant=False) for piece in pieces]
        return torch.cat(done, dim=-2)
