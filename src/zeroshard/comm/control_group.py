"""How do ranks agree on facts without a collective, from any one thread, while a disk may be slow?

They post small texts in the store that they met through. Nobody waits in a transport, so nothing times
out there; a rank of this host that ends meanwhile is noticed, and named.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import torch

from zeroshard.comm.agreement import Store
from zeroshard.comm.flight_recorder import rank_ranges
from zeroshard.comm.recorder import Item, Recorder
from zeroshard.errors import DistributedError, RankLate, RankLost

_LOOK_S = 0.25  # how often to look whether those who are missing still live
_NOTHING = torch.empty(0, dtype=torch.uint8)  # a record is of a tensor
_END_S = 2.0  # how long a process that closed its connections may take to end


class ControlGroup:
    """A key space of ``world_size`` ranks, of which ``first`` is the global rank of number 0. ``store``
    must be a client that no other thread uses.

    ``gone(rank)`` says why a rank will never come, or "" as long as it may; ``check()`` raises what has
    ended the run. All ranks make the same calls in the same order, each from one thread at a time;
    ``recorder`` tells a sentinel which. Texts are gathered on rank 0 and said by it: with W ranks a call
    costs W texts, not W squared.
    """

    def __init__(
        self,
        store: Store | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
        first: int = 0,
        gone: Callable[[int], str] = lambda _rank: "",
        recorder: Recorder | None = None,
        check: Callable[[], None] = lambda: None,
        timeout_s: float = 3600.0,
    ) -> None:
        assert store is not None or world_size == 1
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._gone = gone
        self._recorder = recorder or Recorder("meetings")
        self._meetings = self._recorder.entries("meet")
        self._sayings = self._recorder.entries(f"broadcast from {first}")
        self._check = check
        self._timeout_s = timeout_s
        self._calls = 0
        self._spent: list[str] = []  # keys that everybody will have read at the next gathering

    def gather(self, text: str, *, topic: str) -> list[str] | None:
        """Every rank's ``text``, in rank order, on rank 0; None elsewhere, without waiting.

        Raises:
            RankLost: the process of a rank ended, or the one that serves the store; it names the ranks
                and the topic.
            RankLate: some did not come in time.
        """
        self._calls += 1
        store, call = self._store, self._calls
        if store is None:
            return [text]
        item = self._recorder.enter(self._meetings[topic], _NOTHING, 0, 0)
        with self._reaching(topic):
            if self.rank:
                store.set(f"{call}/{self.rank}", text)
                return None
            others = range(1, self.world_size)
            self._wait({rank: f"{call}/{rank}" for rank in others}, topic, item)
            texts = [text, *(store.get(f"{call}/{rank}").decode() for rank in others)]
            # Who came here has read what was said before.
            self._spent += [f"{call}/{rank}" for rank in others]
            for key in self._spent:
                store.delete_key(key)
            self._spent = []
        return texts

    def broadcast(self, text: str | None, *, topic: str) -> str:
        """Rank 0's ``text`` on every rank; raises as :meth:`gather`."""
        self._calls += 1
        store, key = self._store, f"{self._calls}/said"
        item = self._recorder.enter(self._sayings[topic], _NOTHING, 0, 0)
        with self._reaching(topic):
            if self.rank == 0:
                assert text is not None
                if store is not None:
                    store.set(key, text)
                    self._spent.append(key)
                return text
            assert store is not None
            self._wait({0: key}, topic, item)
            return store.get(key).decode()

    @contextlib.contextmanager
    def _reaching(self, topic: str) -> Iterator[None]:
        """An error of the store means that the process that serves it ended: often rank 0."""
        try:
            yield
        except DistributedError:
            raise
        except RuntimeError as error:
            lost: dict[int, str] = {}
            deadline_s = time.monotonic() + _END_S
            while not lost and time.monotonic() < deadline_s:
                time.sleep(0.02)
                for rank in range(self.world_size):
                    with contextlib.suppress(RuntimeError):  # who lives is asked over the store
                        if why := self._gone(rank):
                            lost[rank] = why
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            facts = f"the store that the ranks met through does not answer: {first[:200]}"
            raise _rank_lost(lost, topic, facts) from error

    def _wait(self, keys: Mapping[int, str], topic: str, item: Item) -> None:
        self._recorder.waiter = threading.get_ident()
        self._recorder.waiting = item
        try:
            self._look(keys, topic)
        finally:
            self._recorder.waiting = None

    def _look(self, keys: Mapping[int, str], topic: str) -> None:
        store = self._store
        assert store is not None
        missing = list(keys)
        begun_s = looked_s = time.monotonic()
        pause_s = 0.0005
        while missing := [rank for rank in missing if not store.check([keys[rank]])]:
            now_s = time.monotonic()
            if now_s - looked_s > _LOOK_S:
                looked_s = now_s
                self._check()
                others = [rank for rank in range(self.world_size) if rank != self.rank]
                lost = {rank: why for rank in others if (why := self._gone(rank))}
                # One that posted and left is not missing: the store is asked after the process was.
                if lost and any(not store.check([keys[rank]]) for rank in missing):
                    raise _rank_lost(lost, topic)
            if now_s - begun_s > self._timeout_s:
                raise RankLate(
                    f"RankLate: {rank_ranges(missing)} did not come to {topic} within "
                    f"{self._timeout_s:.0f} s, while rank {self.rank} waited. Look at its output first."
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.002 if now_s - begun_s < 1.0 else 0.02)


def _rank_lost(lost: Mapping[int, str], topic: str, more: str = "") -> RankLost:
    """``lost``: why, by rank; none if only the process that served the store is known to be gone."""
    who = rank_ranges(list(lost)) if lost else "the process that serves the store"
    facts = [*(f"rank {rank}: {why}" for rank, why in lost.items()), *([more] if more else [])]
    return RankLost(
        f"RankLost: {who} ended during {topic} ({'; '.join(facts)}). Look at its output first."
    )
