"""Do all ranks hold the same plan, before the first byte moves?

Ranks meet in the store that their process group was built with. A different config on one rank is
then an error in the first second, with one text on every rank, not a hang or a wrong number later.
"""

from __future__ import annotations

import hashlib
import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from zeroshard.comm.flight_recorder import rank_ranges
from zeroshard.errors import RankLate, RankMismatch

FAILED = "failed"
"""The only field of a rank that cannot come, because something went wrong on its way here: what."""


class Store(Protocol):
    """What is used of a torch.distributed store."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def delete_key(self, key: str, /) -> bool: ...


def namespace(store: Store, label: str, rank: int) -> Store:
    """A key space that no earlier meeting under this label has used."""
    return numbered_namespace(store, label, rank)[1]


def numbered_namespace(store: Store, label: str, rank: int) -> tuple[int, Store]:
    """The same, and how many meetings under this label there were before.

    A rank's n-th meeting is every other rank's n-th, also if one left the last before the others came:
    the store counts for each rank by itself.
    """
    number = store.add(f"{label}/arrivals/{rank}", 1) - 1
    return number, cast("Store", PrefixStore(f"{label}/{number}", cast("Any", store)))


def exchange(
    store: Store,
    rank: int,
    world_size: int,
    value: str,
    *,
    key: str,
    timeout_s: float = 1800.0,
    check: Callable[[Sequence[int]], None] = lambda _missing: None,
) -> list[str]:
    """Every rank's ``value``, in rank order. Waits for all; ``check(missing)`` may end that by an error.

    Raises:
        RankLate: some ranks did not come within ``timeout_s``; it names them.
    """
    store.set(f"{key}/{rank}", value)
    missing = [r for r in range(world_size) if r != rank]
    begun_s, pause_s = time.monotonic(), 0.001
    while missing:
        missing = [r for r in missing if not store.check([f"{key}/{r}"])]
        if not missing:
            break
        if time.monotonic() - begun_s > timeout_s:
            raise RankLate(
                f"RankLate: {rank_ranges(missing)} did not come to {key!r} within "
                f"{timeout_s:.0f} s, while rank {rank} waited. Look at their output first."
            )
        check(missing)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)
    return [value if r == rank else store.get(f"{key}/{r}").decode() for r in range(world_size)]


def agree_plan(
    store: Store,
    rank: int,
    world_size: int,
    fields: Mapping[str, str],
    *,
    timeout_s: float = 1800.0,
    check: Callable[[Sequence[int]], None] = lambda _missing: None,
) -> None:
    """Return if all ranks have equal ``fields``; collective.

    Raises:
        RankMismatch: names the first field that differs, its values and who has them.
        RankLate: a rank did not come.
    """
    digest = post_plan(store, rank, fields)
    digests = exchange(
        store, rank, world_size, digest, key="plan", timeout_s=timeout_s, check=check
    )
    groups: dict[str, list[int]] = {}
    for at, other in enumerate(digests):
        groups.setdefault(other, []).append(at)
    if len(groups) == 1:
        return
    ordered = sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks))
    plans = [json.loads(store.get(f"fields/{ranks[0]}")) for ranks in ordered]
    raise RankMismatch(mismatch_text(ordered, plans))


def post_plan(store: Store, rank: int, fields: Mapping[str, str]) -> str:
    """Post ``fields`` without waiting for the others; returns their digest.

    A rank that fails on its way to :func:`agree_plan` posts why; the others' agreement then fails.
    """
    digest = hashlib.sha256(json.dumps(dict(fields)).encode()).hexdigest()
    store.set(f"fields/{rank}", json.dumps([socket.gethostname(), dict(fields)]))
    store.set(f"plan/{rank}", digest)
    return digest


def agree_value(
    store: Store, rank: int, world_size: int, name: str, value: str, *, timeout_s: float = 1800.0
) -> None:
    """Return if all ranks have the same ``value``; collective. Errors as :func:`agree_plan`."""
    agree_plan(store, rank, world_size, {name: value}, timeout_s=timeout_s)


def mismatch_text(
    groups: Sequence[Sequence[int]], plans: Sequence[tuple[str, Mapping[str, Any]]]
) -> str:
    """Who failed before, or who differs from whom, in what. ``groups`` of ranks, the largest first.

    >>> plans = [("a", {"stage": "2"}), ("b", {"stage": "3"})]
    >>> mismatch_text([[0, 1, 2], [3]], plans)[:68]
    'RankMismatch: rank 3 has another plan than ranks 0-2. First differen'
    """
    for ranks, (host, fields) in zip(groups, plans, strict=True):
        if FAILED in fields:
            return (
                f"RankMismatch: {rank_ranges(ranks)} (host {host}) failed before all ranks had met, so "
                f"that none can go on: {fields[FAILED]}"
            )
    odd = sorted(r for ranks in groups[1:] for r in ranks)
    has = "has" if len(odd) == 1 else "have"
    keys = dict.fromkeys(key for _, fields in plans for key in fields)
    differing = [key for key in keys if len({fields.get(key) for _, fields in plans}) > 1]
    key = differing[0] if differing else "order of the fields"
    values = " vs ".join(
        f"{_short(fields.get(key))} ({rank_ranges(ranks)}, host {host})"
        for ranks, (host, fields) in list(zip(groups, plans, strict=True))[:3]
    )
    more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
    return (
        f"RankMismatch: {rank_ranges(odd)} {has} another plan than {rank_ranges(groups[0])}. "
        f"First difference: {key} = {values}{more}.\n"
        "  Start every rank with the same program, config and library versions."
    )


def _short(value: Any) -> str:
    return str(value)[:90] if value is not None else "missing"
