"""A directory of checkpoints: listing, choosing, saving and pruning."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_dirs import write_checkpoint
from kit import adamw, config
from torch import nn

from zeroshard import Engine
from zeroshard.checkpoint import directory as places
from zeroshard.checkpoint.manifest import MANIFEST, Manifest, SavedFile, parse
from zeroshard.errors import CheckpointError, UsageError

FROZEN = "frozen-0123456789abcdef"
OTHER = "frozen-fedcba9876543210"


def save(root: Path, tag: str, step: int, *, frozen: str = "", **keys) -> Path:
    """A checkpoint; with ``frozen`` it refers to a file there, which is made."""
    path = write_checkpoint(root, {"w": torch.arange(10.0)}, tag=tag, step=step, files=1, **keys)
    if frozen:
        (root / frozen).mkdir(exist_ok=True)
        (root / frozen / "base.safetensors").write_bytes(b"")
        manifest = parse((path / MANIFEST).read_text(), where=path)
        file = SavedFile(name=f"../{frozen}/base.safetensors", nbytes=0, crc32=())
        more = manifest.model_copy(update={"files": (*manifest.files, file)})
        (path / MANIFEST).write_text(more.dump())
    return path


def listing(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def spoil(path: Path) -> None:
    text = (path / MANIFEST).read_text()
    (path / MANIFEST).write_text(text[: len(text) // 2])


# ---------------------------------------------------------------------- names


@pytest.mark.parametrize(
    "tag", ["global_step10", "a", "1", 7, "epoch=3-loss=0.5", "a.b", "v1+x@y,z", "_x"]
)
def test_tags_are_names_of_directories(tag):
    assert places.check_tag(tag) == str(tag)


@pytest.mark.parametrize(
    "tag",
    [
        "", ".", "..", ".hidden", "a/b", "../a", "/a", "a\\b", "a\0", "a b", "a\n", "latest", "frozen-1",
        "é", "a" * 201, "-x", None.__class__, "a:b", "*",
    ],
)  # fmt: skip
def test_what_cannot_be_a_tag_is_refused(tag):
    with pytest.raises(UsageError, match="cannot be the name of a checkpoint"):
        places.check_tag(tag)


def test_tags_are_in_the_order_of_training_then_of_time_then_of_names(tmp_path):
    save(tmp_path, "z", 1)
    save(tmp_path, "a", 20, saved_at="2030-01-02T00:00:00+00:00")
    save(tmp_path, "b", 20, saved_at="2030-01-01T00:00:00+00:00")
    save(tmp_path, "global_step9", 9)
    save(tmp_path, "global_step10", 10)
    save(tmp_path, "c", 20, saved_at="2030-01-01T00:00:00+00:00")
    assert places.tags(tmp_path) == ["z", "global_step9", "global_step10", "b", "c", "a"]


def test_only_complete_checkpoints_are_tags(tmp_path):
    save(tmp_path, "good", 1)
    spoil(save(tmp_path, "spoiled", 2))
    (save(tmp_path, "without", 3) / MANIFEST).unlink()
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    save(tmp_path, ".hidden.saving-00000001", 4)
    save(tmp_path, ".good.replaced", 5)
    (tmp_path / "link").symlink_to(tmp_path / "good")
    (tmp_path / "fifo").mkdir()
    os.mkfifo(tmp_path / "fifo" / MANIFEST)
    assert places.tags(tmp_path) == ["good"]
    assert places.tags(tmp_path / "nowhere") == []
    assert places.tags(tmp_path / "file") == []


# ---------------------------------------------------------------------- which one is meant


def test_latest_is_what_the_file_says(tmp_path):
    save(tmp_path, "a", 1)
    save(tmp_path, "b", 2, is_latest=False)
    assert places.latest(tmp_path) == "a"
    assert places.resolve(tmp_path) == tmp_path / "a"
    assert places.resolve(tmp_path, "b") == tmp_path / "b"
    (tmp_path / "latest").write_text("b\n")
    assert places.latest(str(tmp_path)) == "b"


@pytest.mark.parametrize(
    "content",
    [b"", b"../a", b"/etc", b".a.replaced", b"a\nb", b"\xff\xfe", b"a\0", b"x" * 10_000_000],
)
def test_a_latest_that_names_no_tag_is_refused(tmp_path, content):
    (tmp_path / "latest").write_bytes(content)
    with pytest.raises(CheckpointError, match="latest") as error:
        places.resolve(tmp_path)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda p: os.symlink("/dev/zero", p)])
def test_a_latest_that_is_no_file_is_not_waited_for(tmp_path, make):
    make(tmp_path / "latest")
    with pytest.raises(CheckpointError, match="latest"):
        places.latest(tmp_path)


def test_what_is_not_there_is_said_with_what_is(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"nowhere does not exist\. Check the path\. .* missing_ok=True"
    ):
        places.latest(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"has no file 'latest'\. It contains no checkpoint"):
        places.latest(tmp_path)
    with pytest.raises(CheckpointError, match="There is no other checkpoint"):
        places.resolve(tmp_path, "b")
    for step in range(7):
        save(tmp_path, f"s{step}", step)
    with pytest.raises(CheckpointError, match=r"b does not exist\. There are s2, s3, s4, s5, s6"):
        places.resolve(tmp_path, "b")
    (tmp_path / "latest").write_text("b")
    with pytest.raises(CheckpointError, match=r"b does not exist\. There are s2, s3, s4, s5, s6"):
        places.resolve(tmp_path)
    (tmp_path / "latest").unlink()
    with pytest.raises(
        CheckpointError, match=("contains s2, s3, s4, s5, s6: pass one of them as tag=")
    ):
        places.resolve(tmp_path)
    with pytest.raises(UsageError):
        places.resolve(tmp_path, "../s1")


def test_fallbacks_are_older_and_the_newest_first(tmp_path):
    for step in range(4):
        save(tmp_path, f"s{step}", step)
    assert places.fallbacks(tmp_path, "s2") == ["s1", "s0"]
    assert places.fallbacks(tmp_path, "s0") == []
    assert places.fallbacks(tmp_path, "gone") == ["s3", "s2", "s1", "s0"]
    spoil(tmp_path / "s2")
    assert places.fallbacks(tmp_path, "s2") == ["s3", "s1", "s0"]
    assert places.fallbacks(tmp_path, "s3") == ["s1", "s0"]


def test_the_newest_is_the_last_one_that_was_saved_although_another_run_had_come_further(tmp_path):
    for day, (tag, step) in enumerate([("far", 9), ("again", 3), ("on", 4)], 1):
        save(tmp_path, tag, step, saved_at=f"2030-01-0{day}T00:00:00+00:00")
    assert places.newest_first(tmp_path) == ["on", "again", "far"]


def test_one_that_was_put_aside_counts_and_so_does_the_latest_that_cannot_be_read(tmp_path):
    for step, tag in enumerate("abc"):
        save(tmp_path, tag, step)
    (tmp_path / "b").rename(tmp_path / ".b.replaced")  # killed between two renames
    spoil(tmp_path / "c")
    assert places.newest_first(tmp_path) == ["c", "b", "a"]
    assert listing(tmp_path) == ["a", "b", "c", "latest"]


@pytest.mark.parametrize("content", [b"", b"a b", b"\xff", b"../x", b"x" * 10_000])
def test_the_manifests_decide_if_latest_cannot_be_read(tmp_path, caplog, content):
    (tmp_path / "latest").write_bytes(content)
    with pytest.raises(CheckpointError, match="latest"):
        places.newest_first(tmp_path)  # nothing is complete: a new run would hide that
    for step in range(2):
        save(tmp_path, f"s{step}", step)
    (tmp_path / "latest").write_bytes(content)
    assert places.newest_first(tmp_path) == ["s1", "s0"]
    assert "The newest complete checkpoint is s1" in caplog.text


def test_what_was_put_aside_is_taken_back_only_where_nothing_is(tmp_path):
    save(tmp_path, "a", 1).rename(tmp_path / ".a.replaced")
    assert places.resolve(tmp_path) == tmp_path / "a"
    assert listing(tmp_path) == ["a", "latest"]
    shutil.copytree(tmp_path / "a", tmp_path / ".a.replaced")
    (tmp_path / "a" / "mark").write_text("")
    places.restore_replaced(tmp_path, "a")
    assert (tmp_path / "a" / "mark").exists()
    places.restore_replaced(tmp_path, "other")
    assert listing(tmp_path) == [".a.replaced", "a", "latest"]


# ---------------------------------------------------------------------- writing


def test_what_interrupted_saves_left_is_removed_and_nothing_else(tmp_path):
    save(tmp_path, "a", 1, frozen=FROZEN)
    kept = {"a", "latest", FROZEN, ".saving-00000001", ".a.saving-xyz", ".mine"}
    for name in kept - {"a", "latest", FROZEN}:
        (tmp_path / name).mkdir()
    own = ".a.saving-0000000a"
    (tmp_path / ".a.replaced").mkdir()  # its successor is there
    save(tmp_path, "b", 2, is_latest=False).rename(tmp_path / ".b.replaced")  # its is not
    for name in (".a.saving-00000001", ".b.saving-ffffffff", f".{FROZEN}.saving-00000001"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank.safetensors").write_text("half")
    places.remove_leftovers(tmp_path)
    assert set(listing(tmp_path)) == kept | {"b"}
    assert places.tags(tmp_path) == ["a", "b"]
    places.begin(tmp_path, own)
    (tmp_path / own / "rank.safetensors").write_text("half")
    places.begin(tmp_path, own)
    assert listing(tmp_path / own) == ["rank.safetensors"]  # another rank was here first
    places.begin(tmp_path, f".{FROZEN}.saving-0000000a")
    assert set(listing(tmp_path)) == kept | {own, "b", f".{FROZEN}.saving-0000000a"}
    places.begin(tmp_path / "new" / "deep", own)
    assert listing(tmp_path / "new" / "deep") == [own]


@pytest.mark.parametrize("blocked", ["root", "place"])
def test_a_place_that_cannot_be_made_is_an_error(tmp_path, blocked):
    root = tmp_path / "root"
    if blocked == "place":
        root.mkdir()
    (root if blocked == "root" else root / ".a.saving-00000001").write_text("a file")
    with pytest.raises(CheckpointError, match=r"cannot be created: .*\(E"):
        places.begin(root, ".a.saving-00000001")


def staged(root: Path, text: str) -> Path:
    place = root / ".a.saving-00000001"
    place.mkdir()
    (place / "x").write_text(text)
    return place


def test_commit_replaces_and_leaves_nothing(tmp_path):
    for text in ("first", "second", "third"):
        places.commit(staged(tmp_path, text), tmp_path / "a")
        assert (tmp_path / "a" / "x").read_text() == text
        assert listing(tmp_path) == ["a"]
    (tmp_path / ".a.replaced").mkdir()  # of a save that ended after its second rename
    places.commit(staged(tmp_path, "fourth"), tmp_path / "a")
    assert (tmp_path / "a" / "x").read_text() == "fourth"
    assert listing(tmp_path) == ["a"]


def test_commit_that_ends_between_its_renames_loses_nothing(tmp_path, monkeypatch):
    places.commit(staged(tmp_path, "old"), tmp_path / "a")
    place, real = staged(tmp_path, "new"), Path.rename

    def rename(self, target):
        if self == place:
            raise KeyboardInterrupt
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        places.commit(place, tmp_path / "a")
    monkeypatch.undo()
    assert not (tmp_path / "a").exists()
    places.restore_replaced(tmp_path, "a")
    assert (tmp_path / "a" / "x").read_text() == "old"


def test_small_files_are_old_or_new_whatever_happens(tmp_path, monkeypatch):
    places.write_durably(tmp_path / "latest", "old")
    for name in ("fsync", "replace"):

        def fails(*_):
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(*((os, name) if name == "fsync" else (Path, name)), fails)
        with pytest.raises(CheckpointError, match="latest cannot be written: Input"):
            places.write_durably(tmp_path / "latest", "new")
        monkeypatch.undo()
        assert (tmp_path / "latest").read_text() == "old"
    places.write_durably(tmp_path / "latest", "new")
    assert (tmp_path / "latest").read_text() == "new"
    assert listing(tmp_path) == ["latest"]


# ---------------------------------------------------------------------- pruning


def test_prune_keeps_the_newest_and_what_latest_names(tmp_path):
    for step in range(6):
        save(tmp_path, f"s{step}", step, is_latest=step == 1)
    before = listing(tmp_path)
    assert places.prune(tmp_path, 2, dry_run=True) == ["s0", "s2", "s3"]
    assert listing(tmp_path) == before
    assert places.prune(tmp_path, 2) == ["s0", "s2", "s3"]
    assert listing(tmp_path) == ["latest", "s1", "s4", "s5"]
    assert places.prune(tmp_path, 2) == []
    assert places.prune(tmp_path, 100) == []
    assert places.prune(tmp_path, 0) == ["s4", "s5"]
    assert listing(tmp_path) == ["latest", "s1"]
    assert places.prune(tmp_path / "nowhere", 1) == []


def test_prune_leaves_alone_what_is_no_checkpoint_of_ours(tmp_path):
    for step in range(4):
        save(tmp_path, f"s{step}", step)
    spoil(tmp_path / "s0")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "best").symlink_to("s1")
    assert places.prune(tmp_path, 1) == ["s2"]
    assert listing(tmp_path) == ["best", "latest", "notes", "notes.txt", "s0", "s1", "s3"]


def test_a_tag_that_is_a_link_is_read_and_what_it_refers_to_is_never_removed(tmp_path):
    other, here = tmp_path / "other", tmp_path / "here"
    save(other, "s0", 0)
    save(here, "s1", 1)
    (here / "s0").symlink_to(other / "s0")
    (here / "s2").symlink_to(tmp_path / "nowhere")
    (here / ".s7.saving-01234567").symlink_to(other)
    (here / ".s1.replaced").symlink_to(other)
    assert places.read_manifest(places.resolve(here, "s0")).step == 0
    assert places.tags(here) == ["s1"]
    assert places.prune(here, 0) == []  # latest names s1
    for tag in ("s0", "s0", "s2"):
        (here / ".draft").mkdir()
        places.commit(here / ".draft", here / tag)
        assert not (here / tag).is_symlink()
    places.remove_leftovers(here)
    assert listing(here) == ["latest", "s0", "s1", "s2"]
    assert listing(other) == ["latest", "s0"]
    assert listing(other / "s0")


def test_prune_removes_frozen_weights_with_the_last_that_refers_to_them(tmp_path):
    save(tmp_path, "s0", 0, frozen=FROZEN)
    save(tmp_path, "s1", 1, frozen=FROZEN)
    save(tmp_path, "s2", 2, frozen=OTHER)
    save(tmp_path, "s3", 3, frozen=OTHER)
    assert places.prune(tmp_path, 3) == ["s0"]
    assert places.prune(tmp_path, 2, dry_run=True) == ["s1", FROZEN]
    assert places.prune(tmp_path, 2) == ["s1", FROZEN]
    assert listing(tmp_path) == [OTHER, "latest", "s2", "s3"]
    assert places.frozen_names(tmp_path / "s3") == {OTHER}


def test_prune_removes_frozen_weights_that_a_killed_save_left(tmp_path):
    save(tmp_path, "s0", 0)
    (tmp_path / FROZEN).mkdir()
    assert places.prune(tmp_path, 5) == [FROZEN]
    assert listing(tmp_path) == ["latest", "s0"]


def test_frozen_weights_of_a_checkpoint_put_aside_are_in_use(tmp_path):
    save(tmp_path, "a", 1, frozen=FROZEN).rename(tmp_path / ".a.replaced")
    save(tmp_path, "b", 2)
    assert places.prune(tmp_path, 1) == []
    assert places.resolve(tmp_path, "a").is_dir()
    assert places.prune(tmp_path, 1) == ["a", FROZEN]


def test_frozen_weights_stay_where_a_manifest_cannot_be_read(tmp_path):
    newer = save(tmp_path, "newer", 1, frozen=FROZEN)
    text = json.loads((newer / MANIFEST).read_text())
    (newer / MANIFEST).write_text(json.dumps({**text, "version": 99}))
    save(tmp_path, "s2", 2)
    assert places.prune(tmp_path, 1) == []
    assert (tmp_path / FROZEN).is_dir()


def test_a_removal_that_is_interrupted_leaves_no_half_of_a_checkpoint(tmp_path, monkeypatch):
    for step in range(2):
        save(tmp_path, f"s{step}", step)
    monkeypatch.setattr(shutil, "rmtree", lambda *_args, **_keys: None)
    places.prune(tmp_path, 1)
    monkeypatch.undo()
    assert places.tags(tmp_path) == ["s1"]
    places.remove_leftovers(tmp_path)
    places.begin(tmp_path, ".s2.saving-00000001")
    assert listing(tmp_path) == [".s2.saving-00000001", "latest", "s1"]


def test_frozen_weights_are_found_again_only_whole(tmp_path):
    assert places.find_frozen(tmp_path, FROZEN) is None
    path = save(tmp_path, "s0", 0, frozen=FROZEN)
    found = places.find_frozen(tmp_path, FROZEN)
    assert isinstance(found, Manifest)
    assert found.tag == "s0"
    assert places.find_frozen(tmp_path, OTHER) is None
    (tmp_path / FROZEN / "base.safetensors").write_bytes(b"grown")
    assert places.find_frozen(tmp_path, FROZEN) is None
    (tmp_path / FROZEN / "base.safetensors").unlink()
    assert places.find_frozen(tmp_path, FROZEN) is None
    (tmp_path / FROZEN / "base.safetensors").write_bytes(b"")
    spoil(path)
    assert places.find_frozen(tmp_path, FROZEN) is None


def test_leftovers_are_gone_before_ranks_make_files_and_measure_space(tmp_path, monkeypatch):
    (tmp_path / ".old.saving-00000001").mkdir()
    seen = []

    def begin(root: Path, *_: object, **__: object) -> None:
        seen.extend(root.iterdir())
        raise CheckpointError("far enough")

    monkeypatch.setattr(places, "begin", begin)
    with Engine(nn.Linear(8, 4), config=config(2), optimizer=adamw) as engine:
        with pytest.raises(CheckpointError, match="far enough"):
            engine.save_checkpoint(tmp_path)
    assert seen == []
