"""Measures what a run with many ranks costs the store through which they agree.

    python benchmarks/control_plane.py [--clients 64 512 4096] [--only ACT ...] [--out FILE]

A real TCPStore runs in a process of its own. Threads in a few other processes are the ranks: they run the
code of ``src/zeroshard`` that talks to the store, and nothing else of a rank. They join, start their
watchdogs, agree on a plan, do the four rounds of a save, are idle, and get two verdicts: one rank calls
another collective, and one rank does not answer. Eight ranks at a time are told that they share a host.
A rank's *requests* are round trips to the store: a ``get`` or ``multi_get`` is two, since torch waits for
the key first. *Bytes* are keys and values, in both directions, without torch's framing.

All ranks and the store share the cores of this machine. So the times are upper limits, which contain
the work of all ranks. CPU times of the store and of the ranks are measured by themselves; they depend
less on what else the machine does. The name of ``::ffff:127.0.0.1`` has to be in ``/etc/hosts``: torch
looks it up for each connection, which takes longer than anything else if a name service is asked.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import multiprocessing
import os
import resource
import shutil
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

from machine import describe

HOST_RANKS = 8
"""Ranks that are told that they share a host."""
PER_PROCESS = 128
"""Ranks in one process, unless it is given."""
PLAN = {f"key {at}": "x" * 40 for at in range(60)}
"""What the ranks agree on: about as many fields and bytes as those of an engine."""
SAID = "x" * 1000
"""What each rank says in a round of a save: about as much as one that writes its part of 100 tensors."""
STACKS = "\n".join(
    f'  File "/a/program/of/this/user/train.py", line {at}, in f{at}' for at in range(100)
)
"""Stacks of a rank, for its answer to a question: about as long as those of ten threads."""
TARGETS = {
    "join": ("seconds", 5.0), "agree": ("seconds", 5.0), "divergence": ("seconds", 60.0),
    "idle": ("store cores", 0.05),
}  # fmt: skip
"""Act -> what should be at most how much with 4,096 ranks."""


# ---------------------------------------------------------------------- a client of the store that counts


class CountedStore:
    """A client of the store. ``counts``: requests by operation, and bytes ``in`` and ``out``."""

    def __init__(self, prefix: str, store: Any, counts: Counter[str]) -> None:
        self.prefix, self.store, self.counts = prefix, store, counts

    def below(self, prefix: str) -> CountedStore:
        """The same client with a longer prefix."""
        return type(self)(f"{self.prefix}{prefix}/", self.store, self.counts)

    def clone(self) -> CountedStore:
        """A second connection, which counts into the same numbers."""
        return type(self)(self.prefix, self.store.clone(), self.counts)

    def _note(self, what: str, keys: Sequence[str], sent: int, requests: int = 1) -> list[str]:
        full = [self.prefix + key for key in keys]
        self.counts[what] += requests
        self.counts["in"] += requests * sum(map(len, full)) + sent
        return full

    def set(self, key: str, value: str) -> None:
        """As a store's."""
        self.store.set(self._note("set", [key], len(value))[0], value)

    def get(self, key: str) -> bytes:
        """As a store's."""
        found: bytes = self.store.get(self._note("get", [key], 0, 2)[0])
        self.counts["out"] += len(found)
        return found

    def add(self, key: str, amount: int) -> int:
        """As a store's."""
        self.counts["out"] += 8
        found: int = self.store.add(self._note("add", [key], 8)[0], amount)
        return found

    def check(self, keys: list[str]) -> bool:
        """As a store's."""
        found: bool = self.store.check(self._note("check", keys, 0))
        return found

    def delete_key(self, key: str) -> bool:
        """As a store's."""
        found: bool = self.store.delete_key(self._note("delete", [key], 0)[0])
        return found

    def append(self, key: str, value: str) -> None:
        """As a store's."""
        self.store.append(self._note("append", [key], len(value))[0], value)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """As a store's."""
        sent = len(expected) + len(desired)
        found: bytes = self.store.compare_set(self._note("look", [key], sent)[0], expected, desired)
        self.counts["out"] += len(found)
        return found

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        """As a store's."""
        self.store.multi_set(self._note("multi_set", keys, sum(map(len, values))), values)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """As a store's."""
        found: list[bytes] = self.store.multi_get(self._note("multi_get", keys, 0, 2))
        self.counts["out"] += sum(map(len, found))
        return found


def requests_of(counts: Counter[str]) -> int:
    """All requests."""
    return sum(number for what, number in counts.items() if what not in ("in", "out"))


# ---------------------------------------------------------------------- one rank


_HERE = threading.local()  # .player: the rank that this thread plays


class Rank:
    """One simulated rank: the objects of ZeroShard that talk to the store."""

    def __init__(self, rank: int, size: int, port: int) -> None:
        self.rank, self.size, self.port = rank, size, port
        self.counts: Counter[str] = Counter()
        self.watchdog_counts: Counter[str] = Counter()
        self.watchdog: Any = None

    def connect(self) -> None:
        """Open the connection that torch's process group would use."""
        from torch.distributed import TCPStore

        store = TCPStore(
            "127.0.0.1", self.port, self.size, False, timedelta(seconds=300), wait_for_workers=False
        )
        self.store = CountedStore("zs/run/0/", store, self.counts)

    def join(self) -> None:
        """What ``init_distributed`` does before it makes the process group."""
        from zeroshard.session.join import await_all

        place = cast("Any", self.store.below("joining"))
        await_all(place, self.rank, self.size, timeout_s=300)

    def watch(self) -> None:
        """Start the watchdog."""
        from zeroshard.run.recordings import PRESENCE, recording_dir
        from zeroshard.watchdog.messages import watchdog_namespace
        from zeroshard.watchdog.settings import WatchdogSettings
        from zeroshard.watchdog.watchdog import Watchdog

        ranks = tuple(range(self.size))
        space = watchdog_namespace(ranks, self.store.prefix + "zs/run/0")
        client = CountedStore(f"{space}/", self.store.store.clone(), self.watchdog_counts)
        folder = recording_dir(f"plane-{os.getpid()}")
        self.settings = WatchdogSettings(dump_dir=str(folder)).with_environment()
        self.watchdog = Watchdog(
            cast("Any", client),
            rank=self.rank,
            ranks=ranks,
            recording=recording_dir(f"plane-{os.getpid()}-{self.rank}") / PRESENCE,
            settings=self.settings,
        )

    def agree(self) -> None:
        """What ``initialize`` does before it opens communicators."""
        from zeroshard.comm.connect import DeviceUse
        from zeroshard.session import session

        ranks = tuple(range(self.size))
        number, place = session._store_namespace(ranks, self.rank)
        self.crew = session.SetUpRanks(
            ranks, self.rank, number, place, "initialize", self.settings, self.watchdog
        )
        use = DeviceUse(
            "cuda",
            f"cuda:{self.rank % HOST_RANKS}",
            f"GPU-{self.rank:036}",
            str(self.rank // HOST_RANKS),
        )
        self.peers = session._agree(self.crew, PLAN, use, {})

    def follow(self) -> None:
        """Let the watchdog follow an engine, with its lone reads and its agreement to stop."""
        from zeroshard.comm.recorder import Recorder
        from zeroshard.session import session
        from zeroshard.session.groups import SessionWatch
        from zeroshard.watchdog.stop_agreement import StopSignals
        from zeroshard.watchdog.tracked_calls import calls_of

        path = Path(self.peers[self.rank].recording)
        self.recorder = Recorder(recording=path, rank=self.rank, group_size=self.size)
        meetings = Recorder("meetings", ring=64, rank=self.rank, group_size=self.size)
        part = calls_of(self.recorder, self.crew.label, self.settings, peers=self.peers)
        self.session = SessionWatch(
            self.watchdog, self.crew.label, self.settings, self.peers, [part]
        )
        self.session.readers(self.recorder)
        self.session.stop_agreement(cast("StopSignals", NoSignals()), self.rank)
        self.group = session._control_group(self.crew, self.peers, meetings)

    def save(self) -> None:
        """The rounds of a save, with nothing to write."""
        from zeroshard.comm.agreement import run_on_all_ranks

        for topic in ("planning it", "reserving space", "writing", "completing it"):
            run_on_all_ranks(
                self.group, "failed", topic, lambda: SAID,
                say=lambda own: own, decide=len, tell=lambda decision: decision,
            )  # fmt: skip
        self.group.gather("", topic="finishing the save")

    def rest(self) -> None:
        """Nothing: the watchdog ticks."""
        time.sleep(float(os.environ["CONTROL_PLANE_IDLE_S"]))

    def diverge(self) -> None:
        """Wait in a collective that the last rank does not call, until the watchdog ends it."""
        import torch

        name = "another" if self.rank == self.size - 1 else "a layer"
        whole = torch.empty(64)
        self._await(self.recorder.all_gather(name, whole, whole[:1]), "RankDivergence")

    def lose(self) -> None:
        """Wait in a collective for the last rank, which does not answer, until the watchdog ends it."""
        import torch

        if self.rank == self.size - 1:
            self.watchdog.tick = lambda: None
            return
        whole = torch.empty(64)
        self._await(self.recorder.all_gather("a layer", whole, whole[:1]), "RankFrozen")

    def _await(self, item: Any, kind: str) -> None:
        self.recorder.waiting = item
        state = self.watchdog._state
        assert state.ready.wait(240), f"rank {self.rank} got no verdict"
        state.delivered.set()  # the simulated program raises it
        self.recorder.waiting = None
        assert state.diagnosis.kind == kind, state.diagnosis.text

    def again(self) -> None:
        """Start as a program that initializes a second time after an error."""
        self.watchdog._state.stop.set()
        self.watchdog._state.kick.set()
        self.watch()
        self.agree()
        self.follow()


class NoSignals:
    """Signals that never come."""

    seen = ""

    def poll(self) -> str:
        """No signal."""
        return ""


# ---------------------------------------------------------------------- a process of ranks


def ranks_process(pipe: Connection, ranks: range, size: int, port: int) -> None:
    """Let threads that play ``ranks`` do what ``pipe`` asks for: the name of a method of :class:`Rank`.

    Answers with the times of all of them, the requests of all, and an error.
    """
    threading.stack_size(512 * 1024)
    players = [Rank(rank, size, port) for rank in ranks]
    let_threads_be_ranks()
    gc.disable()  # many ranks in one process: its garbage is not that of one rank
    sys.setswitchinterval(1.0)  # a thread that waits for its turn asks for it in this interval
    pipe.send(None)
    while (act := pipe.recv()) is not None:
        before = _counts(players)
        times, error = play(players, act)
        after = _counts(players)
        after.subtract(before)
        pipe.send((times, after, error))
    from zeroshard.run.recordings import recording_dir

    here = recording_dir("plane")
    for folder in here.parent.glob(f"{here.name}-{os.getpid()}*"):
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # thousands of watchdogs need not end one by one


def play(players: Sequence[Rank], act: str) -> tuple[list[tuple[float, float]], str]:
    """When each rank began and ended ``act``, and the first error."""
    times, errors, go = [(0.0, 0.0)] * len(players), [""] * len(players), threading.Event()

    def perform(at: int, player: Rank) -> None:
        _HERE.player = player
        go.wait()
        begun_s = time.monotonic()
        try:
            getattr(player, act)()
        except BaseException:
            errors[at] = traceback.format_exc()
        times[at] = begun_s, time.monotonic()

    threads = [threading.Thread(target=perform, args=pair) for pair in enumerate(players)]
    for thread in threads:
        thread.start()
    go.set()
    for thread in threads:
        thread.join()
    return times, next((error for error in errors if error), "")


def _counts(players: Sequence[Rank]) -> Counter[str]:
    total: Counter[str] = Counter()
    for player in players:
        total.update(dict(player.counts))
        total.update(dict(player.watchdog_counts))
    return total


def let_threads_be_ranks(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Give each thread its own store and host, where a process has them in a real run.

    ``put(module, name, value)`` replaces what a module has.
    """
    from zeroshard.comm import store_keys
    from zeroshard.comm.host import Process, _stat
    from zeroshard.session import session
    from zeroshard.watchdog import inquiry, tracked_calls, watchdog

    pid = os.getppid()  # it has one thread: the state of a process with hundreds takes long to read
    started = _stat(pid)[1]

    def this_process() -> Process:
        host = _HERE.player.rank // HOST_RANKS
        return Process(f"host-{host}", f"boot-{host:032}", pid, started)

    def below(prefix: str, store: Any) -> Any:
        return (
            store.below(prefix) if isinstance(store, CountedStore) else PrefixStore(prefix, store)
        )

    from torch.distributed import PrefixStore

    for module in (session, watchdog):
        put(module, "this_process", this_process)
    for module in (store_keys, session):
        put(module, "PrefixStore", below)
    put(session, "default_store", lambda: _HERE.player.store)
    put(tracked_calls, "call_of_torch", lambda _thread: None)  # sees the frames of all ranks here
    put(inquiry, "stacks", lambda: STACKS)
    put(watchdog, "_IDLE_TICK_S", 1.0)  # looks that ask nobody would keep this machine busy


# ---------------------------------------------------------------------- the measurement


def store_process(pipe: Connection) -> None:
    """Serve a store until ``pipe`` says so."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()
    os._exit(0)


def cpu_s_of(pid: int | None) -> float:
    """CPU seconds that a process has used, in user and system mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Plane:
    """A store and ``size`` simulated ranks."""

    def __init__(self, size: int, per_process: int = PER_PROCESS) -> None:
        self.size = size
        here = multiprocessing.get_context("forkserver")
        here.set_forkserver_preload(["zeroshard.session.session"])  # so that torch is imported once
        self.store_pipe, theirs = here.Pipe()
        self.store = here.Process(target=store_process, args=(theirs,))
        self.store.start()
        port = self.store_pipe.recv()
        self.pipes, self.processes = [], [self.store]
        for first in range(0, size, per_process):
            mine, theirs = here.Pipe()
            ranks = range(first, min(first + per_process, size))
            process = here.Process(target=ranks_process, args=(theirs, ranks, size, port))
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)
        for pipe in self.pipes:
            pipe.recv()

    def do(self, act: str) -> dict[str, Any]:
        """Let all ranks do ``act`` at once. Returns seconds, requests and bytes, and CPU of the store."""
        cpu_s, ranks_cpu_s, begun_s = self._cpu_s(), self._ranks_cpu_s(), time.monotonic()
        for pipe in self.pipes:
            pipe.send(act)
        answers = [pipe.recv() for pipe in self.pipes]
        wall_s = time.monotonic() - begun_s
        total: Counter[str] = Counter()
        for _, counts, error in answers:
            if error:
                raise RuntimeError(f"{act} with {self.size} ranks: {error}")
            total.update(counts)
        times = [pair for found, _, _ in answers for pair in found]
        cpu_s, ranks_cpu_s = self._cpu_s() - cpu_s, self._ranks_cpu_s() - ranks_cpu_s
        return {
            "seconds": round(max(end for _, end in times) - min(begun for begun, _ in times), 3),
            "requests": requests_of(total),
            "requests per rank": round(requests_of(total) / self.size, 2),
            "requests per second": round(requests_of(total) / wall_s, 1),
            "bytes to the store": total["in"],
            "bytes from the store": total["out"],
            "store cpu seconds": round(cpu_s, 3),
            "store cores": round(cpu_s / wall_s, 4),
            "cpu ms of a rank": round(1000 * ranks_cpu_s / self.size, 3),
            "by operation": {
                what: number for what, number in sorted(total.items())
                if what not in ("in", "out") and number
            },
        }  # fmt: skip

    def _cpu_s(self) -> float:
        return cpu_s_of(self.store.pid)

    def _ranks_cpu_s(self) -> float:
        return sum(cpu_s_of(process.pid) for process in self.processes[1:])

    def resident_nbytes(self) -> int:
        """Memory of the store's process."""
        pages = Path(f"/proc/{self.store.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def close(self) -> None:
        """End all processes."""
        for pipe, process in zip(
            (*self.pipes, self.store_pipe), (*self.processes[1:], self.store), strict=True
        ):
            with contextlib.suppress(OSError):
                pipe.send(None)
            process.join(20)
            process.kill()


ACTS = {
    "join": "join", "watch": "watch", "agree": "agree", "follow": "follow", "save": "save",
    "idle": "rest", "divergence": "diverge", "again": "again", "frozen": "lose",
}  # fmt: skip
"""What is measured, and the method of :class:`Rank` that does it, in this order."""


def measure(size: int, wanted: Sequence[str], per_process: int) -> dict[str, Any]:
    """All measurements with ``size`` ranks."""
    plane = Plane(size, per_process)
    try:
        plane.do("connect")
        found: dict[str, Any] = {}
        for name, act in ACTS.items():
            if name not in wanted:
                continue
            row = found[name] = plane.do(act)
            row["store bytes resident"] = plane.resident_nbytes()
            print(f"{size:>6} {name:<11}{_line(row)}", flush=True)
        return found
    finally:
        plane.close()


def _line(row: dict[str, Any]) -> str:
    millions = {way: row[f"bytes {way} the store"] / 1e6 for way in ("to", "from")}
    return (
        f"{row['seconds']:8.2f} s {row['requests per rank']:8.1f} requests per rank "
        f"{row['requests per second']:8.0f}/s {millions['to']:7.1f} MB in {millions['from']:7.1f} MB "
        f"out; CPU: store {row['store cpu seconds']:6.2f} s, rank {row['cpu ms of a rank']:6.2f} ms"
    )


def name_ms() -> float:
    """How long a look-up of the other address of a connection takes. Torch makes one for each."""
    begun_s = time.monotonic()
    with contextlib.suppress(OSError):
        socket.getnameinfo(("::ffff:127.0.0.1", 1), 0)
    return 1000 * (time.monotonic() - begun_s)


GROWTH = ("seconds", "requests", "bytes from the store", "store cpu seconds", "cpu ms of a rank")


def growth(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By what seconds, requests and bytes grow when the number of ranks doubles, from size to size."""
    sizes = sorted(map(int, found))
    rows: dict[str, dict[str, float]] = {}
    for small, large in pairwise(sizes):
        doublings = math.log2(large / small)
        for name, row in found[str(large)].items():
            before = found[str(small)].get(name, Counter())
            rows.setdefault(name, {}).update({
                f"{what}, {small} to {large}": round((row[what] / before[what]) ** (1 / doublings), 2)
                for what in GROWTH
                if before[what]
            })  # fmt: skip
    return rows


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--clients", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--only", nargs="+", choices=list(ACTS), default=list(ACTS))
    parser.add_argument("--idle", type=float, default=20.0, help="seconds of idleness")
    parser.add_argument("--per-process", type=int, default=PER_PROCESS)
    parser.add_argument("--out", type=Path, help="a file; what it has is kept and completed")
    parser.add_argument("--note", default="ranks and store share this machine")
    given = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    del soft
    os.environ["CONTROL_PLANE_IDLE_S"] = str(given.idle)
    machine = describe() | {"look-up of the loopback's name in ms": round(name_ms(), 1)}
    found = {str(size): measure(size, given.only, given.per_process) for size in given.clients}
    before = json.loads(given.out.read_text()) if given.out and given.out.exists() else {}
    for size, rows in before.get("ranks", {}).items():  # measured by an earlier command
        found[size] = found.get(size, {}) | rows
    found = dict(sorted(found.items(), key=lambda pair: int(pair[0])))
    rates = growth(found)
    for name, (what, limit) in TARGETS.items():
        if (value := found.get("4096", {}).get(name, {}).get(what)) is not None:
            word = "met" if value <= limit else "missed"
            print(f"4096 {name}: {what} {value}, at most {limit}: {word}")
    for name, row in rates.items():
        print(f"{name}: per doubling " + ", ".join(f"{what} x{by}" for what, by in row.items()))
    if given.out:
        machines = [*before.get("machines", []), machine]
        text = {"note": given.note, "machines": machines, "ranks": found, "per doubling": rates}
        given.out.write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()
