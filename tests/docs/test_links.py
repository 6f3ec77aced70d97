"""Links of the pages lead somewhere, and the site's lists contain every page. Needs no Sphinx."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import DOCS, PAGES, READ, ROOT, anchors, links, listed


def broken(page: Path) -> list[str]:
    found = []
    for path, anchor in links(page.read_text(encoding="utf-8")):
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            found.append(f"{path}: no such file")
        elif anchor and anchor not in anchors(target.read_text(encoding="utf-8")):
            found.append(f"{path}#{anchor}: no such heading")
    return found


@pytest.mark.parametrize("page", READ, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_link_leads_to_a_file_and_a_heading(page):
    assert broken(page) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A\n[a](#a) [b](#b) [c](other.md) `[d](d.md)`\n```\n[e](e.md)\n# b\n```\n")
    assert broken(page) == ["#b: no such heading", "other.md: no such file"]


def test_equal_headings_have_numbered_anchors():
    assert anchors("# A `b`, [c](d)\n## Same\n## Same\n") == {"a-b-c", "same", "same-1"}


DECISIONS = set((DOCS / "decisions").glob("*.md"))


def test_each_page_is_in_a_list_of_the_site():
    assert listed(DOCS / "index.md") == set(PAGES) - {DOCS / "index.md"} - DECISIONS


def test_the_page_of_decisions_has_each_with_its_title():
    text = (DOCS / "decisions.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\* \[(\d+)\]\((\S+)\) (.*)$", text, re.MULTILINE)
    titles = [(DOCS / path).read_text(encoding="utf-8").partition("\n")[0] for _, path, _ in shown]
    assert [f"# {number} {title}" for number, _, title in shown] == titles
    assert [DOCS / path for _, path, _ in shown] == sorted(DECISIONS)


def test_the_first_page_says_what_each_page_of_its_lists_is():
    index = DOCS / "index.md"
    items = "\n".join(re.findall(r"^\* .*$", index.read_text(encoding="utf-8"), re.MULTILINE))
    linked = {(DOCS / path).resolve() for path, _ in links(items)}
    assert listed(index) <= linked


def test_the_first_page_names_pages_as_they_name_themselves():
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\* \[(.+?)\]\(([\w/-]+\.md)\)", text, re.MULTILINE)
    titles = [(DOCS / path).read_text(encoding="utf-8").partition("\n")[0] for _, path in shown]
    assert [f"# {name}" for name, _ in shown] == titles
