"""What removes recordings of dead ranks removes nothing else, whatever lies beside them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.launch.agent import remove_recordings
from zeroshard.run.recordings import FlightRecorder, pid_space, sweep_recordings

ENDED = 2**22 + 1  # above every number of a process
NOBODY = 65534
OTHERS = [
    "a living one",
    "other bytes",
    "a link",
    "a folder",
    "of a container",
    "stacks that are a link",
]
if hasattr(os, "getuid") and os.getuid() == 0:
    OTHERS.append("another user's")


def recording_of(pid: int, space: int | None = None) -> bytes:
    buffer = bytearray(FlightRecorder.nbytes_for(4))
    recorder = FlightRecorder(buffer, ring=4, pid=pid, rank=0, group_size=1)
    if space is not None:
        recorder.words[9] = space
    return bytes(buffer)


def put(folder: Path, number: int, what: str, kept: Path) -> None:
    """Put something into ``folder`` that must keep it, or a recording or stacks of a dead process."""
    path = folder / str(number)
    if what == "dead":
        path.write_bytes(recording_of(ENDED))
    elif what == "stacks" and not (folder / "process.stack").is_symlink():
        (folder / "process.stack").write_bytes(b"File ...")
    elif what == "a living one":
        path.write_bytes(recording_of(os.getpid()))
    elif what == "other bytes":
        path.write_bytes(b"weights" * 100)
    elif what == "a link":
        path.symlink_to(kept)
    elif what == "a folder":
        path.mkdir()
    elif what == "of a container":
        path.write_bytes(recording_of(ENDED, pid_space() + 1))
    elif what == "stacks that are a link":
        (folder / "process.stack").unlink(missing_ok=True)
        (folder / "process.stack").symlink_to(kept)
    elif what == "another user's":
        path.write_bytes(recording_of(ENDED))
        os.chown(path, NOBODY, NOBODY)


def tree(root: Path) -> dict[str, bytes | str]:
    """All below a folder: what a file holds, where a link points to."""
    return {
        str(path.relative_to(root)): os.readlink(path)
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else "folder"
        for path in root.rglob("*")
    }


@pytest.mark.parametrize("cleaner", ["sweep", "launcher"])
@settings(deadline=None, max_examples=60)
@given(
    contents=st.lists(
        st.tuples(
            st.lists(st.sampled_from(["dead", "stacks", *OTHERS]), max_size=4),
            st.sampled_from(["own", "own", "a link", "another user's"]),
        ),
        max_size=5,
    )
)
def test_only_folders_with_nothing_but_own_dead_recordings_are_removed(cleaner, contents):
    with tempfile.TemporaryDirectory() as scratch:
        root, away = Path(scratch) / "shm", Path(scratch) / "away"
        root.mkdir()
        away.mkdir()
        kept = away / "kept"
        kept.write_bytes(recording_of(ENDED))
        removed = set()
        for number, (files, owner) in enumerate(contents):
            name = f"zeroshard-run-{number:08x}"
            folder = (away if owner == "a link" else root) / name
            folder.mkdir()
            for position, what in enumerate(files):
                put(folder, position, what, kept)
            if owner == "a link":
                (root / name).symlink_to(folder)
            is_foreign = owner == "another user's" and os.getuid() == 0
            if is_foreign:
                os.chown(folder, NOBODY, NOBODY)
            if (
                owner != "a link"
                and not is_foreign
                and "dead" in files
                and not {*files} & {*OTHERS}
            ):
                removed.add(name)
        before, outside = tree(root), tree(away)
        if cleaner == "sweep":
            sweep_recordings(root, older_than_s=-10)
        else:
            remove_recordings("run", {ENDED}, root)
        left = {name: what for name, what in before.items() if name.split("/")[0] not in removed}
        assert (tree(root), tree(away)) == (left, outside)


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_another_container_removes_nothing_of_a_living_process(tmp_path):
    """Its processes have numbers of their own: none there has the number of this one."""
    folder = tmp_path / "zeroshard-run-00000000"
    folder.mkdir()
    (folder / "0").write_bytes(recording_of(os.getpid()))
    sweep = (
        "import sys; from pathlib import Path; from zeroshard.run.recordings import sweep_recordings; "
        "from zeroshard.launch.agent import remove_recordings; root = Path(sys.argv[1]); "
        "assert not Path('/proc', sys.argv[2]).exists(); sweep_recordings(root, older_than_s=-10); "
        "remove_recordings('run', {int(sys.argv[2])}, root)"
    )
    words = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make a namespace")
    words += [sys.executable, "-c", sweep, str(tmp_path), str(os.getpid())]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert (folder / "0").exists()
