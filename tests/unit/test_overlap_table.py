"""What a step at stage 3 starts, and when: the table of docs/gpu.md, and some rows with few layers."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
import overlap as tool
from published_models import llama
from support.covering import each_value

LAYERS = 3
LIMIT = 6
"""Collectives of a step besides three for each layer: of embedding, head and final norm."""


@pytest.mark.parametrize(
    ("size", "sizes"), each_value([(size, name) for size in tool.LAYERS for name in tool.SIZES])
)
def test_each_layer_is_gathered_twice_ahead_of_its_use_and_reduced_once(size, sizes):
    model = llama(1, tool.TOKENS, size=size, layers=LAYERS)
    found = tool.step_of(model, 3, tool.RANKS, tool.SIZES[sizes])
    assert found.launches <= 3 * LAYERS + LIMIT
    assert found.launches >= 3 * LAYERS - 1  # the last layer may stay for its backward
    assert not found.late


def test_the_table_is_that_of_the_tool():
    page = tool.GPU_PAGE.read_text()
    begin, end = (f"<!-- {tool.TABLE}: {mark} -->" for mark in ("begin", "end"))
    lines = page.split(begin)[1].split(end)[0].strip().split("\n")[2:]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert [row[:2] for row in rows] == [
        [size, name] for size in tool.LAYERS for name in tool.SIZES
    ]
    for size, _, launches, operators, late, _ in rows:
        made, limit = launches.removesuffix(")").split(" (")
        assert int(made) <= int(limit) == 3 * tool.LAYERS[size] + LIMIT
        assert 0 <= float(operators) <= 6
        assert late == "0"
