"""The ``deepspeed`` command lines that Accelerate builds for several machines."""

from __future__ import annotations

import os

import pytest
from typer.testing import CliRunner

from zeroshard.cli import launch as launch_options
from zeroshard.cli.main import main
from zeroshard.deepspeed import install
from zeroshard.deepspeed.install import DIRECTORY
from zeroshard.errors import LaunchError
from zeroshard.launch.launch_plan import RunHere, RunNodes, RunSrun, plan_launch

pytest.importorskip("accelerate")


@pytest.fixture
def hostfile(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("n1 slots=8\nn2 slots=8\n")
    return str(path)


@pytest.fixture
def request_of(monkeypatch, hostfile):
    """The launch request for ``accelerate launch WORDS train.py --x`` on two machines."""
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    monkeypatch.syspath_prepend(str(DIRECTORY))  # it asks for the version of deepspeed

    def parse(*words: str):
        args = launch_command_parser().parse_args([
            "--use_deepspeed", "--num_machines", "2", "--num_processes", "8", "--machine_rank", "1",
            "--mixed_precision", "no", "--main_process_ip", "n1", "--main_process_port", "29717",
            "--deepspeed_hostfile", hostfile, *words, "train.py", "--x",
        ])  # fmt: skip
        args.deepspeed_fields_from_accelerate_config = ""
        built, _ = prepare_deepspeed_cmd_env(args)
        assert built[0] == "deepspeed"
        lines: list[list[str]] = []
        seen = []
        monkeypatch.setattr(os, "execv", lambda _, line: lines.append(line))
        monkeypatch.setattr(launch_options, "launch", lambda request: seen.append(request) or 0)
        install.main(built[1:])
        result = CliRunner().invoke(main, lines[0][lines[0].index("launch") :])
        assert result.exit_code == 0, result.output
        return seen[0]

    return parse


def decided(request, **env):
    return plan_launch(request, env, this_host=("n1",), has_srun=True)


@pytest.mark.parametrize("launcher", ["pdsh", "openmpi", "mvapich", "mpich"])
def test_hosts_are_started_with_what_was_asked_for(request_of, launcher):
    request = request_of("--deepspeed_multinode_launcher", launcher)
    found = decided(request)
    assert isinstance(found, RunNodes) and found.master_port == 29717
    assert [(host.name, len(host.slots)) for host in found.hosts] == [("n1", 4), ("n2", 4)]
    assert found.starter == ("ssh" if launcher == "pdsh" else launcher)
    assert (request.script, request.args, request.master_addr) == ("train.py", ("--x",), "n1")
    assert not request.pass_local_rank


def test_pdsh_is_what_accelerate_takes_by_itself(request_of):
    assert request_of().launcher == "pdsh"


def test_one_command_per_machine_without_ssh(request_of):
    request = request_of("--deepspeed_multinode_launcher", "nossh")
    assert decided(request) == RunHere(4, 2, 1, "n1", 29717, None)
    assert request.pass_local_rank


def test_slurm_starts_the_nodes_of_its_job(request_of):
    request = request_of("--deepspeed_multinode_launcher", "slurm")
    found = decided(request, SLURM_JOB_ID="7", SLURM_JOB_NODELIST="n[1-2]")
    assert isinstance(found, RunSrun) and found.command[:2] == ("srun", "--nodes=2")
    with pytest.raises(LaunchError, match="not a SLURM job"):
        decided(request)


@pytest.mark.parametrize(
    ("words", "slots"),
    [
        (("--deepspeed_inclusion_filter", "n1:0,1@n2:3"), [2, 1]),
        (("--deepspeed_exclusion_filter", "n2:0"), [8, 7]),
    ],
)
def test_filters_and_modules_pass(request_of, words, slots):
    request = request_of(*words, "--module")
    assert request.module and [len(host.slots) for host in decided(request).hosts] == slots
