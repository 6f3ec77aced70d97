"""Is every use of CUDA behind what it depends on, on the right device? With fakes: no GPU is needed.

Streams do nothing here but note who waits for whom; copies happen at once.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from zeroshard import Engine
from zeroshard.comm.env import RankInfo, own_device
from zeroshard.comm.host import this_process
from zeroshard.comm.recorder import Recorder
from zeroshard.engine import build
from zeroshard.errors import UsageError
from zeroshard.offload import stores
from zeroshard.offload.async_update import AsyncUpdateWorker
from zeroshard.offload.copy_streams import CudaCopyStreams
from zeroshard.watchdog.rank_status import PRESENCE, Peer
from zeroshard.watchdog.settings import WatchdogSettings
from zeroshard.watchdog.tracked_calls import calls_of
from zeroshard.watchdog.watchdog import SessionWatch, Watchdog
from zeroshard.zero import safe_get_full_grad


@dataclass(eq=False)
class FakeStream:
    name: str
    cuda: FakeCuda

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.note(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Any) -> None:
        self.cuda.note(f"{self.name} waits for an event")


class FakeEvent:
    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        CUDA[-1].note("query")
        return True


@dataclass
class FakeCuda:
    """Notes (thread, what) in the order of the calls."""

    gpus: int = 8
    notes: list[tuple[str, str]] = field(default_factory=list)
    streams: list[FakeStream] = field(default_factory=list)

    def note(self, what: str) -> None:
        self.notes.append((threading.current_thread().name, what))

    def stream_of(self, device: Any = None) -> FakeStream:
        self.streams.append(FakeStream(("down", "up")[len(self.streams)], self))
        return self.streams[-1]

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Any:
        self.note(f"copy {stream.name}")
        yield

    def of(self, thread: str) -> list[str]:
        """What a thread did."""
        return [what for name, what in self.notes if name.startswith(thread)]


CUDA: list[FakeCuda] = []


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    CUDA.append(fake)
    compute = FakeStream("compute", fake)
    for name, value in {
        "Stream": fake.stream_of,
        "Event": FakeEvent,
        "stream": fake.stream,
        "current_stream": lambda device=None: compute,
        "set_device": lambda device: fake.note(f"set_device {device}"),
        "current_device": lambda: 3,
        "is_available": lambda: fake.gpus > 0,
        "device_count": lambda: fake.gpus,
        "is_current_stream_capturing": lambda: False,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    yield fake
    CUDA.pop()


# ---------------------------------------------------------------------- which device


@pytest.mark.parametrize("named", [None, "cuda", torch.device("cuda")])
def test_a_device_without_an_index_is_the_ranks_own(cuda, named):
    assert own_device(named, RankInfo(local_rank=5)) == torch.device("cuda", 5)
    assert own_device(named, RankInfo(local_rank=9)) == torch.device("cuda", 1)


def test_a_device_with_an_index_is_that_one(cuda):
    for named in ("cuda:2", torch.device("cuda", 2)):
        assert own_device(named, RankInfo(local_rank=5)) == torch.device("cuda", 2)
    assert own_device("cpu", RankInfo(local_rank=5)) == torch.device("cpu")


def test_no_device_is_the_gpu_that_the_environment_leaves(cuda, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert own_device(None, RankInfo(local_rank=5)) == torch.device("cpu")
    assert own_device("cuda", RankInfo(local_rank=5)) == torch.device("cuda", 5)


@pytest.mark.parametrize(("named", "gpus"), [("cuda", 0), ("cuda:0", 0), ("cuda:8", 8)])
def test_a_gpu_that_is_not_there_is_an_error_that_says_how_many_are(cuda, named, gpus):
    cuda.gpus = gpus
    with pytest.raises(UsageError, match=rf"'{named}': torch finds {gpus} CUDA devices"):
        Engine(nn.Linear(2, 2), config={"train_batch_size": 1}, device=named)


# ---------------------------------------------------------------------- threads


def test_the_update_thread_selects_its_device_before_anything_else(cuda):
    behind = AsyncUpdateWorker(torch.device("cuda", 3), threads=1, delayed=False)
    transfer = mock.Mock(is_edited=False, is_skipped=True)
    transfer.wait.side_effect = lambda: cuda.note("waits")
    behind.submit(mock.Mock(), mock.Mock(), transfer, [])()
    behind.close()
    assert cuda.of("zeroshard-update") == ["set_device cuda:3", "waits"]


def test_the_sentinel_selects_the_device_that_it_asks_for_events(cuda, tmp_path):
    recorder = Recorder(recording=tmp_path / "0")
    recorder.watch_device()
    recorder.note_pending(recorder.enter(recorder.entries("x")["y"], torch.ones(1), 1, 0))
    peer = Peer(0, this_process(), str(tmp_path / "0"))
    store = torch.distributed.HashStore()
    trust = WatchdogSettings(tick_s=0.01)
    watchdog = Watchdog(store, rank=0, ranks=[0], recording=tmp_path / PRESENCE, trust=trust)
    asked = threading.Event()
    with mock.patch.object(FakeEvent, "query", lambda _: [cuda.note("query"), asked.set()]):
        part = calls_of(recorder, "x", trust, peers={0: peer})
        session_watch = SessionWatch(watchdog, "x", trust, {0: peer}, [part])
        assert asked.wait(10)
    session_watch.close()
    recorder.close()
    assert cuda.of("zeroshard-sentinel")[:2] == ["set_device 3", "query"]


# ---------------------------------------------------------------------- races


def test_a_copy_up_is_behind_the_current_stream_unless_it_is_known_to_be_free(cuda):
    streams = CudaCopyStreams(torch.device("cpu"))
    streams.h2d(torch.ones(2), torch.zeros(2))
    streams.h2d(torch.ones(2), torch.zeros(2), at_once=True)
    assert cuda.of("Main") == ["up waits for compute", "copy up", "copy up"]


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_every_copy_to_the_device_that_the_main_thread_starts_is_behind_its_kernels(
    cuda, stage, delayed
):
    """Parameters after an update, and gradients that are needed again: forward and backward may still
    use the memory that they go to. The update's own thread has waited for the gradient instead."""
    config = {
        "train_batch_size": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": {"device": "cpu", "delayed_update": delayed},
        },
    }
    model = nn.Linear(3, 3, bias=False)
    cuda.gpus = 0  # no memory to lock pages of
    with (
        mock.patch.object(build, "has_copy_streams", lambda _device: True),
        mock.patch.object(
            stores, "make_copy_streams", lambda device, *, copies: CudaCopyStreams(device)
        ),
        Engine(model, config=config, device="cpu") as engine,
    ):
        for _ in range(3):
            for _ in range(2):
                engine.backward(engine(torch.ones(2, 3).bfloat16()).float().square().mean())
            assert safe_get_full_grad(model.weight).isfinite().all()
            engine.step()
        engine(torch.ones(2, 3).bfloat16())
    main = cuda.of("Main")
    ups = [at for at, what in enumerate(main) if what == "copy up"]
    assert len(ups) == (3 if delayed else 7)
    assert {main[at - 1] for at in ups} == {"up waits for compute"}
    worker = cuda.of("zeroshard-update")
    assert "up waits for compute" not in worker
    assert ("copy up" in worker) != delayed
