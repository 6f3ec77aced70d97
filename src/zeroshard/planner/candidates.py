"""The configurations that ``zeroshard plan --fit`` compares, and the result of its search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from zeroshard.planner.plan import Plan

Aim: TypeAlias = Literal["speed", "memory"]


@dataclass(frozen=True)
class Strategy:
    """A stage of ZeRO, and what is offloaded to host memory."""

    stage: int
    optimizer: bool = False
    params: bool = False

    @property
    def text(self) -> str:
        """In words."""
        away = ["optimizer"] * self.optimizer + ["parameters"] * self.params
        return f"stage {self.stage}" + (f", {' and '.join(away)} offloaded" if away else "")


STRATEGIES = (
    (Strategy(0),),
    (Strategy(1), Strategy(2)),
    (Strategy(2, optimizer=True),),
    (Strategy(3),),
    (Strategy(3, optimizer=True),),
    (Strategy(3, optimizer=True, params=True),),
)
"""From the fastest to the one that needs the least device memory. Stages 1 and 2 are as fast."""


@dataclass(frozen=True)
class Candidate:
    """One configuration. ``micro_batch`` times ``accumulation`` samples are a rank's part of a step."""

    strategy: Strategy
    checkpointing: bool
    micro_batch: int
    accumulation: int

    @property
    def text(self) -> str:
        """In words."""
        how = "with" if self.checkpointing else "without"
        return (
            f"{self.strategy.text}, {how} activation checkpointing, micro-batch {self.micro_batch} x "
            f"accumulation {self.accumulation}"
        )

    def config(self, base: Mapping[str, Any]) -> dict[str, Any]:
        """``base`` with this candidate's keys. Offload sections that ``base`` has are used."""
        zero = dict(base.get("zero_optimization") or {})
        wanted = {
            "offload_optimizer": self.strategy.optimizer,
            "offload_param": self.strategy.params,
        }
        own = {key: zero.pop(key, None) for key in wanted}
        for key, on in wanted.items():
            if on:
                given = own[key] or {}
                is_away = given.get("device") not in (None, "none")
                zero[key] = given if is_away else {**given, "device": "cpu"}
        others = {key: value for key, value in base.items() if key != "train_batch_size"}
        return {  # train_batch_size follows from micro-batch, accumulation and ranks
            **others,
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.accumulation,
            "zero_optimization": {**zero, "stage": self.strategy.stage},
        }


@dataclass(frozen=True)
class Judged:
    """A candidate, and why it was chosen or not.

    ``peak_nbytes`` and ``seconds``: None: not known. ``simulated``: they are of a simulation, and not
    of lines through others.
    """

    candidate: Candidate
    peak_nbytes: int | None
    seconds: float | None
    simulated: bool
    why: str

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        own = self.candidate
        return {
            "strategy": own.strategy.text, "stage": own.strategy.stage,
            "checkpointing": own.checkpointing, "micro_batch": own.micro_batch,
            "accumulation": own.accumulation, "peak_nbytes": self.peak_nbytes,
            "seconds": self.seconds, "simulated": self.simulated, "why": self.why,
        }  # fmt: skip


@dataclass(frozen=True)
class Fit:
    """The result of a search. ``chosen``: None if nothing fits; then ``plan`` is the smallest peak.

    ``judged``: every candidate. ``larger``: the next larger micro-batch like the chosen one, simulated;
    None: the chosen one is the largest, or the aim is "memory". ``order``: where the order of speed is
    from.
    """

    aim: Aim
    chosen: Candidate | None
    plan: Plan
    config: Mapping[str, Any]
    judged: Sequence[Judged]
    larger: Judged | None
    simulations: int
    order: str

    @property
    def count(self) -> int:
        """Candidates."""
        return len(self.judged)

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "aim": self.aim, "order": self.order,
            "chosen": None if self.chosen is None else self.chosen.text,
            "checkpointing": self.chosen is not None and self.chosen.checkpointing,
            "config": dict(self.config),
            "next_larger": None if self.larger is None else self.larger.as_dict(),
            "simulations": self.simulations,
            "candidates": [each.as_dict() for each in self.judged],
            "plan": self.plan.as_dict(),
        }  # fmt: skip
