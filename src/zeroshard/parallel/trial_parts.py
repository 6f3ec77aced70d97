"""What the guesses of a tensor plan share: the blocks of a model, and the weights of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from zeroshard.parallel.tensor_styles import part_of, row_of


def repeated_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The members of the outermost lists of modules that repeat one class."""
    outer: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < 2:
            continue
        if any(name.startswith(f"{other}.") for other in outer):
            continue
        members = list(module.named_children())
        if len({type(m) for _, m in members}) == 1 and any(m.children() for _, m in members):
            if not all(list(member.children()) for _, member in members):
                continue
            outer.append(name)
            yield from ((f"{name}.{leaf}".lstrip("."), member) for leaf, member in members)


def weights_of_rank(
    linears: Mapping[str, nn.Module],
    guess: Mapping[str, str],
    fused: Mapping[str, Sequence[int]],
    shared: Mapping[str, int],
    size: int,
    index: int,
) -> dict[str, Tensor]:
    """The weights of rank ``index`` of ``size``, by name. The bias of a row-parallel layer counts once.

    ``linears``: layers by name. ``guess``: their styles. ``fused``: sizes of the matrices that a layer
    joins. ``shared``: how many ranks share each part of a layer; 1 if it is not there.
    """
    found: dict[str, Tensor] = {}
    for leaf, style in guess.items():
        row, sizes = row_of(style, linears[leaf]), fused.get(leaf, ())
        weight, bias = linears[leaf].weight, getattr(linears[leaf], "bias", None)
        assert isinstance(weight, Tensor)
        assert row.weight_axis is not None
        parts, at = size // shared.get(leaf, 1), index // shared.get(leaf, 1)
        found[f"{leaf}.weight"] = part_of(weight, row.weight_axis, parts, at, sizes)
        if isinstance(bias, Tensor):
            rowwise = bias if index == 0 else torch.zeros_like(bias)
            cut = row.bias_axis is not None
            found[f"{leaf}.bias"] = part_of(bias, 0, parts, at, sizes) if cut else rowwise
    return found
