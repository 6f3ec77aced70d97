"""Turns a result (see run.py) into tables of text: the columns of each protocol's table.

report.py prints the tables. readme_block.py writes some of them into the README.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from comparability import NORM_TOLERANCE, Row, usable
from targets import (
    PEERS,
    all_targets,
    best,
    bound_ms,
    is_zeroshard,
    ms,
    named,
    offload_ratio,
    overhead_us,
    rows_of,
    stream_gb_per_s,
    update_ms,
)
from training import PHASES


@dataclass(frozen=True)
class TextTable:
    """A table. ``notes`` are printed below it: what failed, what is missing, what holds for all lines."""

    title: str
    heads: list[str]
    rows: list[list[str]]
    notes: list[str]


Cells = Callable[[Row, str, dict[str, Any]], list[str]]
"""Makes the cells of a row from a line, the key of its protocol and the whole result."""


def text_tables(result: dict[str, Any]) -> list[TextTable]:
    """One table per protocol. The targets are last, if at least one of them was measured."""
    tables = [_protocol_table(key, result) for key in result["protocols"]]
    if "a9" in result["protocols"]:
        tables.insert([*result["protocols"]].index("a9") + 1, _moved_table(result))
    kept = [table for table in tables if table.rows or table.notes]
    measured = any(target.value is not None for target in all_targets(result))
    return [*kept, target_table(result)] if measured else kept


def _protocol_table(key: str, result: dict[str, Any]) -> TextTable:
    protocol = result["protocols"][key]
    if key.startswith("a3"):
        return _collectives(protocol)
    heads, cells = {
        "a4": (_UPDATE_HEADS, _update_cells),
        "a4-2": (["wall ms", *_UPDATE_HEADS[1:]], _update_cells),
        "a5": (_MEMORY_HEADS, _memory_cells),
        "a7": (_LAYER_HEADS, _layer_cells),
        "a9": (_OFFLOAD_HEADS, _offload_cells),
        "a9-disk": (_DISK_HEADS, _disk_cells),
        "a10": (_CHECKPOINT_HEADS, _checkpoint_cells),
    }.get(key, (_STEP_HEADS, _step_cells))
    rows = [
        [row["name"], *cells(row, key, result)] for row in protocol["rows"] if not _why_not_measured(row)
    ]  # fmt: skip
    notes = _notes(protocol["rows"])
    if key == "a1":
        rows[1:1] = _bound_row(result, len(heads))
    if key == "a5":
        notes.insert(0, f"16 bytes per parameter: {protocol['formula_mib']:.0f} MiB")
    own = [
        row for row in rows_of(result, key)
        if key in ("a1", "a9") and is_zeroshard(row) and row["compared"]
    ]  # fmt: skip
    if len(own) > 1:
        same = all(row["losses"] == own[0]["losses"] for row in own)
        notes.insert(0, f"ZeroShard's {len(own)} loss curves are {'' if same else 'NOT '}bit-equal")
    return TextTable(protocol["title"], ["system", *heads], rows, notes)


def _bound_row(result: dict[str, Any], columns: int) -> list[list[str]]:
    """The row of the lower bound (``targets.bound_ms``); empty if forward and backward were not
    measured."""
    floor, bound = named(rows_of(result, "a1"), "forward + backward"), bound_ms(result)
    if floor is None or bound is None:
        return []
    cells = [""] * columns
    cells[0], cells[_STEP_HEADS.index("step")] = f"{bound:.0f}", f"{bound - ms(floor):.0f}"
    return [["floor + update at memory bandwidth", *cells]]


def _why_not_measured(row: Row) -> str:
    return str(row.get("error") or row.get("absent") or "")


def _notes(rows: list[Row]) -> list[str]:
    """Lines that did not run, grouped by the reason."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if reason := _why_not_measured(row):
            kind = "failed" if "error" in row else "not run"
            reasons.setdefault(f"{kind}: {reason}", []).append(row["name"])
    return [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]


_STEP_HEADS = [
    "CPU ms", "min", "max", *PHASES, "wall ms", "built MiB", "train MiB", "loss",
    "distance", "peer / it",
]  # fmt: skip


def _step_cells(row: Row, key: str, result: dict[str, Any]) -> list[str]:
    rows = result["protocols"][key]["rows"]
    peer = best(r for r in rows if usable(r) and r["family"] in PEERS[1:])
    trains = "loss_distance" in row
    return [
        *(f"{row['cpu_ms'][part]:.0f}" for part in ("median", "min", "max")),
        *(f"{ms(row, measure):.0f}" for measure in (*PHASES, "wall")),
        *(f"{row['peak_mib'][phase]:.0f}" for phase in ("construction", "training")),
        f"{row['losses'][-1]:.4f}" if trains else "",
        _distance(row),
        f"{ms(peer) / ms(row):.2f}" if peer and trains else "",
    ]


def _distance(row: Row) -> str:
    """Empty for a line that is not compared."""
    if "loss_distance" not in row:
        return ""
    cell = f"{row['loss_distance']:.0e}"
    if row.get("norm_distance", 0) > NORM_TOLERANCE:
        cell += f" norm {row['norm_distance']:.0e}"
    return cell + ("" if row["comparable"] else " NO RESULT")


_UPDATE_HEADS = ["CPU ms", "min", "max", "GB/s", "of STREAM", "distance"]


def _update_cells(row: Row, key: str, result: dict[str, Any]) -> list[str]:
    settings = result["protocols"][key]["settings"]
    numel, threads = settings["parameters"], settings["threads_per_rank"]
    measure = "step" if threads == 1 else "step_wall"
    share = update_ms(numel, result, threads) / ms(row, measure)
    return [
        *(f"{row[f'{measure}_ms'][part]:.1f}" for part in ("median", "min", "max")),
        f"{share * stream_gb_per_s(result, threads):.1f}",
        f"{100 * share:.0f} %",
        _distance(row),
    ]


_MEMORY_HEADS = ["construction MiB", "training MiB", "of 16 B per parameter"]


def _memory_cells(row: Row, key: str, result: dict[str, Any]) -> list[str]:
    built, trained = (row["peak_mib"][phase] for phase in ("construction", "training"))
    share = f"{trained / result['protocols'][key]['formula_mib']:.2f}x"
    return [f"{built:.0f}", f"{trained:.0f}", share if row["learns"] else "NO RESULT"]


_LAYER_HEADS = ["forward + backward ms", "min", "max", "us per layer above plain", "distance"]


def _layer_cells(row: Row, _key: str, result: dict[str, Any]) -> list[str]:
    extra = overhead_us(row, result)
    return [
        *(f"{row['compute_ms'][key]:.1f}" for key in ("median", "min", "max")),
        "" if extra is None or row["family"] == "floor" else f"{extra:.1f}",
        _distance(row),
    ]


_OFFLOAD_HEADS = [
    "CPU ms", "min", "max", "wall ms", "min", "max", "CPU, of none", "wall, of none", "train MiB",
    "distance",
]  # fmt: skip


def _offload_cells(row: Row, key: str, result: dict[str, Any]) -> list[str]:
    rows = rows_of(result, key)
    ratios = [offload_ratio(row, rows, measure) for measure in ("cpu", "wall")]
    return [
        *(
            f"{row[m][part]:.0f}"
            for m in ("cpu_ms", "wall_ms")
            for part in ("median", "min", "max")
        ),
        *("" if ratio is None else f"{ratio:.2f}x" for ratio in ratios),
        f"{row['peak_mib']['training']:.0f}",
        _distance(row),
    ]


def _moved_table(result: dict[str, Any]) -> TextTable:
    """A9: bytes per step and rank over the bus and to disk, counted and by the formula."""
    kinds = ("down_nbytes", "up_nbytes", "read_nbytes", "written_nbytes")
    rows = []
    for row in result["protocols"]["a9"]["rows"]:
        theory = row.get("theory_nbytes", {})
        if any(theory.values()):
            pairs = [(row["moved_nbytes"][kind], theory[kind]) for kind in kinds]
            rows.append([row["name"], *(_moved_cell(*pair) for pair in pairs)])
    notes = [
        "counted / by the formula, and the ratio; in the formula parameters are read three times, for "
        "forward, backward and update, but what stays in memory between two uses is not read again",
        "on CPU ranks device memory is host memory: only a delayed update copies",
    ]
    heads = ["system", "down MB", "up MB", "read MB", "written MB"]
    return TextTable("A9  bytes of a step and rank over the bus and to disk", heads, rows, notes)


def _moved_cell(counted: int, theory: int) -> str:
    if not counted and not theory:
        return "0"
    ratio = f"{counted / theory:.3f}x" if theory else "none expected"
    return f"{counted / 1e6:.2f} / {theory / 1e6:.2f}  {ratio}"


_DISK_HEADS = ["wall ms", "min", "max", "CPU ms", "GB/s", "of best raw", "O_DIRECT"]


def _disk_cells(row: Row, key: str, result: dict[str, Any]) -> list[str]:
    """The share is of the best plain loop of the same round, because both ran under the same
    conditions."""
    share = result["protocols"][key]["share_of_raw"]["median"]
    return [
        *(f"{row['wall_ms'][part]:.0f}" for part in ("median", "min", "max")),
        f"{ms(row):.0f}",
        f"{row['gb_per_s']:.2f}",
        f"{100 * share:.0f} %" if is_zeroshard({"family": row["name"]}) else "",
        "yes" if row["direct"] else "NO",
    ]


_CHECKPOINT_HEADS = [
    "save ms", "min", "max", "GB/s", "CPU ms", "load ms", "min", "max", "GB/s", "CPU ms",
    "copy ms", "copy again ms",
]  # fmt: skip


def _checkpoint_cells(row: Row, _key: str, _result: dict[str, Any]) -> list[str]:
    """An asynchronous line has no bandwidth: its time is the time that training waits."""
    cells = []
    for kind in ("save", "load"):
        found = row.get(kind)
        if found is None:
            cells += [""] * 5
            continue
        rate = "" if "copy" in row else f"{found['gb_per_s']:.2f}"
        wall = (f"{found['wall_ms'][part]:.0f}" for part in ("median", "min", "max"))
        cells += [*wall, rate, f"{found['cpu_ms']['median']:.0f}"]
    copies = (row.get(kind) for kind in ("copy", "copy again"))
    return [*cells, *(f"{c['wall_ms']['median']:.0f}" if c else "" for c in copies)]


def _collectives(protocol: dict[str, Any]) -> TextTable:
    """One row per case, one column per transport: CPU ms / wall ms / GB/s."""
    measured = [row for row in protocol["rows"] if not _why_not_measured(row)]
    kinds = list(dict.fromkeys(row["name"] for row in measured))
    cases = list(dict.fromkeys(row["case"] for row in measured))
    by_cell = {(row["case"], row["name"]): row for row in measured}
    rows = []
    for case in cases:
        found = [by_cell.get((case, kind)) for kind in kinds]
        rows.append([case, *("" if row is None else _collective_cell(row) for row in found)])
    notes = ["CPU ms / wall ms / GB/s of the full buffer; memcpy copies it inside each process"]
    return TextTable(
        f"{protocol['title']}, {protocol['settings']['ranks']} ranks",
        ["call", *kinds], rows, [*notes, *_notes(protocol["rows"])],
    )  # fmt: skip


def _collective_cell(row: Row) -> str:
    if not row["right"]:
        return "WRONG"
    return f"{ms(row):.3g} / {ms(row, 'wall'):.3g} / {row['gb_per_s']:.1f}"


def target_table(result: dict[str, Any]) -> TextTable:
    """Each target with its measured value."""
    rows = [[t.name, t.wanted, t.measured, t.verdict, t.detail] for t in all_targets(result)]
    return TextTable("Targets", ["what", "target", "measured", "", "from"], rows, [])
