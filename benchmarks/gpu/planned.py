"""Compares plans with runs on this GPU: the peak of a step, its time, and whether what fits does run.

A run gets the memory that its plan needs, and :data:`ROOM` of it more for the blocks of the allocator.
One that runs out of memory is a false "fits".
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # modules that CPU and GPU benchmarks share

from comparability import Row
from shapes import SHAPES
from trainers import Job, batches, build, dtype_of, zeroshard_config
from turns import Answer, Bench, Line

PEAK_OFF, TIME_OFF = 0.02, 0.15
"""The parts by which peak and time of a plan may differ from the run."""

ROOM = 0.04
"""The part of the planned peak that a run gets besides, since the allocator gives memory in blocks."""


@dataclass(frozen=True)
class Case:
    """One configuration. ``rows``: samples of a step."""

    shape: str
    stage: int
    rows: int
    recompute: bool = False
    offload: str = ""
    params: bool = False
    precision: str = "bf16"

    @property
    def line(self) -> Line:
        """As a system of the benchmark."""
        return Line("ZeroShard", self.stage, self.precision, self.params)

    @property
    def text(self) -> str:
        """The case in words."""
        more = ["recomputing"] * self.recompute + [f"optimizer on {self.offload}"] * bool(
            self.offload
        )
        return ", ".join([f"{self.shape} {self.line.name} {self.precision} x {self.rows}", *more])

    def job(self, job: Job) -> Job:
        """A job of the worker, as that of this case."""
        return replace(
            job, system="ZeroShard", stage=self.stage, precision=self.precision, offload=self.offload,
            offloads_params=self.params, recompute=self.recompute,
        )  # fmt: skip


CASES = (
    *(Case("0.1B", stage, rows) for stage in (0, 2, 3) for rows in (1, 4, 16)),
    *(Case("0.1B", stage, 16, recompute=True) for stage in (0, 2, 3)),
    Case("0.1B", 2, 1, offload="cpu"), Case("0.1B", 1, 8, offload="cpu"),
    Case("0.1B", 3, 4, offload="cpu", params=True), Case("0.1B", 0, 2, precision="fp32"),
    Case("0.1B", 1, 4, precision="fp16"), Case("1.5B", 0, 1), Case("1.5B", 3, 2, recompute=True),
    Case("1.5B", 2, 2, recompute=True, offload="cpu"),
)  # fmt: skip
"""Twenty configurations."""

REHEARSED = (
    Case("tiny", 1, 1, offload="cpu"), Case("tiny", 2, 2, recompute=True, offload="cpu"),
    Case("tiny", 3, 1, offload="cpu", params=True),
)  # fmt: skip
"""In a rehearsal: the pretended device has no Triton, without which an update there needs more."""

MACHINES = {"H200": "h200", "H100": "h100", "A100": "a100", "4090": "rtx4090"}
"""The part of a GPU's name, and the preset of its times."""


def plan(job: Job, *, cases: Sequence[Mapping[str, Any]], gpu: str = "") -> dict[str, Any]:
    """Peak and milliseconds of each case, without the GPU. ``gpu``: its name; unknown: no times."""
    return {"plans": [_planned(job, Case(**case), _machine(gpu)) for case in cases]}


def _machine(gpu: str) -> Any:
    from zeroshard.config.machine_file import load_machine

    name = next((preset for part, preset in MACHINES.items() if part in gpu), None)
    return None if name is None else load_machine(name)


def _planned(job: Job, case: Case, machine: Any) -> dict[str, Any]:
    from zeroshard.core.mesh import Mesh
    from zeroshard.planner.simulate import simulate
    from zeroshard.planner.step_time import stage_times

    job, shape = case.job(job), SHAPES[case.shape]
    tokens, targets = batches(shape, case.rows, "cpu", count=1)[0]
    found = simulate(
        lambda: build(shape, "cpu", dtype=dtype_of(job), recompute=case.recompute),
        zeroshard_config(job), ((tokens, targets), None), mesh=Mesh(), rank=0,
        loss_fn=lambda loss, _: loss, target="cuda", with_events=machine is not None,
    )  # fmt: skip
    time = None
    if machine is not None:
        samples = {"samples": case.rows, "tokens": case.rows * shape.context}
        time = 1e3 * stage_times([found], machine, **samples)[0].total_s
    return {"peak_nbytes": found.peak_nbytes, "step_ms": time}


def compare(bench: Bench) -> list[Row]:
    """One row for the run of each case, and rows for its peak and its time."""
    cases = REHEARSED if bench.rehearsal else CASES
    given = {"cases": [vars(case) for case in cases], "gpu": bench.machine.get("gpu", "")}
    answer = bench.turn("plan", Line("plan"), "tiny", options=given)
    if "error" in answer:
        return [{"check": "plans", "result": answer["error"], "error": answer["error"]}]
    rows: list[Row] = []
    for case, planned in zip(cases, answer["plans"], strict=True):
        limit = int((1 + ROOM) * planned["peak_nbytes"])
        options = {"rows": case.rows, "warm_up": 3, "limit_nbytes": 0 if bench.rehearsal else limit}
        live = bench.turn(
            "train", case.line, case.shape, offload=case.offload, recompute=case.recompute,
            options=options,
        )  # fmt: skip
        rows += rows_of(case.text, planned, live)
    return rows


def rows_of(case: str, planned: Mapping[str, Any], live: Answer) -> Iterator[Row]:
    """What a run shows of its plan. A CPU tells no peak; a GPU without a preset has no planned time."""
    if "error" in live:
        yield {"check": f"{case}: fits", "result": live["error"], "error": live["error"]}
        return
    yield {"check": f"{case}: fits", "result": "yes"}
    if "allocated_nbytes" in live:
        peak = planned["peak_nbytes"], live["allocated_nbytes"]
        yield _row(f"{case}: peak", *peak, PEAK_OFF) | {"reserved": live["reserved_nbytes"]}
    if planned["step_ms"] is not None:
        step_ms = sorted(live["step_ms"])[len(live["step_ms"]) // 2]
        yield _row(f"{case}: ms", planned["step_ms"], step_ms, TIME_OFF)


def _row(check: str, planned: float, live: float, allowed: float) -> Row:
    off = planned / live - 1
    result = "yes" if abs(off) <= allowed else f"the plan is off by {off:+.1%}"
    return {"check": check, "result": result, "planned": planned, "live": live, "off": off}
