"""Cuts a model into units and counts the bytes that they need: pure functions, before memory moves.

First the modules to wrap are chosen. A wrapped module gathers its parameters before its forward and frees
them after it. By default, repeated blocks (transformer layers) and large single modules (embeddings) are
wrapped. The remaining parameters belong to the root. Then the parameters of each wrapped module become
units, one for each combination of dtype and trainability.

On an accelerator a large block is wrapped whole, and each of its matrices is a unit. So one launch
gathers the block, and the gradient of a matrix, which has memory of its own, is reduced without a copy.
Smaller blocks stay one unit, because each unit costs time of the host in every step.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import nn

from zeroshard.comm.dtensors import local_of
from zeroshard.config import Config
from zeroshard.core.layout import Slot, SlotBlock, UnitLayout, pack
from zeroshard.core.nbytes import StateBytes, UnitBytes
from zeroshard.core.tiers import Tier
from zeroshard.errors import ConfigError, UnsupportedError, UsageError
from zeroshard.offload.offload_plan import OffloadPlan, grad_itemsizes
from zeroshard.optim.factory import Probe, probe
from zeroshard.parallel.split import STAGE, PipelineModel
from zeroshard.precision.policy import DtypeRow, Policy
from zeroshard.zero.materialize import check_meta

GATHERED_AS_ONE = "_gathered_as_one"
"""Attribute of a module that is never cut into units, like ``leaf_module`` in the configuration."""


ROOT = "root"
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_EXPERTS = ("*experts", "*experts.*")  # never wrapped: a rank may route no token to an expert


@dataclass(frozen=True, slots=True)
class WrapPlan:
    """A module to wrap: its full name (``""`` for the root) and the names of its parameters."""

    fqn: str
    params: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name in errors, records and reports."""
        return self.fqn or ROOT


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
    zero = config.zero_optimization
    leaf = zero.leaf_module
    block_max_numel = largest_block_numel(config, device_nbytes)
    is_split = block_max_numel > config.unit_max_numel
    wrapped_modules = plan_wrapping(
        model,
        units=config.units,
        max_numel=block_max_numel,
        min_numel=config.unit_min_numel,
        conditional=config.conditional_modules,
        leaves=[c.rpartition(".")[2] for c in leaf.classes]
        + list(leaf.names)
        + [f"*{suffix}" for suffix in leaf.name_suffixes]
        + [fqn for fqn, module in model.named_modules() if getattr(module, GATHERED_AS_ONE, False)],
    )
    params = dict(model.named_parameters())
    is_part = isinstance(model, PipelineModel) and model.kept is not None
    trains = not is_part or any(param.requires_grad for param in params.values())
    updated = _updated_params(params, optimizer) if trains else set()

    def specs_of(wrapped: WrapPlan, shards: int = num_shards) -> list[UnitSpec]:
        owners = {fqn: model.get_submodule(fqn.rpartition(".")[0]) for fqn in wrapped.params}
        rows = {
            fqn: policy.row_for(fqn, params[fqn].dtype, getattr(owner, "stands_for", owner))
            for fqn, owner in owners.items()
        }
        return _unit_specs(
            wrapped,
            params,
            updated,
            rows,
            num_shards=shards,
            whole=whole,
            blocks=blocks,
            own_numel=config.unit_min_numel if is_split else None,
            max_numel=config.unit_max_numel,
        )

    if isinstance(model, PipelineModel):
        return _specs_of_pipeline(wrapped_modules, model, specs_of, num_shards, num_holders)
    return [spec for wrapped in wrapped_modules for spec in specs_of(wrapped)]


def _specs_of_pipeline(
    wrapped_modules: Sequence[WrapPlan],
    model: PipelineModel,
    specs_of: Callable[[WrapPlan, int], list[UnitSpec]],
    num_shards: int,
    num_holders: int,
) -> list[UnitSpec]:
    """The units that are tied over stages, and then those of the stages.

    What belongs to no wrapped module is given to the stages, which run at different times.
    """
    params = {name for name, _ in model.named_parameters()}
    sharing: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name in model.ties:  # in the order of the whole model, which is the same on every rank
        if name in params:
            sharing[model.holders_of(name)].append(name)
    specs = []
    for ranks, names in sharing.items():
        several = len(ranks) > 1
        shards = num_holders * len(ranks) if several else num_shards
        for spec in specs_of(WrapPlan("", tuple(names)), shards):
            name, tie = f"tied {spec.layout.slots[0].fqn}", ranks if several else ()
            specs.append(replace(spec, name=name, pipeline_stage=None, tie=tie))
    *inner, root = [
        replace(plan, params=tuple(name for name in plan.params if name not in model.ties))
        for plan in wrapped_modules
    ]
    outer: dict[int, list[str]] = defaultdict(list)
    for name in root.params:
        outer[_stage_of(model, name)].append(name)
    for plan in [p for p in inner if len({_stage_of(model, name) for name in p.params}) > 1]:
        inner.remove(plan)
        for name in plan.params:
            outer[_stage_of(model, name)].append(name)
    around = [WrapPlan(f"{STAGE}{stage}", tuple(outer[stage])) for stage in sorted(outer)]
    for plan in [*(plan for plan in inner if plan.params), *around]:
        stage = _stage_of(model, plan.params[0])
        specs += [replace(spec, pipeline_stage=stage) for spec in specs_of(plan, num_shards)]
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


def _unit_specs(
    wrapped: WrapPlan,
    params: Mapping[str, nn.Parameter],
    updated: set[int] | None,
    rows: Mapping[str, DtypeRow],
    *,
    num_shards: int,
    whole: bool,
    blocks: Mapping[str, SlotBlock],
    own_numel: int | None,
    max_numel: int,
) -> list[UnitSpec]:
    """``own_numel``: matrices of at least so many elements are units of their own if those of one kind
    have more than ``max_numel`` elements in all; None: none are."""
    kinds: dict[tuple[bool, DtypeRow], list[str]] = defaultdict(list)
    for fqn in wrapped.params:
        param = params[fqn]
        trainable = param.requires_grad and (updated is None or id(param) in updated)
        if param.requires_grad and not (param.is_floating_point() or param.is_complex()):
            raise UnsupportedError(f"parameter {fqn!r} of dtype {param.dtype} cannot be trained.")
        kinds[trainable, rows[fqn]].append(fqn)
    specs = []
    for (trainable, row), fqns in kinds.items():
        tags = [] if trainable else ["frozen"]
        others = [r for t, r in kinds if t == trainable and r != row]
        if any(r.param != row.param for r in others):
            tags.append(str(row.param).removeprefix("torch."))
        if any(r.param == row.param for r in others):
            tags.append(f"sent as {str(row.reduce).removeprefix('torch.')}")
        shapes = {fqn: local_of(params[fqn]).shape for fqn in fqns}
        parts = {wrapped.name: fqns}
        is_whole = whole and trainable  # a matrix alone would be padded to the others' shards
        numel = sum(shape.numel() for shape in shapes.values())
        if own_numel is not None and not is_whole and numel > max_numel:
            parts = _parts_of(wrapped.name, shapes, own_numel)
        group = ":".join([wrapped.name, *tags]) if len(parts) > 1 else ""
        for part, held in parts.items():
            name = ":".join([part, *tags]) if len(kinds) > 1 else part
            layout = pack(
                [(fqn, shapes[fqn]) for fqn in held],
                num_shards=num_shards,
                whole=is_whole,
                blocks=blocks,
            )
            specs.append(UnitSpec(name, wrapped.fqn, layout, row, trainable, group))
    return specs


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


def largest_block_numel(config: Config, device_nbytes: int) -> int:
    """Elements of the largest block that is gathered whole. ``device_nbytes``: see :func:`plan_units`."""
    asked = config.block_max_numel
    if asked == "auto":
        return max(config.unit_max_numel, whole_block_numel(device_nbytes))
    return asked


def cut_block(model: nn.Module, config: Config, device_nbytes: int) -> str:
    """A sentence about the largest block if the device's memory is too small for two of them; or ""."""
    if config.units != "auto" or config.block_max_numel != "auto" or not device_nbytes:
        return ""
    tree, limit = _Tree(model), largest_block_numel(config, device_nbytes)
    name = max(tree.blocks(), key=tree.numel.__getitem__, default="")
    if not name or tree.numel[name] <= limit:
        return ""
    return (
        f"{name} has {tree.numel[name]:,} parameters, and two such blocks would take more than a "
        f"sixteenth of the device's memory ({device_nbytes / 1e9:.1f} GB). So each is gathered module by "
        f'module: more launches, less memory. "block_max_numel": {tree.numel[name]} gathers it whole.'
    )


def whole_block_numel(device_nbytes: int) -> int:
    """Elements of the largest block that is gathered whole on a device with so much memory; 0: none is.

    Two of them, in two bytes an element, take at most a sixteenth of the memory: the block that is used
    and the next one. A power of two, since the memory of devices of one type differs a little.
    """
    numel = device_nbytes // (16 * 2 * 2)
    return 1 << (numel.bit_length() - 1) if numel else 0


# ---------------------------------------------------------------- the wrapped modules


def plan_wrapping(
    model: nn.Module,
    *,
    units: Sequence[str] | str = "auto",
    max_numel: int = 64 * 2**20,
    min_numel: int = 256 * 2**10,
    conditional: Sequence[str] = (),
    leaves: Sequence[str] = (),
) -> list[WrapPlan]:
    """The modules to wrap, in order of registration, the root last.

    ``units``: ``"auto"``, or patterns of names or class names of modules to wrap, beside which large
    single modules are wrapped: what belongs to the root is gathered before anything runs, and stays.
    ``max_numel`` and ``min_numel``: larger blocks are split into their children, and smaller ones are
    gathered with the enclosing wrapped module. ``conditional``: modules that only some ranks run. Their
    parameters belong to the enclosing wrapped module, which every rank runs. ``leaves``: modules that
    are never split.

    A parameter shared by several modules belongs to their lowest common ancestor that is wrapped.

    Raises:
        ConfigError: a pattern matches no module.
    """
    tree = _Tree(model)
    skipped = tree.matching(conditional, "conditional_modules")
    skipped |= tree.matching(_EXPERTS, "experts", required=False)
    scripted = (
        fqn for fqn, each in tree.modules.items() if isinstance(each, torch.jit.ScriptModule)
    )
    skipped |= {*scripted}  # they take no hooks
    leaf = tree.matching(leaves, "leaf_module", required=False)
    if "" in leaf or "" in leaves:
        chosen = set()  # the whole model is gathered together
    elif units == "auto":
        chosen = set(_auto_wrapping(tree, max_numel, min_numel, skipped, leaf))
    else:
        patterns = [units] if isinstance(units, str) else list(units)
        chosen = tree.matching(patterns, "units")
        chosen |= {
            fqn
            for fqn, numel in tree.numel.items()
            if numel >= min_numel and tree.is_single(fqn) and not _nearest(fqn, chosen)
        }
    inside = {fqn for fqn in tree.modules if any(_is_below(fqn, s) for s in skipped)}
    chosen -= inside | {""}

    owned: dict[str, list[str]] = defaultdict(list)
    for name, holders in tree.holders.items():
        common = _common_ancestor(holders)
        owned[_nearest(common, chosen)].append(name)
    order = [fqn for fqn in tree.modules if fqn in chosen and owned[fqn]]
    return [WrapPlan(fqn, tuple(owned[fqn])) for fqn in [*order, ""]]


class _Tree:
    """Names, sizes and parameter holders of a module tree. Shared modules and parameters appear once."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())  # each module object once
        # Names and classes of a pipeline's modules, also of those on other ranks.
        self._cut: list[tuple[str, str]] = []
        if isinstance(model, PipelineModel):
            self._cut = model.every_module
        self.holders: dict[str, list[str]] = {}  # a parameter's first name -> modules that hold it
        first_name: dict[int, str] = {}
        for fqn, module in self.modules.items():
            for leaf, param in module.named_parameters(recurse=False, remove_duplicate=False):
                name = first_name.setdefault(id(param), f"{fqn}.{leaf}" if fqn else leaf)
                self.holders.setdefault(name, []).append(fqn)
        self.numel = {
            fqn: sum(p.numel() for p in module.parameters()) for fqn, module in self.modules.items()
        }

    def children(self, fqn: str) -> Iterator[str]:
        prefix = f"{fqn}." if fqn else ""
        for name, _ in self.modules[fqn].named_children():
            if prefix + name in self.modules:  # a second registration of a module is not a child
                yield prefix + name

    def repeated(self, fqn: str, children: Sequence[str]) -> list[str]:
        """Those of the children of a list of modules whose class occurs more than once: its blocks."""
        if not isinstance(self.modules[fqn], _CONTAINERS):
            return []
        classes = Counter(type(self.modules[child]).__name__ for child in children)
        return [c for c in children if classes[type(self.modules[c]).__name__] > 1]

    def blocks(self) -> Iterator[str]:
        """All repeated blocks."""
        for fqn in self.modules:
            yield from self.repeated(fqn, [*self.children(fqn)])

    def is_single(self, fqn: str) -> bool:
        """Whether all parameters of the module are its own, such as those of an embedding."""
        return not any(self.numel[child] for child in self.children(fqn))

    def matching(self, patterns: Sequence[str], key: str, *, required: bool = True) -> set[str]:
        found: set[str] = set()
        for pattern in patterns:
            hits = {
                fqn
                for fqn, module in self.modules.items()
                if fqnmatch(fqn, pattern) or fnmatchcase(type(module).__name__, pattern)
            }
            found |= hits
            if hits or any(fqnmatch(f, pattern) or fnmatchcase(c, pattern) for f, c in self._cut):
                continue
            if required:
                classes = sorted({type(m).__name__ for m in self.modules.values()})
                raise ConfigError(
                    f"{key}: {pattern!r} matches no module name and no class name of the model. "
                    f"Classes in the model: {', '.join(classes[:20])}."
                )
        return found


def fqnmatch(fqn: str, pattern: str) -> bool:
    """Shell-style match of a whole dotted name, as ``layers.*`` or ``*.mlp``. The root never matches."""
    return bool(fqn) and fnmatchcase(fqn, pattern)


def _auto_wrapping(
    tree: _Tree, max_numel: int, min_numel: int, skipped: set[str], leaf: set[str]
) -> Iterator[str]:
    """Walk down the tree. Wrap repeated blocks that fit, and look into larger modules."""

    def visit(fqn: str) -> Iterator[str]:
        children = [c for c in tree.children(fqn) if tree.numel[c] and c not in skipped]
        blocks = {*tree.repeated(fqn, children)}
        for child in children:
            numel = tree.numel[child]
            is_block = child in blocks
            if numel < min_numel:
                continue
            if child in leaf or tree.is_single(child) or (is_block and numel <= max_numel):
                yield child
            elif is_block:
                yield child  # for parameters that its children do not hold
                yield from visit(child)
            else:
                yield from visit(child)

    yield from visit("")


def _is_below(fqn: str, ancestor: str) -> bool:
    return fqn == ancestor or fqn.startswith(f"{ancestor}.") or ancestor == ""


def _common_ancestor(fqns: Sequence[str]) -> str:
    """The deepest module that contains all given modules."""
    split = [fqn.split(".") if fqn else [] for fqn in fqns]
    common: list[str] = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def _nearest(fqn: str, chosen: set[str]) -> str:
    """The closest enclosing wrapped module of a module, else the root."""
    while fqn and fqn not in chosen:
        fqn = fqn.rpartition(".")[0]
    return fqn


# ---------------------------------------------------------------- what units need


def layout_digest(specs: Iterable[UnitSpec]) -> str:
    """A hash of everything in the layout that ranks must share. Parts of global tensors may differ."""
    text = repr(
        [
            (
                s.name,
                [_shared(slot) for slot in s.layout.slots],
                s.layout.full_numel,
                s.row,
                s.trainable,
            )
            for s in specs
        ]
    )
    return hashlib.sha256(text.encode()).hexdigest()


def _shared(slot: Slot) -> tuple[object, ...]:
    """What ranks must share of a slot: its name, its position, and the global tensor."""
    block = slot.block
    rest = (slot.shape,) if block is None else (block.shape, sorted(block.split), block.largest)
    return slot.fqn, slot.start, *rest


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
            name = type(optimizer).__name__
            if dtype.is_complex and not tried.works and probe(optimizer).works:
                raise UnsupportedError(
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
            raise UnsupportedError(
                f"{name} cannot run on sharded parameters: {tried.reason}. "
                "With ZeRO, an optimizer updates pieces of each parameter. Use an element-wise "
                f"optimizer (Adam, AdamW, SGD, Adagrad, Lion, RMSprop...), or {ours}."
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
