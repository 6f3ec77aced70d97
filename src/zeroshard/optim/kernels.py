"""The arithmetic of known optimizers as functions, for updates piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zeroshard.optim.fused_update import UpdateKernel
from zeroshard.optim.optimizers import Lion, lion_

_State = dict[str, list[Tensor]]
_Group = Mapping[str, Any]
_Groups = Sequence[_Group]


def kernel_of(optimizer: torch.optim.Optimizer, *, compiles: bool = True) -> UpdateKernel | None:
    """The optimizer's arithmetic as a function; None if its own ``step`` has to run.

    ``compiles``: a compiled kernel may be used instead (ZeroShard's key ``compile_update``). Subclasses,
    unusual options and torch's unfused loops keep their own ``step``. Results do not depend on which one
    runs.
    """
    known = KERNELS.get(type(optimizer))
    return known(optimizer.param_groups, compiles) if known is not None else None


def _is_fused(groups: _Groups) -> bool:
    return all(group.get("fused") and not group.get("differentiable") for group in groups)


def _adam_kernel(groups: _Groups, compiles: bool) -> UpdateKernel | None:
    if not _is_fused(groups) or any(group["amsgrad"] for group in groups):
        return None
    return UpdateKernel(_adam, ("exp_avg", "exp_avg_sq"), counts=True, compiles=compiles)


def _sgd_kernel(groups: _Groups, _compiles: bool) -> UpdateKernel | None:
    with_momentum = {group["momentum"] != 0 for group in groups}
    if not _is_fused(groups) or len(with_momentum) != 1:
        return None
    state = ("momentum_buffer",) if with_momentum.pop() else ()
    return UpdateKernel(_sgd, state, counts=False)


def _lion_kernel(_groups: _Groups, _compiles: bool) -> UpdateKernel | None:
    return UpdateKernel(_lion, ("exp_avg",), counts=False)


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


KERNELS: dict[type[torch.optim.Optimizer], Callable[[_Groups, bool], UpdateKernel | None]] = {
    torch.optim.Adam: _adam_kernel,
    torch.optim.AdamW: _adam_kernel,
    torch.optim.SGD: _sgd_kernel,
    Lion: _lion_kernel,
}
"""Class -> its kernel for param groups with these options; None if their arithmetic is another."""
