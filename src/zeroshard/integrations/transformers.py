"""Transformers' Trainer under ZeroShard, without ``TrainingArguments(deepspeed=...)``.

    from zeroshard.integrations.transformers import Trainer

    Trainer(model, args, zeroshard_config={"zero_optimization": {"stage": 3}}, train_dataset=...).train()

For a subclass of ``transformers.Trainer``, put :class:`ZeroShardMixin` before it in the list of bases.
Batch size, accumulation, precision and clipping are those of the ``TrainingArguments``. The Trainer makes
the optimizer and the schedule.

Every checkpoint contains the weights and an engine's checkpoint, which any number of ranks can resume.
The keys of :data:`REPLACED` are the private methods of the Trainer that are replaced.
"""

from __future__ import annotations

import functools
import os
from typing import Any

try:
    import transformers
except ImportError as error:
    raise ImportError(
        f"zeroshard.integrations.transformers needs Transformers, which cannot be imported ({error}): "
        "pip install 'zeroshard[hf]'",
        name=error.name,
    ) from error

import torch
from torch import Tensor, nn

from zeroshard.checkpoint.directory import LATEST
from zeroshard.config.parse import Source, read_source
from zeroshard.engine.engine import Engine
from zeroshard.errors import UsageError
from zeroshard.integrations.accelerate import Accelerator, PreparedEngine
from zeroshard.integrations.accelerate.arguments import Wishes
from zeroshard.integrations.resuming import newest_checkpoint

__all__ = [
    "REPLACED",
    "PreemptionCallback",
    "Seq2SeqTrainer",
    "Trainer",
    "ZeroShardMixin",
    "newest_checkpoint",
]

REPLACED = {
    "_build_accelerator_args": "the arguments of its Accelerator, with which ours is built",
    "_move_model_to_device": "an engine allocates the shards; the whole model may not fit",
    "_wrap_model": "evaluation runs the engine, which knows the dtypes, not the bare model",
    "_save": "all ranks gather the weights that one writes",
    "_save_optimizer_and_scheduler": "all ranks write the engine's checkpoint",
    "_load_from_checkpoint": "weights are part of the engine's checkpoint, when there is an engine",
    "_load_optimizer_and_scheduler": "all ranks read the engine's checkpoint",
    "_load_best_model": "the engine reads the weights of its checkpoint",
}
"""Private methods of ``transformers.Trainer``, and why each is replaced."""

_SCHEDULE = "scheduler.pt"  # the Trainer's name for this file


class ZeroShardMixin:
    """Put it before a subclass of ``transformers.Trainer``, which then trains an engine.

    ``zeroshard_config``: as for :class:`zeroshard.Engine`, without the sections ``optimizer`` and
    ``scheduler``; None is stage 0.

    Raises:
        UsageError: configuration and ``TrainingArguments`` disagree, or ask for what an engine cannot do.
    """

    args: Any  # attributes of the Trainer that the mixin uses
    model: Any
    state: Any
    lr_scheduler: Any
    accelerator: Any
    gather_function: Any

    def __init__(self, *args: Any, zeroshard_config: Source = None, **kwargs: Any) -> None:
        self.zeroshard_config, _ = read_source(zeroshard_config)
        super().__init__(*args, **kwargs)
        self.callback_handler.callbacks.insert(0, _LastValues(self))  # type: ignore[attr-defined]
        if (self.zeroshard_config.get("preemption") or {}).get("enabled"):
            self.add_callback(PreemptionCallback(self))  # type: ignore[attr-defined]

    # ------------------------------------------------------------------ the Accelerator

    def create_accelerator_and_postprocess(self) -> None:
        """Run the Trainer's preparations, then replace its Accelerator by ours with equal arguments."""
        _refuse(self.args, self.zeroshard_config)
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator = _TrainersAccelerator(
            trainer=self, config=self.zeroshard_config, **self._accelerator_arguments
        )
        self.gather_function = functools.partial(
            self.accelerator.gather_for_metrics,
            use_gather_object=self.args.eval_use_gather_object,
        )

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        built: dict[str, Any] = super()._build_accelerator_args(**kwargs)  # type: ignore[misc]
        self._accelerator_arguments = built
        return built

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Nothing: see :data:`REPLACED`."""

    @property
    def _engine(self) -> PreparedEngine | None:
        """The engine of the Trainer's model; None before training."""
        engine: PreparedEngine | None = self.accelerator.engine_of(self.model)
        return engine

    def _wrap_model(
        self, model: nn.Module, training: bool = True, dataloader: Any = None
    ) -> nn.Module:
        wrapped: nn.Module | None = None if training else self.accelerator.engine_of(model)
        if wrapped is None:
            wrapped = super()._wrap_model(model, training, dataloader)  # type: ignore[misc]
        return wrapped

    # ------------------------------------------------------------------ saving

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        engine = self._engine
        if engine is not None and state_dict is None:
            state_dict = _weights(engine)
        super()._save(output_dir, state_dict)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        engine = self._trained("save")
        engine.save_checkpoint(output_dir, exclude_frozen_parameters=_has_adapters(engine.module))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULE))

    # ------------------------------------------------------------------ loading

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not _holds_engine(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not _holds_engine(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        self._trained("load").load_checkpoint(checkpoint)
        schedule = torch.load(os.path.join(checkpoint, _SCHEDULE), weights_only=True)
        self.lr_scheduler.load_state_dict(schedule)

    def _load_best_model(self) -> None:
        self._trained("load").load_checkpoint(
            self.state.best_model_checkpoint, load_module_only=True
        )

    def _trained(self, verb: str) -> PreparedEngine:
        engine = self._engine
        if engine is None:
            raise UsageError(
                f"the Trainer cannot {verb} a checkpoint before train(): there is no engine yet."
            )
        return engine


class _LastValues(transformers.TrainerCallback):
    """Sends the values of the last steps to the trackers before their callbacks end the runs."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait until they are written."""
        if self._trainer._engine is not None:
            self._trainer._engine.flush_monitors()


class PreemptionCallback(transformers.TrainerCallback):
    """After a signal to any rank, a Trainer saves one of its checkpoints and stops.

    For a Trainer whose configuration has ``"preemption": {"enabled": true}``. :class:`Trainer` adds it
    by itself, another one with ``trainer.add_callback(PreemptionCallback(trainer))``. ``train()`` returns
    after the checkpoint. In an evaluation the process ends after it, with exit code 0.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @property
    def _is_preempted(self) -> bool:
        engine = getattr(self._trainer, "_engine", None) or self._trainer.model_wrapped
        return isinstance(engine, Engine) and engine.preempted

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ask the Trainer to save and to stop."""
        if self._is_preempted:
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save in the middle of an evaluation. All ranks evaluate equal numbers of batches.

        Raises:
            SystemExit: with code 0, after the checkpoint.
        """
        if self._is_preempted:
            self._trainer._save_checkpoint(self._trainer.model, None)
            raise SystemExit(0)


class Trainer(ZeroShardMixin, transformers.Trainer):
    """``transformers.Trainer`` with ``zeroshard_config``: see :class:`ZeroShardMixin`."""


class Seq2SeqTrainer(ZeroShardMixin, transformers.Seq2SeqTrainer):
    """``transformers.Seq2SeqTrainer`` with ``zeroshard_config``: see :class:`ZeroShardMixin`.

    With ``predict_with_generate`` at stage 3, every rank generates until all ranks have finished.
    """

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """See ``transformers.Seq2SeqTrainer``."""
        found: dict[str, float] = super().evaluate(*args, **self._together(kwargs))
        return found

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """See ``transformers.Seq2SeqTrainer``."""
        return super().predict(*args, **self._together(kwargs))

    def _together(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        engine = self._engine
        is_sharded = engine is not None and engine.runtime.stage.shards_params
        return {"synced_gpus": True, **kwargs} if is_sharded else kwargs


class _TrainersAccelerator(Accelerator):
    """An Accelerator for the Trainer.

    The Trainer counts micro-batches itself, and calls ``free_memory()`` before each training although it
    keeps the model.
    """

    def __init__(self, *args: Any, trainer: Any, **kwargs: Any) -> None:
        self._trainer = trainer
        super().__init__(*args, **kwargs)

    @property
    def wishes(self) -> Wishes:
        """The values of the ``TrainingArguments``."""
        args = self._trainer.args
        return Wishes(
            args.gradient_accumulation_steps,
            self._trainer._train_batch_size,
            self.mixed_precision,
            ("TrainingArguments.gradient_accumulation_steps",
             "TrainingArguments.per_device_train_batch_size"),
        )  # fmt: skip

    def keeps(self, engine: PreparedEngine) -> bool:
        """Whether the engine stays open: only if the Trainer still has its model (see ``model_init``)."""
        return engine.module is self._trainer.model


def _refuse(args: Any, config: dict[str, Any]) -> None:
    """Raise :class:`UsageError` for everything that an engine would ignore."""
    for section, instead in (
        ("optimizer", "optim, learning_rate, weight_decay, ..."),
        ("scheduler", "lr_scheduler_type, warmup_steps, ..."),
    ):
        if config.get(section) is not None:
            raise UsageError(
                f'zeroshard_config has "{section}", but the Trainer makes its own, from '
                f"TrainingArguments ({instead}). Remove that section."
            )
    if (config.get("preemption") or {}).get("save_dir"):
        raise UsageError(
            'zeroshard_config has "preemption": {"save_dir": ...}, and the Trainer could not resume from '
            'a checkpoint of the engine alone. Write "preemption": {"enabled": true}: the Trainer then '
            "saves one of its own."
        )
    refused = {
        "deepspeed": "it trains with DeepSpeed; zeroshard_config accepts the same file",
        "fsdp": "it would shard the model a second time",
        "parallelism_config": "this Trainer gives each rank samples of its own, so it knows no tensor or "
        "sequence ranks. For them use transformers.Trainer with deepspeed=, where import deepspeed "
        "imports ZeroShard (zeroshard launch --as-deepspeed)",
        "fp16_full_eval": "an engine evaluates in the dtype in which it trains",
        "bf16_full_eval": "an engine evaluates in the dtype in which it trains",
        "torch_compile": "hooks gather the parameters; compile parts of the model before training",
        "save_on_each_node": "the ranks of a checkpoint write into one directory",
    }
    for name, why in refused.items():
        if getattr(args, name, None):
            raise UsageError(
                f"TrainingArguments({name}=...) with zeroshard_config: {why}. Remove it."
            )
    if args.n_gpu > 1:
        raise UsageError(
            f"one process sees {args.n_gpu} GPUs, and the Trainer would copy the model to all of "
            "them. Start one process for each GPU: torchrun --nproc-per-node, or zeroshard."
        )
    if args.save_only_model and args.load_best_model_at_end:
        raise UsageError(
            "save_only_model=True with load_best_model_at_end=True: the best model is read from "
            "the engine's checkpoint, which would not be written. Remove one of them."
        )
    clip = config.get("gradient_clipping", "auto")
    if args.max_grad_norm > 0 and clip not in ("auto", None, 0, args.max_grad_norm):
        raise UsageError(
            f'zeroshard_config says "gradient_clipping": {clip}, but TrainingArguments.max_grad_norm is '
            f'{args.max_grad_norm:g}. Both must agree: leave the key out, or write "auto".'
        )


def _weights(engine: PreparedEngine) -> dict[str, Tensor]:
    """The weights that the Trainer writes, in host memory on rank 0; empty on other ranks. Collective.

    For a model with adapters: only trained weights, unless an adapter is frozen; then all weights.
    """
    adapters = getattr(engine.module, "peft_config", None) or {}
    rests = any(
        not param.requires_grad and not adapters.keys().isdisjoint(name.split("."))
        for name, param in engine.module.named_parameters()
    )
    exclude = bool(adapters) and not rests
    return engine._consolidated_16bit_state_dict(exclude_frozen_parameters=exclude) or {}


def _has_adapters(module: Any) -> bool:
    return bool(getattr(module, "peft_config", None))


def _holds_engine(checkpoint: str) -> bool:
    return os.path.isfile(os.path.join(checkpoint, LATEST))
