"""``torch.cuda``, ``torch.accelerator``, ``torch.Stream`` and ``torch.Event`` of the pretended machine.

Only what talks to the driver is replaced. Both families of functions act on the same machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from zeroshard_testing.streams.clocks import Clock
from zeroshard_testing.streams.machine import Machine, StreamLine
from zeroshard_testing.streams.patches import Patches
from zeroshard_testing.streams.pools import pools_of
from zeroshard_testing.streams.tensor_patches import number_of
from zeroshard_testing.streams.tensors import Storages

if TYPE_CHECKING:
    from typing_extensions import Self

_machine: list[Machine] = []
"""The machine of the running :func:`pretend_cuda`: streams and events are made without naming it."""


class Stream:
    """``torch.Stream``. Nothing orders a new stream with others.

    The rules are those of ``torch/csrc/Stream.cpp``, which checks no types.
    """

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        machine = _machine[-1]
        number = machine.thread().device if device is None else number_of(device, machine)
        assert number is not None, device
        with machine.lock:
            self._set(machine.new_stream(number), priority)
        self._entered: list[AbstractContextManager[None]] = []

    def _set(self, line: StreamLine, priority: int = 0) -> None:
        self.line = line
        self.priority = priority
        self.device = torch.device("cuda", line.device)
        self.device_index = line.device
        self.device_type = 1
        self.stream_id = self.native_handle = line.number

    @classmethod
    def of(cls, line: StreamLine) -> Self:
        """The object of a stream that exists."""
        stream = cls.__new__(cls)
        stream._set(line)
        stream._entered = []
        return stream

    def wait_stream(self, other: Stream) -> None:
        """Let later work of this stream begin after all work of ``other``, of either family, so far."""
        event = Event()
        event.record(other)
        event.wait(self)

    def wait_event(self, event: Event) -> None:
        """Let later work of this stream begin after ``event``.

        It waits for the generic event inside a ``torch.cuda.Event``, which nobody can record.
        """
        if isinstance(event, CudaEvent):
            machine = _machine[-1]
            with machine.lock:
                machine.report(
                    "family", "torch.Stream.wait_event(torch.cuda.Event) waits for nothing"
                )
        else:
            event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        """An event at the end of the work so far.

        Raises:
            RuntimeError: ``event`` is a ``torch.cuda.Event``, whose generic event is one of the CPU.
        """
        if isinstance(event, CudaEvent):
            raise RuntimeError(
                f"Event device type CPU does not match recording stream's {self.device}"
            )
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Block this thread until all work so far has ended."""
        machine = _machine[-1]
        with machine.lock:
            machine.host_waits("stream", self.line.clock)

    def query(self) -> bool:
        """Whether all work so far has ended."""
        machine = _machine[-1]
        with machine.lock:
            return machine.has_ended(self.line.clock)

    def is_capturing(self) -> bool:
        """No graph is captured on a pretended device."""
        return False

    def __enter__(self) -> Self:
        context = _machine[-1].on_stream(self.line)
        context.__enter__()
        self._entered.append(context)
        return self

    def __exit__(self, *exc: Any) -> None:
        self._entered.pop().__exit__(*exc)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.line is self.line

    def __hash__(self) -> int:
        return hash(self.line)

    def __repr__(self) -> str:
        return f"<pretended {self.line}>"


class CudaStream(Stream):
    """``torch.cuda.Stream``, which takes events of both families (``torch/cuda/streams.py``)."""

    def _set(self, line: StreamLine, priority: int = 0) -> None:
        super()._set(line, priority)
        self.cuda_stream = line.number

    def wait_stream(self, other: Stream) -> None:
        """See :class:`Stream`."""
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        """Let later work of this stream begin after ``event``."""
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        """An event at the end of the work so far."""
        event = event or CudaEvent()
        event.record(self)
        return event

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CudaStream) and other.line is self.line

    __hash__ = Stream.__hash__


class Event:
    """``torch.Event``, which takes streams of both families (``torch/csrc/Event.cpp``).

    Torch accepts ``blocking`` and leaves it out: a thread that waits polls.
    """

    sleeps = False

    def __init__(self, device: Any = None, *, enable_timing: bool = True, **_: Any) -> None:
        del device
        self.measures_time = enable_timing
        self.clock: Clock | None = None
        self.device: torch.device | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Mark the end of the work of ``stream`` so far; default: the current one."""
        machine = _machine[-1]
        with machine.lock:
            line = self._line_of(stream)
            self.clock = machine.record(line)
            self.device = torch.device("cuda", line.device)

    def wait(self, stream: Stream | None = None) -> None:
        """Let later work of ``stream`` begin after this event."""
        machine = _machine[-1]
        with machine.lock:
            machine.stream_waits(self._line_of(stream), self.clock or {})

    def _line_of(self, stream: Stream | None) -> StreamLine:
        machine = _machine[-1]
        return machine.current_stream(machine.thread().device) if stream is None else stream.line

    def synchronize(self) -> None:
        """Block this thread until the work before the event has ended."""
        machine = _machine[-1]
        with machine.lock:
            machine.host_waits("event" if self.sleeps else "polled event", self.clock or {})

    def query(self) -> bool:
        """Whether the work before the event has ended."""
        machine = _machine[-1]
        with machine.lock:
            return self.clock is None or machine.has_ended(self.clock)

    def elapsed_time(self, end: Event) -> float:
        """0: the machine has no clock.

        Raises:
            ValueError: one of the events does not measure time.
        """
        if not (self.measures_time and end.measures_time):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        return 0.0


class CudaEvent(Event):
    """``torch.cuda.Event``. Until pull request 173908 of PyTorch it reads what only a
    ``torch.cuda.Stream`` has (``torch/csrc/cuda/Event.cpp``)."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: Any) -> None:
        super().__init__(enable_timing=enable_timing)
        self.sleeps = blocking

    def _line_of(self, stream: Stream | None) -> StreamLine:
        if stream is not None and not isinstance(stream, CudaStream):
            _machine[-1].report(
                "family",
                "torch.cuda.Event with a torch.Stream needs torch with pull request 173908",
            )
        return super()._line_of(stream)


class _Device:
    """``torch.cuda.device`` and ``torch.accelerator.device_index``: a current device for a block."""

    def __init__(self, device: Any) -> None:
        machine = _machine[-1]
        self._number = None if device is None else number_of(device, machine)
        self._before = 0

    def __enter__(self) -> None:
        thread = _machine[-1].thread()
        self._before = thread.device
        if self._number is not None:
            thread.device, thread.has_device = self._number, True

    def __exit__(self, *_: Any) -> None:
        _machine[-1].thread().device = self._before


class _Cudart:
    """The functions of the CUDA runtime that page-lock host memory."""

    def __init__(self, storages: Storages) -> None:
        self._storages = storages

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        """Page-lock ``nbytes`` at ``address``."""
        del flags
        with self._storages.machine.lock:
            self._storages.register(address, nbytes)
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        """End page-locking; 713 if the memory is not page-locked."""
        with self._storages.machine.lock:
            return 0 if self._storages.unregister(address) else 713

    def cudaGetErrorString(self, code: int) -> str:  # noqa: N802
        """The text of an error."""
        return f"error {int(code)}"

    def cudaGetLastError(self) -> int:  # noqa: N802
        """No error."""
        return 0

    def cudaMemGetInfo(self, device: int) -> tuple[int, int]:  # noqa: N802
        """Free and total bytes."""
        machine = self._storages.machine
        return machine.device_nbytes - machine.live_nbytes[device], machine.device_nbytes


def always(value: Any) -> Callable[..., Any]:
    """A function that gives ``value``, whatever it is called with."""
    return lambda *_, **__: value


class CudaPatches:
    """Replaces the functions of both families."""

    def __init__(self, storages: Storages, patches: Patches) -> None:
        self._storages = storages
        self._machine = storages.machine
        self._patches = patches

    def install(self) -> None:
        """Replace all of them."""
        functions = self._both() | self._random()
        for name, value in (functions | self._of_cuda()).items():
            self._patches.everywhere(torch.cuda, name, value)
        for name, value in (functions | self._of_accelerator()).items():
            if hasattr(torch.accelerator, name):
                self._patches.everywhere(torch.accelerator, name, value)
        for name in ("memory_allocated", "max_memory_allocated", "memory_reserved",
                     "max_memory_reserved", "reset_peak_memory_stats", "empty_cache"):  # fmt: skip
            for module in (torch.cuda.memory, torch.accelerator.memory):
                if hasattr(module, name):
                    self._patches.set(module, name, functions[name])
        self._patches.everywhere(torch, "Stream", Stream)
        self._patches.everywhere(torch, "Event", Event)
        self._patches.everywhere(torch.cuda, "Stream", CudaStream)
        self._patches.everywhere(torch.cuda, "Event", CudaEvent)
        self._patches.set(torch.cuda.streams, "Stream", CudaStream)
        self._patches.set(torch.cuda.streams, "Event", CudaEvent)
        self._patches.everywhere(torch, "Generator", _generator(torch.Generator))
        self._group_by_device()
        self._autocast()

    def _number(self, device: Any) -> int:
        if device is None:
            return self._machine.thread().device
        number = number_of(device, self._machine)
        if number is None:
            raise ValueError(f"Expected a cuda device, but got: {device}")
        return number

    def _both(self) -> dict[str, Any]:
        """The functions that both modules have."""
        machine, number = self._machine, self._number

        def set_stream(stream: Stream) -> None:
            thread = machine.thread()
            thread.device, thread.streams[stream.line.device] = stream.line.device, stream.line

        def synchronize(device: Any = None) -> None:
            with machine.lock:
                machine.host_waits("device", machine.device_clock(number(device)))

        def reset_peak(device: Any = None) -> None:
            machine.peak_nbytes[number(device)] = machine.live_nbytes[number(device)]

        def live(device: Any = None) -> int:
            with machine.lock:
                self._storages.collect()
            return machine.live_nbytes[number(device)]

        return {
            "is_available": always(True),
            "device_count": lambda: machine.devices,
            "set_stream": set_stream,
            "synchronize": synchronize,
            "empty_cache": always(None),
            "memory_allocated": live,
            "memory_reserved": live,
            "max_memory_allocated": lambda device=None: machine.peak_nbytes[number(device)],
            "max_memory_reserved": lambda device=None: machine.peak_nbytes[number(device)],
            "reset_peak_memory_stats": reset_peak,
            "memory_stats": always({}),
        }

    def _set_device(self, device: Any) -> None:
        chosen = (
            torch.device(device) if not isinstance(device, int) else torch.device("cuda", device)
        )
        if chosen.type != "cuda" or chosen.index is None:
            raise ValueError(f"Expected a torch.device with a specified index, but got: {chosen}")
        thread, number = self._machine.thread(), self._number(device)
        thread.device, thread.has_device = number, True

    def _of_cuda(self) -> dict[str, Any]:
        machine, number = self._machine, self._number

        def current_stream(device: Any = None) -> CudaStream:
            return CudaStream.of(machine.current_stream(number(device)))

        def default_stream(device: Any = None) -> CudaStream:
            return CudaStream.of(machine.default_stream(number(device)))

        @contextmanager
        def on(stream: Stream | None) -> Iterator[None]:
            with ExitStack() as stack:
                if stream is not None:
                    stack.enter_context(machine.on_stream(stream.line))
                yield

        properties = SimpleNamespace(
            name="pretended device", major=9, minor=0, total_memory=machine.device_nbytes,
            multi_processor_count=132, warp_size=32, max_threads_per_multi_processor=2048,
            L2_cache_size=50 << 20, shared_memory_per_block_optin=227 << 10, is_integrated=0,
            regs_per_multiprocessor=65536, gcnArchName="", uuid="pretended",
        )  # fmt: skip
        return {
            "is_initialized": always(True),
            "init": always(None),
            "_lazy_init": always(None),
            "current_device": lambda: machine.thread().device,
            "set_device": self._set_device,
            "device": _Device,
            "device_of": lambda tensor: _Device(tensor.device if tensor.is_cuda else None),
            "current_stream": current_stream,
            "default_stream": default_stream,
            "stream": on,
            "StreamContext": on,
            "is_current_stream_capturing": always(False),
            "is_bf16_supported": always(True),
            "get_device_capability": always((9, 0)),
            "get_device_name": always("pretended device"),
            "get_device_properties": always(properties),
            "mem_get_info": lambda device=None: (
                machine.device_nbytes - machine.live_nbytes[number(device)],
                machine.device_nbytes,
            ),
            "ipc_collect": always(None),
            "can_device_access_peer": always(True),
            "cudart": lambda: _Cudart(self._storages),
            "host_memory_stats": always({}),
            **pools_of(machine),
        }

    def _of_accelerator(self) -> dict[str, Any]:
        machine = self._machine

        def set_index(device: Any) -> None:
            self._set_device(torch.device("cuda", self._number(device)))

        def current_stream(device: Any = None) -> Stream:
            return Stream.of(machine.current_stream(self._number(device)))

        return {
            "current_stream": current_stream,
            "current_accelerator": always(torch.device("cuda")),
            "current_device_index": lambda: machine.thread().device,
            "current_device_idx": lambda: machine.thread().device,
            "set_device_index": set_index,
            "set_device_idx": set_index,
            "device_index": _Device,
            "empty_host_cache": always(None),
            "get_memory_info": lambda device=None: (
                machine.device_nbytes - machine.live_nbytes[self._number(device)],
                machine.device_nbytes,
            ),
        }

    def _random(self) -> dict[str, Any]:
        """The generators of devices are the one of the host, since operators run there."""
        return {
            "manual_seed": always(None),
            "manual_seed_all": always(None),
            "seed": always(None),
            "seed_all": always(None),
            "initial_seed": torch.initial_seed,
            "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
            "get_rng_state_all": lambda: [
                torch.zeros(16, dtype=torch.uint8) for _ in range(self._machine.devices)
            ],
            "set_rng_state": always(None),
            "set_rng_state_all": always(None),
        }

    def _group_by_device(self) -> None:
        """Optimizers of torch group tensors by device in C++, which sees host memory only."""
        old: Callable[..., Any] = torch._C._group_tensors_by_device_and_dtype
        device_of = self._storages.device_of

        def group(lists: Any, with_indices: bool = False) -> Any:
            found = old(lists, with_indices)
            renamed = {}
            for (device, dtype), (tensors, indices) in found.items():
                first = next((t for column in tensors for t in column if t is not None), None)
                place = device if first is None else device_of(first)
                renamed[place, dtype] = (tensors, indices)
            return renamed

        self._patches.set(torch._C, "_group_tensors_by_device_and_dtype", group)

    def _autocast(self) -> None:
        """Operators run on the host, so its autocast is the one that changes dtypes."""
        old = torch.autocast.__init__

        def init(self_: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
            old(self_, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

        self._patches.set(torch.autocast, "__init__", init)


def _generator(old: Any) -> Any:
    """Generators of a pretended device are generators of the host."""

    class Kind(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, old)

        def __call__(cls, device: Any = "cpu") -> Any:
            return old(device="cpu" if torch.device(device).type == "cuda" else device)

    return Kind("Generator", (), {})


@contextmanager
def chosen(machine: Machine) -> Iterator[None]:
    """A context in which new streams and events belong to ``machine``."""
    _machine.append(machine)
    try:
        yield
    finally:
        _machine.pop()
