"""Weights tied over pipeline stages: who holds them, traffic, checkpoints, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import pipeline_models as models
from support import tensor_models
from torch import Tensor, nn
from zeroshard_testing import on_ranks

from zeroshard import Engine
from zeroshard.checkpoint.reader import CheckpointReader
from zeroshard.core.mesh import Mesh
from zeroshard.errors import UsageError
from zeroshard.parallel import pipeline, tensor_parallel
from zeroshard.parallel.tensor_plan import neighbours

SPLIT = ["layers.3"]
QUARTERS = ["layers.1", "layers.3", "layers.5"]


def opened(
    stage: int, model: nn.Module, split: list[str], parallel: Any = None, **keys: Any
) -> Engine:
    cut = {key: keys.pop(key) for key in ("schedule", "gather", "reduce", "loss_fn") if key in keys}
    made = pipeline(
        model,
        split=split,
        order=keys.pop("order", models.ORDER),
        **{"loss_fn": models.loss_fn, **cut},
    )
    optimizer = keys.pop("optimizer", models.adamw)
    config = models.config(stage, parallel=parallel or {"pipeline": 2}, **keys)
    return Engine(made, config=config, optimizer=optimizer)


def tied() -> models.Decoder:
    return models.Decoder(tied=True).double()


def train(engine: Engine, begin: int, end: int) -> list[float]:
    norms = []
    for step in range(begin, end):
        engine.train_batch(iter(models.batches(step, engine.dp_rank)))
        norms.append(float(engine.last_step.grad_norm))
    return norms


def values(engine: Engine) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in engine.iter_full_params()}


@on_ranks(4)
def test_several_ties_over_four_stages_train_like_plain_pytorch():
    """Five groups of ranks, of two and of four, meet in the same order everywhere."""

    def build() -> models.Decoder:
        model = tied()
        model.layers[1].down.weight = model.layers[0].down.weight
        model.layers[3].up.weight = model.layers[1].up.weight
        model.norm.weight = model.layers[0].norm.weight
        model.layers[2].norm.weight = model.layers[4].norm.weight = model.norm.weight
        return model

    plain = build()
    adamw, norms = torch.optim.AdamW(plain.parameters(), lr=models.LR), []
    for step in range(3):
        made = models.batches(step, 0)
        torch.stack([models.loss_fn(plain(x), y) for x, y in made]).mean().backward()
        norms.append(float(nn.utils.clip_grad_norm_(plain.parameters(), models.CLIP)))
        adamw.step()
        adamw.zero_grad()
    wanted = dict(plain.named_parameters())
    for stage in (1, 3):
        with opened(stage, build(), QUARTERS, {"pipeline": 4}) as engine:
            assert len(engine.module.tied_ranks) == 5
            assert train(engine, 0, 3) == pytest.approx(norms, rel=1e-14)
            for name, value in values(engine).items():
                assert (value - wanted[name]).abs().max() <= 1e-12 * wanted[name].abs().max()


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(4)
def test_a_tied_unit_is_gathered_and_reduced_once_per_step_over_all_holders(stage):
    """1 + 1 of its elements, with any schedule, and however often other units are gathered."""
    for schedule, split in (("1F1B", SPLIT), ("LoopedBFS", QUARTERS)):
        with opened(stage, tied(), split, schedule=schedule) as engine:
            train(engine, 0, 1)
            (comm,) = engine._watch.ties.values()
            over_all = [unit for unit in engine.runtime.tied if unit.comm is comm]
            assert comm.size == 4
            assert {unit.layout.num_shards for unit in over_all} == {4}
            assert len(engine.runtime.tied) == 1 if schedule == "1F1B" else len(over_all) == 1
            comm.recorder.reset_traffic()
            train(engine, 1, 2)
            for unit in engine.runtime.units:
                unit.wait_for_unshard()
            numel = sum(unit.layout.full_numel for unit in over_all)
            sent = comm.recorder.payload_numel
            assert (sent["all_gather"], sent["reduce_scatter"]) == (numel, numel)
            if stage == 3:
                assert all(unit.is_sharded for unit in engine.runtime.tied)
                engine.eval_batch(iter(models.batches(0, engine.dp_rank)))
                sent = comm.recorder.payload_numel
                assert (sent["all_gather"], sent["reduce_scatter"]) == (2 * numel, numel)


@on_ranks(4)
def test_a_checkpoint_has_a_tied_weight_once_and_loads_into_any_mesh(tmp_path: Path):
    """2 + 2 steps are 4 steps; other schedules, stages and a plain engine load the same values."""
    with opened(3, tied(), SPLIT) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path, "second")
        saved = values(engine)
        train(engine, 2, 4)
        last = values(engine)
    with opened(3, tied(), SPLIT) as engine:
        engine.load_checkpoint(tmp_path, "second")
        train(engine, 2, 4)
        assert all(torch.equal(value, last[name]) for name, value in values(engine).items())
    if torch.distributed.get_rank() == 0:
        check_saved_once(tmp_path / "second")
    before = "second"
    for tag, stage, split, keys in (
        ("looped", 1, QUARTERS, {"schedule": "LoopedBFS"}),
        ("zero", 0, SPLIT, {}),
    ):
        with opened(stage, tied(), split, **keys) as engine:
            engine.load_checkpoint(tmp_path, before)
            for name, value in values(engine).items():
                assert name not in saved or torch.equal(value, saved[name])
            engine.save_checkpoint(tmp_path, tag)
        before = tag
    with Engine(tied(), config=models.config(2), optimizer=models.adamw) as engine:
        engine.load_checkpoint(tmp_path, before)
        found = values(engine)
        assert all(torch.equal(found[name], value) for name, value in saved.items())
        losses = [models.loss_fn(engine(x), y) for x, y in models.batches(2, engine.dp_rank)]
        assert len(losses) == models.COUNT


def check_saved_once(path: Path) -> None:
    with CheckpointReader(path) as source:
        assert source.verify() == []
        shapes = {name: tuple(param.shape) for name, param in tied().named_parameters()}
        assert {name: tuple(p.shape) for name, p in source.parameters.items()} == shapes
        assert source.parameters["embed.weight"].aliases == ("head.weight",)
        for name, parameter in source.parameters.items():
            for tensor in parameter.tensors.values():
                saved = sum(fragment.numel for fragment in tensor.fragments)
                assert saved == torch.Size(parameter.shape).numel(), name


@on_ranks(8, timeout=120)
def test_replicas_count_and_save_a_tied_weight_once(tmp_path: Path):
    params, _, norms = models.train_plainly(2, tied=True, dp_size=4)
    parallel = {"pipeline": 2, "data_replicate": 2, "data_shard": 2}
    with opened(3, tied(), SPLIT, parallel) as engine:
        assert train(engine, 0, 2) == pytest.approx(norms, rel=1e-14)
        for name, value in values(engine).items():
            assert (value - params[name]).abs().max() <= 1e-12
        engine.save_checkpoint(tmp_path, "second")
    if torch.distributed.get_rank() == 0:
        check_saved_once(tmp_path / "second")


class Detached(nn.Linear):
    """A head that gives its weight no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.detach(), self.bias)


@on_ranks(4)
def test_a_gradient_from_one_of_the_stages_is_enough():
    """The ranks of the last stage update their part of the weight without a gradient of their own."""

    def build() -> models.Decoder:
        model = tied()
        head = Detached(models.WIDTH, models.VOCABULARY).double()
        head.bias, head.weight = model.head.bias, model.embed.weight
        model.head = head
        return model

    plain = build()
    every = [batch for rank in range(2) for batch in models.batches(0, rank)]
    torch.stack([models.loss_fn(plain(x), y) for x, y in every]).mean().backward()
    nn.utils.clip_grad_norm_(plain.parameters(), models.CLIP)
    torch.optim.AdamW(plain.parameters(), lr=models.LR).step()
    for stage in (0, 1, 3):
        with opened(stage, build(), SPLIT) as engine:
            train(engine, 0, 1)
            found = values(engine)["embed.weight"]
            assert (found - plain.embed.weight).abs().max() <= 1e-12


@on_ranks(4)
def test_overflow_in_one_stage_leaves_a_tied_weight_unchanged_everywhere():
    fp16 = {"enabled": True, "initial_scale_power": 10, "hysteresis": 1, "loss_scale_window": 2}
    with opened(3, models.Decoder(tied=True).half(), SPLIT, fp16=fp16) as engine:
        before, skipped = values(engine), []
        engine.module.loss_fn = lambda x, y: models.loss_fn(x, y) * float("inf")
        train(engine, 0, 1)
        skipped.append(engine.last_step.skipped)
        assert all(torch.equal(value, before[name]) for name, value in values(engine).items())
        engine.module.loss_fn = models.loss_fn
        train(engine, 1, 2)
        skipped.append(engine.last_step.skipped)
    assert skipped == [True, False]


def by_module(params: Any) -> torch.optim.Optimizer:
    """The same groups everywhere; on the ranks of the last stage the tied parameter is in another one."""
    tied, *others = params
    groups = [[tied, *others], []] if torch.distributed.get_rank() < 2 else [others, [tied]]
    decays = (0.0, 0.1)
    return torch.optim.AdamW(
        [{"params": g, "weight_decay": d} for g, d in zip(groups, decays, strict=True)],
        lr=models.LR,
    )


@on_ranks(4)
def test_other_options_on_some_holders_are_refused_on_every_rank():
    text = "'embed.weight' is tied over pipeline stages, .* on ranks 2,3 than on rank 0"
    with pytest.raises(UsageError, match=text):
        opened(1, tied(), SPLIT, optimizer=by_module)


class Sevens(nn.Linear):
    """A linear layer whose first values can be told from others."""

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 7.0)
        nn.init.constant_(self.bias, 7.0)


@on_ranks(2)
def test_a_tied_weight_on_the_meta_device_begins_with_the_values_of_its_first_module():
    """Its first module is on pipeline rank 1, and rank 0 has the first rank of the group."""
    with torch.device("meta"):
        layers = [nn.Linear(4, 4), Sevens(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
        layers[2].weight = layers[1].weight
    with opened(
        3,
        nn.Sequential(*layers),
        ["1", "2", "3"],
        schedule="Interleaved1F1B",
        order=None,
        units=["Linear", "Sevens"],
        loss_fn=nn.functional.mse_loss,
    ) as engine:
        found = values(engine)
        assert torch.equal(found["1.weight"], torch.full((4, 4), 7.0))
        assert not any("2.weight" in name for name in found)
        if "2.bias" in found:
            assert found["2.bias"].abs().max() < 1
        made = [(torch.ones(1, 4), torch.zeros(1, 4))] * models.COUNT
        assert not engine.train_batch(iter(made)).isnan()


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(4)
def test_a_vocabulary_cut_over_tensor_ranks_may_be_tied_over_stages(stage):
    """Pipeline 2 x tensor 2: each half of the vocabulary is one unit over two stages."""
    order = ("embed", "blocks", "norm", "head")

    def build() -> nn.Module:
        torch.manual_seed(3)
        return tensor_models.TinyGPT(tied=True, depth=4).double()

    def batches(step: int) -> list[tuple[Tensor, Tensor]]:
        made = torch.Generator().manual_seed(step)
        shape = (models.COUNT, 2, tensor_models.LENGTH)
        ids, labels = (torch.randint(tensor_models.VOCAB, shape, generator=made) for _ in range(2))
        return list(zip(ids, labels, strict=True))

    def run(model: nn.Module, ids: Tensor) -> Tensor:
        x = model.embed(ids)
        for block in model.blocks:
            x = block(x)
        return model.head(model.norm(x))

    plain = build()
    del plain.positions
    adamw, norms = torch.optim.AdamW(plain.parameters(), lr=models.LR), []
    for step in range(3):
        torch.stack([models.loss_fn(run(plain, x), y) for x, y in batches(step)]).mean().backward()
        norms.append(float(nn.utils.clip_grad_norm_(plain.parameters(), models.CLIP)))
        adamw.step()
        adamw.zero_grad()
    model = build()
    del model.positions
    plan = {**tensor_models.BLOCKS, "embed": "vocab", "head": "colwise_gather"}
    tensor_parallel(model, neighbours(2), plan)
    assert model.head.weight is model.embed.weight
    made = pipeline(model, split=["blocks.2"], order=order, loss_fn=models.loss_fn)
    config = models.config(stage, units="auto")
    with Engine(
        made, config=config, mesh=Mesh(pipeline=2, tensor=2), optimizer=models.adamw
    ) as engine:
        for step in range(3):
            engine.train_batch(iter(batches(step)))
            assert float(engine.last_step.grad_norm) == pytest.approx(norms[step], rel=1e-14)
        wanted = dict(plain.named_parameters())
        found = values(engine)
        assert "embed.weight" in found
        for name, value in found.items():
            assert (value - wanted[name]).abs().max() <= 1e-12
