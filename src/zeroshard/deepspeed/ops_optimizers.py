"""Optimizers under DeepSpeed's names (``deepspeed.ops``).

A call of one of these classes returns an ordinary ``torch.optim`` object with DeepSpeed's defaults, as
the configuration would make it. So the engine's kernels apply, on GPU and host, and checkpoints do not
depend on how the optimizer was named. ``isinstance`` recognizes the class that was called.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from zeroshard.optim.factory import build_optimizer


class _Maker(type):
    """A metaclass. Calling its classes makes objects of other classes.

    ``kind``: the optimizer's name in a configuration. ``takes``: DeepSpeed's arguments with their
    defaults, in DeepSpeed's order; the first is the parameters. ``renamed``: argument -> its name in a
    configuration, or None if it has no effect here.
    """

    kind: str
    takes: Mapping[str, Any]
    renamed: Mapping[str, str | None] = {}

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make the optimizer.

        Raises:
            ConfigError: an argument is wrong.
            UnsupportedError: an argument asks for what is not supported.
        """
        given = cls.__signature__.bind(*args, **kwargs)
        given.apply_defaults()
        (_, params), *others = given.arguments.items()
        names = [cls.renamed.get(name, name) for name, _ in others]
        options = {
            name: value for name, (_, value) in zip(names, others, strict=True) if name is not None
        }
        made: Any = _made(cls.kind, params, options)
        made.asked_as = cls
        return made

    def __instancecheck__(cls, instance: Any) -> bool:
        asked = getattr(instance, "asked_as", None)
        return isinstance(asked, type) and issubclass(asked, cls)

    @property
    def __signature__(cls) -> inspect.Signature:
        return inspect.Signature(
            [
                inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
                for name, default in cls.takes.items()
            ]
        )


def _made(kind: str, params: Any, options: dict[str, Any]) -> Optimizer:
    members: list[Any] = [params] if isinstance(params, Tensor) else list(params)
    has_groups = bool(members) and isinstance(members[0], dict)
    groups: list[dict[str, Any]] = members if has_groups else [{"params": members}]
    made = build_optimizer(kind, options, groups, fused=True)
    if has_groups:  # schedules of other optimizers keep these dicts, and write into them
        for given, own in zip(groups, made.param_groups, strict=True):
            fused = {"fused": True} if "fused" in own and own["fused"] is None else {}
            given.update({**own, **fused})
        made.param_groups = groups
    return made


_BETAS = (0.9, 0.999)
_NEEDED = inspect.Parameter.empty  # no default


class DeepSpeedCPUAdam(metaclass=_Maker):
    """AdamW, or Adam with ``adamw_mode=False``. The default weight decay is 0."""

    optimizer_id: ClassVar[int] = 0
    kind = "Adam"
    takes: ClassVar[Mapping[str, Any]] = {
        "model_params": _NEEDED, "lr": 1e-3, "bias_correction": True, "betas": _BETAS, "eps": 1e-8,
        "weight_decay": 0, "amsgrad": False, "adamw_mode": True, "fp32_optimizer_states": True,
    }  # fmt: skip
    renamed: ClassVar[Mapping[str, str | None]] = {"adamw_mode": "adam_w_mode"}


class FusedAdam(metaclass=_Maker):
    """AdamW, or Adam with ``adam_w_mode=False``. The default weight decay is 0."""

    kind = "Adam"
    takes: ClassVar[Mapping[str, Any]] = {
        "params": _NEEDED, "lr": 1e-3, "bias_correction": True, "betas": _BETAS, "eps": 1e-8,
        "adam_w_mode": True, "weight_decay": 0.0, "amsgrad": False, "set_grad_none": True,
    }  # fmt: skip
    renamed: ClassVar[Mapping[str, str | None]] = {"set_grad_none": None}


class DeepSpeedCPUAdagrad(metaclass=_Maker):
    """Adagrad."""

    kind = "Adagrad"
    takes: ClassVar[Mapping[str, Any]] = {
        "model_params": _NEEDED, "lr": 1e-2, "eps": 1e-10, "weight_decay": 0, "amsgrad": False,
        "fp32_optimizer_states": True,
    }  # fmt: skip
    renamed: ClassVar[Mapping[str, str | None]] = {"amsgrad": None, "fp32_optimizer_states": None}


class DeepSpeedCPULion(metaclass=_Maker):
    """Lion."""

    kind = "Lion"
    takes: ClassVar[Mapping[str, Any]] = {
        "model_params": _NEEDED, "lr": 1e-3, "betas": _BETAS, "weight_decay": 0,
        "fp32_optimizer_states": True,
    }  # fmt: skip
    renamed: ClassVar[Mapping[str, str | None]] = {"fp32_optimizer_states": None}


class FusedLion(metaclass=_Maker):
    """Lion."""

    kind = "Lion"
    takes: ClassVar[Mapping[str, Any]] = {
        "params": _NEEDED, "lr": 1e-3, "betas": _BETAS, "weight_decay": 0.0, "set_grad_none": True,
    }  # fmt: skip
    renamed: ClassVar[Mapping[str, str | None]] = {"set_grad_none": None}


class FusedLamb(metaclass=_Maker):
    """Lamb. Parameters are not cut. A ``max_grad_norm`` other than 0 is refused: the engine clips."""

    kind = "Lamb"
    takes: ClassVar[Mapping[str, Any]] = {
        "params": _NEEDED, "lr": 1e-3, "bias_correction": True, "betas": _BETAS, "eps": 1e-8,
        "eps_inside_sqrt": False, "weight_decay": 0.0, "max_grad_norm": 0.0, "max_coeff": 10.0,
        "min_coeff": 0.01, "amsgrad": False,
    }  # fmt: skip
    renamed: ClassVar[Mapping[str, str | None]] = {}
