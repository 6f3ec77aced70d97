"""Updates all chunks in device memory in one pass, with Triton (ADR 0015).

The kernels (:mod:`~zeroshard.optim.triton_kernels`) read what they work on from tables on the device. A
row of the table of fragments has the addresses of one fragment: master, moments, step count and
parameter. A row of the table of tiles says which fragment a program updates, and from which element on.
Both are made once, and again if a tensor is replaced or moves. What differs from step to step is one
short vector, copied without waiting: the addresses of the gradients, and the options of the param groups.

Nothing else is allocated. Unscaling, averaging, clipping, weight decay, moments, master, rounding, edits
of the program and the skip of a step all happen between reading an element and writing it.

Before a kernel is used, its results are compared with those of torch's on the same device
(:mod:`~zeroshard.optim.triton_check`). Triton is imported only then.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeroshard.device.choice import ops_of
from zeroshard.memory.host_memory import kernel_access
from zeroshard.optim.fused_update import UpdateKernel

BLOCK = 2048
"""Elements that a program loads at once: 8 for each of its 256 threads, 16 bytes of a bf16 tensor."""

BLOCKS = 8
"""Blocks of a tile. More of them share the scalars of a step, fewer leave less idle at the end."""

COUNT_BLOCK = 256
"""Step counts that one program increases."""

ALIGNMENT = 16
"""A thread reads 16 bytes at once if all addresses of a fragment are multiples of this."""

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Dtypes of gradients and parameters, and the kernels' names for them."""

ORDERS = {"torch on CPU": 0, "torch on CUDA, fp32": 1, "torch on CUDA, fp64": 2}
"""Orders of operations of the kernels. Each has the bits of some kernel of torch."""


class DeviceFragment(NamedTuple):
    """What the kernel updates of one parameter. Tensors are contiguous and on one device.

    ``state``: moments and momenta, fp32. ``step``: 0-dim, fp32; None if the optimizer counts no steps.
    ``low``: the parameter, if that is not the master itself.
    """

    chunk: int  # which of the gradients is its own
    group: int
    grad_at: int  # where its gradient starts in that of the chunk
    master: Tensor  # fp32
    state: tuple[Tensor, ...]
    step: Tensor | None
    low: Tensor | None

    @property
    def tensors(self) -> Iterator[Tensor]:
        """What the update reads and writes besides the gradient."""
        yield from (self.master, *self.state)
        yield from (t for t in (self.step, self.low) if t is not None)

    @property
    def fits(self) -> bool:
        """Whether the kernel can update the fragment."""
        wide = [self.master, *self.state, *([] if self.step is None else [self.step])]
        device, numel = self.master.device, self.master.numel()
        return (
            all(t.dtype == torch.float32 for t in wide)
            and all(t.device == device and t.is_contiguous() for t in self.tensors)
            and all(t.numel() == numel for t in self.state)
            and (self.low is None or self.low.dtype in (torch.bfloat16, torch.float16))
        )


class Launch(NamedTuple):
    """One call of a kernel. ``numbers``: addresses and sizes. ``constants``: what it is compiled for.

    ``reads`` and ``writes``: the tensors whose elements it reads or writes, for tools that check or count
    accesses. (A gradient may have padding, which is listed and not read.)
    """

    kernel: str
    grid: int
    numbers: tuple[int, ...]
    constants: Mapping[str, Any]
    reads: Sequence[Tensor]
    writes: Sequence[Tensor]


class Launcher:
    """Launches the kernels on ``device``, which becomes the current one of the thread.

    ``kernels``: the module :mod:`~zeroshard.optim.triton_kernels`, or a copy for Triton's interpreter.

    Raises:
        ImportError: Triton is not installed.
    """

    def __init__(self, device: torch.device, kernels: Any = None) -> None:
        if kernels is None:
            from zeroshard.optim import triton_kernels as kernels
        self.fields: tuple[str, ...] = kernels.FRAGMENT
        self.option_count: int = kernels.OPTIONS
        self._kernels = kernels
        self._select = ops_of(device).select

    def __call__(self, launch: Launch) -> None:
        """Queue a launch on the current stream."""
        self._select()
        kernel_access(launch.reads, launch.writes)
        kernel = getattr(self._kernels, launch.kernel)
        kernel[(launch.grid,)](
            *launch.numbers, **launch.constants, num_warps=8, enable_fp_fusion=False
        )


@dataclass(frozen=True, eq=False, slots=True)
class _Section:
    """The tiles of fragments for which the same compiled kernel is used."""

    tiles: Tensor  # int64 [tiles, 2]: fragment, first element
    constants: Mapping[str, Any]
    tensors: Sequence[Tensor]  # of its fragments
    chunks: Sequence[int]


@dataclass(eq=False)
class TritonUpdate:
    """The prepared update of some fragments on one device.

    ``kernel`` must have a ``device_form``. ``grads``: of each chunk; only dtypes and alignment matter
    here, and :meth:`matches` says whether other gradients have the same. They are not kept.
    """

    kernel: UpdateKernel
    launcher: Launcher
    order: int
    fragments: Sequence[DeviceFragment]
    grads: InitVar[Sequence[Tensor]]
    block: int = BLOCK
    blocks: int = BLOCKS
    _words: list[int] = field(default_factory=list, init=False)

    def __post_init__(self, grads: Sequence[Tensor]) -> None:
        self._device = self.fragments[0].master.device
        self._kinds = _kinds(grads)
        rows = [self._row(fragment) for fragment in self.fragments]
        self._table = self._on_device(torch.tensor(rows, dtype=torch.int64))
        self._steps = [f.step for f in self.fragments if f.step is not None]
        self._sections = list(self._make_sections(grads))
        self._no_flag = torch.zeros((), dtype=torch.float32, device=self._device)
        self._varying: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tables on the device."""
        return self._table.nbytes + sum(section.tiles.nbytes for section in self._sections)

    def matches(self, grads: Sequence[Tensor]) -> bool:
        """Whether :meth:`run` may be called with these gradients."""
        return self._kinds == _kinds(grads)

    def run(
        self,
        grads: Sequence[Tensor],
        factor: Tensor,
        found_inf: Tensor | None,
        groups: Sequence[Mapping[str, Any]],
    ) -> None:
        """Update every fragment with its gradient times ``factor`` (0-dim). Does not wait.

        ``found_inf``: 0-dim float; if it is not 0, nothing changes.
        """
        flag = self._no_flag if found_inf is None else found_inf.float()
        factor = factor.float()
        if self.kernel.counts:
            self.launcher(self._count(flag))
        varying = self._vary(grads, groups)
        grads_at = varying.data_ptr()
        shared = [self._table, varying, factor, flag, *self._steps]
        for section in self._sections:
            numbers = (
                *(section.tiles.data_ptr(), self._table.data_ptr()),
                *(grads_at, grads_at + 8 * len(grads), factor.data_ptr(), flag.data_ptr()),
            )
            own_grads = [grads[chunk] for chunk in section.chunks]
            self.launcher(
                Launch(
                    "update",
                    len(section.tiles),
                    numbers,
                    section.constants,
                    reads=[*section.tensors, *own_grads, section.tiles, *shared],
                    writes=section.tensors,
                )
            )

    def _count(self, flag: Tensor) -> Launch:
        count = len(self._steps)
        return Launch(
            "count",
            -(-count // COUNT_BLOCK),
            (self._table.data_ptr(), count, flag.data_ptr()),
            {"BLOCK": COUNT_BLOCK},
            reads=[*self._steps, self._table, flag],
            writes=self._steps,
        )

    def _vary(self, grads: Sequence[Tensor], groups: Sequence[Mapping[str, Any]]) -> Tensor:
        """What differs from step to step, on the device: addresses of gradients, then options."""
        form = self.kernel.device_form
        assert form is not None
        words = [grad.data_ptr() for grad in grads]
        for group in groups:
            options = [float(number) for number in form.options(group)]
            options += [0.0] * (self.launcher.option_count - len(options))
            words += struct.unpack(f"{len(options)}q", struct.pack(f"{len(options)}d", *options))
        if self._varying is None or words != self._words:
            self._varying = self._on_device(torch.tensor(words, dtype=torch.int64))
            self._words = words
        return self._varying

    def _row(self, fragment: DeviceFragment) -> list[int]:
        first, second, *_ = [*(t.data_ptr() for t in fragment.state), 0, 0]
        values = {
            "master": fragment.master.data_ptr(),
            "first": first,
            "second": second,
            "step": 0 if fragment.step is None else fragment.step.data_ptr(),
            "low": 0 if fragment.low is None else fragment.low.data_ptr(),
            "chunk": fragment.chunk,
            "grad_at": fragment.grad_at,
            "numel": fragment.master.numel(),
            "group": fragment.group,
        }
        return [values[name] for name in self.launcher.fields]

    def _make_sections(self, grads: Sequence[Tensor]) -> Iterator[_Section]:
        form = self.kernel.device_form
        assert form is not None
        by_key: dict[tuple[str, str, bool], list[int]] = {}
        for at, fragment in enumerate(self.fragments):
            if fragment.master.numel() == 0:
                continue
            grad = grads[fragment.chunk]
            low = "" if fragment.low is None else NAMES[fragment.low.dtype]
            key = NAMES[grad.dtype], low, _is_aligned(fragment, grad)
            by_key.setdefault(key, []).append(at)
        for (grad_name, low, aligned), members in by_key.items():
            constants = {
                "KIND": form.kind, "ORDER": self.order, "GRAD": grad_name, "LOW": low,
                "ALIGNED": aligned, "BLOCK": self.block, "BLOCKS": self.blocks,
            }  # fmt: skip
            chosen = [self.fragments[at] for at in members]
            moved = [t for f in chosen for t in (f.master, *f.state, f.low) if t is not None]
            chunks = sorted({fragment.chunk for fragment in chosen})
            yield _Section(self._tiles(members), constants, moved, chunks)

    def _tiles(self, members: Sequence[int]) -> Tensor:
        """``(fragment, first element)`` of each tile of these fragments."""
        span = self.block * self.blocks
        parts = []
        for at in members:
            begins = torch.arange(0, self.fragments[at].master.numel(), span, dtype=torch.int64)
            parts.append(torch.stack([torch.full_like(begins, at), begins], dim=1))
        return self._on_device(torch.cat(parts))

    def _on_device(self, host: Tensor) -> Tensor:
        """A copy on the device. The copy does not block, which needs pinned memory."""
        if ops_of(self._device).is_async:
            host = host.pin_memory()
        return host.to(self._device, non_blocking=True)


def _kinds(grads: Sequence[Tensor]) -> list[tuple[torch.dtype, int]]:
    return [(grad.dtype, grad.data_ptr() % ALIGNMENT) for grad in grads]


def _is_aligned(fragment: DeviceFragment, grad: Tensor) -> bool:
    addresses = [t.data_ptr() for t in (fragment.master, *fragment.state)]
    addresses.append(grad.data_ptr() + fragment.grad_at * grad.element_size())
    if fragment.low is not None:
        addresses.append(fragment.low.data_ptr())
    return not any(address % ALIGNMENT for address in addresses)
