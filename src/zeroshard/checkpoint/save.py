"""Writes one checkpoint with all ranks, so that it exists as a whole or not at all.

[Note: phases of a save]
A save is one :class:`SaveTask` on each rank, in seven rounds. A *round* is one call of
:func:`~zeroshard.checkpoint.all_ranks.run_on_all_ranks`, in which every rank acts, rank 0 decides, and
all ranks get the decision. The *leader* is the lowest rank that sees the same directory as this rank;
ranks on separate disks have different leaders.

1. "planning it" (:func:`plan`): ranks report tag, path, digests and buffers. Rank 0 chooses the tag, the
   nonce, and whether frozen weights are written, referred to or left out.
2. "laying out its files": each rank fixes the header and the entries of its files.
3. "making the directory": each rank makes ``.TAG.saving-NONCE`` and its files, empty.
4. "looking for each other's files": each rank finds its leader. Rank 0 adds up the bytes by leader.
5. "reserving space": each rank checks the free space and reserves all blocks of its files.
6. "writing": each rank writes, syncs and reports checksums. Rank 0 merges the reports into the manifest.
7. "completing it": each leader writes the manifest and renames the directory to ``TAG``.

In an asynchronous save :meth:`SaveTask.snapshot` runs after round 2: it copies this rank's bytes into
host memory. :meth:`SaveTask.run` does rounds 3 to 7, on a thread while training goes on.

Who owns what: each element is saved by exactly one rank, the one whose shard it is in. A rank writes one
file with its fragments; rank 0 also writes the file of what all ranks share. A snapshot uses memory of
the caller, which must not change before :meth:`SaveTask.run` returns. Without a snapshot, values are read
from the units in round 6.

Invariants, and what breaks without them:

* The manifest is written after every rank has reported that its files are durable. Otherwise a crash
  could leave a complete-looking checkpoint whose files lack bytes.
* A checkpoint gets its name by one rename of a directory whose content is durable. ``latest`` changes
  after that, so it never names an incomplete checkpoint. Replacing a checkpoint takes two renames;
  :mod:`zeroshard.checkpoint.directory` says what a crash between them leaves.
* Ranks agree through a :class:`~zeroshard.comm.control_group.ControlGroup`, never through a collective
  (ADR 0010). A slow disk would otherwise run into the time limit of the transport, and an asynchronous
  save would mix its collectives with those of training.
* A failure of one rank in any round is raised by all ranks as the same error, before the next round
  begins. What existed before the save is untouched.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroshard.checkpoint import directory as places
from zeroshard.checkpoint.all_ranks import run_on_all_ranks
from zeroshard.checkpoint.blocks import BLOCK_NBYTES, BlockWriter, bytes_of
from zeroshard.checkpoint.local_state import LocalState, digest_part, total_digests
from zeroshard.checkpoint.manifest import (
    MANIFEST,
    Digest,
    Dtype,
    Manifest,
    buffer_key,
    fragment_key,
    parse,
    tree_key,
)
from zeroshard.checkpoint.merge import SHARED_FILE, CheckpointMetadata, merge, merged
from zeroshard.checkpoint.safetensors_file import Entry, dtype_name, lay_out
from zeroshard.comm.control_group import ControlGroup
from zeroshard.core.files import free_nbytes
from zeroshard.errors import CheckpointError, DistributedError
from zeroshard.memory.pages import aligned_bytes
from zeroshard.zero.unit import Unit

logger = logging.getLogger("zeroshard")

FAULT_POINTS = (
    "planned", "made", "reserved", "half", "written", "collected",
    "manifest", "frozen", "aside", "committed", "latest", "pruned",
)  # fmt: skip
"""Points of a save at which a callback is called. Tests end a rank at each of them."""

_STAGING_NBYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Options:
    """The part of the configuration's ``checkpoint`` section that saving needs."""

    frozen: str = "once"
    keep_last: int | None = None
    max_buffer_nbytes: int = 512 << 20
    tag_validation: str = "warn"


@dataclass(eq=False, slots=True)
class _File:
    """One file that this rank writes. ``rows``: ``(fqn, tensor, dtype, begin, numel)`` in file order."""

    name: str  # as in the manifest
    units: list[Unit]
    extras: dict[str, Tensor]
    head: bytes
    entries: list[Entry]
    rows: list[tuple[str, str, Dtype, int, int]]
    image: Tensor | None = None  # uint8 [nbytes], the content of the file, after a snapshot

    @property
    def nbytes(self) -> int:
        return max([len(self.head), *(e.offset + e.nbytes for e in self.entries[-1:])])


def _planned(name: str, local: LocalState, units: list[Unit], extras: dict[str, Tensor]) -> _File:
    rows = [
        (
            p.fqn,
            p.tensor,
            dtype_name(p.dtype, where=f"{p.tensor} of {p.fqn!r}"),
            p.begin,
            p.numel,
        )
        for unit in units
        for p in local.pieces(unit)
    ]
    entries = [
        Entry(fragment_key(f, t, begin), dtype, (numel,)) for f, t, dtype, begin, numel in rows
    ]
    entries += [
        Entry(key, dtype_name(tensor.dtype, where=key), tuple(tensor.shape))
        for key, tensor in extras.items()
    ]
    return _File(name, units, extras, *lay_out(entries), rows)


def file_name(rank: int, world_size: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


class SaveTask:
    """One save, on one rank. Made by :func:`plan`."""

    def __init__(
        self,
        root: Path,
        decision: Mapping[str, Any],
        *,
        local: LocalState,
        control_group: ControlGroup,
        facts: CheckpointMetadata,
        options: Options,
        at: Callable[[str], None],
    ) -> None:
        self.root = root
        self.tag: str = decision["tag"]
        self._control_group = control_group
        self._local = local
        self._facts = facts
        self._options = options
        self._at = at
        self._digests: dict[str, Digest] = decision.get("digests", {})
        self._reused: Manifest | None = decision.get("reused")
        self._place = root / places.saving_name(self.tag, decision["nonce"])
        self._frozen_name: str = decision["frozen_name"]
        self._frozen_place = root / places.saving_name(self._frozen_name, decision["nonce"])
        own_buffers = set(decision["own_buffers"])
        me = file_name(control_group.rank, control_group.world_size)
        extras = {tree_key(f"rank/{name}"): t for name, t in facts.own_tensors.items()}
        extras |= {buffer_key(name): facts.buffers[name] for name in own_buffers}
        self._own_buffers = own_buffers
        self._frozen: str = decision["frozen"]
        frozen = [unit for unit in local.units if not unit.trainable]
        with_it = [] if self._frozen != "here" else frozen
        trained = [unit for unit in local.units if unit.trainable]
        self._files = [_planned(me, local, [*trained, *with_it], extras)]
        if control_group.rank == 0:  # what every rank reads is kept apart from shards
            common = {tree_key(f"shared/{name}"): t for name, t in facts.shared_tensors.items()}
            for name, buffer in facts.buffers.items():
                if name not in own_buffers:
                    common[buffer_key(name)] = buffer
            self._files.append(_planned(SHARED_FILE, local, [], common))
        if self._frozen == "write":
            self._files.append(_planned(f"../{self._frozen_name}/{me}", local, frozen, {}))
        self._scalars = merged(map(local.scalars, local.units), _numbers)  # training changes them
        self._leader = 0  # the lowest rank that sees the same directory as this one
        self._text = ""  # the manifest, on rank 0
        self._writers: list[BlockWriter] = []
        self._failure: Exception | None = None  # of the snapshot

    @property
    def nbytes(self) -> int:
        """Bytes that this rank writes."""
        return sum(file.nbytes for file in self._files)

    # ------------------------------------------------------------------ copying, or writing at once

    def snapshot(self, take: Callable[[int], Tensor]) -> None:
        """Copy all bytes of this rank into host memory. ``take(nbytes)`` returns uint8 ``[nbytes]``.

        Does not wait for other ranks. An error is kept, and :meth:`run` raises it on all ranks.
        """
        try:
            self._copy(take)
        except Exception as error:
            self._failure = error

    def _copy(self, take: Callable[[int], Tensor]) -> None:
        for file in self._files:
            image = take(file.nbytes)
            image[: len(file.head)].copy_(torch.frombuffer(bytearray(file.head), dtype=torch.uint8))
            for entry, values in self._values(file):
                place = image[entry.offset : entry.offset + entry.nbytes]
                if values is None:
                    place.zero_()
                elif entry.nbytes:
                    place.view(values.dtype).copy_(values, non_blocking=True)
            file.image = image
        if any(unit.full_N.is_cuda for unit in self._local.units):
            torch.cuda.synchronize()

    def run(self) -> Path:
        """Write the files and commit the checkpoint. Every rank calls it. Returns the directory.

        Raises:
            CheckpointError: on every rank, with the same text; what existed before is untouched.
            RankLost: another rank ended.
            RankLate: another rank did not reach the save in time.
        """
        try:
            self._agree("making the directory", self._make)
            self._at("made")
            room = self._agree("looking for each other's files", self._find_leader, _room_by_leader)
            self._agree("reserving space", lambda: self._reserve(room["wanted"]))
            self._at("reserved")
            written = self._agree("writing", self._write, self._merge)
            self._at("collected")
            self._agree(
                "completing it", lambda: self._publish(self._text or written.get("manifest", ""))
            )
        except BaseException as error:
            self._abandon(keep=isinstance(error, DistributedError))
            raise
        # Rank 0 may host the store, and may end after this: wait until all ranks have the outcome.
        self._control_group.gather("", topic="ending the save")
        return self.root / self.tag

    # ------------------------------------------------------------------ steps

    def _agree(
        self,
        topic: str,
        act: Callable[[], dict[str, Any] | None],
        decide: Callable[[list[dict[str, Any]]], dict[str, Any]] = lambda _said: {},
    ) -> dict[str, Any]:
        failed = f"checkpoint {self.tag!r} was not saved to {self.root}"
        return run_on_all_ranks(self._control_group, failed, topic, act, decide)

    def _make(self) -> None:
        if self._failure is not None:
            raise self._failure
        for place in {self._path(file).parent for file in self._files}:
            places.begin(self.root, place.name, nonce=place.name[-8:])
        for file in self._files:
            self._path(file).touch()

    def _find_leader(self) -> dict[str, Any]:
        world_size = self._control_group.world_size
        self._leader = next(
            rank
            for rank in range(self._control_group.rank + 1)
            if (self._place / file_name(rank, world_size)).exists()
        )
        return {"leader": self._leader, "nbytes": self.nbytes}

    def _reserve(self, wanted: Mapping[str, int]) -> None:
        need, free = wanted.get(str(self._control_group.rank), 0), free_nbytes(self.root)
        if need > free:
            raise CheckpointError(
                f"{self.root} has {free:,} bytes free, and this checkpoint needs {need:,}. Make room, "
                'keep fewer ("checkpoint": {"keep_last": N}), or save elsewhere.'
            )
        for file in self._files:
            self._path(file).unlink()
            self._writers.append(
                BlockWriter(
                    self._path(file),
                    file.nbytes,
                    buffers=self._options.max_buffer_nbytes // 4 // BLOCK_NBYTES,
                )
            )

    def _write(self) -> dict[str, Any]:
        said = []
        for file, writer in zip(self._files, self._writers, strict=True):
            done = 0
            for data in self._bytes(file):
                writer.write(data)
                if done < file.nbytes / 2 <= done + len(data):
                    self._at("half")
                done += len(data)
            said.append(
                {
                    "name": file.name,
                    "nbytes": file.nbytes,
                    "crc32": writer.finish(),
                    "rows": file.rows,
                }
            )
        self._at("written")
        return {
            "leader": self._leader,
            "files": said,
            "tree": self._facts.own,
            "own_buffers": sorted(self._own_buffers),
            "scalars": self._scalars,
            "groups": merged(map(self._local.groups, self._local.units)),
        }

    def _publish(self, text: str) -> None:
        """On the leader: write the manifest and rename. On other ranks: nothing."""
        if self._leader != self._control_group.rank:
            return
        places.write_durably(self._place / MANIFEST, text)
        self._at("manifest")
        if self._frozen_place.exists():
            places.commit(self._frozen_place, self.root / self._frozen_name)
            self._at("frozen")
        places.commit(self._place, self.root / self.tag, lambda: self._at("aside"))
        self._at("committed")
        if self._facts.save_latest:
            places.write_durably(self.root / places.LATEST, self.tag)
            if self._facts.script:
                places.write_durably(self.root / places.SCRIPT, self._facts.script)
        self._at("latest")
        if self._options.keep_last is not None:
            try:
                places.prune(self.root, self._options.keep_last)
            except OSError as error:  # the save itself is complete
                logger.warning("older checkpoints of %s stay: %s", self.root, error)
        self._at("pruned")

    def _abandon(self, *, keep: bool) -> None:
        """The save failed. ``keep``: ranks are lost, and others may still write into the directory."""
        for writer in self._writers:
            writer.close()
        for place in {self._path(file).parent for file in self._files} if not keep else ():
            shutil.rmtree(place, ignore_errors=True)

    def _path(self, file: _File) -> Path:
        leaf = Path(file.name).name
        return (self._frozen_place if file.name.startswith("../") else self._place) / leaf

    # ------------------------------------------------------------------ bytes

    def _bytes(self, file: _File) -> Iterator[memoryview]:
        """The file from start to end. Each part is valid until the next one."""
        if file.image is not None:
            yield bytes_of(file.image)
            return
        yield memoryview(file.head)
        staging = None
        for entry, values in self._values(file):
            if values is None:
                yield memoryview(bytes(entry.nbytes))
            elif values.device.type == "cpu":
                yield bytes_of(values)
            else:
                if staging is None:
                    staging = _staging(min(_STAGING_NBYTES, self._options.max_buffer_nbytes // 4))
                whole = staging.view(values.dtype)
                for part in values.split(whole.numel()):
                    whole[: part.numel()].copy_(part)
                    yield bytes_of(whole[: part.numel()])

    def _values(self, file: _File) -> Iterator[tuple[Entry, Tensor | None]]:
        """Each entry and its values, in the order of the file. None: padding, to be written as zeros."""
        values = chain(
            (p.values for unit in file.units for p in self._local.visit(unit)),
            (t.detach().contiguous() for t in file.extras.values()),
        )
        for entry in file.entries:
            yield entry, None if entry.key.startswith("pad:") else next(values).view(-1)
        for _ in values:
            raise AssertionError("there is more to save than was planned")

    def _merge(self, said: list[dict[str, Any]]) -> dict[str, Any]:
        """On rank 0: make the manifest from all ranks' reports, and parse its text to check it."""
        manifest = merge(
            said,
            units=self._local.units,
            trained=[unit for unit in self._local.units if self._local.shard_of(unit) is not None],
            facts=self._facts,
            frozen=self._frozen,
            reused=(self._reused, self._frozen_name),
            digests=self._digests,
            tag=self.tag,
            block_nbytes=BLOCK_NBYTES,
        )
        self._text = manifest.dump()
        parse(self._text, where=MANIFEST)
        return {"manifest": self._text} if any(part["leader"] for part in said) else {}


def plan(
    root: Path,
    tag: str,
    *,
    local: LocalState,
    control_group: ControlGroup,
    facts: Callable[[], CheckpointMetadata],
    options: Options,
    at: Callable[[str], None] = lambda _point: None,
) -> SaveTask:
    """Agree with all ranks on what is written and by which rank.

    ``at`` is called with each of :data:`FAULT_POINTS`.

    Raises:
        CheckpointError: on every rank, with the same text.
        RankLost: another rank ended.
        RankLate: another rank did not reach the save in time.
    """
    kept: dict[str, Any] = {}  # decisions that only rank 0 needs

    made: list[CheckpointMetadata] = []

    def own_facts() -> dict[str, Any]:
        made.append(facts())
        frozen = [unit for unit in local.units if not unit.trainable]
        return {
            "root": str(root),
            "tag": tag,
            "digests": _digest_parts(local, frozen),
            "buffers": {name: _crc(buffer) for name, buffer in made[0].buffers.items()},
            "frozen_here": [path.name for path in root.glob("frozen-*")],
        }

    def decide(said: list[dict[str, Any]]) -> dict[str, Any]:
        names, roots = {part["tag"] for part in said}, {part["root"] for part in said}
        if len(roots) > 1:
            logger.warning(
                "ranks save to different directories (%s): each gets the files of its own ranks. That "
                "is for disks that nodes do not share; else give every rank the same path.",
                ", ".join(sorted(roots)[:3]) + (", ..." if len(roots) > 3 else ""),
            )
        if len(names) > 1 and options.tag_validation == "fail":
            listed = ", ".join(f"{part['tag']!r} on rank {r}" for r, part in enumerate(said))
            raise CheckpointError(f"ranks save under different tags: {listed}.")
        kept["digests"] = digests = _total_digests(local, (part["digests"] for part in said))
        summary = json.dumps({fqn: d.model_dump() for fqn, d in sorted(digests.items())})
        name = f"frozen-{hashlib.sha256(summary.encode()).hexdigest()[:16]}"
        how = {"always": "here", "reference": "none", "once": "write"}[options.frozen]
        if made[0].exclude_frozen or not digests:
            how = "none"
        if how == "write" and any(name in part["frozen_here"] for part in said):
            everywhere = all(name in part["frozen_here"] for part in said)
            before = places.find_frozen(root, name) if everywhere else None
            if before is not None and before.block_nbytes == BLOCK_NBYTES:
                how, kept["reused"] = "reuse", before
            elif not everywhere or places.is_frozen_in_use(root, name):
                how = "here"  # replacing it would break the checkpoints that need it
        first = said[0]["buffers"]
        return {
            "tag": said[0]["tag"],
            "tags": sorted(names),
            "nonce": secrets.token_hex(4),
            "frozen": how,
            "frozen_name": name,
            "own_buffers": [
                buffer
                for buffer, crc in first.items()
                if any(part["buffers"].get(buffer) != crc for part in said)
            ],
        }

    failed = f"checkpoint {tag!r} was not saved to {root}"
    decision = run_on_all_ranks(control_group, failed, "planning it", own_facts, decide)
    if len(decision["tags"]) > 1 and options.tag_validation == "warn" and control_group.rank == 0:
        logger.warning(
            "ranks save under different tags (%s): rank 0's is used", ", ".join(decision["tags"])
        )
    jobs: list[SaveTask] = []

    def make() -> None:
        jobs.append(
            SaveTask(
                root,
                {**decision, **kept},
                local=local,
                control_group=control_group,
                facts=made[0],
                options=options,
                at=at,
            )
        )

    run_on_all_ranks(control_group, failed, "laying out its files", make)
    at("planned")
    return jobs[0]


def _room_by_leader(said: list[dict[str, Any]]) -> dict[str, Any]:
    wanted: dict[str, int] = {}
    for part in said:
        leader = str(part["leader"])
        wanted[leader] = wanted.get(leader, 0) + part["nbytes"]
    return {"wanted": wanted}


def _digest_parts(local: LocalState, units: Iterable[Unit]) -> dict[str, int]:
    parts: dict[str, int] = {}
    for unit in units:
        for piece in local.visit(unit):
            parts[piece.fqn] = parts.get(piece.fqn, 0) + digest_part(piece)
    return parts


def _total_digests(local: LocalState, parts: Iterable[Mapping[str, int]]) -> dict[str, Digest]:
    totals = total_digests(parts)
    return {
        slot.fqn: Digest(
            dtype=dtype_name(unit.row.param, where=slot.fqn), sum=totals.get(slot.fqn, "0" * 16)
        )
        for unit in local.units
        if not unit.trainable
        for slot in unit.layout.slots
    }


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
        elif value is not None:
            raise CheckpointError(
                f"the optimizer keeps {name!r} as a {type(value).__name__}"
                f"{list(value.shape) if isinstance(value, Tensor) else ''}: neither of the parameter's "
                "shape nor a number, so it cannot be cut for other ranks. Save it in client_state."
            )
        if name in found and not math.isfinite(found[name][1]):
            raise CheckpointError(f"the optimizer's {name!r} is {found[name][1]}: it has diverged.")
    return found


def _staging(nbytes: int) -> Tensor:
    """Host memory ``[nbytes]`` that a GPU copies into; pinned where CUDA is available."""
    nbytes -= nbytes % 64
    if torch.cuda.is_available():
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return aligned_bytes(nbytes)
