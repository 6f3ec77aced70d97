"""``import deepspeed`` imports ZeroShard, for every way to start a program."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path
from types import ModuleType

import pytest
import warm_python

import zeroshard.compat
from zeroshard.cli import launch as launch_cli
from zeroshard.deepspeed import api_table
from zeroshard.deepspeed import install as ways
from zeroshard.deepspeed.install import DIRECTORY
from zeroshard.errors import UsageError

PROGRAM = """
import argparse, os
import torch
import deepspeed

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()
deepspeed.init_distributed()
model = torch.nn.Linear(4, 1)
engine, optimizer, _, _ = deepspeed.initialize(args, model=model, config={
    "train_batch_size": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": 3},
})
loss = engine(torch.ones(2, 4)).sum()
engine.backward(loss)
engine.step()
print(f"rank {engine.global_rank} of {engine.world_size} {deepspeed.__version__} {args.local_rank}")
"""


def run(
    *command: str, cwd: Path, path: str = "", warm: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RANK", "WORLD_SIZE")}
    env |= {"OMP_NUM_THREADS": "1", **variables}
    env["PATH"] = f"{Path(sys.executable).parent}:{env.get('PATH', '')}"
    if path:
        env["PYTHONPATH"] = path
    if warm:
        return warm_python.run(command, cwd=cwd, env=env, timeout=100, warm_ranks=True)
    return subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.fixture
def program(tmp_path: Path) -> Path:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    return script


def expect_two_ranks(done: subprocess.CompletedProcess[str], local_ranks: str) -> None:
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    for rank, local in enumerate(local_ranks.split()):
        assert f"rank {rank} of 2 {api_table.VERSION} {local}" in done.stdout
    assert (
        done.stdout.count(f"DeepSpeed info: version={api_table.VERSION}, provided by ZeroShard")
        == 1
    )


def test_the_launcher_s_flag(program):
    words = ("-m", "zeroshard.cli.main", "launch", "--as-deepspeed", "--nproc", "2")
    done = run(sys.executable, *words, str(program), cwd=program.parent, warm=True)
    expect_two_ranks(done, "0 1")  # initialize() sets args.local_rank from the environment


ASKS = """
import os, deepspeed
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} {deepspeed.__version__}")
"""


def test_a_shell_that_evaluates_what_the_command_prints(tmp_path):
    """New interpreters all the way. What the ranks import can train, as with the launcher's flag."""
    (tmp_path / "asks.py").write_text(ASKS)
    compat = f'eval "$({sys.executable} -m zeroshard.cli.main compat)"'
    done = run("bash", "-c", f"{compat}; deepspeed --num_gpus 2 asks.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    for rank in range(2):
        assert f"rank {rank} of 2 {api_table.VERSION}" in done.stdout


def test_the_directory_alone(tmp_path):
    done = run(sys.executable, "-m", "zeroshard.cli.main", "compat", "--path", cwd=tmp_path)
    assert done.stdout.strip() == str(DIRECTORY)
    code = "import deepspeed; print(deepspeed.__file__)"
    done = run(sys.executable, "-c", code, cwd=tmp_path, path=f"{done.stdout.strip()}:/nowhere")
    assert done.stdout.strip() == str(DIRECTORY / "deepspeed" / "__init__.py")


def test_the_report(tmp_path):
    done = run(sys.executable, str(DIRECTORY / "bin" / "ds_report"), cwd=tmp_path, warm=True)
    assert f"deepspeed {api_table.VERSION}: ZeroShard" in done.stdout


def test_modules_that_are_commands_can_be_run(tmp_path):
    done = run(
        sys.executable, "-m", "deepspeed.env_report", cwd=tmp_path, path=str(DIRECTORY), warm=True
    )
    assert f"deepspeed {api_table.VERSION}: ZeroShard" in done.stdout, done.stderr
    words = ("-m", "deepspeed.utils.zero_to_fp32", "no-such-directory", "out")
    done = run(sys.executable, *words, cwd=tmp_path, path=str(DIRECTORY), warm=True)
    assert done.returncode == 2 and "no-such-directory" in done.stderr
    done = run(sys.executable, "-m", "deepspeed.zero", cwd=tmp_path, path=str(DIRECTORY), warm=True)
    assert done.returncode == 1 and "the module is deepspeed.runtime.zero" in done.stderr


def test_a_line_of_code(tmp_path):
    code = """
import sys
import zeroshard.compat
zeroshard.compat.install()
zeroshard.compat.install()
import importlib.metadata, deepspeed
print(deepspeed.__version__, importlib.metadata.version("deepspeed"), sys.path.count(sys.path[0]))
"""
    done = run(sys.executable, "-c", code, cwd=tmp_path, warm=True)
    assert done.stdout.split() == [api_table.VERSION, api_table.VERSION, "1"], done.stderr


# ---------------------------------------------------------------------- another package of that name


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A directory with another ``deepspeed`` of a later version, as pip would install it."""
    wrapped = tmp_path / "site"
    (wrapped / "deepspeed").mkdir(parents=True)
    (wrapped / "deepspeed" / "__init__.py").write_text("__version__ = '9.9'\n")
    (wrapped / "deepspeed-9.9.dist-info").mkdir()
    (wrapped / "deepspeed-9.9.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: deepspeed\nVersion: 9.9\n"
    )
    return wrapped


ASK = """
import importlib.metadata, deepspeed
print(deepspeed.__version__, importlib.metadata.version("deepspeed"))
"""


def test_an_installed_deepspeed_is_hidden_in_both_ways_of_asking(installed):
    done = run(sys.executable, "-c", ASK, cwd=installed.parent, path=f"{DIRECTORY}:{installed}")
    assert done.stdout.split() == [api_table.VERSION] * 2
    done = run(
        sys.executable, "-c", ASK, cwd=installed.parent, path=f"{installed}:{DIRECTORY}", warm=True
    )
    assert done.stdout.split() == ["9.9", "9.9"]


def test_install_hides_it_too(installed):
    code = "import zeroshard.compat; zeroshard.compat.install()\n" + ASK
    done = run(sys.executable, "-c", code, cwd=installed.parent, path=str(installed), warm=True)
    assert done.stdout.split() == [api_table.VERSION] * 2


def test_install_after_the_other_one_was_imported_is_an_error(installed):
    code = "import deepspeed, zeroshard.compat; zeroshard.compat.install()"
    done = run(sys.executable, "-c", code, cwd=installed.parent, path=str(installed), warm=True)
    assert done.returncode == 1
    assert f"another deepspeed was imported already, from {installed}" in done.stderr


@pytest.mark.parametrize(
    ("imported", "named"),
    [
        (["transformers.integrations.deepspeed"], "transformers"),
        (["accelerate.utils"], "accelerate"),
        (
            ["transformers.integrations.deepspeed", "accelerate.utils"],
            "accelerate and transformers",
        ),
    ],
)
def test_install_after_a_library_found_none_is_an_error(monkeypatch, imported, named):
    for name in ("transformers.integrations.deepspeed", "accelerate.utils", "deepspeed"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in imported:
        module = ModuleType(name)
        module.DeepSpeedConfig = object
        monkeypatch.setitem(sys.modules, name, module)
    before = list(sys.path)
    with pytest.raises(UsageError) as caught:
        zeroshard.compat.install()
    assert str(caught.value) == (
        f"{named} looked for deepspeed when imported, and did not find it. Call "
        f"zeroshard.compat.install() before importing {named}."
    )
    assert sys.path == before


def test_libraries_that_found_it_are_no_obstacle(monkeypatch):
    accelerate, transformers = ModuleType("accelerate.utils"), ModuleType("transformers...")
    accelerate.DummyOptim = transformers.DeepSpeedConfig = type("Found", (), {})
    monkeypatch.setitem(sys.modules, "accelerate.utils", accelerate)
    monkeypatch.setitem(sys.modules, "transformers.integrations.deepspeed", transformers)
    assert ways.found_none() == []


def test_metadata_of_another_version_is_noticed(installed, monkeypatch):
    assert ways.disagreement() == "" or "finds deepspeed" in ways.disagreement()
    monkeypatch.syspath_prepend(str(installed))
    assert "finds deepspeed 9.9, but the imported package is ZeroShard's" in ways.disagreement()


def test_rivals_are_those_before_ours(installed, monkeypatch):
    monkeypatch.chdir(installed)
    package = installed / "deepspeed"
    assert ways.rivals([str(installed), str(DIRECTORY)]) == [package]
    assert ways.rivals([str(DIRECTORY), str(installed)]) == []
    assert [path.resolve() for path in ways.rivals([""])] == [package]


def test_a_pth_file_that_puts_another_one_first_is_found(installed, tmp_path):
    venv.create(tmp_path / "env", symlinks=True)
    (packages,) = (tmp_path / "env").rglob("site-packages")
    ask = "from zeroshard.deepspeed.install import winner; print(winner())"
    source = str(Path(zeroshard.compat.__file__).parents[1])
    python = str(tmp_path / "env" / "bin" / "python")
    assert run(python, "-c", ask, cwd=tmp_path, path=source).stdout.strip() == ""
    (packages / "x.pth").write_text(f"import sys; sys.path.insert(0, {str(installed)!r})\n")
    found = run(python, "-c", ask, cwd=tmp_path, path=source).stdout.strip()
    assert found == str(installed / "deepspeed" / "__init__.py")


def test_one_that_wins_anyway_is_named(monkeypatch, capsys):
    assert ways.winner() == ""
    monkeypatch.setattr(launch_cli, "winner", lambda: "/site/deepspeed/__init__.py")
    launch_cli.warn_of_winner()
    assert "'import deepspeed' imports /site/deepspeed/__init__.py" in capsys.readouterr().err


def test_a_folder_beside_the_program_is_named(program):
    (program.parent / "deepspeed").mkdir()
    words = (sys.executable, "-m", "zeroshard.cli.main")
    launch = ("launch", "--as-deepspeed", "--nproc", "1", "program.py")
    done = run(*words, *launch, cwd=program.parent, warm=True)
    assert (
        "'deepspeed' is in the directory of the script, so 'import deepspeed' imports it"
        in done.stderr
    )
    done = run(*words, "compat", cwd=program.parent, warm=True)
    assert (
        "'deepspeed' is imported instead of ZeroShard by programs in this directory" in done.stderr
    )


def test_a_module_s_working_directory_counts_as_beside(program):
    (program.parent / "deepspeed.py").write_text("x = 1\n")
    words = ("-m", "zeroshard.cli.main", "launch", "--nproc", "1", "--module", "program")
    done = run(sys.executable, *words, cwd=program.parent, warm=True)
    assert "'deepspeed.py' is in the directory of the script" in done.stderr


# ---------------------------------------------------------------------- consumers


def test_accelerate_and_transformers_take_it_for_deepspeed(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    code = """
from accelerate.utils import compare_versions, is_deepspeed_available
from accelerate.utils import DummyOptim
from transformers.integrations import is_deepspeed_available as theirs
assert is_deepspeed_available() and theirs()
assert compare_versions("deepspeed", ">=", "0.18.2")
from transformers.integrations.deepspeed import HfDeepSpeedConfig
print(HfDeepSpeedConfig({"zero_optimization": {"stage": 3}}).is_zero3())
"""
    done = run(sys.executable, "-c", code, cwd=tmp_path, path=str(DIRECTORY), warm=True)
    assert done.stdout.strip().endswith("True"), done.stderr
