"""The table of the ZeRO paper: its numbers follow from the sizes of the model, and keep to the limits."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")
import zero_table as tool

from zeroshard.core.layout import ALIGNMENT

PSI = 7_500_001_280


def cells() -> list[list[str]]:
    """The cells of the rows of the table of the page."""
    page = tool.PAGE.read_text()
    begin, end = (f"<!-- {tool.TABLE}: {edge} -->" for edge in ("begin", "end"))
    lines = page.split(begin)[1].split(end)[0].strip().split("\n")[2:]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_units_are_the_parameters_of_the_model():
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tool.MODEL))
    params = {
        name.removeprefix("transformer."): param.numel() for name, param in model.named_parameters()
    }
    numels = tool.unit_numels()
    assert sum(numels.values()) == sum(params.values()) == PSI
    of_modules = {name for name in numels if name.count(".") > 1}
    for name in of_modules:
        assert numels[name] == params[f"{name}.weight"] + params[f"{name}.bias"]


@pytest.mark.parametrize(
    ("stage", "state"), [(0, 16), (1, 4 + 12 / 64), (2, 2 + 14 / 64), (3, 16 / 64)]
)
def test_expected_states_are_those_of_the_paper(stage, state):
    need = tool.expected(stage, 64)
    assert need.state == state * PSI
    paper = tool.PAPER[stage, 64]
    assert f"{need.state / 1e9:.{len(paper.partition('.')[2])}f}" == paper


def test_expected_traffic_is_two_or_three_times_the_parameters():
    for stage in range(3):
        need = tool.expected(stage, 64)
        assert need.gathered + need.reduced == 2 * PSI and not need.once
    need, numels = tool.expected(3, 64), tool.unit_numels()
    once = sum(numels[name] for name in need.once)
    assert need.gathered + need.reduced == 3 * PSI - once
    padded = tool.expected(3, 4096)
    assert 0 < padded.reduced - PSI < len(numels) * ALIGNMENT * 4096


def test_the_page_says_what_is_expected_and_within_the_limits():
    rows = cells()
    assert [(int(row[0]), int(row[1].replace(",", ""))) for row in rows] == list(tool.ROWS)
    for row, (stage, ranks) in zip(rows, tool.ROWS, strict=True):
        need = tool.expected(stage, ranks)
        assert row[2] == f"{need.state / 1e9:.3f}"
        assert row[3] == tool.PAPER.get((stage, ranks), "")
        assert row[4:6] == [f"{n / PSI:.4f} Ψ" for n in (need.gathered, need.reduced)]
        assert row[6] == ", ".join(f"`{name}`" for name in need.once)
        assert 0 < float(row[7]) <= tool.LIMIT_S
        assert 0 < float(row[8]) * 1e9 <= tool.LIMIT_NBYTES
    few, many = rows[-2:]
    assert float(many[9]) == pytest.approx(float(many[7]) / float(few[7]), abs=0.02)
    assert float(many[9]) <= tool.LIMIT_RATIO


def right(stage: int, ranks: int) -> tuple[tool.Row, dict]:
    """A row that keeps to everything, and its plan."""
    need = tool.expected(stage, ranks)
    each = {"name": "one", "calls": 2}
    once = [
        {"op": "all_gather", "name": f"transformer.{name}", "calls": 1, "numel": 0}
        for name in need.once
    ]
    traffic = [
        {"op": "all_gather", "numel": need.gathered} | each,
        {"op": "reduce_scatter", "numel": need.reduced} | each,
        {"op": "gather_small", "numel": 14} | each,
        *once,
    ]
    return tool.Row(stage, ranks, need, need.state + 4, 15.0, 10**8), {"traffic": traffic}


@pytest.mark.parametrize(("stage", "ranks"), tool.ROWS)
def test_a_row_that_differs_ends_the_tool(stage, ranks):
    row, plan = right(stage, ranks)
    assert tool.differences(row, plan) == []

    def said(**changed: object) -> str:
        return "; ".join(tool.differences(replace(row, **changed), plan))

    assert "state is" in said(state=row.state - 8)
    assert "state is" in said(state=row.state + 4 * 436)
    assert "took 20.1 s of CPU, more than 20" in said(seconds=20.1)
    assert "took 1.10 GB, more than 1" in said(rss_nbytes=11 * 10**8)
    for at, what in ((0, "all_gather moves"), (1, "reduce_scatter moves")):
        other = json.loads(json.dumps(plan))
        other["traffic"][at]["numel"] += 1
        assert [each for each in tool.differences(row, other) if what in each]
    other = json.loads(json.dumps(plan))
    other["traffic"].append({"op": "all_reduce", "name": "more", "calls": 1, "numel": 1})
    assert "other collectives: all_reduce" in "; ".join(tool.differences(row, other))
    if stage == 3:
        other = json.loads(json.dumps(plan))
        del other["traffic"][-1]
        assert "gathered once are" in "; ".join(tool.differences(row, other))


def test_a_ratio_above_the_limit_ends_the_tool(monkeypatch):
    seconds = {64: 10.0, 4096: 12.1}

    def planned(stage: int, ranks: int, folder: object) -> tuple[dict, float, int]:
        row, plan = right(stage, ranks)
        return plan | {"states_nbytes": row.state}, seconds[ranks], row.rss_nbytes

    monkeypatch.setattr(tool, "planned", planned)
    with pytest.raises(SystemExit, match=r"4,096 ranks take 1\.21 times as long as 64"):
        tool.rows()
    seconds[4096] = 11.9
    assert len(tool.table(tool.rows())) == 1 + len(tool.ROWS)
