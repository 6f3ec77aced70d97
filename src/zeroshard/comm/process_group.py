"""Collectives over a process group of torch: NCCL, gloo, torch's fake backend and others.

W ranks; N padded elements, S = N // W; K elements of a small vector.

[Note: registered memory] NCCL can have a pool of device memory for each communicator. The registration is
*local* (``ncclCommRegister``): it waits for no other rank, also where the allocator makes a later segment
of the pool. What is sent from such memory, or received there, needs no copy through NCCL's own buffers
where its transports allow that. The table of docs/gpu.md has the rules of each call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.comm.collectives import (
    DONE,
    Comm,
    CommMemory,
    ErrorExplainer,
    Handle,
    KeepsScratch,
    RecordedComm,
    Scratch,
    Then,
    closed,
    first_line,
)
from zeroshard.comm.host import shut_down
from zeroshard.comm.recorder import Item, Recorder
from zeroshard.device.choice import ops_of
from zeroshard.device.ops import DevicePool
from zeroshard.memory.storage import resize

_CPU = torch.device("cpu")
_SLICE = timedelta(seconds=1)


#: Dtypes that every backend can gather; tensors of other dtypes are sent as bytes.
_NATIVE = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16}
    | {torch.int64, torch.int32, torch.int8, torch.uint8}
)


_AllgatherOptions: Any = vars(dist.distributed_c10d)["AllgatherOptions"]  # torch does not export it


@dataclass(slots=True, eq=False)
class JointHandle:
    """The handle of collectives that were started as one. All whose tensors they fill wait for it."""

    _handle: Handle
    _error: BaseException | None = None

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


class BoundCollectives:
    """The collectives of one process group, bound once. Each starts one and returns torch's work.

    ``torch.distributed`` looks up the group and checks all arguments in every call. Without that a
    reduce-scatter of torch's fake backend takes 7 us of host time, with it 11 us.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        gather, scatter = _AllgatherOptions(), dist.ReduceScatterOptions()
        gather.asyncOp = scatter.asyncOp = True

        def bound(name: str, old: str, options: Any) -> Callable[[Any, Any], Any]:
            call: Any = getattr(group, name, None) or getattr(group, old)  # torch 2.13 renamed them
            return lambda out, source: call(out, source, options)

        self.all_gather = bound("all_gather_single", "_allgather_base", gather)
        self.reduce_scatter = bound("reduce_scatter_single", "_reduce_scatter_base", scatter)
        # Of lists of tensors; NCCL starts each list as one group, which is one launch.
        self.joint_all_gather = bound(
            "all_gather_single_coalesced", "allgather_into_tensor_coalesced", gather
        )
        self.joint_reduce_scatter = bound(
            "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", scatter
        )
        self.broadcast: Callable[..., Any] = partial(dist.broadcast, group=group, async_op=True)
        self.all_to_all: Callable[..., Any] = partial(
            dist.all_to_all_single, group=group, async_op=True
        )


class ProcessGroupComm(RecordedComm):
    """The stock collectives of a process group: NCCL, torch's fake backend and others.

    The backend decides the order of a sum. With two ranks it is rank order; with more, NCCL adds around a
    ring, in the dtype of the buffer. For gloo see :class:`GlooComm`.
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


@dataclass(slots=True, eq=False)
class _Pending:
    """A stock collective in flight; it keeps the buffers alive until the wait."""

    _comm: ProcessGroupComm
    _item: Item
    _work: Any
    _buffers: Any

    def wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            self._comm.finish(self._item, work)
            self._buffers = None


def joining(comm: Comm) -> ProcessGroupComm | None:
    """``comm``, if several of its collectives can be one launch, as those of NCCL can."""
    return comm if isinstance(comm, ProcessGroupComm) and comm.joins else None


class GlooComm(KeepsScratch, ProcessGroupComm):
    """Collectives of a gloo group. Sums have the bits of :class:`zeroshard.comm.p2p.P2PComm`."""

    def all_gather(self, full_N: Tensor, shard_S: Tensor, *, name: str) -> Handle:
        """Every rank broadcasts its slice of ``full_N``; the others receive it in place."""
        item = self.recorder.all_gather(name, full_N, shard_S)
        if not full_N.numel():
            return DONE
        bound = self.bound(item)
        slices = full_N.view(self.size, -1).unbind()
        own = slices[self.rank]
        if own.data_ptr() != shard_S.data_ptr():
            own.copy_(shard_S)
        sent = [
            self._start(item, bound.broadcast, piece.view(torch.uint8), source)
            for piece, source in zip(slices, self.ranks, strict=True)
        ]
        return Then(_nothing, *sent)

    def reduce_scatter(self, out_S: Tensor, full_N: Tensor, *, name: str) -> Handle:
        """Every rank receives all ranks' chunks of its slice; ``wait`` adds them."""
        numel = full_N.numel()
        item = self.recorder.reduce_scatter(name, out_S, full_N)
        if not numel:
            return DONE
        space = self._scratch.take(full_N.dtype, numel, full_N.device)
        chunks = space[:numel]
        arrival = self._start(
            item, self.bound(item).all_to_all, chunks.view(torch.uint8), full_N.view(torch.uint8)
        )
        return self._summed(arrival, chunks.view(self.size, -1).unbind(), out_S, space)

    def close(self) -> None:
        """Destroy the group if this object made it, and free the scratch memory."""
        super().close()
        self._scratch = Scratch()


PROBE_NBYTES = 2 << 20
"""Bytes that are allocated and registered to find out whether that is possible."""

NAME = "registered memory"
"""The name of the collective in which ranks tell each other whether it is possible."""


def _nothing() -> None:
    """All was received in place."""


class RegisteredMemory(CommMemory):
    """Memory of a pool that one communicator has registered. See :class:`CommMemory`."""

    def __init__(self, backend: Any, pool: DevicePool) -> None:
        self._backend: Any = backend
        self._pool = pool

    def empty(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        with self._pool.use():
            return torch.empty(numel, dtype=dtype, device=device)

    def use(self) -> AbstractContextManager[object]:
        return self._pool.use()

    def resize(self, flat: Tensor, nbytes: int) -> None:
        with self._pool.use():
            resize(flat, nbytes)

    def forget(self) -> None:
        """To be called before the communicator is aborted, by any thread: the abort ends the
        registrations, and torch does not know the communicator afterwards."""
        self._backend = None

    def close(self) -> None:
        """End the registrations. Tensors of the pool keep their memory."""
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.deregister_mem_pool(self._pool.handle)


def register(comms: Sequence[Comm], device: torch.device) -> str:
    """Give each communicator memory of its own that it has registered. Collective.

    Returns what is used, as a line: all ranks use it for a communicator, or none. A communicator for
    which it is not possible keeps plain memory.
    """
    told: list[str] = []
    for comm in dict.fromkeys(comms):
        if isinstance(comm, ProcessGroupComm) and comm.queues_on_device:
            told.append(_register_on_all(comm, device))
        else:
            told.append(f"the transport {comm.transport} sends from any memory")
    refused = [why for why in dict.fromkeys(told) if why]
    used = told.count("")
    if not refused:
        return f"registered memory: {used} communicators of {len(told)}"
    return f"registered memory: {used} communicators of {len(told)}; plain memory: {'; '.join(refused)}"


def _register_on_all(comm: ProcessGroupComm, device: torch.device) -> str:
    """Register memory on all ranks or on none. Returns why not; "" if it was done."""
    memory = _registered(comm, device)
    mine = torch.tensor([float(not isinstance(memory, str))], device=device)
    possible = ops_of(device).read(comm.all_gather_small(mine, name=NAME).view(-1))
    if isinstance(memory, str):
        return memory
    if not all(possible):
        memory.close()
        pairs = zip(comm.ranks, possible, strict=True)
        where = [str(rank) for rank, is_possible in pairs if not is_possible]
        return f"it is not possible on rank {', '.join(where)}"
    comm.memory = memory
    return ""


def _registered(comm: ProcessGroupComm, device: torch.device) -> RegisteredMemory | str:
    """A pool that this rank has registered, or why that is not possible."""
    backend = comm.backend
    lacking = [name for name in _NEEDED if not hasattr(backend, name)]
    if lacking:
        return f"this build of torch has no {', '.join(lacking)} for {comm.transport}"
    try:
        pool = ops_of(device).memory_pool(backend.mem_allocator)
        if pool is None:
            return f"torch has no pools of memory for {device.type}"
        with pool.use():
            torch.empty(PROBE_NBYTES, dtype=torch.uint8, device=device)
        backend.register_mem_pool(pool.handle)
    except (RuntimeError, AttributeError, TypeError) as error:  # NCCL, the allocator, another torch
        return _said(error)
    return RegisteredMemory(backend, pool)


_NEEDED = ("mem_allocator", "register_mem_pool", "deregister_mem_pool")


def _said(error: BaseException) -> str:
    """The first line of an error, and what to do about the usual one."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
    if "expandable_segments" in line:
        line += " Set PYTORCH_ALLOC_CONF=expandable_segments:False; zeroshard launch sets True."
    return line
