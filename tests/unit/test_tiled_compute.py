"""Tiled computations give what the whole computation gives, and keep one piece at a time."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from zeroshard.errors import UsageError
from zeroshard.sequence.tiled import (
    SequenceTiledCompute,
    TiledFusedLogitsLoss,
    TiledMLP,
    sequence_tiled_compute,
)

VOCAB, WIDTH = 11, 6


@pytest.fixture
def parts():
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCAB, dtype=torch.float64)
    hidden = torch.randn(2, 9, WIDTH, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, VOCAB, (2, 9))
    labels[:, ::4] = -100
    return head, hidden, labels


def gradients(loss, head, hidden):
    return torch.autograd.grad(loss, [hidden, head.weight, head.bias])


def summed(head, x, y):
    return F.cross_entropy(head(x), y, ignore_index=-100, reduction="sum")


@pytest.mark.parametrize("shards", [1, 3, 4, 40])
def test_a_tiled_loss_is_the_whole_loss_and_logits_are_never_whole(parts, shards):
    head, hidden, labels = parts
    seen = []

    def loss(head, x, y):
        seen.append(x.shape[0])
        return summed(head, x, y)

    found = TiledFusedLogitsLoss.apply(loss, head, hidden, labels, None, shards, [], "sum")
    grads = gradients(found, head, hidden)
    assert max(seen) == -(-18 // min(shards, 18))
    expected = summed(head, hidden.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(found, expected)
    for grad, other in zip(grads, gradients(expected, head, hidden), strict=True):
        torch.testing.assert_close(grad, other)


def test_a_mask_is_cut_too_and_the_mean_is_that_of_the_pieces(parts):
    head, hidden, labels = parts
    mask = torch.rand(2, 9) < 0.5

    def loss(head, x, y, mask):
        return F.cross_entropy(head(x), y.clamp(min=0), reduction="none")[mask].sum()

    found = TiledFusedLogitsLoss.apply(loss, head, hidden, labels, mask, 3)
    expected = loss(head, hidden.flatten(0, 1), labels.flatten(), mask.flatten())
    torch.testing.assert_close(found, expected / 3)


@pytest.mark.parametrize("how", [None, "mean", "sum"])
def test_tiled_outputs_are_joined_along_the_sequence(parts, how):
    head, hidden, labels = parts

    def compute(x, y, head):
        return head(x) * (y >= 0).unsqueeze(-1)

    given = {"x": hidden, "y": labels}
    found = sequence_tiled_compute(
        compute, 9, 2, given, {"head": head}, "x", [], output_reduction=how
    )
    whole = compute(hidden, labels, head)
    expected = whole if how is None else getattr(whole, how)()
    torch.testing.assert_close(found, expected)
    same = SequenceTiledCompute.apply(
        compute, 9, 2, ["x", "y"], ["head"], "x", None, 1, how, hidden, labels, head
    )
    assert torch.equal(same, found)
    seed = torch.ones_like(found)
    for grad, other in zip(
        torch.autograd.grad(found, [hidden, head.weight], seed),
        torch.autograd.grad(expected, [hidden, head.weight], seed),
        strict=True,
    ):
        torch.testing.assert_close(grad, other)


def test_numbers_are_stacked(parts):
    head, hidden, labels = parts

    def compute(x, y):
        return summed(head, x.flatten(0, 1), y.flatten())

    options = {"output_unshard_dimension": 0, "output_reduction": None}
    found = sequence_tiled_compute(compute, 9, 3, {"x": hidden, "y": labels}, {}, "x", **options)
    assert found.shape == (3,)
    torch.testing.assert_close(found.sum(), compute(hidden, labels))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda h, x, y: TiledFusedLogitsLoss.apply(summed, h, x, y[:1], None, 2), r"\(1, 9\)"),
        (lambda h, x, y: TiledFusedLogitsLoss.apply(summed, h, x, y, y[:, 0], 2), r"\(2,\)"),
        (lambda h, x, y: TiledFusedLogitsLoss.apply(summed, h, x, y, None, 0), "shards is 0"),
        (lambda h, x, y: TiledFusedLogitsLoss.apply(summed, h, x, y, None, 2, [], "max"), "'max'"),
        (lambda h, x, y: TiledMLP.apply(h, h, x[0, 0], 2), r"x is \(6,\)"),
        (lambda h, x, y: TiledMLP.apply(h, h, x, 0), "shards is 0"),
        (lambda h, x, y: sequence_tiled_compute(h, 0, 2, {"x": x[:, :0]}, {}, "x"), "seqlen is 0"),
        (lambda h, x, y: sequence_tiled_compute(h, 8, 2, {"x": x}, {}, "x"), "seqlen is 8"),
        (lambda h, x, y: sequence_tiled_compute(h, 9, 2, {"x": x}, {}, "z"), "'z'"),
    ],
)
def test_what_does_not_fit_is_an_error(parts, call, message):
    with pytest.raises(UsageError, match=message):
        call(*parts)
