"""Fetches checkpoint files that only the disk of another node has.

Without a shared file system each node keeps what its ranks wrote. Loading with the same ranks on the same
nodes needs nothing else. Otherwise a rank that has a missing file sends it block by block, and the
receiver keeps it.
"""

from __future__ import annotations

import hashlib
import logging
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from zeroshard.checkpoint.blocks import BlockFile, BlockWriter, bytes_of
from zeroshard.checkpoint.directory import write_durably
from zeroshard.checkpoint.manifest import MANIFEST, Manifest, SavedFile
from zeroshard.checkpoint.reader import CheckpointReader, manifest_bytes
from zeroshard.comm.agreement import ControlGroup, run_on_all_ranks
from zeroshard.comm.collectives import Comm
from zeroshard.errors import CheckpointError

logger = logging.getLogger("zeroshard")


def fetch_missing(
    path: Path,
    comm: Comm,
    control_group: ControlGroup,
    failed: str,
    *,
    needs: Callable[[Manifest], set[int]],
    device: torch.device,
) -> None:
    """Make every file that this rank ``needs`` visible to it, at its full size. Collective.

    Does nothing for directories of other formats. ``needs(manifest)``: the indices of these files in the
    manifest. ``failed``: begins the text of an error.

    Raises:
        CheckpointError: on every rank: no rank has a file, or ranks have manifests of different saves.
    """
    text, is_ours = _agree_on_manifest(path, control_group, failed)
    if not is_ours:
        return
    manifest, missing = _find_missing(path, text, control_group, failed, needs)
    if not missing:
        return
    holders = _find_holders(path, missing, control_group, failed)
    if control_group.rank == 0:
        nbytes = sum(manifest.files[at].nbytes for at in holders)
        logger.info(
            "%s: %d files (%s bytes) are not on every disk, so ranks send them to each other",
            path,
            len(holders),
            f"{nbytes:,}",
        )
    for at, holder in holders.items():
        file = manifest.files[at]
        problem = _send(path, file, manifest.block_nbytes, holder, comm, device)

        def report(problem: str = problem) -> None:
            if problem:
                raise CheckpointError(problem)

        run_on_all_ranks(control_group, failed, f"sending {file.name}", report)


def _agree_on_manifest(path: Path, control_group: ControlGroup, failed: str) -> tuple[str, bool]:
    """The manifest's text ("" if every rank has the file), and whether the directory is in our format."""

    def judge(shas: list[str]) -> tuple[str, bool]:
        others = [rank for rank, sha in enumerate(shas) if sha and sha != shas[0]]
        if shas[0] and others:
            raise CheckpointError(
                f"{path / MANIFEST} on rank {others[0]} belongs to another save than on rank 0: the "
                "directories are not shared, and contain different runs."
            )
        text = "" if all(shas) or not shas[0] else manifest_bytes(path).decode()
        return text, bool(shas[0])

    _, (text, is_ours) = run_on_all_ranks(
        control_group,
        failed,
        "reading the manifest",
        lambda: manifest_bytes(path),
        say=lambda text: hashlib.sha256(text).hexdigest() if text else "",
        decide=judge,
    )
    return text, is_ours


def _find_missing(
    path: Path,
    text: str,
    control_group: ControlGroup,
    failed: str,
    needs: Callable[[Manifest], set[int]],
) -> tuple[Manifest, dict[int, str]]:
    """The manifest, and the files that some rank needs and does not see: their index -> the reason.

    Writes the manifest where it is missing.
    """

    def look() -> tuple[Manifest, dict[int, str]]:
        if text and not (path / MANIFEST).exists():
            path.mkdir(parents=True, exist_ok=True)
            write_durably(path / MANIFEST, text)
        with CheckpointReader(path) as saved:
            return saved.manifest, saved.problems(needs(saved.manifest))

    (manifest, _), missing = run_on_all_ranks(
        control_group,
        failed,
        "looking for its files",
        look,
        say=lambda own: own[1],
        decide=lambda parts: {at: why for part in parts for at, why in part.items()},
    )
    return manifest, {int(at): why for at, why in missing.items()}


def _find_holders(
    path: Path, missing: Mapping[int, str], control_group: ControlGroup, failed: str
) -> dict[int, int]:
    """For each missing file the lowest rank that has it."""

    def look() -> list[int]:
        with CheckpointReader(path) as saved:
            return sorted(missing.keys() - saved.problems(missing).keys())

    def choose(parts: list[list[int]]) -> dict[int, int]:
        found: dict[int, int] = {}
        for at, why in missing.items():
            having = [rank for rank, part in enumerate(parts) if at in part]
            if not having:
                raise CheckpointError(why)
            found[at] = having[0]
        return found

    _, holders = run_on_all_ranks(
        control_group, failed, "looking for its files", look, say=lambda own: own, decide=choose
    )
    return {int(at): int(rank) for at, rank in holders.items()}


def _send(
    path: Path, file: SavedFile, block_nbytes: int, holder: int, comm: Comm, device: torch.device
) -> str:
    """Send one file. Every rank takes part until the end. Returns the first problem, or ""."""
    problems: list[str] = []
    target = path / file.name
    source: BlockFile | None = None
    writer: BlockWriter | None = None
    fresh = target.with_name(f".{target.name}.from-{holder}-to-{comm.rank}")
    with _noted(problems):
        if comm.rank == holder:
            source = BlockFile(target, file.nbytes, file.crc32, block_nbytes=block_nbytes)
        elif not target.exists() or target.stat().st_size != file.nbytes:
            target.parent.mkdir(parents=True, exist_ok=True)
            fresh.unlink(missing_ok=True)
            writer = BlockWriter(fresh, file.nbytes)
    host = torch.empty(min(block_nbytes, file.nbytes), dtype=torch.uint8)
    for block, begin in enumerate(range(0, file.nbytes, block_nbytes)):
        part = host[: file.nbytes - begin]
        if source is not None and not problems:  # else it is sent as it is, and no rank keeps it
            with _noted(problems):
                source.read(begin, bytes_of(part))
        moving = part.to(device)
        comm.broadcast(moving, holder, name=f"checkpoint file {target.name}").wait()
        part.copy_(moving)
        if writer is not None and not problems:
            with _noted(problems):
                if zlib.crc32(bytes_of(part)) != file.crc32[block]:
                    raise CheckpointError(
                        f"{target} was damaged when it arrived from rank {holder}."
                    )
                writer.write(bytes_of(part))
    if source is not None:
        source.close()
    if writer is not None:
        with _noted(problems):
            _finish(writer, fresh, target, is_complete=not problems)
    return problems[0] if problems else ""


def _finish(writer: BlockWriter, fresh: Path, target: Path, *, is_complete: bool) -> None:
    """Put a complete file in its place, or remove what was written of it."""
    try:
        if is_complete:
            writer.finish()
            fresh.replace(target)
    finally:
        writer.close()
        fresh.unlink(missing_ok=True)


@contextmanager
def _noted(problems: list[str]) -> Iterator[None]:
    """A context that notes an error of files instead of raising it."""
    try:
        yield
    except (CheckpointError, OSError) as error:
        problems.append(str(error))
