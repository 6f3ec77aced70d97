"""Lets ranks agree through the store of ``torch.distributed``, without a collective.

Before the first collective they compare their plans (:func:`agree_plan`): if the config of one rank
differs, every rank raises the same error in the first second, instead of a hang or a wrong number later.

While a rank may wait for a disk, in a save or a load, they act and decide together
(:func:`run_on_all_ranks`): all ranks act, rank 0 decides, all ranks get the decision. A failure of one
rank becomes the same error on all ranks. No rank waits in a transport, so no transport times out. If a
rank of this host ends during a wait, the other ranks notice it and name it (:class:`ControlGroup`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from zeroshard.comm.flight_recorder import rank_ranges
from zeroshard.comm.recorder import Recorder
from zeroshard.core.files import reason
from zeroshard.errors import CheckpointError, DistributedError, RankLate, RankLost, RankMismatch

_CHECK_S = 0.25  # how often a waiting rank asks whether the missing ranks still live
_NOTHING = torch.empty(0, dtype=torch.uint8)  # Recorder.enter needs a tensor
_END_S = 2.0  # how long a process that closed its connections may take to end
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


def wait_for_keys(
    store: Store,
    keys: Mapping[int, str],
    topic: str,
    *,
    rank: int,
    timeout_s: float,
    check: Callable[[Sequence[int]], None] = lambda _missing: None,
) -> None:
    """Return when the store has all ``keys``: for each rank the key that it posts.

    ``check(missing)`` gets the ranks that have not posted, a few times a second. It may end the wait by
    raising. ``rank`` and ``topic`` are for the message: who waits, and for what.

    Raises:
        RankLate: some ranks did not post within ``timeout_s``; it names them.
    """
    wanted = list(keys.values())
    begun_s = checked_s = time.monotonic()
    pause_s = 0.0005
    while not store.check(wanted):
        now_s = time.monotonic()
        if now_s - checked_s > _CHECK_S or now_s - begun_s > timeout_s:
            checked_s = now_s
            missing = [other for other, key in keys.items() if not store.check([key])]
            check(missing)
            if missing and now_s - begun_s > timeout_s:
                raise RankLate(
                    f"RankLate: {rank_ranges(missing)} did not reach {topic} within "
                    f"{timeout_s:.0f} s, while rank {rank} waited. Look at its output first."
                )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.002 if now_s - begun_s < 1.0 else 0.02)


def exchange(
    store: Store,
    rank: int,
    size: int,
    value: str,
    *,
    key: str,
    timeout_s: float = 1800.0,
    check: Callable[[Sequence[int]], None] = lambda _missing: None,
) -> list[str]:
    """Every rank's ``value``, in rank order, on every rank. Waits as :func:`wait_for_keys`."""
    keys = {at: f"{key}/{at}" for at in range(size)}
    store.set(keys[rank], value)
    wait_for_keys(store, keys, repr(key), rank=rank, timeout_s=timeout_s, check=check)
    return [value if at == rank else store.get(keys[at]).decode() for at in range(size)]


# ---------------------------------------------------------------------- plans


def agree_plan(
    store: Store,
    rank: int,
    size: int,
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
    digests = exchange(store, rank, size, digest, key="plan", timeout_s=timeout_s, check=check)
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
                f"RankMismatch: {rank_ranges(ranks)} (host {host}) failed before all ranks had "
                f"joined, so no rank can continue: {fields[FAILED]}"
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


# ---------------------------------------------------------------------- acting and deciding together


class ControlGroup:
    """Gather and broadcast of texts among ``size`` ranks. ``first``: the global rank of number 0.

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
        size: int = 1,
        first: int = 0,
        gone: Callable[[int], str] = lambda _rank: "",
        recorder: Recorder | None = None,
        check: Callable[[], None] = lambda: None,
        timeout_s: float = 3600.0,
    ) -> None:
        assert store is not None or size == 1
        self.rank = rank
        self.size = size
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
        with self._store_errors_named(topic):
            if self.rank:
                store.set(f"{call}/{self.rank}", text)
                return None
            keys = {rank: f"{call}/{rank}" for rank in range(1, self.size)}
            self._wait(store, keys, topic, item)
            texts = [text, *(store.get(key).decode() for key in keys.values())]
            # A rank that has posted for this call has read all earlier broadcasts.
            for key in (*self._spent, *keys.values()):
                store.delete_key(key)
            self._spent = []
        return texts

    def broadcast(self, text: str | None, *, topic: str) -> str:
        """Rank 0's ``text`` on every rank; raises as :meth:`gather`."""
        self._calls += 1
        store, key = self._store, f"{self._calls}/said"
        item = self._recorder.enter(self._sayings[topic], _NOTHING, 0, 0)
        with self._store_errors_named(topic):
            if self.rank == 0:
                assert text is not None
                if store is not None:
                    store.set(key, text)
                    self._spent.append(key)
                return text
            assert store is not None
            self._wait(store, {0: key}, topic, item)
            return store.get(key).decode()

    @contextlib.contextmanager
    def _store_errors_named(self, topic: str) -> Iterator[None]:
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
                for rank in range(self.size):
                    with contextlib.suppress(RuntimeError):  # ``_gone`` asks the store too
                        if why := self._gone(rank):
                            lost[rank] = why
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            facts = f"the store that connects the ranks does not answer: {first[:200]}"
            raise _rank_lost(lost, topic, facts) from error

    def _wait(self, store: Store, keys: Mapping[int, str], topic: str, item: Any) -> None:
        def check(missing: Sequence[int]) -> None:
            self._check()
            others = [rank for rank in range(self.size) if rank != self.rank]
            lost = {rank: why for rank in others if (why := self._gone(rank))}
            # A rank that posted and then left is not missing, so look at the store once more.
            if lost and any(not store.check([keys[rank]]) for rank in missing):
                raise _rank_lost(lost, topic)

        self._recorder.waiter = threading.get_ident()
        began_s = self._recorder.begin_wait(item)
        try:
            wait_for_keys(
                store, keys, topic, rank=self.rank, timeout_s=self._timeout_s, check=check
            )
        finally:
            self._recorder.end_wait(item, began_s)


def _rank_lost(lost: Mapping[int, str], topic: str, more: str = "") -> RankLost:
    """``lost``: reason by rank; empty if only the process that served the store is known to be gone."""
    who = rank_ranges(list(lost)) if lost else "the process that serves the store"
    facts = [*(f"rank {rank}: {why}" for rank, why in lost.items()), *([more] if more else [])]
    return RankLost(
        f"RankLost: {who} ended during {topic} ({'; '.join(facts)}). Look at its output first."
    )


@dataclass(frozen=True, slots=True)
class Attempt(Generic[T_co]):
    """What a call returned, or the error that it raised. It carries an error to the next round."""

    value: T_co | None = None
    error: Exception | None = None

    def result(self) -> T_co:
        """The value; raises the error if there is one."""
        if self.error is not None:
            raise self.error
        return cast("T_co", self.value)


def attempt(act: Callable[[], T]) -> Attempt[T]:
    """Call ``act``. An error that ended the run, a :class:`DistributedError`, is raised at once."""
    try:
        return Attempt(act())
    except DistributedError:
        raise
    except Exception as error:  # of whatever kind: the other ranks wait for a text from this one
        return Attempt(error=error)


def run_on_all_ranks(
    control_group: ControlGroup,
    failed: str,
    topic: str,
    act: Callable[[], T],
    *,
    say: Callable[[T], Any] = lambda _own: None,
    decide: Callable[[list[Any]], Any] = lambda _said: None,
    tell: Callable[[Any], Any] = lambda decision: decision,
) -> tuple[T, Any]:
    """One round. Returns this rank's own result and the decision of rank 0.

    1. Every rank: ``own = act()``.
    2. Rank 0 gets ``say(own)`` of every rank, in rank order.
    3. Rank 0: ``decision = decide(said)``.
    4. The other ranks get ``tell(decision)``.

    ``say`` and ``tell`` return what JSON can hold. A round is one gather and one broadcast of texts.

    Raises:
        CheckpointError: on every rank, if ``act`` or ``say`` failed on one or ``decide`` failed. The
            text is made of rank 0's ``failed``, of ``topic`` and of the reason.
        RankLost: another rank ended.
        RankLate: another rank did not make this call in time.
    """
    own = attempt(act)
    said = attempt(lambda: json.dumps({"said": say(own.result())}))
    texts = control_group.gather(_or_error(said), topic=topic)
    if texts is None:
        told: dict[str, Any] = json.loads(control_group.broadcast(None, topic=topic))
        if "error" in told:
            raise CheckpointError(told["error"]) from said.error
        return own.result(), told["decision"]
    decided = attempt(lambda: decide(_all_said(texts)))
    reply = attempt(lambda: json.dumps({"decision": tell(decided.result())}))
    heading = f"{failed} (while {topic}). "
    control_group.broadcast(_or_error(reply, heading), topic=topic)
    if reply.error is not None:
        raise CheckpointError(heading + error_text(reply.error)) from said.error or reply.error
    return own.result(), decided.value


def _or_error(text: Attempt[str], begin: str = "") -> str:
    if text.error is None:
        return text.result()
    return json.dumps({"error": begin + error_text(text.error)})


def _all_said(texts: Sequence[str]) -> list[Any]:
    said = [json.loads(text) for text in texts]
    raise_joined({rank: part["error"] for rank, part in enumerate(said) if "error" in part})
    return [part["said"] for part in said]


def raise_joined(reasons: Mapping[int, str]) -> None:
    """Raise one :class:`CheckpointError` for the ``reasons`` of failed ranks; return if there is none.

    A reason that several ranks gave appears once.
    """
    ranks_by_text: dict[str, list[int]] = {}
    for rank, text in reasons.items():
        ranks_by_text.setdefault(text, []).append(rank)
    lines = [f"{rank_ranges(ranks)}: {text}" for text, ranks in ranks_by_text.items()]
    rest = f" (and {len(lines) - 3} more reasons)" if len(lines) > 3 else ""
    if lines:
        raise CheckpointError(" ".join(lines[:3]) + rest)


def error_text(error: Exception) -> str:
    """An error in the words of a message that all ranks raise."""
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename or 'a file'}: {reason(error)}."
    return f"{type(error).__name__}: {error}"
