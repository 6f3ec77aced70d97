"""Prints the tables of a result on a terminal.

python benchmarks/report.py [results/....json]
"""

from __future__ import annotations

import json
import sys
from typing import Any

from table_columns import TextTable, text_tables
from targets import stream_gb_per_s


def show(result: dict[str, Any]) -> None:
    """Print every table of the result."""
    from rich.console import Console

    console = Console()
    console = console if console.is_terminal else Console(width=160)
    versions = ", ".join(f"{k} {v or 'missing'}" for k, v in result["machine"]["versions"].items())
    console.print(
        f"{result['machine']['processor']}, {result['machine']['cores']} cores, load "
        f"{result['machine']['load_average'][0]}; {versions}; "
        f"STREAM {stream_gb_per_s(result)} GB/s"
    )
    if because := result.get("compute_because"):
        console.print(f"The GPT of A1, A2, A6 and A8 is trained in {result['compute']}: {because}")
    for view in text_tables(result):
        _show(view, console)


def _show(view: TextTable, console: Any) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=view.title, box=box.SIMPLE_HEAD, title_justify="left")
    for number, head in enumerate(view.heads):
        words = number == 0 or head == "from"
        table.add_column(
            head, justify="left" if words else "right", no_wrap=number == 0 and len(view.heads) > 5
        )
    for row in view.rows:
        table.add_row(*map(Text, row))
    console.print(table)
    for note in view.notes:
        console.print(Text(f"  {note}"), style="dim")


if __name__ == "__main__":
    from readme_block import requested_result

    show(json.loads(requested_result(sys.argv[1:]).read_text()))
