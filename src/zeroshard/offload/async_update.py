"""Runs the update in host memory asynchronously, on one worker thread.

The worker takes one chunk after another, in the order of forward. For each it waits for the gradient,
updates, and starts the copy of the parameter to the device. The main thread waits only where a unit is
used whose parameters have not arrived yet.
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
"""An optimizer's param groups, for their options."""

ParamTransfer = Callable[[], CopyHandle | None]
"""Gives the copy of a parameter to the device, once that has started; None if there is no copy."""


class AsyncUpdateWorker:
    """The worker thread of one engine that trains on ``device``.

    ``threads``: threads that one update may use, including the worker. ``delayed``: an updated parameter
    is copied to the device when it is waited for, not at once.
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
        """Wait for the gradient, then update the chunk on the calling thread."""
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
        """Run :meth:`update` on the worker, with the options that ``groups`` have now.

        The returned function waits for the update and raises what it raised.
        """
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
    """The chunks of one unit whose updated parameters may not have arrived yet."""

    def __init__(self) -> None:
        self._chunks: list[tuple[HostChunk, ParamTransfer]] = []

    def add(self, host_chunk: HostChunk, sent: ParamTransfer) -> None:
        """Add one chunk."""
        self._chunks.append((host_chunk, sent))

    def wait(self) -> None:
        """Wait for the updates, so that the current stream may use this rank's part of the unit.

        Raises what the worker raised.
        """
        while self._chunks:
            host_chunk, sent = self._chunks[0]
            host_chunk.wait_for_param(sent())
            del self._chunks[0]  # after the wait: a failed one raises again in the next call
