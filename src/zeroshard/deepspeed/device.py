"""What is behind ``deepspeed.accelerator.get_accelerator()``?

Questions about the device that this process trains on, answered by ``torch.cuda`` or, on the CPU, by what
holds there. Names are DeepSpeed's.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zeroshard.comm.env import current_rank_info, default_backend, local_device, uses_cuda
from zeroshard.memory.host_limits import host_limits


class DeepSpeedAccelerator:
    """What both kinds have in common."""

    _name = "cpu"
    _communication_backend_name = "gloo"

    def device(self, device_index: int | None = None) -> Any:
        """A context in which the device is current."""
        return contextlib.nullcontext()

    def communication_backend_name(self) -> str:
        """``nccl`` or ``gloo``."""
        return default_backend()

    def current_device_name(self) -> str:
        """``cpu``, or ``cuda:0``: fits the backend."""
        return str(local_device())

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Is the tensor on this kind of device?"""
        return tensor.device.type == self._name

    def is_available(self) -> bool:
        """Always: it was found."""
        return True

    def is_bf16_supported(self) -> bool:
        """Always."""
        return True

    is_fp16_supported = is_bf16_supported
    is_fp64_supported = is_bf16_supported

    def supported_dtypes(self) -> list[torch.dtype]:
        """What parameters may be trained in."""
        return [torch.float32, torch.float16, torch.bfloat16, torch.float64]

    def is_synchronized_device(self) -> bool:
        """Does a call return when its work is done?"""
        return self._name == "cpu"

    use_host_timers = resolves_data_dependency = is_synchronized_device
    handles_memory_backpressure = is_synchronized_device

    def is_triton_supported(self) -> bool:
        """Does this kind of device run triton's kernels?"""
        return self._name == "cuda"

    is_graph_capture_supported = is_triton_supported

    def random(self) -> Any:
        """``torch.random``."""
        return torch.random

    def amp(self) -> Any:
        """``torch.amp``."""
        return torch.amp

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Call it: the device is there."""
        return callback()

    def pin_memory(self, tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        """Page-locked where there is a device to copy to."""
        return tensor.pin_memory() if self._name == "cuda" else tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Is it page-locked? On the CPU everything is as good as that."""
        return self._name == "cpu" or tensor.is_pinned()

    def op_builder_dir(self) -> str:
        """The module of the builders."""
        return "deepspeed.ops.op_builder"

    def get_op_builder(self, class_name: str) -> Any:
        """A builder's class, None if there is none: nothing is compiled."""
        from zeroshard.deepspeed import version_info

        return getattr(version_info, class_name, None)

    def create_op_builder(self, class_name: str) -> Any:
        """An object of it."""
        cls = self.get_op_builder(class_name)
        return None if cls is None else cls()

    def get_compile_backend(self) -> str:
        """Of ``torch.compile``."""
        return "inductor"

    def get_supported_compile_backends(self) -> list[str]:
        """Of ``torch.compile``."""
        return list(torch._dynamo.list_backends())

    def visible_devices_envs(self) -> list[str]:
        """Variables that choose devices."""
        return ["CUDA_VISIBLE_DEVICES"]


class _CPU(DeepSpeedAccelerator):
    """Ranks on the cores of this host."""

    Stream = Event = None

    def device_name(self, device_index: int | None = None) -> str:
        return "cpu"

    def device_count(self) -> int:
        """Ranks on this host."""
        return current_rank_info().local_world_size

    def current_device(self) -> int:
        """This rank on its host."""
        return current_rank_info().local_rank

    def set_device(self, device_index: int) -> None:
        """Nothing: a rank stays where it is."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing is in flight."""

    def stream(self, stream: Any) -> Any:
        return contextlib.nullcontext()

    def current_stream(self, device_index: int | None = None) -> None:
        """There are none."""

    default_stream = current_stream

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        torch.set_rng_state(new_state)

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.default_generator

    def empty_cache(self) -> None:
        """There is none."""

    reset_peak_memory_stats = reset_max_memory_allocated = empty_cache

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes that this host, or its container, has."""
        limits = host_limits()
        return limits.cgroup.limit_nbytes if limits.cgroup else limits.host_total_nbytes or 0

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes that can still be had."""
        return host_limits().free_nbytes or 0

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes of the host that are in use."""
        return max(0, self.total_memory() - self.available_memory())

    max_memory_allocated = memory_reserved = max_memory_reserved = memory_allocated
    memory_cached = max_memory_cached = memory_allocated

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        return {"allocated_bytes.all.current": self.memory_allocated()}

    def range_push(self, msg: str) -> None:
        """There is no profiler that would show it."""

    def range_pop(self) -> None:
        """See :meth:`range_push`."""


class _CUDA(DeepSpeedAccelerator):
    """GPUs: every other question goes to ``torch.cuda`` under the same name."""

    _name = "cuda"
    _communication_backend_name = "nccl"

    def device(self, device_index: int | None = None) -> Any:
        return torch.cuda.device(device_index)

    def device_name(self, device_index: int | None = None) -> str:
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.cuda.default_generators[device_index]

    def total_memory(self, device_index: int | None = None) -> int:
        return torch.cuda.get_device_properties(device_index or 0).total_memory

    def available_memory(self, device_index: int | None = None) -> int:
        free, _ = torch.cuda.mem_get_info(device_index)
        return free

    def range_push(self, msg: str) -> Any:
        return torch.cuda.nvtx.range_push(msg)

    def range_pop(self) -> Any:
        return torch.cuda.nvtx.range_pop()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cuda, name)


@functools.cache
def get_accelerator() -> Any:
    """The one for this process."""
    return _CUDA() if uses_cuda() else _CPU()


def is_current_accelerator_supported() -> bool:
    """Always."""
    return True
