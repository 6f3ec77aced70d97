"""How does a chunk that rests in host memory meet its gradient, and the device its parameter?

Two bytes an element go down, two come up. What the update has to know of the step goes down with the
gradient: the host reads nothing from the device that it would have to wait for.
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
    """A gradient on its way down, with the numbers of its step. Read them after :meth:`wait`."""

    grad_C: Tensor  # on the host
    _numbers: Tensor  # on the host: factor, overflow, edited
    _handles: Sequence[CopyHandle]

    def wait(self) -> None:
        """Block this thread until gradient and numbers are there."""
        for arrival in self._handles:
            arrival.synchronize()

    @property
    def factor(self) -> float:
        """What the gradient is to be multiplied by."""
        return float(self._numbers[0])

    @property
    def is_skipped(self) -> bool:
        """Was the gradient of the step not finite, on any rank?"""
        return bool(self._numbers[1])

    @property
    def is_edited(self) -> bool:
        """Did the program write into the parameter on the device since it was sent up?"""
        return bool(self._numbers[2])


class HostChunk:
    """The host's side of one chunk.

    ``low_C`` is the parameter on the device, or None where it rests in host memory itself. ``home_C`` is
    the host's copy of it: rounded masters, as they were sent up last. If it ``shares`` that memory with
    other chunks, the parameter comes down before each use.
    """

    def __init__(
        self,
        streams: CopyStreams,
        low_C: Tensor | None,
        *,
        grad_bytes: Tensor,
        home_C: Tensor,
        numbers: Tensor,
        shares: bool,
    ) -> None:
        self.streams = streams
        self.host_param_C = home_C
        self._device_param_C = low_C
        self._grad_bytes = grad_bytes
        self._numbers = numbers
        self._is_shared = shares
        self._fingerprint: Tensor | None = None
        self._grad_C: Tensor | None = None  # of the running step, on the host
        self._grad_arrival: CopyHandle | None = None
        if low_C is not None:
            home_C.copy_(low_C)
            self._fingerprint = fingerprint(low_C)

    def send_gradient(self, grad_C: Tensor) -> None:
        """Start the gradient of a step on its way, behind what the current stream has queued."""
        self._grad_C = self._grad_bytes[: grad_C.nbytes].view(grad_C.dtype)
        self._grad_arrival = self.streams.d2h(grad_C, self._grad_C)

    def fetch_gradient(self, grad_C: Tensor) -> None:
        """Bring the gradient back into ``grad_C``, on the device. Waits for both ways."""
        assert self._grad_arrival is not None
        assert self._grad_C is not None
        self._grad_arrival.synchronize()
        self.streams.h2d(self._grad_C, grad_C).synchronize()

    def send_numbers(self, factor: Tensor, found_inf: Tensor | None) -> HostGradTransfer:
        """Start what the update has to know beside the gradient; the delivery is of both."""
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
        """The host's copy becomes what the program wrote on the device, if it did. Waits to know."""
        if self._device_param_C is None:
            return
        if self._is_shared or bool(fingerprint(self._device_param_C) != self._fingerprint):
            self.streams.d2h(self._device_param_C, self.host_param_C).synchronize()
            self.update_fingerprint()

    def update_fingerprint(self) -> None:
        """Host and device were written alike."""
        if self._device_param_C is not None:
            self._fingerprint = fingerprint(self._device_param_C)

    def send_param(self, *, at_once: bool = False) -> CopyHandle | None:
        """Start the updated parameter on its way; None where it is at home. ``at_once``: the delivery of
        this update's gradient was waited for, so that nobody uses the parameter on the device; else
        behind what the current stream has queued."""
        if self._device_param_C is None:
            return None
        return self.streams.h2d(self.host_param_C, self._device_param_C, at_once=at_once)

    def wait_for_param(self, arrival: CopyHandle | None) -> None:
        """The parameter is used from here on, by the current stream; edits show from now."""
        if arrival is not None:
            assert self._device_param_C is not None
            arrival.wait_stream()
            self.update_fingerprint()


class HostGradStore:
    """A unit's reduced gradient in host memory, where its update is, from the end of its reduction.

    ``parts``: its chunks, together ``numel`` elements. ``before()`` is called before they are written to.
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
        self._like: Tensor | None = None  # empty; it has dtype and device of what was sent

    def write(self, values_R: Tensor) -> None:
        """See :class:`~zeroshard.zero.gradients.GradRest`."""
        self._before()
        self._like = values_R.new_empty(0)
        for part, host_chunk in self._parts:
            host_chunk.send_gradient(values_R[part])

    def prefetch(self) -> None:
        """Nothing: it is used where it is."""

    def acquire(self) -> Tensor:
        """A copy on the device."""
        assert self._like is not None
        back_R = self._like.new_empty(self._numel)
        for part, host_chunk in self._parts:
            host_chunk.fetch_gradient(back_R[part])
        return back_R

    peek = acquire

    def free(self) -> None:
        """Nothing: its memory is there for the next."""


class HostStaging:
    """Makes crossings: the bus, and ``take(numel, dtype)``, which gives host memory.

    ``grad_itemsize``: bytes of the widest gradient element. Chunks on disk are updated one at a time:
    they share one buffer for gradients and one for parameters.
    """

    def __init__(
        self, streams: CopyStreams, take: Callable[[int, torch.dtype], Tensor], grad_itemsize: int
    ) -> None:
        self.streams = streams
        self.allocate = take
        self._grad_itemsize = grad_itemsize
        self._shared: dict[str, Tensor] = {}

    def make_chunk(self, low_C: Tensor, *, at_home: bool, shares: bool) -> HostChunk:
        """For one chunk. ``at_home``: the parameter rests in host memory; ``shares``: see the class."""
        numel, dtype = low_C.numel(), low_C.dtype
        grad_bytes = self._buffer("grad", numel * self._grad_itemsize, shares)
        home_C = low_C
        if not at_home:
            home_C = self._buffer("low", numel * dtype.itemsize, shares).view(dtype)
        return HostChunk(
            self.streams,
            None if at_home else low_C,
            grad_bytes=grad_bytes,
            home_C=home_C,
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
