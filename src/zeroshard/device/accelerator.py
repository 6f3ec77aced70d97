"""The operations of an accelerator, as far as torch has one name for all of them (``torch.accelerator``).

[Note: current stream] ``with torch.Stream(...)`` keeps the previous stream in the stream object, so two
threads may not enter one stream. Here :func:`on_stream` keeps it on the Python stack.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from zeroshard.device.ops import (
    ArrivingValues,
    DeviceMark,
    DeviceOps,
    Event,
    HostFlag,
    HostValues,
    Mark,
)


class AcceleratorOps(DeviceOps):
    """The operations of an accelerator that ``torch.accelerator`` knows. ``device`` has an index."""

    is_async = True

    def select(self) -> None:
        """See :class:`DeviceOps`."""
        torch.accelerator.set_device_index(self.device)

    def current_stream(self) -> torch.Stream:
        """The stream that this thread queues work on."""
        return torch.accelerator.current_stream(self.device)

    def new_stream(self) -> torch.Stream:
        """A stream whose work runs beside that of other streams."""
        return torch.Stream(self.device)

    def event(self) -> Event:
        """See :class:`DeviceOps`."""
        return self._new_event()

    def host_event(self) -> Event:
        """See :class:`DeviceOps`. Whether the thread sleeps is up to the backend."""
        return self._new_event(blocking=True)

    def mark(self) -> Mark:
        """See :class:`DeviceOps`."""
        return DeviceMark(self._new_event(enable_timing=True))

    def _new_event(self, **options: bool) -> Event:
        """An event of the family of :meth:`new_stream`; see [Note: one family] in ``cuda.py``."""
        return torch.Event(self.device, **({"enable_timing": False} | options))

    def record_use(self, tensor: Tensor) -> None:
        """See :class:`DeviceOps`."""
        tensor.record_stream(self.current_stream())

    def synchronize(self) -> None:
        """See :class:`DeviceOps`."""
        torch.accelerator.synchronize(self.device)

    def host_flag(self, flag: Tensor) -> HostFlag | Tensor:
        """See :class:`DeviceOps`. The copy is queued behind the work that computes ``flag``."""
        return HostFlag(flag, self.host_event(), self.raise_if_aborted)

    def host_values(self, tensors: Sequence[Tensor]) -> HostValues:
        """See :class:`DeviceOps`. The copy is queued behind the work that computes them."""
        return ArrivingValues(tensors, self.host_event(), self.raise_if_aborted)

    def empty_cache(self) -> None:
        """See :class:`DeviceOps`."""
        torch.accelerator.empty_cache()

    def total_nbytes(self) -> int:
        """See :class:`DeviceOps`."""
        _, total = torch.accelerator.get_memory_info(self.device)
        return int(total)

    def free_nbytes(self) -> int:
        """See :class:`DeviceOps`."""
        free, _ = torch.accelerator.get_memory_info(self.device)
        return int(free)

    def allocatable_nbytes(self) -> int:
        """See :class:`DeviceOps`."""
        kept = torch.accelerator.memory_reserved(self.device)
        return self.free_nbytes() + int(kept - torch.accelerator.memory_allocated(self.device))

    def memory_in_use(self) -> tuple[int, int] | None:
        """See :class:`DeviceOps`."""
        memory = torch.accelerator
        return memory.memory_allocated(self.device), memory.max_memory_allocated(self.device)

    def manual_seed(self, seed: int) -> None:
        """See :class:`DeviceOps`."""
        module = torch.get_device_module(self.device)
        with torch.accelerator.device_index(self.device.index):
            module.manual_seed(seed)

    def rng_state(self) -> Tensor | None:
        """See :class:`DeviceOps`."""
        state: Tensor = torch.get_device_module(self.device).get_rng_state(self.device)
        return state

    def set_rng_state(self, state: Tensor) -> None:
        """See :class:`DeviceOps`."""
        torch.get_device_module(self.device).set_rng_state(state, self.device)

    def identity(self) -> str:
        """See :class:`DeviceOps`."""
        return str(self.device)

    def product(self) -> str:
        """See :class:`DeviceOps`."""
        name = getattr(torch.get_device_module(self.device), "get_device_name", None)
        return self.device.type if name is None else str(name(self.device))

    def multiplies_bf16(self) -> tuple[bool, str] | None:
        """See :class:`DeviceOps`."""
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
