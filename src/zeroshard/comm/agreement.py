"""Checks that all ranks have the same plan before the first collective.

Ranks compare fingerprints through the store that their process group was built with. If the config of one
rank differs, every rank raises the same error in the first second, instead of a hang or a wrong number
later.
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
"""Key of the only field that a rank posts if it failed before it could agree. The value says why."""


class Store(Protocol):
    """The methods of a ``torch.distributed`` store that are used here."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def delete_key(self, key: str, /) -> bool: ...


def namespace(store: Store, label: str, rank: int) -> Store:
    """A key space of ``store`` that no earlier call under ``label`` has used."""
    return numbered_namespace(store, label, rank)[1]


def numbered_namespace(store: Store, label: str, rank: int) -> tuple[int, Store]:
    """How often this rank called this for ``label`` before, and the key space of this call.

    The n-th call of one rank gets the key space of the n-th call of every other rank. That holds even
    if a rank left an earlier one before the others had come: the store counts the calls of each rank
    separately.
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
    """Every rank's ``value``, in rank order. Waits for all; ``check(missing)`` may end that by raising.

    Raises:
        RankLate: some ranks did not post within ``timeout_s``; it names them.
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
        RankMismatch: names the first field that differs, its values, and the ranks that have them.
        RankLate: some ranks did not post within ``timeout_s``; it names them.
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
    """Post ``fields`` without waiting for the other ranks; return their digest.

    A rank that fails before :func:`agree_plan` posts :data:`FAILED` and the reason; the agreement then
    fails on the other ranks.
    """
    digest = hashlib.sha256(json.dumps(dict(fields)).encode()).hexdigest()
    store.set(f"fields/{rank}", json.dumps([socket.gethostname(), dict(fields)]))
    store.set(f"plan/{rank}", digest)
    return digest


def agree_value(
    store: Store, rank: int, world_size: int, name: str, value: str, *, timeout_s: float = 1800.0
) -> None:
    """Return if all ranks have the same ``value``; collective. Raises as :func:`agree_plan`."""
    agree_plan(store, rank, world_size, {name: value}, timeout_s=timeout_s)


def mismatch_text(
    groups: Sequence[Sequence[int]], plans: Sequence[tuple[str, Mapping[str, Any]]]
) -> str:
    """Which ranks failed before, or which ranks differ in what. ``groups``: ranks, largest group first.

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
