"""What every test may rely on: a warm rank pool, and a process that the last test left clean."""

from __future__ import annotations

import pytest

from zeroshard.testing import leak_check
from zeroshard.testing.ranks import pool


def pytest_collection_modifyitems(items):
    """Let the fork server import torch while the first tests run, if any test will need it."""
    if any(hasattr(getattr(item, "obj", None), "rank_body") for item in items):
        pool().warm()


def pytest_sessionfinish():
    """End the ranks before the interpreter begins to."""
    pool().kill()


@pytest.fixture(autouse=True)
def leave_nothing_behind():
    """Fail a test that leaves variables, threads, files, a process group or torch's switches."""
    before = leak_check.snapshot()
    yield
    leaks = leak_check.leaks(before, leak_check.snapshot(), grace_s=1.0)
    leak_check.restore(before)
    assert not leaks, "The test left behind:\n" + "\n".join(leaks)
