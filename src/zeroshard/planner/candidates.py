"""The configurations that ``zeroshard plan --fit`` compares, and the result of its search."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from zeroshard.core.texts import without_secrets
from zeroshard.parallel.schedules import SCHEDULES
from zeroshard.planner.plan import Plan

SCHEDULE = "1F1B"
"""The schedule of pipelines that are searched: a stage of P holds at most P micro-batches."""

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


class Sizes(NamedTuple):
    """Tensor ranks and pipeline stages of a mesh, and ranks that share experts. None: as the
    configuration says."""

    tensor: int | None = None
    pipeline: int | None = None
    expert: int | None = None

    @property
    def by_axis(self) -> dict[str, int]:
        """Those that are searched."""
        return {axis: size for axis, size in self._asdict().items() if size is not None}

    @property
    def text(self) -> str:
        """In words."""
        return " x ".join(f"{axis} {size}" for axis, size in self.by_axis.items())


AS_CONFIGURED = Sizes()
"""The mesh of the configuration."""


class StrategyKind(NamedTuple):
    """What candidates have in common that differ in the micro-batch only."""

    strategy: Strategy
    checkpointing: bool
    sizes: Sizes = AS_CONFIGURED


def kinds_by_experience(sizes: Sequence[Sizes], *, can_checkpoint: bool) -> Iterator[StrategyKind]:
    """Every kind, the fastest first as far as this is known without a machine."""
    for level in LEVELS:
        for each in sizes:
            for group in level:
                for on in (False, True) if can_checkpoint else (False,):
                    for strategy in group:
                        yield StrategyKind(strategy, on, each)


@dataclass(frozen=True)
class Candidate:
    """One configuration. ``micro_batch`` times ``accumulation`` samples are a rank's part of a step.

    Ranks that differ in the tensor or pipeline dimension have the same samples.
    """

    strategy: Strategy
    checkpointing: bool
    micro_batch: int
    accumulation: int
    sizes: Sizes = AS_CONFIGURED

    @property
    def kind(self) -> StrategyKind:
        """What it has in common with other micro-batches."""
        return StrategyKind(self.strategy, self.checkpointing, self.sizes)

    @property
    def text(self) -> str:
        """In words."""
        how = "with" if self.checkpointing else "without"
        axes = "".join(f", {axis} {size}" for axis, size in self.sizes.by_axis.items())
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
        if self.sizes.tensor is not None:
            others = with_tensor_ranks(others, self.sizes.tensor)
        if self.sizes.pipeline is not None:
            others = with_parallel(others, "pipeline", self.sizes.pipeline)
        if self.sizes.expert is not None:
            others = with_expert_ranks(others, self.sizes.expert)
        return {  # train_batch_size follows from micro-batch, accumulation and ranks
            **others,
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.accumulation,
            "zero_optimization": {**zero, "stage": self.strategy.stage},
        }


def candidates_of(kind: StrategyKind, samples: int) -> list[Candidate]:
    """Those of a kind for the ``samples`` of a rank in a step, by increasing micro-batch."""
    strategy, on, sizes = kind
    micro_batches = [size for size in range(1, samples + 1) if samples % size == 0]
    return [Candidate(strategy, on, size, samples // size, sizes) for size in micro_batches]


def refusal(candidate: Candidate) -> str:
    """Why the schedule of a candidate's pipeline cannot run; "" if it can."""
    stages = candidate.sizes.pipeline or 1
    if stages == 1:
        return ""
    return SCHEDULES[SCHEDULE].refusal(stages, 1, candidate.accumulation)


def possible(kind: StrategyKind, samples: int) -> list[Candidate]:
    """Those of :func:`candidates_of` that can run."""
    return [own for own in candidates_of(kind, samples) if not refusal(own)]


def next_larger(own: Candidate, ways: Sequence[Candidate]) -> Candidate | None:
    """The candidate with the next larger micro-batch, of those of its kind by increasing size."""
    return next((way for way in ways if way.micro_batch > own.micro_batch), None)


def with_parallel(base: Mapping[str, Any], key: str, size: int) -> dict[str, Any]:
    """``base`` with this size of a key of the section ``parallel``."""
    given = {k: v for k, v in (base.get("parallel") or {}).items() if k != key}
    rest = {name: value for name, value in base.items() if name != "parallel"}
    parallel = given | ({key: size} if size > 1 else {})
    return rest | ({"parallel": parallel} if parallel else {})


def with_expert_ranks(base: Mapping[str, Any], size: int) -> dict[str, Any]:
    """``base`` with ``size`` ranks that share the experts of a layer."""
    made = with_parallel(base, "expert", size)
    if "expert_parallel" in made:
        given = made["expert_parallel"] or {}
        made["expert_parallel"] = {k: v for k, v in given.items() if k != "autoep_size"}
    return made


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
            "strategy": own.strategy.text, "stage": own.strategy.stage, "axes": own.sizes.by_axis,
            "checkpointing": own.checkpointing, "micro_batch": own.micro_batch,
            "accumulation": own.accumulation, "peak_nbytes": self.peak_nbytes,
            "seconds": self.seconds, "simulated": self.simulated, "why": self.why,
        }  # fmt: skip


@dataclass(frozen=True)
class Fit:
    """The result of a search. ``chosen``: None if nothing fits; then ``plan`` is the smallest peak.

    ``judged``: every candidate. ``larger``: the next larger micro-batch like the chosen one, simulated;
    None: the chosen one is the largest, or the aim is "memory". ``order``: where the order of speed is
    from. ``refused``: sizes of axes that no candidate can have, with the reason. ``split``: where the
    program must cut the model into pipeline stages; none if it has one, or cuts it already.
    """

    aim: Aim
    chosen: Candidate | None
    plan: Plan
    config: Mapping[str, Any]
    judged: Sequence[Judged]
    larger: Judged | None
    simulations: int
    order: str
    refused: Mapping[Sizes, str] = field(default_factory=dict)
    split: Sequence[str] = ()

    @property
    def count(self) -> int:
        """Candidates."""
        return len(self.judged)

    @property
    def shown_config(self) -> dict[str, Any]:
        """The configuration without secrets."""
        shown: dict[str, Any] = without_secrets(self.config)
        return shown

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "aim": self.aim, "order": self.order,
            "chosen": None if self.chosen is None else self.chosen.text,
            "checkpointing": self.chosen is not None and self.chosen.checkpointing,
            "config": self.shown_config,
            "next_larger": None if self.larger is None else self.larger.as_dict(),
            "simulations": self.simulations,
            "refused": {sizes.text: why for sizes, why in self.refused.items()},
            "split": list(self.split),
            "candidates": [each.as_dict() for each in self.judged],
            "plan": self.plan.as_dict(),
        }  # fmt: skip


def refused_by_schedule(
    kinds: Iterable[StrategyKind], samples: Mapping[Sizes, int]
) -> list[Judged]:
    """The candidates whose pipeline cannot run, with the reason."""
    every = [own for kind in kinds for own in candidates_of(kind, samples[kind.sizes])]
    reasons = [(own, refusal(own)) for own in every]
    return [Judged(own, None, None, False, f"cannot run: {why}") for own, why in reasons if why]
