"""The engine: forward, backward and step of one model, and the calls that a program makes beside them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from os import PathLike, fspath
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from zeroshard.checkpoint.directory import check_directory
from zeroshard.comm.dtensors import whole_of
from zeroshard.comm.mesh_objects import mesh_sources
from zeroshard.config import LoadedConfig
from zeroshard.core.nbytes import state_nbytes
from zeroshard.data.batches import agreed_batches, loader_for
from zeroshard.device.choice import on_host, read
from zeroshard.engine import export, failed_call, out_of_memory, shared_loss
from zeroshard.engine.arguments import backward_error
from zeroshard.engine.build import build_engine
from zeroshard.engine.checkpoint_loader import CheckpointLoader
from zeroshard.engine.checkpoint_saver import CheckpointSaver
from zeroshard.engine.draft import EngineArguments
from zeroshard.engine.manual_gc import ManualGC
from zeroshard.engine.non_finite import NonFinitePolicy
from zeroshard.engine.offload_states import asked_of_to, check_keeps, is_return
from zeroshard.engine.optimizer_step import SkippedSteps, loss_of
from zeroshard.engine.pipeline import (
    Evaluation,
    check_loss_fn,
    evaluate_alone,
    make_runner,
    train_alone,
)
from zeroshard.engine.preemption import Preemption
from zeroshard.engine.restarts import Resumed
from zeroshard.engine.shared_loss import LossSharing
from zeroshard.engine.training_state import Counters, TrainingState
from zeroshard.errors import UnsupportedError, UsageError, in_short
from zeroshard.metrics.flops import counted
from zeroshard.metrics.monitors import Monitors
from zeroshard.metrics.step_report import (
    MemoryReport,
    StepReport,
    measured_nbytes,
    memory_rows,
    rows_from_vector,
    vector_of,
)
from zeroshard.precision.casting import cast_floats
from zeroshard.zero.hooks import StepHooks
from zeroshard.zero.life import EngineState

logger = logging.getLogger("zeroshard")
T = TypeVar("T")

MISCOUNTED = (
    "engine.step() after %d backwards counts as one micro-batch of %d. If the program calls "
    "step() only at the end of an optimizer step, use set_gradient_accumulation_boundary(), "
    'no_sync(), or "managed_gradient_accumulation": false'
)
"""A warning, not an error, because several losses in one micro-batch are allowed."""


NO_OPTIMIZER = (
    "engine.step() without an optimizer: pass one to initialize(), or name one in the config under "
    '"optimizer".'
)


class Engine(nn.Module):
    """Trains one model under ZeRO.

    ``model``: an ordinary module, one built under :class:`zeroshard.zero.Init`, or one on the meta
    device. ``config``: DeepSpeed's JSON as dict, path or string. ``optimizer``: a ``torch.optim``
    object, or a callable that makes one from the parameters. None: the optimizer that the configuration
    names. If it names none, the engine only runs the model. ``lr_scheduler``: an object, or a callable
    that makes one from the optimizer. An object replaces the schedule in the configuration, and a notice
    says so. ``mesh``: the number of ranks along each dimension, for example a ``DeviceMesh``
    (:func:`zeroshard.comm.mesh_objects.mesh_sources`). The configuration must agree with it. ``plan``:
    cut the model over tensor ranks by this plan (:func:`zeroshard.parallel.tensor_parallel`) or "auto".

    Collective: every rank builds its engines in the same order, from the same configuration.

    Raises:
        ConfigError: the configuration has mistakes, or sources of the mesh disagree; the text lists all
            of them.
        UsageError: the arguments do not fit together.

    >>> engine = Engine(nn.Linear(4, 1), config={
    ...     "train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}})
    >>> loss = engine(torch.ones(8, 4)).square().mean()
    >>> _ = engine.backward(loss)
    >>> engine.step()
    >>> engine.last_step.skipped
    False
    >>> engine.close()
    """

    _as_deepspeed: ClassVar[bool] = False  # whether unknown keys may be notices: see load_config
    _in_backward: ClassVar[list[Engine]] = []  # whose backward() runs; several if they share a loss
    __reduce_ex__ = failed_call.refuse_copy

    def __init__(
        self,
        model: nn.Module,
        *,
        config: Any,
        optimizer: Any = None,
        model_parameters: Iterable[Any] | None = None,
        lr_scheduler: Any = None,
        device: torch.device | str | None = None,
        mesh: Any = None,
        plan: Mapping[str, str] | str | None = None,
    ) -> None:
        super().__init__()
        parts = build_engine(
            EngineArguments(
                model,
                config,
                optimizer,
                model_parameters,
                lr_scheduler,
                device,
                self._as_deepspeed,
                mesh_sources(mesh=mesh, model=model),
                plan,
            ),
            partial(
                StepHooks,
                on_forward_begin=self._on_forward_begin,
                on_backward_begin=self._on_backward_begin,
                on_abandon=self._on_abandon,
                on_dropped=self._on_dropped,
            ),
        )
        self.module = model
        self.loaded: LoadedConfig = parts.loaded
        self.settings = parts.loaded.config
        self.device = parts.device
        self.policy = parts.policy
        self.runtime = parts.runtime
        self.life = parts.runtime.life
        self.scaler = parts.scaler
        self.scales_loss = parts.scales_loss
        self._sharing = LossSharing(parts.scaler.scale)
        self.lr_scheduler = parts.scheduler
        self.optimizer = parts.runtime.optimizer.inner if parts.runtime.optimizer else None
        self.world_size = parts.rank_info.world_size
        self.global_rank = parts.rank_info.rank
        self.local_rank = parts.rank_info.local_rank
        self.local_world_size = parts.rank_info.local_world_size
        self.is_main_rank = parts.rank_info.is_main_rank
        self.mesh = parts.mesh
        self.dp_rank = parts.coordinate.dp_rank
        self.dp_size = parts.coordinate.dp_size
        self.accumulation = parts.accumulation
        self.global_steps = self.micro_steps = self.global_samples = 0
        self.resumed: Resumed | None = None  # set by initialize(resume=...)
        self.last_step: StepReport | None = None
        self.training_dataloader: Any = None  # set by initialize(), from training_data
        self._watch = parts.watch
        self._update = parts.update
        self.memory_baseline = out_of_memory.MemoryBaseline(parts.runtime.ledger)
        self._hooks = parts.hooks
        self._offloader = parts.offloader
        self._observer = parts.observer
        self._skipped = SkippedSteps(self._groups)
        self._make_savers = parts.make_savers
        self._micro_batch_size = self.settings.train_micro_batch_size_per_gpu
        self._norms: Sequence[tuple[int, Tensor]] = ()  # of the last step, by parameter
        self._losses: list[Tensor] = []  # that backward() got in the running step
        self._step_losses: list[Tensor] = []  # those of the last step
        self._non_finite = NonFinitePolicy(parts.nan_policy, self.settings.trust.max_rollbacks)
        self._scaled_by_caller = False
        self._weight = 1.0
        self._observer.watch_calls(self)
        if (section := self.settings.flops_profiler).enabled and self.is_main_rank:
            self.forward = counted(  # type: ignore[method-assign]
                self.forward,
                model,
                lambda: self.global_steps,
                section,
                self._observer.flops_counted,
            )
        if not self.mesh.is_data_only:  # other collectives than the engine's run in there
            for phase in ("forward", "backward"):
                setattr(self, phase, self._watch.explained(getattr(self, phase)))
        self._gc = ManualGC() if self.settings.disable_python_gc else None
        self._pipeline = make_runner(self, model, parts.watch)
        self._preemption: Preemption | None = None
        if (asked := self.settings.preemption).enabled or asked.save_dir is not None:
            self._watch_preemption()
            if asked.save_dir is not None:
                self.save_on_preemption(asked.save_dir)

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
            if (clearer := backward_error(loss, error)) is not None:
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
        """Whether the backward that runs is one of a micro-batch. See :class:`StepHooks`.

        ``landed``: a gradient is ready. Before that, only a backward that :meth:`backward` started is
        known to be one.
        """
        if not self.life.is_open:
            self.life.check("loss.backward()", "lp_params", "lp_grads")
        running = self._in_backward
        self.accumulation.rescale = None
        if not running and not landed:
            return False
        if running:
            caller = self if self in running else running[-1]
            shared_loss.check(self, caller)
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
        return True

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
        self._skipped.advance(outcome.skipped, report, self.lr_scheduler, lr_kwargs or {})
        self.runtime.reducer.reset()
        self._hooks.forget_calls()
        self._norms, self._step_losses = outcome.norms, self._losses
        self._count_micro_batches()
        self._scaled_by_caller = False
        self._forget_step()
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
        next_lr = float(self._groups[0]["lr"]) if self._groups else 0.0
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
            raise UsageError("engine.train_batch() in the middle of a step: call it after step().")
        if self.runtime.optimizer is None:
            raise UsageError(NO_OPTIMIZER)
        if self._pipeline is None:
            return train_alone(self, data_iter)
        if self._preemption is not None:
            self._preemption.before_batch(self, training=True)
        loss = self._pipeline.train(self, data_iter)
        accumulation.advance(accumulation.steps - 1)
        self._count_micro_batches(accumulation.steps - 1)
        Engine.step(self)
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

    # ------------------------------------------------------------------ preemption

    @property
    def preempted(self) -> bool:
        """Whether a rank got SIGTERM, SIGUSR1 or SIGINT, and the run is to end.

        It becomes true on all ranks between the same two steps. Needs the key ``preemption.enabled``.
        No message, no wait.

        Raises:
            UsageError: the configuration has no section ``preemption``.
        """
        if self._preemption is None:
            raise UsageError(
                'engine.preempted without "preemption": {"enabled": true} in the configuration: signals '
                "are not noted. Add the key, or do not read this."
            )
        return self._preemption.happened

    def save_on_preemption(
        self,
        save_dir: str | PathLike[str],
        client_state: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        """After SIGTERM, SIGUSR1 or SIGINT to any rank, save after a step and exit with code 0.

        Every rank calls this, in the main thread. ``client_state()`` gives the ``client_state`` of that
        :meth:`save_checkpoint`. The file ``preempted`` in ``save_dir`` then has the signal and the step;
        this call deletes it. The key ``preemption.save_dir`` does the same without ``client_state``.

        Raises:
            UsageError: another engine of this process does this, or this is not the main thread.
        """
        self.life.check()
        check_directory(save_dir, "engine.save_on_preemption()")
        preemption = self._preemption or self._watch_preemption()
        preemption.save_in(save_dir, client_state)

    def _watch_preemption(self) -> Preemption:
        """Note signals from now on. Other engines pay nothing for it in a forward."""
        self._preemption = preemption = Preemption(self._watch)
        if self._pipeline is None:  # else train_batch() and eval_batch() are the points

            def begin_forward() -> None:
                preemption.before_forward(self)
                self._on_forward_begin()

            self._hooks.on_forward_begin = begin_forward
        return preemption

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

    # ------------------------------------------------------------------ reading

    @property
    def _groups(self) -> list[dict[str, Any]]:
        inner = self.basic_optimizer
        return inner.param_groups if inner is not None else []

    @property
    def basic_optimizer(self) -> torch.optim.Optimizer | None:
        """The ``torch.optim`` optimizer, also if a program replaced ``optimizer`` by a wrapper of it."""
        return self.runtime.optimizer.inner if self.runtime.optimizer is not None else None

    @property
    def monitors(self) -> Monitors:
        """The sinks of events. ``add(function)`` sends them to a function too. Empty but on rank 0."""
        return self._observer.monitors

    @property
    def transport(self) -> str:
        """The name of the transport, for instance ``p2p`` or ``nccl``."""
        return self._watch.gathers.transport

    @property
    def dtypes(self) -> str:
        """The table of dtypes of this run."""
        return self.policy.table()

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's gradient before clipping; None before the first step."""
        return self.last_step.grad_norm if self.last_step is not None else None

    def was_step_applied(self) -> bool:
        """Whether the last ``step()`` updated the parameters."""
        return self.last_step is not None and not self.last_step.skipped

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as it was passed; if that was a path, the contents of the file."""
        return self.loaded.raw

    def get_lr(self) -> list[float]:
        """Learning rate of each param group, for the next update."""
        self._resolve_last_step()
        return [float(group["lr"]) for group in self._groups]

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

    def iter_full_params(self) -> Iterator[tuple[str, Tensor]]:
        """Yield ``(name, full values)`` of every parameter, one unit in memory at a time. Collective."""
        self.life.check()
        self._update.all_gather_late()
        for unit in self.runtime.units:
            unit.wait_for_unshard()
            unit.write_back_edits()
            nbytes = 0 if unit.resident else unit.full_nbytes
            with self.runtime.ledger.lend("iter_full_params", nbytes):
                full_N = unit.full_N if unit.resident else unit.gathered_copy()
                for slot, param in zip(unit.layout.slots, unit.params, strict=True):
                    local = full_N[slot.start : slot.stop].view(slot.shape).detach()
                    yield slot.fqn, whole_of(param, local)
                del full_N, local

    def memory_report(self, *, all_ranks: bool = False) -> MemoryReport:
        """Planned and measured bytes per category and tier. Collective if ``all_ranks``."""
        planned = state_nbytes(self.runtime.plan, self.runtime.stage, self._watch.gathers.rank)
        outside = self.memory_baseline.peaks(self.device)
        measured = measured_nbytes(self.runtime.ledger, self._watch.scratch_peak_nbytes, outside)
        notes = self.runtime.traffic.lines
        if not all_ranks:
            return MemoryReport({self.global_rank: memory_rows(planned, measured)}, notes)
        self.life.check()
        vector = torch.tensor(vector_of(planned, measured), dtype=torch.float64, device=self.device)
        rows = read(self._watch.world.all_gather_small(vector, name="memory report"))
        return MemoryReport({at: rows_from_vector(row) for at, row in enumerate(rows)}, notes)

    # ------------------------------------------------------------------ checkpoints

    @cached_property
    def _savers(self) -> tuple[CheckpointSaver, CheckpointLoader]:
        """Made at the first save or load, because making them opens a connection to the store."""
        return self._make_savers()

    @property
    def _saver(self) -> CheckpointSaver:
        return self._savers[0]

    def _wait_for_save(self) -> None:
        """Wait for a save that runs in the background. Makes no saver if there never was a save."""
        if "_savers" in vars(self):
            self._saver.wait()

    def save_checkpoint(
        self,
        save_dir: str | PathLike[str],
        tag: object = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save a checkpoint: the directory ``save_dir/tag``. Every rank calls it.

        The directory gets its name when it is complete. After that ``latest`` names it
        (``docs/checkpoints.md``, ``docs/format.md``). ``tag``: default ``global_step<N>``.
        ``client_state``: plain data and tensors of the caller; those of rank 0 are saved.
        ``exclude_frozen_parameters``: only their digests are saved, and a load needs a model with the
        same values. With ``"checkpoint": {"asynchronous": true}`` this returns when the values are
        copied. :meth:`wait_for_checkpoint` waits for the rest. So does the next save. Returns True.

        Raises:
            CheckpointError: on every rank: it cannot be written. Earlier checkpoints are unchanged.
        """
        if not self.life.is_open:
            self.life.check("engine.save_checkpoint()")
        check_directory(save_dir, "engine.save_checkpoint()")
        with self._watch.recorder.in_section("save"):
            self._wait_for_save()
            agreed = self._saver.save(
                save_dir,
                tag,
                client_state or {},
                self._training_state(),
                save_latest=save_latest,
                exclude_frozen=exclude_frozen_parameters,
            )
        self._non_finite.checkpoint = (fspath(save_dir), agreed)
        return True

    def wait_for_checkpoint(self) -> None:
        """Wait until the last save is complete. Raises its error, if it failed."""
        with self._watch.recorder.in_section("save"):
            self._wait_for_save()

    def load_checkpoint(
        self,
        load_dir: str | PathLike[str],
        tag: object = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: object = None,
        *,
        missing_ok: bool = False,
        resumes_data: bool = True,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load a checkpoint of ZeroShard or of DeepSpeed. Every rank calls it.

        World size, stage, tiers and units may differ from those of the save. ``tag=None``: the checkpoint
        that ``latest`` names; if that is damaged, the newest older one that is not, with a warning.
        ``load_module_strict=False``: load the parameters and buffers whose names fit.
        ``load_module_only``: load only weights; counters, schedule and generators do not change.
        ``custom_load_fn``: DeepSpeed's argument, which is refused. ``missing_ok``: for a directory
        without ``latest`` return ``(None, {})`` and change nothing. ``resumes_data=False``: the loader of
        ``training_data`` goes on where it is.

        Returns the directory and the ``client_state``.

        Raises:
            CheckpointError: on every rank. If the checkpoint is of another model or optimizer, nothing
                has been changed.
        """
        self.life.check("engine.load_checkpoint()", may_load=True)
        check_directory(load_dir, "engine.load_checkpoint()")
        if custom_load_fn is not None:
            raise UnsupportedError(
                "load_checkpoint(custom_load_fn=...): values are loaded directly into shards, and "
                "no rank has a full state dict. Load without custom_load_fn, then edit parameters "
                "under zero.GatheredParameters."
            )
        with self._watch.recorder.in_section("load"):
            self._wait_for_save()
            self._drop_gradients()
            self._resolve_last_step()
            self._non_finite.skipped = None  # the state that the step left is replaced
            loaded = self._savers[1].load(
                load_dir,
                tag,
                self._training_state(resumes_data=resumes_data),
                strict=load_module_strict,
                optimizer_states=load_optimizer_states,
                scheduler_states=load_lr_scheduler_states,
                module_only=load_module_only,
                missing_ok=missing_ok,
            )
        if loaded is None:
            return None, {}
        if loaded.counters is not None:
            self._set_counters(loaded.counters)
            if load_module_strict and load_optimizer_states:  # else it is of another run
                self._non_finite.checkpoint = (fspath(loaded.path.parent), loaded.path.name)
        return str(loaded.path), loaded.client_state

    def _training_state(self, *, resumes_data: bool = True) -> TrainingState:
        """What a checkpoint contains besides units. Gets the outcome of the last step first."""
        self._judge_last_step()
        self._update.all_gather_late()
        if self.runtime.optimizer is not None:
            self.runtime.optimizer.wait_for_worker()  # it counts steps in the state that is read here
        accumulation = self.accumulation
        return TrainingState(
            Counters(self.global_steps, self.micro_steps, self.global_samples, self._skipped.count),
            self.module,
            self.basic_optimizer,
            self._groups,
            self.scaler,
            self.lr_scheduler,
            self.training_dataloader if resumes_data else None,
            accumulation_steps=accumulation.steps,
            lost_backwards=accumulation.backwards if accumulation.divided else None,
        )

    def _set_counters(self, counters: Counters) -> None:
        self.global_steps = counters.global_steps
        self.micro_steps = counters.micro_steps
        self.global_samples = counters.global_samples
        self._skipped.count = counters.skipped_steps
        self._skipped.in_a_row = 0

    save_16bit_model = export.save_16bit_model
    save_fp16_model = export.save_16bit_model
    save_pretrained = export.save_pretrained
    _consolidated_16bit_state_dict = export.consolidated_16bit_state_dict
    _zero3_consolidated_16bit_state_dict = export.consolidated_16bit_state_dict

    # ------------------------------------------------------------------ offload

    def offload_states(
        self,
        include: Any = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move training state from the device to host memory until :meth:`reload_states` is called.

        Every rank calls it. It works at every stage. State that the configuration stores in host memory
        or on disk is not moved. ``include``: some of ``optim_states``, ``hp_params`` (masters),
        ``lp_params`` (parameters; in fp32 they are their own masters) and ``lp_grads``; None: all. While
        state is offloaded, calls that need it raise :class:`UsageError`. Views of parameters or
        optimizer state that the program made before must not be read. ``non_blocking``: the copies may
        still run when this returns, and freed memory stays in torch's cache. Pinned memory is kept for
        the next call; :meth:`empty_partition_cache` frees it.
        """
        self.life.check()
        self._offloader.offload(include, device, pin_memory=pin_memory, non_blocking=non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move back to the device all that :meth:`offload_states` moved. Every rank calls it."""
        self.life.check()
        self._offloader.reload(non_blocking=non_blocking)

    def empty_partition_cache(self) -> None:
        """Free gathered parameters until their next use, and memory kept for :meth:`offload_states`.

        Every rank calls it, between steps.
        """
        self.life.check()
        self.runtime.prefetcher.reshard_all()
        self._offloader.forget_spare()

    def to(self, *args: Any, **kwargs: Any) -> Engine:
        """Offload, reload, or cast buffers, depending on the arguments.

        To ``"cpu"``: :meth:`offload_states`. To the engine's own device, which on CPU ranks is
        ``"cpu"``: :meth:`reload_states`. To the parameters' dtype, as in :meth:`half`: cast buffers.

        Raises:
            UsageError: another device or dtype.
        """
        device, dtype = asked_of_to(args, kwargs)
        home = device is None or is_return(device, self.device)
        if dtype is not None:
            self._apply(lambda held: held.to(dtype) if held.is_floating_point() else held)
        if device is not None:
            if home:
                self.reload_states()
            else:
                self.offload_states()
        return self

    def cpu(self) -> Engine:
        """See :meth:`to`."""
        return self.to("cpu")

    def cuda(self, device: int | torch.device | None = None) -> Engine:
        """See :meth:`to`."""
        return self.to(
            torch.device("cuda", device) if isinstance(device, int) else device or "cuda"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Engine:
        """Change buffers by ``fn``. ``half()``, ``bfloat16()``, ``float()`` and ``type()`` call this.

        Raises:
            UsageError: ``fn`` would change a parameter.
        """
        self.life.check()
        check_keeps(fn, self.module.parameters(), self.device)
        for module in self.module.modules() if recurse else ():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = fn(buffer)
        return self

    def to_empty(self, **_: Any) -> Engine:
        """Refused, because the values of the parameters would be lost."""
        raise UsageError(
            "engine.to_empty() would delete the trained values. To start without values, build "
            "the model on the meta device and pass it to the engine."
        )

    def share_memory(self) -> Engine:
        """Refused, because the engine frees and allocates the memory of parameters."""
        raise UsageError(
            "engine.share_memory(): parameters are views of memory that the engine frees and "
            "allocates. Share a copy of the model, for instance from engine.save_16bit_model()."
        )

    # ------------------------------------------------------------------ mode and end

    def train(self, mode: bool = True) -> Engine:
        """Set the module and the engine to training mode, or to evaluation mode."""
        self.module.train(mode)
        self.training = mode
        return self

    def close(self, reason: str = "") -> None:
        """Detach hooks and free all memory. Resident parameters stay readable; shards are lost.

        ``reason``: the error that ends the engine. Other ranks that wait for this one show it.
        """
        if self.life.state is EngineState.CLOSED:
            return
        self.life.close()
        self._sharing.close()
        # The last entry runs first. All of them run, also after an error.
        with contextlib.ExitStack() as rest:
            rest.callback(self._watch.close)
            if self._gc is not None:
                rest.callback(self._gc.close)
            if self._preemption is not None:
                rest.callback(self._preemption.close)
            rest.callback(self._observer.close)
            rest.callback(self.runtime.close, wait=not reason)
            if reason:  # other ranks may have ended: close the connections, wait for nothing
                rest.callback(self._watch.close, reason)
            # Before other ranks are told that this rank has left: they would give up the save.
            if "_savers" in vars(self):
                rest.callback(vars(self).pop, "_savers")  # they refer to masters
                rest.callback(self._saver.close, quiet=bool(reason))
            rest.callback(self._hooks.remove)
            if not reason:
                rest.callback(self._update.all_gather_late)
            rest.callback(self._offloader.close)
            rest.callback(self._observer.end, reason)

    destroy = close

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        found = self._watch.explanation(error)
        cause = found or error
        ended = isinstance(cause, SystemExit) and not cause.code
        self.close("" if cause is None or ended else in_short(cause))
        if found is not None:
            raise found from error
