"""Chooses the modules to wrap: pure functions of the module tree.

A wrapped module gathers its parameters before its forward and frees them after it. By default, repeated
blocks (transformer layers) and large single modules (embeddings) are wrapped. The remaining parameters
belong to the root.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from zeroshard.config import Config
from zeroshard.errors import ConfigError
from zeroshard.parallel.split import PipelineModel

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
    skipped |= tree.matching(_EXPERTS, "experts", required=False) | tree.scripted()
    leaf = tree.matching(leaves, "leaf_module", required=False)
    if "" in leaf or "" in leaves:
        chosen = set()  # the whole model is gathered together
    elif units == "auto":
        chosen = set(_auto_wrapping(tree, max_numel, min_numel, skipped, leaf))
    else:
        patterns = [units] if isinstance(units, str) else list(units)
        chosen = tree.matching(patterns, "units")
        chosen |= {fqn for fqn in tree.singles(min_numel) if not _nearest(fqn, chosen)}
    chosen -= {fqn for fqn in tree.modules if any(_is_below(fqn, s) for s in skipped)}
    chosen.discard("")

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

    def singles(self, min_numel: int) -> Iterator[str]:
        """All single modules of at least so many elements."""
        return (fqn for fqn, n in self.numel.items() if n >= min_numel and self.is_single(fqn))

    def scripted(self) -> set[str]:
        """The modules that take no hooks."""
        return {
            fqn for fqn, each in self.modules.items() if isinstance(each, torch.jit.ScriptModule)
        }

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


# ---------------------------------------------------------------- large blocks


def largest_block_numel(config: Config, device_nbytes: int) -> int:
    """Elements of the largest block that is gathered whole. ``device_nbytes``: 0 for a CPU."""
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
