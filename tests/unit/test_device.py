"""Which device a rank trains on, what a device is asked, and the errors if it cannot be used.

No accelerator is needed: what torch would say of one is injected.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from zeroshard.comm.connect import DeviceUse, check_devices
from zeroshard.device import accelerator
from zeroshard.device.accelerator import AcceleratorOps, CudaOps, on_stream
from zeroshard.device.choice import (
    accelerator_type,
    current_ops,
    device_of_rank,
    ops_of,
    own_device,
)
from zeroshard.device.ops import DeviceOps, HostFlag
from zeroshard.device.pinned import HostArena, host_bytes, refusal_text
from zeroshard.errors import LaunchError, UsageError

CPU, CUDA, XPU = torch.device("cpu"), torch.device("cuda", 1), torch.device("xpu", 1)
TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver "
    "by downloading and installing a new version."
)


@pytest.fixture
def pretend(monkeypatch):
    """Pretend that torch was built for a kind of accelerator, of which the host has ``count``."""

    def pretended(kind: str | None, count: int = 8, refusal: str = "") -> None:
        def init() -> None:
            if refusal:
                raise RuntimeError(refusal)

        found = None if kind is None else torch.device(kind)
        module = SimpleNamespace(is_available=lambda: count > 0, device_count=lambda: count)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: found)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch, "get_device_module", lambda _kind: module)
        monkeypatch.setattr(torch.cuda, "init", init)

    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    return pretended


# ---------------------------------------------------------------------- which device


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_a_rank_trains_on_the_accelerator_with_its_number(pretend, kind):
    pretend(kind, count=4)
    assert device_of_rank(1) == torch.device(kind, 1)
    assert own_device(None, 6) == torch.device(kind, 2)
    assert own_device(torch.device(kind), 3) == torch.device(kind, 3)


@pytest.mark.parametrize(("kind", "count"), [(None, 0), ("cuda", 0), ("mps", 1)])
def test_without_an_accelerator_with_streams_ranks_train_on_the_cpu(pretend, kind, count):
    pretend(kind, count=count)
    assert accelerator_type() is None
    assert device_of_rank(3) == CPU


def test_the_environment_can_ask_for_the_cpu(pretend, monkeypatch):
    pretend("cuda", count=0, refusal=TOO_OLD)
    assert accelerator_type({"DS_ACCELERATOR": "CPU"}) is None


@pytest.mark.parametrize(
    ("count", "refusal", "found"),
    [
        (2, "", "2 CUDA devices here (cuda:0 to cuda:1)"),
        (1, "", "1 CUDA devices here (cuda:0)"),
        (0, "No CUDA GPUs are available", "0 CUDA devices here (No CUDA GPUs are available)"),
        (
            0,
            TOO_OLD,
            "0 CUDA devices here (The NVIDIA driver on your system is too old (found version 11040))",
        ),
        (0, "", "0 CUDA devices here"),
    ],
)
def test_a_device_that_does_not_exist_is_an_error_that_says_which_do(
    pretend, count, refusal, found
):
    pretend("cuda", count=count, refusal=refusal)
    with pytest.raises(UsageError) as caught:
        own_device("cuda:5", 0)
    assert str(caught.value) == (
        f"device='cuda:5': torch finds {found}. Leave device out, or check CUDA_VISIBLE_DEVICES, the "
        "driver, and whether this build of torch supports CUDA."
    )


def test_a_kind_of_device_that_torch_does_not_know_is_an_error():
    with pytest.raises(UsageError, match="device='xla:0': torch finds 0 XLA devices here"):
        own_device("xla:0", 0)


def test_an_old_driver_is_an_error_and_not_a_run_on_the_cpu(pretend):
    pretend("cuda", count=0, refusal=TOO_OLD)
    with pytest.raises(LaunchError) as caught:
        device_of_rank(0)
    assert str(caught.value) == (
        "This host's GPUs cannot be used: The NVIDIA driver on your system is too old (found version "
        "11040). Update the driver, or install a build of torch for this driver (https://pytorch.org). "
        "To train on the CPU, set DS_ACCELERATOR=cpu."
    )


# ---------------------------------------------------------------------- two ranks, one device


def test_two_ranks_on_one_gpu_are_an_error_with_ranks_device_and_remedy():
    uses = {
        0: DeviceUse("cuda", "cuda:0", "GPU-a", "one"),
        1: DeviceUse("cuda", "cuda:0", "GPU-a", "one"),
        2: DeviceUse("cuda", "cuda:0", "GPU-a", "two"),
        3: DeviceUse("cuda", "cuda:1", "GPU-b", "two"),
    }
    with pytest.raises(LaunchError) as caught:
        check_devices(uses)
    assert str(caught.value) == (
        "Ranks train on the same device: ranks 0,1 (cuda:0, GPU-a). The collectives of devices need a "
        "device for each rank. Start at most one rank for each device of a host, and let each rank use "
        "its own: leave device out, or give it the index LOCAL_RANK. To let ranks share a device, use "
        'gloo: init_distributed(dist_backend="gloo").'
    )


def test_ranks_that_may_share_a_device_or_have_their_own_pass():
    check_devices({rank: DeviceUse("cpu", "cpu", "", "one") for rank in range(4)})
    check_devices({rank: DeviceUse("cuda", "cuda:0", "GPU-a", str(rank)) for rank in range(4)})
    check_devices({rank: DeviceUse("cuda", "cuda:0", f"GPU-{rank}", "one") for rank in range(4)})


# ---------------------------------------------------------------------- operations


def test_each_kind_of_device_has_its_operations():
    assert type(ops_of(CPU)) is DeviceOps
    assert type(ops_of(CUDA)) is CudaOps
    assert type(ops_of(XPU)) is AcceleratorOps
    assert ops_of(torch.device("cuda", 1)) is ops_of(CUDA)


def test_helpers_ask_the_current_device_and_not_that_of_the_rank(pretend, monkeypatch):
    """A program may train on another device than the one with its local rank."""
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    pretend(None)
    assert current_ops() is ops_of(CPU)
    pretend("cuda")
    assert current_ops() is ops_of(CUDA)


def test_a_cpu_has_nothing_to_wait_for():
    ops = ops_of(CPU)
    ops.select(), ops.synchronize(), ops.empty_cache(), ops.record_use(torch.ones(1))
    event = ops.event()
    event.record(), event.synchronize()
    assert event.query() and not ops.is_async and not ops.is_capturing()
    flag = torch.tensor(True)
    assert ops.host_flag(flag) is flag


def test_the_host_sleeps_while_it_waits_for_a_gpu(monkeypatch):
    """Events of CUDA poll by default: the waiting thread would take a core from the update."""
    made = []
    event = mock.Mock(query=lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", lambda **options: made.append(options) or event)
    flag = torch.tensor(True)
    with mock.patch("zeroshard.device.ops.torch.empty", lambda *_, **__: torch.zeros(()).bool()):
        host_flag = ops_of(CUDA).host_flag(flag)
    assert isinstance(host_flag, HostFlag)
    assert bool(host_flag) is True
    assert made == [{"blocking": True}]
    assert event.mock_calls == [mock.call.record(), mock.call.synchronize()]


def test_the_stream_before_is_current_again_also_after_an_error(monkeypatch):
    current = ["compute"]
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _device: current[-1])
    monkeypatch.setattr(torch.accelerator, "set_stream", current.append)
    stream = SimpleNamespace(device=CUDA)
    with pytest.raises(ZeroDivisionError), on_stream(stream):
        assert current[-1] is stream
        _ = 1 / 0
    assert current == ["compute", stream, "compute"]


def test_a_query_ends_no_capture_of_a_graph_on_another_thread(monkeypatch):
    """The driver is told that captures of other threads do not matter to this one."""
    modes = []
    driver = SimpleNamespace(
        cuThreadExchangeStreamCaptureMode=lambda mode: modes.append(
            (threading.current_thread().name, mode._obj.value)
        )
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    accelerator._capture_mode_exchange.cache_clear()
    thread = threading.Thread(target=ops_of(CUDA).tolerate_captures, name="watchdog")
    thread.start()
    thread.join()
    accelerator._capture_mode_exchange.cache_clear()
    assert modes == [("watchdog", 1)]


def test_a_driver_without_that_function_changes_nothing(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", mock.Mock(side_effect=OSError))
    accelerator._capture_mode_exchange.cache_clear()
    ops_of(CUDA).tolerate_captures()
    accelerator._capture_mode_exchange.cache_clear()


# ---------------------------------------------------------------------- host memory


def test_host_memory_for_a_gpu_is_registered_while_it_is_used(monkeypatch):
    runtime = mock.Mock()
    runtime.cudaHostRegister.return_value = runtime.cudaHostUnregister.return_value = 0
    monkeypatch.setattr("zeroshard.device.pinned.host_registrar", lambda: runtime)
    memory = host_bytes(5000, CUDA)
    assert (memory.numel(), memory.data_ptr() % 4096) == (5000, 0)
    runtime.cudaHostRegister.assert_called_once_with(memory.data_ptr(), 8192, 0)
    part = memory[10:]
    del memory
    gc.collect()
    runtime.cudaHostUnregister.assert_not_called()
    del part
    gc.collect()
    runtime.cudaHostUnregister.assert_called_once()


def test_pages_are_there_before_the_driver_locks_them(monkeypatch):
    """The driver would let one core clear them."""
    resident = []

    def register(address: int, nbytes: int, flags: int) -> int:
        inside = False
        for line in open("/proc/self/smaps").read().splitlines():
            if "-" in line.split()[0]:
                begin, end = (int(at, 16) for at in line.split()[0].split("-"))
                inside = begin <= address < end
            elif inside and line.startswith("Rss:"):
                resident.append((int(line.split()[1]) * 1024, end - begin))
        return 0

    runtime = mock.Mock(cudaHostRegister=register)
    runtime.cudaHostUnregister.return_value = 0
    monkeypatch.setattr("zeroshard.device.pinned.host_registrar", lambda: runtime)
    monkeypatch.setattr("zeroshard.device.pinned._PIECE_NBYTES", 1 << 20)
    HostArena(5 << 20, pin=True).close()
    ((rss, mapped),) = resident
    assert rss == mapped >= 5 << 20


def test_refused_memory_is_reported_with_bytes_limits_and_remedy():
    assert refusal_text(3 << 29, 2, "out of memory", "ulimit -l 64 KiB; cgroup limit 2.0 GiB") == (
        "1610612736 bytes (1.5 GiB) of host memory could not be page-locked: cudaHostRegister gave "
        "error 2 (out of memory). Limits here: ulimit -l 64 KiB; cgroup limit 2.0 GiB. Copies to and "
        "from the GPU will be slower and will not overlap with computation. Raise the limit of locked "
        "memory (ulimit -l unlimited, in a container --ulimit memlock=-1) or of the cgroup, or write "
        '"pin_memory": false to use memory that is not page-locked.'
    )


def test_the_generator_of_a_device_is_seeded_and_read_by_one_interface(monkeypatch):
    module = mock.Mock()
    module.get_rng_state.return_value = torch.ones(4, dtype=torch.uint8)
    monkeypatch.setattr(accelerator.torch, "get_device_module", lambda device: module)
    ops = ops_of(XPU)
    ops.set_rng_state(ops.rng_state())
    assert module.mock_calls[0] == mock.call.get_rng_state(XPU)
    assert module.set_rng_state.call_args.args[1] == XPU
    assert ops_of(CPU).rng_state() is None
