"""Layers that a program has cut over tensor ranks by itself, with plain parameters, as Megatron does."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from support.covering import each_value, sampled
from torch import Tensor, nn
from zeroshard_testing import on_ranks

import zeroshard
from zeroshard import deepspeed
from zeroshard.deepspeed import pipe
from zeroshard.deepspeed.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from zeroshard.errors import UnsupportedError, UsageError
from zeroshard.zero import safe_get_full_fp32_param, safe_set_full_fp32_param

WIDTH, INNER, STEPS, CLIP = 8, 24, 3, 0.3


class Mpu:
    """Megatron's getters. Tensor ranks are neighbours."""

    def __init__(self, tensor: int) -> None:
        world, self.tensor = dist.get_world_size(), tensor
        own = dist.get_rank()
        self._groups = {}
        rows = [list(range(at, at + tensor)) for at in range(0, world, tensor)]
        columns = [list(range(at, world, tensor)) for at in range(tensor)]
        for name, groups in (("tensor", rows), ("data", columns)):
            for ranks in groups:
                made = dist.new_group(ranks)
                if own in ranks:
                    self._groups[name] = made

    def get_tensor_model_parallel_group(self) -> Any:
        return self._groups["tensor"]

    def get_tensor_model_parallel_world_size(self) -> int:
        return self.tensor

    def get_tensor_model_parallel_rank(self) -> int:
        return dist.get_rank() % self.tensor

    def get_data_parallel_group(self) -> Any:
        return self._groups["data"]

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size() // self.tensor

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank() // self.tensor


class Copy(torch.autograd.Function):
    """The same in forward, and the sum of the gradients."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class Sum(torch.autograd.Function):
    """The sum in forward, and the same gradient."""

    @staticmethod
    def forward(ctx, x, group):
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Cut(torch.autograd.Function):
    """This rank's rows of a tensor that all have, and all rows of the gradient."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, grad.contiguous(), group=ctx.group)
        return torch.cat(parts), None


class Join(torch.autograd.Function):
    """All rows of a tensor that is cut, and this rank's rows of the gradient."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


def draw(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5


def mark(param: nn.Parameter, axis: int, stride: int = 1, names: str = "tensor_model_parallel"):
    setattr(param, names, True)
    param.partition_dim, param.partition_stride = axis, stride


class Block(nn.Module):
    """A norm and a gated MLP that is cut over the ranks of ``group``; None: it is whole.

    ``cuts_rows``: the norm sees a part of the rows. ``hooks``: its gradients are added by hooks.
    """

    def __init__(self, seed: int, group: Any = None, *, cuts_rows: bool = False, names="") -> None:
        super().__init__()
        size = 1 if group is None else dist.get_world_size(group)
        place = 0 if group is None else dist.get_rank(group)
        self.group, self.cuts_rows = group, cuts_rows and group is not None
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        up = draw(2 * INNER, WIDTH, seed=seed).view(2, INNER, WIDTH)
        own = up.chunk(size, 1)[place].reshape(-1, WIDTH)
        self.up = nn.Parameter(own.clone())
        self.up_bias = nn.Parameter(torch.zeros(len(own), dtype=torch.float64))
        down = draw(WIDTH, INNER, seed=seed + 1).chunk(size, 1)[place]
        self.down = nn.Parameter(down.clone())
        self.down_bias = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))
        if group is not None:
            words = names or "tensor_model_parallel"
            mark(self.up, 0, 2, words)
            mark(self.up_bias, 0, 2, words)
            mark(self.down, 1, 1, words)
        if self.cuts_rows:
            for param in self.norm.parameters():
                param.sequence_parallel = True

    def forward(self, x: Tensor) -> Tensor:
        if self.group is None:
            gate, up = F.linear(self.norm(x), self.up, self.up_bias).chunk(2, -1)
            return x + F.linear(gate.sigmoid() * up, self.down, self.down_bias)
        if self.cuts_rows:
            inner = Join.apply(self.norm(Cut.apply(x, self.group)), self.group)
            inner = Copy.apply(inner, self.group)
        else:
            inner = Copy.apply(self.norm(x), self.group)
        gate, up = F.linear(inner, self.up, self.up_bias).chunk(2, -1)
        return x + Sum.apply(F.linear(gate.sigmoid() * up, self.down), self.group) + self.down_bias


def build(group: Any = None, **keys: Any) -> nn.Sequential:
    return nn.Sequential(*(Block(10 * at, group, **keys) for at in range(3)))


def samples(step: int, share: int = 0, shares: int = 1) -> tuple[Tensor, Tensor]:
    x, y = draw(8, WIDTH, seed=100 + step), draw(8, WIDTH, seed=200 + step)
    return x.chunk(shares)[share], y.chunk(shares)[share]


def config(stage: int, **keys: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 1e-2}},
        "gradient_clipping": CLIP,
        "unit_min_numel": 1,
        "zero_optimization": {"stage": stage},
        **keys,
    }


def plain_training(steps: int = STEPS) -> tuple[dict[str, Tensor], list[float]]:
    model, norms = build(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        x, y = samples(step)
        F.mse_loss(model(x), y).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}, norms


def train(engine: Any, first: int = 0, steps: int = STEPS) -> list[float]:
    norms = []
    for step in range(first, first + steps):
        x, y = samples(step, engine.dp_rank, engine.dp_size)
        engine.backward(F.mse_loss(engine(x), y))
        engine.step()
        norms.append(engine.last_step.grad_norm)
    return norms


def check_equal(engine: Any, expected: dict[str, Tensor]) -> None:
    for name, value in engine.iter_full_params():
        torch.testing.assert_close(value, expected[name], rtol=1e-11, atol=1e-12, msg=name)


CASES = [
    (stage, init, keys)
    for stage in range(4)
    for init in ([False, True] if stage == 3 else [False])
    for keys in ({}, {"cuts_rows": True}, {"names": "model_parallel"})
]


@pytest.mark.parametrize(("stage", "init", "keys"), sampled(CASES, every=2))
@on_ranks(4)
def test_it_trains_as_one_process_and_its_checkpoints_load_anywhere(stage, init, keys, tmp_path):
    expected, norms = plain_training(STEPS + 1)
    mpu = Mpu(2)
    at_build = (
        deepspeed.zero.Init(config_dict_or_path=config(3), mpu=mpu)
        if init
        else contextlib.nullcontext()
    )
    with at_build:
        model = build(mpu.get_tensor_model_parallel_group(), **keys)
    engine, *_ = deepspeed.initialize(model=model, config=config(stage), mpu=mpu)
    assert engine.mesh.text == "data_shard 2 x tensor 2"
    assert train(engine) == pytest.approx(norms[:-1], rel=1e-12)
    check_equal(engine, plain_training()[0])
    before = {name: value.clone() for name, value in engine.iter_full_params()}
    engine.save_checkpoint(str(tmp_path))
    assert train(engine, STEPS, 1) == pytest.approx(norms[-1:], rel=1e-12)
    engine.load_checkpoint(str(tmp_path))
    assert train(engine, STEPS, 1) == pytest.approx(norms[-1:], rel=1e-12)
    check_equal(engine, expected)
    engine.destroy()
    told: list[str] = []
    logger = logging.getLogger("zeroshard")
    logger.addFilter(lambda record: told.append(record.getMessage()) or True)
    model = build()
    mark(model[0].up, 0, 2)  # Megatron marks them on one tensor rank too
    with zeroshard.Engine(model, config=config(3)) as alone:  # data ranks only
        alone.load_checkpoint(str(tmp_path))
        logger.filters.clear()
        is_told = any("was saved with tensor 2, and this run has tensor 1" in text for text in told)
        assert is_told is alone.is_main_rank
        for name, value in alone.iter_full_params():
            assert torch.equal(value, before[name]), name
        assert train(alone, STEPS, 1) == pytest.approx(norms[-1:], rel=1e-12)


class Table(nn.Module):
    """A matrix that the first and the last layer use. Its rows are cut over the ranks of ``group``."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        whole = draw(WIDTH, WIDTH, seed=77)
        if group is not None:
            whole = whole.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()
        self.group, self.weight = group, nn.Parameter(whole)
        if group is not None:
            mark(self.weight, 0)

    def forward(self, x: Tensor) -> Tensor:
        if self.group is None:
            return F.linear(x, self.weight)
        part = F.linear(Copy.apply(x, self.group), self.weight)
        return Join.apply(part.t(), self.group).t()

    def back(self, x: Tensor) -> Tensor:
        if self.group is None:
            return x @ self.weight
        return Sum.apply(Cut.apply(x.t(), self.group).t() @ self.weight, self.group)


def layers(group: Any = None) -> list[Any]:
    blocks = [pipe.LayerSpec(Block, 10 * at, group) for at in range(3)]
    return [
        pipe.TiedLayerSpec("table", Table, group),
        *blocks,
        pipe.TiedLayerSpec("table", Table, group, forward_fn=Table.back),
    ]


def plain_pipeline() -> tuple[dict[str, Tensor], list[float], list[float]]:
    table, blocks = Table(), build()
    params = {
        f"{at + 1}.{name}": p for at, b in enumerate(blocks) for name, p in b.named_parameters()
    }
    params["tied_modules.table.weight"] = table.weight
    optimizer, losses, norms = torch.optim.AdamW(params.values(), lr=1e-2), [], []
    for step in range(STEPS):
        x, y = samples(step)
        loss = F.mse_loss(table.back(blocks(table(x))), y)
        loss.backward()
        losses.append(float(loss))
        norms.append(float(nn.utils.clip_grad_norm_(params.values(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in params.items()}, losses, norms


@pytest.mark.parametrize(
    ("stage", "init", "sizes"),
    sampled(
        [
            *((3, True, sizes) for sizes in ((2, 1, 2), (2, 2, 1), (1, 2, 2))),
            *((stage, False, (2, 1, 2)) for stage in range(4)),
        ],
        every=2,
    ),
)
@on_ranks(4)
def test_a_pipeline_of_such_layers_trains_as_one_process(stage, init, sizes, tmp_path):
    """Also built under zero.Init."""
    pipeline, data, tensor = sizes
    topology = PipeModelDataParallelTopology(num_pp=pipeline, num_mp=tensor, num_dp=data)
    grid = PipelineParallelGrid(topology)
    group = grid.get_slice_parallel_group() if tensor > 1 else None
    keys = config(stage, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=4 // data)
    at_build = (
        deepspeed.zero.Init(config_dict_or_path=keys, mpu=grid)
        if init
        else contextlib.nullcontext()
    )
    with at_build:
        model = pipe.PipelineModule(layers(group), topology=topology, loss_fn=F.mse_loss)
    engine, *_ = deepspeed.initialize(model=model, config=keys)
    expected, losses, norms = plain_pipeline()
    for step in range(STEPS):
        x, y = samples(step, engine.dp_rank, engine.dp_size)
        loss = engine.train_batch(iter(zip(x.split(2), y.split(2), strict=True)))
        assert float(loss) == pytest.approx(losses[step], rel=1e-12)
        assert engine.last_step.grad_norm == pytest.approx(norms[step], rel=1e-12)
    check_equal(engine, expected)
    engine.save_checkpoint(str(tmp_path))
    assert engine.load_checkpoint(str(tmp_path))[0] is not None
    check_equal(engine, expected)
    engine.destroy()


@on_ranks(2)
def test_gradients_that_a_hook_of_the_program_adds_are_not_added_again():
    """gpt-neox marks its norms and adds their gradients in hooks."""
    mpu, norms = Mpu(2), plain_training()[1]
    group = mpu.get_tensor_model_parallel_group()
    for stage in (1, 3):
        model = build(group, cuts_rows=True)
        engine, *_ = deepspeed.initialize(
            model=model, config=config(stage, train_micro_batch_size_per_gpu=8), mpu=mpu
        )

        def add(grad: Tensor) -> Tensor:
            total = grad.clone()
            dist.all_reduce(total, group=group)
            return total

        def add_in_place(param: nn.Parameter) -> None:
            dist.all_reduce(param.grad, group=group)

        for at, block in enumerate(model):
            for param in block.norm.parameters():
                if at:
                    param.register_post_accumulate_grad_hook(add_in_place)
                else:
                    param.register_hook(add)
        assert train(engine) == pytest.approx(norms, rel=1e-12)
        engine.destroy()


@pytest.mark.parametrize("adds", ["register_hook", "register_post_accumulate_grad_hook"])
@on_ranks(2)
def test_a_hook_of_one_rank_that_looks_at_gradients_changes_nothing(adds):
    """It cannot have added them over the group."""
    mpu, norms = Mpu(2), plain_training()[1]
    model = build(mpu.get_tensor_model_parallel_group(), cuts_rows=True)
    keys = config(1, train_micro_batch_size_per_gpu=8)
    engine, *_ = deepspeed.initialize(model=model, config=keys, mpu=mpu)
    seen = []
    if mpu.get_tensor_model_parallel_rank() == 0:
        for block in model:
            for param in block.norm.parameters():
                getattr(param, adds)(lambda found: seen.append(found.shape))
    assert train(engine) == pytest.approx(norms, rel=1e-12)
    assert bool(seen) is (mpu.get_tensor_model_parallel_rank() == 0)
    engine.destroy()


@on_ranks(2)
def test_full_values_and_exports_are_those_of_the_whole_tensor(tmp_path):
    mpu = Mpu(2)
    model = build(mpu.get_tensor_model_parallel_group())
    keys = config(2, train_micro_batch_size_per_gpu=8)
    engine, *_ = deepspeed.initialize(model=model, config=keys, mpu=mpu)
    whole = build()
    for own, expected in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(safe_get_full_fp32_param(own), expected)
    engine.save_16bit_model(str(tmp_path))
    saved = load_file(tmp_path / "model.safetensors")
    for name, expected in whole.state_dict().items():
        assert torch.equal(saved[name], expected), name
    value = draw(*whole[1].up.shape, seed=5)
    safe_set_full_fp32_param(model[1].up, value)
    assert torch.equal(safe_get_full_fp32_param(model[1].up), value)
    rows = value.view(2, INNER, WIDTH).chunk(2, 1)[mpu.get_tensor_model_parallel_rank()]
    assert torch.equal(model[1].up, rows.reshape(-1, WIDTH))
    engine.destroy()
    with pytest.raises(UsageError, match="is cut over tensor ranks already"):
        zeroshard.initialize(
            model=build(mpu.get_tensor_model_parallel_group()), config=keys, plan="auto", mpu=mpu
        )


@on_ranks(4)
def test_marks_and_groups_that_contradict_the_mesh_are_refused():
    mpu = Mpu(2)
    group = mpu.get_tensor_model_parallel_group()

    def refused(match: str, kind: type[Exception] = UsageError, **marks: Any) -> None:
        model = build(group)
        for name, value in marks.items():
            setattr(model[1].up, name, value)
        with pytest.raises(kind, match=match):
            deepspeed.initialize(model=model, config=config(1), mpu=mpu)

    refused(
        r"'1.up' of shape \(24, 8\) has the mark .* its partition_dim is None", partition_dim=None
    )
    refused(r"partition_dim is 2", partition_dim=2)
    refused(r"partition_stride 5: it should be the number", partition_stride=5)
    model = build(group)
    with pytest.raises(
        UsageError, match=r"data_parallel_group of the ranks \[0, 1, 2, 3\], but the"
    ):
        deepspeed.zero.Init(
            config_dict_or_path=config(3), mpu=mpu, data_parallel_group=dist.group.WORLD
        )
    with deepspeed.zero.Init(config_dict_or_path=config(3)):
        model = nn.Linear(WIDTH, WIDTH)
    mark(model.weight, 0)
    with pytest.raises(
        UnsupportedError, match=r"sharded its parameters over all ranks, and the mesh"
    ):
        deepspeed.initialize(model=model, config=config(3), mpu=mpu)


class Expert(nn.Module):
    """An MLP that is cut over the ranks of ``group``; None: it is whole. Megatron marks both."""

    group: Any = None  # not of the object: groups cannot be copied

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        size, place = (
            (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
        )
        Expert.group = group
        self.up = nn.Parameter(draw(INNER, WIDTH, seed=90).chunk(size)[place].clone())
        self.down = nn.Parameter(draw(WIDTH, INNER, seed=91).chunk(size, 1)[place].clone())
        mark(self.up, 0)
        mark(self.down, 1)

    def forward(self, x: Tensor) -> Tensor:
        if Expert.group is None:
            return F.linear(F.linear(x, self.up).tanh(), self.down)
        inner = F.linear(Copy.apply(x, Expert.group), self.up).tanh()
        return Sum.apply(F.linear(inner, self.down), Expert.group)


class Choice(nn.Module):
    """A cut block, and experts of which ranks share those of the layer."""

    def __init__(self, group: Any, experts_group: Any, ep_size: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.block = Block(0, group)
        self.moe = deepspeed.moe.layer.MoE(
            WIDTH, Expert(experts_group), num_experts=4, ep_size=ep_size, k=1, drop_tokens=False,
            use_residual=True, enable_expert_tensor_parallelism=experts_group is not None,
        ).double()  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        return x + self.moe(x)[0]


@pytest.mark.parametrize(
    ("stage", "cuts_experts"), each_value([(s, c) for s in (0, 2, 3) for c in (True, False)])
)
@on_ranks(4)
def test_experts_beside_such_layers_train_as_one_process(stage, cuts_experts):
    """Their marks say whether they are cut only if the layer says so, too, and copies lose them."""
    mpu = Mpu(2)
    group = mpu.get_tensor_model_parallel_group()
    model = Choice(group, group if cuts_experts else None, ep_size=2)
    keys = config(stage, train_micro_batch_size_per_gpu=4)
    engine, *_ = deepspeed.initialize(model=model, config=keys, mpu=mpu)
    assert engine.mesh.text_with_experts == "data_shard 2 x tensor 2, expert 2"
    norms = train(engine)
    found = {name: value.clone() for name, value in engine.iter_full_params()}
    engine.destroy()
    alone = Choice(None, None, ep_size=1)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    for step in range(STEPS):
        x, y = samples(step)
        F.mse_loss(alone(x), y).backward()
        norm = nn.utils.clip_grad_norm_(alone.parameters(), CLIP)
        assert norms[step] == pytest.approx(float(norm), rel=1e-12)
        optimizer.step()
        optimizer.zero_grad()
    for name, param in alone.named_parameters():
        if name in found:  # experts of other ranks are not here
            torch.testing.assert_close(
                found[name], param.detach(), rtol=1e-11, atol=1e-12, msg=name
            )
    assert sum("deepspeed_experts" in name for name in found) == 4  # two experts of this rank
