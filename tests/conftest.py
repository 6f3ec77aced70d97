"""Fixtures of all tests: started rank processes, and a check that each test leaves the process clean."""

from __future__ import annotations

import gc
import os

import pytest
from support.covering import FULL, rows_for_full
from zeroshard_testing import leak_check
from zeroshard_testing.ranks import pool


def pytest_collection_modifyitems(config, items):
    """Leave tests out that only ``make test-full`` runs.

    If any test needs it, let the fork server import torch while the first tests run.
    """
    if not FULL:
        left_out = {item for item in items if item.get_closest_marker("full")}
        left_out |= rows_for_full([item for item in items if item not in left_out])
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    if any(hasattr(getattr(item, "obj", None), "rank_body") for item in items):
        pool().warm()


def pytest_runtest_logreport(report):
    """Name a failed test at once, since a run that is ended from outside prints no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid}", flush=True)


def pytest_sessionfinish():
    """End the rank processes before the interpreter shuts down."""
    gc.unfreeze()  # libraries report what the interpreter does not free at its end
    pool().kill()


@pytest.fixture(autouse=True, scope="module")
def freeze_what_is_imported():
    """Exclude all objects that exist from garbage collections.

    With thousands of collected tests and large packages in memory, each ``gc.collect()`` would take half
    a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def leave_nothing_behind():
    """Fail a test that leaves variables, threads, files, a process group or torch's switches."""
    before = leak_check.snapshot()
    yield
    leaks = leak_check.leaks(before, leak_check.snapshot(), grace_s=1.0)
    leak_check.restore(before)
    assert not leaks, "The test left behind:\n" + "\n".join(leaks)
