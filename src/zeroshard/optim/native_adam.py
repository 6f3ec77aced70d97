"""The compiled Adam: built in a thread, checked against torch, then offered to updates.

It is compiled while the first steps use torch's kernel. It is then compared with that kernel and is
offered only if no bit differs (ADR 0007).
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeroshard.optim.native_build import CannotBuild, load

logger = logging.getLogger("zeroshard")
SPAN_MULTIPLE = 64
"""Spans have a multiple of this many elements. Torch computes the elements after it in scalar code."""

PIECE_NUMEL = 2**16
"""Elements that a thread takes at a time: about 50 microseconds, so no thread waits long for another."""

_GRADS = {torch.bfloat16: "adam_bf16", torch.float32: "adam_fp32"}


class _Options(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_double) for name in ("lr", "beta1", "beta2", "weight_decay", "eps")),
        *((name, ctypes.c_int64) for name in ("decoupled", "maximize")),
    ]


class _Span(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("master", "exp_avg", "exp_avg_sq", "low", "step")),
        *((n, ctypes.c_int64) for n in ("grad_at", "numel", "group")),
    ]


class Span(NamedTuple):
    """A fragment without the last elements beyond a multiple of 64. All tensors are contiguous."""

    group: int
    grad_at: int  # where its gradient starts in the chunk's gradient
    master: Tensor  # fp32, as the moments and the 0-dim step are
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    low: Tensor | None  # bf16: the parameter; None if that is the master itself


class Spans:
    """Addresses for :meth:`CompiledAdam.update`. Keeps the tensors alive."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.kept = list(spans)
        self.numel = sum(span.master.numel() for span in self.kept)
        self.array = (_Span * len(self.kept))()
        self.locate()

    def locate(self) -> None:
        """Read the addresses of the tensors. Needed again after a storage was resized."""
        for entry, span in zip(self.array, self.kept, strict=True):
            assert span.master.numel() % SPAN_MULTIPLE == 0
            entry.master, entry.exp_avg = span.master.data_ptr(), span.exp_avg.data_ptr()
            entry.exp_avg_sq, entry.step = span.exp_avg_sq.data_ptr(), span.step.data_ptr()
            entry.low = None if span.low is None else span.low.data_ptr()
            entry.grad_at, entry.numel, entry.group = span.grad_at, span.master.numel(), span.group


def fits(*tensors: Tensor) -> bool:
    """Whether these tensors may be the fp32 tensors of a span."""
    return all(
        t.dtype == torch.float32 and t.device.type == "cpu" and t.is_contiguous() for t in tensors
    )


class CompiledAdam:
    """The compiled library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._calls = {dtype: getattr(library, name) for dtype, name in _GRADS.items()}
        for call in self._calls.values():
            call.restype = None
            call.argtypes = [
                *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p),
                *(ctypes.c_float, ctypes.c_int64, ctypes.c_int64),
            ]

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether gradients may have this dtype."""
        return dtype in self._calls

    def update(
        self,
        spans: Spans,
        grad_R: Tensor,
        factor: float,
        groups: Sequence[Mapping[str, Any]],
        *,
        threads: int = 1,
        piece_numel: int = PIECE_NUMEL,
    ) -> None:
        """One step of all spans with ``grad_R * factor``. Step counts must be increased already.

        The caller and up to ``threads - 1`` threads of the library share pieces of ``piece_numel``
        elements. The bits do not depend on the number of threads. The library's threads start with the
        first call that needs them, end some seconds after the last one, and do not delay a fork or an
        exit. May be called from several threads at once.
        """
        options = (_Options * len(groups))()
        for entry, group in zip(options, groups, strict=True):
            entry.lr, (entry.beta1, entry.beta2) = float(group["lr"]), map(float, group["betas"])
            entry.weight_decay, entry.eps = group["weight_decay"], group["eps"]
            entry.decoupled = group["decoupled_weight_decay"]
            entry.maximize = group["maximize"]
        call = self._calls[grad_R.dtype]
        call(
            *(spans.array, len(spans.array), options, grad_R.data_ptr(), factor),
            *(max(1, threads), max(1, piece_numel)),
        )


class _Preparation:
    """Compiles and checks the library: once per process, since all engines use the same one."""

    def __init__(self) -> None:
        self.result: CompiledAdam | None = None
        self._checks = self._leaves = False
        atexit.register(self._leave)
        self.thread = threading.Thread(target=self._run, name="zeroshard-compile", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            compiled = CompiledAdam(load(Path(__file__).with_name("adam.cpp")))
        except CannotBuild as error:
            logger.info("the update is not compiled: %s", error)
            return
        self._checks = True
        if self._leaves:
            return
        if agrees_with_torch(compiled):
            self.result = compiled
        else:
            logger.info(
                "the compiled update is not used: it differs from torch's on this processor"
            )

    def _leave(self) -> None:
        """Wait for the check, or prevent it, before the interpreter ends.

        A thread that is inside torch at that time would abort the process (SIGABRT). The check takes some
        milliseconds. Compilation is not waited for.
        """
        self._leaves = True
        if self._checks:
            self.thread.join()


@cache
def _preparation() -> _Preparation:
    return _Preparation()


def prepare() -> None:
    """Start compiling, unless that was started before. Returns at once."""
    _preparation()


def compiled() -> CompiledAdam | None:
    """The compiled Adam if it is ready, else None. Never waits."""
    return _preparation().result


def wait() -> CompiledAdam | None:
    """Wait for the compiled Adam. None: it cannot be used."""
    _preparation().thread.join()
    return _preparation().result


def agrees_with_torch(candidate: CompiledAdam, *, numel: int = 4096) -> bool:
    """Whether it changes master, moments and parameter to the same bits as torch, in every mode."""
    generator = torch.Generator().manual_seed(0)
    for grad_dtype in _GRADS:
        for decoupled in (True, False):
            for low_dtype in (torch.bfloat16, None):
                for weight_decay in (0.0, 0.1):
                    group = {
                        "lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "maximize": False,
                        "weight_decay": weight_decay, "decoupled_weight_decay": decoupled,
                    }  # fmt: skip
                    if not _agrees(candidate, group, grad_dtype, low_dtype, numel, generator):
                        return False
    return True


def _agrees(
    candidate: CompiledAdam,
    group: Mapping[str, Any],
    grad_dtype: torch.dtype,
    low_dtype: torch.dtype | None,
    numel: int,
    generator: torch.Generator,
) -> bool:
    """Compare three steps with values of all magnitudes, including zeros and values that are too large.

    Step ``i`` runs on ``i`` threads. They share two spans, in pieces that end inside both.
    """
    scale = 10.0 ** torch.randint(-30, 4, (numel,), generator=generator)
    master = torch.randn(numel, generator=generator) * scale.clamp(min=1e-10)
    low = None if low_dtype is None else master.to(low_dtype)
    state = [torch.zeros(numel), torch.zeros(numel)]
    expected, truth = master.clone(), [torch.zeros(numel), torch.zeros(numel)]
    step = torch.zeros(())
    fused = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    beta1, beta2 = group["betas"]
    for at in range(3):
        step += 1
        grad = (torch.randn(numel, generator=generator) * scale).to(grad_dtype)
        grad[at::7] = 0
        grad[at + 8 :: 501] = float("inf")
        cuts = slice(0, numel // 192 * 64), slice(numel // 192 * 64, numel)
        spans = Spans(
            Span(
                *(0, cut.start, master[cut], state[0][cut], state[1][cut], step),
                None if low is None else low[cut],
            )
            for cut in cuts
        )
        piece_numel = numel // 8
        candidate.update(spans, grad, 0.37, [group], threads=at + 1, piece_numel=piece_numel)
        fused(
            [expected], [grad.float() * 0.37], [truth[0]], [truth[1]], [], [step],
            lr=group["lr"], beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"],
            eps=group["eps"], amsgrad=False, maximize=False, grad_scale=None, found_inf=None,
        )  # fmt: skip
        pairs = [(master, expected), *zip(state, truth, strict=True)]
        if low is not None:
            pairs.append((low, expected.to(low.dtype)))
        if not all(_same(mine, theirs) for mine, theirs in pairs):
            return False
    return True


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether all bits are equal; NaN may equal any other NaN."""
    bits = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return bool(((a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())).all())
