"""Sharded construction and access: what programs reach as ``zeroshard.zero``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeroshard.zero.access import (
        safe_get_full_fp32_param as safe_get_full_fp32_param,
    )
    from zeroshard.zero.access import (
        safe_get_full_grad as safe_get_full_grad,
    )
    from zeroshard.zero.access import (
        safe_get_full_optimizer_state as safe_get_full_optimizer_state,
    )
    from zeroshard.zero.access import (
        safe_get_local_fp32_param as safe_get_local_fp32_param,
    )
    from zeroshard.zero.access import (
        safe_get_local_grad as safe_get_local_grad,
    )
    from zeroshard.zero.access import (
        safe_get_local_optimizer_state as safe_get_local_optimizer_state,
    )
    from zeroshard.zero.access import (
        safe_set_full_fp32_param as safe_set_full_fp32_param,
    )
    from zeroshard.zero.access import (
        safe_set_full_grad as safe_set_full_grad,
    )
    from zeroshard.zero.access import (
        safe_set_full_optimizer_state as safe_set_full_optimizer_state,
    )
    from zeroshard.zero.access import (
        safe_set_local_fp32_param as safe_set_local_fp32_param,
    )
    from zeroshard.zero.access import (
        safe_set_local_grad as safe_set_local_grad,
    )
    from zeroshard.zero.access import (
        safe_set_local_optimizer_state as safe_set_local_optimizer_state,
    )
    from zeroshard.zero.gathered import GatheredParameters as GatheredParameters
    from zeroshard.zero.init import Init as Init

_ACCESS = [
    *(f"safe_{verb}_{extent}_{what}"
      for verb in ("get", "set")
      for extent in ("full", "local")
      for what in ("fp32_param", "grad", "optimizer_state")),
]  # fmt: skip

__all__ = ["GatheredParameters", "Init", *_ACCESS]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name == "Init":
        return importlib.import_module("zeroshard.zero.init").Init
    if name == "GatheredParameters":
        return importlib.import_module("zeroshard.zero.gathered").GatheredParameters
    if name in _ACCESS:
        return getattr(importlib.import_module("zeroshard.zero.access"), name)
    raise AttributeError(f"module 'zeroshard.zero' has no attribute {name!r}")
