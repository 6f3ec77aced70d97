"""The arithmetic of known optimizers as functions, for updates piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeroshard.optim import native_adam
from zeroshard.optim.fused_update import DeviceForm, UpdateKernel
from zeroshard.optim.optimizers import Lion, lion_

_State = dict[str, list[Tensor]]
_Group = Mapping[str, Any]
_Groups = Sequence[_Group]


def kernel_of(optimizer: torch.optim.Optimizer, *, compiles: bool = True) -> UpdateKernel | None:
    """The optimizer's arithmetic as a function; None if its own ``step`` has to run.

    ``compiles``: a compiled kernel may be used instead (ZeroShard's key ``compile_update``). Subclasses,
    unusual options and torch's unfused loops keep their own ``step``. Results do not depend on which one
    runs. The answer holds until an option in :func:`deciding_options` changes.
    """
    row = KERNELS.get(type(optimizer))
    return row.make(optimizer.param_groups, compiles) if row is not None else None


def deciding_options(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """The options of param groups on which :func:`kernel_of` depends for this optimizer's class."""
    row = KERNELS.get(type(optimizer))
    return row.options if row is not None else ()


def steps_chunk_by_chunk(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``step`` may be called for one chunk after another: known classes count by parameter."""
    return type(optimizer).__module__.partition(".")[0] in ("torch", "zeroshard")


def _is_fused(groups: _Groups) -> bool:
    return all(group.get("fused") and not group.get("differentiable") for group in groups)


def _adam_kernel(groups: _Groups, compiles: bool) -> UpdateKernel | None:
    if not _is_fused(groups) or any(group["amsgrad"] for group in groups):
        return None
    return UpdateKernel(
        _adam,
        ("exp_avg", "exp_avg_sq"),
        counts=True,
        compiled=native_adam.compiled if compiles else None,
        device_form=_ADAM_ON_DEVICE if compiles else None,
    )


def _sgd_kernel(groups: _Groups, compiles: bool) -> UpdateKernel | None:
    with_momentum = {group["momentum"] != 0 for group in groups}
    if not _is_fused(groups) or len(with_momentum) != 1:
        return None
    has_momentum = with_momentum.pop()
    return UpdateKernel(
        _sgd,
        ("momentum_buffer",) if has_momentum else (),
        counts=False,
        device_form=_SGD_ON_DEVICE[has_momentum] if compiles else None,
    )


def _lion_kernel(_groups: _Groups, compiles: bool) -> UpdateKernel | None:
    return UpdateKernel(
        _lion, ("exp_avg",), counts=False, device_form=_LION_ON_DEVICE if compiles else None
    )


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
    lion_(params, grads, state["exp_avg"], group)


def _sign(group: _Group) -> float:
    return -1.0 if group["maximize"] else 1.0


def _adam_options(group: _Group) -> tuple[float, ...]:
    betas = group["betas"]
    decoupled = group["decoupled_weight_decay"]
    return (*(_sign(group), group["lr"], *betas, group["eps"], group["weight_decay"], decoupled),)


def _sgd_options(group: _Group) -> tuple[float, ...]:
    return (
        *(_sign(group), group["lr"], group["momentum"], group["dampening"]),
        *(group["weight_decay"], group["nesterov"]),
    )


def _lion_options(group: _Group) -> tuple[float, ...]:
    return 1.0, group["lr"], *group["betas"], group["weight_decay"]


_ADAM_ON_DEVICE = DeviceForm("adam", _adam_options, starts_at_zero=True)
_LION_ON_DEVICE = DeviceForm("lion", _lion_options, starts_at_zero=True)
_SGD_ON_DEVICE = {
    False: DeviceForm("sgd", _sgd_options, starts_at_zero=True),
    # The first momentum is the gradient, which dampening does not reduce.
    True: DeviceForm("sgd momentum", _sgd_options, starts_at_zero=False),
}


@dataclass(frozen=True, slots=True)
class KernelRow:
    """``make(groups, compiles)``: the kernel for param groups with these options; None if their
    arithmetic is another. ``options``: the names of the options on which that depends."""

    make: Callable[[_Groups, bool], UpdateKernel | None]
    options: tuple[str, ...] = ()


_ADAM = KernelRow(_adam_kernel, ("fused", "differentiable", "amsgrad"))

KERNELS: dict[type[torch.optim.Optimizer], KernelRow] = {
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
    torch.optim.SGD: KernelRow(_sgd_kernel, ("fused", "differentiable", "momentum")),
    Lion: KernelRow(_lion_kernel),
}
"""The kernels of the optimizer classes that have one."""
