"""Measures the memory that a communicator takes, and tries what NCCL does with registered memory.

The key ``registered_memory`` uses the second of :data:`WAYS`; ``docs/gpu.md`` says why no window is used.
A way that this machine does not know is a fact, not an error. A way that hangs loses only those after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from hardware import synchronize
from ranks import Facts, on_processes
from torch import Tensor
from trainers import Job

from zeroshard.comm.process_group import BoundCollectives


def communicators(job: Job, *, ranks: int, backend: str, numel: int) -> dict[str, Any]:
    """Bytes of the GPU that each of two communicators takes on a rank, when it connects and later.

    ``numel``: elements of bf16 that all ranks together gather.
    """
    return {"facts": _of_rank_0(partial(_communicators, numel=numel), job, ranks, backend)}


def registered(job: Job, *, ranks: int, backend: str, numel: int) -> dict[str, Any]:
    """What happens in each of :data:`WAYS`: GB/s of an all-gather with right values, or an error."""
    return {"facts": _of_rank_0(partial(_registered, numel=numel), job, ranks, backend)}


def _of_rank_0(
    work: Callable[[Job, int, int], Facts], job: Job, ranks: int, backend: str
) -> dict[str, Any]:
    if job.pretended:
        return {"not measured": "the pretended device has no NCCL"}
    found = on_processes(work, job, ranks=ranks, backend=backend)[0]
    return {name: value for name, value in found.items() if (name, value) != ("joins", "")}


# ---------------------------------------------------------------------- communicators


def _communicators(job: Job, rank: int, ranks: int, *, numel: int) -> Facts:
    """Ranks on one GPU share its free memory, so what both take is divided by their number."""
    full_N, shard_S = Turn(job.device, rank, ranks, numel).buffers()
    for number in ("first", "second"):
        before = _free_nbytes(job.device)
        work = BoundCollectives(_new_group(job.device))
        connected = _free_nbytes(job.device)
        work.all_gather(full_N, shard_S).wait()
        gathered = _free_nbytes(job.device)
        work.reduce_scatter(shard_S, full_N).wait()
        reduced = _free_nbytes(job.device)
        yield f"{number} communicator, connected: bytes", (before - connected) // ranks
        yield f"{number} communicator, after a gather: bytes", (before - gathered) // ranks
        yield f"{number} communicator, after a reduction: bytes", (before - reduced) // ranks


def _new_group(device: str, options: Any = None) -> dist.ProcessGroup:
    """A group of all ranks that connects at once, if the backend can."""
    connects = torch.device("cuda", 0) if device == "cuda" else None
    group: dist.ProcessGroup = dist.new_group(pg_options=options, device_id=connects)
    return group


def _free_nbytes(device: str) -> int:
    """Free bytes of the GPU, when no rank is between two measurements."""
    if device != "cuda":
        return 0
    synchronize(device)
    dist.barrier()
    free = int(torch.cuda.mem_get_info()[0])
    dist.barrier()
    return free


@dataclass(frozen=True)
class Turn:
    """One gather of ``numel`` elements of bf16 by ``ranks`` ranks, of which this is ``rank``."""

    device: str
    rank: int
    ranks: int
    numel: int

    def buffers(self) -> tuple[Tensor, Tensor]:
        """The target, and this rank's part, which has its number."""
        full_N = torch.zeros(self.numel, device=self.device, dtype=torch.bfloat16)
        part_S = torch.full_like(full_N[: self.numel // self.ranks], float(self.rank))
        return full_N, part_S

    def rate(self, group: dist.ProcessGroup, full_N: Tensor, part_S: Tensor) -> str:
        """GB/s of the fastest of five gathers, as bytes of the target; or that values are wrong."""
        work, seconds = BoundCollectives(group), []
        for _ in range(6):
            synchronize(self.device)
            begin_s = time.perf_counter()
            work.all_gather(full_N, part_S).wait()
            synchronize(self.device)
            seconds.append(time.perf_counter() - begin_s)
        wanted = torch.arange(self.ranks, device=self.device, dtype=full_N.dtype).view(-1, 1)
        if not bool((full_N.view(self.ranks, -1) == wanted).all()):
            return "no: values are wrong"
        return f"{full_N.nbytes / min(seconds[1:]) / 1e9:.3g} GB/s"

    def registered(
        self, group: dist.ProcessGroup, **how: bool
    ) -> tuple[Any, Any, tuple[Tensor, Tensor]]:
        """The backend, a pool that it has registered, and buffers in it.

        All memory of the pool is allocated before. A later segment would be registered by the allocator,
        and the registration of a window is a collective: with another allocation on another rank it would
        never end.
        """
        backend: Any = group._get_backend(torch.device(self.device))
        pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(pool):
            buffers = self.buffers()
        synchronize(self.device)
        dist.barrier()
        backend.register_mem_pool(pool, **how)
        return backend, pool, buffers

    def rate_in_pool(self, group: dist.ProcessGroup, **how: bool) -> str:
        """The same with registered memory."""
        backend, pool, buffers = self.registered(group, **how)
        told = self.rate(group, *buffers)
        backend.deregister_mem_pool(pool)
        return told


# ---------------------------------------------------------------------- registered memory


def _registered(job: Job, rank: int, ranks: int, *, numel: int) -> Facts:
    turn = Turn(job.device, rank, ranks, numel)
    for name, way in WAYS.items():
        try:
            yield name, way(turn)
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            yield name, f"no: {type(error).__name__}: {lines[0][:160]}"


def _in_plain_memory(turn: Turn) -> str:
    return turn.rate(_new_group(turn.device), *turn.buffers())


def _in_registered_pool(turn: Turn) -> str:
    """Memory of ncclMemAlloc that one communicator knows (``ncclCommRegister``)."""
    return turn.rate_in_pool(_new_group(turn.device))


def _in_window(turn: Turn) -> str:
    """The same as a symmetric window (``ncclCommWindowRegister``)."""
    return turn.rate_in_pool(_new_group(turn.device), symm=True)


def _in_window_without_kernels(turn: Turn) -> str:
    """A window, and the policy that uses no multiprocessor where there is another way."""
    kind: Any = dist.ProcessGroupNCCL  # type: ignore[attr-defined]
    options = kind.Options()
    options.config.cta_policy = kind.NCCL_CTA_POLICY_ZERO
    return turn.rate_in_pool(_new_group(turn.device, options), symm=True)


def _in_symmetric_memory(turn: Turn) -> str:
    """Torch's own pool for symmetric memory, which FSDP2 uses."""
    import torch.distributed._symmetric_memory as symmetric

    symmetric.set_backend("NCCL")
    group = _new_group(turn.device)
    with torch.cuda.use_mem_pool(symmetric.get_mem_pool(torch.device("cuda", 0))):
        buffers = turn.buffers()
    for tensor in buffers:
        symmetric.rendezvous(tensor, group)
    return turn.rate(group, *buffers)


def _abort(turn: Turn) -> str:
    """What ends the collectives of a lost rank has to return although the communicator has a window."""
    backend, _, _ = turn.registered(_new_group(turn.device), symm=True)
    begin_s = time.perf_counter()
    backend.abort()
    return f"{time.perf_counter() - begin_s:.3g} s"


WAYS: dict[str, Callable[[Turn], str]] = {
    "plain memory": _in_plain_memory,
    "registered pool": _in_registered_pool,
    "symmetric window": _in_window,
    "symmetric window, zero-CTA policy": _in_window_without_kernels,
    "symmetric memory of torch": _in_symmetric_memory,
    "abort with a symmetric window": _abort,  # last: it may hang
}
