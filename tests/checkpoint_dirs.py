"""Makes valid checkpoint directories of plain tensors, without an engine, for tests of reading."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroshard.checkpoint import json_state
from zeroshard.checkpoint.blocks import BlockWriter, TensorEntry, bytes_of, lay_out
from zeroshard.checkpoint.boxes import Box
from zeroshard.checkpoint.manifest import (
    MANIFEST,
    VALUE,
    Manifest,
    SavedBox,
    SavedBuffer,
    SavedFile,
    SavedFragment,
    SavedParameter,
    SavedTensor,
    buffer_key,
    dtype_name,
    fragment_key,
    tree_key,
)

BLOCK_NBYTES = 4096


def write_checkpoint(
    directory: Path,
    values: Mapping[str, Tensor],
    *,
    tag: str = "global_step10",
    step: int = 10,
    files: int = 2,
    state: Mapping[str, Mapping[str, Tensor]] | None = None,
    scalars: Mapping[str, Mapping[str, float]] | None = None,
    frozen: Collection[str] = (),
    unsaved: Collection[str] = (),
    aliases: Mapping[str, Sequence[str]] | None = None,
    buffers: Mapping[str, Tensor] | None = None,
    shared: Mapping[str, Any] | None = None,
    block_nbytes: int = BLOCK_NBYTES,
    saved_at: str = "2030-01-01T00:00:00+00:00",
    stage: int = 3,
    is_latest: bool = True,
    boxes: Mapping[str, Sequence[Box]] | None = None,
    mesh: str | None = None,
    dp_ranks: Sequence[int] = (),
) -> Path:
    """``directory/tag``: every parameter is cut into ``files`` uneven fragments, one a file.

    ``boxes``: parameters of which each box is cut into such fragments.

    ``state``: optimizer state by parameter and name; ``frozen``: parameters that are not trained, and
    ``unsaved`` those of them whose values are left out. Buffers and shared state are in the first file.
    """
    path = directory / tag
    path.mkdir(parents=True)
    contents: list[dict[str, Tensor]] = [{} for _ in range(files)]
    parameters = {}
    for fqn, value in values.items():
        tensors = {} if fqn in unsaved else {VALUE: value, **(state or {}).get(fqn, {})}
        parameters[fqn] = SavedParameter(
            shape=tuple(value.shape),
            trained=fqn not in frozen,
            group=None if fqn in frozen else 0,
            aliases=tuple((aliases or {}).get(fqn, ())),
            tensors={
                name: _cut(fqn, name, t.reshape(value.shape), contents, (boxes or {}).get(fqn, ()))
                for name, t in tensors.items()
            },
            scalars={k: ("F32", float(v)) for k, v in (scalars or {}).get(fqn, {}).items()},
        )
    for name, buffer in (buffers or {}).items():
        contents[0][buffer_key(name)] = buffer
    encoded, tensors = json_state.encode(dict(shared or {}), where="shared")
    contents[0].update({tree_key(f"shared/{name}"): tensor for name, tensor in tensors.items()})
    manifest = Manifest(
        tag=tag,
        step=step,
        saved_at=saved_at,
        writer={"zeroshard": "test"},
        world_size=files,
        stage=stage,
        block_nbytes=block_nbytes,
        files=tuple(
            _write_file(path / f"rank-{i}.safetensors", content, block_nbytes)
            for i, content in enumerate(contents)
        ),
        parameters=parameters,
        buffers={
            name: SavedBuffer(
                dtype=dtype_name(b.dtype, where=name), shape=tuple(b.shape), files=(0,)
            )
            for name, b in (buffers or {}).items()
        },
        shared=encoded,
        mesh=mesh,
        dp_ranks=tuple(dp_ranks),
    )
    (path / MANIFEST).write_text(manifest.dump())
    if is_latest:
        (directory / "latest").write_text(tag)
    return path


def _cut(
    fqn: str,
    name: str,
    tensor: Tensor,
    contents: list[dict[str, Tensor]],
    boxes: Sequence[Box],
) -> SavedTensor:
    """Add the fragments to the contents of the files."""
    dtype = dtype_name(tensor.dtype, where=fqn)
    if not boxes:
        fragments = _cut_flat(fqn, name, tensor.reshape(-1), contents, None)
        return SavedTensor(dtype=dtype, fragments=fragments)
    cells = []
    for box in boxes:
        places = [slice(low, low + n) for low, n in zip(box.start, box.extent, strict=True)]
        flat = tensor[tuple(places)].reshape(-1)
        fragments = _cut_flat(fqn, name, flat, contents, box)
        cells.append(SavedBox(start=box.start, extent=box.extent, fragments=fragments))
    return SavedTensor(dtype=dtype, fragments=(), boxes=tuple(cells))


def _cut_flat(
    fqn: str, name: str, flat: Tensor, contents: list[dict[str, Tensor]], box: Box | None
) -> tuple[SavedFragment, ...]:
    begin, fragments = 0, []
    for file, content in enumerate(contents):
        end = len(flat) * (file + 1) ** 2 // len(contents) ** 2
        if begin < end:
            content[fragment_key(fqn, name, begin, box and box.start)] = flat[begin:end]
            fragments.append(SavedFragment(file, begin, end - begin))
        begin = end
    return tuple(fragments)


def _write_file(path: Path, content: Mapping[str, Tensor], block_nbytes: int) -> SavedFile:
    head, entries = lay_out(
        TensorEntry(k, dtype_name(t.dtype, where=k), tuple(t.shape)) for k, t in content.items()
    )
    nbytes = max([len(head), *(entry.offset + entry.nbytes for entry in entries)])
    writer = BlockWriter(path, nbytes, block_nbytes=block_nbytes)
    try:
        writer.write(memoryview(head))
        for entry in entries:
            tensor = content.get(entry.key, torch.zeros(entry.nbytes, dtype=torch.uint8))
            tensor = tensor.contiguous()  # has a name, and so lives, while its bytes are read
            writer.write(bytes_of(tensor))
        crcs = writer.finish()
    finally:
        writer.close()
    return SavedFile(name=path.name, nbytes=nbytes, crc32=crcs)
