"""Flags of the ``deepspeed`` command: the cores of ranks, and how other hosts are started."""

from __future__ import annotations

import os

import pytest
from typer.testing import CliRunner

from zeroshard.cli import launch as launch_options
from zeroshard.cli.main import main
from zeroshard.deepspeed import install
from zeroshard.errors import PLAN_COMMAND, LaunchError
from zeroshard.launch.hosts import Host
from zeroshard.launch.launch_plan import RunHere, RunNodes, RunSrun, notices, plan_launch
from zeroshard.launch.options import LAUNCHERS, LaunchRequest, passed_on
from zeroshard.launch.remote import (
    NodeCommand,
    mpirun_command,
    node_commands,
    ssh_words,
    this_launcher,
)
from zeroshard.launch.resources import (
    Cpu,
    Shares,
    bound,
    parse_core_list,
    read_cpus,
    share_cores,
    share_listed,
)

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]"}


def machine(nodes: int, cores: int, threads: int = 1) -> list[Cpu]:
    """As Linux numbers them: first a thread of every core, node by node, then the second ones."""
    total = nodes * cores
    return [
        Cpu(thread * total + core, core, core // cores)
        for thread in range(threads)
        for core in range(total)
    ]


def refusal(call, *args, **options) -> str:
    with pytest.raises(LaunchError) as caught:
        call(*args, **options)
    return str(caught.value)


# ---------------------------------------------------------------------- cores


def test_hardware_threads_of_a_core_go_to_one_rank():
    assert share_cores(machine(1, 4, threads=2), 2) == Shares(((0, 1, 4, 5), (2, 3, 6, 7)), 2)


def test_no_rank_gets_cores_of_two_numa_nodes_if_that_costs_nothing():
    assert share_cores(machine(2, 5), 4).cpus == ((0, 1), (2, 3), (5, 6), (7, 8))


def test_ranks_get_as_many_cores_as_there_are_if_nodes_differ():
    lopsided = [*machine(1, 7), Cpu(7, 7, node=1)]
    assert share_cores(lopsided, 2).cpus == ((0, 1, 2, 3), (4, 5, 6, 7))


@pytest.mark.parametrize("num_local", range(1, 13))
def test_shares_are_disjoint_and_of_one_size(num_local):
    shares = share_cores(machine(3, 4, threads=2), num_local)
    used = [cpu for share in shares.cpus for cpu in share]
    assert len(shares.cpus) == num_local and len(used) == len(set(used))
    assert {len(share) for share in shares.cpus} == {2 * shares.num_threads}
    assert shares.num_threads == 12 // num_local


def test_fewer_cores_than_ranks_is_refused():
    assert "this process may use 2 cores, which is not enough for 3 ranks" in refusal(
        share_cores, machine(1, 2, threads=2), 3
    )


def test_listed_cores_are_the_only_ones():
    shares = share_listed(machine(2, 4), [1, 2, 5, 6], 2)
    assert shares == Shares(((1, 2), (5, 6)), 2)
    assert share_listed(machine(1, 2, threads=2), [0, 1, 2, 3], 2).cpus == ((0, 2), (1, 3))


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        (
            [0, 9],
            "--bind_core_list names core 9, which this process may not use here; there are 0-3.",
        ),
        ([0, 1, 2], "--bind_core_list has 3 cores for 2 ranks, so they would not all get the same"),
        ([0], "--bind_core_list has 1 cores for 2 ranks, so they would not all get the same"),
    ],
)
def test_lists_that_cannot_be_shared_are_refused(listed, message):
    assert message in refusal(share_listed, machine(1, 4), listed, 2)


@pytest.mark.parametrize("text", ["", "a", "3-1", "1,,2", "0-3,2", "1-", "-1"])
def test_lists_that_are_none_are_refused(text):
    assert f"--bind_core_list {text!r}" in refusal(parse_core_list, text)


def test_what_linux_says_about_cores_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 3, 9})
    for path, text in {
        "cpu/cpu0/topology/thread_siblings_list": "0,2\n",
        "cpu/cpu2/topology/thread_siblings_list": "0,2\n",
        "cpu/cpu3/topology/thread_siblings_list": "1,3\n",
        "node/node0/cpulist": "0-2\n",
        "node/node1/cpulist": "3\n",
        "node/node2/cpulist": "\n",  # memory only
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert read_cpus(tmp_path) == (Cpu(0, 0, 0), Cpu(2, 0, 0), Cpu(3, 1, 1), Cpu(9, 9, 0))


def test_a_system_that_cannot_bind_says_so(monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    assert "cannot bind processes to cores" in refusal(read_cpus)


def test_the_bound_command_keeps_its_words():
    words = bound(((0, 2), (1,)), "1", ["train", "--x", "two words"])
    assert words[-5:] == ["0,2;1", "1", "train", "--x", "two words"]


# ---------------------------------------------------------------------- who starts other hosts


@pytest.fixture
def hostfile(tmp_path) -> str:
    path = tmp_path / "hosts"
    path.write_text("a slots=2\nn2 slots=2\nn1 slots=2\n")
    return str(path)


def decision(env=None, **options):
    request = LaunchRequest("t.py", **options)
    return plan_launch(request, env or {}, this_host=("a",), has_srun=True)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_starts_hosts_or_says_what_it_needs(hostfile, launcher):
    if launcher == "slurm":
        assert "SLURM_JOB_ID is not set" in refusal(decision, hostfile=hostfile, launcher=launcher)
        return
    found = decision(hostfile=hostfile, launcher=launcher)
    starter = "ssh" if launcher == "pdsh" else launcher
    assert isinstance(found, RunNodes) and (len(found.hosts), found.starter) == (3, starter)


@pytest.mark.parametrize("launcher", ["ssh", "pdsh", "openmpi"])
def test_a_launcher_changes_nothing_on_this_host_alone(launcher):
    assert decision(launcher=launcher) == RunHere(None, 1, 0, None, None, None)


def test_a_hostfile_filters_the_nodes_of_a_slurm_job(hostfile):
    found = decision(
        JOB, hostfile=hostfile, include="n2@n1", launcher="slurm", launcher_args="-v --exclusive"
    )
    assert isinstance(found, RunSrun)
    words = list(found.command)
    assert words[:2] == ["srun", "--nodes=2"] and "--nodelist=n1,n2" in words
    assert words.index("-v") < words.index("--exclusive") < words.index("-m")
    assert words[words.index("--master_addr") + 1] == "n1"  # where SLURM puts node 0
    assert words[words.index("--nproc") + 1] == "2"


def test_force_multi_gives_a_single_host_a_launcher_of_its_own(hostfile):
    found = decision(hostfile=hostfile, include="a", force_multi=True)
    assert found == RunNodes((Host("a", (0, 1)),), 29500)
    assert isinstance(decision(JOB | {"SLURM_JOB_NODELIST": "n1"}, force_multi=True), RunSrun)


@pytest.mark.parametrize(
    ("options", "env", "message"),
    [
        ({"launcher": "pdhs"}, {}, "--launcher 'pdhs' is unknown. Use one of ssh, pdsh, slurm"),
        ({"launcher": "ssh", "no_ssh": True}, {}, "--launcher and --no_ssh cannot be given together"),
        ({"force_multi": True, "no_ssh": True}, {}, "--force_multi and --no_ssh cannot be given"),
        ({"force_multi": True}, {}, "no hosts are given. Give --hostfile."),
        ({"launcher": "impi", "ssh_port": 22}, {},
            "--ssh_port cannot be used with --launcher impi"),
        ({"launcher_args": "-f 9"}, {}, "'-f 9' with no --launcher: hosts are reached over ssh"),
        ({"launcher": "pdsh", "launcher_args": "-f 9"}, {}, "with --launcher pdsh: hosts are"),
        ({"launcher": "ssh", "launcher_args": "'a"}, {}, "cannot be split into words: No closing"),
        ({"venv_script": "v/activate"}, {}, "activate the environment before this command"),
        ({"launcher": "ssh"}, JOB, "--launcher ssh in a SLURM job of 3 nodes needs --hostfile"),
        ({"save_pid": True}, JOB, "--save_pid: this command becomes srun, mpirun or a rank"),
        (
            {"bind_core_list": "0"},
            JOB | {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "6"},
            "SLURM or MPI started one process per rank, and binds them itself",
        ),
        (
            {"force_multi": True},
            JOB | {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "3"},
            "--force_multi inside a SLURM step",
        ),
    ],
)  # fmt: skip
def test_flags_that_cannot_be_followed_say_why(options, env, message):
    assert message in refusal(decision, env, **options)


def test_a_hostfile_of_another_job_is_refused(hostfile):
    said = refusal(decision, JOB, hostfile=hostfile, launcher="slurm")
    assert "--hostfile names 'a', which is not a node of the SLURM job (n1, n2, n3)" in said


def test_a_pid_file_needs_a_launcher_that_stays(hostfile):
    assert decision(hostfile=hostfile, save_pid=True).starter == "ssh"
    assert "--save_pid" in refusal(decision, hostfile=hostfile, launcher="mpich", save_pid=True)


def said(**options) -> tuple[str, ...]:
    request = LaunchRequest("t.py", **options)
    return notices(request, plan_launch(request, {}, this_host=("a",), has_srun=False))


def test_what_is_not_used_is_said(hostfile):
    (line,) = said(hostfile=hostfile, launcher="pdsh")
    assert line == "--launcher pdsh: hosts are reached over ssh, and pdsh is not used."
    (line,) = said(launcher="ssh", launcher_args="-v")
    assert "--launcher_args has no effect" in line
    (line,) = said(args=("--nproc=2", "--lr", "1"))
    assert line.startswith("--nproc=2 stands after the script, so the script gets it.")
    assert said(args=("--lr", "1")) == ()
    assert said(hostfile=hostfile, launcher="ssh", launcher_args="-v") == said() == ()


def test_nodes_bind_their_ranks_and_leave_no_pid_files():
    request = LaunchRequest("t.py", bind_cores=True, bind_core_list="0-3", save_pid=True)
    assert passed_on(request) == ["--bind_cores_to_rank", "--bind_core_list", "0-3"]


# ---------------------------------------------------------------------- their command lines


def nodes(**changes) -> tuple[NodeCommand, ...]:
    options = {
        "launcher": ["launcher"], "master_addr": None, "master_port": 29500, "options": [],
        "program": ["t.py"], "env": {"X": "1"}, "this_host": ("a",), "flags": (), **changes,
    }  # fmt: skip
    return node_commands((Host("a", (0, 1)), Host("b", (3,))), **options)


def sections(line: list[str]) -> list[list[str]]:
    """The words between the colons."""
    found: list[list[str]] = [[]]
    for word in line:
        if word == ":":
            found.append([])
        else:
            found[-1].append(word)
    return found


def test_open_mpi_starts_one_unbound_launcher_on_each_host():
    first, second = sections(mpirun_command("openmpi", nodes(), ["--oversubscribe"], ["X"]))
    assert first[:6] == ["mpirun", "--bind-to", "none", "-x", "X", "--oversubscribe"]
    assert first[6:12] == ["-n", "1", "--host", "a", "env", "launcher"]
    assert second[:4] == ["-n", "1", "--host", "b"]
    assert second[4:6] == ["env", "CUDA_VISIBLE_DEVICES=3"]
    assert second[second.index("--node_rank") + 1] == "1" and second[-1] == "t.py"


@pytest.mark.parametrize(
    ("kind", "free"),
    [
        ("mpich", ["-bind-to", "none"]),
        ("impi", ["-genv", "I_MPI_PIN", "0"]),
        ("mvapich", ["-bind-to", "none"]),
    ],
)
def test_hydra_starts_one_unbound_launcher_on_each_host(kind, free):
    first, second = sections(mpirun_command(kind, nodes()))
    assert first[:5] == ["mpirun", "-hosts", "a,b", "-ppn", "1"]
    assert first[5 : 5 + len(free)] == free
    assert second[:3] == ["-n", "1", "env"]


def test_words_for_ssh_stand_before_the_host():
    assert ssh_words(2222, ["-i", "key"])[-4:] == ["-i", "key", "-p", "2222"]


def test_a_script_is_read_first_and_brings_its_python(tmp_path):
    words = this_launcher(str(tmp_path / "activate"))
    assert words[:2] == ["bash", "-c"] and words[3] == str(tmp_path / "activate")
    assert words[4:] == ["python", "-m", "zeroshard.launch"]


# ---------------------------------------------------------------------- the command line


@pytest.fixture
def request_of(monkeypatch):
    seen: list[LaunchRequest] = []
    monkeypatch.setattr(launch_options, "launch", lambda r: seen.append(r) or 0)

    def parse(*words: str) -> LaunchRequest:
        result = CliRunner().invoke(main, ["launch", *words])
        assert result.exit_code == 0, result.output
        return seen[-1]

    return parse


def test_flags_of_the_deepspeed_command_keep_their_names(request_of):
    words = (
        "--force_multi --launcher openmpi --no_ssh_check --venv_script v --save_pid "
        "--bind_cores_to_rank --bind_core_list 0-3 --hostfile h"
    )
    assert request_of(*words.split(), "--launcher_args", "-x A -x B", "t.py") == LaunchRequest(
        script="t.py",
        hostfile="h",
        force_multi=True,
        launcher="openmpi",
        launcher_args="-x A -x B",
        venv_script="v",
        save_pid=True,
        bind_cores=True,
        bind_core_list="0-3",
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "ds.json"], "it is an option of the program, and stands after it"),
        (["--deepspeed", "ds.json"], "The launcher reads no configuration."),
        (["--autotuning", "run"], "sizes are derived from the model"),
        (["--autotuning", "tune"], f"run: {PLAN_COMMAND}. Leave --autotuning out."),
        (["--elastic_training"], "checkpoints load at any world size"),
        (["--max_elastic_nodes", "4"], "checkpoints load at any world size"),
        (["--save_pids"], "--save_pid"),
        (["--lancher", "pdsh"], "--launcher"),
    ],
)
def test_flags_that_are_not_there_are_named_with_a_reason_or_a_neighbour(words, message):
    result = CliRunner().invoke(main, ["launch", *words, "t.py"])
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(("words", "passes"), [([], True), (["--no_local_rank"], False)])
def test_the_deepspeed_command_becomes_our_launcher(monkeypatch, request_of, words, passes):
    ran: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, line: ran.append(line))
    install.main([*words, "t.py", "--no_local_rank"])
    line = ran[0][ran[0].index("launch") + 1 :]
    request = request_of(*line)
    assert request.pass_local_rank is passes and request.as_deepspeed
    assert request.args == ("--no_local_rank",)
