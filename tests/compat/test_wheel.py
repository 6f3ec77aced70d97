"""The wheel is complete, contains nothing else, and trains where it is installed."""

from __future__ import annotations

import email
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from zeroshard.deepspeed.install import DIRECTORY

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "zeroshard"

TRAIN = """
import sys
from pathlib import Path

import torch

import zeroshard

assert Path(zeroshard.__file__).is_relative_to(sys.prefix), zeroshard.__file__
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 3},
}
engine, *_ = zeroshard.initialize(model=model, config=config)
with engine:
    x = torch.randn(4, 8)
    losses = []
    for _ in range(5):
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.9 * losses[0], losses
    if engine.global_rank == 0:
        print("trained on", engine.world_size)
"""


def ran(command: list[str | Path], **options: object) -> str:
    """The output of a command. If it fails, its error output is shown."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, **options
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    found = importlib.util.find_spec("setuptools") and importlib.metadata.version("setuptools")
    if not found or int(found.partition(".")[0]) < 77:
        pytest.skip("needs setuptools 77")  # not imported here: it replaces distutils
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    trash = shutil.ignore_patterns("*.egg-info", "__pycache__")
    shutil.copytree(ROOT / "src", source / "src", ignore=trash)
    code = "from setuptools.build_meta import build_wheel; build_wheel('out')"
    ran([sys.executable, "-c", code], cwd=source)
    (found,) = (source / "out").glob("*.whl")
    return found


def test_a_wheel_holds_every_file_of_the_package_and_no_other(wheel):
    """Tests, documentation, benchmarks and examples stay outside."""
    with zipfile.ZipFile(wheel) as archive:
        names = [Path(name) for name in archive.namelist()]
    shipped = {str(name) for name in names if not name.parts[0].endswith(".dist-info")}
    files = [p for p in PACKAGE.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    assert shipped == {f"zeroshard/{path.relative_to(PACKAGE)}" for path in files}
    foreign = [p for p in files if p.name.startswith(("test_", "conftest")) or p.suffix == ".md"]
    assert foreign == []


def test_a_wheel_holds_every_file_of_the_directory(wheel):
    with zipfile.ZipFile(wheel) as archive:
        shipped = {info.filename: info.external_attr >> 16 for info in archive.infolist()}
    wanted = [p for p in DIRECTORY.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    assert len(wanted) == 7
    for path in wanted:
        mode = shipped[f"zeroshard/{path.relative_to(PACKAGE)}"]
        assert mode & 0o111 or path.parent.name != "bin"  # pip keeps commands executable


def test_a_wheel_describes_itself_without_links_that_lead_nowhere(wheel):
    """A package index shows the README, and has none of the files that it links to."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (name,) = [name for name in names if re.fullmatch(r"zeroshard-[^/]*/METADATA", name)]
        found = email.message_from_bytes(archive.read(name))
    text = str(found.get_payload())
    assert text.startswith("# ZeroShard")
    assert re.findall(r"\]\((?!https?:)[^)]*\)", text) == []
    assert "what is proved (`docs/gpu.md`)" in text
    assert found["Description-Content-Type"] == "text/markdown"
    assert found["Author"] == "ZeroShard contributors"


def test_an_installed_wheel_trains_on_two_ranks(wheel, tmp_path):
    """The wheel is installed in a separate environment, which shares only torch and similar packages with
    this one."""
    venv.create(tmp_path / "env", symlinks=True, with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    ran([*pip, "install", "--no-deps", "--no-index", wheel])
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    # A path in a .pth file, so that the .pth file of an editable install here is not read.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (tmp_path / "train.py").write_text(TRAIN)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = tmp_path / "env" / "bin" / "zeroshard"
    printed = ran([command, "launch", "--nproc", "2", "train.py"], cwd=tmp_path, env=env)
    assert printed.splitlines()[-1] == "trained on 2"
