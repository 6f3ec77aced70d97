"""The tables, limits, checksums and encodings of ``docs/format.md`` agree with the code."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import zlib
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path

import numpy
import pytest
import torch
from checkpoint_dirs import write_checkpoint
from pydantic import BaseModel

from zeroshard.checkpoint import directory as places
from zeroshard.checkpoint import json_state, save
from zeroshard.checkpoint import manifest as m
from zeroshard.checkpoint.local_state import ShardItem, digest_part
from zeroshard.checkpoint.manifest import MANIFEST
from zeroshard.errors import CheckpointError

DOC = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
TREES = DOC[DOC.index("## Trees") : DOC.index("## What a reader")]
ROWS = re.findall(r"^\| `(.+?)` \| `(.+?)` \|$", TREES, flags=re.M)
NAMES = {
    "torch": torch, "numpy": numpy, "Path": Path, "Namespace": Namespace, "Counter": Counter,
    "OrderedDict": OrderedDict, "defaultdict": defaultdict,
}  # fmt: skip


def table(first: str) -> list[str]:
    """The first column of the table whose head begins with ``first``, code only."""
    lines = DOC[DOC.index(f"| {first} |") :].split("\n\n")[0].splitlines()[2:]
    return [name for line in lines for name in re.findall(r"`(.+?)`", line.split("|")[1])]


@pytest.mark.parametrize(
    ("first", "model"),
    [
        ("key of `body`", m.Manifest), ("key of a file", m.SavedFile), ("key of a buffer", m.SavedBuffer),
        ("key of a parameter", m.SavedParameter), ("key of a tensor", m.SavedTensor),
        ("key of a box", m.SavedBox), ("key of a digest", m.Digest),
    ],
)  # fmt: skip
def test_every_key_is_in_its_table(first: str, model: type[BaseModel]):
    assert table(first) == list(model.model_fields)


def test_dtypes_are_listed_with_their_bytes():
    line = next(line for line in DOC.splitlines() if line.startswith("BOOL"))
    groups = re.findall(r"([A-Z0-9_ ]+): (\d+)", line)
    assert {name: int(n) for names, n in groups for name in names.split()} == m.ITEMSIZE


def test_every_mark_of_a_tree_is_in_the_table():
    marks = set(re.findall(r"\$[a-z_]+\b", " ".join(form for _, form in ROWS)))
    assert marks - {"$a"} == set(json_state._READ) - {"$pickle"}


@pytest.mark.parametrize(("value", "form"), ROWS, ids=[value for value, _ in ROWS])
def test_trees_are_encoded_as_the_table_says(value, form):
    encoded, tensors = json_state.encode(eval(value, dict(NAMES)), where="where")
    assert encoded == json.loads(form)
    assert json.dumps(encoded) == json.dumps(json.loads(form))  # types and order too
    json_state.decode(encoded, tensors, where="where")


def test_limits_are_those_of_the_code():
    assert f"nested at most {json_state.MAX_DEPTH} deep" in DOC
    assert f"at most {json_state.MAX_VALUES:,} values" in DOC
    assert m.MAX_NUMEL == 2**53
    assert m.MAX_NBYTES == 2**30
    assert f'"{m.FORMAT}"' in DOC
    assert DOC.split("\n")[2].startswith(f"Version {m.VERSION}.")
    assert places.LATEST in table("name")
    assert re.fullmatch(r"\.TAG\.saving-[0-9a-f]{8}", table("name")[4])
    assert places.saving_name("TAG", "01234567") == table("name")[4]
    for word in m._RESERVED:
        assert f"`{word}`" in DOC
    assert save.file_name(0, 2) in DOC


@pytest.mark.parametrize("numel", [0, 1, 7, 8, 64, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_the_digest_of_the_page_is_the_sum_over_fragments(numel, dtype):
    scope: dict = {}
    exec(blocks()[0], scope)
    flat = torch.randn(numel).to(dtype)
    data = flat.view(torch.uint8).numpy().tobytes()
    for cuts in ([0, numel], [0, numel // 128 * 64, numel]):
        pieces = [ShardItem("a", "value", b, e - b, flat, b) for b, e in itertools.pairwise(cuts)]
        total = sum(digest_part(piece) for piece in pieces if piece.numel)
        assert scope["digest"](data) == f"{total % 2**64:016x}"


def blocks() -> list[str]:
    """The programs of the page."""
    return re.findall(r"```python\n(.*?)```", DOC, flags=re.S)


def make(root: Path) -> Path:
    return write_checkpoint(
        root,
        {
            "a": torch.randn(40, 50), "b": torch.randn(7).bfloat16(), "c": torch.tensor(1.5),
            "d": torch.zeros(0, 2),
        },
        aliases={"a": ["tied"]},
        buffers={"naïve": torch.ones(2)},
        frozen=["b", "c"],
        unsaved=["c"],
        shared={"client_state": {"ü": 0.1}},
    )  # fmt: skip


def test_checksums_are_computed_as_the_page_says(tmp_path):
    path = make(tmp_path)
    head = json.loads((path / MANIFEST).read_text())
    body = head["body"]
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    assert text.isascii()
    assert hashlib.sha256(text.encode()).hexdigest() == head["sha256"]
    for file in body["files"]:
        data, step = (path / file["name"]).read_bytes(), body["block_nbytes"]
        assert len(data) == file["nbytes"]
        crcs = [zlib.crc32(data[at : at + step]) for at in range(0, len(data), step)]
        assert crcs == file["crc32"]


def test_the_reader_of_the_page_reads_what_others_wrote(tmp_path):
    scope: dict = {}
    exec(blocks()[1], scope)
    path = make(tmp_path)
    with pytest.raises(ValueError, match="version 3"):
        text = (path / MANIFEST).read_text()
        (path / MANIFEST).write_text(text.replace('"version":1', '"version":3'))
        scope["read_fp32"](path)
    (path / MANIFEST).write_text(text)
    found = scope["read_fp32"](path)
    assert {name: tuple(t.shape) for name, t in found.items()} == {
        "a": (40, 50), "tied": (40, 50), "b": (7,), "d": (0, 2),
    }  # fmt: skip
    assert {t.dtype for t in found.values()} == {torch.float32}


def test_the_manifest_of_the_page_is_accepted_but_for_its_checksums():
    example = json.loads(re.search(r"```json\n(.*?)```", DOC, flags=re.S)[1])
    body = example["body"]
    with pytest.raises(CheckpointError, match="its checksum"):
        m.parse(json.dumps(example), where="page")
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    example["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    assert m.parse(json.dumps(example), where="page").world_size == 2
