"""The factor by which the loss is multiplied before backward, and its changes on overflow.

fp16 gradients below 6e-8 become zero, so the loss is scaled up and the update is scaled down again. The
rule is DeepSpeed's (keys ``fp16.*``). Its state is in 0-dim tensors on the device, so a step never waits
for the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_LARGEST = 2.0**127  # doubling it gives inf in fp32, and halving inf gives inf


class LossScaler:
    """A constant factor (``fp16.loss_scale`` > 0), which is 1 in every mode but fp16.

    ``scale``: the factor for the next backward, 0-dim, fp32, on the device: always the same tensor,
    updated in place. ``at_floor``: 0-dim bool, whether a gradient has overflowed when the scale could not
    be lowered any more.
    """

    def __init__(self, value: float = 1.0, *, device: torch.device | str = "cpu") -> None:
        self.scale = torch.tensor(float(value), dtype=torch.float32, device=device)
        self.at_floor = torch.zeros((), dtype=torch.bool, device=device)

    def update(self, found_inf: Tensor) -> None:
        """End a step. ``found_inf`` (0-dim, any dtype) is nonzero if a gradient was not finite.

        An overflow skips the update and does not change a constant factor.
        """

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON. Waits for the device."""
        return {"scale": self.scale.item()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``. A constant factor is that of the configuration."""


class DynamicScale(LossScaler):
    """Halves on overflow, doubles after ``window`` good steps.

    ``hysteresis - 1`` overflows do not halve. This allowance is restored when the scale grows or, with
    ``consecutive``, at the next good step. The window is counted from the last overflow. Keys:
    ``fp16.{initial_scale_power, loss_scale_window, hysteresis, consecutive_hysteresis,
    min_loss_scale}``.
    """

    def __init__(
        self,
        init: float = 2.0**16,
        *,
        window: int = 1000,
        hysteresis: int = 2,
        consecutive: bool = False,
        min_scale: float = 1.0,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(init, device=device)
        self._window, self._hysteresis = window, hysteresis
        self._consecutive, self._min_scale = consecutive, float(min_scale)

        def counter(value: int) -> Tensor:
            return torch.tensor(value, dtype=torch.int64, device=device)

        self._step, self._last_overflow, self._budget = counter(0), counter(-1), counter(hysteresis)

    def update(self, found_inf: Tensor) -> None:
        overflow = found_inf != 0
        lower = overflow & (self._budget <= 1)
        good_steps = self._step - self._last_overflow - 1
        grow = ~overflow & (good_steps > 0) & (good_steps % self._window == 0)
        refill = ~overflow if self._consecutive else grow

        self.at_floor.logical_or_(lower & (self.scale <= self._min_scale))
        halved = (self.scale / 2).clamp_(min=self._min_scale)
        doubled = (self.scale * 2).clamp_(max=_LARGEST)
        self.scale.copy_(torch.where(lower, halved, torch.where(grow, doubled, self.scale)))
        self._budget.sub_((overflow & ~lower).long()).masked_fill_(refill, self._hysteresis)
        self._last_overflow.copy_(torch.where(overflow, self._step, self._last_overflow))
        self._step.add_(1)

    def state_dict(self) -> dict[str, Any]:
        return {name: tensor.item() for name, tensor in self._tensors().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue as if never interrupted. Window and hysteresis are those of the configuration."""
        for name, tensor in self._tensors().items():
            tensor.fill_(state[name])

    def _tensors(self) -> dict[str, Tensor]:
        return {
            "scale": self.scale,
            "step": self._step,
            "last_overflow": self._last_overflow,
            "budget": self._budget,
        }


def scaler_from(config: Any, device: torch.device | str) -> LossScaler:
    """The loss scale of ``config`` for fp16 parameters or fp16 autocast; otherwise the factor 1."""
    fp16, autocast = config.fp16, config.torch_autocast
    if not fp16.enabled and not (autocast.enabled and autocast.dtype == "float16"):
        return LossScaler(1.0, device=device)
    if fp16.loss_scale:
        return LossScaler(fp16.loss_scale, device=device)
    return DynamicScale(
        2.0**fp16.initial_scale_power,
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive=fp16.consecutive_hysteresis,
        min_scale=fp16.min_loss_scale,
        device=device,
    )
