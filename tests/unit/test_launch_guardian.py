"""What the process beside a launcher prints of what the launcher's C++ code and interpreter print."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.launch import guardian
from zeroshard.launch.guardian import Fold

HEAD = "[W1127 23:30:40.577 TCPStoreLibUvBackend.cpp:126] [c10d] Error processing client message: "
STACK = (
    "Exception raised from read_key at TCPStoreLibUvBackend.cpp:588 (most recent call first):\n"
    "frame #0: c10::Error::Error() + 0x9d (0x7fe4 in libc10.so)\n"
    "<omitting python frames>\n"
    "frame #2: uv_run + 0x16f (0x7fe4 in libtorch_cpu.so)\n\n"
)
SIZE = f"{HEAD}Invalid string size. size: 18446744073709551615, max: 8192\n{STACK}"
KEYS = f"{HEAD}Too many keys being waited. keys: 99999999999, max: 131072\n{STACK}"


def folded(*parts: str) -> str:
    written: list[bytes] = []
    fold = Fold(written.append)
    for part in parts:
        fold.feed(part.encode())
    fold.finish()
    return b"".join(written).decode()


def test_each_kind_of_refusal_has_one_line_and_the_others_are_counted():
    lines = folded(*[SIZE] * 3, "mine\n", *[KEYS] * 2, SIZE, "mine too\n").splitlines()
    assert ["Invalid string size. size: 18446744073709551615" in line for line in lines] == [
        *(True, False, False, False, False)
    ]
    assert lines[1::2] == ["mine", "mine too"]
    assert "Too many keys being waited" in lines[2]
    assert lines[4] == "zeroshard: 4 more such messages came to the store of this run."


def test_a_line_of_another_process_in_the_middle_of_a_stack_leaves_none_of_it():
    first, second, *rest = SIZE.splitlines(True)
    lines = folded(first, second, "mine\n", *rest, "mine too\n").splitlines()
    assert lines[1:] == ["mine", "mine too"]
    other = "[W1127 23:30 socket.cpp:1] [c10d] refused\n" + STACK
    assert folded(first, second, other).endswith(other)


def test_a_sender_cannot_make_more_kinds_than_there_are_lines_for():
    sent = [f"{HEAD}Invalid {number}. x\n{STACK}" for number in range(100)]
    assert len(folded(*sent).splitlines()) == guardian._KINDS + 1


def test_an_unfinished_line_does_not_wait_for_its_end():
    written: list[bytes] = []
    Fold(written.append).feed(b"half a li")
    assert written == [b"half a li"]


@given(
    st.lists(
        st.sampled_from([SIZE, KEYS, "Traceback:\n", "[W other.cpp:1] [c10d] x\n", "\n", "a"])
    ),
    st.lists(st.integers(1, 40), min_size=1),
)
def test_no_other_line_is_hidden_wherever_the_reads_end(parts, sizes):
    sent, pieces, at = "".join(parts), [], 0
    while at < len(sent):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(sent[at : at + size])
        at += size
    others = "".join(part for part in parts if part not in (SIZE, KEYS))
    seen = folded(*pieces)
    # A refusal that follows an unfinished line of another writer is not at the start of its line.
    if "a" not in parts:
        assert (
            "".join(line for line in seen.splitlines(True) if "zeroshard: " not in line) == others
        )
    assert seen.count("a") >= others.count("a")


DYING = """
import ctypes, os, sys
from zeroshard.launch.guardian import Guardian
with Guardian() as guardian, guardian.past(sys.stderr) as console:
    print("on the console", file=console)
    os.write(2, b"last words\\n")
    {end}
print("after it", file=sys.stderr)
"""


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "os.abort()", "pass"])
def test_the_last_words_of_a_launcher_are_printed(end):
    done = subprocess.run(
        [sys.executable, "-c", DYING.format(end=end)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    after = ["after it"] if end == "pass" else []
    assert sorted(done.stderr.split("\n")[:2]) == ["last words", "on the console"]
    assert done.stderr.splitlines()[2:] == after


CLOSED = """
import contextlib, sys
from zeroshard.launch.guardian import Guardian
with Guardian() as guardian, guardian.past(sys.stderr) as console:
    with contextlib.suppress(OSError):
        console.write("lost\\n")
"""


def test_a_closed_console_is_no_error_of_the_launcher():
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run([sys.executable, "-c", CLOSED], stderr=write_end, timeout=60, check=False)
    os.close(write_end)
    assert done.returncode == 0


def test_a_console_that_does_not_read_keeps_no_rank_of_a_dead_launcher_alive(tmp_path):
    rank = subprocess.Popen(["sleep", "60"], start_new_session=True)
    fill = (
        "os.set_blocking(2, False)\n    "
        + "sent = 1\n    while sent:\n        "
        + (
            "try: sent = os.write(console.fileno(), bytes(1 << 16))\n        except OSError: sent = 0"
        )
    )
    end = f"os.set_blocking(console.fileno(), False); guardian.watch([{rank.pid}])\n    " + fill
    end += "\n    os.set_blocking(console.fileno(), True); os.set_blocking(2, True)"
    end += "\n    os.write(2, bytes(1 << 12)); os.kill(os.getpid(), 9)"
    launcher = subprocess.Popen(
        [sys.executable, "-c", DYING.format(end=end)], stderr=subprocess.PIPE
    )
    try:
        assert launcher.wait(timeout=60) == -signal.SIGKILL
        assert rank.wait(timeout=10) == -signal.SIGKILL
    finally:
        launcher.communicate(timeout=10)
        rank.kill()
