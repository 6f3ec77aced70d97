"""``deepspeed.accelerator.get_accelerator()``: the device that this process trains on.

Method names are DeepSpeed's. On an accelerator torch's module for it answers; on the CPU the methods
return equivalents.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zeroshard.comm.env import current_rank_info, default_backend, local_device
from zeroshard.device.choice import accelerator_type
from zeroshard.memory.host_limits import host_limits


class DeepSpeedAccelerator:
    """Methods that are the same for the CPU and accelerators."""

    _name = "cpu"
    _communication_backend_name = "gloo"

    def device(self, device_index: int | None = None) -> Any:
        """A context manager that makes the device current."""
        return contextlib.nullcontext()

    def communication_backend_name(self) -> str:
        """torch's backend for this device, such as ``nccl`` or ``gloo``."""
        return default_backend()

    def current_device_name(self) -> str:
        """``cpu``, or for example ``cuda:0``."""
        return str(local_device())

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Whether the tensor is on this kind of device."""
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
        """Whether a call returns only after its work is done."""
        return self._name == "cpu"

    use_host_timers = resolves_data_dependency = is_synchronized_device
    handles_memory_backpressure = is_synchronized_device

    def is_triton_supported(self) -> bool:
        """Whether this kind of device runs Triton kernels."""
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
        return tensor if self._name == "cpu" else tensor.pin_memory()

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether the tensor is page-locked. Always true on the CPU, where no copy needs it."""
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
    # Constructors from a list. Torch's modules for accelerators have them under the same names.
    ByteTensor, IntTensor, LongTensor = torch.ByteTensor, torch.IntTensor, torch.LongTensor
    HalfTensor, BFloat16Tensor = torch.HalfTensor, torch.BFloat16Tensor
    FloatTensor, DoubleTensor = torch.FloatTensor, torch.DoubleTensor

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


class _Accelerator(DeepSpeedAccelerator):
    """Any accelerator. All other attributes are those of torch's module for it, such as ``torch.xpu``."""

    def __init__(self, kind: str) -> None:
        self._name = kind
        self._module = torch.get_device_module(kind)
        self._communication_backend_name = default_backend()

    def device(self, device_index: int | None = None) -> Any:
        return self._module.device(device_index)

    def device_name(self, device_index: int | None = None) -> str:
        return self._name if device_index is None else f"{self._name}:{device_index}"

    def default_generator(self, device_index: int) -> torch.Generator:
        generator: torch.Generator = self._module.default_generators[device_index]
        return generator

    def total_memory(self, device_index: int | None = None) -> int:
        return int(self._module.get_device_properties(device_index or 0).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        free, _ = self._module.mem_get_info(device_index)
        return int(free)

    def range_push(self, msg: str) -> Any:
        """Nothing: see :class:`_CUDA`."""

    def range_pop(self) -> Any:
        """See :meth:`range_push`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_module":
            raise AttributeError(name)
        return getattr(self._module, name)


class _CUDA(_Accelerator):
    """GPUs, for which ranges are those of NVIDIA's profiler."""

    def range_push(self, msg: str) -> Any:
        return torch.cuda.nvtx.range_push(msg)

    def range_pop(self) -> Any:
        return torch.cuda.nvtx.range_pop()


@functools.cache
def get_accelerator() -> Any:
    """The accelerator of this process."""
    kind = accelerator_type()
    if kind is None:
        return _CPU()
    return _CUDA(kind) if kind == "cuda" else _Accelerator(kind)


def is_current_accelerator_supported() -> bool:
    """True."""
    return True
