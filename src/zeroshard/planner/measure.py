"""Measures this machine for plans, and writes its file.

The numbers are those of CPU ranks: this package has never been run on a GPU, so GPUs have presets, whose
numbers are assumed.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroshard.config.machine_file import MachineFile, parse_machine
from zeroshard.errors import LaunchError, UsageError
from zeroshard.launch.remote import this_launcher
from zeroshard.memory.host_limits import host_limits
from zeroshard.planner.rates import LINK_NBYTES

TURN_S = 0.1
"""How long each rate is measured."""

BUSY_CORES = 0.5
STOLEN = 0.05
"""More than this number of cores in use by others, or than this part of the time taken by the host of a
virtual machine, makes measurements wrong by more than plans may be."""


@dataclass(frozen=True)
class Load:
    """What else the machine does.

    ``busy_cores``: cores that others use. ``stolen``: part of the time that the host of this virtual
    machine took. ``average``: processes that wanted to run in the last minute.
    """

    cores: int
    busy_cores: float
    stolen: float
    average: float


def read_load(seconds: float = 1.0) -> Load:
    """The load of this machine while this process sleeps."""
    before = _ticks()
    time.sleep(seconds)
    spent = [b - a for a, b in zip(before, _ticks(), strict=True)]
    whole, cores = max(1, sum(spent)), os.cpu_count() or 1
    idle, stolen = spent[3] + spent[4], spent[7]  # idle and iowait; steal
    return Load(cores, cores * (1 - (idle + stolen) / whole), stolen / whole, os.getloadavg()[0])


def _ticks() -> list[int]:
    """user, nice, system, idle, iowait, irq, softirq, steal: ticks of all cores together."""
    return [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]


def check_quiet(load: Load) -> None:
    """Check that the machine does nothing else."""
    found = []
    if load.busy_cores > BUSY_CORES:
        found.append(f"other programs use {load.busy_cores:.1f} of {load.cores} cores")
    if load.average > load.cores:
        found.append(f"the load average is {load.average:.1f} with {load.cores} cores")
    if load.stolen > STOLEN:
        found.append(f"{load.stolen:.0%} of the CPU time goes to other virtual machines (steal)")
    if found:
        raise UsageError(
            f"this machine is loaded: {'; '.join(found)}. Rates that are measured now would be too low. "
            "End the other programs, wait a minute, and measure again."
        )


def measure(
    path: Path,
    *,
    turn_s: float = TURN_S,
    largest_nbytes: int = LINK_NBYTES[-1],
    load: Callable[[], Load] | None = read_load,
) -> MachineFile:
    """Measure this machine and write ``path``. Takes about a minute.

    ``turn_s``: for each rate. ``largest_nbytes``: of tensors of collectives. ``load``: reads what else
    the machine does; None: measure in any case.

    Raises:
        UsageError: the machine is loaded.
        LaunchError: the processes that measure ended with an error, whose text is on stderr.
        OSError: ``path`` cannot be written.
    """
    if load is not None:
        check_quiet(load())
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        how = (str(turn_s), str(largest_nbytes))
        alone = _alone(Path(folder), (*how, str(path.resolve().parent)))
        together = _together(Path(folder), how)
    text = as_toml(_numbers(alone, together))
    machine = parse_machine(text, str(path))
    path.write_text(text)
    return machine


def _alone(folder: Path, how: Sequence[str]) -> Sequence[dict[str, Any]]:
    """What two processes measure at the same time, each by itself."""
    outs = [folder / f"alone.{number}" for number in range(2)]
    words = [sys.executable, "-m", "zeroshard.planner.rates", "alone"]
    running = [subprocess.Popen([*words, str(o), *how]) for o in outs]
    try:
        codes = [process.wait() for process in running]
    finally:
        for process in running:
            process.kill()
    if any(codes):
        raise LaunchError(
            f"a process that measures this machine ended with exit code {max(codes)}."
        )
    return [json.loads(out.read_text()) for out in outs]


def _together(folder: Path, how: Sequence[str]) -> dict[str, Any]:
    """What two ranks measure."""
    out = folder / "together"
    words = [*this_launcher(), "--nproc", "2", "--quiet", "--module", "zeroshard.planner.rates"]
    if code := subprocess.call([*words, "together", str(out), *how]):
        raise LaunchError(f"the ranks that measure collectives ended with exit code {code}.")
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def _mean(values: Sequence[Any]) -> Any:
    """The mean of numbers, or of each number in dicts and lists."""
    first = values[0]
    if isinstance(first, dict):
        return {key: _mean([value[key] for value in values]) for key in first}
    if isinstance(first, list):
        return [_mean(each) for each in zip(*values, strict=True)]
    return sum(values) / len(values)


def _numbers(alone: Sequence[dict[str, Any]], link: dict[str, Any]) -> dict[str, Any]:
    """The contents of a machine file, without sources."""
    found = _mean(alone)
    cores = os.cpu_count() or 1
    limits = host_limits()
    memory = limits.cgroup.limit_nbytes if limits.cgroup else limits.host_total_nbytes
    host = {
        "memory_bytes_per_s": cores * found["bytes_per_s"][-1][1],
        "optimizer_bytes_per_s": found["optimizer_bytes_per_s"],
        "cores": cores,
    }
    device = {
        "context_bytes": found["resident_nbytes"],
        "bytes_per_s": found["bytes_per_s"],
        "random_per_s": found["random_per_s"],
        "operation_s": found["operation_s"],
        "optimizer_bytes_per_s": found["optimizer_bytes_per_s"],
    }
    if memory is not None:
        device["memory_bytes"] = min(memory, limits.host_total_nbytes or memory) / cores
    return {
        "name": f"{cores} cores of {platform.node()}, measured {time.strftime('%Y-%m-%d')}",
        "execution": "serial",
        "devices_per_node": cores,
        "device": device,
        "matmul": found["matmul"],
        "attention": found["attention"],
        "special": found["special"],
        "host": host,
        "disk": found["disk"],
        "inside_node": link,
    }


def as_toml(numbers: dict[str, Any]) -> str:
    """A machine file whose numbers are measured.

    >>> print(as_toml({"name": "a", "host": {"cores": 2}}), end="")
    name = "a"
    <BLANKLINE>
    [host]
    cores = {value = 2, source = "measured"}
    """
    lines = [_line(key, value) for key, value in numbers.items() if not isinstance(value, dict)]
    for name, section in numbers.items():
        if isinstance(section, dict):
            lines += ["", f"[{name}]", *(_line(key, value) for key, value in section.items())]
    return "\n".join(lines) + "\n"


def _line(key: str, value: Any) -> str:
    if isinstance(value, str):
        return f"{key} = {json.dumps(value)}"
    if isinstance(value, list):
        points = ", ".join(f"[{size:.0f}, {rate:.4g}]" for size, rate in value)
        return f'{key} = {{value = [{points}], source = "measured"}}'
    return f'{key} = {{value = {value:.4g}, source = "measured"}}'
