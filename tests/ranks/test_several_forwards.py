"""Several forwards before their backwards, as in a pipeline: the same bits, and no more memory."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from kit import engine
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zeroshard_testing import on_ranks

from zeroshard import Engine
from zeroshard.zero.reduce import BackwardKind

WIDTH, DEPTH = 64, 8

ORDERS = {
    "first in, first out": "F0 F1 B0 B1",
    "last in, first out": "F0 F1 B1 B0",
    "all forwards first": "F0 F1 F2 F3 B0 B1 B2 B3",
    "one forward, one backward": "F0 F1 B0 F2 B1 F3 B2 B3",
}


class Block(nn.Module):
    """A residual perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BD: Tensor) -> Tensor:
        return x_BD + self.up(self.norm(x_BD)).tanh()


class Stack(nn.Module):
    """Equal blocks; ``recompute`` is what ``checkpoint`` gets as ``use_reentrant``, or None."""

    def __init__(self, recompute: bool | None, span: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.recompute, self.span = recompute, span

    def forward(self, x_BD: Tensor) -> Tensor:
        for at in range(0, DEPTH, self.span):
            part = nn.Sequential(*self.blocks[at : at + self.span])
            if self.recompute is None:
                x_BD = part(x_BD)
            else:
                x_BD = checkpoint(part, x_BD, use_reentrant=self.recompute)
        return x_BD


def opened(model: Stack, steps: int) -> Engine:
    section = {"type": "AdamW", "params": {"lr": 1e-2}}
    return engine(model, 3, optimizer=section, gradient_accumulation_steps=steps)


def run(order: Sequence[str], model: Stack, *, is_pipeline: bool) -> tuple[list[Tensor], int, int]:
    """Train two steps. Returns the parameters, the peak of gathered bytes, and the elements reduced."""
    torch.manual_seed(0)
    for param in model.parameters():
        nn.init.normal_(param, std=0.1)
    count = len(order) // 2
    with opened(model, count) as made:
        made._hooks.is_pipeline = is_pipeline
        for step in range(2):
            losses: dict[str, Tensor] = {}
            made._watch.recorder.reset_traffic()
            for kind, number in order:
                if kind == "F":
                    torch.manual_seed(100 * step + 10 * int(number) + made.dp_rank)
                    x_BD = torch.randn(3, WIDTH).requires_grad_()
                    losses[number] = made(x_BD).square().mean()
                else:
                    made.backward(losses.pop(number))
                    made.step()
        peak = made.runtime.ledger.peak("gathered")
        reduced = made._watch.recorder.payload_numel["reduce_scatter"]
        return [p.clone() for _, p in made.iter_full_params()], peak, reduced


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize(
    ("recompute", "span"), [(None, 1), (True, 1), (False, 1), (True, 2), (False, 2)]
)
@on_ranks(2)
def test_forwards_in_flight_change_no_bit_and_gather_no_more(recompute, span, name):
    order = ORDERS[name].split()
    numbers = [number for kind, number in order if kind == "B"]
    one_by_one = [kind + number for number in numbers for kind in "FB"]
    expected, lowest, psi = run(one_by_one, Stack(recompute, span), is_pipeline=False)
    whole = sum(p.numel() * p.element_size() for p in expected)
    for is_pipeline in (False, True):
        if name == "last in, first out" and not is_pipeline:
            continue  # the backward of the later forward may be that of the earlier one too
        params, peak, reduced = run(order, Stack(recompute, span), is_pipeline=is_pipeline)
        assert all(map(torch.equal, params, expected))
        assert (peak, reduced) == (lowest, psi)
        assert recompute is not None or peak < 0.3 * whole


@on_ranks(2)
def test_one_backward_through_two_forwards_reduces_each_unit_once():
    """The modules of the earlier forward are not left before backward has reached them."""
    model = Stack(None)
    with opened(model, 1) as made:
        for _ in range(2):
            made._watch.recorder.reset_traffic()
            first = made(torch.ones(3, WIDTH)).square().mean()
            second = made(torch.zeros(3, WIDTH)).square().mean()
            made.backward(first + second)
            made.step()
        psi = sum(unit.layout.full_numel for unit in made.runtime.units)
        assert made._watch.recorder.payload_numel["reduce_scatter"] == psi


class Halves(nn.Module):
    """Two blocks, of which a forward runs one: two stages of a pipeline on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x_BD: Tensor, half: int) -> Tensor:
        return self.halves[half](x_BD)


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_a_backward_reduces_the_buffers_of_its_pipeline_stage_only(stage, eager):
    """Otherwise each backward would send zeros for the other stage."""
    micro_batches, section = 2, {"type": "SGD", "params": {"lr": 1e-2}}
    with engine(Halves(), stage, optimizer=section, managed_gradient_accumulation=False) as made:
        reducer = made.runtime.reducer
        reducer.eager = reducer.eager and eager
        for buffer in reducer.buffers:
            buffer.pipeline_stage = int("halves.1" in buffer.unit.name)
        for micro_batch in range(micro_batches):
            for half in (1, 0):
                kind = BackwardKind(micro_batch + 1 == micro_batches, True, pipeline_stage=half)
                made._hooks.kind_of_backward = lambda kind=kind: kind
                made.backward(made(torch.ones(3, WIDTH), half).square().mean())
        psi = sum(unit.layout.full_numel for unit in made.runtime.units)
        sent = made._watch.recorder.payload_numel["reduce_scatter"]
        assert sent == psi * (micro_batches if reducer.eager else 1)
        assert not reducer.waiting
        made.step()
        assert made._watch.recorder.payload_numel["reduce_scatter"] == sent
