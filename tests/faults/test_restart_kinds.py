"""The short form of ``benchmarks/restarts.py``: one fault of each kind, in two runs.

Slow: SIGSTOP, because the watchdog waits some seconds before it gives a stopped rank up.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import warm_python

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import restarts
from restarts import Case

pytestmark = pytest.mark.timeout(150)

FAULTS = (
    {"attempt": 0, "step": 3, "rank": 0, "kind": "save", "point": "committed"},
    {"attempt": 1, "step": 4, "rank": 1, "kind": "raise"},
    {"attempt": 2, "step": 7, "rank": 0, "kind": "kill"},
)
SAME = Case("several", 2, 3, FAULTS, (2, 2, 2, 2))
FEWER = Case(
    "fewer ranks",
    3,
    3,
    (
        {"attempt": 0, "step": 4, "rank": 1, "kind": "slot", "slot": 1},
        {"attempt": 1, "step": 8, "rank": 1, "kind": "slot", "slot": 2},
    ),
    (3, 2, 1),
)


@pytest.fixture(autouse=True)
def warm_ranks(monkeypatch):
    """Ranks are copies that have imported torch: these cases start about thirty.

    A process that is left makes ``warm_python.run`` fail, because it holds the output open.
    """

    def run(command, *, env, stdout, timeout, **_):
        done = warm_python.run(command, cwd=Path.cwd(), env=env, timeout=timeout, warm_ranks=True)
        stdout.write(done.stdout + done.stderr)
        return done

    monkeypatch.setattr(restarts, "subprocess", SimpleNamespace(run=run, STDOUT=None))


def outcome(case: Case, tmp_path: Path) -> restarts.Outcome:
    plain = restarts.undisturbed_run(case, tmp_path / "undisturbed")
    return restarts.run_case(case, tmp_path / "broken", plain)


def test_faults_of_every_kind_change_no_bit_and_leave_nothing(tmp_path):
    found = outcome(SAME, tmp_path)
    assert found.problems == []
    assert (found.difference, found.resumed_at) == (0.0, [0, 3, 3, 6])


def test_three_ranks_go_on_as_two_and_as_one_with_the_same_samples(tmp_path):
    found = outcome(FEWER, tmp_path)
    assert found.problems == []
    assert found.resumed_at == [0, 3, 6]
    assert found.difference <= restarts.TOLERANCE


@pytest.mark.slow
def test_a_stopped_rank_changes_no_bit(tmp_path):
    case = restarts._same("stop", (0, 5, 1))
    assert outcome(case, tmp_path).problems == []
