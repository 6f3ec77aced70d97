"""Takes from every operator of torch what it reads and writes, and queues it on the current stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from zeroshard_testing.streams.machine import Range
from zeroshard_testing.streams.tensors import HOST, DevicePlace, Storages, read_on_host

aten = torch.ops.aten
_SYNCS = {
    "equal", "nonzero", "masked_select", "unique", "_unique", "_unique2", "unique_dim",
    "unique_consecutive", "bincount", "repeat_interleave", "is_nonzero",
}  # fmt: skip
"""Operators whose result the host needs, so that it waits for the device."""
_READS_NOTHING = {
    "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted",
}  # fmt: skip
_LIKE = {"zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
         "new_zeros", "new_ones", "new_full"}  # fmt: skip
_METADATA = {"set_", "detach", "alias", "lift_fresh", "resize_", "_has_compatible_shallow_copy_type",
             "is_same_size", "record_stream"}  # fmt: skip
_ONLY_WRITES = {
    "copy_", "_foreach_copy_", "fill_", "zero_", "_foreach_zero_", "_foreach_fill_", "random_",
    "uniform_", "normal_", "log_normal_", "cauchy_", "exponential_", "geometric_", "bernoulli_",
}  # fmt: skip
"""Operators that do not read what they write in place."""
_COPIES = ("copy_", "_to_copy", "_foreach_copy_")
_TAKES_HOST_INDEX = {"index", "index_put_", "index_put", "_index_put_impl_", "_unsafe_index"}


@dataclass(frozen=True)
class _Shape:
    """What the schema of an operator says."""

    name: str
    writes: frozenset[int | str]  # positions and names of the arguments that it writes
    is_view: bool  # its results are views of its arguments, and it writes none of them
    reads_written: bool  # it reads what it writes: it works in place


@cache
def _shape_of(func: Any) -> _Shape:
    schema = func._schema
    writes: set[int | str] = set()
    for at, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes |= {at, argument.name}
    views = [
        result.alias_info is not None and not result.alias_info.is_write
        for result in schema.returns
    ]
    name = schema.name.partition("::")[2]
    is_view = bool(views) and all(views) and not writes
    is_in_place = bool(writes) and 0 in writes and name not in _ONLY_WRITES
    return _Shape(name, frozenset(writes), is_view, is_in_place)


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        if (
            not isinstance(value, FakeTensor)
            and value.layout is torch.strided
            and torch._C.TensorBase.device.__get__(value).type == "cpu"  # type: ignore[attr-defined]
        ):
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _used(shape: _Shape, args: tuple[Any, ...], kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors among the arguments that an operator only reads, and those that it writes."""
    read: list[Tensor] = []
    written: list[Tensor] = []
    for at, argument in (*enumerate(args), *kwargs.items()):
        (written if at in shape.writes else read).extend(_tensors(argument))
    return read, written


def _nbytes(tensors: Iterable[Tensor]) -> int:
    total = 0
    for tensor in tensors:
        numel = 1
        for size, step in zip(tensor.shape, tensor.stride(), strict=True):
            numel *= size if step else 1  # an expanded dimension is read once
        total += numel * tensor.element_size()
    return total


class OperatorMode(TorchDispatchMode):
    """Sees every operator of one host thread."""

    def __init__(self, storages: Storages) -> None:
        super().__init__()
        self._storages = storages
        self._machine = storages.machine

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        storages = self._storages
        if storages.is_quiet or func.namespace != "aten":
            return func(*args, **kwargs)
        shape = _shape_of(func)
        with self._machine.lock:
            if shape.is_view or shape.name in _METADATA:
                return self._view(func, shape, args, kwargs)
            read, written = _used(shape, args, kwargs)
            if shape.name == "_local_scalar_dense":
                for tensor in read:
                    read_on_host(storages, tensor, "item")
                return func(*args, **kwargs)
            before = {id(t): storages.of(t) for t in (*read, *written)}
            del before
            result = func(*args, **kwargs)
            self._record(shape, read, written, result, args, kwargs)
        return result

    def _view(self, func: Any, shape: _Shape, args: Any, kwargs: Any) -> Any:
        for tensor in _tensors(list(args)):
            self._storages.of(tensor)
        if shape.name != "resize_":
            result = func(*args, **kwargs)
        else:
            made: list[Any] = []
            self._storages.resize(
                args[0].untyped_storage(), lambda: made.append(func(*args, **kwargs))
            )
            result = made[0]
        return result

    def _record(
        self,
        shape: _Shape,
        read: list[Tensor],
        written: list[Tensor],
        result: Any,
        args: Any,
        kwargs: Any,
    ) -> None:
        storages = self._storages
        where = self._where(shape, read, written)
        fresh = [t for t in _tensors(result) if storages.find(t) is None]
        for tensor in fresh:
            storages.adopt(tensor, where)
        if shape.name in _READS_NOTHING:
            return
        if shape.name in _LIKE:
            read = []
        # A copy from or to a fake or meta tensor, as a compiler makes, moves nothing.
        if shape.name in _COPIES and len(written or fresh) == len(read):
            self._copies(shape, read, written, fresh, args, kwargs)
            return
        if shape.reads_written:
            read = [*read, *written]
        written = written + fresh
        if where.device is None:
            self._on_host(shape.name, read, written)
        else:
            self._on_device(where.device, shape.name, read, written)

    def _where(self, shape: _Shape, read: list[Tensor], written: list[Tensor]) -> DevicePlace:
        """Where an operator runs and makes its results."""
        placing = self._storages.placing
        if placing is not None:
            return placing
        for tensor in (*written, *read):
            block = self._storages.of(tensor)
            if block.device is not None:
                return DevicePlace(block.device)
        return HOST

    def _on_host(self, name: str, read: list[Tensor], written: list[Tensor]) -> None:
        ranges = self._storages.range_of
        self._machine.host(name, [ranges(t) for t in read], [ranges(t) for t in written])

    def _on_device(self, device: int, name: str, read: list[Tensor], written: list[Tensor]) -> None:
        machine, ranges = self._machine, self._storages.range_of
        reads: list[Range] = []
        for tensor in read:
            here = ranges(tensor)
            if here[0].device is None:
                self._mixed(device, name, tensor, here)
            else:
                reads.append(here)
                self._same_device(device, name, here)
        writes = [ranges(tensor) for tensor in written]
        for here in writes:
            if here[0].device is None:
                machine.report("device", f"{name} on device {device} writes {here[0]}")
            else:
                self._same_device(device, name, here)
        if not any(end > begin for _, begin, end in (*reads, *writes)):
            return
        line = machine.kernel(
            device, name, reads, [w for w in writes if w[0].device is not None],
            traffic=(_nbytes(read), _nbytes(written)),
        )  # fmt: skip
        if name in _SYNCS:
            machine.host_waits(name, line.clock)

    def _mixed(self, device: int, name: str, tensor: Tensor, here: Range) -> None:
        """A host tensor among the inputs of a kernel: only numbers and indices may be there."""
        if tensor.dim() == 0:
            self._machine.host(name, [here], [])
        elif name in _TAKES_HOST_INDEX:
            line = self._machine.kernel(device, "copy of an index", [], [])
            self._machine.host_waits("copy", line.clock)
        else:
            self._machine.report("device", f"{name} on device {device} reads {here[0]}")

    def _same_device(self, device: int, name: str, here: Range) -> None:
        if here[0].device != device:
            self._machine.report("device", f"{name} on device {device} uses {here[0]}")

    # ------------------------------------------------------------------ copies

    def _copies(
        self, shape: _Shape, read: list[Tensor], written: list[Tensor], fresh: list[Tensor],
        args: Any, kwargs: Any,
    ) -> None:  # fmt: skip
        at = {"copy_": 2, "_foreach_copy_": 2}.get(shape.name, 99)
        non_blocking = bool(kwargs.get("non_blocking", args[at] if len(args) > at else False))
        targets = written or fresh
        pairs = list(zip(targets, read, strict=True))
        blocks = self._storages.of
        if len({blocks(t).device for pair in pairs for t in pair}) == 1:
            device = blocks(targets[0]).device if targets else None
            if device is None:
                self._on_host(shape.name, read, targets)
            else:
                self._on_device(device, shape.name, read, targets)
            return
        for target, source in pairs:
            self._copy(target, source, non_blocking)

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool) -> None:
        """One copy between memories, on the current stream of the source's or target's device."""
        machine, ranges = self._machine, self._storages.range_of
        to, from_ = ranges(target), ranges(source)
        if to[1] == to[2]:
            return
        device = from_[0].device if from_[0].device is not None else to[0].device
        if device is None:
            machine.host("copy", [from_], [to])
            return
        direction = "d2d" if to[0].device is not None else "d2h"
        if from_[0].device is None:
            direction = "h2d"
        machine.counts.copies[direction] += _nbytes([target])
        if direction == "d2d":
            self._between_devices(to, from_, _nbytes([target]))
            return
        host = to[0] if direction == "d2h" else from_[0]
        if not host.is_pinned:
            machine.counts.pageable += 1
            if non_blocking:
                machine.report("unpinned", f"an asynchronous copy ({direction}) uses {host}")
        line = machine.kernel(device, f"copy {direction}", [from_], [to])
        if not non_blocking or not host.is_pinned:
            machine.host_waits(f"copy {direction}", line.clock)

    def _between_devices(self, to: Range, from_: Range, nbytes: int) -> None:
        """Torch lets the source's stream wait for the target's, and the target's for the copy."""
        machine = self._machine
        assert to[0].device is not None and from_[0].device is not None  # noqa: PT018
        here, there = machine.current_stream(from_[0].device), machine.current_stream(to[0].device)
        here.join(there.clock)
        machine.kernel(from_[0].device, "copy d2d", [from_], [to], traffic=(nbytes, nbytes))
        there.join(here.clock)


def declare(storages: Storages) -> Callable[[Any, Any, bool], None]:
    """What code that torch cannot see says that it uses; see :mod:`zeroshard.memory.host_memory`."""

    def listen(reads: Any, writes: Any, on_device: bool) -> None:
        machine, ranges = storages.machine, storages.range_of
        with machine.lock:
            used = [ranges(t) for t in _tensors(list(reads))]
            changed = [ranges(t) for t in _tensors(list(writes))]
            found = {block.device for block, _, _ in (*used, *changed)}
            if not on_device:
                for device in found - {None}:
                    machine.report("device", f"code of the host uses memory of device {device}")
                machine.host("code of the host", used, changed)
                return
            for device in found:
                if device is None:
                    machine.report("device", "a kernel uses host memory")
                    continue
                sizes = _nbytes(_tensors(list(reads))), _nbytes(_tensors(list(writes)))
                machine.kernel(device, "kernel", used, changed, traffic=sizes)

    return listen
