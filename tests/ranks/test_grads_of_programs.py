"""What programs do to gradients between backward and step: as in plain PyTorch, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import kit
import pytest
import torch
from torch import Tensor, nn
from torch.nn import utils
from zeroshard_testing import on_ranks

from zeroshard import Engine
from zeroshard.errors import RankDivergence, UsageError
from zeroshard.zero import GatheredParameters, safe_get_full_grad

STAGES = (0, 1, 2, 3)
WIDTH, BATCH = 4, 6


class Net(nn.Module):
    """Three units, and one that only some inputs use."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        values = torch.Generator().manual_seed(seed)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.extra = nn.Linear(WIDTH, WIDTH)
        for param in self.double().parameters():
            param.data = torch.randn(param.shape, generator=values, dtype=torch.float64) / 2

    def forward(self, x: Tensor, *, extra: bool = False) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.extra(x) if extra else x


class Plain:
    """A model and its optimizer in plain PyTorch, called as an engine is called."""

    share = slice(0, BATCH)

    def __init__(self, seed: int) -> None:
        self.module = Net(seed)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-2)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = self.module(*args, **kwargs)
        return result

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def grad(self, param: nn.Parameter) -> Tensor:
        assert param.grad is not None
        return param.grad

    def values(self) -> list[Tensor]:
        return [param.detach() for param in self.module.parameters()]


class Zero:
    """The same with an engine."""

    def __init__(self, seed: int, stage: int, **keys: Any) -> None:
        self.module = Net(seed)
        self.engine = kit.engine(self.module, stage, unit_min_numel=0, units=["Linear"], **keys)
        self.optimizer = self.engine.optimizer
        size, rank = self.engine.world_size, self.engine.global_rank
        self.share = slice(rank * BATCH // size, (rank + 1) * BATCH // size)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = self.engine(*args, **kwargs)
        return result

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def step(self) -> None:
        self.engine.step()

    def grad(self, param: nn.Parameter) -> Tensor:
        grad = safe_get_full_grad(param)
        assert grad is not None
        return grad

    def values(self) -> list[Tensor]:
        found = dict(self.engine.iter_full_params())
        return [found[name] for name, _ in self.module.named_parameters()]


Trainer = Any  # Plain or Zero
Make = Callable[[int], Trainer]


def batch(trainer: Trainer, step: int) -> Tensor:
    """This rank's part of the global batch."""
    values = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, WIDTH, generator=values, dtype=torch.float64)[trainer.share]


def gan(make: Make) -> Iterator[Any]:
    """The loop of DCGAN: the generator's loss leaves gradients in the discriminator."""
    judge, maker = make(1), make(2)
    for step in range(3):
        noise = batch(maker, step)
        judge.optimizer.zero_grad()
        fake = maker(noise)
        judge.backward(judge(batch(judge, 9 + step)).square().mean() - judge(fake.detach()).mean())
        judge.step()
        maker.optimizer.zero_grad()
        maker.backward(judge(fake).mean())
        maker.step()
    yield from (*judge.values(), *maker.values())


def wgan_gp(make: Make) -> Iterator[Any]:
    """The gradient penalty is a gradient of a gradient."""
    judge = make(1)
    for step in range(3):
        judge.module.zero_grad()
        x = batch(judge, step).requires_grad_()
        score = judge(x)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        judge.backward(score.mean() + 10 * (slope.norm(dim=1) - 1).square().mean())
        judge.step()
    yield from judge.values()


def dropped(drop: Callable[[Trainer], None]) -> Callable[[Make], Iterator[Any]]:
    def program(make: Make) -> Iterator[Any]:
        trainer = make(1)
        for step in range(4):
            loss = trainer(batch(trainer, step), extra=step == 1).square().mean()
            if step == 1:
                loss = loss * float("nan")
            trainer.backward(loss)
            if step == 1:
                drop(trainer)
                continue
            trainer.step()
        yield from trainer.values()

    return program


def to_none(trainer: Trainer) -> None:
    for param in trainer.module.parameters():
        param.grad = None


def to_zero(trainer: Trainer) -> None:
    for param in trainer.module.parameters():
        if param.grad is not None:
            param.grad.zero_()


def part(make: Make) -> Iterator[Any]:
    """Drops one unit's and one parameter's gradients, with others, before and after more backwards."""
    trainer = make(1)
    first, second, third = trainer.module.blocks
    for step in range(3):
        trainer.backward(trainer(batch(trainer, step), extra=True).square().mean())
        first.zero_grad()
        second.weight.grad = None
        trainer.module.extra.zero_grad(set_to_none=False)
        trainer.backward(trainer(batch(trainer, 10 + step)).square().mean())
        third.bias.grad = None
        trainer.step()
    yield from trainer.values()


def clipped(make: Make) -> Iterator[Any]:
    trainer = make(1)
    params = [*trainer.module.parameters()]
    for step, foreach in enumerate((None, True, False, None)):
        trainer.backward(trainer(batch(trainer, step), extra=step == 2).square().mean())
        if step == 3:
            norm = utils.get_total_norm([p.grad for p in params if p.grad is not None])
            utils.clip_grads_with_norm_(params, 0.1, norm)
        else:
            norm = utils.clip_grad_norm_(iter(params), 0.1, foreach=foreach)
        yield norm
        yield torch.norm(torch.stack([torch.norm(p.grad, 2) for p in params if p.grad is not None]))
        trainer.step()
    yield from trainer.values()


def scaled(make: Make) -> Iterator[Any]:
    trainer = make(1)
    for step in range(2):
        trainer.backward(trainer(batch(trainer, step), extra=True).square().mean())
        for param in trainer.module.parameters():
            param.grad.mul_(0.5)
            param.grad /= 4
        torch._foreach_div_([param.grad for param in trainer.module.parameters()], 2.0)
        trainer.backward(trainer(batch(trainer, step), extra=True).square().mean())
        trainer.module.extra.weight.grad.data *= torch.tensor(3.0, dtype=torch.float64)
        trainer.step()
    yield from trainer.values()


def sam(make: Make) -> Iterator[Any]:
    """Sharpness-aware minimization: the gradient at perturbed weights updates the weights."""
    trainer = make(1)
    params = [*trainer.module.blocks.parameters()]
    for step in range(3):
        x = batch(trainer, step)
        trainer.backward(trainer(x).square().mean())
        held = [param.grad for param in trainer.module.parameters() if param.grad is not None]
        norm = utils.get_total_norm(held)
        moves = [trainer.grad(param) * (0.05 / norm) for param in params]
        trainer.optimizer.zero_grad()
        _move(trainer, params, moves, 1)
        trainer.backward(trainer(x).square().mean())
        _move(trainer, params, moves, -1)
        trainer.step()
    yield from trainer.values()


def _move(trainer: Trainer, params: list[Any], moves: list[Tensor], sign: int) -> None:
    with torch.no_grad(), GatheredParameters(params, modifier_rank=0):
        for param, move in zip(params, moves, strict=True):
            param.add_(move, alpha=sign)


PROGRAMS = {
    "gan": gan,
    "wgan_gp": wgan_gp,
    "optimizer.zero_grad": dropped(lambda t: t.optimizer.zero_grad()),
    "optimizer zeros": dropped(lambda t: t.optimizer.zero_grad(set_to_none=False)),
    "engine.zero_grad": dropped(lambda t: getattr(t, "engine", t.optimizer).zero_grad()),
    "engine zeros": dropped(
        lambda t: getattr(t, "engine", t.optimizer).zero_grad(set_to_none=False)
    ),
    "module.zero_grad": dropped(lambda t: t.module.zero_grad()),
    "module zeros": dropped(lambda t: t.module.zero_grad(set_to_none=False)),
    "grad = None": dropped(to_none),
    "grad.zero_": dropped(to_zero),
    "part": part,
    "clipped": clipped,
    "scaled": scaled,
    "sam": sam,
}


REFUSED: dict[str, Callable[[nn.Parameter], Any]] = {
    "add": lambda p: p.grad + 1,
    "item": lambda p: p.grad.norm().item(),
    "pow": lambda p: p.grad.norm() ** 2,
    "norm": lambda p: p.grad.norm(1),
    "_foreach_norm": lambda p: utils.clip_grad_norm_(p, 1.0, norm_type=torch.inf, foreach=True),
    "clamp": lambda p: utils.clip_grad_value_(p, 1.0),
    "_foreach_clamp": lambda p: utils.clip_grad_value_(p, 1.0, foreach=True),
    "clone": lambda p: p.grad.clone(),
    "copy_": lambda p: p.grad.copy_(torch.zeros_like(p.grad)),
    "numpy": lambda p: p.grad.numpy(),
    "__bool__": lambda p: bool(p.grad),
    "mul_": lambda p: p.grad.mul_(torch.ones(WIDTH, WIDTH)),
    "__set__": lambda p: setattr(p.grad, "data", torch.zeros(WIDTH, WIDTH).double()),
    "1 gradients": lambda p: utils.clip_grad_norm_(p, 1.0),
}


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(1)
def test_what_needs_values_is_refused_by_name(stage):
    with Zero(1, stage).engine as engine:
        weight = engine.module.blocks[0].weight
        engine.backward(engine(torch.ones(1, WIDTH).double()).mean())
        for what, use in REFUSED.items():
            with pytest.raises(
                UsageError, match=f"(?s){what}.*safe_get_full_grad.*gradient_clipping"
            ):
                use(weight)
        (params,) = (group["params"] for group in engine.optimizer.param_groups)
        with pytest.raises(UsageError, match=r"param groups.*safe_get_full_grad"):
            utils.clip_grad_norm_(params, 1.0)
        assert weight.grad.shape == weight.shape == torch.zeros_like(weight.grad).shape
        assert weight.grad.stride() == (WIDTH, 1) and not weight.grad.is_sparse
        assert "blocks.0.weight" in repr(weight.grad)
        with GatheredParameters(weight):
            weight.grad = torch.ones_like(weight)
        with pytest.raises(UsageError, match=r"was assigned.*safe_set_full_grad"):
            engine.step()


@on_ranks(2)
def test_a_rank_that_drops_alone_is_named():
    engine = Zero(1, 2).engine
    rank = engine.global_rank
    engine.backward(engine(torch.ones(1, WIDTH).double(), extra=True).mean())
    if rank == 1:
        engine.module.extra.zero_grad()
    with pytest.raises(RankDivergence):
        engine.step()
    engine.close("diverged")


def trains_as_plainly(name: str, stage: int, rtol: float, **keys: Any) -> None:
    made: list[Engine] = []

    def make(seed: int) -> Zero:
        zero = Zero(seed, stage, **keys)
        made.append(zero.engine)
        return zero

    torch.manual_seed(0)
    try:
        found = [*PROGRAMS[name](make)]
    finally:
        for engine in reversed(made):
            engine.close()
    for mine, plain in zip(found, PROGRAMS[name](Plain), strict=True):
        torch.testing.assert_close(mine, plain, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(1)
def test_one_rank_trains_as_the_plain_program(stage):
    for name in PROGRAMS:
        trains_as_plainly(name, stage, 0)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_two_ranks_train_as_the_plain_program(stage):
    for name in PROGRAMS:
        trains_as_plainly(name, stage, 1e-12)
