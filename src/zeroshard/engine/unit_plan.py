"""Cuts a model into units and counts the bytes that they need: pure functions, before memory moves.

First the modules to wrap are chosen (:mod:`zeroshard.engine.wrapping`). Then the parameters of each
become units, one for each combination of dtype and trainability.

On an accelerator a large block is wrapped whole, and each of its matrices is a unit. So one launch
gathers the block, and the gradient of a matrix, which has memory of its own, is reduced without a copy.
Smaller blocks stay one unit, because each unit costs time of the host in every step.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

from zeroshard.comm.dtensors import local_of
from zeroshard.config import Config
from zeroshard.core.layout import Slot, SlotBlock, UnitLayout, is_split, pack
from zeroshard.core.stages import StateBytes, UnitBytes
from zeroshard.core.tiers import Tier
from zeroshard.engine.wrapping import WrapPlan, largest_block_numel, plan_wrapping
from zeroshard.errors import UnsupportedError, UsageError
from zeroshard.experts.marks import ranks_of_layer
from zeroshard.offload.offload_plan import OffloadPlan, grad_itemsizes
from zeroshard.optim.probe import Probe, probe
from zeroshard.parallel.split import STAGE, PipelineModel
from zeroshard.precision.policy import DtypeRow, Policy
from zeroshard.zero.materialize import check_meta

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
    group: str = ""  # units of one group are gathered, and reduced, by one launch
    pipeline_stage: int | None = 0  # that has the unit; None: several, since the unit is tied
    tie: tuple[int, ...] = ()  # the pipeline ranks that hold the unit, if there are several
    experts: int = 1  # ranks that share the experts of which these are some; 1: no experts, or all

    @property
    def is_outermost(self) -> bool:
        """Whether its wrapped module runs around all others of its pipeline stage."""
        return not self.wrapped or self.wrapped.startswith(STAGE)


def plan_units(
    model: nn.Module,
    config: Config,
    policy: Policy,
    optimizer: torch.optim.Optimizer | None,
    *,
    num_shards: int,
    num_holders: int,
    whole: bool,
    blocks: Mapping[str, SlotBlock],
    device_nbytes: int = 0,
) -> list[UnitSpec]:
    """Cut the model into units: by wrapped module, and inside a module by dtype and trainability.

    ``num_shards``: the ranks of a shard group. ``num_holders``: the ranks of one pipeline rank that hold
    the same, replicas included; a unit that is tied over p pipeline ranks has p times as many shards.
    ``whole``: the optimizer needs whole matrices, so no trained
    parameter is cut. ``blocks``: of parameters that are DTensors, by name. ``device_nbytes``: the memory
    of the device; 0: it is the CPU.

    Units that are tied over pipeline stages come first. So every rank has them in the same order, and
    they are gathered first and reduced last.

    Raises :class:`ConfigError` for patterns that match nothing, :class:`UsageError` for an optimizer
    over parameters that the model does not have.
    """
    check_meta(model)
    block_max_numel = largest_block_numel(config, device_nbytes)
    is_split = block_max_numel > config.unit_max_numel
    wrapped_modules = plan_wrapping(
        model,
        units=config.units,
        max_numel=block_max_numel,
        min_numel=config.unit_min_numel,
        conditional=config.conditional_modules,
        leaves=_leaves(model, config),
    )
    params = dict(model.named_parameters())
    is_part = isinstance(model, PipelineModel) and model.kept is not None
    trains = not is_part or any(param.requires_grad for param in params.values())
    cut = _Cut(
        model,
        params,
        _updated_params(params, optimizer) if trains else set(),
        policy,
        whole=whole,
        blocks=blocks,
        own_numel=config.unit_min_numel if is_split else None,
        max_numel=config.unit_max_numel,
        replicas=num_holders // num_shards,
    )
    if isinstance(model, PipelineModel):
        tied = _specs_of_ties(model, cut, num_shards, num_holders)
        return tied + _specs_of_stages(model, cut, num_shards, wrapped_modules)
    return [spec for wrapped in wrapped_modules for spec in cut.specs_of(wrapped, num_shards)]


def _leaves(model: nn.Module, config: Config) -> list[str]:
    """Patterns of the modules that are never cut."""
    leaf = config.zero_optimization.leaf_module
    return [
        *(c.rpartition(".")[2] for c in leaf.classes),
        *leaf.names,
        *(f"*{suffix}" for suffix in leaf.name_suffixes),
        *(fqn for fqn, each in model.named_modules() if getattr(each, GATHERED_AS_ONE, False)),
    ]


def _specs_of_ties(
    model: PipelineModel, cut: _Cut, num_shards: int, num_holders: int
) -> list[UnitSpec]:
    """The units that are tied over pipeline stages."""
    params = {name for name, _ in model.named_parameters()}
    sharing: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name in model.ties:  # in the order of the whole model, which is the same on every rank
        if name in params:
            sharing[model.holders_of(name)].append(name)
    specs = []
    for ranks, names in sharing.items():
        several = len(ranks) > 1
        shards = num_holders * len(ranks) if several else num_shards
        for spec in cut.specs_of(WrapPlan("", tuple(names)), shards):
            name, tie = f"tied {spec.layout.slots[0].fqn}", ranks if several else ()
            specs.append(replace(spec, name=name, pipeline_stage=None, tie=tie))
    return specs


def _specs_of_stages(
    model: PipelineModel, cut: _Cut, num_shards: int, wrapped_modules: Sequence[WrapPlan]
) -> list[UnitSpec]:
    """The units of each pipeline stage.

    What belongs to no wrapped module is given to the stages, which run at different times.
    """
    *inner, root = [
        replace(plan, params=tuple(name for name in plan.params if name not in model.ties))
        for plan in wrapped_modules
    ]
    stages_of = {plan: {_stage_of(model, name) for name in plan.params} for plan in inner}
    outer: dict[int, list[str]] = defaultdict(list)
    for plan in [root, *(plan for plan in inner if len(stages_of[plan]) > 1)]:
        for name in plan.params:
            outer[_stage_of(model, name)].append(name)
    around = [WrapPlan(f"{STAGE}{stage}", tuple(outer[stage])) for stage in sorted(outer)]
    specs = []
    for plan in [*(plan for plan in inner if len(stages_of[plan]) == 1), *around]:
        stage = _stage_of(model, plan.params[0])
        specs += [replace(spec, pipeline_stage=stage) for spec in cut.specs_of(plan, num_shards)]
    return specs


def _stage_of(model: PipelineModel, parameter: str) -> int:
    stage = model.stage_of(parameter)
    assert stage is not None, "tied parameters have units of their own"
    return stage


def _updated_params(
    params: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer | None
) -> set[int] | None:
    if optimizer is None:
        return None
    known = {id(param) for param in params.values()}
    updated = [param for group in optimizer.param_groups for param in group["params"]]
    if not updated:
        raise UsageError(
            "the optimizer has no parameters, so nothing would be trained. An engine that was closed, or "
            "whose construction failed, takes them out of its optimizer. Make a new optimizer from the "
            "model's parameters."
        )
    strangers = [param for param in updated if id(param) not in known]
    if strangers:
        raise UsageError(
            f"the optimizer (or model_parameters) holds {len(strangers)} parameters that are not "
            f"in the model (the first has shape {tuple(strangers[0].shape)}). They would never be "
            "reduced or updated. Build the optimizer from the parameters of the model that you "
            "pass, after the last change that replaces parameters."
        )
    if len(updated) != len({id(param) for param in updated}):
        raise UsageError(
            "a parameter is in two param groups of the optimizer; keep it in one of them."
        )
    return {id(param) for param in updated}


class _Kind(NamedTuple):
    """What the parameters of a unit have in common."""

    trainable: bool
    row: DtypeRow
    experts: int

    def tags(self, kinds: Iterable[_Kind]) -> list[str]:
        """What tells it from the other ``kinds`` of a wrapped module, in names of units."""
        tags = [] if self.trainable else ["frozen"]
        if self.experts > 1:
            tags.append(f"experts of {self.experts}")
        alike = [k for k in kinds if k[::2] == self[::2]]
        others = [k.row for k in alike if k.row != self.row]
        if any(row.param != self.row.param for row in others):
            tags.append(str(self.row.param).removeprefix("torch."))
        if any(row.param == self.row.param for row in others):
            tags.append(f"sent as {str(self.row.reduce).removeprefix('torch.')}")
        return tags


@dataclass(frozen=True, eq=False)
class _Cut:
    """How wrapped modules are cut into units.

    ``updated``: ``id`` of the parameters of the optimizer; None: there is none. ``own_numel``: matrices
    of at least so many elements are units of their own if those of one kind have more than ``max_numel``
    elements in all; None: none are. For ``whole`` and ``blocks``, see :func:`plan_units`.
    """

    model: nn.Module
    params: Mapping[str, nn.Parameter]
    updated: set[int] | None
    policy: Policy
    _: KW_ONLY
    whole: bool
    blocks: Mapping[str, SlotBlock]
    own_numel: int | None
    max_numel: int
    replicas: int

    def shards_of(self, kind: _Kind, num_shards: int) -> int:
        """How many ranks shard a unit; of experts those of ``core.mesh: Mesh.expert_holders``."""
        same = num_shards // kind.experts
        return self.replicas if same == 1 < kind.experts else same

    def specs_of(self, wrapped: WrapPlan, num_shards: int) -> list[UnitSpec]:
        """The units of a wrapped module."""
        kinds: dict[_Kind, list[str]] = defaultdict(list)
        for fqn in wrapped.params:
            kinds[self._kind_of(fqn)].append(fqn)
        specs = []
        for kind, fqns in kinds.items():
            tags = kind.tags(kinds)
            shapes = {fqn: local_of(self.params[fqn]).shape for fqn in fqns}
            parts = {wrapped.name: fqns}
            # A matrix alone would be padded to the others' shards.
            is_whole = self.whole and kind.trainable
            numel = sum(shape.numel() for shape in shapes.values())
            # Experts have other names on other ranks, which must have the same units.
            is_cut = self.own_numel is not None and not is_whole and kind.experts == 1
            if is_cut and numel > self.max_numel:
                assert self.own_numel is not None
                parts = _parts_of(wrapped.name, shapes, self.own_numel)
            group = ":".join([wrapped.name, *tags]) if len(parts) > 1 else ""
            for part, held in parts.items():
                name = ":".join([part, *tags]) if len(kinds) > 1 else part
                layout = pack(
                    [(fqn, shapes[fqn]) for fqn in held],
                    num_shards=self.shards_of(kind, num_shards),
                    whole=is_whole,
                    blocks=self.blocks,
                )
                specs.append(
                    UnitSpec(
                        name, wrapped.fqn, layout, kind.row, kind.trainable, group,
                        experts=kind.experts,
                    )
                )  # fmt: skip
        return specs

    def _kind_of(self, fqn: str) -> _Kind:
        param, owner = self.params[fqn], self.model.get_submodule(fqn.rpartition(".")[0])
        if param.requires_grad and not (param.is_floating_point() or param.is_complex()):
            raise UnsupportedError(f"parameter {fqn!r} of dtype {param.dtype} cannot be trained.")
        is_updated = self.updated is None or id(param) in self.updated
        row = self.policy.row_for(fqn, param.dtype, getattr(owner, "stands_for", owner))
        return _Kind(param.requires_grad and is_updated, row, ranks_of_layer(param, fqn))


def _parts_of(name: str, shapes: Mapping[str, torch.Size], own_numel: int) -> dict[str, list[str]]:
    """The parameters of a block by the name of their unit: large matrices alone, the rest together.

    A matrix has the name of its module, unless that is the name of another unit.
    """
    large = {fqn for fqn, shape in shapes.items() if len(shape) > 1 and shape.numel() >= own_numel}
    modules = Counter([name, *(fqn.rpartition(".")[0] for fqn in large)])
    parts: dict[str, list[str]] = {}
    for fqn in shapes:
        module = fqn.rpartition(".")[0]
        own = module if modules[module] == 1 else fqn
        parts.setdefault(own if fqn in large else name, []).append(fqn)
    return parts if len(parts) > 1 else {name: [*shapes]}


# ---------------------------------------------------------------- what units need


def layout_digest(specs: Iterable[UnitSpec]) -> str:
    """A hash of everything in the layout that ranks must share. Parts of global tensors may differ."""
    text = repr(
        [
            (
                s.name,
                [_shared(slot, has_experts=s.experts > 1) for slot in s.layout.slots],
                s.layout.full_numel,
                s.row,
                s.trainable,
            )
            for s in specs
        ]
    )
    return hashlib.sha256(text.encode()).hexdigest()


def layout_lines(specs: Iterable[UnitSpec]) -> list[str]:
    """What :func:`layout_digest` hashes, for messages: a line for each parameter."""
    lines = []
    for s in specs:
        for slot in s.layout.slots:
            name = slot.fqn if s.experts == 1 or is_split(slot, "expert") else "of an expert"
            shape = slot.shape if slot.block is None else slot.block.shape
            kind = f"{str(s.row.param).removeprefix('torch.')}{'' if s.trainable else ', frozen'}"
            lines.append(f"{name} {list(shape)}, {kind}, in unit {s.name}")
    return lines


def _shared(slot: Slot, *, has_experts: bool) -> tuple[object, ...]:
    """What ranks must share of a slot: its name, its position, and the global tensor.

    Of experts those with the same position: their names differ, unless they are parts of one tensor.
    """
    block = slot.block
    name = "" if has_experts and not is_split(slot, "expert") else slot.fqn
    rest = (slot.shape,) if block is None else (block.shape, sorted(block.split), block.largest)
    return name, slot.start, *rest


def probed(optimizer: torch.optim.Optimizer, policy: Policy) -> dict[torch.dtype, Probe]:
    """What the optimizer does with masters of each dtype: what it keeps, and whether pieces will do.

    Raises :class:`UnsupportedError` for a class that cannot run here at all.
    """
    trained = {p.dtype for g in optimizer.param_groups for p in g["params"]}
    dtypes = {dtype for dtype in trained if dtype.is_floating_point or dtype.is_complex}
    masters = {policy.row_for("", dtype).master for dtype in dtypes} or {torch.float32}
    if policy.keep_fp32:
        masters.add(torch.float32)
    found = {dtype: probe(optimizer, dtype=dtype) for dtype in sorted(masters, key=str)}
    takes_whole = getattr(optimizer, "takes_whole_parameters", False)
    for dtype, tried in found.items():
        if not tried.works or not (tried.elementwise or takes_whole):
            raise _cannot_run(optimizer, dtype, tried)
    return found


def _cannot_run(
    optimizer: torch.optim.Optimizer, dtype: torch.dtype, tried: Probe
) -> UnsupportedError:
    name = type(optimizer).__name__
    if dtype.is_complex and not tried.works and probe(optimizer).works:
        return UnsupportedError(
            f"{name} cannot update parameters of dtype {dtype}: {tried.reason.rstrip('.')}. Use "
            "Adam, AdamW, SGD, Adagrad or RMSprop, or keep these parameters as their real views, "
            "nn.Parameter(torch.view_as_real(w)), with torch.view_as_complex in forward."
        )
    ours = (
        'ZeroShard\'s own: "optimizer": {"type": "Muon"} in the configuration, with '
        "param.use_muon = True on the matrices and False on all others"
        if name == "Muon"
        else "Muon or Lamb, whose parameters are never split"
    )
    return UnsupportedError(
        f"{name} cannot run on sharded parameters: {tried.reason}. "
        "With ZeRO, an optimizer updates pieces of each parameter. Use an element-wise "
        f"optimizer (Adam, AdamW, SGD, Adagrad, Lion, RMSprop...), or {ours}."
    )


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
    """The bytes per element that each unit needs between steps. ``many``: gradients are accumulated;
    ``shards_grads``: each backward's are reduced at once."""
    groups = optimizer.param_groups if optimizer is not None else []
    group_of = {id(param): at for at, group in enumerate(groups) for param in group["params"]}
    planned = []
    for spec in specs:
        row, layout = spec.row, spec.layout
        if not spec.trainable:
            tier = offload_plan.tier_of(spec.name)
            planned.append(UnitBytes(layout, row.param.itemsize, param_tier=tier, group=spec.group))
            continue
        state = {}
        for slot in layout.slots if optimizer is not None else ():
            kept = found[row.master].state_by_group[group_of[id(params[slot.fqn])]].values()
            shaped = sum(dtype.itemsize for dtype in kept if dtype is not None)
            scalars = sum(torch.float32.itemsize for dtype in kept if dtype is None)
            state[slot.fqn] = StateBytes(shaped, scalars)
        grad_tier = offload_plan.grads.get(spec.name)
        in_memory, stored = grad_itemsizes(
            row,
            many=many,
            is_stored=grad_tier is not None,
            is_sent=spec.name in offload_plan.sent,
            shards_grads=shards_grads,
        )
        planned.append(
            UnitBytes(
                layout,
                param_nbytes=row.param.itemsize,
                grad_nbytes=in_memory,
                stored_grad_nbytes=stored,
                grad_tier=grad_tier or Tier.DEVICE,
                master_nbytes=row.master.itemsize if state and row.has_master else 0,
                state=state,
                spans=offload_plan.spans_of(spec.name),
                param_tier=offload_plan.tier_of(spec.name),
                group=spec.group,
            )
        )
    return planned
