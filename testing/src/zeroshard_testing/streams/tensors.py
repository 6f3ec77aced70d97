"""Marks storages as device memory, and makes tensors say that they are there.

The values of every tensor are in host memory, so that operators compute real numbers. A table says which
storages count as device memory. ``Tensor.device``, factories, ``Tensor.to`` and others follow the table.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._device
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from zeroshard_testing.streams.clocks import Clock
from zeroshard_testing.streams.findings import here
from zeroshard_testing.streams.machine import Machine, Range
from zeroshard_testing.streams.memory_blocks import MemoryBlock

_real_device = torch._C.TensorBase.device.__get__  # type: ignore[attr-defined]
real_to = torch._C.TensorBase.to


@dataclass(frozen=True)
class DevicePlace:
    """Where new memory is: a device's number, or None for host memory, which may be page-locked."""

    device: int | None
    is_pinned: bool = False


HOST = DevicePlace(None)


_left: dict[int, tuple[int, int]] = {}
"""Device and bytes of storages that outlive the machine that they were made on, as caches do."""
_open: list[Storages] = []
"""The tables of the open machine."""


def _died(key: int) -> None:
    """Note the death of a storage. It may happen at any time, so that nothing else is done here."""
    _left.pop(key, None)
    for storages in _open:
        storages.dead.append((key, storages.machine.thread().clock.copy()))


class Storages:
    """The blocks of all storages, by the address of the storage object."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._blocks: dict[int, MemoryBlock] = {}
        self._mappings: list[MemoryBlock] = []  # page-locked with cudaHostRegister
        self.dead: deque[tuple[int, Clock]] = deque()
        self._local = threading.local()
        _open.append(self)  # first: a storage that dies from now on is noted in ``dead``
        for key in list(_left):  # storages may die while the table is filled
            device, nbytes = _left.get(key, (0, 0))
            self._blocks[key] = MemoryBlock(min(device, machine.devices - 1), nbytes)

    def close(self) -> None:
        """Remember which storages are in device memory, for the next machine.

        A storage may die at any time. Until the table is closed its death is noted in ``dead``, and from
        then on its entry is removed at once.
        """
        for key, block in self._blocks.items():
            if block.device is not None:
                _left[key] = (block.device, block.nbytes)
        _open.remove(self)
        while self.dead:
            _left.pop(self.dead.popleft()[0], None)

    # ------------------------------------------------------------------ where new memory goes

    @property
    def placing(self) -> DevicePlace | None:
        """Where the calling thread asked new memory to be; None: where the inputs are."""
        return getattr(self._local, "placing", None)

    @contextmanager
    def place(self, where: DevicePlace | None) -> Iterator[None]:
        """A context in which new memory is at ``where``."""
        before = self.placing
        self._local.placing = where
        try:
            yield
        finally:
            self._local.placing = before

    @property
    def is_quiet(self) -> bool:
        """Whether operators of the calling thread are the checker's own, and no part of the program."""
        return getattr(self._local, "quiet", False)

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """A context in which operators are not recorded."""
        before = self.is_quiet
        self._local.quiet = True
        try:
            yield
        finally:
            self._local.quiet = before

    # ------------------------------------------------------------------ the table

    def collect(self) -> None:
        """Free the blocks of storages that have died."""
        if not self.dead:
            return
        with (
            self.machine.lock
        ):  # else a new storage with the address of a dead one could be dropped
            while self.dead:
                key, clock = self.dead.popleft()
                block = self._blocks.pop(key, None)
                if block is not None and block not in self._mappings:
                    self.machine.free(block, clock)

    def find(self, tensor: Tensor) -> MemoryBlock | None:
        """The block of a tensor's storage; None if the storage was not seen before."""
        self.collect()
        return self._blocks.get(tensor.untyped_storage()._cdata)

    def of(self, tensor: Tensor) -> MemoryBlock:
        """The block of a tensor's storage. One that was not seen before is host memory."""
        return self.find(tensor) or self.adopt(tensor, HOST)

    def adopt(self, tensor: Tensor, place: DevicePlace) -> MemoryBlock:
        """Make the block of a new storage."""
        storage = tensor.untyped_storage()
        return self.adopt_storage(storage, place)

    def adopt_storage(self, storage: Any, place: DevicePlace) -> MemoryBlock:
        """See :meth:`adopt`."""
        with self.machine.lock:
            return self._adopt(storage, place)

    def _adopt(self, storage: Any, place: DevicePlace) -> MemoryBlock:
        self.collect()
        key, nbytes = storage._cdata, storage.nbytes()
        block = self._mapping_at(storage) if place.device is None else None
        if block is None:
            block = MemoryBlock(place.device, nbytes)
            block.is_pinned = block.is_cached = place.is_pinned
            block.address = storage.data_ptr()
            block.made_by = here()
            if place.device is not None and nbytes:
                self.machine.allocate(block)
        self._blocks[key] = block
        weakref.finalize(storage, _died, key).atexit = False
        return block

    def _mapping_at(self, storage: Any) -> MemoryBlock | None:
        address = storage.data_ptr()
        for block in self._mappings:
            if block.address <= address < block.address + block.nbytes:
                return block
        return None

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock host memory that is not torch's."""
        block = MemoryBlock(None, nbytes, address=address)
        block.made_by = here()
        self._mappings.append(block)
        self.machine.pin(block)

    def unregister(self, address: int) -> bool:
        """End page-locking. False: it was not page-locked."""
        for block in reversed(self._mappings):
            if block.address == address and block.is_pinned:
                self.machine.unpin(block)
                self._mappings.remove(block)
                return True
        return False

    def resize(self, storage: Any, resize: Callable[[], None]) -> None:
        """Let a storage give its memory back and take other memory."""
        self.collect()
        block = self._blocks.get(storage._cdata)
        before = storage.nbytes()
        resize()
        if block is None or storage.nbytes() == before:
            return
        if block.device is None:
            if block not in self._mappings:
                block.nbytes, block.address = storage.nbytes(), storage.data_ptr()
            return
        if before:
            self.machine.free(block, self.machine.thread().clock)
        if storage.nbytes():
            fresh = MemoryBlock(block.device, storage.nbytes(), address=storage.data_ptr())
            fresh.made_by = here()
            self.machine.allocate(fresh)
            self._blocks[storage._cdata] = fresh

    def range_of(self, tensor: Tensor) -> Range:
        """The block of a tensor, and the bytes that it spans."""
        block = self.of(tensor)
        if tensor.numel() == 0:
            return block, 0, 0
        size = tensor.element_size()
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        begin = tensor.storage_offset() * size
        if block in self._mappings or (block.device is None and block.address):
            begin += tensor.untyped_storage().data_ptr() - block.address
        return block, int(begin), int(begin + (last + 1) * size)

    def place_of(self, tensor: Tensor) -> DevicePlace:
        """Where a tensor is."""
        block = self.find(tensor)
        return HOST if block is None else DevicePlace(block.device, block.is_pinned)

    def device_of(self, tensor: Tensor) -> torch.device:
        """What ``tensor.device`` says."""
        with torch._C.DisableTorchFunctionSubclass():
            real: torch.device = _real_device(tensor)
            if (
                real.type != "cpu"
                or isinstance(tensor, FakeTensor)
                or tensor.layout != torch.strided
            ):
                return real
            block = self.find(tensor)
        if block is None or block.device is None:
            return real
        return torch.device("cuda", block.device)


def read_on_host(storages: Storages, tensor: Tensor, what: str) -> None:
    """The host reads a tensor. One in device memory is copied first, and the host waits for it."""
    machine = storages.machine
    with machine.lock:
        block, begin, end = storages.range_of(tensor)
        if block.device is None:
            machine.host(what, [(block, begin, end)], [])
            return
        line = machine.kernel(block.device, what, [(block, begin, end)], [])
        machine.host_waits(what, line.clock)
