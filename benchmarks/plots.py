"""Draws two plots of a result: the losses of A1, and the step times of A1 and A2.

python benchmarks/plots.py [results/....json]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from targets import is_zeroshard, ms, rows_of


def draw(result: dict[str, Any], folder: Path, stem: str) -> None:
    """Write ``<stem>-losses.png`` (A1) and ``<stem>-steps.png`` (A1 and A2)."""
    try:
        import matplotlib
    except ImportError:
        print("no plots: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    for name, plot in (("losses", _losses), ("steps", _bars)):
        figure = plot(result)
        if figure is not None:
            path = folder / f"{stem}-{name}.png"
            figure.savefig(path, dpi=120)
            print(f"written: {path}")


def _losses(result: dict[str, Any]) -> Any:
    """The loss of every step, for every line that trains on the data of all ranks."""
    from matplotlib.figure import Figure

    rows = [row for row in rows_of(result, "a1") if "loss_distance" in row]
    if not rows:
        return None
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        steps = range(1, len(row["losses"]) + 1)
        style = (
            {"lw": 1, "color": "black", "alpha": 0.3}
            if is_zeroshard(row)
            else {"lw": 2, "alpha": 0.6}
        )
        axes.plot(steps, row["losses"], label=row["name"], **style)
    axes.set(xlabel="step", ylabel="loss, mean of all ranks", title="A1: every system, every step")
    axes.legend(fontsize=7, ncols=2)
    return figure


def _bars(result: dict[str, Any]) -> Any:
    """CPU milliseconds per step and rank. A dotted line marks forward and backward alone."""
    from matplotlib.figure import Figure

    keys = [key for key in ("a1", "a2-512", "a2-2048") if rows_of(result, key)]
    if not keys:
        return None
    figure = Figure(figsize=(5.5 * len(keys), 6), layout="constrained")
    for axes, key in zip(figure.subplots(1, len(keys), squeeze=False)[0], keys, strict=True):
        rows = rows_of(result, key)[::-1]
        names = [row["name"] for row in rows]
        colors = ["tab:blue" if is_zeroshard(row) else "tab:gray" for row in rows]
        axes.barh(names, [ms(row) for row in rows], color=colors)
        axes.set(xlabel="CPU ms per step and rank", title=result["protocols"][key]["title"])
        axes.title.set_fontsize(9)
        axes.tick_params(axis="y", labelsize=7)
        floor = next((row for row in rows if row["family"] == "floor"), None)
        if floor:
            axes.axvline(ms(floor), color="black", lw=1, ls=":")
    return figure


if __name__ == "__main__":
    from readme_block import requested_result

    source = requested_result(sys.argv[1:])
    draw(json.loads(source.read_text()), source.parent, source.stem)
