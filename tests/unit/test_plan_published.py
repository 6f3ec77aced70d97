"""The tables of published runs: their arithmetic, and one row planned again."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
import plan_published as tool


def table(name: str) -> list[list[str]]:
    """The cells of the rows of a table of the page."""
    page = tool.PAGE.read_text()
    lines = page.split(f"<!-- {name}: begin -->")[1].split(f"<!-- {name}: end -->")[0].strip()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines.split("\n")[2:]]


def number(cell: str) -> float:
    return 0.0 if cell in ("none", "") else float(cell.replace(",", ""))


def test_the_table_of_batches_adds_up():
    limit = (tool.CARD_NBYTES - tool.CONTEXT_NBYTES) / 1e9
    rows = table(tool.BATCHES)
    assert [row[:3] for row in rows] == [[r.model, r.how, str(r.ranks)] for r in tool.ROWS]
    for row, of_tool in zip(rows, tool.ROWS, strict=True):
        published, planned, one, each = (number(row[at]) for at in (3, 4, 6, 7))
        assert published == of_tool.published
        assert row[5] == tool.off(published, planned)
        if not planned:
            assert one > limit
            continue
        line = one + (planned - 1) * each / 1e3
        assert line - each / 1e3 < limit < line + 2 * each / 1e3
    planned = {(row[0], row[1]): number(row[4]) for row in rows}
    assert (
        abs(planned["DeBERTa-v2-xlarge", "stage 2"] - 40) <= 8
    )  # one step of the published search
    assert planned["GPT-2 XL", "DDP, stage 0"] == 0


def test_the_published_llama_lies_between_both_kinds_of_checkpointing():
    published, none, every = table(tool.LLAMA)
    assert number(published[1]) == tool.TORCHTITAN["tokens"]
    assert number(every[2]) < number(published[2]) == tool.TORCHTITAN["gib"] < number(none[2])
    assert none[3] == every[3] == f"{16 * 8_030_261_248 / 8 / 2**30:.1f}"


def test_a_row_is_planned_as_the_page_says():
    row = next(row for row in tool.ROWS if (row.model, row.stage) == ("Blenderbot-400M", 2))
    (said,) = (cells for cells in table(tool.BATCHES) if cells[:2] == [row.model, row.how])
    assert f"{tool.plan(row, 1).peak_nbytes / 1e9:.2f}" == said[6]
