"""Gives the package its description. Everything else is in pyproject.toml.

The description is the README. Its links are relative, so that they work wherever the repository is
read. On the page of a package index they would lead nowhere, so there they are text, with the path in
the repository, and a picture is what it says without being seen.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

PICTURE = re.compile(r"!\[([^\]]*)\]\((?![a-z]+://)[^)]*\)")
LINK = re.compile(r"\[([^\]]*)\]\((?![a-z]+://)([^)#\s]+)[^)]*\)")


def without_links(text: str) -> str:
    """``[plan](docs/plan.md#files)`` as ``plan (`docs/plan.md`)``.

    >>> without_links("see [a](b.md#c), [d.md](d.md) and [e](https://e)")
    'see a (`b.md`), `d.md` and [e](https://e)'
    >>> without_links("![GiB by stage: 128, 44](docs/a.svg)")
    'GiB by stage: 128, 44'
    """

    def shown(link: re.Match[str]) -> str:
        text, path = link.groups()
        return f"`{path}`" if path.endswith(text) else f"{text} (`{path}`)"

    return LINK.sub(shown, PICTURE.sub(r"\1", text))


if __name__ == "__main__":
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(long_description=without_links(readme), long_description_content_type="text/markdown")
