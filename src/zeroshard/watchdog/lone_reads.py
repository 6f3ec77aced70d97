"""Does a rank that reads sharded values read them alone?

Such a read is a gathering to which every rank gives its part. In a program that was written for
DeepSpeed one rank may read alone: there it gets nothing, and the run goes on. So, in such a program,
ranks say in the store that they have come to a read before its gathering begins. It begins when all have
come. It does not if one of them is known to be elsewhere: in a call that this rank makes only after its
read, in another read, or gone. Whoever reads alone learns that and has taken part in nothing, so that the
ranks still make the same collectives in the same order. Not to know is no reason: a slow rank is waited
for. See docs/decisions/0011-lonely-reads.md.
"""

from __future__ import annotations

import json
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from zeroshard.comm.agreement import Store
from zeroshard.errors import RankLate, RankLost
from zeroshard.watchdog.diagnosis import TORCH
from zeroshard.watchdog.store_client import StoreLost, look

_PATIENCE_S = 0.05  # ranks that read together come within this, nearly always
_LOOK_S = 0.05  # how often to look for answers
_ASK_S = 0.5  # how often to ask again


@dataclass(frozen=True)
class Position:
    """How far a rank has come.

    ``reached``: the number of its calls in each sequence of calls that all ranks make, ``last``: the
    last of them in words; a sequence that threads beside the program have a part in is in ``reached``
    alone. ``in_torch``: which function of ``torch.distributed`` its program is in. ``wait``: the call
    that its program is blocked in, as sequence, number and words, and the only ``rank`` that it needs
    (None: all). ``reads``: the read at which it waits.
    """

    rank: int = 0
    reached: Mapping[str, int] = field(default_factory=dict)
    last: Mapping[str, str] = field(default_factory=dict)
    in_torch: str = ""
    wait: tuple[str, int, str, int | None] | None = None
    reads: str = ""

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> Position:
        """As it came through JSON."""
        wait = answer["wait"]
        return cls(**{**answer, "wait": None if wait is None else tuple(wait)})


def elsewhere(mine: Position, theirs: Position, before: Position | None) -> str:
    """Where a rank is that will not come to the read at which this one waits, in words; "": it may come.

    ``before``: its position a while ago. A collective that this rank has not called cannot end before
    the read does; what a program calls by itself counts only while the rank stays in it.

    >>> mine = Position(0, {"engine": 7}, reads="'head'")
    >>> elsewhere(mine, Position(1, {"engine": 8}, {"engine": "gather 'body' (#8)"}), None)
    "in gather 'body' (#8)"
    >>> elsewhere(mine, Position(1, {"engine": 6}), None)
    ''
    """
    for label, count in theirs.reached.items():
        if count <= mine.reached.get(label, count):
            continue
        if label in theirs.last:
            return f"in {theirs.last[label]}"
        if label == TORCH and theirs.in_torch and theirs == before:
            return f"in {theirs.in_torch}()"
    if theirs.wait is not None:
        label, number, words, source = theirs.wait
        if number > mine.reached.get(label, number) and source in (None, mine.rank):
            return f"in {words}"
    return ""


def smaller_party(me: int, reads: Mapping[int, str]) -> str:
    """The read of a larger party, to which this rank's yields, or "".

    ``reads``: at which read each rank waits, of all ranks. Of two parties of one size the one with the
    lowest rank yields: most programs read alone on rank 0.

    >>> smaller_party(0, {0: "a", 1: "b", 2: "b"}), smaller_party(1, {0: "a", 1: "b", 2: "b"})
    ('b', '')
    >>> smaller_party(0, {0: "a", 1: "b"}), smaller_party(1, {0: "a", 1: "b"})
    ('b', '')
    """
    parties: dict[str, list[int]] = {}
    for rank, read in reads.items():
        parties.setdefault(read, []).append(rank)
    largest = max(parties, key=lambda read: (len(parties[read]), min(parties[read])))
    return "" if largest == reads[me] else largest


class LoneReadCheck:
    """The ranks of one engine at their reads. ``rank`` is this one's number of ``world_size``.

    ``call(operation)`` gives the result of ``operation(store)``, on a store in which ``label`` is this
    engine's own. ``position(words)`` is this rank's, without its read, and without ``last`` unless
    ``words``; ``history()`` stands for the collectives that it made, so that only ranks with the same
    meet. ``gone(rank)``: why a rank will never come, or "". A wait is reported after ``report_s`` and
    given up after ``limit_s``.
    """

    def __init__(
        self,
        call: Callable[[Callable[[Any], Any]], Any],
        *,
        label: str,
        rank: int,
        world_size: int,
        position: Callable[[bool], Position],
        history: Callable[[], str],
        gone: Callable[[int], str],
        report_s: float,
        limit_s: float,
    ) -> None:
        self._call = call
        self._space = f"reads/{label}"
        self._rank = rank
        self._world_size = world_size
        self._position = position
        self._history = history
        self._gone = gone
        self._report_s = report_s
        self._limit_s = limit_s
        self._reads = ""  # the key of the read at which this rank waits
        self._answered = 0
        self._alone: tuple[object, str] | None = (
            None  # where this rank was when it read alone, and why
        )
        self._spent: set[str] = set()  # keys of reads that are over
        _ALL.add(self)

    def alone(self, name: str) -> str:
        """Why no other rank reads ``name`` with this one; "": all do, and its gathering comes next.

        As long as this rank stays where it is, its next reads are alone too, and cost nothing.

        Raises:
            RankLost: the store that the ranks met through does not answer.
        """
        reached = self._position(False).reached
        if self._alone is not None and self._alone[0] == reached:
            return self._alone[1]
        self._alone = None
        history = self._history()
        key = f"{self._space}/{history}/{name}"
        try:
            why, stays = self._come(key, name)
            if not why:  # all are here, so none can be at what was read before
                self._sweep(but=key)
        except StoreLost as error:
            raise RankLost(
                f"RankLost: rank {self._rank} was about to read {name!r}, and the store that the ranks "
                f"met through does not answer ({error}). Look at the output of the other ranks."
            ) from error
        if why or self._rank == 0:
            self._spent.add(key)
        if why and stays:
            self._alone = (reached, why)
        return why

    def _come(self, key: str, name: str) -> tuple[str, bool]:
        if self._add(key, 1) == self._world_size:
            return "", False
        self._reads = key
        try:
            return self._wait(key, name)
        finally:
            self._reads = ""

    def answer(self) -> None:
        """Say where this rank is, if one that waits has asked. Called regularly, by another thread."""
        asked = self._add(f"{self._space}/asked", 0)
        if asked == self._answered:
            return
        reads = next((reader._reads for reader in list(_ALL) if reader._reads), "")
        text = json.dumps([asked, asdict(self._position(True)) | {"reads": reads}])
        self._call(lambda store: store.set(f"{self._space}/at/{self._rank}", text))
        self._answered = asked

    # -- one wait ----------------------------------------------------------------------------------

    def _wait(self, key: str, name: str) -> tuple[str, bool]:
        """Why this rank reads alone, or "" when all have come; whether its next reads will be too."""
        begun_s = looked_s = time.monotonic()
        search, pause_s, reported = _Search(self), 0.0002, False
        while self._add(key, 0) < self._world_size:
            waited_s = time.monotonic() - begun_s
            why, stays = "", True
            if waited_s > self._limit_s:
                why = f"no other came to it within {self._limit_s:.0f} s"
            elif waited_s > _PATIENCE_S and time.monotonic() - looked_s > _LOOK_S:
                looked_s = time.monotonic()
                why, stays = search.look(key)
            if why and self._leaves(key):
                return why, stays
            if waited_s > self._report_s and not reported:
                reported = True
                print(
                    f"zeroshard: rank {self._rank} has waited {waited_s:.0f} s to read {name!r}: every "
                    "rank has to read it, and not all have come.", file=sys.stderr, flush=True,
                )  # fmt: skip
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.002 if waited_s < 1.0 else 0.02)
        return "", False

    def _leaves(self, key: str) -> bool:
        """Leave the wait, unless the last rank has come meanwhile.

        One leaves at a time: that all have come once shows in the count until it is taken back.
        """
        leaving = key + "/leaving"
        until_s = time.monotonic() + 10.0
        while self._add(leaving, 1) != 1:
            self._add(leaving, -1)
            if time.monotonic() > until_s:  # the one that left died in between
                raise RankLate(
                    f"RankLate: rank {self._rank} cannot leave its wait to read {key!r}."
                )
            time.sleep(0.001)
        too_late = self._add(key, -1) == self._world_size - 1
        if too_late:
            self._add(key, 1)
        self._add(leaving, -1)
        return not too_late

    def _sweep(self, but: str) -> None:
        for key in self._spent - {but}:
            for name in (key, key + "/leaving"):
                self._call(partial(_delete, name))
        self._spent &= {but}

    def _add(self, key: str, amount: int) -> int:
        count: int = self._call(lambda store: store.add(key, amount))
        return count


class _Search:
    """Where are the ranks that have not come?"""

    def __init__(self, readers: LoneReadCheck) -> None:
        self._readers = readers
        self._asked = 0
        self._asked_s = -_ASK_S
        self._seen: dict[int, Position] = {}
        self._before: dict[int, Position] = {}

    def look(self, key: str) -> tuple[str, bool]:
        """Why one of them will not come, or ""; whether that holds for the next read as well."""
        readers = self._readers
        others = [rank for rank in range(readers._world_size) if rank != readers._rank]
        if gone := self._collect(others):
            return gone, True
        mine = readers._position(False)
        for rank, theirs in self._seen.items():
            if where := elsewhere(mine, theirs, self._before.get(rank)):
                return f"rank {rank} is {where}", True
        reads = {rank: seen.reads for rank, seen in self._seen.items()} | {readers._rank: key}
        complete = len(reads) == len(others) + 1 and all(map(self._is_now, reads.values()))
        if complete and (other := smaller_party(readers._rank, reads)):
            return f"other ranks read {other.rpartition('/')[2]!r} meanwhile", False
        return "", False

    def _is_now(self, read: str) -> bool:
        """Does a rank wait at this read which has made the same collectives as this one?"""
        space = self._readers._space
        own = f"{space}/{self._readers._history()}/"
        return bool(read) and (read.startswith(own) or not read.startswith(space + "/"))

    def _collect(self, others: list[int]) -> str:
        """Take what has been answered; when it is time, look who is gone, and ask again."""
        readers, space = self._readers, self._readers._space
        for rank in others if self._asked else ():
            if rank in self._seen:
                continue
            text = readers._call(partial(_answer_at, f"{space}/at/{rank}"))
            number, words = json.loads(text) if text is not None else (0, {})
            if number >= self._asked:
                self._seen[rank] = Position.from_answer(words)
        now_s = time.monotonic()
        if now_s - self._asked_s > _ASK_S:
            self._asked_s = now_s
            for rank in others:
                if why := readers._gone(rank):
                    return f"rank {rank} has left ({why})"
            self._before, self._seen = self._seen or self._before, {}
            self._asked = readers._add(f"{space}/asked", 1)
        return ""


def _delete(key: str, store: Store) -> None:
    store.delete_key(key)


def _answer_at(key: str, store: Store) -> str | None:
    return look(store, key)


#: Process-wide, as the main thread is that reads: it waits at one read at a time.
_ALL: weakref.WeakSet[LoneReadCheck] = weakref.WeakSet()
