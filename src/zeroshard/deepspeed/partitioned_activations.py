"""Keeps 1/T of what activation checkpointing saves on each of T tensor ranks.

The inputs of a checkpointed block are equal on all ranks of a tensor group. Each rank keeps a part of
them, and gathers the parts right before the block is computed again. The values, and how they lie in
memory, are those that were saved, so gradients have the same bits.

Saved tensors pass through ``torch.autograd.graph.saved_tensors_hooks``. They are gathered in the order in
which backward uses them, which is the same on all tensor ranks, because they run the same graph.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.device.choice import ops_of
from zeroshard.errors import UsageError
from zeroshard.memory.storage import fingerprint


class _Part(NamedTuple):
    """One saved tensor. ``order``: its axes by decreasing stride; ``part`` is flat in this order."""

    part: Tensor
    order: tuple[int, ...]
    shape: torch.Size  # in this order of the axes
    print: Tensor  # fingerprint of the whole
    device: torch.device


class PartitionedActivations:
    """Partitions saved tensors over ``group``, the tensor ranks of this rank.

    ``on_host``: parts are kept in host memory until they are used.
    """

    def __init__(self, group: dist.ProcessGroup, *, on_host: bool) -> None:
        self._group, self._on_host = group, on_host
        self._size, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._unread: deque[Tensor] = (
            deque()
        )  # on an accelerator: whether the last tensors differed

    def saving(self) -> AbstractContextManager[Any]:
        """A context in which the tensors that autograd saves are partitioned."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, saved: Tensor) -> _Part | Tensor:
        order = _order(saved)
        if type(saved) is not Tensor or saved.numel() < self._size or order is None:
            return saved
        dense = saved.detach().permute(order)
        numel = -(-saved.numel() // self._size)
        flat = dense.reshape(-1)  # a view: its axes are in the order of memory
        own = flat[self._rank * numel : (self._rank + 1) * numel]
        device = torch.device("cpu") if self._on_host else saved.device
        part = torch.zeros(numel, dtype=saved.dtype, device=device, pin_memory=self._pins(saved))
        part[: len(own)].copy_(own)
        return _Part(part, order, dense.shape, _print_of(flat), saved.device)

    def _pins(self, saved: Tensor) -> bool:
        return self._on_host and saved.device.type != "cpu"

    def _unpack(self, kept: _Part | Tensor) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        part = kept.part.to(kept.device, non_blocking=True)
        whole = part.new_empty(self._size * part.numel())
        dist.all_gather_into_tensor(_sendable(whole), _sendable(part), group=self._group)
        flat = whole[: kept.shape.numel()]
        self._check(_print_of(flat) != kept.print)
        return flat.view(kept.shape).permute(_inverse(kept.order))

    def _check(self, differs: Tensor) -> None:
        """Check that what was gathered is what this rank saved.

        On an accelerator the comparison of one tensor is read when the next one is needed, so that the
        host does not wait.

        Raises:
            UsageError: it is not.
        """
        self._unread.append(differs)
        while len(self._unread) > (1 if ops_of(differs.device).is_async else 0):
            if bool(self._unread.popleft().any()):
                raise UsageError(
                    "partition_activations: the tensor ranks called a checkpointed function with "
                    'different inputs, so they cannot keep a part each. With the style "sequence" '
                    "inputs are cut already: leave partition_activations out. Else the ranks train on "
                    "different samples: choose them by engine.dp_rank."
                )


def _order(tensor: Tensor) -> tuple[int, ...] | None:
    """The axes by decreasing stride; None if the tensor has gaps, or elements that lie at one place."""
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda axis: -strides[axis]))
    return order if tensor.permute(order).is_contiguous() else None


def _inverse(order: Sequence[int]) -> list[int]:
    found = [0] * len(order)
    for at, axis in enumerate(order):
        found[axis] = at
    return found


def _print_of(flat: Tensor) -> Tensor:
    """The fingerprint, also of a tensor whose bytes are no multiple of 8."""
    contents = _sendable(flat)
    if rest := contents.numel() % 8:
        contents = torch.cat([contents, contents.new_zeros(8 - rest)])
    return fingerprint(contents)


def _sendable(flat: Tensor) -> Tensor:
    """Bytes: not every backend sends every dtype."""
    return flat.view(torch.uint8)
