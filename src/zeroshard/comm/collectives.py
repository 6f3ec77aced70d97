"""The collectives that the runtime may call, over one rank or over a process group.

W ranks share a unit; N padded elements of the unit, S = N // W; K elements of a small vector.
Every call that returns a handle returns at once; ``wait`` on the handle finishes it. Reductions sum.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.comm.entries import Entry
from zeroshard.comm.flight_recorder import rank_ranges
from zeroshard.comm.host import shut_down
from zeroshard.comm.plain_memory import PLAIN, CommMemory
from zeroshard.comm.recorder import Item, Recorder
from zeroshard.errors import RankLost, UsageError

_SLICE = timedelta(seconds=1)
#: Dtypes that every backend can gather; tensors of other dtypes are sent as bytes.
_NATIVE = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16}
    | {torch.int64, torch.int32, torch.int8, torch.uint8}
)
_CPU = torch.device("cpu")
_AllgatherOptions: Any = vars(dist.distributed_c10d)["AllgatherOptions"]  # torch does not export it


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


class JointHandle:
    """The handle of collectives that were started as one. All whose tensors they fill wait for it."""

    __slots__ = ("_error", "_handle")

    def __init__(self, handle: Handle) -> None:
        self._handle: Handle = handle
        self._error: BaseException | None = None

    def wait(self) -> None:
        """See :class:`Handle`. After an error every wait raises it: no result is complete."""
        if self._error is not None:
            raise self._error
        handle, self._handle = self._handle, DONE
        try:
            handle.wait()
        except BaseException as error:
            self._error = error
            raise


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


class BoundCollectives:
    """The collectives of one process group, bound once. Each starts one and returns torch's work.

    ``torch.distributed`` looks up the group and checks all arguments in every call. Without that a
    reduce-scatter of torch's fake backend takes 7 us of host time, with it 11 us.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        # torch 2.13 renamed these two
        gather: Any = getattr(group, "all_gather_single", None) or group._allgather_base
        scatter: Any = getattr(group, "reduce_scatter_single", None) or group._reduce_scatter_base
        gather_options, scatter_options = _AllgatherOptions(), dist.ReduceScatterOptions()
        gather_options.asyncOp = scatter_options.asyncOp = True
        self.all_gather: Callable[[Tensor, Tensor], Any] = lambda full_N, shard_S: gather(
            full_N, shard_S, gather_options
        )
        self.reduce_scatter: Callable[[Tensor, Tensor], Any] = lambda out_S, full_N: scatter(
            out_S, full_N, scatter_options
        )
        # Of lists of tensors; NCCL starts each list as one group, which is one launch.
        gathers: Any = (
            getattr(group, "all_gather_single_coalesced", None)
            or group.allgather_into_tensor_coalesced
        )
        scatters: Any = (
            getattr(group, "reduce_scatter_single_coalesced", None)
            or group.reduce_scatter_tensor_coalesced
        )
        self.joint_all_gather: Callable[[list[Tensor], list[Tensor]], Any] = lambda full, shards: (
            gathers(full, shards, gather_options)
        )
        self.joint_reduce_scatter: Callable[[list[Tensor], list[Tensor]], Any] = lambda out, full: (
            scatters(out, full, scatter_options)
        )
        self.broadcast: Callable[..., Any] = partial(dist.broadcast, group=group, async_op=True)
        self.all_to_all: Callable[..., Any] = partial(
            dist.all_to_all_single, group=group, async_op=True
        )


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
        device: torch.device = _CPU,
        buffer_nbytes: int = 0,
    ) -> None:
        super().__init__(dist.get_rank(group), dist.get_process_group_ranks(group), recorder, guard)
        backend = dist.get_backend(group)
        self.transport = backend if backend in ("nccl", "fake") else f"stock:{backend}"
        self.recorder.compares = backend != "fake"
        self.queues_on_device = backend not in ("fake", "gloo") and device.type != "cpu"
        #: Whether several collectives can be one launch: ``joint_all_gather``, ``joint_reduce_scatter``.
        self.joins = backend in ("nccl", "fake")
        self._group: dist.ProcessGroup | None = group
        self._bound: BoundCollectives | None = BoundCollectives(group)
        self._owns_group = owns_group
        self._device = device
        self._buffer_nbytes = buffer_nbytes
        # Gloo blocks the host inside wait: slices of time let Ctrl-C and a fatal diagnosis take effect.
        self._slice = _SLICE if backend == "gloo" else None
        self._sockets = dict(sockets or {})

    @property
    def group_name(self) -> str:
        """The name that torch gave the group; "" once this communicator is closed."""
        return "" if self._group is None else str(self._group.group_name)

    @property
    def backend(self) -> Any:
        """Torch's object for the collectives of the device; None once this communicator is closed."""
        return None if self._group is None else self._group._get_backend(self._device)

    @property
    def scratch_nbytes(self) -> int:
        """Bytes of device memory that the backend took when this communicator was made."""
        return self._buffer_nbytes

    @property
    def scratch_peak_nbytes(self) -> int:
        """The same: they stay."""
        return self.scratch_nbytes

    def all_gather(self, full_N: Tensor, shard_S: Tensor, *, name: str) -> Handle:
        """Stock all-gather. Dtypes that a backend may not know are sent as bytes."""
        item = self.recorder.all_gather(name, full_N, shard_S)
        if not full_N.numel():
            return DONE
        if full_N.dtype not in _NATIVE:
            full_N, shard_S = full_N.view(torch.uint8), shard_S.view(torch.uint8)
        return self._start(item, self.bound(item).all_gather, full_N, shard_S)

    def reduce_scatter(self, out_S: Tensor, full_N: Tensor, *, name: str) -> Handle:
        """Stock reduce-scatter."""
        item = self.recorder.reduce_scatter(name, out_S, full_N)
        if not full_N.numel():
            return DONE
        return self._start(item, self.bound(item).reduce_scatter, out_S, full_N)

    def all_to_all(self, out_N: Tensor, full_N: Tensor, *, name: str) -> Handle:
        """Slice r of ``out_N`` gets the slice for this rank of rank r's ``full_N``. uint8."""
        item = self.recorder.all_to_all(name, full_N, full_N.numel() // self.size)
        return self._start(item, self.bound(item).all_to_all, out_N, full_N)

    def joint_all_gather(
        self, full_N: Sequence[Tensor], shard_S: Sequence[Tensor], *, name: str
    ) -> JointHandle:
        """All-gathers of several tensors of one dtype, started as one and recorded as one."""
        item = self._enter_joint("all_gather", name, full_N)
        full, shards = list(full_N), list(shard_S)
        if full[0].dtype not in _NATIVE:
            full = [tensor.view(torch.uint8) for tensor in full]
            shards = [tensor.view(torch.uint8) for tensor in shards]
        return JointHandle(self._start(item, self.bound(item).joint_all_gather, full, shards))

    def joint_reduce_scatter(
        self, out_S: Sequence[Tensor], full_N: Sequence[Tensor], *, name: str
    ) -> JointHandle:
        """Reduce-scatters of several tensors of one dtype, started as one and recorded as one."""
        item = self._enter_joint("reduce_scatter", name, full_N)
        call = self.bound(item).joint_reduce_scatter
        return JointHandle(self._start(item, call, list(out_S), list(full_N)))

    def _enter_joint(self, op: str, name: str, full_N: Sequence[Tensor]) -> Item:
        numel = sum([tensor.numel() for tensor in full_N])
        sent = numel - numel // self.size
        return self.recorder.enter(self.recorder.entries(op)[name], full_N[0], numel, sent)

    def all_gather_small(self, vector_K: Tensor, *, name: str) -> Tensor:
        """Stock all-gather into a new tensor; on CUDA the result is ready on the current stream."""
        item = self.recorder.gather_small(name, vector_K, self.size - 1)
        rows = vector_K.new_empty((self.size, vector_K.numel()))
        if vector_K.numel():
            flat, vector = rows.view(-1), vector_K.detach().contiguous()
            if vector.dtype not in _NATIVE:
                flat, vector = flat.view(torch.uint8), vector.view(torch.uint8)
            self._start(item, self.bound(item).all_gather, flat, vector).wait()
        return rows

    def broadcast(self, tensor: Tensor, src: int, *, name: str) -> Handle:
        """Stock broadcast; ``src`` is a rank of this group."""
        item = self._record_broadcast(tensor, src, name)
        if not tensor.numel():
            return DONE
        values = tensor.detach() if tensor.requires_grad else tensor
        if values.is_complex():  # gloo knows no complex dtype
            values = torch.view_as_real(values)
        return self._start(item, self.bound(item).broadcast, values, self.ranks[src])

    def bound(self, item: Item) -> BoundCollectives:
        """The collectives of the group.

        Raises:
            UsageError: this communicator was closed.
        """
        if self._bound is None:
            raise closed(item[1])
        return self._bound

    def _start(self, item: Item, call: Callable[..., Any], *args: Any) -> Handle:
        try:
            work = call(*args)
        except RuntimeError as error:
            self.fail(item, error)
        return _Pending(self, item, work, args)

    def finish(self, item: Item, work: Any) -> None:
        """Wait for ``work``; a transport error is replaced by the exception that the guard explains."""
        began_s = self.recorder.begin_wait(item)
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
            self.recorder.end_wait(item, began_s)
        self.recorder.note_pending(item)

    def fail(self, item: Item, error: RuntimeError) -> NoReturn:
        """Raise the exception that the guard gives for a transport error."""
        peers = [r for i, r in enumerate(self.ranks) if i != self.rank]
        raise self._guard.explain(item, peers, first_line(error)) from None

    def abort(self) -> None:
        """Make every blocked wait on this group fail now. Called by the watchdog's thread."""
        self.memory.forget()
        if self._sockets:
            shut_down(self._sockets)
        elif self._owns_group and self.queues_on_device:
            abort = getattr(self.backend, "abort", None)
            if abort is not None:
                abort()

    def close(self) -> None:
        """Destroy the group if this object made it."""
        self.memory.close()
        group, self._group, self._bound = self._group, None, None
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


def joining(comm: Comm) -> ProcessGroupComm | None:
    """``comm``, if several of its collectives can be one launch, as those of NCCL can."""
    return comm if isinstance(comm, ProcessGroupComm) and comm.joins else None


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
