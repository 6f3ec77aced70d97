"""What is a training step? Forward, backward and step of one engine, and nothing else."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from zeroshard import moved
from zeroshard.checkpoint.directory import check_directory
from zeroshard.comm.collectives import Comm
from zeroshard.config import LoadedConfig
from zeroshard.core.nbytes import state_nbytes
from zeroshard.engine import export
from zeroshard.engine.arguments import check_loss, refused_graph
from zeroshard.engine.checkpoint_loader import CheckpointLoader
from zeroshard.engine.checkpoint_saver import CheckpointSaver
from zeroshard.engine.compose import Events, compose
from zeroshard.engine.data import agreed_batches
from zeroshard.engine.flops import counted
from zeroshard.engine.manual_gc import ManualGC
from zeroshard.engine.offload_states import asked_of_to, check_keeps, is_return
from zeroshard.engine.optimizer_step import SkippedSteps
from zeroshard.engine.report import (
    MemoryReport,
    StepReport,
    measured_nbytes,
    memory_rows,
    rows_from_vector,
    vector_of,
)
from zeroshard.errors import LossScaleError, UnsupportedError, UsageError, in_short
from zeroshard.precision.casting import cast_floats
from zeroshard.zero.life import EngineState

logger = logging.getLogger("zeroshard")
T = TypeVar("T")

MISCOUNTED = (
    "engine.step() after %d backwards counts as one micro-batch of %d. If step() is called only where "
    "a step ends, say so: set_gradient_accumulation_boundary(), no_sync(), or "
    '"managed_gradient_accumulation": false'
)
"""A warning and no error: several losses in one micro-batch are legal."""


class Engine(nn.Module):
    """Trains one model under ZeRO.

    ``model``: an ordinary module, one built under :class:`zeroshard.zero.Init`, or one on the meta
    device. ``config``: DeepSpeed's JSON as dict, path or string. ``optimizer``: a ``torch.optim``
    object, or a callable of the parameters; None takes the one in the config, or none at all (then the
    engine only runs the model). ``lr_scheduler``: an object, or a callable of the optimizer. An object
    acts instead of what the config names, and a notice says so.

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

    _as_deepspeed: ClassVar[bool] = False  # how unknown keys are taken: see load_config
    _in_backward: ClassVar[list[Engine]] = []  # whose backward() runs: one loss, several engines

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
        events = Events(self._on_forward_begin, self._on_backward_begin, self._on_abandon)
        parts = compose(
            model,
            events,
            config=config,
            optimizer=optimizer,
            model_parameters=model_parameters,
            lr_scheduler=lr_scheduler,
            device=device,
            as_deepspeed=self._as_deepspeed,
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
        self.lr_scheduler = parts.scheduler
        self.optimizer = parts.runtime.optimizer.inner if parts.runtime.optimizer else None
        self.world_size = parts.place.world_size
        self.global_rank = parts.place.rank
        self.local_rank = parts.place.local_rank
        self.local_world_size = parts.place.local_world_size
        self.accumulation = parts.accumulation
        self.global_steps = 0
        self.micro_steps = 0
        self.global_samples = 0
        self.last_step: StepReport | None = None
        self.training_dataloader: Any = None  # what initialize() made of training_data
        self._comm: Comm = parts.watch.gathers
        self._watch = parts.watch
        self._update = parts.update
        self._hooks = parts.hooks
        self._offloader = parts.offloader
        self._observer = parts.observer
        self._skipped = SkippedSteps(lambda: self.lr_scheduler, self._groups)
        self._saver, self._loader = CheckpointSaver(self), CheckpointLoader(self)
        self._micro_batch_size = self.settings.train_micro_batch_size_per_gpu
        self._norms: Sequence[tuple[int, Tensor]] = ()  # of the last step, by parameter
        self._scaled_by_caller = False
        self._weight = 1.0
        if self._observer.watches_phases:
            for phase in ("forward", "backward", "step"):
                setattr(self, phase, self._observer.phase(phase, getattr(self, phase)))
        if (section := self.settings.flops_profiler).enabled and self.global_rank == 0:
            self.forward = counted(self.forward, model, lambda: self.global_steps, section)  # type: ignore[method-assign]
        self._gc = ManualGC() if self.settings.disable_python_gc else None

    # ------------------------------------------------------------------ forward and backward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model. Returns what the model returns."""
        self.life.check("engine.forward()", "lp_params")
        if self.settings.fp16.enabled and self.settings.fp16.auto_cast:
            args, kwargs = cast_floats((args, kwargs), torch.float16)
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
        self.life.check("engine.backward()", "lp_params", "lp_grads")
        check_loss(loss)
        self._hooks.recover()
        if scale_wrt_gas and self.accumulation.steps > 1:
            loss = loss / self.accumulation.steps
        scaled = loss * self.scaler.scale if self.scales_loss else loss
        if self._weight != 1.0:
            scaled = scaled * self._weight
        self._in_backward.append(self)
        try:
            scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if (refused := refused_graph(error)) is not None:
                raise refused from error
            raise
        finally:
            self._in_backward.remove(self)
        return loss

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, for a plain ``.backward()`` in fp16."""
        self.life.check()
        self._scaled_by_caller = True
        return loss * self.scaler.scale

    def _on_forward_begin(self) -> None:
        if self.accumulation.uncounted and torch.is_grad_enabled():
            self._end_micro_batch()  # no_sync: a new forward ends the micro-batch before it

    def _on_abandon(self) -> None:
        """Gradients were dropped: the next micro-batch is the first of its step."""
        lost = self.accumulation.micro_steps
        if lost and self.global_rank == 0:
            logger.warning("the gradients of %d complete micro-batches of this step are lost", lost)
        self.accumulation.restart()
        self._forget_step()

    def _on_backward_begin(self, landed: bool) -> bool:
        """Does the backward that begins count? If nobody announced it, not before a gradient landed."""
        self.life.check("loss.backward()", "lp_params", "lp_grads")
        running = self._in_backward
        if not running and not landed:
            return False
        if running and self not in running:
            self._check_shared_loss(running[-1])
        elif not running:
            if self.scales_loss and not self._scaled_by_caller:
                raise UsageError(
                    "loss.backward() in fp16 without loss scaling: small gradients would vanish. Use "
                    "engine.backward(loss), or engine.scale(loss).backward()."
                )
            if self._weight != 1.0:
                raise UsageError(
                    'loss.backward() on a rank that has joined with weight 0 ("uneven": "join"): its '
                    "repeated batch would count. Use engine.backward(loss)."
                )
        self.accumulation.note_backward(divided=bool(running))
        return True

    def _check_shared_loss(self, other: Engine) -> None:
        """The loss that another engine divides and scales reaches this one too."""
        mine, theirs = self.accumulation.steps, other.accumulation.steps
        if mine != theirs:
            raise UsageError(
                f"one loss goes through engines with gradient_accumulation_steps={theirs} and "
                f"{mine}, so backward() of one divides it wrongly for the other. Use the same number."
            )
        if self.scales_loss or other.scales_loss:
            raise UsageError(
                "one loss goes through two engines, and one of them scales it (fp16): their loss "
                "scales would differ. Train both in bf16 or fp32, or give each engine its own loss."
            )

    # ------------------------------------------------------------------ the step

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """At an accumulation boundary: clip, update, zero the gradients, advance the schedule.

        Elsewhere it only counts the micro-batch. Nothing is updated, and the schedule stays, if the
        gradient is not finite (fp16, and bf16 with ``check_grad_overflow``). Waits for the device only
        where an optimizer cannot skip there, or a parameter got no gradient.
        """
        self.life.check("engine.step()")
        if self.accumulation.deferred:
            raise UsageError("engine.step() inside no_sync(): leave the context before stepping.")
        if self._hooks.recover():
            raise UsageError(
                "engine.step() after a backward that an exception ended: its gradients are "
                "incomplete and were dropped. Run the step's micro-batches again."
            )
        if not self.accumulation.at_boundary():
            if self.accumulation.seems_miscounted() and self.global_rank == 0:
                logger.warning(MISCOUNTED, self.accumulation.backwards, self.accumulation.steps)
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
        self._resolve_last_step()
        report, skipped, measures = self._update.run(self.global_steps + 1)
        self.last_step = report
        self.global_steps += 1
        self._skipped.advance(skipped, report, lr_kwargs or {})
        self.runtime.reducer.reset()
        self._hooks.forget_calls()
        self._forget_step()
        self._norms = measures.own_norms
        self._end_micro_batch()
        self.accumulation.restart()
        self._end_step(skipped)

    def _forget_step(self) -> None:
        self._scaled_by_caller = False
        self._update.forget_step()

    def _end_step(self, skipped: bool | None) -> None:
        """Tell everybody who wants to know."""
        report = self.last_step
        assert report is not None
        if skipped:
            self._on_skip(report)
        elif skipped is not None:
            self._skipped.in_a_row = 0
        self._observer.after_step(report, samples=self.global_samples, skipped=self.skipped_steps)
        if self._gc is not None:
            self._gc.collect()

    def _end_micro_batch(self) -> None:
        self.accumulation.advance()
        self.micro_steps += 1
        self.global_samples += self.train_micro_batch_size_per_gpu() * self.world_size

    # ------------------------------------------------------------------ skipped steps

    def _resolve_last_step(self) -> None:
        """Learn the outcome of the last step if the host does not know it yet."""
        if (report := self._skipped.resolve_last_step()) is not None:
            self._on_skip(report)

    @property
    def skipped_steps(self) -> int:
        """Steps that changed nothing, as far as the host knows."""
        return self._skipped.count

    def _on_skip(self, report: StepReport) -> None:
        self._skipped.count += 1
        self._skipped.in_a_row += 1
        if self._skipped.in_a_row == 1 and self.global_rank == 0:
            logger.warning(
                "step %d skipped: the gradient is not finite (loss scale %g)",
                report.step, report.loss_scale,
            )  # fmt: skip
        if self.scales_loss and bool(self.scaler.at_floor):
            raise LossScaleError(self._non_finite_text(report))

    def _non_finite_text(self, report: StepReport) -> str:
        return (
            f"Non-finite gradients for {self._skipped.in_a_row} steps up to step {report.step}, and the "
            f"loss scale {report.loss_scale:g} is at its minimum, so lowering it cannot help. First "
            f"bad gradient: {self._first_bad_gradient()}. If the model was trained in bf16, train it "
            'in bf16; else look at the loss, or lower "fp16": {"min_loss_scale"}.'
        )

    def _first_bad_gradient(self) -> str:
        """The first parameter, in model order, whose gradient is not finite on any rank."""
        bad = [float(place) for place, norm in self._norms if not norm.isfinite()]
        vote = torch.tensor([min(bad, default=float(2**31))], dtype=torch.float64)
        index = int(self._comm.all_gather_small(vote.to(self.device), name="first bad").min())
        names = dict(enumerate(name for name, _ in self.module.named_parameters()))
        return repr(names.get(index, "unknown"))

    # ------------------------------------------------------------------ accumulation and data

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside do not complete a step. Legal at every stage: 0 and 1 defer the reduction,
        2 and 3 reduce into the owner's shard, which is the same result at more traffic.

        A forward after a backward inside counts as the next micro-batch, so that ``step()`` may be
        called once per optimizer step.
        """
        self.life.check()
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
        """Forget the gradients accumulated so far: the next micro-batch begins a step."""
        self.life.check()
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        self._hooks.recover()
        self.runtime.reducer.abandon()
        if self.accumulation.micro_steps or self.accumulation.divided:
            self._on_abandon()
        for param in self.module.parameters():
            param.grad = None

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Iterate while ranks agree that there are batches (config key ``uneven``)."""
        self.life.check()
        return agreed_batches(
            loader,
            exchange=lambda vote: self._comm.all_gather_small(
                vote.to(self.device), name="batches"
            ).cpu(),
            join=self.settings.uneven == "join",
            set_weight=self._set_weight,
        )

    def _set_weight(self, own: float, active: int) -> None:
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
        """The torch optimizer, whatever a program that wraps it calls ``optimizer``."""
        return self.runtime.optimizer.inner if self.runtime.optimizer is not None else None

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

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as it was passed; a file's contents where a path was."""
        return self.loaded.raw

    def get_lr(self) -> list[float]:
        """Learning rate of each param group, for the next update."""
        self._resolve_last_step()
        return [float(group["lr"]) for group in self._groups]

    def train_batch_size(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.train_micro_batch_size_per_gpu() * self.accumulation.steps * self.world_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per rank and forward."""
        assert self._micro_batch_size is not None, "the configuration is resolved"
        return self._micro_batch_size

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Tell the engine of another micro-batch; the accumulation stays."""
        self._check_between_steps("set_train_micro_batch_size", micro_batch_size)
        self._micro_batch_size = micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self.accumulation.steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the batch size by changing the accumulation; the micro-batch stays."""
        self._check_between_steps("set_train_batch_size", train_batch_size)
        per_step = self.train_micro_batch_size_per_gpu() * self.world_size
        if train_batch_size < per_step or train_batch_size % per_step:
            raise UsageError(
                f"set_train_batch_size({train_batch_size}): not a multiple of micro-batch "
                f"{self.train_micro_batch_size_per_gpu()} x world size {self.world_size}. Only the "
                f"accumulation changes, so give a multiple of {per_step}."
            )
        self.accumulation.steps = train_batch_size // per_step

    def _check_between_steps(self, call: str, size: int) -> None:
        self.life.check()
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UsageError(f"{call}({size!r}): give a whole number of samples, at least 1.")
        if self.accumulation.divided or self.accumulation.micro_steps:
            raise UsageError(f"{call} in the middle of a step: call it after step().")

    def iter_full_params(self) -> Iterator[tuple[str, Tensor]]:
        """Stream ``(name, full values)`` of every parameter, one unit in memory at a time. Collective."""
        self.life.check()
        self._update.all_gather_late()
        for unit in self.runtime.units:
            unit.wait_for_unshard()
            unit.write_back_edits()
            nbytes = 0 if unit.resident else unit.full_nbytes
            with self.runtime.ledger.lend("iter_full_params", nbytes):
                full_N = unit.full_N if unit.resident else unit.gathered_copy()
                for slot in unit.layout.slots:
                    yield slot.fqn, full_N[slot.start : slot.stop].view(slot.shape).detach()
                del full_N

    def memory_report(self, *, all_ranks: bool = False) -> MemoryReport:
        """Planned and measured bytes per category and tier; of all ranks if asked (then collective)."""
        planned = state_nbytes(self.runtime.plan, self.runtime.stage, self._comm.rank)
        measured = measured_nbytes(self.runtime.ledger, self._watch.scratch_nbytes)
        if not all_ranks:
            return MemoryReport({self.global_rank: memory_rows(planned, measured)})
        self.life.check()
        vector = torch.tensor(vector_of(planned, measured), dtype=torch.float64, device=self.device)
        rows = self._comm.all_gather_small(vector, name="memory report").tolist()
        return MemoryReport({rank: rows_from_vector(row) for rank, row in enumerate(rows)})

    # ------------------------------------------------------------------ checkpoints

    def save_checkpoint(
        self,
        save_dir: str | PathLike[str],
        tag: object = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write everything that training needs to go on: ``save_dir/tag`` appears as a whole, then
        ``latest`` names it. Every rank calls it.

        ``tag``: default ``global_step<N>``. ``client_state``: plain data and tensors of the caller, from
        rank 0. ``exclude_frozen_parameters``: their digest is kept, and the model must bring the same
        ones. With ``"checkpoint": {"asynchronous": true}`` it returns when the values are copied;
        :meth:`wait_for_checkpoint` waits for the rest, and so does the next save.

        Returns True. Raises :class:`CheckpointError` on every rank if it could not be written; what was
        saved before is untouched. (``docs/checkpoints.md``, ``docs/format.md``.)
        """
        self.life.check("engine.save_checkpoint()")
        check_directory(save_dir, "engine.save_checkpoint()")
        with self._watch.section("save"):
            self._saver.save(
                save_dir,
                tag,
                client_state or {},
                save_latest=save_latest,
                exclude_frozen=exclude_frozen_parameters,
            )
        return True

    def wait_for_checkpoint(self) -> None:
        """Return when the last save is on disk. Raises what ended it."""
        with self._watch.section("save"):
            self._saver.wait()

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
    ) -> tuple[str | None, dict[str, Any]]:
        """Go on where a checkpoint was saved, by whatever world size, stage, store or unit plan, by this
        library or by DeepSpeed. Every rank calls it.

        ``tag=None`` takes ``latest``; if that one is damaged, the newest older one that is not, with a
        warning. ``load_module_strict=False`` loads the parameters and buffers that fit by name.
        ``load_module_only``: weights alone; counters, schedule and generators stay. ``custom_load_fn`` is
        DeepSpeed's, and refused: edit parameters after loading. ``missing_ok``: a directory without
        ``latest`` gives ``(None, {})``, and training starts from what the model has.

        Returns the directory and the ``client_state``. Raises :class:`CheckpointError` on every rank:
        for one of another model or optimizer before anything is changed.
        """
        self.life.check("engine.load_checkpoint()", may_load=True)
        check_directory(load_dir, "engine.load_checkpoint()")
        if custom_load_fn is not None:
            raise UnsupportedError(
                "load_checkpoint(custom_load_fn=...): values go straight into shards, and no rank sees a "
                "whole state dict. Load without it, then edit under zero.GatheredParameters."
            )
        with self._watch.section("load"):
            self._saver.wait()
            return self._loader.load(
                load_dir,
                tag,
                strict=load_module_strict,
                optimizer_states=load_optimizer_states,
                scheduler_states=load_lr_scheduler_states,
                module_only=load_module_only,
                missing_ok=missing_ok,
            )

    save_16bit_model = export.save_16bit_model
    save_fp16_model = export.save_16bit_model
    save_pretrained = export.save_pretrained
    _consolidated_16bit_state_dict = export.consolidated_16bit_state_dict
    _zero3_consolidated_16bit_state_dict = export.consolidated_16bit_state_dict

    # ------------------------------------------------------------------ away from the device

    def offload_states(
        self,
        include: Any = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move training state from the device to host memory, at any stage: the device is for something
        else until :meth:`reload_states`. What rests in host memory or on disk anyway stays.

        ``include``: some of ``optim_states``, ``hp_params`` (masters), ``lp_params`` (parameters; in fp32
        they are their own masters) and ``lp_grads``; None is all. Until they are back, calls that need
        them raise :class:`UsageError`; views of parameters or optimizer state that the program took
        before must not be read. ``non_blocking``: copies go on behind, and freed memory stays in torch's
        cache. Page-locked memory is kept for the next time; :meth:`empty_partition_cache` gives it back.
        Every rank calls it.
        """
        self.life.check()
        self._offloader.offload(include, device, pin_memory=pin_memory, non_blocking=non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back, bit by bit, all that :meth:`offload_states` moved. Every rank calls it."""
        self.life.check()
        self._offloader.reload(non_blocking=non_blocking)

    def empty_partition_cache(self) -> None:
        """Free gathered parameters of sharded units until their next use, and memory kept for
        :meth:`offload_states`. Every rank calls it, between steps."""
        self.life.check()
        self.runtime.prefetcher.reshard_all()
        self._offloader.forget_spare()

    def to(self, *args: Any, **kwargs: Any) -> Engine:
        """To ``"cpu"``: :meth:`offload_states`. To the engine's own device, which on CPU ranks is
        ``"cpu"``: :meth:`reload_states`. To the parameters' dtype, as :meth:`half` and the like: casts
        buffers. Raises :class:`UsageError` for other devices and dtypes."""
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
        """What ``half()``, ``bfloat16()``, ``float()``, ``type()`` and the like come down to: buffers
        follow, and parameters are that already. Raises :class:`UsageError` if they are not."""
        self.life.check()
        check_keeps(fn, self.module.parameters(), self.device)
        for module in self.module.modules() if recurse else ():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = fn(buffer)
        return self

    def to_empty(self, **_: Any) -> Engine:
        """Refused: an engine's parameters have their values."""
        raise UsageError(
            "engine.to_empty() would forget what was trained. Build the model on the meta device, and "
            "give it to the engine as it is."
        )

    def share_memory(self) -> Engine:
        """Refused: parameters are views of the engine's own memory."""
        raise UsageError(
            "engine.share_memory(): parameters are views of memory that the engine frees and fills. "
            "Share a copy of the model, for instance from engine.save_16bit_model()."
        )

    # ------------------------------------------------------------------ life

    def train(self, mode: bool = True) -> Engine:
        """Training mode of the module."""
        self.module.train(mode)
        self.training = mode
        return self

    def close(self, reason: str = "") -> None:
        """Detach hooks and give all memory back. Whole parameters stay readable, shards are gone.

        ``reason``: the error that ends the engine; other ranks learn it if they still wait for this one.
        """
        if self.life.state is EngineState.CLOSED:
            return
        self.life.close()
        with contextlib.ExitStack() as rest:  # last in, first closed; an error keeps nothing open
            rest.callback(self._watch.close)
            if self._gc is not None:
                rest.callback(self._gc.close)
            rest.callback(self._observer.close)
            rest.callback(self.runtime.stores.close)
            if self.runtime.optimizer is not None:
                rest.callback(self.runtime.optimizer.close)
            rest.callback(self.runtime.reducer.close, wait=not reason)
            for unit in reversed(self.runtime.units):
                rest.callback(unit.close, wait=not reason)
            if reason:  # other ranks may be gone: end the connections, then wait for nothing
                rest.callback(self._watch.close, reason)
            # Before anybody is told that this rank is gone: the others would give the save up.
            rest.callback(self._saver.close, quiet=bool(reason))
            rest.callback(self._hooks.remove)
            if not reason:
                rest.callback(self._update.all_gather_late)
            rest.callback(self._offloader.close)

    destroy = close

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.close("" if error is None else in_short(error))

    if not TYPE_CHECKING:  # for one release: see zeroshard/moved.py

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError as error:
                return moved.attribute_of_engine(self, name, error)
