"""Compares ZeroShard's training with plain PyTorch's on the same global batches.

:func:`reference_run` is the reference: one process, torch's own optimizer and clipping, no code of
ZeroShard. :func:`engine_run` trains the same case on this rank. Both return a :class:`Trajectory`.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from support.edge_case_models import BATCH, Case

Batch = tuple[Any, ...]
Batches = list[list[list[Batch]]]
"""``batches[step][micro][rank]``"""

Precision = Literal["fp64", "fp32", "bf16", "fp16"]
DTYPES: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}

OptimizerFactory = Callable[[list[tuple[str, nn.Parameter]]], Optimizer]
"""Makes an optimizer over the named trainable parameters, given in the model's order."""

ScheduleFactory = Callable[[Optimizer], torch.optim.lr_scheduler.LRScheduler]


@dataclass
class Trajectory:
    """The numbers of each step of a run, and its final tensors. Losses are means of the global batch."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)  # before clipping, loss scale removed
    lrs: list[float] = field(default_factory=list)  # of the first group, as used by the step
    scales: list[float] = field(default_factory=list)  # loss scale, as used by the step
    skipped: list[bool] = field(default_factory=list)
    params: dict[str, Tensor] = field(default_factory=dict)
    masters: dict[str, Tensor] = field(default_factory=dict)  # of 16-bit parameters, fp32


@dataclass
class Scale:
    """DeepSpeed's loss scale (keys ``fp16.*``), fixed unless ``dynamic``."""

    value: float = 2.0**16
    dynamic: bool = True
    window: int = 1000
    hysteresis: int = 2
    consecutive: bool = False
    minimum: float = 1.0
    _step: int = 0
    _last_overflow: int = -1
    _forgiven: int = 0

    def update(self, *, overflow: bool) -> None:
        """Change the scale at the end of a step."""
        good = self._step - self._last_overflow - 1
        if not self.dynamic:
            return
        if overflow:
            self._last_overflow = self._step
            if self._forgiven + 1 >= self.hysteresis:
                self.value = max(self.value / 2, self.minimum)
            else:
                self._forgiven += 1
        else:
            if self.consecutive:
                self._forgiven = 0
            if good > 0 and good % self.window == 0:
                self.value *= 2
                self._forgiven = 0
        self._step += 1


def adamw(lr: float = 1e-2, weight_decay: float = 0.1, eps: float = 1e-3) -> OptimizerFactory:
    """AdamW with two groups: matrices have weight decay, other parameters have none.

    ``eps`` is large on purpose. Where a gradient is nearly zero, Adam multiplies its rounding error by
    ``lr / eps``; with a small ``eps`` two correct runs would differ visibly.
    """

    def factory(named: list[tuple[str, nn.Parameter]]) -> Optimizer:
        matrices = [p for _, p in named if p.ndim > 1]
        rest = [p for _, p in named if p.ndim <= 1]
        groups: list[dict[str, Any]]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": rest}]
        return torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=lr, eps=eps, weight_decay=0.0
        )

    return factory


def sgd(lr: float = 0.1, momentum: float = 0.9) -> OptimizerFactory:
    """SGD with momentum over one group."""
    return lambda named: torch.optim.SGD([p for _, p in named], lr=lr, momentum=momentum)


def make_batches(
    case: Case, *, steps: int, world: int, accumulation: int = 1, seed: int = 0
) -> Batches:
    """Batches that are the same in every process. A rank's batches do not depend on ``world``."""

    def batch(step: int, micro: int, rank: int) -> Batch:
        generator = torch.Generator().manual_seed(
            zlib.crc32(f"{seed} {step} {micro} {rank}".encode())
        )
        return case.make_batch(rank, micro, generator)

    return [
        [[batch(step, micro, rank) for rank in range(world)] for micro in range(accumulation)]
        for step in range(steps)
    ]


def cast_batch(batch: Batch, dtype: torch.dtype, device: torch.device | None = None) -> Batch:
    """Floating-point tensors in ``dtype``, all tensors on ``device``, other items unchanged."""
    return tuple(
        item.to(device, dtype if item.is_floating_point() else item.dtype)
        if isinstance(item, Tensor)
        else item
        for item in batch
    )


def cast_parameters(
    module: nn.Module, dtype: torch.dtype, *, keep_fp32: Sequence[str] = ()
) -> nn.Module:
    """Cast parameters in place, but no buffers. Tied parameters stay tied. As in torch's ``half()``, a
    16-bit ``dtype`` leaves complex parameters as they are.

    ``keep_fp32``: patterns of names that a 16-bit ``dtype`` leaves as they are.
    """
    for name, param in module.named_parameters():
        if param.is_complex():
            param.data = param.data.to(torch.complex128) if dtype == torch.float64 else param.data
        elif dtype.itemsize > 2 or not any(fnmatchcase(name, pattern) for pattern in keep_fp32):
            param.data = param.data.to(dtype)
    return module


def reference_run(
    case: Case,
    optimizer: OptimizerFactory,
    batches: Batches,
    *,
    clip: float = 0.0,
    precision: Precision = "fp32",
    schedule: ScheduleFactory | None = None,
    scale: Scale | None = None,
    reduce_dtype: torch.dtype | None = None,
    untouched: Literal["skip", "zeros"] = "skip",
) -> Trajectory:
    """Train ``case`` on the global batches in this process, with plain PyTorch.

    fp32 and fp64: the loss of a micro-batch is the mean over its ranks, divided by the number of
    micro-batches.

    16 bit: the gradient of each rank and micro-batch is computed separately in 16 bit and upcast. The
    gradients of one rank are added in fp32. That sum is rounded to ``reduce_dtype``, if it is given,
    and the sums of all ranks are added in rank order. The total is rounded to ``reduce_dtype`` as well.
    In fp16 sums are divided by the number of ranks before, so that a total overflows only if a mean does.
    The optimizer updates fp32 masters, which start as the rounded parameters. fp16 uses ``scale``, and
    skips the optimizer and the schedule when a gradient is not finite. ZeroShard rounds a sum of
    micro-batches to its reduction dtype where it reduces once a step (stages 0 and 1).

    ``untouched``: what the optimizer sees of parameters that got no gradient: ``skip``, no gradient, like
    plain PyTorch after ``zero_grad(set_to_none=True)``; ``zeros``, a gradient of zeros.
    """
    dtype = DTYPES[precision]
    model = cast_parameters(case.build(), dtype, keep_fp32=case.config.get("keep_fp32", ()))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    low = dtype.itemsize == 2
    updated = (
        {name: nn.Parameter(_wide(p.detach()).clone()) for name, p in trained.items()}
        if low
        else trained
    )
    optim = optimizer(list(updated.items()))
    scheduler = schedule(optim) if schedule else None
    scale = scale or Scale(dynamic=False, value=1.0)
    run = Trajectory()
    for micros in batches:
        run.lrs.append(optim.param_groups[0]["lr"])
        run.scales.append(scale.value)
        cast = [[cast_batch(batch, dtype) for batch in ranks] for ranks in micros]
        if low:
            loss, grads_of = _low_precision_gradients(
                case, model, cast, scale=scale.value, reduce_dtype=reduce_dtype
            )
            for name, grad in grads_of.items():
                updated[name].grad = grad
        else:
            loss = _plain_gradients(case, model, cast)
        run.losses.append(loss)
        grads = []
        for param in updated.values():
            if param.grad is None and untouched == "zeros":
                param.grad = torch.zeros_like(param)
            if param.grad is not None:
                grads.append(param.grad)
        norm = torch.nn.utils.get_total_norm(grads)
        run.grad_norms.append(norm.item())
        overflow = precision == "fp16" and not math.isfinite(norm.item())
        run.skipped.append(overflow)
        if not overflow:
            if clip > 0:
                torch.nn.utils.clip_grad_norm_(updated.values(), clip)
            optim.step()
            for name, param in trained.items():
                param.data.copy_(updated[name].data)
            if scheduler is not None:
                scheduler.step()
        scale.update(overflow=overflow)
        optim.zero_grad()
    run.params = {name: p.detach().clone() for name, p in model.named_parameters()}
    run.masters = {name: p.detach().clone() for name, p in updated.items()} if low else {}
    return run


def _plain_gradients(case: Case, model: nn.Module, micros: list[list[Batch]]) -> float:
    """Store the gradient of the global batch in ``.grad``; return the loss of the global batch."""
    total = 0.0
    for ranks in micros:
        loss = torch.stack([case.loss(model, batch) for batch in ranks]).sum() / len(ranks)
        (loss / len(micros)).backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total / len(micros)


def _low_precision_gradients(
    case: Case,
    model: nn.Module,
    micros: list[list[Batch]],
    *,
    scale: float,
    reduce_dtype: torch.dtype | None,
) -> tuple[float, dict[str, Tensor]]:
    """The loss of the global batch and its fp32 gradient by name, with the loss scale removed."""
    world, total = len(micros[0]), 0.0
    sums: dict[str, Tensor] = {}
    low = {name for name, param in model.named_parameters() if param.dtype.itemsize == 2}
    before = world if reduce_dtype is torch.float16 else 1

    def as_sent(name: str, grad: Tensor) -> Tensor:
        return grad.to(reduce_dtype).float() if reduce_dtype and name in low else grad

    for rank in range(world):
        own: dict[str, Tensor] = {}
        for ranks in micros:
            loss = case.loss(model, ranks[rank])
            (loss / len(micros) * scale).backward()  # type: ignore[no-untyped-call]
            total += loss.item()
            for name, param in model.named_parameters():
                if param.grad is not None:
                    grad = _wide(param.grad)
                    own[name] = own[name] + grad if name in own else grad
                    param.grad = None
        for name, grad in own.items():
            sent = as_sent(name, grad / before)
            sums[name] = sums[name] + sent if name in sums else sent
    for name, grad in sums.items():
        sums[name] = as_sent(name, grad) * (before / (scale * world))
    return total / (world * len(micros)), sums


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_complex() else tensor.float()


def precision_config(precision: Precision, scale: Scale | None = None) -> dict[str, Any]:
    """The DeepSpeed keys for ``precision``. fp64 and fp32 need none: they are the dtype of the model."""
    if precision == "bf16":
        return {"bf16": {"enabled": True}}
    if precision != "fp16":
        return {}
    scale = scale or Scale(dynamic=False, value=1.0)
    if not scale.dynamic:
        return {"fp16": {"enabled": True, "loss_scale": scale.value}}
    return {
        "fp16": {
            "enabled": True,
            "initial_scale_power": int(math.log2(scale.value)),
            "loss_scale_window": scale.window,
            "hysteresis": scale.hysteresis,
            "consecutive_hysteresis": scale.consecutive,
            "min_loss_scale": scale.minimum,
        }
    }


def engine_run(
    case: Case,
    optimizer: OptimizerFactory,
    batches: Batches,
    *,
    stage: int,
    clip: float = 0.0,
    precision: Precision = "fp32",
    schedule: ScheduleFactory | None = None,
    scale: Scale | None = None,
    config: Mapping[str, Any] | None = None,
    mesh: Any = None,
) -> Trajectory:
    """Train ``case`` with ``zeroshard.Engine`` on this rank's share of the batches.

    ``config`` overrides the keys that the other arguments imply. Collective: every rank calls it with the
    same arguments and gets the same trajectory.
    """
    import zeroshard

    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    dtype = DTYPES[precision]
    model = case.build()
    if precision == "fp64":
        cast_parameters(model, dtype)
    optim = optimizer([(name, p) for name, p in model.named_parameters() if p.requires_grad])
    keys: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": len(batches[0]),
        "gradient_clipping": clip,
        "unit_min_numel": 1,  # otherwise these small models would be one unit
        "zero_optimization": {"stage": stage},
        **precision_config(precision, scale),
        **case.config,
    }
    run = Trajectory()
    with zeroshard.Engine(
        model,
        config=_merged(keys, config or {}),
        optimizer=optim,
        lr_scheduler=schedule(optim) if schedule else None,
        mesh=mesh,
    ) as engine:
        for micros in batches:
            total = 0.0
            for ranks in micros:
                loss = case.loss(engine, cast_batch(ranks[rank], dtype, engine.device))
                engine.backward(loss)
                engine.step()
                total += loss.item()
            run.losses.append(_mean_over_ranks(total / len(micros), world))
            last = engine.last_step
            assert last is not None  # the last micro-batch completed a step
            assert last.grad_norm is not None
            run.grad_norms.append(last.grad_norm)
            run.scales.append(last.loss_scale)
            run.skipped.append(last.skipped)
            run.lrs.append(last.lr)
        run.params = {name: full.detach().cpu() for name, full in engine.iter_full_params()}
    return run


def _merged(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    both = {
        key: _merged(low[key], high[key])
        for key in low.keys() & high.keys()
        if isinstance(low[key], Mapping) and isinstance(high[key], Mapping)
    }
    return {**low, **high, **both}


def _mean_over_ranks(value: float, world: int) -> float:
    if world == 1:
        return value
    values: list[Any] = [None] * world
    dist.all_gather_object(values, value)
    return math.fsum(values) / world


def assert_close_trajectory(actual: Trajectory, expected: Trajectory, *, rtol: float) -> None:
    """Assert that losses, norms and tensors differ by at most ``rtol``.

    The difference of a tensor is relative to its largest element, that of a number to the number.
    Masters are compared if both runs have them. The message begins with the largest difference.
    """
    assert actual.skipped == expected.skipped, f"{actual.skipped} != {expected.skipped}"
    found = []
    for what in ("losses", "grad_norms", "lrs", "scales"):
        pairs = itertools.zip_longest(getattr(actual, what), getattr(expected, what))
        for step, (a, b) in enumerate(pairs):
            found.append((_relative(a, b), f"{what}[{step}]: {a} != {b}"))
    for name, a, b in _tensor_pairs(actual, expected):
        largest = max(b.abs().max().item(), torch.finfo(b.dtype).tiny) if b.numel() else 1.0
        wide = torch.complex128 if b.is_complex() else torch.float64
        error = (a.to(wide) - b.to(wide)).abs().max().item() / largest if b.numel() else 0.0
        found.append((error, f"{name}: relative difference {error:.2e}"))
    wrong = sorted((e for e in found if not e[0] <= rtol), key=lambda e: -e[0])
    assert not wrong, "\n".join(
        [f"{len(wrong)} of {len(found)} values differ by more than {rtol:g}:"]
        + [text for _, text in wrong[:8]]
    )


def assert_bit_equal(actual: Trajectory, expected: Trajectory) -> None:
    """Assert that all numbers and all bits are equal. The message gives the first difference."""
    for what in ("skipped", "losses", "grad_norms", "lrs", "scales"):
        a, b = getattr(actual, what), getattr(expected, what)
        assert repr(a) == repr(b), f"{what}: {a} != {b}"  # repr: nan equals nan
    for name, a, b in _tensor_pairs(actual, expected):
        if not torch.equal(a, b):
            different = (a != b).flatten()
            at = int(different.nonzero()[0])
            raise AssertionError(
                f"{name}: {int(different.sum())} of {a.numel()} elements differ, first "
                f"[{at}]: {a.flatten()[at].item()!r} != {b.flatten()[at].item()!r}"
            )


def _relative(a: float | None, b: float | None) -> float:
    if a is None or b is None:
        return math.inf
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    difference = abs(a - b) / abs(b) if b else math.inf
    return math.inf if math.isnan(difference) else difference


def _tensor_pairs(actual: Trajectory, expected: Trajectory) -> list[tuple[str, Tensor, Tensor]]:
    """The tensors of both runs in pairs.

    Raises:
        AssertionError: the names, shapes or dtypes differ.
    """
    pairs = []
    for what in ("params", "masters"):
        a, b = getattr(actual, what), getattr(expected, what)
        if what == "masters" and not (a and b):
            continue
        assert a.keys() == b.keys(), f"{what}: only one side has {sorted(a.keys() ^ b.keys())}"
        for name, expected_tensor in b.items():
            x, y = a[name], expected_tensor
            assert (x.shape, x.dtype) == (y.shape, y.dtype), (
                f"{what} {name}: {tuple(x.shape)} {x.dtype} != {tuple(y.shape)} {y.dtype}"
            )
            pairs.append((f"{what} {name}", x, y))
    return pairs
