"""Merges the reports of all ranks into one manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from torch import Tensor

from zeroshard.checkpoint.manifest import (
    VALUE,
    Digest,
    Dtype,
    Fragment,
    Manifest,
    SavedBuffer,
    SavedFile,
    SavedParameter,
    SavedTensor,
)
from zeroshard.checkpoint.safetensors_file import dtype_name
from zeroshard.zero.unit import Unit

SHARED_FILE = "shared.safetensors"
"""Rank 0 writes it, with what every rank reads. Shards are in other files."""

_Found = dict[str, dict[str, tuple[Dtype, list[Fragment]]]]
"""Fragments by parameter and tensor name."""


@dataclass(frozen=True, slots=True)
class CheckpointMetadata:
    """What goes into the manifest besides tensors of units. Trees are encoded, their tensors separate.

    ``shared`` and ``shared_tensors``: state of all ranks; rank 0's is saved. ``own`` and ``own_tensors``:
    of this rank. ``buffers``: this rank's, by name. ``aliases``: parameter -> its other names.
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
    exclude_frozen: bool = False
    save_latest: bool = True
    script: str = ""  # text of a script that is written next to ``latest``


def merge(
    said: Sequence[Mapping[str, Any]],
    *,
    units: Sequence[Unit],
    trained: Sequence[Unit],
    facts: CheckpointMetadata,
    frozen: str,
    reused: tuple[Manifest | None, str],
    digests: Mapping[str, Digest],
    tag: str,
    block_nbytes: int,
) -> Manifest:
    """The manifest of a save.

    ``said``: for each rank, ``files`` (name, size, checksums, rows of fragments), ``scalars``, ``groups``
    and ``tree``. ``trained``: units whose saved values are masters. ``reused``: an earlier manifest, and
    the directory of frozen weights that it refers to. ``frozen="none"``: frozen weights are not stored.
    """
    files: list[SavedFile] = []
    found: _Found = {}
    main: list[int] = []
    for part in said:
        main.append(len(files))
        for file in part["files"]:
            for fqn, tensor, dtype, begin, numel in file["rows"]:
                fragments = found.setdefault(fqn, {}).setdefault(tensor, (dtype, []))[1]
                fragments.append(Fragment(len(files), begin, numel))
            files.append(SavedFile(name=file["name"], nbytes=file["nbytes"], crc32=file["crc32"]))
    if reused[0] is not None:
        _refer(reused[0], reused[1], files, found)
    shared_file = next(at for at, file in enumerate(files) if file.name == SHARED_FILE)
    scalars = merged(part["scalars"] for part in said)
    groups = merged(part["groups"] for part in said)
    own_buffers = set(said[0]["own_buffers"])
    parameters = {}
    for unit in units:
        for slot in unit.layout.slots:
            if slot.numel == 0 and (unit.trainable or frozen != "none"):
                dtype = unit.row.master if unit in trained else unit.row.param
                found.setdefault(slot.fqn, {})[VALUE] = (dtype_name(dtype, where=slot.fqn), [])
            parameters[slot.fqn] = SavedParameter(
                shape=slot.shape,
                trained=unit.trainable,
                group=groups.get(slot.fqn),
                aliases=tuple(facts.aliases.get(slot.fqn, ())),
                tensors={
                    tensor: SavedTensor(dtype=dtype, fragments=tuple(fragments))
                    for tensor, (dtype, fragments) in found.get(slot.fqn, {}).items()
                },
                scalars=scalars.get(slot.fqn, {}),
                digest=digests.get(slot.fqn),
            )
    return Manifest(
        tag=tag,
        step=facts.step,
        saved_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        writer=dict(facts.writer),
        world_size=len(said),
        stage=facts.stage,
        block_nbytes=block_nbytes,
        files=tuple(files),
        parameters=parameters,
        buffers={
            name: SavedBuffer(
                dtype=dtype_name(buffer.dtype, where=f"buffer {name!r}"),
                shape=tuple(buffer.shape),
                files=tuple(main) if name in own_buffers else (shared_file,),
            )
            for name, buffer in facts.buffers.items()
        },
        shared=facts.shared,
        shared_file=shared_file,
        ranks=tuple(part["tree"] for part in said),
        rank_files=tuple(main),
    )


def _refer(before: Manifest, frozen_name: str, files: list[SavedFile], found: _Found) -> None:
    """Refer to frozen weights that an earlier save into the directory wrote."""
    place_of: dict[int, int] = {}
    for at, file in enumerate(before.files):
        if file.name.startswith(f"../{frozen_name}/"):
            place_of[at] = len(files)
            files.append(file)
    for fqn, parameter in before.parameters.items():
        value = parameter.tensors.get(VALUE)
        if value is None or parameter.trained:
            continue
        if all(fragment.file in place_of for fragment in value.fragments):
            fragments = [Fragment(place_of[f.file], f.begin, f.numel) for f in value.fragments]
            found[fqn] = {VALUE: (value.dtype, fragments)}


def merged(
    tables: Iterable[Mapping[str, Any]], convert: Callable[[Any], Any] = lambda value: value
) -> dict[str, Any]:
    """The union of tables, with converted rows. A name has the same row in every table that has it."""
    return {fqn: convert(row) for table in tables for fqn, row in table.items()}
