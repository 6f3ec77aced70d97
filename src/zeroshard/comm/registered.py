"""Memory that NCCL knows: a pool of the device for each communicator, and plain memory without it.

The registration is *local* (``ncclCommRegister``): it waits for no other rank, also where the allocator
makes a later segment of the pool. What is sent from such memory, or received there, needs no copy through
NCCL's own buffers where its transports allow that. The table of docs/gpu.md has the rules of each call.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from zeroshard.comm.collectives import Comm, ProcessGroupComm
from zeroshard.device.choice import ops_of
from zeroshard.device.ops import DevicePool
from zeroshard.memory.storage import resize

PROBE_NBYTES = 2 << 20
"""Bytes that are allocated and registered to find out whether that is possible."""

NAME = "registered memory"
"""The name of the collective in which ranks tell each other whether it is possible."""


class RegisteredMemory:
    """Memory of a pool that one communicator has registered. See :class:`CommMemory`."""

    def __init__(self, backend: Any, pool: DevicePool) -> None:
        self._backend: Any = backend
        self._pool = pool

    def empty(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See :class:`CommMemory`."""
        with self._pool.use():
            return torch.empty(numel, dtype=dtype, device=device)

    def use(self) -> AbstractContextManager[object]:
        """See :class:`CommMemory`."""
        return self._pool.use()

    def resize(self, flat: Tensor, nbytes: int) -> None:
        """See :class:`CommMemory`."""
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
