"""Attention heads under tensor parallelism: which layers are made of heads, and how many a rank has.

A column-parallel projection gives each tensor rank the rows of whole heads. A module that reads its
number of heads from an attribute must see the number of this rank, so those attributes are divided.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from torch import nn

from zeroshard.errors import UsageError
from zeroshard.parallel.tensor_styles import MATRICES, features, kind_of

QUERY_COUNTS = ("num_heads", "n_head", "n_heads", "num_attention_heads", "nhead")
KEY_VALUE_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head")
SPLIT_SIZES = ("split_size",)
"""Attributes that say how many features of a fused projection are those of q."""
WIDTHS = ("attn_dim",)
"""Attributes that say how many features all heads of q have together."""
GROUPS = ("num_key_value_groups", "n_rep")
"""Attributes that say how many heads of q read one key/value head."""
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


def fused_sizes(model: nn.Module, name: str, style: str, size: int) -> tuple[int, ...]:
    """The sizes of the matrices that the fused layer ``name`` joins, one after another.

    ``style``: ``colwise_fused``, or with sizes ``colwise_fused:64,32,32``. Without sizes: two halves for
    gate and up or for k and v; for q, k and v from the numbers of heads, or three equal parts.

    Raises:
        UsageError: the sizes are not known, do not fit the layer, or do not divide by ``size``.
    """
    _, rows = features(model.get_submodule(name))
    given = style.partition(":")[2]
    try:
        sizes = tuple(map(int, given.split(","))) if given else known_sizes(model, name, rows)
    except ValueError:
        sizes = ()
    if len(sizes) < 2 or sum(sizes) != rows or min(sizes) < 1:
        example = ",".join([str(rows // 2), str(rows - rows // 2)])
        raise UsageError(
            f"plan: {name!r} has {rows} output features, and the style {style!r} does not say of which "
            "matrices they are. Give the sizes in their order after a colon, such as "
            f'"colwise_fused:{example}". They must sum up to {rows}.'
        )
    if odd := [one for one in sizes if one % size]:
        raise UsageError(
            f"plan: {name!r} joins matrices of {list(sizes)} output features, and {size} tensor ranks "
            f"cannot share {odd[0]} evenly. Use a number of tensor ranks that divides all of them, or "
            "leave the layer and its partner out of the plan."
        )
    return sizes


def known_sizes(model: nn.Module, name: str, rows: int) -> tuple[int, ...]:
    """The sizes of the matrices in a fused layer of ``rows`` output features; () if not known."""
    parent, _, leaf = name.rpartition(".")
    leaf = leaf.lower()
    if re.search(r"gate_up|up_gate|key_value$|(?:^|_)kv(?:_|$)", leaf) and "query" not in leaf:
        return (rows // 2, rows // 2) if rows % 2 == 0 else ()
    width, _ = features(model.get_submodule(name))
    found = _counts(model.get_submodule(parent))
    heads = {count for attribute, count in found.items() if attribute in QUERY_COUNTS}
    counts = {count for attribute, count in found.items() if attribute in KEY_VALUE_COUNTS}
    if len(heads) == 1 and len(counts) == 1 and counts != heads:
        query, key = heads.pop(), counts.pop()
        head, rest = divmod(rows, query + 2 * key)
        return (query * head, key * head, key * head) if not rest else ()
    return (width,) * 3 if rows == 3 * width else ()


def head_counts(
    model: nn.Module,
    colwise: Mapping[str, Sequence[int]],
    size: int,
    copies: Mapping[str, int] = MappingProxyType({}),
) -> list[HeadCount]:
    """The attributes that say how many heads there are, of the modules that own ``colwise`` layers.

    ``colwise``: by name of a layer the sizes of the matrices that it joins; empty for one matrix.
    ``copies``: what :func:`key_value_copies` gives.

    Raises:
        UsageError: heads do not divide by ``size`` tensor ranks, or an attribute contradicts the rows.
    """
    found: list[HeadCount] = []
    for parent, layers in _owners(model, colwise):
        module = model.get_submodule(parent)
        fused = {
            leaf: sizes for leaf in layers if (sizes := colwise[f"{parent}.{leaf}".lstrip(".")])
        }
        joined = {rows for sizes in fused.values() for rows in sizes}
        found += _divided(parent, module, SPLIT_SIZES, size, joined)
        head = head_size(module, layers, fused)
        if head is None:
            continue
        names = {leaf: f"{parent}.{leaf}".lstrip(".") for leaf in layers}
        whole = {leaf: name for leaf, name in names.items() if name not in copies}
        _check_even(whole, layers, fused, head, size)
        shared = max(copies.get(name, 1) for name in names.values())
        found += _attributes(parent, module, layers, head, size, shared)
    return found


def _attributes(
    parent: str,
    module: nn.Module,
    layers: Mapping[str, nn.Module],
    head: int,
    size: int,
    shared: int,
) -> Iterator[HeadCount]:
    """Those of a module with heads of ``head`` rows. ``shared``: ranks that share a key/value head."""
    counts = _counts(module)
    for name, count in counts.items():
        parts = size // shared if name in KEY_VALUE_COUNTS else size
        if not _is_own_already(parent, name, count, layers, head, parts):
            yield HeadCount(parent, name, count, count // parts)
    if shared > 1:  # each of these ranks has a part of the heads of q that read it
        yield from _divided(parent, module, GROUPS, shared, range(2, sys.maxsize))
    # A module that writes the width of its heads into a shape must see that of this rank's heads.
    wholes = {counts[name] * head for name in QUERY_COUNTS if name in counts}
    yield from _divided(parent, module, WIDTHS, size, wholes)


def _counts(module: nn.Module) -> dict[str, int]:
    """The attributes of a module that are numbers of heads."""
    return {
        name: count
        for name in (*QUERY_COUNTS, *KEY_VALUE_COUNTS)
        if type(count := getattr(module, name, None)) is int
    }


def _divided(
    parent: str, module: nn.Module, names: Iterable[str], parts: int, counts: Container[int]
) -> Iterator[HeadCount]:
    """The attributes of these names that are one of ``counts``, for each of ``parts`` ranks."""
    for name in names:
        count = getattr(module, name, None)
        if type(count) is int and count in counts:
            yield HeadCount(parent, name, count, count // parts)


def key_value_copies(model: nn.Module, colwise: Iterable[str], size: int) -> dict[str, int]:
    """By name of a layer of fewer key/value heads than tensor ranks: how many ranks share each head.

    Raises:
        UsageError: the number of heads does not divide ``size``.
    """
    found: dict[str, int] = {}
    for parent, layers in _owners(model, colwise):
        module = model.get_submodule(parent)
        head = head_size(module, layers, {})
        for leaf, layer in layers.items():
            _, rows = features(layer)
            if head is None or rows % head or not KEY_VALUE.search(leaf):
                continue
            heads, name = rows // head, f"{parent}.{leaf}".lstrip(".")
            if heads < size and size % heads:
                raise UsageError(
                    f"{name!r} has {heads} key/value heads of {head} rows, fewer than the {size} "
                    "tensor ranks, and each head would belong to another number of ranks. Use a "
                    f"number of tensor ranks that divides {heads} or is a multiple of it."
                )
            if heads < size:
                found[name] = size // heads
    return found


def _owners(model: nn.Module, colwise: Iterable[str]) -> Iterator[tuple[str, dict[str, nn.Module]]]:
    """Name of a module, and its own column-parallel layers by their names in it."""
    owners: dict[str, dict[str, nn.Module]] = {}
    for name in colwise:
        layer = model.get_submodule(name)
        if kind_of(layer) in MATRICES:
            parent, _, leaf = name.rpartition(".")
            owners.setdefault(parent, {})[leaf] = layer
    yield from owners.items()


def head_size(
    module: nn.Module, layers: Mapping[str, nn.Module], sizes: Mapping[str, Sequence[int]]
) -> int | None:
    """Rows of one head of a module's column-parallel ``layers``; None if they have no heads.

    ``sizes``: of the matrices that each layer joins, empty for one matrix; by its name in the module.
    """
    counts = _counts(module)
    queries = [features(layer)[1] for leaf, layer in layers.items() if QUERY.search(leaf)]
    if not queries and not counts and not any(map(KEY_VALUE.search, layers)):
        return None
    if named := _named_head_size(module):
        return named
    queries += [own[0] for own in sizes.values() if own]
    query_counts = [counts[name] for name in QUERY_COUNTS if name in counts]
    if queries and query_counts and queries[0] % query_counts[0] == 0:
        return queries[0] // query_counts[0]
    return None


def _named_head_size(module: nn.Module) -> int:
    """Rows of one head, from an attribute of the module; 0 without one."""
    sizes = (getattr(module, name, None) for name in HEAD_SIZES)
    return next((size for size in sizes if type(size) is int and size > 0), 0)


def _check_even(
    names: Mapping[str, str],
    layers: Mapping[str, nn.Module],
    fused: Mapping[str, Sequence[int]],
    head: int,
    size: int,
) -> None:
    """Check that each rank gets whole heads of layers, and of each matrix that a fused one joins."""
    for leaf, name in names.items():
        if leaf in fused and "gate" not in leaf:
            _check_fused(name, fused[leaf], head, size)
            continue
        _, rows = features(layers[leaf])
        heads, rest = divmod(rows, head)
        if not rest and heads % size and (QUERY.search(leaf) or KEY_VALUE.search(leaf)):
            raise UsageError(
                f"{name!r} has {heads} heads of {head} rows, which {size} tensor ranks cannot share "
                "evenly. A head must stay on one rank. Use a number of tensor ranks that divides the "
                "number of heads."
            )


def _check_fused(name: str, sizes: Sequence[int], head: int, size: int) -> None:
    for rows in sizes:
        if rows % head == 0 and rows // head % size:
            raise UsageError(
                f"{name!r} joins matrices of {[one // head for one in sizes]} heads of {head} "
                f"rows, and {size} tensor ranks cannot share {rows // head} heads evenly. A head "
                "must stay on one rank. Use a number of tensor ranks that divides all of them."
            )


def _is_own_already(
    parent: str,
    attribute: str,
    count: int,
    layers: Mapping[str, nn.Module],
    head_size: int,
    size: int,
) -> bool:
    """Whether the program has divided the attribute itself."""
    pattern = QUERY if attribute in QUERY_COUNTS else KEY_VALUE
    rows = [
        features(layer)[1]
        for leaf, layer in layers.items()
        if pattern.search(leaf) and not FUSED.search(leaf.lower())  # its rows are of q, k and v
    ]
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
