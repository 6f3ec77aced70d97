"""The steps of the GPU benchmark: checks first, then measurements.

A step is a function of the :class:`turns.Bench` that returns rows. ``seconds`` is about what it needs on
one H100. The steps of a part fit into nine minutes together.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.append(str(Path(__file__).parents[1]))  # modules that CPU and GPU benchmarks share

from comparability import Row, distance, statistics
from interleaving import alternating
from measurements import host_rates, memory_of_nccl, unit_costs, unused_memory
from planned import compare
from room import ratio_for, refusal
from shapes import SHAPES, mfu, peak_tflops
from turns import MIN_TURN_S, OUT_OF_TIME, Answer, Bench, Line

NOT_COMPARABLE = 0.01  # relative distance of the last loss from the first system's
OWN = Line("ZeroShard")

# ---------------------------------------------------------------------- checks


def check_imports(bench: Bench) -> list[Row]:
    """Versions, and what the hardware can do at best. Also tells the bench how much memory there is."""
    options = {"scale": 0.01} if bench.rehearsal else {}
    answer = bench.turn("machine", OWN, "tiny", options=options)
    bench.machine = answer
    return (
        [answer] if "error" in answer else [{"machine": key, "is": answer[key]} for key in answer]
    )


def check_rows(answer: Answer) -> list[Row]:
    """One row per check of a turn."""
    if "error" in answer:
        return [{"check": "all", "result": answer["error"], "error": answer["error"]}]
    rows = [{"check": name, "result": text or "yes"} for name, text in answer["checks"].items()]
    rows += [
        {"check": name, "result": "yes", **more} for name, more in answer.get("more", {}).items()
    ]
    return rows + finding_rows(answer)


def finding_rows(answer: Answer) -> list[Row]:
    """What the pretended device found in a rehearsal."""
    return [{"check": "pretended device", "result": text} for text in answer.get("findings", ())]


def check_numbers(bench: Bench) -> list[Row]:
    return check_rows(bench.turn("checks", OWN, "tiny"))


def check_update(bench: Bench) -> list[Row]:
    """The update in one pass compared with the optimizer's own step, and its bandwidth."""
    return check_rows(bench.turn("update", OWN, "tiny", options={"numel": bench.numel(2**28)}))


RANK_LIMIT_S = 75.0  # ranks that cannot connect wait for ever


def check_one_rank(bench: Bench) -> list[Row]:
    """Collectives over a process group of one rank; at stage 3 parameters are gathered all the same."""
    backend = "gloo" if bench.rehearsal else "nccl"
    return check_rows(_ranks(bench, 1, backend))


def check_two_ranks(bench: Bench) -> list[Row]:
    """Two ranks on one GPU. NCCL accepts this if it takes them for two hosts; else gloo."""
    rows: list[Row] = []
    for backend in ("gloo",) if bench.rehearsal else ("nccl", "gloo"):
        found = check_rows(_ranks(bench, 2, backend))
        rows += [{**row, "check": f"{backend}: {row['check']}"} for row in found]
        if not any("error" in row for row in found):
            break
    return rows


def _ranks(bench: Bench, ranks: int, backend: str) -> Answer:
    options = {"ranks": ranks, "backend": backend}
    line = Line("plain") if bench.rehearsal and ranks > 1 else OWN  # ranks are real processes
    return bench.turn("ranks", line, "tiny", limit_s=RANK_LIMIT_S, options=options)


def check_streams(bench: Bench) -> list[Row]:
    """Scenarios of the streams under PyTorch's sanitizer, one process each group of scenarios."""
    rows: list[Row] = []
    for group in SCENARIO_GROUPS:
        answer = bench.turn("scenarios", OWN, "tiny", sanitized=True, options={"group": group})
        rows += check_rows(answer)
    return rows


SCENARIO_GROUPS = ("device", "host", "parameters")

# ---------------------------------------------------------------------- speed


B1_LINES = (
    Line("plain"), Line("FSDP2"), Line("DeepSpeed", 1), Line("DeepSpeed", 3),
    Line("ZeroShard", 0), Line("ZeroShard", 2), Line("ZeroShard", 3),
)  # fmt: skip


def speed(bench: Bench) -> list[Row]:
    """Turns go forwards, then backwards through the list, so that drift affects all systems equally."""
    rows: list[Row] = []
    wanted = bench.chosen(B1_LINES)
    lines = [line for line in wanted if line.installed]
    answers: dict[str, dict[Line, list[Answer]]] = {}
    for size in ("tiny",) if bench.rehearsal else ("1.5B", "3B"):
        if not bench.rehearsal and not SHAPES[size].fits(gpu_free(bench), 2048):
            rows.append({"system": "all", "model": size, "error": "does not fit into this GPU"})
        else:
            answers[size] = {line: [] for line in lines}
    for turn, line in alternating(lines, 1 if bench.rehearsal else 2):
        for size, of_size in answers.items():
            if turn and bench.left_s < MIN_TURN_S:
                continue  # a second turn only makes the numbers better
            if not any("error" in answer for answer in of_size[line]):
                of_size[line].append(bench.turn("train", line, size))
    for size, of_size in answers.items():
        rows += with_distance([summary(bench, line, size, of_size[line], 1) for line in lines])
    missing = sorted({line.system for line in wanted if not line.installed})
    return rows + [{"system": system, "error": "not installed"} for system in missing]


def summary(bench: Bench, line: Line, size: str, answers: Sequence[Answer], rows: int) -> Row:
    """Median and minimum over the steps of all successful turns. ``error``: why a turn failed."""
    row: Row = {"system": line.name, "model": size}
    good = [answer for answer in answers if "error" not in answer]
    errors = [answer["error"] for answer in answers if "error" in answer]
    if errors:
        row["error"] = errors[0]
    if not good:
        return row
    shape, peak = SHAPES[bench.shape(size)], peak_of(bench)
    steps = statistics([ms for answer in good for ms in answer["step_ms"]])
    rate = rows * shape.context / steps["median"] * 1e3
    row |= {"turns": len(good), "step_ms": steps["median"], "min_ms": steps["min"]}
    row["tokens_per_s"] = rate
    for key in ("forward_ms", "backward_ms", "update_ms", "wall_ms", "host_cpu_ms"):
        row[key] = median(answer[key] for answer in good)
    for key in ("allocated_nbytes", "reserved_nbytes"):
        if key in good[0]:
            row[key] = max(answer[key] for answer in good)
    row["mfu"] = mfu(shape, rate, peak) if peak else None
    row["losses"] = good[0]["losses"]
    if findings := [text for answer in good for text in answer.get("findings", ())]:
        row["error"] = f"pretended device: {findings[0]}"
    return row


def peak_of(bench: Bench) -> float | None:
    """TFLOP/s of this GPU in bf16, as sold, else as measured."""
    return peak_tflops(bench.machine.get("gpu", "")) or bench.machine.get("matmul_bf16_tflops")


def gpu_free(bench: Bench) -> int:
    """Bytes of free GPU memory. Measures the machine if no step has done so."""
    if not bench.machine:
        check_imports(bench)
    return int(bench.machine.get("gpu_free_nbytes", 0))


def with_distance(rows: list[Row]) -> list[Row]:
    """Mark rows that train differently: those whose last loss differs too much from the first row's."""
    measured = [row for row in rows if "losses" in row]
    for row in measured:
        row["distance"] = distance(row["losses"][-1:], measured[0]["losses"][-1:])
        if row["distance"] > NOT_COMPARABLE:
            row["error"] = "NO RESULT: trains differently"
    return rows


# ---------------------------------------------------------------------- offload


PREBUILD_LIMIT_S = 200.0  # more would leave no time for the measurements


def prebuild(bench: Bench) -> list[Row]:
    """Compile what peers would compile at first use, so that no measurement contains it."""
    line = Line("DeepSpeed", 2)
    if not line.installed:
        return [{"system": "DeepSpeed", "error": "not installed"}]
    answer = bench.turn("prebuild", line, "tiny", limit_s=PREBUILD_LIMIT_S)
    if "error" not in answer:
        (bench.extensions / "built").write_text(answer["built"] + "\n")
    return [{"system": "DeepSpeed", **answer}]


def _prebuilt(bench: Bench, lines: Sequence[Line]) -> list[Row]:
    """Prebuild, unless a step has done so in this folder or no line needs it."""
    wanted = any(line.system == "DeepSpeed" and line.installed for line in lines)
    return prebuild(bench) if wanted and not (bench.extensions / "built").exists() else []


@dataclass(frozen=True)
class Offloaded:
    """A measurement with optimizer state in ``offload``. ``sizes`` are tried one after the other."""

    sizes: tuple[str, ...]
    rows: int
    lines: tuple[Line, ...]
    offload: str = "cpu"
    warm_up: int = 2
    steps: int = 8

    def __call__(self, bench: Bench) -> list[Row]:
        wanted = bench.chosen(self.lines)
        lines = [line for line in wanted if line.installed]
        rows = [row for row in _prebuilt(bench, lines) if "error" in row]
        lines = [line for line in lines if line.system not in {row["system"] for row in rows}]
        for size in self.sizes[:1] if bench.rehearsal else self.sizes:
            answers = [(line, self.train(bench, line, size)) for line in lines]
            made = [self.row(bench, line, size, answer) for line, answer in answers]
            rows += with_distance(made)
        return rows

    def train(self, bench: Bench, line: Line, size: str) -> Answer:
        """One turn; without a process, the reason, if the model cannot fit."""
        shape, ratio = SHAPES[bench.shape(size)], 1.0
        if not bench.rehearsal:
            free = gpu_free(bench)
            host_free = int(bench.machine.get("host_free_nbytes", 0))
            system = f"{line.system} with parameters" if line.params else line.system
            ratio = ratio_for(system, line.stage, shape, host_free)
            why = "" if self.offload != "cpu" else refusal(
                system, shape, self.rows, ratio, gpu_free=free, host_free=host_free
            )  # fmt: skip
            if why:
                return {"error": f"refused: {why}"}
        options = {"warm_up": self.warm_up, "steps": self.steps, "rows": self.rows}
        return {"ratio": ratio} | bench.turn(
            "train", line, size, offload=self.offload, ratio=ratio, recompute=True, options=options
        )

    def row(self, bench: Bench, line: Line, size: str, answer: Answer) -> Row:
        """The row of one turn."""
        row = summary(bench, line, size, [answer], self.rows)
        return {**row, "ratio": answer["ratio"]} if "ratio" in answer else row


@dataclass(frozen=True)
class Largest(Offloaded):
    """The largest model that each system trains: ``sizes`` from the largest, until one succeeds."""

    def __call__(self, bench: Bench) -> list[Row]:
        lines = [line for line in bench.chosen(self.lines) if line.installed]
        rows = [row for row in _prebuilt(bench, lines) if "error" in row]
        lines = [line for line in lines if line.system not in {row["system"] for row in rows}]
        for line in lines:
            for size in self.sizes[:1] if bench.rehearsal else self.sizes:
                row = self.row(bench, line, size, self.train(bench, line, size))
                rows.append(row)
                if "error" not in row or row["error"] == OUT_OF_TIME:
                    break
        return rows


_OFFLOAD_LINES = (
    Line("ZeroShard", 2), Line("DeepSpeed", 2), Line("FSDP2"), Line("ZeroShard", 3, params=True),
)  # fmt: skip
OFFLOAD = Offloaded(("3B", "7B"), 4, _OFFLOAD_LINES)
LARGEST = Largest(
    ("18B", "16B", "14B", "12B", "10B", "8B", "7B", "5B", "3B"), 8,
    (Line("ZeroShard", 2), Line("DeepSpeed", 3), Line("FSDP2")), warm_up=1, steps=3,
)  # fmt: skip
DISK = Offloaded(("1.5B",), 4, (Line("ZeroShard", 3), Line("DeepSpeed", 3)), "nvme", steps=4)

# ---------------------------------------------------------------------- waits and traces

WAIT_LINES = (
    *(Line("ZeroShard", stage, kind) for kind in ("bf16", "fp16") for stage in range(4)),
    Line("plain"), Line("FSDP2"), Line("DeepSpeed", 1), Line("DeepSpeed", 3),
)  # fmt: skip


def waits(bench: Bench) -> list[Row]:
    """Waits and driver calls of one step. In a small model waits are easier to detect."""
    rows: list[Row] = []
    for line in bench.chosen(WAIT_LINES):
        if not line.installed:
            rows.append({"system": line.name, "error": "not installed"})
            continue
        # A loss scale that does not overflow: a skipped step prints its reason, which waits.
        extra = (
            {"fp16": {"enabled": True, "initial_scale_power": 8}}
            if line.precision == "fp16"
            else {}
        )
        answer = bench.turn("audit", line, "0.1B", extra=extra)
        rows.append({"system": line.name, "precision": line.precision, **answer})
    return rows


def traces(bench: Bench) -> list[Row]:
    """A trace of one step at stage 3 and of one with offload, and how much of the copies overlaps."""
    rows: list[Row] = []
    for line, offload in ((Line("ZeroShard", 3), ""), (Line("ZeroShard", 2), "cpu")):
        name = f"stage-{line.stage}{'-offload' if offload else ''}"
        file = bench.artifacts / f"trace-{name}.json.gz"
        answer = bench.turn("trace", line, "0.1B" if offload else "1.5B", offload=offload,
                            options={"file": str(file)})  # fmt: skip
        rows.append({"system": f"{line.name} {offload}".strip(), **answer})
    return rows


# ---------------------------------------------------------------------- the table of steps


@dataclass(frozen=True)
class Step:
    """``seconds``: what it needs on one H100. ``checks``: whether a row that is not "yes" fails the run.

    ``by_default``: whether it runs without ``--only``.
    """

    title: str
    seconds: float
    run: Callable[[Bench], list[Row]]
    by_default: bool = True


STEPS: dict[str, Step] = {
    "import": Step("Imports, versions, bandwidths of this machine", 30, check_imports),
    "checks": Step("Numbers of stages 0 to 3, compared with a plain loop", 110, check_numbers),
    "nccl": Step("Collectives of NCCL with one rank", 60, check_one_rank),
    "two-ranks": Step("Two ranks on one GPU", 150, check_two_ranks),
    "update": Step("The update in one pass", 50, check_update),
    "waits": Step("Waits for the GPU and driver calls of a step", 130, waits),
    "speed": Step("1.5 B and 3 B, 2 K tokens, everything on the GPU", 370, speed),
    "trace": Step("Traces of a step at stage 3 and with offload", 40, traces),
    "units": Step("Host time of a unit, beside FSDP2", 35, unit_costs),
    "fragments": Step(
        "Unused memory after 50 steps with the units of an 8B model", 40, unused_memory
    ),
    "host": Step("Page-locking, and the update on the host's cores", 25, host_rates),
    "nccl-memory": Step("Memory of a communicator; registered memory", 35, memory_of_nccl),
    "offload": Step("3 B and 7 B, 8 K tokens, optimizer state on the host", 450, OFFLOAD),
    "largest": Step("The largest model, state on GPU and host, 16 K tokens", 480, LARGEST),
    "plans": Step("Peaks and times of twenty plans, compared with their runs", 380, compare),
    "sanitizer": Step("Stream order, under PyTorch's sanitizer", 150, check_streams),
    "prebuild": Step("Extensions of other libraries", 110, prebuild, by_default=False),
    "disk": Step("1.5 B, 8 K tokens, optimizer state on disk", 200, DISK, by_default=False),
}

PART_S = 540.0
"""A part takes at most this time: a machine is often lent for ten minutes at a time."""

PARTS: dict[int, tuple[str, ...]] = {
    1: ("import", "checks", "nccl", "two-ranks", "update", "waits"),
    2: ("import", "speed", "trace", "units", "fragments"),
    3: ("import", "host", "nccl-memory", "offload"),
    4: ("import", "largest"),
    5: ("import", "plans"),
    6: ("import", "sanitizer"),
}
"""The steps of each part, the most important first: the first three answer whether it runs, whether its
numbers are right, and how fast it is with and without offload."""


def limits(names: Sequence[str], seconds: float) -> Iterator[tuple[str, float]]:
    """The seconds that each step may take; steps share what is left over in proportion."""
    spare = max(1.0, seconds / sum(STEPS[name].seconds for name in names))
    return ((name, STEPS[name].seconds * spare) for name in names)


def failed(rows: Sequence[Row]) -> list[Row]:
    """Rows of checks that do not hold."""
    return [row for row in rows if "check" in row and row["result"] != "yes"]
