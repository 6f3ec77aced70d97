"""What a rank asks of its device: streams, events, waits, pinned memory, generators and facts.

:class:`DeviceOps` serves the CPU, where work is done when a call returns, so most methods do nothing.
:class:`~zeroshard.device.accelerator.AcceleratorOps` serves every accelerator that ``torch.accelerator``
knows, and :class:`~zeroshard.device.accelerator.CudaOps` adds what only CUDA has. An object that needs
the device gets the ops of its device when it is built (:func:`zeroshard.device.choice.ops_of`). From then
on it does not ask which kind of device that is.

[Note: aborted collectives] When a rank is lost, the collectives that wait for it never end, and with
them every host wait for the device. So the watchdog aborts the communicators. The device then goes on
with what the buffers contain, and the waits end as if all was well: a gloo collective would raise an
error, a wait for an event cannot. The watchdog has its diagnosis before it aborts anything. So each wait
after which the host reads a value asks for it (:meth:`DeviceOps.raise_if_aborted`). Waits before memory
is freed do not ask: an engine must be able to close.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in a stream: what was queued before :meth:`record`."""

    def record(self, stream: Any = None) -> None:
        """Move the event to the end of ``stream``; None: of the current stream."""

    def query(self) -> bool:
        """Whether the device has reached the event. Does not wait."""

    def synchronize(self) -> None:
        """Block this thread until the device has reached the event."""


class Reached:
    """The event of a CPU: its work is done when a call returns."""

    __slots__ = ()

    def record(self, stream: Any = None) -> None:
        """Nothing to record."""

    def query(self) -> bool:
        """True."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""


_REACHED = Reached()


@dataclass(frozen=True)
class DevicePool:
    """Memory of a CUDA device that is apart from all other memory. ``handle``: torch's object."""

    handle: Any
    device: torch.device

    def use(self) -> contextlib.AbstractContextManager[object]:
        """A context in which the calling thread allocates from the pool."""
        return torch.cuda.use_mem_pool(self.handle, self.device)


class WaitGuard(Protocol):
    """Knows whether collectives of the device were aborted. See [Note: aborted collectives]."""

    def check_wait(self) -> None:
        """Raise the reason, if they were."""


class HostFlag:
    """A 0-dim flag of an accelerator on its way to the host. Reading it waits only for that copy."""

    def __init__(self, flag: Tensor, event: Event, check: Callable[[], None]) -> None:
        """``check``: :meth:`DeviceOps.raise_if_aborted` of the device of ``flag``."""
        self._flag = torch.empty((), dtype=flag.dtype, pin_memory=True)
        self._flag.copy_(flag, non_blocking=True)
        self._arrival = event
        self._arrival.record()
        self._check = check

    def __bool__(self) -> bool:
        self._arrival.synchronize()
        self._check()
        return bool(self._flag)


class HostValues:
    """Numbers of some tensors on the host, in order, as Python's floats."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._numbers: list[float] = torch.cat([each.view(-1) for each in tensors]).tolist()

    def is_ready(self) -> bool:
        """Whether they have arrived. Does not wait."""
        return True

    def read(self) -> list[float]:
        """The numbers. Waits for them if they have not arrived."""
        return self._numbers


class ArrivingValues(HostValues):
    """Numbers of an accelerator on their way to the host: one copy for all tensors."""

    def __init__(self, tensors: Sequence[Tensor], event: Event, check: Callable[[], None]) -> None:
        """``check``: see :class:`HostFlag`."""
        flat = torch.cat([each.view(-1) for each in tensors])  # in the widest of their dtypes
        self._flat = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        self._flat.copy_(flat, non_blocking=True)
        self._arrival = event
        self._arrival.record()
        self._check = check

    def is_ready(self) -> bool:
        return self._arrival.query()

    def read(self) -> list[float]:
        self._arrival.synchronize()
        self._check()
        return [float(number) for number in self._flat.tolist()]


class Mark:
    """A point in time of the device. On the CPU: now."""

    __slots__ = ("_s",)

    def __init__(self) -> None:
        self._s = time.perf_counter()

    def is_reached(self) -> bool:
        """Whether the device has come to it. Does not wait."""
        return True

    def seconds_since(self, earlier: Any) -> float:
        """Seconds from another mark of the same device, which must be reached, to this one."""
        return float(self._s - earlier._s)


class DeviceMark(Mark):
    """A point in the current stream of an accelerator."""

    __slots__ = ("_event",)

    def __init__(self, event: Any) -> None:
        """``event``: a new one that measures time."""
        self._event = event
        self._event.record()

    def is_reached(self) -> bool:
        return bool(self._event.query())

    def seconds_since(self, earlier: Any) -> float:
        return 1e-3 * float(earlier._event.elapsed_time(self._event))


class DeviceOps:
    """The operations of one device. The methods of this class serve the CPU."""

    is_async = False
    """Whether a call may return before its work is done."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Replaced as a whole, because threads read it at any time.
        self._guards: tuple[weakref.ref[WaitGuard], ...] = ()

    # ------------------------------------------------------------------ aborted collectives

    def guard_waits(self, guard: WaitGuard) -> None:
        """Ask ``guard`` after each wait whose values the host reads. Does not keep it alive."""
        alive = (ref for ref in self._guards if ref() is not None)
        self._guards = (*alive, weakref.ref(guard))

    def raise_if_aborted(self) -> None:
        """To be called after a wait for the device, before a value is read that it has computed.

        Raises:
            DistributedError: collectives of this device were aborted, so the value may be garbage.
        """
        for ref in self._guards:
            if (guard := ref()) is not None:
                guard.check_wait()

    def read(self, tensor: Tensor) -> Any:
        """``tensor.tolist()`` for a tensor of this device. Waits for the device.

        Raises: see :meth:`raise_if_aborted`.
        """
        values = tensor.tolist()
        self.raise_if_aborted()
        return values

    # ------------------------------------------------------------------ order

    def select(self) -> None:
        """Make the device current on this thread. To be called before a thread first uses it.

        The current device of a new thread is the first one of the host. A rank that uses another one
        would create a context of hundreds of MB there, even by creating an event.
        """

    def event(self) -> Event:
        """A new event, for waits of streams and for queries."""
        return _REACHED

    def host_event(self) -> Event:
        """A new event for waits of the host. The waiting thread sleeps instead of polling."""
        return _REACHED

    def tolerate_captures(self) -> None:
        """Let this thread query events without ending a capture of a graph on another thread."""

    def mark(self) -> Mark:
        """The point that the current stream has reached, for measurements of time."""
        return Mark()

    def record_use(self, tensor: Tensor) -> None:
        """Keep the memory of ``tensor`` from other uses until the current stream has used it."""

    def synchronize(self) -> None:
        """Block this thread until all work of the device is done."""

    def is_capturing(self) -> bool:
        """Whether the current stream is captured into a graph. Events may not be queried then."""
        return False

    # ------------------------------------------------------------------ memory

    def host_flag(self, flag: Tensor) -> HostFlag | Tensor:
        """A 0-dim ``flag``, to be read later. Reading it waits for the flag and for nothing else."""
        return flag

    def host_values(self, tensors: Sequence[Tensor]) -> HostValues:
        """The numbers of some tensors of the device, to be read later."""
        return HostValues(tensors)

    def memory_pool(self, allocator: Any) -> DevicePool | None:
        """A pool with memory of torch's ``allocator``. None: there are no pools for this device."""
        return None

    def empty_cache(self) -> None:
        """Return the unused memory of torch's allocator to the device."""

    def total_nbytes(self) -> int:
        """Bytes of the device's memory, as its driver counts them. 0 on the CPU."""
        return 0

    def free_nbytes(self) -> int:
        """Free bytes of the device's memory, as its driver counts them. 0 on the CPU."""
        return 0

    def allocatable_nbytes(self) -> int:
        """Bytes that torch can still give: free ones, and those that it keeps. 0 on the CPU."""
        return 0

    def memory_in_use(self) -> tuple[int, int] | None:
        """Bytes that tensors occupy now, and at most so far. None: the device has no counter."""
        return None

    # ------------------------------------------------------------------ generator

    def manual_seed(self, seed: int) -> None:
        """Seed the device's own generator."""

    def rng_state(self) -> Tensor | None:
        """The state of the device's own generator, uint8 ``[n]``. None: it is that of the CPU."""
        return None

    def set_rng_state(self, state: Tensor) -> None:
        """Set the state of the device's own generator."""

    # ------------------------------------------------------------------ facts

    def identity(self) -> str:
        """A name for the device that no other device of this host has; "" for the CPU."""
        return ""

    def product(self) -> str:
        """The maker's name for the device, or its kind if torch does not know a name."""
        return self.device.type

    def profiler_range(self, name: str) -> contextlib.AbstractContextManager[object]:
        """A context that profilers of the device show as a range called ``name``."""
        return contextlib.nullcontext()

    def multiplies_bf16(self) -> tuple[bool, str] | None:
        """Whether the device multiplies bf16 in hardware, and the reason in words.

        None: it is the CPU, which :mod:`zeroshard.precision.hardware` knows.
        """
        return None
