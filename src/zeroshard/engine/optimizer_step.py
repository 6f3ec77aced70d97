"""The optimizer step: which micro-batches belong to it, and what happens at its end.

A micro-batch is at the accumulation boundary if the caller has declared this. Without declarations the
engine counts. With ``managed_gradient_accumulation`` off, every ``step()`` is at the boundary. At the
boundary the accumulated gradient is reduced and measured, and the parameters are updated and
all-gathered.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from zeroshard.config import Config
from zeroshard.device.choice import ops_of, read
from zeroshard.engine.build_runtime import ZeroRuntime
from zeroshard.errors import UsageError
from zeroshard.metrics.step_report import StepReport, learning_rates
from zeroshard.offload.async_update import PendingUpdates
from zeroshard.optim.schedulers import schedule_restore, schedule_snapshot, step_schedule
from zeroshard.precision.loss_scaler import DynamicScale, LossScaler
from zeroshard.session.comm_session import CommSession
from zeroshard.zero.clip import (
    NO_LOSS,
    GlobalNorm,
    NormExchange,
    RankLoss,
    clip_factor,
    global_norm,
)
from zeroshard.zero.gradients import Norms
from zeroshard.zero.reduce import BackwardKind
from zeroshard.zero.unit import Unit

logger = logging.getLogger("zeroshard")

OLD_VALUES = (
    "a forward has kept a tensor that shares memory with parameters of unit %r (as in self.kept = "
    "self.weight[2:4]). At stage 3 such a tensor keeps its values, so from this step on it differs from "
    "the parameter. Read the parameter itself where new values are wanted, and keep a clone() where old "
    "ones are: that ends this message, which is not repeated for other units."
)


ENDLESS = 16
"""Backwards, for each micro-batch of a step, after which ``step()`` is probably forgotten."""


class Accumulation:
    """Counts micro-batches of optimizer steps.

    ``steps``: micro-batches per optimizer step. ``managed``: DeepSpeed's key
    ``managed_gradient_accumulation``.
    """

    def __init__(self, steps: int, *, managed: bool) -> None:
        self.steps = steps
        self.managed = managed
        self.micro_steps = 0  # finished micro-batches of the current step
        self.declared: bool | None = None  # set_gradient_accumulation_boundary
        self.deferred = 0  # depth of no_sync
        self.uncounted = False  # a backward inside no_sync that no step() has counted yet
        self.divided: set[bool] = set()  # this step's backwards: was the loss divided before?
        self.backwards = 0  # in the current micro-batch
        self.unstepped = 0  # backwards since the last step(); zero_grad() does not count as one
        self.rescale: Tensor | None = None  # of the running backward's gradients: see BackwardKind
        self.is_dropped = False  # the program dropped all gradients, and no backward has followed
        self._has_warned = False

    def at_boundary(self) -> bool:
        """Whether the current micro-batch is the last of its optimizer step."""
        if self.declared is not None:
            return self.declared
        return not self.managed or self.micro_steps + 1 >= self.steps

    def kind_of_backward(self) -> BackwardKind:
        """The next backward's kind. It completes the step only if none can follow in the same step."""
        completes = self.managed and not self.deferred and self.at_boundary()
        return BackwardKind(completes, self.expects_more(), rescale=self.rescale)

    def expects_more(self) -> bool:
        """Whether gradients of several backwards are summed before a step."""
        return self.steps > 1 or not self.managed or self.declared is not None

    def note_backward(self, *, divided: bool) -> None:
        """Note that a backward begins. ``divided``: the engine divided its loss.

        Raises:
            UsageError: divided and undivided losses are mixed in one step, which would weigh them
                differently.
        """
        self.uncounted = self.uncounted or self.deferred > 0
        self.backwards += 1
        self.unstepped += 1
        self.is_dropped = False
        self.divided.add(divided)
        if self.steps > 1 and len(self.divided) > 1:
            raise UsageError(
                f"engine.backward(loss) and loss.backward() were mixed in one step with "
                f"gradient_accumulation_steps={self.steps}: engine.backward divides the loss, and "
                "gradients of loss.backward() are divided in the step. Use one of them for all losses of "
                "a step."
            )

    @property
    def remaining_divisor(self) -> int:
        """The number by which the summed gradient is still to be divided."""
        return 1 if True in self.divided else self.steps

    def advance(self, count: int = 1) -> None:
        """Note that the current micro-batch has ended, or ``count`` of them."""
        self.micro_steps += count
        self.uncounted, self.backwards, self.unstepped = False, 0, 0

    def seems_miscounted(self) -> bool:
        """Whether one micro-batch had as many backwards as a step has micro-batches. True at most once.

        Then the caller probably calls ``step()`` only at boundaries without declaring them. It would
        train with one update for ``steps**2`` backwards.
        """
        found = self.declared is None and self.backwards >= self.steps and not self._has_warned
        self._has_warned = self._has_warned or found
        return found

    def seems_endless(self) -> bool:
        """Whether so many backwards came without ``step()`` that it is probably never called.

        True at most once.
        """
        found = self.unstepped >= ENDLESS * self.steps and not self._has_warned
        self._has_warned = self._has_warned or found
        return found

    def restart(self) -> None:
        """Count the next micro-batch as the first of an optimizer step."""
        self.micro_steps = self.backwards = 0
        self.uncounted = self.is_dropped = False
        self.divided.clear()


@dataclass(frozen=True, eq=False, slots=True)
class StepOutcome:
    """The result of one optimizer step."""

    report: StepReport
    skipped: bool | None  # None: only the device has the flag, and the optimizer skips there
    norms: Sequence[tuple[int, Tensor]]  # 0-dim, of this rank's fragments, by parameter


class OptimizerStep:
    """The optimizer step of one engine.

    ``num_terms``: by how many the sum of gradients is divided; ``terms_per_batch``: how many of them are
    ranks with parts of one batch. ``checks_overflow``: a step whose gradient is not finite is skipped.
    """

    def __init__(
        self,
        runtime: ZeroRuntime,
        settings: Config,
        *,
        watch: CommSession,
        exchange: NormExchange,
        scaler: LossScaler,
        accumulation: Accumulation,
        num_terms: int,
        terms_per_batch: int,
        device: torch.device,
        checks_overflow: bool,
    ) -> None:
        self.checks_overflow = checks_overflow
        self.max_norm: float = settings.gradient_clipping  # of the next step; 0: no clipping
        self._runtime = runtime
        self._settings = settings
        self._recorder = watch.recorder
        self._watch = watch if watch.world is not watch.gathers else None  # on a mesh
        self._exchange = exchange
        self._scaler = scaler
        self._adapts_scale = isinstance(scaler, DynamicScale)  # only fp16, which checks overflow
        self._accumulation = accumulation
        self._num_terms, self._terms_per_batch = num_terms, terms_per_batch
        self._device = device
        self._ops = ops_of(device)
        self._wide = widest(runtime.units)
        self._active = self._rounds = 0  # counted by join() in this step
        self._late: list[tuple[Unit, PendingUpdates]] = []
        self._updating: list[Unit] = []  # resident units, in the order of their all-gathers
        gathers = runtime.stage.shards_optimizer
        shards = runtime.optimizer.shards if runtime.optimizer and gathers else ()
        self._whole = [s.unit for s in shards if s.unit.resident and s.unit.comm.size > 1]
        for unit in runtime.units:
            if unit.resident:
                unit.own_uses()
        self._resident = [
            s.unit
            for s in (runtime.optimizer.shards if runtime.optimizer else ())
            if s.unit.resident
        ]
        offload = settings.zero_optimization.offload_optimizer
        self._asks_norm: bool = settings.zero_optimization.compute_grad_norm
        self._is_delayed = offload is not None and offload.delayed_update
        self._told_of_old_values = False
        if runtime.optimizer is not None and runtime.optimizer.early is not None:
            runtime.optimizer.early.guess = self._factor_without_clipping

    def run(self, step: int, loss: RankLoss = NO_LOSS) -> StepOutcome:
        """Do one optimizer step. ``loss``: this rank's, over the step's micro-batches.

        1. All-gather the parameters whose update was delayed. Take over edits of the program.
        2. Finish the reduction of gradients.
        3. Measure norm, overflow and the mean loss, with one small all-gather.
        4. Unless the step is skipped: update, and all-gather each updated unit that is resident.
        5. Update the loss scale, and record that a step has ended.
        """
        runtime, optimizer = self._runtime, self._runtime.optimizer
        assert optimizer is not None
        self.all_gather_late()
        optimizer.sync_edits()
        runtime.reducer.finish()
        measured, norms = self._measure(loss)
        norm, found_inf = self._mean_norm(measured), measured.found_inf
        scale = self._scaler.scale.clone()
        clip = None if norm is None else clip_factor(norm, self.max_norm)
        factor = self._factor_without_clipping()
        if clip is not None:
            factor = clip.to(self._wide) * factor
        skipped = read_flag(found_inf) if self.checks_overflow else False
        flag = self._ops.host_flag(found_inf) if skipped is None else skipped
        report = StepReport(
            step,
            learning_rates(optimizer.inner.param_groups),
            norm, clip, scale, flag, measured.loss,
        )  # fmt: skip
        if skipped is None and not optimizer.skips_on_device:
            skipped = bool(flag)  # the optimizer cannot skip on the device: wait for the flag
        if not skipped:
            on_device = found_inf.float() if skipped is None else None
            self._update(factor, on_device, measured.untouched)
        if self._adapts_scale:
            self._scaler.update(found_inf)
            report = replace(report, _next_scale=self._scaler.scale.clone())
        self._recorder.mark_step(step)
        return StepOutcome(report, skipped, norms)

    def norm_before_step(self) -> Tensor | None:
        """The norm that the next :meth:`run` will find, 0-dim on the device. Collective.

        None if the configuration does not ask for norms.
        """
        self.all_gather_late()
        self._runtime.reducer.finish()
        measured, _ = self._measure()
        return self._mean_norm(measured)

    def _measure(self, loss: RankLoss = NO_LOSS) -> tuple[GlobalNorm, Norms]:
        """The reduced gradient over all ranks, and the norms of this rank's fragments."""
        runtime, optimizer = self._runtime, self._runtime.optimizer
        assert optimizer is not None
        norms = optimizer.norms() if self._asks_norm or self.checks_overflow else []
        numbers = optimizer.numbers
        measured = global_norm(
            norms, runtime.reducer.buffers, self._exchange, device=self._device, dtype=self._wide,
            lost_edit=None if numbers is None else numbers.lost_edit(self._device),
            loss=loss,
        )  # fmt: skip
        if numbers is not None:
            numbers.lost_on_any_rank = measured.lost_edit
        is_strict = not self._settings.zero_optimization.ignore_unused_parameters
        if is_strict and (measured.untouched or self._watch is not None):
            self._refuse_unused(measured.untouched)
        return measured, norms

    def _mean_norm(self, measured: GlobalNorm) -> Tensor | None:
        """2-norm of the mean over ranks, without loss scale, before clipping."""
        if not self._asks_norm:
            return None
        return measured.total * self.mean_factor() / self._scaler.scale.to(self._wide)

    def _update(
        self, factor: Tensor, found_inf: Tensor | None, untouched: dict[int, frozenset[int]]
    ) -> None:
        """Update every unit and make the new values available. An error fails the engine for good."""
        optimizer = self._runtime.optimizer
        assert optimizer is not None
        for unit in self._resident:
            unit.note_uses()
        updated = optimizer.update(factor, found_inf=found_inf, untouched=untouched)
        try:
            with contextlib.closing(updated):
                for unit, pending in updated:
                    self._all_gather_updated(unit, pending)
                    if unit.forget_left() and not self._told_of_old_values:
                        self._told_of_old_values = True
                        logger.warning(OLD_VALUES, unit.name)
            for unit in self._whole:
                if unit.is_aliased:  # nothing tells when the program reads the new values
                    unit.wait_for_unshard()
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        self._runtime.life.fail(
            f"an update ended in the middle ({type(error).__name__}: {error}): parameters "
            "before it are one step ahead of those after it, and pending transfers are lost. "
            "Close this engine, build a new one and continue from the last checkpoint."
        )

    # ------------------------------------------------------------------ factors

    def join(self, active: int) -> None:
        """Count a micro-batch for which ``active`` ranks had a batch (key ``uneven``)."""
        self._active, self._rounds = self._active + active, self._rounds + 1

    def forget_step(self) -> None:
        """Reset the counts of :meth:`join`: the next micro-batch is the first of its step."""
        self._active = self._rounds = 0

    def mean_factor(self) -> float:
        """The factor that turns the sum over ranks and backwards into the mean."""
        ranks: float = self._num_terms
        if self._settings.gradient_allreduce_op == "sum":
            ranks = 1
        elif self._active:  # the mean number of ranks with a batch, over the step's micro-batches
            ranks = self._active / self._rounds * self._terms_per_batch
        return self._runtime.reducer.predivide / ranks / self._accumulation.remaining_divisor

    def _factor_without_clipping(self) -> Tensor:
        """0-dim on the device: turns the scaled sum into the mean. Early updates use it."""
        return self.mean_factor() / self._scaler.scale.to(self._wide)

    def unscaled_factor(self) -> float:
        """:meth:`mean_factor` for gradients that are still loss-scaled. Waits for the device."""
        return self.mean_factor() / float(read(self._scaler.scale))

    def _refuse_unused(self, untouched: dict[int, frozenset[int]]) -> None:
        names = [
            unit.layout.slots[i].fqn
            for unit in self._runtime.units
            for i in sorted(untouched.get(id(unit), ()))
        ]
        if self._watch is not None:  # other stages have other parameters, and must not go on either
            names = self._watch.texts_of_all(names, self._device, topic="unused parameters")
        if not names:
            return
        raise UsageError(
            f"{len(names)} trainable parameters got no gradient on any rank: {', '.join(names[:5])}"
            f"{'...' if len(names) > 5 else ''}. Freeze them, use them, or set "
            '"ignore_unused_parameters": true.'
        )

    # ------------------------------------------------------------------ new values

    def _all_gather_updated(self, unit: Unit, pending: PendingUpdates | None) -> None:
        """Make the update of a unit available to the next forward, which waits for it on first use.

        The unit is all-gathered if it is resident. ``pending``: its asynchronous update. All ranks must
        start the all-gathers of resident units in the order of the units (ADR 0004), and forward may use
        the units in another order. So the first use of one of them ends all updates.
        """
        ordered = unit.resident and unit.comm.size > 1
        if pending is not None and self._is_delayed:
            self._late.append((unit, pending))
        elif ordered and (pending is not None or self._updating):
            unit.all_gather_updated(
                _nothing if pending is None else pending.wait, in_order=self.end_updates
            )
            self._updating.append(unit)
        elif pending is not None:
            unit.all_gather_updated(pending.wait)
        elif self._runtime.stage.shards_optimizer:
            unit.all_gather_updated()
            if self._settings.zero_optimization.overlap_comm is False:
                unit.wait_for_unshard()
        else:
            unit.increment_versions()

    def end_updates(self) -> None:
        """Wait for the updates that still run, and all-gather their units, in the order of the units.

        Raises what an update raised. The engine has failed then.
        """
        updating, self._updating = self._updating, []
        try:
            for unit in updating:
                unit.end_update()
        except BaseException as error:
            self._fail(error)
            raise

    def all_gather_late(self) -> None:
        """All-gather the parameters whose update runs or was delayed (ZeroShard's ``delayed_update``)."""
        self.end_updates()
        late, self._late = self._late, []
        for unit, pending in late:
            pending.wait()
            unit.all_gather_updated()


def _nothing() -> None:
    """The update has ended."""


class SkippedSteps:
    """Counts skipped steps, and advances the schedule for applied updates only.

    The schedule is passed to each call, because a program may remove it to step it itself.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.count = 0
        self.in_a_row = 0
        self._groups = groups
        self._unread: tuple[StepReport, Any] | None = None  # a step without known outcome

    def advance(
        self,
        skipped: bool | None,
        report: StepReport,
        scheduler: Any,
        lr_kwargs: dict[str, Any],
        samples: Callable[[], int],
    ) -> None:
        """Advance the schedule for an applied update of so many samples.

        ``skipped=None``: the outcome is not known; the schedule is set back if the step was skipped.
        """
        if skipped is None:
            self._unread = (report, schedule_snapshot(scheduler, self._groups))
        if not skipped and scheduler is not None:
            step_schedule(scheduler, lr_kwargs, samples)

    def resolve_last_step(self, scheduler: Any) -> StepReport | None:
        """Get the outcome of the last step if the host does not have it. Returns the report of a skip.

        Waits for that step only; the forward and backward after it stay queued.
        """
        unread, self._unread = self._unread, None
        if unread is None:
            return None
        report, snapshot = unread
        if not report.skipped:
            self.in_a_row = 0
            return None
        schedule_restore(scheduler, self._groups, snapshot)
        return report


def loss_of(losses: Sequence[Tensor], weight: float) -> RankLoss:
    """The sum of a step's losses, which are divided by the number of its micro-batches.

    None of the losses is known if the program calls ``backward()`` on them itself.
    """
    if not losses or not all(_is_whole(loss) for loss in losses):
        return NO_LOSS
    own = [getattr(loss, "_local_tensor", loss).view(1) for loss in losses]
    total = own[0].double() if len(own) == 1 else torch.cat(own).double().sum().view(1)
    return RankLoss(total, weight)


def _is_whole(loss: Tensor) -> bool:
    """Whether this rank has the value. For a cut DTensor that would be a collective."""
    return all(placement.is_replicate() for placement in getattr(loss, "placements", ()))


def read_flag(flag: Tensor) -> bool | None:
    """The value of a 0-dim flag if the host can know it without waiting, else None. Fakes are False."""
    if is_fake(flag):
        return False
    return bool(flag) if flag.device.type == "cpu" else None


def widest(units: Sequence[Unit]) -> torch.dtype:
    """fp64 if anything trains in fp64, else fp32."""
    masters = {unit.row.master for unit in units if unit.trainable}
    return torch.float32 if masters.isdisjoint((torch.float64, torch.complex128)) else torch.float64
