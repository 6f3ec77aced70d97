"""Optimizers that the configuration may name and torch does not have.

Lion, Adam with DeepSpeed's options, Lamb, and Muon with AdamW for parameters that are not matrices. All
are plain ``torch.optim.Optimizer`` classes. They work without ZeroShard and do not know about shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.errors import UsageError

Group = dict[str, Any]

_NOT_MATRICES = ("embed", "lm_head", "wte", "wpe")  # parts of names; Muon leaves these to AdamW
_CHUNK_NUMEL = 1 << 18  # 1 MiB of fp32, so that a chunk's temporaries stay in the cache


class Lion(Optimizer):
    """Sign of an interpolated momentum, with decoupled weight decay (Chen et al. 2023, algorithm 2).

    State: ``exp_avg``, shaped like the parameter and in its dtype.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = _evaluate(closure)
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            grads = [p.grad for p in params]
            for p in params:
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
            momenta = [self.state[p]["exp_avg"] for p in params]
            lion_(params, grads, momenta, group)
        return loss


def lion_(
    params: list[Tensor], grads: list[Tensor], momenta: list[Tensor], group: Mapping[str, Any]
) -> None:
    """Lion's arithmetic on lists of tensors, in place, with the options of a param group."""
    lr, weight_decay, (beta1, beta2) = group["lr"], group["weight_decay"], group["betas"]
    update = torch._foreach_lerp(momenta, grads, 1 - beta1)
    torch._foreach_sign_(update)
    torch._foreach_mul_(update, -lr)
    torch._foreach_mul_(params, 1 - lr * weight_decay)
    torch._foreach_add_(params, update)
    torch._foreach_lerp_(momenta, grads, 1 - beta2)


class _EachByItself(Optimizer):
    """Updates one parameter after another with :meth:`_update`."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = _evaluate(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group)
        return loss

    def _update(self, p: Tensor, grad: Tensor, group: Group) -> None:
        raise NotImplementedError

    def _count_step(self, p: Tensor, kept: torch.dtype) -> tuple[dict[str, Any], torch.dtype]:
        """Adam's state of ``p`` with one more step counted, and the dtype of the arithmetic.

        The first step makes the state, with moments in the dtype ``kept``.
        """
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            state["exp_avg"] = torch.zeros_like(p, dtype=kept)
            state["exp_avg_sq"] = torch.zeros_like(p, dtype=kept)
        state["step"] += 1
        return state, torch.float64 if p.dtype.to_real() == torch.float64 else torch.float32


class FlexibleAdam(_EachByItself):
    """Adam with options that torch's Adam lacks: no bias correction, moments in another dtype.

    Arithmetic is in fp32 (fp64 for fp64 parameters), whatever the stored dtypes are. State: ``exp_avg``
    and ``exp_avg_sq``, shaped like the parameter, in ``state_dtype`` (the name of a torch dtype; None:
    the parameter's dtype), and ``step``, 0-dim on the device.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled: bool = True,
        bias_correction: bool = True,
        state_dtype: str | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled": decoupled,
            "bias_correction": bias_correction,
            "state_dtype": state_dtype,
        }
        super().__init__(params, defaults)

    def _update(self, p: Tensor, grad: Tensor, group: Group) -> None:
        has_own = group["state_dtype"] and not p.is_complex()
        kept = getattr(torch, group["state_dtype"]) if has_own else p.dtype
        state, work = self._count_step(p, kept)
        lr, eps, decay = group["lr"], group["eps"], group["weight_decay"]
        beta1, beta2 = group["betas"]
        scale1 = scale2 = torch.ones((), dtype=work, device=p.device)
        if group["bias_correction"]:
            step = state["step"].to(work)
            scale1, scale2 = _bias_correction(beta1, step), _bias_correction(beta2, step).sqrt()
        step_size = -lr / scale1

        for stored in _chunks(*map(_real, (p, grad, state["exp_avg"], state["exp_avg_sq"]))):
            w, g, m, v = (tensor.to(work) for tensor in stored)
            if group["decoupled"]:
                w.mul_(1 - lr * decay)
            elif decay:
                g = g.add(w, alpha=decay)
            m.lerp_(g, 1 - beta1)
            v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            denominator = v.sqrt().div_(scale2).add_(eps)
            w.add_(m.div(denominator).mul_(step_size))
            for narrow, wide in zip(stored, (w, None, m, v), strict=True):
                if wide is not None and wide is not narrow:
                    narrow.copy_(wide)


class Lamb(_EachByItself):
    """Adam's update, scaled per parameter by the parameter's norm over the update's (You et al. 2020).

    The ratio is limited to ``min_coeff`` to ``max_coeff``, and is 1 if one of the norms is 0. As in
    DeepSpeed, the update whose norm is taken has no bias correction; the step size contains it instead.
    Arithmetic is in fp32 (fp64 for fp64 parameters). Parameters must be whole. State: ``exp_avg`` and
    ``exp_avg_sq``, shaped like the parameter and in its dtype, and ``step``, 0-dim on the device.
    """

    takes_whole_parameters = True  # not element-wise: its parameters are never cut

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        eps_inside_sqrt: bool = False,
        bias_correction: bool = True,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "eps_inside_sqrt": eps_inside_sqrt,
            "bias_correction": bias_correction,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, defaults)

    def _update(self, p: Tensor, grad: Tensor, group: Group) -> None:
        state, work = self._count_step(p, p.dtype)
        beta1, beta2 = group["betas"]
        stored = p, grad, state["exp_avg"], state["exp_avg_sq"]
        p, grad, exp_avg, exp_avg_sq = map(_real, stored)
        w, g = p.to(work), grad.to(work)
        m = exp_avg.to(work).lerp_(g, 1 - beta1)
        v = exp_avg_sq.to(work).mul_(beta2).addcmul_(g, g, value=1 - beta2)
        eps, inside = group["eps"], group["eps_inside_sqrt"]
        update = m / (v.add(eps).sqrt_() if inside else v.sqrt().add_(eps))
        update.add_(w, alpha=group["weight_decay"])
        w_norm, update_norm = w.norm(), update.norm()
        bounded = (w_norm / update_norm).clamp(group["min_coeff"], group["max_coeff"])
        ratio = torch.where((w_norm > 0) & (update_norm > 0), bounded, torch.ones_like(bounded))
        step_size = ratio * group["lr"]
        if group["bias_correction"]:
            step = state["step"].to(work)
            step_size *= _bias_correction(beta2, step).sqrt() / _bias_correction(beta1, step)
        p.copy_(w - update.mul_(step_size))
        exp_avg.copy_(m)
        exp_avg_sq.copy_(v)


class Muon(Optimizer):
    """Orthogonalized momentum for matrices, AdamW for all other parameters (Jordan et al. 2024).

    Two of torch's optimizers share one list of groups and one state. A group with ``use_muon`` true is
    updated by ``torch.optim.Muon``, others by AdamW. A group without this key is split into two. Matrices
    are real 2-D parameters whose names are not those of an embedding or output layer. They must be whole.
    ``muon_lr`` and ``adam_lr`` replace ``lr`` for one kind.

    Raises:
        UsageError: a group has to be split and its parameters have no names.
    """

    takes_whole_parameters = True  # not element-wise: its parameters are never cut

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        muon_lr: float | None = None,
        adam_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        fused: bool = False,
    ) -> None:
        self._parts = _muon_parts()
        matrix: Group = {"lr": lr if muon_lr is None else muon_lr, "momentum": momentum}
        other: Group = {"lr": lr if adam_lr is None else adam_lr, "betas": betas, "eps": eps}
        matrix |= {"weight_decay": weight_decay}
        other |= {"weight_decay": weight_decay, "fused": fused or None}
        groups = [
            {**(matrix if group["use_muon"] else other), **group} for group in _muon_groups(params)
        ]
        super().__init__(groups, {})

    def add_param_group(self, param_group: Group) -> None:
        use_muon = param_group.setdefault("use_muon", False)
        members = named(param_group["params"])
        if use_muon and any(tensor.is_complex() for _, tensor in members):
            raise UsageError(
                "a complex parameter has use_muon = True, but Muon orthogonalizes real matrices. Set "
                "use_muon = False on it: AdamW then updates it"
            )
        part = self._parts[use_muon]
        super().add_param_group({**part.defaults, **param_group})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = _evaluate(closure)
        for use_muon, part in self._parts.items():
            part.state = self.state
            part.param_groups = [g for g in self.param_groups if g["use_muon"] is use_muon]
            if use_muon and any(p.ndim != 2 for g in part.param_groups for p in g["params"]):
                raise UsageError(
                    "Muon got a piece of a matrix, but it orthogonalizes whole matrices. Its "
                    "parameters need the layout that never splits a parameter"
                )
            part.step()
        return loss

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._parts = _muon_parts()


def _muon_parts() -> dict[bool, Optimizer]:
    return {
        True: torch.optim.Muon([torch.zeros(1, 1)]),
        False: torch.optim.AdamW([torch.zeros(1)]),
    }


def _muon_groups(params: Any) -> Iterator[Group]:
    """Groups that each have ``use_muon``. The order of parameters of one kind is kept."""
    groups = list(params)
    if not groups or not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    for group in groups:
        if "use_muon" in group:
            yield group
            continue
        rest = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        members = list(named(group["params"], group.get("param_names")))
        for use_muon in (True, False):
            chosen = [item for item in members if _is_matrix(*item) is use_muon]
            if chosen:
                yield {**rest, "params": chosen, "use_muon": use_muon}


def _is_matrix(name: str | None, tensor: Tensor) -> bool:
    if tensor.ndim != 2 or tensor.is_complex():
        return False
    if name is None:
        raise UsageError(
            "Muon needs names to distinguish weights from embeddings; give its parameters as "
            '(name, parameter) pairs, or groups with "use_muon": true or false'
        )
    return not any(word in name.lower() for word in _NOT_MATRICES)


def named(params: Any, names: Sequence[str] | None = None) -> Iterator[tuple[str | None, Tensor]]:
    members = [params] if isinstance(params, Tensor) else list(params)
    for at, member in enumerate(members):
        yield member if isinstance(member, tuple) else (names[at] if names else None, member)


def _evaluate(closure: Any) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _real(tensor: Tensor) -> Tensor:
    """A complex tensor as pairs of real numbers, each with moments of its own, as in torch's Adam."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _bias_correction(beta: float, step: Tensor) -> Tensor:
    """``1 - beta**step``. Written that way, fp32 would lose it to cancellation."""
    return -torch.expm1(step * math.log(beta)) if beta else torch.ones_like(step)


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Slices of all tensors at the same positions, small enough that wide copies stay in the cache."""
    if all(tensor.is_contiguous() for tensor in tensors):
        yield from zip(*(torch.split(t.view(-1), _CHUNK_NUMEL) for t in tensors), strict=True)
    else:
        yield tensors
