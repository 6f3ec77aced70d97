"""Measures the peak memory of this process (Linux only)."""

from __future__ import annotations

import ctypes
import gc
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_ROLLUP = Path("/proc/self/smaps_rollup")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def resident_nbytes(key: str = "VmRSS") -> int:
    """Resident bytes of this process: now, or the peak (``VmHWM``)."""
    (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def give_back() -> None:
    """Return freed memory to the system now, and from now on as soon as it is freed."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, 128 * 1024)  # otherwise it grows with the largest block freed
    libc.mallopt(_M_TRIM_THRESHOLD, 128 * 1024)
    gc.collect()
    libc.malloc_trim(0)


class Peak:
    """``nbytes``: the peak memory of the block, above the memory before it."""

    def __enter__(self) -> Peak:
        give_back()
        _RESET.write_text("5")  # resets the high-water mark to the resident bytes
        self._before = resident_nbytes()
        return self

    def __exit__(self, *_: object) -> None:
        self.nbytes = resident_nbytes("VmHWM") - self._before


class SharedPeak:
    """Like :class:`Peak`, but a page that ranks share counts once: each rank counts its share of the
    page.

    The kernel keeps no high-water mark of this, so it is sampled every few milliseconds.
    """

    def __enter__(self) -> SharedPeak:
        give_back()
        self._before = self._highest = _proportional_nbytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.003):
            self._highest = max(self._highest, _proportional_nbytes())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.nbytes = self._highest - self._before


def _proportional_nbytes() -> int:
    """Mapped files are not counted: their share grows when another process that mapped them ends."""
    lines = _ROLLUP.read_text().splitlines()
    return 1024 * sum(int(x.split()[1]) for x in lines if x.startswith(("Pss_Anon", "Pss_Shmem")))


class TensorPeak(TorchDispatchMode):
    """``nbytes``: the exact peak of the sum of all storages that were allocated in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self._alive: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self._alive.setdefault(storage._cdata, StorageWeakRef(storage))
        self._alive = {key: ref for key, ref in self._alive.items() if not ref.expired()}
        self.nbytes = max(self.nbytes, sum(map(_nbytes_behind, self._alive)))
        return result


def _nbytes_behind(cdata: int) -> int:
    return torch.UntypedStorage._new_with_weak_ptr(cdata).nbytes()
