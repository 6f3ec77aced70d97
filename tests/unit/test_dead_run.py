"""What `zeroshard explain` says about folders of runs: what ranks left, damaged files, wrong folders."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from zeroshard.cli.main import main
from zeroshard.comm.host import this_process
from zeroshard.comm.recorder import Recorder
from zeroshard.run.exit_report import ExitReport
from zeroshard.run.recordings import PRESENCE
from zeroshard.run.run_folder import keep_exit, point_to
from zeroshard.watchdog.dead_run import explain_run, text_of
from zeroshard.watchdog.diagnosis import Diagnosis
from zeroshard.watchdog.rank_status import RankStatus
from zeroshard.watchdog.run_record import (
    Peer,
    RanksFile,
    StorePlace,
    keep_recordings,
    read_ranks,
    write_ranks,
)

SHARD = torch.zeros(4)


class Folder:
    """The folder of a run whose ranks are gone. Its recordings are in ``shared``."""

    def __init__(self, root: Path, monkeypatch, ranks: int = 2) -> None:
        monkeypatch.setenv("ZEROSHARD_RUN_ID", "run1")
        self.root = root
        self.path = root / "run1"
        dead = replace(this_process(), started="0")
        self.peers = {
            rank: Peer(rank, replace(dead, pid=100 + rank), str(self.shared(rank) / PRESENCE))
            for rank in range(ranks)
        }
        self.write()

    def shared(self, rank: int) -> Path:
        return self.root / f"shared-{rank}"

    def write(self) -> None:
        place = StorePlace("tcp", "127.0.0.1", 1, space="zs")
        write_ranks(str(self.root), RanksFile(place, 0, True, self.peers, {"0": "initialize 0"}, 0))

    def record(self, rank: int, *names: str, waits: bool = False, step: int = 3) -> None:
        """Leave a recording in shared memory, as a process that is killed does."""
        file = self.shared(rank) / "0"
        recorder = Recorder(recording=file, rank=rank, group_size=len(self.peers))
        recorder.mark_step(step)
        for name in names:
            item = recorder.all_gather(name, torch.zeros(8), SHARD)
        if waits:
            recorder.begin_wait(item)
            recorder.note_wait()
        raw = file.read_bytes()
        recorder.close()
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(raw)

    def keep(self, rank: int, reason: str) -> None:
        keep_recordings(str(self.root), self.peers[rank], reason, by=rank)
        shutil.rmtree(self.shared(rank))

    def hang(self, *, fatal: bool) -> None:
        words = Diagnosis(
            "RankLate", fatal, (1,), "RankLate at step 3 after 9 s (2 of 2)\n  rank 1: x"
        )
        statuses = [asdict(RankStatus(0, None)), asdict(RankStatus(1, None))]
        (self.path / "hang-3-100.json").write_text(
            json.dumps({"diagnosis": asdict(words), "statuses": statuses})
        )


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Folder:
    return Folder(tmp_path, monkeypatch)


def refusal(path: Path) -> str:
    done = CliRunner().invoke(main, ["explain", str(path)])
    assert done.exit_code == 2
    assert "Traceback" not in done.output
    return " ".join(done.output.split())


# -- the cause -------------------------------------------------------------------------------------


def test_ranks_that_were_killed_together_are_explained_from_shared_memory(folder):
    folder.record(0, "a", "b", "c", waits=True)
    folder.record(1, "a", "b")
    found = explain_run(folder.path)
    assert found.diagnosis.kind == "RankLate"
    assert found.diagnosis.ranks == (1,)
    text = text_of(found)
    assert (
        "likely cause: every rank was ended from outside at the same time; RankLate at step 3"
        in text
    )
    assert "  rank 0: waiting in gather 'c' (#3)" in text


def test_histories_that_differ_are_the_cause(folder):
    folder.record(0, "a", "b", "c", waits=True)
    folder.record(1, "a", "c", waits=True)
    text = text_of(explain_run(folder.path))
    assert "RankDivergence" in text
    assert "rank 0: called gather 'b' (#2)" in text
    assert "rank 1: waiting in gather 'c' (#2)" in text


def test_of_two_errors_the_first_that_names_no_other_rank_is_the_cause(folder):
    folder.record(0, "a", "b", waits=True)
    folder.keep(0, "RankLost: rank 1 left")
    folder.record(1, "a")
    folder.keep(1, "ValueError: bad sample 17")
    text = text_of(explain_run(folder.path))
    assert "likely cause: rank 1 (host " in text
    assert "step 3: ValueError: bad sample 17\n  its last call was gather 'a' (#1)" in text
    assert "  rank 0: waiting in gather 'b' (#2); ended with RankLost" in text


def test_a_rank_that_left_no_word_is_the_cause(folder):
    folder.record(0, "a", "b", waits=True)
    folder.keep(0, "RankLost: rank 1 left")
    folder.record(1, "a")
    keep_recordings(str(folder.root), folder.peers[1], "", by=0)
    found = explain_run(folder.path)
    assert found.cause == (1,)
    assert found.why.startswith("its process ended without a word")
    assert found.diagnosis.kind == "RankLost"


def test_what_the_launcher_said_comes_first(folder, monkeypatch):
    folder.record(0, "a", "b", waits=True)
    folder.record(1, "a")
    monkeypatch.setattr("zeroshard.run.run_folder.default_root", lambda: folder.root / "default")
    environ = {"ZEROSHARD_RUN_ID": "run1"}
    point_to(folder.path, environ)
    lines = ("rank 1 got SIGKILL from outside.", "then rank 0 lost its peers.")
    keep_exit(ExitReport(lines, 1, "Traceback...", 137), 0, environ)
    found = explain_run(folder.path)
    assert (found.cause, found.why, found.trace) == (
        (1,),
        "got SIGKILL from outside",
        "Traceback...",
    )
    assert not list((folder.root / "default").iterdir())  # the launcher removed what it was told


def test_the_report_of_a_launcher_lies_where_its_ranks_have_their_run(folder, monkeypatch):
    """The launcher has other variables than its ranks, and so would name another run."""
    monkeypatch.delenv("ZEROSHARD_RUN_ID", raising=False)
    monkeypatch.setattr("zeroshard.run.run_folder.default_root", lambda: folder.root / "default")
    message = f"rank 1 raised ValueError: {'long ' * 50}end (exit code 1)."
    trace = 'Traceback:\n  File "train.py", line 7, in main\n  File "/x/site-packages/a.py", line 1, in a'
    keep_exit(ExitReport((message,), 1, trace, 1), 0, {"ZEROSHARD_RUN_ID": "run7"})
    [written] = (folder.root / "default").iterdir()
    assert written.name == "run7"
    text = text_of(explain_run(written))
    assert "long end" in text
    assert "  raised at train.py:7 in main" in text.splitlines()


def test_a_word_waiting_that_is_too_old_is_not_believed(folder):
    folder.record(0, "a", waits=True)
    raw = folder.shared(0) / "0"
    waits = raw.read_bytes()[64:72]
    folder.record(0, *"abcdefgh")
    found = bytearray(raw.read_bytes())
    found[64:72] = waits
    raw.write_bytes(found)
    assert explain_run(folder.path).statuses[0].flight.waiting == 0


def test_a_report_that_did_not_end_the_run_is_not_the_cause(folder):
    folder.hang(fatal=False)
    text = text_of(explain_run(folder.path))
    assert "likely cause: none is known, as no rank left an error" in text


def test_many_ranks_take_at_most_ten_lines(tmp_path, monkeypatch):
    folder = Folder(tmp_path, monkeypatch, ranks=64)
    for rank in range(64):
        folder.record(rank, *"abcdefghij"[: 1 + rank % 8])
        if rank != 5:
            folder.keep(rank, "RankLost: rank 5 left")
    text = text_of(explain_run(folder.path))
    assert "likely cause: rank 5 " in text
    assert len(text.splitlines()) <= 10
    assert max(map(len, text.splitlines())) <= 240


def test_json_has_every_rank(folder):
    folder.record(0, "a", "b", waits=True)
    folder.record(1, "a")
    done = CliRunner().invoke(main, ["explain", str(folder.root), "--json"])
    found = json.loads(done.output)
    assert [(rank["rank"], rank["step"], rank["unit"]) for rank in found["ranks"]] == [
        (0, 3, "b"), (1, 3, "a")
    ]  # fmt: skip


# -- wrong and damaged -----------------------------------------------------------------------------


def test_a_file_and_a_folder_without_a_run_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    assert "is not a directory. Give the folder of a run." in refusal(tmp_path / "file")
    assert "holds no run" in refusal(tmp_path)


def test_a_run_that_ended_without_an_error_has_no_recording(folder):
    assert "has no recording of its 2 ranks" in refusal(folder.path)


def test_a_run_that_lives_is_refused(folder):
    folder.peers[1] = replace(folder.peers[1], process=this_process())
    folder.write()
    assert "still lives: rank 1 of 2 run here. Try: zeroshard stacks" in refusal(folder.path)


def test_stacks_on_another_host_than_that_of_the_store_says_which_one(folder):
    """The store is on the loopback interface of the first host."""
    there = replace(this_process(), host="node1", space="another boot")
    folder.peers = {rank: replace(peer, process=there) for rank, peer in folder.peers.items()}
    folder.write()
    done = CliRunner().invoke(main, ["stacks", str(folder.path)])
    said = " ".join(done.output.split())
    assert done.exit_code == 2
    assert "only host node1, where rank 0 ran, reaches it: run the command there" in said
    assert "has ended" not in said


def test_a_recording_that_is_cut_is_named_and_the_others_are_used(folder):
    for rank in (0, 1):
        folder.record(rank, "a", "b")
        folder.keep(rank, "ValueError: x" if rank else "RankLost: y")
    (cut,) = folder.path.glob("recordings/rank-0-*/0.gz")
    cut.write_bytes(cut.read_bytes()[:100])
    text = text_of(explain_run(folder.path))
    assert f"cannot be read: {cut}: " in text
    assert "likely cause: rank 1 " in text


@pytest.mark.parametrize("how", ["cut", "zeros", "text"])
def test_only_damaged_recordings_are_an_error_that_names_them(folder, how):
    folder.record(0, "a")
    file = folder.shared(0) / "0"
    raw = file.read_bytes()
    file.write_bytes({"cut": raw[:300], "zeros": bytes(len(raw)), "text": b"hello"}[how])
    assert f"can be read: {file}: not a whole recording" in refusal(folder.path)


def test_a_ranks_file_of_another_release_is_named(folder):
    (folder.path / "ranks.json").write_text('{"format": 9}')
    assert "It is damaged, or of another release of ZeroShard" in refusal(folder.path)


# -- what is written -------------------------------------------------------------------------------


def test_sessions_of_the_same_processes_are_added_and_those_of_others_replaced(folder):
    place = StorePlace("tcp", "127.0.0.1", 1, space="zs")
    write_ranks(str(folder.root), RanksFile(place, 0, True, folder.peers, {"1": "initialize 1"}, 0))
    assert read_ranks(folder.path).calls == {"0": "initialize 0", "1": "initialize 1"}
    other = {0: folder.peers[0]}
    write_ranks(str(folder.root), RanksFile(place, 1, True, other, {"0": "zero.Init 0"}, 0))
    found = read_ranks(folder.path)
    assert (found.attempt, dict(found.peers), found.calls) == (1, other, {"0": "zero.Init 0"})
    assert [file.name for file in folder.path.iterdir()] == ["ranks.json"]


def test_a_kept_recording_is_small_and_a_folder_that_cannot_be_written_is_no_error(folder):
    folder.record(0, *"abcdefgh")
    folder.keep(0, "ValueError: x")
    (kept,) = folder.path.glob("recordings/*/0.gz")
    assert len(gzip.decompress(kept.read_bytes())) > 50_000
    assert kept.stat().st_size < 3000
    folder.record(1, "a")
    keep_recordings(os.devnull, folder.peers[1], "ValueError: x", by=1)
    write_ranks(os.devnull, RanksFile(StorePlace("HashStore"), 0, True, folder.peers, {}))
