"""Keys of a store that ranks share: their names, what is posted under them, and how ranks meet there."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn, Protocol, TypeVar, cast

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from zeroshard.core.texts import rank_ranges
from zeroshard.errors import RankLate
from zeroshard.run.exit_report import tell_launcher

CHECK_S = 0.25  # how often a waiting rank asks whether the missing ranks still live
NOTHING = torch.empty(0, dtype=torch.uint8)  # Recorder.enter needs a tensor
ABSENT = "\0absent"  # what no rank writes
END_S = 2.0  # how long a process that closed its connections may take to end
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
FAILED = "failed"
"""Key of the only field that a rank posts if it failed before it could agree. The value says why."""


class Store(Protocol):
    """The methods of a ``torch.distributed`` store that are used here."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def delete_key(self, key: str, /) -> bool: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def multi_set(self, keys: list[str], values: list[str], /) -> None: ...
    def append(self, key: str, value: str, /) -> None: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


def look(store: Store, key: str) -> str | None:
    """The value under ``key``; None, without waiting, if there is none. One request: a ``get`` is two."""
    found = _bytes_at(store, key)
    return None if found is None else found.decode()


def _bytes_at(store: Store, key: str) -> bytes | None:
    found = store.compare_set(key, ABSENT, "")  # sets nothing: no value is equal to ``ABSENT``
    return None if found == ABSENT.encode() else found


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


def ranks_key(ranks: Sequence[int]) -> str:
    """A name of a set of ranks for keys in the store. Every key has it, so it is short for many ranks.

    >>> ranks_key([0, 4]), ranks_key(range(4096)), len(ranks_key(range(0, 8192, 2)))
    ('0,4', '0-4095', 25)
    """
    if len(ranks) > 8 and tuple(ranks) == tuple(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}-{ranks[-1]}"
    text = ",".join(map(str, ranks))
    if len(ranks) <= 8:
        return text
    return f"{ranks[0]}-{ranks[-1]}-{hashlib.sha256(text.encode()).hexdigest()[:18]}"


class Missing(Sequence[int]):
    """Ranks that have not come. The store is asked for them when they are first used: that costs more
    requests than to learn whether all have come.
    """

    def __init__(self, find: Callable[[], list[int]]) -> None:
        self._find = find

    @cached_property
    def _found(self) -> list[int]:
        return self._find()

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, at: Any) -> Any:
        return self._found[at]


Check = Callable[[Sequence[int]], None]


def no_check(_missing: Sequence[int]) -> None:
    """Let the wait go on."""


def first_pause_s(size: int) -> float:
    """Seconds until a rank that waits asks the store again for the first time. As :func:`next_pause_s`.

    Many ranks ask at most 20,000 times a second: a store answers two or three times as many.
    """
    return max(0.0005, size / 20_000)


def next_pause_s(pause_s: float, waited_s: float, size: int) -> float:
    """Seconds until a rank that waits asks the store again; ``size``: the ranks that may wait.

    Doubles, up to 2 ms in the first second and to 20 ms later. Many ranks look less often: all together
    8,000 times a second at first, and 1,000 times after eight seconds per thousand ranks.
    """
    quick_s = 0.002 if waited_s < 1.0 else 0.02
    return min(2 * pause_s, max(quick_s, size / 8000, min(waited_s / 8, size / 1000)))


def present(store: Store, keys: Sequence[str]) -> list[str]:
    """Those of ``keys`` that the store has, in their order. One request if it has all.

    Else at most ``2 m log2(n / m)`` requests about, if ``m`` of the ``n`` keys are absent.
    """
    if not keys or store.check(list(keys)):
        return list(keys)
    half = len(keys) // 2
    return [*present(store, keys[:half]), *present(store, keys[half:])] if half else []


def post(store: Store, key: str, rank: int, text: str) -> int:
    """Add the text of ``rank`` to those under ``key``. Returns how many ranks have posted there.

    All texts are one value of the store, so that one request reads them. A value for each rank takes
    thousands of small messages, which the rank that reads them would wait for. Costs two requests; the
    first has no answer, so it is no round trip.
    """
    store.append(f"{key}/posts", f"{rank} {len(text.encode())} {text}")
    return store.add(f"{key}/came", 1)


def posts(store: Store, key: str) -> dict[int, str]:
    """The texts that ranks have posted under ``key``, by rank. One request."""
    found, at, texts = _bytes_at(store, f"{key}/posts") or b"", 0, {}
    while at < len(found):
        rank, nbytes, _ = found[at : at + 32].split(b" ", 2)
        at += len(rank) + len(nbytes) + 2
        texts[int(rank)] = found[at : at + int(nbytes)].decode()
        at += int(nbytes)
    return texts


def absent(store: Store, key: str, ranks: Iterable[int]) -> list[int]:
    """Those of ``ranks`` that have not posted under ``key``. One request."""
    there = posts(store, key)
    return [rank for rank in ranks if rank not in there]


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """This rank among ``size`` ranks that agree through ``store``, a key space of their own.

    ``check(missing)`` is called a few times a second in each wait, and may end it by raising.
    """

    store: Store
    rank: int
    size: int
    timeout_s: float = 1800.0
    check: Check = no_check

    def wait_for(
        self, find: Callable[[], T | None], missing: Callable[[], list[int]], topic: str
    ) -> T:
        """Return what ``find()`` finds, as soon as that is not None.

        ``missing()``: the ranks that have not come. Both ask the store. ``topic``: what is waited for.

        Raises:
            RankLate: some ranks did not come within ``timeout_s``; it names them.
        """
        begun_s = checked_s = time.monotonic()
        pause_s = first_pause_s(self.size)
        while (found := find()) is None:
            now_s = time.monotonic()
            waited_s = now_s - begun_s
            if now_s - checked_s > CHECK_S or waited_s > self.timeout_s:
                checked_s = now_s
                late = Missing(missing)
                self.check(late)
                if waited_s > self.timeout_s and (found := find()) is None:
                    self._give_up(late, topic)
                if found is not None:
                    return found
            time.sleep(pause_s)
            pause_s = next_pause_s(pause_s, waited_s, self.size)
        return found

    def _give_up(self, late: Missing, topic: str) -> NoReturn:
        who = rank_ranges(late) if late else "the rank that came last"
        error = RankLate(
            f"RankLate: {who} did not reach {topic} within {self.timeout_s:.0f} s, while rank "
            f"{self.rank} waited. Look at its output first."
        )
        error.ranks, error.did = tuple(late), "was late" if len(late) == 1 else "were late"
        tell_launcher(error, os.environ)
        raise error

    def arrive(self, value: str, decide: Callable[[list[str]], str], key: str) -> str | None:
        """Post ``value`` under ``key`` without waiting. The last of the ranks gets the decision.

        The rank that comes last calls ``decide`` with the values of all ranks, in rank order. The other
        ranks get None here, and the decision of :meth:`outcome`. ``decide`` must be the same function of
        the values on every rank. A rank makes two requests, the last one four.
        """
        if post(self.store, key, self.rank, value) != self.size:
            return None
        values = posts(self.store, key)
        said = decide([values[at] for at in range(self.size)])
        self.store.set(f"{key}/decided", said)
        return said

    def outcome(self, key: str) -> str:
        """What the last rank that came to ``key`` decided. Waits as :meth:`wait_for`."""
        return self.wait_for(
            lambda: look(self.store, f"{key}/decided"),
            lambda: absent(self.store, key, range(self.size)),
            repr(key),
        )

    def exchange(self, value: str, key: str) -> list[str]:
        """Every rank's ``value``, in rank order, on every rank. Waits as :meth:`wait_for`.

        All ranks get all values. For many ranks let the last one decide (:meth:`arrive`).
        """
        said = self.arrive(value, json.dumps, key)
        values: list[str] = json.loads(self.outcome(key) if said is None else said)
        return values
