"""The machine, the versions and the load of a measurement."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any


def describe() -> dict[str, Any]:
    """What a reader must know before comparing numbers."""
    return {
        "cores": os.cpu_count(),
        "processor": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "memory": _field("/proc/meminfo", "MemTotal"),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        "versions": {
            name: _version(name) for name in ("torch", "transformers", "deepspeed", "zeroshard")
        },
    }


def _version(name: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def _field(path: str, name: str) -> str:
    with contextlib.suppress(OSError):
        for line in Path(path).read_text().splitlines():
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return ""
