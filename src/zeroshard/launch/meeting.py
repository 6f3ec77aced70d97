"""Lets launchers restart a run together that nobody else controls: ``--no_ssh`` on each host.

The launcher of node 0 decides for all. It serves a small store at ``--master_port`` during the whole run.
Every launcher writes there how its ranks ended and which slots it has, and reads the plan of the next
attempt. Ranks meet at another port of node 0, which is new in each attempt. If node 0 is gone, the run
ends: there is no other place to meet.

Every launcher also counts up a key every two seconds. A node whose key stands still for half a minute
is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TextIO

from zeroshard.errors import LaunchError
from zeroshard.launch.hosts import Host
from zeroshard.launch.launch_plan import RunHere
from zeroshard.launch.options import LaunchRequest
from zeroshard.launch.restart import Team, logs_of, say
from zeroshard.launch.restarting import host_of, on_slots
from zeroshard.launch.usable import usable_slots
from zeroshard.run.address import unused_port
from zeroshard.run.batch_note import CHECKPOINT_DIR_VARIABLE
from zeroshard.run.exit_report import EXIT_SURVIVOR, ExitReport
from zeroshard.run.run_folder import RUN_ID_VARIABLE

if TYPE_CHECKING:
    from zeroshard.launch.agent import NodeRun

ARRIVE_S = 900.0
"""Seconds that all launchers have to arrive."""
BEAT_S, GONE_S = 2.0, 30.0
ENDED_S = 300.0
"""Seconds that the ranks of other nodes have to end after those of node 0 have failed."""
_ANSWER_S = 60.0
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class NodeEnd:
    """How an attempt ended on one node, and the slots that it can use now."""

    exitcode: int
    lines: tuple[str, ...] = ()
    consequence: bool = False
    interrupted: bool = False
    slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class AttemptPlan:
    """What node 0 has decided. ``slots``: of each node of the attempt."""

    port: int
    slots: dict[str, tuple[int, ...]]
    env: dict[str, str]


class Meeting:
    """The store of one run, seen from one node. Keys are written once, except the beats."""

    def __init__(self, store: Any, node_rank: int, num_nodes: int) -> None:
        self._store = store
        self.node_rank, self.num_nodes = node_rank, num_nodes
        self._seen: dict[int, tuple[int | None, float]] = {}  # beats, and since when they stand

    def write(self, key: str, value: object) -> None:
        self._store.set(key, json.dumps(value))

    def read(self, key: str) -> Any:
        """The value of a key; None if it is not there yet."""
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def fail(self, number: int) -> None:
        """Tell the other nodes that attempt ``number`` has failed here."""
        self.write(f"failed/{number}", True)

    def is_gone(self, node: int) -> bool:
        """Whether a node's beat stands still. Node 0 asks again and again."""
        now_s, beat = time.monotonic(), self.read(f"beat/{node}")
        if node not in self._seen or self._seen[node][0] != beat:
            self._seen[node] = (beat, now_s)
        return now_s - self._seen[node][1] > GONE_S


def restart_together(
    request: LaunchRequest, here: RunHere, node: NodeRun, *, run_id: str, console: TextIO
) -> int:
    """Run this node's part of all attempts. Returns the exit code of the last one.

    Raises:
        LaunchError: node 0 is not there or has another secret, or launchers do not arrive.
    """
    from zeroshard.launch.common_store import HostsPlace, client_of, store_of_hosts

    assert here.master_addr is not None, "plan_launch() gives it for several nodes"
    assert here.master_port is not None, "plan_launch() gives it for several nodes"
    place = HostsPlace(here.master_addr, here.master_port, node.secret, here.node_rank == 0)
    pulse = _Pulse()
    with (
        store_of_hosts(place) as common,
        _beating(Meeting(client_of(common, _ANSWER_S), here.node_rank, here.num_nodes), pulse),
    ):
        meeting = Meeting(common.store, here.node_rank, here.num_nodes)
        meeting.write(f"hello/{here.node_rank}", list(host_of("", here, node).slots))
        node = replace(node, has_failed_elsewhere=pulse.failed.is_set)
        part = _Part(request, here, node, console, meeting, pulse)
        if here.node_rank == 0:
            return _lead(meeting, part, run_id)
        return _follow(meeting, part)


class _Part:
    """Runs the ranks of this node."""

    def __init__(
        self,
        request: LaunchRequest,
        here: RunHere,
        node: NodeRun,
        console: TextIO,
        meeting: Meeting,
        pulse: _Pulse,
    ) -> None:
        self.request, self.here, self.node, self.console = request, here, node, console
        self._meeting, self.pulse = meeting, pulse
        self.host = host_of(_name(here.node_rank), here, node)

    def run(self, number: int, plan: AttemptPlan) -> ExitReport:
        """Run attempt ``number``; a node that the plan leaves out has nothing to do."""
        from zeroshard.launch.agent import run_node

        if self.host.name not in plan.slots:
            say(self.console, f"this node has no ranks in attempt {number}.")
            return ExitReport((), None, "", 0)
        part = on_slots(self.node, self.host, plan.slots[self.host.name])
        rank, size, logs = list(plan.slots).index(self.host.name), len(plan.slots), part.log_dir
        own = {
            "CROSS_RANK": str(rank),
            "CROSS_SIZE": str(size),
            CHECKPOINT_DIR_VARIABLE: os.path.abspath(self.request.checkpoint_dir or "."),
        }
        self.pulse.begin(
            number, [node for node in range(self.here.num_nodes) if _name(node) in plan.slots]
        )
        report = run_node(
            replace(
                part,
                num_nodes=size,
                node_rank=rank,
                master_addr=part.master_addr if size > 1 else None,
                master_port=plan.port,
                attempt=str(number),
                env={**part.env, **plan.env, **own},
                log_dir=logs and logs_of(logs, number),
            ),
            self.console,
        )
        if report.exitcode:
            self._meeting.fail(number)
        return report

    def end(self, report: ExitReport) -> NodeEnd:
        """What the other launchers must know. Asks for usable slots only after a failure."""
        slots = self.host.slots
        if self.request.min_ranks is not None and report.exitcode:
            slots = usable_slots(slots, self.request.check_slot)
        return NodeEnd(report.exitcode, report.lines, report.consequence, report.interrupted, slots)


def _lead(meeting: Meeting, part: _Part, run_id: str) -> int:
    """Node 0: run all attempts, and tell the others."""
    hosts = _arrived(meeting)
    answers: dict[str, tuple[int, ...] | None] = {}
    team = Team(part.request, hosts, lambda: answers, run_id=run_id, console=part.console)

    def run(number: int) -> ExitReport:
        slots = {host.name: host.slots for host in team.now}
        env = {**team.env(number), RUN_ID_VARIABLE: run_id}
        plan = AttemptPlan(unused_port(""), slots, env)
        meeting.write(f"plan/{number}", asdict(plan))
        report = part.run(number, plan)
        ends = _collect(meeting, number, part.end(report), part.pulse)
        answers.update({_name(n): end.slots if end else None for n, end in ends.items()})
        return joined(report, ends, [*slots])

    try:
        return team.run(run)
    finally:
        with contextlib.suppress(Exception):  # another error ends the run
            meeting.write("end", 1)
            _wait_for_farewells(meeting)


def _follow(meeting: Meeting, part: _Part) -> int:
    """Another node: run this node's part of every attempt that node 0 plans."""
    number, report = 0, ExitReport((), None, "", 0)
    try:
        while (plan := _next_plan(meeting, number)) is not None:
            report = part.run(number, plan)
            meeting.write(f"ended/{number}/{meeting.node_rank}", asdict(part.end(report)))
            number += 1
        meeting.write(f"farewell/{meeting.node_rank}", 1)
    except KeyboardInterrupt:
        return 130
    except LaunchError:
        raise
    except (RuntimeError, OSError) as error:  # of the store
        raise LaunchError(
            "node 0 does not answer. It decides about restarts, so the run ends here. Start the command "
            "again on all hosts that are left."
        ) from error
    return report.exitcode


def joined(
    own: ExitReport, ends: dict[int, NodeEnd | None], taking_part: Sequence[str]
) -> ExitReport:
    """The report of the whole attempt from those of the nodes; None: the node is gone.

    The cause is the first failure that is not a consequence of another one.
    """
    by_name = {_name(node): end for node, end in ends.items()}
    gone = [name for name in taking_part if by_name[name] is None]
    there = [end for end in ends.values() if end is not None]
    cause = _cause(own, [end for end in there if end.exitcode], gone)
    return replace(cause, interrupted=any(end.interrupted for end in there))


def _cause(own: ExitReport, failed: Sequence[NodeEnd], gone: Sequence[str]) -> ExitReport:
    if not (failed or gone) or (own.exitcode and not own.consequence):
        return own
    if causes := [end for end in failed if not end.consequence]:
        return ExitReport(causes[0].lines, None, "", causes[0].exitcode)
    lines = tuple(f"{name} does not answer." for name in gone) or own.lines
    return ExitReport(lines, None, "", own.exitcode or EXIT_SURVIVOR)


def _arrived(meeting: Meeting) -> list[Host]:
    deadline_s = time.monotonic() + ARRIVE_S
    hosts: list[Host] = []
    while len(hosts) < meeting.num_nodes:
        slots = meeting.read(f"hello/{len(hosts)}")
        if slots is not None:
            hosts.append(Host(_name(len(hosts)), tuple(slots)))
        elif time.monotonic() > deadline_s:
            raise LaunchError(
                f"the launcher of node {len(hosts)} has not arrived within {ARRIVE_S:g} s. Start the "
                f"command on all {meeting.num_nodes} nodes, with the same --master_addr."
            )
        else:
            time.sleep(_POLL_S)
    return hosts


def _collect(
    meeting: Meeting, number: int, own: NodeEnd, pulse: _Pulse
) -> dict[int, NodeEnd | None]:
    """How the attempt ended on each node. None: the node is gone."""
    ends: dict[int, NodeEnd | None] = {0: own}
    deadline_s = time.monotonic() + ENDED_S
    waiting = set(range(1, meeting.num_nodes))
    while waiting:
        for node in sorted(waiting):
            said = meeting.read(f"ended/{number}/{node}")
            is_late = own.exitcode != 0 and time.monotonic() > deadline_s
            if said is not None:
                ends[node] = _end_of(said)
            elif is_late or node in pulse.gone:
                ends[node] = None
        waiting -= ends.keys()
        if waiting:
            time.sleep(_POLL_S)
    return ends


def _end_of(said: dict[str, Any]) -> NodeEnd:
    return NodeEnd(**{**said, "lines": tuple(said["lines"]), "slots": tuple(said["slots"])})


def _next_plan(meeting: Meeting, number: int) -> AttemptPlan | None:
    """The plan of attempt ``number``; None when the run has ended."""
    while True:
        if (said := meeting.read(f"plan/{number}")) is not None:
            slots = {name: tuple(each) for name, each in said["slots"].items()}
            return AttemptPlan(said["port"], slots, said["env"])
        if meeting.read("end") is not None:
            return None
        time.sleep(_POLL_S)


def _wait_for_farewells(meeting: Meeting) -> None:
    """Keep the store until the others have read the end, a few seconds at most."""
    deadline_s = time.monotonic() + 5.0
    waiting = set(range(1, meeting.num_nodes))
    while waiting and time.monotonic() < deadline_s:
        waiting -= {node for node in waiting if meeting.read(f"farewell/{node}") is not None}
        time.sleep(_POLL_S)


class _Pulse:
    """What the thread of the beats and the main thread share: the attempt, and whether it has failed."""

    def __init__(self) -> None:
        self.number = -1
        self.gone: frozenset[int] = frozenset()  # nodes that no longer beat; node 0 looks for them
        self.failed = threading.Event()
        self._taking_part: frozenset[int] = frozenset()
        self._lock = threading.Lock()

    def begin(self, number: int, taking_part: Iterable[int]) -> None:
        """Attempt ``number`` begins, on these nodes."""
        with self._lock:
            self.number, self._taking_part = number, frozenset(taking_part)
            self.failed.clear()

    def look(self, meeting: Meeting) -> None:
        """Find out whether the attempt has failed on another node."""
        with self._lock:
            if self.number < 0:
                return
            if meeting.node_rank == 0:
                others = range(1, meeting.num_nodes)
                self.gone = frozenset(node for node in others if meeting.is_gone(node))
                if self.gone & self._taking_part:
                    meeting.fail(self.number)
            if meeting.read(f"failed/{self.number}"):
                self.failed.set()


@contextlib.contextmanager
def _beating(meeting: Meeting, pulse: _Pulse) -> Iterator[None]:
    """A context in which a thread counts this node's beat up. Nothing else uses this ``meeting``."""
    ended = threading.Event()

    def run() -> None:
        count = 0
        with contextlib.suppress(Exception):  # node 0 is gone; the main thread says so
            while True:
                meeting.write(f"beat/{meeting.node_rank}", count)
                pulse.look(meeting)
                count += 1
                if ended.wait(BEAT_S):
                    return

    thread = threading.Thread(target=run, name="zeroshard-beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(BEAT_S)


def _name(node: int) -> str:
    return f"node {node}"
