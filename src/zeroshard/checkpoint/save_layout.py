"""Lays out the files of one rank, and gives their bytes in that order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, starmap
from pathlib import Path
from typing import Any

from torch import Tensor

from zeroshard.checkpoint.blocks import BLOCK_NBYTES, TensorEntry, bytes_of, lay_out, write_buffers
from zeroshard.checkpoint.boxes import Box
from zeroshard.checkpoint.local_state import LocalState
from zeroshard.checkpoint.manifest import (
    Dtype,
    Manifest,
    buffer_key,
    dtype_name,
    fragment_key,
    stored_as,
    tree_key,
)
from zeroshard.checkpoint.save_decisions import (
    SHARED_FILE,
    CheckpointMetadata,
    Options,
    RankFacts,
    SaveDecision,
    first_frozen_plan,
)
from zeroshard.comm.agreement import Attempt, ControlGroup
from zeroshard.device.pinned import host_bytes
from zeroshard.zero.unit import Unit

Row = tuple[str, str, Dtype, int, int, Box | None]
"""A fragment as the manifest describes it: parameter, tensor, dtype, begin, number of elements, box."""


@dataclass(frozen=True, eq=False, slots=True)
class PlannedFile:
    """One file that this rank writes. ``name``: as in the manifest; ``rows``: in the file's order."""

    name: str
    units: Sequence[Unit]
    extras: Mapping[str, Tensor]
    head: bytes
    entries: Sequence[TensorEntry]
    rows: Sequence[Row]
    nbytes: int


@dataclass(frozen=True, eq=False, slots=True)
class RankState:
    """What this rank has read of its state when the save began; training may change it afterwards.

    ``rows``: the fragments of each unit. ``parameters``: those that this rank describes. ``scalars``,
    ``groups``: by parameter. ``frozen``: on rank 0, a
    manifest that refers to complete frozen weights, by the name of their directory.
    """

    facts: RankFacts
    metadata: CheckpointMetadata
    rows: Mapping[Unit, Sequence[Row]]
    parameters: Mapping[str, Any]
    scalars: Mapping[str, Any]
    groups: Mapping[str, int]
    frozen: Mapping[str, Manifest]


def file_name(rank: int, world_size: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


def rows_of(local: LocalState, unit: Unit) -> list[Row]:
    return [
        (
            p.fqn,
            p.tensor,
            dtype_name(p.holder.dtype, where=f"{p.tensor} of {p.fqn!r}"),
            p.begin,
            p.numel,
            p.box,
        )
        for p in local.pieces(unit)
    ]


def files_of_rank(
    local: LocalState, metadata: CheckpointMetadata, options: Options, rank: int, world_size: int
) -> list[PlannedFile]:
    """The files of a rank in the first save into a directory, where all ranks have equal buffers.

    Reads shapes and dtypes only, so tensors may be fake. For plans: nothing is agreed with other ranks.
    """
    nobody = RankFacts(root="", tag="", nonce="", digests={}, buffers={})
    rows = {unit: rows_of(local, unit) for unit in local.units}
    state = RankState(nobody, metadata, rows, parameters={}, scalars={}, groups={}, frozen={})
    has_frozen = any(not unit.trainable for unit in local.units)
    frozen = first_frozen_plan(options) if has_frozen else "none"
    decision = SaveDecision("", "", frozen, frozen_name="frozen", own_buffers=())
    return lay_out_files(decision, state, local, rank, world_size)


def write_nbytes(files: Sequence[PlannedFile], options: Options) -> int:
    """Bytes of host memory that a rank needs to write its files, all of which are open at once."""
    sizes = (write_buffers(file.nbytes, buffers=num_buffers(options)) for file in files)
    return sum(count * nbytes for count, nbytes in sizes)


def num_buffers(options: Options) -> int:
    return options.max_buffer_nbytes // 4 // BLOCK_NBYTES


def lay_out_files(
    decision: SaveDecision, state: RankState, local: LocalState, rank: int, world_size: int
) -> list[PlannedFile]:
    metadata, own_buffers = state.metadata, buffers_of_rank(decision, state, rank)
    me = file_name(rank, world_size)
    trained = [unit for unit in local.units if unit.trainable]
    frozen = [unit for unit in local.units if not unit.trainable]
    extras = {tree_key(f"rank/{name}"): t for name, t in metadata.own_tensors.items()}
    extras |= {buffer_key(name): metadata.buffers[name] for name in own_buffers}
    units = [*trained, *frozen] if decision.frozen == "here" else trained
    files = [_lay_out_file(me, state, units, extras)]
    if rank == 0:  # what every rank reads is kept apart from shards
        shared = {tree_key(f"shared/{name}"): t for name, t in metadata.shared_tensors.items()}
        shared |= {buffer_key(n): b for n, b in metadata.buffers.items() if n not in own_buffers}
        files.append(_lay_out_file(SHARED_FILE, state, [], shared))
    if decision.frozen == "write":
        files.append(_lay_out_file(f"../{decision.frozen_name}/{me}", state, frozen, {}))
    return files


def buffers_of_rank(decision: SaveDecision, state: RankState, rank: int) -> list[str]:
    """The buffers of which this rank writes a copy into its own file."""
    return [
        name
        for name in state.metadata.buffers
        if name in decision.own_buffers or decision.buffer_writers.get(name) == rank
    ]


def _lay_out_file(
    name: str, state: RankState, units: Sequence[Unit], extras: Mapping[str, Tensor]
) -> PlannedFile:
    rows = [row for unit in units for row in state.rows[unit]]
    wanted: list[tuple[str, Dtype, tuple[int, ...]]] = [
        (fragment_key(fqn, tensor, begin, box and box.start), *stored_as(dtype, (numel,)))
        for fqn, tensor, dtype, begin, numel, box in rows
    ]
    wanted += [
        (key, *stored_as(dtype_name(tensor.dtype, where=key), tuple(tensor.shape)))
        for key, tensor in extras.items()
    ]
    head, entries = lay_out(starmap(TensorEntry, wanted))
    nbytes = max([len(head), *(e.offset + e.nbytes for e in entries[-1:])])
    return PlannedFile(name, units, extras, head, entries, rows, nbytes)


_STAGING_NBYTES = 32 << 20


@dataclass(frozen=True, eq=False, slots=True)
class SaveTask:
    """One planned save, on one rank. Made by :func:`~.save.plan`.

    ``files``: those that this rank writes, or why they could not be laid out. ``place``: the directory
    that is renamed to ``root/tag`` when it is complete. ``frozen_place``: that of frozen weights, which
    exists if this save writes them.
    """

    root: Path
    decision: SaveDecision
    state: RankState
    files: Attempt[Sequence[PlannedFile]]
    place: Path
    frozen_place: Path
    local: LocalState
    control_group: ControlGroup
    options: Options
    at: Callable[[str], None]

    @property
    def tag(self) -> str:
        """The name of the checkpoint."""
        return self.decision.tag

    @property
    def nbytes(self) -> int:
        """Bytes that this rank writes."""
        return sum(file.nbytes for file in self.files.value or ())


def bytes_of_file(task: SaveTask, file: PlannedFile, image: Tensor | None) -> Iterator[memoryview]:
    """The file from start to end. Each part is valid until the next one."""
    if image is not None:
        yield bytes_of(image)
        return
    yield memoryview(file.head)
    staging = None
    for entry, values in values_of(task.local, file):
        if values is None:
            yield memoryview(bytes(entry.nbytes))
        elif values.device.type == "cpu":
            yield bytes_of(values)
        else:
            if staging is None:
                nbytes = min(_STAGING_NBYTES, task.options.max_buffer_nbytes // 4)
                staging = host_bytes(nbytes - nbytes % 64, values.device)
            whole = staging.view(values.dtype)
            for part in values.split(whole.numel()):
                whole[: part.numel()].copy_(part)
                yield bytes_of(whole[: part.numel()])


def values_of(local: LocalState, file: PlannedFile) -> Iterator[tuple[TensorEntry, Tensor | None]]:
    """Each entry and its values, in the order of the file. None: padding, to be written as zeros."""
    values = chain(
        (p.values for unit in file.units for p in local.visit(unit)),
        (t.detach().contiguous() for t in file.extras.values()),
    )
    for entry in file.entries:
        yield entry, None if entry.key.startswith("pad:") else next(values).view(-1)
    for _ in values:
        raise AssertionError("there is more to save than was planned")
