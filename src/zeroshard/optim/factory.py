"""Builds the configured optimizer: a ``torch.optim.Optimizer`` that does not know that it is sharded."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.config.keys import nearest
from zeroshard.config.params import OPTIMIZERS
from zeroshard.errors import ConfigError, UnsupportedError
from zeroshard.optim.inner_optimizer import rebind
from zeroshard.optim.optimizers import FlexibleAdam, Group, Lamb, Muon, named

_FUSED_DEVICES = ("cpu", "cuda", "meta")
_HINTS = ("foreach", "fused", "set_grad_none")  # choose between kernels, which the engine does

_Options = dict[str, Any]
_Chosen = tuple[Callable[..., Optimizer], _Options]
"""What makes an optimizer, and the options for it."""


def build_optimizer(
    type_: str,
    params: Mapping[str, Any],
    groups: Sequence[Group],
    *,
    fused: bool,
    state_dtype: torch.dtype | None = None,
) -> Optimizer:
    """The optimizer of ``optimizer.type`` and ``.params``, with DeepSpeed's names and defaults.

    ``groups`` are torch parameter groups; options in them override ``params``. For Muon, parameters come
    with names: ``(fqn, parameter)``. ``fused``: use torch's fused kernels if the class has them. They
    need fp32 or fp64 masters, since all their tensors must have one dtype. ``state_dtype``: the dtype of
    Adam's moments, if it differs from that of the parameters it updates.

    "Adam" is AdamW unless ``adam_w_mode`` is false. Both default to no weight decay.

    Raises:
        ConfigError: the name or an argument does not exist, or a value is not allowed.
        UnsupportedError: the option is not supported yet, or not for this optimizer.
    """
    groups = [dict(group) for group in groups]  # torch writes into them
    by_lower = {name.lower(): name for name in OPTIMIZERS}
    name = by_lower.get(type_.lower(), type_)
    options = dict(params)
    if options.pop("max_grad_norm", 0):
        raise ConfigError(
            "optimizer.params.max_grad_norm has no effect, because the engine clips gradients: "
            'write "gradient_clipping" at the top level'
        )
    fused = fused and options.get("fused") is not False
    if name in OPTIMIZERS:
        options = {key: value for key, value in options.items() if key not in _HINTS}
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    cls, options = _chosen(type_, name, options, state_dtype)

    known = inspect.signature(cls).parameters
    _refuse_unknown(type_, options, known)
    _refuse_text(options, known)
    if fused and "fused" in known and _can_fuse(groups):
        options["fused"] = True
    try:
        return cls(groups, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer {type_}: {error}") from error


def _refuse_text(options: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Refuse text where the optimizer's own value is a number, or true or false."""
    for key, value in options.items():
        default = known[key].default
        if isinstance(value, str) and isinstance(default, int | float):
            raise ConfigError(
                f"optimizer.params.{key} is the text {value!r}, but must be a value such as {default}. "
                "YAML reads 1e-8 as text, and 1.0e-8 as a number."
            )


def _refuse_unknown(type_: str, options: Iterable[str], known: Mapping[str, Any]) -> None:
    """Refuse options that are no arguments of the optimizer. ``known``: its arguments."""
    for key in options:
        if key not in known or key == "params":
            near = nearest(key, [*known])
            hint = f'did you mean "{near}"?' if near else f"it takes {', '.join([*known][1:])}"
            raise ConfigError(f"optimizer.params.{key}: {type_} has no such argument; {hint}")


def _chosen(type_: str, name: str, options: _Options, state_dtype: torch.dtype | None) -> _Chosen:
    row = OPTIMIZERS.get(name)
    if state_dtype is not None and not (row and row.narrow_state):
        raise UnsupportedError(
            f"{type_} keeps its state in the dtype of the parameters it updates; moments in "
            f"{state_dtype} exist for Adam and AdamW only"
        )
    if row is None:
        return _torch_class(type_, name), options
    module, _, attribute = row.made_by.partition(":")
    made_by: Any = getattr(importlib.import_module(module), attribute)
    if isinstance(made_by, type):
        return made_by, options
    chosen: _Chosen = made_by(name, options, state_dtype)
    return chosen


def choose_adagrad(_name: str, options: _Options, _state_dtype: object) -> _Chosen:
    """``torch.optim.Adagrad`` without its first allocation."""
    return _adagrad, options


@functools.wraps(torch.optim.Adagrad)
def _adagrad(groups: Sequence[Group], **options: Any) -> Optimizer:
    """The constructor would make state as large as the parameters: it gets their shapes alone, then the
    parameters take their places."""
    members = [_tensors(group) for group in groups]
    shapes = [[torch.empty_like(tensor, device="meta") for tensor in group] for group in members]
    optimizer = torch.optim.Adagrad(
        [{**group, "params": here} for group, here in zip(groups, shapes, strict=True)], **options
    )
    rebind(optimizer, members, fresh_state=False)
    return optimizer


def choose_adam(name: str, options: _Options, state_dtype: torch.dtype | None) -> _Chosen:
    decoupled = options.pop("adam_w_mode", True) or name == "AdamW"
    if options.pop("torch_adam", False):
        options.pop("bias_correction", None)
        options.pop("fp32_optimizer_states", None)
        return (torch.optim.AdamW if decoupled else torch.optim.Adam), options
    options.setdefault("weight_decay", 0.0)
    if not options.pop("fp32_optimizer_states", True):
        state_dtype = None
    correct = options.pop("bias_correction", True)
    if correct and state_dtype is None:
        return (torch.optim.AdamW if decoupled else torch.optim.Adam), options
    if options.pop("amsgrad", False):
        raise UnsupportedError(
            "amsgrad exists only with bias_correction and with moments in the parameters' dtype"
        )
    word = None if state_dtype is None else str(state_dtype).removeprefix("torch.")
    options |= {"decoupled": decoupled, "bias_correction": correct, "state_dtype": word}
    return FlexibleAdam, options


def choose_lamb(_name: str, options: _Options, _state_dtype: object) -> _Chosen:
    """Lamb. Raises :class:`UnsupportedError` for ``amsgrad``."""
    if options.pop("amsgrad", False):
        raise UnsupportedError("Lamb has no variant with amsgrad; leave it out")
    return Lamb, options


def choose_muon(_name: str, options: _Options, _state_dtype: object) -> _Chosen:
    """Muon. Raises :class:`UnsupportedError` for ``per_head_muon``."""
    if options.pop("per_head_muon", False):
        raise UnsupportedError("per_head_muon is planned, not implemented yet; leave it out")
    options.pop("ns_method", None)  # the same matrix by another order of products
    return Muon, options


def _torch_class(type_: str, name: str) -> type[Optimizer]:
    classes = {
        key: cls
        for key, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, Optimizer) and cls is not Optimizer
    }
    if name not in classes:
        near = nearest(type_, [*classes, *OPTIMIZERS])
        hint = f'did you mean "{near}"? ' if near else ""
        *others, last = sorted(OPTIMIZERS)
        raise ConfigError(
            f'optimizer.type "{type_}" does not exist; {hint}It is {", ".join(others)} or {last} '
            "in any case, or the exact name of a class of torch.optim"
        )
    return classes[name]


def _can_fuse(groups: Iterable[Group]) -> bool:
    return all(
        tensor.is_floating_point() and tensor.device.type in _FUSED_DEVICES
        for group in groups
        for tensor in _tensors(group)
    )


def _tensors(group: Group) -> list[Tensor]:
    """The parameters of a group, with or without names."""
    return [tensor for _, tensor in named(group["params"])]
