"""A resolved configuration, and where its values came from."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from zeroshard.config.fields import Section, show
from zeroshard.config.monitor_sections import MonitorSections
from zeroshard.config.schema import Config
from zeroshard.core.hidden import without_secrets
from zeroshard.core.mesh_sources import ResolvedMesh

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
WATCHERS = frozenset(
    (
        *MonitorSections.model_fields,
        *("comms_logger", "dump_state", "flops_profiler", "log_level", "memory_breakdown"),
        *("steps_per_print", "timers", "wall_clock_breakdown"),
    )
)
ALWAYS_SHOWN = (*BATCH, "zero_optimization.stage", "gradient_clipping", "transport", "uneven")


class Hardware(NamedTuple):
    """Which 16-bit dtypes the device multiplies at full speed, and the reason in words."""

    bf16: bool
    fp16: bool
    because: str


@dataclass(frozen=True)
class LoadedConfig:
    """A resolved configuration, and where its values came from.

    ``raw``: what the user gave, parsed, in containers of our own. ``origins``: dotted key -> "file PATH",
    "config" (a dict), "argument", "auto" (in some cases with a reason), "derived" or "default".
    ``notices``: one line each, to be shown once; ``warnings``: those of them that change what is trained,
    which come last. ``mesh``: the ranks; its sizes are also the values of
    ``parallel``. None if the configuration was not read for training.
    """

    config: Config
    raw: dict[str, Any]
    origins: dict[str, str]
    notices: tuple[str, ...]
    mesh: ResolvedMesh | None = None
    warnings: tuple[str, ...] = ()

    def agreed(self) -> dict[str, str]:
        """Dotted key -> JSON of every value that must be the same on all ranks.

        Keys that only observe (monitors, printing) may differ: many programs log on rank 0 only.
        """
        return {
            path: json.dumps(value, sort_keys=True, default=lambda object_: type(object_).__name__)
            for path, value in leaves(self.config)
            if path.partition(".")[0] not in WATCHERS
        }

    def fingerprint(self) -> str:
        """SHA-256 of ``agreed()`` in hexadecimal. Equal on all ranks of a correct run."""
        return hashlib.sha256(json.dumps(self.agreed(), sort_keys=True).encode()).hexdigest()

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """Key, value as JSON, and origin of every key. Secrets are hidden."""
        for path, value in leaves(self.config):
            shown = show(without_secrets(value, path.rpartition(".")[2]))
            yield path, shown, self.origins[path]

    def table(self, *, every_key: bool = False) -> str:
        """Key, value and origin as plain text. Keys at their default only with ``every_key``."""
        from rich.console import Console
        from rich.table import Table

        grid = Table(box=None, pad_edge=False)
        for title in ("key", "value", "origin"):
            grid.add_column(title, overflow="fold")
        hidden = 0
        for path, shown, origin in self.rows():
            if origin == "default" and path not in ALWAYS_SHOWN and not every_key:
                hidden += 1
            else:
                grid.add_row(path, shown, origin)
        out = io.StringIO()
        Console(file=out, width=100, color_system=None, highlight=False).print(grid)
        more = f"({hidden} other keys have their default values)\n" if hidden else ""
        lines = [line.rstrip() for line in (out.getvalue() + more).splitlines()]
        return "\n".join(lines)


def leaves(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key in ``section`` with its value. Optimizer arguments are separate keys."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from leaves(value, f"{prefix}{name}.")
        elif name == "params":
            yield from ((f"{prefix}params.{key}", value[key]) for key in sorted(value))
        else:
            yield prefix + name, value
