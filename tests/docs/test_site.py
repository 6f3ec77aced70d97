"""Sphinx builds the site without a warning, and each page is in it."""

from __future__ import annotations

import json
import re

from pages import DOCS, PAGES


def test_sphinx_has_no_warning(site):
    assert site[1] == ""


def test_each_page_is_in_the_site(site):
    built = {path.relative_to(site[0]).with_suffix("") for path in site[0].rglob("*.html")}
    assert {page.relative_to(DOCS).with_suffix("") for page in PAGES} <= built


def test_decisions_are_in_no_side_bar_and_no_search(site):
    page = (site[0] / "index.html").read_text()
    assert 'href="decisions.html"' in page
    assert 'href="decisions/' not in page
    index = (site[0] / "searchindex.js").read_text()
    indexed = json.loads(index[index.index("{") : index.rindex("}") + 1])
    decisions = {n for n, name in enumerate(indexed["docnames"]) if name.startswith("decisions/")}
    hits = [docs if isinstance(docs, list) else [docs] for docs in indexed["terms"].values()]
    assert len(decisions) > 20
    assert decisions.isdisjoint({n for docs in hits for n in docs})


QUESTIONS = {
    "learning rate": "config", "out of memory": "plan", "8 gpus": "fine-tune", "slurm": "clusters",
    "resume": "restart", "export safetensors": "checkpoints", "offload": "offload",
    "deepspeed config": "config", "accelerate": "integrations", "pipeline": "pipeline",
    "hang": "stalls", "fsdp2": "fsdp2", "benchmark": "speed",
}  # fmt: skip
"""What a user types, and the page that must come first. Equal texts in the index rank above all else."""


def test_what_users_type_is_in_the_index_of_the_page_that_answers_it(site):
    index = (site[0] / "searchindex.js").read_text()
    indexed = json.loads(index[index.index("{") : index.rindex("}") + 1])
    for question, page in QUESTIONS.items():
        (entry,) = indexed["indexentries"][question]
        assert (indexed["docnames"][entry[0]], entry[2]) == (page, True), question


def test_code_has_a_button_to_copy_it_but_for_diffs(site):
    page = (site[0] / "index.html").read_text()
    assert "copybutton.js" in page
    assert 'class="highlight-diff' in page
    selector = (site[0] / "_static" / "copybutton.js").read_text()
    assert "div:not(.highlight-diff) > div.highlight > pre" in selector


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
