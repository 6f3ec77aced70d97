"""Plans the 7.5 B model of the ZeRO paper, and writes its table in ``docs/plan-reference.md``.

    python tools/zero_table.py            # prints the table; takes some minutes of CPU
    python tools/zero_table.py --write    # and puts it into the page

Each row is a ``zeroshard plan`` of its own process with one thread. A row whose states, traffic, CPU time
or memory is not as said here ends the run. Needs Transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plan_published import put

from zeroshard.core.layout import ALIGNMENT

PAGE = Path(__file__).parents[1] / "docs/plan-reference.md"
TABLE = "zero_table.py"

LAYERS, WIDTH, WORDS, TOKENS = 36, 4096, 60_089, 1024
MODEL = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": LAYERS, "n_embd": WIDTH,
    "n_head": 32, "vocab_size": WORDS, "n_positions": TOKENS,
}  # fmt: skip

ROWS = ((0, 64), (1, 64), (2, 64), (3, 64), (3, 4096))
"""Stage and ranks."""

PAPER = {(0, 64): "120", (1, 64): "31.4", (2, 64): "16.6", (3, 64): "1.9"}
"""GB of state: arXiv 1910.02054, figure 1."""

GATHERED_ONCE = ("root", "wpe", f"h.{LAYERS - 1}.mlp.c_proj")
"""Units that stage 3 does not gather for backward."""

LIMIT_S, LIMIT_NBYTES, LIMIT_RATIO = 20.0, 10**9, 1.2
"""What a plan may take: CPU time, memory, and the time of 4,096 ranks divided by that of 64."""

RUNS = 3
"""Of each row. The page has the median of the time, and the most memory."""


def unit_numels() -> dict[str, int]:
    """Parameters of every unit, by the formulas of GPT-2's layers. The head is tied to the words."""
    layer = {
        "": 4 * WIDTH,
        ".attn.c_attn": 3 * WIDTH * (WIDTH + 1),
        ".attn.c_proj": WIDTH * (WIDTH + 1),
        ".mlp.c_fc": 4 * WIDTH * (WIDTH + 1),
        ".mlp.c_proj": WIDTH * (4 * WIDTH + 1),
    }
    found = {f"h.{at}{name}": n for at in range(LAYERS) for name, n in layer.items()}
    return found | {"root": (WORDS + 2) * WIDTH, "wpe": TOKENS * WIDTH}


@dataclass(frozen=True)
class Need:
    """What is right for a row. ``state``: bytes, without step counts of AdamW; others are elements."""

    state: int
    gathered: int
    reduced: int
    once: tuple[str, ...]


def expected(stage: int, ranks: int) -> Need:
    """Section 3.1 and 7 of the paper, with each unit padded to shards of a multiple of 64 elements."""
    each = ALIGNMENT * ranks
    padded = {name: -(-n // each) * each for name, n in unit_numels().items()}
    whole, part = sum(padded.values()), sum(padded.values()) // ranks
    held = [part if stage >= level else whole for level in (3, 2, 1)]
    once = GATHERED_ONCE if stage == 3 else ()
    gathered = (2 if stage == 3 else 1) * whole - sum(padded[name] for name in once)
    return Need(2 * held[0] + 2 * held[1] + 12 * held[2], gathered, whole, once)


@dataclass(frozen=True)
class Row:
    """One planned row: what is measured of its processes, and its cells in the table."""

    stage: int
    ranks: int
    need: Need
    state: int
    seconds: float
    rss_nbytes: int

    def cells(self, ratio: str) -> str:
        """The row in Markdown. ``ratio``: the time of this row divided by that of 64 ranks."""
        psi = sum(unit_numels().values())
        moved = [f"{n / psi:.4f} Ψ" for n in (self.need.gathered, self.need.reduced)]
        once = ", ".join(f"`{name}`" for name in self.need.once)
        cells = [
            str(self.stage), f"{self.ranks:,}", f"{self.state / 1e9:.3f}",
            PAPER.get((self.stage, self.ranks), ""), *moved, once, f"{self.seconds:.1f}",
            f"{self.rss_nbytes / 1e9:.2f}", ratio,
        ]  # fmt: skip
        return f"| {' | '.join(cells)} |"


HEAD = (
    "| stage | ranks | state, GB | paper | gathered | reduced | units gathered once | CPU seconds "
    "| process, GB | time : 64 ranks |\n"
    "|---|--:|--:|--:|--:|--:|---|--:|--:|--:|"
)


def planned(stage: int, ranks: int, folder: Path) -> tuple[dict[str, Any], float, int]:
    """``zeroshard plan --json`` in a process of its own, its CPU seconds, and the bytes of its peak."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage},
    }
    model, keys, out = (folder / name for name in ("config.json", "ds.json", "plan.json"))
    model.write_text(json.dumps(MODEL))
    keys.write_text(json.dumps(config))
    command = [
        sys.executable, "-m", "zeroshard.cli.main", "plan", str(model), "--config", str(keys),
        "--ranks", str(ranks), "--seq", str(TOKENS), "--target", "cuda", "--json",
    ]  # fmt: skip
    # An installed package is compiled; the first run compiles a checkout.
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    with out.open("w") as file:
        process = subprocess.Popen(command, stdout=file, env=env)
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(
            f"stage {stage} on {ranks} ranks: the plan ended with {process.returncode}"
        )
    return json.loads(out.read_text()), _cpu_s(used), 1024 * used.ru_maxrss


def _cpu_s(used: resource.struct_rusage) -> float:
    return used.ru_utime + used.ru_stime


def differences(row: Row, plan: dict[str, Any]) -> list[str]:
    """What a row does not keep to, in words."""
    need, found = row.need, []
    over = row.state - need.state
    if not 0 <= over <= 4 * (12 * LAYERS + 4):  # AdamW has a step count for each parameter
        found.append(f"state is {row.state} bytes, not {need.state}")
    said = PAPER.get((row.stage, row.ranks))
    if said is not None and f"{row.state / 1e9:.{len(said.partition('.')[2])}f}" != said:
        found.append(f"state is {row.state / 1e9:.3f} GB, and {said} in the paper")
    calls = [each for each in plan["traffic"] if each["op"] != "gather_small"]  # some scalars
    for op, numel in (("all_gather", need.gathered), ("reduce_scatter", need.reduced)):
        moved = sum(each["numel"] for each in calls if each["op"] == op)
        if moved != numel:
            found.append(f"{op} moves {moved} elements, not {numel}")
    if others := {each["op"] for each in calls} - {"all_gather", "reduce_scatter"}:
        found.append(f"there are other collectives: {', '.join(sorted(others))}")
    once = {
        each["name"].removeprefix("transformer.")
        for each in calls
        if each["op"] == "all_gather" and each["calls"] == 1 and row.stage == 3
    }
    if once != set(need.once):
        found.append(f"gathered once are {sorted(once)}, not {sorted(need.once)}")
    if row.seconds > LIMIT_S:
        found.append(f"took {row.seconds:.1f} s of CPU, more than {LIMIT_S:.0f}")
    if row.rss_nbytes > LIMIT_NBYTES:
        found.append(f"took {row.rss_nbytes / 1e9:.2f} GB, more than {LIMIT_NBYTES / 1e9:.0f}")
    return found


def rows(runs: int = RUNS) -> list[Row]:
    """All rows, in turns ``runs`` times.

    Raises:
        SystemExit: a row does not keep to what is expected or to the limits.
    """
    plans: dict[tuple[int, int], dict[str, Any]] = {}
    took: dict[tuple[int, int], list[tuple[float, int]]] = {row: [] for row in ROWS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(runs):
            for stage, ranks in ROWS:
                plans[stage, ranks], cpu_s, nbytes = planned(stage, ranks, Path(folder))
                took[stage, ranks].append((cpu_s, nbytes))
                print(
                    f"stage {stage}, {ranks} ranks: {cpu_s:.1f} s, {nbytes / 1e9:.2f} GB",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
    found, wrong = [], []
    for (stage, ranks), plan in plans.items():
        seconds = [cpu_s for cpu_s, _ in took[stage, ranks]]
        nbytes = max(peak for _, peak in took[stage, ranks])
        row = Row(
            stage, ranks, expected(stage, ranks), plan["states_nbytes"],
            statistics.median(seconds), nbytes,
        )  # fmt: skip
        found.append(row)
        wrong += [f"stage {stage}, {ranks} ranks: {what}" for what in differences(row, plan)]
    if ratio_of(found) > LIMIT_RATIO:
        wrong.append(f"4,096 ranks take {ratio_of(found):.2f} times as long as 64")
    if wrong:
        raise SystemExit("\n".join(wrong))
    return found


def ratio_of(found: list[Row]) -> float:
    """The time of stage 3 on 4,096 ranks, divided by that on 64."""
    few, many = (row.seconds for row in found if row.stage == 3)
    return many / few


def table(found: list[Row]) -> list[str]:
    """The table in Markdown."""
    ratio = f"{ratio_of(found):.2f}"
    return [HEAD, *(row.cells(ratio if row.ranks > 64 else "") for row in found)]


def main() -> None:
    """Plan all rows; with ``--write`` put the table into the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--runs", type=int, default=RUNS, help="of each row; the median counts")
    given = parser.parse_args()
    lines = table(rows(given.runs))
    print("\n".join(lines))
    if given.write:
        PAGE.write_text(put(PAGE.read_text(), TABLE, lines))


if __name__ == "__main__":
    main()
