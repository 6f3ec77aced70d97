"""Runs the update in host memory asynchronously, on one worker thread.

The worker takes one chunk after another, in the order of forward. For each it waits for the gradient,
updates, and starts the copy of the parameter to the device. The main thread waits only when it uses a
unit whose parameters have not arrived yet. With ``super_offload`` it begins before the norm of the
gradient is known.

[Note: early updates] Usually clipping does not change the gradient, and the factor of the gradient is
then known in backward. So a chunk is updated when its gradient arrives, on the worker thread, while
backward goes on (SuperOffload, arXiv 2509.21271; ADR 0024). Its old state is copied aside first. When the
norm is known, the worker *settles* the update: it stands if the step uses the same numbers. Otherwise the
old state is copied back, and the chunk is updated as if it had not begun. So no bit depends on it.

*What nobody sees.* The parameter on the device changes after the update was settled. Master and optimizer
state in host memory have new values before. Whatever reads or writes them, or changes the gradient,
between backward and step *withdraws* the early updates first: it waits for them and copies the old state
back. ``OptimizerShard.loaded``, ``ShardedOptimizer.wait_for_worker``, ``optimizer.state``, the tensors in
the optimizer's groups and :class:`~zeroshard.offload.grad_store.HostGradStore` do so. A tensor that the
program kept from before can be read without that; a write through it is an error in the step.

*Cost.* Host memory for the old state, and twice its bytes of memory traffic. A refused update is done
twice. So after a refused step 1 step waits for the norm; after a second one in a row 3 do, then 7, 15 and
always 31.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from zeroshard.device.choice import choose_device
from zeroshard.device.copy_streams import CopyHandle, CopyStreams
from zeroshard.errors import UsageError
from zeroshard.offload.host_chunk import HostChunk, HostGradTransfer
from zeroshard.optim.fused_update import FusedUpdate

LONGEST_PAUSE = 5
"""After so many refused steps in a row, ``2**LONGEST_PAUSE - 1`` steps wait for the norm."""

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
        self.start(lambda: None).result()

    def close(self) -> None:
        """Wait for the update that runs, and drop those that have not begun."""
        self._worker.shutdown(wait=True, cancel_futures=True)


def options_of(groups: Groups) -> list[dict[str, Any]]:
    """The options of param groups as they are now."""
    return [{**group, "params": ()} for group in groups]


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


class Guess:
    """What the early updates of one step assume: the gradient's factor and the options of the groups.

    ``factor_1``: in host memory, valid after ``arrival``. ``is_refused``: an update of the step was not
    right, or was withdrawn.
    """

    def __init__(self, groups: Groups, factor_1: Tensor, arrival: CopyHandle) -> None:
        self.options = [_values_of(group) for group in groups]
        self.groups = options_of(groups)
        self.is_refused = False
        self.chunks: set[HostChunk] = set()
        self.factor: float | None = None
        self.readers: list[Future[None]] = []
        self._factor_1, self._arrival = factor_1, arrival

    def arrived_factor(self) -> float:
        """Wait for the factor's copy. The memory may be used again when no reader runs."""
        if self.factor is None:
            self._arrival.synchronize()
            self.factor = float(self._factor_1)
        return self.factor

    def holds_for(self, groups: Groups) -> bool:
        """Whether the groups have the same options now."""
        return self.options == [_values_of(group) for group in groups]


class EarlyUpdate:
    """The update of one chunk that began before the norm was known, and the state before it.

    ``kept``: memory for the old state, tensors like ``fused.changed()``.
    """

    def __init__(self, fused: FusedUpdate, kept: list[Tensor], guess: Guess) -> None:
        self.fused = fused
        self.guess = guess
        self._changed, self._kept = fused.changed(), kept
        self._began = self._failed = False
        self._versions: list[int] = []
        self.future: Future[None] | None = None

    def run(self, grad_C: Tensor, arrival: CopyHandle, threads: int) -> None:
        """Wait for the gradient, copy the state aside and update. On the worker thread.

        Never raises: an update that fails is undone, and done again by the step, which raises its error.
        """
        guess = self.guess
        try:
            arrival.synchronize()
            factor = guess.arrived_factor()
            torch._foreach_copy_(self._kept, self._changed)
            self._began = True
            self.fused.run(grad_C, factor, guess.groups, threads=threads, keeps_grad=True)
            self._versions = [flat._version for flat in self._changed]
        except Exception:
            self._failed = True

    def settle(self, transfer: HostGradTransfer) -> bool:
        """Wait for the numbers of the step. Returns whether the update stands; else it is undone.

        Raises:
            UsageError: the program wrote into optimizer state while the update had changed it.
        """
        try:
            transfer.wait()
            self._check_versions()
        except BaseException:
            self.undo()
            raise
        numbers, guess = transfer.numbers, self.guess
        stands = not (
            self._failed
            or transfer.is_edited
            or numbers.is_skipped
            or numbers.factor != guess.factor
        )
        if not stands:
            self.undo()
        return stands

    def undo(self) -> None:
        """Copy the old state back. The update must have ended."""
        self.guess.is_refused = True
        if self._began:
            torch._foreach_copy_(self._changed, self._kept)
            self._began = False

    def withdraw(self) -> None:
        """Wait until the update has ended, and undo it, unless it has not begun."""
        assert self.future is not None
        self.guess.is_refused = True
        if not self.future.cancel():
            self.future.result()
            try:
                self._check_versions()
            finally:
                self.undo()

    def _check_versions(self) -> None:
        if self._versions and self._versions != [flat._version for flat in self._changed]:
            raise UsageError(
                "the program wrote into a master or into optimizer state between backward and step(), "
                "through a tensor that it had kept from before. With super_offload these have the values "
                "of an update that began in backward and may be copied back. Get the tensor again before "
                "each write (optimizer.state, zeroshard.zero.safe_set_local_optimizer_state), or write "
                "after step()."
            )


class EarlyUpdates:
    """The early updates of one engine. See [Note: early updates].

    ``units``: names of those that may be updated early. ``factor_1``: float64 in host memory. ``guess``:
    returns the factor of the running step without clipping, 0-dim on the device; set by the engine.
    """

    def __init__(
        self,
        worker: AsyncUpdateWorker,
        units: Collection[str],
        streams: CopyStreams,
        factor_1: Tensor,
    ) -> None:
        self.units = units
        self.guess: Callable[[], Tensor] | None = None
        self.begun = 0  # early updates since the engine was built
        self._worker = worker
        self._streams = streams
        self._factor_1 = factor_1
        self._kept: dict[HostChunk, list[Tensor]] = {}
        self._open: dict[HostChunk, EarlyUpdate] = {}
        self._handed_over: dict[HostChunk, EarlyUpdate] = {}
        self._last: Guess | None = None
        self._refused = 0  # steps in a row
        self._pause = 0  # steps that wait for the norm
        self._waiting: set[HostChunk] = set()  # chunks of the paused step that were here

    def begin(self, host_chunk: HostChunk, fused: FusedUpdate, groups: Groups) -> None:
        """Start the update of a chunk whose gradient is on its way, if the last steps suggest it."""
        guess = self._guess_for(host_chunk, groups)
        if guess is None or guess.is_refused:
            return
        early = EarlyUpdate(fused, self._memory(host_chunk, fused), guess)
        grad_C, arrival = host_chunk.gradient
        early.future = self._worker.start(lambda: early.run(grad_C, arrival, self._worker.threads))
        guess.readers.append(early.future)
        self._open[host_chunk] = early
        self.begun += 1

    def hand_over(self) -> None:
        """The step begins: from here on its updaters have the open updates, and none is withdrawn."""
        self._handed_over, self._open = self._open, {}

    def take(
        self, host_chunk: HostChunk, fused: FusedUpdate | None, groups: Groups
    ) -> EarlyUpdate | None:
        """The chunk's early update, which the caller settles. None: there is none of these options."""
        early = self._handed_over.pop(host_chunk, None)
        if early is None or (early.fused is fused and early.guess.holds_for(groups)):
            return early
        early.withdraw()
        return None

    def withdraw(self) -> None:
        """Undo the open updates. Waits for one that runs.

        Raises:
            UsageError: the program wrote into optimizer state.
        """
        while self._open:
            self._open.popitem()[1].withdraw()  # the newest first, which has not begun

    def withdraw_if_open(self, host_chunks: Sequence[HostChunk]) -> None:
        """Undo all open updates if one of these chunks has one: its gradient is not valid any more."""
        if any(host_chunk in self._open for host_chunk in host_chunks):
            self.withdraw()

    def close(self) -> None:
        """Withdraw all, and hold the engine no longer."""
        self.withdraw()
        self.guess = None
        self._kept.clear()

    def _guess_for(self, host_chunk: HostChunk, groups: Groups) -> Guess | None:
        """The guess of the running step. A chunk that comes again begins the next step.

        None: the step waits for the norm.
        """
        last = self._last
        if last is not None and host_chunk not in last.chunks:
            last.chunks.add(host_chunk)
            return last
        if last is not None:
            self._refused = min(self._refused + 1, LONGEST_PAUSE) if last.is_refused else 0
            self._pause, self._last = 2**self._refused - 1, None
            self._waiting.clear()
            for reader in last.readers:
                if not reader.cancelled():
                    reader.result()  # the memory is used again
        if self._is_paused(host_chunk) or _has_tensors(groups) or self.guess is None:
            return None
        factor_1 = self.guess().double().view(1)
        guess = Guess(groups, self._factor_1, self._streams.d2h(factor_1, self._factor_1))
        guess.chunks.add(host_chunk)
        self._last = guess
        return guess

    def _is_paused(self, host_chunk: HostChunk) -> bool:
        if not self._pause:
            return False
        if host_chunk in self._waiting:
            self._pause -= 1
            self._waiting.clear()
        self._waiting.add(host_chunk)
        return self._pause > 0

    def _memory(self, host_chunk: HostChunk, fused: FusedUpdate) -> list[Tensor]:
        """Memory for the old state of a chunk, from its first use on."""
        kept, changed = self._kept.get(host_chunk), fused.changed()
        if kept is None or [t.shape for t in kept] != [t.shape for t in changed]:
            kept = self._kept[host_chunk] = [torch.empty_like(flat) for flat in changed]
        return kept


def _values_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Options that can be compared, and do not change with the group."""
    kinds = (int, float, str, tuple, type(None))
    lists = {name: tuple(value) for name, value in group.items() if isinstance(value, list)}
    plain = {name: value for name, value in group.items() if isinstance(value, kinds)}
    return {**plain, **lists, "params": ()}


def _has_tensors(groups: Groups) -> bool:
    """Whether an option is a tensor: it can change without being replaced, and may be on the device."""
    return any(isinstance(value, Tensor) for group in groups for value in group.values())
