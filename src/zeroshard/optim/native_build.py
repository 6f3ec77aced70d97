"""Compiles a C++ source into a library, and caches the result.

The cache is a folder of the user. The library's name depends on the source, the compiler, its flags, the
C library and the processor. A library appears there only when it is complete, also if several processes
build it at the same time.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

FLAGS = (
    *("-O3", "-march=native", "-shared", "-fPIC", "-std=c++17", "-pthread"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
)
_TIMEOUT_S = 120


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
