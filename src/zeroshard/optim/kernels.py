"""The arithmetic of known optimizers as functions, for updates piece by piece."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zeroshard.optim.fused_update import UpdateKernel
from zeroshard.optim.optimizers import Lion, lion_

_State = dict[str, list[Tensor]]
_Group = Mapping[str, Any]


def kernel_of(optimizer: torch.optim.Optimizer, *, compiles: bool = True) -> UpdateKernel | None:
    """The optimizer's arithmetic as a function; None if its own ``step`` has to run.

    ``compiles``: a compiled kernel may be used instead (ZeroShard's key ``compile_update``). Subclasses,
    unusual options and torch's unfused loops keep their own ``step``. Results do not depend on which one
    runs.
    """
    kind, groups = type(optimizer), optimizer.param_groups
    if kind is Lion:
        return UpdateKernel(_lion, ("exp_avg",), counts=False)
    if not all(group.get("fused") and not group.get("differentiable") for group in groups):
        return None
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        plain = not any(group["amsgrad"] for group in groups)
        moments = ("exp_avg", "exp_avg_sq")
        return UpdateKernel(_adam, moments, counts=True, compiles=compiles) if plain else None
    if kind is torch.optim.SGD:
        with_momentum = {group["momentum"] != 0 for group in groups}
        if len(with_momentum) == 1:
            return UpdateKernel(
                _sgd, ("momentum_buffer",) if with_momentum.pop() else (), counts=False
            )
    return None


def _adam(group: _Group, params: list[Tensor], grads: list[Tensor], state: _State) -> None:
    decoupled = group["decoupled_weight_decay"]
    fused = torch._fused_adamw_ if decoupled else torch._fused_adam_
    beta1, beta2 = group["betas"]
    fused(
        params, grads, state["exp_avg"], state["exp_avg_sq"], [], state["step"],
        lr=group["lr"], beta1=float(beta1), beta2=float(beta2),
        weight_decay=group["weight_decay"], eps=group["eps"], amsgrad=False,
        maximize=group["maximize"], grad_scale=None, found_inf=None,
    )  # fmt: skip


def _sgd(group: _Group, params: list[Tensor], grads: list[Tensor], state: _State) -> None:
    torch._fused_sgd_(
        params, grads, state.get("momentum_buffer", []),
        weight_decay=group["weight_decay"], momentum=group["momentum"], lr=group["lr"],
        dampening=group["dampening"], nesterov=group["nesterov"], maximize=group["maximize"],
        is_first_step=False, grad_scale=None, found_inf=None,
    )  # fmt: skip


def _lion(group: _Group, params: list[Tensor], grads: list[Tensor], state: _State) -> None:
    lion_(
        params,
        grads,
        state["exp_avg"],
        lr=group["lr"],
        betas=group["betas"],
        weight_decay=group["weight_decay"],
    )
