"""The loss of logits that are cut over the vocabulary is that of the whole logits."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from zeroshard_testing import on_ranks

from zeroshard.errors import UsageError
from zeroshard.parallel.tensor_styles import part
from zeroshard.parallel.tensor_sums import vocab_parallel_cross_entropy

EXACT = 1e-12


def check(vocab: int, *, scale: float = 1.0, **options: object) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(vocab)
    full = (
        torch.randn(3, 5, vocab, generator=generator, dtype=torch.float64) * scale
    ).requires_grad_()
    target = torch.randint(vocab, (3, 5), generator=generator)
    ignored = options.get("ignore_index", -100)
    target[1, :2] = ignored
    begin, end = part(vocab, mesh.size(), mesh.get_local_rank())
    own = full.detach()[..., begin:end].clone().requires_grad_()
    expected = F.cross_entropy(full.flatten(0, 1), target.flatten(), **options)
    found = vocab_parallel_cross_entropy(own, target, mesh, vocab_size=vocab, **options)
    assert torch.allclose(found.flatten(), expected.flatten(), rtol=EXACT, atol=EXACT)
    weights = torch.linspace(1, 2, expected.numel(), dtype=torch.float64)
    (expected.flatten() * weights).sum().backward()
    (found.flatten() * weights).sum().backward()
    assert torch.allclose(own.grad, full.grad[..., begin:end], rtol=EXACT, atol=EXACT)


@on_ranks(2)
def test_every_option_gives_the_loss_and_gradient_of_the_whole_logits():
    for reduction, smoothing, ignored in itertools.product(
        ("mean", "sum", "none"), (0.0, 0.1, 1.0), (-100, 3)
    ):
        check(9, reduction=reduction, label_smoothing=smoothing, ignore_index=ignored)


@on_ranks(4)
def test_parts_of_other_sizes_also_empty_ones():
    check(33)
    check(5, label_smoothing=0.2)  # the last rank has nothing
    check(2)


@on_ranks(2)
def test_large_and_masked_logits():
    check(10, scale=1e3)
    mesh = init_device_mesh("cpu", (2,))
    full = torch.zeros(1, 6, dtype=torch.float64)
    full[0, 4:] = float("-inf")
    begin, end = part(6, 2, mesh.get_local_rank())
    loss = vocab_parallel_cross_entropy(full[:, begin:end], torch.tensor([1]), mesh, vocab_size=6)
    assert loss.item() == pytest.approx(torch.tensor(4.0).log().item())


@on_ranks(2)
def test_half_precision_logits_are_summed_in_fp32():
    mesh = init_device_mesh("cpu", (2,))
    full = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    begin, end = part(8, 2, mesh.get_local_rank())
    own = full[:, begin:end].clone().requires_grad_()
    target = torch.tensor([0, 3, 4, 7])
    loss = vocab_parallel_cross_entropy(own, target, mesh, vocab_size=8)
    assert loss.dtype == torch.bfloat16
    assert loss == F.cross_entropy(full.float(), target).bfloat16()
    loss.backward()
    assert own.grad.dtype == torch.bfloat16


@on_ranks(2)
def test_sizes_and_targets_that_do_not_fit_are_errors():
    mesh = init_device_mesh("cpu", (2,))
    logits = torch.zeros(2, 4)
    with pytest.raises(UsageError, match=r"target -1 is outside of the vocabulary of 8"):
        vocab_parallel_cross_entropy(logits, torch.tensor([0, -1]), mesh, vocab_size=8)
    with pytest.raises(UsageError, match=r"needs logits of the shape \(2, 5\)"):
        vocab_parallel_cross_entropy(logits, torch.tensor([0, 1]), mesh, vocab_size=10)
    with pytest.raises(UsageError, match=r"reduction = 'median'"):
        vocab_parallel_cross_entropy(
            logits, torch.tensor([0, 1]), mesh, vocab_size=8, reduction="median"
        )
