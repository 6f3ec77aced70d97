"""Runs the engine of one rank of any mesh in one process, without memory and without other ranks.

The engine, the schedule and the optimizer are those that train. Tensors are fake: they have shapes and no
values. The process group is fake too. So the result is what this rank of a real run would hold, send and
receive, as far as it does not depend on values.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from zeroshard.comm.collectives import RecordedComm
from zeroshard.comm.mesh_objects import mesh_sources
from zeroshard.comm.planned import PlannedShm, nodes_of
from zeroshard.comm.process_group import GlooComm, ProcessGroupComm
from zeroshard.comm.shm import ShmComm
from zeroshard.comm.simulation import CallLog, lone_rank
from zeroshard.config import load_config
from zeroshard.config.parse import read_source
from zeroshard.core.mesh import DIMS, HOLDERS, SHARDS, Mesh
from zeroshard.device.choice import planned_memory
from zeroshard.engine.build import gathers_while_reducing
from zeroshard.engine.engine import Engine
from zeroshard.engine.out_of_memory import run_of
from zeroshard.errors import UsageError
from zeroshard.metrics.sinks import SINKS
from zeroshard.metrics.step_report import OUTSIDE
from zeroshard.parallel.pipeline_stage import Boundary
from zeroshard.parallel.schedules import SCHEDULES, idle, live
from zeroshard.parallel.split import PipelineModel
from zeroshard.planner.allocations import Allocations, Places
from zeroshard.planner.assumptions import shared_layers
from zeroshard.planner.checkpoint_phases import CheckpointNeeds, checkpoint_phases
from zeroshard.planner.fakes import (
    as_cut,
    fake_tensors,
    rows_as_in,
    sequence_attention,
    stage_inputs,
)
from zeroshard.planner.gpu_kernels import Target, kernels_of
from zeroshard.planner.prices import updated_by
from zeroshard.planner.simulated import Simulation, Traffic, highest
from zeroshard.planner.step_log import StepLog
from zeroshard.precision.policy import policy_from

_KINDS: Mapping[str, frozenset[str]] = {
    "all ranks": frozenset(DIMS),
    "tensor": frozenset({"tensor"}),
    "sequence": frozenset({"sequence"}),
    "pipeline": frozenset({"pipeline"}),
    "shards": SHARDS,
    "replicas": frozenset({"data_replicate"}),
    "holders": HOLDERS,
}
"""Groups of ranks, and the dimensions in which their ranks differ. The first that fits names a group."""


_NOT_SIMULATED = frozenset(
    {
        *("comms_logger", "dump_state", "flops_profiler", "memory_breakdown", "preemption"),
        *("steps_per_print", "wall_clock_breakdown", *SINKS),
    }
)
"""Keys that a simulation leaves out: it handles no signals of its process, makes no directory of
checkpoints, prints nothing, and opens no monitor, whose package may be missing where a run is planned."""


USUAL_NBYTES = 80_000_000_000
"""The memory of an accelerator that is not known."""


def simulate(
    build: Callable[[], nn.Module],
    config: Any,
    batch: Any,
    *,
    mesh: Mesh,
    rank: int,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    plan: Mapping[str, str] | str | None = None,
    steps: int = 2,
    with_events: bool = False,
    target: Target = "cpu",
    with_checkpoint: bool = False,
    ranks_per_node: int | None = None,
    device_nbytes: int = 0,
) -> Simulation:
    """Train ``steps`` steps as ``rank`` of ``mesh`` with fake tensors, and say what that needed.

    ``build`` makes the model. It is called where tensors are fake, so a model of any size fits; it may
    use the meta device, :func:`zeroshard.parallel.tensor_parallel` and
    :func:`zeroshard.parallel.pipeline`. With a pipeline it is called twice. ``config``: as for
    :func:`zeroshard.initialize`. ``batch``: one micro-batch of one rank, a pair (inputs, labels); inputs
    by name are a mapping; only shapes and dtypes of its tensors count. ``loss_fn(output, labels)``: the
    loss; a pipeline has its own.
    The first step creates optimizer state, so the second one shows the memory of all later steps.
    ``with_events``: log what the last step does, for its time. ``target``: the kind of device whose
    operations the model runs. ``with_checkpoint``: then save and load. ``ranks_per_node``: how many
    ranks share a node, and so may share memory; None: not known. ``device_nbytes``: the memory of an
    accelerator, which decides what blocks are gathered whole; 0: :data:`USUAL_NBYTES`.

    The process must not have a process group. Memory of allocators and of the program is not counted;
    that of the transport of CPU ranks is, if the key ``transport`` or ``ranks_per_node`` says which.

    Raises:
        UsageError: the arguments do not fit together.
        ConfigError: the configuration has mistakes.
    """
    inputs, labels = _pair(batch)
    config = {k: value for k, value in read_source(config)[0].items() if k not in _NOT_SIMULATED}
    log = StepLog()
    watch = Allocations(log.note)
    known_nbytes = 0 if target == "cpu" else device_nbytes or USUAL_NBYTES
    with _pretended(mesh, rank, target, known_nbytes, inputs), watch:
        inputs, labels = tree_map_only(torch.Tensor, _fake_like, (inputs, labels))
        model = build()
        arriving: Mapping[int, Sequence[Boundary]] = {}
        if isinstance(model, PipelineModel) and mesh.pipeline > 1:
            arriving = _arriving(model, config, mesh, as_cut(inputs, mesh))
            del model
            gc.collect()  # cut layers are in cycles
            watch.forget_peaks()  # a run gets the shapes in messages
            model = build()
        # What zero.Init holds of a transport is not counted.
        with contextlib.closing(_engine(model, config, mesh, plan, ranks_per_node)) as engine:
            _expect(engine, arriving)
            trained = _Trained(engine, model, watch, log)
            step = trained.stepper(inputs, labels, loss_fn)
            found = trained.last_step(step, steps, with_events=with_events)
            return trained.and_checkpoint(found) if with_checkpoint else found


@contextlib.contextmanager
def _pretended(
    mesh: Mesh, rank: int, target: Target, device_nbytes: int, inputs: Any
) -> Iterator[None]:
    """Ranks, a device and tensors that do not exist. ``inputs``: of the model, with values."""
    with (
        lone_rank(rank, mesh.world_size),
        kernels_of(target),
        planned_memory(device_nbytes),
        rows_as_in(inputs),
        sequence_attention(mesh, rank),
        fake_tensors(),
    ):
        yield


def _arriving(
    model: PipelineModel, config: Any, mesh: Mesh, inputs: Any
) -> Mapping[int, Sequence[Boundary]]:
    """What each stage of a pipeline receives."""
    sources = mesh_sources(mesh=mesh, model=model)
    loaded = load_config(config, world_size=mesh.world_size, mesh_sources=sources)
    return stage_inputs(model.whole(), inputs, policy_from(loaded.config))


def _engine(
    model: nn.Module,
    config: Any,
    mesh: Mesh,
    plan: Mapping[str, str] | str | None,
    ranks_per_node: int | None,
) -> Engine:
    """On the CPU, whatever this host has, with the transports of ranks on such nodes."""
    with nodes_of(ranks_per_node):
        return Engine(model, config=config, mesh=mesh, plan=plan, device="cpu")


def observe(
    build: Callable[[], nn.Module],
    config: Mapping[str, Any],
    batch: Any,
    *,
    loss_fn: Callable[[Any, Any], Tensor],
    steps: int = 2,
    directory: str = "",
) -> Simulation:
    """Train ``steps`` steps for real as this rank, and say what the last one needed, as :func:`simulate`
    does: for comparisons of plans with runs.

    All ranks of the process group call it, on the CPU. ``batch`` has values. The transport is "p2p" if
    the configuration names none. Memory inside of kernels is in no number. Every operation is slower than
    in a run that is not observed. ``directory``: save a checkpoint into it and load it, as the phases
    "save" and "load".

    Raises:
        UsageError: the arguments do not fit together.
        ConfigError: the configuration has mistakes.
    """
    inputs, labels = _pair(batch)
    log = StepLog()
    watch = Allocations(log.note, real=True)
    with watch:
        inputs, labels = tree_map_only(torch.Tensor, torch.clone, (inputs, labels))
        model = build()
        chosen = {"transport": "p2p", **config}
        with contextlib.closing(Engine(model, config=chosen)) as engine:
            log.calls.reductions = {
                c.group_name for c in engine._watch.comms if isinstance(c, GlooComm)
            }
            trained = _Trained(engine, model, watch, log)
            found = trained.last_step(trained.stepper(inputs, labels, loss_fn), steps)
            if not directory:
                return found
            watch.looked = None
            watch.phase = "save"
            watch.look("a save")
            engine.save_checkpoint(directory)
            watch.phase = "load"
            watch.look("a load")
            engine.load_checkpoint(directory)
            return trained.with_peaks(found)


def _pair(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise UsageError(
            f"simulate(batch=...) got a {type(batch).__name__}. Give one micro-batch of one rank as a "
            "pair (inputs, labels); several inputs are a tuple."
        )
    return batch[0], batch[1]


def _fake_like(tensor: Tensor) -> Tensor:
    """A tensor of this shape and dtype, made under the fake mode that is on."""
    return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, requires_grad=tensor.requires_grad)


class _Trained:
    """An engine whose steps are measured by ``watch`` and ``log``."""

    def __init__(self, engine: Engine, model: nn.Module, watch: Allocations, log: StepLog) -> None:
        self.engine, self.model, self.watch, self.log = engine, model, watch, log
        # What transports hold in tensors of torch; windows of shared memory are no such tensors.
        comms = [c for c in engine._watch.comms if not isinstance(c, (ShmComm, PlannedShm))]
        watch.buffers_nbytes = lambda: sum(getattr(c, "scratch_nbytes", 0) for c in comms)

    def stepper(
        self, inputs: Any, labels: Any, loss_fn: Callable[[Any, Any], Tensor] | None
    ) -> Callable[[], None]:
        """A function that takes one optimizer step and says which phase runs."""
        engine, count = self.engine, self.engine.accumulation.steps
        if isinstance(self.model, PipelineModel):
            self._tell_phases()

            def whole() -> None:
                self.watch.phase = "forward"
                named = labels is None and isinstance(inputs, Mapping)
                fed = as_cut(inputs, engine.mesh) if named else (inputs, labels)
                engine.train_batch(iter([fed] * count))

            return whole
        if loss_fn is None:
            raise UsageError(
                "simulate() needs loss_fn=, which computes the loss from the model's output and the "
                "labels of the batch. Only a pipeline has one of its own."
            )
        by_name = dict(inputs) if isinstance(inputs, Mapping) else {}
        by_place = () if by_name else inputs if isinstance(inputs, tuple) else (inputs,)

        def step() -> None:
            for _ in range(count):
                self._enter("forward")
                loss = loss_fn(engine(*by_place, **by_name), labels)
                self._enter("backward")
                engine.backward(loss)
                self._enter("step")
                engine.step()

        return step

    def _enter(self, phase: str) -> None:
        self.watch.phase = phase
        if phase == "forward":
            self.log.begin_micro_batch()
        elif phase == "backward":
            self.log.begin_backward(self.engine.runtime.units)

    def _tell_phases(self) -> None:
        """Let train_batch() say which phase runs. What is between two of them is of the first."""

        def told(phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                self._enter(phase)
                return call(*args, **kwargs)

            return run

        runner = self.engine._pipeline
        if runner is None:
            for phase in ("forward", "backward", "step"):
                vars(self.engine)[phase] = told(phase, getattr(self.engine, phase))
            return
        for stage in runner.stages:
            stage._run = told("forward", stage._run)
            stage._run_backward = told("backward", stage._run_backward)
        schedule = runner.train

        def train(*args: Any) -> Tensor:
            loss = schedule(*args)
            self.watch.phase = "step"
            return loss

        vars(runner)["train"] = train

    def last_step(
        self, step: Callable[[], None], steps: int, *, with_events: bool = False
    ) -> Simulation:
        """Take ``steps`` steps and measure the last one."""
        for _ in range(steps - 1):
            step()
        engine, log = self.engine, self.log
        gc.collect()
        self.watch.measure(engine.runtime.ledger, Places(engine.module))
        log.calls.clear()
        log.starts.clear()
        log.kept.clear()
        for recorder in engine._watch.recorders:
            recorder.reset_traffic()
        before = _swapped(engine)
        comms = [c for c in engine._watch.comms if isinstance(c, RecordedComm)]
        log.begin(comms, self.watch)
        if with_events:
            links = engine._watch.pipeline
            log.begin_events(comms, self.watch, None if links is None else links.messages)
        step()
        return self._result(before)

    def and_checkpoint(self, found: Simulation) -> Simulation:
        """Also with what saving and loading need. Afterwards the engine can only be closed."""
        self.watch.looked = None  # the step is over
        return self.with_peaks(found, checkpoint_phases(self.engine, self.watch))

    def with_peaks(
        self, found: Simulation, checkpoint: CheckpointNeeds | None = None
    ) -> Simulation:
        """With the peaks of phases after the step."""
        moments, together = dict(self.watch.moments), dict(self.watch.together)
        return replace(found, moments=moments, together=together, checkpoint=checkpoint)

    def _result(self, before: tuple[int, int]) -> Simulation:
        engine, watch, log = self.engine, self.watch, self.log
        mesh, rank = engine.mesh, engine.global_rank
        bubble, in_flight = _schedule_of(self.model, mesh, rank, engine.accumulation.steps)
        read, written = _swapped(engine)
        return Simulation(
            mesh,
            rank,
            sum(unit.layout.params_numel for unit in engine.runtime.units),
            tuple(row for row in engine.memory_report().rows if row.category not in OUTSIDE),
            watch.activations_nbytes,
            tuple(_traffic(engine, log.calls)),
            tuple(log.calls.messages),
            bubble,
            in_flight,
            dict(watch.moments),
            tuple(watch.largest(highest(watch.moments)[1], LARGEST)),
            tuple(unit.name for unit in engine.runtime.units),
            tuple(log.events),
            updated_by(engine),
            _communicators(engine),
            engine.runtime.stores.file_nbytes,
            (read - before[0], written - before[1]),
            dict(watch.together),
            run_of(engine, _activations(watch)),
            tuple(log.starts),
            kept=tuple(unit.name for unit in engine.runtime.units if unit.name in log.kept),
            histories=log.histories(),
            experts=shared_layers(self.model, mesh, rank),
        )


def _expect(engine: Engine, arriving: Mapping[int, Sequence[Boundary]]) -> None:
    """Tell the stages of this rank what they will receive: messages of a simulation have no contents."""
    if engine._pipeline is not None:
        for stage in engine._pipeline.stages:
            stage.known_inputs = list(arriving.get(stage.stage_index, ()))


def _swapped(engine: Engine) -> tuple[int, int]:
    """Bytes read from swap files and written, until now."""
    for file in engine.runtime.stores.files:
        file.drain()
    moved = engine.runtime.stores.moved_nbytes
    return moved["read_nbytes"], moved["written_nbytes"]


def _activations(watch: Allocations) -> int:
    """What the engine does not hold at the peak of forward; of a pipeline, at most in the step."""
    forward = watch.moments.get("forward")
    return watch.activations_nbytes if forward is None else forward.activations_nbytes


def _communicators(engine: Engine) -> int:
    """How many communicators the engine opens on NCCL: reductions get their own beside gathers."""
    groups = [
        c for c in engine._watch.comms if isinstance(c, ProcessGroupComm) and len(c.ranks) > 1
    ]
    both = bool(groups) and gathers_while_reducing(engine.settings)
    return len(groups) + both + (engine.mesh.pipeline > 1)


LARGEST = 20
"""Storages of a peak that a simulation lists."""


def _schedule_of(model: nn.Module, mesh: Mesh, rank: int, count: int) -> tuple[float, int]:
    if not isinstance(model, PipelineModel) or mesh.pipeline == 1:
        return 0.0, 1
    stages = len(model.stages)
    schedule = SCHEDULES[model.schedule]
    actions = schedule.actions(mesh.pipeline, stages // mesh.pipeline, count)
    return idle(actions, stages), live(actions[mesh.coordinate(rank)["pipeline"]])


def _traffic(engine: Engine, log: CallLog) -> Iterator[Traffic]:
    mesh, rank = engine.mesh, engine.global_rank
    recorded = {id(c.recorder): c for c in engine._watch.comms if isinstance(c, RecordedComm)}
    for comm in recorded.values():
        if len(comm.ranks) == 1:
            continue
        group = group_name(mesh, rank, comm.ranks)
        for entry in comm.recorder.traffic():
            if entry.calls:
                yield Traffic(
                    group, entry.op.partition(" ")[0], entry.name, entry.calls,
                    entry.payload_numel, entry.sent_numel, entry.sent_nbytes,
                )  # fmt: skip
    for (op, ranks), calls in log.layers.items():
        yield Traffic(
            group_name(mesh, rank, ranks), op, "layers", calls.calls, calls.numel,
            calls.sent_numel, calls.sent_nbytes,
        )  # fmt: skip


def group_name(mesh: Mesh, rank: int, ranks: Sequence[int]) -> str:
    """The name of a group of ranks that ``rank`` is in; the list of them if no dimension makes it.

    >>> group_name(Mesh(data_shard=2, tensor=2), 3, [2, 3])
    'tensor'
    >>> group_name(Mesh(data_shard=4, node=2), 3, [2, 3])
    'node'
    >>> group_name(Mesh(data_shard=8, expert=4), 3, [3, 7])
    'same of 4 parts of experts'
    """
    if mesh.node > 1:
        for name, own in (("node", mesh.node_group(rank)), ("nodes", mesh.across_nodes(rank))):
            if own == tuple(ranks):
                return name
    for name, dims in _KINDS.items():
        if mesh.group(rank, dims) == tuple(ranks):
            return name
    for size in range(2, mesh.expert + 1):
        if mesh.expert % size:
            continue
        if mesh.expert_group(rank, size) == tuple(ranks):
            return f"{size} that share experts"
        if mesh.expert_holders(rank, size) == tuple(ranks):
            return f"same of {size} parts of experts"
    return f"ranks {list(ranks)}"
