"""What are a model and an optimizer that our :mod:`~zeroshard.integrations.accelerate` prepared?

An engine, and the optimizer as a script sees it. Both are what Accelerate makes of them elsewhere: the
model takes and returns fp32 under mixed precision, the optimizer acts where gradients are complete.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, ClassVar

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import convert_to_fp32
from torch import Tensor

from zeroshard.deepspeed.getters import ForwardingEngine
from zeroshard.errors import UsageError
from zeroshard.precision.casting import cast_floats
from zeroshard.zero.life import EngineState
from zeroshard.zero.sharded_parameter import list_on_request


class PreparedEngine(ForwardingEngine):
    """An engine whose ``forward`` takes floating inputs in any dtype, and returns 16-bit outputs in fp32.

    ``optimizer``: an :class:`EngineOptimizer`, or None for a model that is not trained.
    """

    _runs: ClassVar[itertools.count[int]] = itertools.count()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As :class:`zeroshard.Engine`."""
        super().__init__(*args, **kwargs)
        self._is_accelerate_prepared = True
        self.ran_at = -1  # of the engines of a process, the greatest ran last
        self.optimizer: EngineOptimizer | None = (  # type: ignore[assignment]
            None if self.basic_optimizer is None else EngineOptimizer(self)
        )
        if self.runtime.stage.shards_params:  # ranks that save nothing list a state dict alone
            list_on_request(self.module.parameters())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model. Returns what the model returns, 16-bit floats of it in fp32."""
        if torch.is_grad_enabled():
            self.ran_at = next(self._runs)
        if self.policy.param is not None:
            args, kwargs = cast_floats((args, kwargs), self.policy.param)
        outputs = super().forward(*args, **kwargs)
        is_narrow = self.policy.param is not None or self.policy.autocast is not None
        return convert_to_fp32(outputs) if is_narrow else outputs

    def clip_next_step(self, max_norm: float) -> Tensor:
        """Let the next ``step()`` clip at ``max_norm``. Returns the norm before, 0-dim, on the device.

        Collective; it costs one more small exchange than clipping by the configuration.
        """
        self.life.check()
        if not self.accumulation.divided:
            raise UsageError(
                "clip_grad_norm_() before any backward of this step: there is no gradient. Call "
                "accelerator.backward(loss) first."
            )
        self._update.all_gather_late()
        self.runtime.reducer.finish()
        norm = self._update._measure().norm
        if norm is None:
            raise UsageError(
                'clip_grad_norm_() with "compute_grad_norm": false in the configuration: there is no '
                "norm to clip. Leave that key out."
            )
        self._update.max_norm = 0.0 if math.isinf(max_norm) else float(max_norm)
        return norm

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """As :meth:`zeroshard.Engine.step`; a norm to clip at counts for one step."""
        super().step(lr_kwargs)
        self._update.max_norm = self.settings.gradient_clipping

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As :meth:`zeroshard.Engine.zero_grad`; a norm to clip at is forgotten too."""
        super().zero_grad(set_to_none)
        self._update.max_norm = self.settings.gradient_clipping

    @property
    def is_closed(self) -> bool:
        """Has somebody called ``close()``?"""
        return self.life.state is EngineState.CLOSED

    def set_boundary(self, is_boundary: bool) -> None:
        """Accelerate says which micro-batch is the last of its step. Said only where the engine's own
        count differs: a boundary that others declare makes it keep room for sums."""
        if self.is_gradient_accumulation_boundary() != is_boundary:
            self.set_gradient_accumulation_boundary(is_boundary)


class EngineOptimizer(AcceleratedOptimizer):
    """The script's optimizer: its groups are the torch optimizer's, ``step`` and ``zero_grad`` the
    engine's. Both do nothing while gradients accumulate, as with Accelerate.
    """

    def __init__(self, engine: PreparedEngine) -> None:
        super().__init__(engine.basic_optimizer, device_placement=False)
        self._is_accelerate_prepared = True
        self._engine = engine

    def step(self, closure: Any = None) -> None:
        """Clip, update, and zero the gradients. Collective, where gradients are complete."""
        if closure is not None:
            raise UsageError(
                "optimizer.step(closure): the engine updates after backward and cannot run the model "
                "again. Call it without a closure."
            )
        if self.gradient_state.sync_gradients:
            self._engine.set_boundary(True)
            self._engine.step()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Forget the gradients, where they are complete; ``step()`` did so already."""
        if self.gradient_state.sync_gradients:
            self._engine.zero_grad()

    @property
    def step_was_skipped(self) -> bool:
        """Did the last ``step()`` change nothing, because a gradient was not finite? In fp16 it waits for
        that step."""
        report = self._engine.last_step
        return report is not None and report.skipped

    def add_param_group(self, param_group: Any) -> None:
        """Raises :class:`UsageError`: shards were cut when the model was prepared."""
        raise UsageError(
            "optimizer.add_param_group() after prepare(): the state is cut into shards already. Add the "
            "group before accelerator.prepare()."
        )

    def state_dict(self) -> dict[str, Any]:
        """Raises :class:`UsageError`: no rank has the whole state."""
        raise UsageError(
            "optimizer.state_dict(): each rank holds a part of the state, and one rank's would be saved. "
            "Use accelerator.save_state(), or save_checkpoint() of the prepared model."
        )

    def load_state_dict(self, state_dict: Any) -> None:
        """Raises :class:`UsageError`: see :meth:`state_dict`."""
        raise UsageError(
            "optimizer.load_state_dict(): a whole state cannot be loaded into this rank's part. Use "
            "accelerator.load_state(), or load_checkpoint() of the prepared model; it reads states saved "
            "by ZeroShard and by DeepSpeed."
        )
