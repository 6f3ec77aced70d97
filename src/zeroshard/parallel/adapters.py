"""Adapters of PEFT in layers that are cut over tensor ranks.

A layer with LoRA computes ``base(x) + scale * B(A(x))``. Its parts are cut so that the sum has the form
that the layer alone would have: if the layer is column-parallel, so is B, and A is whole; if it is
row-parallel, so is A, and B is whole. A head whose output is gathered has whole adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from zeroshard.errors import UnsupportedError, UsageError
from zeroshard.parallel.heads import KEY_VALUE, QUERY
from zeroshard.parallel.tensor_styles import generic, kind_of

_CUT_PART = {"colwise": "lora_B", "rowwise": "lora_A", "colwise_gather": "", "replicate": ""}
"""By style of a layer: which part of its adapters has the same style."""
_WITHOUT = (
    "Train without tensor parallelism, where ZeRO shards these layers as any other, or leave the layer "
    "out of target_modules and modules_to_save."
)


def base_of(model: nn.Module) -> tuple[str, nn.Module]:
    """The model inside PEFT's wrapper, and its name with a dot behind; "" and the model without one."""
    get_base = getattr(model, "get_base_model", None)
    if not getattr(model, "peft_config", None) or not callable(get_base):
        return "", model
    base = get_base()
    return next((f"{name}." for name, m in model.named_modules() if m is base and name), ""), base


def with_adapters(
    model: nn.Module, prefix: str, plan: Mapping[str, str], size: int
) -> dict[str, str]:
    """The plan of the model inside, with adapters: for layers that have some, their parts.

    ``plan``: globs of the model inside, whose name is ``prefix``. ``size``: the number of tensor ranks.

    Raises:
        UnsupportedError: a layer that is cut has adapters that cannot be cut.
    """
    globs = {f"{prefix}{glob}": style for glob, style in plan.items()}
    wrapped = {name: module for name, module in model.named_modules() if _is_wrapped(module)}
    if not wrapped:
        return globs
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        style = globs.get(name) or globs.get(generic(name))
        if style is None:
            continue
        if name not in wrapped:
            found[name] = style
            continue
        _check(model, name, module, style, size)
        found[f"{name}.base_layer"] = style
        if part := _CUT_PART[style]:
            found |= {f"{name}.{part}.{leaf}": style for leaf in getattr(module, part)}
    return found


def check_no_adapters(model: nn.Module) -> None:
    """Check that a model whose plan is guessed has no adapters."""
    for name, module in model.named_modules():
        if _is_wrapped(module):
            raise UnsupportedError(
                f'plan "auto": {name!r} has adapters ({type(module).__name__}), and adapters are cut '
                "over tensor ranks only in models of Transformers that have a plan of their own. "
                f"{_WITHOUT}"
            )


def check_made_before_the_cut(model: nn.Module) -> None:
    """Check that no adapters were made for a tensor rank's part of a layer.

    Such adapters are others on each rank, and nothing adds up what they compute.
    """
    for name, module in model.named_modules():
        base = getattr(module, "base_layer", None)
        weight = getattr(base, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2:
            continue
        assert isinstance(base, nn.Module)
        ways = tuple(weight.shape)[:: -1 if kind_of(base) == "Conv1D" else 1]
        for axis, adapter in _linears(module):
            if adapter.shape[axis] != ways[axis]:
                raise UsageError(
                    f"{name!r} has an adapter of shape {tuple(adapter.shape)}, and its weight is cut "
                    f"over tensor ranks and has the shape {tuple(weight.shape)}: the adapter was made "
                    "for one rank's part. Add adapters to the whole model first, and let initialize() "
                    'cut it: plan="auto", or "tensor_parallel": {"autotp_size": N} in the config.'
                )


def _is_wrapped(module: nn.Module) -> bool:
    """Whether PEFT has put adapters, or a copy that is trained, around the layer."""
    return isinstance(getattr(module, "base_layer", None), nn.Module) or isinstance(
        getattr(module, "modules_to_save", None), nn.ModuleDict
    )


def _linears(module: nn.Module) -> Iterator[tuple[int, Tensor]]:
    """The weights of A and B, with the axis that they share with the layer's weight ``[out, in]``."""
    for axis, part in ((1, "lora_A"), (0, "lora_B")):
        for layer in getattr(module, part, None) or ():
            weight: Any = getattr(getattr(module, part)[layer], "weight", None)
            if isinstance(weight, Tensor) and weight.dim() == 2:
                yield axis, weight


def _check(model: nn.Module, name: str, module: nn.Module, style: str, size: int) -> None:
    why = _refusal(module, style)
    if not why:
        parent, _, leaf = name.rpartition(".")
        head = getattr(model.get_submodule(parent), "head_dim", None)
        rows = module.get_submodule("base_layer").get_parameter("weight").shape[0]
        is_of_heads = QUERY.search(leaf) or KEY_VALUE.search(leaf)
        if isinstance(head, int) and is_of_heads and rows // head % size:
            why = f"{rows // head} heads, which {size} tensor ranks cannot share evenly"
    if why:
        raise UnsupportedError(
            f'plan "auto": {name!r}, which would be cut by the style "{style}", has {why}. ZeroShard '
            f"does not cut such a layer over tensor ranks. {_WITHOUT}"
        )


def _refusal(module: nn.Module, style: str) -> str:
    """What the adapters have that cannot be cut; "" if they can."""
    parts = [getattr(module, part, None) for part in ("lora_A", "lora_B")]
    if style not in _CUT_PART or not all(isinstance(p, nn.ModuleDict) and len(p) for p in parts):
        kind = type(module).__name__
        return f"adapters or a trained copy ({kind}) that are not LoRA of a linear layer"
    if len(getattr(module, "lora_magnitude_vector", None) or ()):
        return "adapters with a magnitude vector (use_dora)"
    if getattr(module, "lora_variant", None):
        return "adapters of a variant of LoRA"
    rates = [getattr(m, "p", 0.0) for m in (getattr(module, "lora_dropout", None) or {}).values()]
    if any(rates):
        return f"adapters with lora_dropout = {max(rates)} (set it to 0)"
    return ""
