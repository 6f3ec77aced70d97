"""Marks of experts: of parameters, of blocks that shard a model while it is built, and of param groups.

The marks of parameters are DeepSpeed's, which its programs set and ask for, too. A block that shards what
it sees over all ranks (``zero.Init``) takes the values of rank 0. Experts that ranks share are others on
each rank, so the layer says when it makes its own, and when it makes those of other ranks.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from zeroshard.core.mesh import Mesh
from zeroshard.errors import UsageError

_GROUP = re.compile(r"ep_size_([1-9]\d*)")


def mark(param: Tensor, size: int) -> None:
    """Note that ``param`` is that of an expert of a layer whose experts ``size`` ranks share."""
    marked: Any = param
    marked.allreduce = False
    marked.group_name = f"ep_size_{size}"


def is_expert(param: Any) -> bool:
    """Whether the parameter has the mark of an expert."""
    return not getattr(param, "allreduce", True)


def ranks_of_layer(param: Any, name: str = "") -> int:
    """How many ranks share the experts of the layer to which ``param`` belongs; 1: all hold the same.

    ``name``: of the parameter, for messages.

    Raises:
        UsageError: the mark names no such number.
    """
    if not is_expert(param):
        return 1
    found = _GROUP.fullmatch(str(getattr(param, "group_name", "")))
    if found is None:
        raise UsageError(
            f"parameter {name!r} has allreduce=False, the mark of an expert, but its group_name is "
            f"{getattr(param, 'group_name', None)!r}, so it is unknown which ranks hold the same expert. "
            "Set group_name to 'ep_size_N', where N ranks share the experts of the layer."
        )
    return int(found[1])


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


Options = Mapping[str, Any]


def matched_groups(saved: Sequence[Options], own: Sequence[Options]) -> list[list[int]] | None:
    """For each saved group the groups of ``own`` that may have its parameters; None: they do not fit.

    As many groups on both sides are the same groups. Else groups of experts belong to those with the same
    name; or, if one side has none, to groups with the options of the one that they were made from.

    >>> saved = [{"lr": 1}, {"lr": 2}, {"lr": 2, "moe": True, "name": "ep_size_2"}]
    >>> matched_groups(saved, [{"lr": 3}, {"lr": 4}]), matched_groups(saved, [{"lr": 3}])
    ([[0], [1], [1]], None)
    """
    if len(saved) == len(own):
        return [[at] for at in range(len(saved))]
    plain, plain_own = _without_experts(saved), _without_experts(own)
    if len(plain) != len(plain_own):
        return None
    place = dict(zip(plain, plain_own, strict=True))
    found = [_places(at, saved, own, place) for at in range(len(saved))]
    covered = set().union(*found)
    return found if all(found) and covered == set(range(len(own))) else None


def _places(
    at: int, saved: Sequence[Options], own: Sequence[Options], place: Mapping[int, int]
) -> list[int]:
    """The groups of ``own`` for saved group ``at``. ``place``: of the groups without experts."""
    if at in place:
        more = [] if len(place) < len(saved) else _made_from(own, place[at])
        return [place[at], *more]
    if len(place) < len(own):
        return [k for k, group in enumerate(own) if _is_named(group, saved[at].get("name"))]
    return [there for k, there in place.items() if _rest(saved[k]) == _rest(saved[at])]


def _made_from(groups: Sequence[Options], at: int) -> list[int]:
    """Groups of experts with the options of group ``at``."""
    rest = _rest(groups[at])
    return [k for k, group in enumerate(groups) if group.get("moe") and _rest(group) == rest]


def _without_experts(groups: Sequence[Options]) -> list[int]:
    return [at for at, group in enumerate(groups) if not group.get("moe")]


def _is_named(group: Options, name: Any) -> bool:
    return bool(group.get("moe")) and group.get("name") == name


def _rest(group: Options) -> dict[str, Any]:
    """What a group of experts has from the group that it was made from."""
    return {
        key: each for key, each in group.items() if key not in ("params", "name", "moe", "step")
    }
