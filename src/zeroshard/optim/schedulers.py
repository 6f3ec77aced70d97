"""Learning-rate schedules: the value with which each update runs.

There are five schedules under DeepSpeed's names, with its published formulas, and all classes of
``torch.optim.lr_scheduler``. A schedule is a pure function of ``i``, the index of the last update made,
which is -1 before the first. The constructor writes the value for -1, so the first update already
follows the schedule. The engine calls ``step()`` after every update that was applied, and not after a
skipped one. Thus update ``k`` runs with the value for ``i = k - 1``, and a warm-up starts with two
updates at its minimum. Attributes have DeepSpeed's names and may be read.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from zeroshard.config.keys import nearest
from zeroshard.errors import ConfigError, UnsupportedError

_log = logging.getLogger(__name__)

PerGroup = float | Sequence[float]
"""One number, or one for each parameter group."""


class Scheduler(Protocol):
    """What the engine needs of a schedule. Those of torch have it too."""

    def step(self) -> Any: ...
    def get_last_lr(self) -> list[Any]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class Schedule:
    """Writes ``lr_at(i)`` into the optimizer's groups. Subclasses define ``lr_at``.

    ``last_batch_iteration`` other than -1 continues a run: nothing is written before the first step.
    """

    def __init__(self, optimizer: Any, last_batch_iteration: int = -1) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[float] | None = None
        if last_batch_iteration == -1:
            self._write()

    def lr_at(self, i: int) -> list[float]:
        """The learning rate of each group after update ``i``. Pure."""
        raise NotImplementedError

    def get_lr(self) -> list[float]:
        """The learning rate for the current ``i``, one number per group."""
        return self.lr_at(self.last_batch_iteration)

    def get_last_lr(self) -> list[float]:
        """The learning rates that were written last.

        Raises:
            AssertionError: nothing was written yet. Transformers looks for the words of this error.
        """
        if self._last_lr is None:
            raise AssertionError("no learning rate was set yet: you need to call step() first")
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance to the next ``i``, or to the one given, and write its value."""
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = (
            following if last_batch_iteration is None else last_batch_iteration
        )
        self._write()

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved ``i``, and write its value into the groups."""
        self.last_batch_iteration = state_dict["last_batch_iteration"]
        self._write()

    def _write(self) -> None:
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            _set_lr(group, lr)

    def _per_group(self, name: str, value: PerGroup) -> list[float]:
        groups = len(self.optimizer.param_groups)
        if not isinstance(value, (list, tuple)):
            return [float(value)] * groups  # type: ignore[arg-type]
        if len(value) != groups:
            raise ConfigError(
                f"scheduler.params.{name} has {len(value)} values, the optimizer has {groups} "
                "parameter groups; give one number, or one for each group"
            )
        return [float(number) for number in value]

    def _group_lrs(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]


class WarmupLR(Schedule):
    """From ``warmup_min_lr`` to ``warmup_max_lr`` (None: the group's) in ``warmup_num_steps``."""

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.optimizer = optimizer
        self.min_lrs = self._per_group("warmup_min_lr", warmup_min_lr)
        self.max_lrs = (
            self._group_lrs()
            if warmup_max_lr is None
            else self._per_group("warmup_max_lr", warmup_max_lr)
        )
        self._warmup = _Warmup(warmup_num_steps, warmup_type)
        self.warmup_num_steps, self.warmup_type = self._warmup.steps, warmup_type
        super().__init__(optimizer, last_batch_iteration)

    def lr_at(self, i: int) -> list[float]:
        share = self._warmup(i) if i < self._warmup.steps else self._share_after(i)
        return [
            low + (high - low) * share for low, high in zip(self.min_lrs, self.max_lrs, strict=True)
        ]

    def _share_after(self, i: int) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """As :class:`WarmupLR`, then linearly down to ``warmup_min_lr`` at ``total_num_steps``."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = 1e-3,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(
            optimizer,
            warmup_min_lr,
            warmup_max_lr,
            warmup_num_steps,
            warmup_type,
            last_batch_iteration,
        )
        self._warmup.warn_if_longer_than(total_num_steps)

    def _share_after(self, i: int) -> float:
        return max(
            0.0, (self.total_num_steps - i) / max(1, self.total_num_steps - self._warmup.steps)
        )


class WarmupCosineLR(Schedule):
    """A factor on each group's learning rate: warm-up, then half a cosine down to ``cos_min_ratio``."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 1e-4,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.optimizer = optimizer
        self.org_lrs = self._group_lrs()
        self.total_num_steps, self.warmup_min_ratio, self.cos_min_ratio = (
            total_num_steps,
            warmup_min_ratio,
            cos_min_ratio,
        )
        self._warmup = _Warmup(warmup_num_steps, warmup_type)
        self.warmup_num_steps, self.warmup_type = self._warmup.steps, warmup_type
        self._warmup.warn_if_longer_than(total_num_steps)
        super().__init__(optimizer, last_batch_iteration)

    def lr_at(self, i: int) -> list[float]:
        return [base * self._ratio(i) for base in self.org_lrs]

    def _ratio(self, i: int) -> float:
        warmup = self._warmup
        if i < 0:
            return 0.0
        if i < warmup.steps:
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * warmup(i)
        progress = min(1.0, (i - warmup.steps + 1) / max(1, self.total_num_steps - warmup.steps))
        return max(
            0.0,
            self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2,
        )


class LRRangeTest(Schedule):
    """Grows without limit, to find the largest learning rate that still trains (Smith 2017)."""

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.optimizer = optimizer
        self.min_lr = self._per_group("lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size = _positive("lr_range_test_step_size", lr_range_test_step_size)
        self.step_rate, self.staircase = lr_range_test_step_rate, lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def lr_at(self, i: int) -> list[float]:
        steps = (i + 1) / self.step_size
        growth = 1 + self.step_rate * (math.floor(steps) if self.staircase else steps)
        return [low * growth for low in self.min_lr]


class OneCycle(Schedule):
    """Up, down, then decay, while momentum changes in the opposite direction (Smith, Topin 2018).

    Momentum is the first of the ``betas``; the second is set to 0.99. Groups without betas keep their
    momentum.
    """

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float = 0.8,
        cycle_max_mom: float = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        self.optimizer = optimizer
        self.min_lrs = self._per_group("cycle_min_lr", cycle_min_lr)
        self.max_lrs = self._per_group("cycle_max_lr", cycle_max_lr)
        self.first_step_size = _positive("cycle_first_step_size", cycle_first_step_size)
        self.second_step_size = (
            self.first_step_size if cycle_second_step_size is None else cycle_second_step_size
        )
        if self.second_step_size < 0:
            raise ConfigError(
                f"scheduler.params.cycle_second_step_size is {self.second_step_size}; give 0 or "
                "more steps, or leave it out for the same number as in the first half"
            )
        first, second = cycle_first_stair_count, cycle_second_stair_count
        self.first_stair_count = first
        self.second_stair_count = first if second is None else second
        self.decay_step_size, self.decay_lr_rate, self.decay_mom_rate = (
            decay_step_size,
            decay_lr_rate,
            decay_mom_rate,
        )
        self._min_mom, self._max_mom = cycle_min_mom, cycle_max_mom
        self.cycle_momentum = cycle_momentum
        if cycle_momentum and not any("betas" in group for group in optimizer.param_groups):
            self.cycle_momentum = False
            _log.warning("OneCycle: the optimizer has no betas, so only the learning rate cycles")
        super().__init__(optimizer, last_batch_iteration)

    @property
    def total_size(self) -> int:
        """Updates per cycle."""
        return self.first_step_size + self.second_step_size

    @property
    def step_ratio(self) -> float:
        """The share of a cycle in which the learning rate rises."""
        return self.first_step_size / self.total_size

    def lr_at(self, i: int) -> list[float]:
        if i < self.total_size:
            height = self._height(i + 1)
            return [
                low + (high - low) * height
                for low, high in zip(self.min_lrs, self.max_lrs, strict=True)
            ]
        decay = 1 + self._decay(self.decay_lr_rate, i)
        return [low / decay for low in self.min_lrs]

    def momentum_at(self, i: int) -> float:
        """The first beta after update ``i``. It starts at its minimum, as in DeepSpeed."""
        if i < 0:
            return self._min_mom
        if i < self.total_size:
            return self._max_mom - (self._max_mom - self._min_mom) * self._height(i + 1)
        return self._max_mom * (1 + self._decay(self.decay_mom_rate, i))

    def _height(self, n: int) -> float:
        """The height in the cycle after ``n`` updates, 0 to 1."""
        length = self.total_size
        offset = n % length
        rising = offset <= self.first_step_size
        stairs = self.first_stair_count if rising else self.second_stair_count
        if stairs > 0:
            way, steps = (
                (offset, self.first_step_size)
                if rising
                else (length - offset, self.second_step_size)
            )
            return (way * stairs // steps) / stairs
        share, top = offset / length, self.step_ratio
        return share / top if rising else (share - 1) / (top - 1)

    def _decay(self, rate: float, i: int) -> float:
        if not self.decay_step_size or not rate:
            return 0.0
        return rate * (i - self.total_size + 1) / self.decay_step_size

    def _write(self) -> None:
        super()._write()
        if self.cycle_momentum:
            betas = (self.momentum_at(self.last_batch_iteration), 0.99)
            for group in self.optimizer.param_groups:
                if "betas" in group:
                    group["betas"] = betas


VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
_SCHEDULES: dict[str, type[Schedule]] = {
    cls.__name__: cls for cls in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}


def build_scheduler(type_: str, params: Mapping[str, Any], optimizer: Any) -> Scheduler:
    """The schedule of ``scheduler.type`` and ``scheduler.params`` over ``optimizer.param_groups``.

    Raises:
        ConfigError: the name or an argument does not exist, or a value does not fit.
        UnsupportedError: the schedule needs more than a count of updates.
    """
    torch_classes = {
        name: cls
        for name, cls in vars(torch.optim.lr_scheduler).items()
        if isinstance(cls, type) and hasattr(cls, "get_last_lr") and "LRS" not in name
    }
    cls: Any = _SCHEDULES.get(type_) or torch_classes.get(type_)
    if cls is None:
        near = nearest(type_, [*_SCHEDULES, *torch_classes])
        hint = f'did you mean "{near}"? ' if near else ""
        raise ConfigError(
            f'scheduler.type "{type_}" does not exist; {hint}It is one of '
            f"{', '.join(VALID_LR_SCHEDULES)} or a class of torch.optim.lr_scheduler"
        )
    if type_ == "ReduceLROnPlateau":
        raise UnsupportedError(
            "scheduler.type ReduceLROnPlateau needs a metric that the engine does not know; build "
            "it from engine.optimizer in the program, and call its step(metric)"
        )
    try:
        scheduler: Scheduler = cls(optimizer, **params)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"scheduler.params do not fit {type_}: {error}") from error
    return scheduler


class _Warmup:
    """The share of a warm-up that is complete: 0 before it starts, 1 at its end."""

    def __init__(self, num_steps: int, kind: str) -> None:
        self.steps = max(2, num_steps)  # 1 would divide by ln(1) = 0
        if kind not in ("log", "linear"):
            _log.warning('warmup_type "%s" is neither log nor linear; log is used', kind)
        self._linear = kind == "linear"

    def __call__(self, i: int) -> float:
        if i < 0:
            return 0.0
        return i / self.steps if self._linear else math.log(i + 1) / math.log(self.steps)

    def warn_if_longer_than(self, total: int) -> None:
        if total < self.steps:
            _log.warning(
                "total_num_steps %d is less than warmup_num_steps %d: the warm-up will not end",
                total,
                self.steps,
            )


def _positive(name: str, value: int) -> int:
    if value <= 0:
        raise ConfigError(f"scheduler.params.{name} is {value}; give at least 1 step")
    return value


def _set_lr(group: dict[str, Any], lr: float) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)  # in place, because compiled updates and graphs refer to the tensor
    else:
        group["lr"] = lr


def step_schedule(scheduler: Any, arguments: Mapping[str, Any], samples: Callable[[], int]) -> None:
    """Advance the schedule of a program after an update of so many samples.

    ``arguments``: what the program gave for ``scheduler.step``. A ``step`` that cannot run without one
    gets the samples, as with DeepSpeed: those of Megatron count them.
    """
    if (optimizer := getattr(scheduler, "optimizer", None)) is not None:
        # Else torch warns that no update came first: a program may have wrapped the engine's object.
        optimizer._opt_called = True
    step = scheduler.step
    if not arguments and _needs_argument(step):
        step(samples())
    else:
        step(**arguments)


def _needs_argument(step: Callable[..., Any]) -> bool:
    """Takes 12 us, once per update. A cache would keep the program's schedules alive."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # not written in Python
        return False
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [
        each for each in parameters if each.default is each.empty and each.kind in by_position
    ]
    return len(needed) == 1


def schedule_snapshot(
    scheduler: Any, groups: list[dict[str, Any]]
) -> tuple[Any, list[dict[str, Any]]]:
    """What has to be restored if the update turns out to have been skipped."""
    if scheduler is None:
        return None, []
    options = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    return scheduler.state_dict(), options


def schedule_restore(scheduler: Any, groups: list[dict[str, Any]], snapshot: Any) -> None:
    """Undo one advance of the schedule."""
    state, options = snapshot
    if scheduler is None or state is None:
        return
    scheduler.load_state_dict(state)
    for group, saved in zip(groups, options, strict=True):
        group.update(saved)
