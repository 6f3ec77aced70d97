"""One optimizer step: what an optimizer counts advances once, and hooks run once, wherever state is."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import (
    CASE,
    STAGES,
    adamw,
    assert_close,
    assert_same,
    data,
    open_engine,
    own_data,
    train,
    weights,
)
from support.covering import some_stages
from support.optimizer_runs import offload
from support.parity import cast_batch, cast_parameters, engine_run, make_batches, reference_run
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from zeroshard_testing import on_ranks

from zeroshard.errors import UnsupportedError, UsageError
from zeroshard.zero import safe_get_full_fp32_param


class Warm(torch.optim.AdamW):
    """Counts its steps, and sets the learning rate from the count. Its ``step`` is not AdamW's."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-2, eps=1e-3, fused=True)
        self.count = 0
        self.seen: list[int] = []

    def step(self, closure: Any = None) -> None:
        self.count += 1
        self.seen.append(self.count)
        for group in self.param_groups:
            group["lr"] = 1e-3 * min(self.count, len(self.seen))
        super().step()


class Averaged(torch.optim.Optimizer):
    """Schedule-free SGD: counts in the group, with an option that the first step makes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "beta": 0.9, "train_mode": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["train_mode"]
            k = group["k"] = group.get("k", 0) + 1
            total = group["total"] = group.get("total", torch.zeros(())) + k**2
            share, beta, lr = float(k**2 / total), group["beta"], group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, share)
                p.add_(p.grad, alpha=-lr * (1 - beta * (1 - share)))
                z.sub_(p.grad, alpha=lr)

    @torch.no_grad()
    def eval(self) -> None:
        self._move(1 - 1 / 0.9, training=False)

    @torch.no_grad()
    def train(self) -> None:
        self._move(1 - 0.9, training=True)

    def _move(self, share: float, *, training: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not training:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.data.lerp_(self.state[p]["z"], share)
                group["train_mode"] = training


class Logged(torch.optim.Optimizer):
    """Counts in a dict with a dict of tensors inside, and in a deque."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.log: dict[str, Any] = {"steps": 0, "of": {}}
        self.recent: deque[int] = deque(maxlen=2)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.log["steps"] += 1
        self.recent.append(self.log["steps"])
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    count = self.log["of"][id(p)] = self.log["of"].get(id(p), 0) + 1
                    p.sub_(p.grad, alpha=group["lr"] / (count + sum(self.recent)))


def hooked(params: Any) -> torch.optim.Optimizer:
    """Plain AdamW with a Lookahead of two steps in a hook, and counters."""
    optimizer = torch.optim.AdamW(params, lr=1e-2, eps=1e-3, fused=True)
    slow: dict[Tensor, Tensor] = {}
    steps: list[int] = []

    def look(inner: Any, args: Any, kwargs: Any) -> None:
        assert inner is optimizer
        steps.append(len(steps))
        with torch.no_grad():
            for p in [p for group in inner.param_groups for p in group["params"]]:
                here = slow.setdefault(p, p.clone())
                if len(steps) % 2 == 0:
                    p.copy_(here.lerp_(p, 0.5))

    def warm(inner: Any, args: Any, kwargs: Any) -> None:
        inner.param_groups[0]["lr"] *= 1.1

    optimizer.register_step_post_hook(look)
    optimizer.register_step_pre_hook(warm)
    return optimizer


STEPS = 4
PLACES = [
    (0, ""),
    (1, ""),
    (2, ""),
    (3, ""),
    (1, "cpu"),
    (1, "nvme"),
    (2, "nvme"),
    (3, "cpu"),
    (3, "nvme"),
]


def averaged(params: Any) -> Averaged:
    return Averaged(params)


def masters(make: Any, stage: int, config: Any) -> dict[str, Tensor]:
    with open_engine(stage, optimizer=make, bf16={"enabled": True}, **config) as engine:
        train(engine, own_data(engine, STEPS))
        found = {}
        for name, param in engine.module.named_parameters():
            value = safe_get_full_fp32_param(param)
            assert value is not None
            found[name] = value
        return found


def evaluated(world: int) -> list[dict[str, Tensor]]:
    """The averaged weights of plain PyTorch after two steps and at the end."""
    model = cast_parameters(CASE.build(), torch.float64)
    optimizer = Averaged(model.parameters())
    found = []
    for step, micros in enumerate(make_batches(CASE, steps=STEPS, world=world)):
        for batch in micros[0]:
            (CASE.loss(model, cast_batch(batch, torch.float64)) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (1, STEPS - 1):
            optimizer.eval()
            found.append({name: p.detach().clone() for name, p in model.named_parameters()})
            optimizer.train()
    return found


def over(make: Any) -> Any:
    return lambda named: make([param for _, param in named])


def compare(make: Any, world: int, folder: Path, places: Any, *, precision: Any = "fp64") -> None:
    """As in plain PyTorch at each stage and place of ``places``."""
    batches = make_batches(CASE, steps=STEPS, world=world)
    wanted = reference_run(CASE, over(make), batches, precision=precision)
    for stage, where in places:
        if make is hooked and where == "nvme":
            continue  # its hook reads parameters
        config = offload(where, folder, stage)
        run = engine_run(CASE, over(make), batches, stage=stage, precision=precision, config=config)
        for name, value in wanted.params.items():
            error = (run.params[name] - value).abs().max().item()
            most = 1e-12 if precision == "fp64" and world > 1 else 0.0
            assert error <= most, (stage, where, name, error)


@pytest.mark.parametrize("make", [Warm, averaged, Logged, hooked])
def test_a_step_counts_once_on_one_rank(make, tmp_path):
    compare(make, 1, tmp_path, PLACES)


@on_ranks(2)
def test_a_step_counts_once_on_two_ranks(tmp_path):
    for make in (Warm, averaged, Logged, hooked):
        compare(make, 2, tmp_path, PLACES[1:])


@on_ranks(2)
def test_masters_of_16_bit_parameters_are_stepped_once(tmp_path):
    for make in (Warm, averaged, hooked):
        runs = [
            masters(make, stage, offload(where, tmp_path, stage))
            for stage, where in [(0, ""), (1, ""), (3, ""), (3, "cpu")]
        ]
        for run in runs[1:]:
            assert_same(run, runs[0])


@on_ranks(2)
def test_step_hooks_of_the_program_run_once_also_beside_state_on_disk(tmp_path):
    calls: list[tuple[str, type]] = []
    handle = register_optimizer_step_pre_hook(lambda inner, *_: calls.append(("all", type(inner))))
    try:
        with (
            open_engine(3, optimizer=adamw, **offload("nvme", tmp_path, 3)) as engine,
        ):
            optimizer = engine.optimizer
            train(engine, own_data(engine, 1))  # a fused kernel is chosen without hooks too
            own = optimizer.register_step_pre_hook(
                lambda inner, *_: calls.append(("pre", type(inner)))
            )
            optimizer.register_step_post_hook(lambda inner, *_: calls.append(("post", type(inner))))
            train(engine, own_data(engine, 2))
            own.remove()
            train(engine, own_data(engine, 1))
    finally:
        handle.remove()
    names = [name for name, _ in calls]
    assert names == ["all", "all", "pre", "post", "all", "pre", "post", "all", "post"]
    assert {kind for _, kind in calls} == {torch.optim.AdamW}


@on_ranks(2)
def test_eval_of_a_schedule_free_optimizer_gives_all_ranks_the_averaged_weights(tmp_path):
    batches = make_batches(CASE, steps=STEPS, world=2)
    wanted = evaluated(2)
    for stage, where in PLACES:
        model = cast_parameters(CASE.build(), torch.float64)
        config = offload(where, tmp_path, stage)
        with open_engine(stage, model=model, optimizer=averaged, **config) as engine:
            for step, micros in enumerate(batches):
                loss = CASE.loss(engine, cast_batch(micros[0][engine.dp_rank], torch.float64))
                engine.backward(loss)
                engine.step()
                if step == 1:
                    engine.optimizer.eval()
                    middle = weights(engine)
                    engine.optimizer.train()
            engine.optimizer.eval()
            for run, plain in zip((middle, weights(engine)), wanted, strict=True):
                assert_close(run, plain, rtol=1e-12)


def test_a_resumed_run_continues_the_options_that_step_made(tmp_path):
    batches = data(STEPS)
    for at, (stage, where) in enumerate([(0, ""), (2, "cpu"), (3, "nvme")]):
        config = offload(where, tmp_path, stage)
        folder = str(tmp_path / f"saved{at}")
        with open_engine(stage, optimizer=averaged, **config) as engine:
            train(engine, batches[:2])
            engine.save_checkpoint(folder)
            train(engine, batches[2:])
            wanted, group = weights(engine), dict(engine.optimizer.param_groups[0], params=None)
        with open_engine(stage, optimizer=averaged, **config) as engine:
            engine.load_checkpoint(folder)
            train(engine, batches[2:])
            assert_same(weights(engine), wanted)
            assert dict(engine.optimizer.param_groups[0], params=None) == group


@on_ranks(2)
def test_a_write_to_a_piece_of_a_master_is_refused_and_a_read_is_not():
    for stage in some_stages(STAGES):
        with open_engine(stage) as engine:
            train(engine, own_data(engine, 1))
            piece = next(p for group in engine.optimizer.param_groups for p in group["params"])
            before = piece.clone()
            for write in (
                lambda p: p.mul_(2),
                lambda p: p.data.copy_(p),
                lambda p: p.detach().view(-1).zero_(),
                lambda p: torch._foreach_add_([p], 1.0),
                lambda p: torch.add(p, 1, out=p),
                lambda p: setattr(p, "data", p * 2),
                lambda p: p.data.__setitem__(0, 1.0),
                lambda p: setattr(p, "grad", p * 2),
                nn.init.zeros_,
            ):
                with torch.no_grad(), pytest.raises(UsageError, match="register_step_post_hook"):
                    write(piece)
            torch.empty_like(before).copy_(piece)
            assert torch.equal(piece * 1, before)
            assert float(piece.norm()) > 0


def test_a_patched_step_is_called_once_and_no_kernel_replaces_it():
    with open_engine(1) as engine:
        inner = engine.optimizer
        calls: list[int] = []
        original = inner.step

        def step():
            calls.append(1)
            original()

        inner.step = step
        train(engine, own_data(engine, 3))
        del inner.step
        assert len(calls) == 3


class Summed(torch.optim.SGD):
    """Element-wise in its numbers, but the group's option depends on all gradients."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0.0) + sum(
                float(p.grad.sum()) for p in group["params"]
            )
        super().step()


class Counting(torch.optim.SGD):
    """Advances its count once per parameter."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["n"] = group.get("n", 0) + len(group["params"])
            group["lr"] = 0.1 / group["n"]
        super().step()


@pytest.mark.parametrize(
    ("cls", "words"),
    [(Summed, "computes 'seen' from many"), (Counting, "two parts of a matrix in one")],
)
def test_what_an_optimizer_computes_from_all_parameters_is_refused(cls, words):
    with pytest.raises(UnsupportedError, match=words):
        open_engine(1, optimizer=lambda params: cls(params, lr=0.1))
