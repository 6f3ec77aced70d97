"""Every name that programs written for DeepSpeed use, bound to ZeroShard's implementation.

``import zeroshard.deepspeed as deepspeed`` needs nothing else. Programs that ``import deepspeed``
themselves need the compatibility directory (:mod:`zeroshard.compat`). Each name is imported on first use.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any


def _modules() -> Any:
    # "from . import" would call __getattr__ below.
    return importlib.import_module(f"{__name__}.import_hook")


def __getattr__(name: str) -> Any:
    return _modules().attribute(sys.modules[__name__], "", name)


def __dir__() -> list[str]:
    found: list[str] = _modules().known("")
    return found
