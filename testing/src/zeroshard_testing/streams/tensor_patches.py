"""Replaces methods and factories of tensors, so that each knows its pretended memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._device
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from zeroshard_testing.streams.machine import Machine
from zeroshard_testing.streams.patches import Patches
from zeroshard_testing.streams.tensors import HOST, DevicePlace, Storages, read_on_host, real_to

_CPU = torch.device("cpu")


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
                moved: Tensor = real_to(t, dtype=dtype or t.dtype, copy=True, **how)
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
