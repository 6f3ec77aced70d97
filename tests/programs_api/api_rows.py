"""The table of programs: what they cover, what is expected, and how one of them is run.

A row is a small program. It is written once, and runs with plain PyTorch's objects and with those of
``zeroshard.initialize``. Its name is that of the function.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from kit import config
from torch import Tensor, nn
from torch.nn import functional as F

import zeroshard
from zeroshard.errors import ZeroShardError

WIDTH, ROWS_OF_BATCH = 4, 2
STAGES = (0, 1, 2, 3)


class Net(nn.Module):
    """Three layers and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x))))) * self.scale


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-3)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@dataclass
class Program:
    """The objects of one run. ``model`` is the engine, or the module of plain PyTorch."""

    model: Any
    optimizer: Any
    rank: int | None  # None: plain PyTorch, on the batches of all ranks
    world: int
    began: list[tuple[str, nn.Parameter]]

    @property
    def module(self) -> Any:
        """The module below the engine."""
        return self.model if self.rank is None else self.model.module

    def batch(self, at: int = 0) -> tuple[Tensor, Tensor]:
        """Inputs and targets ``[rows, WIDTH]``; different on each rank."""
        generator = torch.Generator().manual_seed(at)
        rows = ROWS_OF_BATCH * self.world
        x, y = torch.randn(2, rows, WIDTH, generator=generator, dtype=torch.float64)
        own = slice(None)
        if self.rank is not None:
            own = slice(self.rank * ROWS_OF_BATCH, (self.rank + 1) * ROWS_OF_BATCH)
        return x[own], y[own]

    def loss(self, at: int = 0) -> Tensor:
        x, y = self.batch(at)
        return F.mse_loss(self.model(x), y)

    def backward(self, at: int = 0) -> None:
        self.loss(at).backward()

    def step(self) -> None:
        if self.rank is not None:
            self.model.step()
        else:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def train(self, steps: int = 1, first: int = 0) -> None:
        for at in range(first, first + steps):
            self.backward(at)
            self.step()

    def mean(self, value: Tensor) -> Tensor:
        """Over the ranks."""
        value = value.detach().clone()
        if self.rank is not None and self.world > 1:
            dist.all_reduce(value)
            value /= self.world
        return value

    def full(self) -> dict[str, Tensor]:
        """Copies of the parameters that the model had at the beginning."""
        named = self.began if self.rank is None else self.model.iter_full_params()
        return {name: value.detach().clone() for name, value in named}


@dataclass(frozen=True)
class Row:
    program: Callable[[Program], Any]
    covers: tuple[str, ...]
    raises: str | None  # a regular expression
    at: tuple[int, ...]  # the stages at which it raises
    on: tuple[int, ...]  # the numbers of ranks on which it raises
    make: Callable[[], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    close: float  # largest difference on several ranks

    @property
    def name(self) -> str:
        return self.program.__name__


ROWS: dict[str, Row] = {}
NOT_APPLICABLE: dict[str, str] = {}
"""Public names of torch that no program can test here, and why."""


def row(
    covers: str = "",
    *,
    raises: str | None = None,
    at: tuple[int, ...] = STAGES,
    on: tuple[int, ...] = (1, 2),
    make: Callable[[], nn.Module] = Net,
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    close: float = 1e-12,
) -> Callable[[Callable[[Program], Any]], Callable[[Program], Any]]:
    """Add a program that covers the names in ``covers``.

    It gives what it gives in plain PyTorch: what it returns, and the parameters at its end. With
    ``raises`` it ends with such an error at the stages ``at`` on ``on`` ranks.
    """

    def add(program: Callable[[Program], Any]) -> Callable[[Program], Any]:
        assert program.__name__ not in ROWS, program.__name__
        added = Row(program, tuple(covers.split()), raises, at, on, make, optimizer, close)
        ROWS[program.__name__] = added
        return program

    return add


def cases(ranks: int, part: str) -> list[tuple[str, int]]:
    """Rows of a module, and stages. In ``make test`` a row runs once: a third of all on one rank.

    Stages take turns on one rank; on two ranks stage 3 has every other row. With ``ZEROSHARD_TEST_ALL=1``
    all rows run on both, at all stages.
    """
    chosen, run_all = [], os.environ.get("ZEROSHARD_TEST_ALL") == "1"
    for at, (name, row) in enumerate(ROWS.items()):
        if row.program.__module__ != part or (not run_all and (at % 3 == 0) != (ranks == 1)):
            continue
        turn = at // 3
        stage = turn % 4 if ranks == 1 else 3 if at % 3 == 1 else turn % 3
        chosen += [(name, each) for each in (STAGES if run_all else (stage,))]
    return chosen


def named(program: Callable[[Program], Any], name: str) -> Callable[[Program], Any]:
    """For rows that a loop makes."""
    program.__name__ = name
    return program


# ---------------------------------------------------------------------- running a row


_of_plain: dict[tuple[str, int], tuple[dict[str, Any], Exception | None]] = {}


def judge(name: str, stage: int) -> str:
    """Run a row on this rank: what is not as expected, or nothing. Collective."""
    return _judge(ROWS[name], stage)


APART = ("compiles", "func_", "functional")
"""In names of rows that leave a model to Dynamo or torch.func, which fail on many others themselves."""


def sequences(seed: int, count: int, stage: int) -> list[list[str]]:
    """Names of rows that may follow each other in one program: of the usual model, without an error."""
    names = [
        name
        for name, row in ROWS.items()
        if row.make is Net and row.optimizer is adamw and row.close <= 1e-12
        if row.raises is None or stage not in row.at
        if not any(part in name for part in APART)
    ]
    draw = random.Random(seed)
    return [draw.choices(names, k=draw.choice([2, 3, 4])) for _ in range(count)]


def judge_sequence(names: list[str], stage: int) -> str:
    """Run rows one after the other, and a step: where they are not PyTorch's, or nothing. Collective.

    A row may refuse what another one has left, and torch too: then the rest is not compared.
    """

    def program(p: Program) -> Any:
        returned = [ROWS[name].program(p) for name in names]
        p.train(1, first=5)
        return returned

    row = Row(named(program, " ".join(names)), (), None, (), (), Net, adamw, 1e-11)
    found = _judge(row, stage)
    return (
        ""
        if re.match(r"raised (\w*Usage|Unsupported|Sharded)|plain PyTorch raised", found)
        else found
    )


def _judge(row: Row, stage: int) -> str:
    name = row.name
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if (name, world) not in _of_plain:
        _of_plain[name, world] = _outcome(row, world=world)
    plain, plain_error = _of_plain[name, world]
    ours, error = _outcome(row, world=world, rank=rank, stage=stage)
    if row.raises is not None and stage in row.at and world in row.on:
        if error is None:
            return "no error" + (", other values" if _difference(ours, plain, 1e-12) else "")
        of_loading = str(error).startswith(
            "Error(s) in loading state_dict"
        )  # torch's list of errors
        ours_or_torchs = isinstance(error, ZeroShardError) or type(error) is type(plain_error)
        if not (ours_or_torchs or of_loading):
            return f"raised {_short(error)}, which is no error of zeroshard"
        return "" if re.search(row.raises, str(error)) else f"raised {_short(error)}"
    if plain_error is not None:
        return f"plain PyTorch raised {_short(plain_error)}"
    if error is not None:
        return f"raised {_short(error)}"
    return _difference(ours, plain, 0.0 if world == 1 else row.close)


def _short(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _outcome(
    row: Row, *, world: int, rank: int | None = None, stage: int = 0
) -> tuple[dict[str, Any], Exception | None]:
    torch.manual_seed(0)
    model = row.make().double()
    program = Program(model, None, rank, world, list(model.named_parameters()))
    try:
        optimizer = row.optimizer([p for p in model.parameters() if p.requires_grad])
        program.optimizer = optimizer
        if rank is not None:
            keys = config(stage, train_micro_batch_size_per_gpu=ROWS_OF_BATCH, log_level="error")
            program.model, program.optimizer, *_ = zeroshard.initialize(
                model=model, optimizer=optimizer, config=keys
            )
        torch.manual_seed(1)
        returned = row.program(program)
        return {"returned": returned, "parameters": program.full()}, None
    except Exception as error:
        error.__traceback__ = None
        return {}, error
    finally:
        if isinstance(program.model, zeroshard.Engine):
            program.model.close()


def _difference(ours: Any, plain: Any, close: float) -> str:
    """Where two outcomes differ, or nothing."""
    for path, a, b in _pairs(ours, plain, ""):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if a.shape != b.shape or a.dtype != b.dtype:
                return f"{path}: {tuple(a.shape)} {a.dtype}, not {tuple(b.shape)} {b.dtype}"
            if not torch.equal(a, b):
                size = (a.double() - b.double()).abs().max().item()
                if not size <= close:
                    return f"{path}: differs by {size:.1e}"
        elif isinstance(a, float) and isinstance(b, float):
            if a != b and not abs(a - b) <= close:
                return f"{path}: differs by {abs(a - b):.1e}"
        elif a != b:
            return f"{path}: {a!r}, not {b!r}"
    return ""


def _pairs(a: Any, b: Any, path: str) -> Any:
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        for key in b:
            yield from _pairs(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        for at, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _pairs(x, y, f"{path}[{at}]")
    elif isinstance(a, Tensor) and isinstance(b, Tensor):
        yield path, a.detach(), b.detach()
    else:
        yield path, a, b
