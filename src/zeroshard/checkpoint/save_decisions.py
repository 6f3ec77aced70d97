"""What rank 0 decides in a save: pure functions of what the ranks have reported.

:func:`decide` says what is written, :func:`leaders` by whom a directory is completed, :func:`merge` what
the manifest contains. :mod:`zeroshard.checkpoint.save` says when each is called.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Literal

from torch import Tensor

from zeroshard.checkpoint.boxes import Box
from zeroshard.checkpoint.local_state import total_digests
from zeroshard.checkpoint.manifest import (
    VALUE,
    Digest,
    Dtype,
    Manifest,
    SavedBox,
    SavedBuffer,
    SavedFile,
    SavedFragment,
    SavedParameter,
    SavedTensor,
    dtype_name,
)
from zeroshard.comm.agreement import raise_joined
from zeroshard.errors import CheckpointError

SHARED_FILE = "shared.safetensors"
"""Rank 0 writes it, with what every rank reads. Shards are in other files."""

FrozenPlan = Literal["here", "none", "write", "reuse"]
"""Frozen weights are written into the checkpoint, not stored, written into a directory of their own that
later saves can refer to, or found in such a directory."""

_PLANS: dict[str, FrozenPlan] = {"always": "here", "reference": "none", "once": "write"}
_Parts = dict[Box | None, list[SavedFragment]]
"""The fragments of a tensor by box; those of the whole tensor under None."""
_Found = dict[str, dict[str, tuple[Dtype, _Parts]]]
"""The dtype and the parts of tensors, by parameter and name."""


# ---------------------------------------------------------------------- round 1: what is written


@dataclass(frozen=True, slots=True)
class Options:
    """The part of the configuration's ``checkpoint`` section that saving needs.

    ``frozen``: "always", "once" or "reference".
    """

    frozen: str = "once"
    keep_last: int | None = None
    max_buffer_nbytes: int = 512 << 20
    tag_validation: str = "warn"


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What one rank reports when a save begins.

    ``digests``: this rank's part of the digest of each frozen parameter. ``frozen_dtypes``: the dtypes of
    the frozen parameters that this rank describes. ``buffers``: CRC-32 by name.
    ``frozen_here``: the directories ``frozen-*`` that this rank sees. ``frozen_state``: on rank 0, what
    each of them is worth: "complete" (it can be referred to), "needed" (it is damaged or has another
    block size, and a checkpoint refers to it), or "unused". ``nonce``: 8 random hexadecimal digits.
    """

    root: str
    tag: str
    nonce: str
    digests: Mapping[str, int]
    buffers: Mapping[str, int]
    frozen_dtypes: Mapping[str, Dtype] = field(default_factory=dict)
    frozen_here: Sequence[str] = ()
    frozen_state: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SaveDecision:
    """What a save writes; the same on all ranks.

    ``own_buffers``: the buffers of which every rank that has one writes its copy, because they differ.
    ``buffer_writers``: the rank that writes a buffer that rank 0 does not have (of another pipeline
    stage), by buffer; rank 0 writes the others. ``frozen_name``: the directory of the frozen weights with
    these values. Only on rank 0: ``digests`` of all frozen parameters, and ``warnings`` to log.
    """

    tag: str
    nonce: str
    frozen: FrozenPlan
    frozen_name: str
    own_buffers: Sequence[str]
    buffer_writers: Mapping[str, int] = field(default_factory=dict)
    digests: Mapping[str, Digest] = field(default_factory=dict)
    warnings: Sequence[str] = ()


def decide(facts: Sequence[RankFacts], options: Options) -> SaveDecision:
    """What is written. Pure.

    Raises:
        CheckpointError: ranks have different tags, and ``options`` do not allow it.
    """
    first = facts[0]
    totals = total_digests(rank.digests for rank in facts)
    digests = {
        fqn: Digest(dtype=dtype, sum=totals.get(fqn, "0" * 16))
        for fqn, dtype in merged(rank.frozen_dtypes for rank in facts).items()
    }
    summary = json.dumps({fqn: d.model_dump() for fqn, d in sorted(digests.items())})
    name = f"frozen-{hashlib.sha256(summary.encode()).hexdigest()[:16]}"
    crcs: dict[str, set[int]] = {}
    holders: dict[str, int] = {}  # the first rank that has a buffer
    for at, rank in enumerate(facts):
        for buffer, crc in rank.buffers.items():
            crcs.setdefault(buffer, set()).add(crc)
            holders.setdefault(buffer, at)
    return SaveDecision(
        tag=first.tag,
        nonce=first.nonce,
        frozen=_frozen_plan(facts, name, options) if digests else "none",
        frozen_name=name,
        digests=digests,
        own_buffers=[buffer for buffer, found in crcs.items() if len(found) > 1],
        buffer_writers={
            buffer: at for buffer, at in holders.items() if at and len(crcs[buffer]) == 1
        },
        warnings=[*_root_warnings(facts), *_tag_warnings(facts, options.tag_validation)],
    )


def first_frozen_plan(options: Options) -> FrozenPlan:
    """What happens to frozen weights if a directory has none of them yet."""
    return _PLANS[options.frozen]


def _frozen_plan(facts: Sequence[RankFacts], name: str, options: Options) -> FrozenPlan:
    plan = first_frozen_plan(options)
    if plan != "write" or not any(name in rank.frozen_here for rank in facts):
        return plan
    if not all(name in rank.frozen_here for rank in facts):
        return "here"  # some nodes lack it, and replacing it would break checkpoints of the others
    state = facts[0].frozen_state.get(name)
    return "reuse" if state == "complete" else "here" if state == "needed" else "write"


def _root_warnings(facts: Sequence[RankFacts]) -> list[str]:
    roots = sorted({rank.root for rank in facts})
    if len(roots) == 1:
        return []
    listed = ", ".join(roots[:3]) + (", ..." if len(roots) > 3 else "")
    return [
        f"ranks save to different directories ({listed}): each directory gets the files of its "
        "own ranks. This is right for disks that nodes do not share. Otherwise give every rank the "
        "same path."
    ]


def _tag_warnings(facts: Sequence[RankFacts], validation: str) -> list[str]:
    tags = sorted({rank.tag for rank in facts})
    if len(tags) > 1 and validation == "fail":
        listed = ", ".join(f"{rank.tag!r} on rank {at}" for at, rank in enumerate(facts))
        raise CheckpointError(f"ranks save under different tags: {listed}.")
    if len(tags) > 1 and validation == "warn":
        return [f"ranks save under different tags ({', '.join(tags)}): rank 0's is used"]
    return []


# ---------------------------------------------------------------------- round 2: where it has room


@dataclass(frozen=True, slots=True)
class Reservation:
    """What one rank reports after it has made its files.

    ``free_nbytes``: of the directory, before this rank reserved its ``nbytes``. ``sees``: the ranks whose
    files it sees. ``failed``: why it could not reserve, or "".
    """

    root: str
    nbytes: int
    free_nbytes: int
    sees: Sequence[int]
    failed: str = ""


def leaders(sees: Sequence[Collection[int]]) -> list[int]:
    """For each rank, the lowest rank that shares its directory. ``sees``: the ranks that each rank sees.

    Each rank looks after it has made its own file. So of two ranks that share a directory, at least the
    one that was later sees the other. Pure.
    """
    found = list(range(len(sees)))
    for rank, others in enumerate(sees):
        for other in others:
            low, high = sorted((found[rank], found[other]))
            found = [low if leader == high else leader for leader in found]
    return found


def check_room(reservations: Sequence[Reservation]) -> list[int]:
    """The :func:`leaders`, if every directory has room for the files of its ranks. Pure.

    Raises:
        CheckpointError: a directory has less free space than its ranks need, or a rank could not reserve.
    """
    found = leaders([part.sees for part in reservations])
    full: dict[int, str] = {}
    for leader in sorted(set(found)):
        parts = [part for part, lead in zip(reservations, found, strict=True) if lead == leader]
        need = sum(part.nbytes for part in parts)
        free = max(part.free_nbytes for part in parts)  # before any of them had reserved
        if need > free:
            full[leader] = (
                f"{reservations[leader].root} has {free:,} bytes free, and this checkpoint needs "
                f'{need:,}. Free space, keep fewer checkpoints ("checkpoint": {{"keep_last": N}}), or '
                "save to another disk."
            )
    failed = {rank: part.failed for rank, part in enumerate(reservations) if part.failed}
    raise_joined(full or failed)
    return found


# ---------------------------------------------------------------------- round 3: the manifest


@dataclass(frozen=True, slots=True)
class CheckpointMetadata:
    """What goes into the manifest besides tensors of units. Trees are encoded, their tensors separate.

    ``shared`` and ``shared_tensors``: state of all ranks; rank 0's is saved. ``own`` and ``own_tensors``:
    of this rank. ``buffers``: this rank's, by name. ``aliases``: parameter -> its other names. ``mesh``
    and ``dp_ranks``: as in the manifest, empty if every rank has samples of its own.
    """

    step: int
    stage: int
    writer: Mapping[str, str]
    aliases: Mapping[str, Sequence[str]]
    shared: Any
    shared_tensors: Mapping[str, Tensor]
    own: Any
    own_tensors: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    mesh: str = ""
    dp_ranks: Sequence[int] = ()
    save_latest: bool = True
    script: str = ""  # text of a script that is written next to ``latest``


def merge(
    reports: Sequence[Mapping[str, Any]],
    *,
    metadata: CheckpointMetadata,
    decision: SaveDecision,
    reused: Manifest | None,
    block_nbytes: int,
) -> Manifest:
    """The manifest of a save.

    ``reports``: for each rank, ``files`` (name, size, checksums, rows of fragments), ``parameters`` (what
    :meth:`~zeroshard.checkpoint.local_state.LocalState.descriptions` returned), ``scalars``, ``groups``,
    ``buffers`` (dtype and shape of the copies in its file) and ``tree``. ``reused``: an earlier manifest
    that has the frozen weights, if this one refers to them.

    Raises:
        CheckpointError: ranks describe a parameter or a buffer differently, or no rank saved a parameter.
    """
    files, found, main = _written(reports)
    if reused is not None:
        _refer(reused, decision.frozen_name, files, found)
    parameters = _saved_parameters(reports, decision, found)
    shared_file = next(at for at, file in enumerate(files) if file.name == SHARED_FILE)
    return Manifest(
        tag=decision.tag,
        step=metadata.step,
        saved_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        writer=dict(metadata.writer),
        world_size=len(reports),
        stage=metadata.stage,
        block_nbytes=block_nbytes,
        files=tuple(files),
        parameters=parameters,
        buffers=_saved_buffers(reports, metadata, decision, main, shared_file),
        shared=metadata.shared,
        shared_file=shared_file,
        ranks=tuple(part["tree"] for part in reports),
        rank_files=tuple(main),
        mesh=metadata.mesh or None,
        dp_ranks=tuple(metadata.dp_ranks),
    )


def _written(reports: Sequence[Mapping[str, Any]]) -> tuple[list[SavedFile], _Found, list[int]]:
    """The files that the ranks wrote, the fragments in them, and the first file of each rank."""
    files: list[SavedFile] = []
    found: _Found = {}
    main: list[int] = []
    for part in reports:
        main.append(len(files))
        for file in part["files"]:
            for fqn, tensor, dtype, begin, numel, box in file["rows"]:
                key = None if box is None else Box(*map(tuple, box))
                parts = found.setdefault(fqn, {}).setdefault(tensor, (dtype, {}))[1]
                parts.setdefault(key, []).append(SavedFragment(len(files), begin, numel))
            files.append(SavedFile(name=file["name"], nbytes=file["nbytes"], crc32=file["crc32"]))
    return files, found, main


def _saved_parameters(
    reports: Sequence[Mapping[str, Any]], decision: SaveDecision, found: _Found
) -> dict[str, SavedParameter]:
    """The rows of all parameters. Adds values without elements, which have no fragments, to ``found``."""
    scalars = merged(part["scalars"] for part in reports)
    groups = merged(part["groups"] for part in reports)
    parameters = {}
    for fqn, facts in _agreed("parameter", [part["parameters"] for part in reports]).items():
        is_stored = facts["trained"] or decision.frozen != "none"
        if 0 in facts["shape"] and is_stored:
            found.setdefault(fqn, {})[VALUE] = (facts["dtype"], {})
        tensors = found.get(fqn, {})
        if is_stored and VALUE not in tensors:
            raise CheckpointError(f"no rank has saved parameter {fqn!r}.")
        parameters[fqn] = SavedParameter(
            shape=tuple(facts["shape"]),
            trained=facts["trained"],
            group=groups.get(fqn),
            aliases=tuple(facts["aliases"]),
            tensors={name: _saved_tensor(*saved) for name, saved in tensors.items()},
            scalars=scalars.get(fqn, {}),
            digest=decision.digests.get(fqn),
        )
    return parameters


def _agreed(what: str, tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The union of the ranks' tables. A name must have the same row in all tables that have it."""
    found: dict[str, Any] = {}
    first: dict[str, int] = {}
    for rank, table in enumerate(tables):
        for name, row in table.items():
            if found.setdefault(name, row) != row:
                raise CheckpointError(
                    f"{what} {name!r} is {found[name]} on rank {first[name]} and {row} on rank "
                    f"{rank}, but a checkpoint has one {what} of each name."
                )
            first.setdefault(name, rank)
    return found


def _saved_tensor(dtype: Dtype, parts: _Parts) -> SavedTensor:
    boxes = sorted((box, fragments) for box, fragments in parts.items() if box is not None)
    return SavedTensor(
        dtype=dtype,
        fragments=tuple(parts.get(None, ())),
        boxes=tuple(
            SavedBox(start=box.start, extent=box.extent, fragments=tuple(fragments))
            for box, fragments in boxes
        ),
    )


def _saved_buffers(
    reports: Sequence[Mapping[str, Any]],
    metadata: CheckpointMetadata,
    decision: SaveDecision,
    main: Sequence[int],
    shared_file: int,
) -> dict[str, SavedBuffer]:
    """Rank 0's buffers, then those that only other ranks have. ``main``: each rank's file."""
    first, *others = [part["buffers"] for part in reports]
    rows = _agreed("buffer", [{**described(metadata.buffers), **first}, *others])
    found = {}
    for name, (dtype, shape) in rows.items():
        holders = [rank for rank, part in enumerate(reports) if name in part["buffers"]]
        if not holders:
            places = [shared_file]
        elif name in decision.buffer_writers:
            places = [main[holders[0]]]
        else:
            places = [main[at] for at in _nearest(holders, metadata.dp_ranks, len(reports))]
        found[name] = SavedBuffer(dtype=dtype, shape=tuple(shape), files=tuple(places))
    return found


def described(buffers: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Dtype and shape of each buffer."""
    return {
        name: [dtype_name(buffer.dtype, where=f"buffer {name!r}"), list(buffer.shape)]
        for name, buffer in buffers.items()
    }


def _nearest(holders: Sequence[int], dp_ranks: Sequence[int], world_size: int) -> list[int]:
    """For each rank whose copy it loads: its own, that of the first with its samples, or the first."""
    data = dp_ranks or range(world_size)
    first: dict[int, int] = {}
    for rank in holders:
        first.setdefault(data[rank], rank)
    own = set(holders)
    return [
        rank if rank in own else first.get(data[rank], holders[0]) for rank in range(world_size)
    ]


def _refer(before: Manifest, frozen_name: str, files: list[SavedFile], found: _Found) -> None:
    """Refer to frozen weights that an earlier save into the directory wrote."""
    index_of: dict[int, int] = {}
    for at, file in enumerate(before.files):
        if file.name.startswith(f"../{frozen_name}/"):
            index_of[at] = len(files)
            files.append(file)
    for fqn, parameter in before.parameters.items():
        value = parameter.tensors.get(VALUE)
        if value is None or parameter.trained:
            continue
        parts = value.parts(parameter.shape)
        if all(f.file in index_of for _, fragments in parts for f in fragments):
            found[fqn] = {
                VALUE: (
                    value.dtype,
                    {
                        box if value.boxes else None: [
                            SavedFragment(index_of[f.file], f.begin, f.numel) for f in fragments
                        ]
                        for box, fragments in parts
                    },
                )
            }


def merged(
    tables: Iterable[Mapping[str, Any]], convert: Callable[[Any], Any] = lambda value: value
) -> dict[str, Any]:
    """The union of tables, with converted rows. A name has the same row in every table that has it."""
    return {fqn: convert(row) for table in tables for fqn, row in table.items()}
