"""Graphs that cross units in unusual ways: stage 3 equals stages 1 and 2 bit for bit, and plain PyTorch.

There are four groups: outputs of a unit that the next module changes in place; one tensor that feeds
several units, each of which uses it more than once; outputs that are views of a parameter; parameters
that are read in several ways.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from compare import TOLERANCE, adamw, assert_bit_equal, assert_close_trajectory
from support.covering import sampled
from support.edge_case_models import Case, mse
from support.parity import engine_run, make_batches, reference_run
from torch import nn
from torch.utils.checkpoint import checkpoint
from zeroshard_testing import on_ranks

SAMPLES, TOKENS, WIDTH = 2, 3, 7


def sequences(_rank, _micro, generator):
    """``x`` and ``y``, both [B, T, D]: a linear layer's output on these is a view."""
    x, y = torch.randn(2, SAMPLES, TOKENS, WIDTH, generator=generator)
    return x, y


def case_of(model):
    def build():
        torch.manual_seed(5)
        return model()

    return Case(build=build, make_batch=sequences, loss=mse, config={"units": list(model.units)})


KEEP_NOTHING = {"zero_optimization": {"stage3_max_reuse_distance": 0}}


class Chain(nn.Module):
    """Three linear units. ``follow`` is applied to the output of each."""

    units = ("layers.*",)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.shift = nn.Parameter(torch.full((TOKENS, WIDTH), 0.1))

    def forward(self, x):
        for layer in self.layers:
            x = self.follow(layer(x))
        return x

    def follow(self, h):
        return h


class ReluInPlace(Chain):
    def follow(self, h):
        return F.relu(h, inplace=True)


class Masked(Chain):
    def follow(self, h):
        h[:, 0] = self.shift[0]
        return h


class MaskedByBooleans(Chain):
    def follow(self, h):
        h[h.detach() > 0.5] = 0.25
        return h


class Scaled(Chain):
    def follow(self, h):
        return h.mul_(0.9)


class Shifted(Chain):
    def follow(self, h):
        h += self.shift
        return h


class ChangedThroughAView(Chain):
    def follow(self, h):
        h.view(-1, WIDTH)[0].mul_(0.5)
        return h.transpose(0, 1).add_(0.1).transpose(0, 1)


class ChangedTwice(Chain):
    def follow(self, h):
        before = h * 2
        h.add_(before).clamp_(min=-1)
        return h + before


class FrozenBelow(ReluInPlace):
    """A frozen unit gets no gradients, but backward reads its parameters."""

    def __init__(self):
        super().__init__()
        self.layers[1].requires_grad_(False)


class ReluCheckpointed(ReluInPlace):
    reentrant = False

    def forward(self, x):
        x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = checkpoint(
                lambda x, layer=layer: self.follow(layer(x)), x, use_reentrant=self.reentrant
            )
        return x


class ReluCheckpointedReentrant(ReluCheckpointed):
    reentrant = True


class ChangesItsInput(Chain):
    """A unit that first changes its input in place."""

    class Unit(nn.Linear):
        def forward(self, x):
            return super().forward(x.mul_(0.9).add_(0.1))

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Unit(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        return super().forward(x * 1)


IN_PLACE = [
    ReluInPlace, Masked, MaskedByBooleans, Scaled, Shifted, ChangedThroughAView, ChangedTwice,
    FrozenBelow, ReluCheckpointed, ReluCheckpointedReentrant, ChangesItsInput,
]  # fmt: skip


class Attention(nn.Module):
    """Uses both inputs three times."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, context):
        weights = torch.softmax(self.q(x) @ self.k(context).transpose(1, 2), -1)
        return x + weights @ self.v(context) + self.q(context)


class CrossAttention(nn.Module):
    """The output of the encoder is an input of each layer of the decoder."""

    units = ("Attention", "encoder")

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(WIDTH, WIDTH)
        self.decoder = nn.ModuleList(Attention() for _ in range(3))

    def forward(self, x):
        context = torch.tanh(self.encoder(x))
        for layer in self.decoder:
            x = layer(x, context)
        return x


class CrossAttentionCheckpointed(CrossAttention):
    reentrant = False

    def forward(self, x):
        context = torch.tanh(self.encoder(x))
        for layer in self.decoder:
            x = checkpoint(layer, x, context, use_reentrant=self.reentrant)
        return x


class CrossAttentionCheckpointedReentrant(CrossAttentionCheckpointed):
    reentrant = True


class Pyramid(nn.Module):
    """Every level feeds the next one, a lateral unit, and the sum at the end."""

    units = ("Attention",)

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList(Attention() for _ in range(3))
        self.lateral = nn.ModuleList(Attention() for _ in range(3))

    def forward(self, x):
        levels = []
        for down in self.down:
            x = down(x, x)
            levels.append(x)
        for lateral, level in zip(self.lateral, levels, strict=True):
            x = lateral(x, level) + level
        return x


class FrozenAndShared(CrossAttention):
    def __init__(self):
        super().__init__()
        self.decoder[1].requires_grad_(False)
        self.encoder.weight.requires_grad_(False)


SHARED_INPUTS = [
    CrossAttention, CrossAttentionCheckpointed, CrossAttentionCheckpointedReentrant, Pyramid,
    FrozenAndShared,
]  # fmt: skip


class Latents(nn.Module):
    """A unit whose output is a view of its own parameter: learned queries, positions, latents."""

    def __init__(self, give):
        super().__init__()
        self.values = nn.Parameter(torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH))
        self.give = give

    def forward(self, like):
        return self.give(self.values, like)


@dataclasses.dataclass
class Given:
    latents: torch.Tensor
    more: dict


class GivesViews(nn.Module):
    units = ("latents", "more", "out")

    def __init__(self):
        super().__init__()
        self.latents = Latents(lambda p, x: p[:TOKENS].expand(len(x), -1, -1))
        self.more = Latents(lambda p, x: Given(p[1:], {"first": [p.T[:, 0], x]}))
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        given = self.more(x)
        x = self.norm(self.latents(x) + x) * given.latents + given.more["first"][0]
        return self.out(x) * self.latents(x)


class GivesViewsCheckpointed(GivesViews):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


VIEWS_OF_PARAMETERS = [GivesViews, GivesViewsCheckpointed]


class Reads(nn.Module):
    """The root computes with the parameters of a unit that is sharded at that time."""

    units = ("first", "lin")

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.read(self.first(x), self.lin)

    def read(self, x, lin):
        raise NotImplementedError


class ViewAndWhole(Reads):
    def read(self, x, lin):
        return F.linear(x, lin.weight[:], lin.bias)


class WholeAndView(Reads):
    def read(self, x, lin):
        return F.linear(x, lin.weight, lin.bias[:])


class TransposedAndWhole(Reads):
    def read(self, x, lin):
        return torch.addmm(lin.bias, x.flatten(0, 1), lin.weight.T).view_as(x)


class Chunks(Reads):
    def read(self, x, lin):
        upper, lower = lin.weight.split([3, 4])
        return torch.cat([x @ upper.T, x @ lower.T], -1) + lin.bias


class Stacked(Reads):
    def read(self, x, lin):
        both = torch.stack([lin.bias, lin.weight[0], lin.weight[1] * lin.bias])
        return x @ lin.weight.t() + both.sum(0)


class Iterated(Reads):
    def read(self, x, lin):
        return torch.stack([x @ row for row in lin.weight], -1) + lin.bias


class IntoOther(Reads):
    def read(self, x, lin):
        y = x @ lin.weight.T
        y += lin.bias
        y[:, 0] *= lin.bias
        y.addcmul_(lin.bias, lin.weight[:1])
        return y


class IntoOut(Reads):
    def read(self, x, lin):
        scale = torch.empty(WIDTH)
        with torch.no_grad():
            torch.mul(lin.bias, lin.weight[2], out=scale)
        return F.linear(x, lin.weight, lin.bias) * scale


class Einsums(Reads):
    def read(self, x, lin):
        return torch.einsum("btd,ed->bte", x, lin.weight.view(WIDTH, WIDTH)) + lin.bias.expand(
            2, 1, 7
        )


class NamedByF(Reads):
    def read(self, x, lin):
        assert f"{lin.weight.sum().item():.3f}" == f"{lin.weight[:].sum():.3f}" != "nan"
        return F.layer_norm(x, (WIDTH,), lin.weight[0], lin.bias)


class StateSpace(Reads):
    """As state space models do: a negative exponential, a slice and a whole bias in one operation."""

    def read(self, x, lin):
        decay = -torch.exp(lin.weight.float())
        return F.softplus(x @ decay + lin.bias[None, None]) + torch.where(
            lin.bias > 0, lin.bias, lin.weight[0]
        )


MIXED_READS = [
    ViewAndWhole, WholeAndView, TransposedAndWhole, Chunks, Stacked, Iterated, IntoOther, IntoOut,
    Einsums, NamedByF, StateSpace,
]  # fmt: skip


@pytest.mark.parametrize(
    "model", sampled(IN_PLACE + SHARED_INPUTS + VIEWS_OF_PARAMETERS + MIXED_READS, every=3)
)
@on_ranks(2)
def test_every_stage_gives_the_same_bits_and_plain_pytorch(model):
    case = case_of(model)
    batches = make_batches(case, steps=3, world=2)
    runs = {
        stage: engine_run(case, adamw(), batches, stage=stage, clip=0.3, config=KEEP_NOTHING)
        for stage in (1, 2, 3)
    }
    expected = reference_run(case, adamw(), batches, clip=0.3)
    assert_close_trajectory(runs[1], expected, rtol=TOLERANCE["fp32"])
    assert_bit_equal(runs[2], runs[1])
    assert_bit_equal(runs[3], runs[2])
