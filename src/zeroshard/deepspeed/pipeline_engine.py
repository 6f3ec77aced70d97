"""The engine that ``deepspeed.initialize`` builds for a ``PipelineModule``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from zeroshard.data.batches import loader_for
from zeroshard.deepspeed import pipe_schedule
from zeroshard.deepspeed.engine import GETTERS
from zeroshard.deepspeed.helpers import RepeatingLoader
from zeroshard.deepspeed.logs import log_dist
from zeroshard.deepspeed.pipe_instructions import METHODS, InstructionEngine, current
from zeroshard.deepspeed.pipeline_module import PipelineModule
from zeroshard.engine.initialize import announce
from zeroshard.engine.pipeline import Evaluation
from zeroshard.engine.training_engine import IN_THE_MIDDLE
from zeroshard.errors import UnsupportedError, UsageError

# ---------------------------------------------------------------------- what a program has changed

_METHODS = (
    *METHODS.values(),
    "_exec_schedule", "_train_schedule", "_inference_schedule", "_next_batch", "_reserve_pipe_buffers",
    "_aggregate_total_loss", "_reduce_outputs", "_bcast_pipe_scalar", "_scale_loss_by_gas",
    "_loss_stage_global_rank",
)  # fmt: skip
_PLAIN = {name: getattr(InstructionEngine, name) for name in _METHODS}
_PLAIN_MAP = dict(InstructionEngine._INSTRUCTION_MAP)
_SCHEDULES = {name: getattr(pipe_schedule, name) for name in ("TrainSchedule", "InferenceSchedule")}

_SHAPES = (
    "each message brings the shapes and dtypes of its tensors, and buffers are made from them. Override "
    "_exec_send_activations, _exec_recv_activations, _exec_send_grads or _exec_recv_grads"
)
_GRADIENTS = (
    "gradients are reduced during backward, and what is left in _exec_reduce_grads. Override that, and "
    "call it from the override"
)
UNUSED = {
    "_send_tensor_meta": _SHAPES,
    "_recv_tensor_meta": _SHAPES,
    "_allocate_zeros": _SHAPES,
    "_allocate_buffer": _SHAPES,
    "_allocate_or_extend_buffers": _SHAPES,
    "_bf16_reduce_grads": _GRADIENTS,
    "_backward_prologue_per_tensor": _GRADIENTS,
    "_take_model_step": "the update is one operation. Override _exec_optimizer_step",
    "_reentrant_activation_checkpointing": (
        "inputs need no gradient for activation checkpoints. Pass activation_checkpoint_func to "
        "PipelineModule"
    ),
}
"""Internals of DeepSpeed's engine that a program may override and that nothing calls here, and why."""


def changed(engine: InstructionEngine) -> str:
    """The first instruction or schedule that the program has changed, in words; "" if there is none.

    Programs derive classes, replace functions of ``PipelineEngine`` and of schedules, change
    ``_INSTRUCTION_MAP``, and do so before or after the engine is built. So this is asked at each
    ``train_batch()`` and ``eval_batch()``: some fifty comparisons of identities, a few microseconds.
    """
    kind, own = type(engine), vars(engine)
    for name, plain in _PLAIN.items():
        if getattr(kind, name) is not plain or name in own:
            return name
    if engine._INSTRUCTION_MAP != _PLAIN_MAP:
        return "_INSTRUCTION_MAP"
    for name, schedule in _SCHEDULES.items():
        if current(name) is not schedule:
            return f"deepspeed.runtime.pipe.schedule.{name}"
    for schedule, name, function in pipe_schedule.PLAIN:
        if vars(schedule).get(name) is not function:
            return f"{schedule.__name__}.{name}"
    return ""


def refuse_unused(kind: type) -> None:
    """Refuse a class with an override that would not be called.

    Raises:
        UnsupportedError: it has one.
    """
    for name, why in UNUSED.items():
        if hasattr(kind, name):
            raise UnsupportedError(
                f"{kind.__name__} has a method {name} of its own, which ZeroShard does not call: {why}."
            )


def check_mpu(model: PipelineModule, mpu: Any) -> None:
    """Refuse another ``mpu`` than that of the model, whose topology says where each rank is."""
    if mpu is not None and mpu is not model.mpu():
        raise UsageError(
            "PipelineEngine(mpu=...) with another mpu than that of the model, whose topology says where "
            "each rank is. Pass mpu=model.mpu(), or leave it out."
        )


# ---------------------------------------------------------------------- the engine


IGNORED = (
    "config_class", "dist_init_required", "mesh_device", "dont_change_device", "has_bool_tensors",
)  # fmt: skip
"""Arguments of DeepSpeed's engine without a use: what they say is in the configuration, or is not
needed."""


class PipelineEngine(InstructionEngine):
    """Trains a :class:`PipelineModule`. If it has several stages, ``forward``, ``backward`` and ``step``
    raise an error.

    ``grid``: this rank's place in the topology. ``stage_id``: the number of its stage. A derived class
    may override what :class:`InstructionEngine` has.
    """

    def __init__(
        self,
        model: PipelineModule,
        *,
        args: Any = None,
        mpu: Any = None,
        training_data: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        config: Any = None,
        **options: Any,
    ) -> None:
        """As :class:`zeroshard.Engine`, or with the arguments of DeepSpeed's engine, by name.

        ``args.deepspeed_config``: the configuration, if ``config`` is None. ``mpu``: that of the model.

        Raises:
            UsageError: also for an override of a method that nothing calls here.
        """
        check_mpu(model, mpu)
        refuse_unused(type(self))
        if config is None:
            config = getattr(args, "deepspeed_config", None)
        for name in IGNORED:
            options.pop(name, None)
        super().__init__(model, config=config, **options)
        self._built_from = {"config": config, **options}
        self.agg_train_loss: Tensor | None = None
        self._own_loader: Any = None  # of training_data
        self._began_s = time.perf_counter()
        self._told_why = ""
        if args is not None:  # a program builds its own class, and initialize() does not
            announce(self)
        if training_data is not None:
            self.training_dataloader = self.loader_of(training_data, collate_fn)

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        """Give an optimizer to an engine that was built without one, by building it again. Collective.

        Raises:
            UnsupportedError: it has an optimizer, or its parameters are sharded (stage 3).
        """
        if self.runtime.optimizer is not None or self.runtime.stage.shards_params:
            raise UnsupportedError(
                "engine._configure_optimizer() is for an engine without an optimizer, below stage 3: the "
                "engine is built again with it, from the values of the parameters. Pass the optimizer, "
                "or a function that makes it from parameters, to initialize()."
            )
        options = {
            **self._built_from,
            "optimizer": client_optimizer,
            "model_parameters": model_parameters,
        }
        self.close()
        PipelineEngine.__init__(self, self.module, **options)

    # ------------------------------------------------------------------ where this rank is

    @property
    def micro_batch_size(self) -> int:
        """Samples of one micro-batch of one rank."""
        return self.train_micro_batch_size_per_gpu()

    def get_pipeline_parallel_rank(self) -> int:
        """The number of this rank's stage."""
        return self.stage_id

    # ------------------------------------------------------------------ data

    def loader_of(self, dataset: Any, collate_fn: Callable[..., Any] | None) -> Any:
        """A loader of samples in their order. ``train_batch()`` reads it again and again."""
        loader = loader_for(self, dataset, route="pipeline", collate_fn=collate_fn)
        self._own_loader = loader
        self.set_dataloader(RepeatingLoader(loader))
        return loader

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Train on the batches of a loader. Ranks without first and last stage ignore it."""
        self.set_dataiterator(iter(loader))

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        """Train on the batches of an iterator. Ranks without first and last stage ignore it."""
        if self.is_first_stage() or self.is_last_stage():
            self.data_iterator = iterator

    def set_batch_fn(self, fn: Callable[[Any], Any] | None) -> None:
        """Change each batch by ``fn``. A rank without data calls it with None."""
        self.batch_fn = fn

    def _batches(self, iterator: Iterator[Any] | None) -> Iterator[Any] | None:
        if self.batch_fn is None:
            return iterator
        if iterator is None and not (self.is_first_stage() or self.is_last_stage()):
            return None
        return map(self.batch_fn, repeat(None) if iterator is None else iterator)

    # ------------------------------------------------------------------ steps

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """As :meth:`zeroshard.Engine.train_batch`. An iterator stays in use for later calls.

        None: the iterator of the call before, or the data passed to ``initialize``.

        Raises:
            UsageError: also inside ``torch.no_grad()``.
        """
        if not torch.is_grad_enabled():
            raise UsageError(
                "engine.train_batch() inside torch.no_grad() could not train. Leave the context, or call "
                "eval_batch()."
            )
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self.train()
        self.module.additional_losses = {}
        loss = self._train_by_instructions() if self._is_changed() else self._train_plainly()
        self.agg_train_loss = loss
        self.agg_additional_losses = self._aggregate_additional_losses()
        every: float = GETTERS["steps_per_print"](self)
        if every and self.global_steps % every == 0:
            self._print_step(loss, every)
        return loss

    def _train_plainly(self) -> Tensor:
        return super().train_batch(self._batches(self.data_iterator))

    def _train_by_instructions(self) -> Tensor:
        """One step, by the schedule and the instructions of the program."""
        self._check_pipeline("train_batch()")
        accumulation = self.accumulation
        if accumulation.micro_steps or (accumulation.divided and not self._parts.is_unfinished):
            raise UsageError(IN_THE_MIDDLE)
        self.total_loss, self._compute_loss = None, True
        with self.running_instructions():
            self._exec_schedule(self._train_schedule())
        return self._aggregate_total_loss()

    def _is_changed(self) -> bool:
        """Whether the program has changed what instructions do, which torch's schedules do not run."""
        what = changed(self)
        if what and what != self._told_why:
            self._told_why = what
            refuse_unused(type(self))
            log_dist(
                f"the pipeline runs instruction by instruction: the program changes {what}", [0]
            )
        return bool(what)

    def _print_step(self, loss: Tensor, steps: float) -> None:
        now_s = time.perf_counter()
        step_s, self._began_s = (now_s - self._began_s) / steps, now_s
        log_dist(
            f"steps: {self.global_steps} loss: {float(loss):0.4f} iter time (s): {step_s:0.3f} "
            f"samples/sec: {self.train_batch_size() / step_s:0.3f}",
            ranks=[0],
        )

    def _tell(self, name: str, loss: Tensor) -> None:
        """Send a loss to the monitors."""
        if self.is_main_rank and self.monitor.enabled:
            self.monitor.write_events([(f"Train/Samples/{name}", float(loss), self.global_samples)])

    def eval_batch(  # type: ignore[override]
        self,
        data_iter: Iterator[Any] | None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Run forwards only, in evaluation mode. Collective.

        Returns the mean loss over micro-batches and data-parallel ranks (0-dim fp64) on every rank; with
        ``bcast_loss=False`` None where the last stage is not. ``compute_loss=False``: the mean of the
        outputs instead, on the last stage, else None. ``reduce_output=None``: the losses or outputs of
        this rank's micro-batches as a list, on the last stage, else None. ``return_logits``: a pair of
        that and the output of the last micro-batch (None if the last stage is elsewhere).
        ``num_micro_batches``: default as in a training step.

        Raises:
            UsageError: an argument has another value, or as :meth:`train_batch`.
        """
        _check_evaluation(reduce_output, num_micro_batches)
        count = num_micro_batches or self.gradient_accumulation_steps()
        if self._is_changed():
            return self._evaluate_by_instructions(
                data_iter, count, return_logits=return_logits, compute_loss=compute_loss,
                reduce_output=reduce_output, bcast_loss=bcast_loss,
            )  # fmt: skip
        asked = Evaluation(
            count,
            keeps_outputs=return_logits or not compute_loss,
            computes_loss=compute_loss,
        )
        reads = data_iter is not None and (self.is_first_stage() or self.is_last_stage())
        loss = self._evaluate(self._batches(iter(data_iter) if reads else None), asked)  # type: ignore[arg-type]
        if loss is not None:
            self._tell("eval_loss", loss)
        found: Any = None
        if self.is_last_stage() or (compute_loss and bcast_loss and reduce_output):
            found = self._result_of(asked, loss, whole_list=reduce_output is None)
        if return_logits:
            return found, asked.outputs[-1] if asked.outputs else None
        return found

    def _result_of(self, asked: Evaluation, loss: Tensor | None, *, whole_list: bool) -> Any:
        """The loss or the mean of the outputs; ``whole_list``: those of all micro-batches."""
        if whole_list:
            return asked.losses if asked.computes_loss else asked.outputs
        return loss if asked.computes_loss else self._reduce_outputs(asked.outputs)

    def _evaluate_by_instructions(
        self,
        data_iter: Iterator[Any] | None,
        count: int,
        *,
        return_logits: bool,
        compute_loss: bool,
        reduce_output: str | None,
        bcast_loss: bool,
    ) -> Any:
        """As :meth:`eval_batch`, by the schedule and the instructions of the program."""
        self._check_pipeline("eval_batch()")
        mode, before = self.training, self.data_iterator
        self.eval()
        self.set_dataiterator(data_iter)
        self._compute_loss, self.eval_return_logits = compute_loss, return_logits
        try:
            with torch.no_grad(), self.running_instructions():
                self._exec_schedule(self._inference_schedule(count))
        finally:
            self.train(mode)
            self.set_dataiterator(before)
            self._compute_loss, self.eval_return_logits = True, False
        found = None
        if self.is_last_stage():
            found = self._reduce_outputs(self.fwd_outputs, reduce_output, micro_batches=count)
        if compute_loss and bcast_loss and reduce_output:
            found = self._bcast_pipe_scalar(found)
            self._tell("eval_loss", found)
        outputs, self.outputs = self.outputs, None
        return (found, outputs) if return_logits else found

    # ------------------------------------------------------------------ checkpoints, and old names

    def load_checkpoint(self, load_dir: str | PathLike[str], *args: Any, **options: Any) -> Any:
        """As :meth:`zeroshard.Engine.load_checkpoint`. ``training_data`` continues where it was."""
        found = super().load_checkpoint(load_dir, *args, **options)
        if self._own_loader is not None and options.get("resumes_data", True):
            self.set_dataloader(RepeatingLoader(self._own_loader))
        return found

    def reset_activation_shape(self) -> None:
        """Nothing: each step sends its shapes ahead."""

    def mem_status(self, msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
        """Nothing: ``memory_report()`` has the bytes held. Old releases of DeepSpeed have this."""

    def set_has_attention_mask(self, value: bool) -> None:
        """Nothing: booleans are sent as they are."""


def _check_evaluation(reduce_output: Any, num_micro_batches: Any) -> None:
    if reduce_output is not None and str(reduce_output).lower() != "avg":
        raise UsageError(
            f'eval_batch(reduce_output={reduce_output!r}): give "avg" for the mean, or None for a list.'
        )
    is_count = type(num_micro_batches) is int and num_micro_batches > 0
    if num_micro_batches is not None and not is_count:
        raise UsageError(
            f"eval_batch(num_micro_batches={num_micro_batches!r}): give a number of at least 1, or None."
        )
