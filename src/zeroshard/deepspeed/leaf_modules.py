"""Marks modules whose parameters are to be gathered as one.

The marks are on the modules, and are read when the engine is built. The configuration has the same in
``leaf_module``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from zeroshard.engine.unit_plan import GATHERED_AS_ONE
from zeroshard.errors import UsageError


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether the module itself is marked."""
    return bool(getattr(model, GATHERED_AS_ONE, False))


def z3_leaf_parameter(parameter: nn.Parameter) -> bool:
    """False: modules are marked, not parameters."""
    return False


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """All marked modules."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module, or remove its mark."""
    model._z3_leaf = flag  # type: ignore[assignment]
    setattr(model, GATHERED_AS_ONE, flag)


def set_z3_leaf_modules(
    model: nn.Module,
    leaf_module_classes: Sequence[type[nn.Module] | str],
    raise_if_not_found: bool = True,
) -> list[nn.Module]:
    """Mark every module of these classes, given as types or names. Returns the modules."""
    return _set(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module,
    leaf_module_classes: Sequence[type[nn.Module] | str],
    raise_if_not_found: bool = True,
) -> list[nn.Module]:
    """Remove the marks of every module of these classes. Returns the modules."""
    return _set(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by their full names. Returns the modules, and the names that do not exist."""
    return _by(model, module_names, raise_if_not_found, lambda name, asked: name == asked)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by the ends of their names. Returns the modules, and the suffixes without a match."""
    return _by(
        model,
        module_name_suffixes,
        raise_if_not_found,
        lambda name, asked: name == asked or name.endswith(f".{asked}"),
    )


def _set(
    model: nn.Module, classes: Sequence[type[nn.Module] | str], flag: bool, required: bool
) -> list[nn.Module]:
    if isinstance(classes, (str, type)):
        raise UsageError(f"leaf_module_classes is {classes!r}: give a list of classes or names.")
    found = [module for module in model.modules() if any(_is(module, c) for c in classes)]
    if required and not found:
        raise UsageError(f"no module of the classes {list(classes)} in a {type(model).__name__}.")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _is(module: nn.Module, wanted: type[nn.Module] | str) -> bool:
    kind = type(module)
    if isinstance(wanted, str):
        return wanted in (
            kind.__name__,
            kind.__qualname__,
            f"{kind.__module__}.{kind.__qualname__}",
        )
    return kind is wanted or isinstance(module, wanted)


def _by(
    model: nn.Module, asked: Sequence[str], required: bool, fits: Callable[[str, str], bool]
) -> tuple[list[nn.Module], list[str]]:
    if isinstance(asked, str):
        raise UsageError(f"{asked!r}: give a list of names.")
    found: dict[int, Any] = {}
    missing = []
    for wanted in asked:
        modules = [module for name, module in model.named_modules() if fits(name, wanted)]
        found.update((id(module), module) for module in modules)
        if not modules:
            missing.append(wanted)
    if required and missing:
        raise UsageError(f"no modules called {missing} in a {type(model).__name__}.")
    for module in found.values():
        set_z3_leaf_module(module, True)
    return list(found.values()), missing
