"""The configurations that ``zeroshard plan --fit`` compares, and the result of its search."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

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

LEVELS = (STRATEGIES[:2], *((group,) for group in STRATEGIES[2:]))
"""Groups of strategies that are tried with every tensor size before the next ones are. Those of the
first level neither gather parameters for forward nor offload anything."""


class StrategyKind(NamedTuple):
    """What candidates have in common that differ in the micro-batch only.

    ``tensor``: tensor ranks; None: as the configuration says.
    """

    strategy: Strategy
    checkpointing: bool
    tensor: int | None = None


def kinds_by_experience(
    tensors: Sequence[int | None], *, can_checkpoint: bool
) -> Iterator[StrategyKind]:
    """Every kind, the fastest first as far as this is known without a machine."""
    for level in LEVELS:
        for tensor in tensors:
            for group in level:
                for on in (False, True) if can_checkpoint else (False,):
                    for strategy in group:
                        yield StrategyKind(strategy, on, tensor)


@dataclass(frozen=True)
class Candidate:
    """One configuration. ``micro_batch`` times ``accumulation`` samples are a rank's part of a step.

    ``tensor``: tensor ranks, which have the same samples; None: as the configuration says.
    """

    strategy: Strategy
    checkpointing: bool
    micro_batch: int
    accumulation: int
    tensor: int | None = None

    @property
    def kind(self) -> StrategyKind:
        """What it has in common with other micro-batches."""
        return StrategyKind(self.strategy, self.checkpointing, self.tensor)

    @property
    def axes(self) -> dict[str, int]:
        """The sizes of the axes of the mesh that were searched."""
        return {} if self.tensor is None else {"tensor": self.tensor}

    @property
    def text(self) -> str:
        """In words."""
        how = "with" if self.checkpointing else "without"
        axes = "".join(f", {axis} {size}" for axis, size in self.axes.items())
        return (
            f"{self.strategy.text}{axes}, {how} activation checkpointing, micro-batch "
            f"{self.micro_batch} x accumulation {self.accumulation}"
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
        if self.tensor is not None:
            others = with_tensor_ranks(others, self.tensor)
        return {  # train_batch_size follows from micro-batch, accumulation and ranks
            **others,
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.accumulation,
            "zero_optimization": {**zero, "stage": self.strategy.stage},
        }


def candidates_of(kind: StrategyKind, samples: int) -> list[Candidate]:
    """Those of a kind for the ``samples`` of a rank in a step, by increasing micro-batch."""
    strategy, on, tensor = kind
    sizes = [size for size in range(1, samples + 1) if samples % size == 0]
    return [Candidate(strategy, on, size, samples // size, tensor) for size in sizes]


def with_tensor_ranks(base: Mapping[str, Any], size: int) -> dict[str, Any]:
    """``base`` with ``size`` tensor ranks, over which the engine cuts the model by itself."""
    made = dict(base)
    for section, own in {"tensor_parallel": ("autotp_size", "tp"), "parallel": ("tensor",)}.items():
        given = made.pop(section, None) or {}
        rest = {key: value for key, value in given.items() if key not in own}
        if section == "tensor_parallel" and size > 1:
            rest["autotp_size"] = size
        if rest:
            made[section] = rest
    return made


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
            "strategy": own.strategy.text, "stage": own.strategy.stage, "axes": own.axes,
            "checkpointing": own.checkpointing, "micro_batch": own.micro_batch,
            "accumulation": own.accumulation, "peak_nbytes": self.peak_nbytes,
            "seconds": self.seconds, "simulated": self.simulated, "why": self.why,
        }  # fmt: skip


@dataclass(frozen=True)
class Fit:
    """The result of a search. ``chosen``: None if nothing fits; then ``plan`` is the smallest peak.

    ``judged``: every candidate. ``larger``: the next larger micro-batch like the chosen one, simulated;
    None: the chosen one is the largest, or the aim is "memory". ``order``: where the order of speed is
    from. ``refused``: tensor sizes that no candidate can have, with the reason.
    """

    aim: Aim
    chosen: Candidate | None
    plan: Plan
    config: Mapping[str, Any]
    judged: Sequence[Judged]
    larger: Judged | None
    simulations: int
    order: str
    refused: Mapping[int, str] = field(default_factory=dict)

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
            "refused": {f"tensor {size}": why for size, why in self.refused.items()},
            "candidates": [each.as_dict() for each in self.judged],
            "plan": self.plan.as_dict(),
        }  # fmt: skip
