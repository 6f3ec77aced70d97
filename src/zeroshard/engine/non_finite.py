"""What follows a step whose gradient is not finite: the key ``trust.nan_policy`` (ADR 0020).

The step itself has changed nothing: the norm of the gradient was not finite, so the update was skipped.
Only then the ranks exchange what they know of the cause, in one small message. After the reduction of
gradients nobody can tell which rank a NaN came from. So each rank keeps the losses of a step, as they
are on the device, until the outcome of the step is known.

In fp16 a gradient that overflows although the losses are finite is what the loss scale is for. Such a
step is skipped and the scale lowered, whatever the policy. Engines that share a loss share its scale,
too: :class:`LossSharing`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from zeroshard.config import Config
from zeroshard.core.texts import rank_ranges
from zeroshard.device.choice import read
from zeroshard.errors import LossScaleError, NonFiniteError

logger = logging.getLogger("zeroshard")

NanPolicy: TypeAlias = Literal["error", "skip", "rollback"]


def nan_policy(settings: Config, *, scales_loss: bool) -> NanPolicy | None:
    """What follows a step whose gradient is not finite. None: such steps are not looked for.

    Without the key ``trust.nan_policy``: "skip" in fp16 (``scales_loss``), what
    ``bf16.check_grad_overflow`` says if it is given, and else "error". The norm of the gradient is what
    shows such a step. So without these keys nothing is looked for if
    ``zero_optimization.compute_grad_norm`` is false.
    """
    if (asked := settings.trust.nan_policy) is not None:
        return asked
    if scales_loss:
        return "skip"
    bf16 = settings.bf16
    if bf16.enabled and bf16.check_grad_overflow is not None:
        return "skip" if bf16.check_grad_overflow else None
    return "error" if settings.zero_optimization.compute_grad_norm else None


@dataclass(frozen=True)
class Cause:
    """What the ranks know of a gradient that is not finite.

    ``parameter``: the first one in model order with such a gradient. ``ranks``: those with a loss that
    was not finite. ``saw_losses``: any rank saw its losses, because ``engine.backward`` got them.
    ``kept``: a parameter of a module whose forward left one somewhere, so backward may read it sharded.
    """

    parameter: str
    ranks: tuple[int, ...]
    saw_losses: bool
    kept: str | None = None

    @property
    def text(self) -> str:
        """One or two sentences."""
        if self.ranks:
            losses = f"The loss of {rank_ranges(self.ranks)} was not finite."
        elif self.saw_losses:
            losses = "All losses were finite, so a number became infinite or NaN in backward."
        else:
            losses = (
                "The losses are not known, because the program called backward() on them itself."
            )
        aside = ""
        if self.kept is not None and not self.ranks:
            aside = (
                f" The forward of the module of {self.kept!r} kept a parameter itself. If that was by "
                "saved_tensors_hooks of the program, which return parameters as they are, backward may "
                "read it while it is sharded, and finds NaN: let the first hook return tensor.clone() "
                "for parameters."
            )
        return f"{losses} First bad gradient: {self.parameter}.{aside}"


class NonFinitePolicy:
    """Decides after a skipped step: go on, raise, or go back to the last checkpoint.

    ``policy``: what :func:`nan_policy` gives; None: nothing follows. ``checkpoint``: directory and tag of
    what the engine saved or loaded last. ``skipped``: the report of a step that is not judged yet.
    """

    def __init__(self, policy: NanPolicy | None, max_rollbacks: int) -> None:
        self._policy = policy
        self._max_rollbacks = max_rollbacks
        self.rollbacks = 0
        self.checkpoint: tuple[str, str] | None = None
        self.skipped: Any = None

    def judge(self, engine: Any) -> bool:
        """Act on the skipped step. Collective. Returns whether the engine was set back to a checkpoint.

        Raises:
            NonFiniteError: the policy does not let training go on; the same on every rank.
            LossScaleError: in fp16 the loss scale cannot be lowered any more; the same on every rank.
        """
        report, self.skipped = self.skipped, None
        if self._policy is None:
            return False
        first = engine._skipped.in_a_row == 1
        at_floor = engine.scales_loss and bool(engine.scaler.at_floor)
        if self._policy == "skip" and not first and not at_floor:
            return False
        cause = _find_cause(engine)
        if at_floor:
            raise LossScaleError(_floor_text(engine, report, cause))
        is_overflow = engine.scales_loss and not cause.ranks
        if is_overflow or self._policy == "skip":
            if first and engine.is_main_rank:
                scale = f" (loss scale {report.loss_scale:g})" if engine.scales_loss else ""
                logger.warning(
                    "step %d skipped: the gradient is not finite%s. %s",
                    report.step,
                    scale,
                    cause.text,
                )
            return False
        what = (
            f"The gradient of step {report.step} is not finite. {cause.text} Nothing was updated."
        )
        if self._policy == "rollback":
            self._roll_back(engine, what)
            return True
        raise NonFiniteError(
            f"{what} Look at the batch of this step, or lower the learning rate. "
            '"trust": {"nan_policy": "skip"} goes on without such steps, and "rollback" goes back to the '
            "last checkpoint and leaves out the batches since then."
        )

    def _roll_back(self, engine: Any, what: str) -> None:
        if self.checkpoint is None:
            raise NonFiniteError(
                f'{what} nan_policy is "rollback", but this engine has not saved or loaded a checkpoint '
                "yet. Save one before the first step."
            )
        if self.rollbacks >= self._max_rollbacks:
            raise NonFiniteError(
                f"{what} The run has gone back to a checkpoint {self.rollbacks} times, which is "
                "trust.max_rollbacks. Look at the data, or lower the learning rate."
            )
        self.rollbacks += 1
        directory, tag = self.checkpoint
        if engine.is_main_rank:
            logger.warning(
                "%s Going back to the checkpoint %s/%s (%d of at most %d times).",
                what, directory, tag, self.rollbacks, self._max_rollbacks,
            )  # fmt: skip
        # The data go on after the bad batch.
        engine.load_checkpoint(directory, tag, resumes_data=False)


def _find_cause(engine: Any) -> Cause:
    """The cause, from this rank's losses and norms and those of the others. Collective."""
    norms: Sequence[tuple[int, Tensor]] = engine._norms
    losses: Sequence[Tensor] = engine._step_losses
    names = [name for name, _ in engine.module.named_parameters()]
    every = getattr(engine.module, "every_parameter", names)  # of all stages of a pipeline
    bad = [float(every.index(names[at])) for at, norm in norms if not norm.isfinite()]
    saw = [float(not loss.isfinite().all()) for loss in losses]
    none = float(len(every))
    kept = engine._hooks.saved_views.kept
    aside = float(every.index(kept)) if kept in every else none
    own = [min(bad, default=none), float(bool(saw)), max(saw, default=0.0), aside]
    world = engine._watch.world
    sent = torch.tensor(own, dtype=torch.float64).to(engine.device)
    rows = read(world.all_gather_small(sent, name="cause of a gradient that is not finite"))
    first, aside = (int(min(row[at] for row in rows)) for at in (0, 3))
    ranks = getattr(world, "ranks", range(len(rows)))
    return Cause(
        repr(every[first]) if first < len(every) else "unknown",
        tuple(rank for rank, row in zip(ranks, rows, strict=True) if row[2]),
        any(row[1] for row in rows),
        every[aside] if aside < len(every) else None,
    )


def _floor_text(engine: Any, report: Any, cause: Cause) -> str:
    return (
        f"Non-finite gradients for {engine._skipped.in_a_row} steps up to step {report.step}, "
        f"and the loss scale {report.loss_scale:g} is at its minimum, so lowering it cannot "
        f"help. {cause.text} If the model was trained in bf16 before, train it in bf16. Otherwise check "
        'the loss, or lower "fp16": {"min_loss_scale"}.'
    )


# ---------------------------------------------------------------- losses of several engines


class LossSharing:
    """The engines that have shared a loss with one engine, and what the running backward carries.

    ``engine.backward(loss)`` multiplies the loss by one number, so all gradients of that backward carry
    it, also those of other engines that the loss was computed with. In the step, an engine divides its
    gradients by its own loss scale. So gradients that carry another number are multiplied by the quotient
    of the two when they arrive (:attr:`~zeroshard.zero.gradients.GradBuffer.rescale`). Then every
    gradient that an engine holds carries its own scale, whatever this rank or another one computed it
    with; each engine finds its own overflows, skips its own steps and adapts its own scale. Loss scales
    are powers of two unless the configuration has others, so the product is exact as long as it is in the
    range of fp16.

    The number is the smallest loss scale of the engines that have shared a loss. With a larger one, an
    engine whose gradients overflow would lower its own scale in vain. Which engines share losses is known
    after their first backward. Only what fp16 cannot represent depends on the number, so ranks need not
    agree on it.
    """

    def __init__(self, own_scale: Tensor) -> None:
        self._own_scale = own_scale  # updated in place
        self._partners: weakref.WeakSet[LossSharing] = weakref.WeakSet()
        self._carried = own_scale

    def begin(self) -> Tensor:
        """The number by which :meth:`Engine.backward` multiplies the loss, 0-dim."""
        scales = [self._own_scale, *(other._own_scale for other in self._partners)]
        self._carried = torch.stack(scales).amin() if len(scales) > 1 else self._own_scale
        return self._carried

    def close(self) -> None:
        """The engine trains no more: its scale, which stays, limits no other."""
        for other in self._partners:
            other._partners.discard(self)

    def rescale(self, running: LossSharing) -> Tensor | None:
        """What gradients of ``running``'s backward are multiplied by, 0-dim; None: by nothing."""
        if running is not self:
            self._partners.add(running)
            running._partners.add(self)
        if running._carried is self._own_scale:
            return None
        return self._own_scale / running._carried
