"""Figures of a page: few points that keep every extreme, drawn as SVG; and the template around them."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from zeroshard.errors import UsageError
from zeroshard.version import __version__

BUCKETS = 600
"""At most twice as many points are drawn of a curve."""
ROWS = 40
"""Rows of the table behind a figure."""


class Bucket(NamedTuple):
    """Consecutive steps of a curve. ``bad``: values that were not finite."""

    first: int
    last: int
    low: float
    mean: float
    high: float
    bad: int


def buckets(points: Sequence[tuple[int, float]], count: int) -> list[Bucket]:
    """At most ``count`` runs of equally many points, in order. No extreme is lost.

    >>> buckets([(1, 5.0), (2, 1.0), (3, 3.0)], 2)
    [Bucket(first=1, last=2, low=1.0, mean=3.0, high=5.0, bad=0), Bucket(first=3, last=3, low=3.0, mean=3.0, high=3.0, bad=0)]
    """  # noqa: E501
    size = max(1, math.ceil(len(points) / count))
    made = []
    for at in range(0, len(points), size):
        part = points[at : at + size]
        good = [value for _, value in part if math.isfinite(value)]
        low, high, mean = (
            (min(good), max(good), math.fsum(good) / len(good)) if good else (math.nan,) * 3
        )
        made.append(Bucket(part[0][0], part[-1][0], low, mean, high, len(part) - len(good)))
    return made


def thinned(points: Sequence[tuple[int, float]], count: int = BUCKETS) -> list[tuple[float, float]]:
    """The points, or the lowest and the highest of each bucket if there are more than ``2 * count``."""
    if len(points) <= 2 * count:
        return [(float(step), value) for step, value in points]
    found = []
    size = math.ceil(len(points) / count)
    for at in range(0, len(points), size):
        part = [point for point in points[at : at + size] if math.isfinite(point[1])]
        if part:
            ends = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
            found += [(float(step), value) for step, value in sorted(ends)]
    return found


def line_chart(
    curves: Mapping[str, Sequence[tuple[int, float]]],
    unit: str,
    *,
    log: bool,
    count: int = BUCKETS,
) -> str:
    """An SVG of curves over steps. ``log``: a logarithmic axis, if all values are positive.

    At most ``2 * count`` points are drawn of a curve.

    Raises:
        UsageError: matplotlib is missing.
    """
    figure, axes = _figure(2.4)
    positive = True
    for name, points in curves.items():
        thin = thinned(points, count)
        positive = positive and all(value > 0 for _, value in thin if math.isfinite(value))
        axes.plot(*zip(*thin, strict=True), label=name, linewidth=1.0)
    if log and positive:
        axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    if len(curves) > 1:
        axes.legend(fontsize=8)
    return _svg(figure, f"line {unit} {sorted(curves)}")


def bar_chart(bars: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """An SVG of horizontal bars: a group for each key, a bar for each series in it."""
    series = list(dict.fromkeys(name for group in bars.values() for name in group))
    figure, axes = _figure(0.8 + 0.28 * len(bars) * max(1, len(series)))
    height = 0.8 / max(1, len(series))
    for index, name in enumerate(series):
        at = [row + (index - (len(series) - 1) / 2) * height for row in range(len(bars))]
        axes.barh(at, [group.get(name, 0.0) for group in bars.values()], height, label=name)
    axes.set_yticks(range(len(bars)), [_label(name) for name in bars])
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    if len(series) > 1:
        axes.legend(fontsize=8)
    return _svg(figure, f"bars {unit} {list(bars)}")


LABEL = 48
"""Characters of a label. The table has all of them."""


def _label(name: str) -> str:
    """A name as a label: its end if it is long. A dollar would begin a formula.

    >>> _label("a$b")
    'a\\\\$b'
    """
    end = name if len(name) <= LABEL else f"…{name[1 - LABEL :]}"
    return end.replace("$", r"\$")


def area_chart(
    areas: Mapping[str, Sequence[float]],
    spans: Sequence[tuple[str, int, int]],
    unit: str,
    *,
    limit: float | None = None,
    mark: int | None = None,
) -> str:
    """An SVG of areas on top of each other over moments 0, 1, 2...

    ``spans``: name, first and last moment of each phase. ``limit``: a line. ``mark``: the moment of the
    peak.
    """
    figure, axes = _figure(3.6)
    count = max(map(len, areas.values()), default=0)
    axes.stackplot(range(count), *areas.values(), labels=list(areas), step="post", linewidth=0)
    top = [sum(values) for values in zip(*areas.values(), strict=True)]
    if mark is not None:
        axes.plot([mark], [top[mark]], marker="v", color="black", label="peak", linestyle="none")
    height = max(top, default=0.0) or 1.0
    if limit is not None and limit < 2 * height:  # a higher one would make the curve flat
        axes.axhline(limit, color="black", linewidth=1.0, linestyle="--", label="limit")
        height = max(height, limit)
    axes.set_ylim(0, 1.12 * height)
    for name, first, last in spans:
        axes.axvline(first, color="black", linewidth=0.4)
        axes.text(
            (first + last) / 2, 0.99, name, ha="center", va="top", fontsize=8,
            transform=axes.get_xaxis_transform(),
        )  # fmt: skip
    axes.set_xlim(0, max(1, count - 1))
    axes.set_xticks([])
    axes.set_ylabel(unit)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return _svg(figure, f"areas {unit} {list(areas)}")


def _figure(height: float):  # type: ignore[no-untyped-def]
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(
            f"the package matplotlib, which draws the figures, cannot be imported ({error}); install it: "
            "pip install 'zeroshard[report]'"
        ) from error
    figure = Figure(figsize=(9, height), layout="constrained")
    axes = figure.subplots()
    axes.grid(visible=True, linewidth=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    return figure, axes


def _svg(figure, salt: str) -> str:  # type: ignore[no-untyped-def]
    import matplotlib

    out = io.StringIO()
    none = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    # Names inside one SVG are made from the salt: those of two figures of a page must differ.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        figure.savefig(out, format="svg", metadata=none)
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'(<svg\b[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    return re.sub(r'(<svg\b[^>]*?) height="[^"]*"', r'\1 role="img"', svg, count=1)


@dataclass(frozen=True)
class Figure:
    """A figure and the table behind it. ``note``: what a reader has to know."""

    title: str
    svg: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def render(template: str, title: str, **values: Any) -> str:
    """A page as one HTML text without scripts, which loads nothing. Texts in ``values`` are escaped."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(title=title, version=__version__, **values)
