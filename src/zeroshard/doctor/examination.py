"""Examines this machine: facts, probes, and what they mean."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroshard.doctor.facts import (
    Facts,
    ProbeOutcome,
    addresses_of,
    collectives,
    disk_below,
    gather,
    listed_gpus,
    registered_memory,
)
from zeroshard.doctor.verdicts import (
    BISECT,
    CODES,
    MachineFinding,
    of_facts,
    of_gloo,
    of_gpus,
    of_name,
    of_nccl,
)
from zeroshard.memory.host_limits import gib

GLOO_LIMIT_S, NCCL_LIMIT_S, ANSWER_LIMIT_S = 60.0, 30.0, 5.0
"""Seconds for one probe; that of gloo is for ranks with a core each. torch is imported in that time."""
RANKS_PER_CORE = 4
"""No more ranks exchange tensors with gloo: with many ranks to a core, each round takes seconds."""
TOTAL_S, LEAST_S = 240.0, 5.0
"""Seconds for all probes together, and with how many left a probe is not begun."""


@dataclass(frozen=True)
class Examination:
    """``gloo``: by number of ranks. ``nccl``: by setting; empty without GPUs."""

    facts: Facts
    gpus: list[dict[str, str]]
    gloo: dict[int, ProbeOutcome]
    nccl: dict[str, ProbeOutcome]
    findings: list[MachineFinding]

    @property
    def exit_code(self) -> int:
        """0: nothing found; 1: warnings; 2: a run will fail."""
        return max([{"warns": 1, "fails": 2}[f.weight] for f in self.findings], default=0)


def examine(
    ranks: int | None, disk: Path, nodes: int = 1, environ: Mapping[str, str] | None = None
) -> Examination:
    """Examine this machine for ``ranks`` ranks; None: one for each GPU, or 2.

    ``nodes``: hosts of the run; the name of this one matters if there are several. ``environ``: for the
    programs that are started; None: that of this process.
    """
    environ = dict(os.environ) if environ is None else environ
    time_left = _Deadline(TOTAL_S)
    answer, gpus = listed_gpus(limit_s=ANSWER_LIMIT_S, environ=environ)
    count = ranks or len(gpus) or 2
    trouble, place = disk_below(disk, limit_s=ANSWER_LIMIT_S, environ=environ)
    facts = gather(count, place, environ, disk_trouble=trouble)
    name: list[MachineFinding] = []
    if nodes > 1:
        answered, found = addresses_of(facts.host, limit_s=ANSWER_LIMIT_S, environ=environ)
        name = list(of_name(found, answered=answered))
    gloo = {}
    most = max(2, int(RANKS_PER_CORE * facts.usable_cores))
    for n in sorted({2, min(count, most)} - {1}):
        limit_s = GLOO_LIMIT_S * max(1.0, n / facts.usable_cores)
        gloo[n] = _exchange(n, "gloo", time_left.at_most(limit_s), environ)
    one = ProbeOutcome("ok", "")
    nccl: dict[str, ProbeOutcome] = {}
    if gpus:
        one, nccl = _try_nccl(min(count, len(gpus)), facts, environ, time_left)
    verdict = of_nccl(one, nccl)
    findings = [
        *of_gpus(facts, answer),
        *([verdict] if verdict else []),
        *of_gloo(gloo),
        *of_facts(facts),
        *name,
    ]
    return Examination(facts, gpus, gloo, nccl, findings)


class _Deadline:
    """Gives each probe its own limit, or what is left of the time for all of them."""

    def __init__(self, seconds: float) -> None:
        self._until_s = time.monotonic() + seconds

    def at_most(self, limit_s: float) -> float:
        """0: too little is left to begin."""
        left_s = self._until_s - time.monotonic()
        return min(limit_s, left_s) if left_s >= min(limit_s, LEAST_S) else 0.0


def _exchange(ranks: int, backend: str, limit_s: float, environ: Mapping[str, str]) -> ProbeOutcome:
    if not limit_s:
        return ProbeOutcome("untried", "not tried: no time was left")
    return collectives(ranks, backend, limit_s=limit_s, environ=environ)


def _try_nccl(
    ranks: int, facts: Facts, environ: Mapping[str, str], time_left: _Deadline
) -> tuple[ProbeOutcome, dict[str, ProbeOutcome]]:
    """One GPU alone, then all GPUs with one setting after the other, until one works."""
    one = _exchange(1, "nccl", time_left.at_most(NCCL_LIMIT_S), environ)
    tried: dict[str, ProbeOutcome] = {}
    if one.kind != "ok" or ranks < 2:
        return one, tried
    interfaces = [(f"NCCL_SOCKET_IFNAME={n}", {"NCCL_SOCKET_IFNAME": n}) for n in facts.interfaces]
    for name, settings in (*BISECT, *interfaces):
        limit_s = time_left.at_most(NCCL_LIMIT_S)
        tried[name] = _exchange(ranks, "nccl", limit_s, {**environ, **settings})
        if tried[name].kind == "ok":
            break
    return one, tried


def lines(found: Examination) -> Iterator[str]:
    """The examination as text: a line per check, then the findings."""
    for name, text in _checks(found):
        yield f"{name:<16}{text}"
    if not found.findings:
        yield "Nothing is wrong."
    for finding in found.findings:
        code = CODES[finding.code]
        yield f"{finding.code}  {code.title}: {finding.detail}."
        yield f"  {code.remedy}"
        if finding.fix:
            yield f"  Now: {finding.fix}"


def _checks(found: Examination) -> Iterator[tuple[str, str]]:
    facts = found.facts
    versions = [f"{name} {version}" for name, version in facts.versions.items()]
    yield "versions", ", ".join([f"Python {facts.python}", *versions])
    quota = "" if facts.quota is None else f", cgroup {facts.quota:g} cores"
    yield "host", f"{facts.host}: {facts.cores} cores{quota}; {facts.memory.in_words()}"
    if facts.shm_nbytes is not None:
        yield "/dev/shm", f"{gib(facts.shm_nbytes)}, {gib(facts.shm_free_nbytes or 0)} free"
    limits = (f"ulimit {k} {'unlimited' if v < 0 else v}" for k, v in facts.limits.items())
    yield "limits", ", ".join(limits)
    if facts.disk is not None:
        disk, direct = facts.disk, "O_DIRECT" if facts.disk.direct else "no O_DIRECT"
        yield "disk", f"{disk.path}: {disk.filesystem}, {gib(disk.free_nbytes)} free, {direct}"
    iommu = "; an IOMMU is on" if facts.iommu else ""
    yield "network", f"{', '.join(facts.interfaces) or 'no interface but the loopback'}{iommu}"
    yield from _of_gpus(found)
    for name, value in facts.variables.items():
        yield "variable", f"{name}={value}"
    for ranks, outcome in found.gloo.items():
        yield f"gloo {ranks} ranks", _numbers(outcome) + _listens(outcome)
    for name, outcome in found.nccl.items():
        yield "NCCL", f"{name}: {_numbers(outcome)}"


def _of_gpus(found: Examination) -> Iterator[tuple[str, str]]:
    for gpu in found.gpus:
        yield "GPU", f"{gpu['name']}, {gpu['memory.total']} MiB, driver {gpu['driver_version']}"
    if found.gpus:
        yield "memory of NCCL", registered_memory(found.facts.versions, found.facts.variables)


def _numbers(outcome: ProbeOutcome) -> str:
    """Latency of 8 bytes and bandwidth of 16 MiB of an all-reduce, and whether values were right."""
    if not outcome.found:
        return outcome.text
    row = outcome.found["all_reduce"]
    speed = f"all_reduce {row['latency_s'] * 1e6:.0f} us, {row['busbw_Bps'] / 1e9:.2f} GB/s"
    return f"{speed}, {outcome.text}"


def _listens(outcome: ProbeOutcome) -> str:
    """Where the ranks could be reached over the network while they exchanged tensors."""
    addresses = outcome.found.get("listens", [])
    return f"; ranks listen on {', '.join(addresses)}" if addresses else ""


def as_json(found: Examination) -> str:
    """Everything, for programs."""
    tree: dict[str, Any] = dataclasses.asdict(found)
    for finding in tree["findings"]:
        code = CODES[finding["code"]]
        finding |= {"weight": code.weight, "title": code.title, "remedy": code.remedy}
    return json.dumps({**tree, "exit_code": found.exit_code}, indent=1)
