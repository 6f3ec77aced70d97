"""``deepspeed.accelerator.get_accelerator()``: the device that this process trains on.

Method names are DeepSpeed's. On a GPU ``torch.cuda`` answers; on the CPU the methods return equivalents.
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
    """Methods that are the same for CPU and CUDA."""

    _name = "cpu"
    _communication_backend_name = "gloo"

    def device(self, device_index: int | None = None) -> Any:
        """A context manager that makes the device current."""
        return contextlib.nullcontext()

    def communication_backend_name(self) -> str:
        """``nccl`` or ``gloo``."""
        return default_backend()

    def current_device_name(self) -> str:
        """``cpu``, or for example ``cuda:0``."""
        return str(local_device())

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Is the tensor on this kind of device?"""
        return tensor.device.type == self._name

    def is_available(self) -> bool:
        """True: the device was found."""
        return True

    def is_bf16_supported(self) -> bool:
        """True."""
        return True

    is_fp16_supported = is_bf16_supported
    is_fp64_supported = is_bf16_supported

    def supported_dtypes(self) -> list[torch.dtype]:
        """Dtypes in which parameters can be trained."""
        return [torch.float32, torch.float16, torch.bfloat16, torch.float64]

    def is_synchronized_device(self) -> bool:
        """Does a call return only after its work is done?"""
        return self._name == "cpu"

    use_host_timers = resolves_data_dependency = is_synchronized_device
    handles_memory_backpressure = is_synchronized_device

    def is_triton_supported(self) -> bool:
        """Does this kind of device run Triton kernels?"""
        return self._name == "cuda"

    is_graph_capture_supported = is_triton_supported

    def random(self) -> Any:
        """``torch.random``."""
        return torch.random

    def amp(self) -> Any:
        """``torch.amp``."""
        return torch.amp

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Call it now: the device is initialized."""
        return callback()

    def pin_memory(self, tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        """``tensor`` in page-locked memory if there is a GPU, else unchanged."""
        return tensor.pin_memory() if self._name == "cuda" else tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Is the tensor page-locked? Always true on the CPU, where no copy needs it."""
        return self._name == "cpu" or tensor.is_pinned()

    def op_builder_dir(self) -> str:
        """The name of the module that has the builders."""
        return "deepspeed.ops.op_builder"

    def get_op_builder(self, class_name: str) -> Any:
        """The class of a builder; None if there is none. Builders compile nothing."""
        from zeroshard.deepspeed import version_info

        return getattr(version_info, class_name, None)

    def create_op_builder(self, class_name: str) -> Any:
        """An instance of the builder's class, or None."""
        cls = self.get_op_builder(class_name)
        return None if cls is None else cls()

    def get_compile_backend(self) -> str:
        """The default backend of ``torch.compile``."""
        return "inductor"

    def get_supported_compile_backends(self) -> list[str]:
        """The backends of ``torch.compile``."""
        return list(torch._dynamo.list_backends())

    def visible_devices_envs(self) -> list[str]:
        """Environment variables that choose devices."""
        return ["CUDA_VISIBLE_DEVICES"]


class _CPU(DeepSpeedAccelerator):
    """The CPU. Ranks run on the cores of this host."""

    Stream = Event = None

    def device_name(self, device_index: int | None = None) -> str:
        return "cpu"

    def device_count(self) -> int:
        """Number of ranks on this host."""
        return current_rank_info().local_world_size

    def current_device(self) -> int:
        """This rank's number on its host."""
        return current_rank_info().local_rank

    def set_device(self, device_index: int) -> None:
        """Nothing: a rank has one device."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing: no work is in flight."""

    def stream(self, stream: Any) -> Any:
        return contextlib.nullcontext()

    def current_stream(self, device_index: int | None = None) -> None:
        """None: there are no streams."""

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
        """Nothing: there is no cache."""

    reset_peak_memory_stats = reset_max_memory_allocated = empty_cache

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of memory of this host, or of its container."""
        limits = host_limits()
        return limits.cgroup.limit_nbytes if limits.cgroup else limits.host_total_nbytes or 0

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes that can still be allocated."""
        return host_limits().free_nbytes or 0

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes in use on this host."""
        return max(0, self.total_memory() - self.available_memory())

    max_memory_allocated = memory_reserved = max_memory_reserved = memory_allocated
    memory_cached = max_memory_cached = memory_allocated

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        return {"allocated_bytes.all.current": self.memory_allocated()}

    def range_push(self, msg: str) -> None:
        """Nothing: no profiler shows ranges on the CPU."""

    def range_pop(self) -> None:
        """See :meth:`range_push`."""


class _CUDA(DeepSpeedAccelerator):
    """GPUs. All other attributes are those of ``torch.cuda``."""

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
    """The accelerator of this process."""
    return _CUDA() if uses_cuda() else _CPU()


def is_current_accelerator_supported() -> bool:
    """True."""
    return True
