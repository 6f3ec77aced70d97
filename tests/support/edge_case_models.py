"""Edge-case models, which ZeroShard must train exactly as plain PyTorch does.

Every case is tiny (about 1 ms a step) and deterministic. Sizes are odd on purpose: few parameters have
a number of elements that is divisible by 2, 3 or 64. A loss is the mean over the samples of a batch,
and the batches of all ranks have the same size, so the mean over ranks is the loss of the global batch.

Letters: ``B`` samples, ``T`` tokens, ``D`` features.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

BATCH, TOKENS, WIDTH, VOCAB = 3, 5, 23, 37

Forward = Callable[..., Any]
"""A module or an engine, which are called in the same way."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model with its data and loss.

    ``build()`` returns the same fp32 model at every call. ``make_batch(rank, micro, generator)``
    returns a tuple, the batch. ``loss(forward, batch)`` calls the model or the engine on it and returns
    a 0-dim tensor. ``config`` holds the configuration keys that a user of the model has to set.
    """

    build: Callable[[], nn.Module]
    make_batch: Callable[[int, int, torch.Generator], tuple[Any, ...]]
    loss: Callable[[Forward, tuple[Any, ...]], Tensor]
    config: Mapping[str, Any]


CASES: dict[str, Case] = {}
"""Every case by its name. :mod:`support.edge_case_networks` adds its own."""

_Factory = TypeVar("_Factory", bound=Callable[[], nn.Module])


def mse(forward: Forward, batch: tuple[Any, ...]) -> Tensor:
    """Mean squared error of ``forward(inputs)`` against the last item of the batch."""
    *inputs, target = batch
    return F.mse_loss(at_least_fp32(forward(*inputs)), at_least_fp32(target))


def cross_entropy(forward: Forward, batch: tuple[Any, ...]) -> Tensor:
    """Mean cross entropy over all tokens; the last item of the batch holds the targets [B, T]."""
    *inputs, target = batch
    return F.cross_entropy(at_least_fp32(forward(*inputs)).flatten(0, 1), target.flatten())


def features(_rank: int, _micro: int, generator: torch.Generator) -> tuple[Any, ...]:
    """``x`` and ``y``, both [B, D]."""
    x, y = torch.randn(2, BATCH, WIDTH, generator=generator)
    return x, y


def tokens(_rank: int, _micro: int, generator: torch.Generator) -> tuple[Any, ...]:
    """Token ids and next-token targets, both int64 [B, T]."""
    ids = torch.randint(VOCAB, (BATCH, TOKENS + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def case(
    make_batch: Callable[[int, int, torch.Generator], tuple[Any, ...]] = features,
    loss: Callable[[Forward, tuple[Any, ...]], Tensor] = mse,
    **config: Any,
) -> Callable[[_Factory], _Factory]:
    """Register a model class or factory as a case, under its name in snake case."""

    def register(factory: _Factory) -> _Factory:
        def build() -> nn.Module:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(20)
                return factory()

        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", factory.__name__).lower()
        CASES[name] = Case(build=build, make_batch=make_batch, loss=loss, config=config)
        return factory

    return register


def at_least_fp32(x: Tensor) -> Tensor:
    """``x`` in fp32 if it has 16 bits, because a 16-bit loss would overflow when it is scaled."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


class Block(nn.Module):
    """A residual perceptron, the repeated block of most cases."""

    def __init__(self, width: int = WIDTH, hidden: int = 35) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + y


@case()
class Mlp(nn.Module):
    """Three blocks between two linears: the simple case."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.blocks: Any = nn.ModuleList(Block() for _ in range(depth))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.out(x)
        return y


@case()
class Frozen(Mlp):
    """A frozen first layer and block, and single frozen parameters in the others."""

    def __init__(self) -> None:
        super().__init__()
        self.inp.requires_grad_(False)
        self.blocks[0].requires_grad_(False)
        self.blocks[1].up.weight.requires_grad_(False)
        self.blocks[2].down.bias.requires_grad_(False)


@case()
class Unused(Mlp):
    """A parameter, a linear inside a block and a whole block that no rank ever uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.randn(7))
        self.blocks[1].spare = nn.Linear(3, 5)
        self.spare_block = Block()


@case()
class Reused(Mlp):
    """One block called three times in a forward, each call with gradients (DeepSpeed #8224)."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](self.blocks[1](self.inp(x))))
        y: Tensor = self.out(self.blocks[1](self.blocks[2](x)))
        return y


@case()
class SharedBlock(Mlp):
    """One block registered under two names, and one parameter shared by two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(self.blocks[0])
        self.blocks[2].down.weight = self.blocks[1].down.weight


@case()
class ReusedCheckpointed(Reused):
    """A module used several times, and recomputed each time."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for i in (1, 0, 1, 2, 1):
            x = checkpoint(self.blocks[i], x, use_reentrant=False)
        y: Tensor = self.out(x)
        return y


@case()
class Checkpointed(Mlp):
    """Non-reentrant activation checkpointing around each block."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        y: Tensor = self.out(x)
        return y


@case()
class CheckpointedReentrant(Checkpointed):
    """Reentrant checkpointing: every block runs a separate backward pass."""

    reentrant = True


class BlockCheckpointedInside(Block):
    """Checkpointing begins inside the block, after its forward hooks have run."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self._inner, x, use_reentrant=False)
        return x + y

    def _inner(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return y


@case()
class CheckpointedInside(Mlp):
    """Recomputation calls the block's children but not the block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BlockCheckpointedInside() for _ in range(3))


@case()
class CheckpointedPairs(Mlp):
    """One checkpoint around two blocks, inside another checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        x = checkpoint(self._outer, x, use_reentrant=False)
        y: Tensor = self.out(self.blocks[2](x))
        return y

    def _outer(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.blocks[1], self.blocks[0](x), use_reentrant=False)
        return y


@case()
class Empty(Mlp):
    """Parameters without elements: one that is used, one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.zeros(0, WIDTH))
        self.blocks[1].unused = nn.Parameter(torch.zeros(3, 0))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(torch.cat([x, self.used.to(x.dtype)]))
        return y


@case()
class Scalars(Mlp):
    """0-dim parameters, at the root and in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.3))
        self.blocks[1].register_parameter("gain", nn.Parameter(torch.tensor(0.7)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.inp(x)) * self.temperature
        gain = self.blocks[1].get_parameter("gain")
        y: Tensor = self.out(self.blocks[2](self.blocks[1](x))) * gain
        return y


@case()
class ReadsElsewhere(nn.Module):
    """A weight read by a module that does not own it, before and after its owner has run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.second.up.weight).tanh() @ self.second.up.weight / WIDTH
        x = self.second(self.first(x))
        return x + F.linear(x, self.first.up.weight) @ self.first.up.weight / WIDTH


@case()
class InPlace(Mlp):
    """The outputs of blocks are modified in place by their caller."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
            x += 0.25
            x.tanh_()
        y: Tensor = self.out(x)
        return y


@case()
class NoGradFirst(Mlp):
    """A block that runs without gradients, and later in the same forward with them."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = self.blocks[2](self.blocks[1](self.inp(x)))
        y: Tensor = super().forward(x) + 0.5 * teacher
        return y


@case()
class BareParameters(nn.Module):
    """Parameters in containers that have no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 5 for _ in range(3))
        self.named = nn.ParameterDict({"shift": torch.randn(WIDTH), "scale": torch.ones(WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.stack:
            x = torch.tanh(x @ weight)
        y: Tensor = x * self.named["scale"] + self.named["shift"]
        return y


class LoraLinear(nn.Module):
    """``base(x) + B A x``, the base frozen, ``B`` zero at the start (LoRA paper, section 4.1)."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / 5)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        return y + F.linear(F.linear(x, self.lora_a), self.lora_b)


@case()
class Lora(Mlp):
    """Everything frozen but adapters inside the blocks; blocks are checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.up, block.down = LoraLinear(block.up), LoraLinear(block.down)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        y: Tensor = self.out(x)
        return y
