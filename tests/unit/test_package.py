"""Files about the package agree with each other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from zeroshard import __version__

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no reader for TOML")

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_release_is_the_same_everywhere():
    cited = re.findall(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert [PROJECT["project"]["version"], *cited] == [__version__] * 2


def test_commits_are_checked_with_the_pinned_ruff():
    (pinned,) = re.findall(r"^ruff==.*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert set(re.findall(r"ruff==[\d.]+", hooks)) == {pinned}


def test_every_release_of_python_that_is_named_is_tested():
    named = [text.rpartition(" :: ")[2] for text in PROJECT["project"]["classifiers"]]
    releases = [text for text in named if re.fullmatch(r"3\.\d+", text)]
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    assert f"python: {releases}".replace("'", '"') in workflow
    assert PROJECT["project"]["requires-python"] == f">={releases[0]}"


def test_what_an_install_offers_is_for_users():
    """Tools for work on the repository are groups, which no wheel names."""
    extras, groups = PROJECT["project"]["optional-dependencies"], PROJECT["dependency-groups"]
    assert set(extras) == {"hf", "lightning", "monitor", "report", "examples"}
    assert set(groups) == {"dev", "test", "docs", "programs", "bench"}


def test_what_users_install_needs_no_triton():
    asked = [*PROJECT["project"]["dependencies"]]
    asked += [
        name for names in PROJECT["project"]["optional-dependencies"].values() for name in names
    ]
    assert not [name for name in asked if name.startswith("triton")]
    makefile = (ROOT / "Makefile").read_text()
    (setup,) = re.findall(r"^\$\(READY\):.*?\n\n", makefile, re.MULTILINE | re.DOTALL)
    assert "triton" not in setup.lower()
