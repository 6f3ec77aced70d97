"""Which files the directory of one tag of DeepSpeed has, in rank order."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, NoReturn

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
    names = _names(path)
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
    same = _of_one_stage(path, model)
    return RankFiles(
        _by_rank(path, same, "model"),
        _by_rank(path, optim, "optim"),
        {(int(m["layer"]), int(m["rank"])): path / m.string for m in experts},
        _by_rank(path, of_places, "optim"),
    )


def _names(path: Path) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}.") from error


def _others(names: Sequence[str], known: Sequence[re.Match[str]]) -> list[str]:
    """Files of another kind of parallelism."""
    parts = {name for name in names if _PARTS.fullmatch(name)} - {m.string for m in known}
    return sorted(parts | {m.string for m in known if int(m["mp"]) != 0})


def _of_one_stage(path: Path, model: list[re.Match[str]]) -> list[re.Match[str]]:
    """The files of the model: one for all ranks, or one for each (stage 3).

    Raises:
        CheckpointError: the directory has files of both kinds.
    """
    whole = [m for m in model if m["rank"] is None]
    sliced = [m for m in model if m["rank"] is not None]
    if whole and sliced:
        _refuse_mixture(path, whole[0].string, sliced[0].string)
    return sliced or whole


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
