"""Chooses the device that a rank trains on, and the operations for it.

``DS_ACCELERATOR=cpu`` makes ranks without a named device train on the CPU.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from zeroshard.device.accelerator import AcceleratorOps, CudaOps, why_unusable
from zeroshard.device.ops import DeviceOps
from zeroshard.errors import LaunchError, UsageError

_HOST_TYPES = ("cpu", "meta")
_OPS = {"cuda": CudaOps}
_WITHOUT_STREAMS = ("mps",)  # nor pinned memory, nor float64: ranks train on the CPU there


@functools.cache
def ops_of(device: torch.device) -> DeviceOps:
    """The operations of ``device``: one object for each device of this process."""
    if device.type in _HOST_TYPES:
        return DeviceOps(device)
    return _OPS.get(device.type, AcceleratorOps)(device)


_planned_nbytes: list[int] = []


@contextlib.contextmanager
def planned_memory(nbytes: int) -> Iterator[None]:
    """Inside, engines of fake tensors plan for a device with so much memory of its own; 0: the CPU."""
    _planned_nbytes.append(nbytes)
    try:
        yield
    finally:
        _planned_nbytes.pop()


def memory_nbytes(device: torch.device) -> int:
    """Bytes of the device's own memory. 0: it has that of the host."""
    return ops_of(device).total_nbytes() or sum(_planned_nbytes[-1:])


def read(tensor: Tensor) -> Any:
    """``tensor.tolist()``: waits for the tensor's device.

    Raises:
        DistributedError: collectives of that device were aborted, so the values may be garbage.
    """
    return ops_of(tensor.device).read(tensor)


def on_host(tensor: Tensor) -> Tensor:
    """``tensor.cpu()``: waits for the tensor's device. Raises as :func:`read`."""
    copy = tensor.cpu()
    ops_of(tensor.device).raise_if_aborted()
    return copy


def choose_device(device: torch.device) -> None:
    """Make ``device`` current on this thread. To be called before a thread first uses it."""
    ops_of(device).select()


def accelerator_type(environ: Mapping[str, str] | None = None) -> str | None:
    """The type of the accelerator of this host, such as ``cuda``. None: ranks train on the CPU.

    Raises:
        LaunchError: the driver is too old for this build of torch.
    """
    env = os.environ if environ is None else environ
    if env.get("DS_ACCELERATOR", "").lower() == "cpu":
        return None
    found = torch.accelerator.current_accelerator()
    if found is None or found.type in _WITHOUT_STREAMS:
        return None
    if torch.accelerator.is_available():
        return found.type
    if found.type == "cuda" and "too old" in (reason := why_unusable()):
        raise LaunchError(
            f"This host's GPUs cannot be used: {reason}. Update the driver, or install a build of "
            "torch for this driver (https://pytorch.org). To train on the CPU, set "
            "DS_ACCELERATOR=cpu."
        )
    return None


def current_ops() -> DeviceOps:
    """The operations of this thread's current device; those of the CPU if ranks train there."""
    kind = accelerator_type()
    if kind is None:
        return ops_of(torch.device("cpu"))
    return ops_of(torch.device(kind, torch.accelerator.current_device_index()))


def device_of_rank(local_rank: int) -> torch.device:
    """The device of the rank with number ``local_rank`` on its host: its accelerator, or the CPU."""
    found = accelerator_type()
    return torch.device("cpu") if found is None else _numbered(found, local_rank)


def own_device(named: torch.device | str | None, local_rank: int) -> torch.device:
    """The device that a program names for the rank with number ``local_rank`` on its host.

    None, and an accelerator without an index, mean the rank's own: see :func:`device_of_rank`.

    Raises:
        UsageError: ``named`` is an accelerator that does not exist.
    """
    if named is None:
        return device_of_rank(local_rank)
    device = torch.device(named)
    if device.type in _HOST_TYPES:
        return device
    count = device_count(device.type)
    if (device.index or 0) >= count:
        raise UsageError(_absent(str(named), device.type, count))
    return device if device.index is not None else _numbered(device.type, local_rank)


def visible_devices() -> int:
    """How many accelerators this host has. Creates no context, so that children may use them."""
    return torch.accelerator.device_count()


def _absent(named: str, kind: str, count: int) -> str:
    """The message for a named device that does not exist."""
    reason = why_unusable() if kind == "cuda" and not count else ""
    found = f"{kind}:0 to {kind}:{count - 1}" if count > 1 else f"{kind}:0" if count else reason
    return (
        f"device={named!r}: torch finds {count} {kind.upper()} devices here"
        f"{f' ({found})' if found else ''}. Leave device out, or check CUDA_VISIBLE_DEVICES, the driver, "
        f"and whether this build of torch supports {kind.upper()}."
    )


def device_count(kind: str) -> int:
    """How many devices of type ``kind`` this process sees."""
    try:
        module = torch.get_device_module(kind)
    except RuntimeError:  # this build of torch does not know the type
        return 0
    return int(module.device_count()) if module.is_available() else 0


def _numbered(kind: str, local_rank: int) -> torch.device:
    return torch.device(kind, local_rank % device_count(kind))
