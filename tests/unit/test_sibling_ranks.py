"""Which ranks a launcher has started beside this one, from a made-up ``/proc``."""

from __future__ import annotations

import pytest

from zeroshard.comm import host

LAUNCHER = 10
STAT = "{pid} (python) {state} " + " ".join(["0"] * 30)


@pytest.fixture
def proc(tmp_path, monkeypatch):
    """Makes the launcher and its children: number -> variables (b"": not readable) and state."""
    monkeypatch.setattr(host, "_PROC", tmp_path)
    monkeypatch.setattr(host.os, "getppid", lambda: LAUNCHER)

    def make(children: dict[int, tuple[bytes, str]], launcher: bytes = b"PATH=/bin\0"):
        for pid, (environ, state) in {LAUNCHER: (launcher, "S"), **children}.items():
            (tmp_path / str(pid)).mkdir()
            (tmp_path / str(pid) / "environ").write_bytes(environ)
            (tmp_path / str(pid) / "stat").write_text(STAT.format(pid=pid, state=state))
        task = tmp_path / str(LAUNCHER) / "task" / str(LAUNCHER)
        task.mkdir(parents=True)
        (task / "children").write_text(" ".join(map(str, children)))

    return make


def rank(number: int) -> tuple[bytes, str]:
    return b"PATH=/bin\0RANK=%d\0LOCAL_RANK=0\0" % number, "S"


def test_ranks_are_known_by_their_variable(proc):
    proc({11: rank(0), 12: (b"PATH=/bin\0", "S"), 13: rank(3), 14: (b"", "Z")})
    assert host.sibling_ranks() == {0: 11, 3: 13}


@pytest.mark.parametrize("environ", [b"", b"train: rank one\0\0\0\0"])
def test_a_child_that_overwrote_its_variables_may_be_any_rank(proc, environ):
    proc({11: rank(0), 12: (environ, "R")})
    assert host.sibling_ranks() == {}


def test_a_script_around_one_rank_is_no_launcher(proc):
    proc({11: rank(0)}, launcher=rank(0)[0])
    assert host.sibling_ranks() == {}
