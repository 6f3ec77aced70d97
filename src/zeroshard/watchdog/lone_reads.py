"""Finds out whether a rank that reads sharded values reads them alone.

Such a read is an all-gather to which every rank contributes. In a program that was written for
DeepSpeed one rank may read alone: with DeepSpeed it gets nothing, and the run goes on. In such a
program, therefore, each rank posts in the store that it has come to a read, before the all-gather
begins. The all-gather begins when all ranks have posted. It does not if a rank is known to be
elsewhere: in a call that this rank makes only after its read, in another read, or gone. A rank that
reads alone learns it and has called no collective, so all ranks still make the same collectives in the
same order. If nothing is known about a rank, it may be slow, and this rank waits for it. See
docs/decisions/0011-lonely-reads.md.
"""

from __future__ import annotations

import json
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from zeroshard.comm.store_keys import Store, look, next_pause_s
from zeroshard.errors import RankLate, RankLost
from zeroshard.watchdog.diagnosis import SET_UPS
from zeroshard.watchdog.messages import BELL, StoreLost
from zeroshard.watchdog.rank_status import call_text
from zeroshard.watchdog.settings import store_tick_s
from zeroshard.watchdog.stacks import TORCH, call_of_torch
from zeroshard.watchdog.tracked_calls import TrackedCalls, calls_of_torch

_PATIENCE_S = 0.05  # ranks that read together nearly always post within this time
_LOOK_S = 0.05  # how often to look for answers
_ASK_S = 0.5  # how often to ask again


@dataclass(frozen=True)
class Position:
    """How many calls a rank has made, and which call it is in.

    ``reached``: the number of its calls, by label of the sequence. ``last``: the last call of each
    sequence, in words; without the sequences in which other threads than the program's take part.
    ``in_torch``: the function of ``torch.distributed`` that its program is in. ``wait``: the call that
    its program is blocked in: label, number, words, and the only rank that it needs (None: all).
    ``reads``: the key of the read at which it waits.
    """

    rank: int = 0
    reached: Mapping[str, int] = field(default_factory=dict)
    last: Mapping[str, str] = field(default_factory=dict)
    in_torch: str = ""
    wait: tuple[str, int, str, int | None] | None = None
    reads: str = ""

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> Position:
        """The position from its JSON values."""
        wait = answer["wait"]
        return cls(**{**answer, "wait": None if wait is None else tuple(wait)})


def position_of(rank: int, parts: Iterable[TrackedCalls], main: int, *, words: bool) -> Position:
    """How many calls of each sequence ``rank``, this process, has made. ``main``: its program's thread.

    ``words``: with its last calls, and what its program is blocked in.
    """
    reached, last, wait = {}, {}, None
    for part in parts:
        if part.label == TORCH:
            continue
        reached[part.label] = part.reached()
        if not words:
            continue
        if part.collective or part.label == SET_UPS:
            flight = part.flight()
            calls = [call_text(record) for record in (flight.records if flight else ())[-1:]]
            last[part.label] = calls[0] if calls else part.label
        blocked = part.wait()
        if blocked is not None and not blocked.behind:
            wait = blocked.label, blocked.seq, blocked.what, blocked.source
    reached[TORCH] = calls_of_torch()
    own = call_of_torch(main) if words else None
    return Position(rank, reached, last, own[1] if own is not None else "", wait)


def elsewhere(mine: Position, theirs: Position, before: Position | None) -> str:
    """Where the rank of ``theirs`` is, if it will not come to the read of ``mine``; "": it may come.

    ``before``: its position a while ago. A collective that this rank has not called cannot end before
    its read ends. A call that the program itself makes of ``torch.distributed`` counts only if the rank
    stays in it.

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
    """The read at which most ranks wait, if rank ``me`` waits at another one; else "".

    ``reads``: the read at which each rank waits. If two reads have equally many ranks, the one with the
    lowest rank yields, because most programs that read alone do so on rank 0.

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
    """Checks, for the reads of one engine, whether all ranks read together.

    ``rank`` is this one's number among the ``size`` ranks of the group. ``call(operation)`` returns
    ``operation(store)``; ``label`` names this engine in the store. ``position(words)`` is this rank's
    position without ``reads``, and without ``last`` unless ``words``. ``history()`` identifies the
    collectives that this rank has made; only ranks with the same history count as being at the same read.
    ``gone(rank)``: why a rank will never come, or "". A wait is reported after ``report_s`` seconds and
    given up after ``limit_s`` seconds. ``rung()``: the number of the watchdogs' bell; questions are
    looked for only when it changes.
    """

    def __init__(
        self,
        call: Callable[[Callable[[Any], Any]], Any],
        *,
        label: str,
        rank: int,
        size: int,
        position: Callable[[bool], Position],
        history: Callable[[], str],
        gone: Callable[[int], str],
        report_s: float,
        limit_s: float,
        rung: Callable[[], int] | None = None,
    ) -> None:
        self._call = call
        self._rung, self._heard = rung, -1
        self._space = f"reads/{label}"
        self._rank = rank
        self._size = size
        self._position = position
        self._history = history
        self._gone = gone
        self._report_s = report_s
        self._limit_s = limit_s
        self._reads = ""  # the key of the read at which this rank waits
        self._answered = 0
        self._alone: tuple[object, str] | None = None  # where it read alone, and why it was alone
        self._spent: set[str] = set()  # keys of reads that are over
        _ALL.add(self)

    def alone(self, name: str) -> str:
        """Why not all ranks read ``name`` with this one; "": all do, and the all-gather is next.

        As long as this rank makes no other call, its next reads are alone too, and the store is not
        asked.

        Raises:
            RankLost: the store that the ranks met through does not answer.
            RankLate: the rank cannot leave its wait, because another rank died while it left.
        """
        reached = self._position(False).reached
        if self._alone is not None and self._alone[0] == reached:
            return self._alone[1]
        self._alone = None
        history = self._history()
        key = f"{self._space}/{history}/{name}"
        try:
            why, stays = self._come(key, name)
            if not why:  # all ranks are at this read, so none is at an earlier one
                self._sweep(but=key)
        except StoreLost as error:
            raise RankLost(
                f"RankLost: rank {self._rank} was about to read {name!r}, and the store that "
                f"connects the ranks does not answer ({error}). Look at the output of the other "
                "ranks."
            ) from error
        if why or self._rank == 0:
            self._spent.add(key)
        if why and stays:
            self._alone = (reached, why)
        return why

    def _come(self, key: str, name: str) -> tuple[str, bool]:
        if self._add(key, 1) == self._size:
            return "", False
        self._reads = key
        try:
            return self._wait(key, name)
        finally:
            self._reads = ""

    def answer(self) -> None:
        """Post this rank's position if a rank that waits has asked. Called by the watchdog's thread."""
        rung = self._heard + 1 if self._rung is None else self._rung()
        if rung == self._heard:
            return
        asked = self._add(f"{self._space}/asked", 0)
        if asked == self._answered:
            self._heard = rung
            return
        reads = next((reader._reads for reader in list(_ALL) if reader._reads), "")
        text = json.dumps([asked, asdict(self._position(True)) | {"reads": reads}])
        self._call(lambda store: store.set(f"{self._space}/at/{self._rank}", text))
        self._answered, self._heard = asked, rung

    # -- one wait ----------------------------------------------------------------------------------

    def _wait(self, key: str, name: str) -> tuple[str, bool]:
        """Why this rank reads alone, or "" if all have come; and whether its next reads are alone too."""
        begun_s = looked_s = time.monotonic()
        search, pause_s, reported = _Search(self), 0.0002, False
        while self._add(key, 0) < self._size:
            waited_s = time.monotonic() - begun_s
            why, stays = "", True
            if waited_s > self._limit_s:
                why = f"no other rank reached it within {self._limit_s:.0f} s"
            elif (
                waited_s > max(_PATIENCE_S, self._size / 1000)
                and time.monotonic() - looked_s > _LOOK_S
            ):
                looked_s = time.monotonic()
                why, stays = search.look(key)
            if why and self._leaves(key):
                return why, stays
            if waited_s > self._report_s and not reported:
                reported = True
                print(
                    f"zeroshard: rank {self._rank} has waited {waited_s:.0f} s to read {name!r}: "
                    "every rank has to read it, and not all ranks have reached the read.",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
            time.sleep(pause_s)
            pause_s = next_pause_s(pause_s, waited_s, self._size)
        return "", False

    def _leaves(self, key: str) -> bool:
        """Leave the wait; False if the last rank has come in the meantime.

        Only one rank leaves at a time, because leaving changes the count that shows that all have come.
        """
        leaving = key + "/leaving"
        until_s = time.monotonic() + 10.0
        while self._add(leaving, 1) != 1:
            self._add(leaving, -1)
            if time.monotonic() > until_s:  # the rank that was leaving died
                raise RankLate(
                    f"RankLate: rank {self._rank} cannot leave its wait to read {key!r}."
                )
            time.sleep(0.001)
        too_late = self._add(key, -1) == self._size - 1
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
    """Looks for the ranks that have not come."""

    def __init__(self, readers: LoneReadCheck) -> None:
        self._readers = readers
        self._asked = 0
        self._asked_s = -_ASK_S
        self._seen: dict[int, Position] = {}
        self._before: dict[int, Position] = {}

    def look(self, key: str) -> tuple[str, bool]:
        """Why one of them will not come, or ""; and whether that holds for the next read as well."""
        readers = self._readers
        others = [rank for rank in range(readers._size) if rank != readers._rank]
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
        """Whether a rank that waits at ``read`` has made the same collectives as this one."""
        space = self._readers._space
        own = f"{space}/{self._readers._history()}/"
        return bool(read) and (read.startswith(own) or not read.startswith(space + "/"))

    def _collect(self, others: list[int]) -> str:
        """Take the answers that have come. When it is time, ask again, or return why a rank is gone."""
        readers, space = self._readers, self._readers._space
        for rank in others if self._asked else ():
            if rank in self._seen:
                continue
            text = readers._call(partial(look, key=f"{space}/at/{rank}"))
            number, words = json.loads(text) if text is not None else (0, {})
            if number >= self._asked:
                self._seen[rank] = Position.from_answer(words)
        now_s = time.monotonic()
        if now_s - self._asked_s > max(_ASK_S, store_tick_s(0.0, readers._size)):
            self._asked_s = now_s
            for rank in others:
                if why := readers._gone(rank):
                    return f"rank {rank} has left ({why})"
            self._before, self._seen = self._seen or self._before, {}
            self._asked = readers._add(f"{space}/asked", 1)
            readers._add(BELL, 1)
        return ""


def _delete(key: str, store: Store) -> None:
    store.delete_key(key)


#: All checks of this process: its main thread waits at one read at a time, whichever engine it is for.
_ALL: weakref.WeakSet[LoneReadCheck] = weakref.WeakSet()
