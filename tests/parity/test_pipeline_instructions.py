"""Programs that bring instructions, schedules or engines of their own train like plain PyTorch.

Each program below changes what DeepSpeed's pipeline engine does in one of the ways that public programs
use. Its code must run, as often and in the order that its schedule says, and no number may change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from zeroshard_testing import on_ranks

from zeroshard import deepspeed
from zeroshard.deepspeed import import_hook, pipe_schedule
from zeroshard.deepspeed.pipe_schedule import (
    BackwardPass,
    BufferOpInstruction,
    ForwardPass,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
    TrainSchedule,
)
from zeroshard.deepspeed.pipeline_engine import PipelineEngine
from zeroshard.deepspeed.pipeline_layers import TiedLayerSpec
from zeroshard.deepspeed.pipeline_module import PipelineModule

WIDTH, MICRO_BATCH, COUNT, STEPS, LR, CLIP = 6, 2, 3, 3, 1e-2, 0.2


class Pair(nn.Module):
    """Takes and gives activations and a mask; the mask needs no gradient."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.inner.bias.stride = 1  # as programs do that divide layers over tensor ranks

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, mask = pair
        return x + self.inner(x).tanh() * mask, mask


class Table(nn.Module):
    """Tied over the first and the last stage."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(77)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) / 2)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return pair[0] @ self.weight, pair[1]


def read_back(table: Table, pair: tuple[Tensor, Tensor]) -> Tensor:
    return pair[0] @ table.weight.T


def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels).square().mean()


def layers() -> list[Any]:
    ends = [TiedLayerSpec("table", Table), TiedLayerSpec("table", Table, forward_fn=read_back)]
    return [ends[0], *(Pair(seed) for seed in range(4)), ends[1]]


def batches(step: int) -> list[tuple[tuple[Tensor, Tensor], Tensor]]:
    draw = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, COUNT, MICRO_BATCH, WIDTH, dtype=torch.float64, generator=draw)
    masks = torch.rand(COUNT, MICRO_BATCH, 1, generator=draw) < 0.7
    return [((x[at], masks[at]), y[at]) for at in range(COUNT)]


@functools.cache
def expected() -> tuple[dict[str, Tensor], list[float], float]:
    """Parameters, losses and the last loss of an evaluation, of plain PyTorch in one process."""
    table, pairs = Table(), [Pair(seed) for seed in range(4)]
    named = {"tied_modules.table.weight": table.weight}
    for at, pair in enumerate(pairs, 1):
        named |= {f"{at}.{name}": param for name, param in pair.named_parameters()}
    optimizer = torch.optim.AdamW(named.values(), lr=LR)

    def loss_of(step: int) -> Tensor:
        losses = []
        for inputs, labels in batches(step):
            value: Any = table(inputs)
            for pair in pairs:
                value = pair(value)
            losses.append(loss_fn(read_back(table, value), labels))
        return torch.stack(losses).mean()

    losses = []
    for step in range(STEPS):
        loss = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(named.values(), CLIP)
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        return {name: p.detach() for name, p in named.items()}, losses, float(loss_of(99))


def config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": COUNT,
        "gradient_clipping": CLIP,
        "units": ["Pair"],
        "zero_optimization": {"stage": stage},
    }


def model(stages: int) -> PipelineModule:
    return PipelineModule(layers(), num_stages=stages, loss_fn=loss_fn, partition_method="uniform")


def built(kind: type[PipelineEngine], stages: int, stage: int, **more: Any) -> PipelineEngine:
    """As programs build a class of their own, without ``initialize``."""
    net = model(stages)
    args = mock.Mock(deepspeed_config=None)
    return kind(
        args=args, model=net, optimizer=torch.optim.AdamW(net.parameters(), lr=LR), mpu=net.mpu(),
        config=config(stage), config_class=object(), **more,
    )  # fmt: skip


def initialized(stages: int, stage: int) -> PipelineEngine:
    net = model(stages)
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=torch.optim.AdamW(net.parameters(), lr=LR), config=config(stage)
    )
    assert isinstance(engine, PipelineEngine)
    return engine


def check(engine: PipelineEngine, train: Callable[[Iterator[Any]], Any]) -> None:
    params, losses, tested = expected()
    with engine:
        found = [float(train(iter(batches(step)))) for step in range(STEPS)]
        assert found == pytest.approx(losses, rel=1e-12)
        assert float(engine.eval_batch(iter(batches(99)))) == pytest.approx(tested, rel=1e-12)
        own = dict(engine.iter_full_params())
        assert own
        for name, value in own.items():
            error = (value - params[name]).abs().max() / params[name].abs().max()
            assert error <= 1e-12, (name, float(error))
        assert (engine.global_steps, engine.micro_steps) == (STEPS, STEPS * COUNT)
        assert engine.global_samples == STEPS * COUNT * MICRO_BATCH * engine.dp_size


# ---------------------------------------------------------------------- the ways of programs


class Derived(PipelineEngine):
    """Overrides a method of each kind, and calls the one that it overrides."""

    def __init__(self, *args: Any, note: str = "", **options: Any) -> None:
        super().__init__(*args, **options)
        self.note, self.ran = note, []

    def _exec_forward_pass(self, buffer_id: int) -> None:
        self.ran.append(("forward", buffer_id))
        super()._exec_forward_pass(buffer_id)

    def _exec_backward_pass(self, buffer_id: int) -> None:
        self.ran.append(("backward", buffer_id))
        super()._exec_backward_pass(buffer_id)

    def _exec_optimizer_step(self, lr_kwargs: Any = None) -> None:
        self.ran.append(("step", self.global_steps))
        super()._exec_optimizer_step(lr_kwargs)


def derived(stages: int, stage: int) -> None:
    engine = built(Derived, stages, stage, note="mine")
    check(engine, engine.train_batch)
    assert engine.note == "mine"
    schedule = TrainSchedule(COUNT, stages, engine.stage_id)
    wanted = [
        ("forward" if isinstance(each, ForwardPass) else "backward", each.buffer_id)
        for step in schedule
        for each in step
        if isinstance(each, (ForwardPass, BackwardPass))
    ]
    assert engine.ran[: len(wanted) + 1] == [*wanted, ("step", 0)]


def own_forward(self: PipelineEngine, buffer_id: int) -> None:
    """A forward that is written anew: several losses, of which the first is trained."""
    inputs = tuple(each.clone() for each in self.pipe_buffers["inputs"][buffer_id])
    outputs = super(PipelineEngine, self).forward(inputs)
    self.pipe_buffers["outputs"][buffer_id] = outputs
    if self.is_last_stage():
        self.loss = self.module.loss_fn(outputs, self.pipe_buffers["labels"][buffer_id])
        self.fwd_outputs.append([self.loss.detach(), outputs.detach().abs().mean()])


class Losses(PipelineEngine):
    """Its own ``train_batch`` and ``eval_batch`` run a schedule, and combine the losses."""

    def train_batch(self, data_iter: Any) -> Any:
        self.set_dataiterator(data_iter)
        self.module.train()
        self._exec_schedule(TrainSchedule(self.micro_batches, self.num_stages, self.stage_id))
        return self.mean_loss()

    def eval_batch(self, data_iter: Any) -> Any:
        self.set_dataiterator(data_iter)
        self.module.eval()
        with torch.no_grad():
            self._exec_schedule(
                pipe_schedule.InferenceSchedule(self.micro_batches, self.num_stages, self.stage_id)
            )
        return self.mean_loss()

    def mean_loss(self) -> Tensor:
        found = None
        if self.is_last_stage():
            assert len(self.fwd_outputs) == COUNT
            found = torch.stack([first for first, _ in self.fwd_outputs]).mean()
            if self.is_data_parallel:
                deepspeed.comm.all_reduce(found, group=self.grid.get_data_parallel_group())
                found /= self.dp_world_size
        return self._bcast_pipe_scalar(found)


def map_entry(stages: int, stage: int) -> None:
    with mock.patch.dict(PipelineEngine._INSTRUCTION_MAP, {ForwardPass: own_forward}):
        engine = built(Losses, stages, stage)
        check(engine, engine.train_batch)


class ForwardsFirst(pipe_schedule.PipeSchedule):
    """All forwards, then all backwards."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for at in range(self.micro_batches):
            made: list[PipeInstruction] = []
            if self.is_first_stage or self.is_last_stage:
                made.append(LoadMicroBatch(at))
            made += [] if self.is_first_stage else [RecvActivation(at)]
            made.append(ForwardPass(at))
            yield made + ([] if self.is_last_stage else [SendActivation(at)])
        if not self.is_last_stage:  # all of them before the first is used
            yield [RecvGrad(at) for at in range(self.micro_batches)]
        for at in range(self.micro_batches):
            made = [BackwardPass(at)]
            yield made + ([] if self.is_first_stage else [SendGrad(at)])
        yield [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]


def whole_schedule(stages: int, stage: int) -> None:
    names = import_hook.module("runtime.pipe.schedule")
    with mock.patch.object(names, "TrainSchedule", ForwardsFirst):
        engine = initialized(stages, stage)
        ran = mock.Mock(wraps=ForwardsFirst.steps)
        with mock.patch.object(ForwardsFirst, "steps", lambda self: ran(self)):
            check(engine, engine.train_batch)
        assert ran.call_count == STEPS


def patched_steps(stages: int, stage: int) -> None:
    """Loads come before messages."""
    plain, seen = TrainSchedule.steps, []

    def steps(self: TrainSchedule) -> Iterator[list[PipeInstruction]]:
        for made in plain(self):
            seen.append(sorted(made, key=lambda each: not isinstance(each, LoadMicroBatch)))
            yield seen[-1]

    with mock.patch.object(TrainSchedule, "steps", steps):
        engine = initialized(stages, stage)
        check(engine, engine.train_batch)
    assert len(seen) == 2 * STEPS * (COUNT + stages - 1)


def own_loop(stages: int, stage: int) -> None:
    """``_exec_schedule`` and single methods of the class are replaced, as programs that trace do."""
    ran: list[str] = []
    plain = PipelineEngine._exec_send_activations

    def traced(self: PipelineEngine, buffer_id: int) -> None:
        ran.append("send")
        plain(self, buffer_id)

    def run(self: PipelineEngine, schedule: Any) -> None:
        self._reserve_pipe_buffers(schedule.num_pipe_buffers())
        self.fwd_outputs = []
        for step in schedule:
            for each in step:
                self._INSTRUCTION_MAP[type(each)](self, **each.kwargs)

    entries = {SendActivation: traced}
    with (
        mock.patch.object(PipelineEngine, "_exec_schedule", run),
        mock.patch.object(PipelineEngine, "_exec_send_activations", traced),
        mock.patch.dict(PipelineEngine._INSTRUCTION_MAP, entries),
    ):
        engine = initialized(stages, stage)
        check(engine, engine.train_batch)
    assert len(ran) == (0 if engine.is_last_stage() else (STEPS + 1) * COUNT)


class InputGradients(BufferOpInstruction):
    """The part of a backward that the stage before waits for."""


class WeightGradients(PipeInstruction):
    """The rest."""


QUEUE: list[tuple[nn.Parameter, Tensor]] = []


class LateWeight(torch.autograd.Function):
    """A product whose weight gradient is computed later, and put into ``.grad`` by the program."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, weight = ctx.saved_tensors
        QUEUE.append((ctx.weight, grad.T @ x))
        return grad @ weight, None


def late_inner(self: Pair, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    x, mask = pair
    y = LateWeight.apply(x, self.inner.weight) + self.inner.bias
    return x + y.tanh() * mask, mask


def input_gradients(self: PipelineEngine, buffer_id: int) -> None:
    if self.is_last_stage():
        super(PipelineEngine, self).backward(self.loss)
        return
    outputs = [each for each in self.pipe_buffers["outputs"][buffer_id] if each.is_floating_point()]
    torch.autograd.backward(outputs, self.grad_layer)


def weight_gradients(self: PipelineEngine) -> None:
    for weight, grad in QUEUE:
        weight.grad = grad if weight.grad is None else weight.grad + grad
    QUEUE.clear()


class Halves(TrainSchedule):
    def steps(self) -> Iterator[list[PipeInstruction]]:
        for step in super().steps():
            made: list[PipeInstruction] = []
            for each in step:
                if isinstance(each, BackwardPass):
                    made += [InputGradients(each.buffer_id), WeightGradients()]
                else:
                    made.append(each)
            yield made


def two_halves(stages: int, stage: int) -> None:
    entries = {InputGradients: input_gradients, WeightGradients: weight_gradients}
    with (
        mock.patch.dict(PipelineEngine._INSTRUCTION_MAP, entries),
        mock.patch.object(import_hook.module("runtime.pipe.schedule"), "TrainSchedule", Halves),
        mock.patch.object(Pair, "forward", late_inner),
    ):
        engine = initialized(stages, stage)
        check(engine, engine.train_batch)


WAYS = (derived, map_entry, whole_schedule, patched_steps, own_loop, two_halves)


@pytest.mark.parametrize("stage", (0, 1, 2, 3))
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_programs_with_instructions_of_their_own_train_like_plain_pytorch(way, stage):
    expected()  # before a program patches the layers
    way(2, stage)
