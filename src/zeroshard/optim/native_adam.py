"""The compiled update, Adam and norms: built in a thread, checked against torch, then offered.

It is compiled while the first steps use torch's kernels. Each part is then compared with these and is
offered only if no bit differs (ADR 0007).

The library is cached in a folder of the user. Its name depends on the source, the compiler, its flags,
the C library and the processor. It appears there only when it is complete, also if several processes
build it at the same time.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroshard.optim.fragment_norms import CompiledNorms, norm_of
from zeroshard.optim.fused_update import GRAD_DTYPES, CompiledAdam, FusedFragment, Spans

logger = logging.getLogger("zeroshard")

FLAGS = (
    *("-O3", "-march=native", "-shared", "-fPIC", "-std=c++17", "-pthread"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
)
_TIMEOUT_S = 120

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


class CannotBuild(Exception):
    """There is no compiler, or it failed. The message is one line."""


def load(source: Path) -> ctypes.CDLL:
    """The compiled ``source``, from the cache if it is there.

    Raises:
        CannotBuild: there is no compiler, or it failed.
    """
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), None)
    if compiler is None or shutil.which(compiler) is None:
        raise CannotBuild(f"no C++ compiler ({compiler or 'g++, clang++'}) was found")
    try:
        name = _name(source, compiler)
        folder = _cache_folder()
        if folder is not None:
            return _load(compiler, source, folder / name)
        with tempfile.TemporaryDirectory(prefix="zeroshard-native-") as passing:
            return _load(compiler, source, Path(passing, name))  # the code stays loaded
    except OSError as error:
        raise CannotBuild(f"{type(error).__name__}: {error}") from error


def _name(source: Path, compiler: str) -> str:
    """A name that differs for everything that the code depends on, so that no stale library is used."""
    identity = [source.read_text(), compiler, _version_of(compiler), *FLAGS, _processor()]
    identity += platform.libc_ver()  # containers may share one home directory
    digest = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:24]
    return f"{source.stem}-{digest}.so"


def _load(compiler: str, source: Path, library: Path) -> ctypes.CDLL:
    if not library.exists():
        _build(compiler, source, library)
    return ctypes.CDLL(str(library))


def _build(compiler: str, source: Path, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        fresh = Path(folder, library.name)
        command = [compiler, *FLAGS, "-o", str(fresh), str(source)]
        try:
            ended = _run(command, _TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise CannotBuild(f"{compiler} took more than {_TIMEOUT_S} s") from error
        if ended.returncode:
            first = next(iter(ended.stderr.strip().splitlines()), "no message")
            raise CannotBuild(f"{compiler} failed: {first[:200]}")
        fresh.replace(library)


def _run(command: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=timeout_s)


def _version_of(compiler: str) -> str:
    try:
        ended = _run([compiler, "--version"], 20)
    except subprocess.SubprocessError as error:
        raise CannotBuild(f"{compiler} --version: {error}") from error
    return ended.stdout


def _processor() -> str:
    """What ``-march=native`` depends on. Machines of many kinds may share a home directory."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    known = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    return "\n".join(sorted(known))


def _cache_folder() -> Path | None:
    """A folder that only this user can write, since code in it is executed. None if there is none."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(base, "zeroshard", "native")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.stat()
    except (OSError, RuntimeError):  # there is no home directory, or it is read-only
        return None
    mine = state.st_uid == os.getuid() and not state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return folder if mine and os.access(folder, os.W_OK) else None
