"""Exchanges gradient and parameter of one chunk between the device and the host, where it is updated.

[Note: host chunks]

*What is copied.* Each step, the gradient is copied to the host and the updated parameter back to the
device, 2 bytes per element each way. The numbers of the step (:class:`StepNumbers`) are copied after the
gradients, once for all chunks. So the host never reads a value from the device that it
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
from itertools import cycle

import torch
from torch import Tensor

from zeroshard.device.copy_streams import CopyHandle, CopyStreams
from zeroshard.errors import UsageError
from zeroshard.memory.storage import fingerprint
from zeroshard.offload.shard_store import EditWatch

SHARED_BUFFERS = 2
"""While one chunk on disk is updated, the next one is copied."""


class StepNumbers:
    """The numbers that the host reads from the device in each step, as one vector.

    float64 ``[2 + L + C]``: the factor of the gradients; whether the step is skipped; if shards are
    stored outside the device (L = 1, else 0), the number of one of which an edit was lost, counted from
    1; for each of C chunks, whether the program edited its parameter. One copy per step, behind the
    gradients, so no thread waits for the device where it could compute. The number of the shard travels
    with the norm of the gradient (:mod:`zeroshard.zero.clip`), so that all ranks raise the same error.

    ``take(numel, dtype)`` gives host memory. ``shards`` may grow until the first step.
    """

    def __init__(
        self,
        streams: CopyStreams,
        take: Callable[[int, torch.dtype], Tensor],
        shards: Sequence[EditWatch],
    ) -> None:
        self._streams = streams
        self._take = take
        self._shards = shards
        self._chunks: list[HostChunk] = []
        self.lost_on_any_rank: Tensor | None = None  # 0-dim: the number, largest of all ranks
        self._lost: list[Tensor | None] = []  # on this rank since the last step, by shard
        self._host: Tensor | None = None
        self._step: object = None
        self._arrival: CopyHandle | None = None

    def watch(self, chunk: HostChunk) -> int:
        """Compare the chunk's parameter in each step. Returns its number for :meth:`is_edited`."""
        self._chunks.append(chunk)
        return len(self._chunks) - 1

    def lost_edit(self, device: torch.device) -> Tensor | None:
        """``[1]`` on ``device``: the number of a shard of which this rank has lost an edit; 0: none.

        Since the last step; counted from 1. None: every shard is stored on the device.
        """
        if not self._shards:
            return None
        now = [shard.take() for shard in self._shards]
        before = self._lost or [None] * len(now)
        self._lost = [
            new if old is None else old if new is None else old | new
            for old, new in zip(before, now, strict=True)
        ]
        found = [(at, lost) for at, lost in enumerate(self._lost, 1) if lost is not None]
        if not found:
            return torch.zeros(1, dtype=torch.float64, device=device)
        return torch.stack([at * lost.double() for at, lost in found]).amax().view(1)

    def send(self, step: object, factor: Tensor, found_inf: Tensor | None) -> None:
        """Start copying the numbers. Only the first call for a ``step`` does, which is any new object.

        ``factor``: 0-dim. ``found_inf``: 0-dim, 1 if the step is skipped; None if it is not.
        """
        if step is self._step:
            return
        self._step = step
        no = torch.zeros((), dtype=torch.bool, device=factor.device)
        skipped = no if found_inf is None else found_inf != 0
        parts = [torch.stack([factor.double(), skipped.double()])]
        if self._shards:
            assert self.lost_on_any_rank is not None, "the norm is exchanged first"
            parts.append(self.lost_on_any_rank.view(1))
        self.lost_on_any_rank, self._lost = None, []
        if self._chunks:
            now, then = zip(*(chunk.prints() for chunk in self._chunks), strict=True)
            parts.append((torch.stack(now) != torch.stack(then)).double())
        numbers = torch.cat(parts)
        if self._host is None:
            self._host = self._take(numbers.numel(), torch.float64)
        self._arrival = self._streams.d2h(numbers, self._host)

    def wait(self) -> None:
        """Block this thread until the numbers are on the host.

        Raises:
            UsageError: an edit was lost.
        """
        assert self._arrival is not None
        self._arrival.synchronize()
        assert self._host is not None
        if self._shards and (lost := int(self._host[2])):
            raise UsageError(
                f"parameters of {self._shards[lost - 1].name!r} were written inside forward or backward, "
                "on at least one rank, in a way that PyTorch does not count, such as "
                "param.data.mul_(...). They are stored in host memory or on disk (offload_param), so the "
                "values are lost. Write them in place under torch.no_grad(), or inside "
                "zeroshard.zero.GatheredParameters(params, modifier_rank=0)."
            )

    @property
    def factor(self) -> float:
        """The factor by which updates multiply gradients. Valid after :meth:`wait`, as all below."""
        assert self._host is not None
        return float(self._host[0])

    @property
    def is_skipped(self) -> bool:
        """Whether the gradient of the step was not finite on some rank."""
        assert self._host is not None
        return bool(self._host[1])

    def is_edited(self, chunk: int) -> bool:
        """Whether the program wrote into the chunk's parameter since it was copied to the device."""
        assert self._host is not None
        return bool(self._host[2 + bool(self._shards) + chunk])


def numbers_numel(shards: int, chunks: int) -> int:
    """Elements of the vector."""
    return 2 + bool(shards) + chunks


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


@dataclass(eq=False, slots=True)
class HostBuffers:
    """Host memory for gradient and parameter of a chunk, as bytes."""

    grad_bytes: Tensor
    param_bytes: Tensor
    shared: bool  # other chunks use it too, one at a time
    leaving: CopyHandle | None = None  # the last copy of a parameter out of it


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
        self._gradient: tuple[Tensor, CopyHandle] | None = None
        if param_C is not None:
            host_param_C.copy_(param_C)
            if not buffers.shared:
                self.arrived_print = fingerprint(param_C)
                self._at = numbers.watch(self)

    def prints(self) -> tuple[Tensor, Tensor]:
        """Fingerprints of the device's parameter: now, and when it was equal to the host's copy."""
        assert self.device_param_C is not None
        assert self.arrived_print is not None
        return fingerprint(self.device_param_C), self.arrived_print

    @property
    def gradient(self) -> tuple[Tensor, CopyHandle]:
        """The gradient of this step in host memory, and the copy that brings it."""
        assert self._gradient is not None
        return self._gradient

    def send_gradient(self, grad_C: Tensor) -> None:
        """Start copying this step's gradient to the host, after the queued work of the current stream.

        ``grad_C`` may be dropped at once.
        """
        there_C = self._buffers.grad_bytes[: grad_C.nbytes].view(grad_C.dtype)
        self._gradient = there_C, self.streams.d2h(grad_C, there_C)

    def fetch_gradient(self, grad_C: Tensor) -> None:
        """Copy the gradient back into ``grad_C`` on the device, and wait for it."""
        there_C, arrival = self.gradient
        arrival.synchronize()
        self.streams.h2d(there_C, grad_C).synchronize()

    def transfer(self, step: object, factor: Tensor, found_inf: Tensor | None) -> HostGradTransfer:
        """The gradient on its way, with the numbers of the ``step``, whose first call sends them."""
        grad_C, arrival = self.gradient
        self._numbers.send(step, factor, found_inf)
        arrivals = [arrival]
        if self._buffers.shared and self.device_param_C is not None:
            arrivals.append(self._copy_from_device(self.device_param_C))
        self._gradient = None
        return HostGradTransfer(grad_C, self._numbers, self._at, arrivals)

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


class HostStaging:
    """Makes host chunks, whose memory is from ``take(numel, dtype)``, and the numbers of their steps.

    ``watched``: see :class:`StepNumbers`. ``grad_itemsize``: bytes of the widest gradient element.
    ``shared_nbytes``: of gradient and parameter of the largest chunk on disk.
    """

    def __init__(
        self,
        streams: CopyStreams,
        take: Callable[[int, torch.dtype], Tensor],
        watched: Sequence[EditWatch],
        *,
        grad_itemsize: int,
        shared_nbytes: tuple[int, int],
    ) -> None:
        self.streams = streams
        self.allocate = take
        self.numbers = StepNumbers(streams, take, watched)
        self._grad_itemsize = grad_itemsize
        self._shared = cycle(
            [self._buffers(*shared_nbytes, shared=True) for _ in range(SHARED_BUFFERS)]
        )

    def make_chunk(self, param_C: Tensor, *, on_host: bool, shares: bool) -> HostChunk:
        """The host chunk of ``param_C``. ``on_host``: the parameter is in host memory.

        ``shares``: it uses the shared buffers that the last such chunk does not use.
        """
        if shares:
            buffers = next(self._shared)
        else:
            param_nbytes = 0 if on_host else param_C.nbytes
            buffers = self._buffers(
                param_C.numel() * self._grad_itemsize, param_nbytes, shared=False
            )
        return HostChunk(
            self.streams,
            None if on_host else param_C,
            buffers=buffers,
            host_param_C=param_C
            if on_host
            else buffers.param_bytes[: param_C.nbytes].view(param_C.dtype),
            numbers=self.numbers,
        )

    def _buffers(self, grad_nbytes: int, param_nbytes: int, *, shared: bool) -> HostBuffers:
        grad_bytes = self.allocate(grad_nbytes, torch.uint8)
        return HostBuffers(grad_bytes, self.allocate(param_nbytes, torch.uint8), shared)
