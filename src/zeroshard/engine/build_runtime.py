"""Builds the parts of an engine that train: plans what they need, checks for room, and allocates it."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from zeroshard.comm.collectives import Comm
from zeroshard.comm.dtensors import local_of
from zeroshard.comm.hops import NestedComm, TwoHops
from zeroshard.comm.quantized import QuantizedSums, wire_nbytes
from zeroshard.config import Config
from zeroshard.config.mesh_keys import keeps_node_sums, shares_params_in_nodes
from zeroshard.core.layout import is_split
from zeroshard.core.ledger import Ledger
from zeroshard.core.stages import STAGES, Stage, UnitBytes, state_nbytes
from zeroshard.core.tiers import Tier
from zeroshard.engine.draft import Draft
from zeroshard.engine.out_of_memory import check_memory, new_nbytes, passing_nbytes, states_only
from zeroshard.engine.pipeline_traffic import PipelineTraffic, agreed_traffic
from zeroshard.engine.remedies import PlannedRun, search_lines
from zeroshard.engine.shared_units import gathers_of, reductions_of
from zeroshard.engine.unit_plan import UnitSpec, plan_bytes
from zeroshard.offload.capacity_check import check_capacity
from zeroshard.offload.offload_plan import (
    OffloadPlan,
    check_device,
    disk_buffer_nbytes,
    old_state_nbytes,
    plan_offload,
    shaped_state,
)
from zeroshard.offload.shard_store import AllocateShard, ShardStore
from zeroshard.offload.stores import Stores, has_copy_streams
from zeroshard.offload.zeropp_stores import (
    BITS,
    NodeShardStore,
    QuantizedShardStore,
    allocate_in_node,
)
from zeroshard.optim.inner_optimizer import rebind
from zeroshard.parallel.split import PipelineModel
from zeroshard.session.comm_session import CommSession
from zeroshard.zero.copy_sums import CopySums
from zeroshard.zero.grad_buckets import by_block
from zeroshard.zero.gradients import GradBuffer
from zeroshard.zero.life import Life
from zeroshard.zero.node_sums import NodeSums
from zeroshard.zero.optimizer import ShardedOptimizer
from zeroshard.zero.param_bucket import whole_values
from zeroshard.zero.prefetch import Prefetcher, WrappedModule
from zeroshard.zero.reduce import MAX_IN_FLIGHT, GradReducer
from zeroshard.zero.unit import Unit

FirstValues = Callable[[str, nn.Module], None]
"""Gives a module, after its name, the first values of what it has on the meta device."""


@dataclass(eq=False)
class ZeroRuntime:
    """The parts that take a training step."""

    stage: Stage
    units: list[Unit]
    prefetcher: Prefetcher
    reducer: GradReducer
    optimizer: ShardedOptimizer | None
    ledger: Ledger
    plan: list[UnitBytes]
    stores: Stores
    forecast: list[str]  # the forecast of disk times: lines of text
    life: Life
    traffic: PipelineTraffic  # of a pipeline: how often it gathers and reduces
    tied: list[Unit]  # over pipeline stages, in the same order on every rank

    def close(self, *, wait: bool = True) -> None:
        """Give all memory back. Resident parameters stay readable, shards are gone.

        ``wait=False``: drop collectives in flight, because they will never finish.
        """
        # The last entry runs first. All of them run, also after an error.
        with contextlib.ExitStack() as rest:
            rest.callback(self.stores.close, wait=wait)
            if self.optimizer is not None:
                rest.callback(self.optimizer.close)
            rest.callback(self.reducer.close, wait=wait)
            for unit in reversed(self.units):
                rest.callback(unit.close, wait=wait)
            # Before units free memory that is copied to. Copies that the worker starts come later.
            rest.callback(self.stores.finish_copies, wait=wait)


@dataclass(frozen=True, eq=False)
class _Frame:
    """What all parts of one runtime share while they are built."""

    draft: Draft
    watch: CommSession
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


def build_runtime(
    draft: Draft, watch: CommSession, draw: FirstValues, *, many: bool
) -> ZeroRuntime:
    """Move the model's parameters into units and compose what acts on them. Collective.

    ``many``: gradients of several backwards are summed before a step. The values are those of rank 0. At
    stage 3 a unit is sharded before the next one is built. So no rank holds more than its shards and one
    unit, if the model was sharded before or is on the meta device.
    """
    model, specs, optimizer = draft.model, draft.specs, draft.optimizer
    config = draft.loaded.config
    stage = STAGES[config.zero_optimization.stage]
    offload_plan = _plan_offload(draft, watch)
    plan = _plan_bytes(draft, watch, offload_plan, many=many)
    forecast = _check_room(draft, watch, offload_plan, plan)
    traffic = PipelineTraffic("micro_batch", "micro_batch")
    if isinstance(model, PipelineModel):
        traffic = agreed_traffic(model, draft, watch, plan, stage)
    ledger, life = Ledger(), Life()
    stores = Stores(config, ledger, offload_plan, draft.device)
    frame = _Frame(draft, watch, offload_plan, plan, stores, ledger, life, traffic)
    with contextlib.ExitStack() as undo:
        # An error keeps alive what was built, so without this disk space would be freed late.
        undo.callback(stores.close, wait=False)
        units = _build_units(model, frame, undo, draw)
        prefetcher = _build_prefetcher(model, units, frame)
        reducer = _build_reducer(units, frame)
        sharded = None if optimizer is None else _build_optimizer(optimizer, reducer, frame)
        undo.pop_all()
    return ZeroRuntime(
        stage, units, prefetcher, reducer, sharded, ledger, plan,
        stores, forecast, life, traffic,
        [unit for spec, unit in zip(specs, units, strict=True) if spec.pipeline_stage is None],
    )  # fmt: skip


def _plan_offload(draft: Draft, watch: CommSession) -> OffloadPlan:
    in_order = _in_order(draft.specs)
    trained = [spec for spec in in_order if spec.trainable and draft.optimizer is not None]
    copies = has_copy_streams(draft.device)
    offload_plan = plan_offload(
        {spec.name: spec.layout for spec in in_order},
        {spec.name: spec.row for spec in trained},
        draft.loaded.config,
        rank_of={spec.name: gathers_of(spec, watch).rank for spec in in_order}.__getitem__,
        whole=not all(probe.elementwise for probe in draft.probes.values()),
        has_copy_streams=copies,
    )
    check_device(offload_plan, has_copy_streams=copies)
    return offload_plan


def _plan_bytes(
    draft: Draft, watch: CommSession, offload_plan: OffloadPlan, *, many: bool
) -> list[UnitBytes]:
    stage = STAGES[draft.loaded.config.zero_optimization.stage]
    plan = plan_bytes(
        draft.specs,
        dict(draft.model.named_parameters()),
        draft.optimizer,
        draft.probes,
        many=many,
        shards_grads=stage.shards_grads,
        offload_plan=offload_plan,
    )
    rows = [
        _of_holders(row, spec, draft.loaded.config, gathers_of(spec, watch))
        for spec, row in zip(draft.specs, plan, strict=True)
    ]
    if not (keeps_node_sums(draft.loaded.config.zero_optimization) and many):
        return rows
    return [
        _with_node_sum(row, spec, reductions_of(spec, watch)) if spec.trainable else row
        for spec, row in zip(draft.specs, rows, strict=True)
    ]


def _with_node_sum(row: UnitBytes, spec: UnitSpec, comm: Comm) -> UnitBytes:
    """With the sum of a node, which several micro-batches add to."""
    if not isinstance(comm, TwoHops):
        return row
    nbytes = row.layout.full_numel // comm.inner.size * spec.row.grad_accum.itemsize
    return replace(row, node_sum_nbytes=nbytes - row.grad_nbytes * row.layout.shard_numel)


def _of_holders(row: UnitBytes, spec: UnitSpec, config: Config, comm: Comm) -> UnitBytes:
    """What depends on the ranks that share a unit, and on what travels between them."""
    shard_numel, nodes = row.layout.shard_numel, 1
    if spec.tie or spec.experts > 1:
        row = replace(row, rank=comm.rank)
    if _rests_in_node(spec, config, comm):
        assert isinstance(comm, NestedComm)
        nodes = comm.outer.size
    second_nbytes = (nodes - 1) * shard_numel * row.param_nbytes
    if _travels_quantized(spec, config, comm):
        second_nbytes = nodes * wire_nbytes(shard_numel, BITS)
    return replace(row, second_nbytes=second_nbytes)


def _check_room(
    draft: Draft, watch: CommSession, offload_plan: OffloadPlan, plan: Sequence[UnitBytes]
) -> list[str]:
    """Check that hosts, disks and devices have room. Collective. Returns the forecast in words."""
    config, device = draft.loaded.config, draft.device
    stage = STAGES[config.zero_optimization.stage]
    forecast = []
    states = state_nbytes(plan, stage, watch.gathers.rank)
    if offload_plan.is_offloaded:
        forecast = check_capacity(
            states, offload_plan, config, watch.world, draft.rank_info, device,
            buffer_nbytes=old_state_nbytes(offload_plan, draft.probes)
            + disk_buffer_nbytes(
                plan,
                offload_plan,
                draft.probes,
                shards_params=stage.shards_params,
                has_copy_streams=has_copy_streams(device),
            ),
        )  # fmt: skip
    if device.type != "cpu" or not offload_plan.is_offloaded:
        passing = _passing(_in_order(draft.specs), stage, watch)
        missing = new_nbytes(states, draft.model, device, passing)
        on_device = sum(nbytes for (_, tier), nbytes in states.items() if tier is Tier.DEVICE)
        forecast += check_memory(
            missing,
            on_device + passing - missing,
            watch.world,
            draft.rank_info.rank,
            device,
            lambda: states_only(plan, config, device),
            lambda room: search_lines(_planned_run(draft), room),
        )
    return forecast


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


def _build_units(
    model: nn.Module, frame: _Frame, undo: contextlib.ExitStack, draw: FirstValues
) -> list[Unit]:
    positions = {id(param): at for at, param in enumerate(model.parameters())}
    params, modules = dict(model.named_parameters()), dict(model.named_modules())
    device = frame.draft.device
    units = []
    for spec in frame.draft.specs:
        comm = gathers_of(spec, frame.watch)
        store_of, room = _store_of(spec, frame, comm)
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
            store_of=store_of,
            room=room,
            has_copies=spec.experts > 1 or not frame.draft.mesh.is_data_only,
            group=spec.group,
        )
        units.append(unit)
        undo.callback(unit.close, wait=False)
    return units


def _store_of(
    spec: UnitSpec, frame: _Frame, comm: Comm
) -> tuple[Callable[[Tensor], ShardStore], AllocateShard]:
    """What makes the store of a unit's shard, and the memory for it."""
    stores = frame.stores.stores_of_unit(spec.name)
    in_node = _rests_in_node(spec, frame.config, comm)
    if _travels_quantized(spec, frame.config, comm):
        return partial(QuantizedShardStore, comm=comm, in_node=in_node), stores.allocate
    if in_node:
        assert isinstance(comm, NestedComm)
        store_of = partial(NodeShardStore, nodes=comm.outer.size)
        return store_of, partial(allocate_in_node, comm.outer, frame.draft.device)
    return partial(stores.shard_store, spec.name), stores.allocate


def _rests_in_node(spec: UnitSpec, config: Config, comm: Comm) -> bool:
    """Whether the ranks of a node share a unit between steps. Tied units are shared by other ranks."""
    shared = shares_params_in_nodes(config.zero_optimization)
    return shared and isinstance(comm, NestedComm) and not spec.tie


def _travels_quantized(spec: UnitSpec, config: Config, comm: Comm) -> bool:
    """Whether a unit is gathered in 8 bits. One rank gathers nothing."""
    zero = config.zero_optimization
    asked = zero.zero_quantized_weights or (
        zero.zero_quantized_nontrainable_weights and not spec.trainable
    )
    return asked and comm.size > 1 and spec.row.param.is_floating_point


def _sums_of(spec: UnitSpec, frame: _Frame) -> Comm:
    """The communicator that reduces the gradients of a unit."""
    comm = reductions_of(spec, frame.watch)
    asked = frame.config.zero_optimization.zero_quantized_gradients and not spec.tie
    if asked and comm.size > 1 and spec.row.reduce.is_floating_point:
        return QuantizedSums(comm, spec.layout.gaps)
    return comm


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
            comm=_sums_of(spec, frame),
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
    eager = stage.shards_grads and frame.traffic.reduce == "micro_batch"
    in_flight_limit = MAX_IN_FLIGHT if zero.overlap_comm else 0
    return GradReducer(
        buffers,
        eager=eager,
        whole=not stage.shards_optimizer,
        in_flight_limit=in_flight_limit,
        policy=by_block,
        node_sums=NodeSums(buffers, in_flight_limit) if eager and keeps_node_sums(zero) else None,
        predivide=predivide(
            frame.config,
            frame.draft.num_terms,
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
    host, worker = stores.host_updates(found, frame.draft.rank_info)
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
            whole_values(param)  # a parameter that was built under zero.Init cannot be written
            values = local_of(param).detach().to(device).contiguous()
            tensor.broadcast(values, 0, name=slot.fqn).wait()
            with torch.no_grad():
                local_of(param).copy_(values)
        yield param


def predivide(config: Config, dp_size: int, reduced: Collection[torch.dtype]) -> float:
    """What local gradients are divided by before they are reduced. ``reduced``: their dtypes then.

    A sum over ranks in fp16 overflows at 65,504, whatever the number of ranks, so there the mean is taken
    before. Otherwise the loss scale would be lower the more ranks there are.
    """
    factor = config.gradient_predivide_factor
    if config.prescale_gradients or (factor == 1.0 and torch.float16 in reduced):
        return float(dp_size)
    return factor
