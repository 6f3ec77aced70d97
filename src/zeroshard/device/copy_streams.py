"""Copies between the device and host memory, on streams of their own.

Per step and element, a gradient of 2 bytes is copied to the host and an updated parameter of 2 bytes back
to the device (ZeRO-Offload, arXiv 2101.06840, section 4). Both directions overlap with the computation
and with each other. Bytes are counted for each direction.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeroshard.device.accelerator import AcceleratorOps, on_stream
from zeroshard.device.choice import ops_of


class CopyHandle:
    """A copy that has ended. It keeps the host's memory alive, and the target on the device."""

    __slots__ = ()

    def synchronize(self) -> None:
        """Block this thread until the copy has ended.

        Raises:
            DistributedError: it is a copy to the host, and collectives of the device were aborted, so
                what was copied may be garbage.
        """

    def wait_stream(self) -> None:
        """Make later work of the current stream wait for the copy. This thread does not wait."""

    def behind(self) -> AbstractContextManager[None]:
        """A context in which this thread queues work behind the copy, on the stream of the copy.

        A collective that is started there waits for the copy, and the current stream need not.
        """
        return contextlib.nullcontext()


class CopyStreams:
    """Copies that are complete when the call returns, for ranks whose device memory is host memory.

    CPU ranks use this class where they need a copy all the same. ``down_nbytes`` and ``up_nbytes`` count
    bytes copied to the host and to the device.
    """

    def __init__(self) -> None:
        self.down_nbytes = 0
        self.up_nbytes = 0

    def d2h(self, source: Tensor, target: Tensor) -> CopyHandle:
        """Start a copy from device to host, after the work that the current stream has queued.

        ``source`` may be dropped at once: its memory gets another use when the copy has ended.
        """
        self.down_nbytes += source.nbytes
        return self._copy(source, target)

    def h2d(self, source: Tensor, target: Tensor, *, at_once: bool = False) -> CopyHandle:
        """Start a copy from host to device, after the work that the current stream has queued.

        That work may still use ``target``, or used its block before the allocator gave it to ``target``.
        ``at_once``: do not wait for that work. Allowed on any thread, if ``target`` is not in use.
        """
        self.up_nbytes += source.nbytes
        return self._copy(source, target)

    def synchronize(self) -> None:
        """Block this thread until all copies have ended."""

    def _copy(self, source: Tensor, target: Tensor) -> CopyHandle:
        target.copy_(source)
        return CopyHandle()


class CudaCopyStreams(CopyStreams):
    """Copies on two streams of an accelerator, one for each direction.

    Host memory should be pinned. Copies from and to other host memory do not overlap with computation.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        ops = ops_of(device)
        assert isinstance(ops, AcceleratorOps), f"{device} has no streams"
        self._ops = ops
        self._down = ops.new_stream()
        self._up = ops.new_stream()

    def d2h(self, source: Tensor, target: Tensor) -> CopyHandle:
        self.down_nbytes += source.nbytes
        self._down.wait_stream(self._ops.current_stream())
        with on_stream(self._down):
            # If the handle kept it instead, gradients would live until their update.
            self._ops.record_use(source)
            check = self._ops.raise_if_aborted
            return self._start(self._down, source, target, (target,), check)

    def h2d(self, source: Tensor, target: Tensor, *, at_once: bool = False) -> CopyHandle:
        self.up_nbytes += source.nbytes
        if not at_once:
            self._up.wait_stream(self._ops.current_stream())
        with on_stream(self._up):
            return self._start(self._up, source, target, (source, target), _nothing)

    def synchronize(self) -> None:
        for stream in (self._down, self._up):
            stream.synchronize()

    def _start(
        self,
        stream: torch.Stream,
        source: Tensor,
        target: Tensor,
        ends: tuple[Tensor, ...],
        check: Callable[[], None],
    ) -> CopyHandle:
        target.copy_(source, non_blocking=True)
        event = self._ops.host_event()
        event.record(stream)
        return _Event(event, stream, self._ops, ends, check)


def _nothing() -> None:
    """The host does not read what is copied to the device."""


@dataclass(frozen=True, slots=True)
class _Event(CopyHandle):
    """A copy in flight."""

    event: Any
    stream: torch.Stream
    ops: AcceleratorOps
    ends: tuple[Tensor, ...]  # keeps them from the allocator until the copy has ended
    check: Callable[[], None]  # raises if what was copied to the host may be garbage

    def synchronize(self) -> None:
        self.event.synchronize()
        self.check()

    def wait_stream(self) -> None:
        self.ops.current_stream().wait_event(self.event)

    def behind(self) -> AbstractContextManager[None]:
        return on_stream(self.stream)
