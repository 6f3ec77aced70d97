"""Attention heads under tensor parallelism: which layers are made of heads, and how many a rank has.

A column-parallel projection gives each tensor rank the rows of whole heads. A module that reads its
number of heads from an attribute must see the number of this rank, so those attributes are divided.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from zeroshard.errors import UsageError

QUERY_COUNTS = ("num_heads", "n_head", "n_heads", "num_attention_heads", "nhead")
KEY_VALUE_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head")
HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "d_head")

QUERY = re.compile(r"(?:^|_)(?:q|query|wq)(?:_|$)|^q(?:_proj|_lin)?$")
KEY_VALUE = re.compile(r"(?:^|_)(?:k|v|key|value|wk|wv)(?:_|$)|^[kv](?:_proj|_lin)?$")
FUSED = re.compile(r"qkv|c_attn|query_key_value|key_value|gate_up|up_gate|in_proj|(?:^|_)kv(?:_|$)")
"""Names of projections that often have several matrices in one, one after the other."""


@dataclass(frozen=True)
class HeadCount:
    """``module.attribute`` is a number of heads: ``whole`` in the model, ``own`` on each tensor rank."""

    module: str
    attribute: str
    whole: int
    own: int


def head_counts(model: nn.Module, colwise: list[str], size: int) -> list[HeadCount]:
    """The attributes that say how many heads there are, of the modules that own ``colwise`` layers.

    Raises:
        UsageError: heads do not divide by ``size`` tensor ranks, or an attribute contradicts the rows.
    """
    found = []
    for parent, layers in _owners(model, colwise):
        module = model.get_submodule(parent)
        counts = {
            name: count
            for name in (*QUERY_COUNTS, *KEY_VALUE_COUNTS)
            if type(count := getattr(module, name, None)) is int
        }
        head_size = _head_size(module, layers, counts)
        if head_size is None:
            continue
        for leaf, layer in layers.items():
            _check_layer(f"{parent}.{leaf}".lstrip("."), leaf, layer, head_size, size)
        found += [
            HeadCount(parent, name, count, count // size)
            for name, count in counts.items()
            if not _is_own_already(parent, name, count, layers, head_size, size)
        ]
    return found


def _owners(model: nn.Module, colwise: list[str]) -> Iterator[tuple[str, dict[str, nn.Linear]]]:
    """Name of a module, and its own column-parallel layers by their names in it."""
    owners: dict[str, dict[str, nn.Linear]] = {}
    for name in colwise:
        layer = model.get_submodule(name)
        if isinstance(layer, nn.Linear):
            parent, _, leaf = name.rpartition(".")
            owners.setdefault(parent, {})[leaf] = layer
    yield from owners.items()


def _head_size(
    module: nn.Module, layers: Mapping[str, nn.Linear], counts: Mapping[str, int]
) -> int | None:
    """Rows of one head; None if the layers are not known to be made of heads."""
    projections = [leaf for leaf in layers if QUERY.search(leaf) or KEY_VALUE.search(leaf)]
    if not projections and not counts:
        return None
    for name in HEAD_SIZES:
        if type(size := getattr(module, name, None)) is int and size > 0:
            return size
    queries = [layers[leaf].out_features for leaf in layers if QUERY.search(leaf)]
    query_counts = [counts[name] for name in QUERY_COUNTS if name in counts]
    if queries and query_counts and queries[0] % query_counts[0] == 0:
        return queries[0] // query_counts[0]
    return None


def _check_layer(name: str, leaf: str, layer: nn.Linear, head_size: int, size: int) -> None:
    rows = layer.out_features
    if rows % head_size or not (QUERY.search(leaf) or KEY_VALUE.search(leaf)):
        return
    heads = rows // head_size
    if heads % size == 0:
        return
    if KEY_VALUE.search(leaf) and heads < size:
        raise UsageError(
            f"{name!r} has {heads} key/value heads of {head_size} rows, fewer than the {size} tensor "
            "ranks. Ranks would have to share a head, which ZeroShard does not do yet. Use at most "
            f"{heads} tensor ranks."
        )
    raise UsageError(
        f"{name!r} has {heads} heads of {head_size} rows, which {size} tensor ranks cannot share "
        "evenly. A head must stay on one rank. Use a number of tensor ranks that divides the number "
        "of heads."
    )


def _is_own_already(
    parent: str,
    attribute: str,
    count: int,
    layers: Mapping[str, nn.Linear],
    head_size: int,
    size: int,
) -> bool:
    """Whether the program has divided the attribute itself.

    Raises:
        UsageError: it is neither the number of heads of the model nor that of a rank.
    """
    pattern = QUERY if attribute in QUERY_COUNTS else KEY_VALUE
    rows = [layer.out_features for leaf, layer in layers.items() if pattern.search(leaf)]
    if not rows or rows[0] == count * head_size:
        if count % size == 0:
            return False
        raise UsageError(
            f"{parent!r} has {attribute} = {count}, which {size} tensor ranks cannot share evenly. "
            "A head must stay on one rank. Use a number of tensor ranks that divides it."
        )
    if rows[0] == count * head_size * size:
        return True
    raise UsageError(
        f"{parent!r} has {attribute} = {count} and heads of {head_size} rows, but its projection has "
        f"{rows[0]} rows. ZeroShard divides the number of heads by the {size} tensor ranks and must "
        "know it. Correct the attribute, or rename it if it means something else."
    )
