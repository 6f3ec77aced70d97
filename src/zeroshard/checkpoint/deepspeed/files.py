"""Which files the directory of one tag of DeepSpeed has, and which saved ranks held which experts."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from torch import Tensor

from zeroshard.core.mesh import Mesh
from zeroshard.errors import CheckpointError

_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt")
_OPTIM = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt"
)
_EXPERT = re.compile(
    r"layer_(?P<layer>\d+)_expert_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt"
)
_PLACE = re.compile(r"expp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")
_PARTS = re.compile(r"layer_\d+.*\.pt|expp_rank_.*\.pt|expert_.*\.pt")  # pipelines, old experts


class RankFiles(NamedTuple):
    """Files in rank order. ``model`` has one file for all ranks, or one for each rank (stage 3).

    ``experts``: the weights of each expert, by the numbers of its layer and of the expert. ``places``:
    the optimizer at stage 0, of one of the ranks with the same experts, by the place of these.
    """

    model: tuple[Path, ...]
    optim: tuple[Path, ...]
    experts: Mapping[tuple[int, int], Path] = MappingProxyType({})
    places: tuple[Path, ...] = ()


def is_deepspeed(path: str | Path) -> bool:
    """Whether this is the directory of one tag that DeepSpeed wrote."""
    try:
        return any(_MODEL.fullmatch(name) for name in os.listdir(path))
    except OSError:
        return False


def files_of(path: Path) -> RankFiles:
    """The files of a directory, which must have one for every rank up to the highest."""
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}.") from error
    model, optim, experts, of_places = (
        [found for name in names if (found := pattern.fullmatch(name))]
        for pattern in (_MODEL, _OPTIM, _EXPERT, _PLACE)
    )
    files = (*model, *optim, *experts, *of_places)
    if others := _others(names, files):
        refuse_parallel(path, f"the file {others[0]}")
    if not model:
        raise CheckpointError(
            f"{path} has no file *mp_rank_00_model_states.pt: it is not a checkpoint of "
            "DeepSpeed, or the save did not finish. Give the directory of one tag, such as "
            "global_step1000."
        )
    whole = [m for m in model if m["rank"] is None]
    sliced = [m for m in model if m["rank"] is not None]  # one for each rank (stage 3)
    if whole and sliced:
        _refuse_mixture(path, whole[0].string, sliced[0].string)
    return RankFiles(
        _by_rank(path, sliced or whole, "model"),
        _by_rank(path, optim, "optim"),
        {(int(m["layer"]), int(m["rank"])): path / m.string for m in experts},
        _by_rank(path, of_places, "optim"),
    )


def _others(names: Sequence[str], known: Sequence[re.Match[str]]) -> list[str]:
    """Files of another kind of parallelism."""
    parts = {name for name in names if _PARTS.fullmatch(name)} - {m.string for m in known}
    return sorted(parts | {m.string for m in known if int(m["mp"]) != 0})


def _by_rank(path: Path, matches: Iterable[re.Match[str]], kind: str) -> tuple[Path, ...]:
    found: dict[int, str] = {}
    for match in matches:
        rank = int(match["rank"] or 0)
        if rank in found:
            _refuse_mixture(path, found[rank], match.string)
        found[rank] = match.string
    gaps = [rank for rank in range(len(found)) if rank not in found]
    if gaps:
        _refuse_gaps(path, gaps, kind)
    return tuple(path / found[rank] for rank in sorted(found))


def check_ranks(path: Path, files: Sequence[Path], kind: str, ranks: int) -> None:
    """Check that there are as many files as the run had ranks."""
    if len(files) < ranks:
        _refuse_gaps(path, range(len(files), ranks), kind)
    if len(files) > ranks:
        raise CheckpointError(
            f"{path} has {kind} files of {len(files)} ranks, but the run had {ranks}: "
            f"{files[ranks].name} and those of higher ranks belong to another save. Remove them."
        )


def _refuse_gaps(path: Path, ranks: Sequence[int], kind: str) -> NoReturn:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    raise CheckpointError(
        f"{path} lacks the file zero_pp_rank_R_mp_rank_00_{kind}_states.pt for R = {shown}. Every "
        "rank saved a part of each parameter, so the files of all ranks are needed. Ranks on "
        "other machines may have saved to their local disks: copy all files into one directory."
    )


def _refuse_mixture(path: Path, one: str, other: str) -> NoReturn:
    raise CheckpointError(
        f"{path} has both {one} and {other}: they belong to different saves under one tag. Remove "
        "the older files."
    )


def refuse_parallel(path: Path, seen: str) -> NoReturn:
    raise CheckpointError(
        f"{path} was saved with tensor, pipeline or AutoEP's parallelism ({seen}), which is not "
        "supported: only ZeRO data parallelism and layers of experts (MoE) are. Load it with DeepSpeed, "
        "and save plain weights from there."
    )


# ---------------------------------------------------------------------- experts
#
# DeepSpeed numbers the experts of a rank from 0 on. Files with the weights of one expert have its number
# in the whole layer, and so have the names in them; optimizers, lists of shapes and of buffers have the
# rank's own. With ``ep`` ranks that share a layer of E experts, the rank at place ``p`` of them has the
# numbers ``p * E / ep`` and up (``deepspeed/utils/groups.py`` says which ranks these are).

_NAME = re.compile(r"(.*deepspeed_moe\.experts\.deepspeed_experts\.)(\d+)(\..+)")


def is_of_expert(name: str) -> bool:
    """Whether a parameter or a buffer is that of an expert of a ``MoE`` layer."""
    return _NAME.fullmatch(name) is not None


def without_number(name: str) -> str:
    """The name with ``*`` for the number of the expert, if it is that of an expert."""
    return _NAME.sub(r"\1*\3", name)


def per_layer(names: Iterable[str]) -> dict[str, int]:
    """How many experts of each layer ``names`` mention, by what is before the number.

    >>> at = "deepspeed_moe.experts.deepspeed_experts."
    >>> per_layer([at + "0.w", at + "0.b", at + "1.w", "head"])
    {'deepspeed_moe.experts.deepspeed_experts.': 2}
    """
    found: dict[str, set[str]] = defaultdict(set)
    for name in names:
        if match := _NAME.fullmatch(name):
            found[match[1]].add(match[2])
    return {layer: len(numbers) for layer, numbers in found.items()}


def in_layer(name: str, place: int, counts: Mapping[str, int]) -> str:
    """The name of a parameter of the rank at ``place`` with the number in the whole layer.

    ``counts``: of :func:`per_layer`, for one rank.

    >>> at = "deepspeed_moe.experts.deepspeed_experts."
    >>> in_layer(at + "1.w", 2, {at: 4})
    'deepspeed_moe.experts.deepspeed_experts.9.w'
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    return f"{match[1]}{place * counts[match[1]] + int(match[2])}{match[3]}"


def holders(ranks: int, partitions: int, *, data_first: bool) -> list[tuple[int, ...]]:
    """The saved ranks that share a group of parameters, for each place, in the order of their parts.

    ``partitions``: into how many parts the group is cut. With ``ranks`` parts all ranks share it.

    >>> holders(4, 2, data_first=False), holders(4, 2, data_first=True), holders(2, 2, data_first=False)
    ([(0, 2), (1, 3)], [(0, 1), (2, 3)], [(0, 1)])
    """
    mesh = Mesh(data_shard=ranks, data_before_expert=int(data_first))
    size = ranks // partitions
    return [mesh.expert_holders(rank, size) for rank in mesh.expert_group(0, size)]


def is_data_first(model: Mapping[str, Any]) -> bool:
    """Whether the saved run had ``use_data_before_expert_parallelism``."""
    config = model.get("ds_config")
    return isinstance(config, Mapping) and bool(config.get("use_data_before_expert_parallelism"))


def partitions_of(wrapper: Mapping[str, Any], shapes: Sequence[Any]) -> list[int]:
    """Into how many parts the state of each group of parameters is cut. ``shapes``: of the groups."""
    count = wrapper["partition_count"]
    return [int(n) for n in count] if isinstance(count, list) else [int(count)] * len(shapes)


def are_odd(partitions: Sequence[int], shapes: Sequence[Iterable[str]], ranks: int) -> bool:
    """Whether a group is cut into fewer parts than there are ranks, and not because of experts."""
    return any(
        parts != ranks and (ranks % parts or not all(map(is_of_expert, row)))
        for parts, row in zip(partitions, shapes, strict=True)
    )


def tensors_of_experts(contents: Mapping[Path, Mapping[str, Any]]) -> dict[str, Tensor]:
    """The tensors in the files of experts, with their numbers in the layer. In the order of ``contents``.

    Raises:
        CheckpointError: a file has something else.
    """
    found: dict[str, Tensor] = {}
    for file, content in contents.items():
        for name, item in content.items():
            if not isinstance(item, Tensor) or not is_of_expert(name) or name in found:
                raise CheckpointError(
                    f"{file} has {name!r}, which is not a tensor of one expert: it belongs to another "
                    "save, or was not written by DeepSpeed 0.19."
                )
            found[name] = item
    return found


def check_complete(path: Path, experts: Mapping[tuple[int, int], Any], counts: Any) -> None:
    """Check that there is a file for each expert. ``experts``: files by layer and number.

    ``counts``: the experts of each layer, as the model's file has them; None: it has no such layer.

    Raises:
        CheckpointError: files are missing, or there are too many.
    """
    if counts is None:
        wanted = set()
    elif isinstance(counts, list):
        wanted = {(layer, number) for layer, count in enumerate(counts) for number in range(count)}
    else:
        raise CheckpointError(
            f"{path} has files of experts without a number of the layer, as old releases of DeepSpeed "
            "wrote them. Load it with DeepSpeed 0.19, and save it with that."
        )
    odd = sorted(wanted ^ set(experts))
    if odd:
        layer, number = odd[0]
        name = f"layer_{layer}_expert_{number}_mp_rank_00_model_states.pt"
        what = "lacks" if odd[0] in wanted else "has"
        raise CheckpointError(
            f"{path} {what} the file {name}, and its model has num_experts {counts}"
            f"{f' ({len(odd)} such files)' if len(odd) > 1 else ''}: the save did not finish, or files "
            "belong to different saves. Ranks on other machines may have saved to their local disks: "
            "copy all files into one directory."
        )


def names_of_groups(
    path: Path,
    options: Sequence[Mapping[str, Any]],
    dense: Sequence[str],
    experts: Sequence[str],
    place: int,
    size: int,
) -> list[list[str]]:
    """The parameters of each group of the optimizer of the rank at ``place``, with numbers in the layer.

    For stage 0, whose files have no names. ``dense``: parameters of no expert, ``experts``: all experts',
    in the order of the model. ``size``: the ranks that share a layer. Groups of experts have the key
    ``moe``; if there are several, each has the next ones.

    Raises:
        CheckpointError: there are several groups without experts, or layers that differ in ``size``.
    """
    of_experts = [at for at, row in enumerate(options) if row.get("moe")]
    sizes = {str(options[at].get("name")) for at in of_experts}
    if len(options) - len(of_experts) != 1 or len(sizes) > 1:
        raise CheckpointError(
            f"{path} was saved at stage 0, whose files do not name the parameters of the optimizer. It "
            f"has {len(options) - len(of_experts)} groups without experts and layers of "
            f"{', '.join(sorted(sizes)) or 'no size'}; only one of each is understood. "
            "load_optimizer_states=False loads only the weights, or save it with DeepSpeed at stage 1."
        )
    totals = per_layer(experts)
    own = [
        name
        for name in experts
        if (match := _NAME.fullmatch(name)) and int(match[2]) * size // totals[match[1]] == place
    ]
    found = [list(dense) if not row.get("moe") else [] for row in options]
    begin = 0
    for at in of_experts:
        count = len(options[at]["params"]) if at != of_experts[-1] else len(own) - begin
        found[at] = own[begin : begin + count]
        begin += count
    return found
