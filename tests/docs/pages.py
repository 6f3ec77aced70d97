"""Reads the pages of the repository: their code blocks, headings and links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
"""What the site consists of."""
FOLDERS = ("docs", "examples", "benchmarks")
READ = sorted(
    [*ROOT.glob("*.md"), *(page for name in FOLDERS for page in (ROOT / name).rglob("*.md"))]
)
"""What people read in the repository."""

FENCE = re.compile(r"^ {0,3}```(.*)$")
HEADING = re.compile(r"^#{1,6} (.+?)\s*$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`[^`\n]*`")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    line: int
    language: str
    text: str


def split(text: str) -> tuple[str, list[Block]]:
    """The prose of a page, and its fenced blocks. Raises ValueError for a block without an end."""
    prose, blocks = [], []
    begin, language, body = 0, "", []
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        fence = FENCE.match(line)
        if begin and fence and not fence[1].strip():
            blocks.append(Block(begin, language, "".join(body)))
            begin = 0
        elif begin:
            body.append(line)
        elif fence:
            begin, language, body = number, fence[1].strip(), []
        else:
            prose.append(line)
    if begin:
        raise ValueError(f"the block that begins in line {begin} has no end")
    return "".join(prose), blocks


def blocks_of(page: Path) -> list[Block]:
    return split(page.read_text(encoding="utf-8"))[1]


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as code hosts and MyST make them."""
    found: dict[str, int] = {}
    for heading in HEADING.findall(split(text)[0]):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        found[anchor] = found.get(anchor, -1) + 1
    return {f"{name}-{n}" if n else name for name, last in found.items() for n in range(last + 1)}


def links(text: str) -> Iterator[tuple[str, str]]:
    """``(path, anchor)`` of each link that is not to another site. Either may be empty."""
    for link in LINK.findall(CODE.sub("", split(text)[0])):
        if "://" not in link:
            path, _, anchor = link.partition("#")
            yield path, anchor


def listed(page: Path) -> set[Path]:
    """The pages in the toctrees of a page."""
    found: set[Path] = set()
    for block in blocks_of(page):
        if block.language == "{toctree}":
            lines = [line for line in block.text.splitlines() if line and not line.startswith(":")]
            for entry in lines:
                matches = set(page.parent.glob(f"{entry}.md"))
                if not matches:
                    raise ValueError(f"{page.name} lists {entry}, which is no page")
                found |= matches
    return found
