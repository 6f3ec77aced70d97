"""Lets ranks exchange small texts through the store, without a collective, while one may wait for a disk.

No rank waits in a transport, so no transport times out. If a rank of this host ends during a wait, the
other ranks notice it and name it.
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

_LOOK_S = 0.25  # how often to check whether the missing ranks still live
_NOTHING = torch.empty(0, dtype=torch.uint8)  # Recorder.enter needs a tensor
_END_S = 2.0  # how long a process that closed its connections may take to end


class ControlGroup:
    """Gather and broadcast of texts among ``world_size`` ranks. ``first``: the global rank of number 0.

    ``store`` must be a client that no other thread uses. All ranks make the same calls in the same
    order, from any thread, but only one call at a time; ``recorder`` records them for the watchdog.
    ``gone(rank)`` is why a rank will make no further call, or "". ``check()`` raises the error that has
    ended the run, if there is one. Texts are gathered on rank 0, which broadcasts the answer: with W
    ranks a call costs W texts, not W squared.
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
        self._spent: list[str] = []  # keys that all ranks have read by the next gather

    def gather(self, text: str, *, topic: str) -> list[str] | None:
        """Every rank's ``text``, in rank order, on rank 0. The other ranks do not wait and get None.

        Raises:
            RankLost: the process of a rank ended, or the process that serves the store; it names the
                ranks and the topic.
            RankLate: some ranks did not post in time.
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
            # A rank that has posted for this call has read all earlier broadcasts.
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
        """Turn an error of the store into RankLost: the process that serves it ended, often rank 0's."""
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
                    with contextlib.suppress(RuntimeError):  # ``_gone`` asks the store too
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
                # A rank that posted and then left is not missing, so look at the store once more.
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
    """``lost``: reason by rank; empty if only the process that served the store is known to be gone."""
    who = rank_ranges(list(lost)) if lost else "the process that serves the store"
    facts = [*(f"rank {rank}: {why}" for rank, why in lost.items()), *([more] if more else [])]
    return RankLost(
        f"RankLost: {who} ended during {topic} ({'; '.join(facts)}). Look at its output first."
    )
