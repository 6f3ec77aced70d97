"""One simulated rank of a mesh holds, sends and receives what arithmetic says."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from support import tensor_models
from torch import Tensor, nn

from zeroshard.comm.simulation import lone_rank, unmatched
from zeroshard.core.mesh import Mesh
from zeroshard.deepspeed.pipeline_layers import LayerSpec, TiedLayerSpec
from zeroshard.deepspeed.pipeline_module import PipelineModule
from zeroshard.errors import UsageError
from zeroshard.parallel import pipeline, tensor_parallel
from zeroshard.parallel.tensor_plan import neighbours
from zeroshard.planner import Simulation, simulate
from zeroshard.zero import Init

WIDTH, INNER, WORDS, LAYERS, LENGTH, BATCH, COUNT = 128, 512, 256, 4, 16, 2, 4
PLAN = {
    "0": "vocab",
    "*.up": "colwise",
    "*.down": "rowwise",
    f"{LAYERS + 2}": "colwise_gather",
}
IDS = torch.empty(BATCH, LENGTH, dtype=torch.long, device="meta")


class Layer(nn.Module):
    """Nothing in it is padded: all sizes are multiples of 64 times the shards."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return y


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


def build(
    mesh: Mesh, schedule: str = "1F1B", per_rank: int = 1, device: str = "meta", **cut: Any
) -> nn.Module:
    with torch.device(device):
        ends = nn.Embedding(WORDS, WIDTH), nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        model = nn.Sequential(ends[0], *(Layer() for _ in range(LAYERS)), *ends[1:])
    if mesh.tensor > 1:
        tensor_parallel(model, neighbours(mesh.tensor), PLAN)
    if mesh.pipeline == 1:
        return model
    stages = mesh.pipeline * per_rank
    split = [str(1 + LAYERS // stages * at) for at in range(1, stages)]
    return pipeline(model, split=split, loss_fn=loss_of, schedule=schedule, **cut)


def settings(stage: int, count: int = COUNT) -> dict:
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": count,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "units": ["Layer"],
        "zero_optimization": {"stage": stage},
    }


@cache
def simulated(
    mesh: Mesh, stage: int, rank: int, schedule: str = "1F1B", per_rank: int = 1
) -> Simulation:
    return simulate(
        lambda: build(mesh, schedule, per_rank), settings(stage), (IDS, IDS),
        mesh=mesh, rank=rank, loss_fn=loss_of,
    )  # fmt: skip


def numels(mesh: Mesh, at: int) -> list[int]:
    """Elements of each parameter of one pipeline stage on one tensor rank, by arithmetic."""
    table = WORDS * WIDTH // mesh.tensor
    layer = [WIDTH, WIDTH * INNER // mesh.tensor, WIDTH * INNER // mesh.tensor]
    layers = layer * (LAYERS // mesh.pipeline)
    first, last = at == 0, at == mesh.pipeline - 1
    return [*([table] if first else []), *layers, *([WIDTH, table] if last else [])]


CUBE, LINE = Mesh(pipeline=4, data_shard=2, tensor=2), Mesh(pipeline=4, tensor=2)


@pytest.mark.parametrize(
    ("mesh", "stage", "at"),
    [*itertools.product([CUBE], (3, 1), (0, 1, 3)), (LINE, 1, 0)],
    ids=str,
)
def test_bytes_are_those_of_the_formula(mesh, stage, at):
    rank = mesh.rank_at(
        {"pipeline": at, "data_shard": 0, "tensor": 1, "data_replicate": 0, "sequence": 0}
    )
    found, numel = simulated(mesh, stage, rank), sum(numels(mesh, at))
    assert found.params_numel == numel
    by_stage = [mesh.data_shard if stage >= level else 1 for level in (3, 2, 1)]
    # bf16 parameters; the gradients of several micro-batches are added in fp32; fp32 masters
    assert found.nbytes("parameters") == 2 * numel // by_stage[0]
    assert found.nbytes("gradients") == 4 * numel // by_stage[1]
    assert found.nbytes("master") == 4 * numel // by_stage[2]
    moments = found.nbytes("optimizer") - 8 * numel // by_stage[2]
    assert (
        0 < moments <= 4 * len(numels(mesh, at))
    )  # a step count for each parameter that it updates
    assert all(row.planned in (None, row.measured) for row in found.memory)


@pytest.mark.parametrize("at", [0, 1, 3], ids=["first", "middle", "last"])
def test_traffic_of_each_group_is_that_of_the_formula(at):
    rank = CUBE.group(0, {"pipeline"})[at]
    numel = sum(numels(CUBE, at))
    sharded, resident = simulated(CUBE, 3, rank), simulated(CUBE, 1, rank)
    assert sharded.moved_numel("shards", "reduce_scatter") == COUNT * numel
    assert COUNT * numel < sharded.moved_numel("shards", "all_gather") <= 2 * COUNT * numel
    assert resident.moved_numel("shards", "reduce_scatter") == numel
    assert resident.moved_numel("shards", "all_gather") == numel
    # Of each layer one sum in forward and one in backward, for each micro-batch.
    tokens = BATCH * LENGTH * COUNT
    sums = (
        2 * (LAYERS // CUBE.pipeline) + (at == 0) + (at == 3)
    )  # the table's rows, the head's input
    assert sharded.moved_numel("tensor", "all_reduce") == sums * tokens * WIDTH
    gathered = sharded.moved_numel("tensor", "all_gather")
    assert gathered == (tokens * WORDS if at == 3 else 0)


@pytest.mark.parametrize(
    ("schedule", "ranks", "per_rank"), [("1F1B", 4, 1), ("Interleaved1F1B", 2, 2)]
)
def test_every_message_has_its_partner(schedule, ranks, per_rank):
    mesh = Mesh(pipeline=ranks)
    found = {rank: simulated(mesh, 1, rank, schedule, per_rank).messages for rank in range(ranks)}
    borders = ranks * per_rank - 1
    shapes, tensors = borders, 2 * borders * COUNT
    assert sum(len(messages) for messages in found.values()) == 2 * (shapes + tensors)
    assert unmatched(found) == []
    found[1] = found[1][:-1]
    assert len(unmatched(found)) == 1


def as_head(table: nn.Embedding, x: Tensor) -> Tensor:
    return x @ table.weight.T


def of_layers() -> nn.Module:
    """The rank builds its own layers only, and the table of words is tied over both stages."""
    table = ("words", nn.Embedding, WORDS, WIDTH)
    specs = [
        TiedLayerSpec(*table), *(LayerSpec(Layer) for _ in range(LAYERS)), lambda x: x * 2,
        TiedLayerSpec(*table, forward_fn=as_head),
    ]  # fmt: skip
    return PipelineModule(specs, num_stages=2, loss_fn=loss_of, partition_method="uniform")


def test_a_pipeline_module_is_simulated_although_a_rank_has_its_own_layers_only():
    mesh = Mesh(pipeline=2, data_shard=2)
    ranks = mesh.group(0, {"pipeline"})
    ids = IDS, IDS
    found = [simulate(of_layers, settings(1), ids, mesh=mesh, rank=rank) for rank in ranks]
    assert unmatched({rank: each.messages for rank, each in zip(ranks, found, strict=True)}) == []
    floats = [m for m in found[0].messages if m.dtype.is_floating_point]
    sent = [m for m in floats if m.kind == "send"]
    assert {(m.shape, m.dtype) for m in sent} == {((BATCH, LENGTH, WIDTH), torch.bfloat16)}
    layer = WIDTH + 2 * WIDTH * INNER
    assert [each.params_numel for each in found] == [
        WORDS * WIDTH + 3 * layer, WORDS * WIDTH + layer
    ]  # fmt: skip


def test_bubble_and_micro_batches_in_flight():
    first, last = simulated(CUBE, 3, 0), simulated(CUBE, 3, 12)
    assert first.bubble == last.bubble == pytest.approx(3 / (COUNT + 3))
    assert (first.in_flight, last.in_flight) == (4, 1)


def test_activations_are_counted_to_the_byte():
    """Of a chain of linear layers without bias, backward needs the input of each layer."""

    def chain(width: int) -> Callable[[], nn.Module]:
        return lambda: nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(6)))

    config = settings(1, 1) | {"bf16": {"enabled": False}, "unit_min_numel": 1}
    del config["units"], config["gradient_clipping"]
    x = torch.empty(64, 128, device="meta")
    found = simulate(
        chain(128), config, (x, x), mesh=Mesh(data_shard=4), rank=1, loss_fn=lambda y, _: y.sum()
    )
    one = 64 * 128 * 4
    # The inputs of the step are held too. At the peak, all outputs exist.
    assert 8 * one <= found.activations_nbytes <= 9 * one + 128 * 128 * 4
    assert found.peak_nbytes >= found.activations_nbytes + found.nbytes("parameters")


@pytest.mark.parametrize("rank", [0, 3])
def test_ranks_that_share_key_value_heads_add_their_gradients_once_per_step(rank):
    """Two heads on four tensor ranks, so pairs of neighbours hold the same part of k and v."""
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "unit_min_numel": 1,
        "zero_optimization": {"stage": 2},
    }
    ids = torch.zeros(3, 8, dtype=torch.long)
    found = simulate(
        lambda: tensor_models.TinyGPT(kv_heads=2), config, (ids, ids), rank=rank,
        mesh=Mesh(data_shard=2, tensor=4), plan=tensor_models.BLOCKS,
        loss_fn=tensor_models.loss_of,
    )  # fmt: skip
    (row,) = [row for row in found.traffic if row.name == "gradients of copies"]
    first = rank - rank % 2
    assert (row.group, row.calls) == (f"ranks [{first}, {first + 1}]", 1)


def test_a_cut_frees_the_whole_parameters():
    with lone_rank(0, 2):
        model = build(Mesh(), device="cpu")
        whole = [weakref.ref(model[0].weight), weakref.ref(model[1].up.weight)]
        tensor_parallel(model, neighbours(2), PLAN)
        gc.collect()
        assert [ref() for ref in whole] == [None, None]
        assert model[1].up.weight.to_local().shape == (INNER // 2, WIDTH)


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_on_the_meta_device_is_simulated_as_any_other(device, stage):
    mesh = Mesh(data_shard=2)
    found = simulate(
        lambda: build(mesh, device=device), settings(stage), (IDS, IDS),
        mesh=mesh, rank=1, loss_fn=loss_of,
    )  # fmt: skip
    assert found.nbytes("parameters") == 2 * sum(numels(mesh, 0)) // (2 if stage == 3 else 1)
    assert torch.distributed.is_initialized() is False


def test_a_simulation_chooses_by_a_limit_and_not_by_memory_that_it_does_not_have():
    mesh, auto = Mesh(pipeline=4, data_shard=2), {"gather": "auto", "reduce": "auto"}
    given = settings(3), (IDS, IDS)
    with pytest.raises(UsageError, match="auto_limit_nbytes="):
        simulate(lambda: build(mesh, **auto), *given, mesh=mesh, rank=0)
    limited = simulate(
        lambda: build(mesh, **auto, auto_limit_nbytes=1 << 30), *given, mesh=mesh, rank=0
    )
    named = simulate(lambda: build(mesh, gather="step", reduce="step"), *given, mesh=mesh, rank=0)
    assert limited.traffic == named.traffic


def test_zero_init_shards_a_simulated_model():
    def sharded() -> nn.Module:
        with Init():
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        # One element of memory in place of each parameter: values are only in the shards.
        assert {p.untyped_storage().nbytes() for p in model.parameters()} == {4}
        return model

    def whole() -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    config = settings(3, 1) | {"bf16": {"enabled": False}, "units": ["Linear"]}
    x = torch.empty(4, WIDTH, device="meta")
    found = [
        simulate(build, config, (x, x), mesh=Mesh(data_shard=4), rank=1, loss_fn=lambda y, _: y.sum())
        for build in (sharded, whole)
    ]  # fmt: skip
    assert found[0].memory == found[1].memory
    assert found[0].traffic == found[1].traffic


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"rank": 8}, "rank 8 of a simulation with 8 ranks does not exist"),
        ({"batch": IDS}, "as a pair"),
        ({"loss_fn": None}, "needs loss_fn="),
    ],
)
def test_arguments_that_do_not_fit(keys, text):
    mesh = Mesh(data_shard=8)
    given = {"batch": (IDS, IDS), "mesh": mesh, "rank": 0, "loss_fn": loss_of} | keys
    with pytest.raises(UsageError, match=text):
        simulate(lambda: build(mesh), settings(1), **given)


def test_each_phase_has_its_peak_and_large_tensors_their_modules():
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))

    config = settings(3, 1) | {"bf16": {"enabled": False}, "units": ["Linear"]}
    x = torch.empty(4096, WIDTH, device="meta")
    found = simulate(
        build, config, (x, x), mesh=Mesh(data_shard=4), rank=1, loss_fn=lambda y, _: (y * y).sum()
    )
    assert set(found.moments) == {"init", "forward", "backward", "step"}
    # The batch has two tensors of the size of x. Forward: four outputs and y * y. Backward: two products
    # for the gradient of y * y, which is gone. Step: nothing but the batch.
    expected = {"forward": 2 + 4 + 1, "backward": 2 + 4 + 2, "step": 2}
    for name, count in expected.items():
        moment = found.moments[name]
        assert moment.activations_nbytes == pytest.approx(count * x.numel() * 4, rel=1e-3)
        on_device = sum(n for (_, tier), n in moment.held.items() if tier == "device")
        assert moment.device_nbytes == on_device + moment.activations_nbytes
        assert moment.held.get(("gathered", "device"), 0) == (name != "step") * WIDTH * WIDTH * 4
    assert found.peak_nbytes == found.moments["backward"].device_nbytes
    made = {(row.phase, row.module) for row in found.largest if row.nbytes == x.numel() * 4}
    assert {("forward", str(at)) for at in range(4)} <= made
    assert [row.nbytes for row in found.largest if row.op == "gather of a unit"] == [
        WIDTH * WIDTH * 4
    ]
    sizes = [row.nbytes for row in found.largest]
    assert sizes == sorted(sizes, reverse=True)


class Wide(nn.Module):
    """Its backward holds the most: a gradient eight times as wide as the input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat(1, 8).tanh()


def test_a_tensor_of_backward_has_the_module_whose_forward_made_its_node():
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), Wide())

    config = settings(3, 1) | {"bf16": {"enabled": False}, "units": ["Linear"]}
    x = torch.empty(4096, WIDTH, device="meta")
    found = simulate(
        build, config, (x, x), mesh=Mesh(data_shard=4), rank=1, loss_fn=lambda y, _: y.sum()
    )
    moment = found.moments["backward"]
    assert (moment.op, moment.module) == ("aten::tanh_backward", "1")


@pytest.mark.parametrize("rounded", [False, True])
def test_plan_of_nodes_is_that_of_a_run_and_names_both_hops(rounded):
    keys = {"zero_hpz_partition_size": 2, "zero_quantized_weights": rounded}
    found = simulate(
        lambda: nn.Sequential(nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 3)),
        {
            "train_micro_batch_size_per_gpu": 5,
            "unit_min_numel": 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 3, **keys},
        },
        (torch.randn(5, 16, dtype=torch.bfloat16), torch.randn(5, 3)),
        mesh=Mesh(data_shard=4),
        rank=3,
        loss_fn=lambda out_BD, labels_BD: (out_BD.float() - labels_BD).square().mean(),
    )
    assert all(row.planned in (None, row.measured) for row in found.memory)
    numel, first = 768 + 256, 768  # padded elements; those that backward gathers again
    # 2 bytes per element of the node part; or of the shard, and 17/16 of the node part
    parameters = numel // 2 * 2 if not rounded else numel // 4 * 2 + numel // 2 * 17 // 16
    assert found.nbytes("parameters") == parameters
    size = 17 / 16 if rounded else 1
    assert found.moved_numel("node", "all_gather") == (numel + first) * size
    assert found.moved_numel("nodes", "all_gather") == numel // 2 * size
    assert found.moved_numel("nodes", "reduce_scatter") == numel // 2
