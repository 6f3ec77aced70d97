"""What watchdogs write for each other into the store, with a deadline for each operation.

A store client that two threads share deadlocks, and a store whose server is frozen never answers. So one
separate thread makes all operations (:class:`StoreClient`), and the caller waits for its answer no longer
than a deadline.

A rank that waits for nothing makes one request at a time: it reads the counter ``bell``, which whoever
wants the others to look adds to. How often: :func:`~.settings.store_tick_s`.

Keys, below the name of the set of ranks (:func:`watchdog_namespace`):

    card/RANK            which process watches there, its recording, and its state: on, idle or left
    cards                how many cards were written
    left/LABEL/RANK      why a rank closed the engine or model LABEL
    left/LABEL/all       how many ranks have done so
    bell                 how often a rank has asked the others to look
    times/RANK           how many watchdogs the rank has started
    asked                the number of the newest question
    elect/N              the rank that adds 1 first asks question N
    label/N              the sequence of calls that question N is about
    answer/N/RANK        what a rank does, as JSON
    answers/N            which ranks have answered, and how many (:func:`~zeroshard.comm.store_keys.post`)
    diagnosis/N          the answer to question N, as JSON
    final, finals        the first fatal diagnosis, and how many there were
    read                 how many ranks have read a fatal diagnosis
    views                how many times another process has asked what the ranks do
    view/N               what it asked, as JSON; there until it has its answers
    view/N/RANK          what a rank does, as JSON, with the stack of its main thread
    pace                 a step to come, from which on ranks measure their own time
    pace/RANK            what a rank measured, as JSON
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar, cast

from zeroshard.comm.host import Process
from zeroshard.comm.store_keys import Store, look, post, posts, present, ranks_key
from zeroshard.watchdog.diagnosis import Diagnosis, diagnosis_of_values
from zeroshard.watchdog.run_record import Peer

T = TypeVar("T")
_Job = tuple[Callable[[Store], Any], "Future[Any]"]
LEAVERS = "all"
"""Below ``left/LABEL``: how many ranks have left the sequence."""
BELL = "bell"
_CHUNK = 256  # keys that are read in one operation, which has a deadline


def watchdog_namespace(ranks: Sequence[int], space: str) -> str:
    """The prefix in the store of the messages between the watchdogs of these ranks."""
    return f"{space}/watchdog/{ranks_key(ranks)}"


class Messages:
    """The messages of one rank's watchdog. Each method may raise :class:`StoreLost`.

    ``store``: a client that nothing else uses, with a key space that these ranks share. ``own``: this
    rank's process and recording. ``store_rank``: the rank whose process serves the store, if that is
    another rank. ``hung_up()``: whether the server of the store has closed its connection. ``peers``:
    what is known of the ranks' processes. ``idle``: ranks that run nothing of ZeroShard.
    """

    def __init__(
        self, store: Store, own: Peer, *, store_rank: int | None, hung_up: Callable[[], bool]
    ) -> None:
        self._own = own
        self._store_rank = store_rank if store_rank != own.rank else None
        self._hung_up = hung_up
        self.peers: dict[int, Peer] = {own.rank: own}
        self.idle: set[int] = set()
        self.rung = 0  # the counter ``bell``, when it was last read
        self._answered = ""  # the key of this rank's newest answer
        self._cards: dict[int, str] = {}  # as they were when ``_cards_count`` had been written
        self._cards_count = 0
        self._client = StoreClient(store, name=f"zeroshard-store-client-{own.rank}")
        # A watchdog that is collected without being closed must not leave a thread.
        weakref.finalize(self, self._client.end)

    @property
    def is_open(self) -> bool:
        """Whether the store's server may still answer. Without one, torch would log many lines."""
        server = self.peers.get(self._store_rank) if self._store_rank is not None else None
        gone = server is not None and server.fate(self._own.process)[0] == "gone"
        return not gone and not self._hung_up()

    def call(self, operation: Callable[[Store], Any], timeout_s: float = 5.0) -> Any:
        """``operation(store)``, unless the store's server is known to have gone.

        Raises:
            StoreLost: the store did not answer within ``timeout_s``, or its server has gone.
        """
        if not self.is_open:
            raise StoreLost("the process that served the store has left")
        return self._client.call(operation, timeout_s)

    def add(self, key: str, amount: int, timeout_s: float = 5.0) -> int:
        """The counter ``key`` after ``amount`` has been added."""
        return cast("int", self.call(lambda store: store.add(key, amount), timeout_s))

    def set(self, key: str, text: str, timeout_s: float = 5.0) -> None:
        """Write ``text``."""
        self.call(lambda store: store.set(key, text), timeout_s)

    def look(self, key: str) -> str | None:
        """What is written under ``key``; None, without waiting, if nothing is."""
        return cast("str | None", self.call(lambda store: look(store, key)))

    # -- cards -------------------------------------------------------------------------------------

    def post_card(self, state: str, reason: str = "", *, timeout_s: float = 2.0) -> None:
        """Tell the others this rank's process and its state: ``on``, ``idle`` or ``left``."""
        own = self._own
        card = {"state": state, "reason": reason, "process": asdict(own.process)}
        text = json.dumps({**card, "recording": own.recording})

        def write(store: Store) -> None:
            store.set(f"card/{own.rank}", text)
            store.add("cards", 1)

        self.call(write, timeout_s)

    def read_card(self, rank: int) -> tuple[Peer | None, str, str]:
        """Another rank's process, its state (``on``, ``idle`` or ``left``) and why; None: no card yet."""
        text = self.look(f"card/{rank}")
        return (None, "", "") if text is None else self._peer_of(rank, text)

    def read_cards(self, ranks: Sequence[int]) -> dict[int, tuple[Peer, str, str]]:
        """What :meth:`read_card` returns, of those of ``ranks`` that have a card.

        One request if no card was written since the last call; else a few for each 256 ranks.
        """
        count = self.add("cards", 0)
        if count != self._cards_count:
            self._cards, self._cards_count = {}, count
        new = [rank for rank in ranks if rank not in self._cards]
        self._cards |= self._present({rank: f"card/{rank}" for rank in new})
        return {
            rank: self._peer_of(rank, self._cards[rank]) for rank in ranks if rank in self._cards
        }

    def _present(self, keys: dict[int, str]) -> dict[int, str]:
        """What is written under those of ``keys`` (by rank) that there are."""
        there: set[str] = set()
        for part in _chunks(list(keys.values())):
            there.update(self.call(partial(present, keys=part)))
        return self._read({rank: key for rank, key in keys.items() if key in there})

    def _read(self, keys: dict[int, str]) -> dict[int, str]:
        """What is written under ``keys`` (by rank), all of which there are."""
        found: list[bytes] = []
        for part in _chunks(list(keys.values())):
            found += self.call(partial(_multi_get, keys=part))
        return {rank: text.decode() for rank, text in zip(keys, found, strict=True)}

    def _peer_of(self, rank: int, text: str) -> tuple[Peer, str, str]:
        card = json.loads(text)
        peer = Peer(rank, Process(**card["process"]), card["recording"])
        # A process whose files cannot be seen is in another container: treat it as on another host.
        seen = peer.is_on(self._own.process) and card["state"] == "on"
        if seen and not Path(peer.recording).exists():
            card = json.loads(self.look(f"card/{rank}") or text)
            if card["state"] == "on" and peer.fate(self._own.process)[0] != "gone":
                peer = peer.far()
        self.peers[rank] = peer
        (self.idle.add if card["state"] == "idle" else self.idle.discard)(rank)
        return peer, card["state"], card["reason"]

    def post_left(self, label: str, why: str) -> None:
        """Tell ranks that still wait in the sequence ``label`` why this rank left it."""

        def write(store: Store) -> None:
            store.set(f"left/{label}/{self._own.rank}", why)
            store.add(f"left/{label}/{LEAVERS}", 1)

        self.call(write, 2.0)

    def leavers(self, label: str, ranks: Sequence[int]) -> dict[int, str]:
        """Why those of ``ranks`` left that did. One request if no rank has left ``label``."""
        if not self.add(f"left/{label}/{LEAVERS}", 0):
            return {}
        return self._present({rank: f"left/{label}/{rank}" for rank in ranks})

    def why_left(self, label: str, rank: int) -> str | None:
        """Why ``rank`` left the sequence ``label``; None: it has not."""
        return self.look(f"left/{label}/{rank}")

    # -- questions ---------------------------------------------------------------------------------

    def listen(self, timeout_s: float = 5.0) -> bool:
        """Whether the bell has rung since the last call. One request."""
        before, self.rung = self.rung, self.add(BELL, 0, timeout_s)
        return self.rung != before

    def asked(self, timeout_s: float = 5.0) -> int:
        """The number of the newest question."""
        return self.add("asked", 0, timeout_s)

    def news(self, timeout_s: float = 5.0) -> tuple[int, int]:
        """The numbers of the newest question and of the newest view."""

        def read(store: Store) -> tuple[int, int]:
            return store.add("asked", 0), store.add("views", 0)

        return cast("tuple[int, int]", self.call(read, timeout_s))

    def is_elected(self, number: int) -> bool:
        """Whether this rank is the one that asks question ``number``. True once, on one rank."""
        return self.add(f"elect/{number}", 1) == 1

    def ask(self, number: int, label: str) -> None:
        """Ask all ranks what they do, because of a stall in the sequence ``label``."""

        def write(store: Store) -> None:
            store.set(f"label/{number}", label)
            store.add("asked", 1)
            store.add(BELL, 1)

        self.call(write)

    def label_of(self, number: int) -> str:
        """The sequence that question ``number`` is about."""
        return self.look(f"label/{number}") or ""

    def answer(self, number: int, words: dict[str, Any]) -> None:
        """This rank's answer to question ``number``."""
        key, text = f"answer/{number}/{self._own.rank}", json.dumps(words)

        def write(store: Store) -> None:
            store.set(key, text)
            post(store, f"answers/{number}", self._own.rank, "")
            if self._answered:  # no rank reads it any more: all answers are in one host's memory
                store.delete_key(self._answered)

        self.call(write)
        self._answered = key

    def count_answers(self, number: int) -> int:
        """How many ranks have answered question ``number``."""
        return self.add(f"answers/{number}/came", 0)

    def answers_of(self, number: int, ranks: Sequence[int]) -> dict[int, dict[str, Any]]:
        """The answers of those of ``ranks`` that have answered."""
        there = self.call(lambda store: posts(store, f"answers/{number}"))
        keys = {rank: f"answer/{number}/{rank}" for rank in ranks if rank in there}
        return {rank: json.loads(text) for rank, text in self._read(keys).items()}

    def publish(self, number: int, diagnosis: Diagnosis, *, reported: bool) -> None:
        """The diagnosis of question ``number``. The first fatal diagnosis is never replaced.

        ``reported``: this rank has printed it.
        """
        text = json.dumps({"number": number, "diagnosis": asdict(diagnosis), "reported": reported})

        def write(store: Store) -> None:
            if diagnosis.fatal and store.add("finals", 1) == 1:
                store.set("final", text)
            store.set(f"diagnosis/{number}", text)

        self.call(write)

    def diagnosis_of(self, number: int, since: int = 0) -> tuple[Diagnosis, bool] | None:
        """The first fatal diagnosis of a question after ``since``, else that of question ``number``.

        None: there is none yet. The second value: whether the rank that made it has printed it.
        """

        def read(store: Store) -> str | None:
            final = look(store, "final")
            if final is not None and json.loads(final)["number"] > since:
                return final
            return look(store, f"diagnosis/{number}")

        text = self.call(read)
        if text is None:
            return None
        found = json.loads(text)
        return diagnosis_of_values(found["diagnosis"]), bool(found["reported"])

    # -- views -------------------------------------------------------------------------------------

    def view(self, number: int) -> dict[str, Any] | None:
        """What view ``number`` asks; None: nobody waits for it any more."""
        text = self.look(f"view/{number}")
        return None if text is None else cast("dict[str, Any]", json.loads(text))

    def show(self, number: int, words: dict[str, Any]) -> None:
        """This rank's answer to view ``number``."""
        self.set(f"view/{number}/{self._own.rank}", json.dumps(words))

    # -- the end -----------------------------------------------------------------------------------

    def count_read(self, timeout_s: float = 5.0, *, more: int = 0) -> int:
        """How many ranks have read a fatal diagnosis, after ``more`` have been added."""
        return self.add("read", more, timeout_s)

    def close(self) -> None:
        """End the thread."""
        self._client.close()


def _multi_get(store: Store, keys: list[str]) -> list[bytes]:
    return store.multi_get(keys)


def _chunks(keys: list[str]) -> Iterator[list[str]]:
    for at in range(0, len(keys), _CHUNK):
        yield keys[at : at + _CHUNK]


class StoreLost(Exception):
    """The store did not answer in time, or its server is gone."""


class StoreClient:
    """Store operations with a deadline. ``store`` must be a client that nothing else uses."""

    def __init__(self, store: Store, *, name: str) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._busy: Future[Any] | None = None
        self._turn = threading.Lock()
        self._thread = threading.Thread(
            target=_serve, args=(store, self._jobs), name=name, daemon=True
        )
        self._thread.start()

    def call(self, operation: Callable[[Store], T], timeout_s: float = 5.0) -> T:
        """The result of ``operation(store)``.

        Raises:
            StoreLost: no answer within ``timeout_s``, none to an earlier call yet, or an error of the
            store.
        """
        if threading.current_thread() is self._thread:  # garbage is collected in any thread
            raise StoreLost("the thread that would answer asks")
        if not self._turn.acquire(timeout=timeout_s):
            raise StoreLost("another call still waits")
        try:
            if self._busy is not None and not self._busy.done():
                raise StoreLost("an earlier call still waits")
            answer: Future[T] = Future()
            self._busy = answer
            self._jobs.put((operation, answer))
            if not wait([answer], timeout_s).done:
                raise StoreLost(f"no answer in {timeout_s:.0f} s")
        finally:
            self._turn.release()
        if (error := answer.exception()) is not None:
            raise StoreLost(str(error)) from error
        return answer.result()

    def end(self) -> None:
        """Ask the thread to end, without waiting."""
        self._jobs.put(None)

    def close(self) -> None:
        """End the thread. After 2 s a thread that is stuck in the store is left, as a daemon."""
        self.end()
        if threading.current_thread() is not self._thread:
            self._thread.join(2.0)


def _serve(store: Store, jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        operation, answer = job
        try:
            answer.set_result(operation(store))
        except Exception as error:  # StoreClient.call raises it in the caller's thread
            answer.set_exception(error)
        del operation, answer, job
