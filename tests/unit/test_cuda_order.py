"""Every CUDA operation comes after those that it depends on, on the right device. No GPU is needed.

The CUDA streams are fakes. They only record which stream waits for which. Copies happen at once.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from zeroshard import Engine
from zeroshard.comm.host import this_process
from zeroshard.comm.recorder import Recorder
from zeroshard.device.accelerator import AcceleratorOps, CudaOps
from zeroshard.device.choice import ops_of, own_device
from zeroshard.device.copy_streams import CudaCopyStreams
from zeroshard.engine import build_runtime
from zeroshard.errors import UsageError
from zeroshard.offload import stores
from zeroshard.offload.async_update import AsyncUpdateWorker
from zeroshard.run.recordings import PRESENCE
from zeroshard.session.groups import SessionWatch
from zeroshard.watchdog.run_record import Peer, Peers
from zeroshard.watchdog.settings import WatchdogSettings
from zeroshard.watchdog.tracked_calls import calls_of
from zeroshard.watchdog.watchdog import Watchdog
from zeroshard.zero import safe_get_full_grad


@dataclass(eq=False)
class FakeStream:
    name: str
    cuda: FakeCuda
    device: Any = None

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.note(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None: ...

    def is_capturing(self) -> bool:
        return False

    def wait_event(self, event: Any) -> None:
        self.cuda.note(f"{self.name} waits for an event")


class FakeEvent:
    def __init__(self, *args: Any, **options: Any) -> None: ...

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

    def set_stream(self, stream: FakeStream) -> None:
        if stream.name != "compute":
            self.note(f"copy {stream.name}")

    def of(self, thread: str) -> list[str]:
        """The calls of a thread."""
        return [what for name, what in self.notes if name.startswith(thread)]


CUDA: list[FakeCuda] = []


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    CUDA.append(fake)
    compute = FakeStream("compute", fake)
    for name, value in {
        "Event": FakeEvent,
        "is_available": lambda: fake.gpus > 0,
        "device_count": lambda: fake.gpus,
        "is_current_stream_capturing": lambda: False,
        "current_stream": lambda device=None: compute,
        "Stream": fake.stream_of,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name, value in {
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_stream": lambda device=None: compute,
        "set_stream": fake.set_stream,
        "set_device_index": lambda device: fake.note(f"set_device {device}"),
    }.items():
        monkeypatch.setattr(torch.accelerator, name, value)
    monkeypatch.setattr(AcceleratorOps, "record_use", lambda ops, tensor: None)  # of the CPU here
    yield fake
    CUDA.pop()


# ---------------------------------------------------------------------- which device


@pytest.mark.parametrize("named", [None, "cuda", torch.device("cuda")])
def test_a_device_without_an_index_is_the_ranks_own(cuda, named):
    assert own_device(named, 5) == torch.device("cuda", 5)
    assert own_device(named, 9) == torch.device("cuda", 1)


def test_a_device_with_an_index_is_that_one(cuda):
    for named in ("cuda:2", torch.device("cuda", 2)):
        assert own_device(named, 5) == torch.device("cuda", 2)
    assert own_device("cpu", 5) == torch.device("cpu")


def test_no_device_is_the_gpu_that_the_environment_leaves(cuda, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert own_device(None, 5) == torch.device("cpu")
    assert own_device("cuda", 5) == torch.device("cuda", 5)


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


def test_the_watchdog_selects_the_device_that_it_asks_for_events(cuda, tmp_path):
    recorder = Recorder(recording=tmp_path / "0")
    recorder.watch_device(ops_of(torch.device("cuda", 3)))
    recorder.note_pending(recorder.enter(recorder.entries("x")["y"], torch.ones(1), 1, 0))
    peer = Peer(0, this_process(), str(tmp_path / "0"))
    store = torch.distributed.HashStore()
    settings = WatchdogSettings(tick_s=0.01)
    watchdog = Watchdog(store, rank=0, ranks=[0], recording=tmp_path / PRESENCE, settings=settings)
    asked = threading.Event()
    with (
        mock.patch.object(FakeEvent, "query", lambda _: [cuda.note("query"), asked.set()]),
        mock.patch.object(CudaOps, "tolerate_captures", lambda _: cuda.note("tolerates captures")),
    ):
        part = calls_of(recorder, "x", settings, peers={0: peer})
        session_watch = SessionWatch(watchdog, "x", settings, Peers({0: peer}, [0]), [part])
        assert asked.wait(10)
    session_watch.close()
    recorder.close()
    assert cuda.of("zeroshard-watchdog")[:3] == [
        "set_device cuda:3",
        "tolerates captures",  # a query would end the capture of a graph on the program's thread
        "query",
    ]


def test_events_of_collectives_that_have_ended_are_used_again(cuda):
    recorder = Recorder()
    recorder.watch_device(ops_of(torch.device("cuda", 3)))
    item = recorder.enter(recorder.entries("x")["y"], torch.ones(1), 1, 0)
    with mock.patch.object(torch.cuda, "Event", mock.Mock(side_effect=FakeEvent)) as made:
        for _ in range(3):
            for _ in range(4):
                recorder.note_pending(item)
            assert len(recorder.pending) == 4
            assert recorder.oldest_pending() is None
    assert made.call_count == 4


# ---------------------------------------------------------------------- races


def test_a_copy_up_is_behind_the_current_stream_unless_it_is_known_to_be_free(cuda):
    streams = CudaCopyStreams(torch.device("cuda", 0))
    streams.h2d(torch.ones(2), torch.zeros(2))
    streams.h2d(torch.ones(2), torch.zeros(2), at_once=True)
    assert cuda.of("Main") == ["up waits for compute", "copy up", "copy up"]


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_every_copy_to_the_device_that_the_main_thread_starts_is_behind_its_kernels(
    cuda, stage, delayed
):
    """Copies of updated parameters, and of gradients that are needed again.

    Forward and backward may still use the memory that they are copied to. The thread of the update need
    not wait for that, since it has waited for the gradient.
    """
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
        mock.patch.object(build_runtime, "has_copy_streams", lambda _device: True),
        mock.patch.object(
            stores,
            "make_copy_streams",
            lambda _device, *, copies: CudaCopyStreams(torch.device("cuda", 0)),
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
