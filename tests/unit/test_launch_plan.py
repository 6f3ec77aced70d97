"""Which process starts which rank, the commands for other hosts, and the environment of ranks."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from zeroshard.errors import LaunchError
from zeroshard.launch.hosts import Host
from zeroshard.launch.launch_plan import ExecAsRank, RunHere, RunNodes, plan_launch
from zeroshard.launch.launcher import launch
from zeroshard.launch.options import LaunchRequest
from zeroshard.launch.rank_env import (
    check_secret,
    exported,
    new_secret,
    rank_defaults,
)
from zeroshard.launch.remote import mpirun_command, names_of_this_host, node_commands, ssh_words
from zeroshard.run.run_folder import variables_of_behaviour


@pytest.fixture
def hostfile(tmp_path) -> str:
    path = tmp_path / "hosts"
    path.write_text("a slots=4\nb slots=2\n")
    return str(path)


def decision(**options):
    return plan_launch(LaunchRequest("t.py", **options), {}, this_host=("a",), has_srun=False)


def refusal(**options) -> str:
    with pytest.raises(LaunchError) as caught:
        decision(**options)
    return str(caught.value)


def test_nothing_said_means_this_node_with_a_free_port():
    assert decision() == RunHere(None, 1, 0, None, None, None)


def test_include_without_hostfile_chooses_devices():
    assert decision(include="localhost:1,3") == RunHere(2, 1, 0, None, None, "1,3")


def test_a_hostfile_of_several_hosts_starts_a_launcher_on_each(hostfile):
    hosts = (Host("a", (0, 1, 2, 3)), Host("b", (0, 1)))
    assert decision(hostfile=hostfile) == RunNodes(hosts, 29500)


def test_a_hostfile_reduced_to_this_host_runs_here(hostfile):
    assert decision(hostfile=hostfile, include="a:2,3") == RunHere(2, 1, 0, None, None, "2,3")


def test_a_hostfile_reduced_to_another_host_still_needs_ssh(hostfile):
    assert decision(hostfile=hostfile, include="b") == RunNodes((Host("b", (0, 1)),), 29500)


def test_no_ssh_runs_the_named_node_of_a_hostfile(hostfile):
    chosen = decision(hostfile=hostfile, no_ssh=True, node_rank=1)
    assert chosen == RunHere(2, 2, 1, "a", 29500, None)


def test_no_ssh_without_hostfile_runs_the_named_node():
    chosen = decision(no_ssh=True, num_nodes=3, node_rank=2, master_addr="h", nproc=8)
    assert chosen == RunHere(8, 3, 2, "h", 29500, None)


MPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in
       {"RANK": "2", "SIZE": "3", "LOCAL_RANK": "2", "LOCAL_SIZE": "3"}.items()}  # fmt: skip


def under_mpirun(**options):
    request = LaunchRequest("t.py", **options.pop("options", {}))
    return plan_launch(request, MPI | options, this_host=("a",), has_srun=False)


def test_a_process_of_mpirun_becomes_a_rank():
    chosen = under_mpirun()
    assert isinstance(chosen, ExecAsRank)
    assert dict(chosen.env) == {
        **{"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
    }
    assert isinstance(under_mpirun(options={"no_ssh": True}), RunHere)
    assert isinstance(under_mpirun(OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="1"), RunHere)


def test_a_process_of_mpirun_that_cannot_become_a_rank_says_why():
    with pytest.raises(LaunchError, match="--nproc 2 cannot be used"):
        under_mpirun(options={"nproc": 2})
    with pytest.raises(LaunchError, match="2 of them on this host, and MASTER_ADDR is not set"):
        under_mpirun(OMPI_COMM_WORLD_LOCAL_SIZE="2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"module": True, "no_python": True},
            "--module and --no_python cannot be given together; keep one of them.",
        ),
        (
            {"include": "a", "exclude": "b"},
            "--include and --exclude cannot be given together; keep one of them.",
        ),
        (
            {"include": "localhost:0", "nproc": 2},
            "--include already says which slots are used; "
            "it cannot be given with --nproc/--num_gpus.",
        ),
        ({"nproc": 0}, "--nproc/--num_gpus is 0; it must be at least 1."),
        (
            {"exclude": "localhost:0"},
            "--exclude needs --hostfile. Without a hostfile, choose devices with --include.",
        ),
        (
            {"include": "other:0"},
            "--include names host 'other', which is not among the hosts (localhost).",
        ),
        (
            {"num_nodes": 2},
            "--num_nodes 2 needs --hostfile, or --no_ssh --node_rank R on each node.",
        ),
        (
            {"node_rank": 1},
            "--node_rank 1 is for one launcher per node; give --no_ssh with it.",
        ),
        (
            {"no_ssh": True, "num_nodes": 2},
            "--no_ssh with several nodes needs --node_rank, this node's number.",
        ),
        (
            {"no_ssh": True, "num_nodes": 2, "node_rank": 2, "master_addr": "a"},
            "--node_rank 2 is outside of 0..1.",
        ),
        (
            {"no_ssh": True, "num_nodes": 2, "node_rank": 0},
            "--no_ssh with several nodes needs --master_addr, the address of node 0.",
        ),
        ({"master_port": 70000}, "--master_port is 70000; it must lie between 1 and 65535."),
        (
            {"hostfile": "/nowhere/hosts"},
            "--hostfile '/nowhere/hosts' cannot be read: No such file or directory. It must "
            "contain lines 'host slots=N'.",
        ),
    ],
)
def test_options_that_cannot_work_say_why(options, message):
    assert refusal(**options) == message


def commands(**changes):
    options = {
        "launcher": ["py", "-m", "zeroshard.launch"],
        "master_addr": None,
        "master_port": 29500,
        "options": ["--module"],
        "program": ["pkg.train", "--name", "two words; $HOME"],
        "env": {
            **{"NCCL_DEBUG": "INFO", "SERVICE": "https://me:pass@host", "API_KEY": "abc"},
            "ZEROSHARD_SECRET": "abcabcabcabcabcabc",
        },
        "this_host": ("b",),
        **changes,
    }
    hosts = options.pop("hosts", (Host("a", (1, 3)), Host("b", (0, 1))))
    return node_commands(hosts, **options)


def test_each_node_gets_its_rank_and_number_of_slots():
    assert commands()[1].argv == (
        *("py", "-m", "zeroshard.launch", "--no_ssh", "--leash"),
        *("--num_nodes", "2", "--node_rank", "1", "--nproc", "2"),
        *("--master_addr", "a", "--master_port", "29500", "--module"),
        *("--", "pkg.train", "--name", "two words; $HOME"),
    )


def test_the_host_we_are_on_is_not_reached_by_ssh():
    argv = commands()[1].process_argv(cwd="/w", ssh=ssh_words(None))
    assert argv[0] == "py"


def test_another_host_is_reached_by_one_quoted_shell_line():
    argv = commands()[0].process_argv(cwd="/my work", ssh=ssh_words(2222))
    assert argv[:-1] == ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-p", "2222", "a"]
    assert argv[-1] == (
        "cd '/my work' && exec env NCCL_DEBUG=INFO CUDA_VISIBLE_DEVICES=1,3 "
        "py -m zeroshard.launch --no_ssh --leash --num_nodes 2 --node_rank 0 --nproc 2 "
        "--master_addr a --master_port 29500 --module -- pkg.train --name 'two words; $HOME'"
    )


def test_no_command_holds_a_variable_that_may_be_secret():
    for kind in ("openmpi", "mpich"):
        line = mpirun_command(kind, commands(), (), ["SERVICE", "API_KEY"])
        assert "pass" not in " ".join(line) and "abc" not in " ".join(line)
        assert ("SERVICE" in line) is (kind == "openmpi")


def test_each_run_has_a_secret_of_its_own_unless_the_user_gives_one():
    made = [new_secret({})["ZEROSHARD_SECRET"] for _ in range(2)]
    assert made[0] != made[1] and len(made[0]) == 64
    given = {"ZEROSHARD_SECRET": "sixteen letters."}
    assert new_secret(given) == given and check_secret(given) == "sixteen letters."
    assert check_secret({}) == ""
    with pytest.raises(LaunchError, match="has 8 characters, which others can guess"):
        check_secret({"ZEROSHARD_SECRET": "password"})


def test_a_single_host_is_given_no_address_that_others_reach():
    (alone,) = commands(hosts=(Host("b", (0, 1)),))
    assert "--master_addr" not in alone.argv
    (asked,) = commands(hosts=(Host("b", (0, 1)),), master_addr="10.0.0.1")
    assert asked.argv[asked.argv.index("--master_addr") + 1] == "10.0.0.1"


def test_a_host_is_ours_under_its_short_and_its_full_name():
    assert names_of_this_host("n1.cluster", "n1.cluster.org") == (
        "n1.cluster",
        "n1.cluster.org",
        "n1",
    )


def test_cores_are_divided_among_the_local_ranks():
    env = rank_defaults({}, cores=16, num_local=5, run_id="r")
    assert env["OMP_NUM_THREADS"] == "3"


def test_more_ranks_than_cores_still_get_a_thread():
    assert rank_defaults({}, cores=2, num_local=8, run_id="r")["OMP_NUM_THREADS"] == "1"


def test_a_restarted_rank_never_reads_the_store_of_a_dead_attempt():
    env = rank_defaults({}, cores=1, num_local=1, run_id="r")
    assert (env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"], env["PYTHONFAULTHANDLER"]) == ("1", "1")


def test_what_the_user_exported_wins():
    mine = {"OMP_NUM_THREADS": "7", "PYTHONFAULTHANDLER": "0", "ZEROSHARD_RUN_ID": "mine"}
    assert not mine.keys() & rank_defaults(mine, cores=4, num_local=2, run_id="r").keys()


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_allocator_gets_settings_only_if_it_has_none(name):
    default = rank_defaults({}, cores=1, num_local=1, run_id="r")
    assert default["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    mine = rank_defaults({name: "backend:native"}, cores=1, num_local=1, run_id="r")
    assert not {key for key in mine if key.startswith("PYTORCH_")}


def test_settings_of_torch_reach_other_hosts():
    assert exported({"PYTORCH_ALLOC_CONF": "x"}) == {"PYTORCH_ALLOC_CONF": "x"}


def test_only_variables_that_concern_training_travel_to_other_hosts():
    env = {"NCCL_DEBUG": "INFO", "HOME": "/h", "PYTHONPATH": "/p", "AWS_SECRET": "x", "RANK": "0"}
    assert exported(env) == {"NCCL_DEBUG": "INFO", "PYTHONPATH": "/p"}


def test_the_command_line_does_not_import_torch():
    code = "import sys, zeroshard.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0


def test_a_launcher_whose_master_has_no_address_ends_at_once(tmp_path, monkeypatch):
    def unknown(*_):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    (tmp_path / "t.py").touch()
    request = LaunchRequest(
        str(tmp_path / "t.py"),
        no_ssh=True,
        num_nodes=2,
        node_rank=1,
        master_addr="nowhere",
        nproc=1,
    )
    with pytest.raises(LaunchError, match="meet at host 'nowhere', port 29500, and this name"):
        launch(request)


def test_what_is_recorded_of_the_environment_has_no_secrets():
    env = {
        "ZEROSHARD_PASS": "a",
        "TORCH_DB_PASS_FILE": "b",
        "NCCL_PASSWD": "c",
        "TORCH_PROXY": "http://me:secret@host:8080/x",
        "NCCL_PASSES": "3",
        "NCCL_DEBUG": "INFO",
        "HOME": "/h",
    }
    assert variables_of_behaviour(env) == {
        "NCCL_DEBUG": "INFO",
        "NCCL_PASSES": "3",
        "NCCL_PASSWD": "(hidden)",
        "TORCH_DB_PASS_FILE": "(hidden)",
        "TORCH_PROXY": "http://***@host:8080/x",
        "ZEROSHARD_PASS": "(hidden)",
    }
