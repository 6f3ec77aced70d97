"""The compiled update, Adam and norms: built in a thread, checked against torch, then offered.

It is compiled while the first steps use torch's kernels. Each part is then compared with these and is
offered only if no bit differs (ADR 0007).
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroshard.optim.fragment_norms import CompiledNorms, norm_of
from zeroshard.optim.fused_update import GRAD_DTYPES, CompiledAdam, FusedFragment, Spans
from zeroshard.optim.native_build import CannotBuild, load

logger = logging.getLogger("zeroshard")


_DIFFERS = "the compiled %s is not used: it differs from torch's on this processor"


class _Preparation:
    """Compiles and checks the library: once per process, since all engines use the same one."""

    def __init__(self) -> None:
        self.result: CompiledAdam | None = None
        self.norms: CompiledNorms | None = None
        self._checks = self._leaves = False
        atexit.register(self._leave)
        self.thread = threading.Thread(target=self._run, name="zeroshard-compile", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            library = load(Path(__file__).with_name("host_update.cpp"))
        except CannotBuild as error:
            logger.info("the update is not compiled: %s", error)
            return
        self._checks = True
        if self._leaves:
            return
        adam, norms = CompiledAdam(library), CompiledNorms(library)
        if agrees_with_torch(adam):
            self.result = adam
        else:
            logger.info(_DIFFERS, "update")
        if norms_agree_with_torch(norms):
            self.norms = norms
        else:
            logger.info(_DIFFERS, "norm")

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
    """The compiled Adam if it is ready, else None. Never waits. The first call starts compiling."""
    return _preparation().result


def norms() -> CompiledNorms | None:
    """The compiled norms if they are ready, else None. Never waits, and starts nothing."""
    return _preparation().norms if _preparation.cache_info().currsize else None


def wait() -> CompiledAdam | None:
    """Wait for the compiled Adam. None: it cannot be used."""
    _preparation().thread.join()
    return _preparation().result


def agrees_with_torch(candidate: CompiledAdam, *, numel: int = 4096) -> bool:
    """Whether it changes master, moments and parameter to the same bits as torch, in every mode."""
    generator = torch.Generator().manual_seed(0)
    for grad_dtype in GRAD_DTYPES:
        for decoupled in (True, False):
            for low_dtype in (torch.bfloat16, None):
                for weight_decay, beta1 in ((0.0, 0.9), (0.1, 0.9), (0.1, 0.3)):
                    group = {
                        "lr": 1e-3, "betas": (beta1, 0.95), "eps": 1e-8, "maximize": False,
                        "weight_decay": weight_decay, "decoupled_weight_decay": decoupled,
                    }  # fmt: skip
                    if not _agrees(candidate, group, grad_dtype, low_dtype, numel, generator):
                        return False
    return True


def norms_agree_with_torch(candidate: CompiledNorms) -> bool:
    """Whether norms of short and long fragments, of all magnitudes, have torch's bits on 1 to 3 threads.

    Pieces are shorter than in use, so that many are added. Half of the squares are about as small as
    denormal numbers begin, which the program may flush (:func:`torch.set_flush_denormal`): this thread
    has inherited its choice. Dtypes are given, as in :func:`_agrees`.
    """
    generator = torch.Generator().manual_seed(0)
    piece_numel = 1000
    for at, numel in enumerate((*range(35), 999, 1000, 1001, 8191, 40_003)):
        low, high = ((-20, 18), (-22, -17))[at % 2]
        scale = 10.0 ** float(torch.randint(low, high, (), generator=generator))
        grad = torch.randn(numel + at, generator=generator, dtype=torch.float32)
        grad = (grad * scale).to(torch.bfloat16)
        cuts = [(at, at + numel), (0, at), (at // 2, at + numel)]
        found = candidate.measure(
            [(-grad.roll(1), []), (grad, cuts)], threads=1 + at % 3, piece_numel=piece_numel
        )
        expected = torch.stack([norm_of(grad[begin:end], piece_numel) for begin, end in cuts])
        if not _same(found, expected):
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

    Step ``i`` runs on ``i`` threads. They share two spans, in pieces that end inside both. Every dtype is
    given: this runs in a thread, and the program may change torch's default dtype at the same time. The
    library would then write over the ends of tensors.
    """
    fp32 = torch.float32
    scale = torch.tensor(10.0, dtype=fp32) ** torch.randint(-30, 4, (numel,), generator=generator)
    master = torch.randn(numel, generator=generator, dtype=fp32) * scale.clamp(min=1e-10)
    low = None if low_dtype is None else master.to(low_dtype)
    state, truth = ([torch.zeros(numel, dtype=fp32) for _ in range(2)] for _ in range(2))
    expected = master.clone()
    step = torch.zeros((), dtype=fp32)
    fused = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    beta1, beta2 = group["betas"]
    for at in range(3):
        step += 1
        grad = (torch.randn(numel, generator=generator, dtype=fp32) * scale).to(grad_dtype)
        grad[at::7] = 0
        grad[at + 8 :: 501] = float("inf")
        cuts = slice(0, numel // 192 * 64), slice(numel // 192 * 64, numel)
        spans = Spans(
            FusedFragment(
                *(0, cut.start, master[cut], state[0][cut], state[1][cut], step),
                None if low is None else low[cut],
            )
            for cut in cuts
        )
        piece_numel = numel // 8
        candidate.update(spans, [grad], 0.37, [group], threads=at + 1, piece_numel=piece_numel)
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
