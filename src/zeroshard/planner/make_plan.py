"""Makes the plan of a run from a configuration and a model without weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from zeroshard.comm.simulation import lone_rank
from zeroshard.config import Config, LoadedConfig, load_config
from zeroshard.config.fields import is_auto
from zeroshard.config.machine_file import MachineFile, Number, check_links
from zeroshard.config.parse import read_source
from zeroshard.core.mesh import Mesh
from zeroshard.core.texts import gib, gib_text
from zeroshard.errors import UsageError
from zeroshard.parallel.schedules import settled_after
from zeroshard.planner.assumptions import (
    check_tokens,
    mesh_of,
    not_modelled,
    of_sequence_ranks,
    of_two_memories,
    on_one_host,
    said_of_experts,
    shares_memory,
    stands_for_all,
)
from zeroshard.planner.gpu_kernels import Target
from zeroshard.planner.model_source import (
    FACTORY_HINT,
    ModelSource,
    explained,
    model_source,
)
from zeroshard.planner.plan import Plan, StageNeeds
from zeroshard.planner.planned_batch import (
    MICRO_BATCH,
    check_rows,
    names_a_batch,
    refuse_options,
    shared_size,
)
from zeroshard.planner.simulate import simulate
from zeroshard.planner.simulated import Simulation, check_order
from zeroshard.planner.step_time import StepTime, stage_times

WITHOUT_EFFECT = {
    **{"optimizer.params.lr": 1e-3, "scheduler.params.lr_range_test_min_lr": 1e-3},
    **{"scheduler.params.warmup_num_steps": 1000, "scheduler.params.total_num_steps": 10_000},
}
"""Keys that libraries fill in when a run starts, with values: no plan depends on them."""


@dataclass(frozen=True)
class Asked:
    """The run that is planned, and what it trains on.

    ``model``: see :func:`~zeroshard.planner.model_source.model_source`. ``length``: tokens of a sample;
    a model with a batch of its own takes none. ``memory_gib``: of one device. ``machine``: predict the
    time of a step on it, and compare the peak with its memory if ``memory_gib`` is not given. ``target``:
    see :func:`target_of`. ``ranks_per_node``: instead of the devices of a node of the machine; groups of
    CPU ranks communicate through shared memory if all of their ranks are on one node, as in a run.
    """

    model: str
    config: Mapping[str, Any] | str | Path
    ranks: int
    length: int | None = None
    memory_gib: float | None = None
    machine: MachineFile | None = None
    target: Target | None = None
    ranks_per_node: int | None = None

    @property
    def has_limit(self) -> bool:
        """Whether the memory of a device is known."""
        machine = self.machine
        is_known = machine is not None and machine.device.memory_bytes is not None
        return self.memory_gib is not None or is_known


def make_plan(
    asked: Asked,
    *,
    micro_batch: int | None = None,
    checkpointing: bool = False,
    with_events: bool = False,
    few: bool = False,
) -> Plan:
    """Simulate one rank of a run and say what it needs. Must be called outside of any process group.

    ``micro_batch`` replaces ``train_micro_batch_size_per_gpu``; a model with a batch of its own takes
    none, and its rows are the micro-batch if nothing says how large that is. ``checkpointing``: call the
    model's ``gradient_checkpointing_enable()``. ``with_events``: keep what the step does, for a trace.
    ``few``: simulate two micro-batches of a step at most, and of a pipeline with the schedule 1F1B one
    more than it has stages; later ones hold and take what the last of these does.
    All ranks of a mesh without pipeline do the same on shards of equal size, so rank 0 stands for all. Of
    a pipeline one rank of each stage is simulated. A model that is no pipeline is cut into stages with
    equal numbers of blocks.

    Raises:
        ConfigError: the configuration has mistakes.
        UsageError: the model is not known, an argument is impossible, or the machine has no link between
            nodes and the ranks are on several.
        UnsupportedError: the model needs values, or an operation has no fake kernel.
    """
    ranks, per_node = asked.ranks, asked.ranks_per_node
    asked_nbytes = None if asked.memory_gib is None else limit_of(asked.memory_gib)
    kind = target_of(asked.machine, asked.target)
    machine = with_node_size(asked.machine, ranks, per_node)
    if machine is not None:
        check_links(machine, ranks)
    where = _Where(kind, machine, asked_nbytes, per_node)
    task = _read(asked, where, micro_batch, checkpointing=checkpointing)
    if few:
        task = _with_few(task)
    with explained(task.source.name):
        of_stages = _simulated(task, with_events=with_events or machine is not None)
        layers = [layer for each in of_stages for layer in each.experts]
        said = said_of_experts(layers, None if few else partial(_peak_again, task))
    check_order(of_stages)
    return _plan_of(replace(task, assumed=(*task.assumed, *said)), of_stages)


def _plan_of(task: _Task, of_stages: Sequence[Simulation]) -> Plan:
    """The plan of a task of which one rank of each pipeline stage was simulated."""
    where, mesh, settings = task.where, task.mesh, task.loaded.config
    peaks = list(map(where.peak_nbytes, of_stages))
    highest_at = peaks.index(max(peaks))
    found = of_stages[highest_at]
    limit_nbytes, said = where.limit(found.communicators)
    times = [] if where.machine is None else _times(of_stages, where.machine, task)
    is_cut = mesh.pipeline > 1
    passes_blocks = is_cut and shares_memory(where.kind, mesh.world_size, task.chosen)
    return Plan(
        task.source.name,
        replace(mesh, expert=max(each.mesh.expert for each in of_stages)),
        settings.zero_optimization.stage,
        _size_of(settings),
        limit_nbytes,
        found,
        (*_assumed(task, found), *said),
        not_modelled=not_modelled(where.kind, passes_blocks=passes_blocks),
        own_batch=task.source.own_batch,
        target=where.kind,
        time=times[highest_at] if times else None,
        stages=tuple(map(_stage_needs, of_stages, peaks)) if is_cut else (),
        stage_times=tuple(times) if is_cut else (),
        of_stages=tuple(of_stages),
        ranks_per_node=where.ranks_per_node,
        config=tuple(task.loaded.rows()),
    )


@dataclass(frozen=True)
class _Where:
    """What the run is planned for. ``asked_nbytes``: of one device; None: those of the machine."""

    kind: Target
    machine: MachineFile | None
    asked_nbytes: int | None
    ranks_per_node: int | None

    def peak_nbytes(self, found: Simulation) -> int:
        """The most bytes that count: on a serial machine device and host are one memory."""
        is_one_memory = self.machine is not None and self.machine.execution == "serial"
        return _peak_of_both(found) if is_one_memory else _device_peak(found)

    def limit(self, communicators: int) -> tuple[int | None, list[str]]:
        """What the peak is compared with, and what is said of it."""
        machine = self.machine
        if self.asked_nbytes is not None or machine is None or machine.device.memory_bytes is None:
            return self.asked_nbytes, []
        limit_nbytes, said = device_memory(machine, communicators)
        return limit_nbytes, [said]


@dataclass(frozen=True)
class _Task:
    """A model and a configuration, read for some ranks.

    ``loaded``: what the configuration of the run means; ``chosen``: the one to simulate. ``engine_cuts``:
    the engine cuts the model over tensor ranks. ``assumed``: what was chosen while they were read;
    ``left_out``: of the step, when it was shortened.
    """

    source: ModelSource
    loaded: LoadedConfig
    chosen: dict[str, Any]
    mesh: Mesh
    engine_cuts: bool
    assumed: tuple[str, ...]
    where: _Where
    left_out: tuple[str, ...] = ()


def _read(asked: Asked, where: _Where, micro_batch: int | None, *, checkpointing: bool) -> _Task:
    """Read model and configuration. Without a batch size it is known only when the model is there.

    Arguments and errors as for :func:`make_plan`.
    """
    model, config, ranks, length = asked.model, asked.config, asked.ranks, asked.length
    given = config_dict(config)
    is_sized = micro_batch is not None or names_a_batch(given)

    def load(samples: int | None) -> LoadedConfig:
        arguments = {MICRO_BATCH: samples, **_left_auto(read_source(config)[0])}
        return load_config(config, world_size=ranks, arguments=arguments)

    samples = micro_batch
    loaded = load(samples if is_sized else 1)
    mesh = mesh_of(loaded.config, ranks)
    engine_cuts = mesh.tensor > 1 and _cuts_by_itself(loaded.config)
    is_sharded = loaded.config.zero_optimization.stage == 3
    check_tokens(length, mesh)
    # A factory may ask for its rank, as PipelineModule does.
    with explained(model, FACTORY_HINT), lone_rank(0, ranks):
        source = model_source(
            model,
            _size_of(loaded.config),
            length,
            sequence=mesh.sequence,
            sharded=is_sharded and not engine_cuts and mesh.pipeline == 1,
            checkpointing=checkpointing,
            stages=mesh.pipeline,
        )
    assumed = (*source.assumed, *of_sequence_ranks(mesh))
    if source.own_batch:
        refuse_options(model, micro_batch, length)
        if is_sized:
            check_rows(model, source.batch, _size_of(loaded.config))
    if not is_sized:
        samples = shared_size(source.batch, 0) if source.own_batch else None
        loaded = load(samples)  # an error without rows
        assumed += (f"the micro-batch has {samples} samples, the rows of the model's own batch",)
    chosen = given if samples is None else given | {MICRO_BATCH: samples}
    return _Task(source, loaded, chosen, mesh, engine_cuts, assumed, where)


def _size_of(settings: Config) -> int:
    size = settings.train_micro_batch_size_per_gpu
    assert size is not None  # computed where it is not given
    return size


def _with_few(task: _Task) -> _Task:
    """The task with as few micro-batches in a step as show what each of them holds and takes."""
    count = task.loaded.config.gradient_accumulation_steps or 1
    source, ranks = task.source, task.mesh.pipeline
    enough = settled_after(source.schedule, source.cut_into or ranks, ranks)
    if enough is None or count <= enough:
        return task
    chosen = task.chosen | {"gradient_accumulation_steps": enough}
    chosen.pop("train_batch_size", None)
    said = (
        f"{enough} of {count} micro-batches of a step were simulated: traffic is that of {enough}"
    )
    return replace(task, chosen=chosen, left_out=(said,))


def _simulated(task: _Task, *, with_events: bool) -> list[Simulation]:
    """One rank of each pipeline stage. ``with_events``: keep what the step does."""
    source, mesh, where = task.source, task.mesh, task.where
    known = where.machine.device.memory_bytes if where.machine is not None else None
    return [
        simulate(
            source.build, task.chosen, source.batch, mesh=mesh, rank=rank, loss_fn=source.loss,
            plan="auto" if task.engine_cuts else None, with_events=with_events,
            target=where.kind, with_checkpoint=True,
            ranks_per_node=where.ranks_per_node or mesh.world_size,
            device_nbytes=int(known.value) if known is not None else where.asked_nbytes or 0,
        )
        for rank in _first_ranks(mesh)
    ]  # fmt: skip


def _peak_again(task: _Task) -> int:
    """The highest peak of another simulation."""
    return max(map(task.where.peak_nbytes, _simulated(task, with_events=False)))


def _assumed(task: _Task, found: Simulation) -> list[str]:
    """What the plan assumes, in sentences. ``found``: the simulation with the highest peak."""
    where, ranks = task.where, task.mesh.world_size
    assumed = [*task.assumed, stands_for_all(task.mesh)]
    if where.kind == "cpu" and where.machine is None:
        assumed += of_two_memories(_device_peak(found), _peak_of_both(found))
    if shares_memory(where.kind, ranks, task.chosen):
        assumed += on_one_host(ranks, where.ranks_per_node, task.chosen)
    return [*assumed, *task.left_out]


def _first_ranks(mesh: Mesh) -> list[int]:
    """One rank of each pipeline stage."""
    stages = [mesh.coordinate(rank)["pipeline"] for rank in range(mesh.world_size)]
    return [stages.index(stage) for stage in range(mesh.pipeline)]


def _device_peak(found: Simulation) -> int:
    return max(moment.device_nbytes for moment in found.moments.values())


def _peak_of_both(found: Simulation) -> int:
    return max(found.together.values())


def _stage_needs(found: Simulation, peak_nbytes: int) -> StageNeeds:
    sent = [each for each in found.messages if each.kind == "send"]
    numel = sum(prod(each.shape) for each in sent)
    nbytes = sum(prod(each.shape) * each.dtype.itemsize for each in sent)
    return StageNeeds(
        found.rank,
        found.params_numel,
        found.states_nbytes,
        peak_nbytes,
        found.in_flight,
        numel,
        nbytes,
        found.kept,
    )


def _times(of_stages: Sequence[Simulation], machine: MachineFile, task: _Task) -> list[StepTime]:
    """The time of a step, for each pipeline stage."""
    settings, batch = task.loaded.config, task.source.batch
    samples = settings.train_batch_size
    assert samples is not None  # computed where it is not given
    ids = batch[0].get("input_ids") if isinstance(batch[0], Mapping) else None
    sequence = of_stages[0].mesh.sequence
    tokens = 0 if ids is None else samples * sequence * (ids.numel() // len(ids))
    count = settings.gradient_accumulation_steps
    return stage_times(of_stages, machine, samples=samples, tokens=tokens, micro_batches=count)


def _cuts_by_itself(settings: Config) -> bool:
    """Whether a run cuts the model over tensor ranks, because a key of DeepSpeed says how many."""
    section = settings.tensor_parallel
    return max(section.autotp_size, section.tp.tp_size) > 1


def target_of(machine: MachineFile | None, asked: Target | None) -> Target:
    """The kind of device that is planned for: that of the machine, or the one that was asked for.

    A machine with streams is a GPU, a serial one is a CPU. Without both it is the CPU.
    """
    if machine is None:
        return asked or "cpu"
    own: Target = "cuda" if machine.execution == "streams" else "cpu"
    if asked not in (None, own):
        raise UsageError(
            f"--target is {asked}, and the machine {machine.name!r} is of the kind {own} (its execution "
            f'is "{machine.execution}"). Leave --target out, or name a machine of that kind.'
        )
    return own


def with_node_size(
    machine: MachineFile | None, ranks: int, ranks_per_node: int | None
) -> MachineFile | None:
    """A machine with so many devices in a node; None stays as it is."""
    if ranks_per_node is None:
        return machine
    if ranks > ranks_per_node and ranks % ranks_per_node:
        raise UsageError(
            f"--ranks-per-node {ranks_per_node} does not divide --ranks {ranks}, so one node would have "
            "fewer ranks than the others. Give numbers that divide."
        )
    if machine is None:
        return None
    size = Number(value=ranks_per_node, source="assumed")
    return machine.model_copy(update={"devices_per_node": size})


def device_memory(machine: MachineFile, communicators: int) -> tuple[int, str]:
    """Bytes that tensors can have on a device, which has a size, and a sentence about the rest."""
    device = machine.device
    assert device.memory_bytes is not None  # the caller has looked
    whole = device.memory_bytes.value
    context, each = device.context_bytes, device.communicator_bytes
    taken = context.value if context else 0.0
    parts = [f"{gib(round(taken))} for the device's context ({context.source})"] if context else []
    if each and communicators:
        taken += communicators * each.value
        parts.append(
            f"{communicators} x {gib(round(each.value))} for communicators of NCCL ({each.source}; those "
            "that the program itself opens are not known)"
        )
    rest = f", of which {' and '.join(parts)} are not for tensors" if parts else ""
    return round(whole - taken), f"the device has {gib_text(round(whole))}{rest}"


def config_dict(config: Any) -> dict[str, Any]:
    """A configuration or its file as a new dict, with :data:`WITHOUT_EFFECT` for "auto".

    Raises:
        ConfigError: the file cannot be read, or is not one JSON object.
    """
    given = read_source(config if isinstance(config, Mapping) else Path(config))[0]
    for path, value in _left_auto(given).items():
        section, _, name = path.split(".")
        given[section]["params"][name] = value
    return given


def _left_auto(given: Mapping[str, Any]) -> dict[str, float]:
    """The keys of :data:`WITHOUT_EFFECT` that are "auto", with their values."""

    def value(path: str) -> object:
        found: Any = given
        for name in path.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        return found

    return {path: number for path, number in WITHOUT_EFFECT.items() if is_auto(value(path))}


def limit_of(memory_gib: float) -> int:
    """Bytes of device memory."""
    if not 0 < memory_gib < math.inf:  # also NaN
        raise UsageError(
            f"--memory is {memory_gib:g} GiB, which is not a size of memory. Give the GiB of one device."
        )
    return int(memory_gib * 2**30)
