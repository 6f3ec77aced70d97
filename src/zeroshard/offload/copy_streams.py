"""Copies between the device and host memory, on streams of their own.

Per step and element, a gradient of 2 bytes is copied to the host and an updated parameter of 2 bytes back
to the device (ZeRO-Offload, arXiv 2101.06840, section 4). Both directions overlap with the computation
and with each other. Bytes are counted for each direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


def choose_device(device: torch.device) -> None:
    """Make ``device`` current on this thread. To be called before a thread first uses it.

    The current device of a new thread is the first GPU of the host. A rank that uses another GPU would
    create a context of hundreds of MB there, even by creating an event.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


class CopyHandle(Protocol):
    """A copy in flight. It keeps source and target alive."""

    def synchronize(self) -> None:
        """Block this thread until the copy has ended."""

    def wait_stream(self) -> None:
        """Make later work of the current stream wait for the copy. This thread does not wait."""


class CopyStreams:
    """Copies that are complete when the call returns, for ranks whose device memory is host memory.

    CPU ranks use this class where they need a copy all the same. ``down_nbytes`` and ``up_nbytes`` count
    bytes copied to the host and to the device.
    """

    def __init__(self) -> None:
        self.down_nbytes = 0
        self.up_nbytes = 0

    def d2h(self, source: Tensor, target: Tensor) -> CopyHandle:
        """Start a copy from device to host, after the work that the current stream has queued."""
        self.down_nbytes += source.nbytes
        return self._copy(source, target)

    def h2d(self, source: Tensor, target: Tensor, *, at_once: bool = False) -> CopyHandle:
        """Start a copy from host to device, after the work that the current stream has queued.

        That work may still use ``target``, or used its block before the allocator gave it to ``target``.
        ``at_once``: do not wait for that work. Allowed on any thread, if ``target`` is not in use.
        """
        self.up_nbytes += source.nbytes
        return self._copy(source, target)

    def _copy(self, source: Tensor, target: Tensor) -> CopyHandle:
        target.copy_(source)
        return _Completed()


@dataclass(frozen=True, slots=True)
class _Completed:
    def synchronize(self) -> None:
        """Nothing to wait for."""

    def wait_stream(self) -> None:
        """Nothing to wait for."""


class CudaCopyStreams(CopyStreams):
    """Copies on two CUDA streams, one for each direction.

    Host memory should be pinned. Copies from and to other host memory do not overlap with computation.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._down = torch.cuda.Stream(device)
        self._up = torch.cuda.Stream(device)

    def d2h(self, source: Tensor, target: Tensor) -> CopyHandle:
        """See :class:`CopyStreams`."""
        self.down_nbytes += source.nbytes
        self._down.wait_stream(torch.cuda.current_stream(source.device))
        return _on_stream(self._down, source, target)

    def h2d(self, source: Tensor, target: Tensor, *, at_once: bool = False) -> CopyHandle:
        """See :class:`CopyStreams`."""
        self.up_nbytes += source.nbytes
        if not at_once:
            self._up.wait_stream(torch.cuda.current_stream(target.device))
        return _on_stream(self._up, source, target)


@dataclass(frozen=True, slots=True)
class _Event:
    event: torch.cuda.Event
    ends: tuple[Tensor, Tensor]  # keeps both from the allocator until the copy has ended

    def synchronize(self) -> None:
        self.event.synchronize()

    def wait_stream(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


def _on_stream(stream: torch.cuda.Stream, source: Tensor, target: Tensor) -> CopyHandle:
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(stream)
    return _Event(event, (source, target))
