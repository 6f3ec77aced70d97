"""What cannot run on a mesh is refused with the same words on every rank, before ranks meet.

Sources that disagree and sizes that do not multiply are in ``tests/unit/mesh_cases.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from support import pipeline_models as models
from support.tensor_networks import network
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from zeroshard_testing import on_ranks

from zeroshard import Engine, initialize
from zeroshard.core.mesh import Mesh
from zeroshard.errors import ZeroShardError
from zeroshard.parallel import pipeline, tensor_parallel

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}
PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
Call = Callable[[], object]


def opening(model: nn.Module | None = None, *, keys: Any = None, **arguments: Any) -> Call:
    """``initialize`` with a plain layer, or another model."""
    return lambda: initialize(
        model=model or nn.Linear(2, 2), config={**CONFIG, **(keys or {})}, **arguments
    )


def planned(plan: Any, *, tensor: int = 2, inner: int = 32, **arguments: Any) -> Call:
    """``initialize(plan=...)`` of a small network with blocks of ``inner`` features."""
    return opening(
        network(inner, torch.float32), keys={"parallel": {"tensor": tensor}}, plan=plan, **arguments
    )


def staged(
    *, count: int = 4, ranks: int = 2, pair: dict[str, int] | None = None, **cut: Any
) -> Call:
    """An engine over a pipeline of ``ranks``, and what is cut otherwise."""

    def call() -> None:
        keys = {"split": ["layers.3"], "order": models.ORDER, "loss_fn": models.loss_fn, **cut}
        config = models.config(1, parallel={"pipeline": ranks, **(pair or {})})
        config["gradient_accumulation_steps"] = count
        Engine(pipeline(models.Decoder(), **keys), config=config, optimizer=models.adamw).close()

    return call


def over_data_ranks() -> nn.Module:
    """A model with a DTensor that is cut over ranks with different samples."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("data",))
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.data, mesh, [Shard(0)]))
    return layer


def cases() -> list[tuple[Call, str]]:
    """Calls, and how their errors begin."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    shuffled = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    cut = tensor_parallel(network(32, torch.float32), grid, PLAN)
    return [
        (opening(mesh=shuffled), "UsageError: mesh= has the ranks"),
        (opening(mesh=Mesh(data_shard=2)), "ConfigError: 1 problem"),
        (opening(mesh_param=(3, 1)), "ConfigError: 1 problem"),
        (opening(mesh_param="four"), "UsageError: mesh_param is 'four'"),
        (opening(keys={"parallel": {"tensor": 8}}), "ConfigError: 1 problem"),
        (opening(keys={"parallel": {"sequence": 3}}), "ConfigError: 1 problem"),
        (opening(keys={"sequence_parallel_size": 8}), "ConfigError: 1 problem"),
        (opening(keys={"parallel": {"expert": 2}}), "UsageError: the mesh has 2 expert ranks"),
        (
            opening(keys={"parallel": {"tensor": 2}}),
            "UsageError: the mesh is data_shard 2 x tensor 2",
        ),
        (opening(keys={"parallel": {"pipeline": 2}}), "UsageError: the mesh is pipeline 2"),
        (opening(over_data_ranks()), "UsageError: parameter 'weight' is a DTensor that is cut"),
        (opening(cut, keys={"parallel": {"tensor": 4}}), "ConfigError: 1 problem"),
        (
            opening(cut, keys={"parallel": {"tensor": 2}}, plan=PLAN),
            "UsageError: initialize(plan=...)",
        ),
        (
            planned({"blocks.*.up": "columns"}),
            "UsageError: plan: 'blocks.*.up' has the unknown style",
        ),
        (planned({"layers.*.up": "colwise"}), "UsageError: plan: 'layers.*.up' matches no module"),
        (planned({}), "UsageError: plan is {}"),
        (planned("columns"), "UsageError: plan is 'columns'"),
        (planned({"blocks.*.norm": "colwise"}), "UsageError: plan: 'blocks.0.norm' is a LayerNorm"),
        (planned(PLAN, tensor=3), "ConfigError: 1 problem"),
        (staged(ranks=3), "ConfigError: 1 problem"),
        (staged(split=["layers.2", "layers.4"]), "UsageError: "),
        (staged(split="layers.3"), "UsageError: split='layers.3' is one name"),
        (staged(split=["layers.9"]), "UsageError: "),
        (staged(order=["embed"]), "UsageError: "),
        (staged(count=1), "UsageError: zeroshard.parallel.pipeline: the schedule 1F1B needs"),
        (
            staged(split=["layers.1", "layers.2", "layers.3"]),
            "UsageError: zeroshard.parallel.pipeline",
        ),
        (
            staged(count=5, schedule="Interleaved1F1B"),
            "UsageError: zeroshard.parallel.pipeline: the",
        ),
        (staged(schedule="ZBVZeroBubble"), "UsageError: pipeline(schedule='ZBVZeroBubble') is not"),
        (staged(schedule="1f1b"), "UsageError: pipeline(schedule='1f1b'): choose one of"),
        (staged(gather="always"), "UsageError: pipeline(gather='always'): choose one of"),
        (staged(pair={"tensor": 2}), "UsageError: the mesh is pipeline 2 x tensor 2"),
    ]


@on_ranks(4)
def test_what_a_mesh_cannot_run_is_refused_alike_on_all_ranks():
    texts = []
    for at, (call, expected) in enumerate(cases()):
        try:
            call()
            texts.append(f"{at}: nothing failed")
        except ZeroShardError as error:
            texts.append(f"{at} {type(error).__name__}: {error}")
        assert texts[-1].startswith(f"{at} {expected}"), texts[-1]
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, texts)
    assert everyone == [texts] * 4
