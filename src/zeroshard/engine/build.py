"""Builds the parts of an engine, in the same order on every rank.

First the ranks join. Then each rank makes its draft, and the ranks open their connections. Then memory is
allocated. Everything is decided here, so that the step does not test whether a feature is on.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.checkpoint.local_state import LocalState
from zeroshard.comm.collectives import Comm
from zeroshard.comm.dtensors import groups_over, local_of
from zeroshard.comm.env import DataCoordinate, RankInfo, current_rank_info
from zeroshard.config import Config, LoadedConfig
from zeroshard.core.layout import Slot, is_counted, is_split
from zeroshard.core.ledger import Ledger
from zeroshard.core.mesh import HOLDERS, Mesh
from zeroshard.core.nbytes import UnitBytes, state_nbytes
from zeroshard.core.stages import STAGES, Stage
from zeroshard.core.tiers import Tier
from zeroshard.device.choice import choose_device, read
from zeroshard.engine.build_observer import make_observer
from zeroshard.engine.checkpoint_loader import CheckpointLoader
from zeroshard.engine.checkpoint_saver import CheckpointSaver
from zeroshard.engine.draft import Draft, EngineArguments, check_model, make_draft
from zeroshard.engine.free_memory import check_memory, new_nbytes, passing_nbytes
from zeroshard.engine.non_finite import NanPolicy, nan_policy
from zeroshard.engine.offload_states import StateOffloader
from zeroshard.engine.optimizer_step import Accumulation, OptimizerStep, is_fake
from zeroshard.engine.param_groups import groups_in_words
from zeroshard.engine.pipeline_traffic import (
    PipelineTraffic,
    RankMemory,
    agreed_traffic,
    facts_of,
)
from zeroshard.engine.plan_line import PlannedRun, search_lines
from zeroshard.engine.remedies import Run, is_offloaded
from zeroshard.engine.restarts import tell_launcher
from zeroshard.engine.runtime import ZeroRuntime
from zeroshard.engine.tied_units import (
    check_options,
    gathers_of,
    reductions_of,
    tied_parts,
    tied_ranks,
)
from zeroshard.engine.unit_plan import UnitSpec, layout_digest, plan_bytes
from zeroshard.errors import in_short
from zeroshard.memory.malloc import return_large_blocks
from zeroshard.metrics.observe import Observer
from zeroshard.offload.async_update import AsyncUpdateWorker
from zeroshard.offload.capacity_check import check_capacity
from zeroshard.offload.offload_plan import (
    OffloadPlan,
    check_device,
    disk_buffer_nbytes,
    plan_offload,
    shaped_state,
)
from zeroshard.offload.stores import Stores, has_copy_streams, update_threads
from zeroshard.optim.twin import rebind
from zeroshard.parallel.initial_values import ValuesByName, is_meta
from zeroshard.parallel.split import PipelineModel
from zeroshard.precision.hardware import hardware_of, tell_if_slow
from zeroshard.precision.loss_scaler import LossScaler, scaler_from
from zeroshard.precision.policy import Policy
from zeroshard.session.join import join_ranks
from zeroshard.session.session import CommSession, decline, open_session
from zeroshard.zero.access import UnitOptimState
from zeroshard.zero.clip import DataExchange, NormExchange, num_words
from zeroshard.zero.copy_sums import CopySums
from zeroshard.zero.gradients import GradBuffer
from zeroshard.zero.hooks import StepHooks
from zeroshard.zero.life import Life
from zeroshard.zero.mesh_norm import MeshExchange
from zeroshard.zero.mode_switch import publish_modes
from zeroshard.zero.module_order import ModuleOrder
from zeroshard.zero.optimizer import ShardedOptimizer
from zeroshard.zero.prefetch import Prefetcher, WrappedModule
from zeroshard.zero.reduce import MAX_IN_FLIGHT, GradReducer
from zeroshard.zero.unit import Unit


@dataclass(frozen=True, eq=False)
class EngineParts:
    """Everything that an engine is made of."""

    loaded: LoadedConfig
    rank_info: RankInfo
    mesh: Mesh
    coordinate: DataCoordinate
    device: torch.device
    policy: Policy
    watch: CommSession
    runtime: ZeroRuntime
    scaler: LossScaler
    scales_loss: bool  # gradients are computed in fp16
    scheduler: Any
    accumulation: Accumulation
    update: OptimizerStep
    hooks: StepHooks
    offloader: StateOffloader
    observer: Observer
    make_savers: Callable[[], tuple[CheckpointSaver, CheckpointLoader]]
    nan_policy: NanPolicy | None


FirstValues = Callable[[str, nn.Module], None]
"""Gives a module, after its name, the first values of what it has on the meta device."""


def build_engine(given: EngineArguments, make_hooks: Callable[..., StepHooks]) -> EngineParts:
    """Build all parts. Collective. Ranks compare their plans before they allocate memory.

    ``make_hooks`` makes :class:`StepHooks` that call functions of the engine. After an error the model
    has no hooks, and resident parameters are plain again.
    """
    check_model(given.model)
    join_ranks()
    try:
        draft = make_draft(given, current_rank_info())
    except Exception as error:
        if not getattr(error, "on_all_ranks", False):  # else the other ranks would wait
            decline(f"{type(error).__name__}: {_first_fact(error)}")
        raise
    settings = draft.loaded.config
    choose_device(draft.device)  # events are recorded, and kernels queued, on the current device
    watch = open_session(
        transport=settings.transport,
        device=draft.device,
        trust=settings.trust,
        plan={
            **_shared_plan(draft),
            **_agreed_groups(draft),
            **draft.loaded.agreed(),
            "ranks that share key/value heads": str(list(draft.head_copies)),
        },
        head_copies=draft.head_copies,
        separate_reductions=gathers_while_reducing(settings),
        mesh=draft.mesh,
        ties=tied_ranks(draft.model),
    )
    tell_launcher(draft.loaded, rank=draft.rank_info.rank)
    try:
        return _assemble(draft, watch, make_hooks)
    except BaseException as error:
        watch.close(in_short(error))
        raise


def _shared_plan(draft: Draft) -> dict[str, str]:
    """What all ranks must share of the model. The units of pipeline ranks differ."""
    model = draft.model
    if isinstance(model, PipelineModel):
        first = ", ".join(pieces[0] for pieces in model.stages if pieces)
        return {
            "pipeline schedule": f"{model.schedule}, gather {model.gather}, reduce {model.reduce}, "
            f"auto_limit_nbytes {model.auto_limit_nbytes}",
            "first pieces of the pipeline stages": first,
            "whole model": model.digest,
        }
    return {"units": layout_digest(draft.specs)}


def _agreed_groups(draft: Draft) -> dict[str, str]:
    """What all ranks of a pipeline must share of their param groups."""
    if draft.mesh.pipeline == 1 or draft.optimizer is None:
        return {}
    return groups_in_words(draft.optimizer)


def gathers_while_reducing(settings: Config) -> bool:
    """Whether the backward of one layer gathers the next one while it reduces the one before."""
    zero = settings.zero_optimization
    return bool(zero.overlap_comm) and STAGES[zero.stage].shards_params


def _assemble(
    draft: Draft, watch: CommSession, make_hooks: Callable[..., StepHooks]
) -> EngineParts:
    """Build the parts that need memory. All ranks have the same plan by now."""
    model, settings = draft.model, draft.loaded.config
    device, policy = draft.device, draft.policy
    trains_on_host = device.type == "cpu" and watch.gathers.transport != "fake"
    if draft.rank_info.is_main_rank and trains_on_host:
        tell_if_slow(policy, hardware_of(device))
    accumulation = Accumulation(
        settings.gradient_accumulation_steps or 1, managed=settings.managed_gradient_accumulation
    )
    check_options(draft, watch)
    after_bad_step = nan_policy(settings, scales_loss=scales_loss(settings, policy))
    if watch.gathers.transport == "fake":  # without other ranks gradients have no meaning
        after_bad_step = None
    with contextlib.ExitStack() as undo:
        draw = _first_values(draft, watch)
        runtime = _build_runtime(draft, watch, accumulation, draw)
        undo.callback(runtime.close, wait=False)
        keep = kept_buffers(model, settings)
        buffers = place_buffers(model, policy.buffer, device, keep=keep, draw=draw)
        for at, buffer in enumerate(buffers):
            for comm in (watch.tensor, watch.gathers):
                if comm is not None:
                    comm.broadcast(buffer, 0, name=f"buffer {at}").wait()
        scaler = scaler_from(settings, device)
        order = ModuleOrder()
        update = OptimizerStep(
            runtime,
            settings,
            watch=watch,
            exchange=_exchange(draft, watch, runtime, order),
            scaler=scaler,
            accumulation=accumulation,
            dp_size=draft.coordinate.dp_size,
            device=device,
            checks_overflow=scales_loss(settings, policy) or after_bad_step is not None,
        )
        for shard in runtime.optimizer.shards if runtime.optimizer else ():
            assert runtime.optimizer is not None
            shard.unit.optim_state = UnitOptimState(
                runtime.optimizer,
                shard,
                runtime.reducer.summed,
                update.unscaled_factor,
                update.all_gather_late,
            )
        if runtime.optimizer is not None:
            publish_modes(runtime.optimizer, update.all_gather_late)
        hooks = make_hooks(
            runtime.prefetcher, runtime.reducer, kind_of_backward=accumulation.kind_of_backward,
            compiles=settings.compile_blocks,
        )  # fmt: skip
        undo.callback(hooks.remove)
        if runtime.optimizer is not None:
            measure = weakref.WeakMethod(update.norm_before_step)  # parameters hold the reducer
            runtime.reducer.measure = lambda: None if (found := measure()) is None else found()
            runtime.reducer.fragments = runtime.optimizer.stand_ins
        if draft.mesh.tensor > 1:
            hooks.note_forwards(order.note)
            tensor_ranks = draft.mesh.group(draft.rank_info.rank, {"tensor"})
            watch.watch_layers(groups_over(model.parameters(), tensor_ranks))
        parts = EngineParts(
            draft.loaded, draft.rank_info, draft.mesh, draft.coordinate, device, policy, watch, runtime,
            scaler, scales_loss(settings, policy), draft.scheduler, accumulation, update, hooks,
            StateOffloader(runtime, hooks, device), make_observer(draft, runtime, watch),
            partial(_make_savers, draft, runtime, watch), after_bad_step,
        )  # fmt: skip
        undo.pop_all()
    if trains_on_host:
        return_large_blocks(offloaded=False)
    return parts


def _first_values(draft: Draft, watch: CommSession) -> FirstValues:
    """How modules on the meta device get their first values. Collective if there are such modules.

    Each module draws from the seed of rank 0 and its name. So the values do not depend on the mesh, nor
    on where a pipeline is cut.
    """
    if not any(map(is_meta, draft.model.modules())):
        return lambda _name, _module: None
    own = torch.initial_seed()
    words = torch.tensor([own >> 32, own % 2**32], dtype=torch.int64, device=draft.device)
    watch.world.broadcast(words, 0, name="seed of the first values").wait()
    high, low = (own >> 32, own % 2**32) if is_fake(words) else read(words)
    return ValuesByName(draft.model, (high << 32) + low, draft.device).draw


def _exchange(
    draft: Draft, watch: CommSession, runtime: ZeroRuntime, order: ModuleOrder
) -> NormExchange:
    """How norm, overflow and flags are exchanged. Collective on a mesh."""
    if draft.mesh.is_flat:
        return DataExchange(watch.world, watch.divergence)
    tied = tied_parts(draft, watch, runtime.units, runtime.reducer.buffers)
    trained = [unit for unit in runtime.units if unit.trainable]
    copied = {
        position: slot.fqn
        for unit in trained
        for position, slot in zip(unit.positions, unit.layout.slots, strict=True)
        if draft.mesh.tensor > 1 and not is_split(slot)
    }
    place = draft.mesh.coordinate(draft.rank_info.rank)["tensor"]
    uncounted = {
        position
        for unit in trained
        for position, slot in zip(unit.positions, unit.layout.slots, strict=True)
        if not is_counted(slot, place)
    }
    return MeshExchange(
        watch.world,
        watch.gathers,
        draft.mesh,
        rank=draft.rank_info.rank,
        copied=copied,
        uncounted=uncounted,
        num_words=num_words(sum(len(unit.params) for unit in trained)),
        precision=max((torch.finfo(unit.row.reduce).eps for unit in trained), default=0.0),
        device=draft.device,
        divergence=watch.divergence,
        order=order,
        tied=tied,
    )


def _make_savers(
    draft: Draft, runtime: ZeroRuntime, watch: CommSession
) -> tuple[CheckpointSaver, CheckpointLoader]:
    settings, mesh = draft.loaded.config, draft.mesh
    counts = _counts(draft, watch)
    local = LocalState(runtime.units, runtime.optimizer, counts)
    saver = CheckpointSaver(
        settings.checkpoint,
        stage=int(settings.zero_optimization.stage),
        local=local,
        control_group=watch.control_group,
        rank_info=draft.rank_info,
        device=draft.device,
        ledger=runtime.ledger,
        uses_disk=runtime.stores.uses_disk,
        mesh=mesh,
    )
    loader = CheckpointLoader(
        settings.checkpoint,
        local=local,
        comm=watch.world,
        control_group=watch.control_group,
        rank_info=draft.rank_info,
        device=draft.device,
        life=runtime.life,
        mesh=mesh,
    )
    return saver, loader


def _counts(draft: Draft, watch: CommSession) -> Callable[[Slot], bool]:
    """Which parameters this rank saves its part of.

    Of the shard groups that hold the same part the first one saves it: that of the first replica, and of
    the first tensor coordinate with this part. What is tied over pipeline ranks is sharded over replicas
    as well.
    """
    mesh, rank = draft.mesh, draft.rank_info.rank
    at = mesh.coordinate(rank)
    has_replicas = watch.gathers.size < len(mesh.group(rank, HOLDERS))
    is_later, place = has_replicas and at["data_replicate"] > 0, at["tensor"]
    tied = {slot.fqn for spec in draft.specs if spec.tie for slot in spec.layout.slots}
    return lambda slot: (not is_later or slot.fqn in tied) and is_counted(slot, place)


def scales_loss(settings: Config, policy: Policy) -> bool:
    """Whether gradients are computed in fp16, so that the loss is scaled."""
    return settings.fp16.enabled or policy.autocast == torch.float16


def _first_fact(error: Exception) -> str:
    """The first line of an error that is not a heading."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if line and not line.endswith(":")), "")


@dataclass(frozen=True, eq=False)
class _Frame:
    """What all parts of one runtime share while they are built."""

    draft: Draft
    watch: CommSession
    accumulation: Accumulation
    offload_plan: OffloadPlan
    plan: list[UnitBytes]
    stores: Stores
    ledger: Ledger
    life: Life
    traffic: PipelineTraffic

    @property
    def config(self) -> Config:
        """The resolved configuration."""
        return self.draft.loaded.config

    @property
    def stage(self) -> Stage:
        """The row of the configuration's stage."""
        return STAGES[self.config.zero_optimization.stage]


def _in_order(specs: Sequence[UnitSpec]) -> list[UnitSpec]:
    """The specs with those first that run around all other modules and are reduced last: the root's."""
    return sorted(specs, key=lambda spec: not spec.is_outermost)


def _build_runtime(
    draft: Draft, watch: CommSession, accumulation: Accumulation, draw: FirstValues
) -> ZeroRuntime:
    """Move the model's parameters into units and compose what acts on them. Collective.

    The values are those of rank 0. At stage 3 a unit is sharded before the next one is built. So no rank
    holds more than its shards and one unit, if the model was sharded before or is on the meta device.
    """
    model, config, comm = draft.model, draft.loaded.config, watch.gathers
    specs, optimizer = draft.specs, draft.optimizer
    stage = STAGES[config.zero_optimization.stage]
    in_order = _in_order(specs)
    copies = has_copy_streams(draft.device)
    offload_plan = plan_offload(
        {spec.name: spec.layout for spec in in_order},
        {spec.name: spec.row for spec in in_order if spec.trainable and optimizer is not None},
        config,
        rank_of={spec.name: gathers_of(spec, watch).rank for spec in specs}.__getitem__,
        whole=not all(probe.elementwise for probe in draft.probes.values()),
        has_copy_streams=copies,
    )
    plan = plan_bytes(
        specs,
        dict(model.named_parameters()),
        optimizer,
        draft.probes,
        many=accumulation.expects_more(),
        shards_grads=stage.shards_grads,
        offload_plan=offload_plan,
    )
    plan = [
        replace(row, rank=gathers_of(spec, watch).rank) if spec.tie else row
        for spec, row in zip(specs, plan, strict=True)
    ]
    forecast = []
    check_device(offload_plan, has_copy_streams=copies)
    if offload_plan.is_offloaded:
        planned = state_nbytes(plan, stage, comm.rank)
        forecast = check_capacity(
            planned, offload_plan, config, watch.world, draft.rank_info, draft.device,
            disk_buffer_nbytes=disk_buffer_nbytes(
                plan,
                offload_plan,
                draft.probes,
                shards_params=stage.shards_params,
                has_copy_streams=copies,
            ),
        )  # fmt: skip
    passing, states = _passing(in_order, stage, watch), state_nbytes(plan, stage, comm.rank)
    if draft.device.type != "cpu" or not offload_plan.is_offloaded:
        missing = new_nbytes(states, model, draft.device, passing)
        on_device = sum(nbytes for (_, tier), nbytes in states.items() if tier is Tier.DEVICE)
        forecast += check_memory(
            missing,
            on_device + passing - missing,
            watch.world,
            draft.rank_info.rank,
            draft.device,
            _states_only(plan, config, draft.device),
            partial(search_lines, _planned_run(draft)),
        )
    traffic = _traffic(draft, watch, plan, stage)
    ledger, life = Ledger(), Life()
    stores = Stores(config, ledger, offload_plan, draft.device)
    frame = _Frame(draft, watch, accumulation, offload_plan, plan, stores, ledger, life, traffic)
    with contextlib.ExitStack() as undo:
        # An error keeps alive what was built, so without this disk space would be freed late.
        undo.callback(stores.close, wait=False)
        units = _build_units(model, frame, undo, draw)
        prefetcher = _build_prefetcher(model, units, frame)
        reducer = _build_reducer(units, frame)
        sharded = None if optimizer is None else _build_optimizer(optimizer, reducer, frame)
        undo.pop_all()
    return ZeroRuntime(
        stage, units, prefetcher.wrapped_modules, prefetcher, reducer, sharded, ledger, plan,
        stores, forecast, life, traffic,
        [unit for spec, unit in zip(specs, units, strict=True) if spec.pipeline_stage is None],
    )  # fmt: skip


def _passing(in_order: Sequence[UnitSpec], stage: Stage, watch: CommSession) -> int:
    spec = next((spec for spec in in_order if spec.trainable), None)
    if spec is None:
        return 0
    comm = reductions_of(spec, watch)
    has_scratch = hasattr(comm, "scratch_nbytes")
    return passing_nbytes(spec.layout, spec.row, stage, ranks=comm.size, has_scratch=has_scratch)


def _planned_run(draft: Draft) -> PlannedRun:
    """A run of which no forward has begun, for a command line."""
    settings = draft.loaded.config
    assert settings.train_micro_batch_size_per_gpu is not None  # computed where it is not given
    return PlannedRun(
        draft.model, draft.loaded, draft.optimizer, draft.mesh, draft.rank_info,
        draft.device.type != "cpu", settings.train_micro_batch_size_per_gpu,
        settings.gradient_accumulation_steps or 1,
    )  # fmt: skip


def _states_only(plan: Sequence[UnitBytes], config: Config, device: torch.device) -> Run:
    """The run for a choice of remedies while nothing but its states is known, as of its first rank."""
    zero = config.zero_optimization
    return Run(
        units=plan,
        accumulated=plan,
        rank=0,
        stage=int(zero.stage),
        micro_batch=1,
        accumulation=1,
        activation_nbytes=0,
        has_host=device.type != "cpu",
        checkpointing="",
        offloads_optimizer=is_offloaded(zero.offload_optimizer),
        offloads_params=is_offloaded(zero.offload_param),
        block_nbytes=0,
    )


def _traffic(
    draft: Draft, watch: CommSession, plan: Sequence[UnitBytes], stage: Stage
) -> PipelineTraffic:
    """How often a pipeline gathers and reduces. Collective if it is to be chosen."""

    def facts() -> RankMemory:
        return facts_of(
            draft.specs,
            plan,
            state_nbytes(plan, stage, watch.gathers.rank),
            stage,
            draft.device,
            shares=watch.gathers.size if draft.mesh.pipeline > 1 else 1,
            rank=draft.rank_info.rank,
        )

    return agreed_traffic(
        draft.model,
        facts,
        watch.world,
        draft.device,
        micro_batches=draft.loaded.config.gradient_accumulation_steps or 1,
    )


def _build_units(
    model: nn.Module, frame: _Frame, undo: contextlib.ExitStack, draw: FirstValues
) -> list[Unit]:
    positions = {id(param): at for at, param in enumerate(model.parameters())}
    params, modules = dict(model.named_parameters()), dict(model.named_modules())
    stores, device = frame.stores, frame.draft.device
    units = []
    for spec in frame.draft.specs:
        comm = gathers_of(spec, frame.watch)
        unit = Unit(
            spec.name,
            spec.layout,
            _members(modules, spec, device, frame.watch.tensor, draw),
            positions=[positions[id(params[slot.fqn])] for slot in spec.layout.slots],
            row=spec.row,
            trainable=spec.trainable,
            # On one rank the shard is the whole unit, and gathering would only make a copy.
            resident=not frame.stage.shards_params
            or (comm.size == 1 and frame.offload_plan.tier_of(spec.name) is Tier.DEVICE),
            comm=comm,
            ledger=frame.ledger,
            device=device,
            store_of=partial(stores.stores_of_unit(spec.name).shard_store, spec.name),
            room=stores.stores_of_unit(spec.name).allocate,
            has_copies=not frame.draft.mesh.is_data_only,
            group=spec.group,
        )
        units.append(unit)
        undo.callback(unit.close, wait=False)
    return units


def _build_prefetcher(model: nn.Module, units: Sequence[Unit], frame: _Frame) -> Prefetcher:
    zero, modules = frame.config.zero_optimization, dict(model.named_modules())
    units_of: dict[str, list[Unit]] = defaultdict(list)
    for spec, unit in zip(frame.draft.specs, units, strict=True):
        units_of[spec.wrapped].append(unit)
    inner = [fqn for fqn in dict.fromkeys(spec.wrapped for spec in frame.draft.specs) if fqn]
    return Prefetcher(
        [WrappedModule(fqn or "root", modules[fqn], tuple(units_of[fqn])) for fqn in [*inner, ""]],
        prefetch_numel=zero.stage3_prefetch_bucket_size if zero.overlap_comm else 0,
        live_numel=zero.stage3_max_live_parameters,
        reuse_numel=zero.stage3_max_reuse_distance,
    )


def _build_reducer(units: Sequence[Unit], frame: _Frame) -> GradReducer:
    zero, stage, device = frame.config.zero_optimization, frame.stage, frame.draft.device
    unit_of = {unit.name: unit for unit in units}
    nbytes_of = {spec.name: row for spec, row in zip(frame.draft.specs, frame.plan, strict=True)}
    buffers = [
        GradBuffer(
            unit_of[spec.name],
            comm=reductions_of(spec, frame.watch),
            ledger=frame.ledger,
            transient=stage.shards_grads or not nbytes_of[spec.name].grad_nbytes,
            rest=frame.stores.grad_store_of(
                spec.name, nbytes_of[spec.name].stored_grad_nbytes * spec.layout.shard_numel
            ),
            pipeline_stage=spec.pipeline_stage,
            # On a device one copy of all gradients costs less than several, and the room is there.
            group_numel=frame.config.unit_max_numel if has_copy_streams(device) else None,
        )
        for spec in _in_order(frame.draft.specs)
        if spec.trainable
    ]
    watch = frame.watch
    return GradReducer(
        buffers,
        eager=stage.shards_grads and frame.traffic.reduce == "micro_batch",
        whole=not stage.shards_optimizer,
        in_flight_limit=MAX_IN_FLIGHT if zero.overlap_comm else 0,
        predivide=predivide(
            frame.config,
            frame.draft.coordinate.dp_size,
            {buffer.unit.row.reduce for buffer in buffers},
        ),
        copy_sums=[
            CopySums(copies, watch.gathers, buffers, zero.reduce_bucket_size)
            for copies in watch.copies
        ],
    )


def _build_optimizer(
    optimizer: torch.optim.Optimizer, reducer: GradReducer, frame: _Frame
) -> ShardedOptimizer:
    stores, found = frame.stores, frame.draft.probes
    host = stores.host_staging()
    worker = None
    if host is not None:
        threads = update_threads(frame.draft.device, frame.draft.rank_info)
        worker = AsyncUpdateWorker(frame.draft.device, threads=threads, delayed=stores.is_delayed)
    return ShardedOptimizer(
        optimizer,
        reducer.buffers,
        spans=[frame.offload_plan.spans_of(buffer.unit.name) for buffer in reducer.buffers],
        shards_optimizer=frame.stage.shards_optimizer,
        ledger=frame.ledger,
        life=frame.life,
        rebind=rebind,
        compiles=frame.config.compile_update,
        pager=stores.pager(found),
        chunk_memory=stores.chunk_memory,
        state_dtypes=lambda buffer: partial(shaped_state, found[buffer.unit.row.master]),
        host=host,
        worker=worker,
    )


def predivide(config: Config, dp_size: int, reduced: Collection[torch.dtype]) -> float:
    """What local gradients are divided by before they are reduced. ``reduced``: their dtypes then.

    A sum over ranks in fp16 overflows at 65,504, whatever the number of ranks, so there the mean is taken
    before. Otherwise the loss scale would be lower the more ranks there are.
    """
    factor = config.gradient_predivide_factor
    if config.prescale_gradients or (factor == 1.0 and torch.float16 in reduced):
        return float(dp_size)
    return factor


def _members(
    modules: Mapping[str, nn.Module],
    spec: UnitSpec,
    device: torch.device,
    tensor: Comm | None,
    draw: FirstValues,
) -> Iterator[nn.Parameter]:
    """The unit's parameters. Those on the meta device get their values right before they are yielded.

    ``tensor``: connects the tensor group. What the group holds whole gets the values of its first rank.
    """
    for slot in spec.layout.slots:
        name, _, leaf = slot.fqn.rpartition(".")
        draw(name, modules[name])
        param = modules[name]._parameters[leaf]
        assert param is not None
        if tensor is not None and not is_split(slot):
            values = local_of(param).detach().to(device).contiguous()
            tensor.broadcast(values, 0, name=slot.fqn).wait()
            with torch.no_grad():
                local_of(param).copy_(values)
        yield param


def kept_buffers(model: nn.Module, config: Config) -> list[str]:
    """Globs on buffers that ``data_types.buffer_dtype`` does not change. "auto": those of the model.

    Transformers models name parts of modules in ``_keep_in_fp32_modules`` and ``..._strict``.
    """
    patterns = config.data_types.keep_in_fp32_modules
    if patterns != "auto":
        return list(patterns)
    parts = [getattr(model, f"_keep_in_fp32_modules{end}", None) or () for end in ("", "_strict")]
    return [f"*{part}*" for some in parts for part in some]


def place_buffers(
    model: nn.Module,
    dtype: torch.dtype | None,
    device: torch.device,
    *,
    keep: Sequence[str] = (),
    draw: FirstValues,
) -> list[Tensor]:
    """Move buffers to the device; floating ones change dtype only if asked. Returns them in order.

    ``keep``: globs on names of buffers that keep their dtype. ``draw``: gives those on the meta device
    their values.
    """
    moved: list[Tensor] = []
    for prefix, module in model.named_modules():
        draw(prefix, module)
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            fqn = f"{prefix}.{name}" if prefix else name
            kept = dtype is None or any(fnmatchcase(fqn, pattern) for pattern in keep)
            cast = buffer.dtype if kept or not buffer.is_floating_point() else dtype
            module._buffers[name] = buffer.to(device=device, dtype=cast).contiguous()
            moved.append(module._buffers[name])  # type: ignore[arg-type]
    return moved
