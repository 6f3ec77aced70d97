"""Exchanges gradient and parameter of one chunk between the device and the host, where it is updated.

[Note: host chunks]

*What is copied.* Each step, the gradient is copied to the host and the updated parameter back to the
device, 2 bytes per element each way. The numbers of the step (:mod:`zeroshard.offload.step_numbers`) are
copied after the gradients, once for all chunks. So the host never reads a value from the device that it
would have to wait for (ADR 0008). On the device, a gradient is freed when its copy has ended.

*Who owns which memory.* The unit owns the parameter on the device (``device_param_C``). The chunk owns
the host's copy ``host_param_C`` and a buffer for the gradient, from :class:`HostStaging`. Chunks whose
state is on disk are updated one at a time. They use two :class:`HostBuffers` in turn, so that the next
chunk is copied while one is updated; their parameter is copied to the host before each update. If the
parameter itself is in host memory, ``host_param_C`` is that memory and it is not copied.

*Edits.* Between updates, ``host_param_C`` equals the parameter on the device, unless the program wrote
into the latter. A fingerprint of the device's parameter is taken when it has arrived, and compared in
each step and in ``sync_edits_from_device``. Only where it differs is the parameter copied to the
host. Without the fingerprint, the update would start from ``host_param_C`` and overwrite what the program
wrote; with a second copy on the device to compare with, offload would save less.

*Order.* Streams order the copies. ``send_param(at_once=True)`` skips the wait for the current stream, and
is correct only after the gradient of the same update has arrived: the device then no longer uses the
parameter. A copy into shared buffers waits on the device for the last copy out of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroshard.device.copy_streams import CopyHandle, CopyStreams
from zeroshard.memory.storage import fingerprint
from zeroshard.offload.step_numbers import StepNumbers

SHARED_BUFFERS = 2
"""While one chunk on disk is updated, the next one is copied."""


@dataclass(frozen=True, slots=True)
class HostGradTransfer:
    """A gradient being copied to the host, with the numbers of its step. Valid after :meth:`wait`."""

    grad_C: Tensor  # on the host
    numbers: StepNumbers
    _at: int | None  # of the chunk in the numbers; None: its parameter is not compared
    _handles: Sequence[CopyHandle]

    def wait(self) -> None:
        """Block this thread until gradient and numbers are on the host.

        Raises:
            UsageError: an edit of a parameter was lost.
        """
        self.numbers.wait()
        for arrival in self._handles:
            arrival.synchronize()

    @property
    def is_edited(self) -> bool:
        """Whether the program wrote into the parameter on the device since it was copied there."""
        return self._at is not None and self.numbers.is_edited(self._at)


class HostBuffers:
    """Host memory for gradient and parameter of a chunk, as bytes.

    ``shared``: other chunks use it too, one at a time. ``leaving``: the last copy of a parameter out of
    it.
    """

    def __init__(self, grad_bytes: Tensor, param_bytes: Tensor, *, shared: bool) -> None:
        self.grad_bytes = grad_bytes
        self.param_bytes = param_bytes
        self.shared = shared
        self.leaving: CopyHandle | None = None


class HostChunk:
    """The host's side of one chunk. See [Note: host chunks].

    ``param_C``: the parameter on the device, or None if it is in host memory. ``host_param_C``: the
    host's copy, which is the rounded master as it was last copied to the device. If the ``buffers`` are
    shared, the parameter is copied to the host before each update.
    """

    def __init__(
        self,
        streams: CopyStreams,
        param_C: Tensor | None,
        *,
        buffers: HostBuffers,
        host_param_C: Tensor,
        numbers: StepNumbers,
    ) -> None:
        self.streams = streams
        self.host_param_C = host_param_C
        self.device_param_C = param_C
        self.arrived_print: Tensor | None = None  # of the parameter, when both copies were equal
        self._buffers = buffers
        self._numbers = numbers
        self._at: int | None = None
        self._grad_C: Tensor | None = None  # of this step, on the host
        self._grad_arrival: CopyHandle | None = None
        if param_C is not None:
            host_param_C.copy_(param_C)
            if not buffers.shared:
                self.arrived_print = fingerprint(param_C)
                self._at = numbers.watch(self)

    def prints(self) -> tuple[Tensor, Tensor]:
        """See :class:`~zeroshard.offload.step_numbers.WatchedChunk`."""
        assert self.device_param_C is not None
        assert self.arrived_print is not None
        return fingerprint(self.device_param_C), self.arrived_print

    @property
    def gradient(self) -> tuple[Tensor, CopyHandle]:
        """The gradient of this step in host memory, and the copy that brings it."""
        assert self._grad_C is not None
        assert self._grad_arrival is not None
        return self._grad_C, self._grad_arrival

    def send_gradient(self, grad_C: Tensor) -> None:
        """Start copying this step's gradient to the host, after the queued work of the current stream.

        ``grad_C`` may be dropped at once.
        """
        self._grad_C = self._buffers.grad_bytes[: grad_C.nbytes].view(grad_C.dtype)
        self._grad_arrival = self.streams.d2h(grad_C, self._grad_C)

    def fetch_gradient(self, grad_C: Tensor) -> None:
        """Copy the gradient back into ``grad_C`` on the device, and wait for it."""
        assert self._grad_arrival is not None
        assert self._grad_C is not None
        self._grad_arrival.synchronize()
        self.streams.h2d(self._grad_C, grad_C).synchronize()

    def transfer(self, step: object, factor: Tensor, found_inf: Tensor | None) -> HostGradTransfer:
        """The gradient on its way, with the numbers of the ``step``, whose first call sends them."""
        assert self._grad_arrival is not None
        assert self._grad_C is not None
        self._numbers.send(step, factor, found_inf)
        arrivals = [self._grad_arrival]
        if self._buffers.shared and self.device_param_C is not None:
            arrivals.append(self._copy_from_device(self.device_param_C))
        self._grad_arrival = None
        return HostGradTransfer(self._grad_C, self._numbers, self._at, arrivals)

    def copy_param_from_device(self) -> None:
        """Copy the device's parameter to the host. Waits for the copy."""
        if self.device_param_C is not None:
            self._copy_from_device(self.device_param_C).synchronize()

    def _copy_from_device(self, param_C: Tensor) -> CopyHandle:
        leaving, self._buffers.leaving = self._buffers.leaving, None
        if leaving is not None:
            leaving.wait_stream()  # the copy begins when the last parameter has left the memory
        return self.streams.d2h(param_C, self.host_param_C)

    def wait_until_unused(self) -> None:
        """Block this thread until no copy uses ``host_param_C``, so that the host may write it."""
        leaving, self._buffers.leaving = self._buffers.leaving, None
        if leaving is not None:
            leaving.synchronize()

    def sync_edits_from_device(self) -> None:
        """Copy the device's parameter to the host if the program wrote into it. Waits for the device."""
        if self.device_param_C is None:
            return
        if self._buffers.shared:
            self.copy_param_from_device()
        elif bool(fingerprint(self.device_param_C) != self.arrived_print):
            self.copy_param_from_device()
            self.update_fingerprint()

    def update_fingerprint(self) -> None:
        """Note that host and device hold the same values now."""
        if self.device_param_C is not None and not self._buffers.shared:
            self.arrived_print = fingerprint(self.device_param_C)

    def send_param(self, *, at_once: bool = False) -> CopyHandle | None:
        """Start copying the updated parameter to the device; None if it is in host memory.

        ``at_once``: do not wait for the work that the current stream has queued. Allowed after this
        update's :class:`HostGradTransfer` was waited for, because the device no longer uses the parameter
        then.
        """
        if self.device_param_C is None:
            return None
        arrival = self.streams.h2d(self.host_param_C, self.device_param_C, at_once=at_once)
        self._buffers.leaving = arrival
        return arrival

    def wait_for_param(self, arrival: CopyHandle | None) -> None:
        """Make the current stream wait for the parameter, and take its fingerprint."""
        if arrival is not None:
            arrival.wait_stream()
            self.update_fingerprint()


def nothing() -> None:
    """Updates in host memory wait for the step."""


class HostGradStore:
    """A unit's reduced gradient in host memory, where its update runs, from the end of its reduction.

    ``parts``: slices of the gradient and their chunks, ``numel`` elements in total. ``before()`` is
    called before the chunks' gradient buffers are overwritten, ``after()`` when a complete gradient is on
    its way, and ``stale()`` when that is taken out or dropped, which comes before another one.
    """

    every_backward = False

    def __init__(
        self,
        parts: Sequence[tuple[slice, HostChunk]],
        *,
        numel: int,
        before: Callable[[], object],
        after: Callable[[], object] = nothing,
        stale: Callable[[], object] = nothing,
    ) -> None:
        self._parts = parts
        self._numel = numel
        self._before, self._after, self._stale = before, after, stale
        self._like: Tensor | None = None  # empty, with dtype and device of the stored gradient

    def write(self, values_R: Tensor) -> None:
        """See :class:`~zeroshard.offload.grad_store.GradStore`."""
        self._before()
        self._like = values_R.new_empty(0)
        for part, host_chunk in self._parts:
            host_chunk.send_gradient(values_R[part])
        self._after()

    def prefetch(self) -> None:
        """Does nothing: the update uses the gradient in host memory."""

    def acquire(self) -> Tensor:
        """A copy on the device, to be changed."""
        self._stale()
        return self.peek()

    def peek(self) -> Tensor:
        """A copy on the device."""
        assert self._like is not None
        back_R = self._like.new_empty(self._numel)
        for part, host_chunk in self._parts:
            host_chunk.fetch_gradient(back_R[part])
        return back_R

    def free(self) -> None:
        """The memory is reused for the next gradient."""
        self._stale()


class HostStaging:
    """Makes host chunks. ``take(numel, dtype)`` gives them host memory.

    ``grad_itemsize``: bytes of the widest gradient element. ``shared_nbytes``: of gradient and parameter
    of the largest chunk on disk.
    """

    def __init__(
        self,
        streams: CopyStreams,
        take: Callable[[int, torch.dtype], Tensor],
        numbers: StepNumbers,
        *,
        grad_itemsize: int,
        shared_nbytes: tuple[int, int],
    ) -> None:
        self.streams = streams
        self.allocate = take
        self.numbers = numbers
        self._grad_itemsize = grad_itemsize
        self._shared_nbytes = shared_nbytes
        self._shared: list[HostBuffers] = []
        self._turn = 0

    def make_chunk(self, param_C: Tensor, *, on_host: bool, shares: bool) -> HostChunk:
        """The host chunk of ``param_C``. ``on_host``: the parameter is in host memory.

        ``shares``: it uses the shared buffers that the last such chunk does not use.
        """
        numel, dtype = param_C.numel(), param_C.dtype
        buffers = self._next_shared() if shares else None
        if buffers is None:
            param_nbytes = 0 if on_host else param_C.nbytes
            buffers = self._buffers(numel * self._grad_itemsize, param_nbytes, shared=False)
        host_param_C = param_C
        if not on_host:
            host_param_C = buffers.param_bytes[: param_C.nbytes].view(dtype)
        return HostChunk(
            self.streams,
            None if on_host else param_C,
            buffers=buffers,
            host_param_C=host_param_C,
            numbers=self.numbers,
        )

    def _next_shared(self) -> HostBuffers:
        if not self._shared:
            self._shared = [
                self._buffers(*self._shared_nbytes, shared=True) for _ in range(SHARED_BUFFERS)
            ]
        self._turn += 1
        return self._shared[self._turn % SHARED_BUFFERS]

    def _buffers(self, grad_nbytes: int, param_nbytes: int, *, shared: bool) -> HostBuffers:
        grad_bytes, param_bytes = (
            self.allocate(nbytes, torch.uint8) for nbytes in (grad_nbytes, param_nbytes)
        )
        return HostBuffers(grad_bytes, param_bytes, shared=shared)
