"""Which param group of an optimizer a saved one belongs to, where experts had groups of their own.

DeepSpeed's optimizers need groups for experts (``"moe": True``), and large ones several. Here they need
none, so a run may continue another one with fewer groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
