"""The operations of an accelerator, and what only CUDA has.

:class:`AcceleratorOps` is as far as torch has one name for all of them (``torch.accelerator``).
:class:`CudaOps` adds events that the host sleeps on, registered host memory, capability and capture.

[Note: current stream] ``with torch.Stream(...)`` keeps the previous stream in the stream object, so two
threads may not enter one stream. Here :func:`on_stream` keeps it on the Python stack.

[Note: one family] Torch has two families of streams and events, which share base classes and check no
types. ``torch.Stream.wait_event`` waits for the generic event inside a ``torch.cuda.Event``, which nobody
has recorded, so it returns at once and nothing is ordered; ``torch.cuda.Event.record`` reads past the end
of a ``torch.Stream``. Only ``torch.cuda.Event`` lets the host sleep, so all streams and events of a CUDA
device are made by :class:`CudaOps`, from ``torch.cuda``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor

from zeroshard.device.ops import (
    ArrivingValues,
    DeviceMark,
    DeviceOps,
    DevicePool,
    Event,
    HostFlag,
    HostValues,
    Mark,
)


class AcceleratorOps(DeviceOps):
    """The operations of an accelerator that ``torch.accelerator`` knows. ``device`` has an index."""

    is_async = True

    def select(self) -> None:
        torch.accelerator.set_device_index(self.device)

    def current_stream(self) -> torch.Stream:
        """The stream that this thread queues work on."""
        return torch.accelerator.current_stream(self.device)

    def new_stream(self) -> torch.Stream:
        """A stream whose work runs beside that of other streams."""
        return torch.Stream(self.device)

    def event(self) -> Event:
        return self._new_event()

    def host_event(self) -> Event:
        """See :class:`DeviceOps`. Whether the thread sleeps is up to the backend."""
        return self._new_event(blocking=True)

    def mark(self) -> Mark:
        return DeviceMark(self._new_event(enable_timing=True))

    def _new_event(self, **options: bool) -> Event:
        """An event of the family of :meth:`new_stream`; see [Note: one family]."""
        return torch.Event(self.device, **({"enable_timing": False} | options))

    def record_use(self, tensor: Tensor) -> None:
        tensor.record_stream(self.current_stream())

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)

    def host_flag(self, flag: Tensor) -> HostFlag | Tensor:
        """See :class:`DeviceOps`. The copy is queued behind the work that computes ``flag``."""
        return HostFlag(flag, self.host_event(), self.raise_if_aborted)

    def host_values(self, tensors: Sequence[Tensor]) -> HostValues:
        """See :class:`DeviceOps`. The copy is queued behind the work that computes them."""
        return ArrivingValues(tensors, self.host_event(), self.raise_if_aborted)

    def empty_cache(self) -> None:
        torch.accelerator.empty_cache()

    def total_nbytes(self) -> int:
        _, total = torch.accelerator.get_memory_info(self.device)
        return int(total)

    def free_nbytes(self) -> int:
        free, _ = torch.accelerator.get_memory_info(self.device)
        return int(free)

    def allocatable_nbytes(self) -> int:
        kept = torch.accelerator.memory_reserved(self.device)
        return self.free_nbytes() + int(kept - torch.accelerator.memory_allocated(self.device))

    def memory_in_use(self) -> tuple[int, int] | None:
        memory = torch.accelerator
        return memory.memory_allocated(self.device), memory.max_memory_allocated(self.device)

    def manual_seed(self, seed: int) -> None:
        module = torch.get_device_module(self.device)
        with torch.accelerator.device_index(self.device.index):
            module.manual_seed(seed)

    def rng_state(self) -> Tensor | None:
        state: Tensor = torch.get_device_module(self.device).get_rng_state(self.device)
        return state

    def set_rng_state(self, state: Tensor) -> None:
        torch.get_device_module(self.device).set_rng_state(state, self.device)

    def identity(self) -> str:
        return str(self.device)

    def product(self) -> str:
        name = getattr(torch.get_device_module(self.device), "get_device_name", None)
        return self.device.type if name is None else str(name(self.device))

    def multiplies_bf16(self) -> tuple[bool, str] | None:
        return True, f"a device of type {self.device.type}"


@contextlib.contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """Queue the work of this thread on ``stream`` inside the context. Its device is current already."""
    outer = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(outer)


class CudaOps(AcceleratorOps):
    """The operations of a CUDA device, or of a ROCm device, which torch calls CUDA too."""

    def current_stream(self) -> torch.cuda.Stream:
        """The stream that this thread queues work on."""
        return torch.cuda.current_stream(self.device)

    def new_stream(self) -> torch.cuda.Stream:
        """A stream whose work runs beside that of other streams."""
        return torch.cuda.Stream(self.device)

    def _new_event(self, **options: bool) -> Event:
        """See :class:`AcceleratorOps`. With ``blocking`` the host sleeps: others occupy a core."""
        return torch.cuda.Event(**options)

    def tolerate_captures(self) -> None:
        """See :class:`DeviceOps`. Otherwise a query on any thread would end a capture on another one."""
        exchange = _capture_mode_exchange()
        if exchange is not None:
            exchange(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def memory_pool(self, allocator: Any) -> DevicePool | None:
        """See :class:`DeviceOps`. Its first allocation raises if segments of memory can grow."""
        return DevicePool(torch.cuda.MemPool(allocator), self.device)

    def identity(self) -> str:
        """See :class:`DeviceOps`. Parts of one GPU (MIG) have different names."""
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def profiler_range(self, name: str) -> AbstractContextManager[object]:
        """See :class:`DeviceOps`. The profiler is NVIDIA's."""
        return torch.cuda.nvtx.range(name)

    def multiplies_bf16(self) -> tuple[bool, str] | None:
        capability = torch.cuda.get_device_capability(self.device)
        return multiplies_bf16(capability, rocm=torch.version.hip is not None)


_THREAD_LOCAL = 1  # the capture mode in which captures of other threads do not matter
_EXCHANGES = (
    ("libcuda.so.1", "cuThreadExchangeStreamCaptureMode"),
    ("libamdhip64.so", "hipThreadExchangeStreamCaptureMode"),
)


@functools.cache
def _capture_mode_exchange() -> Any | None:
    """The driver's function that sets a thread's capture mode, for which torch has none."""
    for library, function in _EXCHANGES:
        with suppress(OSError, AttributeError):
            return getattr(ctypes.CDLL(library), function)
    return None


def multiplies_bf16(capability: tuple[int, int], *, rocm: bool) -> tuple[bool, str]:
    """Whether a GPU of this compute capability multiplies bf16 in hardware, and the reason in words."""
    major, minor = capability
    if rocm or major >= 8:
        return True, "this GPU multiplies bf16"
    return False, f"this GPU (compute capability {major}.{minor}) has no bf16 instructions"


def host_registrar() -> Any | None:
    """The CUDA runtime, which page-locks memory that others allocated. None: there is no CUDA device."""
    return torch.cuda.cudart() if torch.cuda.is_available() else None


def is_initialized() -> bool:
    """Whether this process uses CUDA already. Its forked children cannot."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def why_unusable() -> str:
    """Why torch cannot use CUDA here, in torch's words; "" if it can."""
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        return str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
    return ""


def forget_error() -> None:
    """Clear the error code of a failed CUDA call, or the next kernel would report it."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")
