"""Checks before the start whether there is enough memory for the ranks.

Pure functions: they make an error or warnings from numbers that were read elsewhere. No warning means
that no problem was found.
"""

from __future__ import annotations

import re

from zeroshard.errors import LaunchError
from zeroshard.memory.host_limits import HostLimits, gib

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?", re.IGNORECASE)
# A rank that has only imported torch holds about this much.
BARE_RANK_NBYTES = 256 << 20
# The size of ``/dev/shm`` that container runtimes give by default.
SMALL_SHM_NBYTES = 64 << 20


def parse_nbytes(text: str, option: str) -> int:
    """The bytes of a size such as ``"12GB"``, ``"12GiB"``, ``"1.5g"`` or a plain number.

    >>> parse_nbytes("1.5GiB", "--expect-memory-per-rank")
    1610612736

    Raises:
        LaunchError: ``text`` is not a size; it names ``option``.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        raise LaunchError(f"{option} {text!r} is not a size; write for example 12GB or 12GiB.")
    unit = match[2].upper()
    return int(float(match[1]) * (_BINARY[unit] if match[3] else _UNITS[unit]))


def check_memory(
    memory: HostLimits,
    *,
    num_local: int,
    expected_nbytes: int | None,
    shm_nbytes: int | None,
) -> tuple[str, ...]:
    """At most two warnings. ``expected_nbytes``: of one rank. ``shm_nbytes``: the size of ``/dev/shm``.

    Raises:
        LaunchError: the expected memory of all local ranks does not fit.
    """
    warnings: list[str] = []
    free = memory.free_nbytes
    if free is not None and expected_nbytes is not None and num_local * expected_nbytes > free:
        raise LaunchError(
            f"{_count(num_local)} x {gib(expected_nbytes)} = {gib(num_local * expected_nbytes)} "
            f"of memory are expected, but only {gib(free)} are free here ({memory.in_words()}).\n"
            "The kernel would kill a rank during the run. Use fewer ranks per node, a higher ZeRO "
            "stage, a larger memory limit, or correct --expect-memory-per-rank."
        )
    if free is not None and expected_nbytes is None and num_local * BARE_RANK_NBYTES > free:
        warnings.append(
            f"only {gib(free)} of memory are free for {_count(num_local)} ({memory.in_words()}); "
            "importing torch alone takes about 0.25 GiB each."
        )
    if shm_nbytes is not None and shm_nbytes <= SMALL_SHM_NBYTES:
        warnings.append(
            f"/dev/shm has only {shm_nbytes >> 20} MiB. When it is full, data-loader workers and "
            "NCCL end with SIGBUS. docker run --shm-size=8g (or --ipc=host) makes it larger."
        )
    return tuple(warnings)


def _count(num_local: int) -> str:
    return "1 rank" if num_local == 1 else f"{num_local} ranks"
