"""Every name that programs written for DeepSpeed use, bound to ours.

``import zeroshard.deepspeed as deepspeed`` works without anything else; programs that say
``import deepspeed`` themselves need the compatibility directory (:mod:`zeroshard.compat`). Nothing is
imported before it is used.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any


def _modules() -> Any:
    return importlib.import_module(
        f"{__name__}.import_hook"
    )  # "from . import" would come back here


def __getattr__(name: str) -> Any:
    return _modules().attribute(sys.modules[__name__], "", name)


def __dir__() -> list[str]:
    found: list[str] = _modules().known("")
    return found
