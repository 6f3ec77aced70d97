"""What does a training step cost beside DDP, FSDP2 and DeepSpeed, on CPU ranks of this machine?

    python benchmarks/sanity.py                 # everything that is installed, about four minutes
    python benchmarks/sanity.py --only stock    # lines whose name contains a word

Every system is a team of processes that stays alive; the teams take turns in short bursts of
steps, so that whatever else the machine does meets all of them. While one team works the others
sleep. The measure is CPU time of the process (``time.process_time``: all its threads, waiting not
included), which a loaded machine changes much less than wall time; that is shown beside it.

Peers come with the extra ``zeroshard[bench]``; see benchmarks/README.md. A peer that is missing is
reported as missing.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import multiprocessing
import os
import platform
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Any

from models import Shape, batches, build
from systems import ADAMW, CLIP, System, Trainer, catalogue, prepare_process

RESULTS = Path(__file__).parent / "results"
NOISE = 0.005
"""Largest relative distance of a loss from the other systems' that bf16 may explain. (The same model in
fp32 and under bf16 autocast, in one process: 0.0002 over 20 steps.)"""

PHASES = ("forward", "backward", "step")


@dataclass(frozen=True)
class Options:
    """The sizes of one comparison."""

    ranks: int
    tokens: int
    warm_up: int
    rounds: int
    burst: int
    shape: Shape


# ---------------------------------------------------------------------- one rank of one system


def work(connection: Connection, name: str, rank: int, meeting: str, options: Options) -> None:
    """Build the system, then answer each number ``n`` that comes with records of ``n`` steps."""
    try:
        _serve(connection, name, rank, meeting, options)
    except EOFError:
        pass  # the program that asks has gone
    except BaseException as error:
        short = traceback.format_exception_only(error)[-1].strip()
        connection.send(("error", f"rank {rank}: {short}", traceback.format_exc()))


def _serve(connection: Connection, name: str, rank: int, meeting: str, options: Options) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": options.ranks}
    os.environ |= {key: str(value) for key, value in place.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
    prepare_process()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(meeting, options.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    system = next(system for system in catalogue() if system.name == name)
    trainer = system.build(build(options.shape))
    data = batches(options.shape, rank=rank, tokens=options.tokens)
    done = 0
    connection.send(("ready",))
    while (steps := connection.recv()) is not None:
        records = []
        for _ in range(steps):
            records.append(_one_step(trainer, *data[done % len(data)]))
            done += 1
        connection.send(("steps", records))
    trainer.close()
    dist.destroy_process_group()
    connection.send(("closed",))


def _one_step(trainer: Trainer, tokens: Any, targets: Any) -> dict[str, float]:
    """CPU seconds of this process in each part of the step, wall seconds of the whole, the loss."""
    wall, at = time.perf_counter(), [time.process_time()]
    loss = trainer.forward(tokens, targets)
    at.append(time.process_time())
    trainer.backward(loss)
    at.append(time.process_time())
    trainer.step()
    at.append(time.process_time())
    parts = {phase: at[i + 1] - at[i] for i, phase in enumerate(PHASES)}
    return {**parts, "wall": time.perf_counter() - wall, "loss": float(loss.detach())}


# ---------------------------------------------------------------------- all ranks of one system


@dataclass(eq=False)
class Team:
    """The ranks of one system, and what they measured: ``steps[i]`` is a mean over ranks."""

    system: System
    options: Options
    steps: list[dict[str, float]] = field(default_factory=list)
    error: str = ""
    _ends: list[Connection] = field(default_factory=list)
    _processes: list[BaseProcess] = field(default_factory=list)

    def start(self, context: Any, folder: str) -> None:
        """Build the system on all its ranks."""
        meeting = tempfile.mktemp(dir=folder)
        for rank in range(self.options.ranks):
            end, far = context.Pipe()
            process = context.Process(
                target=work, args=(far, self.system.name, rank, meeting, self.options), daemon=True
            )
            process.start()
            far.close()
            self._ends.append(end)
            self._processes.append(process)
        self._answers()

    def take(self, steps: int, *, keep: bool) -> None:
        """Train for some steps; ``keep`` marks them as measured."""
        if self.error:
            return
        for end in self._ends:
            end.send(steps)
        answers = self._answers()
        if self.error:
            return
        for records in zip(*(answer[1] for answer in answers), strict=True):
            step = {key: sum(r[key] for r in records) / len(records) for key in records[0]}
            step["wall"] = max(record["wall"] for record in records)
            step["cpu"] = sum(step[phase] for phase in PHASES)
            self.steps.append({**step, "timed": keep})

    def _answers(self) -> list[Any]:
        """One message of every rank, or none of them and ``error``."""
        answers: list[Any] = [None] * len(self._ends)
        missing = set(range(len(self._ends)))
        while missing and not self.error:
            ready = wait([self._ends[rank] for rank in missing], timeout=300)
            if not ready:
                self.error = "no answer for 300 s"
            for end in ready:
                rank = self._ends.index(end)  # type: ignore[arg-type]
                try:
                    answers[rank] = self._ends[rank].recv()
                except EOFError:
                    self.error = f"rank {rank} died"
                    break
                missing.discard(rank)
                if answers[rank][0] == "error":
                    self.error = answers[rank][1]
                    print(answers[rank][2])
        if self.error:
            self.stop()
        return answers

    def stop(self) -> None:
        """End the ranks: politely, or at once after an error."""
        if not self.error:
            for end in self._ends:
                end.send(None)
            self._answers()
        for process in self._processes:
            if self.error:
                process.terminate()
            process.join(30)
            process.kill()
        self._processes = []

    # ------------------------------------------------------------------ what was measured

    def milliseconds(self, key: str) -> list[float]:
        """One number per measured step: CPU per rank, or wall of the slowest rank."""
        return [1000 * step[key] for step in self.steps if step["timed"]]

    @property
    def losses(self) -> list[float]:
        """The loss of every step from the first on, mean over ranks."""
        return [step["loss"] for step in self.steps]


def measure(systems: list[System], options: Options, say: Any) -> list[Team]:
    """Run all systems in turns. Teams are built one after the other and sleep between turns."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    teams = [Team(system, options) for system in systems]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        for team in teams:
            say(f"building {team.system.name}")
            team.start(context, folder)
            running.callback(lambda team=team: team.error or team.stop())
            team.take(options.warm_up, keep=False)
        for turn in range(options.rounds):
            for team in teams if turn % 2 == 0 else reversed(teams):
                say(f"round {turn + 1} of {options.rounds}: {team.system.name}")
                team.take(options.burst, keep=True)
    return teams


# ---------------------------------------------------------------------- the result


def summary(teams: list[Team]) -> list[dict[str, Any]]:
    """One row per system: statistics, and how far its losses are from the others'.

    The centre is the median over libraries, one curve each: no library outvotes the others.
    """
    trained = [team for team in reversed(teams) if team.system.trains and not team.error]
    curves = {team.system.family.split()[0]: team.losses for team in trained}
    centre = [median(column) for column in zip(*curves.values(), strict=True)]
    rows = []
    for team in teams:
        row: dict[str, Any] = {
            "name": team.system.name,
            "family": team.system.family,
            "version": team.system.version,
            "setting": team.system.setting,
        }
        if team.error:
            rows.append({**row, "error": team.error})
            continue
        for key in ("cpu", "wall", *PHASES):
            values = team.milliseconds(key)
            row[f"{key}_ms"] = {
                "median": median(values), "min": min(values), "max": max(values)
            }  # fmt: skip
        row["steps"] = len(team.milliseconds("cpu"))
        row["losses"] = team.losses
        if team.system.trains:
            away = [abs(a - b) / b for a, b in zip(team.losses, centre, strict=True)]
            row["loss_distance"] = max(away)
            row["comparable"] = max(away) <= NOISE
        rows.append(row)
    return rows


def best_peer(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The DeepSpeed or FSDP2 line with the least CPU time per step."""
    peers = [r for r in rows if r["family"] in ("DeepSpeed", "FSDP2") and r.get("comparable")]
    return min(peers, key=lambda row: row["cpu_ms"]["median"], default=None)


def show(rows: list[dict[str, Any]], missing: list[System], options: Options) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    best = best_peer(rows)
    table = Table(
        title=f"CPU ms per step and rank: {options.ranks} ranks x 1 thread, "
        f"{options.tokens} tokens per rank, gloo"
    )
    table.add_column("system", no_wrap=True)
    for head in ("median", "min", "max", *PHASES, "wall", "loss", "distance", "peer / it"):
        table.add_column(head, justify="right")
    for row in rows:
        if "error" in row:
            table.add_row(row["name"], "failed")
            continue
        cpu = row["cpu_ms"]
        ratio = best["cpu_ms"]["median"] / cpu["median"] if best else None
        away = row.get("loss_distance")
        table.add_row(
            row["name"],
            *(f"{cpu[key]:.0f}" for key in ("median", "min", "max")),
            *(f"{row[f'{phase}_ms']['median']:.0f}" for phase in PHASES),
            f"{row['wall_ms']['median']:.0f}",
            "-" if away is None else f"{row['losses'][-1]:.4f}",
            "-" if away is None else f"{away:.1e}" + ("" if row["comparable"] else " NO RESULT"),
            "-" if ratio is None or away is None else f"{ratio:.2f}",
        )
    for system in {system.library: system for system in missing}.values():
        lines = sum(1 for other in missing if other.library == system.library)
        table.add_row(f"{system.family} ({lines} lines): not installed")
    console = Console()
    console = console if console.is_terminal else Console(width=124)
    console.print(table)
    for row in rows:
        if "error" in row:
            console.print(f"{row['name']} failed: {row['error']}", style="red")
    if missing:
        console.print("How to install the peers: benchmarks/README.md", style="dim")
    own = [row for row in rows if row["family"].startswith("ZeroShard") and "losses" in row]
    if len(own) > 1:
        same = all(row["losses"] == own[0]["losses"] for row in own)
        console.print(f"ZeroShard's {len(own)} loss curves are {'' if same else 'NOT '}bit-equal.")


def write(rows: list[dict[str, Any]], missing: list[System], options: Options, path: Path) -> None:
    """Keep everything that was measured, and what it was measured on."""
    import torch

    result = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": {
            "cores": os.cpu_count(),
            "processor": _processor(),
            "load_average": os.getloadavg(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "settings": {
            "ranks": options.ranks,
            "threads_per_rank": 1,
            "tokens_per_rank": options.tokens,
            "model": vars(options.shape),
            "parameters": sum(p.numel() for p in build(options.shape).parameters()),
            "adamw": ADAMW,
            "clip": CLIP,
            "warm_up_steps": options.warm_up,
            "rounds": options.rounds,
            "steps_per_turn": options.burst,
        },
        "unit": "milliseconds per step; cpu is process time, mean over ranks",
        "systems": rows,
        "not_installed": sorted({system.library for system in missing}),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {path}")


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def main() -> None:
    """Parse, measure, show, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128, help="per rank and step")
    parser.add_argument("--warm-up", type=int, default=3, help="first steps, not timed")
    parser.add_argument("--rounds", type=int, default=3, help="turns of every system")
    parser.add_argument("--burst", type=int, default=4, help="steps per turn")
    parser.add_argument("--layers", type=int, default=Shape.layers)
    parser.add_argument("--only", nargs="*", default=[], help="lines with one of these words")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<date>-cpu.json")
    given = parser.parse_args()
    shape = Shape(layers=given.layers, context=given.tokens)
    options = Options(given.ranks, given.tokens, given.warm_up, given.rounds, given.burst, shape)
    chosen = [
        system
        for system in catalogue()
        if not given.only or any(word.lower() in system.name.lower() for word in given.only)
    ]
    missing = [system for system in chosen if system.version is None]
    began = time.monotonic()
    teams = measure(
        [system for system in chosen if system not in missing],
        options,
        lambda text: print(f"{time.monotonic() - began:5.0f} s  {text}", flush=True),
    )
    rows = summary(teams)
    show(rows, missing, options)
    path = given.out or RESULTS / f"{datetime.date.today().isoformat()}-cpu.json"
    write(rows, missing, options, path)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
