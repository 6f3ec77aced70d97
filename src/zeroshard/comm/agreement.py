"""Lets ranks agree through the store of ``torch.distributed``, without a collective.

Before the first collective they compare their plans (:func:`agree_plan`): if the config of one rank
differs, every rank raises the same error in the first second, instead of a hang or a wrong number later.

What all ranks of a run do at once has to cost each of them a few requests to the store, however many they
are (docs/control-plane.md). So the rank that comes last decides for all
(:meth:`~.store_keys.Rendezvous.arrive`), and ranks that wait look the less often the more they are
(:func:`~.store_keys.next_pause_s`).

While a rank may wait for a disk, in a save or a load, they act and decide together
(:func:`run_on_all_ranks`): all ranks act, rank 0 decides, all ranks get the decision. A failure of one
rank becomes the same error on all ranks. No rank waits in a transport, so no transport times out. If a
rank of this host ends during a wait, the other ranks notice it and name it (:class:`ControlGroup`).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar, cast

from zeroshard.comm.recorder import Recorder
from zeroshard.comm.store_keys import (
    CHECK_S,
    END_S,
    FAILED,
    NOTHING,
    Rendezvous,
    Store,
    T_co,
    absent,
    look,
    post,
    posts,
)
from zeroshard.core.files import reason
from zeroshard.core.texts import rank_ranges
from zeroshard.errors import CheckpointError, DistributedError, RankLost, RankMismatch

_DIGEST = 64  # characters of a digest
_DETAILS_NBYTES = 16 << 10  # of one rank; the store of a run has those of all ranks
T = TypeVar("T")


# ---------------------------------------------------------------------- plans


def agree_plan(
    meeting: Rendezvous,
    fields: Mapping[str, str],
    *,
    card: str = "",
    sum_up: Callable[[list[str]], str] = lambda _cards: "",
    details: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> str:
    """Return if all ranks have equal ``fields``; collective.

    ``details``: of a field that is a digest, what it is a digest of. An error shows the first of these
    lines that differs, instead of digests. Returns what ``sum_up`` has made of the ``card`` of every
    rank, in rank order, on the rank that came last. So plans and cards cost one round.

    Raises:
        RankMismatch: names the first field that differs, its values, and the ranks that have them.
        RankLate: some ranks did not post in time; it names them.
    """
    said = post_plan(meeting, fields, card=card, sum_up=sum_up, details=details)
    groups, _, summary = (meeting.outcome("plan") if said is None else said).partition("\n")
    if odd := json.loads(groups):
        raise RankMismatch(mismatch_text(odd, plans_of(meeting.store, odd)))
    return summary


def alike_plans(meeting: Rendezvous, fields: Mapping[str, str]) -> list[list[int]]:
    """The ranks in groups that have equal ``fields``, the largest group first; collective.

    :func:`plans_of` has the fields. Raises RankLate as :func:`agree_plan`.
    """
    said = post_plan(meeting, fields) or meeting.outcome("plan")
    return json.loads(said.partition("\n")[0]) or [list(range(meeting.size))]


def post_plan(
    meeting: Rendezvous,
    fields: Mapping[str, str],
    *,
    card: str = "",
    sum_up: Callable[[list[str]], str] = lambda _cards: "",
    details: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> str | None:
    """Post ``fields`` and ``card`` without waiting for the other ranks. The last rank gets the outcome.

    A rank that fails before :func:`agree_plan` posts :data:`FAILED` and the reason; the agreement then
    fails on the other ranks.
    """
    text = json.dumps(dict(fields))
    digest = hashlib.sha256(text.encode()).hexdigest()
    packed = {key: _packed(lines) for key, lines in details.items()}
    meeting.store.set(f"fields/{meeting.rank}", json.dumps([socket.gethostname(), text, packed]))
    return meeting.arrive(digest + card, partial(_compared, sum_up), "plan")


class PostedPlan(NamedTuple):
    """What a rank has posted. ``details``: packed."""

    host: str
    fields: Mapping[str, Any]
    details: Mapping[str, str] = MappingProxyType({})


def plans_of(store: Store, groups: Sequence[Sequence[int]]) -> list[PostedPlan]:
    """The plan of the first rank of each group of :func:`alike_plans`."""
    found = [json.loads(store.get(f"fields/{ranks[0]}")) for ranks in groups]
    return [PostedPlan(host, json.loads(fields), details) for host, fields, details in found]


def _packed(lines: Sequence[str]) -> str:
    """``lines``, compressed; "" if there are so many that the store of a large run would suffer."""
    packed = base64.b85encode(zlib.compress("\n".join(lines).encode())).decode()
    return packed if len(packed) <= _DETAILS_NBYTES else ""


def _unpacked(packed: str) -> list[str]:
    return zlib.decompress(base64.b85decode(packed)).decode().split("\n") if packed else []


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


def mismatch_text(groups: Sequence[Sequence[int]], plans: Sequence[PostedPlan]) -> str:
    """Which ranks failed before, or which ranks differ in what. ``groups``: ranks, largest group first.

    >>> plans = [PostedPlan("a", {"stage": "2"}), PostedPlan("b", {"stage": "3"})]
    >>> mismatch_text([[0, 1, 2], [3]], plans)[:68]
    'RankMismatch: rank 3 has another plan than ranks 0-2. First differen'
    """
    for ranks, (host, fields, _) in zip(groups, plans, strict=True):
        if FAILED in fields:
            return (
                f"RankMismatch: {rank_ranges(ranks)} (host {host}) failed before all ranks had "
                f"joined, so no rank can continue: {fields[FAILED]}"
            )
    odd = sorted(r for ranks in groups[1:] for r in ranks)
    has = "has" if len(odd) == 1 else "have"
    difference, hint = _difference(groups, plans)
    return (
        f"RankMismatch: {rank_ranges(odd)} {has} another plan than {rank_ranges(groups[0])}. "
        f"First difference: {difference}.\n"
        f"  Start every rank with the same program, config and library versions{hint}."
    )


def _difference(groups: Sequence[Sequence[int]], plans: Sequence[PostedPlan]) -> tuple[str, str]:
    """The first field that differs and its values, and what else to do."""
    keys = dict.fromkeys(key for plan in plans for key in plan.fields)
    differing = [key for key in keys if len({plan.fields.get(key) for plan in plans}) > 1]
    key = differing[0] if differing else "order of the fields"
    at, lines = _first_difference([_unpacked(plan.details.get(key, "")) for plan in plans[:3]])
    shown: list[Any] = [*lines] or [plan.fields.get(key) for plan in plans[:3]]
    values = " vs ".join(
        f"{_short(value)} ({rank_ranges(ranks)}, host {plan.host})"
        for value, ranks, plan in zip(shown, groups, plans, strict=False)
    )
    more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
    hint = ", and build the model in the same order: a set has another one in each process"
    return f"{key}{at} = {values}{more}", hint if at else ""


def _first_difference(lists: Sequence[Sequence[str]]) -> tuple[str, list[str]]:
    """The number of the first line that is not the same in all ``lists``, in words, and those lines.

    >>> _first_difference([["a", "b"], ["a", "c"], ["a"]])
    (' 2', ['b', 'c', 'none'])
    """
    if not all(lists):
        return "", []
    for at, lines in enumerate(zip_longest(*lists, fillvalue="none"), 1):
        if len(set(lines)) > 1:
            return f" {at}", [*lines]
    return "", []


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
        item = self._recorder.enter(self._meetings[topic], NOTHING, 0, 0)
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
        item = self._recorder.enter(self._sayings[topic], NOTHING, 0, 0)
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
            deadline_s = time.monotonic() + END_S
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
        pause_s, asked_s = max(CHECK_S, self.size / 2048), time.monotonic()

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
            assert self._store is not None
            meeting = Rendezvous(self._store, self.rank, size, self._timeout_s, check)
            return meeting.wait_for(find, missing, topic)
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
