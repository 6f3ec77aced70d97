"""How do a model, an optimizer and a configuration become the parts of an engine?

Everything is decided and composed here, in one order on every rank; the step itself contains no feature.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.comm.collectives import Comm
from zeroshard.config import Config
from zeroshard.core.layout import UnitLayout, pack
from zeroshard.core.ledger import Ledger
from zeroshard.core.nbytes import UnitBytes
from zeroshard.core.stages import STAGES, Stage
from zeroshard.engine.optimizers import Probe, needs_whole_parameters, probe
from zeroshard.errors import UnsupportedError, UsageError
from zeroshard.precision.policy import DtypeRow, Policy
from zeroshard.zero.gather import Gatherer, Site
from zeroshard.zero.materialize import materialize
from zeroshard.zero.optimizer import ShardedOptimizer
from zeroshard.zero.reduce import GradBuffer, GradReducer
from zeroshard.zero.unit import Unit
from zeroshard.zero.wrap import SitePlan, find_sites


@dataclass(frozen=True, eq=False)
class UnitSpec:
    """One unit before it owns any memory: pure data, equal on every rank."""

    name: str
    site: str
    layout: UnitLayout
    row: DtypeRow
    trainable: bool


@dataclass(eq=False)
class Runtime:
    """The parts that take a training step."""

    stage: Stage
    units: list[Unit]
    sites: list[Site]
    gatherer: Gatherer
    reducer: GradReducer
    optimizer: ShardedOptimizer | None
    ledger: Ledger
    plan: list[UnitBytes]


def plan_units(
    model: nn.Module,
    config: Config,
    policy: Policy,
    optimizer: torch.optim.Optimizer | None,
    *,
    world_size: int,
) -> list[UnitSpec]:
    """Cut the model into units: by site, and inside a site by dtype and trainability.

    Raises :class:`ConfigError` for patterns that match nothing, :class:`UsageError` for an optimizer
    over parameters that the model does not have.
    """
    zero = config.zero_optimization
    leaf = zero.leaf_module
    sites = find_sites(
        model,
        units=config.units,
        max_numel=config.unit_max_numel,
        min_numel=config.unit_min_numel,
        conditional=config.conditional_modules,
        leaves=[c.rpartition(".")[2] for c in leaf.classes]
        + list(leaf.names)
        + [f"*{suffix}" for suffix in leaf.name_suffixes],
    )
    params = dict(model.named_parameters())
    updated = _updated_params(params, optimizer)
    whole = optimizer is not None and needs_whole_parameters(optimizer)
    specs = []
    for site in sites:
        specs += _site_specs(site, params, updated, policy, world_size=world_size, whole=whole)
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
            f"the optimizer holds {len(strangers)} parameters that are not in the model (the first has "
            f"shape {tuple(strangers[0].shape)}). They would never be reduced or updated. Build the "
            "optimizer from the parameters of the very model that is passed in, after any step that "
            "replaces parameters."
        )
    if len(updated) != len({id(param) for param in updated}):
        raise UsageError("a parameter appears in two param groups of the optimizer; keep one.")
    return {id(param) for param in updated}


def _site_specs(
    site: SitePlan,
    params: Mapping[str, nn.Parameter],
    updated: set[int] | None,
    policy: Policy,
    *,
    world_size: int,
    whole: bool,
) -> list[UnitSpec]:
    kinds: dict[tuple[bool, DtypeRow], list[str]] = defaultdict(list)
    for fqn in site.params:
        param = params[fqn]
        if not (param.is_floating_point() or param.is_complex()) and param.requires_grad:
            raise UnsupportedError(f"parameter {fqn!r} of dtype {param.dtype} cannot be trained.")
        trainable = param.requires_grad and (updated is None or id(param) in updated)
        kinds[trainable, policy.row_for(fqn, param.dtype)].append(fqn)
    dtypes = {(trainable, row.param) for trainable, row in kinds}
    specs = []
    for (trainable, row), fqns in kinds.items():
        tags = [] if trainable else ["frozen"]
        if sum(1 for t, _ in dtypes if t == trainable) > 1:
            tags.append(str(row.param).removeprefix("torch."))
        name = ":".join([site.name, *tags]) if len(kinds) > 1 else site.name
        layout = pack(
            [(fqn, params[fqn].shape) for fqn in fqns],
            world_size=world_size,
            whole=whole and trainable,
        )
        specs.append(UnitSpec(name, site.fqn, layout, row, trainable))
    return specs


def layout_digest(specs: Iterable[UnitSpec]) -> str:
    """A hash of everything in the layout that ranks must share."""
    text = repr([(s.name, s.layout.slots, s.layout.full_numel, s.row, s.trainable) for s in specs])
    return hashlib.sha256(text.encode()).hexdigest()


def probed(optimizer: torch.optim.Optimizer) -> Probe:
    """What the optimizer's class keeps per parameter, and whether fragments are all it needs.

    Raises :class:`UnsupportedError` for a class that gives another result on a cut parameter.
    """
    if needs_whole_parameters(optimizer):
        return probe(optimizer)
    found = probe(optimizer)
    if not found.elementwise:
        raise UnsupportedError(
            f"{type(optimizer).__name__} cannot run on sharded parameters: {found.reason}. "
            "ZeRO gives an optimizer one-dimensional pieces of each parameter. Use an element-wise "
            "optimizer (Adam, AdamW, SGD, Adagrad, Lion, RMSprop...), or Muon for whole matrices."
        )
    return found


def build_runtime(
    model: nn.Module,
    specs: Sequence[UnitSpec],
    config: Config,
    *,
    optimizer: torch.optim.Optimizer | None,
    found: Probe | None,
    gather_comm: Comm,
    reduce_comm: Comm,
    device: torch.device,
    expects_accumulation: Callable[[], bool],
) -> Runtime:
    """Move the model's parameters into units and compose what acts on them. Collective.

    Rank 0's values win. At stage 3 a unit is sharded before the next one is touched, so that no rank
    holds more than its shards and one unit, if the model came sharded or on the meta device.
    """
    zero = config.zero_optimization
    stage = STAGES[zero.stage]
    ledger = Ledger()
    params = dict(model.named_parameters())
    positions = {id(param): at for at, param in enumerate(params.values())}
    modules = dict(model.named_modules())
    by_site: dict[str, list[Unit]] = defaultdict(list)
    units = []
    for spec in specs:
        materialize(modules, [slot.fqn for slot in spec.layout.slots], device)
        members = [_parameter(modules, slot.fqn) for slot in spec.layout.slots]
        unit = Unit(
            spec.name,
            spec.layout,
            members,
            positions=[positions[id(params[slot.fqn])] for slot in spec.layout.slots],
            row=spec.row,
            trainable=spec.trainable,
            resident=not stage.shards_params,
            comm=gather_comm,
            ledger=ledger,
            device=device,
        )
        units.append(unit)
        by_site[spec.site].append(unit)
    sites = [
        Site(fqn or "root", modules[fqn], tuple(by_site[fqn]))
        for fqn in [*(f for f in dict.fromkeys(s.site for s in specs) if f), ""]
    ]
    gatherer = Gatherer(
        sites,
        prefetch_numel=zero.stage3_prefetch_bucket_size if zero.overlap_comm is not False else 0,
        live_numel=zero.stage3_max_live_parameters,
        keep_last=zero.stage3_max_reuse_distance > 0,
    )
    buffers = [
        GradBuffer(unit, comm=reduce_comm, ledger=ledger, transient=stage.shards_grads)
        for unit in units
        if unit.trainable
    ]
    reducer = GradReducer(
        buffers,
        eager=stage.shards_grads,
        whole=not stage.shards_optimizer,
        expects_accumulation=expects_accumulation,
        bucket_numel=zero.reduce_bucket_size,
        overlap=zero.overlap_comm is not False,
        predivide=predivide(config, gather_comm.world_size),
    )
    sharded = None
    if optimizer is not None:
        sharded = ShardedOptimizer(
            optimizer,
            buffers,
            shards_optimizer=stage.shards_optimizer,
            rank=gather_comm.rank,
            ledger=ledger,
        )
    plan = [
        unit_bytes(spec, found, many=expects_accumulation(), updated=optimizer is not None)
        for spec in specs
    ]
    return Runtime(stage, units, sites, gatherer, reducer, sharded, ledger, plan)


def predivide(config: Config, world_size: int) -> float:
    """What local gradients are divided by before they are reduced."""
    if not config.prescale_gradients:
        return 1.0
    factor = config.gradient_predivide_factor
    return factor if factor != 1.0 else float(world_size)


def unit_bytes(spec: UnitSpec, found: Probe | None, *, many: bool, updated: bool) -> UnitBytes:
    """The bytes per element that a unit needs at rest."""
    row = spec.row
    if not spec.trainable:
        return UnitBytes(spec.layout, row.param.itemsize, 0, 0, 0)
    grad = row.grad_accum if many else row.reduce
    state = [dtype for dtype in found.state.values()] if found and updated else []
    return UnitBytes(
        spec.layout,
        param_nbytes=row.param.itemsize,
        grad_nbytes=grad.itemsize,
        master_nbytes=row.master.itemsize if updated and row.master != row.param else 0,
        state_nbytes=sum((d or row.master).itemsize for d in state if d is not None),
        state_scalar_nbytes=sum(4 for d in state if d is None),
        optimized=frozenset(slot.fqn for slot in spec.layout.slots) if updated else frozenset(),
    )


def _parameter(modules: Mapping[str, nn.Module], fqn: str) -> nn.Parameter:
    module, _, leaf = fqn.rpartition(".")
    param = modules[module]._parameters[leaf]
    assert param is not None
    return param


def place_buffers(model: nn.Module, dtype: torch.dtype | None, device: torch.device) -> list[Tensor]:
    """Move buffers to the device; floating ones change dtype only if asked. Returns them in order."""
    moved: list[Tensor] = []
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if buffer.is_meta:
                raise UsageError(
                    f"buffer {name!r} of {type(module).__name__} is on the meta device, so its values "
                    "are unknown. Create buffers on a real device, or give the module a "
                    "reset_parameters() that fills them."
                )
            cast = dtype if dtype is not None and buffer.is_floating_point() else buffer.dtype
            module._buffers[name] = buffer.to(device=device, dtype=cast)
            moved.append(module._buffers[name])  # type: ignore[arg-type]
    return moved

