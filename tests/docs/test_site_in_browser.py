"""The site in headless Chromium: no error, no request to other hosts, no dead link, no sideways scroll.

Every page is opened once; the tests look at what was seen. Needs Sphinx, Chromium and ChromeDriver.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, DRIVER, Browser, Visit, opened, served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no Chromium or no ChromeDriver"),
]
WIDTHS = (390, 1280)  # CSS pixels of a phone and of a laptop

LOOK = """
const clean = link => [link.href.split('#')[0], decodeURIComponent(link.hash.slice(1))];
return {
    links: [...document.querySelectorAll('a[href]')].map(clean),
    ids: [...document.querySelectorAll('[id]')].map(node => node.id),
};
"""
SIDEWAYS = """
const edge = document.documentElement.clientWidth;
if (window.innerWidth !== arguments[0]) return ['the window is ' + window.innerWidth];
const scrolls = node => ['auto', 'scroll'].includes(getComputedStyle(node).overflowX);
const boxed = node => node.tagName !== 'ARTICLE' && (scrolls(node) || boxed(node.parentElement));
const past = node => node.getBoundingClientRect().right > edge + 1 && !boxed(node.parentElement);
const found = [...document.querySelectorAll('article *')].filter(past).map(
    node => node.tagName + '.' + node.className + ' ' + node.textContent.slice(0, 40));
const wider = document.documentElement.scrollWidth - edge;
return wider > 0 ? [wider, ...found.slice(0, 5)] : found.slice(0, 5);
"""
RESULTS = """
const found = () => [...document.querySelectorAll('#search-results ul.search li')];
const ended = () => document.querySelector('#search-results p.search-summary')?.textContent ?? '';
return new Promise(done => {
    const look = () => {
        if (/found|did not match/.test(ended())) done(found().map(item => item.textContent));
    };
    new MutationObserver(look).observe(document, {childList: true, subtree: true, characterData: true});
    look();
});
"""


@dataclass(frozen=True)
class Page:
    """What was seen of one page."""

    visit: Visit
    links: list[tuple[str, str]]
    ids: set[str]
    wide: dict[int, list[Any]]
    """By width of the window: by how much the page is wider, and what sticks out of no scrolling box."""


@pytest.fixture(scope="module")
def address(site: tuple[Path, str]) -> Iterator[str]:
    with served(site[0]) as url:
        yield url


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with opened(tmp_path_factory.mktemp("profile")) as window:
        yield window


@pytest.fixture(scope="module")
def pages(site: tuple[Path, str], address: str, browser: Browser) -> dict[str, Page]:
    """Every page of the site by its address."""
    files = sorted(site[0].rglob("*.html"))
    urls = [f"{address}/{file.relative_to(site[0]).as_posix()}" for file in files]
    return {url: looked_at(browser, url) for url in urls}


def looked_at(browser: Browser, url: str) -> Page:
    visit, wide = browser.open(url), {}
    seen = browser.run(LOOK)
    for pixels in WIDTHS:
        browser.width(pixels)
        wide[pixels] = browser.run(SIDEWAYS, pixels)
    return Page(visit, [(path, anchor) for path, anchor in seen["links"]], set(seen["ids"]), wide)


def test_every_page_was_opened(pages):
    assert len(pages) > 40
    assert all(page.links and page.visit.requests for page in pages.values())


def test_no_page_writes_an_error_to_the_console(pages):
    assert {url: page.visit.console for url, page in pages.items() if page.visit.console} == {}


def test_every_request_is_to_this_host_and_is_answered(pages, address):
    asked = {url for page in pages.values() for url in page.visit.requests}
    assert {url for url in asked if not url.startswith((f"{address}/", "data:"))} == set()
    assert [failed for page in pages.values() for failed in page.visit.failed] == []


def test_links_lead_to_pages_and_anchors(pages, address):
    pages = {**pages, f"{address}/": pages[f"{address}/index.html"]}
    dead = [
        (url, path, anchor)
        for url, page in pages.items()
        for path, anchor in page.links
        if path.startswith(address)
        and (path not in pages or (anchor and anchor not in pages[path].ids))
    ]
    assert dead == []


@pytest.mark.parametrize("pixels", WIDTHS)
def test_no_page_scrolls_sideways(pages, pixels):
    assert {url: page.wide[pixels] for url, page in pages.items() if page.wide[pixels]} == {}


def test_the_search_finds_a_key_of_the_configuration(browser, address):
    browser.open(f"{address}/search.html?q=stage3_prefetch_bucket_size")
    found = browser.run(RESULTS)
    assert any(text.startswith("Configuration") for text in found), found
    browser.open(f"{address}/search.html?q=nothingwiththisname")
    assert browser.run(RESULTS) == []
