"""What an optimizer of a program keeps, and where: for itself, in containers, in attributes by parameter.

Wherever state is, a run has the numbers of plain PyTorch, and so has a resumed one, or the engine refuses
the class in words.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from loops import CASE, assert_same, data, open_engine, train, weights
from support.covering import FULL
from support.optimizer_runs import compare, offload
from zeroshard_testing import on_ranks

from zeroshard.errors import UnsupportedError
from zeroshard.zero import safe_get_full_optimizer_state


class Kept(torch.optim.Optimizer):
    """SGD with what the subclasses add."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.begin()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.change(p, self.state[p]), alpha=group["lr"])

    def begin(self) -> None:
        pass

    def change(self, p: Any, state: Any) -> Any:
        raise NotImplementedError


class Counted(Kept):
    """Counts in ``state``, by a name, as MADGRAD does."""

    def begin(self) -> None:
        self.state["k"] = self.state.get("k", torch.zeros((), dtype=torch.long))
        self.state["k"].add_(1)

    def change(self, p: Any, state: Any) -> Any:
        return p.grad / int(self.state["k"])


class Aggregated(Kept):
    """A momentum for each of several rates, in a dict and a tuple."""

    def change(self, p: Any, state: Any) -> Any:
        if not state:
            state["buffers"] = {rate: torch.zeros_like(p) for rate in (0.0, 0.9)}
            state["more"] = (0, [torch.zeros_like(p)])
        for rate, buffer in state["buffers"].items():
            buffer.mul_(rate).add_(p.grad)
        count, (last,) = state["more"]
        found = sum(state["buffers"].values()) + last
        last.copy_(p.grad)
        state["more"] = (count + 1, [last])
        return found / (count + 1)


class Queued(Kept):
    """The mean of the last three gradients, in a queue."""

    def change(self, p: Any, state: Any) -> Any:
        queue = state.setdefault("queue", deque(maxlen=3))
        queue.append(p.grad.clone())
        return sum(queue) / len(queue)


class Swapped(Kept):
    """Two tensors that change their names in each step."""

    def change(self, p: Any, state: Any) -> Any:
        if not state:
            state["a"], state["b"] = torch.zeros_like(p), torch.zeros_like(p)
        state["a"], state["b"] = state["b"], state["a"]
        state["a"].add_(p.grad)
        return state["a"] - 0.5 * state["b"]


class Attributed(Kept):
    """Keeps a tensor for each parameter in an attribute, and a window of its own."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)
        self.last: dict[Any, Any] = {}
        self.window: deque[int] = deque(maxlen=2)

    def begin(self) -> None:
        self.window.append(len(self.window) + 1)

    def change(self, p: Any, state: Any) -> Any:
        last, self.last[p] = self.last.get(p, 0), p.grad.clone()
        return (p.grad + last) / sum(self.window)


class Horizon(Kept):
    """Needs an argument of which it keeps something else."""

    def __init__(self, params: Any, total_steps: int, *, lr: float = 0.05) -> None:
        super().__init__(params, lr)
        self.rate = 1 / total_steps

    def change(self, p: Any, state: Any) -> Any:
        state["count"] = state.get("count", 0) + 1
        return p.grad * (1 - self.rate * state["count"])


def with_horizon(params: Any) -> Horizon:
    return Horizon(params, 40)


CLASSES = [Counted, Aggregated, Queued, Swapped, Attributed, with_horizon]
STEPS = 5
PLACES = [(0, ""), (1, ""), (2, ""), (3, ""), (2, "cpu"), (1, "nvme"), (3, "nvme")]


def maker(cls: Any) -> Any:
    return lambda named: cls([p for _, p in named])


@pytest.mark.parametrize("cls", CLASSES)
def test_a_step_has_the_bits_of_plain_pytorch(cls, tmp_path):
    compare(CASE, maker(cls), PLACES, tmp_path, steps=STEPS, world=1, most=0.0)


@on_ranks(2)
def test_a_step_on_two_ranks_is_that_of_plain_pytorch(tmp_path):
    for at, cls in enumerate(CLASSES):
        places = PLACES if FULL else PLACES[at :: len(CLASSES)]
        compare(CASE, maker(cls), places, tmp_path, steps=STEPS, world=2, most=1e-12)


@pytest.mark.parametrize("cls", [Counted, Aggregated, Queued, Swapped])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(cls, tmp_path):
    batches = data(6)
    for at, (saved, loaded) in enumerate([((1, ""), (3, "nvme")), ((3, "nvme"), (0, ""))]):
        folder = str(tmp_path / f"saved{at}")
        with open_engine(
            saved[0], optimizer=cls, **offload(saved[1], tmp_path, saved[0])
        ) as engine:
            train(engine, batches[:2])
            engine.save_checkpoint(folder)
            train(engine, batches[2:])
            wanted = weights(engine)
        with open_engine(
            loaded[0], optimizer=cls, **offload(loaded[1], tmp_path, loaded[0])
        ) as engine:
            engine.load_checkpoint(folder)
            train(engine, batches[2:])
            assert_same(weights(engine), wanted)


@pytest.mark.parametrize(
    ("cls", "name"), [(Aggregated, "buffers@({0.9},)"), (Queued, "queue@([2, 3],)")]
)
def test_tensors_in_containers_are_on_disk_and_can_be_read_by_name(cls, name, tmp_path):
    with open_engine(1, optimizer=cls, **offload("nvme", tmp_path, 1)) as engine:
        train(engine, data(4))
        rows = engine.memory_report().rows
        held = {row.tier: row for row in rows if row.category == "optimizer" and row.measured}
        param = next(engine.module.parameters())
        found = safe_get_full_optimizer_state(param, name)
        assert found is not None
        assert found.shape == param.shape
        shaped = 3 * 4 * sum(p.numel() for p in engine.module.parameters())
        assert held["disk"].measured == held["disk"].planned
        assert held["disk"].measured >= shaped
        assert sum(row.measured for row in held.values()) < 1.1 * held["disk"].measured


class Growing(Kept):
    """A list of tensors that gets longer after the steps of the probe."""

    def change(self, p: Any, state: Any) -> Any:
        count = state["count"] = state.get("count", 0) + 1
        found = state.setdefault("all", [torch.zeros_like(p)])
        if count > 12:
            found.append(p.grad.clone())
        return p.grad


def test_state_that_was_not_planned_on_disk_stays_in_memory_with_a_warning(tmp_path):
    with open_engine(1, optimizer=Growing, **offload("nvme", tmp_path, 1)) as engine:
        train(engine, data(12))
        with pytest.warns(UserWarning, match=r"'all@\(\[1\],\)'.*stays in memory"):
            train(engine, data(1))


class Averages(Kept):
    """A small part of each update comes from the mean of all elements."""

    def change(self, p: Any, state: Any) -> Any:
        return p.grad + 1e-9 * p.grad.mean()


class Clamped(Kept):
    """The norm reaches a parameter only when a state has grown."""

    def change(self, p: Any, state: Any) -> Any:
        curvature = state.setdefault("curvature", torch.zeros_like(p))
        curvature.add_(1e-6 * p.grad.norm())
        return p.grad / curvature.clamp(min=1)


class Late(Kept):
    """Normalizes from the tenth step on."""

    def change(self, p: Any, state: Any) -> Any:
        count = state["count"] = state.get("count", 0) + 1
        return p.grad if count < 10 else p.grad / p.grad.norm()


class Optional(Kept):
    """Normalizes if an attribute says so, which is no default of the groups."""

    def __init__(self, params: Any, lr: float = 0.05, scale: float = 1.0, norm: Any = None) -> None:
        super().__init__(params, lr)
        self.norm = norm

    def change(self, p: Any, state: Any) -> Any:
        return p.grad if self.norm is None else p.grad / self.norm(p.grad)


class Wrapping(torch.optim.Optimizer):
    """Holds another optimizer."""

    def __init__(self, params: Any) -> None:
        self.inner = torch.optim.SGD(params, lr=0.1)
        super().__init__(self.inner.param_groups, {})


class Worded(Kept):
    """Keeps a word."""

    def change(self, p: Any, state: Any) -> Any:
        state["mode"] = "fast"
        return p.grad


class Holed(Kept):
    """Keeps nothing in a list, which a file would not give back."""

    def change(self, p: Any, state: Any) -> Any:
        state["slots"] = [None, p.grad.clone()]
        return p.grad


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Averages, "split in two"),
        (Clamped, "split in two"),
        (Late, "split in two"),
        (lambda params: Optional(params, norm=torch.linalg.vector_norm), "split in two"),
        (lambda params: Optional(params, norm=lambda g: g.norm()), "split in two"),
        (Wrapping, "wraps another optimizer, SGD.*register_step_post_hook"),
        (Worded, "'mode', a str"),
        (Holed, r"'slots@\(\[0\],\)', a NoneType"),
    ],
)
def test_what_cannot_be_cut_or_saved_is_refused_before_the_first_step(make, words):
    with pytest.raises(UnsupportedError, match=words):
        open_engine(1, optimizer=make)
