"""A valid manifest is read. Every other manifest raises one error with the reason."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import os
import random
import shutil
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_dirs import write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from support.covering import FULL, sampled

from zeroshard.checkpoint.blocks import BlockFile, TensorEntry, lay_out, read_entries
from zeroshard.checkpoint.boxes import Box
from zeroshard.checkpoint.manifest import (
    DTYPES,
    FORMAT,
    MANIFEST,
    MAX_NUMEL,
    VERSION,
    Manifest,
    parse,
    stored_as,
)
from zeroshard.checkpoint.reader import CheckpointReader, full, read_manifest
from zeroshard.errors import CheckpointError

VALUES = {
    "a.weight": torch.arange(3000.0).view(60, 50),
    "a.bias": torch.randn(7).bfloat16(),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
}
STATE = {"a.weight": {"exp_avg": torch.randn(3000)}}
BUFFERS = {"seen": torch.tensor([4, 5])}
FROZEN = "frozen-0123456789abcdef"
CELLS = [
    Box(start, extent)
    for start, extent in [
        ((0, 0), (30, 20)), ((0, 20), (30, 30)), ((30, 0), (30, 20)), ((30, 20), (30, 30)),
    ]
]  # fmt: skip
"""The boxes of ``a.weight`` in version 2."""


def make(root: Path, **keys: Any) -> Path:
    return write_checkpoint(
        root,
        VALUES,
        state=STATE,
        scalars={"a.weight": {"step": 3.0}},
        aliases={"a.weight": ["b.weight"]},
        buffers=BUFFERS,
        shared={"counters": {"global_steps": 10}, "client_state": {"pair": (1, b"x")}},
        **keys,
    )


@pytest.fixture(scope="module")
def saved_boxes(tmp_path_factory) -> Path:
    """The same checkpoint in version 2."""
    root = tmp_path_factory.mktemp("boxes")
    boxes = {"a.weight": CELLS, "a.bias": [Box((0,), (3,)), Box((3,), (4,))]}
    return make(root, boxes=boxes, mesh="tensor 2", dp_ranks=[0, 0])


@pytest.fixture(scope="module")
def boxes_body(saved_boxes) -> dict[str, Any]:
    return json.loads((saved_boxes / MANIFEST).read_text())["body"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="module")
def body(saved) -> dict[str, Any]:
    return json.loads((saved / MANIFEST).read_text())["body"]


def signed(body: Any, **head: Any) -> str:
    """The manifest's text with a checksum that is right."""
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    sha = hashlib.sha256(canonical.encode()).hexdigest()
    return json.dumps({"format": FORMAT, "version": VERSION, "sha256": sha, "body": body, **head})


def changed(body: dict[str, Any], place: str, value: Any) -> dict[str, Any]:
    """A copy with one value replaced at the path ``place``, whose steps are separated by slashes."""
    found = copy.deepcopy(body)
    *steps, last = place.split("/")
    parent: Any = found
    for step in steps:
        parent = parent[int(step) if isinstance(parent, list) else step]
    parent[int(last) if isinstance(parent, list) else last] = value
    return found


WEIGHT = "parameters/a.weight"
FRAGMENTS = f"{WEIGHT}/tensors/value/fragments"
DEEP: Any = []
for _ in range(500):
    DEEP = [DEEP]

WRONG = [
    # paths
    *(
        ("files/0/name", name, "is not a name of a file in the directory")
        for name in (
            "../x.safetensors", "/etc/x.safetensors", "..\\x.safetensors", "a\0.safetensors",
            "a/b.safetensors", ".hidden.safetensors", "", ".", "..", "manifest.json",
            "x.safetensors\n", "x.safetensors/", "x.SAFETENSORS", "é.safetensors", "-" * 3,
            "a" * 200 + ".safetensors", "C:x.safetensors", "~/x.safetensors", "a b.safetensors",
            f"{FROZEN}/x.safetensors", f"../../{FROZEN}/x.safetensors", f"./../{FROZEN}/x.safetensors",
            "../frozen-0123456789ABCDEF/x.safetensors", "../frozen-0123456789abcde/x.safetensors",
            f"../{FROZEN}/../x.safetensors", f"../{FROZEN}/../../x.safetensors",
            f"../{FROZEN}//x.safetensors", f"..//{FROZEN}/x.safetensors", f"../{FROZEN}/",
            f"..\\{FROZEN}\\x.safetensors", f"../{FROZEN}x/y.safetensors",
        )
    ),
    ("files/1/name", "rank-0.safetensors", "two files have the same name"),
    # files
    ("files/0/nbytes", -1, "greater than or equal to 0"),
    ("files/0/nbytes", 2**53 + 1, "less than or equal"),
    ("files/0/nbytes", 4096.0, "valid integer"),
    ("files/0/nbytes", True, "valid integer"),
    ("files/0/nbytes", "4096", "valid integer"),
    ("files/0/nbytes", 2**53, "checksums for"),
    ("files/0/crc32", [], "0 checksums for"),
    ("files/0/crc32", [1] * 99, "99 checksums for"),
    ("files/0/crc32", [2**32], "less than"),
    ("files/0/crc32", [-1], "greater than or equal to 0"),
    ("files/0/crc32", [1.5], "valid integer"),
    ("files/0/crc32", "aa", "valid array"),
    ("files", [], "file 0 of 0"),
    ("files", {}, "valid array"),
    ("files/0", None, "be an object"),
    # fragments
    (FRAGMENTS, [], "contain 0 of 3,000"),
    (FRAGMENTS, [[0, 0, 750]], "contain 750 of 3,000"),
    (FRAGMENTS, [[0, 0, 750], [1, 740, 2260]], "overlap at element 740"),
    (FRAGMENTS, [[0, 0, 750], [1, 760, 2240]], "gap at element 750"),
    (FRAGMENTS, [[0, 0, 750], [0, 0, 750], [1, 750, 2250]], "overlap at element 0"),
    (FRAGMENTS, [[0, 0, 0], [0, 0, 750], [1, 750, 2250]], "overlap at element 0"),
    (FRAGMENTS, [[0, 1, 750], [1, 751, 2249]], "gap at element 0"),
    (FRAGMENTS, [[0, 0, 750], [1, 750, 2251]], "contain 3,001 of 3,000"),
    (FRAGMENTS, [[2, 0, 750], [1, 750, 2250]], "file 2 of 2"),
    (FRAGMENTS, [[-1, 0, 750], [1, 750, 2250]], "greater than or equal to 0"),
    (FRAGMENTS, [[0, -1, 751], [1, 750, 2250]], "greater than or equal to 0"),
    (FRAGMENTS, [[0, 0, 2**53 + 1]], "less than or equal"),
    (FRAGMENTS, [[0, 0, 2**70]], "less than or equal"),
    (FRAGMENTS, [[0, 0.0, 750], [1, 750, 2250]], "valid integer"),
    (FRAGMENTS, [[False, 0, 750], [1, 750, 2250]], "valid integer"),
    (FRAGMENTS, [["0", 0, 750], [1, 750, 2250]], "valid integer"),
    (FRAGMENTS, [[0, 0]], "Field required"),
    (FRAGMENTS, [[0, 0, 750, 0]], "at most 3 items"),
    (FRAGMENTS, [None], "be an array"),
    (FRAGMENTS, "0", "valid array"),
    (f"{WEIGHT}/shape", [60, 51], "contain 3,000 of 3,060"),
    (f"{WEIGHT}/shape", [2**53, 2**53], "too large"),
    (f"{WEIGHT}/shape", [0, 2**53, 2], "too large"),
    (f"{WEIGHT}/shape", [1] * 65, "at most 64"),
    (f"{WEIGHT}/shape", [-60, -50], "greater than or equal to 0"),
    (f"{WEIGHT}/shape", [60.0, 50], "valid integer"),
    (f"{WEIGHT}/shape", [True, 3000], "valid integer"),
    (f"{WEIGHT}/shape", 3000, "valid array"),
    (f"{WEIGHT}/tensors/value/dtype", "F99", "Input should be 'BOOL'"),
    (f"{WEIGHT}/tensors/value/dtype", "F64", "do not fit into"),
    (f"{WEIGHT}/tensors/value/dtype", 32, "Input should be 'BOOL'"),
    (f"{WEIGHT}/tensors/value/dtype", "f32", "Input should be 'BOOL'"),
    # tensors, scalars and names
    (f"{WEIGHT}/tensors/", {"dtype": "F32", "fragments": []}, "at least 1 character"),
    (f"{WEIGHT}/tensors/a:0", {"dtype": "F32", "fragments": []}, "no tensor may have this name"),
    (f"{WEIGHT}/tensors/pad", {"dtype": "F32", "fragments": []}, "no tensor may have this name"),
    (f"{WEIGHT}/tensors/tree", {"dtype": "F32", "fragments": []}, "no tensor may have this name"),
    (f"{WEIGHT}/tensors/buffer", {"dtype": "F32", "fragments": []}, "no tensor may have this name"),
    (f"{WEIGHT}/tensors", [], "be an object"),
    (f"{WEIGHT}/scalars/step", ["F32"], "Field required"),
    (f"{WEIGHT}/scalars/step", ["F32", 1e39], "is not a valid F32"),
    (f"{WEIGHT}/scalars/step", ["F32", True], "is not a valid F32"),
    (f"{WEIGHT}/scalars/step", ["F32", 10**400], "is not a valid F32"),
    (f"{WEIGHT}/scalars/step", ["F16", 65505], "is not a valid F16"),
    (f"{WEIGHT}/scalars/step", ["I8", 128], "is not a valid I8"),
    (f"{WEIGHT}/scalars/step", ["I64", 1.0], "is not a valid I64"),
    (f"{WEIGHT}/scalars/step", ["U8", -1], "is not a valid U8"),
    (f"{WEIGHT}/scalars/step", ["BOOL", 1], "is not a valid BOOL"),
    (f"{WEIGHT}/scalars/step", ["C64", 1], "is not a valid C64"),
    (f"{WEIGHT}/scalars/step", ["number", 2**63], "is not a valid number"),
    (f"{WEIGHT}/scalars/step", ["F32", "1"], "valid"),
    (f"{WEIGHT}/scalars/step", ["F32", None], "valid"),
    (f"{WEIGHT}/scalars/step", ["F33", 1.0], "Input should be"),
    (f"{WEIGHT}/aliases", ["a.bias"], "names two parameters"),
    (f"{WEIGHT}/aliases", ["a.weight"], "names two parameters"),
    (f"{WEIGHT}/aliases", ["c", "c"], "names two parameters"),
    (f"{WEIGHT}/aliases", [""], "at least 1 character"),
    (f"{WEIGHT}/aliases", "b.weight", "valid array"),
    (f"{WEIGHT}/trained", 1, "valid boolean"),
    (f"{WEIGHT}/trained", "true", "valid boolean"),
    (f"{WEIGHT}/group", -1, "greater than or equal to 0"),
    (f"{WEIGHT}/digest", {"dtype": "F32", "sum": "0" * 15}, "pattern"),
    (f"{WEIGHT}/digest", {"dtype": "F32", "sum": "0" * 15 + "G"}, "pattern"),
    (f"{WEIGHT}/digest", {"dtype": "F32", "sum": "0" * 16 + "\n"}, "pattern"),
    ("parameters/", {"shape": [0], "trained": True}, "at least 1 character"),
    ("parameters/" + "n" * 1001, {"shape": [0], "trained": True}, "at most 1000"),
    ("parameters", [], "be an object"),
    (WEIGHT, None, "be an object"),
    # buffers and state
    ("buffers/seen/files", [], "at least 1 item"),
    ("buffers/seen/files", [0, 0, 0], "3 copies for 2 ranks"),
    ("buffers/seen/files", [2], "in no file"),
    ("buffers/seen/shape", [2**53, 2], "too large"),
    ("shared_file", 2, "a file that does not exist"),
    ("ranks", [{}, {}], "2 ranks have state in 0 files"),
    ("rank_files", [0, 1], "0 ranks have state in 2 files"),
    ("ranks", 5, "valid array"),
    # the run
    ("world_size", 0, "greater than or equal to 1"),
    ("world_size", 2**21, "less than or equal"),
    ("world_size", True, "valid integer"),
    ("stage", 4, "less than or equal to 3"),
    ("step", -1, "greater than or equal to 0"),
    ("step", 1.0, "valid integer"),
    ("block_nbytes", 0, "greater than or equal to 4096"),
    ("block_nbytes", 2**31, "less than or equal"),
    ("tag", "", "at least 1 character"),
    ("tag", None, "valid string"),
    ("saved_at", "x" * 1001, "at most 1000"),
    ("writer", {"zeroshard": 1}, "valid string"),
    ("step", float("nan"), "NaN is not a number"),
    ("step", float("-inf"), "-Infinity is not a number"),
    ("shared", {"deep": DEEP}, "recursion"),
    ("tag", "\ud800", "Invalid JSON: unexpected end of hex escape"),
]  # fmt: skip


@pytest.mark.parametrize(("place", "value", "why"), WRONG, ids=range(len(WRONG)))
def test_each_violation_is_refused_by_name_and_reason(body, place, value, why):
    with pytest.raises(CheckpointError) as error:
        parse(signed(changed(body, place, value)), where="run/tag/manifest.json")
    assert str(error.value).startswith("run/tag/manifest.json")
    assert why in str(error.value)
    assert len(str(error.value)) < 1000


BOXES = f"{WEIGHT}/tensors/value/boxes"
FIRST, SECOND = f"{BOXES}/0", f"{BOXES}/1"
WRONG_BOXES = [
    (BOXES, [], "contain 0 of 3,000"),
    (BOXES, {}, "valid array"),
    (BOXES, [None], "be an object"),
    (FIRST, {"start": [0, 0], "extent": [60, 50], "fragments": []}, "boxes overlap"),
    (FRAGMENTS, [[0, 0, 3000]], "of the whole tensor and of its boxes"),
    (f"{FIRST}/start", [0], "does not have 2 axes"),
    (f"{FIRST}/start", [0] * 65, "at most 64"),
    (f"{FIRST}/start", [], "does not have 2 axes"),
    (f"{FIRST}/start", [0, -1], "greater than or equal to 0"),
    (f"{FIRST}/start", [0, 1], "boxes overlap at 1 of axis 1"),
    (f"{FIRST}/start", [0, 2**53], "boxes have a gap at 50 of axis 1"),
    (f"{FIRST}/start", [0, 2**70], "less than or equal"),
    (f"{FIRST}/start", [0, 0.0], "valid integer"),
    (f"{FIRST}/start", [0, True], "valid integer"),
    (f"{FIRST}/start", "0,0", "valid array"),
    (f"{FIRST}/start", [30, 0], "two boxes have the same start"),
    (f"{FIRST}/extent", [30, 21], "boxes overlap at 0 of axis 1"),
    (f"{FIRST}/extent", [30, 0], "boxes overlap at 0 of axis 1"),
    (f"{FIRST}/extent", [31, 20], "boxes overlap at 0 of axis 0"),
    (f"{FIRST}/extent", [2**53, 2**53], "boxes overlap"),
    (f"{FIRST}/extent", [1] * 65, "at most 64"),
    (f"{SECOND}/extent", [30, 2**53], "boxes overlap"),
    (f"{SECOND}/start", [0, 21], "boxes overlap at 21 of axis 1"),
    (f"{FIRST}/fragments", [], "box at [0, 0]: fragments contain 0 of 600"),
    (f"{FIRST}/fragments", [[0, 0, 600], [0, 0, 600]], "fragments overlap at element 0"),
    (f"{FIRST}/fragments", [[0, 0, 601]], "contain 601 of 600"),
    (f"{FIRST}/fragments", [[0, 1, 600]], "gap at element 0"),
    (f"{FIRST}/fragments", [[9, 0, 600]], "file 9 of 2"),
    (f"{FIRST}/fragments", [[0, -1, 601]], "greater than or equal to 0"),
    (f"{FIRST}/fragments", None, "valid array"),
    (f"{WEIGHT}/shape", [60, 51], "boxes reach 50 of 51 on axis 1"),
    (f"{WEIGHT}/shape", [60, 49], "boxes reach 50 of 49 on axis 1"),
    (f"{WEIGHT}/shape", [3000], "does not have 1 axes"),
    (f"{WEIGHT}/shape", [60, 50, 1], "does not have 3 axes"),
    (f"{WEIGHT}/tensors/value/dtype", "F64", "do not fit into"),
    ("parameters/empty/tensors/value/boxes", [{"start": [0, 0], "extent": [0, 3], "fragments": []}],
     "overlap at 0 of axis 0"),
    ("parameters/scalar/tensors/value/boxes", [{"start": [], "extent": [], "fragments": []}],
     "of the whole tensor and of its boxes"),
    ("mesh", "", "at least 1 character"),
    ("mesh", 2, "valid string"),
    ("dp_ranks", [0], "1 data-parallel ranks for 2 ranks"),
    ("dp_ranks", [0, 2], "one has the number 2"),
    ("dp_ranks", [1, 1], "one has the number 1"),
    ("dp_ranks", [0, 2**53], "one has the number"),
    ("dp_ranks", [0, -1], "greater than or equal to 0"),
]  # fmt: skip


@pytest.mark.parametrize(("place", "value", "why"), WRONG_BOXES, ids=range(len(WRONG_BOXES)))
def test_each_violation_of_version_2_is_refused_by_name_and_reason(boxes_body, place, value, why):
    parse(signed(boxes_body), where="m")
    with pytest.raises(CheckpointError) as error:
        parse(signed(changed(boxes_body, place, value)), where="run/tag/manifest.json")
    assert str(error.value).startswith("run/tag/manifest.json")
    assert why in str(error.value)
    assert len(str(error.value)) < 1000


def test_version_1_has_no_boxes(body, boxes_body):
    assert parse(signed(body, version=1), where="m").version == 1
    for mixed in (boxes_body, {**body, "mesh": "tensor 2"}, {**body, "dp_ranks": [0, 0]}):
        assert parse(signed(mixed), where="m").version == 2
        with pytest.raises(CheckpointError, match="version 1, and parts that only version 2 has"):
            parse(signed(mixed, version=1), where="m")


def test_a_version_1_manifest_is_written_as_version_1(body, boxes_body):
    """Releases that do not know version 2 can read it."""
    for some, version in ((body, 1), (boxes_body, 2)):
        head = json.loads(parse(signed(some), where="m").dump())
        assert head["version"] == version
        assert ("boxes" in head["body"]["parameters"]["a.weight"]["tensors"]["value"]) == (
            version == 2
        )


def test_only_complex128_needs_version_3(body, boxes_body):
    """Other complex numbers are in safetensors, and older releases know them."""
    for some in (body, boxes_body):
        older = parse(signed(some), where="m").version
        for dtype, version in (("C64", older), ("C128", 3)):
            wide = changed(some, "buffers/seen/dtype", dtype)
            assert parse(signed(wide), where="m").version == version
        with pytest.raises(CheckpointError, match="parts that only version 3 has"):
            parse(signed(wide, version=older), where="m")


def test_boxes_are_read_as_the_tensors_that_were_cut(saved_boxes):
    with CheckpointReader(saved_boxes) as source:
        for fqn, value in VALUES.items():
            assert torch.equal(full(source, fqn), value)
        assert torch.equal(
            full(source, "a.weight", "exp_avg").view(-1), STATE["a.weight"]["exp_avg"]
        )
        part = torch.empty(77)
        source.fill("a.weight", "value", 13, part, Box((17, 11), (20, 25)))
        expected = VALUES["a.weight"][17:37, 11:36].reshape(-1)
        assert torch.equal(part, expected[13:90])


def test_many_hostile_boxes_cost_little(boxes_body):
    box = {"start": [0, 0], "extent": [60, 50], "fragments": []}
    text = signed(changed(boxes_body, BOXES, [box] * 50_000))
    begin_s = time.process_time()
    with pytest.raises(CheckpointError, match="same start"):
        parse(text, where="m")
    assert time.process_time() - begin_s < 16


def test_a_fragment_in_two_places_counts_twice(body):
    """Otherwise a small manifest could claim any amount of memory from one small file."""
    nbytes = body["files"][1]["nbytes"]
    many = {"shape": [nbytes], "trained": True,
            "tensors": {"value": {"dtype": "U8", "fragments": [[1, 0, nbytes]]}}}  # fmt: skip
    with pytest.raises(CheckpointError, match=r"rank-1.safetensors: fragments of .* do not fit"):
        parse(signed(changed(body, "parameters/many", many)), where="m")


def test_state_of_some_ranks_only_is_refused(body):
    one = changed(changed(body, "ranks", [{}]), "rank_files", [0])
    with pytest.raises(CheckpointError, match="1 of 2 ranks have state"):
        parse(signed(one), where="m")


RAW = {
    "nothing": b"",
    "no JSON": b"{",
    "no object": b"[]",
    "no UTF-8": b"\xff\xfe{}",
    "another file": b'{"format": "something else"}',
    "null": b"null",
    "deep list": b"[" * 100_000,
    "deep object": b'{"a":' * 100_000,
    "number of 10,000 digits": b'{"format": ' + b"1" * 10_000 + b"}",
}


@pytest.mark.parametrize("text", RAW.values(), ids=RAW.keys())
def test_what_is_no_manifest_is_refused(text):
    with pytest.raises(CheckpointError, match=r"^somewhere "):
        parse(text, where="somewhere")


@pytest.mark.parametrize("version", [0, 4, 1.0, True, "1", None, [1], "x" * 10_000])
def test_other_versions_are_refused_with_what_to_do(body, version):
    with pytest.raises(CheckpointError, match="install that release") as error:
        parse(signed(body, version=version), where="m")
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("head", [{"sha256": "0" * 64}, {"sha256": None}, {"sha256": 1}])
def test_a_manifest_that_its_checksum_does_not_fit_is_refused(body, head):
    with pytest.raises(CheckpointError, match="its checksum"):
        parse(signed(body, **head), where="m")


@pytest.mark.parametrize("name", ["body", "step", "a.weight", "fragments"])
def test_a_name_that_appears_twice_is_refused(body, name):
    text = signed(body)
    assert f'"{name}":' in text
    twice = text.replace(f'"{name}":', f'"{name}": null, "{name}":', 1)
    with pytest.raises(CheckpointError, match=f"'{name}' appears 2 times"):
        parse(twice, where="m")


def test_unknown_keys_are_ignored_and_order_does_not_count(body):
    more = changed(changed(body, "later", [1]), f"{WEIGHT}/later", {"x": 1})
    known = parse(signed(body), where="m")
    assert parse(signed(more, later=1), where="m") == known
    assert parse(signed(dict(reversed(body.items()))), where="m") == known
    assert parse(json.dumps(json.loads(signed(body)), indent=1), where="m") == known


def test_what_dump_writes_is_read_back(body):
    manifest = parse(signed(body), where="m")
    assert parse(manifest.dump(), where="m") == manifest


SLOW = {
    "long string": ("tag", "x" * 10_000_000),
    "long name": ("parameters/" + "x" * 20_000_000, {}),
    "long path": ("files/0/name", "x" * 10_000_000),
    "many names twice": (f"{WEIGHT}/aliases", [*map(str, range(200_000)), "0"]),
    "many extents": (f"{WEIGHT}/shape", [2**53] * 300_000),
}


@pytest.mark.parametrize(("place", "value"), SLOW.values(), ids=SLOW.keys())
def test_large_values_cost_little_and_are_not_repeated(body, place, value):
    text = signed(changed(body, place, value))
    begin_s = time.process_time()
    with pytest.raises(CheckpointError) as error:
        parse(text, where="m")
    assert time.process_time() - begin_s < 15  # quadratic costs take minutes
    assert len(str(error.value)) < 1000


def test_a_name_twice_among_many_is_found_in_linear_time():
    text = "{" + ",".join(f'"{i}":0' for i in range(300_000)) + ',"299999":1}'
    begin_s = time.process_time()
    with pytest.raises(CheckpointError, match="'299999' appears 2 times"):
        parse(text, where="m")
    assert time.process_time() - begin_s < 10


# ---------------------------------------------------------------------- the file itself


def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run" / "tag"))


def test_what_is_no_regular_file_is_neither_read_nor_waited_for(saved, tmp_path):
    path = copied(saved, tmp_path)
    for name in (MANIFEST, "rank-0.safetensors"):
        file, aside = path / name, tmp_path / name
        file.rename(aside)
        for make_one in (
            lambda p: os.mkfifo(p),
            lambda p: p.mkdir(),
            lambda p: p.symlink_to(tmp_path / p.name),
            lambda p: p.symlink_to("/dev/zero"),
        ):
            make_one(file)
            with pytest.raises(CheckpointError, match=name), CheckpointReader(path) as source:
                full(source, "a.weight")
            file.rmdir() if file.is_dir() and not file.is_symlink() else file.unlink()
        aside.rename(file)
    with CheckpointReader(path) as source:
        assert torch.equal(full(source, "a.weight"), VALUES["a.weight"])


def test_a_manifest_over_the_limit_is_not_read(tmp_path):
    with (tmp_path / MANIFEST).open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(CheckpointError, match="not a regular file of at most"):
        read_manifest(tmp_path)


def test_frozen_files_are_beside_the_checkpoint_and_not_behind_a_link(saved, tmp_path):
    path = copied(saved, tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (path / "rank-0.safetensors").rename(elsewhere / "rank-0.safetensors")
    body = json.loads((path / MANIFEST).read_text())["body"]
    name = f"../{FROZEN}/rank-0.safetensors"
    (path / MANIFEST).write_text(signed(changed(body, "files/0/name", name)))
    frozen = path.parent / FROZEN
    frozen.symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="symbolic link"), CheckpointReader(path) as source:
        full(source, "a.weight")
    frozen.unlink()
    elsewhere.rename(frozen)
    with CheckpointReader(path) as source:
        assert torch.equal(full(source, "a.weight"), VALUES["a.weight"])


@pytest.mark.parametrize("in_boxes", [False, True])
def test_claims_cost_no_memory_before_the_files_are_seen(saved, tmp_path, in_boxes):
    """A terabyte that no file has: to ask for it would fail in another way."""
    path = copied(saved, tmp_path)
    body = json.loads((path / MANIFEST).read_text())["body"]
    numel, block_nbytes = 2**38, 2**24
    files = [{"name": "huge.safetensors", "nbytes": 2**40, "crc32": [0] * (2**40 // block_nbytes)}]
    huge = {"shape": [numel], "trained": True,
            "tensors": {"value": {"dtype": "F32", "fragments": [[0, 0, numel]]}}}  # fmt: skip
    if in_boxes:
        halves = [
            {"start": [at], "extent": [numel // 2], "fragments": [[0, 0, numel // 2]]}
            for at in (0, numel // 2)
        ]
        huge["tensors"] = {"value": {"dtype": "F32", "fragments": [], "boxes": halves}}
    body |= {"files": files, "parameters": {"huge": huge}, "block_nbytes": block_nbytes}
    body |= {"buffers": {"b": {"dtype": "F32", "shape": [numel], "files": [0]}}}
    (path / MANIFEST).write_text(signed(body))
    for make_one in (
        lambda f: None,
        lambda f: f.write_bytes(b"{}"),
        lambda f: os.truncate(f, 2**40),
    ):
        make_one(path / "huge.safetensors")
        with CheckpointReader(path) as source:
            with pytest.raises(CheckpointError, match=r"huge.safetensors"):
                full(source, "huge")
            with pytest.raises(CheckpointError, match=r"huge.safetensors"):
                source.buffers(0)


# ---------------------------------------------------------------------- mutations

ODD = [
    None, True, False, 0, 1, 2, 7, 63, 64, 750, 2250, 3000, 4096, 2**31, 2**32, MAX_NUMEL, MAX_NUMEL + 1,
    2**63, 2**64, 2**70, -1, -(2**64), 0.0, 0.5, -0.0, 1e300, 5e-324, "", "value", "F32", "F64", "U8",
    "C64", "BF16", "number", "rank-0.safetensors", "rank-1.safetensors", "../secret.safetensors",
    "/etc/passwd", f"../{FROZEN}/rank-0.safetensors", "0" * 16, "a.weight", "a.bias",
    "\0", "\ud800", "\U0001f40d", [], {},
    [0], [0, 0], [0, 0, 1], [1, 0], [[0, 0, 3000]], {"$tuple": [1]}, {"$tensor": "counters/0"},
    {"$pickle": "gASVAQAAAAAAAAAu"},
]  # fmt: skip


def places_of(node: Any) -> list[tuple[Any, Any]]:
    """Every ``(container, key)`` of a tree."""
    found, todo = [], [node]
    while todo:
        container = todo.pop()
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, value in items:
            found.append((container, key))
            if isinstance(value, (dict, list)):
                todo.append(value)
    return found


def mutated(body: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """One to three random changes: replace, drop, copy from elsewhere, duplicate, shift a number,
    rename."""
    found = json.loads(json.dumps(body))
    for _ in range(draw.randint(1, 3)):
        places = places_of(found)
        if not places:
            break
        container, key = draw.choice(places)
        how = draw.choice(["set", "set", "drop", "copy", "twice", "off", "rename"])
        value = container[key]
        if how == "set":
            container[key] = copy.deepcopy(draw.choice(ODD))
        elif how == "drop":
            del container[key]
        elif how == "copy":
            other, at = draw.choice(places)
            container[key] = copy.deepcopy(other[at])
        elif how == "twice" and isinstance(container, list):
            container.insert(key, copy.deepcopy(value))
        elif how == "off" and type(value) is int:
            container[key] = value + draw.choice([-1, 1, 64, -64])
        elif how == "rename" and isinstance(container, dict):
            container[draw.choice(["a.weight", "value", "exp_avg", "x", ""])] = value
    return found


class Watched:
    """Opens of files by this process while it is active."""

    def __init__(self, monkeypatch) -> None:
        self.opened: list[str] = []
        real = os.open

        def watched(path, *args, **kwargs):
            self.opened.append(os.path.realpath(path))
            return real(path, *args, **kwargs)

        monkeypatch.setattr(os, "open", watched)


def read_all(path: Path, text: str) -> bool:
    """Read everything that the manifest names. Returns True if all of it exists."""
    (path / MANIFEST).write_text(text)
    is_whole = True
    with CheckpointReader(path) as source:
        for fqn, parameter in source.parameters.items():
            for name in parameter.tensors:
                try:
                    assert full(source, fqn, name).shape == torch.Size(parameter.shape)
                except CheckpointError:
                    is_whole = False
        for read in (lambda: source.buffers(1), source.shared, source.ranks):
            try:
                read()
            except CheckpointError:
                is_whole = False
    return is_whole


SEEN = {"valid": 0, "refused": 0, "whole": 0}


@pytest.mark.slow
@pytest.mark.parametrize("version", sampled([2, 1], every=2))
def test_any_mutation_is_refused_or_read_within_the_directory(
    saved, saved_boxes, tmp_path, monkeypatch, version
):
    path = copied(saved if version == 1 else saved_boxes, tmp_path)
    body = json.loads((path / MANIFEST).read_text())["body"]
    (path.parent / "secret.safetensors").write_bytes((path / "rank-0.safetensors").read_bytes())
    inside = tuple(os.path.realpath(p) + os.sep for p in (path, path.parent / FROZEN))
    watched = Watched(monkeypatch)
    SEEN.update(dict.fromkeys(SEEN, 0))

    @settings(max_examples=250 if FULL else 80, deadline=None, derandomize=True, database=None)
    @given(st.integers(0, 2**32))
    def check(seed):
        draw = random.Random(seed)
        for _ in range(10):
            text = signed(mutated(body, draw))
            try:
                manifest = parse(text, where="m")
            except CheckpointError:
                SEEN["refused"] += 1
                continue
            SEEN["valid"] += 1
            assert isinstance(manifest, Manifest)
            assert parse(manifest.dump(), where="m") == manifest
            watched.opened.clear()
            SEEN["whole"] += read_all(path, text)
            assert [p for p in watched.opened if not p.startswith(inside)] == []

    check()
    enough = 100 if FULL else 30  # otherwise too many or too few mutations are valid
    assert min(SEEN.values()) > enough, SEEN


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.integers(0, 2**32))
def test_any_bytes_are_refused_or_the_same_manifest(seed):
    draw = random.Random(seed)
    text, known = raw()
    for _ in range(10):
        other = bytearray(text)
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(other))
            other[at : at + draw.randint(0, 4)] = draw.randbytes(draw.randint(0, 3))
        try:
            manifest = parse(bytes(other), where="m")
        except CheckpointError:
            continue
        assert manifest == known  # the checksum covers all that counts


def raw() -> tuple[bytes, Manifest]:
    """A small manifest without a directory."""
    manifest = Manifest(
        tag="t", step=1, saved_at="2030-01-01T00:00:00+00:00", writer={"zeroshard": "1"}, world_size=1,
        stage=0, block_nbytes=4096, files=(), parameters={}, shared={"counters": {"global_steps": 1}},
    )  # fmt: skip
    return manifest.dump().encode(), manifest


# ---------------------------------------------------------------------- headers of shard files


def shard(path: Path, content: bytes) -> BlockFile:
    path.write_bytes(content)
    crcs = [zlib.crc32(content[at : at + 4096]) for at in range(0, len(content), 4096)]
    return BlockFile(path, len(content), crcs, block_nbytes=4096)


def entries_of(path: Path, content: bytes) -> dict[str, TensorEntry]:
    file = shard(path, content)
    try:
        return read_entries(file)
    finally:
        file.close()


def header(table: Any, data: bytes = b"") -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return len(text).to_bytes(8, "little") + text + data


def row(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HEADERS = {
    "nothing": b"",
    "seven bytes": b"\0" * 7,
    "length over the file": (2**63).to_bytes(8, "little") + b"{}",
    "length one over": (3).to_bytes(8, "little") + b"{}",
    "no JSON": header(b"{"),
    "no UTF-8": header(b'{"\xff": 1}'),
    "list": header([]),
    "string": header("x"),
    "deep": header(b"[" * 50_000),
    "row is a list": header({"a": []}),
    "row is a string": header({"a": "dtype"}),
    "no offsets": header({"a": {"dtype": "F32", "shape": [2]}}),
    "three offsets": header({"a": row(offsets=[0, 4, 8])}, b"\0" * 8),
    "dtype unknown": header({"a": row(dtype="F99")}, b"\0" * 8),
    "dtype is a list": header({"a": row(dtype=["F32"])}, b"\0" * 8),
    "shape of booleans": header({"a": row(shape=[True, 2])}, b"\0" * 8),
    "shape of floats": header({"a": row(shape=[2.0])}, b"\0" * 8),
    "negative": header({"a": row(shape=[-2], offsets=[0, -8])}, b"\0" * 8),
    "backwards": header({"a": row(offsets=[8, 0])}, b"\0" * 8),
    "size": header({"a": row(shape=[3])}, b"\0" * 8),
    "over the end": header({"a": row()}, b"\0" * 7),
    "bytes after the end": header({"a": row()}, b"\0" * 9),
    "hole in front": header({"a": row(offsets=[8, 16])}, b"\0" * 16),
    "hole between": header({"a": row(), "b": row(offsets=[16, 24])}, b"\0" * 24),
    "same bytes twice": header({"a": row(), "b": row()}, b"\0" * 8),
    "same bytes twice and a hole": header({"a": row(), "b": row()}, b"\0" * 16),
    "overlap": header({"a": row(), "b": row(offsets=[4, 12])}, b"\0" * 12),
    "same name twice": header(b'{"a":' + json.dumps(row()).encode() + b',"a":'
                              + json.dumps(row(offsets=[8, 16])).encode() + b"}", b"\0" * 16),
    "empty but vast": header({"a": row(shape=[0, 2**53, 2**53], offsets=[0, 0])}),
    "too many extents": header({"a": row(shape=[1] * 65, offsets=[0, 4])}, b"\0" * 4),
    "a million extents": header({"a": row(shape=[2**53] * 1_000_000)}, b"\0" * 8),
    "a name of megabytes": header({"a" * 3_000_000: row(shape=[3])}, b"\0" * 8),
}  # fmt: skip


@pytest.mark.parametrize("content", HEADERS.values(), ids=HEADERS.keys())
def test_a_header_that_does_not_tile_its_file_is_refused(tmp_path, content):
    begin_s = time.process_time()
    with pytest.raises(CheckpointError, match=r"x\.safetensors") as error:
        entries_of(tmp_path / "x.safetensors", content)
    assert time.process_time() - begin_s < 10
    assert len(str(error.value)) < 1000


def test_every_dtype_and_odd_shape_is_laid_out_and_found(tmp_path):
    entries = [
        TensorEntry(f"{d}-{shape}", *stored_as(d, shape))
        for d in DTYPES
        for shape in [(), (0, 3), (5, 1), (64,)]
    ]
    head, placed = lay_out(entries)
    content = head + bytes(max(e.offset + e.nbytes for e in placed) - len(head))
    found = entries_of(tmp_path / "x.safetensors", content)
    assert found == {e.key: e for e in placed}
    assert all(e.offset % 64 == 0 for key, e in found.items() if not key.startswith("pad:"))


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.integers(0, 2**32))
def test_any_header_is_refused_or_stays_inside_its_file(tmp_path_factory, seed):
    draw = random.Random(seed)
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    head, placed = lay_out(
        [
            TensorEntry("a", "F32", (3, 5)),
            TensorEntry("b", "U8", (0,)),
            TensorEntry("c", "BF16", (9,)),
        ]
    )
    data = bytes(max(e.offset + e.nbytes for e in placed) - len(head))
    for _ in range(10):
        table, other = json.loads(head[8:]), bytearray(head)
        container, key = draw.choice(places_of(table))
        container[key] = copy.deepcopy(draw.choice(ODD))
        at = draw.randrange(len(head))
        other[at : at + 3] = draw.randbytes(3)
        content = header(table, data) if draw.random() < 0.5 else bytes(other) + data
        try:
            found = entries_of(path, content)
        except CheckpointError:
            continue
        taken = sorted((e.offset, e.offset + e.nbytes) for e in found.values())
        assert all(a[1] == b[0] for a, b in itertools.pairwise(taken))
        assert not taken or taken[-1][1] == len(content)
