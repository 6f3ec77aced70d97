"""Gradients that wait to be copied together: second arrivals, missing ones, and groups of every size."""

from __future__ import annotations

from collections.abc import Callable

import kit
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zeroshard_testing import on_ranks

from zeroshard import Engine
from zeroshard.zero import gradients
from zeroshard.zero.held_grads import HeldGrad

WIDTH = 12


class Twice(nn.Module):
    """``a`` gets two gradients in one backward, because reentrant checkpoints run backwards of their own.

    ``b`` gets its gradient last, ``unused`` and ``spare`` none: the unit is never complete.
    """

    def __init__(self) -> None:
        super().__init__()
        values = torch.Generator().manual_seed(3)
        self.a, self.b, self.unused, self.spare = (
            nn.Parameter(torch.randn(WIDTH, WIDTH, generator=values) / 4) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.b
        for _ in range(2):
            x = checkpoint(lambda h: torch.tanh(h @ self.a), x, use_reentrant=True)
        return x


class Model(nn.Module):
    """Two units and a root."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.eye_(self.begin.weight)
        self.blocks = nn.ModuleList(Twice() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        for block in self.blocks:
            x = block(x)
        return x


def batch(step: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step))


def trained_plainly(accumulation: int) -> dict[str, Tensor]:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        for micro in range(accumulation):
            (model(batch(10 * step + micro)).square().mean() / accumulation).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("group_numel", [0, WIDTH * WIDTH + 1, 2**18])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_waiting_gradients_train_as_the_plain_loop(stage, group_numel, accumulation):
    """Both ranks have the same data, so the mean over ranks has the bits of one rank's gradient."""
    before, gradients.GROUP_NUMEL = gradients.GROUP_NUMEL, group_numel
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "units": ["Twice"],
        "unit_min_numel": 0,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
    }
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    try:
        with Engine(model, config=config, optimizer=optimizer) as engine:
            for step in range(3):
                for micro in range(accumulation):
                    engine.backward(engine(batch(10 * step + micro)).square().mean())
                    assert not any(b._waiting for b in engine.runtime.reducer.buffers)
                    engine.step()
            trained = {name: full.clone() for name, full in engine.iter_full_params()}
    finally:
        gradients.GROUP_NUMEL = before
    expected = trained_plainly(accumulation)
    assert trained.keys() == expected.keys()
    # Stages 2 and 3 reduce the sum of each backward, so they add four gradients in another order.
    reordered = stage >= 2 and accumulation > 1
    for name, value in expected.items():
        torch.testing.assert_close(
            trained[name], value, rtol=1e-5 if reordered else 0, atol=1e-7 if reordered else 0
        )


def recorded(param: nn.Parameter) -> list[Tensor]:
    """Copies of ``param.grad``, from a hook of the program, after each backward."""
    seen: list[Tensor] = []
    param.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.detach().clone()))
    return seen


def train_plainly(network: nn.Module, steps: int, accumulation: int) -> None:
    """In PyTorch alone, with a sum of gradients over micro-batches."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    for at in range(steps * accumulation):
        (network(batch(at)).square().sum() / accumulation).backward()
        if (at + 1) % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("stage", [0, 1])
@on_ranks(1)
def test_hooks_of_the_program_see_the_sums_that_plain_pytorch_shows(stage):
    """From the second backward on, autograd adds to the slots of the local sum, which it was lent."""
    accumulation, steps = 3, 2
    plain, model = small_network(), small_network()
    expected, found = recorded(plain[0].weight), recorded(model[0].weight)
    train_plainly(plain, steps, accumulation)
    config = kit.config(stage, gradient_accumulation_steps=accumulation)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with Engine(model, config=config, optimizer=optimizer) as engine:
        for step in range(steps * accumulation):
            engine.backward(engine(batch(step)).square().sum())
            assert all(type(param.grad) is HeldGrad for param in model.parameters())  # no loan
            engine.step()
    assert len(found) == len(expected) == steps * accumulation
    for mine, plain_sum in zip(found, expected, strict=True):
        assert torch.equal(mine, plain_sum)


def halves(param: Tensor) -> None:
    param.grad.mul_(0.5)


def replaces(param: Tensor) -> None:
    param.grad = param.grad * 0.5


def drops_every_third() -> Callable[[Tensor], None]:
    calls: list[int] = []

    def drop(param: Tensor) -> None:
        calls.append(1)
        if len(calls) % 3 == 2:
            param.grad = None

    return drop


HOOKS = {"halves": lambda: halves, "replaces": lambda: replaces, "drops": drops_every_third}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("stage", [0, 1])
@on_ranks(1)
def test_hooks_of_the_program_change_the_sums_as_in_plain_pytorch(stage, hook):
    accumulation, steps = 3, 2
    plain, model = small_network(), small_network()
    for network in (plain, model):
        network[0].weight.register_post_accumulate_grad_hook(HOOKS[hook]())
    train_plainly(plain, steps, accumulation)
    config = kit.config(stage, gradient_accumulation_steps=accumulation)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with Engine(model, config=config, optimizer=optimizer) as engine:
        for step in range(steps * accumulation):
            engine.backward(engine(batch(step)).square().sum())
            engine.step()
        for name, value in engine.iter_full_params():
            assert torch.equal(value, plain.get_parameter(name)), name


@on_ranks(1)
def test_a_lent_slot_holds_the_sum_of_a_backward_that_records_a_graph():
    """With ``create_graph=True`` autograd does not add in place, but makes a new sum."""
    plain, model = small_network(), small_network()
    for create_graph in (False, True, False):
        plain(batch(0)).square().sum().div(4).backward(create_graph=create_graph)
    plain[0].weight.grad = plain[0].weight.grad.detach()
    config = kit.config(1, gradient_accumulation_steps=4)
    with Engine(model, config=config, optimizer=torch.optim.SGD(model.parameters())) as engine:
        for create_graph in (False, True, False):
            loss = engine(batch(0)).square().sum() / 4
            loss.backward(create_graph=create_graph)
            engine.step()
        first = engine.runtime.reducer.buffers[0]
        assert torch.equal(first.views[0], plain[0].weight.grad)


def small_network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


class Early(nn.Module):
    """The first lines read a weight of the last block, whose gradient comes after the block is left."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.blocks[2].weight)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_a_gradient_after_the_reduction_of_its_unit_is_not_lost(stage):
    """A slot that was lent belongs to the reduction now; autograd must not add to it."""
    accumulation = 3
    plain, model = Early(), Early()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for step in range(2 * accumulation):
        (plain(batch(step)).square().sum() / accumulation).backward()
        if (step + 1) % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
    config = kit.config(stage, gradient_accumulation_steps=accumulation, units=["Linear"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with Engine(model, config=config, optimizer=optimizer) as engine:
        for step in range(2 * accumulation):
            engine.backward(engine(batch(step)).square().sum())
            engine.step()
        for name, full in engine.iter_full_params():
            torch.testing.assert_close(full, plain.get_parameter(name).detach())


@pytest.mark.parametrize("stage", [0, 1])
@on_ranks(1)
def test_a_sum_that_was_not_expected_is_made_in_the_accumulation_dtype(stage):
    """Gradients are bf16 and their sums fp32: a sum in bf16 would lose the small one."""
    model = nn.Linear(WIDTH, 1, bias=False)
    bf16 = {"enabled": True}
    config = kit.config(
        stage,
        bf16=bf16,
        communication_data_type="bf16",
        data_types={"grad_accum_dtype": "fp32"},
        optimizer=kit.ADAMW,
    )
    with Engine(model, config=config) as engine:
        with engine.no_sync():
            for value in (1.0, 2**-9):
                x = torch.full((1, WIDTH), value, dtype=torch.bfloat16)
                engine.backward(engine(x).sum())
        (buffer,) = engine.runtime.reducer.buffers
        total = buffer.grads_N if buffer.grads_N is not None else buffer.reduced_S
        assert total[:WIDTH].tolist() == [1.0 + 2**-9] * WIDTH
