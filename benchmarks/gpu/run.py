"""How does ZeroShard do on one GPU? Protocols B1 to B6 and a check of the numbers, in ten minutes.

    python benchmarks/gpu/run.py                           # everything that fits into ten minutes
    python benchmarks/gpu/run.py --only B1 --minutes 5     # some protocols, with their own time
    python benchmarks/gpu/run.py --list
    python benchmarks/gpu/run.py --rehearse                # tiny models on a CPU: is the script sound?

Every turn of every system is a process of its own (``turn.py``). Prints tables and writes
``benchmarks/results/<date>-gpu.json``.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # what both kinds of benchmarks share lies there

from judging import Row, distance, statistics
from rich.console import Console
from rich.table import Table
from shapes import SHAPES, Shape, budgets, mfu, peak_tflops
from teams import to_and_fro

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MARK = "RESULT "
ENOUGH_S = 12.0  # below this much time left, no turn is begun: a process needs as long to start
OUT_OF_TIME = "out of time"
NOT_COMPARABLE = 0.01  # relative distance of the last loss from the first system's
Answer = dict[str, Any]


@dataclass(frozen=True)
class Line:
    """One system in one setting."""

    system: str
    stage: int = 0
    precision: str = "bf16"

    @property
    def name(self) -> str:
        staged = self.system in ("DeepSpeed", "ZeroShard")
        return f"{self.system} stage {self.stage}" if staged else self.system

    @property
    def installed(self) -> bool:
        return self.system != "DeepSpeed" or importlib.util.find_spec("deepspeed") is not None


class Bench:
    """Runs turns within the time of the protocol at hand, and knows the machine."""

    def __init__(self, *, rehearses: bool, folder: str, systems: Sequence[str] = ()) -> None:
        self.rehearses = rehearses
        self.folder = folder
        self.systems = systems
        self.device = "cpu" if rehearses else "cuda"
        self.machine: Answer = {}
        self.console = Console()
        if not self.console.is_terminal:
            self.console = Console(width=140)
        self._ends_s = 0.0

    def allow(self, seconds: float) -> None:
        """From now on turns may take so long together."""
        self._ends_s = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return self._ends_s - time.monotonic()

    def chosen(self, lines: Iterable[Line]) -> list[Line]:
        """Those that the user wants: all, or some by system or by system and stage."""
        return [
            line
            for line in lines
            if not self.systems or line.system in self.systems or line.name in self.systems
        ]

    def shape(self, name: str) -> str:
        return "tiny" if self.rehearses else name

    def turn(self, task: str, line: Line, shape: str, **given: Any) -> Answer:
        """What the process answered, or ``{"error": ...}``: nothing that it does ends the run."""
        if self.left_s < ENOUGH_S:
            return {"error": OUT_OF_TIME}
        options = given.pop("options", {})
        job = {
            "system": line.system, "stage": line.stage, "precision": line.precision,
            "shape": self.shape(shape), "device": self.device, "folder": self.folder,
            "options": options, **given,
        }  # fmt: skip
        self.console.print(f"  {task} {line.name} {line.precision} {shape}", style="dim")
        command = [sys.executable, str(ROOT / "benchmarks/gpu/turn.py"), task, json.dumps(job)]
        paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        try:
            done = subprocess.run(
                command, env=env, capture_output=True, text=True, timeout=self.left_s, check=False
            )
        except subprocess.TimeoutExpired:
            return {"error": OUT_OF_TIME}
        return answer_in(done.stdout, done.stderr, done.returncode)


def answer_in(out: str, err: str, code: int) -> Answer:
    """The JSON after the last mark; without one, the last line that the process wrote about itself."""
    for line in reversed(out.splitlines()):
        if line.startswith(MARK):
            answer: Answer = json.loads(line.removeprefix(MARK))
            return answer
    last = (err.strip().splitlines() or ["it said nothing"])[-1]
    return {"error": f"exit code {code}: {last[:200]}"}


# ---------------------------------------------------------------------- the protocols


def check_numbers(bench: Bench) -> list[Row]:
    answer = bench.turn("checks", Line("ZeroShard"), "tiny")
    if "error" in answer:
        return [{"check": "all", "result": answer["error"], "error": answer["error"]}]
    return [{"check": k, "result": text or "yes"} for k, text in answer["checks"].items()]


B1_LINES = (
    Line("plain"), Line("FSDP2"), Line("DeepSpeed", 1), Line("DeepSpeed", 3),
    Line("ZeroShard", 0), Line("ZeroShard", 2), Line("ZeroShard", 3),
)  # fmt: skip


def b1(bench: Bench) -> list[Row]:
    """Turns go forwards, then backwards through the list, so that drift meets all systems."""
    rows: list[Row] = []
    wanted = bench.chosen(B1_LINES)
    free = bench.machine.get("gpu_free_nbytes", 0)
    for size in ("tiny",) if bench.rehearses else ("1.5B", "3B"):
        if not bench.rehearses and not SHAPES[size].fits(free, 2048):
            rows.append({"system": "all", "model": size, "error": "does not fit into this GPU"})
            continue
        turns = 1 if bench.rehearses else 2
        rows += compared(bench, [line for line in wanted if line.installed], size, turns=turns)
    missing = sorted({line.system for line in wanted if not line.installed})
    return rows + [{"system": system, "error": "not installed"} for system in missing]


def compared(
    bench: Bench, lines: Sequence[Line], size: str, *, turns: int, rows: int = 1, **given: Any
) -> list[Row]:
    """One row per line. A line that failed in its first turn has no second."""
    answers: dict[Line, list[Answer]] = {line: [] for line in lines}
    options = {"rows": rows, **given.pop("options", {})}
    for _, line in to_and_fro(lines, turns):
        if not any("error" in answer for answer in answers[line]):
            answers[line].append(bench.turn("train", line, size, **given, options={**options}))
    peak = peak_tflops(bench.machine.get("gpu", "")) or bench.machine.get("matmul_bf16_tflops")
    shape = SHAPES[bench.shape(size)]
    made = [summary(line, size, shape, answers[line], rows, peak) for line in lines]
    return with_distance(made)


def summary(
    line: Line, size: str, shape: Shape, answers: Sequence[Answer], rows: int, peak: float | None
) -> Row:
    """Median and minimum over the steps of all turns that ended; ``error``: why one did not."""
    row: Row = {"system": line.name, "model": size}
    good = [answer for answer in answers if "error" not in answer]
    errors = [answer["error"] for answer in answers if "error" in answer]
    if errors:
        row["error"] = errors[0]
    if not good:
        return row
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
    return row


def with_distance(rows: list[Row]) -> list[Row]:
    """Whoever trains differently is not compared: the last loss is held against the first row's."""
    measured = [row for row in rows if "losses" in row]
    for row in measured:
        row["distance"] = distance(row["losses"][-1:], measured[0]["losses"][-1:])
        if row["distance"] > NOT_COMPARABLE:
            row["error"] = "NO RESULT: trains differently"
    return rows


@dataclass(frozen=True)
class Offloaded:
    """A protocol with optimizer state off the GPU. ``sizes``: tried in order until one fails."""

    sizes: tuple[str, ...]
    rows: int
    peers: tuple[Line, ...]
    offload: str = "cpu"
    steps: int = 8

    def __call__(self, bench: Bench) -> list[Row]:
        own = Line("ZeroShard", 2)
        probed = bench.turn("probe", own, "tiny", offload=self.offload)
        if "error" in probed:
            return [{"system": own.name, "error": probed["error"]}]
        if probed["refused"]:
            return [{"system": own.name, "error": "needs offload_optimizer: not in this version",
                     "refused": probed["refused"]}]  # fmt: skip
        lines = [line for line in bench.chosen((own, *self.peers)) if line.installed]
        given = {"offload": self.offload, "recompute": True}
        options = {"warm_up": 2, "steps": self.steps}
        rows: list[Row] = []
        for size in self.sizes:
            rows += compared(bench, lines, size, turns=1, rows=self.rows, **given, options=options)
            failed = {row["system"] for row in rows if "error" in row}
            lines = [line for line in lines if line.name not in failed]
        return rows


_PEERS = (Line("DeepSpeed", 2), Line("FSDP2"))
B2 = Offloaded(("7B",), 4, _PEERS)
B3 = Offloaded(
    ("7B", "10B", "14B", "16B", "18B"), 8, (Line("DeepSpeed", 3), Line("FSDP2")), steps=18
)
B4 = Offloaded(("14B",), 8, (Line("DeepSpeed", 3),))
B5 = Offloaded(("3B",), 4, (Line("DeepSpeed", 3),), offload="nvme")

B6_LINES = (
    *(Line("ZeroShard", stage, kind) for kind in ("bf16", "fp16") for stage in range(4)),
    Line("plain"), Line("FSDP2"), Line("DeepSpeed", 1), Line("DeepSpeed", 3),
)  # fmt: skip


def b6(bench: Bench) -> list[Row]:
    """Waits and driver calls of one step of a small model; the smaller, the easier to see."""
    rows: list[Row] = []
    for line in bench.chosen(B6_LINES):
        if not line.installed:
            rows.append({"system": line.name, "error": "not installed"})
            continue
        # A scale that overflows at no step: a skipped step tells its reason, and that waits.
        extra = (
            {"fp16": {"enabled": True, "initial_scale_power": 8}}
            if line.precision == "fp16"
            else {}
        )
        answer = bench.turn("audit", line, "0.1B", extra=extra)
        rows.append({"system": line.name, "precision": line.precision, **answer})
    return rows


# ---------------------------------------------------------------------- tables


def cell(row: Row, key: str, form: str = "{:.1f}", scale: float = 1.0) -> str:
    value = row.get(key)
    return "-" if value is None else form.format(value * scale)


def show_checks(rows: list[Row]) -> Table:
    table = Table("check", "holds")
    for row in rows:
        table.add_row(row["check"], row["result"])
    return table


def show_speed(rows: list[Row]) -> Table:
    table = Table("model", "system", "tokens/s", "MFU %", "step ms", "min", "fwd", "bwd", "update",
                  "host CPU ms", "alloc GiB", "reserved", "loss distance")  # fmt: skip
    for row in rows:
        table.add_row(
            row.get("model", "-"), row["system"], cell(row, "tokens_per_s", "{:.0f}"),
            cell(row, "mfu", "{:.1f}", 100), cell(row, "step_ms"), cell(row, "min_ms"),
            cell(row, "forward_ms"), cell(row, "backward_ms"), cell(row, "update_ms"),
            cell(row, "host_cpu_ms"), cell(row, "allocated_nbytes", "{:.1f}", 2**-30),
            cell(row, "reserved_nbytes", "{:.1f}", 2**-30), cell(row, "distance", "{:.1e}"),
        )  # fmt: skip
    return table


def show_waits(rows: list[Row]) -> Table:
    table = Table("system", "dtype", "waits", "raises in", "waits behind a sleeping GPU",
                  "driver calls after step 3")  # fmt: skip
    for row in rows:
        asleep = row.get("behind_sleep", {})
        waited = [key.removesuffix("_waited") for key, yes in asleep.items() if yes is True]
        calls = row.get("driver_calls_after_step_3", {})
        error = row.get("first_error")
        measured = "behind_sleep" in row
        table.add_row(
            row["system"], row.get("precision", "-"),
            str(len(row["waits"])) if "waits" in row else "-",
            "-" if not measured else (error["phase"] if error else "nothing"),
            "-" if not measured else (waited[0] if waited else "nowhere"),
            ", ".join(f"{name} {count}" for name, count in calls.items() if count)
            or ("0" if calls else "-"),
        )  # fmt: skip
    return table


def places_of(rows: list[Row]) -> list[str]:
    """Each place that waits, once, with who goes through it."""
    found: dict[str, set[str]] = {}
    for row in rows:
        who = f"{row.get('system', '')} {row.get('precision', '')}".strip()
        for wait in row.get("waits", ()):
            found.setdefault(" > ".join(wait["frames"][-2:]), set()).add(f"{who} ({wait['phase']})")
        if error := row.get("first_error"):
            found.setdefault(" > ".join(error["frames"][-2:]), set()).add(f"{who} (raises)")
    return [f"{place}\n    {', '.join(sorted(users))}" for place, users in found.items()]


def remarks_of(rows: list[Row]) -> list[str]:
    """What went wrong, and how the library puts it."""
    texts = []
    for row in rows:
        if "error" in row:
            who = " ".join(row[key] for key in ("system", "precision", "model") if key in row)
            texts.append(f"{who}: {row['error']}")
        texts += [f"    {line.strip()}" for line in row.get("refused", "").splitlines()[-1:]]
    return texts


@dataclass(frozen=True)
class Protocol:
    """``weight``: its share of the time."""

    question: str
    weight: float
    run: Callable[[Bench], list[Row]]
    show: Callable[[list[Row]], Table] = show_speed


PROTOCOLS = {
    "checks": Protocol("Are the numbers right?", 90, check_numbers, show_checks),
    "B6": Protocol("Does a step wait for the GPU, or call its driver?", 125, b6, show_waits),
    "B1": Protocol("1.5 B and 3 B, 2 K tokens, everything on the GPU", 285, b1),
    "B2": Protocol("7 B, 8 K tokens, optimizer state on the host", 20, B2),
    "B3": Protocol("The largest model, state on GPU and host, 16 K tokens", 20, B3),
    "B4": Protocol("14 B, 16 K tokens, optimizer state on the host", 20, B4),
    "B5": Protocol("3 B, 8 K tokens, optimizer state on disk", 20, B5),
}
MACHINE_WEIGHT = 20.0


def main() -> int:
    """Parse, refuse or measure, show, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true", help="the protocols, and nothing else")
    parser.add_argument("--only", nargs="+", choices=list(PROTOCOLS), help="some of the protocols")
    parser.add_argument("--minutes", type=float, default=10.0, help="for everything together")
    parser.add_argument("--rehearse", action="store_true", help="tiny models on a CPU; not written")
    parser.add_argument(
        "--systems", nargs="+", default=(), help='such as plain "ZeroShard stage 3"'
    )
    parser.add_argument("--folder", default="/tmp", help="where B5 may keep state")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<date>-gpu.json")
    given = parser.parse_args()
    chosen = {name: PROTOCOLS[name] for name in PROTOCOLS if name in (given.only or PROTOCOLS)}
    seconds = budgets(
        {"machine": MACHINE_WEIGHT, **{name: p.weight for name, p in chosen.items()}}, given.minutes
    )
    if given.list:
        for name, protocol in chosen.items():
            print(f"{name:<7}{seconds[name]:>5.0f} s  {protocol.question}")
        return 0
    if not given.rehearse and not has_cuda():
        print("benchmarks/gpu needs a CUDA GPU, and PyTorch finds none here; nothing was measured.",
              file=sys.stderr)  # fmt: skip
        return 2
    bench = Bench(rehearses=given.rehearse, folder=given.folder, systems=given.systems)
    path = given.out or RESULTS / f"{datetime.date.today().isoformat()}-gpu.json"
    results: dict[str, list[Row]] = {}
    for _ in measure(bench, chosen, seconds, results):
        if not given.rehearse:  # after each protocol: a run that is ended early leaves what it has
            write(path, bench, results, given.minutes)
    print("A rehearsal: its numbers say nothing and were not written." if given.rehearse
          else f"written: {path}")  # fmt: skip
    failed = [r for r in results.get("checks", ()) if r["result"] != "yes"]
    return 1 if failed else 0


def has_cuda() -> bool:
    """Asked without touching the GPU: turns want all of its memory."""
    import torch

    return torch.cuda.is_available()


def measure(
    bench: Bench,
    chosen: dict[str, Protocol],
    seconds: dict[str, float],
    results: dict[str, list[Row]],
) -> Iterator[str]:
    """Run the protocols one after the other, each within its time, and show what each found.

    Yields the name of each when its rows are in ``results``.
    """
    bench.allow(seconds["machine"])
    options = {"scale": 0.01} if bench.rehearses else {}
    bench.machine = bench.turn("machine", Line("ZeroShard"), "tiny", options=options)
    bench.console.print(bench.machine)
    for name, protocol in chosen.items():
        bench.console.rule(f"{name}: {protocol.question} ({seconds[name]:.0f} s)")
        bench.allow(seconds[name])
        rows = results[name] = protocol.run(bench)
        if any(
            len(row.keys() - {"system", "model", "precision", "error", "refused"}) for row in rows
        ):
            bench.console.print(protocol.show(rows))
        for text in (*remarks_of(rows), *places_of(rows)):
            bench.console.print(text, markup=False, highlight=False)
        if any(row.get("error") == OUT_OF_TIME for row in rows):
            bench.console.print(f"{name} ran out of its time: --only {name} gives it more.")
        yield name


def write(path: Path, bench: Bench, results: dict[str, list[Row]], minutes: float) -> None:
    """Keep everything that was measured, and what it was measured on."""
    content = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "minutes": minutes,
        "machine": bench.machine,
        "peak_tflops_as_sold": peak_tflops(bench.machine.get("gpu", "")),
        "models": {name: {**vars(shape), "numel": shape.numel} for name, shape in SHAPES.items()},
        "protocols": results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
