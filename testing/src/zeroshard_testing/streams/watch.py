"""Pretends a machine with CUDA devices, and watches the order of all that a program does there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from torch import Tensor

from zeroshard.memory import host_memory
from zeroshard_testing.streams import cuda, nccl, threads
from zeroshard_testing.streams.findings import Finding
from zeroshard_testing.streams.machine import DEVICE_NBYTES, Counts, Machine
from zeroshard_testing.streams.memory_blocks import MemoryBlock
from zeroshard_testing.streams.operators import OperatorMode, declare
from zeroshard_testing.streams.patches import Patches
from zeroshard_testing.streams.tensor_patches import TensorPatches
from zeroshard_testing.streams.tensors import Storages


class Watch:
    """What was found and counted so far. Counts are by phase; ``phase=None`` means all phases."""

    def __init__(self, machine: Machine, storages: Storages) -> None:
        self._machine = machine
        self._storages = storages

    @property
    def findings(self) -> list[Finding]:
        """The mistakes, in the order in which they were found."""
        with self._machine.lock:
            self._storages.collect()
        return self._machine.findings

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Count in the phase ``name`` from now on; as a context, until its end."""
        before, self._machine.phase = self._machine.phase, name

        @contextmanager
        def until_the_end() -> Iterator[None]:
            try:
                yield
            finally:
                self._machine.phase = before

        return until_the_end()

    def counts(self, phase: str | None = None) -> Counts:
        """All counts of one phase."""
        with self._machine.lock:
            self._storages.collect()
        if phase is not None:
            return self._machine.phases.get(phase, Counts())
        total = Counts()
        for counts in self._machine.phases.values():
            for name, value in vars(counts).items():
                if isinstance(value, Counter):
                    getattr(total, name).update(value)
                else:
                    setattr(total, name, getattr(total, name) + value)
        return total

    def waits(self, phase: str | None = None, *, thread: str | None = None) -> Counter[str]:
        """How often the host waited for a device, by kind. ``thread``: ``main`` or another name.

        A wait for work that the thread knows to have ended is not counted.
        """
        found: Counter[str] = Counter()
        for (kind, name), count in self.counts(phase).waits.items():
            if thread is None or name.startswith(thread):
                found[kind] += count
        return found

    def traffic(self, phase: str | None = None) -> tuple[int, int]:
        """Bytes that kernels read, and bytes that they wrote, without copies from and to the host."""
        counts = self.counts(phase)
        return counts.read_nbytes, counts.written_nbytes

    def kernels(self, phase: str | None = None) -> Counter[str]:
        """How often each operator was queued on a device. One operator counts as one kernel."""
        return self.counts(phase).kernels

    def allocations(self, phase: str | None = None) -> tuple[int, int]:
        """How many blocks of device memory were given out, and their bytes."""
        counts = self.counts(phase)
        return counts.allocations, counts.allocated_nbytes

    @property
    def live_nbytes(self) -> int:
        """Bytes of device memory in use, of all devices."""
        with self._machine.lock:
            self._storages.collect()
        return sum(self._machine.live_nbytes)

    @property
    def peak_nbytes(self) -> int:
        """The most bytes of memory in use at one time, of the device that used most."""
        return max(self._machine.peak_nbytes)

    @property
    def live_blocks(self) -> list[MemoryBlock]:
        """The blocks of device memory in use, largest first."""
        with self._machine.lock:
            self._storages.collect()
            return sorted(self._machine.live, key=lambda block: -block.nbytes)

    def is_device(self, tensor: Tensor) -> bool:
        """Whether a tensor is in device memory."""
        return self._storages.place_of(tensor).device is not None

    def world(self, size: int, rank: int = 0) -> AbstractContextManager[None]:
        """A context in which this process is one of ``size`` ranks over a model of NCCL."""
        return nccl.pretended_world(self._storages, size, rank)

    def ranks(self) -> AbstractContextManager[None]:
        """A context in which the ranks of the open process group, which is gloo's, use a model of NCCL.

        Each rank is a process that pretends its devices. Values are those of all ranks.

        Raises:
            RuntimeError: no process group of gloo is open.
        """
        return nccl.connected_ranks(self._storages)


@contextmanager
def pretend_cuda(
    devices: int = 1, *, query: bool | None = None, device_nbytes: int = DEVICE_NBYTES
) -> Iterator[Watch]:
    """A context in which torch has ``devices`` CUDA devices. Values are real and are on the host.

    ``device_nbytes``: memory of a device, beyond which allocations fail as torch's do. Blocks count with
    their bytes: nothing is rounded, cached or fragmented.
    ``query``: what ``Event.query`` and ``Stream.query`` answer; None: True once the host has waited for
    the work. Replaces functions of torch and of threads in the whole process, so that only one context
    may be open, and tests run it in a process of their own.
    """
    machine = Machine(devices, query, device_nbytes)
    storages, patches = Storages(machine), Patches()
    with ExitStack() as stack:
        stack.enter_context(cuda.chosen(machine))
        stack.callback(patches.undo)
        stack.callback(storages.close)
        TensorPatches(storages, patches).install()
        cuda.CudaPatches(storages, patches).install()
        threads.install(storages, patches)
        stack.callback(host_memory.listen(declare(storages)))
        stack.enter_context(OperatorMode(storages))
        yield Watch(machine, storages)
