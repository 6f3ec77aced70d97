"""What a layer with experts asks of a block that shards a model while it is built (``zero.Init``).

Such a block shards what it sees over all ranks, with the values of rank 0. Experts that ranks share are
others on each rank, so the layer says when it makes its own, and when it makes those of other ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from zeroshard.core.mesh import Mesh


class ExpertBuilds(Protocol):
    """A block that shards what is built in it."""

    def own_experts(self, mesh: Mesh, size: int) -> AbstractContextManager[None]:
        """A block in which this rank's experts of one layer are made, which ``size`` ranks share.

        Collective.
        """

    def other_experts(self) -> AbstractContextManager[None]:
        """A block in which something is made of which this block takes nothing."""


_OPEN: list[ExpertBuilds] = []  # blocks that the program is in, the innermost last


@contextlib.contextmanager
def inside(block: ExpertBuilds) -> Iterator[None]:
    """Layers ask ``block`` until the end of the context."""
    _OPEN.append(block)
    try:
        yield
    finally:
        _OPEN.remove(block)


@contextlib.contextmanager
def making_own(mesh: Mesh, size: int) -> Iterator[None]:
    """The block in which a layer makes this rank's experts. Collective inside a block that shards."""
    with making_others(), contextlib.ExitStack() as stack:
        if _OPEN:
            stack.enter_context(_OPEN[-1].own_experts(mesh, size))
        yield


@contextlib.contextmanager
def making_others() -> Iterator[None]:
    """The block in which a layer makes experts of other ranks, to draw the same numbers as they do."""
    with contextlib.ExitStack() as stack:
        for block in _OPEN:
            stack.enter_context(block.other_experts())
        yield
