"""Moves a model's parameters into units, and builds the runtime that trains them.

Everything is decided and composed here, in one order on every rank; the step itself contains no feature.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor, nn

from zeroshard.comm.collectives import Comm
from zeroshard.comm.env import RankInfo
from zeroshard.config import Config
from zeroshard.core.ledger import Ledger
from zeroshard.core.nbytes import UnitBytes, state_nbytes
from zeroshard.core.stages import STAGES, Stage
from zeroshard.core.tiers import Tier
from zeroshard.engine.unit_plan import UnitSpec, plan_bytes
from zeroshard.offload.async_update import AsyncUpdateWorker
from zeroshard.offload.capacity_check import check_capacity
from zeroshard.offload.plan import OffloadPlan, check_device, plan_offload, shaped_state
from zeroshard.offload.stores import Stores, has_copy_streams, update_threads
from zeroshard.optim.factory import Probe, rebind
from zeroshard.optim.kernels import kernel_of
from zeroshard.zero.gradients import GradBuffer
from zeroshard.zero.life import Life
from zeroshard.zero.materialize import materialize
from zeroshard.zero.optimizer import ShardedOptimizer
from zeroshard.zero.prefetch import Prefetcher, WrappedModule
from zeroshard.zero.reduce import GradReducer
from zeroshard.zero.unit import Unit


@dataclass(eq=False)
class ZeroRuntime:
    """The parts that take a training step."""

    stage: Stage
    units: list[Unit]
    wrapped_modules: list[WrappedModule]
    prefetcher: Prefetcher
    reducer: GradReducer
    optimizer: ShardedOptimizer | None
    ledger: Ledger
    plan: list[UnitBytes]
    stores: Stores
    forecast: list[str]  # what the disks of this host will cost, in words
    life: Life


@dataclass(frozen=True, eq=False)
class _Frame:
    """What all parts of one runtime share while they are built."""

    config: Config
    specs: Sequence[UnitSpec]
    found: Mapping[torch.dtype, Probe]
    gather_comm: Comm
    reduce_comm: Comm
    place: RankInfo
    device: torch.device
    expects_accumulation: Callable[[], bool]
    offload_plan: OffloadPlan
    plan: list[UnitBytes]
    stores: Stores
    ledger: Ledger
    life: Life

    @property
    def stage(self) -> Stage:
        """The row of the configuration's stage."""
        return STAGES[self.config.zero_optimization.stage]


def _in_order(specs: Sequence[UnitSpec]) -> list[UnitSpec]:
    """The root runs around all other modules: it comes first, so that it is reduced last."""
    return sorted(specs, key=lambda spec: spec.wrapped != "")


def build_runtime(
    model: nn.Module,
    specs: Sequence[UnitSpec],
    config: Config,
    *,
    optimizer: torch.optim.Optimizer | None,
    found: Mapping[torch.dtype, Probe],
    gather_comm: Comm,
    reduce_comm: Comm,
    place: RankInfo,
    device: torch.device,
    expects_accumulation: Callable[[], bool],
) -> ZeroRuntime:
    """Move the model's parameters into units and compose what acts on them. Collective.

    Rank 0's values win. At stage 3 a unit is sharded before the next one is touched, so that no rank
    holds more than its shards and one unit, if the model came sharded or on the meta device.
    """
    stage = STAGES[config.zero_optimization.stage]
    in_order = _in_order(specs)
    offload_plan = plan_offload(
        {spec.name: spec.layout for spec in in_order},
        {spec.name: spec.row for spec in in_order if spec.trainable and optimizer is not None},
        config,
        rank=gather_comm.rank,
        whole=not all(probe.elementwise for probe in found.values()),
        has_bus=has_copy_streams(device),
    )
    plan = plan_bytes(
        specs,
        dict(model.named_parameters()),
        optimizer,
        found,
        many=expects_accumulation(),
        shards_grads=stage.shards_grads,
        offload_plan=offload_plan,
    )
    forecast = []
    check_device(offload_plan, device)
    if offload_plan.is_offloaded:
        planned = state_nbytes(plan, stage, gather_comm.rank)
        forecast = check_capacity(planned, offload_plan, config, gather_comm, place, device)
    ledger, life = Ledger(), Life()
    stores = Stores(config, ledger, offload_plan, device)
    frame = _Frame(
        config, specs, found, gather_comm, reduce_comm, place, device, expects_accumulation,
        offload_plan, plan, stores, ledger, life,
    )  # fmt: skip
    try:
        units = _build_units(model, frame)
        prefetcher = _build_prefetcher(model, units, frame)
        reducer = _build_reducer(units, frame)
        sharded = None if optimizer is None else _build_optimizer(optimizer, reducer, frame)
        return ZeroRuntime(
            stage, units, prefetcher.wrapped_modules, prefetcher, reducer, sharded, ledger, plan,
            stores, forecast, life,
        )  # fmt: skip
    except BaseException:
        stores.close()  # an error holds on to what was built: the disk would come back late
        raise


def _build_units(model: nn.Module, frame: _Frame) -> list[Unit]:
    positions = {id(param): at for at, param in enumerate(model.parameters())}
    params, modules = dict(model.named_parameters()), dict(model.named_modules())
    comm, stores = frame.gather_comm, frame.stores
    return [
        Unit(
            spec.name,
            spec.layout,
            _members(modules, spec, frame.device),
            positions=[positions[id(params[slot.fqn])] for slot in spec.layout.slots],
            row=spec.row,
            trainable=spec.trainable,
            # One rank's shard is the unit: to gather it would only make a copy.
            resident=not frame.stage.shards_params
            or (comm.world_size == 1 and frame.offload_plan.tier_of(spec.name) is Tier.DEVICE),
            comm=comm,
            ledger=frame.ledger,
            device=frame.device,
            store_of=stores.shard_store_of(spec.name),
            room=stores.allocator_of(spec.name),
        )
        for spec in frame.specs
    ]


def _build_prefetcher(model: nn.Module, units: Sequence[Unit], frame: _Frame) -> Prefetcher:
    zero, modules = frame.config.zero_optimization, dict(model.named_modules())
    units_of: dict[str, list[Unit]] = defaultdict(list)
    for spec, unit in zip(frame.specs, units, strict=True):
        units_of[spec.wrapped].append(unit)
    inner = [fqn for fqn in dict.fromkeys(spec.wrapped for spec in frame.specs) if fqn]
    return Prefetcher(
        [WrappedModule(fqn or "root", modules[fqn], tuple(units_of[fqn])) for fqn in [*inner, ""]],
        prefetch_numel=zero.stage3_prefetch_bucket_size if zero.overlap_comm else 0,
        live_numel=zero.stage3_max_live_parameters,
        reuse_numel=zero.stage3_max_reuse_distance,
    )


def _build_reducer(units: Sequence[Unit], frame: _Frame) -> GradReducer:
    zero, stage = frame.config.zero_optimization, frame.stage
    unit_of = {unit.name: unit for unit in units}
    nbytes_of = {spec.name: row for spec, row in zip(frame.specs, frame.plan, strict=True)}
    buffers = [
        GradBuffer(
            unit_of[spec.name],
            comm=frame.reduce_comm,
            ledger=frame.ledger,
            transient=stage.shards_grads or not nbytes_of[spec.name].grad_nbytes,
            rest=frame.stores.grad_store_of(
                spec.name, nbytes_of[spec.name].disk_grad_nbytes * spec.layout.shard_numel
            ),
        )
        for spec in _in_order(frame.specs)
        if spec.trainable
    ]
    return GradReducer(
        buffers,
        eager=stage.shards_grads,
        whole=not stage.shards_optimizer,
        expects_accumulation=frame.expects_accumulation,
        bucket_numel=zero.reduce_bucket_size,
        overlap=bool(zero.overlap_comm),
        predivide=predivide(frame.config, frame.gather_comm.world_size),
    )


def _build_optimizer(
    optimizer: torch.optim.Optimizer, reducer: GradReducer, frame: _Frame
) -> ShardedOptimizer:
    stores, found = frame.stores, frame.found
    host = stores.host_staging()
    worker = None
    if host is not None:
        threads = update_threads(frame.device, frame.place)
        worker = AsyncUpdateWorker(frame.device, threads=threads, delayed=stores.is_delayed)
    return ShardedOptimizer(
        optimizer,
        reducer.buffers,
        spans=[frame.offload_plan.spans_of(buffer.unit.name) for buffer in reducer.buffers],
        shards_optimizer=frame.stage.shards_optimizer,
        ledger=frame.ledger,
        life=frame.life,
        seat=rebind,
        kernel_of=partial(kernel_of, compiles=frame.config.compile_update),
        pager=stores.pager(found),
        state_dtypes=lambda buffer: partial(shaped_state, found[buffer.unit.row.master]),
        host=host,
        behind=worker,
    )


def predivide(config: Config, world_size: int) -> float:
    """What local gradients are divided by before they are reduced."""
    if not config.prescale_gradients:
        return 1.0
    factor = config.gradient_predivide_factor
    return factor if factor != 1.0 else float(world_size)


def _members(
    modules: Mapping[str, nn.Module], spec: UnitSpec, device: torch.device
) -> Iterator[nn.Parameter]:
    """The unit's parameters; those on the meta device get their values when their turn comes."""
    for slot in spec.layout.slots:
        name, _, leaf = slot.fqn.rpartition(".")
        materialize(modules[name], device)
        param = modules[name]._parameters[leaf]
        assert param is not None
        yield param


def place_buffers(
    model: nn.Module,
    dtype: torch.dtype | None,
    device: torch.device,
    *,
    keep: Sequence[str] = (),
) -> list[Tensor]:
    """Move buffers to the device; floating ones change dtype only if asked. Returns them in order.

    ``keep``: globs on names of buffers that keep their dtype.
    """
    moved: list[Tensor] = []
    for prefix, module in model.named_modules():
        materialize(module, device)
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            fqn = f"{prefix}.{name}" if prefix else name
            kept = dtype is None or any(fnmatchcase(fqn, pattern) for pattern in keep)
            cast = buffer.dtype if kept or not buffer.is_floating_point() else dtype
            module._buffers[name] = buffer.to(device=device, dtype=cast).contiguous()
            moved.append(module._buffers[name])  # type: ignore[arg-type]
    return moved
