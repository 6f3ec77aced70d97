"""The collectives that the runtime may call, and what all transports have in common.

W ranks share a unit; N padded elements of the unit, S = N // W; K elements of a small vector.
Every call that returns a handle returns at once; ``wait`` on the handle finishes it. Reductions sum, in
the order of ranks, so that all ranks have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from zeroshard.comm.recorder import Entry, Item, Recorder
from zeroshard.core.texts import rank_ranges
from zeroshard.errors import RankLost, UsageError
from zeroshard.memory import storage

_CPU = torch.device("cpu")


class Handle(Protocol):
    """A collective in flight. It keeps its buffers alive; none of them may be written before ``wait``."""

    def wait(self) -> None:
        """Return when the result is complete. On CUDA: when the current stream is made to wait for it."""


@runtime_checkable
class Comm(Protocol):
    """Collectives over the ranks that share one unit."""

    size: int
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


class Then:
    """Waits for ``handles``, and does one thing more. Keeps what ``after`` needs until then."""

    __slots__ = ("_after", "_handles")

    def __init__(self, after: Callable[[], None], *handles: Handle) -> None:
        self._after: Callable[[], None] | None = after
        self._handles = handles

    def wait(self) -> None:
        """See :class:`Handle`. Only the first wait does something."""
        handles, self._handles = self._handles, ()
        after, self._after = self._after, None
        for handle in handles:
            handle.wait()
        if after is not None:
            after()


class SoloComm:
    """One rank: every collective is a copy. Needs no process group."""

    size = 1
    rank = 0
    transport = "solo"

    def __init__(self, recorder: Recorder | None = None) -> None:
        self.recorder = recorder or Recorder()
        self._broadcasts = self.recorder.entries("broadcast")

    def all_gather(self, full_N: Tensor, shard_S: Tensor, *, name: str) -> Handle:
        """Copy ``shard_S`` to ``full_N``; nothing moves if both are one buffer."""
        self.recorder.all_gather(name, full_N, shard_S)
        full_N.copy_(shard_S)
        return DONE

    def reduce_scatter(self, out_S: Tensor, full_N: Tensor, *, name: str) -> Handle:
        """Copy ``full_N`` to ``out_S``; nothing moves if both are one buffer."""
        self.recorder.reduce_scatter(name, out_S, full_N)
        out_S.copy_(full_N)
        return DONE

    def all_gather_small(self, vector_K: Tensor, *, name: str) -> Tensor:
        """A copy with one row."""
        self.recorder.gather_small(name, vector_K, 0)
        return vector_K.detach().clone().unsqueeze(0)

    def broadcast(self, tensor: Tensor, src: int, *, name: str) -> Handle:
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
        self.size = len(ranks)
        self.rank = rank
        self.ranks = tuple(ranks)
        self.recorder = recorder or Recorder()
        self._guard: ErrorExplainer = guard or NoExplainer()
        self.memory: CommMemory = PLAIN

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory of the kind that this communicator has: plain, or registered."""
        return self.memory.empty(numel, dtype=dtype, device=device)

    def _record_broadcast(self, tensor: Tensor, src: int, name: str) -> Item:
        check_source(src, self.size)
        receivers = self.size - 1 if src == self.rank else 0
        return self.recorder.broadcast(name, tensor, self.ranks[src], receivers)


def queues_on_device(comm: Comm) -> bool:
    """Whether collectives are queued on streams of the device, as NCCL's are: a wait blocks no thread."""
    return getattr(comm, "queues_on_device", False)


def check_source(src: int, size: int) -> None:
    """Check that ``src`` is a rank of the group.

    Raises:
        UsageError: it is not.
    """
    if not 0 <= src < size:
        raise UsageError(
            f"broadcast from rank {src}: this group has ranks 0 to {size - 1}. "
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


class CommMemory:
    """Gives memory for the tensors of one communicator's collectives: that of torch's allocator."""

    def empty(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """``[numel]``, with undefined contents."""
        return torch.empty(numel, dtype=dtype, device=device)

    def use(self) -> AbstractContextManager[object]:
        """A context in which what this thread allocates is such memory."""
        return nullcontext()

    #: Gives the storage of a flat tensor so many bytes, with undefined contents, in one call.
    resize = staticmethod(storage.resize)

    def forget(self) -> None:
        """The communicator is about to be aborted. Any thread may call this."""

    def close(self) -> None:
        """The communicator ends. Tensors keep their memory."""


PLAIN = CommMemory()


def memory_of(comm: object) -> CommMemory:
    """The memory for tensors that a communicator gathers into. Those of one rank have plain memory."""
    found: CommMemory = getattr(comm, "memory", PLAIN)
    return found


class Scratch:
    """Flat buffers that are reused; at most as many as were ever in flight at once."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self.nbytes = self.peak_nbytes = 0

    def take(self, dtype: torch.dtype, numel: int, device: torch.device = _CPU) -> Tensor:
        """A buffer of at least ``numel`` elements on ``device``: the smallest free one, or a new one."""
        same = [t for t in self._free if t.dtype == dtype and t.device == device]
        fits = [t for t in same if t.numel() >= numel]
        if fits:
            best = min(fits, key=Tensor.numel)
            self._free = [t for t in self._free if t is not best]
            return best
        stale = next(iter(same), None)
        if stale is not None:  # too small for this run's units: free it
            self._free = [t for t in self._free if t is not stale]
            self.nbytes -= stale.nbytes
        fresh = torch.empty(numel, dtype=dtype, device=device)
        self.nbytes += fresh.nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
        return fresh

    def give(self, buffer: Tensor) -> None:
        self._free.append(buffer)


class KeepsScratch:
    """A communicator with a :class:`Scratch`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._scratch = Scratch()

    def _summed(
        self, arrival: Handle, parts: Sequence[Tensor], out_S: Tensor, space: Tensor
    ) -> Handle:
        """``out_S`` gets the sum of ``parts`` when they have arrived in ``space``."""
        scratch = self._scratch

        def add() -> None:
            sum_in_rank_order(parts, out_S)
            scratch.give(space)

        return Then(add, arrival)

    @property
    def scratch_nbytes(self) -> int:
        """Bytes kept for incoming chunks, on the device of the reduced tensors."""
        return self._scratch.nbytes

    @property
    def scratch_peak_nbytes(self) -> int:
        """The most of them so far."""
        return self._scratch.peak_nbytes


#: Elements summed at a time: blocks of all ranks together stay in the second-level cache.
_BLOCK_NUMEL = 1 << 16
_SHORT = frozenset({torch.float16, torch.bfloat16})


def sum_in_rank_order(parts: Sequence[Tensor], out_S: Tensor) -> None:
    """``out_S = parts[0] + parts[1] + ...``, rounded once; ``out_S`` may be one of the parts.

    Two 16-bit numbers need no fp32 buffer: ``add`` gives their fp32 sum, rounded once.
    """
    if len(parts) == 2:
        torch.add(parts[0], parts[1], out=out_S)
        return
    # Mixed-dtype arithmetic is 15 times slower on CPU than a widening copy and an add.
    short = parts[0].dtype in _SHORT
    numel = out_S.numel()
    wide = sum_temporary(out_S)
    block = wide.shape[1]
    for begin in range(0, numel, block):
        end = min(begin + block, numel)
        total, term = wide[:, : end - begin]
        total.copy_(parts[0][begin:end])
        for part in parts[1:]:
            total.add_(term.copy_(part[begin:end]) if short else part[begin:end])
        out_S[begin:end].copy_(total)


def sum_temporary(out_S: Tensor) -> Tensor:
    """Two rows of fp32 in which more than two parts are added, a block of elements at a time."""
    dtype = torch.float32 if out_S.dtype in _SHORT else out_S.dtype
    return out_S.new_empty((2, min(out_S.numel(), _BLOCK_NUMEL)), dtype=dtype)
