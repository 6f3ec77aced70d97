"""What sharding adds to each layer of a model: kernels, collectives and allocations of a steady step.

Operators are counted below autograd. The count of six layers minus that of two, divided by four, is the
count of one layer: what a step does once drops out. The plain loop's count is subtracted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zeroshard import Engine

FEW, MANY = 2, 6
WIDTH, RANKS = 16, 8


class Layer(nn.Module):
    """Ten small parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        for linear in self.linears:
            y = linear(y)
        return x + y


class Counts(TorchDispatchMode):
    """``kernels``: operators that read or write memory. ``allocations``: new or resized storages."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.allocations = 0

    def __enter__(self) -> Counts:
        resize = torch.UntypedStorage.resize_

        def counted(storage: Any, nbytes: int) -> Any:
            self.allocations += nbytes > 0
            return resize(storage, nbytes)

        self._patch = mock.patch.object(torch.UntypedStorage, "resize_", counted)
        self._patch.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage_of(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        made = {_storage_of(t) for t in tree_leaves(result) if isinstance(t, Tensor)} - given
        self.allocations += len(made)
        name = func.name()
        if not (func.is_view or "empty" in name or name.startswith("c10d::")):
            self.kernels[name] += 1
        return result


def _storage_of(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


@pytest.fixture(autouse=True)
def fake_ranks() -> Iterator[None]:
    """A fake process group. Its collectives are counted by the engine's recorder."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()


def counted(
    forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Any], end: Callable[[], Any]
) -> Counts:
    """Forward and backward of one step, after three steps without counting."""
    x = torch.ones(2, WIDTH, dtype=torch.bfloat16)
    for _ in range(3):
        backward(forward(x).float().square().mean())
        end()
    counts = Counts()
    with counts:
        loss = forward(x).float().square().mean()
        backward(loss)
    end()
    return counts


def plain(depth: int) -> Counts:
    """The plain loop."""
    model = nn.Sequential(*(Layer() for _ in range(depth))).bfloat16()
    return counted(model, torch.autograd.backward, model.zero_grad)


def sharded(depth: int, stage: int) -> Counts:
    """An engine. Its collectives count as kernels."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "units": ["Layer"],
        "unit_min_numel": 0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    model = nn.Sequential(*(Layer() for _ in range(depth)))
    with Engine(model, config=config) as engine:
        recorder = engine._watch.recorder

        def forward(x: Tensor) -> Tensor:
            recorder.reset_traffic()
            y: Tensor = engine(x)
            return y

        def end() -> None:
            moved.clear()
            moved.update(recorder.calls)
            engine.step()

        moved: Counter[str] = Counter()
        counts = counted(forward, engine.backward, end)
        counts.kernels.update(moved)
    return counts


def per_layer(count: Callable[[int], Counts]) -> tuple[dict[str, float], float]:
    """Kernels by name, and allocations, of one layer."""
    few, many = count(FEW), count(MANY)
    names = few.kernels.keys() | many.kernels.keys()
    layers = MANY - FEW
    kernels = {name: (many.kernels[name] - few.kernels[name]) / layers for name in names}
    return kernels, (many.allocations - few.allocations) / layers


@pytest.mark.parametrize(
    ("stage", "kernels", "allocations"), [(0, 2, 1), (1, 2, 1), (2, 2, 2), (3, 6, 4)]
)
def test_forward_and_backward_of_a_layer_need_few_kernels_and_allocations(
    stage, kernels, allocations
):
    base, base_allocations = per_layer(plain)
    found, own_allocations = per_layer(lambda depth: sharded(depth, stage))
    own = {name: count - base.get(name, 0) for name, count in found.items()}
    own = {name: count for name, count in own.items() if count}
    assert sum(own.values()) <= kernels, own
    assert own_allocations - base_allocations <= allocations
