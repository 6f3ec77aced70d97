"""Lets a test that measures time run alone although pytest-xdist runs tests on several workers.

A test with ``@pytest.mark.alone``, and every test in the folders ``ALONE``, begins when no test of
another worker runs, and none begins before it has ended. All others run beside each other. Without
workers nothing is locked.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ALONE = ("accounting", "faults")
"""Folders whose tests measure time, wait for limits of time, or count the memory of the machine."""


class Turns:
    """Locks of one process on the files ``gate`` and ``room`` of a folder that all workers share.

    A test enters the room through the gate; a test that wants the room for itself keeps the gate until it
    has it. So it waits for one test of each worker at most. A lock ends with its process.
    """

    def __init__(self, folder: Path) -> None:
        self._gate, self._room = (
            os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            for name in ("gate", "room")
        )

    @contextmanager
    def turn(self, *, alone: bool) -> Iterator[None]:
        """Be in the room, alone or beside tests that are not alone."""
        fcntl.flock(self._gate, fcntl.LOCK_EX)
        try:
            fcntl.flock(self._room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        finally:
            fcntl.flock(self._gate, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(self._room, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close both files."""
        os.close(self._gate)
        os.close(self._room)


def runs_alone(item: pytest.Item) -> bool:
    """Whether the test is marked, or its folder is one of ``ALONE``."""
    folder = item.path.parent.name
    return folder in ALONE or item.get_closest_marker("alone") is not None


# -- hooks of pytest and pytest-xdist ----------------------------------------------------------------

TURNS = pytest.StashKey[Turns]()
FOLDER = pytest.StashKey[str]()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Tell a worker of pytest-xdist the folder of the locks. Runs in the process that starts them."""
    stash = node.config.stash
    if FOLDER not in stash:
        stash[FOLDER] = tempfile.mkdtemp(prefix="zeroshard-turns-")
    node.workerinput["turns"] = stash[FOLDER]


def pytest_configure(config):
    """On a worker, open the locks that it shares with the others."""
    if hasattr(config, "workerinput"):
        config.stash[TURNS] = Turns(Path(config.workerinput["turns"]))


def pytest_unconfigure(config):
    """Close the locks, and remove their folder when all workers have ended."""
    if TURNS in config.stash:
        config.stash[TURNS].close()
    if FOLDER in config.stash:
        shutil.rmtree(config.stash[FOLDER])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    """Wait for the turn of the test, before the clock of its time limit starts."""
    turns = item.config.stash.get(TURNS, None)
    if turns is None:
        return (yield)
    with turns.turn(alone=runs_alone(item)):
        return (yield)
