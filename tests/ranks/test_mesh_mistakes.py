"""Mistakes with experts, sequence ranks and nodes: each is an error of ours, and no rank waits.

One world of two ranks makes all of them, one after another. A row that ranks cannot know together names
the text of each. More rows: ``test_expert_errors.py``, ``test_sequence_errors.py`` and
``test_mesh_refusals.py`` here; ``mesh_cases.py``, ``config_cases.py``, ``test_mesh_sources.py`` and
``test_expert_layers.py`` of the unit tests; ``test_engine_on_nodes.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import sequence_models as tiny
from torch import Tensor, nn
from zeroshard_testing import on_ranks

import zeroshard
from zeroshard import sequence
from zeroshard.deepspeed.parallel_init import UlyssesSPAttentionHF
from zeroshard.errors import ZeroShardError
from zeroshard.parallel import MoE

ONE = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
WIDTH = 8
Row = tuple[str, Callable[[], object], str]


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


class Net(nn.Module):
    def __init__(
        self, experts: int = 4, expert: Any = linear, ep_size: int = 2, **more: Any
    ) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.moe = MoE(WIDTH, expert, experts, ep_size, **more)

    @property
    def experts(self) -> list[nn.Module]:
        return list(self.moe.deepspeed_moe.experts.deepspeed_experts)

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(self.mix(x))[0]


def train(net: nn.Module, rows: int = 6, stage: int = 1, **keys: Any) -> None:
    config = {**ONE, "zero_optimization": {"stage": stage}, **keys}
    engine, *_ = zeroshard.initialize(model=net, config=config)
    try:
        engine.backward(engine(torch.randn(rows, WIDTH)).pow(2).mean())
        engine.step()
    finally:
        engine.close()


def with_shared(what: str) -> nn.Module:
    """A model in which another layer has a parameter of an expert, or is one."""
    net = Net()
    if what == "weight":
        net.mix.weight = net.experts[0].weight
    else:
        net.also = net.experts[0]
    return net


def frozen(number: int) -> nn.Module:
    net = Net()
    for name, param in net.named_parameters():
        param.requires_grad_(f"experts.{number}." not in name)
    return net


class Maker:
    """Makes experts that are not alike: ``sizes`` are those of one after another."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = list(sizes)

    def __call__(self) -> nn.Module:
        inner = self.sizes.pop(0)
        return nn.Sequential(nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH))


def with_common_part() -> Callable[[], nn.Module]:
    common = linear()
    return lambda: nn.Sequential(common, linear())


def continued(saved: nn.Module, loaded: nn.Module, root: Path, spoil: Any = None) -> None:
    """Save one model, change the files, and load them into another."""
    engine = zeroshard.initialize(model=saved, config=ONE)[0]
    engine.save_checkpoint(root)
    engine.close()
    if spoil is not None and dist.get_rank() == 0:
        spoil(max(root.rglob("*.safetensors"), key=lambda file: file.stat().st_size))
    dist.barrier()
    engine = zeroshard.initialize(model=loaded, config=ONE)[0]
    try:
        engine.load_checkpoint(root)
    finally:
        engine.close()


def halve(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def experts(root: Path) -> list[Row]:
    """Layers, what ranks must share of them, and checkpoints."""
    me = dist.get_rank()
    plan = "RankMismatch: rank 1 has another plan than rank 0. First difference: "
    return [
        ("another ep_size", lambda: train(Net(ep_size=1 + me)), f"{plan}ranks that share experts"),
        ("fewer experts", lambda: train(Net(4 - 2 * me)), f"{plan}experts of 'moe' = 4 experts"),
        ("another k", lambda: train(Net(k=1 + me)), f"{plan}experts of 'moe' = 4 experts"),
        ("another capacity", lambda: train(Net(capacity_factor=1.0 + me)), f"{plan}experts of 'moe'"),
        ("dropping on one rank", lambda: train(Net(drop_tokens=me == 0)), f"{plan}experts of 'moe'"),
        ("noise on one rank", lambda: train(Net(use_rts=me == 0)), f"{plan}experts of 'moe'"),
        ("a key of one rank", lambda: train(Net(), parallel={"expert": 2} if me else {}),
         f"{plan}parallel.expert = 1"),
        ("another division", lambda: train(Net(), use_data_before_expert_parallelism=bool(me)),
         f"{plan}use_data_before_expert_parallelism"),
        ("another model", lambda: train(nn.Linear(WIDTH, WIDTH + me)),
         f"{plan}parameter 1 = weight [8, 8]"),
        ("experts of two shapes", lambda: train(Net(expert=Maker(8, 8, 12, 12))),
         f"{plan}shapes (they must be equal) of a rank's experts of 'moe' = 0.weight [8, 8]"),
        ("one frozen expert", lambda: train(frozen(0)),
         f"{plan}frozen parameters (freeze the same ones in all) of a rank's experts of 'moe' = "),
        ("unequal tokens", lambda: train(Net(min_capacity=1), rows=6 + 6 * me),
         "the ranks 0, 1 share the experts of a MoE layer with drop_tokens=True: rank 0 has 2 "
         "places at each expert, and rank 1 has 3."),
        ("a weight of an expert elsewhere", lambda: train(with_shared("weight")),
         f"parameter 'mix.weight' is also 'moe.deepspeed_moe.experts.deepspeed_experts.{2 * me}."),
        ("an expert elsewhere", lambda: train(with_shared("module")),
         "parameter 'also.weight' is also 'moe."),
        ("experts with a common part", lambda: Net(expert=with_common_part()),
         "MoE: the experts 0 and 1 that expert() made have the same parameter '0.weight'."),
        ("a key for a dense model", lambda: train(linear(), expert_parallel={"autoep_size": 2}),
         "the mesh has 2 expert ranks (expert_parallel.autoep_size), but no layer"),
        ("a checkpoint with more experts", lambda: continued(Net(4), Net(2), root / "more"),
         f"CheckpointError: {root}/more/global_step0 was not loaded (while comparing it"),
        ("a checkpoint with fewer experts", lambda: continued(Net(2), Net(4), root / "fewer"),
         f"CheckpointError: {root}/fewer/global_step0 was not loaded"),
        ("a file of experts that is cut", lambda: continued(Net(), Net(), root / "cut", halve),
         f"CheckpointError: no checkpoint was loaded from {root}/cut"),
        ("a file of experts that is gone", lambda: continued(Net(), Net(), root / "gone", Path.unlink),
         f"CheckpointError: no checkpoint was loaded from {root}/gone"),
    ]  # fmt: skip


def nodes() -> list[Row]:
    """Keys of nodes and of rounding, on one rank or with a value that cannot be."""
    me = dist.get_rank()
    plan = "RankMismatch: rank 1 has another plan than rank 0. First difference: "
    wrong = "ConfigError: 1 problem in the configuration:\n  zero_optimization."

    def keys(**zero: Any) -> Callable[[], None]:
        return lambda: train(linear(), zero_optimization={"stage": 3, **zero})

    return [
        ("hpZ on one rank", keys(zero_hpz_partition_size=1 + me),
         f"{plan}zero_optimization.zero_hpz_partition_size"),
        ("rounding on one rank", keys(zero_quantized_weights=bool(me)),
         f"{plan}zero_optimization.zero_quantized_weights"),
        ("hpZ of -2", keys(zero_hpz_partition_size=-2), f"{wrong}zero_hpz_partition_size: must be"),
        ("hpZ of 3", keys(zero_hpz_partition_size=3), f"{wrong}zero_hpz_partition_size: 3 does not"),
        ("nodes of 0", keys(hierarchy={"inner": 0}), f"{wrong}hierarchy.inner: must be greater than 0"),
        ("an unknown key", keys(hierarchy={"outer": 2}), f"{wrong}hierarchy.outer: no such key"),
        ("sharding over what", keys(hierarchy={"inner": 2, "shard_over": "outer"}),
         f'{wrong}hierarchy.shard_over: must be "all", "hybrid" or "inner"'),
        ("sums at another time", keys(hierarchy={"inner": 2, "outer_reduce": "step"}),
         f'{wrong}hierarchy.outer_reduce: must be "bucket" or "boundary"'),
        ("sums between no nodes", keys(hierarchy={"outer_reduce": "boundary"}),
         f'{wrong}hierarchy.outer_reduce: "boundary", but there are neither nodes nor replicas'),
        ("sums at the boundary on one rank",
         keys(hierarchy={"inner": 2, "outer_reduce": ("bucket", "boundary")[me]}),
         f"{plan}zero_optimization.hierarchy.outer_reduce"),
        ("rounding to a type", keys(zero_quantized_weights="int8"),
         f"{wrong}zero_quantized_weights: must be true or false"),
        ("rounded weights at stage 1", keys(stage=1, zero_quantized_weights=True),
         f"{wrong}zero_quantized_weights: true at stage 1"),
        ("rounded frozen weights at stage 2", keys(stage=2, zero_quantized_nontrainable_weights=True),
         f"{wrong}zero_quantized_nontrainable_weights: true at stage 2"),
    ]  # fmt: skip


def attention(query: Tensor, key: Tensor | None = None, value: Tensor | None = None) -> Tensor:
    layer = sequence.DistributedAttention(lambda q, _k, _v: q, dist.group.WORLD, 2, 1)
    key = query if key is None else key
    return layer(query, key, key if value is None else value)


def registered(**wrong: Any) -> object:
    """``register_with_transformers`` with one wrong argument."""
    given = {
        "model_name_or_path": tiny.model(tiny.Setting()),
        "core_attn_implementation": "sdpa",
        "sequence_parallel_size": 2,
    }
    return UlyssesSPAttentionHF.register_with_transformers(**{**given, **wrong})


def started(registers: bool, **keys: Any) -> None:
    """``initialize`` with a model of Transformers."""
    if registers:
        sequence.register("sdpa", dist.group.WORLD)
    try:
        zeroshard.initialize(model=tiny.model(tiny.Setting()), config={**ONE, **keys})
    finally:
        sequence.unregister()


def sequences() -> list[Row]:
    """Sequence ranks: attention, batches, loaders, losses."""
    me, group = dist.get_rank(), dist.group.WORLD
    whole = dict(tiny.batches(tiny.Setting(), 1)[0][0][0])
    x = torch.randn(2, 8, 4, 4)
    split = partial(sequence.split_batch, group=group)
    loader, mean = partial(sequence.SequenceLoader, [whole]), sequence.mean_over_tokens
    two = {"sequence_parallel_size": 2}
    other = "ranks 1 have another batch than rank 0"
    return [
        ("attention that is not registered", lambda: started(False, **two),
         "the mesh has 2 sequence ranks, but the attention 'sdpa' of the model is not spread"),
        ("attention of another mesh", lambda: started(True),
         "the attention 'sdpa' of the model is spread over 2 sequence ranks, but the mesh has 1"),
        ("a size on one rank", lambda: train(linear(), parallel={"sequence": 1 + me}),
         "RankMismatch: rank 1 has another plan than rank 0. First difference: "
         "parallel.sequence"),
        ("other tokens", lambda: attention(torch.randn(2, 8 + 2 * me, 4, 4)),
         "DistributedAttention over the ranks 0, 1: the sizes"),
        ("other samples", lambda: attention(torch.randn(2 + me, 8, 4, 4)),
         "DistributedAttention over the ranks 0, 1: the sizes"),
        ("key and value", lambda: attention(x, x, x[:, :6]), "DistributedAttention: query, key"),
        ("too few dimensions", lambda: attention(x[0, 0]), "DistributedAttention: query, key"),
        ("no group", lambda: sequence.DistributedAttention(attention, None), "DistributedAtt"),
        ("no group for all", lambda: sequence.register("sdpa", None), "register('sdpa', None)"),
        ("a size of text", lambda: registered(sequence_parallel_size="2"),
         "sequence_parallel_size is '2'"),
        ("a size of 0", lambda: registered(sequence_parallel_size=0), "sequence_parallel_size is 0"),
        ("a length of text", lambda: registered(seq_length="16", seq_length_is_variable=False),
         "seq_length_is_variable is False, but seq_length is '16'"),
        ("no model of Transformers", lambda: registered(model_name_or_path=linear()),
         "model_name_or_path is a Linear without a config"),
        ("a list", lambda: split([1]), "a batch for sequence parallelism is a list"),
        ("one dimension", lambda: split({"input_ids": torch.arange(8)}), "a batch has input_ids"),
        ("short labels", lambda: split({**whole, "labels": whole["labels"][:, :8]}),
         "a batch has labels of shape (2, 8), and input_ids of shape (2, 16)"),
        ("short positions", lambda: split({**whole, "position_ids": torch.arange(8).expand(2, 8)}),
         "a batch has position_ids of shape (2, 8)"),
        ("a batch of one rank that cannot be cut",
         lambda: split({key: each[:, : 16 - me] for key, each in whole.items()}, check=True),
         "a batch has 15 tokens" if me else other),
        ("a place in another group", lambda: loader(5, group, 2, "cpu"), "SequenceLoader: sp_rank"),
        ("another number of ranks", lambda: loader(me, group, 4, "cpu"), "SequenceLoader: sp_rank"),
        ("losses of tokens", lambda: mean(torch.ones(3), 3, group), "mean_over_tokens: loss and"),
        ("counts of samples", lambda: mean(torch.ones(()), torch.ones(2), group), "mean_over_t"),
    ]  # fmt: skip


def outcome(call: Callable[[], object]) -> str:
    """The text of the error; its class is before it if it is no UsageError."""
    try:
        call()
    except ZeroShardError as error:
        kind = f"{type(error).__name__}: "
        return str(error) if kind == "UsageError: " else kind + str(error).removeprefix(kind)
    return "nothing failed"


def check(rows: list[Row]) -> None:
    for name, call, expected in rows:
        found = outcome(call)
        assert found.startswith(expected), f"{name}: {found}"


@on_ranks(2)
def test_mistakes_with_experts_and_nodes_are_errors_on_every_rank(tmp_path):
    check([*experts(tmp_path), *nodes()])


@on_ranks(2)
def test_mistakes_with_sequence_ranks_are_errors_on_every_rank():
    pytest.importorskip("transformers")
    check(sequences())
