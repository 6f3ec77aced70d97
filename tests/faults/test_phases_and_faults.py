"""Every fault in every phase of every kind of run: what a user sees is in ``phase_table.py``.

A cell whose fault ends the run costs a launch. Faults that a run survives share one: each phase in turn.
"""

from __future__ import annotations

import re

import pytest
from phase_launch import Seen, launch
from phase_program import Plan, losses_of_one_process
from phase_table import (
    CELLS,
    EVERY,
    FAULTS,
    FROZEN_S,
    KNOWN,
    LATE_S,
    LOCK_S,
    PAUSE_S,
    PHASES,
    SURVIVED,
    Cell,
    why_left_out,
)
from support.covering import each_value

pytestmark = pytest.mark.timeout(300)

ENDS = [cell for cell in CELLS if cell.fault not in SURVIVED]
SURVIVES = [cell for cell in CELLS if cell.fault in SURVIVED]
SAVED = [*PHASES].index("forward")
"""Position of the first phase before which a checkpoint is complete."""


def in_make_test(cells: list[Cell]) -> set[Cell]:
    """Few cells in which each phase and each fault occurs, and each kind."""
    return {Cell(*key) for key in each_value([cell.key for cell in cells])}


SAMPLE = in_make_test(ENDS)


def rows(cells: list[Cell]) -> list[object]:
    found = []
    for cell in cells:
        marks = [] if cell in SAMPLE else [pytest.mark.full]
        if cell.key in KNOWN:
            marks.append(pytest.mark.xfail(reason=KNOWN[cell.key], strict=True))
        found.append(pytest.param(cell, marks=marks, id="-".join(cell.key).replace(" ", "")))
    return found


def plan(folder: object, kind: str, faults: dict[str, str], at: int) -> Plan:
    # Where no rank hangs, a busy machine must not make one late.
    late_s = LATE_S if "hangs" in faults.values() else 60.0
    return Plan(kind, faults, at, str(folder), FROZEN_S, late_s, PAUSE_S, LOCK_S)


@pytest.mark.parametrize("cell", rows(ENDS))
def test_a_fault_that_ends_the_run_is_named(cell, tmp_path):
    seen = launch(plan(tmp_path, cell.kind, {cell.phase: cell.fault}, cell.rank))
    assert not complaints(cell, seen), f"{complaints(cell, seen)}\n{seen}"


def complaints(cell: Cell, seen: Seen) -> list[str]:
    """What a user would miss, in words."""
    must, found = cell.seen, []
    if cell.phase not in seen.begun:
        return ["the program did not come to the fault"]
    if seen.code != must.code:
        found.append(f"exit code {seen.code} instead of {must.code}")
    report = [line for line in seen.said if "is stopped by a signal, and" not in line]
    first = report[0] if report else ""
    if must.launcher and not re.match(must.launcher, first):
        found.append(f"the launcher says first {first!r}")
    if not must.launcher and report:
        found.append(f"the launcher says {first!r}, and nothing was wrong")
    if must.launcher and (seen.named_s is None or seen.named_s > must.named_s):
        found.append(f"the rank is named after {seen.named_s} s")
    if seen.ended_s > must.ended_s:
        found.append(f"the launch ends after {seen.ended_s:.1f} s")
    log = seen.logs.get(1 - cell.rank, "")
    verdict = re.search(
        rf"{must.survivor}(?: at step \d+)? after [\s\S]*|{must.survivor}: [\s\S]*", log
    )
    if must.survivor and not (verdict and re.search(must.says, verdict[0], re.MULTILINE)):
        found.append("the other rank does not say what happened")
    if must.explain and cell.fault != "skips" and seen.cause != (cell.rank,):
        found.append(f"zeroshard explain names {seen.explained}")
    if must.explain and seen.cause == (1 - cell.rank,):
        found.append(f"zeroshard explain names the innocent rank: {seen.explained}")
    if seen.left:
        found.append(f"left: {seen.left}")
    if not seen.whole and [*PHASES].index(cell.phase) >= SAVED:
        found.append("no checkpoint is complete")
    return found


# -- faults that a run survives --------------------------------------------------------------------


def groups() -> list[object]:
    """(kind, fault, phases): the cells of one launch. A save behind the training is one of its own."""
    found: dict[tuple[str, str, bool], list[str]] = {}
    for cell in SURVIVES:
        found.setdefault((cell.kind, cell.fault, cell.phase == "behind"), []).append(cell.phase)
    return [
        pytest.param(kind, fault, tuple(phases), id=f"{kind}-{fault}-{phases[-1]}".replace(" ", ""),
                     marks=[] if (kind, behind) == ("stage 3", True) else [pytest.mark.full])
        for (kind, fault, behind), phases in found.items()
    ]  # fmt: skip


@pytest.mark.parametrize(("kind", "fault", "phases"), groups())
def test_a_pause_in_any_phase_ends_no_healthy_run(kind, fault, phases, tmp_path):
    seen = launch(plan(tmp_path, kind, dict.fromkeys(phases, fault), 1))
    assert [*seen.begun] == [*phases], f"the run ended in {[*seen.begun][-1:]}\n{seen}"
    assert seen.code == 0, seen
    assert not [line for line in seen.said if "is stopped by a signal" not in line], seen
    assert "RankDivergence" not in "".join(seen.logs.values()), seen
    assert seen.losses == pytest.approx(losses_of_one_process(), abs=1e-9), seen
    assert (seen.left, seen.whole) == ([], "b"), seen


# -- the table -------------------------------------------------------------------------------------


def test_the_table_has_no_cell_without_a_reason():
    assert len(CELLS) >= 250
    assert {cell.kind for cell in CELLS} == {cell.kind for cell in EVERY}
    assert {cell.phase for cell in CELLS} == {*PHASES}
    assert {cell.fault for cell in CELLS} == {*FAULTS}
    assert all(why_left_out(cell) for cell in {*EVERY} - {*CELLS})
    assert {*KNOWN} <= {cell.key for cell in CELLS}
