"""Compares plans with real runs of two ranks, and writes the table of ``docs/plan.md``.

    python tools/plan_check.py            # prints the table; takes about two minutes
    python tools/plan_check.py --write    # and puts it into the page

Small models of Transformers with random weights, on the CPU. A row that differs in anything but the peak,
or whose peak is more than 2 % off, ends the run. Needs Transformers.
"""

from __future__ import annotations

import argparse
import itertools
import pickle
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroshard.core.mesh import Mesh
from zeroshard.planner.model_source import loss_of
from zeroshard.planner.simulate import Simulation, observe, simulate
from zeroshard.testing.ranks import run_ranks

PAGE = Path(__file__).parents[1] / "docs/plan.md"
BEGIN, END = "<!-- plan_check.py: begin -->", "<!-- plan_check.py: end -->"

RANKS, BATCH, TOKENS, WORDS, WIDTH = 2, 4, 32, 512, 64
TOLERANCE = 0.02
"""How far a planned peak may be from the real one, as a fraction."""

_IDS = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 0}
_LAYERS = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
FAMILIES: dict[str, tuple[str, dict[str, int]]] = {
    "gpt2": ("GPT2LMHeadModel", {"n_layer": 2, "n_embd": WIDTH, "n_head": 2, "n_positions": TOKENS}),
    "llama": ("LlamaForCausalLM", {**_LAYERS, "num_key_value_heads": 2, "intermediate_size": 128}),
    "bert": ("BertForMaskedLM", {**_LAYERS, "intermediate_size": 128}),
    "t5": (
        "T5ForConditionalGeneration",
        {"d_model": WIDTH, "d_ff": 128, "num_layers": 2, "num_heads": 2, "d_kv": 32},
    ),
}  # fmt: skip
"""The class in Transformers of each family, and its sizes."""


@dataclass(frozen=True)
class Case:
    """One run: family, stage, whether layers are checkpointed and the optimizer is in host memory."""

    family: str
    stage: int
    checkpointed: bool
    offloaded: bool


ALL = [
    Case(family, stage, *switches)
    for family, stage in itertools.product(FAMILIES, range(4))
    for switches in itertools.product((False, True), repeat=2)
    if stage or not switches[1]
]
"""Without offload at stage 0, which is a mistake in a configuration."""


def pairwise() -> list[Case]:
    """16 cases. Every two values that can be together in a case are so in one of them."""
    return [
        Case(family, stage, (at + stage) % 2 == 1, stage > 0 and (at // 2 + stage) % 2 == 1)
        for at, family in enumerate(FAMILIES)
        for stage in range(4)
    ]


def build(case: Case) -> Callable[[], nn.Module]:
    """A function that makes the model of a case."""
    import transformers

    name, sizes = FAMILIES[case.family]

    def made() -> nn.Module:
        config = transformers.AutoConfig.for_model(case.family, vocab_size=WORDS, **_IDS, **sizes)
        config.use_cache = False
        model: Any = getattr(transformers, name)(config)
        if case.checkpointed:
            model.gradient_checkpointing_enable()
        found: nn.Module = model.train()
        return found

    return made


def settings(case: Case) -> dict[str, Any]:
    """The configuration of a case."""
    zero: dict[str, Any] = {"stage": case.stage}
    if case.offloaded:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
    }


def _batch() -> tuple[dict[str, torch.Tensor], None]:
    ids = torch.randint(2, WORDS, (BATCH, TOKENS))
    return {"input_ids": ids, "labels": ids.clone()}, None


def _observe(case: Case, path: str) -> None:
    found = observe(build(case), settings(case), _batch(), loss_fn=loss_of)
    if found.rank == 0:
        Path(path).write_bytes(pickle.dumps(found))


def run_and_plan(case: Case) -> tuple[Simulation, Simulation]:
    """What rank 0 of a real run needed, and what its plan says."""
    with tempfile.NamedTemporaryFile() as file:
        run_ranks(_observe, RANKS, case, file.name, timeout=120)
        real: Simulation = pickle.loads(file.read())  # our own file
    mesh = Mesh(data_shard=RANKS)
    plan = simulate(build(case), settings(case), _batch(), mesh=mesh, rank=0, loss_fn=loss_of)
    return real, plan


def differences(real: Simulation, plan: Simulation) -> list[str]:
    """In what a plan differs from its run, in words: bytes of states and temporaries, and traffic.

    Without "scratch", which has the memory of the transport in a real run only.
    """
    return [
        f"{key}: real {ours.get(key)!r}, planned {said.get(key)!r}"
        for table in (_held, _moved)
        for ours, said in [(table(real), table(plan))]
        for key in {**ours, **said}
        if ours.get(key) != said.get(key)
    ]


def _held(found: Simulation) -> dict[tuple[str, ...], Any]:
    rows = [row for row in found.memory if row.category != "scratch"]
    return {(row.category, row.tier): row.measured for row in rows}


def _moved(found: Simulation) -> dict[tuple[str, ...], Any]:
    return {
        (row.group, row.op, row.name): (row.calls, row.numel, row.sent_numel)
        for row in found.traffic
    }


def offs(real: Simulation, plan: Simulation) -> dict[str, float]:
    """Of each phase, how far the planned peak is above the real one, as a fraction."""
    return {
        name: plan.moments[name].device_nbytes / moment.device_nbytes - 1
        for name, moment in real.moments.items()
    }


def _rows() -> list[str]:
    rows = [
        "| model | stage | checkpointed | offloaded | real peak, bytes | planned | off | worst phase |",
        "|---|--:|---|---|--:|--:|--:|--:|",
    ]
    for case in ALL:
        real, plan = run_and_plan(case)
        if wrong := differences(real, plan):
            sys.exit(f"{case}: {wrong}")
        off = plan.peak_nbytes / real.peak_nbytes - 1
        worst = max(offs(real, plan).items(), key=lambda item: abs(item[1]))
        if abs(worst[1]) > TOLERANCE:
            sys.exit(f"{case}: the planned peak of {worst[0]} is {worst[1]:+.2%} off")
        rows.append(
            f"| {case.family} | {case.stage} | {'yes' if case.checkpointed else 'no'} | "
            f"{'yes' if case.offloaded else 'no'} | {real.peak_nbytes:,} | {plan.peak_nbytes:,} | "
            f"{off:+.2%} | {worst[1]:+.2%} ({worst[0]}) |"
        )
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def main() -> None:
    """Compare all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into the page")
    write = parser.parse_args().write
    table = "\n".join(_rows())
    print(table)
    if write:
        page = PAGE.read_text()
        before, after = page.split(BEGIN)[0], page.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


if __name__ == "__main__":
    main()
