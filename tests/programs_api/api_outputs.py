"""Programs around calls of the whole model: what it returns, and backwards that run it again or not."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from api_rows import WIDTH, Net, Program, named, row
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@row()
def model_is_recomputed_as_a_whole(p: Program) -> None:
    for at in range(3):
        x, y = p.batch(at)
        F.mse_loss(checkpoint(p.model, x, use_reentrant=False), y).backward()
        p.step()


@row()
def model_is_recomputed_as_a_whole_by_a_backward_in_backward(p: Program) -> None:
    for at in range(3):
        x, y = p.batch(at)
        F.mse_loss(checkpoint(p.model, x.requires_grad_(), use_reentrant=True), y).backward()
        p.step()


@row()
def model_is_recomputed_after_a_plain_call(p: Program) -> None:
    for at in range(3):
        x, y = p.batch(at)
        hidden = checkpoint(p.model, p.model(x), use_reentrant=False)
        F.mse_loss(checkpoint(p.model, hidden, use_reentrant=False), y).backward()
        p.step()


class Recursive(Net):
    def forward(self, x: Tensor, calls: int = 2) -> Tensor:
        return super().forward(self(x, calls - 1) if calls > 1 else x)


@row(make=Recursive)
def model_calls_itself(p: Program) -> None:
    p.train(3)


# ---------------------------------------------------------------------- what modules return


@dataclasses.dataclass
class Output:
    y: Any
    view: Any
    note: str = ""


OUTPUTS = {
    "dataclass": Output,
    "dict": lambda y, view: {"y": y, "view": view},
    "tuple": lambda y, view: (y, view),
    "nest": lambda y, view: Output({"list": [y]}, (view, None)),
}


def parts_of(output: Any) -> tuple[Tensor, Tensor]:
    if isinstance(output, Output):
        output = output.y, output.view
    y, view = output.values() if isinstance(output, dict) else output
    return (y["list"][0], view[0]) if isinstance(y, dict) else (y, view)


class WithView(nn.Module):
    """Returns a result, and a view of a parameter that is used when the module is sharded again."""

    def __init__(self, kind: str, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.kind, self.inner = kind, inner
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.latents = nn.Parameter(torch.randn(1, WIDTH))

    def forward(self, x: Tensor) -> Any:
        if self.inner is not None:
            y, view = parts_of(self.inner(x))
            x = y + view
        return OUTPUTS[self.kind](torch.tanh(self.layer(x)), self.latents.expand(len(x), -1))


def _returns(kind: str) -> None:
    def program(p: Program) -> Any:
        for at in range(3):
            x, target = p.batch(at)
            y, view = parts_of(p.model(x))
            F.mse_loss(y + view, target).backward()
            p.step()
        with torch.no_grad():
            return [p.mean(part.mean()) for part in parts_of(p.model(x))]

    row(make=lambda: WithView(kind, WithView(kind)))(named(program, f"model_returns_a_{kind}"))


for _kind in OUTPUTS:
    _returns(_kind)


# ---------------------------------------------------------------------- a loss without the model


def _halve(param: nn.Parameter) -> None:
    param.grad.mul_(0.5)


@row("Tensor.register_post_accumulate_grad_hook")
def penalty_alone_meets_hooks(p: Program) -> None:
    """No module has run: the first gradient tells that a backward has begun."""
    for param in p.module.parameters():
        param.register_post_accumulate_grad_hook(_halve)
    for _ in range(2):
        sum(param.square().sum() for param in p.module.parameters()).backward()
        p.step()
    p.train()


@row("Tensor.register_post_accumulate_grad_hook")
def penalty_alone_meets_a_hook_that_drops_it(p: Program) -> None:
    def drop(param: nn.Parameter) -> None:
        param.grad = None

    p.module.first.weight.register_post_accumulate_grad_hook(drop)
    for _ in range(2):
        (p.module.first.weight.square().sum() + p.module.second.weight.square().sum()).backward()
        p.step()


@row("Tensor.register_post_accumulate_grad_hook", raises="adds to a gradient of this step")
def penalty_alone_meets_a_hook_twice(p: Program) -> None:
    weight = p.module.first.weight
    weight.register_post_accumulate_grad_hook(_halve)
    for _ in range(2):
        weight.square().sum().backward()
    p.step()


# ---------------------------------------------------------------------- parameters and gradients


@row()
def gradient_metadata(p: Program) -> Any:
    p.backward()
    grad = p.module.second.weight.grad
    norm = torch.linalg.vector_norm(grad)
    found = [grad.layout, grad.dtype, grad.shape, norm.shape, norm.dtype, str(norm.device)]
    return found, grad.double() is grad, grad.to(torch.float64) is grad, grad.to("cpu") is grad


@row()
def gradient_of_the_program_is_zeroed(p: Program) -> Any:
    p.train()
    weight = p.module.second.weight
    weight.grad = torch.ones(WIDTH, WIDTH).double()
    p.optimizer.zero_grad(set_to_none=False)
    found = weight.grad.clone()
    p.optimizer.zero_grad()
    p.train()
    return found


@row("Tensor.as_subclass Tensor.unbind")
def parameter_becomes_a_subclass(p: Program) -> Any:
    class Own(Tensor):
        pass

    p.train()
    weight = p.module.second.weight
    found = [(weight.as_subclass(Own) * 2).sum(), weight.detach().as_subclass(Own).sum()]
    rows = [line.sum() for line in (*weight, *weight.data, *weight.detach())]
    return [value.detach().as_subclass(Tensor) for value in (*found, *rows)]


@row()
def modules_and_parameters_are_put_back(p: Program) -> None:
    """At the end of their tables: in another order, but all are there."""
    p.train()
    first, weight = p.module.first, p.module.second.weight
    del p.module.first, p.module.second.weight
    p.module.first, p.module.second.weight = first, weight
    p.train(2)


class WithNumbers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Parameter(torch.arange(8), requires_grad=False)
        self.flags = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.whole[:WIDTH] * self.flags[0]


@row(make=WithNumbers)
def parameters_of_whole_numbers(p: Program) -> Any:
    p.train(2)
    whole, flags = p.module.whole, p.module.flags
    return whole.sum(), flags.sum(), whole + 0, whole.tolist(), flags.dtype


# ---------------------------------------------------------------------- optimizers


class Scaled(torch.optim.Optimizer):
    """Has no learning rate; ``step`` takes a factor."""

    def __init__(self, params: Any, rate: float) -> None:
        self.rate = rate
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None, factor: float = 1.0) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=self.rate * factor)


def scaled(params: Any) -> torch.optim.Optimizer:
    return Scaled(params, 0.1)


@row(optimizer=scaled)
def optimizer_has_no_learning_rate(p: Program) -> None:
    p.train(2)


@row("Optimizer.register_step_pre_hook", optimizer=scaled)
def step_pre_hooks_change_arguments(p: Program) -> None:
    p.optimizer.register_step_pre_hook(lambda _, args, kwargs: (args, {**kwargs, "factor": 0.5}))
    p.optimizer.register_step_pre_hook(
        lambda _, args, kwargs: (args, {"factor": kwargs["factor"] * 0.5})
    )
    p.train(3)
