"""Runs the update in host memory asynchronously, on one worker thread.

The worker takes one chunk after another, in the order of forward. For each it waits for the gradient,
updates, and starts the copy of the parameter to the device. The main thread waits only when it uses a
unit whose parameters have not arrived yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from zeroshard.device.choice import choose_device
from zeroshard.device.copy_streams import CopyHandle
from zeroshard.offload.early_update import EarlyUpdate, EarlyUpdates
from zeroshard.offload.host_chunk import HostChunk, HostGradTransfer
from zeroshard.optim.fused_update import FusedUpdate

Groups = Sequence[Mapping[str, Any]]
"""An optimizer's param groups, for their options."""

Wait = Callable[[], None]
"""Waits until an updated parameter is on the device. Raises what its update raised."""


T = TypeVar("T")


class AsyncUpdateWorker:
    """The worker thread of one engine that trains on ``device``.

    ``threads``: threads that one update may use, including the worker. ``delayed``: an updated parameter
    is copied to the device when it is waited for, not at once.
    """

    def __init__(self, device: torch.device, *, threads: int, delayed: bool) -> None:
        self.threads = threads
        self.delayed = delayed
        self.early: EarlyUpdates | None = None  # set once, before the first update
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
        early: EarlyUpdate | None = None,
    ) -> None:
        """Wait for the gradient, then update the chunk on the calling thread.

        ``early``: the chunk was updated before. That stands, or is taken back first.
        """
        if early is None:
            transfer.wait()
        elif early.settle(transfer):
            return
        if transfer.is_edited:
            host_chunk.copy_param_from_device()
        numbers = transfer.numbers
        if not numbers.is_skipped:
            prepared.run(transfer.grad_C, numbers.factor, groups, threads=self.threads)

    def submit(
        self,
        prepared: FusedUpdate,
        host_chunk: HostChunk,
        transfer: HostGradTransfer,
        groups: Groups,
        early: EarlyUpdate | None = None,
    ) -> Wait:
        """Run :meth:`update` on the worker, with the options that ``groups`` have now."""
        options = options_of(groups)

        def update() -> CopyHandle | None:
            self.update(prepared, host_chunk, transfer, options, early)
            return None if self.delayed else host_chunk.send_param(at_once=True)

        future = self.start(update)

        def wait() -> None:
            arrival = future.result()
            host_chunk.wait_for_param(host_chunk.send_param() if self.delayed else arrival)

        return wait

    def start(self, task: Callable[[], T]) -> Future[T]:
        """Run ``task`` on the worker, after all that was started before."""
        return self._worker.submit(task)

    def wait(self) -> None:
        """Block this thread until all updates have ended. Their errors are raised where they are used."""
        self._worker.submit(_nothing).result()

    def close(self) -> None:
        """Wait for the update that runs, and drop those that have not begun."""
        self._worker.shutdown(wait=True, cancel_futures=True)


def options_of(groups: Groups) -> list[dict[str, Any]]:
    """The options of param groups as they are now."""
    return [{**group, "params": ()} for group in groups]


def _nothing() -> None:
    """The last task of a queue."""


class PendingUpdates:
    """The chunks of one unit whose updated parameters may not have arrived yet."""

    def __init__(self, waits: Sequence[Wait]) -> None:
        self._waits = list(waits)

    def wait(self) -> None:
        """Wait for the updates, so that the current stream may use this rank's part of the unit.

        Raises what the worker raised.
        """
        while self._waits:
            self._waits[0]()
            del self._waits[0]  # after the wait: a failed one raises again in the next call
