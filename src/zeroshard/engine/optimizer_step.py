"""What happens to an accumulated batch: how is it reduced, measured, applied and sent out?"""

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
    """What ranks know of a gradient together. Tensors are 0-dim and stay on the device."""

    norm: Tensor | None  # 2-norm of the mean, unscaled, before clipping; None if not asked for
    found_inf: Tensor  # bool
    untouched: dict[int, frozenset[int]]  # per unit (by id), slots without gradient on any rank
    own_norms: Sequence[tuple[int, Tensor]]  # of this rank's fragments, by parameter


class OptimizerStep:
    """Finishes accumulated batches of one engine. ``checks_overflow``: a gradient that is not finite
    changes nothing."""

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
        self.max_norm: float = settings.gradient_clipping  # of the next step; 0 is off
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
        """Reduce, measure, update, publish. Was it skipped? None: only the device knows yet."""
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
            skipped = bool(found_inf)  # this class cannot skip on the device: one wait per step
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
        """One more micro-batch, which ``active`` ranks had (key ``uneven``)."""
        self._active, self._rounds = self._active + active, self._rounds + 1

    def forget_step(self) -> None:
        """The next micro-batch is the first of its step."""
        self._active = self._rounds = 0

    def mean_factor(self) -> float:
        """From the sum over ranks and backwards to the mean: one number, exact where it is 1."""
        ranks: float = self._comm.world_size
        if self._settings.gradient_allreduce_op == "sum":
            ranks = 1
        elif self._active:  # ranks that had a batch, on average over the step's micro-batches
            ranks = self._active / self._rounds
        return self._runtime.reducer.predivide / ranks / self._accumulation.remaining_divisor

    def unscaled_factor(self) -> float:
        """The same for gradients that still carry the loss scale. Waits for the device."""
        return self.mean_factor() / float(self._scaler.scale)

    # ------------------------------------------------------------------ measuring

    def _measure(self) -> Measures:
        """Global norm, overflow flag and never-touched parameters, from one small exchange.

        The exchange carries ``[sum of squares, history hash, touched flags...]`` of each rank.
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
            pin_memory=self._device.type == "cuda",  # from pageable memory the host would wait
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
        if all(flags):  # only a rank that misses gradients has to ask what others had
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
        """Send an updated shard of a whole unit; the next forward waits for it where it needs it.

        ``pending``: it is still being updated, behind. Units that ranks gather from each other right
        after are waited for here: all ranks gather in this order, whatever they do in forward.
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
        """Parameters whose update was put off (own key ``delayed_update``) get it now."""
        late, self._late = self._late, []
        for unit, pending in late:
            pending.wait()
            unit.all_gather_updated()


class SkippedSteps:
    """Which steps changed nothing, and what that means for the schedule.

    ``scheduler()``: the schedule of the moment (programs take it away to step it themselves).
    """

    def __init__(self, scheduler: Callable[[], Any], groups: list[dict[str, Any]]) -> None:
        self.count = 0
        self.in_a_row = 0
        self._scheduler = scheduler
        self._groups = groups
        self._unread: tuple[StepReport, Any] | None = None  # one the host does not know of yet

    def advance(self, skipped: bool | None, report: StepReport, lr_kwargs: dict[str, Any]) -> None:
        """Applied updates advance the schedule. A skip not known yet is taken back when it is."""
        scheduler = self._scheduler()
        if skipped is None:
            self._unread = (report, schedule_snapshot(scheduler, self._groups))
        if not skipped and scheduler is not None:
            scheduler.step(**lr_kwargs)

    def resolve_last_step(self) -> StepReport | None:
        """Learn the outcome of the last step if the host does not know it yet; the report of a skip.

        It waits for that step alone: the forward and backward that came after stay queued.
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
