"""Engines of pipelines: traffic, memory, shapes that change, loss scales, and what is refused."""

from __future__ import annotations

import itertools
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import pipeline_models as models
from support.covering import sampled, some_stages
from torch import Tensor, nn
from zeroshard_testing import on_ranks

from zeroshard import Engine, zero
from zeroshard.engine import pipeline_traffic
from zeroshard.errors import (
    ConfigError,
    LossScaleError,
    RankMismatch,
    UnsupportedError,
    UsageError,
    ZeroShardError,
)
from zeroshard.parallel import pipeline
from zeroshard.parallel.schedules import SCHEDULES

PER_RANK = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "LoopedBFS": 2}
SPLITS = {1: ["layers.3"], 2: ["layers.1", "layers.3", "layers.5"]}


def opened(
    stage: int,
    schedule: str = "1F1B",
    *,
    model: nn.Module | None = None,
    cut: dict[str, Any] | None = None,
    optimizer: Any = models.adamw,
    ranks: int = 2,
    **keys: Any,
) -> Engine:
    made = pipeline(
        model or models.Decoder().double(),
        **{
            "split": SPLITS[PER_RANK[schedule]],
            "order": models.ORDER,
            "loss_fn": models.loss_fn,
            "schedule": schedule,
            **(cut or {}),
        },
    )
    config = models.config(stage, **{"parallel": {"pipeline": ranks}, **keys})
    return Engine(made, config=config, optimizer=optimizer)


def traffic(engine: Engine) -> tuple[float, float]:
    """Elements gathered and reduced in one step, after one that recorded the order, per element held."""
    feed = models.data(2, engine.dp_rank)
    engine.train_batch(feed)
    recorder = engine._watch.gathers.recorder
    recorder.reset_traffic()
    engine.train_batch(feed)
    for unit in engine.runtime.units:
        unit.wait_for_unshard()
    psi = sum(unit.layout.full_numel for unit in engine.runtime.units)
    sent = recorder.payload_numel
    return sent["all_gather"] / psi, sent["reduce_scatter"] / psi


@pytest.mark.parametrize("schedule", sampled([*PER_RANK], every=2))
@on_ranks(4)
def test_traffic_of_a_step_in_the_group_of_each_stage(schedule):
    """Per element: 1 + 1, with ``micro_batch`` M reductions, and a gather per forward and backward."""
    count = models.COUNT
    for stage in some_stages((0, 1, 2)):
        with opened(stage, schedule) as engine:
            assert traffic(engine) == (1, count if stage == 2 else 1)
        with opened(stage, schedule, cut={"reduce": "step"}) as engine:
            assert traffic(engine) == (1, 1)
    with opened(3, schedule, cut={"gather": "step", "reduce": "step"}) as engine:
        assert traffic(engine) == (1, 1)
    with opened(3, schedule, cut={"gather": "step"}) as engine:
        assert traffic(engine) == (1, count)
    none_kept = {"zero_optimization": {"stage3_max_reuse_distance": 0}}
    for reduce in ("micro_batch", "step"):
        with opened(3, schedule, cut={"reduce": reduce}, **none_kept) as engine:
            psi = sum(unit.layout.full_numel for unit in engine.runtime.units)
            spared = sum(u.layout.full_numel for u in engine.runtime.units if "embed" in u.name)
            gathered, reduced = traffic(engine)
            assert reduced == (1 if reduce == "step" else count)
            assert gathered == count * (2 * psi - spared) / psi  # backward reads no embedding
    with opened(3, schedule) as engine:
        block = next(u.layout.full_numel for u in engine.runtime.units if "layers." in u.name)
        kept = block * turns(schedule, engine.mesh.coordinate(engine.global_rank)["pipeline"])
        expected = count * (2 * psi - spared) - kept
        assert traffic(engine) == (expected / psi, count)


@on_ranks(4)
def test_auto_takes_what_fits_into_the_memory_of_every_rank():
    """The last rank has the least memory, which the others do not see themselves."""
    both = {"gather": "auto", "reduce": "auto"}
    with opened(3, cut=both) as engine:  # kilobytes: they fit anywhere
        assert traffic(engine) == (1, 1)
        assert 'auto chose gather "step" and reduce "step"' in str(engine.memory_report())
    last = dist.get_rank() == dist.get_world_size() - 1
    free = {"free_nbytes": 1024 if last else 1 << 40}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline_traffic, "host_limits", partial(SimpleNamespace, **free))
        for cut in ({**both, "auto_limit_nbytes": 0}, both):
            with opened(3, cut=cut) as engine:
                gathered, reduced = traffic(engine)
                assert gathered > 1 and reduced == models.COUNT
                assert engine.memory_report(all_ranks=True).notes == engine.runtime.traffic.lines
        with opened(2, cut={"reduce": "auto"}, ranks=1) as engine:
            assert engine.runtime.traffic.reduce == "micro_batch"


def turns(schedule: str, rank: int) -> int:
    """How often a rank runs a stage forward and at once backward: its last block stays gathered."""
    own = SCHEDULES[schedule].actions(2, PER_RANK[schedule], models.COUNT)[rank]
    return sum(
        (a.kind, b.kind) == ("F", "B") and a.stage == b.stage for a, b in itertools.pairwise(own)
    )


@on_ranks(4)
def test_a_stage_is_not_whole_while_micro_batches_are_in_flight():
    """At most two of a stage's eight blocks at a time: the one in use and the next one, whatever M."""
    for schedule, count in (("1F1B", 4), ("GPipe", 4), ("GPipe", 12)):
        model = models.Decoder(depth=16).double()
        keys = {"cut": {"split": ["layers.8"]}, "gradient_accumulation_steps": count}
        with opened(3, schedule, model=model, **keys) as engine:
            feed = models.data(2 * count // models.COUNT, engine.dp_rank)
            for _ in range(2):
                engine.train_batch(feed)
            held = {unit.name: unit.full_nbytes for unit in engine.runtime.units}
            block = max(n for name, n in held.items() if name.startswith("layers."))
            whole = sum(held.values())
            rest = sum(n for name, n in held.items() if not name.startswith("layers."))
            peak = engine.runtime.ledger.peak("gathered")
            assert peak <= 2 * block + rest
            assert peak < 0.35 * whole


@pytest.mark.parametrize("schedule", PER_RANK)
@on_ranks(2)
def test_sequence_lengths_may_change_between_steps(schedule):
    plain = models.Decoder().double()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=models.LR)
    with opened(3, schedule, gradient_clipping=0.0) as engine:
        for step, length in enumerate((5, 3, 3, 7)):
            made = models.batches(step, 0, length)
            expected = torch.stack([models.loss_fn(plain(x), y) for x, y in made]).mean()
            found = engine.eval_batch(iter(made)), engine.train_batch(iter(made))
            assert [float(loss) for loss in found] == pytest.approx(
                [float(expected)] * 2, rel=1e-12
            )
            optimizer.zero_grad()
            expected.backward()
            optimizer.step()
        assert engine.module.training


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(4)
def test_all_stages_have_one_loss_scale(stage):
    """Only the last stage makes a loss. An overflow there is a skipped step on every rank."""
    fp16 = {"enabled": True, "initial_scale_power": 10, "hysteresis": 1, "loss_scale_window": 2}
    scales = []
    with opened(stage, model=models.Decoder().half(), fp16=fp16) as engine:
        for step in range(4):
            engine.module.loss_fn = infinite if step == 1 else models.loss_fn
            engine.train_batch(models.data(1, engine.dp_rank))
            scales.append((engine.last_step.loss_scale, engine.last_step.skipped))
        assert engine.skipped_steps == 1
        assert float(engine.scaler.scale) == 512.0
    assert scales == [(1024.0, False), (1024.0, True), (512.0, False), (512.0, False)]


def infinite(logits: Tensor, labels: Tensor) -> Tensor:
    return models.loss_fn(logits, labels) * float("inf")


@on_ranks(2)
def test_every_rank_names_the_first_parameter_of_the_model_whose_gradient_is_not_finite():
    fp16 = {"enabled": True, "initial_scale_power": 0, "min_loss_scale": 1, "hysteresis": 1}
    with opened(1, model=models.Decoder().half(), fp16=fp16) as engine:
        engine.module.loss_fn = infinite
        with pytest.raises(LossScaleError, match=r"First bad gradient: 'embed\.weight'"):
            engine.train_batch(models.data(1, engine.dp_rank))


class Sometimes(nn.Module):
    """A block whose linear layer runs for some inputs only."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(models.WIDTH, models.WIDTH)
        self.always = nn.Linear(models.WIDTH, models.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.always(x)
        return x + self.extra(x) if float(x.detach().sum()) > 0 else x


def sometimes() -> models.Decoder:
    model = models.Decoder().double()
    model.layers[1] = Sometimes().double()
    return model


def sorted_feed() -> tuple[list[Any], list[Any]]:
    """Micro-batches for which the layer of :func:`sometimes` runs, and those for which it does not."""
    probe, ran, runs, skips = sometimes(), [], [], []
    probe.layers[1].extra.register_forward_hook(lambda *_: ran.append(1))
    for x, y in itertools.chain.from_iterable(models.batches(seed, 0) for seed in range(4)):
        ran.clear()
        probe(x)
        (runs if ran else skips).append((x, y))
    return runs, skips


@pytest.mark.parametrize("place", range(models.COUNT))
@on_ranks(2)
def test_a_parameter_without_gradient_in_some_micro_batches_is_an_error_unless_declared(place):
    """After a first backward with all gradients, the hooks of the middle ones do not run."""
    runs, skips = sorted_feed()
    feed = [*runs[:place], skips[0], *runs[place : models.COUNT - 1]]
    assert len(feed) == models.COUNT
    with opened(1, model=sometimes(), units=["Block", "Sometimes"]) as engine:
        with pytest.raises(
            UsageError, match="rank 0: some parameters got a gradient from a part of the 4"
        ):
            engine.train_batch(iter(feed))
    names = ["layers.1.extra"]
    with opened(
        1, model=sometimes(), units=["Block", "Sometimes"], conditional_modules=names
    ) as engine:
        assert not engine.train_batch(iter(feed)).isnan()


@on_ranks(2)
def test_gradient_hooks_run_in_the_first_and_the_last_backward_of_a_step_only():
    calls = []
    with opened(1) as engine:
        for buffer in engine.runtime.reducer.buffers:
            take = buffer.take_grad
            buffer.take_grad = lambda *args, take=take: (calls.append(1), take(*args))[1]
        for step in range(2):
            engine.train_batch(iter(models.batches(step, 0)))
        params = sum(len(buffer.unit.params) for buffer in engine.runtime.reducer.buffers)
    assert len(calls) == 2 * 2 * params


@on_ranks(1)
def test_a_pipeline_of_one_rank_is_plain_training():
    model = models.Decoder().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=models.LR)
    with opened(3, ranks=1) as engine:
        for step in range(3):
            made = models.batches(step, 0)
            expected = torch.stack([models.loss_fn(model(x), y) for x, y in made]).mean()
            assert float(engine.eval_batch(iter(made))) == pytest.approx(float(expected), rel=1e-12)
            assert float(engine.train_batch(iter(made))) == pytest.approx(
                float(expected), rel=1e-12
            )
            optimizer.zero_grad()
            expected.backward()
            nn.utils.clip_grad_norm_(model.parameters(), models.CLIP)
            optimizer.step()
        wanted = dict(model.named_parameters())
        for name, value in engine.iter_full_params():
            assert torch.allclose(value, wanted[name], rtol=1e-10, atol=1e-13)
        assert engine(models.batches(0, 0)[0][0]).shape[-1] == models.VOCABULARY


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(4)
def test_offloaded_state_changes_no_bit(stage):
    def trained(**zero: Any) -> list[Tensor]:
        with opened(stage, "Interleaved1F1B", zero_optimization=zero) as engine:
            for _ in range(2):
                engine.train_batch(models.data(1, engine.dp_rank))
            return [value.clone() for _, value in engine.iter_full_params()]

    kept = trained()
    assert all(map(torch.equal, trained(offload_optimizer={"device": "cpu"}), kept))


@on_ranks(2)
def test_data_that_does_not_fit_a_step_is_refused_alike_on_every_rank():
    made = models.batches(0, 0)
    rank = torch.distributed.get_rank()
    with opened(1) as engine:
        cases = [
            (iter(made[:3]), "rank 0 has 3 of the 4 micro-batches"),
            (iter(made if rank == 0 else made[:2]), "rank 1 has 2 of the 4 micro-batches"),
            (None, "rank 0 got no data_iter"),
            (iter(made) if rank == 0 else None, "rank 1 got no data_iter"),
            (iter([x for x, _ in made]), "not a pair"),
            (iter([*made[:3], *models.batches(0, 0, 7)[3:]]), "different shapes in one step"),
        ]
        for feed, text in cases:
            for call in (engine.train_batch, engine.eval_batch):
                feed, again = itertools.tee(feed) if feed is not None else (None, None)
                with pytest.raises(UsageError, match=text):
                    call(again)
        with pytest.raises(StopIteration):
            engine.train_batch(iter(()))
        assert not engine.train_batch(iter(made)).isnan()
        assert engine.global_steps == 1
        assert engine.micro_steps == models.COUNT
        assert engine.global_samples == models.COUNT * models.MICRO_BATCH


@pytest.mark.parametrize(
    "call",
    ["forward", "backward", "step", "no_sync", "batches", "save_16bit_model", "save_pretrained"],
)
@on_ranks(2)
def test_calls_that_a_pipeline_does_not_have_are_refused_by_name(call):
    with opened(1) as engine:
        with pytest.raises(UsageError, match=rf"engine\.{call}\(\) of a pipeline"):
            getattr(engine, call)(torch.zeros(1))
        with pytest.raises(UsageError, match="of a pipeline"):
            engine(torch.zeros(1))


@on_ranks(2)
def test_models_and_schedules_that_do_not_fit_are_refused_before_ranks_meet():
    plain = {"config": models.config(1, parallel={"pipeline": 2}), "optimizer": models.adamw}
    with pytest.raises(UsageError, match="a Decoder, which is not cut into stages"):
        Engine(models.Decoder(), **plain)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"cut": {"split": ["layers.2", "layers.4"]}}, "3 stages, which is not a multiple of 2"),
        ({"cut": {"split": SPLITS[2]}}, "runs one stage per rank"),
        ({"gradient_accumulation_steps": 1}, "at least as many micro-batches as stages"),
        ({"schedule": "Interleaved1F1B", "gradient_accumulation_steps": 5}, "equal length"),
    ]
    for keys, text in cases:
        with pytest.raises(ZeroShardError, match=text):
            opened(1, **keys)
    with pytest.raises(ConfigError, match=r"parallel\.pipeline"):
        opened(1, ranks=3)
    with opened(1, cut={"loss_fn": None}) as engine, pytest.raises(UsageError, match="loss_fn="):
        engine.train_batch(iter(models.batches(0, 0)))


@on_ranks(4)
def test_what_a_pipeline_is_not_combined_with_is_refused_by_name():
    both = {"pipeline": 2, "tensor": 2}
    with pytest.raises(
        UsageError, match=r"pipeline 2 x tensor 2 .*no parameter of the model is cut"
    ):
        opened(1, parallel=both)
    with zero.Init(config_dict_or_path=models.config(3)):
        sharded = models.Decoder().double()
    with pytest.raises(UnsupportedError, match=r"built under zero\.Init"):
        opened(3, model=sharded)


@on_ranks(4)
def test_a_whole_model_may_be_built_under_zero_init_with_the_mesh():
    def losses(model: nn.Module) -> list[float]:
        with opened(3, model=model) as engine:
            return [float(engine.train_batch(models.data(2, engine.dp_rank))) for _ in range(2)]

    torch.manual_seed(0)
    plain = losses(models.Decoder().double())
    asked = models.config(3, parallel={"pipeline": 2})
    torch.manual_seed(0)
    with zero.Init(config_dict_or_path=asked, dtype=torch.float64):
        sharded = models.Decoder().double()
    assert losses(sharded) == plain


def in_two_groups(params: Any, *, keep_empty: bool = True) -> torch.optim.Optimizer:
    every = list(params)
    groups = [
        {"params": [p for p in every if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in every if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"] or keep_empty], lr=models.LR)


def one_rate_each(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=models.LR * (1 + torch.distributed.get_rank()))


def one_tensor_each(params: Any) -> torch.optim.Optimizer:
    rate = torch.tensor(models.LR * (1 + dist.get_rank()), dtype=torch.float64)
    return torch.optim.AdamW(params, lr=rate, foreach=False, capturable=False)


def one_list_each(params: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(params, lr=models.LR)
    optimizer.param_groups[0]["betas"] = [0.9, 0.99 + dist.get_rank() / 1000]
    return optimizer


@on_ranks(2)
def test_stages_with_other_options_of_the_optimizer_are_an_error(tmp_path):
    """Rank 0 saves the options for all. The second stage has the head, a matrix, alone."""
    cut = {"split": ["head"]}
    cases = [
        (one_rate_each, r"lr of param group 0 = 0\.01 \(rank 0,.* vs 0\.02 \(rank 1"),
        (
            one_tensor_each,
            r"lr of param group 0 = tensor 0\.01 \(rank 0,.* vs tensor 0\.02 \(rank 1",
        ),
        (
            one_list_each,
            r"betas of param group 0 = \(0\.9, 0\.99\) \(rank 0,.* vs \(0\.9, 0\.991\)",
        ),
        (
            partial(in_two_groups, keep_empty=False),
            r"number of param groups .*= 2 .* vs 1 \(rank 1",
        ),
    ]
    for optimizer, text in cases:
        with pytest.raises(RankMismatch, match=text):
            opened(1, cut=cut, model=without_bias(), optimizer=optimizer)
    with opened(1, cut=cut, model=without_bias(), optimizer=in_two_groups) as engine:
        engine.train_batch(models.data(1, 0))
        engine.save_checkpoint(tmp_path)
        saved = trained_values(engine)
    with opened(3, cut=cut, model=without_bias(), optimizer=in_two_groups) as engine:
        engine.load_checkpoint(tmp_path)
        loaded = trained_values(engine)
        assert all(torch.equal(loaded[name], value) for name, value in saved.items())


def without_bias() -> models.Decoder:
    model = models.Decoder().double()
    model.head = nn.Linear(models.WIDTH, models.VOCABULARY, bias=False).double()
    return model


@pytest.mark.parametrize(("schedule", "blocks"), [("Interleaved1F1B", 1), ("1F1B", 3)])
@on_ranks(4)
def test_a_model_on_the_meta_device_trains_and_frozen_stages_pass_on_no_gradient(schedule, blocks):
    """Stage 0 is frozen, so its output needs no gradient; with 1F1B its rank trains nothing."""
    with torch.device("meta"):
        model = models.Decoder().double()
    for param in (*model.embed.parameters(), *model.layers[:blocks].parameters()):
        param.requires_grad_(False)
    with opened(3, schedule, model=model) as engine:
        before = trained_values(engine)
        for step in range(2):
            assert not engine.train_batch(iter(models.batches(step, engine.dp_rank))).isnan()
        for name, value in trained_values(engine).items():
            is_frozen = name.startswith(("embed", *(f"layers.{at}." for at in range(blocks))))
            assert torch.equal(value, before[name]) == is_frozen, name


@on_ranks(1)
def test_only_pipelines_have_train_batch():
    with Engine(
        nn.Linear(2, 2), config=models.config(1, units="auto"), optimizer=models.adamw
    ) as engine:
        with pytest.raises(UsageError, match="this is a Linear"):
            engine.train_batch(iter(()))


def trained_values(engine: Engine) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in engine.iter_full_params()}


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(4)
def test_a_checkpoint_of_a_pipeline_is_that_of_the_whole_model(stage, tmp_path):
    """Saved by one schedule, it continues with another one, and without a pipeline."""
    with opened(stage, "1F1B") as engine:
        engine.train_batch(models.data(1, engine.dp_rank))
        engine.save_checkpoint(tmp_path)
        engine.train_batch(iter(models.batches(1, engine.dp_rank)))
        expected = trained_values(engine)
    with opened(4 - stage, "Interleaved1F1B") as engine:
        engine.load_checkpoint(tmp_path)
        engine.train_batch(iter(models.batches(1, engine.dp_rank)))
        for name, value in trained_values(engine).items():
            if name in expected:
                assert torch.allclose(value, expected[name], rtol=1e-12, atol=1e-14)
    config = models.config(stage)
    with Engine(models.Decoder().double(), config=config, optimizer=models.adamw) as engine:
        engine.load_checkpoint(tmp_path)
        # Four data-parallel ranks: two of them repeat the samples of the other two.
        for tokens, labels in models.batches(1, engine.dp_rank % 2):
            engine.backward(models.loss_fn(engine(tokens), labels))
            engine.step()
        values = trained_values(engine)
        assert all(
            torch.allclose(values[n], v, rtol=1e-12, atol=1e-14) for n, v in expected.items()
        )


class Counted(nn.Module):
    """Counts its forwards in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.zeros(1, dtype=torch.float64))
        self.linear = nn.Linear(models.WIDTH, models.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return self.linear(x)


def with_buffers() -> models.Decoder:
    model = models.Decoder().double()
    model.layers[1], model.layers[4] = Counted().double(), Counted().double()
    return model


@on_ranks(4)
def test_every_stage_runs_each_micro_batch_once_and_its_buffers_are_saved(tmp_path):
    """No forward is run to find shapes."""
    units = ["Block", "Counted"]
    with opened(1, model=with_buffers(), units=units) as engine:
        engine.train_batch(models.data(1, engine.dp_rank))
        assert [float(b) for b in engine.module.buffers()] == [models.COUNT]
        engine.save_checkpoint(tmp_path)
    with opened(1, model=with_buffers(), units=units) as engine:
        engine.load_checkpoint(tmp_path)
        assert [float(b) for b in engine.module.buffers()] == [models.COUNT]
    config = models.config(1, units=units)
    with Engine(with_buffers(), config=config, optimizer=models.adamw) as engine:
        engine.load_checkpoint(tmp_path)
        assert [float(b) for b in engine.module.buffers()] == [models.COUNT] * 2
