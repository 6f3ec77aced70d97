"""What the rank that asks makes of what it sees."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from zeroshard.comm import host
from zeroshard.comm.host import this_process
from zeroshard.errors import RankDivergence
from zeroshard.run.recordings import PRESENCE
from zeroshard.watchdog.diagnosis import Diagnosis
from zeroshard.watchdog.inquiry import Inquiry, own_answer
from zeroshard.watchdog.messages import Messages
from zeroshard.watchdog.rank_status import status_from_host
from zeroshard.watchdog.run_record import Peer
from zeroshard.watchdog.settings import WatchdogSettings
from zeroshard.watchdog.tracked_calls import TrackedCalls
from zeroshard.watchdog.watchdog import Watchdog

SETTINGS = WatchdogSettings(stacks=False, tick_s=0.1)


def words_of(calls, left=None):
    return own_answer([calls], calls, left=left, main=0, keep=1, with_stacks=False)


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("answers later", "RankLost", "it closed its end of the connection"),
        ("has told why", "RankLost", "left: ValueError: no loss"),
        ("is silent", "RankFrozen", "waits for a disk (state D)"),
    ],
)
def test_a_rank_that_waits_for_a_disk_has_time_to_answer(what, kind, text, tmp_path, monkeypatch):
    store, here = dist.HashStore(), this_process()
    monkeypatch.setattr(host, "_stat", lambda _pid: ("D", here.started))
    (tmp_path / "0").touch()
    (tmp_path / "1").touch()
    asker, other = (
        Messages(store, Peer(rank, here, str(tmp_path / str(rank))), store_rank=None, hung_up=bool)
        for rank in range(2)
    )
    calls = TrackedCalls("engine", SETTINGS, lambda: None, lambda: 0)
    calls.suspects.add(1)
    answering = threading.Timer(0.2, other.answer, [1, words_of(calls)])
    try:
        asker.post_card("on")
        other.post_card("on")
        if what == "has told why":
            other.post_left("engine", "ValueError: no loss")
        if what == "answers later":
            answering.start()
        inquiry = Inquiry(0, range(2), here, asker, threading.Event())
        diagnosis = inquiry.ask(1, calls, SETTINGS, words_of(calls))
    finally:
        answering.cancel()
        asker.close()
        other.close()
    assert diagnosis.kind == kind
    assert text in diagnosis.text


def test_a_process_in_state_d_is_not_stopped(monkeypatch):
    here = this_process()
    monkeypatch.setattr(host, "_stat", lambda _pid: ("D", here.started))
    fate, words = host.fate_of(here, here)
    assert fate == "waits"
    assert words == f"process {here.pid} waits for a disk (state D)"


def test_a_rank_takes_over_the_cause_that_another_found_before(tmp_path, monkeypatch):
    """The other rank has raised it and left, so by now its connection looks like the cause."""
    cause, effect = (Diagnosis(kind, True, (1,), kind) for kind in ("RankDivergence", "RankLost"))
    store, calls = dist.HashStore(), TrackedCalls("engine", SETTINGS, lambda: None, lambda: 0)
    other = Messages(
        store, Peer(1, this_process(), str(tmp_path / "1")), store_rank=None, hung_up=bool
    )
    monkeypatch.setattr(Inquiry, "ask", lambda *_: effect)
    watchdog = Watchdog(
        store, rank=0, ranks=[0, 1], recording=tmp_path / PRESENCE, settings=SETTINGS
    )
    try:
        other.publish(1, cause, reported=True)
        watchdog._inquire(2, calls)
        with pytest.raises(RankDivergence):
            watchdog.check()
    finally:
        watchdog.close()
        other.close()


def test_a_rank_whose_group_is_not_open_yet_has_not_left(tmp_path):
    here = this_process()
    (tmp_path / "1").touch()
    group = Peer(1, here, str(tmp_path / "1-holders"))
    assert not group.has_left(here)
    assert status_from_host(group, here).fate == "silent"
    (tmp_path / "1").unlink()
    assert group.has_left(here)
