"""Errors on the other ranks when one rank makes another call, dies, freezes or is late.

Every fault must end on every surviving rank within seconds. The error must have the right class, at most
five lines, and name the right ranks and modules.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.faulty_comm import Fault, FaultyComm
from zeroshard_testing.ranks import RankEnd, on_ranks, run_ranks

from zeroshard.errors import RankLost
from zeroshard.run.recordings import read_recording_file
from zeroshard.session.comm_session import CommSession
from zeroshard.session.join import init_distributed
from zeroshard.session.session import open_session
from zeroshard.watchdog.settings import WatchdogSettings

QUICK = WatchdogSettings(first_report_s=0.6, tick_s=0.1, frozen_s=2.0, grace_s=3.0, stuck_s=4.0)
UNITS = ("embed", "visual", "layers.0", "layers.1")
SHARD_NUMEL = 64

Outcome = tuple[str, str, float]


def watched(trust: WatchdogSettings = QUICK, transport: str = "auto") -> CommSession:
    return open_session(
        transport=transport, device=torch.device("cpu"), trust=trust, plan={"stage": "3"}
    )


def gather(comm, name: str) -> torch.Tensor:
    full_N = torch.zeros(SHARD_NUMEL * comm.size)
    comm.all_gather(full_N, torch.full((SHARD_NUMEL,), comm.rank + 1.0), name=name).wait()
    return full_N


def reduce(comm, name: str) -> torch.Tensor:
    out_S = torch.zeros(SHARD_NUMEL)
    comm.reduce_scatter(out_S, torch.ones(SHARD_NUMEL * comm.size), name=name).wait()
    return out_S


def step(watch: CommSession, comm, call: Callable = gather) -> None:
    for name in UNITS:
        call(comm, name)
    hashes = comm.all_gather_small(
        torch.tensor([watch.recorder.hash32], dtype=torch.float64), name="norm"
    )
    if odd := watch.recorder.diverging(hashes[:, 0]):
        raise watch.divergence(watch.gathers, odd)


def fails_with(fault: Fault, trust: WatchdogSettings = QUICK, transport: str = "auto") -> Outcome:
    """(error class, text, seconds) of the second step, in which ``fault`` happens."""
    watch = watched(trust, transport)
    comm = FaultyComm(watch.gathers, replace(fault, at=2))
    watch.recorder.mark_step(0)
    step(watch, comm)
    watch.recorder.mark_step(1)
    begun_s = time.monotonic()
    try:
        step(watch, comm)
        step(watch, comm)
    except Exception as error:
        watch.close(f"{type(error).__name__}: {error}" if fault.kind == "raise" else "")
        return type(error).__name__, str(error), time.monotonic() - begun_s
    watch.close()
    raise AssertionError("nothing failed")


def survivors(results: list, fault: Fault) -> list[Outcome]:
    return [r for rank, r in enumerate(results) if rank != fault.rank]


def check_form(text: str, kind: str) -> None:
    lines = text.splitlines()
    assert len(lines) <= 5, text
    assert max(map(len, lines)) <= 200, text
    assert lines[0].startswith(f"{kind} at step 1 "), text


BOTH = pytest.mark.parametrize("transport", ["shm", "p2p"])

DIVERGENCES = [
    (Fault("skip", 2, "visual"), "gather 'visual' (#7)", "gather 'layers.0' (#7)", "skipped"),
    (Fault("swap", 2, "visual", other="layers.0"), "gather 'visual' (#7)", "'layers.0' (#7)", ""),
    (Fault("bytes", 2, "visual"), "768 bytes float32", "1536 bytes float32", "Same call"),
    (Fault("dtype", 2, "visual"), "bytes float32", "bytes int32", "Same call"),
    (Fault("operation", 2, "visual"), "gather 'visual' (#7)", "reduce 'visual' (#7)", "branches"),
]


@BOTH
@pytest.mark.parametrize(
    ("fault", "most", "odd", "hint"), DIVERGENCES, ids=[f[0].kind for f in DIVERGENCES]
)
def test_ranks_that_call_other_collectives_are_named_on_every_rank(
    fault, most, odd, hint, transport
):
    results = run_ranks(fails_with, 3, fault, QUICK, transport, timeout=30)
    assert len({text for _, text, _ in results}) == 1
    kind, text, seconds = results[0]
    assert kind == "RankDivergence"
    check_form(text, kind)
    lines = text.splitlines()
    assert lines[1].startswith("  ranks 0,1: ")
    assert most in lines[1]
    assert lines[2].startswith("  rank 2: ")
    assert odd in lines[2]
    assert "last agreed: gather 'embed' (#6)" in text
    assert hint in text
    assert seconds < 5


def test_of_two_ranks_neither_is_presumed_right():
    results = run_ranks(fails_with, 2, Fault("skip", 0, "visual"), timeout=30)
    kind, text, _ = results[0]
    assert kind == "RankDivergence"
    assert "  rank 0: waiting in gather 'layers.0' (#7)" in text
    assert "  rank 1: waiting in gather 'visual' (#7)" in text


@pytest.mark.parametrize(
    ("kind", "ends"),
    [("kill", signal.SIGKILL), ("abort", signal.SIGABRT), ("exit", 0)],
    ids=["kill", "abort", "exit"],
)
@pytest.mark.parametrize("rank", [0, 2])
@BOTH
def test_a_rank_that_dies_is_named_by_the_others(kind, ends, rank, transport):
    fault = Fault(kind, rank, "layers.0")
    died = {rank: ends}
    results = run_ranks(fails_with, 3, fault, QUICK, transport, expect_death=died, timeout=30)
    assert isinstance(results[rank], RankEnd)
    for name, text, seconds in survivors(results, fault):
        assert name == "RankLost"
        check_form(text, name)
        assert text.splitlines()[1].startswith(f"  rank {rank} (")
        assert "ended; its last call was gather 'visual' (#7)" in text
        assert "waiting in gather 'layers.0' (#8)" in text
        assert "GLHF" not in text
        assert seconds < 3


@BOTH
def test_an_exception_on_one_rank_is_told_to_the_others(transport):
    fault = Fault("raise", 1, "layers.0")
    results = run_ranks(fails_with, 3, fault, QUICK, transport, timeout=30)
    assert results[1][0] == "InjectedError"
    for name, text, seconds in survivors(results, fault):
        assert name == "RankLost"
        check_form(text, name)
        assert "  rank 1 (" in text
        assert "left: InjectedError: injected at 'layers.0' on rank 1" in text
        assert seconds < 3


@BOTH
def test_a_stopped_rank_ends_the_run_within_its_limit(transport):
    fault = Fault("freeze", 1, "layers.0")
    died = {1: signal.SIGSTOP}
    results = run_ranks(fails_with, 3, fault, QUICK, transport, expect_death=died, timeout=30)
    for name, text, seconds in survivors(results, fault):
        assert name == "RankFrozen"
        check_form(text, name)
        assert "is stopped by a signal" in text
        assert "  ranks 0,2: waiting in gather 'layers.0' (#8)" in text
        assert seconds < 2 * QUICK.frozen_s


@BOTH
def test_a_rank_that_holds_the_interpreter_lock_is_found_with_its_stack(transport):
    fault = Fault("hold", 1, "layers.0", seconds=4)
    trust = replace(QUICK, frozen_s=1.0)
    results = run_ranks(fails_with, 3, fault, trust, transport, timeout=40)
    for name, text, _ in survivors(results, fault):
        assert name == "RankFrozen"
        check_form(text, name)
        assert "runs but does not answer (in interpreter_lock.py:" in text
        assert " hold)" in text
    assert results[1][0] == "RankFrozen"  # it learns it when it runs again


def late_then_done() -> tuple[float, str]:
    watch = watched(replace(QUICK, first_report_s=0.3))
    comm = FaultyComm(watch.gathers, Fault("late", 1, "layers.0", at=2, seconds=2.0))
    step(watch, comm)
    with watch.recorder.in_section("data"):
        step(watch, comm)
    total = float(gather(comm, "last").sum())
    watch.close()
    return total, comm.transport


def test_a_late_rank_is_reported_and_the_run_goes_on():
    expected = SHARD_NUMEL * (1 + 2 + 3)
    assert [total for total, _ in run_ranks(late_then_done, 3, timeout=30)] == [expected] * 3


@on_ranks(3)
def test_pauses_outside_collectives_never_end_a_run():
    watch = watched(replace(QUICK, first_report_s=0.1, tick_s=0.02, stacks=False))
    pauses = random.Random(watch.gathers.rank)
    with contextlib.redirect_stderr(io.StringIO()):
        for _ in range(15):
            time.sleep(pauses.choice((0.0, 0.05, 0.2)))
            step(watch, watch.gathers)
    watch.close()


def report_of_a_late_rank() -> str:
    heard = io.StringIO()
    with contextlib.redirect_stderr(heard):
        late_then_done()
    return heard.getvalue()


def test_the_report_on_a_late_rank_names_its_section_and_its_stack():
    heard = [text for text in run_ranks(report_of_a_late_rank, 3, timeout=30) if text]
    assert len(heard) == 1, heard
    assert heard[0].startswith("RankLate at step 0 after ")
    assert "  ranks 0,2: waiting in gather 'layers.0' (#8)" in heard[0]
    assert "  rank 1: outside collectives, section data: " in heard[0]
    assert "Not ended; limit 1800 s" in heard[0]
    assert len(heard[0].splitlines()) <= 5


def test_a_rank_that_stays_away_too_long_ends_the_run():
    trust = replace(QUICK, collective_timeout_s=1.0, grace_s=0.5)
    fault = Fault("late", 1, "layers.0", seconds=20)
    results = run_ranks(fails_with, 3, fault, trust, expect_death={1: 75}, timeout=30)
    for name, text, seconds in survivors(results, fault):
        assert name == "RankLate"
        check_form(text, name)
        assert "  rank 1: outside collectives" in text
        assert seconds < 4
    assert "RankLate at step 1" in results[1].output


def test_stock_collectives_notice_a_divergence_at_the_next_hash_check():
    # Untagged: the ranks sum unrelated numbers and go on, until the hashes are compared.
    fault = Fault("swap", 2, "visual", other="layers.0")
    for name, text, seconds in run_ranks(fails_with, 3, fault, QUICK, "stock", timeout=30):
        assert name == "RankDivergence"
        check_form(text, name)
        assert "ranks 0,1: called gather 'visual' (#7)" in text
        assert "rank 2: called gather 'layers.0' (#7)" in text
        assert seconds < 5


def test_stock_collectives_of_other_sizes_abort_and_the_log_of_the_dead_tells_why():
    fault = Fault("bytes", 1, "visual")  # rank 0 receives more than it expects
    died = {0: signal.SIGABRT}
    name, text, _ = run_ranks(fails_with, 2, fault, QUICK, "stock", expect_death=died, timeout=30)[
        1
    ]
    assert name == "RankDivergence"
    assert "rank 0: called gather 'visual' (#7) of 512 bytes float32" in text
    assert " gather 'visual' (#7) of 1024 bytes float32" in text


def hash_without_watchdog() -> str:
    watch = watched(replace(QUICK, watchdog=False), "stock")
    comm = FaultyComm(watch.gathers, Fault("swap", 1, "visual", other="layers.0"))
    try:
        step(watch, comm)
    except Exception as error:
        return f"{type(error).__name__} {error}"
    finally:
        watch.close()
    raise AssertionError("nothing failed")


def test_the_hash_check_needs_no_watchdog():
    for text in run_ranks(hash_without_watchdog, 3, timeout=30):
        assert text.startswith("RankDivergence RankDivergence: rank 1 called other collectives")


@BOTH
@on_ranks(3)
def test_no_wrong_number_is_returned_after_a_swap(transport):
    watch = watched(transport=transport)
    comm = FaultyComm(watch.gathers, Fault("swap", 2, "visual", other="layers.0"))
    results = []
    with pytest.raises(Exception, match="RankDivergence"):
        for name in UNITS:
            results.append(reduce(comm, name))
    watch.close()
    assert [float(r[0]) for r in results] == [3.0]


# -- where the evidence comes from -----------------------------------------------------------------


def log_of_a_killed_rank() -> tuple[int, str, str]:
    watch = watched()
    comm = FaultyComm(watch.gathers, Fault("kill", 1, "layers.1"))
    watch.recorder.mark_step(4)
    recording = watch.session_watch.peers[1].recording
    with pytest.raises(RankLost):
        step(watch, comm)
    flight = read_recording_file(Path(recording))
    watch.close()
    assert not Path(recording).exists()  # the survivors clean up
    return flight.step, flight.records[-1].op, flight.records[-1].name


def test_the_log_of_a_killed_rank_tells_its_last_call():
    results = run_ranks(log_of_a_killed_rank, 2, expect_death={1: signal.SIGKILL}, timeout=30)
    assert results[0] == (4, "all_gather", "layers.0")


def log_of_the_dead_after_another_left() -> tuple[bool, bool]:
    watch = watched()
    comm = FaultyComm(watch.gathers, Fault("kill", 0, "layers.1"))
    with pytest.raises(RankLost):
        step(watch, comm)
    dead, other = (Path(watch.session_watch.peers[r].recording) for r in (0, 1))
    if dist.get_rank() == 2:
        until = time.monotonic() + 20
        while other.exists() and time.monotonic() < until:
            time.sleep(0.01)
        assert not other.exists()
    kept = read_recording_file(dead) is not None
    watch.close()
    return kept, dead.exists()


def test_the_last_survivor_removes_the_log_of_the_dead_and_no_other_does():
    died = {0: signal.SIGKILL}
    results = run_ranks(log_of_the_dead_after_another_left, 3, expect_death=died, timeout=40)
    assert results[1][0]
    assert results[2] == (True, False)


def with_a_store_on_rank_0(fault: Fault) -> Outcome:
    """Like ``fails_with``, but rank 0's process serves the store that the watchdogs use."""
    init_distributed(dist_backend="gloo", verbose=False)
    outcome = fails_with(fault)
    dist.destroy_process_group()
    return outcome


@pytest.mark.parametrize(
    ("kind", "ends", "expected"),
    [("kill", signal.SIGKILL, "RankLost"), ("freeze", signal.SIGSTOP, "RankFrozen")],
    ids=["kill", "freeze"],
)
def test_survivors_judge_alone_when_the_store_ends_with_its_rank(kind, ends, expected):
    fault = Fault(kind, 0, "layers.0")
    results = run_ranks(
        with_a_store_on_rank_0, 3, fault, expect_death={0: ends}, group=False, timeout=40
    )
    for name, text, seconds in survivors(results, fault):
        assert name == expected
        check_form(text, name)
        assert text.splitlines()[1].startswith("  rank 0 (")
        assert "its last call was gather 'visual' (#7)" in text
        assert seconds < 8


def evidence_of_a_divergence(folder: str) -> str:
    return fails_with(Fault("skip", 0, "visual"), replace(QUICK, dump_dir=folder))[1]


def test_the_evidence_of_all_ranks_is_kept_in_one_file(tmp_path):
    text = run_ranks(evidence_of_a_divergence, 2, str(tmp_path), timeout=30)[0]
    (path,) = tmp_path.glob("*/hang-*.json")  # the ranks share the folder of their run
    assert f"details: {path})" in text
    evidence = json.loads(path.read_text())
    assert evidence["diagnosis"]["text"] == text
    assert [w["rank"] for w in evidence["statuses"]] == [0, 1]
    assert all("Thread" in w["stacks"] or "step" in w["stacks"] for w in evidence["statuses"])
