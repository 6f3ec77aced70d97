"""Updates one chunk in host memory, while the parameter is used on another device.

The gradient is copied from the device and the parameter back. Where the chunk's memory stays valid, the
worker thread makes the fused pass: in the step or, if that is likely to be right, before it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zeroshard.offload.async_update import AsyncUpdateWorker, Wait
from zeroshard.offload.early_update import EarlyUpdates
from zeroshard.offload.host_chunk import HostChunk, HostGradTransfer
from zeroshard.optim.fused_update import FusedUpdate
from zeroshard.zero.optimizer_object import OptimizerObject
from zeroshard.zero.optimizer_shard import OptimizerChunk, OptimizerShard
from zeroshard.zero.updaters import NO_SLOTS, FusedStep, OwnStep, StepInputs


class HostUpdater:
    """In host memory, on this thread.

    For chunks whose memory is valid only during the call, and for optimizers without a kernel.
    """

    def __init__(
        self,
        shard: OptimizerShard,
        chunk: OptimizerChunk,
        host_chunk: HostChunk,
        own: OwnStep,
        fused: FusedStep | None,
        optimizer: OptimizerObject,
        worker: AsyncUpdateWorker,
    ) -> None:
        self.following: HostUpdater | None = None  # its copies begin before this chunk is updated
        self._shard = shard
        self._chunk = chunk
        self._host_chunk = host_chunk
        self._own = own
        self._fused = fused
        self._inner = optimizer.inner
        self._worker = worker
        self._begun: tuple[StepInputs, HostGradTransfer] | None = None

    def step(self, inputs: StepInputs) -> Wait | None:
        """See :class:`Updater`."""
        transfer, skipped = self.sent(inputs)
        return self._update(transfer, skipped, self._prepared(skipped))

    def begin(self, inputs: StepInputs) -> HostGradTransfer:
        """Start copying the gradient, unless that was started in backward, and the step's numbers."""
        if self._begun is not None and self._begun[0] is inputs:
            return self._begun[1]
        shard, host_chunk = self._shard, self._host_chunk
        if not shard.buffer.is_stored:
            host_chunk.send_gradient(shard.gradient_of(self._chunk))
        transfer = host_chunk.transfer(inputs, inputs.factor, inputs.found_inf)
        self._begun = inputs, transfer
        return transfer

    def sent(self, inputs: StepInputs) -> tuple[HostGradTransfer, frozenset[int]]:
        """Start the copies of this chunk and of the following one."""
        transfer = self.begin(inputs)
        if self.following is not None:
            self.following.begin(inputs)
        self._begun = None
        return transfer, inputs.untouched.get(id(self._shard.unit), NO_SLOTS)

    def _prepared(self, skipped: frozenset[int]) -> FusedUpdate | None:
        return None if skipped or self._fused is None else self._fused.prepared()

    def _update(
        self, transfer: HostGradTransfer, skipped: frozenset[int], fused: FusedUpdate | None
    ) -> Wait:
        if fused is not None:
            self._worker.update(fused, self._host_chunk, transfer, self._inner.param_groups)
        else:
            factor = self.receive(transfer)
            if factor is not None:
                self._own.run(transfer.grad_C, factor, skipped)
        return self.send()

    def receive(self, transfer: HostGradTransfer) -> Tensor | None:
        """Wait for the gradient, and take over edits. Returns its factor; None: the step is skipped."""
        transfer.wait()
        if transfer.is_edited:
            self._host_chunk.copy_param_from_device()
        self._chunk.sync_from_param()
        if transfer.numbers.is_skipped:
            return None
        return torch.tensor(transfer.numbers.factor, dtype=torch.float64)

    def send(self) -> Wait:
        """Let the parameter be copied to the device. Returns what waits for it."""
        host_chunk = self._host_chunk
        if self._chunk.page is None:
            return lambda: host_chunk.wait_for_param(host_chunk.send_param())
        # Started now: the chunk after the following one uses the same memory.
        arrival = host_chunk.send_param()
        return lambda: host_chunk.wait_for_param(arrival)


class AsyncHostUpdater(HostUpdater):
    """In host memory, on the worker thread if the fused pass is prepared, else on this thread."""

    def step(self, inputs: StepInputs) -> Wait | None:
        """See :class:`Updater`."""
        transfer, skipped = self.sent(inputs)
        fused = self._prepared(skipped)
        if fused is None:
            return self._update(transfer, skipped, fused)
        return self._worker.submit(fused, self._host_chunk, transfer, self._inner.param_groups)


class EarlyHostUpdater(AsyncHostUpdater):
    """In host memory, and begun before the step if that is likely to be right.

    See [Note: early updates] in :mod:`zeroshard.offload.early_update`.
    """

    def __init__(self, *args: Any, early: EarlyUpdates) -> None:
        super().__init__(*args)
        self._early = early

    def begin_early(self) -> None:
        """Start the update, after the gradient was sent. None before the optimizer has made its state."""
        fused = self._prepared(NO_SLOTS)
        if fused is not None:
            self._early.begin(self._host_chunk, fused, self._inner.param_groups)

    def step(self, inputs: StepInputs) -> Wait | None:
        """See :class:`Updater`."""
        transfer, skipped = self.sent(inputs)
        fused, groups = self._prepared(skipped), self._inner.param_groups
        early = self._early.take(self._host_chunk, fused, groups)
        if fused is None:
            return self._update(transfer, skipped, fused)
        return self._worker.submit(fused, self._host_chunk, transfer, groups, early)
