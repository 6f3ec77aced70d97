"""The commands of ``zeroshard``, and how options become a launch request."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

import zeroshard.launch
from zeroshard.cli import launch as launch_options
from zeroshard.cli.main import main
from zeroshard.launch.options import WITHOUT_FIELD, LaunchRequest, declared, passed_on
from zeroshard.launch.supervisor import ShutdownTimeouts

pytestmark = pytest.mark.smoke


@pytest.fixture
def run():
    def invoke(*words: str):
        return CliRunner().invoke(main, list(words))

    return invoke


@pytest.fixture
def request_of(monkeypatch, run):
    """The request that a command line makes, without launching anything."""

    def parse(*words: str) -> LaunchRequest:
        seen: list[LaunchRequest] = []
        monkeypatch.setattr(launch_options, "launch", lambda r: seen.append(r) or 0)
        result = run("launch", *words)
        assert result.exit_code == 0, result.output
        return seen[0]

    return parse


def test_no_options_are_the_defaults(request_of):
    assert request_of("t.py") == LaunchRequest("t.py")


def test_what_follows_the_script_is_the_scripts(request_of):
    assert request_of("t.py", "--nproc", "3", "-h", "--", "x").args == (
        "--nproc",
        "3",
        "-h",
        "--",
        "x",
    )


@pytest.mark.parametrize("name", ["--nproc", "--num_gpus", "--num-gpus", "--num_accelerators"])
def test_the_number_of_ranks_has_several_names(request_of, name):
    assert request_of(name, "3", "t.py").nproc == 3


def test_deepspeeds_options_keep_their_names(request_of):
    words = (
        "-H hosts -i a:0 --num_nodes 2 --node_rank 1 --master_addr h --master_port 5 --module "
        "--no_local_rank --no_ssh --enable_each_rank_log logs --log_level info -q"
    )
    assert request_of(*words.split(), "pkg.t") == LaunchRequest(
        script="pkg.t",
        hostfile="hosts",
        include="a:0",
        num_nodes=2,
        node_rank=1,
        master_addr="h",
        master_port=5,
        module=True,
        no_ssh=True,
        each_rank_log="logs",
        log_level="info",
        quiet=True,
    )


OPTIONS = {name: (kind, option) for name, kind, _, option in declared()}
OF_OTHER_PROGRAMS = set(
    "--bind-to --cpu-bind --host --ipc --kill-on-bad-exit --local_rank --nodelist --nodes --ntasks "
    "--ntasks-per-node --shm-size --time --use_cpu".split()
)


def test_every_option_is_known_to_all_that_read_options(request_of, monkeypatch):
    """The command, the request, the ``deepspeed`` runner and the launchers of other nodes."""
    default, seen = LaunchRequest("t.py"), []
    monkeypatch.setattr(launch_options, "check_request", seen.append)
    assert {f.name for f in fields(LaunchRequest)} - {"script", "args"} == set(OPTIONS) - set(
        WITHOUT_FIELD
    )
    for name, (kind, option) in OPTIONS.items():
        if name in WITHOUT_FIELD:
            continue
        assert option.help or option.hidden, name
        words = [option.names[0].partition("/")[0], *([] if kind is bool else ["7"]), "t.py"]
        request = request_of(*words)
        changed = [
            f.name for f in fields(request) if getattr(request, f.name) != getattr(default, f.name)
        ]
        assert changed == [name]
        launch_options._check(words)
        assert seen[-1] == request
        again = request_of(*passed_on(request), "t.py")
        assert again == (request if option.passed_on else default), name


def test_the_launcher_names_only_options_that_are_declared():
    """In the commands that it builds and in its messages."""
    known = {part for _, option in OPTIONS.values() for n in option.names for part in n.split("/")}
    unknown = {
        (path.name, word)
        for path in Path(zeroshard.launch.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for word in re.findall(r"(?<![\w-])--[a-z][\w-]+", node.value)
        if word not in known | OF_OTHER_PROGRAMS
    }
    assert unknown == set()


def test_patience_is_given_in_seconds(request_of):
    assert request_of("--grace-s", "1", "--stop-s", "2.5", "t.py").timeouts == ShutdownTimeouts(
        1, 2.5
    )


def test_the_exit_code_is_that_of_the_launch(monkeypatch, run):
    monkeypatch.setattr(launch_options, "launch", lambda _: 137)
    assert run("launch", "t.py").exit_code == 137


def test_an_unknown_option_is_not_given_to_the_script(run):
    assert run("launch", "--nprocs", "2", "t.py").exit_code == 2


def test_config_prints_values_and_where_they_come_from(run, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 2}}))
    output = run("config", str(path), "--world-size", "2").stdout
    rows = [line.split()[:3] for line in output.splitlines()]
    assert ["train_micro_batch_size_per_gpu", "4", "derived"] in rows
    assert ["zero_optimization.stage", "2", "file"] in rows


def test_a_wrong_config_is_an_error_without_a_traceback(run, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_siz": 8}')
    result = run("config", str(path))
    assert result.exit_code == 2
    assert 'Did you mean "train_batch_size"?' in result.stderr


def test_version_names_zeroshard_torch_and_python(run):
    words = run("version").stdout.split()
    assert words[::2] == ["zeroshard", "torch", "Python"]
