"""The engine of a ``PipelineModule``: evaluation, data, first values, checkpoints, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from zeroshard_testing import on_ranks

from zeroshard import deepspeed
from zeroshard.deepspeed.pipeline_engine import PipelineEngine
from zeroshard.deepspeed.pipeline_layers import LayerSpec, TiedLayerSpec
from zeroshard.deepspeed.pipeline_module import PipelineModule
from zeroshard.errors import ConfigError, UsageError

WIDTH, MICRO_BATCH, COUNT = 6, 2, 3


def mean_square(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels).square().mean()


def read_backwards(layer: nn.Module, x: Tensor) -> Tensor:
    return x @ layer.weight


def layers() -> list[Any]:
    table = TiedLayerSpec("table", nn.Linear, WIDTH, WIDTH, bias=False)
    back = TiedLayerSpec("table", nn.Linear, WIDTH, WIDTH, bias=False, forward_fn=read_backwards)
    specs = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(3)]
    return [table, torch.tanh, *specs, torch.tanh, back]


def opened(stages: int = 2, *, stage: int = 1, data: Any = None, **options: Any) -> PipelineEngine:
    keys = options.pop("keys", {})
    model = PipelineModule(
        options.pop("layers", layers()),
        **{"num_stages": stages, "loss_fn": mean_square, "partition_method": "uniform", **options},
    )
    engine, *_ = deepspeed.initialize(
        model=model.double(),
        training_data=data,
        config={
            "train_micro_batch_size_per_gpu": MICRO_BATCH,
            "gradient_accumulation_steps": COUNT,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": stage},
            **keys,
        },
    )
    assert isinstance(engine, PipelineEngine)
    return engine


def batches(count: int = COUNT, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    made = torch.randn(2, count, MICRO_BATCH, WIDTH, dtype=torch.float64, generator=draw)
    return list(zip(*made, strict=True))


def values(engine: PipelineEngine) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in engine.iter_full_params()}


def whole(engine: PipelineEngine) -> nn.Sequential:
    """The model of both ranks' parameters, in one process."""
    found: list[Any] = [None, None]
    torch.distributed.all_gather_object(found, values(engine))
    params = found[0] | found[1]
    table = params["tied_modules.table.weight"]

    def run(x: Tensor) -> Tensor:
        x = (x @ table.T).tanh()
        for at in (2, 3, 4):
            x = x @ params[f"{at}.weight"].T + params[f"{at}.bias"]
        return x.tanh() @ table

    return run  # type: ignore[return-value]


@on_ranks(2)
def test_evaluation_gives_losses_outputs_or_their_means():
    with opened() as engine:
        model, last, made = whole(engine), engine.is_last_stage(), batches()
        outputs = [model(x) for x, _ in made]
        losses = [mean_square(y, z) for y, (_, z) in zip(outputs, made, strict=True)]
        mean = torch.stack(losses).mean()

        def close(found: Any, wanted: Any) -> bool:
            if isinstance(wanted, list):
                return all(map(close, found, wanted))
            return torch.allclose(found, wanted, rtol=1e-12, atol=1e-14)

        assert close(engine.eval_batch(iter(made)), mean)
        loss, logits = engine.eval_batch(iter(made), return_logits=True)
        assert close(loss, mean)
        assert close(logits, outputs[-1]) if last else logits is None
        found = engine.eval_batch(iter(made), compute_loss=False)
        assert close(found, torch.stack(outputs).mean(0)) if last else found is None
        found = engine.eval_batch(iter(made), compute_loss=False, reduce_output=None)
        assert close(found, outputs) if last else found is None
        found = engine.eval_batch(iter(made), reduce_output=None)
        assert close(found, losses) if last else found is None
        found = engine.eval_batch(iter(made), bcast_loss=False)
        assert close(found, mean) if last else found is None
        assert close(engine.eval_batch(iter(made), num_micro_batches=1), losses[0])
        for options, text in (
            ({"reduce_output": "max"}, "reduce_output='max'"),
            ({"num_micro_batches": 0}, "num_micro_batches=0"),
        ):
            with pytest.raises(UsageError, match=text):
                engine.eval_batch(iter(made), **options)
        assert engine.global_steps == 0


@on_ranks(2)
def test_tied_layers_that_ranks_draw_differently_start_as_on_the_first_stage():
    torch.manual_seed(0)
    wanted = nn.Linear(WIDTH, WIDTH, bias=False).weight
    torch.manual_seed(torch.distributed.get_rank())
    alone = PipelineModule(layers(), num_stages=2, partition_method="uniform")
    assert torch.equal(alone.tied_modules["table"].weight, wanted)
    torch.manual_seed(torch.distributed.get_rank())
    with opened(stage=3) as engine:
        assert torch.equal(values(engine)["tied_modules.table.weight"], wanted.double())
        model, made = whole(engine), batches()
        wanted = torch.stack([mean_square(model(x), y) for x, y in made]).mean()
        assert float(engine.train_batch(iter(made))) == pytest.approx(float(wanted), rel=1e-12)


class Annealing:
    """A schedule that counts samples, as Megatron's: ``step`` has no default."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.samples = optimizer, 0

    def step(self, increment: int, tokens: int | None = None) -> None:
        self.samples += increment
        for group in self.optimizer.param_groups:
            group["lr"] = 1 / self.samples

    def state_dict(self) -> dict[str, int]:
        return {"samples": self.samples}


@on_ranks(2)
def test_a_schedule_that_counts_samples_gets_those_of_the_step():
    engine = opened()
    schedule = engine.lr_scheduler = Annealing(engine.optimizer)
    for number in (1, 2):
        engine.train_batch(iter(batches(seed=number)))
        assert schedule.samples == number * MICRO_BATCH * COUNT
        assert engine.get_lr() == [1 / schedule.samples]
    engine.destroy()


@on_ranks(2)
def test_training_data_is_read_in_order_again_and_again():
    """Three samples are left over at the end of the data; the loader fills the last batch."""
    draw = torch.Generator().manual_seed(3)
    x, y = torch.randn(2, 8, WIDTH, dtype=torch.float64, generator=draw)
    with opened(data=TensorDataset(x, y)) as engine:
        seen: list[Tensor] = []

        def note(batch: Any) -> Any:
            seen.append(batch[0])
            return batch[0] * 2, batch[1]

        engine.set_batch_fn(note)
        for _ in range(2):
            model = whole(engine)
            picked = [(x[at : at + 2] * 2, y[at : at + 2]) for at in ((0, 2, 4), (6, 0, 2))[_]]
            wanted = torch.stack([mean_square(model(a), b) for a, b in picked]).mean()
            assert float(engine.train_batch()) == pytest.approx(float(wanted), rel=1e-12)
        assert torch.equal(torch.cat(seen), x[[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]])
        assert engine.agg_train_loss is not None
        with pytest.raises(UsageError, match=r"inside torch\.no_grad"), torch.no_grad():
            engine.train_batch()


@on_ranks(2)
def test_a_checkpoint_of_two_stages_loads_into_one(tmp_path):
    torch.manual_seed(0)
    with opened(stage=2) as engine:
        engine.train_batch(iter(batches()))
        engine.save_checkpoint(tmp_path)
        expected = float(engine.eval_batch(iter(batches(seed=5))))
        two = values(engine)
    with opened(1, stage=3) as engine:
        engine.load_checkpoint(tmp_path)
        one = values(engine)
        assert float(engine.eval_batch(iter(batches(seed=5)))) == pytest.approx(expected, rel=1e-12)
        assert all(torch.equal(one[name], value) for name, value in two.items())
    with opened(stage=1, partition_method="type:linear") as engine:
        engine.load_checkpoint(tmp_path)
        assert all(torch.equal(one[name], value) for name, value in values(engine).items())


class Loss(nn.Module):
    """A last layer that returns the loss itself."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


@on_ranks(2)
def test_fewer_micro_batches_than_stages_and_a_last_layer_that_is_the_loss():
    model = [*layers(), Loss()]
    with opened(layers=model, loss_fn=None, keys={"gradient_accumulation_steps": 1}) as engine:
        run, made = whole(engine), batches(1)
        wanted = run(made[0][0]).square().mean()
        assert float(engine.train_batch(iter(made))) == pytest.approx(float(wanted), rel=1e-12)
        engine.set_train_batch_size(4 * MICRO_BATCH)
        assert engine.micro_batches == 4
        engine.train_batch(iter(batches(4)))


@on_ranks(2)
def test_what_does_not_fit_is_refused_alike_on_every_rank():
    with opened() as engine:
        for call in ("forward", "backward", "step"):
            with pytest.raises(UsageError, match=rf"engine\.{call}\(\) of a pipeline"):
                getattr(engine, call)(torch.zeros(1))
        mpu = engine.grid
        assert (mpu.get_pipe_parallel_world_size(), engine.mpu) == (2, mpu)
        assert [engine.is_first_stage(), engine.is_last_stage()] == [
            engine.stage_id == 0,
            engine.stage_id == 1,
        ]
    with pytest.raises(UsageError, match="whose topology says where each rank is"):
        deepspeed.initialize(model=PipelineModule(layers(), num_stages=2), mpu=mpu, config={})
    with pytest.raises(ConfigError, match=r"the axis pipe of PipelineModule is 2"):
        opened(keys={"parallel": {"pipeline": 1, "tensor": 2}})
