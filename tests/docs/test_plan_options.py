"""The table of options of ``zeroshard plan`` in its page is that of the command."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from zeroshard.cli.main import main
from zeroshard.planner.planned_batch import LENGTH

PAGE = Path(__file__).parents[2] / "docs" / "plan-reference.md"


def options() -> dict[str, object]:
    """The default of each option of the command."""
    found: dict[str, object] = {}
    for each in typer.main.get_command(main).commands["plan"].params:
        if each.param_type_name == "option":
            names = [name for name in each.opts if name.startswith("--") and name != "--help"]
            found |= dict.fromkeys(names, each.default)
    return found


def test_the_table_has_every_option_in_order_and_its_default():
    text = PAGE.read_text().partition("| option | meaning | default |\n")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[1:]]
    known = options()
    named = [re.findall(r"`(--[\w-]+)", cells[0]) for cells in rows]
    assert [names[0] for names in named] == list(known)
    assert all(len(set(names)) == 1 for names in named)
    plain = {names[0]: cells[2] for names, cells in zip(named, rows, strict=True)}
    numbers = {name: value for name, value in known.items() if value not in (None, False)}
    assert {name: int(plain[name]) for name in numbers} == numbers
    assert plain["--seq"].startswith(f"{LENGTH:,}, or fewer")
