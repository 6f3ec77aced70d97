"""The model and the optimizer that :mod:`zeroshard.integrations.accelerate` prepares.

The model is an engine. It behaves as a model that Accelerate prepares: under mixed precision it takes and
returns fp32. The optimizer acts only where gradients are complete.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, ClassVar

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import convert_to_fp32
from torch import Tensor

from zeroshard.deepspeed.engine import ForwardingEngine
from zeroshard.errors import UsageError
from zeroshard.precision.policy import cast_floats
from zeroshard.zero.life import EngineState
from zeroshard.zero.sharded_parameter import list_on_request


class PreparedEngine(ForwardingEngine):
    """An engine whose ``forward`` takes floating inputs in any dtype, and returns 16-bit outputs in fp32.

    ``optimizer``: an :class:`EngineOptimizer`, or None if the model is not trained.
    """

    _runs: ClassVar[itertools.count[int]] = itertools.count()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As :class:`zeroshard.Engine`."""
        super().__init__(*args, **kwargs)
        self._is_accelerate_prepared = True
        self.ran_at = -1  # a count of forwards: the engine with the largest number ran last
        self.optimizer: EngineOptimizer | None = (  # type: ignore[assignment]
            None if self.basic_optimizer is None else EngineOptimizer(self)
        )
        if self.runtime.stage.shards_params:  # one rank may call state_dict() alone
            list_on_request(self.module.parameters())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model. Returns its outputs, with 16-bit floats converted to fp32."""
        if torch.is_grad_enabled():
            self.ran_at = next(self._runs)
        if self.policy.param is not None:
            args, kwargs = cast_floats((args, kwargs), self.policy.param)
        outputs = super().forward(*args, **kwargs)
        is_narrow = self.policy.param is not None or self.policy.autocast is not None
        return convert_to_fp32(outputs) if is_narrow else outputs

    def clip_next_step(self, max_norm: float) -> Tensor:
        """Make the next ``step()`` clip at ``max_norm``. Returns the norm before, 0-dim, on the device.

        Collective. It costs one small exchange more than clipping by the configuration.

        Raises:
            UsageError: there was no backward in this step, or ``compute_grad_norm`` is false.
        """
        self.life.check()
        if not self.accumulation.divided:
            raise UsageError(
                "clip_grad_norm_() before any backward of this step: there is no gradient. Call "
                "accelerator.backward(loss) first."
            )
        norm = self._update.norm_before_step()
        if norm is None:
            raise UsageError(
                'clip_grad_norm_() with "compute_grad_norm": false in the configuration: the norm '
                "for clipping is not computed. Leave that key out."
            )
        self._update.max_norm = 0.0 if math.isinf(max_norm) else float(max_norm)
        return norm

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """See :meth:`zeroshard.Engine.step`. A norm set by :meth:`clip_next_step` applies to one step."""
        super().step(lr_kwargs)
        self._update.max_norm = self.settings.gradient_clipping

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See :meth:`zeroshard.Engine.zero_grad`. Also drops a norm set by :meth:`clip_next_step`."""
        super().zero_grad(set_to_none)
        self._update.max_norm = self.settings.gradient_clipping

    def flush_monitors(self) -> None:
        """Wait until monitors have the values of all steps: a tracker's run is about to end."""
        self._observer.flush()

    @property
    def is_closed(self) -> bool:
        """Whether ``close()`` was called."""
        return self.life.state is EngineState.CLOSED

    def set_boundary(self, is_boundary: bool) -> None:
        """Set whether this micro-batch is the last of its step, as Accelerate counts.

        It is set only where the engine's own count differs: a declared boundary makes the engine keep
        memory for sums.
        """
        if self.is_gradient_accumulation_boundary() != is_boundary:
            self.set_gradient_accumulation_boundary(is_boundary)


class EngineOptimizer(AcceleratedOptimizer):
    """The script's optimizer: torch's groups, with the engine's ``step`` and ``zero_grad``.

    Both do nothing while gradients accumulate, as in Accelerate.
    """

    def __init__(self, engine: PreparedEngine) -> None:
        super().__init__(engine.basic_optimizer, device_placement=False)
        self._is_accelerate_prepared = True
        self._engine = engine

    def step(self, closure: Any = None) -> None:
        """Clip, update, and drop the gradients, if they are complete. Collective.

        Raises:
            UsageError: a closure is given.
        """
        if closure is not None:
            raise UsageError(
                "optimizer.step(closure): the engine updates after backward and cannot run the model "
                "again. Call it without a closure."
            )
        if self.gradient_state.sync_gradients:
            self._engine.set_boundary(True)
            self._engine.step()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients, if they are complete. ``step()`` does so itself."""
        if self.gradient_state.sync_gradients:
            self._engine.zero_grad()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last ``step()`` was skipped, because a gradient was not finite.

        In fp16, reading this waits for that step.
        """
        report = self._engine.last_step
        return report is not None and report.skipped

    def add_param_group(self, param_group: Any) -> None:
        """Not available: shards are cut when the model is prepared.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "optimizer.add_param_group() after prepare(): the state is already sharded. Add the "
            "group before accelerator.prepare()."
        )

    def state_dict(self) -> dict[str, Any]:
        """Not available: no rank has the full state.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "optimizer.state_dict(): each rank has only a part of the state, and only the part of "
            "one rank would be saved. Use accelerator.save_state(), or save_checkpoint() of the "
            "prepared model."
        )

    def load_state_dict(self, state_dict: Any) -> None:
        """Not available: see :meth:`state_dict`.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "optimizer.load_state_dict(): this rank has only a part of the state, so a full state "
            "cannot be loaded. Use accelerator.load_state(), or load_checkpoint() of the prepared "
            "model; it reads states saved by ZeroShard and by DeepSpeed."
        )
