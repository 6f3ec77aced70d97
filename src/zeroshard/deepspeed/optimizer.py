"""The optimizer that ``deepspeed.initialize`` returns, and the hooks that programs remove through it.

It is a view of the engine, under the names that programs and libraries expect of an optimizer.
Arithmetic, groups and state are those of the inner ``torch.optim`` object.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.deepspeed import api_table
from zeroshard.engine.engine import Engine
from zeroshard.errors import UsageError


class DeepSpeedOptimizer:
    """A base class, by which libraries recognize an optimizer that an engine drives."""


class ZeROOptimizer(DeepSpeedOptimizer):
    """The base class of optimizers with sharded state."""


class ForwardingOptimizer(ZeROOptimizer, torch.optim.Optimizer):
    """The optimizer as the program sees it; torch's schedules accept it.

    ``optimizer`` is the inner one. ``step``, ``backward`` and ``zero_grad`` call the engine.
    """

    def __init__(self, engine: Engine, inner: torch.optim.Optimizer) -> None:
        # torch's constructor would copy the groups, which must stay those of the inner optimizer.
        self._engine = engine
        self.optimizer = inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's groups: writing ``lr`` takes effect."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """State of the fragments that this rank owns."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The inner optimizer's default options."""
        return self.optimizer.defaults

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped, because a gradient was not finite."""
        report = self._engine.last_step
        return report is not None and report.skipped

    @property
    def loss_scale(self) -> float:
        """The factor on the loss; 1 without loss scaling."""
        return float(self._engine.scaler.scale)

    cur_scale = loss_scale

    @property
    def loss_scaler(self) -> Any:
        """The engine's loss scaler, with DeepSpeed's names of the scale."""
        return _Scaler(self._engine)

    @property
    def loss_scale_config(self) -> SimpleNamespace:
        """The current settings of loss scaling."""
        settings, scaler = self._engine.settings.fp16, self._engine.scaler
        dynamic = self.dynamic_loss_scale
        return SimpleNamespace(
            use_grad_scaling=self._engine.scales_loss,
            dynamic_loss_scale=dynamic,
            cur_scale=float(scaler.scale),
            cur_iter=self._engine.global_steps,
            scale_factor=2.0 if dynamic else None,
            scale_window=settings.loss_scale_window if dynamic else None,
            min_loss_scale=settings.min_loss_scale if dynamic else None,
        )

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale changes after overflows."""
        return self._engine.scales_loss and not self._engine.settings.fp16.loss_scale

    @property
    def clip_grad(self) -> float:
        """Limit of the gradient's norm; 0: no clipping."""
        return float(self._engine.settings.gradient_clipping)

    @property
    def _global_grad_norm(self) -> float | None:
        return self._engine.get_global_grad_norm()

    @property
    def dp_process_group(self) -> Any:
        """The group of ranks over which the state is sharded."""
        engine: Any = self._engine  # a property of DeepSpeedEngine
        return engine.data_parallel_group

    @property
    def single_partition_of_fp32_groups(self) -> list[Tensor]:
        """Masters that this rank updates: one flat tensor ``[C]`` for each chunk."""
        owner = self._engine.runtime.optimizer
        assert owner is not None
        owner.wait_for_worker()
        return [chunk.master_C for shard in owner.shards for chunk in shard.chunks]

    fp32_partitioned_groups_flat = single_partition_of_fp32_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """The engine's step.

        Raises:
            TypeError: a closure is given.
        """
        if closure is not None:
            raise TypeError("step() of an engine's optimizer takes no closure")
        self._engine.step()

    def backward(self, loss: Tensor, retain_graph: bool = False) -> Tensor:
        """The engine's backward."""
        return self._engine.backward(loss, retain_graph=retain_graph)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The engine's zero_grad."""
        self._engine.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Groups, and state of the fragments that this rank owns."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned on the same rank of an equal run."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """torch's. The next step raises :class:`UsageError`: shards are cut when the engine is built."""
        self.optimizer.add_param_group(param_group)

    def get_lr(self) -> float:
        """The learning rate of the first group."""
        return float(self.param_groups[0]["lr"])

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all groups."""
        for group in self.param_groups:
            group["lr"] = lr

    def __getattr__(self, name: str) -> Any:
        if name in ("optimizer", "_engine") or name.startswith("__"):
            raise AttributeError(name)
        if (row := api_table.find_member("optimizer", name)) is not None:
            raise AttributeError(api_table.reason_of(row), name=name, obj=self)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "an engine's optimizer cannot be pickled; save with engine.save_checkpoint()"
        )


class _Scaler:
    """The loss scaler of an engine. ``cur_scale`` and ``loss_scale`` are numbers."""

    def __init__(self, engine: Engine) -> None:
        self._scaler = engine.scaler

    @property
    def cur_scale(self) -> float:
        return float(self._scaler.scale)

    loss_scale = cur_scale

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._scaler, name)


class DeepSpeedZeroOptimizer(ForwardingOptimizer):
    """The optimizer at stages 1 and 2, and at stage 0 in fp32."""


class DeepSpeedZeroOptimizer_Stage3(ForwardingOptimizer):
    """The optimizer at stage 3."""

    @property
    def parameter_offload(self) -> DeepSpeedZeRoOffload:
        """The hooks on the model."""
        found: DeepSpeedZeRoOffload = self._engine.__dict__["parameter_offload"]
        return found


class BF16_Optimizer(ForwardingOptimizer):
    """The optimizer at stage 0 in bf16."""


class FP16_Optimizer(ForwardingOptimizer):
    """The optimizer at stage 0 in fp16."""


class FP16_UnfusedOptimizer(ForwardingOptimizer):
    """Never made: there is one implementation of fp16."""


def optimizer_of(engine: Engine) -> ForwardingOptimizer | None:
    """The engine's optimizer, as the class that programs expect; None if the engine has none."""
    inner = engine.basic_optimizer
    if inner is None:
        return None
    stage, settings = engine.runtime.stage.number, engine.settings
    cls: type[ForwardingOptimizer] = DeepSpeedZeroOptimizer
    if stage == 3:
        cls = DeepSpeedZeroOptimizer_Stage3
    elif stage == 0 and (settings.fp16.enabled or settings.bf16.enabled):
        cls = FP16_Optimizer if settings.fp16.enabled else BF16_Optimizer
    return cls(engine, inner)


class LossScalerBase:
    """Types for comparison only. The engine's scaler is ``engine.scaler``."""


class LossScaler(LossScalerBase):
    """A fixed scale."""


class DynamicLossScaler(LossScalerBase):
    """A scale that follows overflows."""


# ---------------------------------------------------------------------- hooks


class DeepSpeedZeRoOffload:
    """The hooks of an engine at stage 3.

    ``module``: the model. ``forward_hooks`` and ``backward_hooks``: handles of the hooks on modules and
    on parameters; ``remove()`` of a handle removes the hook.

    Programs that generate at stage 3 first make all parameters whole (``GatheredParameters``), and then
    remove the hooks, so that each rank can call the model independently. Without its hooks an engine
    gathers and reduces nothing by itself: running a sharded module raises an error that says so, and
    ``step()`` finds no gradient.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.module: nn.Module = engine.module
        self.module.ds_external_parameters = _no_parameters  # type: ignore[assignment]
        self.param_coordinator = _Order()
        self._read_handles()

    def _read_handles(self) -> None:
        hooks = self._engine._hooks
        self.forward_hooks, self.backward_hooks = list(hooks.on_modules), list(hooks.on_params)

    def _register_deepspeed_module(self, module: nn.Module, count: Any = None) -> None:
        """Attach the hooks of the engine's model again."""
        if module is not self.module:
            raise UsageError(
                f"_register_deepspeed_module got a {type(module).__name__} that is not the engine's "
                "model. Pass parameter_offload.module."
            )
        self._engine.life.check()
        self._engine._hooks.attach()
        self._read_handles()


def _no_parameters() -> tuple[()]:
    """Parameters that a module uses and another module owns: none need to be declared."""
    return ()


class _Order:
    """Stands for DeepSpeed's trace of modules. Here a forward in another order is slower, not invalid."""

    def is_invalid_trace(self) -> bool:
        """True: there is no trace to invalidate."""
        return True
