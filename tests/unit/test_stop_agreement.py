"""All ranks stop after the same step, whenever the signal comes and whatever its rank does."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from zeroshard import Engine
from zeroshard.errors import UsageError
from zeroshard.watchdog import stop_agreement
from zeroshard.watchdog.stop_agreement import SIGNALS, Point, StopAgreement, StopSignals


class FakeSignals:
    """What an agreement asks of :class:`StopSignals`."""

    seen = ""
    gave_up = False

    def poll(self) -> str:
        return self.seen

    def give_up(self) -> None:
        self.gave_up = True
        raise SystemExit("gave up")


class FakeStore:
    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.lock = threading.Lock()

    def add(self, key: str, amount: int) -> int:
        with self.lock:
            total = int(self.values.get(key, b"0")) + amount
            self.values[key] = str(total).encode()
        return total

    def set(self, key: str, text: str) -> None:
        self.values[key] = text.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.values[key] for key in keys]

    def compare_set(self, key: str, expected: str, _desired: str) -> bytes:
        return self.values.get(key, expected.encode())


def points_of(rank: int, evaluations: list[list[int]]) -> Iterator[tuple[Point, int]]:
    """The points of a rank and how many steps are done there. Evaluations differ by rank."""
    for step, counts in enumerate(evaluations):
        for number in range(1, counts[rank] + 1):
            yield (step, number), step
        yield (step, math.inf), step
        yield (step + 1, 0), step + 1


@pytest.mark.parametrize("seed", range(12))
def test_ranks_that_meet_in_each_step_stop_after_the_same_one(seed, monkeypatch):
    """The threads of ranks run freely; a barrier in each step is what its collectives are."""
    monkeypatch.setattr(stop_agreement, "POLL_S", 0.0005)
    drawn = random.Random(seed)
    size, steps = 3, 40
    evaluations = [
        [drawn.choice([0, 0, 0, 4]) + drawn.choice([0, 2]) for _ in range(size)]
        for _ in range(steps)
    ]
    store, barrier = FakeStore(), threading.Barrier(size)
    signals = [FakeSignals() for _ in range(size)]
    slowness = random.Random(300 + seed)

    def call(operation):
        """The store answers some ranks later than they take steps."""
        time.sleep(slowness.choice([0, 0.01]))
        return operation(store)

    agreements = [
        StopAgreement(one, rank=rank, ranks=range(size), label="x", call=call)
        for rank, one in enumerate(signals)
    ]
    ended: dict[int, int] = {}
    over = threading.Event()

    def watch(rank: int) -> None:
        pauses = random.Random(100 * seed + rank)
        while not over.is_set():
            agreements[rank].look()
            time.sleep(pauses.random() * 0.004)

    def train(rank: int) -> None:
        pauses = random.Random(200 * seed + rank)
        for point, done in points_of(rank, evaluations):
            if agreements[rank].stops_at(point):
                ended[rank] = done
                return
            if point[1] == math.inf:
                barrier.wait(10)
            time.sleep(pauses.random() * 0.002)

    threads = [threading.Thread(target=f, args=(r,)) for r in range(size) for f in (watch, train)]
    for thread in threads:
        thread.start()
    time.sleep(drawn.random() * 0.05)
    signals[drawn.randrange(size)].seen = "SIGTERM"
    for thread in threads[1::2]:
        thread.join(15)
    over.set()
    assert len(ended) == size, ended
    assert len(set(ended.values())) == 1, ended
    assert {one.asked for one in agreements} == {agreements[0].asked} != {""}


def test_a_rank_waits_at_most_for_a_limit(monkeypatch):
    monkeypatch.setattr(stop_agreement, "AGREE_S", 0.1)
    monkeypatch.setattr(stop_agreement, "_LOOK_S", 0.01)
    store, signals = FakeStore(), FakeSignals()
    agreement = StopAgreement(signals, ranks=(0, 1), label="x", call=lambda f: f(store))
    assert not agreement.stops_at((1, 0))
    signals.seen = "SIGUSR1"
    agreement.look()
    assert json.loads(store.values["stop/x/at/0"]) == [1, 0]
    with pytest.raises(SystemExit):
        agreement.stops_at((1, math.inf))
    assert signals.gave_up


def test_a_lost_store_is_tried_again():
    store, signals, broken = FakeStore(), FakeSignals(), [True]

    def call(operation):
        if broken[0]:
            raise ConnectionError
        return operation(store)

    agreement = StopAgreement(signals, label="x", call=call)
    signals.seen = "SIGTERM"
    with pytest.raises(ConnectionError):
        agreement.look()
    broken[0] = False
    agreement.look()
    assert agreement.stops_at((1, 0))


# ---------------------------------------------------------------- signals


@pytest.fixture(autouse=True)
def default_handlers():
    """Other tests of this process may have left handlers."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        is_interrupt = number == signal.SIGINT
        signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def signals(default_handlers):
    made = StopSignals()
    yield made
    made.close()


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noted_by_another_thread_too(signals, number):
    os.kill(os.getpid(), number)
    seen: list[str] = []
    thread = threading.Thread(target=lambda: seen.append(signals.poll()))
    thread.start()
    thread.join()
    assert seen == [signal.Signals(number).name]


def test_handlers_and_descriptor_of_before_come_back():
    before = [signal.getsignal(number) for number in SIGNALS]
    mine, theirs = os.pipe2(os.O_NONBLOCK)
    old = signal.set_wakeup_fd(theirs)
    try:
        made = StopSignals()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert made.poll() == "SIGUSR1"
        made.close()
        assert os.read(mine, 9) == bytes([signal.SIGUSR1])
        assert [signal.getsignal(number) for number in SIGNALS] == before
        assert signal.set_wakeup_fd(old) == theirs
    finally:
        os.close(mine), os.close(theirs)


def test_the_same_signal_again_acts_as_before(signals, monkeypatch):
    signals.handle(signal.SIGINT)
    signals.handle(signal.SIGTERM)  # another one: a launcher stops what Ctrl-C has reached
    signals.handle(signal.SIGINT)  # at once: from the terminal and from a launcher
    signals._handled[signal.SIGINT] -= 2
    with pytest.raises(KeyboardInterrupt):
        signals.handle(signal.SIGINT)
        time.sleep(1)


def test_the_end_of_a_forked_worker_is_no_signal_to_its_parent(signals):
    ready, is_ready = os.pipe()
    child = os.fork()
    if not child:
        os.write(is_ready, b"!")
        time.sleep(30)
        os._exit(0)
    os.read(ready, 1)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM
    assert signals.poll() == ""


def test_ignored_signals_stay_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        made = StopSignals()
        os.kill(os.getpid(), signal.SIGINT)
        assert made.poll() == ""
        made.close()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


# ---------------------------------------------------------------- one rank, and mistakes


def engine_of(**section) -> Engine:
    keys = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    return Engine(nn.Linear(2, 1), config={**keys, "preemption": section})


def step(engine: Engine) -> None:
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()


def test_one_rank_saves_at_the_next_point(tmp_path):
    engine = engine_of(save_dir=str(tmp_path))
    step(engine)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        step(engine)
    assert ended.value.code == 0
    marker = json.loads((tmp_path / "preempted").read_text())
    assert marker == {"signal": "SIGTERM to rank 0", "step": 1}
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with engine_of() as again:
        path, _ = again.load_checkpoint(tmp_path)
        assert path is not None
        assert again.global_steps == 1
        again.save_on_preemption(tmp_path)
        assert not (tmp_path / "preempted").exists()


def test_a_program_may_save_by_itself():
    with engine_of(enabled=True) as engine:
        step(engine)
        assert not engine.preempted
        os.kill(os.getpid(), signal.SIGUSR1)
        step(engine)
        assert engine.preempted
        step(engine)  # it decides when it ends


def test_a_directory_that_cannot_be_used_is_refused_before_training(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(
        UsageError, match=r"file' cannot be used as a directory.*Give another save_dir"
    ):
        engine_of(save_dir=str(file))
    with engine_of() as engine, pytest.raises(UsageError, match="Not a directory"):
        engine.save_on_preemption(file / "below")


def test_mistakes():
    with engine_of() as engine:
        with pytest.raises(UsageError, match=r'"preemption": {"enabled": true}'):
            _ = engine.preempted
        with engine_of(enabled=True):
            with pytest.raises(UsageError, match="another engine of this process"):
                engine.save_on_preemption("x")
    found: list[BaseException] = []

    def build() -> None:
        try:
            engine_of(enabled=True)
        except UsageError as error:
            found.append(error)

    thread = threading.Thread(target=build)
    thread.start()
    thread.join()
    assert "Build it in the main thread" in str(found[0])
