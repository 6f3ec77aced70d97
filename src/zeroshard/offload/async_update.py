"""How does the update in host memory run behind what the device does next?

One worker takes chunk after chunk, in the order of forward: it waits for the gradient, updates, and sends
the parameter up. The main thread waits only where a unit is used that is not back yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from zeroshard.offload.copy_streams import CopyHandle, choose_device
from zeroshard.offload.host_chunk import HostChunk, HostGradTransfer
from zeroshard.optim.fused_update import FusedUpdate

Groups = Sequence[Mapping[str, Any]]
"""An optimizer's param groups: their options."""

ParamTransfer = Callable[[], CopyHandle | None]
"""Gives the transfer of a parameter to the device once it is under way; None where it stays."""


class AsyncUpdateWorker:
    """The worker thread of one engine that trains on ``device``. ``threads``: how many an update may
    use, itself among them.

    ``delayed``: an updated parameter is sent up by whoever waits for it, not at once.
    """

    def __init__(self, device: torch.device, *, threads: int, delayed: bool) -> None:
        self._threads = threads
        self.delayed = delayed
        self._worker = ThreadPoolExecutor(
            1,
            thread_name_prefix="zeroshard-update",
            initializer=choose_device,
            initargs=(device,),
        )

    def update(
        self,
        prepared: FusedUpdate,
        host_chunk: HostChunk,
        transfer: HostGradTransfer,
        groups: Groups,
    ) -> None:
        """Wait for the gradient and update the chunk, on this thread."""
        transfer.wait()
        if transfer.is_edited:
            host_chunk.sync_edits_from_device()
        if not transfer.is_skipped:
            prepared.run(transfer.grad_C, transfer.factor, groups, threads=self._threads)

    def submit(
        self,
        prepared: FusedUpdate,
        host_chunk: HostChunk,
        transfer: HostGradTransfer,
        groups: Groups,
    ) -> ParamTransfer:
        """The same on the worker, with the options of ``groups`` as they are now. Calling the result
        waits for it and raises what it raised."""
        options = [{**group, "params": ()} for group in groups]

        def update() -> CopyHandle | None:
            self.update(prepared, host_chunk, transfer, options)
            return None if self.delayed else host_chunk.send_param(at_once=True)

        future: Future[CopyHandle | None] = self._worker.submit(update)

        def sent() -> CopyHandle | None:
            arrival = future.result()
            return host_chunk.send_param() if self.delayed else arrival

        return sent

    def close(self) -> None:
        """Wait for the update that runs, and drop those that have not begun."""
        self._worker.shutdown(wait=True, cancel_futures=True)


class PendingUpdates:
    """The chunks of one unit whose update is not known to have arrived."""

    def __init__(self) -> None:
        self._chunks: list[tuple[HostChunk, ParamTransfer]] = []

    def add(self, host_chunk: HostChunk, sent: ParamTransfer) -> None:
        """One more chunk."""
        self._chunks.append((host_chunk, sent))

    def wait(self) -> None:
        """Wait, so that the current stream may use the unit's own part. Raises what the worker did."""
        while self._chunks:
            host_chunk, sent = self._chunks[0]
            host_chunk.wait_for_param(sent())
            del self._chunks[0]  # what failed fails again for the next who waits
