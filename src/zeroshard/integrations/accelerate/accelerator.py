"""An ``Accelerator`` that trains under ZeroShard: scripts change one import and pass ``config=``.

    from zeroshard.integrations.accelerate import Accelerator

    accelerator = Accelerator(config={"zero_optimization": {"stage": 3}})
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

Processes, devices, loaders, schedules, gathering, logging and trackers are Accelerate's. Methods that
concern a model or its optimizer use an engine; only methods that Accelerate documents are overridden.
Differences from plain data parallelism (``docs/integrations.md``):

* A model and its optimizer are prepared in one call, and each optimizer belongs to one model.
* ``mixed_precision`` keeps the weights in 16 bits, and their fp32 masters in shards.
* A script that steps per micro-batch calls ``clip_grad_norm_`` under ``if accelerator.sync_gradients``.
* ``get_state_dict`` returns the full state on the main process, and None on the others.
* ``optimizer.state_dict()`` is refused: ``save_state`` saves all shards, for any number of ranks.

Two private names of Accelerate are used: ``_optimizers``, the optimizers that ``save_state`` saves, and
``_prepare_tp``, which would prepare the parameters of an engine for FSDP.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

try:
    import accelerate
except ImportError as error:
    raise ImportError(
        f"zeroshard.integrations.accelerate needs Accelerate, which cannot be imported ({error}): "
        "pip install 'zeroshard[hf]'",
        name=error.name,
    ) from error

import torch
from accelerate.utils import MODEL_NAME, DistributedType
from torch import Tensor, nn

from zeroshard.comm.env import rank_info_of
from zeroshard.comm.mesh_objects import mesh_from_model
from zeroshard.config.parse import Source, read_source
from zeroshard.engine.initialize import initialize
from zeroshard.errors import UsageError
from zeroshard.integrations.accelerate.arguments import (
    Wishes,
    check_samples,
    completed,
    for_inference,
    has_params,
    is_new_optimizer,
    mesh_of,
    micro_batch_of,
    mixed_precision_for,
    pairs,
    refuse_others,
    refuse_same_samples,
    refuse_schedules,
)
from zeroshard.integrations.accelerate.prepared import EngineOptimizer, PreparedEngine
from zeroshard.integrations.accelerate.sequences import (
    PieceLoader,
    joined,
    open_sequences,
    sequence_size,
    spread_attention,
)
from zeroshard.sequence import unregister
from zeroshard.zero.sharded_parameter import ShardedParameter

__all__ = ["Accelerator", "EngineOptimizer", "PreparedEngine"]

_KINDS = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
_LEFT_TO_THE_ENGINE: dict[str, Any] = {}
"""Stands for the state dict of an engine in ``save_state``, which the engine saves itself."""


class Accelerator(accelerate.Accelerator):
    """``accelerate.Accelerator`` whose prepared models are engines.

    ``config``: as for :class:`zeroshard.Engine`; None is stage 0. All other arguments are Accelerate's.

    Batch sizes, accumulation and precision may be missing in ``config`` or be ``"auto"``: they are taken
    from Accelerate and the loader. Gradients are clipped where the script asks for it, or at every step
    if the configuration has ``gradient_clipping``. An ``optimizer`` section applies to models that are
    prepared without an optimizer, which is then ``model.optimizer``. The engine steps the schedule of a
    ``scheduler`` section.

    ``parallelism_config``: Accelerate's ``ParallelismConfig``. Its tensor ranks get the same samples. Of
    its P sequence ranks (``sp_size``) each gets a part of the tokens of every batch: loaders give P
    times as many batches, which need ``position_ids``.
    ``plan``: how a model is cut over them (:func:`zeroshard.parallel.tensor_parallel`), unless it is cut
    already. Its ``dp_replicate_size`` alone means plain data parallelism, as in Accelerate.

    Raises:
        UsageError: another plug-in shards the model, or ``config`` and an argument disagree.
        ConfigError: in ``prepare``: ``config`` has mistakes.
    """

    native_amp: bool  # an attribute of Accelerate's, as the next one
    _optimizers: list[Any]

    def __init__(
        self,
        *args: Any,
        config: Source = None,
        plan: Mapping[str, str] | str = "auto",
        **arguments: Any,
    ) -> None:
        refuse_others(arguments)
        self.plan = plan
        self.config, _ = read_source(config)
        self._checks_parallelism = arguments.get("parallelism_config") is not None
        if not self._checks_parallelism:
            refuse_same_samples(self.config)
        arguments["mixed_precision"] = mixed_precision_for(
            self.config, arguments.get("mixed_precision")
        )
        super().__init__(*args, **arguments)
        self._checks_parallelism = False
        self._check_state()
        self.sequence_group = open_sequences(
            self.parallelism_config, is_stateful=self.use_stateful_dataloader
        )
        self.scaler = None  # the engine scales the loss
        self._made: list[PreparedEngine] = []
        self._saves_state = False
        self.register_save_state_pre_hook(self._save_engines)
        self.register_load_state_pre_hook(self._load_engines)

    def _check_state(self) -> None:
        if self.distributed_type not in _KINDS:
            raise UsageError(
                f"Accelerate was started for {self.distributed_type.value}, which would shard the model "
                "a second time. Choose plain data parallelism in its configuration (accelerate config)."
            )
        if self.mixed_precision not in ("no", "bf16", "fp16"):
            raise UsageError(
                f'mixed_precision="{self.mixed_precision}": the engine trains in fp32, bf16 or fp16.'
            )
        world_size = rank_info_of().world_size
        if world_size != self.num_processes:
            raise UsageError(
                f"the launcher started {world_size} processes, but Accelerate sees "
                f"{self.num_processes}, so every rank would train on the same data. On machines without "
                "a GPU pass cpu=True (use_cpu=True to TrainingArguments, `--use_cpu true` to programs)."
            )

    @property
    def multi_device(self) -> bool:
        """As in Accelerate. CPU ranks count while it checks a ``ParallelismConfig``, or it takes none."""
        return bool(self._checks_parallelism and self.use_distributed) or super().multi_device

    @property
    def tensor_size(self) -> int:
        """The number of tensor ranks, which get the same samples."""
        asked = self.parallelism_config
        return 1 if asked is None else int(asked.tp_size)

    @property
    def _data_ranks(self) -> int:
        """How many ranks train on different samples."""
        return int(self.num_processes) // self.tensor_size // sequence_size(self.parallelism_config)

    def _prepare_tp(self, *args: Any) -> list[Any]:
        """Nothing: engines have cut their models."""
        return list(args)

    # ------------------------------------------------------------------ preparing

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As in Accelerate, but models become engines. Collective.

        A model without an optimizer in the same call gets the configuration's, or is not trained.

        Raises:
            UsageError: an optimizer's parameters are not those of one model in this call, a model has two
                optimizers, or there is a schedule besides the configuration's.
        """
        known = {id(obj): self.engine_of(obj) for obj in args if has_params(obj)}
        models = [obj for obj in args if id(obj) in known and known[id(obj)] is None]
        optimizers = [obj for obj in args if is_new_optimizer(obj)]
        if self.config.get("scheduler") is not None:
            refuse_schedules(args)
        shares = self.num_processes // self.tensor_size
        micro_batch = micro_batch_of(args, shares, splits=self.split_batches)
        made: dict[int, Any] = {key: engine for key, engine in known.items() if engine is not None}
        for model, optimizer in pairs(models, optimizers, self.engines):
            engine = made[id(model)] = self._make(model, optimizer, micro_batch)
            if optimizer is not None:
                made[id(optimizer)] = engine.optimizer
        objects = [made.get(id(obj), obj) for obj in args]
        return super().prepare(*objects, device_placement=device_placement)

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """As in Accelerate, but returns an engine, with the configuration's optimizer if it has one.

        Collective. ``evaluation_mode``: the model itself, whole on the device. If ``model`` belongs to an
        open engine, that engine is returned.
        """
        engine = self.engine_of(model)
        if engine is None and has_params(model) and not evaluation_mode:
            engine = self._make(model, None, None)
        if any(isinstance(param, ShardedParameter) for param in model.parameters()):
            device_placement = False  # built under zero.Init: the shards are on their device
        has_autocast = self.native_amp
        self.native_amp = False  # else its wrapper stays in model.forward, also below an engine
        try:
            prepared: nn.Module = super().prepare_model(
                model if engine is None else engine,
                device_placement=device_placement,
                evaluation_mode=True,  # leaves an engine as it is, and only moves other models
            )
        finally:
            self.native_amp = has_autocast
        return prepared

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """As in Accelerate. With sequence ranks, one that cuts batches over them."""
        if isinstance(data_loader, PieceLoader):
            return data_loader
        prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        if self.sequence_group is None:
            return prepared
        return PieceLoader(prepared, self.sequence_group, self.device)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """As in Accelerate. With sequence ranks, batches are those that the loader gives, cut ones."""
        skip = super().skip_first_batches
        if isinstance(dataloader, PieceLoader):
            return dataloader.after(num_batches, skip)
        return skip(dataloader, num_batches)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As in Accelerate. With sequence ranks, pieces become whole sequences: see :func:`joined`."""
        if self.sequence_group is None:
            return super().gather_for_metrics(input_data, use_gather_object)
        return joined(self, input_data, use_gather_object)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> torch.optim.Optimizer:
        """As in Accelerate, for an optimizer that was prepared with its model.

        Raises:
            UsageError: the optimizer was not prepared.
        """
        if is_new_optimizer(optimizer):
            raise UsageError(
                "prepare(optimizer) without its model: model and optimizer are sharded together. "
                "Write model, optimizer = accelerator.prepare(model, optimizer)."
            )
        prepared: torch.optim.Optimizer = super().prepare_optimizer(optimizer, device_placement)
        return prepared

    @property
    def wishes(self) -> Wishes:
        """Values that complete the configuration, apart from the loader's batch size."""
        return Wishes(self.gradient_accumulation_steps, None, self.mixed_precision)

    def _make(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, micro_batch: int | None
    ) -> PreparedEngine:
        wishes = self.wishes
        if wishes.micro_batch is None:
            wishes = replace(wishes, micro_batch=micro_batch)
        is_trained = any(param.requires_grad for param in model.parameters())
        config = self.config if is_trained else for_inference(self.config)
        mesh = mesh_of(self.parallelism_config)
        if self.sequence_group is not None:
            spread_attention(model, self.parallelism_config)
        needs_plan = self.tensor_size > 1 and mesh_from_model(model) is None
        engine, *_ = initialize(
            model=model,
            optimizer=optimizer,
            config=completed(config, wishes),
            engine_type=PreparedEngine,
            mesh=mesh,
            plan=self.plan if needs_plan else None,
        )
        assert isinstance(engine, PreparedEngine)
        check_samples(engine, self._data_ranks)
        self._made.append(engine)
        if engine.optimizer is not None:
            self._optimizers.append(engine.optimizer)
        return engine

    # ------------------------------------------------------------------ the loop

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Backpropagate ``loss / gradient_accumulation_steps``; in fp16 the loss is scaled.

        ``kwargs``: ``retain_graph``.
        """
        engines = [engine for engine in self.engines if engine.optimizer is not None]
        if not engines:
            super().backward(loss, **kwargs)
            return
        for engine in engines:
            engine.set_boundary(self.sync_gradients)
        latest = max(engines, key=lambda engine: engine.ran_at)
        if self.gradient_accumulation_steps > 1:
            loss = loss / self.gradient_accumulation_steps
        latest.backward(loss, scale_wrt_gas=False, **kwargs)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """A context in which no backward completes a step, with any number of processes."""
        with model.no_sync() if isinstance(model, PreparedEngine) else super().no_sync(model):
            yield

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Nothing: an engine's norms are those of unscaled gradients, and its step unscales them."""

    def clip_grad_norm_(
        self, parameters: Any, max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        """Make the next step clip the gradient of one model. Returns its 2-norm before, 0-dim.

        ``parameters``: all, or all trainable, parameters of one prepared model. Collective.

        Raises:
            UsageError: gradients still accumulate, it is another norm, or parameters are missing.
        """
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        engine = self._owner(params)
        if engine is None:
            norm: Tensor | None = super().clip_grad_norm_(params, max_norm, norm_type)
            return norm
        if norm_type != 2:
            raise UsageError(
                f"clip_grad_norm_(norm_type={norm_type}): gradients are sharded, and only their "
                "2-norm is computed. Use norm_type=2."
            )
        if not self.sync_gradients:
            raise UsageError(
                "clip_grad_norm_() while gradients accumulate: the gradient is not complete yet. "
                "Call it under `if accelerator.sync_gradients:`."
            )
        if engine.settings.gradient_clipping not in (0, max_norm):
            raise UsageError(
                f"clip_grad_norm_(max_norm={max_norm:g}), but the configuration says "
                f'"gradient_clipping": {engine.settings.gradient_clipping:g}. Leave that key out, '
                "because the program clips."
            )
        return engine.clip_next_step(max_norm)

    def end_training(self) -> None:
        """As in Accelerate. The trackers that it ends get the values of the last steps first."""
        for engine in self.engines:
            engine.flush_monitors()
        super().end_training()

    @property
    def engines(self) -> list[PreparedEngine]:
        """The open engines, in the order in which they were prepared."""
        self._made = [engine for engine in self._made if not engine.is_closed]
        return self._made

    def engine_of(self, model: nn.Module) -> PreparedEngine | None:
        """The open engine of ``model``, or None."""
        return next((engine for engine in self.engines if engine.module is model), None)

    def _owner(self, params: Sequence[Tensor]) -> PreparedEngine | None:
        """The engine of these parameters; None if no engine has one of them."""
        given = {id(param) for param in params if param.requires_grad}
        for engine in self.engines:
            own = {id(param) for param in engine.module.parameters() if param.requires_grad}
            if own == given:
                return engine
            if own & given:
                raise UsageError(
                    f"clip_grad_norm_() of {len(given)} parameters, {len(own & given)} of which "
                    f"are among the {len(own)} of one prepared model: the gradients of a model "
                    "can only be clipped together. Call it once for each model, with "
                    "model.parameters()."
                )
        return None

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """As in Accelerate, for models that are no engines.

        Raises:
            UsageError: the parameters are an engine's.
        """
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if self._owner(params) is not None:
            raise UsageError(
                "clip_grad_value_(): gradients are sharded, and the program cannot change them. "
                "Use clip_grad_norm_()."
            )
        super().clip_grad_value_(params, clip_value)

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Any:
        """As in Accelerate, for models that are no engines.

        Raises:
            UsageError: one of them is an engine.
        """
        if any(isinstance(item, PreparedEngine) for item in joinables):
            raise UsageError(
                "join_uneven_inputs() is for DistributedDataParallel. Keep even_batches=True, or write "
                '"uneven": "join" in the configuration and iterate over model.batches(loader).'
            )
        return super().join_uneven_inputs(joinables, even_batches)

    # ------------------------------------------------------------------ reading and saving

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """The module that was prepared."""
        inner = model.module if isinstance(model, PreparedEngine) else model
        unwrapped: nn.Module = super().unwrap_model(inner, *args, **kwargs)
        return unwrapped

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any] | None:
        """The full state in host memory, on the main process; None on the others. Collective.

        Dtypes are those in which the model computes. This is so at every stage.
        """
        if not isinstance(model, PreparedEngine):
            state: dict[str, Any] = super().get_state_dict(model, unwrap)
            return state
        if self._saves_state:
            return _LEFT_TO_THE_ENGINE
        gathered: dict[str, Any] | None = model._consolidated_16bit_state_dict()
        return gathered

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """As in Accelerate, but engines write checkpoints, which any number of ranks can load.

        Collective. The checkpoints have the names that Accelerate gives DeepSpeed's (``pytorch_model``,
        ``pytorch_model_1``, ...).
        """
        self._saves_state = True
        try:
            with self._engines_apart():
                return super().save_state(*args, **kwargs)
        finally:
            self._saves_state = False

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """As in Accelerate. Reads what ``save_state`` wrote, here or with DeepSpeed. Collective."""
        with self._engines_apart():
            super().load_state(*args, **kwargs)

    def _save_engines(self, models: list[Any], weights: list[Any], output_dir: str) -> None:
        """The first hook of ``save_state``: hooks of the script see no state dict of an engine."""
        self._saves_state = False
        weights[:] = [state for state in weights if state is not _LEFT_TO_THE_ENGINE]
        for at, engine in enumerate(models):
            if isinstance(engine, PreparedEngine):
                engine.save_checkpoint(output_dir, _tag(at), save_latest=at == 0)

    def _load_engines(self, models: list[Any], input_dir: str) -> None:
        """The first hook of ``load_state``. Accelerate loads the models that it leaves in ``models``."""
        for at, engine in enumerate(models):
            if isinstance(engine, PreparedEngine):
                engine.load_checkpoint(input_dir, _tag(at))
        models[:] = [model for model in models if not isinstance(model, PreparedEngine)]

    @contextlib.contextmanager
    def _engines_apart(self) -> Iterator[None]:
        """A context in which Accelerate saves and loads only optimizers without an engine."""
        every = self._optimizers
        self._optimizers = [one for one in every if not isinstance(one, EngineOptimizer)]
        try:
            yield
        finally:
            self._optimizers = every

    def free_memory(self, *objects: Any) -> Any:
        """As in Accelerate. Engines are closed: at stage 3 their shards, the only weights, are lost."""
        for engine in self.engines:
            if not self.keeps(engine):
                engine.close()
        if self.sequence_group is not None:
            unregister()
        return super().free_memory(*objects)

    def keeps(self, _engine: PreparedEngine) -> bool:
        """Whether the engine stays open in ``free_memory()``."""
        return False


def _tag(at: int) -> str:
    return MODEL_NAME if at == 0 else f"{MODEL_NAME}_{at}"
