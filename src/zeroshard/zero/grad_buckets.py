"""Which gradients are reduced together, and when: the policy of buckets.

A policy is a function that every rank calls with the same buffers, in the order in which backward reaches
their units. It returns launches in the order in which they start, the same on every rank: ranks that
ordered collectives differently would wait for each other without end (ADR 0004). A launch starts when
backward has given all gradients of its buffers and the launches before it have started.
:class:`~zeroshard.zero.reduce.GradReducer` uses :func:`by_block`, unless
``engine/build_runtime.py: _build_reducer`` passes another policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

from zeroshard.comm.process_group import joining

if TYPE_CHECKING:
    from zeroshard.comm.process_group import ProcessGroupComm
    from zeroshard.zero.gradients import GradBuffer


@dataclass(eq=False)
class GradLaunch:
    """Buffers that are reduced by one call. ``comm``: the one that can do it; None: it is one buffer.

    ``apart``: results have memory of their own and stay there, so the bytes of each change are known.
    """

    buffers: tuple[GradBuffer, ...]
    comm: ProcessGroupComm | None = field(init=False)
    apart: bool = field(init=False)

    def __post_init__(self) -> None:
        several = len(self.buffers) > 1
        self.comm = joining(self.buffers[0].comm) if several else None
        self.apart = several and all(
            buffer.transient and buffer.comm.size > 1 and buffer.store is None
            for buffer in self.buffers
        )


BucketPolicy = Callable[[Iterable["GradBuffer"]], list[GradLaunch]]
"""Cuts buffers into launches. Several of one launch share a communicator that ``joining`` accepts.

The size of a buffer, padding included, is ``buffer.unit.layout.full_numel``; its block is
``buffer.unit.group``, which also names the launch. A policy with a number is a ``functools.partial``.
"""


def by_block(buffers: Iterable[GradBuffer]) -> list[GradLaunch]:
    """Neighbours whose units are of one group, over a communicator that can reduce several tensors.

    On CPU ranks, whose communicators cannot, and for units of no group each buffer is a launch. So are
    the units of the last group if they are resident: no work of backward is left to overlap with a launch
    of that block, so each of its matrices is reduced while the gradients of the next are computed. At
    stage 3 the block would need more collectives than three.
    """

    def key(buffer: GradBuffer) -> tuple[object, ...]:
        joins = buffer.unit.group and joining(buffer.comm) is not None
        return (buffer.unit.group, id(buffer.comm)) if joins else (id(buffer),)

    launches = [GradLaunch(tuple(members)) for _, members in groupby(buffers, key)]
    groups = [at for at, launch in enumerate(launches) if len(launch.buffers) > 1]
    if not groups or not launches[last := groups[-1]].buffers[0].unit.resident:
        return launches
    # What is no matrix comes last, because a block begins with a norm.
    matrices_first = sorted(launches[last].buffers, key=lambda buffer: len(buffer.unit.params) > 1)
    launches[last : last + 1] = [GradLaunch((buffer,)) for buffer in matrices_first]
    return launches
