"""Cuts a model into units and counts the bytes that they need: pure functions, before memory moves."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from zeroshard.config import Config
from zeroshard.core.layout import UnitLayout, pack
from zeroshard.core.nbytes import StateBytes, UnitBytes
from zeroshard.errors import UnsupportedError, UsageError
from zeroshard.offload.plan import OffloadPlan, grad_itemsizes
from zeroshard.optim.factory import Probe, probe
from zeroshard.precision.policy import DtypeRow, Policy
from zeroshard.zero.materialize import check_meta
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
