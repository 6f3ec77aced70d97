"""What stage 3 gathers in backward, and for how long."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kit import engine
from torch import Tensor, nn
from torch.nn.utils import weight_norm
from zeroshard_testing import on_ranks

from zeroshard.zero.gradients import GradBuffer

VOCABULARY, WIDTH = 32, 16


class OwnStart(nn.Embedding):
    """An embedding with other first values."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.5)


class Doubled(nn.Embedding):
    """An embedding whose backward reads the weight."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.weight.sum()


def normed(vocabulary: int, width: int) -> nn.Module:
    """An embedding whose weight is computed from two parameters."""
    return weight_norm(nn.Embedding(vocabulary, width))


def model(embedding: Callable[[int, int], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    return nn.Sequential(embedding(VOCABULARY, WIDTH), *layers, nn.Linear(WIDTH, 4, bias=False))


def train(net: nn.Module, stage: int) -> tuple[list[float], list[str]]:
    """Losses and values, and the names of the all-gathers of the last backward."""
    gathered: list[str] = []
    with engine(net, stage) as trained:
        losses = []
        for _ in range(3):
            loss = trained(torch.arange(8).view(2, 4)).square().mean()
            gathered.clear()
            comm = trained.runtime.units[0].comm
            start = comm.all_gather

            def note(full_N, shard_S, *, name, start=start):
                gathered.append(name)
                return start(full_N, shard_S, name=name)

            comm.all_gather = note
            trained.backward(loss)
            comm.all_gather = start
            trained.step()
            losses.append(float(loss.detach()))
        for _, full in trained.iter_full_params():
            losses += full.flatten().tolist()
    return losses, gathered


@pytest.mark.parametrize(
    ("embedding", "is_gathered"),
    [(nn.Embedding, False), (OwnStart, False), (Doubled, True), (normed, True)],
)
@on_ranks(2)
def test_an_embedding_is_gathered_in_backward_only_if_its_weight_is_read(embedding, is_gathered):
    expected, _ = train(model(embedding), 2)
    found, gathered = train(model(embedding), 3)
    assert found == expected
    assert ("0" in gathered) == is_gathered
    assert "1" in gathered


@on_ranks(2)
def test_a_linear_layer_is_freed_before_its_gradient_is_reduced():
    """The last one was kept since forward, and is as large as its gradient."""
    gathered: dict[str, int] = {}
    detach = GradBuffer.detach_local

    def note(buffer: GradBuffer) -> Tensor:
        held = buffer.ledger.live["gathered", "device"]
        gathered[buffer.unit.name] = held.get(buffer.unit.name, 0)
        return detach(buffer)

    with pytest.MonkeyPatch.context() as patch, engine(model(nn.Embedding), 3) as trained:
        patch.setattr(GradBuffer, "detach_local", note)
        for _ in range(2):
            trained.backward(trained(torch.arange(8).view(2, 4)).square().mean())
            trained.step()
    assert gathered["3"] == gathered["2"] == gathered["0"] == 0
