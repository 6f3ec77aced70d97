"""Exchanges gradient and parameter of one chunk between the device and the host, where it is updated.

[Note: host chunks]

*What is copied.* Each step, the gradient is copied to the host and the updated parameter back to the
device, 2 bytes per element each way. The numbers of the step (gradient factor, overflow, edited) are
copied after the gradient. So the host never reads a value from the device that it would have to wait for
(ADR 0008).

*Who owns which memory.* The unit owns the parameter on the device (``_device_param_C``). The chunk owns
the host's copy ``host_param_C``, a buffer for the gradient, and three float64 for the numbers; their
memory comes from :class:`HostStaging`. Chunks whose state is on disk share one buffer for gradients and
one for parameters, because they are updated one at a time; their parameter is copied to the host before
each update. If the parameter itself is in host memory, ``host_param_C`` is that memory and nothing is
copied.

*Edits.* Between updates, ``host_param_C`` equals the parameter on the device, unless the program wrote
into the latter. A fingerprint of the device's parameter is taken when it has arrived, and compared in
``send_numbers`` and ``sync_edits_from_device``. Only where it differs is the parameter copied to the
host. Without the fingerprint, the update would start from ``host_param_C`` and overwrite what the program
wrote; with a second copy on the device to compare with, offload would save less.

*Order.* Streams order the copies. ``send_param(at_once=True)`` skips the wait for the current stream, and
is correct only after the gradient of the same update has arrived: the device then no longer uses the
parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroshard.memory.storage import fingerprint
from zeroshard.offload.copy_streams import CopyHandle, CopyStreams


@dataclass(frozen=True, slots=True)
class HostGradTransfer:
    """A gradient being copied to the host, with the numbers of its step. Valid after :meth:`wait`."""

    grad_C: Tensor  # on the host
    _numbers: Tensor  # on the host: factor, overflow, edited
    _handles: Sequence[CopyHandle]

    def wait(self) -> None:
        """Block this thread until gradient and numbers are on the host."""
        for arrival in self._handles:
            arrival.synchronize()

    @property
    def factor(self) -> float:
        """The factor by which the update multiplies the gradient."""
        return float(self._numbers[0])

    @property
    def is_skipped(self) -> bool:
        """Whether the gradient of the step was not finite on some rank."""
        return bool(self._numbers[1])

    @property
    def is_edited(self) -> bool:
        """Whether the program wrote into the parameter on the device since it was copied there."""
        return bool(self._numbers[2])


class HostChunk:
    """The host's side of one chunk. See [Note: host chunks].

    ``param_C``: the parameter on the device, or None if it is in host memory. ``host_param_C``: the
    host's copy, which is the rounded master as it was last copied to the device. ``shares``: other chunks
    use the same memory for it, so the parameter is copied to the host before each update.
    """

    def __init__(
        self,
        streams: CopyStreams,
        param_C: Tensor | None,
        *,
        grad_bytes: Tensor,
        host_param_C: Tensor,
        numbers: Tensor,
        shares: bool,
    ) -> None:
        self.streams = streams
        self.host_param_C = host_param_C
        self._device_param_C = param_C
        self._grad_bytes = grad_bytes
        self._numbers = numbers
        self._is_shared = shares
        self._fingerprint: Tensor | None = None
        self._grad_C: Tensor | None = None  # of this step, on the host
        self._grad_arrival: CopyHandle | None = None
        if param_C is not None:
            host_param_C.copy_(param_C)
            self._fingerprint = fingerprint(param_C)

    def send_gradient(self, grad_C: Tensor) -> None:
        """Start copying this step's gradient to the host, after the queued work of the current stream."""
        self._grad_C = self._grad_bytes[: grad_C.nbytes].view(grad_C.dtype)
        self._grad_arrival = self.streams.d2h(grad_C, self._grad_C)

    def fetch_gradient(self, grad_C: Tensor) -> None:
        """Copy the gradient back into ``grad_C`` on the device, and wait for it."""
        assert self._grad_arrival is not None
        assert self._grad_C is not None
        self._grad_arrival.synchronize()
        self.streams.h2d(self._grad_C, grad_C).synchronize()

    def send_numbers(self, factor: Tensor, found_inf: Tensor | None) -> HostGradTransfer:
        """Start copying the numbers of the step. The returned transfer includes the gradient."""
        assert self._grad_arrival is not None
        assert self._grad_C is not None
        device = factor.device if self._device_param_C is None else self._device_param_C.device
        edited = torch.zeros((), dtype=torch.bool, device=device)
        if self._device_param_C is not None:
            assert self._fingerprint is not None, "sealed when it arrived"
            edited = fingerprint(self._device_param_C) != self._fingerprint
        skipped = torch.zeros_like(edited) if found_inf is None else found_inf != 0
        words = torch.stack([x.double().to(device) for x in (factor, skipped, edited)])
        arrivals = [self._grad_arrival, self.streams.d2h(words, self._numbers)]
        if self._is_shared and self._device_param_C is not None:
            arrivals.append(self.streams.d2h(self._device_param_C, self.host_param_C))
        self._grad_arrival = None
        return HostGradTransfer(self._grad_C, self._numbers, arrivals)

    def sync_edits_from_device(self) -> None:
        """Copy the device's parameter to the host if the program wrote into it. Waits for the device."""
        if self._device_param_C is None:
            return
        if self._is_shared or bool(fingerprint(self._device_param_C) != self._fingerprint):
            self.streams.d2h(self._device_param_C, self.host_param_C).synchronize()
            self.update_fingerprint()

    def update_fingerprint(self) -> None:
        """Note that host and device hold the same values now."""
        if self._device_param_C is not None:
            self._fingerprint = fingerprint(self._device_param_C)

    def send_param(self, *, at_once: bool = False) -> CopyHandle | None:
        """Start copying the updated parameter to the device; None if it is in host memory.

        ``at_once``: do not wait for the work that the current stream has queued. Allowed after this
        update's :class:`HostGradTransfer` was waited for, because the device no longer uses the parameter
        then.
        """
        if self._device_param_C is None:
            return None
        return self.streams.h2d(self.host_param_C, self._device_param_C, at_once=at_once)

    def wait_for_param(self, arrival: CopyHandle | None) -> None:
        """Make the current stream wait for the parameter, and take its fingerprint."""
        if arrival is not None:
            assert self._device_param_C is not None
            arrival.wait_stream()
            self.update_fingerprint()


class HostGradStore:
    """A unit's reduced gradient in host memory, where its update runs, from the end of its reduction.

    ``parts``: slices of the gradient and their chunks, ``numel`` elements in total. ``before()`` is
    called before the chunks' gradient buffers are overwritten.
    """

    every_backward = False

    def __init__(
        self,
        parts: Sequence[tuple[slice, HostChunk]],
        *,
        numel: int,
        before: Callable[[], object],
    ) -> None:
        self._parts = parts
        self._numel = numel
        self._before = before
        self._like: Tensor | None = None  # empty, with dtype and device of the stored gradient

    def write(self, values_R: Tensor) -> None:
        """See :class:`~zeroshard.offload.grad_store.GradStore`."""
        self._before()
        self._like = values_R.new_empty(0)
        for part, host_chunk in self._parts:
            host_chunk.send_gradient(values_R[part])

    def prefetch(self) -> None:
        """Does nothing: the update uses the gradient in host memory."""

    def acquire(self) -> Tensor:
        """A copy on the device."""
        assert self._like is not None
        back_R = self._like.new_empty(self._numel)
        for part, host_chunk in self._parts:
            host_chunk.fetch_gradient(back_R[part])
        return back_R

    peek = acquire

    def free(self) -> None:
        """Does nothing: the memory is reused for the next gradient."""


class HostStaging:
    """Makes host chunks. ``take(numel, dtype)`` gives them host memory.

    ``grad_itemsize``: bytes of the widest gradient element. Chunks on disk are updated one at a time.
    They share one buffer for gradients and one for parameters.
    """

    def __init__(
        self, streams: CopyStreams, take: Callable[[int, torch.dtype], Tensor], grad_itemsize: int
    ) -> None:
        self.streams = streams
        self.allocate = take
        self._grad_itemsize = grad_itemsize
        self._shared: dict[str, Tensor] = {}

    def make_chunk(self, param_C: Tensor, *, on_host: bool, shares: bool) -> HostChunk:
        """The host chunk of ``param_C``. ``on_host``: the parameter is in host memory.

        ``shares``: see :class:`HostChunk`.
        """
        numel, dtype = param_C.numel(), param_C.dtype
        grad_bytes = self._buffer("grad", numel * self._grad_itemsize, shares)
        host_param_C = param_C
        if not on_host:
            host_param_C = self._buffer("low", numel * dtype.itemsize, shares).view(dtype)
        return HostChunk(
            self.streams,
            None if on_host else param_C,
            grad_bytes=grad_bytes,
            host_param_C=host_param_C,
            numbers=self.allocate(3, torch.float64),
            shares=shares,
        )

    def _buffer(self, name: str, nbytes: int, shares: bool) -> Tensor:
        if not shares:
            return self.allocate(nbytes, torch.uint8)
        known = self._shared.get(name)
        if known is None or known.nbytes < nbytes:
            self._shared[name] = known = self.allocate(nbytes, torch.uint8)
        return known[:nbytes]
