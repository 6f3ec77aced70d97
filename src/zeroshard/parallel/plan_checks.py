"""Checks that a model, and each layer that a tensor plan names, can be cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zeroshard.errors import UsageError
from zeroshard.parallel.heads import FUSED
from zeroshard.parallel.tensor_styles import StyleRow, kind_of, part
from zeroshard.zero.sharded_parameter import owner_of


def check_model(model: Any) -> None:
    """Check that it is a module whose parameters are whole, plain ones."""
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model is a {type(model).__name__}, not a torch.nn.Module. Pass the model itself."
        )
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            raise UsageError(
                f"parameter {name!r} is a DTensor with placements {param.placements}: the model has "
                "been cut already. Pass a plain model, or leave the plan out."
            )
        if owner_of(param) is not None:
            raise UsageError(
                f"parameter {name!r} belongs to an engine or to zero.Init, which has sharded it. Cut "
                "the model for tensor parallelism first, and pass it to initialize() afterwards."
            )


def check_layer(name: str, module: nn.Module, row: StyleRow, size: int) -> None:
    """Check that the style fits the layer and that the layer can be cut into ``size`` parts."""
    kind = kind_of(module)
    if kind not in row.kinds:
        names = {"norm": "a norm", "Conv1D": "Conv1D of Transformers"}
        fits = " or ".join(names.get(kind, f"nn.{kind}") for kind in row.kinds)
        raise UsageError(
            f'plan: {name!r} is a {type(module).__name__}, and the style "{row.name}" fits {fits} '
            "only. Name the layers inside it, or leave it out of the plan."
        )
    _check_contents(name, module)
    _check_options(name, module, row)
    if row.name == "colwise" and FUSED.search(name.rpartition(".")[2].lower()):
        raise UsageError(
            f"plan: {name!r} looks like several projections in one weight. A cut through all of its "
            "rows would give the first rank all of the first and none of the last. If they lie one "
            'after another, use the style "colwise_fused". If its rows are ordered head by head (q, k '
            'and v of head 0, then of head 1, ...), use "colwise_by_head".'
        )
    if row.weight_axis is None:
        return
    extent = module.get_parameter("weight").shape[row.weight_axis]
    if row.name in ("vocab", "colwise_gather"):  # uneven parts meet in one tensor
        begin, end = part(extent, size, size - 1)
        if begin == end:
            raise UsageError(
                f"plan: {name!r} has {extent} rows. In parts of {part(extent, size, 0)[1]} the last of "
                f"{size} tensor ranks would have none. Use fewer tensor ranks."
            )
        return
    if extent % size:
        what = "out_features" if row.bias_axis == 0 else "in_features"
        if kind == "Embedding":
            what = "embedding_dim"
        raise UsageError(
            f"plan: {name!r} has {what} = {extent}, which {size} tensor ranks cannot share evenly. "
            f"Use a number of tensor ranks that divides {extent}, or leave the layer and its partner "
            "out of the plan."
        )


def _check_contents(name: str, module: nn.Module) -> None:
    """Check that the layer has nothing that a cut would forget."""
    buffers = [leaf for leaf, buffer in module.named_buffers() if buffer.numel() != 1]
    if buffers:
        raise UsageError(
            f"plan: {name!r} has the buffer {buffers[0]!r}, and the plan does not say how to cut it. "
            "Leave this layer and its partner out of the plan."
        )
    others = [leaf for leaf, _ in module.named_parameters() if leaf not in ("weight", "bias")]
    if others or any(True for _ in module.children()):
        what = repr(others[0]) if others else "modules inside it"
        raise UsageError(
            f"plan: {name!r} has, besides weight and bias, {what}, such as a parametrization, and the "
            "plan does not say how to cut that. Leave this layer and its partner out of the plan."
        )
    for leaf, param in module.named_parameters():
        if not param.is_floating_point() or isinstance(param.grad, torch.Tensor):
            why = "has a gradient" if param.is_floating_point() else f"is {param.dtype}"
            raise UsageError(
                f"plan: '{name}.{leaf}' {why}, and only floating-point parameters without a gradient "
                "can be cut. Cut the model before its first backward and before it is quantized."
            )


def _check_options(name: str, module: nn.Module, row: StyleRow) -> None:
    """Check that the layer was made with options that parts of it can follow."""
    if isinstance(module, nn.Embedding) and (
        module.max_norm is not None or module.sparse or module.scale_grad_by_freq
    ):
        raise UsageError(
            f"plan: {name!r} is an Embedding with max_norm, sparse or scale_grad_by_freq, which need "
            "the whole table on each rank. Leave it out of the plan, or turn these options off."
        )
    if (
        isinstance(module, nn.LayerNorm)
        and len(module.normalized_shape) > 1
        and row.name != "replicate"
    ):
        raise UsageError(
            f"plan: {name!r} normalizes over {len(module.normalized_shape)} dimensions, and the style "
            f'"{row.name}" cuts one of them. Leave it out of the plan.'
        )


def check_stream(model: nn.Module, rows: Mapping[str, StyleRow]) -> None:
    """Check a plan with a residual stream that is cut over the sequence: it has to name every layer.

    The gradient of a layer that the plan does not know would be a sum over this rank's tokens only.
    """
    if hasattr(model, "base_model_prefix") or hasattr(model, "_tp_plan"):
        raise UsageError(
            f'plan: {type(model).__name__} is a model of Transformers, and the style "sequence" cuts '
            "the sequence that these models compute positions and masks from. Use a plan without it."
        )
    for name, module in model.named_modules():
        own = [leaf for leaf, param in module.named_parameters(recurse=False)]
        if own and name not in rows:
            raise UsageError(
                f'plan: the style "sequence" cuts the residual stream, and the plan does not name '
                f"{name or 'the model itself'!r} ({type(module).__name__}), which has the parameter "
                f"{own[0]!r}. Its gradient would count a part of the tokens only. Name it, with the "
                'style "replicate" if it works on each token alone.'
            )
