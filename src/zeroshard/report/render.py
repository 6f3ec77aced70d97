"""Renders a page from a template and figures. The templates escape every text, and load nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroshard.version import __version__


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
