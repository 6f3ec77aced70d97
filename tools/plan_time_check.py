"""Compares planned step times with real runs of two ranks.

Writes the table of ``docs/plan-reference.md``.

    python tools/plan_time_check.py            # measures this machine, prints the table; takes minutes
    python tools/plan_time_check.py --write    # and puts it into the page

Small models of Transformers with random weights, on the CPU. Seconds are those of the CPU time of a
rank's process: medians of steps, and of these the mean of both ranks. Other load on the machine changes
them less than it changes the time of the clock, but not by nothing; the table says how much there was.
Needs Transformers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from plan_check import _IDS, PAGE
from torch import nn
from zeroshard_testing.ranks import run_ranks

import zeroshard
from zeroshard.config.machine_file import MachineFile, load_machine
from zeroshard.core.mesh import Mesh
from zeroshard.planner.measure import Load, measure, read_load
from zeroshard.planner.model_source import loss_of
from zeroshard.planner.simulate import simulate
from zeroshard.planner.step_time import StepTime, stage_times

BEGIN, END = "<!-- plan_time_check.py: begin -->", "<!-- plan_time_check.py: end -->"

RANKS, WORDS, WARM, STEPS = 2, 4096, 2, 9
NEAR = 0.2
"""A prediction that is off by no more than this fraction is near."""

APART = 1.3
"""Configurations whose order is compared differ by at least this factor."""


@dataclass(frozen=True)
class Run:
    """One configuration."""

    family: str
    stage: int
    checkpointed: bool
    width: int
    layers: int
    batch: int
    tokens: int

    @property
    def text(self) -> str:
        """The first cells of its row."""
        how = "yes" if self.checkpointed else "no"
        size = f"{self.layers} x {self.width}, {self.batch} x {self.tokens}"
        return f"{self.family} | {self.stage} | {how} | {size}"


RUNS = [
    Run("t5", 0, False, 128, 2, 2, 64),
    Run("gpt2", 2, True, 128, 4, 4, 64),
    Run("llama", 3, False, 256, 4, 4, 64),
    Run("t5", 3, True, 256, 2, 4, 64),
    Run("bert", 2, True, 256, 4, 4, 128),
    Run("gpt2", 3, False, 256, 4, 4, 128),
    Run("llama", 0, True, 256, 6, 4, 128),
    Run("bert", 1, False, 384, 4, 8, 128),
    Run("llama", 3, True, 512, 4, 4, 128),
    Run("gpt2", 1, False, 512, 6, 8, 128),
]


def build(run: Run) -> Callable[[], nn.Module]:
    """A function that makes the model of a run."""
    import transformers

    layers = {"hidden_size": run.width, "num_hidden_layers": run.layers, "num_attention_heads": 4}
    name, sizes = {
        "gpt2": (
            "GPT2LMHeadModel",
            {"n_layer": run.layers, "n_embd": run.width, "n_head": 4, "n_positions": run.tokens},
        ),
        "llama": (
            "LlamaForCausalLM",
            {**layers, "num_key_value_heads": 4, "intermediate_size": 3 * run.width},
        ),
        "bert": ("BertForMaskedLM", {**layers, "intermediate_size": 4 * run.width}),
        "t5": (
            "T5ForConditionalGeneration",
            {
                "d_model": run.width,
                "d_ff": 4 * run.width,
                "num_layers": run.layers,
                "num_heads": 4,
                "d_kv": run.width // 4,
            },
        ),
    }[run.family]

    def made() -> nn.Module:
        config = transformers.AutoConfig.for_model(run.family, vocab_size=WORDS, **_IDS, **sizes)
        config.use_cache = False
        model: Any = getattr(transformers, name)(config)
        if run.checkpointed:
            model.gradient_checkpointing_enable()
        found: nn.Module = model.train()
        return found

    return made


def settings(run: Run) -> dict[str, Any]:
    """The configuration of a run."""
    return {
        "train_micro_batch_size_per_gpu": run.batch,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": run.stage},
    }


def _batch(run: Run) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, WORDS, (run.batch, run.tokens))
    return {"input_ids": ids, "labels": ids.clone()}


def _train(run: Run) -> float:
    """CPU seconds of a step of this rank, the median."""
    torch.set_num_threads(1)
    engine, *_ = zeroshard.initialize(model=build(run)(), config=settings(run))
    batch = _batch(run)
    seconds = []
    for _ in range(WARM + STEPS):
        begin = time.process_time()
        engine.backward(engine(**batch).loss)
        engine.step()
        seconds.append(time.process_time() - begin)
    engine.close()
    return float(statistics.median(seconds[WARM:]))


def measured_s(run: Run) -> float:
    """CPU seconds of a step on one of two ranks."""
    return float(statistics.mean(run_ranks(_train, RANKS, run, timeout=300)))


def predicted(run: Run, machine: MachineFile) -> StepTime:
    """The plan's time of the same step."""
    mesh = Mesh(data_shard=RANKS)
    pair = (_batch(run), None)
    found = simulate(
        build(run), settings(run), pair, mesh=mesh, rank=0, loss_fn=loss_of, with_events=True
    )
    samples = RANKS * run.batch
    return stage_times([found], machine, samples=samples, tokens=samples * run.tokens)[0]


def apart(pairs: Sequence[tuple[float, float]], factor: float = APART) -> list[tuple[float, float]]:
    """Those pairs, by their first number, of which each is at least ``factor`` above the one before.

    >>> apart([(3.0, 0.0), (1.0, 0.0), (1.2, 0.0), (1.4, 0.0)])
    [(1.0, 0.0), (1.4, 0.0), (3.0, 0.0)]
    """
    found: list[tuple[float, float]] = []
    for pair in sorted(pairs):
        if not found or pair[0] >= factor * found[-1][0]:
            found.append(pair)
    return found


def spearman(pairs: Sequence[tuple[float, float]]) -> float:
    """The rank correlation of pairs without equal numbers.

    >>> spearman([(1, 10), (2, 30), (3, 20)])
    0.5
    """
    first, second = zip(*pairs, strict=True)
    count = len(pairs)
    squares = sum((sorted(first).index(a) - sorted(second).index(b)) ** 2 for a, b in pairs)
    return 1 - 6 * squares / float(count * (count**2 - 1))


def _rows(machine: MachineFile, loads: list[Load]) -> list[str]:
    rows = [
        "| model | stage | checkpointed | layers x width, batch x tokens | real, ms | planned | off |",
        "|---|--:|---|---|--:|--:|--:|",
    ]
    pairs = []
    for run in RUNS:
        real, plan = measured_s(run), predicted(run, machine).total_s
        loads.append(read_load())
        pairs.append((real, plan))
        rows.append(
            f"| {run.text} | {1e3 * real:.0f} | {1e3 * plan:.0f} | {plan / real - 1:+.0%} |"
        )
        print(rows[-1], file=sys.stderr, flush=True)
    near = sum(abs(plan / real - 1) <= NEAR for real, plan in pairs)
    ordered = apart(pairs)
    busy = statistics.median(load.busy_cores for load in loads)
    average = statistics.median(load.average for load in loads)
    rows += [
        "",
        f"{near} of {len(pairs)} are within {NEAR:.0%}. The {len(ordered)} that differ by {APART} or "
        f"more have a rank correlation (Spearman) of {spearman(ordered):.2f}. Between the runs "
        f"other programs used {busy:.1f} of {loads[0].cores} cores (median), with a load average of "
        f"{average:.1f}.",
    ]
    return rows


def main() -> None:
    """Measure the machine and compare all runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into the page")
    parser.add_argument("--machine", help="a file that was measured before")
    given = parser.parse_args()
    loads = [read_load()]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "machine.toml"
        machine = load_machine(given.machine) if given.machine else measure(file, load=None)
    table = "\n".join(_rows(machine, loads))
    print(table)
    if given.write:
        page = PAGE.read_text()
        before, after = page.split(BEGIN)[0], page.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


if __name__ == "__main__":
    main()
