"""Sphinx builds the site without a warning, and each page is in it."""

from __future__ import annotations

import re

from pages import DOCS, PAGES


def test_sphinx_has_no_warning(site):
    assert site[1] == ""


def test_each_page_is_in_the_site(site):
    built = {path.relative_to(site[0]).with_suffix("") for path in site[0].rglob("*.html")}
    assert {page.relative_to(DOCS).with_suffix("") for page in PAGES} <= built


def test_links_out_of_docs_are_text(site):
    """The site has no such files."""
    page = (site[0] / "recipes.html").read_text()
    assert re.search(r"<code[^>]*><span class=\"pre\">examples/plain_loop</span></code>", page)
    linked = [
        link
        for path in site[0].rglob("*.html")
        for link in re.findall(r'href="([^"#]+)', path.read_text())
        if "://" not in link and ("examples/" in link or link.endswith(".md"))
    ]
    assert linked == []
