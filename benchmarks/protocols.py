"""The protocols in which all systems train the same task: tasks, lines and numbers of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from interleaving import Say
from models import GPTTask, Shape, StackTask
from systems import (
    ADAMW,
    CLIP,
    TRANSPORTS,
    System,
    ddp_line,
    deepspeed_line,
    floor_line,
    fsdp2_line,
    plain_line,
    zeroshard_line,
)
from training import Line, RunLength, compare

from zeroshard.precision.hardware import hardware_of

HARDWARE = hardware_of(torch.device("cpu"))
COMPUTE = "bf16" if HARDWARE.bf16 else "fp32"
"""The dtype of the GPT of A1, A2, A5, A6 and A8. On a CPU without bf16 instructions, bf16 matrix
products would dominate every step. The other protocols do few matrix products and always use bf16."""
STEP_NBYTES_PER_ELEMENT = 30
"""Bytes of memory traffic: gradient 2 + 2 (norm, update), parameter 2, master and both moments 8 each."""


@dataclass(frozen=True)
class Comparison:
    """One protocol in which every line trains the same task.

    ``small``: the lines of the smoke version; ``None`` means all.
    """

    key: str
    title: str
    task: GPTTask | StackTask
    lines: Sequence[Line]
    length: RunLength
    micro_batches: int = 1
    small: Sequence[str] | None = None

    def run(self, say: Say, *, smoke: bool, rounds: int | None = None) -> dict[str, Any]:
        """Measure all lines. Returns title, settings and rows."""
        chosen = self.smoke_version() if smoke else self
        task = chosen.task
        length = replace(chosen.length, rounds=rounds or chosen.length.rounds)
        rows = compare(self.key, chosen.lines, task, length, say, micro_batches=self.micro_batches)
        return {
            "title": self.title,
            "settings": {
                "task": asdict(task),
                "compute": COMPUTE if isinstance(task, GPTTask) else "bf16",
                "parameters": sum(p.numel() for p in task.model().parameters()),
                "micro_batches": self.micro_batches,
                "threads_per_rank": self.lines[0].threads,
                "adamw": ADAMW,
                "clip": CLIP,
                "warm_up_steps": length.warm_up,
                "rounds": length.rounds,
                "steps_per_turn": length.burst,
            },
            "rows": rows,
        }

    def smoke_version(self) -> Comparison:
        """A version that takes seconds: tiny models, few steps, some of the lines."""
        kept = [line for line in self.lines if self.small is None or line.title in self.small]
        if isinstance(self.task, GPTTask):
            shape = Shape(vocabulary=256, width=64, layers=2, heads=2, context=16)
            task: GPTTask | StackTask = GPTTask(shape, self.task.batch)
        else:
            task = replace(self.task, width=64, depth=min(self.task.depth, 20))
        return replace(self, task=task, lines=kept, length=RunLength(1, 2, 2))


# ---------------------------------------------------------------------- the lines


def _lines(*systems: Any, ranks: int = 2, threads: int = 1) -> list[Line]:
    return [Line(system, ranks, threads=threads) for system in systems]


def _transports() -> list[Line]:
    return _lines(
        *(zeroshard_line(stage, t, compute=COMPUTE) for t in TRANSPORTS for stage in (0, 1, 2, 3))
    )


def _peers(reduce: str = "") -> list[Line]:
    dtypes = {"compute": COMPUTE, "reduce": reduce}
    return _lines(
        ddp_line(COMPUTE),
        fsdp2_line(False, **dtypes),
        fsdp2_line(True, **dtypes),
        *(deepspeed_line(stage, **dtypes) for stage in (1, 2, 3)),
    )


def _zeroshard(reduce: str = "") -> list[Line]:
    return _lines(*(zeroshard_line(s, compute=COMPUTE, reduce=reduce) for s in (1, 2, 3)))


def _updates(threads: int = 1) -> list[Line]:
    return _lines(
        zeroshard_line(2),
        plain_line("PyTorch, fused", compared=True, fused=True),
        plain_line("PyTorch, foreach", compared=True, foreach=True),
        plain_line("PyTorch, for-loop", compared=True, foreach=False, fused=False),
        deepspeed_line(2),
        ranks=1,
        threads=threads,
    )


def _gathers() -> list[Line]:
    layers: dict[str, Any] = {"units": ["Layer"], "unit_min_numel": 0}
    return _lines(
        floor_line(),
        fsdp2_line(True),
        deepspeed_line(3),
        zeroshard_line(3, suffix=", a unit per layer", **layers),
        zeroshard_line(3, suffix=", merged units"),
        ranks=1,
    )


def _at_size() -> list[Line]:
    return [
        Line(
            zeroshard_line(stage, compute=COMPUTE),
            ranks,
            f"ZeroShard stage {stage}, {ranks} rank{'s'[: ranks - 1]}",
        )
        for ranks in (2, 1)
        for stage in (2, 3)
    ]


_FEW = ("DDP", "FSDP2, resharded", "DeepSpeed stage 3", "ZeroShard stage 3")
_FEW_UPDATES = ("PyTorch, fused", "ZeroShard stage 2", "DeepSpeed stage 2")


def _plain_without_exchange() -> System:
    return plain_line("PyTorch, fused, no exchange", compared=False, compute=COMPUTE, fused=True)


COMPARISONS = [
    Comparison(
        "a1",
        "A1  a step bound by communication: 2 ranks, 128 tokens each",
        GPTTask(),
        [
            *_lines(floor_line(COMPUTE), _plain_without_exchange()),
            *_peers(),
            *_transports(),
        ],
        RunLength(5, 9, 5),  # fifty steps: the loss curves of the plot
        small=(
            "forward + backward", "DDP", "FSDP2, resharded", "DeepSpeed stage 3",
            "ZeroShard stage 2, p2p", "ZeroShard stage 3, p2p", "ZeroShard stage 3, shm",
        ),
    ),
    Comparison(
        "a1-fp32",
        "A1  the same, gradients reduced in fp32",
        GPTTask(),
        [*_lines(floor_line(COMPUTE)), *_peers("fp32"), *_zeroshard("fp32")],
        RunLength(5, 4, 5),
        small=_FEW,
    ),
    Comparison(
        "a2-512",
        "A2  the same, 512 tokens per rank",
        GPTTask(Shape(context=512)),
        [*_lines(floor_line(COMPUTE)), *_peers(), *_zeroshard()],
        RunLength(2, 4, 2),
        small=_FEW[1:],
    ),
    Comparison(
        "a2-2048",
        "A2  the same, 2048 tokens per rank",
        GPTTask(Shape(context=2048)),
        [*_lines(floor_line(COMPUTE)), *_peers(), *_zeroshard()],
        RunLength(1, 3, 1),
        small=(),
    ),
    Comparison(
        "a4",
        "A4  the update alone: 8.4 million elements, 1 rank",
        StackTask(width=1024, depth=8),
        _updates(),
        RunLength(3, 4, 5),
        small=_FEW_UPDATES,
    ),
    Comparison(
        "a4-2",
        "A4  the update alone on 2 threads: 8.4 million elements, 1 rank",
        StackTask(width=1024, depth=8),
        _updates(threads=2),
        RunLength(3, 4, 5),
        small=_FEW_UPDATES,
    ),
    Comparison(
        "a6",
        "A6  gradient accumulation over 8 micro-batches of 128 tokens",
        GPTTask(),
        [
            *_lines(floor_line(COMPUTE)),
            *_peers(),
            *_lines(
                fsdp2_line(False, syncs_always=False, compute=COMPUTE),
                fsdp2_line(True, syncs_always=False, compute=COMPUTE),
            ),
            *_zeroshard(),
        ],
        RunLength(1, 3, 1),
        micro_batches=8,
        small=("FSDP2, resharded, no sync", *_FEW[2:]),
    ),
    Comparison(
        "a7",
        "A7  overhead of 200 tiny layers, 1 rank",
        StackTask(width=64, depth=200, batch=4),
        _gathers(),
        RunLength(5, 5, 10),
    ),
    Comparison(
        "a8",
        "A8  at a batch of 4096 tokens per rank: stage 3 beside stage 2, two ranks beside one",
        GPTTask(Shape(context=2048), batch=2),
        _at_size(),
        RunLength(1, 3, 1),
    ),
]  # fmt: skip


if COMPUTE == "fp32":  # A1 itself reduces in fp32 then
    COMPARISONS = [c for c in COMPARISONS if c.key != "a1-fp32"]


def find_line(protocol: str, title: str) -> Line:
    """The line of this title. The worker processes look their system up with it."""
    lines = next(c.lines for c in COMPARISONS if c.key == protocol)
    return next(line for line in lines if line.title == title)
