"""How do a model, an optimizer and a configuration become the parts of an engine?

Everything is decided and composed here, in one order on every rank; the step itself contains no feature.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor, nn

from zeroshard.comm.collectives import Comm
from zeroshard.comm.env import RankInfo
from zeroshard.config import Config
from zeroshard.core.layout import UnitLayout, pack
from zeroshard.core.ledger import Ledger
from zeroshard.core.nbytes import StateBytes, UnitBytes, state_nbytes
from zeroshard.core.stages import STAGES, Stage
from zeroshard.core.tiers import Tier
from zeroshard.errors import UnsupportedError, UsageError
from zeroshard.offload.async_update import AsyncUpdateWorker
from zeroshard.offload.capacity_check import check_capacity
from zeroshard.offload.plan import (
    OffloadPlan,
    check_device,
    grad_itemsizes,
    plan_offload,
    shaped_state,
)
from zeroshard.offload.stores import Stores, has_copy_streams, update_threads
from zeroshard.optim.factory import Probe, probe, rebind
from zeroshard.optim.kernels import kernel_of
from zeroshard.precision.policy import DtypeRow, Policy
from zeroshard.zero.gradients import GradBuffer
from zeroshard.zero.life import Life
from zeroshard.zero.materialize import check_meta, materialize
from zeroshard.zero.optimizer import ShardedOptimizer
from zeroshard.zero.prefetch import Prefetcher, WrappedModule
from zeroshard.zero.reduce import GradReducer
from zeroshard.zero.unit import Unit
from zeroshard.zero.wrap import WrapPlan, plan_wrapping

GATHERED_AS_ONE = "_gathered_as_one"
"""Attribute of a module that is never cut into units, like ``leaf_module`` in the configuration."""


@dataclass(frozen=True, eq=False)
class UnitSpec:
    """One unit before it owns any memory: pure data, equal on every rank."""

    name: str
    wrapped: str
    layout: UnitLayout
    row: DtypeRow
    trainable: bool


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


def plan_units(
    model: nn.Module,
    config: Config,
    policy: Policy,
    optimizer: torch.optim.Optimizer | None,
    *,
    world_size: int,
    whole: bool,
) -> list[UnitSpec]:
    """Cut the model into units: by site, and inside a site by dtype and trainability.

    ``whole``: the optimizer needs whole matrices, so no trained parameter is cut.

    Raises :class:`ConfigError` for patterns that match nothing, :class:`UsageError` for an optimizer
    over parameters that the model does not have.
    """
    check_meta(model)
    zero = config.zero_optimization
    leaf = zero.leaf_module
    wrapped_modules = plan_wrapping(
        model,
        units=config.units,
        max_numel=config.unit_max_numel,
        min_numel=config.unit_min_numel,
        conditional=config.conditional_modules,
        leaves=[c.rpartition(".")[2] for c in leaf.classes]
        + list(leaf.names)
        + [f"*{suffix}" for suffix in leaf.name_suffixes]
        + [fqn for fqn, module in model.named_modules() if getattr(module, GATHERED_AS_ONE, False)],
    )
    params = dict(model.named_parameters())
    updated = _updated_params(params, optimizer)
    specs = []
    for wrapped in wrapped_modules:
        rows = {
            fqn: policy.row_for(fqn, params[fqn].dtype, model.get_submodule(fqn.rpartition(".")[0]))
            for fqn in wrapped.params
        }
        specs += _unit_specs(wrapped, params, updated, rows, world_size=world_size, whole=whole)
    return specs


def _updated_params(
    params: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer | None
) -> set[int] | None:
    if optimizer is None:
        return None
    known = {id(param) for param in params.values()}
    updated = [param for group in optimizer.param_groups for param in group["params"]]
    strangers = [param for param in updated if id(param) not in known]
    if strangers:
        raise UsageError(
            f"the optimizer (or model_parameters) holds {len(strangers)} parameters that are not in the "
            f"model (the first has shape {tuple(strangers[0].shape)}). They would never be reduced or "
            "updated. Build it from the parameters of the very model that is passed in, after any step "
            "that replaces parameters."
        )
    if len(updated) != len({id(param) for param in updated}):
        raise UsageError("a parameter appears in two param groups of the optimizer; keep one.")
    return {id(param) for param in updated}


def _unit_specs(
    wrapped: WrapPlan,
    params: Mapping[str, nn.Parameter],
    updated: set[int] | None,
    rows: Mapping[str, DtypeRow],
    *,
    world_size: int,
    whole: bool,
) -> list[UnitSpec]:
    kinds: dict[tuple[bool, DtypeRow], list[str]] = defaultdict(list)
    for fqn in wrapped.params:
        param = params[fqn]
        if not (param.is_floating_point() or param.is_complex()) and param.requires_grad:
            raise UnsupportedError(f"parameter {fqn!r} of dtype {param.dtype} cannot be trained.")
        trainable = param.requires_grad and (updated is None or id(param) in updated)
        kinds[trainable, rows[fqn]].append(fqn)
    specs = []
    for (trainable, row), fqns in kinds.items():
        tags = [] if trainable else ["frozen"]
        others = [r for t, r in kinds if t == trainable and r != row]
        if any(r.param != row.param for r in others):
            tags.append(str(row.param).removeprefix("torch."))
        if any(r.param == row.param for r in others):
            tags.append(f"sent as {str(row.reduce).removeprefix('torch.')}")
        name = ":".join([wrapped.name, *tags]) if len(kinds) > 1 else wrapped.name
        layout = pack(
            [(fqn, params[fqn].shape) for fqn in fqns],
            world_size=world_size,
            whole=whole and trainable,
        )
        specs.append(UnitSpec(name, wrapped.fqn, layout, row, trainable))
    return specs


def layout_digest(specs: Iterable[UnitSpec]) -> str:
    """A hash of everything in the layout that ranks must share."""
    text = repr([(s.name, s.layout.slots, s.layout.full_numel, s.row, s.trainable) for s in specs])
    return hashlib.sha256(text.encode()).hexdigest()


def probed(optimizer: torch.optim.Optimizer, policy: Policy) -> dict[torch.dtype, Probe]:
    """What the optimizer does with masters of each dtype: what it keeps, and whether pieces will do.

    Raises :class:`UnsupportedError` for a class that cannot run here at all.
    """
    dtypes = {p.dtype for g in optimizer.param_groups for p in g["params"] if p.is_floating_point()}
    masters = {policy.row_for("", dtype).master for dtype in dtypes} or {torch.float32}
    if policy.keep_fp32:
        masters.add(torch.float32)
    found = {dtype: probe(optimizer, dtype=dtype) for dtype in sorted(masters, key=str)}
    for tried in found.values():
        if not tried.works or not (
            tried.elementwise or getattr(optimizer, "takes_whole_parameters", False)
        ):
            raise UnsupportedError(
                f"{type(optimizer).__name__} cannot run on sharded parameters: {tried.reason}. ZeRO "
                "gives an optimizer pieces of each parameter. Use an element-wise optimizer (Adam, "
                "AdamW, SGD, Adagrad, Lion, RMSprop...), or Muon or Lamb, whose parameters are never cut."
            )
    return found


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
    zero = config.zero_optimization
    stage = STAGES[zero.stage]
    ledger, life = Ledger(), Life()
    params = dict(model.named_parameters())
    # The root runs around all other sites: it comes first, so that it is reduced last.
    in_order = sorted(specs, key=lambda spec: spec.wrapped != "")
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
        params,
        optimizer,
        found,
        many=expects_accumulation(),
        shards_grads=stage.shards_grads,
        offload_plan=offload_plan,
    )
    forecast = []
    check_device(offload_plan, device)
    if offload_plan.is_away:
        planned = state_nbytes(plan, stage, gather_comm.rank)
        forecast = check_capacity(planned, offload_plan, config, gather_comm, place, device)
    stores = Stores(config, ledger, offload_plan, device)
    try:
        positions = {id(param): at for at, param in enumerate(params.values())}
        modules = dict(model.named_modules())
        by_site: dict[str, list[Unit]] = defaultdict(list)
        units = []
        for spec in specs:
            unit = Unit(
                spec.name,
                spec.layout,
                _members(modules, spec, device),
                positions=[positions[id(params[slot.fqn])] for slot in spec.layout.slots],
                row=spec.row,
                trainable=spec.trainable,
                # One rank's shard is the unit: to gather it would only make a copy.
                resident=not stage.shards_params
                or (gather_comm.world_size == 1 and offload_plan.tier_of(spec.name) is Tier.DEVICE),
                comm=gather_comm,
                ledger=ledger,
                device=device,
                rest_of=stores.shard_store_of(spec.name),
                room=stores.allocator_of(spec.name),
            )
            units.append(unit)
            by_site[spec.wrapped].append(unit)
        wrapped_modules = [
            WrappedModule(fqn or "root", modules[fqn], tuple(by_site[fqn]))
            for fqn in [*(f for f in dict.fromkeys(s.wrapped for s in specs) if f), ""]
        ]
        prefetcher = Prefetcher(
            wrapped_modules,
            prefetch_numel=zero.stage3_prefetch_bucket_size if zero.overlap_comm else 0,
            live_numel=zero.stage3_max_live_parameters,
            reuse_numel=zero.stage3_max_reuse_distance,
        )
        by_name = {unit.name: unit for unit in units}
        bytes_of = {spec.name: planned for spec, planned in zip(specs, plan, strict=True)}
        buffers = [
            GradBuffer(
                by_name[spec.name],
                comm=reduce_comm,
                ledger=ledger,
                transient=stage.shards_grads or not bytes_of[spec.name].grad_nbytes,
                rest=stores.grad_store_of(
                    spec.name, bytes_of[spec.name].disk_grad_nbytes * spec.layout.shard_numel
                ),
            )
            for spec in in_order
            if spec.trainable
        ]
        reducer = GradReducer(
            buffers,
            eager=stage.shards_grads,
            whole=not stage.shards_optimizer,
            expects_accumulation=expects_accumulation,
            bucket_numel=zero.reduce_bucket_size,
            overlap=bool(zero.overlap_comm),
            predivide=predivide(config, gather_comm.world_size),
        )
        sharded = None
        if optimizer is not None:
            host = stores.host_staging()
            sharded = ShardedOptimizer(
                optimizer,
                buffers,
                spans=[offload_plan.spans_of(buffer.unit.name) for buffer in buffers],
                shards_optimizer=stage.shards_optimizer,
                ledger=ledger,
                life=life,
                seat=rebind,
                kernel_of=partial(kernel_of, compiles=config.compile_update),
                pager=stores.pager(found),
                state_dtypes=lambda buffer: partial(shaped_state, found[buffer.unit.row.master]),
                host=host,
                behind=None
                if host is None
                else AsyncUpdateWorker(
                    device, threads=update_threads(device, place), delayed=stores.is_delayed
                ),
            )
        return ZeroRuntime(
            stage,
            units,
            wrapped_modules,
            prefetcher,
            reducer,
            sharded,
            ledger,
            plan,
            stores,
            forecast,
            life,
        )
    except BaseException:
        stores.close()  # an error holds on to what was built: the disk would come back late
        raise


def predivide(config: Config, world_size: int) -> float:
    """What local gradients are divided by before they are reduced."""
    if not config.prescale_gradients:
        return 1.0
    factor = config.gradient_predivide_factor
    return factor if factor != 1.0 else float(world_size)


def plan_bytes(
    specs: Iterable[UnitSpec],
    params: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    found: Mapping[torch.dtype, Probe],
    *,
    many: bool,
    shards_grads: bool,
    offload_plan: OffloadPlan,
) -> list[UnitBytes]:
    """The bytes per element that each unit needs at rest. ``many``: gradients are accumulated;
    ``shards_grads``: each backward's are reduced at once."""
    groups = optimizer.param_groups if optimizer is not None else []
    group_of = {id(param): at for at, group in enumerate(groups) for param in group["params"]}
    planned = []
    for spec in specs:
        row, layout = spec.row, spec.layout
        if not spec.trainable:
            tier = offload_plan.tier_of(spec.name)
            planned.append(UnitBytes(layout, row.param.itemsize, param_tier=tier))
            continue
        state = {}
        for slot in layout.slots if optimizer is not None else ():
            kept = found[row.master].state_by_group[group_of[id(params[slot.fqn])]].values()
            shaped = sum(dtype.itemsize for dtype in kept if dtype is not None)
            scalars = sum(torch.float32.itemsize for dtype in kept if dtype is None)
            state[slot.fqn] = StateBytes(shaped, scalars)
        in_memory, on_disk = grad_itemsizes(
            row, many=many, on_disk=spec.name in offload_plan.grads, shards_grads=shards_grads
        )
        planned.append(
            UnitBytes(
                layout,
                param_nbytes=row.param.itemsize,
                grad_nbytes=in_memory,
                disk_grad_nbytes=on_disk,
                master_nbytes=row.master.itemsize if state and row.has_master else 0,
                state=state,
                spans=offload_plan.spans_of(spec.name),
                param_tier=offload_plan.tier_of(spec.name),
            )
        )
    return planned


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
