"""Fixtures of all tests: started rank processes, and a check that each test leaves the process clean."""

from __future__ import annotations

import gc
import logging
import os
from pathlib import Path

import pytest
from support.covering import FULL, rows_for_full
from zeroshard_testing import leak_check
from zeroshard_testing.ranks import pool

TESTS = Path(__file__).parent
ORDER = ("zoo", "compat", "programs", "parity", "accounting", "streams", "ranks")
"""Folders whose files run first, since they take longest; then all others, whose files end soon."""

BY_NAME = "no_deepspeed_on_ranks"

LEFT_OUT = pytest.StashKey[int]()
"""How many collected tests only ``make test-full`` runs."""

_unfreeze = gc.unfreeze


def pytest_sessionstart():
    """Keep out what each test would pay for all that was imported.

    A search of the planner freezes what exists and unfreezes it at its end. This would also unfreeze
    what :func:`freeze_what_is_imported` froze, and each ``gc.collect()`` from then on would take up to a
    second. pytest adds a handler to each logger that does not propagate, three times in each test, and
    torch has forty of them; their records reach the handler of the root logger as well.
    """
    gc.unfreeze = lambda: None
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True


def pytest_collection_modifyitems(config, items):
    """Leave tests out that only ``make test-full`` runs, and sort the others by their files.

    Ranks import Transformers with ``deepspeed`` or without it, and are replaced where the files of one
    kind end and those of the other begin. If any test needs it, let the fork server import torch while
    the first tests run.
    """
    if not FULL:
        left_out = {item for item in items if item.get_closest_marker("full")}
        left_out |= rows_for_full([item for item in items if item not in left_out])
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        config.stash[LEFT_OUT] = len(left_out)
        items[:] = [item for item in items if item not in left_out]
    by_name = {item.path for item in items if BY_NAME in item.fixturenames}
    items.sort(key=lambda item: (_turn(item.path), item.path not in by_name))
    if any(hasattr(getattr(item, "obj", None), "rank_body") for item in items):
        pool().warm()


def _turn(path):
    """When the folder of a file comes."""
    folder = path.relative_to(TESTS).parts[0] if path.is_relative_to(TESTS) else ""
    return ORDER.index(folder) if folder in ORDER else len(ORDER)


def pytest_runtest_logreport(report):
    """Name a failed test at once, since a run that is ended from outside prints no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid}", flush=True)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """A worker, which collects all tests, tells how many it has left out."""
    left_out = getattr(node, "workeroutput", {}).get("left_out", 0)
    node.config.stash[LEFT_OUT] = max(left_out, node.config.stash.get(LEFT_OUT, 0))


def pytest_terminal_summary(terminalreporter, config):
    """Say that rows were left out: a new one may be among them."""
    if left_out := config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(
            f"{left_out} tests were left to make test-full; ZEROSHARD_TEST_ALL=1 runs them too"
        )


def pytest_sessionfinish(session):
    """End the rank processes before the interpreter shuts down."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, 0)
    gc.unfreeze = _unfreeze
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
