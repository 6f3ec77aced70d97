"""The memory that a communicator sends from and receives into, if nothing special is known of it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from zeroshard.memory import storage


class CommMemory(Protocol):
    """Gives memory for the tensors of one communicator's collectives."""

    def empty(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """``[numel]``, with undefined contents."""

    def use(self) -> AbstractContextManager[object]:
        """A context in which what this thread allocates is such memory."""

    def resize(self, flat: Tensor, nbytes: int) -> None:
        """Give the storage of ``flat`` ``nbytes`` of memory, with undefined contents."""

    def forget(self) -> None:
        """The communicator is about to be aborted. Any thread may call this."""

    def close(self) -> None:
        """The communicator ends. Tensors keep their memory."""


class PlainMemory:
    """Memory of torch's allocator. See :class:`CommMemory`."""

    def empty(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See :class:`CommMemory`."""
        return torch.empty(numel, dtype=dtype, device=device)

    def use(self) -> AbstractContextManager[object]:
        """See :class:`CommMemory`."""
        return nullcontext()

    resize = staticmethod(storage.resize)  # no call more than without this class

    def forget(self) -> None:
        """See :class:`CommMemory`."""

    def close(self) -> None:
        """See :class:`CommMemory`."""


PLAIN = PlainMemory()


def memory_of(comm: object) -> CommMemory:
    """The memory for tensors that a communicator gathers into. Those of one rank have plain memory."""
    found: CommMemory = getattr(comm, "memory", PLAIN)
    return found
