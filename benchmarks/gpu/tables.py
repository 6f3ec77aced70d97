"""Prints the rows of a step: a table, and what the table has no room for."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

Row = dict[str, Any]


def make_console() -> Console:
    """A console that is wide enough for the tables, also if its output goes to a file."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def show(console: Console, rows: list[Row]) -> None:
    """Print a table of the rows, then their errors and the places that wait."""
    kind = next((kind for kind, key in _KINDS.items() if any(key in row for row in rows)), None)
    if kind is not None:
        console.print(kind([row for row in rows if _KINDS[kind] in row or kind is show_checks]))
    for text in (*failure_notes(rows), *wait_locations(rows)):
        console.print(text, markup=False, highlight=False)


def cell(row: Row, key: str, form: str = "{:.1f}", scale: float = 1.0) -> str:
    """A number of the row; "-" if it has none."""
    value = row.get(key)
    return "-" if value is None else form.format(value * scale)


def show_machine(rows: list[Row]) -> Table:
    """Facts about the machine."""
    table = Table("machine", "is")
    for row in rows:
        value = row["is"]
        table.add_row(row["machine"], f"{value:.4g}" if isinstance(value, float) else str(value))
    return table


def show_checks(rows: list[Row]) -> Table:
    """Checks, whether they hold, and their measurements."""
    table = Table("check", "holds", "measured")
    for row in rows:
        more = {k: v for k, v in row.items() if k not in ("check", "result", "error")}
        measured = ", ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in more.items()
        )
        table.add_row(row.get("check", "-"), row.get("result", "-"), measured)
    return table


def show_speed(rows: list[Row]) -> Table:
    """Times and memory of training steps."""
    table = Table("model", "system", "tokens/s", "MFU %", "step ms", "min", "fwd", "bwd", "update",
                  "host CPU ms", "alloc GiB", "reserved", "ratio", "loss distance")  # fmt: skip
    for row in rows:
        table.add_row(
            row.get("model", "-"), row["system"], cell(row, "tokens_per_s", "{:.0f}"),
            cell(row, "mfu", "{:.1f}", 100), cell(row, "step_ms"), cell(row, "min_ms"),
            cell(row, "forward_ms"), cell(row, "backward_ms"), cell(row, "update_ms"),
            cell(row, "host_cpu_ms"), cell(row, "allocated_nbytes", "{:.1f}", 2**-30),
            cell(row, "reserved_nbytes", "{:.1f}", 2**-30), cell(row, "ratio", "{:.2f}"),
            cell(row, "distance", "{:.1e}"),
        )  # fmt: skip
    return table


def show_waits(rows: list[Row]) -> Table:
    """Where a step waits for the GPU."""
    table = Table("system", "dtype", "waits", "raises in", "waits behind a sleeping GPU",
                  "driver calls after step 3")  # fmt: skip
    for row in rows:
        during_sleep = row.get("during_sleep", {})
        waited = [key.removesuffix("_waited") for key, yes in during_sleep.items() if yes is True]
        calls = row.get("driver_calls_after_step_3", {})
        error = row.get("first_error")
        measured = "during_sleep" in row
        table.add_row(
            row["system"], row.get("precision", "-"),
            str(len(row["waits"])) if "waits" in row else "-",
            "-" if not measured else (error["phase"] if error else "nothing"),
            "-" if not measured else (waited[0] if waited else "nowhere"),
            ", ".join(f"{name} {count}" for name, count in calls.items() if count)
            or ("0" if calls else "-"),
        )  # fmt: skip
    return table


def show_units(rows: list[Row]) -> Table:
    """Host time of a unit, by phase."""
    phases = ("forward", "backward", "step", "all")
    table = Table("system", *(f"{phase} us" for phase in phases), "beyond plain")
    for row in rows:
        us = row["us_per_unit"]
        table.add_row(row["system"], *(f"{us[phase]:.1f}" for phase in phases), cell(row, "own_us"))
    return table


def show_facts(rows: list[Row]) -> Table:
    """Anything else: a column per key."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(*keys)
    for row in rows:
        values = [row.get(key, "-") for key in keys]
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in values))
    return table


_KINDS = {
    show_machine: "machine",
    show_checks: "check",
    show_waits: "driver_calls_after_step_3",
    show_speed: "step_ms",
    show_units: "us_per_unit",
    show_facts: "built",
}
"""A table, and the key of the rows that it shows."""


def wait_locations(rows: list[Row]) -> list[str]:
    """Each code location that waits, once, with the systems that reach it."""
    found: dict[str, set[str]] = {}
    for row in rows:
        system = f"{row.get('system', '')} {row.get('precision', '')}".strip()
        for wait in row.get("waits", ()):
            found.setdefault(" > ".join(wait["frames"][-2:]), set()).add(
                f"{system} ({wait['phase']})"
            )
        if error := row.get("first_error"):
            found.setdefault(" > ".join(error["frames"][-2:]), set()).add(f"{system} (raises)")
    return [f"{frames}\n    {', '.join(sorted(users))}" for frames, users in found.items()]


def failure_notes(rows: list[Row]) -> list[str]:
    """The errors of the rows that measure something, one line each."""
    return [
        f"{' '.join(row[key] for key in ('system', 'precision', 'model') if key in row)}: "
        f"{row['error']}"
        for row in rows
        if "error" in row and "check" not in row
    ]
