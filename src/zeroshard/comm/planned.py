"""Communicators of a simulated rank: what a transport would hold in memory, and whether calls are right.

Nothing is moved. The other ranks are taken to be as far as this one: they have read what this rank has
waited for. A real rank may be ahead or behind, so it may hold some blocks more or fewer.

W ranks; N padded elements, S = N // W; K elements of a small vector.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from zeroshard.comm.collectives import DONE, Handle, KeepsScratch, Then, sum_temporary
from zeroshard.comm.host import Process
from zeroshard.comm.process_group import BoundCollectives, JointHandle, ProcessGroupComm
from zeroshard.comm.shared_memory import CONTROL_NBYTES, INLINE_NBYTES, RING, Windows
from zeroshard.comm.shm import AHEAD, piece_numel
from zeroshard.errors import UsageError


class _FakeSkipped(BoundCollectives):
    """Skips collectives of fake tensors, for which torch's fake group takes 0.5 ms of host time each.

    With real tensors, as in benchmarks of one rank of many, the fake group gives every rank the values of
    this one.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        for name, call in list(vars(self).items()):
            setattr(self, name, _unless_fake(call))


def _unless_fake(call: Callable[..., Any]) -> Callable[..., Any]:
    def start(out: Any, *others: Any) -> Any:
        first = out[0] if isinstance(out, list) else out
        return DONE if isinstance(first, FakeTensor) else call(out, *others)

    return start


class PlannedComm(ProcessGroupComm):
    """Checks sizes, dtypes and memory formats, as real transports do. Holds no memory.

    ``adds``: a rank adds what the others send, as on CPU ranks. Those join no collectives.
    """

    adds = False

    def __init__(self, group: dist.ProcessGroup, **options: Any) -> None:
        super().__init__(group, **options)
        self.joins = not self.adds
        self._bound = _FakeSkipped(group)

    def all_gather(self, full_N: Tensor, shard_S: Tensor, *, name: str) -> Handle:
        self._check("all_gather", name, full_N, shard_S)
        return super().all_gather(full_N, shard_S, name=name)

    def reduce_scatter(self, out_S: Tensor, full_N: Tensor, *, name: str) -> Handle:
        self._check("reduce_scatter", name, full_N, out_S)
        handle = super().reduce_scatter(out_S, full_N, name=name)
        if not self.adds or self.size == 2 or handle is DONE:
            return handle

        def add() -> None:
            sum_temporary(out_S)

        return Then(add, handle)

    def joint_all_gather(
        self, full_N: Sequence[Tensor], shard_S: Sequence[Tensor], *, name: str
    ) -> JointHandle:
        self._check_all("all_gather", name, full_N, shard_S)
        return super().joint_all_gather(full_N, shard_S, name=name)

    def joint_reduce_scatter(
        self, out_S: Sequence[Tensor], full_N: Sequence[Tensor], *, name: str
    ) -> JointHandle:
        self._check_all("reduce_scatter", name, full_N, out_S)
        return super().joint_reduce_scatter(out_S, full_N, name=name)

    def broadcast(self, tensor: Tensor, src: int, *, name: str) -> Handle:
        if not tensor.is_contiguous():
            raise UsageError(
                f"broadcast {name!r}: the tensor of shape {tuple(tensor.shape)} has the strides "
                f"{tensor.stride()} and is not contiguous, so a real transport would fail. Pass "
                "tensor.contiguous()."
            )
        return super().broadcast(tensor, src, name=name)

    def _check_all(
        self, op: str, name: str, full_N: Sequence[Tensor], shard_S: Sequence[Tensor]
    ) -> None:
        for full, shard in zip(full_N, shard_S, strict=True):
            self._check(op, name, full, shard)

    def _check(self, op: str, name: str, full_N: Tensor, shard_S: Tensor) -> None:
        if full_N.numel() != self.size * shard_S.numel() or full_N.dtype != shard_S.dtype:
            raise UsageError(
                f"{op} {name!r} over {self.size} ranks: {full_N.numel()} elements of {full_N.dtype} in "
                f"all, {shard_S.numel()} of {shard_S.dtype} on a rank. The whole must have the dtype and "
                f"{self.size} times the elements of a part; a real transport would fail or hang."
            )


class PlannedScratch(KeepsScratch, PlannedComm):
    """Keeps buffers for incoming chunks, as p2p does; ``whole``: for all ranks' chunks, as gloo."""

    adds = True
    whole = False

    def reduce_scatter(self, out_S: Tensor, full_N: Tensor, *, name: str) -> Handle:
        """A buffer is in use until the wait."""
        if not full_N.numel():
            return super().reduce_scatter(out_S, full_N, name=name)
        numel = full_N.numel() if self.whole else full_N.numel() - out_S.numel()
        space = self._scratch.take(full_N.dtype, numel, full_N.device)
        handle = super().reduce_scatter(out_S, full_N, name=name)
        return Then(lambda: self._scratch.give(space), handle)


class PlannedGloo(PlannedScratch):
    """The buffers of :class:`~zeroshard.comm.process_group.GlooComm`."""

    whole = True


class PlannedShm(PlannedComm):
    """The blocks of :class:`~zeroshard.comm.shm.ShmComm`."""

    adds = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.windows = PlannedWindows()
        self._seq = 0
        self._pending: dict[int, Handle] = {}

    @property
    def scratch_nbytes(self) -> int:
        """Bytes of the blocks, without those lent."""
        return self.windows.own_nbytes

    @property
    def scratch_peak_nbytes(self) -> int:
        """The most bytes of all blocks so far."""
        return self.windows.peak_nbytes

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor that takes the place of a block."""
        if not numel:
            return torch.empty(numel, dtype=dtype, device=device)
        block: PlannedBlock = self.windows.take(numel * dtype.itemsize, slack=1)
        return block.lend(numel, dtype)

    def all_gather(self, full_N: Tensor, shard_S: Tensor, *, name: str) -> Handle:
        """A copy of the shard is in a block until the others have read it."""
        handle = super().all_gather(full_N, shard_S, name=name)
        return handle if handle is DONE else self._posted(handle, self._post(shard_S.nbytes))

    def reduce_scatter(self, out_S: Tensor, full_N: Tensor, *, name: str) -> Handle:
        """The tensor itself if it lies in a block, else a copy of the slices of the others."""
        handle = super().reduce_scatter(out_S, full_N, name=name)
        if handle is DONE:
            return handle
        block = self.windows.block_of(full_N)
        if block is None:
            return self._posted(handle, self._post(full_N.nbytes - out_S.nbytes))
        seq = self._begin()
        block.reads.append(seq)
        return self._posted(handle, seq)

    def all_to_all(self, out_N: Tensor, full_N: Tensor, *, name: str) -> Handle:
        """A copy of the slices of the others is in a block until they have read it."""
        handle = super().all_to_all(out_N, full_N, name=name)
        if handle is DONE:
            return handle
        return self._posted(handle, self._post(full_N.nbytes - full_N.nbytes // self.size))

    def all_gather_small(self, vector_K: Tensor, *, name: str) -> Tensor:
        """Only a vector that does not fit a slot needs a block."""
        rows = super().all_gather_small(vector_K, name=name)
        if vector_K.nbytes > INLINE_NBYTES:
            self.windows.done.add(self._post(vector_K.nbytes))
        elif vector_K.numel():
            self.windows.done.add(self._begin())
        return rows

    def broadcast(self, tensor: Tensor, src: int, *, name: str) -> Handle:
        """The source has at most some pieces in blocks at a time."""
        handle = super().broadcast(tensor, src, name=name)
        if not tensor.numel():
            return handle
        if tensor.nbytes <= INLINE_NBYTES:
            self.windows.done.add(self._begin())
            return handle
        nbytes = tensor.nbytes
        step = piece_numel(tensor.numel(), tensor.itemsize) * tensor.itemsize
        sizes = {self._begin(): min(step, nbytes - at) for at in range(0, nbytes, step)}
        if src != self.rank:
            return self._posted(handle, *sizes)
        first = list(sizes.items())
        for seq, nbytes in first[:AHEAD]:
            self._publish(seq, nbytes)

        def rest() -> None:
            for seq, nbytes in first[AHEAD:]:
                self.windows.done.add(seq - AHEAD)
                self._publish(seq, nbytes)

        return self._posted(Then(rest, handle), *sizes)

    def _begin(self) -> int:
        self._seq = seq = self._seq + 1
        if (pending := self._pending.get(seq - RING)) is not None:
            pending.wait()
        self.windows.done.discard(seq - 2 * RING)
        return seq

    def _post(self, nbytes: int) -> int:
        seq = self._begin()
        self._publish(seq, nbytes)
        return seq

    def _publish(self, seq: int, nbytes: int) -> None:
        self.windows.take(nbytes).reads.append(seq)

    def _posted(self, handle: Handle, *seqs: int) -> Handle:
        def read() -> None:
            self.windows.done.update(seqs)
            for seq in seqs:
                self._pending.pop(seq, None)

        made = Then(read, handle)
        self._pending.update(dict.fromkeys(seqs, made))
        return made


class PlannedWindows(Windows):
    """Blocks without memory. ``done``: numbers of collectives that all ranks have read.

    What is lent is counted when it is lent and given back: it is asked for after every operation.
    """

    def __init__(self) -> None:
        super().__init__(CONTROL_NBYTES)
        self.done: set[int] = set()
        self._lent_nbytes = 0

    @property
    def lent_nbytes(self) -> int:
        return self._lent_nbytes

    def new_block(self, offset: int, nbytes: int) -> tuple[int, PlannedBlock]:
        return offset, PlannedBlock(nbytes, self.done, self._count_lent)

    def _count_lent(self, nbytes: int) -> None:
        self._lent_nbytes += nbytes

    def block_of(self, tensor: Tensor) -> PlannedBlock | None:
        """The block that stands for the memory of ``tensor``, if any."""
        key = tensor.untyped_storage()._cdata
        return next((b for b in self.blocks.values() if b.is_lent and b.lent_to == key), None)


class PlannedBlock:
    """See :class:`~zeroshard.comm.shared_memory.Block`.

    ``count_lent(nbytes)``: called when memory is lent, and with a negative number when it is given back.
    """

    def __init__(self, nbytes: int, done: set[int], count_lent: Callable[[int], None]) -> None:
        self.nbytes = nbytes
        self.bytes = SimpleNamespace(nbytes=nbytes)
        self._count_lent = count_lent
        self.reads: list[int] = []
        self.used_s = 0.0
        self.is_lent = False
        self.lent_to = 0
        self._done = done

    def is_read_by(self, _readers: Sequence[Any]) -> bool:
        """Whether all has been read that was published from the block."""
        reads = self.reads
        while reads and reads[-1] in self._done:
            reads.pop()
        return not reads

    def lend(self, numel: int, dtype: torch.dtype) -> Tensor:
        """``[numel]``; the block is lent as long as its storage lives."""
        self.bytes = SimpleNamespace(nbytes=numel * dtype.itemsize)
        self.is_lent = True  # before the tensor is counted
        self._count_lent(self.bytes.nbytes)
        tensor = torch.empty(numel, dtype=dtype)
        storage = tensor.untyped_storage()
        self.lent_to = storage._cdata
        weakref.finalize(storage, self._return).atexit = False
        return tensor

    def _return(self) -> None:
        self.is_lent = False
        self._count_lent(-self.bytes.nbytes)

    def discard(self) -> None:
        """Nothing is to be freed."""


_NODE: ContextVar[int | None] = ContextVar("ranks of a node of a simulated run", default=None)


@contextlib.contextmanager
def nodes_of(ranks: int | None) -> Iterator[None]:
    """Inside the block a simulated run has nodes of so many ranks, in the order of ranks.

    None: it is not known which ranks share a node.
    """
    before = _NODE.set(ranks)
    try:
        yield
    finally:
        _NODE.reset(before)


def processes_of(ranks: Sequence[int]) -> list[Process] | None:
    """What processes of simulated ranks would tell of themselves; None: their nodes are not known."""
    size = _NODE.get()
    if size is None:
        return None
    nodes = [f"node {rank // size}" for rank in ranks]
    return [Process(node, node, rank, "") for node, rank in zip(nodes, ranks, strict=True)]


PLANNED: Mapping[str, type[PlannedComm]] = {
    "auto": PlannedComm,
    "shm": PlannedShm,
    "p2p": PlannedScratch,
    "stock": PlannedGloo,
}
"""By transport. With "auto" none is known, and its memory is not counted."""
