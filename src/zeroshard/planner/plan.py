"""The memory and the traffic of a run, from a configuration and a model without weights."""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from zeroshard.comm.simulation import diverged
from zeroshard.config import Config, load_config
from zeroshard.config.machine_file import MachineFile, Number, check_links
from zeroshard.config.mesh_keys import mesh_from_config
from zeroshard.config.parse import read_source
from zeroshard.core.ledger import TEMPORARY
from zeroshard.core.mesh import Mesh
from zeroshard.core.mesh_sources import resolve_mesh
from zeroshard.errors import UnsupportedError, UsageError, ZeroShardError
from zeroshard.planner.allocations import Moment
from zeroshard.planner.gpu_kernels import Target
from zeroshard.planner.in_words import size_text
from zeroshard.planner.largest_batch import largest_batch
from zeroshard.planner.model_source import ModelSource, model_source, refuse_own_batch
from zeroshard.planner.own_batch import (
    MICRO_BATCH,
    check_rows,
    names_a_batch,
    refuse_options,
    shared_size,
)
from zeroshard.planner.places import LIBRARIES
from zeroshard.planner.simulate import OUTSIDE_STEP, Simulation, highest, simulate
from zeroshard.planner.step_time import StepTime, stage_times, step_time
from zeroshard.planner.timeline import columns, timeline

NOT_MODELLED = (
    "memory of the allocator (reserved and fragmented blocks), of the device's context and of the "
    "program itself",
    "the first step, which creates optimizer state",
    "of a checkpoint: client_state, the position in the data and the text of the manifest; on a GPU up "
    "to 32 MiB of pinned host memory that values pass through",
    "scratch memory inside kernels",
    "the update runs as torch operations; compiled and Triton updates need less temporary memory",
    "before the engine exists, everything counts as device memory, also state that goes to host or disk",
    "other ranks are as far as this one; a rank that waits for others may need some more windows",
)
"""What a plan does not contain."""

NOT_MODELLED_OF_STAGES = (
    "with shared memory, the blocks that hold messages between pipeline stages until they are read",
)
"""What a plan of a pipeline does not contain besides."""

NOT_MODELLED_OF: Mapping[Target, str] = {
    "cpu": "attention takes the form that torch chooses on the CPU, which keeps its scores if it has "
    "dropout or a learned mask, where fused kernels of a GPU do not: for a GPU use --target cuda",
    "cuda": "convolutions, recurrent layers and nn.RMSNorm keep what they keep on the CPU; products of a "
    "GPU may need a workspace; what an update in host memory needs for a moment counts on the device",
}
"""What a plan for a kind of device does not contain."""


@dataclass(frozen=True)
class StageNeeds:
    """What one rank of a pipeline stage needs. ``in_flight``: micro-batches whose activations it keeps.

    ``sent_numel``: elements that it sends to other stages in a step. ``kept_units``: as for a plan.
    """

    rank: int
    parameters: int
    states_nbytes: int
    peak_nbytes: int
    in_flight: int
    sent_numel: int
    kept_units: tuple[str, ...]


@dataclass(frozen=True)
class Change:
    """A change with which the run fits, by a simulation of it.

    ``line``: of the configuration as JSON, or of the program. ``peak_nbytes``: with it, and
    ``freed_nbytes``: how much lower that is. ``slowdown``: how much longer a step takes, as a part of it;
    ``predicted``: on the machine of the plan, otherwise it is assumed.
    """

    text: str
    line: str
    peak_nbytes: int
    freed_nbytes: int
    slowdown: float
    predicted: bool


@dataclass(frozen=True)
class Plan:
    """What one rank of a run needs. ``limit_nbytes``: device memory of a rank; None: not given.

    ``own_batch``: the batch came with the model. ``stages``: one rank of each pipeline stage; none
    without a pipeline. ``simulation`` is of the one with the highest peak.
    ``time``: the seconds of a step; None: no machine was given. ``stage_times``: of each of ``stages``.
    ``of_stages``: their simulations; without a pipeline, that of rank 0. ``target``: the kind of device
    whose operations were planned.
    ``one_more_nbytes``: the peak with one more sample in the micro-batch; None: not asked for.
    ``peak_phase`` and ``peak_nbytes``: the highest peak on the device, ``init`` included; on a serial
    machine, which is a CPU, of device and host together, as they are one memory there. ``assumed``: what
    the planner chose itself. ``changes``: each makes the run fit; None: they were not looked for.
    ``ranks_per_node``: None: not given. ``config``: key, value and origin of every key, without secrets.
    """

    model: str
    mesh: Mesh
    stage: int
    micro_batch: int
    limit_nbytes: int | None
    simulation: Simulation
    assumed: tuple[str, ...]
    not_modelled: tuple[str, ...] = NOT_MODELLED
    one_more_nbytes: int | None = None
    own_batch: bool = False
    time: StepTime | None = None
    target: Target = "cpu"
    stages: tuple[StageNeeds, ...] = ()
    stage_times: tuple[StepTime, ...] = ()
    of_stages: tuple[Simulation, ...] = ()
    changes: tuple[Change, ...] | None = None
    ranks_per_node: int | None = None
    config: tuple[tuple[str, str, str], ...] = ()

    @property
    def peaks(self) -> Mapping[str, int]:
        """The most bytes of each phase that count for the limit."""
        found = self.simulation
        if self.time is not None and self.time.serial:
            return found.together
        return {name: moment.device_nbytes for name, moment in found.moments.items()}

    @property
    def peak_phase(self) -> str:
        """The phase with the highest peak."""
        return max(self.peaks, key=self.peaks.__getitem__)

    @property
    def peak_nbytes(self) -> int:
        """The most bytes at one time that count for the limit."""
        return max(self.peaks.values())

    @property
    def step_phase(self) -> str:
        """The phase of a step with the highest peak."""
        peaks = {name: nbytes for name, nbytes in self.peaks.items() if name not in OUTSIDE_STEP}
        return max(peaks, key=peaks.__getitem__)

    @property
    def spare_nbytes(self) -> int | None:
        """The limit minus the peak; negative if the run does not fit."""
        return None if self.limit_nbytes is None else self.limit_nbytes - self.peak_nbytes

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within the limit; None without a limit."""
        spare = self.spare_nbytes
        return None if spare is None else spare >= 0

    def states_nbytes(self, tier: str = "device") -> int:
        """Bytes of parameters, gradients, masters and optimizer state."""
        rows = self.simulation.memory
        return sum(r.measured for r in rows if r.tier == tier and r.category not in TEMPORARY)

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON. Sizes in bytes, traffic in elements."""
        found = self.simulation
        name, top = highest(found.moments)
        read, written = found.swapped
        return {
            "model": self.model, "target": self.target, "parameters": found.params_numel,
            "mesh": self.mesh.text, "ranks": self.mesh.world_size, "rank": found.rank,
            "ranks_per_node": self.ranks_per_node,
            "stage": self.stage, "micro_batch": self.micro_batch,
            "fits": self.fits, "limit_nbytes": self.limit_nbytes,
            "spare_nbytes": self.spare_nbytes, "peak_nbytes": self.peak_nbytes,
            "one_more_nbytes": self.one_more_nbytes,
            "peak_phase": self.peak_phase, "states_nbytes": self.states_nbytes(),
            "step_peak": {
                "phase": name, "op": top.op, "module": top.module, "unit": self.unit_of(top),
                "line": top.line, "nbytes": self.peaks[self.step_phase],
            },
            "memory": [asdict(row) for row in found.memory],
            "phases": {name: _moment(moment) for name, moment in found.moments.items()},
            "timeline": columns(timeline(found.events)),
            "largest": [asdict(holding) for holding in found.largest],
            "pipeline_stages": self._stages_as_dicts(),
            "kept_units": list(found.kept),
            "traffic": [asdict(row) for row in found.traffic],
            "disk": {
                "file_nbytes": found.file_nbytes, "read_nbytes": read, "written_nbytes": written,
            },
            "changes": None if self.changes is None else list(map(asdict, self.changes)),
            "checkpoint": None if found.checkpoint is None else asdict(found.checkpoint),
            "time": None if self.time is None else self.time.as_dict(),
            "assumed": list(self.assumed), "not_modelled": list(self.not_modelled),
        }  # fmt: skip

    def _stages_as_dicts(self) -> list[dict[str, Any]]:
        times = [
            {"compute_s": each.timing.compute_s, "waits_s": each.timing.stages_s}
            for each in self.stage_times
        ]
        return [
            asdict(stage) | (times[at] if times else {}) for at, stage in enumerate(self.stages)
        ]

    def unit_of(self, moment: Moment) -> str:
        """The unit in which a moment is; "" if it is in none."""
        units = sorted(self.simulation.units, key=len, reverse=True)
        at = moment.module
        return next((u for u in units if at == u or at.startswith(f"{u}.")), "")


def _moment(moment: Moment) -> dict[str, Any]:
    held = [
        {"category": category, "tier": tier, "nbytes": nbytes}
        for (category, tier), nbytes in moment.held.items()
        if nbytes
    ]
    return {
        "device_nbytes": moment.device_nbytes, "activations_nbytes": moment.activations_nbytes,
        "op": moment.op, "module": moment.module, "line": moment.line, "held": held,
    }  # fmt: skip


def make_plan(
    model: str,
    config: Mapping[str, Any] | str | Path,
    *,
    ranks: int,
    micro_batch: int | None = None,
    length: int | None = None,
    memory_gib: float | None = None,
    checkpointing: bool = False,
    machine: MachineFile | None = None,
    target: Target | None = None,
    with_events: bool = False,
    few: bool = False,
    ranks_per_node: int | None = None,
) -> Plan:
    """Simulate one rank of a run and say what it needs. Must be called outside of any process group.

    ``model``: see :func:`~zeroshard.planner.model_source.model_source`. ``micro_batch`` replaces
    ``train_micro_batch_size_per_gpu``; ``length``: tokens of a sample; a model with a batch of its own
    takes neither, and its rows are the micro-batch if nothing says how large that is. ``memory_gib``: of
    one device; ``checkpointing``: call the model's ``gradient_checkpointing_enable()``. ``machine``:
    predict the time of a step on it, and compare the peak with its memory if ``memory_gib`` is not given.
    ``target``: see :func:`target_of`. ``with_events``: keep what the step does, for a trace. ``few``:
    simulate two micro-batches of a step at most, and of a pipeline with the schedule 1F1B one more than
    it has stages; later ones hold and take what the last of these does. ``ranks_per_node``: instead of
    the devices of a node of the machine; groups of CPU ranks communicate through shared memory if all of
    their ranks are on one node, as in a run.
    All ranks of a mesh without pipeline do the same on shards of equal size, so rank 0 stands for all. Of
    a pipeline one rank of each stage is simulated. A model that is no pipeline is cut into stages with
    equal numbers of blocks.

    Raises:
        ConfigError: the configuration has mistakes.
        UsageError: the model is not known, an argument is impossible, or the machine has no link between
            nodes and the ranks are on several.
        UnsupportedError: the model needs values, or an operation has no fake kernel.
    """
    limit_nbytes = None if memory_gib is None else limit_of(memory_gib)
    kind = target_of(machine, target)
    machine = with_node_size(machine, ranks, ranks_per_node)
    if machine is not None:
        check_links(machine, ranks)
    named = micro_batch is not None or names_a_batch(config_dict(config))
    arguments = {MICRO_BATCH: micro_batch if named else 1}
    loaded = load_config(config, world_size=ranks, arguments=arguments)
    settings = loaded.config
    mesh = mesh_of(settings, ranks)
    size = settings.train_micro_batch_size_per_gpu
    assert size is not None  # computed where it is not given
    cuts = mesh.tensor > 1 and _cuts_by_itself(settings)
    with explained(model, FACTORY_HINT):
        source = model_source(
            model,
            size,
            length,
            sharded=settings.zero_optimization.stage == 3 and not cuts and mesh.pipeline == 1,
            checkpointing=checkpointing,
            stages=mesh.pipeline,
        )
    assumed = source.assumed
    if source.own_batch:
        refuse_options(model, micro_batch, length)
    if source.own_batch and named:
        check_rows(model, source.batch, size)
    if not named:
        rows = shared_size(source.batch, 0) if source.own_batch else None
        arguments = {MICRO_BATCH: rows}
        loaded = load_config(config, world_size=ranks, arguments=arguments)  # an error without rows
        settings = loaded.config
        size = settings.train_micro_batch_size_per_gpu
        assert size is not None
        assumed += (f"the micro-batch has {size} samples, the rows of the model's own batch",)
    chosen = config_dict(config) | ({k: v for k, v in arguments.items() if v is not None})
    transport = chosen.get("transport", "auto")
    one_node = ranks_per_node is None or ranks <= ranks_per_node
    count = settings.gradient_accumulation_steps or 1
    enough = _enough(source, mesh)
    few = few and enough is not None and count > enough
    if few:
        chosen.pop("train_batch_size", None)
        chosen["gradient_accumulation_steps"] = enough

    def simulated(rank: int) -> Simulation:
        return simulate(
            source.build, chosen, source.batch, mesh=mesh, rank=rank, loss_fn=source.loss,
            plan="auto" if cuts else None,
            with_events=with_events or machine is not None, target=kind, with_checkpoint=True,
            ranks_per_node=ranks_per_node or ranks,
        )  # fmt: skip

    with explained(source.name):
        first = [_first_rank(mesh, stage) for stage in range(mesh.pipeline)]
        of_stages = [simulated(rank) for rank in first]
    _check_order(of_stages)
    is_one_memory = machine is not None and machine.execution == "serial"
    peaks = [_peak_of(each, together=is_one_memory) for each in of_stages]
    highest_at = peaks.index(max(peaks))
    found = of_stages[highest_at]
    one = "rank 0" if mesh.pipeline == 1 else "one rank of each pipeline stage"
    assumed += (f"{one} stands for all {ranks} ranks: shards have equal sizes",)
    most = max(found.together.values())
    if kind == "cpu" and machine is None and most > _peak_of(found):
        assumed += (
            "the device has memory of its own, with which the limit is compared; CPU ranks have one "
            f"memory, and need {size_text(most)} of it",
        )
    shares = kind == "cpu" and ranks > 1 and transport in ("auto", "shm")
    if shares and (one_node or transport == "shm"):
        assumed += (
            "all ranks are on one host and communicate through shared memory; for ranks of several "
            'hosts, --ranks-per-node or "transport": "p2p"',
        )
    if few:
        assumed += (
            f"{enough} of {count} micro-batches of a step were simulated: traffic is that of {enough}",
        )
    if memory_gib is None and machine is not None and machine.device.memory_bytes is not None:
        limit_nbytes, said = device_memory(machine, found.communicators)
        assumed += (said,)
    times = [] if machine is None else _times(of_stages, machine, settings, source.batch)
    return Plan(
        source.name,
        mesh,
        settings.zero_optimization.stage,
        size,
        limit_nbytes,
        found,
        assumed,
        not_modelled=(
            *NOT_MODELLED,
            NOT_MODELLED_OF[kind],
            *(NOT_MODELLED_OF_STAGES if mesh.pipeline > 1 and shares else ()),
        ),
        own_batch=source.own_batch,
        target=kind,
        time=times[highest_at] if times else None,
        stages=tuple(map(_stage_needs, of_stages, peaks)) if mesh.pipeline > 1 else (),
        stage_times=tuple(times) if mesh.pipeline > 1 else (),
        of_stages=tuple(of_stages),
        ranks_per_node=ranks_per_node,
        config=tuple(loaded.rows()),
    )


def _check_order(of_ranks: Sequence[Simulation]) -> None:
    """Check that simulated ranks call the same collectives over the groups that they share.

    Raises:
        UsageError: they do not.
    """
    wrong = diverged({found.rank: found.histories for found in of_ranks})
    if wrong:
        raise UsageError(
            f"{wrong[0]}. The ranks of a run would wait for each other there. Let all ranks make the "
            "same calls of the engine, in the same order."
        )


def _enough(source: ModelSource, mesh: Mesh) -> int | None:
    """The micro-batches of a step after which each does and holds what the one before does.

    None: not known. With the schedule 1F1B the first stage of P holds P of them, and then runs a forward
    and a backward in turns.
    """
    if mesh.pipeline == 1:
        return 2
    is_simple = source.schedule == "1F1B" and source.cut_into in (0, mesh.pipeline)
    return mesh.pipeline + 1 if is_simple else None


def mesh_of(settings: Config, ranks: int) -> Mesh:
    """The mesh of a configuration on ``ranks`` ranks."""
    named = mesh_from_config(settings)
    return resolve_mesh([] if named is None else [named], ranks).mesh


def _first_rank(mesh: Mesh, stage: int) -> int:
    return next(r for r in range(mesh.world_size) if mesh.coordinate(r)["pipeline"] == stage)


def _peak_of(found: Simulation, *, together: bool = False) -> int:
    """The most bytes on the device; ``together``: on device and host."""
    if together:
        return max(found.together.values())
    return max(moment.device_nbytes for moment in found.moments.values())


def _stage_needs(found: Simulation, peak_nbytes: int) -> StageNeeds:
    rows = [row for row in found.memory if row.category not in TEMPORARY]
    states = sum(row.measured for row in rows if row.tier == "device")
    sent = sum(prod(each.shape) for each in found.messages if each.kind == "send")
    return StageNeeds(
        found.rank, found.params_numel, states, peak_nbytes, found.in_flight, sent, found.kept
    )


def _times(
    of_stages: Sequence[Simulation], machine: MachineFile, settings: Config, batch: Any
) -> list[StepTime]:
    """The time of a step, for each pipeline stage."""
    samples, size = settings.train_batch_size, settings.train_micro_batch_size_per_gpu
    assert samples is not None  # computed where it is not given
    assert size is not None
    ids = batch[0].get("input_ids") if isinstance(batch[0], Mapping) else None
    tokens = 0 if ids is None else samples * (ids.numel() // len(ids))
    count = settings.gradient_accumulation_steps
    if len(of_stages) > 1:
        return stage_times(of_stages, machine, samples=samples, tokens=tokens, micro_batches=count)
    return [step_time(of_stages[0], machine, samples=samples, tokens=tokens, micro_batches=count)]


def _cuts_by_itself(settings: Config) -> bool:
    """Whether a run cuts the model over tensor ranks, because a key of DeepSpeed says how many."""
    section = settings.tensor_parallel
    return max(section.autotp_size, section.tp.tp_size) > 1


def target_of(machine: MachineFile | None, asked: Target | None) -> Target:
    """The kind of device that is planned for: that of the machine, or the one that was asked for.

    A machine with streams is a GPU, a serial one is a CPU. Without both it is the CPU.

    Raises:
        UsageError: the machine is of another kind than the one asked for.
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
    """A machine with so many devices in a node; None stays as it is.

    Raises:
        UsageError: the ranks do not fill nodes of this size.
    """
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
    parts = [f"{taken / 1e9:.2f} for the device's context ({context.source})"] if context else []
    if each and communicators:
        taken += communicators * each.value
        parts.append(
            f"{communicators} x {each.value / 1e9:.2f} for communicators of NCCL ({each.source}; those "
            "that the program itself opens are not known)"
        )
    rest = f", of which {' and '.join(parts)} are not for tensors" if parts else ""
    return round(whole - taken), f"the device has {whole / 1e9:.2f} GB{rest}"


def plan_of_largest_batch(
    model: str,
    config: Mapping[str, Any] | str | Path,
    *,
    ranks: int,
    length: int | None = None,
    memory_gib: float | None,
    machine: MachineFile | None = None,
    target: Target | None = None,
    with_events: bool = False,
    ranks_per_node: int | None = None,
) -> Plan:
    """The plan with the largest micro-batch that fits ``memory_gib``; one more sample does not fit.

    Arguments and errors as for :func:`make_plan`. Costs about five simulations.

    Raises:
        UsageError: there is no limit, one sample does not fit, the model has a batch of its own, or the
            configuration fixes ``train_batch_size``.
    """
    plans: dict[int, Plan] = {}

    def peak_nbytes(samples: int) -> int:
        if samples in plans:
            return plans[samples].peak_nbytes
        plans[samples] = make_plan(
            model, config, ranks=ranks, micro_batch=samples, length=length, memory_gib=memory_gib,
            machine=machine, target=target, with_events=with_events, ranks_per_node=ranks_per_node,
        )  # fmt: skip
        return plans[samples].peak_nbytes

    if (fixed := config_dict(config).get("train_batch_size")) not in (None, "auto"):
        raise UsageError(
            f"--batch max tries micro-batches of several sizes, and train_batch_size is {fixed}, which "
            "allows only its divisors. Leave it out of the configuration."
        )
    if memory_gib is None and (machine is None or machine.device.memory_bytes is None):
        raise UsageError("--batch max is the largest that fits --memory, which is not given.")
    with explained(model, FACTORY_HINT):
        refuse_own_batch("--batch max", model_source(model, 1, 1, sharded=False))
    peak_nbytes(1)
    limit_nbytes = plans[1].limit_nbytes
    assert limit_nbytes is not None
    samples, one_more_nbytes = largest_batch(peak_nbytes, limit_nbytes)
    return replace(plans[samples], one_more_nbytes=one_more_nbytes)


def limit_of(memory_gib: float) -> int:
    """Bytes of device memory.

    Raises:
        UsageError: it is no size of memory.
    """
    if not 0 < memory_gib < math.inf:  # also NaN
        raise UsageError(
            f"--memory is {memory_gib:g} GiB, which is not a size of memory. Give the memory of one "
            "device in GiB."
        )
    return int(memory_gib * 2**30)


def config_dict(config: Any) -> dict[str, Any]:
    """A configuration or its file as a new dict.

    Raises:
        ConfigError: the file cannot be read, or is not one JSON object.
    """
    if isinstance(config, Mapping):
        return dict(config)
    return read_source(Path(config))[0]


BATCH_HINT = (
    "If the batch is not of the kind that this model takes, give module:function, which returns the "
    "model and a batch."
)


FACTORY_HINT = "Correct the function that returns the model; it has no arguments."


@contextmanager
def explained(model: str, hint: str = BATCH_HINT) -> Iterator[None]:
    """Say what in a model cannot be planned, at which line, and what to do (``hint``).

    Raises:
        UnsupportedError: an operation needs values or has no fake kernel, or the model raises an error.
    """
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UnsupportedError(
            f"{model} cannot be planned: {_line(error)} calls {error.func}, which "
            "depends on the values of a tensor, and a plan has only shapes. Common causes: "
            ".item(), .tolist(), bool(tensor), nonzero(), and a boolean mask as an index. Use an "
            "operation whose result has a fixed shape, such as torch.where, or give module:function, "
            "which leaves such values out."
        ) from error
    except UnsupportedOperatorException as error:
        raise UnsupportedError(
            f"{model} cannot be planned: {_line(error)} calls {error.func}, which "
            "has no fake kernel, so the shape of its result is unknown. "
            "Register one with torch.library.register_fake."
        ) from error
    except ZeroShardError:
        raise
    except Exception as error:
        if isinstance(error.__cause__, ZeroShardError):  # torch's Module.to wraps every error
            raise UnsupportedError(
                f"{model} cannot be planned: {_line(error)}: {error.__cause__}"
            ) from error
        raise UnsupportedError(
            f"{model} cannot be planned: {type(error).__name__} at {_line(error)}: "
            f"{str(error).rstrip('.')}. {hint}"
        ) from error


def _line(error: BaseException) -> str:
    """The innermost line outside of torch and of this package."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if not frame.filename.startswith(LIBRARIES):
            return f"{frame.filename}:{frame.lineno} ({frame.line})"
    return "a line of torch"
