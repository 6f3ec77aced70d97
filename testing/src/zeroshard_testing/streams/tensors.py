"""Marks storages as device memory, and makes tensors say that they are there.

The values of every tensor are in host memory, so that operators compute real numbers. A table says which
storages count as device memory. ``Tensor.device``, factories, ``Tensor.to`` and others follow the table.
"""

from __future__ import annotations

import functools
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
from torch.overrides import handle_torch_function, has_torch_function_unary

from zeroshard_testing.streams.clocks import Clock
from zeroshard_testing.streams.findings import here
from zeroshard_testing.streams.machine import Machine, Range
from zeroshard_testing.streams.memory_blocks import MemoryBlock
from zeroshard_testing.streams.patches import Patches

_CPU = torch.device("cpu")
_real_device = torch._C.TensorBase.device.__get__  # type: ignore[attr-defined]
_real_to = torch._C.TensorBase.to


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


def number_of(device: Any, machine: Machine) -> int | None:
    """The number of a device that a program names; None for one that is not pretended."""
    if isinstance(device, int):
        return device
    device = torch.device(device)
    if device.type != "cuda":
        return None
    number = machine.thread().device if device.index is None else device.index
    if number >= machine.devices:
        raise RuntimeError(f"CUDA error: invalid device ordinal ({device})")
    return number


class _Move(torch.autograd.Function):
    """A copy to another device with a gradient, which is copied back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, move: Callable[[Tensor], Tensor], back: Any) -> Tensor:
        ctx.back = back
        return move(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return ctx.back(grad), None, None


class TensorPatches:
    """Replaces attributes of ``torch.Tensor``, factories, and storages."""

    def __init__(self, storages: Storages, patches: Patches) -> None:
        self._storages = storages
        self._machine = storages.machine
        self._patches = patches
        self._wrappers: dict[Any, Any] = {}

    def install(self) -> None:
        """Replace all of them."""
        self._attributes()
        self._methods()
        self._factories()
        self._untyped_storage()
        self._teach_tables()

    # ------------------------------------------------------------------ helpers

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
        """Replace a function that takes a tensor first, with the usual dispatch to subclasses."""
        old = getattr(owner, name)
        new = make(old)

        @functools.wraps(new)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if args and isinstance(args[0], Tensor):
                if isinstance(args[0], FakeTensor):
                    return old(*args, **kwargs)
                if has_torch_function_unary(args[0]):
                    return handle_torch_function(wrapper, (args[0],), *args, **kwargs)
            elif torch._C._is_torch_function_mode_enabled():  # ``with torch.device(...)``
                return handle_torch_function(wrapper, (), *args, **kwargs)
            return new(*args, **kwargs)

        wrapper.__name__ = name
        self._wrappers[old] = wrapper
        self._patches.set(owner, name, wrapper)

    def _attribute(self, name: str, get: Callable[[Tensor], Any]) -> None:
        old = getattr(torch._C.TensorBase, name).__get__

        def value(tensor: Tensor) -> Any:
            return old(tensor) if isinstance(tensor, FakeTensor) else get(tensor)

        new = property(value)
        self._wrappers[old] = new.__get__  # type: ignore[attr-defined]
        self._patches.set(torch.Tensor, name, new)

    def _move(self, tensor: Tensor, where: DevicePlace, dtype: Any, **how: Any) -> Tensor:
        storages = self._storages
        from_ = storages.place_of(tensor)

        def move(t: Tensor, to: DevicePlace = where, dtype: Any = dtype) -> Tensor:
            with storages.place(to):
                moved: Tensor = _real_to(t, dtype=dtype or t.dtype, copy=True, **how)
            return moved

        if tensor.requires_grad and torch.is_grad_enabled():
            back = functools.partial(move, to=from_, dtype=tensor.dtype)
            return _Move.apply(tensor, move, back)  # type: ignore[no-any-return]
        return move(tensor)

    # ------------------------------------------------------------------ tensors

    def _attributes(self) -> None:
        device_of = self._storages.device_of
        self._attribute("device", device_of)
        self._attribute("is_cuda", lambda tensor: device_of(tensor).type == "cuda")
        self._attribute("is_cpu", lambda tensor: device_of(tensor).type == "cpu")

    def _methods(self) -> None:
        storages, tensor = self._storages, torch.Tensor
        self._replace(tensor, "to", self._to)
        self._replace(tensor, "cuda", lambda _: self._cuda)
        self._replace(tensor, "cpu", lambda _: lambda t, **_: tensor.to(t, _CPU))
        self._replace(
            tensor,
            "get_device",
            lambda _: lambda t: -1 if t.device.index is None else t.device.index,
        )
        self._replace(tensor, "is_pinned", lambda _: lambda t, *__: storages.place_of(t).is_pinned)
        self._replace(
            tensor,
            "pin_memory",
            lambda _: (
                lambda t, *__: t if t.is_pinned() else self._move(t, DevicePlace(None, True), None)
            ),
        )
        self._replace(tensor, "record_stream", lambda _: self._record_stream)
        self._replace(tensor, "tolist", lambda old: self._reading(old, "tolist"))
        self._replace(tensor, "numpy", self._numpy)

    def _to(self, old: Any) -> Callable[..., Tensor]:
        """A replacement of ``Tensor.to`` that moves between pretended memories. ``old``: the method."""
        storages, machine = self._storages, self._machine

        def call(self_: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            copy = kwargs.pop("copy", False)
            if args and isinstance(args[0], Tensor):
                args = (args[0].device, args[0].dtype, *args[1:])
            if len(args) > 3:
                *args, copy = args  # type: ignore[assignment]
            device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
            how: dict[str, Any] = {"non_blocking": non_blocking}
            if layout is not None:
                how["memory_format"] = layout
            number = None if device is None else number_of(device, machine)
            here_ = storages.place_of(self_)
            if device is None or device.type not in ("cpu", "cuda") or number == here_.device:
                if device is not None and device.type not in ("cpu", "cuda"):
                    how["device"] = device
                moved: Tensor = old(self_, dtype=dtype or self_.dtype, copy=copy, **how)
                return moved
            return self._move(self_, DevicePlace(number), dtype, **how)

        return call

    def _cuda(
        self, tensor: Tensor, device: Any = None, non_blocking: bool = False, **_: Any
    ) -> Tensor:
        chosen = torch.device("cuda" if device is None else device)
        if not isinstance(device, int) and chosen.index is None:
            chosen = torch.device("cuda", self._machine.thread().device)
        return torch.Tensor.to(tensor, chosen, non_blocking=non_blocking)

    def _record_stream(self, tensor: Tensor, stream: Any) -> None:
        block = self._storages.of(tensor)
        with self._machine.lock:
            self._machine.record_stream(block, stream.line)

    def _reading(self, old: Any, what: str) -> Callable[[Tensor], Any]:
        def call(tensor: Tensor) -> Any:
            read_on_host(self._storages, tensor, what)
            with self._storages.quietly():
                return old(tensor)

        return call

    def _numpy(self, old: Any) -> Callable[..., Any]:
        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.is_cuda:
                raise TypeError(
                    f"can't convert {tensor.device} device type tensor to numpy. Use Tensor.cpu() "
                    "to copy the tensor to host memory first."
                )
            read_on_host(self._storages, tensor, "numpy")
            return old(tensor, *args, **kwargs)

        return call

    # ------------------------------------------------------------------ factories

    def _factories(self) -> None:
        known = torch.utils._device._device_constructors()
        for function in known:
            owner = torch.nested if function is torch.nested.nested_tensor else torch
            name = function.__name__
            if getattr(owner, name, None) is function:
                made_on_host = name in ("tensor", "as_tensor", "asarray", "scalar_tensor")
                make = self._from_data if made_on_host else self._factory
                self._replace(owner, name, make)
        for name in ("zeros", "ones", "empty", "full", "rand", "randn", "randint"):
            self._replace(torch, f"{name}_like", self._factory)
        for name in ("new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided"):
            self._replace(torch.Tensor, name, self._factory)
        self._replace(torch.Tensor, "new_tensor", self._new_tensor)
        wrapped = {self._wrappers.get(function, function) for function in known} | known
        self._patches.set(torch.utils._device, "_device_constructors", lambda: wrapped)

    def _asked(self, kwargs: dict[str, Any]) -> tuple[DevicePlace | None, torch.device | None]:
        """Where a factory is to make memory; the second is a device that is not pretended."""
        pin = bool(kwargs.pop("pin_memory", False))
        device = kwargs.pop("device", None)
        if device is None:
            return (DevicePlace(None, True) if pin else None), None
        if not isinstance(device, int):
            device = torch.device(device)
            if device.type not in ("cpu", "cuda"):
                return None, device
        return DevicePlace(number_of(device, self._machine), pin), None

    def _factory(self, old: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            where, other = self._asked(kwargs)
            if other is not None:
                return old(*args, device=other, **kwargs)
            if where is None:
                return old(*args, **kwargs)
            with self._storages.place(where):
                return old(*args, device="cpu", **kwargs)  # the memory of all places

        return call

    def _from_data(self, old: Any) -> Callable[..., Any]:
        """Factories that read numbers: they are made on the host and copied, as torch does."""

        def call(data: Any, *args: Any, **kwargs: Any) -> Any:
            where, other = self._asked(kwargs)
            if other is not None:
                return old(data, *args, device=other, **kwargs)
            if where is None and isinstance(data, Tensor):
                return old(data, *args, **kwargs)
            grad = kwargs.pop("requires_grad", None)
            made = old(data, *args, **kwargs)
            if where is not None and where != self._storages.place_of(made):
                made = self._move(made, where, None)
            return made if grad is None else made.requires_grad_(grad)

        return call

    def _new_tensor(self, old: Any) -> Callable[..., Any]:
        def call(like: Tensor, data: Any, **kwargs: Any) -> Any:
            kwargs.setdefault("dtype", like.dtype)
            kwargs.setdefault("device", like.device)
            return torch.tensor(data, **kwargs)

        return call

    # ------------------------------------------------------------------ storages

    def _untyped_storage(self) -> None:
        storages, patches, kind = self._storages, self._patches, torch.UntypedStorage
        old_resize, old_clone = kind.resize_, kind.clone
        old_device = torch._C.StorageBase.device.__get__  # type: ignore[attr-defined]

        def place_of(storage: Any) -> DevicePlace:
            storages.collect()
            block = storages._blocks.get(storage._cdata)
            return HOST if block is None else DevicePlace(block.device, block.is_pinned)

        def device(storage: Any) -> torch.device:
            number = place_of(storage).device
            return old_device(storage) if number is None else torch.device("cuda", number)

        def resize(storage: Any, nbytes: int) -> Any:
            with storages.machine.lock:
                before = storage.nbytes()
                try:
                    storages.resize(storage, lambda: old_resize(storage, nbytes))
                except torch.OutOfMemoryError:
                    old_resize(storage, before)
                    raise
            return storage

        def clone(storage: Any) -> Any:
            if place_of(storage).device is None:
                return old_clone(storage)
            copy = kind(storage.nbytes())
            storages.adopt_storage(copy, place_of(storage))
            return copy.copy_(storage)

        patches.set(kind, "device", property(device))
        patches.set(kind, "is_cuda", property(lambda storage: place_of(storage).device is not None))
        patches.set(kind, "resize_", resize)
        patches.set(kind, "clone", clone)
        patches.set(kind, "is_pinned", lambda storage, *_: place_of(storage).is_pinned)

    # ------------------------------------------------------------------ tables of functions

    def _teach_tables(self) -> None:
        """Let the tables of functions that sharded parameters consult know the replacements."""
        from zeroshard.zero import functorch, sharded_parameter

        for module in (sharded_parameter, functorch):
            for name, value in list(vars(module).items()):
                if isinstance(value, (set, frozenset)) and not name.startswith("__"):
                    new = {self._wrappers[f] for f in value if _is_key(self._wrappers, f)}
                    if new:
                        self._patches.set(module, name, type(value)(value | new))


def _is_key(table: dict[Any, Any], key: Any) -> bool:
    try:
        return key in table
    except TypeError:
        return False


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
