"""How the outputs of ranks are printed on the console."""

from __future__ import annotations

import io
import os
import time

import pytest

from zeroshard.launch.streams import Streams, _Stream

TRACE = b"Traceback (most recent call last):\n  x\nValueError: boom\n"


@pytest.fixture
def console() -> io.BytesIO:
    return io.BytesIO()


def write(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)


def test_lines_pass_in_order_and_stay_in_the_tail(console):
    streams = Streams(console)
    _, stderr = streams.paths(3)
    write(stderr, b"one\ntwo")
    streams.start()
    streams.finish(release=True)
    assert console.getvalue() == b"one\ntwo"
    assert streams.tail(3) == "one\ntwo"


def test_lines_of_two_ranks_do_not_mix(console):
    one, two = (_Stream(console, watched=False) for _ in range(2))
    one.feed(b"rank ", now_s=0.0)
    two.feed(b"rank 1\n", now_s=0.0)
    one.feed(b"0\n", now_s=0.0)
    assert console.getvalue() == b"rank 1\nrank 0\n"


def test_standard_output_is_the_launchers_own_unless_asked_for(console):
    streams = Streams(console)
    stdout, _ = streams.paths(0)
    streams.finish(release=True)
    assert stdout == ""


def test_a_traceback_of_a_failed_run_is_kept_for_the_report(console):
    streams = Streams(console)
    _, stderr = streams.paths(0)
    streams.fail()
    write(stderr, b"before\n" + TRACE)
    streams.start()
    streams.finish(release=False)
    assert console.getvalue() == b"before\n"
    assert streams.shown_by(0) is None


def test_the_same_traceback_of_several_ranks_is_shown_once(console):
    streams = Streams(console)
    stderrs = [streams.paths(rank)[1] for rank in range(3)]
    for rank, stderr in enumerate(stderrs):
        own = TRACE.replace(b"boom", b"bang") if rank == 2 else TRACE
        write(stderr, b"".join(b"[rank%d]: " % rank + line for line in own.splitlines(True)))
    streams.start()
    deadline_s = time.monotonic() + 20
    while console.getvalue().count(b"\n") < 7 and time.monotonic() < deadline_s:
        time.sleep(0.05)
    streams.finish(release=False)
    shown = console.getvalue().decode()
    assert shown.count("boom") == shown.count("bang") == 1
    assert "zeroshard: rank 1 printed the same traceback as rank 0.\n" in shown
    assert [streams.shown_by(rank) for rank in range(3)] == [0, 0, 2]


def test_a_traceback_of_a_clean_run_is_shown_at_the_end(console):
    streams = Streams(console)
    _, stderr = streams.paths(0)
    write(stderr, TRACE)
    streams.start()
    streams.finish(release=True)
    assert console.getvalue() == TRACE


def test_a_logged_traceback_is_shown_when_the_rank_lives_on(console):
    stream = _Stream(console, watched=True)
    stream.feed(TRACE, now_s=0.0)
    stream.tick(0.5, failing=False)
    assert console.getvalue() == b""
    stream.tick(1.1, failing=False)
    assert console.getvalue() == TRACE


def test_a_traceback_stays_held_once_a_rank_failed(console):
    stream = _Stream(console, watched=True)
    stream.feed(TRACE, now_s=0.0)
    stream.tick(100.0, failing=True)
    assert console.getvalue() == b""


def test_a_progress_bar_without_line_end_is_shown_soon(console):
    stream = _Stream(console, watched=True)
    stream.feed(b"\r10%", now_s=0.0)
    stream.tick(0.1, failing=False)
    assert console.getvalue() == b"\r10%"
    stream.feed(b"\r20%\nnext\n", now_s=0.2)
    assert console.getvalue() == b"\r10%\r20%\nnext\n"


def test_a_line_without_end_passes_on_and_is_not_kept(console):
    stream = _Stream(console, watched=True)
    for _ in range(100):
        stream.feed(b"x" * 4096, now_s=0.0)
        assert len(stream.partial) <= 64 << 10
    stream.feed(b"\nnext\n", now_s=0.0)
    assert console.getvalue() == b"x" * 409_600 + b"\nnext\n"


def test_a_line_without_end_behind_a_traceback_is_held_with_it(console):
    stream = _Stream(console, watched=True)
    stream.feed(TRACE + b"x" * 100_000, now_s=0.0)
    assert console.getvalue() == b""
    stream.release()
    assert console.getvalue() == TRACE + b"x" * 100_000


def test_a_traceback_that_arrives_in_pieces_is_recognised(console):
    stream = _Stream(console, watched=True)
    for at in range(len(TRACE)):
        stream.feed(TRACE[at : at + 1], now_s=0.0)
        stream.tick(0.0, failing=True)
    assert bytes(stream.held) == TRACE


def test_the_tail_is_bounded(console):
    stream = _Stream(console, watched=True)
    for _ in range(100):
        stream.feed(b"x" * 9999 + b"\n", now_s=0.0)
    assert len(stream.tail) == 128 << 10


def test_a_console_that_is_gone_does_not_stop_the_run():
    class Gone(io.BytesIO):
        def write(self, data) -> int:
            raise BrokenPipeError

    stream = _Stream(Gone(), watched=True)
    stream.feed(b"line\n", now_s=0.0)
    assert stream.tail == b"line\n"


def test_with_a_log_folder_both_outputs_go_to_the_ranks_file(console, tmp_path):
    streams = Streams(console, log_dir=tmp_path / "logs")
    stdout, stderr = streams.paths(1)
    write(stdout, b"out\n")
    write(stderr, b"err\n")
    streams.start()
    streams.finish(release=False)
    assert sorted((tmp_path / "logs/rank1.log").read_bytes().splitlines()) == [b"err", b"out"]
    assert console.getvalue() == b""


def test_no_file_descriptor_is_left_open(console):
    before = set(os.listdir("/dev/fd"))
    streams = Streams(console)
    streams.paths(0)
    streams.start()
    streams.finish(release=True)
    assert set(os.listdir("/dev/fd")) == before
