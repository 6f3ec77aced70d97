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
from dataclasses import asdict, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroshard.checkpoint import directory as places
from zeroshard.checkpoint.blocks import BLOCK_NBYTES, BlockWriter, bytes_of
from zeroshard.checkpoint.local_state import LocalState, digest_part
from zeroshard.checkpoint.manifest import MANIFEST, Dtype, Manifest, dtype_name, parse
from zeroshard.checkpoint.save_decisions import (
    CheckpointMetadata,
    Options,
    RankFacts,
    Reservation,
    SaveDecision,
    check_room,
    decide,
    described,
    merge,
    merged,
)
from zeroshard.checkpoint.save_layout import (
    PlannedFile,
    RankState,
    SaveTask,
    buffers_of_rank,
    bytes_of_file,
    file_name,
    lay_out_files,
    num_buffers,
    rows_of,
    values_of,
)
from zeroshard.comm.agreement import Attempt, ControlGroup, attempt, error_text, run_on_all_ranks
from zeroshard.core.files import free_nbytes
from zeroshard.device.choice import ops_of
from zeroshard.errors import CheckpointError, DistributedError
from zeroshard.optim.state_tree import is_keepable
from zeroshard.zero.unit import Unit

logger = logging.getLogger("zeroshard")

FAULT_POINTS = (
    "planned", "made", "reserved", "agreed", "half", "written", "collected",
    "manifest", "frozen", "aside", "committed", "latest", "pruned",
)  # fmt: skip
"""Points of a save at which a callback is called. Tests end a rank at each of them."""


NO_COPIES: Attempt[Sequence[Tensor]] = Attempt(())


def no_fault(_point: str) -> None:
    """A callback for :data:`FAULT_POINTS` that lets the save go on."""


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
    files = attempt(lambda: lay_out_files(decision, state, local, rank, size))
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
        rows={unit: rows_of(local, unit) for unit in local.units},
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


# ---------------------------------------------------------------------- copying


def snapshot(task: SaveTask, take: Callable[[int], Tensor]) -> list[Tensor]:
    """Copy all bytes of this rank into host memory. ``take(nbytes)`` returns uint8 ``[nbytes]``.

    Returns the content of each file. Does not wait for other ranks.
    """
    images = []
    for file in task.files.result():
        image = take(file.nbytes)
        image[: len(file.head)].copy_(torch.frombuffer(bytearray(file.head), dtype=torch.uint8))
        for entry, values in values_of(task.local, file):
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
    buffers = num_buffers(task.options)

    def opened(file: PlannedFile) -> BlockWriter:
        writer = BlockWriter(_path(task, file), file.nbytes, buffers=buffers)
        return open_files.enter_context(contextlib.closing(writer))

    writers = attempt(lambda: list(map(opened, files)))
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


def _write(
    task: SaveTask, writers: Sequence[BlockWriter], images: Sequence[Tensor]
) -> dict[str, Any]:
    """Write this rank's files and make them durable. Returns its report for the manifest."""
    files = []
    for file, writer, image in zip_longest(task.files.result(), writers, images):
        done = 0
        for data in bytes_of_file(task, file, image):
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
        "buffers": described(
            {n: buffers[n] for n in buffers_of_rank(task.decision, state, task.control_group.rank)}
        ),
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


# ---------------------------------------------------------------------- what is reported


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
