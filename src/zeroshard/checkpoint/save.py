"""Writes one checkpoint with all ranks, so that it exists as a whole or not at all.

[Note: phases of a save]
A save takes four rounds. A *round* is one call of :func:`~zeroshard.comm.agreement.run_on_all_ranks`,
in which every rank acts, rank 0 decides, and all ranks get the decision. What is decided is computed by
the pure functions of :mod:`zeroshard.checkpoint.save_decisions`.

1. "planning it" (:func:`plan`): each rank reports tag, path, digests and buffers. Rank 0 chooses the tag,
   the nonce, and whether frozen weights are written, referred to or left out. Each rank then lays out its
   files, without a round.
2. "reserving space": each rank makes ``.TAG.saving-NONCE`` and its files, reserves all their blocks, and
   looks which ranks' files it sees. Rank 0 adds up the bytes by directory. The *leader* of a directory is
   the lowest of the ranks that share it; ranks on separate disks have different leaders.
3. "writing": each rank writes, syncs and reports checksums. Rank 0 merges the reports into the manifest.
4. "completing it": each leader writes the manifest and renames the directory to ``TAG``. From then on the
   checkpoint is complete. The leader then writes ``latest``, if that is wanted, and removes checkpoints
   beyond ``keep_last``.

After round 4 rank 0 waits for all ranks once more, because its process may serve the store.

In an asynchronous save :func:`snapshot` runs after round 1: it copies this rank's bytes into host memory.
:func:`run` does rounds 2 to 4, on a thread while training goes on. An error in laying out or copying is
carried to round 2 (:class:`~zeroshard.comm.agreement.Attempt`), where all ranks raise it.

Who owns what: each element is saved by exactly one rank, the one whose shard it is in. If several shard
groups have the same part of a parameter, one of them saves it (``LocalState.counts``). A rank writes one
file with its fragments; rank 0 also writes the file of what all ranks share. A snapshot uses memory of
the caller, which must not change before :func:`run` returns. Without a snapshot, values are read from
the units in round 3.

Invariants, and what breaks without them:

* The manifest is written after every rank has reported that its files are durable. Otherwise a crash
  could leave a complete-looking checkpoint whose files lack bytes.
* A checkpoint gets its name by one rename of a directory whose content is durable. ``latest`` changes
  after that, so it never names an incomplete checkpoint. Replacing a checkpoint takes two renames;
  :mod:`zeroshard.checkpoint.directory` says what a crash between them leaves.
* Ranks agree through a :class:`~zeroshard.comm.agreement.ControlGroup`, never through a collective
  (ADR 0010). A slow disk would otherwise run into the time limit of the transport, and an asynchronous
  save would mix its collectives with those of training.
* A failure of one rank in any round is raised by all ranks as the same error, before the next round
  begins. What existed before the save is untouched.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, starmap, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroshard.checkpoint import directory as places
from zeroshard.checkpoint.blocks import BLOCK_NBYTES, BlockWriter, bytes_of, write_buffers
from zeroshard.checkpoint.boxes import Box
from zeroshard.checkpoint.local_state import LocalState, digest_part
from zeroshard.checkpoint.manifest import (
    MANIFEST,
    Dtype,
    Manifest,
    buffer_key,
    fragment_key,
    parse,
    tree_key,
)
from zeroshard.checkpoint.safetensors_file import TensorEntry, dtype_name, lay_out, stored_as
from zeroshard.checkpoint.save_decisions import (
    SHARED_FILE,
    CheckpointMetadata,
    Options,
    RankFacts,
    Reservation,
    SaveDecision,
    check_room,
    decide,
    first_frozen_plan,
    merge,
    merged,
)
from zeroshard.comm.agreement import (
    Attempt,
    ControlGroup,
    attempt,
    error_text,
    run_on_all_ranks,
)
from zeroshard.core.files import free_nbytes
from zeroshard.device.choice import ops_of
from zeroshard.device.pinned import host_bytes
from zeroshard.errors import CheckpointError, DistributedError
from zeroshard.optim.state_tree import is_keepable
from zeroshard.zero.unit import Unit

logger = logging.getLogger("zeroshard")

FAULT_POINTS = (
    "planned", "made", "reserved", "agreed", "half", "written", "collected",
    "manifest", "frozen", "aside", "committed", "latest", "pruned",
)  # fmt: skip
"""Points of a save at which a callback is called. Tests end a rank at each of them."""

_STAGING_NBYTES = 32 << 20

NO_COPIES: Attempt[Sequence[Tensor]] = Attempt(())

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


@dataclass(frozen=True, eq=False, slots=True)
class SaveTask:
    """One planned save, on one rank. Made by :func:`plan`.

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


def no_fault(_point: str) -> None:
    """A callback for :data:`FAULT_POINTS` that lets the save go on."""


def file_name(rank: int, world_size: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


# ---------------------------------------------------------------------- round 1: planning


def plan(
    root: Path,
    tag: str,
    *,
    local: LocalState,
    control_group: ControlGroup,
    metadata: Callable[[], CheckpointMetadata],
    options: Options,
    at: Callable[[str], None] = no_fault,
) -> SaveTask:
    """Agree with all ranks on what is written and by which rank.

    ``at`` is called with each of :data:`FAULT_POINTS`.

    Raises:
        CheckpointError: on every rank, with the same text.
        RankLost: another rank ended.
        RankLate: another rank did not reach the save in time.
    """
    speaks = control_group.rank == 0
    state, agreed = run_on_all_ranks(
        control_group,
        f"checkpoint {tag!r} was not saved to {root}",
        "planning it",
        lambda: _read_state(
            root, tag, local, metadata(), may_reuse=speaks and options.frozen == "once"
        ),
        say=lambda state: asdict(state.facts),
        decide=lambda said: decide([RankFacts(**part) for part in said], options),
        tell=lambda decision: asdict(replace(decision, digests={}, warnings=())),
    )
    decision = agreed if speaks else SaveDecision(**agreed)
    for warning in decision.warnings:
        logger.warning("%s", warning)
    rank, size = control_group.rank, control_group.size
    files = attempt(lambda: _lay_out_files(decision, state, local, rank, size))
    at("planned")
    return SaveTask(
        root,
        decision,
        state,
        files,
        place=root / places.saving_name(decision.tag, decision.nonce),
        frozen_place=root / places.saving_name(decision.frozen_name, decision.nonce),
        local=local,
        control_group=control_group,
        options=options,
        at=at,
    )


def _read_state(
    root: Path, tag: str, local: LocalState, metadata: CheckpointMetadata, *, may_reuse: bool
) -> RankState:
    """``may_reuse``: look what directories of frozen weights hold.

    Leftovers of interrupted saves are removed here, one round before ranks measure the free space.
    """
    if root.is_dir():
        places.remove_leftovers(root)
    frozen = [unit for unit in local.units if not unit.trainable]
    here = [path.name for path in root.glob("frozen-*")] if frozen else []
    found = {name: _find_frozen(root, name) for name in here} if may_reuse else {}
    parameters = local.descriptions(metadata.aliases)
    facts = RankFacts(
        root=str(root),
        tag=tag,
        nonce=secrets.token_hex(4),
        digests=_digest_parts(local, frozen),
        buffers={name: _crc(buffer) for name, buffer in metadata.buffers.items()},
        frozen_dtypes=_frozen_dtypes(parameters),
        frozen_here=here,
        frozen_state={name: state for name, (state, _) in found.items()},
    )
    return RankState(
        facts,
        metadata,
        rows={unit: _rows(local, unit) for unit in local.units},
        parameters=parameters,
        scalars=merged([local.scalars(unit) for unit in local.units], _numbers),
        groups=merged([local.groups(unit) for unit in local.units]),
        frozen={name: saved for name, (_, saved) in found.items() if saved is not None},
    )


def _frozen_dtypes(parameters: Mapping[str, Mapping[str, Any]]) -> dict[str, Dtype]:
    """The dtypes of parameters that are not trained, by name."""
    return {fqn: facts["dtype"] for fqn, facts in parameters.items() if not facts["trained"]}


def _find_frozen(root: Path, name: str) -> tuple[str, Manifest | None]:
    """The state of a directory of frozen weights (see :class:`RankFacts`), and a manifest to refer to."""
    saved = places.find_frozen(root, name)
    if saved is not None and saved.block_nbytes == BLOCK_NBYTES:
        return "complete", saved
    return "needed" if places.is_frozen_in_use(root, name) else "unused", None


def _rows(local: LocalState, unit: Unit) -> list[Row]:
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
    rows = {unit: _rows(local, unit) for unit in local.units}
    state = RankState(nobody, metadata, rows, parameters={}, scalars={}, groups={}, frozen={})
    has_frozen = any(not unit.trainable for unit in local.units)
    frozen = first_frozen_plan(options) if has_frozen else "none"
    decision = SaveDecision("", "", frozen, frozen_name="frozen", own_buffers=())
    return _lay_out_files(decision, state, local, rank, world_size)


def write_nbytes(files: Sequence[PlannedFile], options: Options) -> int:
    """Bytes of host memory that a rank needs to write its files, all of which are open at once."""
    sizes = (write_buffers(file.nbytes, buffers=_num_buffers(options)) for file in files)
    return sum(count * nbytes for count, nbytes in sizes)


def _num_buffers(options: Options) -> int:
    return options.max_buffer_nbytes // 4 // BLOCK_NBYTES


def _lay_out_files(
    decision: SaveDecision, state: RankState, local: LocalState, rank: int, world_size: int
) -> list[PlannedFile]:
    metadata, own_buffers = state.metadata, _own_buffers(decision, state, rank)
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


def _own_buffers(decision: SaveDecision, state: RankState, rank: int) -> list[str]:
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


# ---------------------------------------------------------------------- copying


def snapshot(task: SaveTask, take: Callable[[int], Tensor]) -> list[Tensor]:
    """Copy all bytes of this rank into host memory. ``take(nbytes)`` returns uint8 ``[nbytes]``.

    Returns the content of each file. Does not wait for other ranks.
    """
    images = []
    for file in task.files.result():
        image = take(file.nbytes)
        image[: len(file.head)].copy_(torch.frombuffer(bytearray(file.head), dtype=torch.uint8))
        for entry, values in _values(task.local, file):
            place = image[entry.offset : entry.offset + entry.nbytes]
            if values is None:
                place.zero_()
            elif entry.nbytes:
                place.view(values.dtype).copy_(values, non_blocking=True)
        images.append(image)
    for device in {unit.full_N.device for unit in task.local.units}:
        ops_of(device).synchronize()
        ops_of(device).raise_if_aborted()
    return images


# ---------------------------------------------------------------------- rounds 2 to 4: writing


def run(task: SaveTask, images: Attempt[Sequence[Tensor]] = NO_COPIES) -> Path:
    """Write the files and commit the checkpoint. Every rank calls it. Returns the directory.

    ``images``: what :func:`snapshot` returned; without it, values are read from the units.

    Raises:
        CheckpointError: on every rank, with the same text; what existed before is untouched.
        RankLost: another rank ended.
        RankLate: another rank did not reach the save in time.
    """
    group = task.control_group
    failed = f"checkpoint {task.tag!r} was not saved to {task.root}"
    with _undone_on_error(task) as open_files:
        (writers, _), leaders = run_on_all_ranks(
            group,
            failed,
            "reserving space",
            lambda: _reserve(task, images, open_files),
            say=lambda reserved: asdict(reserved[1]),
            decide=lambda said: check_room([Reservation(**part) for part in said]),
        )
        task.at("agreed")
        _, manifest = run_on_all_ranks(
            group,
            failed,
            "writing",
            lambda: _write(task, writers.result(), images.result()),
            say=lambda report: report,
            decide=lambda reports: _manifest_text(task, reports),
            tell=lambda text: text if any(leaders) else "",  # rank 0 needs it, and other leaders
        )
        task.at("collected")
        leads = leaders[group.rank] == group.rank
        run_on_all_ranks(
            group, failed, "completing it", lambda: _publish(task, manifest) if leads else None
        )
    # Rank 0 may host the store, and may end after this: wait until all ranks have the outcome.
    group.gather("", topic="finishing the save")
    return task.root / task.tag


@contextlib.contextmanager
def _undone_on_error(task: SaveTask) -> Iterator[contextlib.ExitStack]:
    """A stack for open files. After an error the directories that this save has made are removed.

    They stay if ranks are lost: others may still write into them.
    """
    with contextlib.ExitStack() as open_files:
        try:
            yield open_files
        except BaseException as error:
            open_files.close()
            for place in () if isinstance(error, DistributedError) else _places(task):
                shutil.rmtree(place, ignore_errors=True)
            raise


def _places(task: SaveTask) -> set[Path]:
    return {_path(task, file).parent for file in task.files.value or ()}


def _path(task: SaveTask, file: PlannedFile) -> Path:
    """Where a file is until the save is complete."""
    folder, _, leaf = file.name.rpartition("/")
    return (task.frozen_place if folder else task.place) / leaf


def _reserve(
    task: SaveTask, images: Attempt[Sequence[Tensor]], open_files: contextlib.ExitStack
) -> tuple[Attempt[list[BlockWriter]], Reservation]:
    """Make this rank's files, reserve their blocks, then look whose files are there."""
    images.result()  # raises the error of laying out or of copying
    files = task.files.result()
    for place in _places(task):
        places.begin(task.root, place.name)
    task.at("made")
    free = free_nbytes(task.root)
    writers = attempt(lambda: [open_files.enter_context(_writer(task, file)) for file in files])
    task.at("reserved")
    world_size = task.control_group.size
    there = set(os.listdir(task.place))
    return writers, Reservation(
        root=str(task.root),
        nbytes=task.nbytes,
        free_nbytes=free,
        sees=[rank for rank in range(world_size) if file_name(rank, world_size) in there],
        failed="" if writers.error is None else error_text(writers.error),
    )


def _writer(task: SaveTask, file: PlannedFile) -> contextlib.AbstractContextManager[BlockWriter]:
    buffers = _num_buffers(task.options)
    return contextlib.closing(BlockWriter(_path(task, file), file.nbytes, buffers=buffers))


def _write(
    task: SaveTask, writers: Sequence[BlockWriter], images: Sequence[Tensor]
) -> dict[str, Any]:
    """Write this rank's files and make them durable. Returns its report for the manifest."""
    files = []
    for file, writer, image in zip_longest(task.files.result(), writers, images):
        done = 0
        for data in _bytes(task, file, image):
            writer.write(data)
            if done < file.nbytes / 2 <= done + len(data):
                task.at("half")
            done += len(data)
        crcs = writer.finish()
        files.append({"name": file.name, "nbytes": file.nbytes, "crc32": crcs, "rows": file.rows})
    task.at("written")
    state = task.state
    buffers = state.metadata.buffers
    return {
        "files": files,
        "parameters": state.parameters,
        "buffers": {
            name: [
                dtype_name(buffers[name].dtype, where=f"buffer {name!r}"),
                list(buffers[name].shape),
            ]
            for name in _own_buffers(task.decision, state, task.control_group.rank)
        },
        "tree": state.metadata.own,
        "scalars": state.scalars,
        "groups": state.groups,
    }


def _manifest_text(task: SaveTask, reports: Sequence[Mapping[str, Any]]) -> str:
    """The manifest, made from all ranks' reports. Its text is parsed, to check it."""
    decision = task.decision
    reused = task.state.frozen[decision.frozen_name] if decision.frozen == "reuse" else None
    text = merge(
        reports,
        metadata=task.state.metadata,
        decision=decision,
        reused=reused,
        block_nbytes=BLOCK_NBYTES,
    ).dump()
    parse(text, where=MANIFEST)
    return text


def _publish(task: SaveTask, manifest: str) -> None:
    """On a leader: write the manifest, and give the directory its name."""
    root, metadata = task.root, task.state.metadata
    places.write_durably(task.place / MANIFEST, manifest)
    task.at("manifest")
    if task.frozen_place.exists():
        places.commit(task.frozen_place, root / task.decision.frozen_name)
        task.at("frozen")
    places.commit(task.place, root / task.tag, lambda: task.at("aside"))
    task.at("committed")
    if metadata.save_latest:
        places.write_durably(root / places.LATEST, task.tag)
        if metadata.script:
            places.write_durably(root / places.SCRIPT, metadata.script)
    task.at("latest")
    if task.options.keep_last is not None:
        try:
            places.prune(root, task.options.keep_last)
        except OSError as error:  # the save itself is complete
            logger.warning("older checkpoints in %s are not removed: %s", root, error)
    task.at("pruned")


# ---------------------------------------------------------------------- bytes


def _bytes(task: SaveTask, file: PlannedFile, image: Tensor | None) -> Iterator[memoryview]:
    """The file from start to end. Each part is valid until the next one."""
    if image is not None:
        yield bytes_of(image)
        return
    yield memoryview(file.head)
    staging = None
    for entry, values in _values(task.local, file):
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


def _values(local: LocalState, file: PlannedFile) -> Iterator[tuple[TensorEntry, Tensor | None]]:
    """Each entry and its values, in the order of the file. None: padding, to be written as zeros."""
    values = chain(
        (p.values for unit in file.units for p in local.visit(unit)),
        (t.detach().contiguous() for t in file.extras.values()),
    )
    for entry in file.entries:
        yield entry, None if entry.key.startswith("pad:") else next(values).view(-1)
    for _ in values:
        raise AssertionError("there is more to save than was planned")


def _digest_parts(local: LocalState, units: Iterable[Unit]) -> dict[str, int]:
    parts: dict[str, int] = {}
    for unit in units:
        for piece in local.visit(unit):
            parts[piece.fqn] = parts.get(piece.fqn, 0) + digest_part(piece)
    return parts


def _crc(tensor: Tensor) -> int:
    return zlib.crc32(bytes_of(tensor.detach().cpu().contiguous()))


def _numbers(row: Mapping[str, object]) -> dict[str, tuple[str, float | int | bool]]:
    """The optimizer's single numbers of one parameter, with their dtypes, as the manifest has them."""
    found: dict[str, tuple[str, float | int | bool]] = {}
    for name, value in row.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            found[name] = dtype_name(value.dtype, where=f"state {name!r}"), value.item()
        elif isinstance(value, bool | int | float):
            found[name] = "number", value
        elif not is_keepable(name, value):
            raise CheckpointError(
                f"the optimizer keeps {name!r} as a "
                f"{type(value).__name__}{list(value.shape) if isinstance(value, Tensor) else ''}: "
                "it does not have the parameter's shape and is not a number, so it cannot be "
                "sharded. Save it in client_state."
            )
        if name in found and not math.isfinite(found[name][1]):
            raise CheckpointError(f"the optimizer's {name!r} is {found[name][1]}: it has diverged.")
    return found
