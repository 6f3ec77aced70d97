"""How do values cross between the device and host memory?

A gradient goes down in 2 bytes an element, the updated parameter comes back up in 2 (ZeRO-Offload, arXiv
2101.06840, section 4). Both directions run beside the computation and beside each other, and both are
counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


def choose_device(device: torch.device) -> None:
    """What a thread does first that touches ``device``. A new thread's own is the first GPU of the host,
    where each rank that so much as asks for an event makes a context of hundreds of MB."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


class CopyHandle(Protocol):
    """A transfer under way. It keeps both of its ends alive."""

    def synchronize(self) -> None:
        """Block this thread until the values are there."""

    def wait_stream(self) -> None:
        """Later work of the current stream waits; this thread does not."""


class CopyStreams:
    """Copies between two kinds of memory, done at once: the same memory under two names.

    What CPU ranks use where a copy is wanted all the same, and the base of what GPUs use.
    ``down_nbytes``, ``up_nbytes``: bytes that crossed since the bus was made.
    """

    def __init__(self) -> None:
        self.down_nbytes = 0
        self.up_nbytes = 0

    def d2h(self, source: Tensor, target: Tensor) -> CopyHandle:
        """From the device into host memory, behind what the current stream has queued."""
        self.down_nbytes += source.nbytes
        return self._copy(source, target)

    def h2d(self, source: Tensor, target: Tensor, *, at_once: bool = False) -> CopyHandle:
        """From host memory to the device, behind what the current stream has queued: that may still use
        ``target``, or the block that the allocator made it of.

        ``at_once``: beside it. Any thread may ask for that which knows that ``target`` is free.
        """
        self.up_nbytes += source.nbytes
        return self._copy(source, target)

    def _copy(self, source: Tensor, target: Tensor) -> CopyHandle:
        target.copy_(source)
        return _Completed()


@dataclass(frozen=True, slots=True)
class _Completed:
    def synchronize(self) -> None:
        """It is there."""

    def wait_stream(self) -> None:
        """It is there."""


class CudaCopyStreams(CopyStreams):
    """One stream for each direction; host memory should be pinned, else the copies are not in the
    background."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._down = torch.cuda.Stream(device)
        self._up = torch.cuda.Stream(device)

    def d2h(self, source: Tensor, target: Tensor) -> CopyHandle:
        """See :class:`Bus`."""
        self.down_nbytes += source.nbytes
        self._down.wait_stream(torch.cuda.current_stream(source.device))
        return _on_stream(self._down, source, target)

    def h2d(self, source: Tensor, target: Tensor, *, at_once: bool = False) -> CopyHandle:
        """See :class:`Bus`."""
        self.up_nbytes += source.nbytes
        if not at_once:
            self._up.wait_stream(torch.cuda.current_stream(target.device))
        return _on_stream(self._up, source, target)


@dataclass(frozen=True, slots=True)
class _Event:
    event: torch.cuda.Event
    ends: tuple[Tensor, Tensor]  # the allocator must not give them away before

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
