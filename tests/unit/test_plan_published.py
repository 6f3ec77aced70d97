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
        published, planned, one, found, more = (number(row[at]) for at in (3, 4, 6, 7, 8))
        assert published == (of_tool.published or 0)
        assert row[5] == ("" if of_tool.published is None else tool.off(published, planned))
        assert one <= found <= limit < more if planned else one > limit
    planned = {(row[0], row[1]): number(row[4]) for row in rows}
    step = 8  # of the published search
    assert abs(planned["DeBERTa-v2-xlarge", "DDP"] - 8) <= step
    assert abs(planned["DeBERTa-v2-xlarge", "stage 2"] - 40) <= step
    assert 100 <= planned["Blenderbot-400M", "DDP"] < 200 <= planned["Blenderbot-400M", "stage 2"]
    assert planned["Blenderbot-400M", "stage 2"] < 300
    assert planned["GPT-2 XL", "DDP"] == 0
    assert planned["GPT-2 XL", "stage 3, all in host memory"] <= 2 * 16


def test_the_published_llama_lies_between_both_kinds_of_checkpointing():
    rows = table(tool.LLAMA)
    assert len(rows) == 3 * len(tool.LLAMAS)
    for at, run in enumerate(tool.LLAMAS):
        published, none, every = rows[3 * at : 3 * at + 3]
        assert [number(cell) for cell in (published[0], *published[2:4])] == [*run]
        assert number(every[3]) < run.gib < number(none[3])
        assert run.tokens < number(every[2]) < number(none[2]) < 1.5 * run.tokens
        assert none[4] == every[4] == f"{16 * 8_030_261_248 / run.gpus / 2**30:.1f}"


def test_many_nodes_cost_as_little_as_was_published():
    few, many = (row for row in table(tool.LLAMA) if row[1].startswith("of every layer"))
    published = tool.LLAMAS[1].tokens / tool.LLAMAS[0].tokens
    assert abs(number(many[2]) / number(few[2]) - published) < 0.05


def test_the_published_llamas_on_64_cards_fit_and_are_within_a_tenth():
    rows = table(tool.A100)
    for row, run in zip(rows, tool.A100S, strict=True):
        assert row[0] == run.name
        assert [number(cell) for cell in (row[1], row[2], row[4])] == [
            run.samples,
            run.length,
            run.tokens,
        ]
        assert row[6] == tool.off(run.tokens, number(row[5]))
        assert abs(number(row[5]) / run.tokens - 1) < 0.11
        assert number(row[7]) < 79.15 - tool.CONTEXT_NBYTES / 2**30  # what torch says the card has


def test_the_published_runs_of_llava_fit_and_took_no_longer_than_with_the_longest_samples():
    rows = table(tool.LLAVA)
    assert [row[:2] for row in rows] == [[r.name, f"{r.cards}, {r.gib} GB"] for r in tool.LLAVAS]
    for row, of_tool in zip(rows, tool.LLAVAS, strict=True):
        assert number(row[5]) < of_tool.gib - tool.CONTEXT_NBYTES / 2**30
        if of_tool.hours is not None:
            assert number(row[2]) == of_tool.hours <= number(row[3])
            assert abs(number(row[4].rstrip("%")) - 100 * (number(row[3]) / of_tool.hours - 1)) < 1
    assert number(rows[0][2]) / number(rows[1][2]) == pytest.approx(
        number(rows[0][3]) / number(rows[1][3]), rel=0.15
    )  # 7B to 13B


def test_gradients_wait_for_a_module_that_is_registered_late():
    first, last = (
        tool.simulated(
            tool.llava(1, size="7B", layers=2, projector_last=last),
            1,
            tool.Mesh(data_shard=8),
            3,
            tool.BF16,
        ).nbytes("buckets")
        for last in (False, True)
    )
    assert last > 1.2 * first


def test_a_row_is_planned_as_the_page_says():
    row = next(row for row in tool.ROWS if (row.model, row.stage) == ("Blenderbot-400M", 2))
    (said,) = (cells for cells in table(tool.BATCHES) if cells[:2] == [row.model, row.how])
    assert f"{tool.plan(row, 1).peak_nbytes / 1e9:.2f}" == said[6]
