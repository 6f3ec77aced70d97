"""Forward, backward and step of an engine."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from zeroshard.data.batches import agreed_batches, loader_for
from zeroshard.data.data_loader import ResumableLoader
from zeroshard.device.choice import on_host
from zeroshard.engine import failed_call, out_of_memory
from zeroshard.engine.build import EngineParts
from zeroshard.engine.engine_base import EngineBase, ManualGC
from zeroshard.engine.non_finite import LossSharing, NonFinitePolicy
from zeroshard.engine.optimizer_step import SkippedSteps, loss_of
from zeroshard.engine.pipeline import (
    Evaluation,
    PipelineRunner,
    check_loss_fn,
    evaluate_alone,
    train_alone,
)
from zeroshard.engine.restarts import Preemption
from zeroshard.errors import UsageError
from zeroshard.metrics.step_report import StepReport, learning_rates
from zeroshard.precision.policy import cast_floats

logger = logging.getLogger("zeroshard")
T = TypeVar("T")

MISCOUNTED = (
    "engine.step() after %d backwards counts as one micro-batch of %d. If the program calls "
    "step() only at the end of an optimizer step, use set_gradient_accumulation_boundary(), "
    'no_sync(), or "managed_gradient_accumulation": false'
)
"""A warning, not an error, because several losses in one micro-batch are allowed."""


UNSTEPPED = (
    "%d backwards without engine.step(): nothing is trained before it. "
    "Call engine.step() after each engine.backward(loss); it counts gradient_accumulation_steps"
)
"""A warning, because a program may sum gradients by itself."""

NO_OPTIMIZER = (
    "engine.step() without an optimizer: pass one to initialize(), or name one in the config under "
    '"optimizer".'
)
IN_THE_MIDDLE = "engine.train_batch() in the middle of a step: call it after step()."


class TrainingEngine(EngineBase):
    """Runs forward, backward and step, and counts them. :class:`~.engine.Engine` is built from it."""

    # Whose backward() runs; several if they share a loss.
    _in_backward: ClassVar[list[TrainingEngine]] = []

    def __init__(self, model: nn.Module, parts: EngineParts) -> None:
        super().__init__(model, parts)
        self._sharing = LossSharing(parts.scaler.scale)
        self._skipped = SkippedSteps(self._groups)
        self._micro_batch_size = self.settings.train_micro_batch_size_per_gpu
        self._norms: Sequence[tuple[int, Tensor]] = ()  # of the last step, by parameter
        self._losses: list[Tensor] = []  # that backward() got in the running step
        self._step_losses: list[Tensor] = []  # those of the last step
        self._non_finite = NonFinitePolicy(parts.nan_policy, self.settings.trust.max_rollbacks)
        self._scaled_by_caller = False
        self._weight = 1.0
        self._pipeline: PipelineRunner | None = None  # set when the calls of the engine are watched
        self._preemption: Preemption | None = None
        self._gc = ManualGC() if self.settings.disable_python_gc else None

    # ------------------------------------------------------------------ forward and backward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model. Returns what the model returns."""
        if not self.life.is_open:
            self.life.check("engine.forward()", "lp_params")
        if self.settings.fp16.enabled and self.settings.fp16.auto_cast:
            args, kwargs = cast_floats((args, kwargs), torch.float16)
        try:
            if self.policy.autocast is None:
                return self.module(*args, **kwargs)
            with torch.autocast(self.device.type, dtype=self.policy.autocast):
                return self.module(*args, **kwargs)
        except Exception as error:
            failed_call.tell(self, error, "forward")
            raise

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """Divide a scalar loss by ``gradient_accumulation_steps``, scale it, and run its backward.

        ``scale_wrt_gas=False``: the caller has divided it already. Returns the divided loss, which is
        not loss-scaled.
        """
        if not self.life.is_open:
            self.life.check("engine.backward()", "lp_params", "lp_grads")
        self._hooks.settle()
        self._in_backward.append(self)
        try:
            if scale_wrt_gas and self.accumulation.steps > 1:
                loss = loss / self.accumulation.steps
            self._losses.append(loss.detach())
            scaled = loss * self._sharing.begin() if self.scales_loss else loss
            if self._weight != 1.0:
                scaled = scaled * self._weight
            scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        except Exception as error:
            failed_call.tell(self, error, "backward")
            if (clearer := failed_call.backward_error(loss, error)) is not None:
                raise clearer from error
            raise
        finally:
            self._in_backward.remove(self)
        return loss

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, for a plain ``.backward()`` in fp16."""
        self.life.check()
        self._hooks.settle()
        self._scaled_by_caller = True
        return loss * self.scaler.scale

    def _on_forward_begin(self) -> None:
        self._update.end_updates()
        if self.accumulation.uncounted and torch.is_grad_enabled():
            self._end_micro_batch()  # inside no_sync() a new forward ends the micro-batch before it

    def _on_abandon(self) -> None:
        """Note that gradients were dropped: the next micro-batch is the first of its step."""
        lost = self.accumulation.micro_steps
        if lost and self.is_main_rank:
            logger.warning("the gradients of %d complete micro-batches of this step are lost", lost)
        self._forget_step()

    def _on_dropped(self) -> None:
        """Note that the program dropped all gradients. A step then updates nothing, as in PyTorch."""
        self._on_abandon()
        self.accumulation.is_dropped = True

    def _on_backward_begin(self, landed: bool) -> bool:
        """Whether the backward that runs is one of a micro-batch.

        See :class:`~zeroshard.zero.hooks.StepHooks`. ``landed``: a gradient is ready. Before that, only
        a backward that :meth:`backward` started is known to be one.
        """
        if not self.life.is_open:
            self.life.check("loss.backward()", "lp_params", "lp_grads")
        running = self._in_backward
        self.accumulation.rescale = None
        if not running and not landed:
            return False
        if running:
            caller = self if self in running else running[-1]
            failed_call.check_sharing(self, caller)
            if self.scales_loss:
                self.accumulation.rescale = self._sharing.rescale(caller._sharing)
        else:
            if self.scales_loss and not self._scaled_by_caller:
                raise UsageError(
                    "loss.backward() in fp16 without loss scaling: small gradients would become "
                    "0. Use engine.backward(loss), or engine.scale(loss).backward(). A loss of "
                    "several engines needs backward() of one of them."
                )
            if self._weight != 1.0:
                raise UsageError(
                    'loss.backward() on a rank that has joined with weight 0 ("uneven": "join"): '
                    "its repeated batch would change the gradients. Use engine.backward(loss)."
                )
        self.accumulation.note_backward(divided=bool(running))
        if self.accumulation.seems_endless():
            self._tell_unstepped()
        return True

    def _tell_untrained(self) -> None:
        """Warn if there were backwards and no step."""
        if self.accumulation.backwards and not self.global_steps:
            self._tell_unstepped()

    def _tell_unstepped(self) -> None:
        """Warn of backwards that no step has followed, if there is an optimizer."""
        if self.is_main_rank and self.runtime.optimizer is not None:
            logger.warning(UNSTEPPED, self.accumulation.unstepped)

    # ------------------------------------------------------------------ the step

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End a micro-batch. At an accumulation boundary: clip, update, advance the schedule.

        The gradients are dropped after the update. If a gradient is not finite, nothing is updated and
        the schedule does not advance; the key ``trust.nan_policy`` says what follows. On an accelerator
        the host reads at the next call whether it was finite. It waits for the device in this call only
        if the optimizer cannot skip a step on the device, or if a parameter got no gradient.

        Raises:
            NonFiniteError: the gradient was not finite; the same on every rank.
            LossScaleError: in fp16, and the loss scale cannot be lowered any more.
        """
        if not self.life.is_open:
            self.life.check("engine.step()")
        if self.accumulation.deferred:
            raise UsageError("engine.step() inside no_sync(): leave the context before stepping.")
        if self._hooks.settle():
            raise UsageError(
                "engine.step() after a backward that raised an exception: its gradients are "
                "incomplete and were deleted. Run the micro-batches of the step again."
            )
        if not self.accumulation.at_boundary():
            if self.accumulation.seems_miscounted() and self.is_main_rank:
                logger.warning(MISCOUNTED, self.accumulation.backwards, self.accumulation.steps)
            self._end_micro_batch()
            return
        if self.runtime.optimizer is None:
            raise UsageError(NO_OPTIMIZER)
        if not self.accumulation.divided and not self.accumulation.is_dropped:
            raise UsageError(
                "engine.step() before any backward of this step: there is no gradient. Call "
                "engine.backward(loss) first."
            )
        if self._judge_last_step():
            return  # the gradients were of other parameters, and were dropped
        try:
            outcome = self._update.run(self.global_steps + 1, loss_of(self._losses, self._weight))
        except Exception as error:
            failed_call.tell(self, error, out_of_memory.UPDATE)
            raise
        self.last_step = report = outcome.report
        self.global_steps += 1
        schedule, arguments = self.lr_scheduler, lr_kwargs or {}
        self._skipped.advance(outcome.skipped, report, schedule, arguments, self.train_batch_size)
        self.runtime.reducer.reset()
        self._hooks.forget_calls()
        self._norms, self._step_losses = outcome.norms, self._losses
        self._count_micro_batches()
        self._scaled_by_caller = False
        self._forget_step()
        self.accumulation.unstepped = 0
        if isinstance(self.training_dataloader, ResumableLoader):
            self.training_dataloader.end_step()
        self._end_step(outcome.skipped)
        if self._preemption is not None:
            self._preemption.after_step(self)

    def _forget_step(self) -> None:
        """The next micro-batch is the first of its step."""
        self._losses = []
        self._update.forget_step()
        self.accumulation.restart()

    def _end_step(self, skipped: bool | None) -> None:
        """Count a skipped step, report the step, and collect garbage if the configuration asks for it."""
        report = self.last_step
        assert report is not None
        if skipped:
            self._on_skip(report)
            if self._judge_last_step():
                return
        elif skipped is not None:
            self._skipped.in_a_row = 0
        next_lr = next(iter(learning_rates(self._groups)), 0.0)
        self._observer.after_step(report, self.global_samples, self.skipped_steps, next_lr)
        if self._gc is not None:
            self._gc.collect()

    def _end_micro_batch(self) -> None:
        self.accumulation.advance()
        self._count_micro_batches()

    def _count_micro_batches(self, count: int = 1) -> None:
        self.micro_steps += count
        self.global_samples += count * self.train_micro_batch_size_per_gpu() * self.dp_size

    # ------------------------------------------------------------------ pipelines

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Run one optimizer step of a model made by :func:`zeroshard.parallel.pipeline`. Collective.

        ``data_iter`` yields ``gradient_accumulation_steps`` micro-batches ``(inputs, labels)``. Inputs,
        which all have one shape in a step, are a tensor or a tuple of tensors for the first stage. Labels
        go to ``loss_fn``. Ranks of one pipeline pass the same data, chosen by ``dp_rank``; ranks without
        first and last stage may pass None.

        Returns the mean loss over micro-batches and data-parallel ranks, 0-dim fp64, on every rank.

        Raises:
            UsageError: the model is not such a model or has no ``loss_fn``, or a rank's data cannot be
                used; the same on every rank, before a forward.
            StopIteration: no rank has data left.
        """
        self._check_pipeline("train_batch()")
        accumulation = self.accumulation
        if accumulation.micro_steps or accumulation.divided:
            raise UsageError(IN_THE_MIDDLE)
        if self.runtime.optimizer is None:
            raise UsageError(NO_OPTIMIZER)
        if self._pipeline is None:
            return train_alone(self, data_iter)
        if self._preemption is not None:
            self._preemption.before_batch(self, training=True)
        loss = self._pipeline.train(self, data_iter)
        accumulation.advance(accumulation.steps - 1)
        self._count_micro_batches(accumulation.steps - 1)
        TrainingEngine.step(self)
        return loss

    def eval_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """The mean loss of as many micro-batches as a step has, in evaluation mode. Collective.

        Arguments, result and errors are those of :meth:`train_batch`.
        """
        loss = self._evaluate(data_iter)
        assert loss is not None
        return loss

    def _evaluate(
        self, data_iter: Iterator[Any] | None, asked: Evaluation | None = None
    ) -> Tensor | None:
        self._check_pipeline("eval_batch()")
        mode = self.training
        self.eval()
        try:
            if self._pipeline is None:
                return evaluate_alone(self, data_iter, asked)
            if self._preemption is not None:
                self._preemption.before_batch(self, training=False)
            return self._pipeline.evaluate(self, data_iter, asked)
        finally:
            self.train(mode)

    def _check_pipeline(self, call: str) -> None:
        self.life.check(f"engine.{call}", "lp_params", "lp_grads")
        check_loss_fn(self.module, call)

    # ------------------------------------------------------------------ skipped steps

    def _resolve_last_step(self) -> None:
        """Get the outcome of the last step from the device, if the host does not have it."""
        if (report := self._skipped.resolve_last_step(self.lr_scheduler)) is not None:
            self._on_skip(report)

    @property
    def skipped_steps(self) -> int:
        """Steps that changed nothing, without the last one while the host does not have its outcome."""
        return self._skipped.count

    def _on_skip(self, report: StepReport) -> None:
        """Count a skipped step. :meth:`_judge_last_step` decides what follows."""
        self._skipped.count += 1
        self._skipped.in_a_row += 1
        self._non_finite.skipped = report

    def _judge_last_step(self) -> bool:
        """Act on the last step if it was skipped (``trust.nan_policy``). Collective then.

        Returns whether the engine was set back to a checkpoint.
        """
        self._resolve_last_step()
        return self._non_finite.skipped is not None and self._non_finite.judge(self)

    # ------------------------------------------------------------------ accumulation and data

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which no backward completes a step. Allowed at every stage.

        Stages 0 and 1 reduce the gradients later. Stages 2 and 3 reduce them in every backward, which
        gives the same result with more traffic. Inside, a forward after a backward begins the next
        micro-batch. So ``step()`` may be called once per optimizer step.
        """
        self.life.check()
        self.accumulation.deferred += 1
        try:
            yield
        finally:
            self.accumulation.deferred -= 1

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether the next backwards complete a step. The engine's own count has no effect any more.

        Accelerate calls this.
        """
        self.accumulation.declared = bool(is_boundary)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next ``step()`` updates the parameters."""
        return self.accumulation.at_boundary()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients accumulated so far. The next micro-batch begins a step.

        With ``set_to_none=False`` they are zeros, with which the step updates their parameters.
        """
        self.life.check()
        if set_to_none:
            self._drop_gradients()
        else:
            self.module.zero_grad(set_to_none=False)
            self._hooks.settle()

    def _drop_gradients(self) -> None:
        self._hooks.recover()
        self.runtime.reducer.abandon()
        if self.accumulation.micro_steps or self.accumulation.divided:
            self._on_dropped()
        self.module.zero_grad()

    def loader_of(self, dataset: Any, collate_fn: Callable[..., Any] | None) -> Any:
        """The loader of ``initialize(training_data=dataset)``."""
        return loader_for(self, dataset, collate_fn=collate_fn)

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield batches until the ranks agree that there are no more (config key ``uneven``)."""
        self.life.check()
        return agreed_batches(
            loader,
            exchange=lambda vote: on_host(
                self._watch.world.all_gather_small(vote.to(self.device), name="batches")
            ),
            shares=[self.mesh.dp_rank(rank) for rank in range(self.mesh.world_size)],
            join=self.settings.uneven == "join",
            set_weight=self._set_weight,
        )

    def _set_weight(self, own: float, active: int) -> None:
        self._hooks.settle()  # before this batch counts
        self._weight = own
        if self.settings.uneven == "join" and active:
            self._update.join(active)

    # ------------------------------------------------------------------ groups and sizes of batches

    @property
    def _groups(self) -> list[dict[str, Any]]:
        inner = self.basic_optimizer
        return inner.param_groups if inner is not None else []

    @property
    def basic_optimizer(self) -> torch.optim.Optimizer | None:
        """The ``torch.optim`` optimizer, also if a program replaced ``optimizer`` by a wrapper of it."""
        return self.runtime.optimizer.inner if self.runtime.optimizer is not None else None

    def get_lr(self) -> list[float]:
        """Learning rate of each param group, for the next update; 0.0 if it has none."""
        self._resolve_last_step()
        return list(learning_rates(self._groups))

    def train_batch_size(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.train_micro_batch_size_per_gpu() * self.accumulation.steps * self.dp_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per rank and forward."""
        assert self._micro_batch_size is not None, "the configuration is resolved"
        return self._micro_batch_size

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Set the samples per rank and forward. The number of accumulation steps does not change."""
        self._check_between_steps("set_train_micro_batch_size", micro_batch_size)
        self._micro_batch_size = micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self.accumulation.steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Set the samples per step by the accumulation steps. The micro-batch does not change."""
        self._check_between_steps("set_train_batch_size", train_batch_size)
        per_step = self.train_micro_batch_size_per_gpu() * self.dp_size
        if train_batch_size < per_step or train_batch_size % per_step:
            raise UsageError(
                f"set_train_batch_size({train_batch_size}): not a multiple of micro-batch "
                f"{self.train_micro_batch_size_per_gpu()} x world size {self.dp_size}. Only the "
                f"number of accumulation steps can change, so give a multiple of {per_step}."
            )
        self.accumulation.steps = train_batch_size // per_step

    def _check_between_steps(self, call: str, size: int) -> None:
        self.life.check()
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UsageError(f"{call}({size!r}): give a whole number of samples, at least 1.")
        if self.accumulation.divided or self.accumulation.micro_steps:
            raise UsageError(f"{call} in the middle of a step: call it after step().")
