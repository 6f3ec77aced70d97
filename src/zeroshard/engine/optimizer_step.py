"""The optimizer step: reduces, measures, updates and all-gathers an accumulated batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from zeroshard.config import Config
from zeroshard.engine.accumulate import Accumulation
from zeroshard.engine.build import ZeroRuntime
from zeroshard.engine.report import HostFlag, StepReport
from zeroshard.errors import UsageError
from zeroshard.offload.async_update import PendingUpdates
from zeroshard.optim.schedulers import schedule_restore, schedule_snapshot
from zeroshard.precision.loss_scaler import LossScaler
from zeroshard.watchdog.session import CommSession
from zeroshard.zero.clip import clip_factor, local_sum_of_squares
from zeroshard.zero.grad_flags import pack_flags, unpack_any
from zeroshard.zero.unit import Unit


@dataclass(frozen=True, eq=False, slots=True)
class Measures:
    """What all ranks know of a gradient together. Tensors are 0-dim, on the device."""

    norm: Tensor | None  # 2-norm of the mean, unscaled, before clipping; None: not asked for
    found_inf: Tensor  # bool: the norm is not finite
    untouched: dict[int, frozenset[int]]  # by id(unit), slots without gradient on any rank
    own_norms: Sequence[tuple[int, Tensor]]  # of this rank's fragments, by parameter


class OptimizerStep:
    """Finishes accumulated batches of one engine.

    ``checks_overflow``: a step whose gradient is not finite is skipped.
    """

    def __init__(
        self,
        runtime: ZeroRuntime,
        settings: Config,
        *,
        watch: CommSession,
        scaler: LossScaler,
        accumulation: Accumulation,
        device: torch.device,
        checks_overflow: bool,
    ) -> None:
        self.checks_overflow = checks_overflow
        self.max_norm: float = settings.gradient_clipping  # of the next step; 0: no clipping
        self._runtime = runtime
        self._settings = settings
        self._watch = watch
        self._comm = watch.gathers
        self._scaler = scaler
        self._accumulation = accumulation
        self._device = device
        self._wide = widest(runtime.units)
        self._active = self._rounds = 0  # of "join": batches of all ranks, and of one, this step
        self._late: list[tuple[Unit, PendingUpdates]] = []
        offload = settings.zero_optimization.offload_optimizer
        self._is_delayed = offload is not None and offload.delayed_update

    def run(self, step: int) -> tuple[StepReport, bool | None, Measures]:
        """Do one optimizer step. Returns its report, whether it was skipped, and the measures.

        1. All-gather the parameters whose update was delayed, and take over edits of the program.
        2. Finish the reduction of gradients.
        3. Measure norm and overflow, with one small all-gather.
        4. Unless the step is skipped: update, and all-gather each updated unit that is resident.
        5. Update the loss scale, and tell the session that a step has ended.

        Skipped is None if only the device knows it yet: the optimizer then skips on the device.
        """
        runtime, optimizer = self._runtime, self._runtime.optimizer
        assert optimizer is not None
        self.all_gather_late()
        optimizer.sync_edits()
        runtime.reducer.finish()
        measures = self._measure()
        norm, found_inf = measures.norm, measures.found_inf
        scale = self._scaler.scale.clone()
        clip = None if norm is None else clip_factor(norm, self.max_norm)
        factor = self.mean_factor() / scale.to(self._wide)
        if clip is not None:
            factor = clip.to(self._wide) * factor
        report = StepReport(
            step,
            tuple(float(group["lr"]) for group in optimizer.inner.param_groups),
            norm, clip, scale, HostFlag(found_inf) if self.checks_overflow else None,
        )  # fmt: skip
        skipped = read_flag(found_inf) if self.checks_overflow else False
        if skipped is None and not optimizer.skips_on_device:
            skipped = bool(found_inf)  # the optimizer cannot skip on the device: wait for the flag
        if not skipped:
            on_device = found_inf.float() if skipped is None else None
            optimizer.update(
                factor,
                found_inf=on_device,
                untouched=measures.untouched,
                published=self._all_gather_updated,
            )
        self._scaler.update(found_inf if self.checks_overflow else torch.zeros_like(found_inf))
        self._watch.step(step)
        return report, skipped, measures

    # ------------------------------------------------------------------ factors

    def join(self, active: int) -> None:
        """Count a micro-batch that ``active`` ranks had (key ``uneven``)."""
        self._active, self._rounds = self._active + active, self._rounds + 1

    def forget_step(self) -> None:
        """Reset the counts of :meth:`join`: the next micro-batch is the first of its step."""
        self._active = self._rounds = 0

    def mean_factor(self) -> float:
        """The factor from the sum over ranks and backwards to the mean. It is exact where it is 1."""
        ranks: float = self._comm.world_size
        if self._settings.gradient_allreduce_op == "sum":
            ranks = 1
        elif self._active:  # the mean number of ranks with a batch, over the step's micro-batches
            ranks = self._active / self._rounds
        return self._runtime.reducer.predivide / ranks / self._accumulation.remaining_divisor

    def unscaled_factor(self) -> float:
        """:meth:`mean_factor` for gradients that are still loss-scaled. Waits for the device."""
        return self.mean_factor() / float(self._scaler.scale)

    # ------------------------------------------------------------------ measuring

    def _measure(self) -> Measures:
        """Global norm, overflow flag and parameters without gradient, from one small all-gather.

        Each rank sends ``[sum of squares, history hash, gradient flags...]`` in fp64.
        """
        runtime, optimizer = self._runtime, self._runtime.optimizer
        assert optimizer is not None
        asked = self._settings.zero_optimization.compute_grad_norm
        norms = optimizer.norms() if asked or self.checks_overflow else []
        squares = local_sum_of_squares([norm for _, norm in norms], self._device)
        flags = [flag for buffer in runtime.reducer.buffers for flag in buffer.has_grad]
        words = torch.tensor(
            [float(self._watch.history()), *pack_flags(flags)],
            dtype=torch.float64,
            pin_memory=self._device.type == "cuda",  # a copy from pageable memory blocks the host
        ).to(self._device, non_blocking=True)
        rows = self._comm.all_gather_small(torch.cat([squares.view(1), words]), name="norm")
        self._watch.check(rows[:, 1])
        total = rows[:, 0].sum().sqrt().to(self._wide)
        norm = total * self.mean_factor() / self._scaler.scale.to(self._wide) if asked else None
        untouched = self._without_grad(rows, flags)
        if untouched and not self._settings.zero_optimization.ignore_unused_parameters:
            self._refuse_unused(untouched)
        return Measures(norm, total.isfinite().logical_not(), untouched, norms)

    def _without_grad(self, rows: Tensor, flags: list[bool]) -> dict[int, frozenset[int]]:
        if all(flags):  # only a rank without some gradients needs the flags of the others
            return {}
        seen = iter(flags if is_fake(rows) else unpack_any(rows[:, 2:], len(flags)))
        untouched = {}
        for buffer in self._runtime.reducer.buffers:
            missing = frozenset(i for i in range(len(buffer.has_grad)) if not next(seen))
            if missing:
                untouched[id(buffer.unit)] = missing
        return untouched

    def _refuse_unused(self, untouched: dict[int, frozenset[int]]) -> None:
        names = [
            unit.layout.slots[i].fqn
            for unit in self._runtime.units
            for i in sorted(untouched.get(id(unit), ()))
        ]
        raise UsageError(
            f"{len(names)} trainable parameters got no gradient on any rank: {', '.join(names[:5])}"
            f"{'...' if len(names) > 5 else ''}. Freeze them, use them, or set "
            '"ignore_unused_parameters": true.'
        )

    # ------------------------------------------------------------------ publishing

    def _all_gather_updated(self, unit: Unit, pending: PendingUpdates | None) -> None:
        """Make the update of a unit available to the next forward, which waits for it on first use.

        The unit is all-gathered if it is resident. ``pending``: its asynchronous update. If several ranks
        have to all-gather, this method waits for that update. All ranks must start these collectives in
        the order of the units (ADR 0004), and forward may use the units in another order.
        """
        if pending is not None and self._is_delayed:
            self._late.append((unit, pending))
        elif pending is not None and not (unit.resident and self._comm.world_size > 1):
            unit.all_gather_updated(pending.wait)
        elif self._runtime.stage.shards_optimizer:
            if pending is not None:
                pending.wait()
            unit.all_gather_updated()
            if self._settings.zero_optimization.overlap_comm is False:
                unit.wait_for_unshard()
        else:
            unit.increment_versions()

    def all_gather_late(self) -> None:
        """Send out the parameters whose update was delayed (ZeroShard's key ``delayed_update``)."""
        late, self._late = self._late, []
        for unit, pending in late:
            pending.wait()
            unit.all_gather_updated()


class SkippedSteps:
    """Counts skipped steps, and keeps the schedule in step with applied updates.

    ``scheduler()`` returns the current schedule; programs may remove it to step it themselves.
    """

    def __init__(self, scheduler: Callable[[], Any], groups: list[dict[str, Any]]) -> None:
        self.count = 0
        self.in_a_row = 0
        self._scheduler = scheduler
        self._groups = groups
        self._unread: tuple[StepReport, Any] | None = None  # a step whose outcome the host lacks

    def advance(self, skipped: bool | None, report: StepReport, lr_kwargs: dict[str, Any]) -> None:
        """Advance the schedule for an applied update.

        ``skipped=None``: the outcome is not known; the schedule is set back if the step was skipped.
        """
        scheduler = self._scheduler()
        if skipped is None:
            self._unread = (report, schedule_snapshot(scheduler, self._groups))
        if not skipped and scheduler is not None:
            scheduler.step(**lr_kwargs)

    def resolve_last_step(self) -> StepReport | None:
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
        schedule_restore(self._scheduler(), self._groups, snapshot)
        return report


def is_fake(tensor: Tensor | None) -> bool:
    """A tensor without values: planning, not training."""
    return isinstance(tensor, FakeTensor)


def read_flag(flag: Tensor) -> bool | None:
    """The value of a 0-dim flag if the host can know it without waiting, else None. Fakes are False."""
    if is_fake(flag):
        return False
    return bool(flag) if flag.device.type == "cpu" else None


def widest(units: Sequence[Unit]) -> torch.dtype:
    """fp64 if anything trains in fp64, else fp32."""
    masters = {unit.row.master for unit in units if unit.trainable}
    return torch.float64 if torch.float64 in masters else torch.float32
