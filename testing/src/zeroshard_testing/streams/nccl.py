"""A model of NCCL: for one rank of a world that has no other ranks, or for ranks that gloo connects.

Each communicator has a stream of its own. A collective waits for the current stream; ``wait()`` on its
handle makes the current stream wait for the collective, and the host waits for nothing. Tensors are kept
until then. A sum is rounded to the dtype of the tensor after each rank, in rank order.

A collective whose peer is gone never ends. ``abort()`` of its communicator ends it, and what it should
have written is then garbage: all that waits for it goes on. Later collectives raise an error. So are
NCCL's rules (``ncclCommAbort``, and ``NCCLUtils.cpp: NCCLComm::getNcclComm`` of torch).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard_testing.streams.clocks import Clock
from zeroshard_testing.streams.machine import StreamLine
from zeroshard_testing.streams.patches import Patches
from zeroshard_testing.streams.tensors import Storages


class _Work:
    """The handle of a collective. ``clock``: when it has ended."""

    def __init__(
        self, storages: Storages, device: int, clock: Clock, kept: Sequence[Tensor]
    ) -> None:
        self._machine = storages.machine
        self._device = device
        self._clock = clock
        self._kept: Sequence[Tensor] = kept

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the current stream wait for the collective, and let go of its tensors."""
        del timeout
        with self._machine.lock:
            self._machine.stream_waits(self._machine.current_stream(self._device), self._clock)
        self._kept = ()
        return True

    def is_completed(self) -> bool:
        """Whether it has ended."""
        with self._machine.lock:
            return self._machine.has_ended(self._clock)


GARBAGE = 77
"""What an aborted collective leaves in its target. It is finite, so that it looks like a result."""


class PeerGoneError(Exception):
    """Another rank has ended, so its values will never come."""


Exchange = Callable[[Tensor, int], Tensor]
"""Gets a flat tensor ``[K]`` and the number of ranks W. Gives ``[W, K]``: row r is rank r's tensor."""


def equal_ranks(mine_K: Tensor, size: int) -> Tensor:
    """The :data:`Exchange` of a world in which every rank has what this rank has."""
    return mine_K.expand(size, -1)


def over_gloo(mine_K: Tensor, size: int) -> Tensor:
    """The :data:`Exchange` of real ranks, over their process group of gloo. It blocks until all call it.

    Raises:
        NotImplementedError: the communicator has fewer ranks than the process group.
        PeerGoneError: another rank has ended.
    """
    if size != dist.get_world_size():
        raise NotImplementedError(
            f"a communicator of {size} among {dist.get_world_size()} ranks: values are exchanged between "
            "all ranks only"
        )
    sent = mine_K.clone().view(torch.uint8)
    received = sent.repeat(size)
    group = dist.group.WORLD
    assert group is not None
    try:
        group._allgather_base(received, sent).wait()
    except RuntimeError as error:
        raise PeerGoneError(str(error)) from error
    return received.view(mine_K.dtype).view(size, -1)


def reduced(rows_WK: Tensor, op: Any) -> Tensor:
    """``[K]``: the reduction of one tensor per rank.

    Raises:
        NotImplementedError: the model does not know ``op``.
    """
    if op == dist.ReduceOp.MAX:
        return rows_WK.amax(0)
    if op == dist.ReduceOp.MIN:
        return rows_WK.amin(0)
    if op != dist.ReduceOp.SUM:
        raise NotImplementedError(f"the model of NCCL does not have {op}")
    total_K = rows_WK[0].clone()
    for row_K in rows_WK[1:]:
        total_K += row_K
    return total_K


_Group: Any = dist.ProcessGroup  # its overloads are more than a model needs


class PretendedNCCL(_Group):  # type: ignore[misc]
    """The collectives of one communicator of ``size`` ranks, which exchange values with ``exchange``."""

    def __init__(self, storages: Storages, rank: int, size: int, exchange: Exchange) -> None:
        super().__init__(rank, size)
        self._storages = storages
        self._machine = storages.machine
        self._exchange = exchange
        self._rank = rank
        self._size = size
        self._lines: dict[int, StreamLine] = {}
        self._name = ""
        self._is_aborted = self._has_lost_a_peer = False
        self._stuck: list[tuple[int, int]] = []
        self.pools: set[int] = set()  # whose memory is registered

    def getBackendName(self) -> str:  # noqa: N802
        """The name that torch knows groups without a network by."""
        return "fake"

    def size(self) -> int:
        """The number of ranks."""
        return self._size

    def rank(self) -> int:
        """This rank."""
        return self._rank

    @property
    def pg_name(self) -> str:
        """The name that torch gave to the group. Torch forgets it before it has ended the group."""
        self._name = dist.distributed_c10d._world.pg_names.get(self, self._name)
        return self._name

    group_name = pg_name

    def _get_backend(self, device: torch.device) -> PretendedNCCL:
        """The communicator of a device: this model has one for all."""
        del device
        return self

    def abort(self) -> None:
        """End the collectives that hang. Any thread may call it."""
        with self._machine.lock:
            self._is_aborted = True
            while self._stuck:
                self._machine.release(self._stuck.pop())

    @property
    def mem_allocator(self) -> object:
        """NCCL's allocator."""
        return self

    def register_mem_pool(self, pool: Any, symm: bool = False) -> None:
        """Register all memory of a pool, also what is allocated later. Waits for no other rank.

        Raises:
            NotImplementedError: as windows, for which ranks wait for each other.
        """
        if symm:
            raise NotImplementedError("the model of NCCL does not have windows")
        self.pools.add(pool.number)

    def deregister_mem_pool(self, pool: Any) -> None:
        """End that. After an abort torch looks for the pool past the end of a table.

        Raises:
            RuntimeError: the pool is not registered.
        """
        if self._is_aborted:
            self._machine.report(
                "abort", "deregister_mem_pool after an abort reads past a table's end"
            )
        if pool.number not in self.pools:
            raise RuntimeError("Trying to unregister not previously registered pool")
        self.pools.remove(pool.number)

    def _run(self, what: str, reads: list[Tensor], writes: list[Tensor], opts: Any) -> _Work:
        storages, machine = self._storages, self._machine
        with machine.lock:
            if self._is_aborted:
                raise RuntimeError(f"NCCL communicator was aborted on rank {self._rank}.")
            used = [storages.range_of(t) for t in reads]
            changed = [storages.range_of(t) for t in writes]
            for block, begin, end in (*used, *changed):
                counts = machine.counts
                kind = counts.registered if block.pool in self.pools else counts.unregistered
                kind[what] += end - begin
            device = changed[0][0].device
            if device is None or {block.device for block, _, _ in (*used, *changed)} != {device}:
                machine.report("device", f"{what} of NCCL uses tensors that are not on one device")
                device = device or 0
            current = machine.current_stream(device)
            line = self._lines.get(device)
            if line is None:
                line = self._lines[device] = machine.new_stream(device, "NCCL stream")
            if getattr(opts, "asyncOp", True):
                machine.stream_waits(line, machine.record(current))
            else:
                line = current
            machine.kernel(device, what, used, changed, stream=line)
            if self._has_lost_a_peer:
                self._stuck.append(machine.hang(line))
            return _Work(storages, device, dict(line.clock), [*reads, *writes])

    def _rows(self, tensor: Tensor) -> Tensor:
        """``[W, K]``: every rank's values of a tensor of K elements."""
        return self._exchange(tensor.detach().reshape(-1), self._size)

    @contextmanager
    def _moving_values(self, *targets: Tensor) -> Iterator[None]:
        """A context in which values are exchanged. What the program does is recorded afterwards.

        If a peer is gone, the ``targets`` get garbage.
        """
        with self._storages.quietly(), torch.no_grad():
            try:
                yield
            except PeerGoneError:
                self._has_lost_a_peer = True
                for target in targets:
                    target.detach().fill_(GARBAGE)

    @staticmethod
    def _options(opts: tuple[Any, ...]) -> Any:
        return opts[0] if opts else None

    @staticmethod
    def _op(options: Any) -> Any:
        return getattr(options, "reduceOp", dist.ReduceOp.SUM)

    def all_gather_single(self, full: Tensor, shard: Tensor, *opts: Any) -> _Work:
        """Every rank's shard, one after the other."""
        return self.all_gather_single_coalesced([full], [shard], *opts)

    def reduce_scatter_single(self, shard: Tensor, full: Tensor, *opts: Any) -> _Work:
        """This rank's part of the reduction over ranks."""
        return self.reduce_scatter_single_coalesced([shard], [full], *opts)

    def all_gather_single_coalesced(
        self, fulls: list[Tensor], shards: list[Tensor], *opts: Any
    ) -> _Work:
        """All-gathers as one launch: it waits for the current stream once, and has one end."""
        with self._moving_values(*fulls):
            for full, shard in zip(fulls, shards, strict=True):
                full.detach().view(self._size, -1).copy_(self._rows(shard).clone())
        return self._run("all-gather", shards, fulls, self._options(opts))

    def reduce_scatter_single_coalesced(
        self, shards: list[Tensor], fulls: list[Tensor], *opts: Any
    ) -> _Work:
        """Reduce-scatters as one launch."""
        options = self._options(opts)
        with self._moving_values(*shards):
            for shard, full in zip(shards, fulls, strict=True):
                parts = self._rows(full).view(self._size, self._size, -1)[:, self._rank]
                shard.detach().view(-1).copy_(reduced(parts, self._op(options)))
        return self._run("reduce-scatter", fulls, shards, options)

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def broadcast(self, tensors: list[Tensor], *opts: Any) -> _Work:
        """The values of the source."""
        options = self._options(opts)
        source = getattr(options, "rootRank", self._rank)
        with self._moving_values(*tensors):
            for tensor in tensors:
                tensor.detach().copy_(self._rows(tensor)[source].clone().view(tensor.shape))
        return self._run("broadcast", tensors if source == self._rank else [], tensors, options)

    def allreduce(self, tensors: list[Tensor], *opts: Any) -> _Work:
        """The reduction over ranks."""
        options = self._options(opts)
        with self._moving_values(*tensors):
            for tensor in tensors:
                total = reduced(self._rows(tensor), self._op(options))
                tensor.detach().copy_(total.view(tensor.shape))
        return self._run("all-reduce", tensors, tensors, options)

    def barrier(self, *opts: Any) -> _Work:
        """An all-reduce of one number that the host waits for."""
        machine = self._machine
        with machine.lock:
            device = machine.thread().device
            line = machine.kernel(device, "barrier", [], [])
            machine.host_waits("barrier", line.clock)
            return _Work(self._storages, device, dict(line.clock), [])


@contextmanager
def _communicators(storages: Storages, exchange: Exchange) -> Iterator[None]:
    """A context in which groups of torch's fake backend and the engine's communicators are the model."""
    from zeroshard.comm.process_group import ProcessGroupComm
    from zeroshard.session import comm_session, session

    patches = Patches()
    plugins = dist.Backend._plugins  # type: ignore[attr-defined]
    before = plugins["FAKE"]

    def create(common: Any, _: Any) -> PretendedNCCL:
        return PretendedNCCL(storages, common.group_rank, common.group_size, exchange)

    def make_comm(*, recorder: Any = None, group: Any = None, guard: Any = None, **_: Any) -> Any:
        ranks = None if group is None else dist.get_process_group_ranks(group)
        comm = ProcessGroupComm(
            dist.new_group(ranks, backend="fake"), recorder=recorder, guard=guard, owns_group=True
        )
        comm.transport = "nccl"
        comm.recorder.compares = comm.queues_on_device = True
        return comm

    plugins["FAKE"] = before._replace(creator_fn=create)
    for module in (session, comm_session):
        patches.set(module, "make_comm", make_comm)
    try:
        yield
    finally:
        plugins["FAKE"] = before
        patches.undo()


@contextmanager
def pretended_world(storages: Storages, size: int, rank: int = 0) -> Iterator[None]:
    """A context in which this process is rank ``rank`` of ``size`` ranks that use the model of NCCL.

    There are no other ranks. The engine opens two communicators at stage 3, as on NCCL.
    """
    from torch.testing._internal.distributed import fake_pg

    with _communicators(storages, equal_ranks):
        dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=rank, world_size=size)
        try:
            yield
        finally:
            dist.destroy_process_group()


@contextmanager
def connected_ranks(storages: Storages) -> Iterator[None]:
    """A context in which the ranks of the open process group, which is gloo's, use the model of NCCL.

    The engine opens two communicators at stage 3, as on NCCL.

    Raises:
        RuntimeError: no process group of gloo is open.
    """
    if not dist.is_initialized() or dist.get_backend() != "gloo":
        raise RuntimeError(
            'ranks exchange their values over gloo: call init_process_group("gloo") on every rank first'
        )
    from torch.testing._internal.distributed import fake_pg  # it registers torch's fake backend

    assert fake_pg
    with _communicators(storages, over_gloo):
        yield
