"""The built site, for tests that need Sphinx."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from pages import DOCS, ROOT

PACKAGES = ("sphinx", "myst_parser", "furo", "sphinx_copybutton")


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of the site, and what Sphinx warned of. Built as ``make docs`` does."""
    if not all(map(find_spec, PACKAGES)):
        pytest.skip("no Sphinx: make docs installs it")
    folder = tmp_path_factory.mktemp("site")
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [
            *(sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q"),
            *("-d", str(folder / "doctrees"), str(DOCS), str(folder / "html")),
        ],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    warned = done.stderr if done.returncode else ""
    return folder / "html", warned
