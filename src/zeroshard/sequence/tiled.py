"""Computes a long sequence piece by piece, so that wide activations exist for one piece only.

The pieces run in forward, and again in backward (activation checkpointing), so between the two only the
inputs and results are in memory. Parameters get their gradients from all pieces through autograd; nothing
has to be declared to the engine. The names and arguments are those of DeepSpeed (arXiv 2506.13996).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zeroshard.errors import UsageError

Reduction = Literal["mean", "sum"]


def _checked(shards: int) -> int:
    if type(shards) is not int or shards < 1:
        raise UsageError(
            f"shards is {shards!r}, and must be the number of pieces, which is a whole number above 0."
        )
    return shards


def _reduced(outputs: Sequence[Tensor], dim: int, how: str | None) -> Tensor:
    if how not in (None, "mean", "sum"):
        raise UsageError(f"the reduction is {how!r}, and must be 'mean', 'sum' or None.")
    joined = torch.stack(list(outputs)) if dim == 0 else torch.cat(list(outputs), dim)
    if how is None:
        return joined
    return joined.mean() if how == "mean" else joined.sum()


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

        Raises:
            UsageError: ``x`` has no such dimension, or ``shards`` is no number of pieces.
        """
        if not isinstance(x, Tensor) or x.dim() < 2:
            shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise UsageError(
                f"TiledMLP: x is {shape}, but must be a tensor [..., tokens, features], which is cut "
                "along the tokens."
            )
        pieces = torch.chunk(x, _checked(shards), dim=-2)
        done = [checkpoint(fn, self, piece, use_reentrant=False) for piece in pieces]
        return torch.cat(done, dim=-2)


class SequenceTiledCompute:
    """:func:`sequence_tiled_compute` with its arguments one after another."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        seqlen: int,
        shards: int,
        keys_to_shard: Sequence[str],
        keys_to_pass: Sequence[str],
        grad_requiring_tensor_key: str,
        compute_params: Iterable[nn.Parameter] | None,
        output_unshard_dimension: int,
        output_reduction: Reduction | None,
        *args: Any,
    ) -> Tensor:
        """``args``: the values of ``keys_to_shard``, then those of ``keys_to_pass``."""
        return sequence_tiled_compute(
            fn,
            seqlen,
            shards,
            dict(zip(keys_to_shard, args, strict=False)),
            dict(zip(keys_to_pass, args[len(keys_to_shard) :], strict=True)),
            grad_requiring_tensor_key,
            compute_params,
            output_unshard_dimension,
            output_reduction,
        )


def sequence_tiled_compute(
    fn: Callable[..., Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, Tensor],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Iterable[nn.Parameter] | None = None,  # noqa: ARG001
    output_unshard_dimension: int = 1,
    output_reduction: Reduction | None = "mean",
) -> Tensor:
    """``fn(**pieces, **kwargs_to_pass)`` for each of ``shards`` pieces of a sequence, joined.

    ``kwargs_to_shard``: tensors ``[B, T, ...]``, cut along ``T``, which is ``seqlen``. Outputs are joined
    along ``output_unshard_dimension``; 0 stacks them, for outputs that are numbers. Then
    ``output_reduction`` makes one number of it; None: nothing. All inputs may need gradients, so
    ``grad_requiring_tensor_key`` is only checked, and ``compute_params`` is not needed.

    Raises:
        UsageError: a tensor has another length than ``seqlen``, a name or number is not possible.
    """
    if grad_requiring_tensor_key not in kwargs_to_shard:
        raise UsageError(
            f"grad_requiring_tensor_key is {grad_requiring_tensor_key!r}, which is not one of "
            f"{sorted(kwargs_to_shard)}, the tensors that are cut."
        )
    for key, value in kwargs_to_shard.items():
        if value.dim() < 2 or value.shape[1] != seqlen:
            raise UsageError(
                f"{key} has the shape {tuple(value.shape)}, but seqlen is {seqlen}: tensors that are cut "
                "have the shape [samples, tokens, ...]."
            )
    if type(seqlen) is not int or seqlen < 1:
        raise UsageError(f"seqlen is {seqlen!r}, but must be the number of tokens, at least 1.")
    per_piece = -(-seqlen // _checked(shards))
    outputs = []
    for begin in range(0, seqlen, per_piece):
        piece = {key: value[:, begin : begin + per_piece] for key, value in kwargs_to_shard.items()}
        outputs.append(checkpoint(partial(fn, **kwargs_to_pass), use_reentrant=False, **piece))  # type: ignore[arg-type]
    return _reduced(outputs, output_unshard_dimension, output_reduction)


class TiledFusedLogitsLoss:
    """A loss over pieces of the sequence, so that logits exist for one piece only."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        self: Any,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        shards: int,
        compute_params: Iterable[nn.Parameter] | None = None,
        output_reduction: Reduction = "mean",
    ) -> Tensor:
        """The mean or sum of ``fn(self, x, y)``, or ``fn(self, x, y, mask)``, over ``shards`` pieces.

        ``x [B, T, ...]``: hidden states; ``y [B, T, ...]``: labels; ``mask [B, T]``. Each piece has its
        positions in one dimension: ``[positions, ...]``. If pieces have unequally many labels that count,
        let ``fn`` return a sum, use ``"sum"``, and divide. ``compute_params`` is not needed.

        Raises:
            UsageError: shapes do not fit, or the reduction is another one.
        """
        if output_reduction not in ("mean", "sum"):
            raise UsageError(f"output_reduction is {output_reduction!r}, not 'mean' or 'sum'.")
        cut = [x, y] if mask is None else [x, y, mask]
        if any(tensor.dim() < 2 or tensor.shape[:2] != x.shape[:2] for tensor in cut):
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in cut)
            raise UsageError(
                f"TiledFusedLogitsLoss: the shapes are {shapes}, but hidden states, labels and mask must "
                "all begin with [samples, tokens]."
            )
        pieces = zip(*(tensor.flatten(0, 1).chunk(_checked(shards)) for tensor in cut), strict=True)
        losses = [checkpoint(fn, self, *piece, use_reentrant=False) for piece in pieces]
        return _reduced(losses, 0, output_reduction)
