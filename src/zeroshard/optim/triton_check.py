"""Finds out whether Triton's kernels may be used on a device, by comparing them with torch's.

Torch's fused optimizers round differently on CPUs and on GPUs, and on GPUs from one release of torch to
another. The kernels have all of these orders of operations. The first one with torch's bits is used. If
none has them on some device, the one with the fewest differing elements is used, and a line says so. If
the results are wrong, or Triton cannot compile, the optimizer's own step runs (ADR 0015).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from zeroshard.device.choice import ops_of
from zeroshard.optim.fused_update import FusedUpdate, UpdateKernel
from zeroshard.optim.kernels import kernel_of
from zeroshard.optim.optimizers import Lion
from zeroshard.optim.triton_update import (
    BLOCK,
    NAMES,
    ORDERS,
    DeviceFragment,
    Launcher,
    TritonUpdate,
)

logger = logging.getLogger("zeroshard")

COST = (
    "the optimizer's own step updates parameters in device memory. It moves about 80 bytes per element "
    "instead of 30 (AdamW, bf16), and needs temporary memory of up to 11 bytes per element of a unit"
)

_NUMEL = (
    2 * BLOCK + 64
)  # torch's CPU kernels compute elements beyond a multiple of 64 in scalar code
_STEPS = 3
_DTYPES = (
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, None),
)
_ROUNDINGS = 64  # more than the last bits of a correct result can differ by


def has_kernels(device: torch.device) -> bool:
    """Whether updates on the device may use the kernels. (The CPU has its own: ADR 0007.)"""
    return ops_of(device).is_async


@dataclass(frozen=True)
class Ready:
    """The kernels may be used. ``differing``: elements that have other bits than torch's, in the test."""

    launcher: Launcher
    order: int
    differing: int = 0


@cache
def ready(
    kernel: UpdateKernel, device: torch.device, grad: torch.dtype, low: torch.dtype | None
) -> Ready | None:
    """The launcher for these dtypes, and the order of operations; None: use the optimizer's own step.

    ``low``: the dtype of the parameter; None: it is its own master. The first call compiles, which takes
    some seconds for each order that is tried. If the result is None, that call logs why and what it
    costs. Later calls return the same.
    """
    try:
        return compare(kernel, device, grad, low)
    except torch.OutOfMemoryError:
        raise
    except (
        Exception
    ) as error:  # Triton raises errors of many kinds, and all mean that it cannot be used
        what = "Triton is not installed" if isinstance(error, ImportError) else "Triton failed"
        first = next(iter(str(error).strip().splitlines()), "")[:200]
        logger.warning("%s (%s: %s): %s.", what, type(error).__name__, first, COST)
        return None


def compare(
    kernel: UpdateKernel, device: torch.device, grad: torch.dtype, low: torch.dtype | None
) -> Ready:
    """Compare the kernels with torch's arithmetic on ``device``, in the orders of operations.

    Raises:
        ArithmeticError: a result is wrong by more than rounding.
        Exception: what Triton raises if it cannot compile.
    """
    launcher = Launcher(device)
    found: list[tuple[int, str, int]] = []
    failures: list[Exception] = []
    for name, order in ORDERS.items():
        try:
            results = list(_results(kernel, device, grad, low, launcher, order))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the other orders may compile
            failures.append(error.with_traceback(None))  # its frames hold tensors of the test
            continue
        differing = sum(int((mine != wanted).sum()) for mine, wanted, _ in results)
        if differing == 0:
            return Ready(launcher, order)
        if all(_is_close(*result) for result in results):
            found.append((differing, name, order))
        else:
            wrong = ArithmeticError("its update differs from torch's by more than rounding")
            failures.insert(0, wrong)
    if not found:
        raise failures.pop(0)  # not kept here: error and frame would keep each other alive
    differing, name, order = min(found)
    logger.info(
        "the update in one pass differs from torch's kernel on this device in the last bits of %d "
        "elements of the test, in the order of %s. The key compile_update chooses torch's: false.",
        *(differing, name),
    )
    return Ready(launcher, order, differing)


def differences(device: torch.device) -> dict[str, str]:
    """Compare every kernel with torch's own on ``device``. For benchmarks on real devices.

    Returns, by a name such as ``AdamW bf16/bf16`` (gradient, parameter): "" if all bits are equal, else
    what was found. Takes some seconds for each name.
    """
    found = {}
    param = [torch.nn.Parameter(torch.zeros(1, device=device))]
    optimizers: dict[str, torch.optim.Optimizer] = {
        "AdamW": torch.optim.AdamW(param, fused=True),
        "SGD": torch.optim.SGD(param, fused=True),
        "SGD with momentum": torch.optim.SGD(param, momentum=0.9, fused=True),
        "Lion": Lion(param),
    }
    for name, optimizer in optimizers.items():
        kernel = kernel_of(optimizer)
        assert kernel is not None
        for grad, low in _DTYPES:
            case = f"{name} {NAMES[grad]}/{NAMES[low or torch.float32]}"
            try:
                answer = compare(kernel, device, grad, low)
            except Exception as error:
                found[case] = f"{type(error).__name__}: {error}"
            else:
                many = answer.differing
                found[case] = f"{many} elements differ in the last bits" if many else ""
    return found


def options_of(kind: str) -> list[dict[str, Any]]:
    """Options of param groups that together reach every branch of the kernel ``kind``."""
    if kind == "adam":
        base = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "maximize": False}
        return [
            {**base, "weight_decay": 0.1, "decoupled_weight_decay": True},
            {**base, "weight_decay": 0.1, "decoupled_weight_decay": False},
            {**base, "weight_decay": 0.0, "decoupled_weight_decay": True, "maximize": True},
        ]
    if kind == "lion":
        return [{"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": decay} for decay in (0.0, 0.1)]
    base = {"lr": 1e-2, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.1}
    plain = [
        {**base, "nesterov": False, "maximize": False},
        {**base, "nesterov": False, "weight_decay": 0.0, "maximize": True},
    ]
    if kind == "sgd":
        return plain
    with_momentum = [{**group, "momentum": 0.9, "dampening": 0.3} for group in plain]
    return [*with_momentum, {**base, "momentum": 0.9, "nesterov": True, "maximize": False}]


def _results(
    kernel: UpdateKernel,
    device: torch.device,
    grad_dtype: torch.dtype,
    low: torch.dtype | None,
    launcher: Launcher,
    order: int,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """What an update gave, what torch's kernel gave, and the size of the numbers that were added up.

    Values have all magnitudes, gradients contain zeros, and one step follows an edit.
    """
    assert kernel.device_form is not None
    reference = dataclasses.replace(kernel, compiled=None)
    generator = torch.Generator().manual_seed(0)
    for group in options_of(kernel.device_form.kind):
        scale = 10.0 ** torch.randint(-12, 3, (_NUMEL,), generator=generator).float()
        start = (_normal(generator) * scale).to(device)
        ours, theirs = (_Trained(kernel, start, low) for _ in range(2))
        fragment, whole = ours.fragment(kernel), [(0, 0, theirs.master)]
        param_R = theirs.param
        other = FusedUpdate(
            reference, whole, [theirs.state], master_R=theirs.master, param_R=param_R
        )
        update: TritonUpdate | None = None
        for step in range(_STEPS):
            host = _normal(generator) * scale
            host[step::7] = 0
            grad = host.to(grad_dtype).to(device)
            if step == 1:
                for trained in (ours, theirs):
                    trained.param[8:16] += 1
            if update is None:
                update = TritonUpdate(kernel, launcher, order, [fragment], [grad])
            update.run(
                [grad], torch.tensor(0.37, dtype=torch.float32, device=device), None, [group]
            )
            other.run(grad, 0.37, [group])
        size = scale.to(device)
        for name, mine in ours.tensors().items():
            yield (
                mine,
                theirs.tensors()[name],
                size.square() if name == "exp_avg_sq" else size + 0.01,
            )


def _normal(generator: torch.Generator) -> Tensor:
    return torch.randn(_NUMEL, generator=generator, dtype=torch.float32)  # whatever the default is


def _is_close(mine: Tensor, wanted: Tensor, size: Tensor) -> bool:
    limit = _ROUNDINGS * torch.finfo(wanted.dtype).eps * (wanted.float().abs() + size)
    return bool(((mine.float() - wanted.float()).abs() <= limit).all())


class _Trained:
    """A parameter with master and state, which training would change."""

    def __init__(self, kernel: UpdateKernel, start: Tensor, low: torch.dtype | None) -> None:
        self.master = start.clone()
        self.param = self.master if low is None else start.to(low)
        self.state = {name: torch.zeros_like(start) for name in kernel.shaped}
        if kernel.counts:
            self.state["step"] = torch.zeros((), dtype=torch.float32, device=start.device)

    def fragment(self, kernel: UpdateKernel) -> DeviceFragment:
        low = None if self.param is self.master else self.param
        shaped = tuple(self.state[name] for name in kernel.shaped)
        return DeviceFragment(0, 0, 0, self.master, shaped, self.state.get("step"), low)

    def tensors(self) -> dict[str, Tensor]:
        return {"master": self.master, "param": self.param, **self.state}
