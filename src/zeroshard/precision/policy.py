"""The dtypes in which each number is stored, summed, sent and updated.

There is one row of dtypes per parameter and one table per run. Modes are ``plain`` (the model as it is,
without a second copy of anything), ``bf16`` and ``fp16`` (16-bit parameters with a wider master).
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn

Mode = Literal["plain", "bf16", "fp16"]
_MODE_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class DtypeRow:
    """The dtypes of one parameter. ``master == param``: there is no second copy."""

    param: torch.dtype
    grad_accum: torch.dtype  # sums of micro-batches
    reduce: torch.dtype  # gradients in collectives
    master: torch.dtype  # what the optimizer updates
    moments: torch.dtype  # optimizer state shaped like the parameter

    @property
    def has_master(self) -> bool:
        """Whether the optimizer updates a copy, from which the parameter is rounded."""
        return self.master != self.param


@dataclass(frozen=True)
class Policy:
    """The dtypes of a run. ``None`` stands for the parameter's own dtype.

    If ``moments`` is wider than ``master`` (bf16 master, fp32 moments), the optimizer must support that:
    see ``state_dtype`` of :func:`zeroshard.optim.factory.build_optimizer`.
    """

    mode: Mode = "plain"
    param: torch.dtype | None = None
    grad_accum: torch.dtype | None = None
    reduce: torch.dtype | None = None
    master: torch.dtype | None = None
    moments: torch.dtype | None = None
    buffer: torch.dtype | None = None  # None: buffers are not changed
    keep_fp32: tuple[str, ...] = ()  # globs over parameter names
    autocast: torch.dtype | None = None  # of forward under torch.autocast
    autocast_reduced: frozenset[str] = frozenset()  # classes with gradients reduced in it

    def row_for(self, fqn: str, dtype: torch.dtype, owner: nn.Module | None = None) -> DtypeRow:
        """The dtypes of parameter ``fqn`` of module ``owner``, which has ``dtype`` in the model.

        Integer parameters (quantized, frozen weights) and complex ones keep their dtype, as in
        ``module.bfloat16()`` and ``module.half()``. A parameter matched by
        ``keep_fp32`` is float32 throughout in a 16-bit mode, and keeps its own dtype in plain mode.
        """
        if not dtype.is_floating_point:
            return DtypeRow(dtype, dtype, dtype, dtype, dtype)
        if self.mode != "plain" and self.keeps_fp32(fqn):
            return DtypeRow(*[torch.float32] * 5)
        reduce = self.reduce
        if reduce is None and self.autocast is not None and self._reduced_low(owner):
            reduce = self.autocast
        return DtypeRow(
            param=self.param or dtype,
            grad_accum=self.grad_accum or dtype,
            reduce=reduce or dtype,
            master=self.master or dtype,
            moments=self.moments or dtype,
        )

    def keeps_fp32(self, fqn: str) -> bool:
        """Whether a pattern of ``keep_fp32`` matches ``fqn``.

        >>> Policy(keep_fp32=("*.router.*",)).keeps_fp32("layers.3.router.weight")
        True
        """
        return any(fnmatchcase(fqn, pattern) for pattern in self.keep_fp32)

    def table(self) -> str:
        """What :attr:`Engine.dtypes` prints: one line per kind of number.

        >>> print(Policy().table().splitlines()[1])
        parameters             as in the model
        """
        own = "as in the model"
        rows = [
            ("parameters", _word(self.param, own)),
            ("gradient accumulation", _word(self.grad_accum, own)),
            ("reduction", _word(self.reduce, own)),
            ("master", _word(self.master, "none: parameters are updated in place")),
            ("optimizer state", _word(self.moments, own)),
            ("buffers", _word(self.buffer, "untouched")),
        ]
        if self.master is not None and self.master == self.param:
            rows[3] = ("master", f"none: {_word(self.master)} parameters are updated in place")
        if self.autocast:
            rows.append(("forward", f"autocast to {_word(self.autocast)}"))
        if self.keep_fp32 and self.mode != "plain":
            rows.append(("float32 throughout", ", ".join(self.keep_fp32)))
        title = f"precision: {self.mode}"
        return "\n".join([title, *(f"{name:<22} {value}" for name, value in rows)])

    def _reduced_low(self, owner: nn.Module | None) -> bool:
        names = {f"{cls.__module__}.{cls.__qualname__}" for cls in type(owner).__mro__}
        return not names.isdisjoint(self.autocast_reduced)


def policy_from(config: Any) -> Policy:
    """The dtypes that ``config`` asks for.

    Keys: ``bf16.*``, ``fp16.enabled``, ``torch_autocast.*``, ``data_types.{grad_accum_dtype,
    buffer_dtype}``, ``communication_data_type``, ``keep_fp32``. The configuration has checked that they
    fit together (not both modes, ``param_dtype`` equal to the mode).
    """
    fp16, bf16, autocast = config.fp16, config.bf16, config.torch_autocast
    mode: Mode = "fp16" if fp16.enabled else "bf16" if bf16.enabled else "plain"
    narrow = _MODE_DTYPE.get(mode)
    wide = torch.float32 if narrow else None
    master = narrow if mode == "bf16" and bf16.bf16_master_weights_and_grads else wide
    moments = narrow if mode == "bf16" and bf16.bf16_optimizer_states else wide
    return Policy(
        mode=mode,
        param=narrow,
        grad_accum=_dtype(config.data_types.grad_accum_dtype) or master,
        reduce=_dtype(config.communication_data_type) or narrow,
        master=master,
        moments=moments,
        buffer=_dtype(config.data_types.buffer_dtype),
        keep_fp32=tuple(config.keep_fp32),
        autocast=(_dtype(autocast.dtype) or torch.bfloat16) if autocast.enabled else None,
        autocast_reduced=frozenset(autocast.lower_precision_safe_modules),
    )


def _dtype(word: str | None) -> torch.dtype | None:
    return None if word is None else getattr(torch, word)


def _word(dtype: torch.dtype | None, otherwise: str = "") -> str:
    return otherwise if dtype is None else str(dtype).removeprefix("torch.")


def cast_floats(tree: Any, dtype: torch.dtype) -> Any:
    """Floating tensors of a nested structure in ``dtype``; everything else as it is."""
    if isinstance(tree, Tensor):
        return tree.to(dtype) if tree.is_floating_point() else tree
    if isinstance(tree, dict):
        return {key: cast_floats(value, dtype) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(cast_floats(item, dtype) for item in tree)
    return tree
