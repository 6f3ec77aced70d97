"""When the launcher starts a failed run again, how long it waits, and with which words it ends."""

from __future__ import annotations

import io
import os
import signal
from dataclasses import replace

import pytest

from zeroshard.errors import LaunchError
from zeroshard.launch.launch_plan import plan_launch
from zeroshard.launch.options import LaunchRequest
from zeroshard.launch.restart import (
    EndedAttempt,
    NewestCheckpoint,
    decide,
    read_newest,
    run_attempts,
)
from zeroshard.launch.supervisor import ShutdownTimeouts, WorkerSupervisor
from zeroshard.run.exit_report import ExitReport

KILLED = ExitReport(("rank 1 got SIGKILL from outside.",), 1, "", 137)
RAISED = ExitReport(("rank 1 raised ValueError: boom (exit code 1).",), 1, "Traceback ...", 1)
DONE = ExitReport((), None, "", 0)
A, B, C = (NewestCheckpoint(f"step-{n}", n) for n in (3, 6, 9))


def attempts(*ends: tuple[ExitReport, NewestCheckpoint | None]) -> list[EndedAttempt]:
    befores = [None, *(after for _, after in ends)]
    return [EndedAttempt(report, before, after) for (report, after), before in zip(ends, befores)]


def test_a_failure_with_a_newer_checkpoint_is_restarted_soon():
    decision = decide(attempts((KILLED, A)), 1)
    assert (decision.restart, decision.wait_s) == (True, 5)


@pytest.mark.parametrize("report", [DONE, replace(KILLED, interrupted=True)])
def test_a_success_and_a_run_that_the_user_ended_are_not_restarted(report):
    decision = decide(attempts((report, A)), 9)
    assert (decision.restart, decision.reason) == (False, "")


def test_all_restarts_may_be_used_up():
    decision = decide(attempts((KILLED, A), (KILLED, B), (KILLED, C)), 2)
    assert not decision.restart
    assert "--max-restarts" in decision.reason


def test_the_wait_grows_without_progress_and_is_short_again_after_some():
    assert decide(attempts((KILLED, A), (KILLED, A), (KILLED, A)), 9).wait_s == 10
    assert decide(attempts((KILLED, A), (KILLED, A), (KILLED, B)), 9).wait_s == 5


def test_three_attempts_without_a_newer_checkpoint_end_the_run():
    assert decide(attempts((KILLED, A), (KILLED, A), (RAISED, A)), 9).restart
    decision = decide(attempts((KILLED, A), (KILLED, A), (RAISED, A), (KILLED, A)), 9)
    assert not decision.restart
    assert "3 attempts in a row saved no newer checkpoint" in decision.reason
    assert "'step-3'" in decision.reason


def test_the_same_exception_at_the_same_place_is_called_an_error_of_the_program():
    decision = decide(attempts((RAISED, A), (RAISED, A), (RAISED, A)), 9)
    assert not decision.restart
    assert "same exception" in decision.reason
    assert "ValueError: boom" in decision.reason
    assert decide(attempts((RAISED, A), (RAISED, B), (RAISED, B)), 9).restart


def test_a_tag_that_is_saved_again_is_progress():
    again = replace(A, saved_at_ns=4)
    assert EndedAttempt(KILLED, A, again).has_progress
    assert not EndedAttempt(KILLED, A, A).has_progress


def test_attempts_run_until_one_succeeds_and_are_listed():
    console, waits, ran = io.StringIO(), [], []
    ends = {0: KILLED, 1: RAISED, 2: DONE}
    newest = iter([None, A, A, A, A, B])

    def run(number: int) -> ExitReport:
        ran.append(number)
        return ends[number]

    code = run_attempts(
        run, lambda: next(newest), 5, console, sleep=waits.append, clock=lambda: 0.0
    )
    assert (code, ran, waits) == (0, [0, 1, 2], [5, 5])
    said = console.getvalue().splitlines()
    assert said[0].endswith("restart 1 of 5 in 5 s, from checkpoint 'step-3'.")
    assert said[-3:] == [
        "zeroshard: attempt 0: 0 s, rank 1 got SIGKILL from outside.",
        "zeroshard: attempt 1: 0 s, rank 1 raised ValueError: boom (exit code 1).",
        "zeroshard: attempt 2: 0 s, finished.",
    ]


def test_the_exit_code_is_that_of_the_last_attempt():
    console = io.StringIO()
    code = run_attempts(lambda _: KILLED, lambda: None, 1, console, sleep=lambda _: None)
    assert code == 137
    assert "not restarted: --max-restarts 1 is used up" in console.getvalue()


def test_the_newest_checkpoint_is_read_from_latest(tmp_path):
    assert read_newest(tmp_path) is None
    (tmp_path / "latest").write_text("step-3\n")
    found = read_newest(tmp_path)
    assert found is not None
    assert found.tag == "step-3"


@pytest.mark.parametrize("engine", [".", "pytorch_model"])
def test_checkpoints_of_a_trainer_and_an_accelerator_are_progress(tmp_path, engine):
    """The folders have other numbers of digits; the time of the save tells which one is the newest."""
    seen = []
    for number, name in enumerate(("checkpoint-9", "checkpoint-10", "checkpoint-2")):
        folder = tmp_path / name / engine
        folder.mkdir(parents=True)
        (folder / "latest").write_text("global_step1\n")
        os.utime(folder / "latest", ns=(number, number))
        newest = read_newest(tmp_path)
        assert newest is not None
        seen.append(newest.tag)
    assert seen == ["checkpoint-9", "checkpoint-10", "checkpoint-2"]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"max_restarts": -1}, "--max-restarts is -1"),
        ({"preempt_save_s": -1.0}, "--preempt-save-s is -1"),
        ({"max_restarts": 2}, "needs --checkpoint-dir"),
        ({"checkpoint_dir": "ckpt"}, "no effect without --max-restarts"),
        ({"min_ranks": 2}, "--min-ranks 2 has no effect without --max-restarts"),
        ({"min_ranks": 0}, "--min-ranks is 0; it must be at least 1"),
        ({"min_ranks": -3}, "--min-ranks is -3"),
        ({"check_slot": "true"}, "no effect without --min-ranks"),
    ],
)
def test_options_that_cannot_work_are_refused_before_the_start(given, text):
    with pytest.raises(LaunchError, match=text):
        plan_launch(LaunchRequest("t.py", **given), {}, this_host=("h",), has_srun=False)


def test_a_signal_of_the_user_after_a_failure_forbids_a_restart():
    supervisor = WorkerSupervisor({}, timeouts=ShutdownTimeouts(), clock=lambda: 0.0)
    assert not supervisor.is_asked_to_end
    supervisor.interrupt(signal.SIGTERM)
    assert supervisor.is_asked_to_end
