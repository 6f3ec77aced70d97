"""How does a chunk that rests in host memory meet its gradient, and the device its parameter?

Two bytes an element go down, two come up. What the update has to know of the step goes down with the
gradient: the host reads nothing from the device that it would have to wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroshard.store.bus import Arrival, Bus
from zeroshard.store.storage import fingerprint


@dataclass(frozen=True, slots=True)
class Delivery:
    """A gradient on its way down, with the numbers of its step. Read them after :meth:`wait`."""

    grad_C: Tensor  # on the host
    _numbers: Tensor  # on the host: factor, overflow, edited
    _arrivals: Sequence[Arrival]

    def wait(self) -> None:
        """Block this thread until gradient and numbers are there."""
        for arrival in self._arrivals:
            arrival.wait_on_host()

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


class Crossing:
    """The host's side of one chunk.

    ``low_C`` is the parameter on the device, or None where it rests in host memory itself. ``home_C`` is
    the host's copy of it: rounded masters, as they were sent up last. If it ``shares`` that memory with
    other chunks, the parameter comes down before each use.
    """

    def __init__(
        self,
        bus: Bus,
        low_C: Tensor | None,
        *,
        grad_bytes: Tensor,
        home_C: Tensor,
        numbers: Tensor,
        shares: bool,
    ) -> None:
        self.bus = bus
        self.home_C = home_C
        self._low_C = low_C
        self._grad_bytes = grad_bytes
        self._numbers = numbers
        self._shares = shares
        self._seal: Tensor | None = None
        self._grad_C: Tensor | None = None  # of the running step, on the host
        self._grad_arrival: Arrival | None = None
        if low_C is not None:
            home_C.copy_(low_C)
            self._seal = fingerprint(low_C)

    def send_gradient(self, grad_C: Tensor) -> None:
        """Start the gradient of a step on its way, behind what the current stream has queued."""
        self._grad_C = self._grad_bytes[: grad_C.nbytes].view(grad_C.dtype)
        self._grad_arrival = self.bus.down(grad_C, self._grad_C)

    def recall_gradient(self, grad_C: Tensor) -> None:
        """Bring the gradient back into ``grad_C``, on the device. Waits for both ways."""
        assert self._grad_arrival is not None
        assert self._grad_C is not None
        self._grad_arrival.wait_on_host()
        self.bus.up(self._grad_C, grad_C).wait_on_host()

    def send_numbers(self, factor: Tensor, found_inf: Tensor | None) -> Delivery:
        """Start what the update has to know beside the gradient; the delivery is of both."""
        assert self._grad_arrival is not None
        assert self._grad_C is not None
        device = factor.device if self._low_C is None else self._low_C.device
        edited = torch.zeros((), dtype=torch.bool, device=device)
        if self._low_C is not None:
            assert self._seal is not None, "sealed when it arrived"
            edited = fingerprint(self._low_C) != self._seal
        skipped = torch.zeros_like(edited) if found_inf is None else found_inf != 0
        words = torch.stack([x.double().to(device) for x in (factor, skipped, edited)])
        arrivals = [self._grad_arrival, self.bus.down(words, self._numbers)]
        if self._shares and self._low_C is not None:
            arrivals.append(self.bus.down(self._low_C, self.home_C))
        self._grad_arrival = None
        return Delivery(self._grad_C, self._numbers, arrivals)

    def take_edits(self) -> None:
        """The host's copy becomes what the program wrote on the device, if it did. Waits to know."""
        if self._low_C is None:
            return
        if self._shares or bool(fingerprint(self._low_C) != self._seal):
            self.bus.down(self._low_C, self.home_C).wait_on_host()
            self.reseal()

    def reseal(self) -> None:
        """Host and device were written alike."""
        if self._low_C is not None:
            self._seal = fingerprint(self._low_C)

    def send_up(self, *, at_once: bool = False) -> Arrival | None:
        """Start the updated parameter on its way; None where it is at home. ``at_once``: the delivery of
        this update's gradient was waited for, so that nobody uses the parameter on the device; else
        behind what the current stream has queued."""
        if self._low_C is None:
            return None
        return self.bus.up(self.home_C, self._low_C, at_once=at_once)

    def arrived(self, arrival: Arrival | None) -> None:
        """The parameter is used from here on, by the current stream; edits show from now."""
        if arrival is not None:
            assert self._low_C is not None
            arrival.wait_on_device()
            self.reseal()


class GradOnHost:
    """A unit's reduced gradient in host memory, where its update is, from the end of its reduction.

    ``parts``: its chunks, together ``numel`` elements. ``before()`` is called before they are written to.
    """

    early = False

    def __init__(
        self,
        parts: Sequence[tuple[slice, Crossing]],
        *,
        numel: int,
        before: Callable[[], object],
    ) -> None:
        self._parts = parts
        self._numel = numel
        self._before = before
        self._like: Tensor | None = None  # empty; it has dtype and device of what was sent

    def send(self, values_R: Tensor) -> None:
        """See :class:`~zeroshard.zero.gradients.GradRest`."""
        self._before()
        self._like = values_R.new_empty(0)
        for part, crossing in self._parts:
            crossing.send_gradient(values_R[part])

    def fetch(self) -> None:
        """Nothing: it is used where it is."""

    def bring(self) -> Tensor:
        """A copy on the device."""
        assert self._like is not None
        back_R = self._like.new_empty(self._numel)
        for part, crossing in self._parts:
            crossing.recall_gradient(back_R[part])
        return back_R

    peek = bring

    def forget(self) -> None:
        """Nothing: its memory is there for the next."""


class HostSide:
    """Makes crossings: the bus, and ``take(numel, dtype)``, which gives host memory.

    ``grad_itemsize``: bytes of the widest gradient element. Chunks on disk are updated one at a time:
    they share one buffer for gradients and one for parameters.
    """

    def __init__(
        self, bus: Bus, take: Callable[[int, torch.dtype], Tensor], grad_itemsize: int
    ) -> None:
        self.bus = bus
        self.take = take
        self._grad_itemsize = grad_itemsize
        self._shared: dict[str, Tensor] = {}

    def crossing(self, low_C: Tensor, *, at_home: bool, shares: bool) -> Crossing:
        """For one chunk. ``at_home``: the parameter rests in host memory; ``shares``: see the class."""
        numel, dtype = low_C.numel(), low_C.dtype
        grad_bytes = self._room("grad", numel * self._grad_itemsize, shares)
        home_C = low_C
        if not at_home:
            home_C = self._room("low", numel * dtype.itemsize, shares).view(dtype)
        return Crossing(
            self.bus,
            None if at_home else low_C,
            grad_bytes=grad_bytes,
            home_C=home_C,
            numbers=self.take(3, torch.float64),
            shares=shares,
        )

    def _room(self, name: str, nbytes: int, shares: bool) -> Tensor:
        if not shares:
            return self.take(nbytes, torch.uint8)
        known = self._shared.get(name)
        if known is None or known.nbytes < nbytes:
            self._shared[name] = known = self.take(nbytes, torch.uint8)
        return known[:nbytes]
