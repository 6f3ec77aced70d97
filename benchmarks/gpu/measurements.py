"""Steps that measure what needs no training of a large model: the host, NCCL's memory, the allocator."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # modules that CPU and GPU benchmarks share

from comparability import Row
from turns import Answer, Bench, Line

OWN = Line("ZeroShard")


def fact_rows(answer: Answer, title: str = "") -> list[Row]:
    """One row for each fact of a turn. ``title``: a prefix of their names."""
    if "error" in answer:
        return [{"system": title or "this machine", "error": answer["error"]}]
    rows: list[Row] = [
        {"machine": f"{title}: {name}" if title else name, "is": value}
        for name, value in answer["facts"].items()
    ]
    findings = answer.get("findings", ())
    return rows + [{"check": "pretended device", "result": text} for text in findings]


def with_findings(answer: Answer) -> Answer:
    """The answer; in a rehearsal, what the pretended device found is its error."""
    findings = answer.pop("findings", ())
    return {**answer, "error": f"pretended device: {findings[0]}"} if findings else answer


def host_rates(bench: Bench) -> list[Row]:
    """Rates of page-locking, and of the update on the host's cores."""
    options = {"nbytes": bench.numel(2**32), "numel": bench.numel(2**28)}
    return fact_rows(bench.turn("host", OWN, "tiny", options=options))


def memory_of_nccl(bench: Bench) -> list[Row]:
    """Bytes of a communicator, and what NCCL does with registered memory: on one rank, then on two, which
    NCCL may refuse."""
    backend = "gloo" if bench.rehearsal else "nccl"
    rows: list[Row] = []
    for task in ("communicators", "registered"):
        for ranks in (1, 2):
            options = {"ranks": ranks, "backend": backend, "numel": bench.numel(2**26)}
            answer = bench.turn(task, OWN, "tiny", limit_s=60, options=options)
            rows += fact_rows(answer, f"{ranks} rank{'s' * (ranks > 1)}")
    return rows


SEGMENTS = {"growing segments": "expandable_segments:True", "fixed segments": ""}
"""Settings of the allocator, by a name for them."""


def unused_memory(bench: Bench) -> list[Row]:
    """What the allocator holds beyond tensors at stage 3, with two settings."""
    options = {"steps": 4 if bench.rehearsal else 50, "settles": 2 if bench.rehearsal else 10}
    rows: list[Row] = []
    for name, setting in SEGMENTS.items():
        answer = with_findings(
            bench.turn(
                "fragments", Line("ZeroShard", 3), "8B-units", allocator=setting, options=options
            )
        )
        rows.append({"system" if "error" in answer else "built": name, **answer})
    return rows


UNIT_LINES = (Line("plain"), Line("FSDP2"), Line("ZeroShard", 3))


def unit_costs(bench: Bench) -> list[Row]:
    """Host time of a unit. ``own_us``: beyond that of the plain loop."""
    depth, width, rounds = (3, 16, 2) if bench.rehearsal else (24, 256, 8)
    options = {"depth": depth, "width": width, "rounds": rounds}
    rows: list[Row] = []
    plain_us: float | None = None
    for line in bench.chosen(UNIT_LINES):
        answer = with_findings(bench.turn("units", line, "tiny", options=options))
        row: Row = {"system": line.name, **answer}
        if "error" not in row:
            all_us = row["us_per_unit"]["all"]
            if line.system == "plain":
                plain_us = all_us
            elif plain_us is not None:
                row["own_us"] = all_us - plain_us
        rows.append(row)
    return rows
