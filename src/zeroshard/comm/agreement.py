"""Lets ranks agree through the store of ``torch.distributed``, without a collective.

Before the first collective they compare their plans (:func:`agree_plan`): if the config of one rank
differs, every rank raises the same error in the first second, instead of a hang or a wrong number later.

What all ranks of a run do at once has to cost each of them a few requests to the store, however many they
are (docs/control-plane.md). So the rank that comes last decides for all (:func:`arrive`), and ranks that
wait look the less often the more they are (:func:`next_pause_s`).

While a rank may wait for a disk, in a save or a load, they act and decide together
(:func:`run_on_all_ranks`): all ranks act, rank 0 decides, all ranks get the decision. A failure of one
rank becomes the same error on all ranks. No rank waits in a transport, so no transport times out. If a
rank of this host ends during a wait, the other ranks notice it and name it (:class:`ControlGroup`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from zeroshard.comm.flight_recorder import rank_ranges
from zeroshard.comm.recorder import Recorder
from zeroshard.core.files import reason
from zeroshard.errors import CheckpointError, DistributedError, RankLate, RankLost, RankMismatch
from zeroshard.run.blame import tell_launcher

_CHECK_S = 0.25  # how often a waiting rank asks whether the missing ranks still live
_NOTHING = torch.empty(0, dtype=torch.uint8)  # Recorder.enter needs a tensor
_ABSENT = "\0absent"  # what no rank writes
_DIGEST = 64  # characters of a digest
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
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def multi_set(self, keys: list[str], values: list[str], /) -> None: ...
    def append(self, key: str, value: str, /) -> None: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


def look(store: Store, key: str) -> str | None:
    """The value under ``key``; None, without waiting, if there is none. One request: a ``get`` is two."""
    found = _bytes_at(store, key)
    return None if found is None else found.decode()


def _bytes_at(store: Store, key: str) -> bytes | None:
    found = store.compare_set(key, _ABSENT, "")  # sets nothing: no value is equal to ``_ABSENT``
    return None if found == _ABSENT.encode() else found


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


# ---------------------------------------------------------------------- waiting for other ranks


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


def wait_for(
    find: Callable[[], T | None],
    missing: Callable[[], list[int]],
    topic: str,
    *,
    rank: int,
    size: int,
    timeout_s: float,
    check: Check = no_check,
) -> T:
    """Return what ``find()`` finds, as soon as that is not None.

    ``missing()``: the ranks that have not come. Both ask the store. ``check(missing)`` is called a few
    times a second. It may end the wait by raising. ``rank`` and ``topic`` are for the message: who waits,
    and for what. ``size``: how many ranks may wait with it.

    Raises:
        RankLate: some ranks did not come within ``timeout_s``; it names them.
    """
    begun_s = checked_s = time.monotonic()
    pause_s = first_pause_s(size)
    while (found := find()) is None:
        now_s = time.monotonic()
        waited_s = now_s - begun_s
        if now_s - checked_s > _CHECK_S or waited_s > timeout_s:
            checked_s = now_s
            late = Missing(missing)
            check(late)
            if waited_s > timeout_s and (found := find()) is None:
                who = rank_ranges(late) if late else "the rank that came last"
                error = RankLate(
                    f"RankLate: {who} did not reach {topic} within "
                    f"{timeout_s:.0f} s, while rank {rank} waited. Look at its output first."
                )
                error.ranks, error.did = tuple(late), "was late" if len(late) == 1 else "were late"
                tell_launcher(error, os.environ)
                raise error
            if found is not None:
                return found
        time.sleep(pause_s)
        pause_s = next_pause_s(pause_s, waited_s, size)
    return found


def present(store: Store, keys: Sequence[str]) -> list[str]:
    """Those of ``keys`` that the store has, in their order. One request if it has all.

    Else at most ``2 m log2(n / m)`` requests about, if ``m`` of the ``n`` keys are absent.
    """
    if not keys or store.check(list(keys)):
        return list(keys)
    half = len(keys) // 2
    return [*present(store, keys[:half]), *present(store, keys[half:])] if half else []


# ---------------------------------------------------------------------- the last rank decides


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


def arrive(
    store: Store,
    rank: int,
    size: int,
    value: str,
    decide: Callable[[list[str]], str],
    *,
    key: str,
) -> str | None:
    """Post ``value`` under ``key`` without waiting. The last of ``size`` ranks gets the decision.

    The rank that comes last calls ``decide`` with the values of all ranks, in rank order. The other ranks
    get None here, and the decision of :func:`outcome`. ``decide`` must be the same function of the values
    on every rank. A rank makes two requests, the last one four.
    """
    if post(store, key, rank, value) != size:
        return None
    values = posts(store, key)
    said = decide([values[at] for at in range(size)])
    store.set(f"{key}/decided", said)
    return said


def outcome(
    store: Store,
    rank: int,
    size: int,
    *,
    key: str,
    timeout_s: float = 1800.0,
    check: Check = no_check,
) -> str:
    """What the last rank that came to ``key`` decided. Waits as :func:`wait_for`."""
    return wait_for(
        lambda: look(store, f"{key}/decided"),
        lambda: absent(store, key, range(size)),
        repr(key),
        rank=rank,
        size=size,
        timeout_s=timeout_s,
        check=check,
    )


def exchange(
    store: Store,
    rank: int,
    size: int,
    value: str,
    *,
    key: str,
    timeout_s: float = 1800.0,
    check: Check = no_check,
) -> list[str]:
    """Every rank's ``value``, in rank order, on every rank. Waits as :func:`wait_for`.

    ``size`` ranks get ``size`` values each. For many ranks let the last one decide (:func:`arrive`).
    """
    said = arrive(store, rank, size, value, json.dumps, key=key)
    if said is None:
        said = outcome(store, rank, size, key=key, timeout_s=timeout_s, check=check)
    values: list[str] = json.loads(said)
    return values


# ---------------------------------------------------------------------- plans


def agree_plan(
    store: Store,
    rank: int,
    size: int,
    fields: Mapping[str, str],
    *,
    card: str = "",
    sum_up: Callable[[list[str]], str] = lambda _cards: "",
    timeout_s: float = 1800.0,
    check: Check = no_check,
) -> str:
    """Return if all ranks have equal ``fields``; collective.

    Returns what ``sum_up`` has made of the ``card`` of every rank, in rank order, on the rank that came
    last. So plans and cards cost one round.

    Raises:
        RankMismatch: names the first field that differs, its values, and the ranks that have them.
        RankLate: some ranks did not post within ``timeout_s``; it names them.
    """
    said = post_plan(store, rank, size, fields, card=card, sum_up=sum_up)
    if said is None:
        said = outcome(store, rank, size, key="plan", timeout_s=timeout_s, check=check)
    groups, _, summary = said.partition("\n")
    if odd := json.loads(groups):
        raise RankMismatch(mismatch_text(odd, plans_of(store, odd)))
    return summary


def alike_plans(
    store: Store,
    rank: int,
    size: int,
    fields: Mapping[str, str],
    *,
    timeout_s: float = 1800.0,
    check: Check = no_check,
) -> list[list[int]]:
    """The ranks in groups that have equal ``fields``, the largest group first; collective.

    :func:`plans_of` has the fields. Raises RankLate as :func:`agree_plan`.
    """
    said = post_plan(store, rank, size, fields)
    if said is None:
        said = outcome(store, rank, size, key="plan", timeout_s=timeout_s, check=check)
    return json.loads(said.partition("\n")[0]) or [list(range(size))]


def post_plan(
    store: Store,
    rank: int,
    size: int,
    fields: Mapping[str, str],
    *,
    card: str = "",
    sum_up: Callable[[list[str]], str] = lambda _cards: "",
) -> str | None:
    """Post ``fields`` and ``card`` without waiting for the other ranks. The last rank gets the outcome.

    A rank that fails before :func:`agree_plan` posts :data:`FAILED` and the reason; the agreement then
    fails on the other ranks.
    """
    text = json.dumps(dict(fields))
    digest = hashlib.sha256(text.encode()).hexdigest()
    store.set(f"fields/{rank}", json.dumps([socket.gethostname(), text]))
    return arrive(store, rank, size, digest + card, partial(_compared, sum_up), key="plan")


def plans_of(store: Store, groups: Sequence[Sequence[int]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Host and fields of the first rank of each group of :func:`alike_plans`."""
    found = [json.loads(store.get(f"fields/{ranks[0]}")) for ranks in groups]
    return [(host, json.loads(fields)) for host, fields in found]


def cards_of(store: Store) -> dict[int, str]:
    """The ``card`` of every rank, after :func:`agree_plan`. One request, with all of them."""
    return {rank: value[_DIGEST:] for rank, value in posts(store, "plan").items()}


def _compared(sum_up: Callable[[list[str]], str], values: Sequence[str]) -> str:
    """The outcome of :func:`post_plan`. ``values``: the digest and the card of each rank.

    First line, as JSON: the ranks in groups of equal digests, the largest first; none if all are equal.
    Only then there is a summary, in the other lines.
    """
    groups: dict[str, list[int]] = {}
    for at, value in enumerate(values):
        groups.setdefault(value[:_DIGEST], []).append(at)
    if len(groups) == 1:
        return "[]\n" + sum_up([value[_DIGEST:] for value in values])
    return json.dumps(sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks))) + "\n"


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
    ``gone()`` says why ranks will make no further call, by rank. ``check()`` raises the error that has
    ended the run, if there is one. Texts are gathered on rank 0, which broadcasts the answer: with W
    ranks a call costs W texts, not W squared. Rank 0 makes as many requests as any other rank: it reads
    all texts at once.
    """

    def __init__(
        self,
        store: Store | None = None,
        *,
        rank: int = 0,
        size: int = 1,
        first: int = 0,
        gone: Callable[[], dict[int, str]] = dict,
        recorder: Recorder | None = None,
        check: Callable[[], None] = lambda: None,
        timeout_s: float = 3600.0,
    ) -> None:
        assert store is not None or size == 1
        self.rank = rank
        self.size = size
        self._store = store if size > 1 else None
        self._gone = gone
        self._recorder = recorder or Recorder("meetings")
        self._meetings = self._recorder.entries("meet")
        self._sayings = self._recorder.entries(f"broadcast from {first}")
        self._check = check
        self._timeout_s = timeout_s
        self._calls = 0
        self._spent: list[str] = []  # rank 0's broadcasts, until all others have read them

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
            key, others = str(call), range(1, self.size)
            if self.rank:
                post(store, key, self.rank, text)
                return None
            self._wait(
                lambda: store.add(f"{key}/came", 0) == len(others) or None,
                lambda: absent(store, key, others),
                topic,
                item,
                1,
            )
            said = posts(store, key)
            texts = [text, *(said[rank] for rank in others)]
            # A rank that has posted for this call has read all earlier broadcasts.
            for name in (f"{key}/posts", f"{key}/came", *self._spent):
                store.delete_key(name)
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
            return self._wait(lambda: look(store, key), lambda: [0], topic, item, self.size)

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
                with contextlib.suppress(RuntimeError):  # ``_gone`` asks the store too
                    lost = self._gone()
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            facts = f"the store that connects the ranks does not answer: {first[:200]}"
            raise _rank_lost(lost, topic, facts) from error

    def _wait(
        self,
        find: Callable[[], T | None],
        missing: Callable[[], list[int]],
        topic: str,
        item: Any,
        size: int,
    ) -> T:
        """What ``find`` finds. ``size``: how many ranks wait as this one does.

        Asks who is gone a few times a second, with very many ranks less often: each of them asks.
        """
        pause_s, asked_s = max(_CHECK_S, self.size / 2048), time.monotonic()

        def check(late: Sequence[int]) -> None:
            nonlocal asked_s
            self._check()
            if time.monotonic() - asked_s < pause_s:
                return
            asked_s = time.monotonic()
            lost = {rank: why for rank, why in self._gone().items() if rank != self.rank}
            # A rank that posted and then left is not missing, so look at the store once more.
            if lost and len(late) and find() is None:
                raise _rank_lost(lost, topic)

        self._recorder.waiter = threading.get_ident()
        began_s = self._recorder.begin_wait(item)
        try:
            return wait_for(
                find, missing, topic,
                rank=self.rank, size=size, timeout_s=self._timeout_s, check=check,
            )  # fmt: skip
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
