"""What is a training step? Forward, backward and step of one engine, and nothing else."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from zeroshard.comm.collectives import Comm
from zeroshard.config import LoadedConfig
from zeroshard.core.ledger import RESTING, TEMPORARY
from zeroshard.core.nbytes import state_nbytes
from zeroshard.engine import setup
from zeroshard.engine.accumulate import Accumulation
from zeroshard.engine.data import agreed_batches
from zeroshard.engine.report import (
    MemoryReport,
    StepReport,
    memory_rows,
    rows_from_vector,
    vector_of,
)
from zeroshard.errors import LossScaleError, UsageError
from zeroshard.zero.access import Training
from zeroshard.zero.clip import clip_factor, local_sum_of_squares
from zeroshard.zero.hooks import StepHooks
from zeroshard.zero.touch import pack_flags, unpack_any

logger = logging.getLogger("zeroshard")
T = TypeVar("T")


class Engine(nn.Module):
    """Trains one model under ZeRO.

    ``model``: an ordinary module, one built under :class:`zeroshard.zero.Init`, or one on the meta
    device. ``config``: DeepSpeed's JSON as dict, path or string. ``optimizer``: a ``torch.optim``
    object, or a callable of the parameters; None takes the one in the config, or none at all (then the
    engine only runs the model). ``lr_scheduler``: an object, or a callable of the optimizer.

    Collective: every rank builds its engines in the same order, from the same configuration.
    Raises :class:`ConfigError` with all mistakes of the configuration at once.

    >>> engine = Engine(nn.Linear(4, 1), config={
    ...     "train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}})
    >>> loss = engine(torch.ones(8, 4)).square().mean()
    >>> _ = engine.backward(loss)
    >>> engine.step()
    >>> engine.last_step.skipped
    False
    >>> engine.close()
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        config: Any,
        optimizer: Any = None,
        model_parameters: Iterable[Any] | None = None,
        lr_scheduler: Any = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        parts = setup.assemble(
            model,
            config=config,
            optimizer=optimizer,
            model_parameters=model_parameters,
            lr_scheduler=lr_scheduler,
            device=device,
        )
        self.module = model
        self.loaded: LoadedConfig = parts.loaded
        self.settings = parts.loaded.config
        self.device = parts.device
        self.policy = parts.policy
        self.runtime = parts.runtime
        self.scaler = parts.scaler
        self.lr_scheduler = parts.scheduler
        self.optimizer = parts.runtime.optimizer.inner if parts.runtime.optimizer else None
        self.world_size = parts.place.world_size
        self.global_rank = parts.place.rank
        self.local_rank = parts.place.local_rank
        self._comm: Comm = parts.comm
        self._watch = parts.watch
        self._monitors = parts.monitors
        self.accumulation = parts.accumulation
        self.global_steps = 0
        self.skipped_steps = 0
        self.global_samples = 0
        self.last_step: StepReport | None = None
        self._skips_in_a_row = 0
        self._unread: tuple[StepReport, Any] | None = None  # a skip the host does not know of yet
        self._in_engine_backward = False
        self._scaled_by_caller = False
        self._weight, self._active = 1.0, 0.0
        self._closed = False
        for tile in self.runtime.optimizer.tiles if self.runtime.optimizer else ():
            tile.unit.training = Training(self.runtime.optimizer, tile, self._mean_factor_on_host)
        self._hooks = StepHooks(
            self.runtime.gatherer,
            self.runtime.reducer,
            at_boundary=self.accumulation.reduces_now,
            on_forward_begin=self._settle,
            on_backward_begin=self._on_backward_begin,
        )

    # ------------------------------------------------------------------ forward and backward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model. Returns what the model returns."""
        self._check_open()
        if self.settings.fp16.enabled and self.settings.fp16.auto_cast:
            args, kwargs = setup.cast_floats((args, kwargs), torch.float16)
        if self.policy.autocast is None:
            return self.module(*args, **kwargs)
        with torch.autocast(self.device.type, dtype=self.policy.autocast):
            return self.module(*args, **kwargs)

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """Backpropagate a scalar loss, divided by ``gradient_accumulation_steps`` and loss-scaled.

        ``scale_wrt_gas=False``: the caller divided already. Returns the divided loss, not loss-scaled.
        """
        self._check_open()
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise UsageError(
                f"engine.backward needs a scalar loss, got {shape}. Reduce it first, for instance "
                "with .mean()."
            )
        if scale_wrt_gas and self.accumulation.steps > 1:
            loss = loss / self.accumulation.steps
        scaled = loss * self.scaler.scale if self._scales_loss else loss
        if self._weight != 1.0:
            scaled = scaled * self._weight
        self._in_engine_backward = True
        try:
            scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        finally:
            self._in_engine_backward = False
        return loss

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, for a plain ``.backward()`` in fp16."""
        self._scaled_by_caller = True
        return loss * self.scaler.scale

    @property
    def _scales_loss(self) -> bool:
        return bool(
            self.settings.fp16.enabled or self.policy.autocast == torch.float16
        )

    def _on_backward_begin(self) -> None:
        if not self._in_engine_backward:
            if self._scales_loss and not self._scaled_by_caller:
                raise UsageError(
                    "loss.backward() in fp16 without loss scaling: small gradients would vanish. Use "
                    "engine.backward(loss), or engine.scale(loss).backward()."
                )
            if self._weight != 1.0:
                raise UsageError(
                    'loss.backward() on a rank that has joined with weight 0 ("uneven": "join"): its '
                    "repeated batch would count. Use engine.backward(loss)."
                )
        self.accumulation.note_backward(divided=self._in_engine_backward)

    # ------------------------------------------------------------------ the step

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """At an accumulation boundary: clip, update, zero the gradients, advance the schedule.

        Elsewhere it only counts the micro-batch. Nothing is updated, and the schedule stays, if the
        gradient is not finite (fp16, and bf16 with ``check_grad_overflow``). Waits for no device.
        """
        self._check_open()
        if self.accumulation.deferred:
            raise UsageError("engine.step() inside no_sync(): leave the context before stepping.")
        if not self.accumulation.at_boundary():
            self._end_micro_batch()
            return
        if self.runtime.optimizer is None:
            raise UsageError(
                "engine.step() without an optimizer: pass one to initialize(), or name one in the "
                'config under "optimizer".'
            )
        if not self.accumulation.divided:
            raise UsageError(
                "engine.step() before any backward of this step: there is no gradient. Call "
                "engine.backward(loss) first."
            )
        self._settle()
        self._update(lr_kwargs or {})
        self._end_micro_batch()

    def _update(self, lr_kwargs: dict[str, Any]) -> None:
        """Finish the accumulated batch: reduce, measure, update, publish."""
        runtime, optimizer = self.runtime, self.runtime.optimizer
        assert optimizer is not None
        optimizer.follow_edits(thorough=self.settings.zero_optimization.enable_sanity_checks)
        runtime.reducer.finish()
        norm, found_inf, untouched = self._measure()
        scale = self.scaler.scale.clone()
        clip = None if norm is None else clip_factor(norm, self.settings.gradient_clipping)
        factor = self._mean_factor() / scale.to(self._wide)
        if clip is not None:
            factor = clip.to(self._wide) * factor
        report = StepReport(
            self.global_steps + 1,
            tuple(float(group["lr"]) for group in self._groups),
            norm, clip, scale, found_inf if self._checks_overflow else None,
        )  # fmt: skip
        skipped = setup.read_flag(found_inf) if self._checks_overflow else False
        if skipped is None and not optimizer.skips_on_device:
            skipped = bool(found_inf)  # this class cannot skip on the device: one wait per step
        if not skipped:
            on_device = found_inf.float() if skipped is None else None
            optimizer.update(factor, found_inf=on_device, untouched=untouched)
            if runtime.stage.shards_optimizer:
                self._publish()
        self.scaler.update(found_inf if self._checks_overflow else torch.zeros_like(found_inf))
        self.last_step = report
        self.global_steps += 1
        self._advance_schedule(skipped, report, lr_kwargs)
        if skipped:
            self._on_skip(report)
        elif skipped is not None:
            self._skips_in_a_row = 0
        runtime.reducer.reset()
        self._hooks.forget_calls()
        self.accumulation.begin_step()
        self._scaled_by_caller, self._active = False, 0.0
        self._observe(report)

    def _measure(self) -> tuple[Tensor | None, Tensor, dict[int, frozenset[int]]]:
        """Global norm, overflow flag and never-touched parameters, from one small exchange.

        The exchange carries ``[sum of squares, history hash, touched flags...]`` of each rank.
        """
        runtime, optimizer = self.runtime, self.runtime.optimizer
        assert optimizer is not None
        measures = self.settings.zero_optimization.compute_grad_norm
        norms = optimizer.norms() if measures or self._checks_overflow else []
        squares = local_sum_of_squares(norms, self.device)
        flags = [flag for buffer in runtime.reducer.buffers for flag in buffer.touched]
        words = torch.tensor(
            [float(self._watch.history()), *pack_flags(flags)], dtype=torch.float64
        ).to(self.device, non_blocking=True)
        rows = self._comm.gather_small(torch.cat([squares.view(1), words]), name="norm")
        self._watch.check(rows[:, 1])
        total = rows[:, 0].sum().sqrt().to(self._wide)
        found_inf = total.isfinite().logical_not()
        norm = total * self._mean_factor() / self.scaler.scale.to(self._wide) if measures else None
        untouched: dict[int, frozenset[int]] = {}
        if not all(flags):  # only a rank that misses gradients has to ask what others had
            seen = iter(unpack_any(rows[:, 2:], len(flags)))
            for buffer in runtime.reducer.buffers:
                missing = frozenset(i for i in range(len(buffer.touched)) if not next(seen))
                if missing:
                    untouched[id(buffer.unit)] = missing
        if untouched and not self.settings.zero_optimization.ignore_unused_parameters:
            self._refuse_unused(untouched)
        return norm, found_inf, untouched

    def _refuse_unused(self, untouched: dict[int, frozenset[int]]) -> None:
        names = [
            unit.layout.slots[i].fqn
            for unit in self.runtime.units
            for i in sorted(untouched.get(id(unit), ()))
        ]
        raise UsageError(
            f"{len(names)} trainable parameters got no gradient on any rank: {', '.join(names[:5])}"
            f"{'...' if len(names) > 5 else ''}. Freeze them, use them, or set "
            '"ignore_unused_parameters": true.'
        )

    def _mean_factor(self) -> float:
        """From the sum over ranks and backwards to the mean: one number, exact where it is 1."""
        ranks: float = self.world_size
        if self.settings.gradient_allreduce_op == "sum":
            ranks = 1
        elif self._active:  # ranks that had a batch, on average over the step's micro-batches
            ranks = self._active / self.accumulation.steps
        return self.runtime.reducer.predivide / ranks / self.accumulation.remaining_divisor

    def _mean_factor_on_host(self) -> float:
        return self._mean_factor() / float(self.scaler.scale)

    def _publish(self) -> None:
        """Send updated shards of whole units; the next forward waits for each where it needs it."""
        units = [u for u in self.runtime.units if u.trainable and u.resident]
        for unit in units:
            unit.publish()
            if self.settings.zero_optimization.overlap_comm is False:
                unit.wait()

    def _end_micro_batch(self) -> None:
        self.accumulation.advance()
        self.global_samples += self.train_micro_batch_size_per_gpu() * self.world_size

    # ------------------------------------------------------------------ skipped steps

    @property
    def _checks_overflow(self) -> bool:
        bf16 = self.settings.bf16
        return bool(self._scales_loss or (bf16.enabled and bf16.check_grad_overflow))

    def _advance_schedule(
        self, skipped: bool | None, report: StepReport, lr_kwargs: dict[str, Any]
    ) -> None:
        """Applied updates advance the schedule. A skip not known yet is taken back when it is."""
        if skipped or self.lr_scheduler is None:
            return
        if skipped is None:
            self._unread = (report, setup.schedule_snapshot(self.lr_scheduler, self._groups))
        self.lr_scheduler.step(**lr_kwargs)

    def _settle(self) -> None:
        """Learn the outcome of the last step if the host does not know it yet."""
        unread, self._unread = self._unread, None
        if unread is None or setup.is_fake(unread[0]._found_inf):
            return
        report, snapshot = unread
        if report.skipped:
            setup.schedule_restore(self.lr_scheduler, self._groups, snapshot)
            self._on_skip(report)
        else:
            self._skips_in_a_row = 0

    def _on_skip(self, report: StepReport) -> None:
        self.skipped_steps += 1
        self._skips_in_a_row += 1
        if self._skips_in_a_row == 1 and self.global_rank == 0:
            logger.warning(
                "step %d skipped: the gradient is not finite (loss scale %g)",
                report.step, report.loss_scale,
            )  # fmt: skip
        if self.settings.fp16.enabled and bool(self.scaler.at_floor):
            raise LossScaleError(self._non_finite_text(report))

    def _non_finite_text(self, report: StepReport) -> str:
        return (
            f"Non-finite gradients for {self._skips_in_a_row} steps up to step {report.step}, and the "
            f"loss scale {report.loss_scale:g} is at its minimum, so lowering it cannot help. First "
            f"bad gradient: {self._first_bad_gradient()}. If the model was trained in bf16, train it "
            'in bf16; else look at the loss, or lower "fp16": {"min_loss_scale"}.'
        )

    def _first_bad_gradient(self) -> str:
        """The first parameter, in model order, whose gradient is not finite on any rank."""
        assert self.runtime.optimizer is not None
        first = self.runtime.optimizer.first_non_finite()
        none = float(2**31)
        vote = torch.tensor([none if first is None else float(first)], dtype=torch.float64)
        index = int(self._comm.gather_small(vote.to(self.device), name="first bad").min())
        names = dict(enumerate(name for name, _ in self.module.named_parameters()))
        return repr(names.get(index, "unknown"))

    # ------------------------------------------------------------------ accumulation and data

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside do not complete a step. Legal at every stage: 0 and 1 defer the reduction,
        2 and 3 reduce into the owner's shard, which is the same result at more traffic.
        """
        self.accumulation.deferred += 1
        try:
            yield
        finally:
            self.accumulation.deferred -= 1

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """From now on the caller says which backward completes a step (Accelerate does)."""
        self.accumulation.declared = bool(is_boundary)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Will the next ``step()`` update?"""
        return self.accumulation.at_boundary()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients accumulated so far."""
        self.runtime.reducer.abandon()
        self.accumulation.begin_step()
        for param in self.module.parameters():
            param.grad = None

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Iterate while ranks agree that there are batches (config key ``uneven``)."""
        return agreed_batches(
            loader,
            exchange=lambda vote: self._comm.gather_small(vote.to(self.device), name="batches").cpu(),
            join=self.settings.uneven == "join",
            set_weight=self._set_weight,
        )

    def _set_weight(self, own: float, active: int) -> None:
        self._weight = own
        if self.settings.uneven == "join":
            self._active += active

    # ------------------------------------------------------------------ reading

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups if self.optimizer is not None else []

    @property
    def _wide(self) -> torch.dtype:
        """The dtype of norms and factors: fp64 if the model trains in fp64."""
        return setup.widest(self.runtime.units)

    @property
    def transport(self) -> str:
        """Which collectives are used, for instance ``p2p`` or ``nccl``."""
        return self._comm.transport

    @property
    def dtypes(self) -> str:
        """The table of dtypes of this run."""
        return self.policy.table()

    def get_global_grad_norm(self) -> float | None:
        """Norm before clipping of the last step; None before the first."""
        return self.last_step.grad_norm if self.last_step is not None else None

    def was_step_applied(self) -> bool:
        """Did the last ``step()`` update the parameters?"""
        return self.last_step is not None and not self.last_step.skipped

    def get_lr(self) -> list[float]:
        """Learning rate of each param group, for the next update."""
        self._settle()
        return [float(group["lr"]) for group in self._groups]

    def train_batch_size(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.train_micro_batch_size_per_gpu() * self.accumulation.steps * self.world_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per rank and forward."""
        size = self.settings.train_micro_batch_size_per_gpu
        assert size is not None, "the configuration is resolved"
        return size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self.accumulation.steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the batch size by changing the accumulation; the micro-batch stays."""
        per_step = self.train_micro_batch_size_per_gpu() * self.world_size
        if train_batch_size < per_step or train_batch_size % per_step:
            raise UsageError(
                f"set_train_batch_size({train_batch_size}): not a multiple of micro-batch "
                f"{self.train_micro_batch_size_per_gpu()} x world size {self.world_size}."
            )
        if self.accumulation.divided:
            raise UsageError("set_train_batch_size in the middle of a step: call it after step().")
        self.accumulation.steps = train_batch_size // per_step
        self.accumulation.micro_steps = 0

    def iter_full_params(self) -> Iterator[tuple[str, Tensor]]:
        """Stream ``(name, full values)`` of every parameter, one unit in memory at a time. Collective."""
        for unit in self.runtime.units:
            unit.wait()
            full_N = unit.full_N if unit.resident else unit.gathered_copy()
            for slot in unit.layout.slots:
                yield slot.fqn, full_N[slot.start : slot.stop].view(slot.shape).detach()

    def memory_report(self, *, all_ranks: bool = False) -> MemoryReport:
        """Planned and measured bytes per category; of all ranks if asked (then collective)."""
        ledger = self.runtime.ledger
        planned = state_nbytes(self.runtime.plan, self.runtime.stage, self._comm.rank)
        measured = {name: ledger.nbytes(name) for name in RESTING}
        measured["gradients"] = ledger.peak["gradients"]  # they exist from backward to step only
        measured |= {name: ledger.peak[name] for name in TEMPORARY}
        if not all_ranks:
            return MemoryReport({self.global_rank: memory_rows(planned, measured)})
        vector = torch.tensor(vector_of(planned, measured), dtype=torch.float64, device=self.device)
        rows = self._comm.gather_small(vector, name="memory report").tolist()
        return MemoryReport({rank: rows_from_vector(row) for rank, row in enumerate(rows)})

    def _observe(self, report: StepReport) -> None:
        every = self.settings.steps_per_print
        due = bool(every) and math.isfinite(every) and report.step % max(1, int(every)) == 0
        if due and self.global_rank == 0:
            norm = report.grad_norm
            logger.info(
                "step=%d skipped=%d lr=%s grad_norm=%s loss_scale=%g",
                report.step, self.skipped_steps, [f"{lr:.3g}" for lr in report.lrs],
                "none" if norm is None else f"{norm:.4g}", report.loss_scale,
            )  # fmt: skip
        if self._monitors is not None:
            self._monitors.write(
                [
                    ("Train/Samples/lr", report.lr, self.global_samples),
                    ("Train/Samples/loss_scale", report.loss_scale, self.global_samples),
                ]
            )

    # ------------------------------------------------------------------ life

    def train(self, mode: bool = True) -> Engine:
        """Training mode of the module."""
        self.module.train(mode)
        self.training = mode
        return self

    def close(self) -> None:
        """Detach hooks and give all memory back. Whole parameters stay readable, shards are gone."""
        if self._closed:
            return
        self._closed = True
        self._hooks.remove()
        self.runtime.reducer.abandon()
        for unit in self.runtime.units:
            unit.close()
        if self.runtime.optimizer is not None:
            self.runtime.optimizer.close()
        if self._monitors is not None:
            self._monitors.close()
        self._watch.close()

    destroy = close

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this engine was closed; build a new one to go on.")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or name.startswith("__"):
                raise
            return getattr(self.module, name)  # generate, config and whatever else models have

