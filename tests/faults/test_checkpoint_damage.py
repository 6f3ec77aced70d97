"""Loading a checkpoint with truncated, changed, swapped or missing files."""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_model import differences, everything, open_engine, train
from saved_runs import STAGE, contents, equals_expected, everywhere, failure, saves
from zeroshard_testing import run_ranks

from zeroshard.checkpoint import save
from zeroshard.checkpoint.blocks import BlockWriter

BLOCK_NBYTES = 4096
SHARD = "rank-00001-of-{:05d}.safetensors"


def saves_in_small_blocks(root: Path) -> None:
    """Two checkpoints whose files have many blocks."""
    save.BLOCK_NBYTES = BLOCK_NBYTES
    save.BlockWriter = functools.partial(BlockWriter, block_nbytes=BLOCK_NBYTES)
    try:
        saves(root, "first", "second")
    finally:
        save.BLOCK_NBYTES, save.BlockWriter = 4 << 20, BlockWriter


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[int, Path]:
    """For each world size, a run that was saved twice."""
    found = {ranks: tmp_path_factory.mktemp("runs") / "run" for ranks in (2, 3)}
    for ranks, root in found.items():
        run_ranks(saves_in_small_blocks, ranks, root)
    return found


def copy_of(run: Path, place: Path) -> Path:
    shutil.copytree(run.parent, place, dirs_exist_ok=True)
    return place / run.name


@pytest.fixture
def root(runs: dict[int, Path], tmp_path: Path) -> Path:
    return copy_of(runs[2], tmp_path)


# ---------------------------------------------------------------- how files are damaged


def resize(change: Callable[[int], int]) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, change(path.stat().st_size))


def flip(where: Callable[[int], int]) -> Callable[[Path], None]:
    """Flip one bit of the byte at ``where(nbytes)``."""

    def act(path: Path) -> None:
        text = bytearray(path.read_bytes())
        text[where(len(text))] ^= 1
        path.write_bytes(text)

    return act


def is_at(where: Callable[[int], int]) -> Callable[[Path], str]:
    """The bytes that the checksum names."""

    def words(path: Path) -> str:
        nbytes = path.stat().st_size
        begin = where(nbytes) // BLOCK_NBYTES * BLOCK_NBYTES
        stop = min(begin + BLOCK_NBYTES, nbytes)
        return f"is damaged between bytes {begin:,} and {stop:,}"

    return words


def instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Replace the file by something else of the same name."""

    def act(path: Path) -> None:
        path.unlink()
        make(path)

    return act


def link_to_a_copy(path: Path) -> None:
    copy = path.parent.parent / "copy"
    path.rename(copy)
    path.symlink_to(copy)


def words(text: str) -> Callable[[Path], str]:
    return lambda path: text


def header(nbytes: int) -> int:
    return 100


def middle(nbytes: int) -> int:
    return nbytes // 2


def last(nbytes: int) -> int:
    return nbytes - 1


DAMAGES: dict[str, tuple[str, Callable[[Path], None], Callable[[Path], str]]] = {
    "cut by a byte": (SHARD, resize(lambda n: n - 1), words("it was truncated or replaced")),
    "cut in half": (SHARD, resize(lambda n: n // 2), words("it was truncated or replaced")),
    "empty": (SHARD, resize(lambda n: 0), words("has 0 bytes instead of")),
    "grown": (SHARD, resize(lambda n: n + 1), words("it was truncated or replaced")),
    "a bit of the header": (SHARD, flip(header), is_at(header)),
    "a bit in the middle": (SHARD, flip(middle), is_at(middle)),
    "the last bit": (SHARD, flip(last), is_at(last)),
    "missing": (SHARD, instead(lambda path: None), words("No such file or directory (ENOENT)")),
    "a pipe": (SHARD, instead(os.mkfifo), words("is not a regular file")),
    "a directory": (SHARD, instead(Path.mkdir), words("is not a regular file")),
    "a link": (SHARD, link_to_a_copy, words("Too many levels of symbolic links (ELOOP)")),
    "no manifest": ("manifest.json", instead(lambda path: None), words("was not completed")),
    "half a manifest": ("manifest.json", resize(lambda n: n // 2), words("as JSON")),
    "a bit of the manifest": ("manifest.json", flip(lambda n: n - 300), words("")),
    "a manifest of bytes": ("manifest.json", lambda p: p.write_bytes(b"\xff\xfe{"), words("")),
    "a manifest that is a pipe": ("manifest.json", instead(os.mkfifo), words("not a regular file")),
    "a manifest that is a link": ("manifest.json", link_to_a_copy, words("")),
}  # fmt: skip
IN_VALUES = ("a bit in the middle",)


# ---------------------------------------------------------------- what loading does about it


class Warnings(logging.Handler):
    """The warnings of ``zeroshard``."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def loads_damaged(root: Path, name: str, reason: str, tears: bool) -> None:
    """Loading ``latest`` falls back to an older checkpoint with a warning. Loading the damaged tag
    raises."""
    warnings = Warnings()
    logging.getLogger("zeroshard").addHandler(warnings)
    try:
        with open_engine(STAGE) as engine:
            train(engine, 1)
            path, client_state = engine.load_checkpoint(root)
            assert Path(path) == root / "first"
            assert client_state == {"note": "first"}
            assert engine.global_steps == 1
            assert equals_expected(engine, root, "first") == []
            if engine.global_rank == 0:
                assert f"{root}/second/{name}" in warnings.texts[-1]
                assert reason in warnings.texts[-1]
                assert warnings.texts[-1].endswith(" Using first instead.")
            train(engine, 2)

            before = everything(engine)
            kind, text = failure(lambda: engine.load_checkpoint(root, "second"))
            assert kind == "CheckpointError"
            assert len(set(everywhere(text))) == 1
            assert f"{root}/second/{name}" in text
            assert reason in text
            if tears:
                kind, text = failure(lambda: train(engine, 1))
                assert kind == "UsageError"
                assert "loading a checkpoint did not finish" in text
                kind, _ = failure(lambda: engine.save_checkpoint(root, "torn"))
                assert kind == "UsageError"
            else:
                assert differences(everything(engine), before) == []
                train(engine, 1)
            engine.load_checkpoint(root, "first")
            assert equals_expected(engine, root, "first") == []
            train(engine, 1)
    finally:
        logging.getLogger("zeroshard").removeHandler(warnings)


def damage(root: Path, kind: str, ranks: int) -> tuple[str, str]:
    """Damage the newest checkpoint. Returns the file and the reason that the error must name."""
    name, act, reason = DAMAGES[kind]
    name = name.format(ranks)
    path = root / "second" / name
    told = reason(path)
    act(path)
    return name, told


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_named_and_the_one_before_is_taken(root, kind):
    name, reason = damage(root, kind, 2)
    before = contents(root.parent)
    run_ranks(loads_damaged, 2, root, name, reason, kind in IN_VALUES, timeout=30)
    assert contents(root.parent) == before


@pytest.mark.parametrize(
    "kind", ["cut by a byte", "a bit in the middle", "the last bit", "missing"]
)
def test_damage_is_found_by_ranks_of_another_number(runs, tmp_path, kind):
    root = copy_of(runs[3], tmp_path)
    name, reason = damage(root, kind, 3)
    run_ranks(loads_damaged, 2, root, name, reason, kind in IN_VALUES, timeout=30)


def loads_nothing(root: Path) -> str:
    with open_engine(STAGE) as engine:
        before = everything(engine)
        kind, text = failure(lambda: engine.load_checkpoint(root))
        assert kind == "CheckpointError"
        assert differences(everything(engine), before) == []
        train(engine, 1)
    return text


def test_if_nothing_is_whole_all_reasons_are_told(root):
    for tag in ("first", "second"):
        resize(lambda n: n - 1)(root / tag / SHARD.format(2))
    texts = run_ranks(loads_nothing, 2, root)
    assert texts[0] == texts[1]
    for tag in ("first", "second"):
        assert f"{root}/{tag}/{SHARD.format(2)}" in texts[0]


def tears_for_good(root: Path) -> None:
    with open_engine(STAGE) as engine:
        kind, _ = failure(lambda: engine.load_checkpoint(root))
        assert kind == "CheckpointError"
        kind, text = failure(lambda: train(engine, 1))
        assert kind == "UsageError"
        assert "loading a checkpoint did not finish" in text


def test_an_engine_that_no_checkpoint_filled_does_not_train(root):
    for tag in ("first", "second"):
        flip(middle)(root / tag / SHARD.format(2))
    run_ranks(tears_for_good, 2, root)


# ---------------------------------------------------------------- latest


def test_without_latest_the_error_lists_what_is_there(root):
    (root / "latest").unlink()
    texts = run_ranks(loads_nothing, 2, root)
    assert texts[0] == texts[1]
    assert f"{root} has no file 'latest'" in texts[0]
    assert "first, second" in texts[0]


@pytest.mark.parametrize("place", ["nowhere", "empty"])
def test_a_directory_without_checkpoints_is_told_from_one_with_some(tmp_path, place):
    if place == "empty":
        (tmp_path / place).mkdir()
    texts = run_ranks(loads_nothing, 2, tmp_path / place)
    assert texts[0] == texts[1]
    told = {"nowhere": "does not exist. Check", "empty": "'latest'. It contains no checkpoint"}
    assert told[place] in texts[0]


def falls_back(root: Path) -> None:
    with open_engine(STAGE) as engine:
        path, _ = engine.load_checkpoint(root)
        assert Path(path) == root / "second"
        assert equals_expected(engine, root, "second") == []


def test_latest_that_names_what_is_gone_leads_to_the_newest(root):
    (root / "latest").write_text("third")
    run_ranks(falls_back, 2, root)


@pytest.mark.parametrize("text", ["", "../first", "first\nsecond", "/etc", ".first", "a" * 9000])
def test_latest_that_is_no_tag_is_refused_with_the_tags(root, text):
    (root / "latest").write_text(text)
    texts = run_ranks(loads_nothing, 2, root)
    assert texts[0] == texts[1]
    assert f"{root}/latest" in texts[0]
    assert "first, second" in texts[0]


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir], ids=["a pipe", "a directory"])
def test_latest_that_is_no_file_is_refused(root, make):
    instead(make)(root / "latest")
    texts = run_ranks(loads_nothing, 2, root, timeout=20)
    assert texts[0] == texts[1]
    assert f"{root}/latest" in texts[0]


# ---------------------------------------------------------------- parts of different saves


@pytest.mark.parametrize("name", ["manifest.json", SHARD.format(2)])
def test_parts_of_different_saves_are_no_checkpoint(root, name):
    shutil.copy(root / "first" / name, root / "second" / name)
    kinds = run_ranks(refused_by_tag, 2, root, "second")
    assert kinds[0] == kinds[1]
    assert f"{root}/second/" in kinds[0]


def refused_by_tag(root: Path, tag: str) -> str:
    with open_engine(STAGE) as engine:
        kind, text = failure(lambda: engine.load_checkpoint(root, tag))
    assert kind == "CheckpointError"
    return text


def other_places(roots: list[Path]) -> str:
    """Each rank has a separate directory, like nodes without a shared disk."""
    with open_engine(STAGE) as engine:
        kind, text = failure(lambda: engine.load_checkpoint(roots[engine.global_rank], "second"))
        train(engine, 1)
    assert kind == "CheckpointError"
    return text


def test_a_damaged_file_is_not_sent_to_a_rank_that_lacks_it(root, tmp_path):
    name = SHARD.format(2)
    other = copy_of(root, tmp_path / "other")
    (other / "second" / name).unlink()
    flip(middle)(root / "second" / name)
    before = contents(other)
    texts = run_ranks(other_places, 2, [root, other], timeout=30)
    assert name in texts[0]
    assert texts[0] == texts[1]
    assert contents(other) == before


def test_directories_of_different_runs_are_not_mixed(root, tmp_path):
    other = copy_of(root, tmp_path / "other")
    shutil.rmtree(other / "second")
    shutil.copytree(other / "first", other / "second")
    texts = run_ranks(other_places, 2, [root, other], timeout=30)
    assert texts[0] == texts[1]
    assert re.search(r"on rank 1 belongs to another save than on rank 0", texts[0])


def test_a_manifest_that_leads_out_of_the_directory_is_refused(root):
    path = root / "second" / "manifest.json"
    head = json.loads(path.read_text())
    head["body"]["files"][1]["name"] = "../first/" + SHARD.format(2)
    path.write_text(json.dumps(head))
    texts = run_ranks(refused_by_tag, 2, root, "second")
    assert f"{path}" in texts[0]


def torn(root: Path, stage: int) -> None:
    with open_engine(stage) as engine:
        kind, text = failure(lambda: engine.load_checkpoint(root, "second"))
        assert kind == "CheckpointError"
        assert "is damaged between" in text
        engine.load_checkpoint(root, "first")
        assert equals_expected(engine, root, "first") == []


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_where_parameters_are_whole_no_rank_waits_for_the_one_that_cannot_read(root, stage):
    """Stage 3 gathers nothing while it loads."""
    flip(middle)(root / "second" / SHARD.format(2))
    run_ranks(torn, 2, root, stage, timeout=30)
