"""Runs the kernels of updates in device memory in Triton's interpreter, on the host."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from zeroshard.optim import triton_check
from zeroshard.optim.triton_update import Launch, Launcher

SOURCE = Path(triton_check.__file__).with_name("triton_kernels.py")


@cache
def interpreted_kernels(source: Path = SOURCE) -> ModuleType:
    """The module ``source``, with kernels that are interpreted, not compiled.

    Raises:
        ImportError: Triton is not installed.
    """
    import triton

    spec = importlib.util.spec_from_file_location("zeroshard_interpreted_kernels", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        spec.loader.exec_module(module)
    return module


class RecordingLauncher(Launcher):
    """Interprets each launch, and keeps a list of them."""

    def __init__(
        self, device: torch.device, launches: list[Launch], kernels: ModuleType | None = None
    ) -> None:
        super().__init__(device, kernels or interpreted_kernels())
        self.launches = launches

    def __call__(self, launch: Launch) -> None:
        self.launches.append(launch)
        super().__call__(launch)


@contextmanager
def interpreted(*, also_on_cpu: bool = False) -> Iterator[list[Launch]]:
    """Inside the block, updates in device memory are interpreted. Yields their launches, in order.

    ``also_on_cpu``: the chunks of CPU ranks count as device memory. Applies to engines that are built
    inside the block. Needs memory that the host can read, as that of a pretended device.
    """
    launches: list[Launch] = []

    def make(device: torch.device, _kernels: Any = None) -> Launcher:
        return RecordingLauncher(device, launches)

    def everywhere(_device: torch.device) -> bool:
        return True

    chosen = everywhere if also_on_cpu else triton_check.has_kernels
    triton_check.ready.cache_clear()
    try:
        with (
            mock.patch.object(triton_check, "Launcher", make),
            mock.patch.object(triton_check, "has_kernels", chosen),
        ):
            yield launches
    finally:
        triton_check.ready.cache_clear()
