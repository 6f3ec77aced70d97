"""ZeroShard: ZeRO training for PyTorch.

``initialize`` takes DeepSpeed's arguments and returns its 4-tuple; :class:`Engine` builds the engine
alone. Importing this package starts nothing and compiles nothing: names are loaded when they are first
used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from zeroshard.version import __version__ as __version__

if TYPE_CHECKING:
    from zeroshard import parallel as parallel
    from zeroshard import zero as zero
    from zeroshard.engine.engine import Engine as Engine
    from zeroshard.engine.initialize import add_config_arguments as add_config_arguments
    from zeroshard.engine.initialize import initialize as initialize
    from zeroshard.session.join import init_distributed as init_distributed

_HOME = {
    "Engine": "zeroshard.engine.engine",
    "add_config_arguments": "zeroshard.engine.initialize",
    "init_distributed": "zeroshard.session.join",
    "initialize": "zeroshard.engine.initialize",
}

__all__ = [
    "Engine",
    "__version__",
    "add_config_arguments",
    "init_distributed",
    "initialize",
    "parallel",
    "zero",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in ("zero", "parallel", "errors"):
        return importlib.import_module(f"zeroshard.{name}")
    raise AttributeError(f"module 'zeroshard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
