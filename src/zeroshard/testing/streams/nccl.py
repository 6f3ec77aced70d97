"""A model of NCCL for one rank of a world that has no other ranks.

Each communicator has a stream of its own. A collective waits for the current stream; ``wait()`` on its
handle makes the current stream wait for the collective, and the host waits for nothing. Tensors are kept
until then. Values are those of a world in which every rank has what this rank has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.testing.streams.clocks import Clock
from zeroshard.testing.streams.machine import StreamLine
from zeroshard.testing.streams.patches import Patches
from zeroshard.testing.streams.tensors import Storages


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


_Group: Any = dist.ProcessGroup  # its overloads are more than a model needs


class PretendedNCCL(_Group):  # type: ignore[misc]
    """The collectives of one communicator of ``size`` ranks."""

    def __init__(self, storages: Storages, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._storages = storages
        self._machine = storages.machine
        self._rank = rank
        self._size = size
        self._lines: dict[int, StreamLine] = {}
        self._name = ""

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

    def _run(self, what: str, reads: list[Tensor], writes: list[Tensor], opts: Any) -> _Work:
        storages, machine = self._storages, self._machine
        with machine.lock:
            used = [storages.range_of(t) for t in reads]
            changed = [storages.range_of(t) for t in writes]
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
            return _Work(storages, device, dict(line.clock), [*reads, *writes])

    @staticmethod
    def _options(opts: tuple[Any, ...]) -> Any:
        return opts[0] if opts else None

    def all_gather_single(self, full: Tensor, shard: Tensor, *opts: Any) -> _Work:
        """Every rank's shard, one after the other."""
        with self._storages.quietly(), torch.no_grad():
            mine = shard.detach().clone()
            full.detach().view(self._size, -1).copy_(mine.view(1, -1))
        return self._run("all-gather", [shard], [full], self._options(opts))

    def reduce_scatter_single(self, shard: Tensor, full: Tensor, *opts: Any) -> _Work:
        """This rank's part of the sum over ranks."""
        options = self._options(opts)
        with self._storages.quietly(), torch.no_grad():
            part = full.detach().view(self._size, -1)[self._rank].clone()
            is_sum = getattr(options, "reduceOp", dist.ReduceOp.SUM) == dist.ReduceOp.SUM
            shard.detach().view(-1).copy_(part * self._size if is_sum else part)
        return self._run("reduce-scatter", [full], [shard], options)

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def broadcast(self, tensors: list[Tensor], *opts: Any) -> _Work:
        """The values of this rank, whatever the source is."""
        options = self._options(opts)
        sends = getattr(options, "rootRank", self._rank) == self._rank
        return self._run("broadcast", tensors if sends else [], tensors, options)

    def allreduce(self, tensors: list[Tensor], *opts: Any) -> _Work:
        """The sum over ranks."""
        options = self._options(opts)
        with self._storages.quietly(), torch.no_grad():
            if getattr(options, "reduceOp", dist.ReduceOp.SUM) == dist.ReduceOp.SUM:
                for tensor in tensors:
                    tensor.detach().mul_(self._size)
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
def pretended_world(storages: Storages, size: int, rank: int = 0) -> Iterator[None]:
    """A context in which this process is rank ``rank`` of ``size`` ranks that use the model of NCCL.

    The engine gets two communicators, as on real NCCL.
    """
    from torch.testing._internal.distributed import fake_pg

    from zeroshard.comm.collectives import ProcessGroupComm
    from zeroshard.watchdog import session

    patches = Patches()
    plugins = dist.Backend._plugins  # type: ignore[attr-defined]
    before = plugins["FAKE"]

    def create(common: Any, _: Any) -> PretendedNCCL:
        return PretendedNCCL(storages, common.group_rank, common.group_size)

    def make_comm(*, recorder: Any = None, group: Any = None, guard: Any = None, **_: Any) -> Any:
        ranks = None if group is None else dist.get_process_group_ranks(group)
        comm = ProcessGroupComm(
            dist.new_group(ranks, backend="fake"), recorder=recorder, guard=guard, owns_group=True
        )
        comm.transport = "nccl"
        comm.recorder.compares = True
        return comm

    plugins["FAKE"] = before._replace(creator_fn=create)
    patches.set(session, "make_comm", make_comm)
    try:
        dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=rank, world_size=size)
        try:
            yield
        finally:
            dist.destroy_process_group()
    finally:
        plugins["FAKE"] = before
        patches.undo()
