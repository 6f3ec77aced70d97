"""The engine that ``deepspeed.initialize`` builds.

It is :class:`zeroshard.Engine` with the methods and attributes that only programs written for DeepSpeed
use.
"""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from zeroshard.deepspeed import api_table, conflicts, groups
from zeroshard.deepspeed.experts import load_moe_state_dict
from zeroshard.deepspeed.getters import ForwardingEngine
from zeroshard.deepspeed.helpers import DeepSpeedConfig
from zeroshard.deepspeed.hook_handles import DeepSpeedZeRoOffload
from zeroshard.deepspeed.logs import log_dist
from zeroshard.deepspeed.lone_reads import LoneReads
from zeroshard.deepspeed.monitors import MonitorMaster
from zeroshard.deepspeed.optimizer import ForwardingOptimizer, optimizer_of
from zeroshard.deepspeed.parameters import mark_parameters
from zeroshard.deepspeed.timers import SynchronizedWallClockTimer, ThroughputTimer
from zeroshard.errors import UnsupportedError
from zeroshard.experts.layer import layers_of
from zeroshard.zero.gathered import GatheredParameters


class DeepSpeedEngine(ForwardingEngine):
    """An engine under DeepSpeed's names. ``optimizer``: what :mod:`.optimizer` describes."""

    _as_deepspeed = True

    def __init__(self, model: nn.Module, *, optimizer: Any = None, **options: Any) -> None:
        """As :class:`zeroshard.Engine`."""
        super().__init__(model, optimizer=_inner(optimizer), **options)
        self._mesh_groups = groups.use(self.mesh)
        self.mpu: Any = None if self.mesh.is_data_only else self._mesh_groups
        self.optimizer: ForwardingOptimizer | DeepSpeedZeRoOffload | None = optimizer_of(self)  # type: ignore[assignment]
        self.num_experts = [layer.num_experts for layer in layers_of(model).values()]
        self.has_moe_layers = bool(self.num_experts)
        self.is_compiled = False
        self.losses: Tensor | None = None
        self._short_steps = conflicts.ShortSteps()
        self.timers = SynchronizedWallClockTimer()
        self.tput_timer = ThroughputTimer(None, self.train_batch_size())
        self.monitor = MonitorMaster(self.settings, self.monitors)
        self.param_names = {param: name for name, param in model.named_parameters()}
        if self.runtime.stage.shards_params:
            mark_parameters(model.parameters())
            self.parameter_offload = DeepSpeedZeRoOffload(self)
            # Programs look there for the hooks of a model that only runs.
            if self.optimizer is None:
                self.optimizer = self.parameter_offload
            if (readers := self._watch.readers()) is not None:
                lonely = LoneReads(readers, self.global_rank)
                for unit in self.runtime.units:
                    unit.is_lone_read = lonely

    # ------------------------------------------------------------------ attributes

    @property
    def dp_world_size(self) -> int:
        """Ranks that train on different data."""
        return self.dp_size

    @property
    def mp_world_size(self) -> int:
        """Number of ranks that share each layer."""
        return self._mesh_groups.get_model_parallel_world_size()

    @property
    def data_parallel_group(self) -> Any:
        """The process group of the ranks that train on different data and hold the same parameters."""
        return self._mesh_groups.get_data_parallel_group()

    @property
    def _global_grad_norm(self) -> float | None:
        return self.get_global_grad_norm()

    @property
    def _config(self) -> DeepSpeedConfig:
        return DeepSpeedConfig.of(self.loaded)

    @property
    def inside_no_sync_ctxt(self) -> bool:
        """Whether the program is inside ``no_sync()``."""
        return self.accumulation.deferred > 0

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Milliseconds of the program's own timers (``engine.timers``)."""
        return {name: timer.elapsed(reset=False) for name, timer in self.timers.timers.items()}

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError as error:
                if (row := api_table.find_member("engine", name)) is not None and not row.home:
                    raise AttributeError(api_table.reason_of(row), name=name, obj=self) from error
                raise

    def hook_handles(self) -> tuple[list[Any], list[Any]]:
        """Handles of the hooks on modules, and of those on parameters."""
        return list(self._hooks.on_modules), list(self._hooks.on_params)

    def attach_hooks(self) -> None:
        """Attach all hooks again, after a program removed some."""
        self.life.check()
        self._hooks.attach()

    # ------------------------------------------------------------------ states

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The module's state dict, with full values at every stage.

        Sharded values are gathered when they are read. Then every rank has to read them.
        """
        into: dict[str, Any] = OrderedDict() if destination is None else destination
        state = self.module.state_dict(destination=into, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, param in self.module.named_parameters():
                if not param.requires_grad:
                    state.pop(prefix + name, None)
        return state

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """Load ``checkpoint["module"]`` of rank 0 into the module. Every rank calls it.

        Meanwhile every rank holds the whole model.
        """
        with GatheredParameters(list(self.module.parameters()), modifier_rank=0):
            if custom_load_fn is not None:
                custom_load_fn(src=checkpoint["module"], dst=self.module)
            else:
                self.module.load_state_dict(checkpoint["module"], strict=strict)

    load_moe_state_dict = staticmethod(load_moe_state_dict)

    # ------------------------------------------------------------------ training

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """As :meth:`zeroshard.Engine.backward`."""
        self._short_steps.saw_backward(divides=scale_wrt_gas)
        return super().backward(loss, retain_graph, scale_wrt_gas)

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """As :meth:`zeroshard.Engine.step`."""
        if notice := self._short_steps.saw_step(self.accumulation):
            log_dist(notice, ranks=[0], level=logging.WARNING)
        super().step(lr_kwargs)

    def compile(
        self,
        backend: Any = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """``torch.compile`` of the module, in place.

        Raises:
            UnsupportedError: DeepCompile's ``schedule``, or compiled autograd. Neither works with hooks
                that free memory.
        """
        if schedule is not None or compiled_autograd_enabled:
            raise UnsupportedError(
                "engine.compile(): schedule and compiled_autograd_enabled belong to DeepCompile. Leave "
                "them out; the module itself is compiled."
            )
        self.module.compile(**{"backend": backend, **(compile_kwargs or {})})
        self.is_compiled = True

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """As :meth:`no_sync`: stages 0 and 1 reduce once, later; stages 2 and 3 reduce every backward."""
        with self.no_sync():
            yield

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Nothing: gradients are reduced during backward."""

    def clip_fp32_gradients(self) -> None:
        """Nothing: clipping is part of the update."""

    def set_data_post_process_func(self, post_process_func: Callable[..., Any]) -> None:
        """Not available: change batches in ``collate_fn``.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "set_data_post_process_func is for DeepSpeed's curriculum loader, which ZeroShard "
            "does not have. Change batches in collate_fn."
        )


def _inner(optimizer: Any) -> Any:
    return optimizer.optimizer if isinstance(optimizer, ForwardingOptimizer) else optimizer
