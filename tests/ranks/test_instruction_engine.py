"""Instructions of a pipeline outside of the common way: what works, and what is refused in words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from zeroshard_testing import on_ranks, run_ranks

from zeroshard import deepspeed
from zeroshard.deepspeed import import_hook, pipeline_engine
from zeroshard.deepspeed.pipe_schedule import (
    BackwardPass,
    DataParallelSchedule,
    ForwardPass,
    InferenceSchedule,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    RecvActivation,
    ReduceGrads,
    SendActivation,
    TrainSchedule,
)
from zeroshard.deepspeed.pipeline_engine import PipelineEngine
from zeroshard.deepspeed.pipeline_module import PipelineModule
from zeroshard.errors import RankLost, UnsupportedError, UsageError, ZeroShardError

WIDTH, MICRO_BATCH, COUNT = 4, 2, 3


def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels).square().mean()


def opened(stages: int = 2, *, stage: int = 1, **options: Any) -> PipelineEngine:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    model = PipelineModule(layers, num_stages=stages, loss_fn=loss_fn, **options)
    engine, *_ = deepspeed.initialize(
        model=model.double(),
        config={
            "train_micro_batch_size_per_gpu": MICRO_BATCH,
            "gradient_accumulation_steps": COUNT,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": stage},
        },
    )
    assert isinstance(engine, PipelineEngine)
    return engine


def batches(count: int = COUNT) -> Iterator[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    made = torch.randn(2, count, MICRO_BATCH, WIDTH, dtype=torch.float64, generator=draw)
    return iter(list(zip(*made, strict=True)))


@on_ranks(2)
def test_an_engine_that_is_not_changed_runs_torchs_schedule():
    with opened() as engine, mock.patch.object(engine._pipeline, "train") as ran:
        ran.side_effect = ValueError("torch's schedule")
        assert pipeline_engine.changed(engine) == ""
        with pytest.raises(ValueError, match="torch's schedule"):
            engine.train_batch(batches())


@on_ranks(2)
def test_every_change_is_seen():
    names = import_hook.module("runtime.pipe.schedule")
    with opened() as engine:
        for target, name, wanted in (
            (PipelineEngine, "_exec_reduce_grads", "_exec_reduce_grads"),
            (engine, "_next_batch", "_next_batch"),
            (InferenceSchedule, "num_pipe_buffers", "InferenceSchedule.num_pipe_buffers"),
            (names, "TrainSchedule", "deepspeed.runtime.pipe.schedule.TrainSchedule"),
        ):
            with mock.patch.object(target, name, mock.Mock()):
                assert pipeline_engine.changed(engine) == wanted
        with mock.patch.dict(PipelineEngine._INSTRUCTION_MAP, {PipeInstruction: print}):
            assert pipeline_engine.changed(engine) == "_INSTRUCTION_MAP"
        assert pipeline_engine.changed(engine) == ""


@on_ranks(2)
def test_a_class_in_the_package_is_built_by_initialize_and_a_module_may_cut_itself():
    class Mine(PipelineEngine):
        pass

    class Uneven(PipelineModule):
        def __init__(self, *args: Any, cut: int, **options: Any) -> None:
            self.cut = cut
            super().__init__(*args, **options)

        def _partition_layers(self, method: str = "uniform") -> None:
            if method.lower() != "manual":
                super()._partition_layers(method)
                return
            assert len(self._count_layer_params()) == len(self._layer_specs) == 4
            self.parts = [0, self.cut, len(self._layer_specs)]
            self._set_bounds(start=self.parts[self.stage_id_of()], stop=4)

        def stage_id_of(self) -> int:
            return int(self._topo.get_coord(self.global_rank).pipe)

    layers = [nn.Linear(2, 2) for _ in range(4)]
    model = Uneven(layers, num_stages=2, loss_fn=loss_fn, partition_method="manual", cut=1)
    assert model.parts == [0, 1, 4]
    assert len(model.forward_funcs) == (1 if model.stage_id == 0 else 3)
    assert Uneven(layers, num_stages=2, partition_method="uniform", cut=1).parts == [0, 2, 4]
    for cut in (0, 4, 2.5):
        with pytest.raises(UsageError, match=r"_partition_layers\(\) of the program has set parts"):
            Uneven(layers, num_stages=2, partition_method="manual", cut=cut)
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD"}}
    with mock.patch.object(deepspeed, "PipelineEngine", Mine):
        engine, *_ = deepspeed.initialize(model=model, config=config)
    assert type(engine) is Mine
    engine.close()
    with (
        mock.patch.object(deepspeed, "PipelineEngine", print),
        pytest.raises(UsageError, match="only classes that are derived from PipelineEngine"),
    ):
        deepspeed.initialize(model=PipelineModule(layers, num_stages=2), config=config)


class Unused(PipelineEngine):
    def _send_tensor_meta(self, buffer: Any, recv_stage: int) -> None:
        """Never called."""


@on_ranks(2)
def test_overrides_that_nothing_would_call_are_refused():
    def model() -> PipelineModule:
        return PipelineModule([nn.Linear(2, 2) for _ in range(2)], num_stages=2)

    with pytest.raises(UnsupportedError, match="Unused has a method _send_tensor_meta of its own"):
        Unused(model(), config={"train_batch_size": 2})
    with pytest.raises(UsageError, match="another mpu than that of the model"):
        PipelineEngine(model(), mpu=model().mpu(), config={})


@on_ranks(2)
def test_forwards_and_messages_run_outside_of_a_schedule_and_backwards_do_not():
    with opened() as engine:
        engine._reserve_pipe_buffers(1)
        inputs, labels = next(batches())
        with torch.no_grad():
            if engine.is_first_stage():
                engine.pipe_buffers["inputs"][0] = inputs
                engine._exec_forward_pass(0)
                engine._exec_send_activations(0)
            else:
                engine.pipe_buffers["labels"][0] = labels
                engine._exec_recv_activations(0)
                engine._exec_forward_pass(0)
        found = engine.loss
        loss = engine.eval_batch(batches(), num_micro_batches=1)
        if engine.is_last_stage():
            assert float(found) == pytest.approx(float(loss), rel=1e-12)
        for call, given in (
            ("forward_pass", (0,)),
            ("backward_pass", (0,)),
            ("optimizer_step", ()),
        ):
            with pytest.raises(UsageError, match=rf"_exec_{call}\(\) outside of a schedule"):
                getattr(engine, f"_exec_{call}")(*given)
        lonely = "send_activations" if engine.is_last_stage() else "recv_activations"
        with pytest.raises(UsageError, match=r"stage \d of 2 has no neighbour"):
            getattr(engine, f"_exec_{lonely}")(0)


@pytest.mark.parametrize("stage", (1, 3))
@on_ranks(2)
def test_an_optimizer_may_come_later_below_stage_3(stage):
    def model() -> PipelineModule:
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        return PipelineModule(layers, num_stages=2, loss_fn=loss_fn).double()

    def sgd(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    keys = {"train_micro_batch_size_per_gpu": MICRO_BATCH, "gradient_accumulation_steps": COUNT}
    keys |= {"zero_optimization": {"stage": stage}}
    engine, *_ = deepspeed.initialize(model=model(), config=keys)
    with engine:
        engine.mine = "kept"
        if stage == 3:
            with pytest.raises(UnsupportedError, match="below stage 3"):
                engine._configure_optimizer(sgd, [*engine.module.parameters()])
            return
        with pytest.raises(UsageError, match="without an optimizer"):
            engine.train_batch(batches())
        engine._configure_optimizer(sgd, [*engine.module.parameters()])
        other, *_ = deepspeed.initialize(model=model(), optimizer=sgd, config=keys)
        with other:
            assert torch.equal(engine.train_batch(batches()), other.train_batch(batches()))
            assert engine.mine == "kept"
            pairs = zip(engine.iter_full_params(), other.iter_full_params(), strict=True)
            assert all(torch.equal(one, two) for (_, one), (_, two) in pairs)


@on_ranks(4)
def test_a_grid_has_the_ranks_of_its_groups():
    grid = PipelineModule([nn.Linear(2, 2) for _ in range(2)], num_stages=2).mpu()
    rank = grid.global_rank
    assert grid.pp_group == [rank % 2, rank % 2 + 2]
    assert grid.dp_group == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert (grid.slice_group, grid.pipe_groups) == ([rank], [[0, 2], [1, 3]])
    assert grid.dp_groups == [[0, 1], [2, 3]]
    assert grid.pp_proc_group is grid.get_pipe_parallel_group()
    assert (grid.ds_model_rank, grid.ds_model_world_size) == (rank // 2, 2)


@on_ranks(2)
def test_programs_send_and_receive_between_stages():
    with opened() as engine:
        p2p = import_hook.module("runtime.pipe.p2p")
        tensor = torch.full((3,), engine.stage_id + 1.0)
        if engine.stage_id:
            p2p.recv(tensor, 0)
            p2p.send(2 * tensor, 0)
        else:
            p2p.send(tensor, 1)
            p2p.recv(tensor, 1)
        assert tensor.tolist() == ([1.0] * 3 if engine.stage_id else [2.0] * 3)


@on_ranks(2)
def test_a_schedule_may_leave_its_gradients_to_the_next_one_and_outputs_can_be_read():
    class Half(TrainSchedule):
        def steps(self) -> Iterator[list[PipeInstruction]]:
            for step in super().steps():
                yield [each for each in step if not isinstance(each, (OptimizerStep, ReduceGrads))]

    class Rest(TrainSchedule):
        def steps(self) -> Iterator[list[PipeInstruction]]:
            yield [ReduceGrads(), OptimizerStep()]

    with opened(stage=2) as engine, opened(stage=1) as other:
        place = engine.num_stages, engine.stage_id
        other.train_batch(batches())
        feed = batches()
        engine.set_dataiterator(feed)
        engine._exec_schedule(Half(COUNT - 1, *place))
        engine._exec_schedule(Half(1, *place))
        assert engine.global_steps == 0
        engine._exec_schedule(Rest(0, *place))
        assert engine.global_steps == 1
        for (_, one), (_, two) in zip(
            engine.iter_full_params(), other.iter_full_params(), strict=True
        ):
            assert torch.allclose(one, two, rtol=1e-12, atol=1e-14)
        with torch.no_grad():
            engine.set_dataiterator(batches())
            engine._exec_schedule(InferenceSchedule(2, *place))
            assert all(out.shape == (MICRO_BATCH, WIDTH) for out in engine.pipe_buffers["outputs"])


class Steps(DataParallelSchedule):
    """An update after each micro-batch."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for _ in range(self.micro_batches):
            yield [
                LoadMicroBatch(0),
                ForwardPass(0),
                BackwardPass(0),
                ReduceGrads(),
                OptimizerStep(),
            ]


@on_ranks(2)
def test_a_schedule_may_update_several_times_and_has_to_reduce():
    """One stage on two data-parallel ranks; each loss is divided by the number of micro-batches."""

    class Unreduced(DataParallelSchedule):
        def steps(self) -> Iterator[list[PipeInstruction]]:
            for step in super().steps():
                yield [each for each in step if not isinstance(each, ReduceGrads)]

    with opened(1, stage=3) as engine:
        weights = {name: value.clone() for name, value in engine.iter_full_params()}
        engine.set_dataiterator(batches())
        engine._exec_schedule(Steps(COUNT, 1, 0))
        assert engine.global_steps == COUNT
        run = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).double()
        run.load_state_dict(weights)
        optimizer = torch.optim.SGD(run.parameters(), lr=0.1)
        for inputs, labels in batches():
            (loss_fn(run(inputs), labels) / COUNT).backward()
            nn.utils.clip_grad_norm_(run.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        wanted = dict(run.named_parameters())
        for name, value in engine.iter_full_params():
            assert torch.allclose(value, wanted[name], rtol=1e-12, atol=1e-14), name
        engine.set_dataiterator(batches())
        with pytest.raises(UsageError, match="gradients that ReduceGrads has not reduced"):
            engine._exec_schedule(Unreduced(COUNT, 1, 0))
        engine.train_batch(batches())  # one pipeline rank goes on: its gradients were dropped


class Named(PipelineModule):
    """Gives a loss for the log beside the trained one."""

    last: Tensor | None = None

    def get_additional_losses(self) -> dict[str, Tensor] | None:
        return {"size": torch.zeros(()) if self.last is None else self.last}

    def loss_of_all(self, outputs: Tensor, labels: Tensor) -> Tensor:
        self.last = labels.square().sum()
        return loss_fn(outputs, labels)


@pytest.mark.parametrize("changed", (False, True))
@on_ranks(2)
def test_additional_losses_are_means_on_every_rank(changed):
    model = Named([nn.Linear(WIDTH, WIDTH) for _ in range(2)], num_stages=2, loss_fn=loss_fn)
    model.loss_fn = model.loss_of_all
    keys = {"train_micro_batch_size_per_gpu": MICRO_BATCH, "gradient_accumulation_steps": COUNT}
    optimizer = {"type": "SGD", "params": {"lr": 0.1}}
    kind = Ragged if changed else PipelineEngine
    with kind(model.double(), config={**keys, "optimizer": optimizer}) as engine:
        wanted = torch.stack([labels.square().sum() for _, labels in batches()]).mean()
        for _ in range(2):
            engine.train_batch(batches())
            assert float(engine.get_additional_losses()["size"]) == pytest.approx(float(wanted))
            engine.eval_batch(batches())


class Ragged(PipelineEngine):
    """Changes a method without a change of what it does, so that instructions run."""

    def _next_batch(self) -> Any:
        return super()._next_batch()


# ---------------------------------------------------------------------- ranks that do not fit together


class SendsTwice(TrainSchedule):
    def steps(self) -> Iterator[list[PipeInstruction]]:
        yield [LoadMicroBatch(0), ForwardPass(0), SendActivation(0), SendActivation(0)]


class ReceivesOnce(TrainSchedule):
    def steps(self) -> Iterator[list[PipeInstruction]]:
        yield [RecvActivation(0)]


class Unknown(TrainSchedule):
    def steps(self) -> Iterator[list[PipeInstruction]]:
        yield [PipeInstruction(size=3)]


def train(schedules: list[Any], count: int, changes: list[bool]) -> None:
    """One step, in which each rank has a schedule of its own; None: the usual one."""
    model = PipelineModule(
        [nn.Linear(WIDTH, WIDTH) for _ in range(2)], num_stages=2, loss_fn=loss_fn
    )
    keys = {"train_micro_batch_size_per_gpu": MICRO_BATCH, "gradient_accumulation_steps": COUNT}
    keys |= {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    kind = Ragged if changes[model.global_rank] else PipelineEngine
    with kind(model.double(), config=keys) as engine:
        schedule = schedules[engine.global_rank]
        if schedule is not None:
            engine._train_schedule = lambda: schedule(COUNT, 2, engine.stage_id)  # type: ignore[method-assign]
        try:
            engine.train_batch(batches(count))
        except UsageError as error:
            if "instructions of its program" not in str(error):
                with pytest.raises(ZeroShardError, match="ended in the middle"):
                    engine.train_batch(batches())
            raise


@pytest.mark.parametrize(
    ("schedules", "count", "changes", "text"),
    [
        (
            [SendsTwice, ReceivesOnce],
            3,
            [True, True],
            "rank 0 sent 2 activations in this step",
        ),
        ([None, None], 3, [False, True], "rank 1 runs the pipeline by instructions of its program"),
        ([None, None], 2, [True, True], "has 2 micro-batches of the step: its data_iter has ended"),
        (
            [None, Unknown],
            3,
            [True, True],
            r"no method for the instruction PipeInstruction\(size=3\)",
        ),
    ],
)
def test_ranks_that_do_not_fit_together_raise(schedules, count, changes, text, monkeypatch):
    monkeypatch.setenv("ZEROSHARD_STALL_S", "0.4")
    found = run_ranks(train, 2, schedules, count, changes, keep_exceptions=True)
    assert any(re.search(text, str(error)) for error in found)
    for error in found:
        assert isinstance(error, (UsageError, RankLost)), error
        assert re.search(text, str(error))  # also where another rank was the cause
