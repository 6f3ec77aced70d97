"""The engine: what trains one model, and the calls that a program makes beside the training step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from os import PathLike, fspath
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from zeroshard.checkpoint.directory import check_directory
from zeroshard.comm.mesh_objects import mesh_sources
from zeroshard.engine import export, failed_call
from zeroshard.engine.build import build_engine
from zeroshard.engine.checkpoint_loader import CheckpointLoader
from zeroshard.engine.checkpoint_saver import CheckpointSaver, Counters, TrainingState
from zeroshard.engine.draft import EngineArguments
from zeroshard.engine.offload_states import asked_of_to, check_keeps, is_return
from zeroshard.engine.pipeline import PipelineRunner
from zeroshard.engine.restarts import Preemption
from zeroshard.engine.training_engine import TrainingEngine
from zeroshard.errors import UnsupportedError, UsageError, in_short
from zeroshard.metrics.flops import counted
from zeroshard.parallel.split import PipelineModel
from zeroshard.zero.hooks import StepHooks
from zeroshard.zero.life import EngineState


class Engine(TrainingEngine):
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
        super().__init__(model, parts)
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
        if isinstance(model, PipelineModel) and parts.watch.pipeline is not None:
            self._pipeline = PipelineRunner(self, model, parts.watch.pipeline)
        if (asked := self.settings.preemption).enabled or asked.save_dir is not None:
            self._watch_preemption()
            if asked.save_dir is not None:
                self.save_on_preemption(asked.save_dir)

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
        self._tell_untrained()
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
        done = accumulation.micro_steps  # of a step that has not ended
        samples = done * self.train_micro_batch_size_per_gpu() * self.dp_size
        return TrainingState(
            Counters(
                self.global_steps,
                self.micro_steps - done,
                self.global_samples - samples,
                self._skipped.count,
            ),
            self.module,
            self.basic_optimizer,
            self._groups,
            self.scaler,
            self.lr_scheduler,
            self.training_dataloader if resumes_data else None,
            accumulation_steps=accumulation.steps,
            lost_batches=done + bool(accumulation.backwards),
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
        if not reason:
            self._tell_untrained()
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
