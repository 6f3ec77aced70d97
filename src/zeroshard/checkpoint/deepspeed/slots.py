"""Locates parameters and their state in the flat tensors of DeepSpeed's optimizers.

A *slot* here is what DeepSpeed's optimizer treats as one parameter. Its form depends on the stage:

* Stage 0: one parameter, or all parameters of a group.
* Stages 1 and 2: a flat tensor of a group's parameters, one after the other, with gaps for alignment. It
  is cut into W parts, one for each rank.
* Stage 3: a sub-group. Every parameter is cut into W equal parts, the last one padded. A rank has its
  part of each parameter, one after the other.

State is laid out like the masters. Single numbers belong to all parameters of a slot.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeroshard.checkpoint.deepspeed.files import holders, in_layer, per_layer
from zeroshard.checkpoint.deepspeed.unpickle import check_values
from zeroshard.errors import CheckpointError

_SCALARS = ("step", "mu_product", "eta", "mu")
"""Keys of torch's optimizer state that are single numbers, even where the parameter is 0-dim too."""


class Chain:
    """Tensors that are read as one flat tensor, one after the other."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._saved = [tensor for tensor in tensors if tensor.numel()]
        self._tensors = [_plain(tensor) for tensor in self._saved]
        self._starts = [0, *accumulate(tensor.numel() for tensor in self._tensors)]

    @property
    def numel(self) -> int:
        return self._starts[-1]

    def read(self, begin: int, out: Tensor) -> None:
        """Copy ``chain[begin : begin + out.numel()]`` into ``out``.

        Raises:
            CheckpointError: the file of a tensor is damaged.
        """
        at, end = begin, begin + out.numel()
        which = bisect_right(self._starts, at) - 1
        while at < end:
            check_values(self._saved[which])
            start, stop = self._starts[which], min(end, self._starts[which + 1])
            piece = self._tensors[which].reshape(-1)[at - start : stop - start]
            out[at - begin : stop - begin].copy_(piece)
            at, which = stop, which + 1


def _plain(tensor: Tensor) -> Tensor:
    """The tensor without ``requires_grad``: masters were saved as leaves."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        raise ValueError(f"a tensor is {tensor.layout} on {tensor.device}")
    return tensor.detach()


class FlatSpan(NamedTuple):
    """Where a flat tensor is: element ``i`` is element ``offset + i % part`` of chain ``i // part``.

    Example at stage 3 with 2 ranks: a parameter of 6 elements follows one of 8 in the same sub-group.
    Each rank has 4 elements of the first, then 3 of the second: ``offset`` is 4 and ``part`` is 3.
    Element 4 is element ``4 + 4 % 3 = 5`` of chain ``4 // 3 = 1``, which is rank 1's tensor. At other
    stages there is one chain, and ``part`` is the number of elements.
    """

    chains: Sequence[Chain]
    offset: int
    part: int
    dtype: torch.dtype

    def read(self, begin: int, out: Tensor) -> None:
        """Copy ``flat[begin : begin + out.numel()]`` into ``out``."""
        at, end = begin, begin + out.numel()
        while at < end:
            which, inside = divmod(at, self.part)
            stop = min(end, at - inside + self.part)
            self.chains[which].read(self.offset + inside, out[at - begin : stop - begin])
            at = stop


def whole_place(tensor: Tensor) -> FlatSpan:
    """The span of a tensor that is one parameter."""
    return FlatSpan([Chain([tensor])], 0, tensor.numel(), tensor.dtype)


class DeepSpeedSlot(NamedTuple):
    """What the optimizer treats as one parameter. Lists have one item for each rank that has a part.

    ``padding``: elements at the end that state has and masters may lack. ``gaps``: elements after each
    parameter. ``slack``: the padding at the end of the whole slot is less than this. ``at``: the number
    of the group in the files of stages 1 to 3. ``ranks``: whose files have the parts; () if it is one
    file. ``told``: the names in these files, where experts have the numbers of their rank.
    """

    group: int
    shapes: Mapping[str, tuple[int, ...]]
    masters: list[Tensor]
    states: list[Mapping[str, Any]]
    padding: list[int]
    gaps: Sequence[int]
    slack: int
    is_cut: bool  # each parameter is cut by itself (stage 3)
    at: int = 0
    ranks: Sequence[int] = ()
    told: Sequence[str] = ()


def places(path: Path, slot: DeepSpeedSlot, pieces: list[Tensor]) -> Iterator[tuple[str, FlatSpan]]:
    """The span of each parameter of a slot, in tensors ``pieces`` that are laid out like its masters."""
    ranks, dtype = len(pieces), pieces[0].dtype
    chains = [Chain([p]) for p in pieces] if slot.is_cut else [Chain(pieces)]
    offset = 0
    if any(gap < 0 for gap in slot.gaps):
        raise ValueError("overlapping elements")
    for (fqn, shape), gap in zip(slot.shapes.items(), slot.gaps, strict=True):
        part = -(-prod(shape) // ranks) if slot.is_cut else prod(shape)
        yield fqn, FlatSpan(chains, offset, part, dtype)
        offset += part + gap
    for rank, chain in enumerate(chains):
        if not 0 <= chain.numel - offset < slot.slack or any(p.dtype != dtype for p in pieces):
            where = f"rank {rank} has" if slot.is_cut else "the ranks have"
            raise CheckpointError(
                f"{path}: {where} {chain.numel:,} elements for {len(slot.shapes)} parameters from "
                f"{next(iter(slot.shapes), '')!r} on, which take {offset:,}. Files may belong to "
                "different saves. Or the state was on NVMe when it was saved, and is not in these "
                "files."
            )


def check_owners(
    files: Sequence[Path], slots: Sequence[DeepSpeedSlot], wrappers: Sequence[Any]
) -> None:
    """Check that each file of stages 1 and 2 is of the rank in its name.

    It says where in the rank's part each parameter is (``param_slice_mappings``). Files of stage 3, and
    of old releases, say nothing that tells one rank from another.

    Raises:
        CheckpointError: a file is of another rank.
    """
    for slot in slots:
        begin = 0
        for part, rank in enumerate(slot.ranks):
            file, end = files[rank], begin + slot.masters[part].numel() + slot.padding[part]
            told = _told_fragments(wrappers[rank], slot.at)
            if told is not None and told != _fragments(slot, begin, end):
                raise CheckpointError(
                    f"{file} is not of rank {rank}, as its name says: the parameters of its group "
                    f"{slot.at} are {', '.join(map(repr, told)) or 'none'}, at other places than this "
                    "rank's. Files of two ranks may have been exchanged when they were copied."
                )
            begin = end


def _fragments(slot: DeepSpeedSlot, begin: int, end: int) -> dict[str, tuple[int, int]]:
    """Name -> start and number of the elements in part ``[begin, end)`` of a flat group."""
    found, at = {}, 0
    for fqn, shape, gap in zip(slot.told, slot.shapes.values(), slot.gaps, strict=True):
        first, last = max(at, begin), min(at + prod(shape), end)
        if first < last:
            found[fqn] = (first - begin, last - first)
        at += prod(shape) + gap
    return found


def _told_fragments(wrapper: Any, group: int) -> dict[str, tuple[int, int]] | None:
    """The same, as a file tells it; None if it does not."""
    try:
        rows = wrapper["param_slice_mappings"][group].items()
        return {name: (int(place.start), int(place.numel)) for name, place in rows if place.numel}
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        return None


def like_master(key: str, state: Any, master: Tensor, padding: int) -> Tensor | None:
    """State of a slot if it is laid out like its master, else None.

    Padding is at the end: its size does not change where parameters are.
    """
    if not isinstance(state, Tensor) or (state.dim() == 0 and key in _SCALARS):
        return None
    padded = state.dim() == master.dim() == 1 and state.numel() == master.numel() + padding
    return state if padded or state.shape == master.shape else None


def shape_of(size: Iterable[Any]) -> tuple[int, ...]:
    """A shape from a ``torch.Size``, or from what older releases saved instead."""
    return tuple(int(n) for n in size)


_KEYS = {
    False: ("single_partition_of_fp32_groups", "base_optimizer_state"),
    True: ("fp32_flat_groups", "optimizer_state_dict"),
}
"""Whether every parameter is cut -> the keys of the masters and of the optimizer's state."""

_States = tuple[list[dict[str, Any]], list[int], list[list[Mapping[str, Any]]]]
"""The options of the optimizer's groups, the group of each slot, and each rank's state of each slot."""


def sharded_slots(
    wrappers: Sequence[Mapping[str, Any]],
    param_shapes: Sequence[Mapping[str, Any]],
    *,
    is_cut: bool,
    partitions: Sequence[int],
    data_first: bool = False,
) -> tuple[list[DeepSpeedSlot], list[dict[str, Any]]]:
    """The slots of stages 1 to 3, and the options of the optimizer's groups.

    ``partitions``: into how many parts each group is cut. Of experts that ranks shared these are fewer
    than there are ranks, and each place has a slot. ``data_first``: see :func:`.files.holders`.
    """
    master, base = _KEYS[is_cut]
    masters = [w[master] for w in wrappers]
    count, ranks = len(param_shapes), len(wrappers)
    options, groups, states = _states_of(wrappers, base, masters, count)
    none = [0] * count
    padding = [none if is_cut else w.get("group_paddings", none) for w in wrappers]
    gaps = wrappers[0].get("param_alignment_paddings") or [[0] * len(row) for row in param_shapes]
    counts = per_layer(itertools.chain(*param_shapes))

    def slot_of(at: int, place: int, held: Sequence[int]) -> DeepSpeedSlot:
        sizes = param_shapes[at].items()
        return DeepSpeedSlot(
            group=groups[at],
            shapes={in_layer(fqn, place, counts): shape_of(size) for fqn, size in sizes},
            masters=[masters[rank][at] for rank in held],
            states=[states[rank][at] for rank in held],
            padding=[padding[rank][at] for rank in held],
            gaps=gaps[at],
            slack=1 if is_cut else 2 * len(held),
            is_cut=is_cut,
            at=at,
            ranks=held,
            told=tuple(param_shapes[at]),
        )

    return [
        slot_of(at, place, held)
        for at in range(count)
        for place, held in enumerate(holders(ranks, partitions[at], data_first=data_first))
    ], options


def _states_of(
    wrappers: Sequence[Mapping[str, Any]], base: str, masters: Sequence[Any], count: int
) -> _States:
    """That of an elastic checkpoint is by slot, without options; others have the optimizer's own keys."""
    bases = [wrapper[base] for wrapper in wrappers]
    if isinstance(bases[0], list):
        row = {"step": wrappers[0].get("base_optimizer_state_step")}
        options: list[dict[str, Any]] = [{} for _ in range(count)]
        groups = list(range(count))
        states = [[_with_step(state, row) for state in base] for base in bases]
    else:
        options = dict(bases[0])["param_groups"]
        keys = [(group, key) for group, row in enumerate(options) for key in row["params"]]
        groups = [group for group, _ in keys]
        states = [
            [_with_step(base["state"].get(key, {}), base["param_groups"][g]) for g, key in keys]
            for base in bases
        ]
    if any(len(rows) != count for rows in (*masters, *states, groups)):
        raise ValueError(f"{count} groups of parameters, but not as many of masters or of state")
    return options, groups, states


def whole_slots(
    path: Path,
    wrapper: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    groups: Sequence[Sequence[str]] | None,
) -> tuple[list[DeepSpeedSlot], list[dict[str, Any]]]:
    """The slots of stage 0: one per parameter, or one per group where masters are flat."""
    inner = wrapper if "param_groups" in wrapper else dict(wrapper["optimizer_state_dict"])
    options = inner["param_groups"]
    names = _names_of_groups(path, wrapper, options, weights, groups)
    slots = []
    for group, fqns in enumerate(names):
        keys = options[group]["params"]
        if "fp32_groups_flat" in wrapper:
            shapes = {fqn: shape_of(weights[fqn].shape) for fqn in fqns}
            flat = wrapper["fp32_groups_flat"][group]
            slots.append(_whole_slot(group, shapes, flat, inner, keys[0]))
            continue
        masters = wrapper["fp32_groups"][group] if "fp32_groups" in wrapper else None
        for at, (fqn, key) in enumerate(zip(fqns, keys, strict=True)):
            master = weights[fqn] if masters is None else masters[at]
            if master.shape != weights[fqn].shape:
                raise CheckpointError(
                    f"{path}: parameter {at} of the optimizer's group {group} has shape "
                    f"{list(master.shape)}, but {fqn!r} has {list(weights[fqn].shape)}. These are "
                    "not the groups of the saved run."
                )
            slots.append(_whole_slot(group, {fqn: shape_of(master.shape)}, master, inner, key))
    return slots, options


def _whole_slot(
    group: int,
    shapes: Mapping[str, tuple[int, ...]],
    master: Tensor,
    inner: Mapping[str, Any],
    key: Any,
) -> DeepSpeedSlot:
    state = _with_step(inner["state"].get(key, {}), inner["param_groups"][group])
    return DeepSpeedSlot(group, shapes, [master], [state], [0], [0] * len(shapes), 1, is_cut=False)


def _with_step(state: Mapping[str, Any], row: Mapping[str, Any]) -> Mapping[str, Any]:
    """``state`` with a step count.

    Old releases of DeepSpeed's FusedAdam keep the count in the group; later ones keep 0 there.
    """
    step = row.get("step")
    return {"step": step, **state} if state and step is not None else state


def _names_of_groups(
    path: Path,
    wrapper: Mapping[str, Any],
    options: Sequence[Mapping[str, Any]],
    weights: Mapping[str, Tensor],
    groups: Sequence[Sequence[str]] | None,
) -> Sequence[Sequence[str]]:
    """The parameter names of each group. The files of stage 0 do not contain them."""
    names = [list(weights)] if groups is None else groups
    if "fp32_groups_flat" in wrapper:
        have = [flat.numel() for flat in wrapper["fp32_groups_flat"]]
        want = [sum(weights[fqn].numel() for fqn in row if fqn in weights) for row in names]
        what = "elements"
    else:
        have = [len(row["params"]) for row in options]
        want = [len(row) for row in names]
        what = "parameters"
    if have != want or any(fqn not in weights for row in names for fqn in row):
        told = "" if groups is None else " that were given"
        raise CheckpointError(
            f"{path} was saved at stage 0. Its optimizer has groups of {have} {what}, without "
            f"their names; the groups{told} have {want}. Give the names of the trained parameters "
            "by group, in the order of the optimizer. They can be taken from a model with the "
            "same optimizer."
        )
    return names
