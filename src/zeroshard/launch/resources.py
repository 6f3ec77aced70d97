"""The cores and the memory of a node: which cores each rank gets, and whether the memory suffices.

:func:`share_cores` and :func:`share_listed` decide. A *CPU* is a hardware thread, as in Linux. A rank
is bound before its program starts. So all its threads stay on its cores, and its memory is allocated on
their NUMA node. :func:`check_memory` is asked before anything is started.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from zeroshard.errors import LaunchError
from zeroshard.memory.host_limits import HostLimits, gib

_SYSTEM = Path("/sys/devices/system")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")

# Run with ``python -c`` and the shares, the local rank and the program; binds itself, then becomes the
# program.
_BIND = (
    "import os, sys; _, shares, rank, *words = sys.argv; "
    "os.sched_setaffinity(0, map(int, shares.split(';')[int(rank)].split(','))); "
    "os.execvp(words[0], words)"
)


@dataclass(frozen=True, slots=True)
class Cpu:
    """A hardware thread. ``core``: the lowest number on the same physical core; ``node``: NUMA node."""

    number: int
    core: int
    node: int = 0


@dataclass(frozen=True, slots=True)
class Shares:
    """The CPU numbers by local rank, and the number of threads that a rank should use."""

    cpus: tuple[tuple[int, ...], ...]
    num_threads: int


def share_cores(cpus: Iterable[Cpu], num_local: int) -> Shares:
    """Give every rank the same number of whole physical cores, with all their hardware threads.

    No rank gets cores of two NUMA nodes, unless every rank would get fewer cores without that. Cores
    that cannot be shared evenly stay free. ``num_threads`` is one per physical core, because hardware
    threads of a core share its arithmetic units.

    >>> share_cores([Cpu(0, 0), Cpu(1, 1), Cpu(2, 0), Cpu(3, 1)], 2)
    Shares(cpus=((0, 2), (1, 3)), num_threads=1)

    Raises:
        LaunchError: there are fewer cores than ranks.
    """
    nodes: dict[int, dict[int, list[int]]] = {}
    for cpu in sorted(cpus, key=_place):
        nodes.setdefault(cpu.node, {}).setdefault(cpu.core, []).append(cpu.number)
    pools = [list(cores.values()) for cores in nodes.values()]
    together = [core for pool in pools for core in pool]
    each = len(together) // num_local
    if not each:
        raise LaunchError(
            f"--bind_cores_to_rank: this process may use {len(together)} cores, which is not "
            f"enough for {num_local} ranks. Start fewer ranks, or leave the option out."
        )
    per_pool, rest = divmod(num_local, len(pools))
    if rest or any(len(pool) // per_pool < each for pool in pools):
        pools, per_pool = [together], num_local
    shares = [pool[each * i : each * (i + 1)] for pool in pools for i in range(per_pool)]
    return Shares(tuple(tuple(sorted(chain(*share))) for share in shares), each)


def share_listed(cpus: Iterable[Cpu], listed: Sequence[int], num_local: int) -> Shares:
    """Give every rank the same number of the ``listed`` CPUs.

    CPUs of one core, and of one NUMA node, go to the same rank as far as the numbers allow.

    >>> share_listed([Cpu(0, 0), Cpu(1, 1), Cpu(2, 0), Cpu(3, 1)], [0, 1, 2, 3], 2)
    Shares(cpus=((0, 2), (1, 3)), num_threads=2)

    Raises:
        LaunchError: this process may not use a listed CPU, or ranks would get different numbers of CPUs.
    """
    known = {cpu.number: cpu for cpu in cpus}
    unknown = [number for number in listed if number not in known]
    if unknown:
        raise LaunchError(
            f"--bind_core_list names core {unknown[0]}, which this process may not use here; there are "
            f"{_as_ranges(sorted(known))}."
        )
    each, rest = divmod(len(listed), num_local)
    if rest:
        raise LaunchError(
            f"--bind_core_list has {len(listed)} cores for {num_local} ranks, so they would not all get "
            f"the same number. List a multiple of {num_local}, or start another number of ranks."
        )
    ordered = [cpu.number for cpu in sorted((known[number] for number in listed), key=_place)]
    shares = (ordered[each * i : each * (i + 1)] for i in range(num_local))
    return Shares(tuple(tuple(sorted(share)) for share in shares), each)


def parse_core_list(text: str, option: str = "--bind_core_list") -> tuple[int, ...]:
    """The numbers of a list of numbers and ranges, in ascending order.

    >>> parse_core_list("8,0-3")
    (0, 1, 2, 3, 8)

    Raises:
        LaunchError: a part is neither, or a core is named twice.
    """
    numbers: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if low > high:
            raise LaunchError(
                f"{option} {text!r}: {part!r} is not a number or a range of numbers like '0-3'; "
                "parts are separated by ','."
            )
        numbers += range(low, high + 1)
    twice = sorted({number for number in numbers if numbers.count(number) > 1})
    if twice:
        raise LaunchError(f"{option} {text!r}: core {twice[0]} is named twice.")
    return tuple(sorted(numbers))


def read_cpus(system: Path = _SYSTEM) -> tuple[Cpu, ...]:
    """The CPUs that this process may use.

    Without information about cores and NUMA nodes, each CPU counts as a separate core of one node.

    Raises:
        LaunchError: this system cannot bind processes to cores.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise LaunchError(
            f"--bind_cores_to_rank: {sys.platform} cannot bind processes to cores. Leave the option out."
        )
    nodes: dict[int, int] = {}
    for path in system.glob("node/node[0-9]*"):
        for number in _read_list(path / "cpulist"):
            nodes[number] = int(path.name.removeprefix("node"))
    found = []
    for number in sorted(os.sched_getaffinity(0)):
        siblings = _read_list(system / f"cpu/cpu{number}/topology/thread_siblings_list")
        found.append(Cpu(number, min(siblings, default=number), nodes.get(number, 0)))
    return tuple(found)


def bound(shares: Sequence[Sequence[int]], local_rank: str, words: Sequence[str]) -> list[str]:
    """A command that binds itself to the share of ``local_rank`` and then becomes ``words``."""
    text = ";".join(",".join(map(str, share)) for share in shares)
    return [sys.executable, "-I", "-S", "-c", _BIND, text, local_rank, *words]


def _place(cpu: Cpu) -> tuple[int, int, int]:
    return cpu.node, cpu.core, cpu.number


def _read_list(path: Path) -> tuple[int, ...]:
    try:
        text = path.read_text().strip()
    except OSError:
        return ()
    return parse_core_list(text, str(path)) if text else ()


def _as_ranges(numbers: Sequence[int]) -> str:
    """
    >>> _as_ranges([0, 1, 2, 5])
    '0-2,5'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


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
