"""The collectives that the runtime may call, over one rank or over a process group.

W ranks share a unit; N padded elements of the unit, S = N // W; K elements of a small vector.
Every call that returns a handle returns at once; ``wait`` on the handle finishes it. Reductions sum.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.comm.flight_recorder import rank_ranges
from zeroshard.comm.host import shut_down
from zeroshard.comm.recorder import Entry, Item, Recorder
from zeroshard.errors import RankLost, UsageError

_SLICE = timedelta(seconds=1)
#: Dtypes that every backend can gather; tensors of other dtypes are sent as bytes.
_NATIVE = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16}
    | {torch.int64, torch.int32, torch.int8, torch.uint8}
)
# torch 2.13 renamed these two and warns on every call under the old names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Handle(Protocol):
    """A collective in flight. It keeps its buffers alive; none of them may be written before ``wait``."""

    def wait(self) -> None:
        """Return when the result is complete. On CUDA: when the current stream is made to wait for it."""


@runtime_checkable
class Comm(Protocol):
    """Collectives over the ranks that share one unit."""

    world_size: int
    rank: int
    transport: str
    recorder: Recorder

    def all_gather(self, full_N: Tensor, shard_S: Tensor, *, name: str) -> Handle:
        """Fill ``full_N`` with every rank's ``shard_S``, which may be this rank's slice of ``full_N``."""

    def reduce_scatter(self, out_S: Tensor, full_N: Tensor, *, name: str) -> Handle:
        """Sum all ranks' ``full_N``; ``out_S`` gets this rank's slice and may lie inside ``full_N``."""

    def all_gather_small(self, vector_K: Tensor, *, name: str) -> Tensor:
        """``[W, K]``: row r is rank r's ``vector_K``. The result is equal on every rank."""

    def broadcast(self, tensor: Tensor, src: int, *, name: str) -> Handle:
        """Overwrite ``tensor`` on every rank with that of rank ``src`` of this group."""

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """``[numel]`` for one ``reduce_scatter``, in memory that this transport can send from.

        After the ``reduce_scatter`` the caller may write this rank's slice of it, or pass it to a later
        collective as the target. Nothing else may be written; then drop it. Its storage must not be
        resized.
        """

    def close(self) -> None:
        """Release groups, sockets and scratch memory. Later calls raise."""


class ErrorExplainer(Protocol):
    """Finds out why a transport failed."""

    def explain(self, item: Item, peers: Sequence[int], detail: str) -> Exception:
        """The exception to raise instead of a transport error on the links to ``peers``."""


class NoExplainer:
    """Used without a watchdog: all that is known is which connection closed."""

    def explain(self, item: Item, peers: Sequence[int], detail: str) -> Exception:
        """A :class:`RankLost` that names the ranks at the other end."""
        return RankLost(lost_text(item, peers, detail))


def lost_text(item: Item, peers: Sequence[int], detail: str) -> str:
    """One line: which connection closed, in which collective."""
    what = f"{item[1].op} {item[1].name!r} (#{item[0]})"
    who = f"rank {peers[0]}" if len(peers) == 1 else f"one of {rank_ranges(peers)}"
    return f"RankLost: the connection to {who} failed during {what}: {detail}"


class Done:
    """The handle of a collective that is already complete."""

    __slots__ = ()

    def wait(self) -> None:
        """Nothing to wait for."""


DONE = Done()


class SoloComm:
    """One rank: every collective is a copy. Needs no process group."""

    world_size = 1
    rank = 0
    transport = "solo"

    def __init__(self, recorder: Recorder | None = None) -> None:
        self.recorder = recorder or Recorder()
        self._gathers = self.recorder.entries("all_gather")
        self._reductions = self.recorder.entries("reduce_scatter")
        self._small = self.recorder.entries("gather_small")
        self._broadcasts = self.recorder.entries("broadcast")

    def all_gather(self, full_N: Tensor, shard_S: Tensor, *, name: str) -> Handle:
        """Copy ``shard_S`` to ``full_N``; nothing moves if both are one buffer."""
        self.recorder.enter(self._gathers[name], full_N, full_N.numel(), 0)
        full_N.copy_(shard_S)
        return DONE

    def reduce_scatter(self, out_S: Tensor, full_N: Tensor, *, name: str) -> Handle:
        """Copy ``full_N`` to ``out_S``; nothing moves if both are one buffer."""
        self.recorder.enter(self._reductions[name], full_N, full_N.numel(), 0)
        out_S.copy_(full_N)
        return DONE

    def all_gather_small(self, vector_K: Tensor, *, name: str) -> Tensor:
        """A copy with one row."""
        self.recorder.enter(self._small[name], vector_K, vector_K.numel(), 0)
        return vector_K.detach().clone().unsqueeze(0)

    def broadcast(self, tensor: Tensor, src: int, *, name: str) -> Handle:
        """Nothing moves."""
        check_source(src, 1)
        self.recorder.enter(self._broadcasts[name], tensor, tensor.numel(), 0)
        return DONE

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Plain memory."""
        return torch.empty(numel, dtype=dtype, device=device)

    def close(self) -> None:
        """Remove the recorder's file; there is nothing else to release."""
        self.recorder.close()


class RecordedComm:
    """Base of every communicator with more than one rank: records each collective before it starts.

    All transports use it, so that they name a collective and count its traffic in the same way.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        recorder: Recorder | None,
        guard: ErrorExplainer | None,
    ) -> None:
        self.world_size = len(ranks)
        self.rank = rank
        self.ranks = tuple(ranks)
        self.recorder = recorder or Recorder()
        self._guard: ErrorExplainer = guard or NoExplainer()
        self._gathers = self.recorder.entries("all_gather")
        self._reductions = self.recorder.entries("reduce_scatter")
        self._small = self.recorder.entries("gather_small")
        self._broadcasts = [self.recorder.entries(f"broadcast from {r}") for r in self.ranks]

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Plain memory."""
        return torch.empty(numel, dtype=dtype, device=device)

    def _record_gather(self, full_N: Tensor, shard_S: Tensor, name: str) -> Item:
        numel = full_N.numel()
        return self.recorder.enter(self._gathers[name], full_N, numel, numel - shard_S.numel())

    def _record_reduction(self, out_S: Tensor, full_N: Tensor, name: str) -> Item:
        numel = full_N.numel()
        return self.recorder.enter(self._reductions[name], full_N, numel, numel - out_S.numel())

    def _record_small(self, vector_K: Tensor, name: str) -> Item:
        numel = vector_K.numel()
        sent = numel * (self.world_size - 1)
        return self.recorder.enter(self._small[name], vector_K, numel, sent)

    def _record_broadcast(self, tensor: Tensor, src: int, name: str) -> Item:
        check_source(src, self.world_size)
        numel = tensor.numel()
        sent = numel * (self.world_size - 1) if src == self.rank else 0
        return self.recorder.enter(self._broadcasts[src][name], tensor, numel, sent)


class ProcessGroupComm(RecordedComm):
    """The stock collectives of a process group: NCCL, torch's fake backend and others.

    The backend decides the order of a sum. With two ranks it is rank order; with more, NCCL adds around a
    ring, in the dtype of the buffer. For gloo see :class:`zeroshard.comm.gloo.GlooComm`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        recorder: Recorder | None = None,
        guard: ErrorExplainer | None = None,
        owns_group: bool = False,
        sockets: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(dist.get_rank(group), dist.get_process_group_ranks(group), recorder, guard)
        backend = dist.get_backend(group)
        self.transport = backend if backend in ("nccl", "fake") else f"stock:{backend}"
        self._group: dist.ProcessGroup | None = group
        self._owns_group = owns_group
        # Gloo blocks the host inside wait: slices of time let Ctrl-C and a fatal diagnosis take effect.
        self._slice = _SLICE if backend == "gloo" else None
        self._sockets = dict(sockets or {})

    def all_gather(self, full_N: Tensor, shard_S: Tensor, *, name: str) -> Handle:
        """Stock all-gather. Dtypes that a backend may not know are sent as bytes."""
        item = self._record_gather(full_N, shard_S, name)
        if not full_N.numel():
            return DONE
        if full_N.dtype not in _NATIVE:
            full_N, shard_S = full_N.view(torch.uint8), shard_S.view(torch.uint8)
        return self._start(item, _all_gather, full_N, shard_S)

    def reduce_scatter(self, out_S: Tensor, full_N: Tensor, *, name: str) -> Handle:
        """Stock reduce-scatter."""
        item = self._record_reduction(out_S, full_N, name)
        return self._start(item, _reduce_scatter, out_S, full_N) if full_N.numel() else DONE

    def all_gather_small(self, vector_K: Tensor, *, name: str) -> Tensor:
        """Stock all-gather into a new tensor; on CUDA the result is ready on the current stream."""
        item = self._record_small(vector_K, name)
        rows = vector_K.new_empty((self.world_size, vector_K.numel()))
        if vector_K.numel():
            flat, vector = rows.view(-1), vector_K.detach().contiguous()
            if vector.dtype not in _NATIVE:
                flat, vector = flat.view(torch.uint8), vector.view(torch.uint8)
            self._start(item, _all_gather, flat, vector).wait()
        return rows

    def broadcast(self, tensor: Tensor, src: int, *, name: str) -> Handle:
        """Stock broadcast; ``src`` is a rank of this group."""
        item = self._record_broadcast(tensor, src, name)
        if not tensor.numel():
            return DONE
        return self._start(item, dist.broadcast, tensor.detach(), self.ranks[src])

    def _start(self, item: Item, call: Any, *args: Any) -> Handle:
        if self._group is None:
            raise closed(item[1])
        try:
            work = call(*args, group=self._group, async_op=True)
        except RuntimeError as error:
            self.fail(item, error)
        return _Pending(self, item, work, args)

    def finish(self, item: Item, work: Any) -> None:
        """Wait for ``work``; a transport error is replaced by the exception that the guard explains."""
        self.recorder.waiting = item
        try:
            while True:
                try:
                    work.wait(self._slice) if self._slice is not None else work.wait()
                    break
                except RuntimeError as error:
                    if self._slice is None or "Operation timed out" not in str(error):
                        raise
        except RuntimeError as error:
            self.fail(item, error)
        finally:
            self.recorder.waiting = None
        self.recorder.note_pending(item)

    def fail(self, item: Item, error: RuntimeError) -> NoReturn:
        """Raise the exception that the guard gives for a transport error."""
        peers = [r for i, r in enumerate(self.ranks) if i != self.rank]
        raise self._guard.explain(item, peers, first_line(error)) from None

    def abort(self) -> None:
        """Make every blocked wait on this group fail now. Called by the watchdog's thread."""
        group = self._group
        if self._sockets:
            shut_down(self._sockets)
        elif group is not None and self._owns_group and self.transport == "nccl":
            backend = group._get_backend(torch.device("cuda"))
            if hasattr(backend, "abort"):
                backend.abort()

    def close(self) -> None:
        """Destroy the group if this object made it."""
        group, self._group = self._group, None
        if group is not None and self._owns_group:
            with contextlib.suppress(ValueError):  # the program destroyed all groups before us
                dist.destroy_process_group(group)
        self.recorder.close()


class _Pending:
    """A stock collective in flight; it keeps the buffers alive until the wait."""

    __slots__ = ("_buffers", "_comm", "_item", "_work")

    def __init__(self, comm: ProcessGroupComm, item: Item, work: Any, buffers: Any) -> None:
        self._comm = comm
        self._item = item
        self._work = work
        self._buffers = buffers

    def wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            self._comm.finish(self._item, work)
            self._buffers = None


def check_source(src: int, world_size: int) -> None:
    """Check that ``src`` is a rank of the group.

    Raises:
        UsageError: it is not.
    """
    if not 0 <= src < world_size:
        raise UsageError(
            f"broadcast from rank {src}: this group has ranks 0 to {world_size - 1}. "
            "Give the rank inside the group, not the global one."
        )


def closed(entry: Entry) -> UsageError:
    """The error for a call on a closed communicator."""
    return UsageError(
        f"{entry.op} {entry.name!r} was called on a closed communicator. "
        "The engine that owned it was closed; build a new one."
    )


def first_line(error: BaseException) -> str:
    """The first line of a transport error, without source positions and guesses, up to 120 characters."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if line.startswith("[") and "] " in line:  # "[../third_party/gloo/...cc:547] Connection closed"
        line = line.split("] ", 1)[1]
    return line.split(". This may indicate")[0][:120]
