"""Fetches checkpoint files that only the disk of another node has.

Without a shared file system each node keeps what its ranks wrote. Loading with the same ranks on the same
nodes needs nothing else. Otherwise a rank that has a missing file sends it block by block, and the
receiver keeps it.
"""

from __future__ import annotations

import hashlib
import logging
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint.all_ranks import run_on_all_ranks
from zeroshard.checkpoint.blocks import BlockFile, BlockWriter, bytes_of
from zeroshard.checkpoint.directory import write_durably
from zeroshard.checkpoint.manifest import MANIFEST, Manifest, SavedFile
from zeroshard.checkpoint.reader import CheckpointReader, manifest_bytes
from zeroshard.comm.collectives import Comm
from zeroshard.comm.control_group import ControlGroup
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
    manifest = path / MANIFEST

    def own_manifest() -> dict[str, Any]:
        text = manifest_bytes(path)
        return {"sha256": hashlib.sha256(text).hexdigest() if text else ""}

    def judge_manifests(said: list[dict[str, Any]]) -> dict[str, Any]:
        shas = [part["sha256"] for part in said]
        if not shas[0]:
            return {"is_ours": False}
        others = [rank for rank, sha in enumerate(shas) if sha and sha != shas[0]]
        if others:
            raise CheckpointError(
                f"{manifest} is of another save on rank {others[0]} than on rank 0: their directories "
                "are not shared, and hold different runs."
            )
        return {"is_ours": True, "text": "" if all(shas) else manifest_bytes(path).decode()}

    said = run_on_all_ranks(
        control_group, failed, "reading the manifest", own_manifest, judge_manifests
    )
    if not said["is_ours"]:
        return
    manifests: list[Manifest] = []

    def own_files() -> dict[str, Any]:
        if said["text"] and not manifest.exists():
            path.mkdir(parents=True, exist_ok=True)
            write_durably(manifest, said["text"])
        with CheckpointReader(path) as saved:
            manifests.append(saved.manifest)
            return {"missing": saved.problems(needs(saved.manifest))}

    def missing_somewhere(parts: list[dict[str, Any]]) -> dict[str, Any]:
        return {"missing": {at: text for part in parts for at, text in part["missing"].items()}}

    def own_of_missing() -> dict[str, Any]:
        with CheckpointReader(path) as saved:
            asked = {int(at) for at in said["missing"]}
            return {"has": sorted(asked - saved.problems(asked).keys())}

    def holders(parts: list[dict[str, Any]]) -> dict[str, Any]:
        found: dict[int, int] = {}
        for at, text in said["missing"].items():
            having = [rank for rank, part in enumerate(parts) if int(at) in part["has"]]
            if not having:
                raise CheckpointError(text)
            found[int(at)] = having[0]
        return {"holders": found}

    said |= run_on_all_ranks(
        control_group, failed, "looking for its files", own_files, missing_somewhere
    )
    if not said["missing"]:
        return
    wanted = run_on_all_ranks(
        control_group, failed, "looking for its files", own_of_missing, holders
    )["holders"]
    files = manifests[0].files
    if control_group.rank == 0:
        nbytes = sum(files[int(at)].nbytes for at in wanted)
        logger.info(
            "%s: %d files (%s bytes) are not on every disk; they are sent",
            path,
            len(wanted),
            f"{nbytes:,}",
        )
    for at, holder in wanted.items():
        file = files[int(at)]
        problems: list[str] = []
        _send(path, file, manifests[0].block_nbytes, holder, comm, device, problems)

        def report(problems: list[str] = problems) -> None:
            if problems:
                raise CheckpointError(problems[0])

        run_on_all_ranks(control_group, failed, f"sending {file.name}", report)


def _send(
    path: Path,
    file: SavedFile,
    block_nbytes: int,
    holder: int,
    comm: Comm,
    device: torch.device,
    problems: list[str],
) -> None:
    """Send one file. Every rank takes part until the end; errors are added to ``problems``."""
    target = path / file.name
    source: BlockFile | None = None
    writer: BlockWriter | None = None
    fresh = target.with_name(f".{target.name}.from-{holder}-to-{comm.rank}")
    try:
        if comm.rank == holder:
            source = BlockFile(target, file.nbytes, file.crc32, block_nbytes=block_nbytes)
        elif not target.exists() or target.stat().st_size != file.nbytes:
            target.parent.mkdir(parents=True, exist_ok=True)
            fresh.unlink(missing_ok=True)
            writer = BlockWriter(fresh, file.nbytes)
    except (CheckpointError, OSError) as error:
        problems.append(str(error))
    host = torch.empty(min(block_nbytes, file.nbytes), dtype=torch.uint8)
    for block, begin in enumerate(range(0, file.nbytes, block_nbytes)):
        part = host[: file.nbytes - begin]
        try:
            if source is not None and not problems:
                source.read(begin, bytes_of(part))
        except CheckpointError as error:  # later blocks are sent too, and no rank keeps them
            problems.append(str(error))
        moving = part.to(device)
        comm.broadcast(moving, holder, name=f"checkpoint file {target.name}").wait()
        part.copy_(moving)
        try:
            if writer is not None and not problems:
                if zlib.crc32(bytes_of(part)) != file.crc32[block]:
                    raise CheckpointError(f"{target} arrived damaged from rank {holder}.")
                writer.write(bytes_of(part))
        except (CheckpointError, OSError) as error:
            problems.append(str(error))
    try:
        if writer is not None and not problems:
            writer.finish()
            fresh.replace(target)
    except (CheckpointError, OSError) as error:
        problems.append(str(error))
    finally:
        if writer is not None:
            writer.close()
            fresh.unlink(missing_ok=True)
        if source is not None:
            source.close()
