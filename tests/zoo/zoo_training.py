"""Compares an engine with plain PyTorch bit for bit: losses, gradients of each step, parameters.

Plain PyTorch is a replica on each rank. Its gradients are added in rank order and divided by the number
of ranks. Both start from the same values and draw the same random numbers (dropout, masks).
"""

from __future__ import annotations

import contextlib
import math
import random
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import torch
import torch.distributed as dist
from support.parity import cast_batch, cast_parameters
from torch import Tensor, nn
from zoo_models import Model

import zeroshard
from zeroshard.zero.hooks import tensors_in

STEPS = 2
"""In the second step units are prefetched, in the order that the first step recorded."""


@dataclass(frozen=True)
class Setting:
    """One way to train a model."""

    stage: int
    bf16: bool = False
    init: bool = False  # built under zero.Init
    checkpointed: bool = False

    def __str__(self) -> str:
        parts = [f"stage {self.stage}", "bf16" if self.bf16 else "fp32"]
        parts += ["zero.Init"] * self.init + ["gradient checkpointing"] * self.checkpointed
        return ", ".join(parts)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else torch.float32

    @property
    def plain(self) -> Setting:
        """The part of the setting that affects plain PyTorch."""
        return replace(self, stage=0, init=False)


@dataclass
class Trace:
    """The numbers of a run. Gradients are means over ranks in fp32, zeros where there was none."""

    losses: list[float] = field(default_factory=list)
    grads: list[dict[str, Tensor]] = field(default_factory=list)
    params: dict[str, Tensor] = field(default_factory=dict)


def plain_run(model: Model, setting: Setting) -> Trace:
    """Train this rank's replica with torch alone. Collective."""
    module = _build(model, setting)
    cast_parameters(module, setting.dtype)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    masters = {name: nn.Parameter(p.detach().float().clone()) for name, p in trained.items()}
    optimizer = _optimizer(masters.values())
    trace = Trace()
    for step in range(STEPS):
        loss = _loss(module, _batch(model, module, step, setting))
        loss.backward()
        trace.losses.append(loss.item())
        trace.grads.append(_mean_grads(trained, masters))
        optimizer.step()
        for name, param in trained.items():
            param.data.copy_(masters[name].data)
            param.grad = None
    trace.params = {name: p.detach() for name, p in module.named_parameters()}
    return trace


def engine_run(model: Model, setting: Setting) -> Trace:
    """Train with an engine on this rank's batches. Collective."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "unit_min_numel": 1,  # without it these small models would be one unit
        "gradient_clipping": 0.0,
        "bf16": {"enabled": setting.bf16},
        "zero_optimization": {"stage": setting.stage},
    }
    sharded = zeroshard.zero.Init(config_dict_or_path=config)
    with sharded if setting.init else contextlib.nullcontext():
        module = _build(model, setting)
    optimizer = _optimizer([p for p in module.parameters() if p.requires_grad])
    trace = Trace()
    with zeroshard.Engine(module, config=config, optimizer=optimizer) as engine:
        for step in range(STEPS):
            loss = _loss(engine, _batch(model, module, step, setting))
            engine.backward(loss)
            trace.losses.append(loss.item())
            trace.grads.append(
                {n: _grad(p) for n, p in module.named_parameters() if p.requires_grad}
            )
            engine.step()
        trace.params = {name: full.detach().clone() for name, full in engine.iter_full_params()}
    return trace


def assert_same_bits(actual: Trace, expected: Trace) -> None:
    """The message says where they first differ, and by how much."""
    pairs = [
        (f"gradient of step {i}", a, b)
        for i, (a, b) in enumerate(zip(actual.grads, expected.grads))
    ]
    for what, a, b in [*pairs, ("parameter", actual.params, expected.params)]:
        assert a.keys() == b.keys(), f"{what}: only one side has {sorted(a.keys() ^ b.keys())}"
        other = [name for name in b if not torch.equal(a[name], b[name])]
        if other:
            worst, name = max((_relative(a[name], b[name]), name) for name in other)
            raise AssertionError(
                f"{len(other)} of {len(b)} differ, {what}: first {other[0]!r}; most {name!r}, "
                f"by {worst:.1e} of its largest element; losses {actual.losses} != {expected.losses}"
            )
    assert actual.losses == expected.losses


def _relative(a: Tensor, b: Tensor) -> float:
    error = float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))
    return error if math.isfinite(error) else math.inf


def _build(model: Model, setting: Setting) -> nn.Module:
    _seed(1)
    module = model.build()
    if setting.checkpointed:
        checkpoint(module)
    return module


def checkpoint(module: Any) -> None:
    """Turn gradient checkpointing on."""
    if hasattr(module, "supports_gradient_checkpointing"):
        module.gradient_checkpointing_enable()
    else:
        module.set_grad_checkpointing(True)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)  # masks of audio models


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _batch(model: Model, module: nn.Module, step: int, setting: Setting) -> dict[str, Any]:
    """This rank's batch; the random numbers of the forward that follows are its own as well."""
    own = 10 * step + _rank()
    batch = model.batch(getattr(module, "config", None), torch.Generator().manual_seed(own))
    _seed(100 + own)
    return dict(zip(batch, cast_batch(tuple(batch.values()), setting.dtype)))


def _loss(forward: Any, batch: dict[str, Any]) -> Tensor:
    """The model's own loss, or a weighted sum of all outputs; no norm layer cancels its gradient."""
    output = forward(**batch)
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss.float().mean()
    total = torch.zeros(())
    for x in tensors_in(output):
        if x.is_floating_point() and x.requires_grad:
            flat = x.float().nan_to_num(posinf=0.0, neginf=0.0).flatten()
            total = total + flat @ torch.arange(len(flat)).cos() / math.sqrt(len(flat))
    return total


def _optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def _mean_grads(
    trained: dict[str, nn.Parameter], masters: dict[str, nn.Parameter]
) -> dict[str, Tensor]:
    """The mean over ranks, also set as ``.grad`` of masters, except where no rank had a gradient."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    found = {}
    own = [p.grad for p in trained.values()]
    everyones: list[Any] = [own]
    if world > 1:
        everyones = [None] * world
        dist.all_gather_object(everyones, own)
    for (name, param), grads in zip(trained.items(), zip(*everyones)):
        touched = [g.float() for g in grads if g is not None]
        total = sum(touched, torch.zeros_like(param, dtype=torch.float32))
        found[name] = total.to(param.dtype).float() / world  # the sum is sent in the training dtype
        masters[name].grad = found[name].clone() if touched else None
    return found


def _grad(param: nn.Parameter) -> Tensor:
    grad = zeroshard.zero.safe_get_full_grad(param)
    return torch.zeros(param.shape) if grad is None else grad.float().clone()
