"""Which optimizers do programs build through DeepSpeed's names?

Calling one of these classes gives an ordinary ``torch.optim`` object with DeepSpeed's defaults: the
same that the configuration would make. So the engine's kernels take it, on the GPU or on the host, and
checkpoints do not tell how it was named. ``isinstance`` knows which class was asked for.
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from zeroshard.engine.optimizers import build_optimizer


class _Maker(type):
    """A class whose call makes an object of another one."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = cls.make(*args, **kwargs)  # type: ignore[attr-defined]
        made.asked_as = cls
        return made

    def __instancecheck__(cls, instance: Any) -> bool:
        asked = getattr(instance, "asked_as", None)
        return isinstance(asked, type) and issubclass(asked, cls)

    @property
    def __signature__(cls) -> inspect.Signature:
        return inspect.signature(cls.make)  # type: ignore[attr-defined]


def _made(kind: str, params: Any, options: dict[str, Any]) -> Optimizer:
    members: list[Any] = [params] if isinstance(params, Tensor) else list(params)
    has_groups = bool(members) and isinstance(members[0], dict)
    groups: list[dict[str, Any]] = members if has_groups else [{"params": members}]
    made = build_optimizer(kind, options, groups, fused=True)
    if has_groups:  # a schedule over another optimizer goes on writing into these very dicts
        for given, own in zip(groups, made.param_groups, strict=True):
            fused = {"fused": True} if "fused" in own and own["fused"] is None else {}
            given.update({**own, **fused})
        made.param_groups = groups
    return made


class DeepSpeedCPUAdam(metaclass=_Maker):
    """AdamW, or Adam with ``adamw_mode=False``; no decay unless asked for."""

    optimizer_id: ClassVar[int] = 0

    @staticmethod
    def make(
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> Optimizer:
        """The optimizer. Raises :class:`ConfigError`, :class:`UnsupportedError`."""
        options = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps,
            "weight_decay": weight_decay, "amsgrad": amsgrad, "adam_w_mode": adamw_mode,
            "fp32_optimizer_states": fp32_optimizer_states,
        }  # fmt: skip
        return _made("Adam", model_params, options)


class FusedAdam(metaclass=_Maker):
    """The same, with ``adam_w_mode``."""

    @staticmethod
    def make(
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> Optimizer:
        """The optimizer. Raises :class:`ConfigError`, :class:`UnsupportedError`."""
        options = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps,
            "weight_decay": weight_decay, "amsgrad": amsgrad, "adam_w_mode": adam_w_mode,
        }  # fmt: skip
        return _made("Adam", params, options)


class DeepSpeedCPUAdagrad(metaclass=_Maker):
    """Adagrad."""

    @staticmethod
    def make(
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> Optimizer:
        """The optimizer."""
        return _made("Adagrad", model_params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})


class DeepSpeedCPULion(metaclass=_Maker):
    """Lion."""

    @staticmethod
    def make(
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
    ) -> Optimizer:
        """The optimizer."""
        return _made("Lion", model_params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})


class FusedLion(metaclass=_Maker):
    """Lion."""

    @staticmethod
    def make(
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> Optimizer:
        """The optimizer."""
        return _made("Lion", params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
