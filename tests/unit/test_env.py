"""A process reads its rank from the environment of its launcher and joins the other ranks."""

from __future__ import annotations

import os
import socket
import sys

import pytest
import torch.distributed as dist
import warm_python

from zeroshard.comm.env import (
    RankInfo,
    RunName,
    meeting_place,
    rank_info_of,
    run_name,
)
from zeroshard.config.sections import TrustConfig
from zeroshard.errors import ConfigError, LaunchError
from zeroshard.run.address import unused_port
from zeroshard.session.join import init_distributed
from zeroshard.watchdog.settings import WatchdogSettings

MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}
STEP = {**SLURM, "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NODEID": "1"}
NODES = {"SLURM_STEP_NODELIST": "n[1-3]", "SLURM_STEP_TASKS_PER_NODE": "4,2(x2)"}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
RENDEZVOUS = {"MASTER_ADDR": "node0"}


@pytest.mark.parametrize(
    ("environ", "rank_info"),
    [
        ({}, RankInfo(0, 1, 0, 1, "none")),
        ({"RANK": "1", "WORLD_SIZE": "2"}, RankInfo(1, 2, 0, 1, "torchrun")),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            RankInfo(1, 2, 1, 2, "torchrun"),
        ),
        ({**MPI, **RENDEZVOUS}, RankInfo(3, 4, 1, 2, "mpi")),
        (
            MPI,
            RankInfo(3, 4, 1, 2, "mpi"),
        ),  # with several hosts an address is needed, but this variable is not
        ({**SLURM, **RENDEZVOUS}, RankInfo(5, 8, 1, 1, "slurm")),
        (SLURM, RankInfo(0, 1, 0, 1, "none")),  # an interactive shell
        ({**STEP, **NODES}, RankInfo(5, 8, 1, 2, "slurm")),
        ({**STEP, "SLURM_STEP_ID": "4294967291"}, RankInfo(0, 1, 0, 1, "none")),  # sbatch's script
        ({**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, RankInfo(0, 1, 1, 1, "slurm")),
        (HYDRA, RankInfo(3, 4, 1, 2, "mpi")),
        ({**STEP, **NODES, "PMI_RANK": "5", "PMI_SIZE": "8"}, RankInfo(5, 8, 1, 2, "slurm")),
        (
            {**STEP, **NODES, **MPI},
            RankInfo(3, 4, 1, 2, "mpi"),
        ),  # srun has started mpirun's servers
        ({**STEP, **HYDRA}, RankInfo(3, 4, 1, 2, "mpi")),
    ],
    ids=[
        *(
            "nothing",
            "short",
            "torchrun",
            "mpi",
            "mpi-alone",
            "slurm",
            "slurm-shell",
            "srun",
            "sbatch",
        ),
        *("srun-of-one-task", "hydra", "srun-with-pmi", "mpirun-in-a-job", "hydra-in-a-job"),
    ],
)
def test_the_rank_follows_from_the_launchers_variables(environ, rank_info):
    assert rank_info_of(environ) == rank_info


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "PMI_RANK is 0 of 2, and PMI_LOCAL_RANK is not set"),
        ({"PMIX_RANK": "0"}, "PMIX_RANK is 0 but PMIX_SIZE is not set"),
    ],
)
def test_a_rank_that_cannot_be_joined_does_not_train_alone(environ, words):
    with pytest.raises(LaunchError, match=words):
        rank_info_of(environ)


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({**STEP, **NODES}, ("n1", 20007)),
        ({**STEP, **NODES, "SLURM_STEP_ID": "2"}, ("n1", 22001)),  # another step, another port
        ({**STEP, "SLURM_STEP_NODELIST": "n2"}, ("127.0.0.1", 20007)),
        ({**STEP, **NODES, **RENDEZVOUS, "MASTER_PORT": "5"}, ("node0", 5)),
        (MPI, ("127.0.0.1", 29500)),
    ],
)
def test_tasks_of_a_step_meet_at_its_first_node(environ, place):
    assert meeting_place(29500, environ) == place


def test_a_host_without_an_address_ends_the_start_and_is_named(no_launcher, monkeypatch):
    def unknown(*_):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "nowhere.x"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=r"meet at host 'nowhere\.x', port 29500, and this name"):
        init_distributed(verbose=False)


def test_rank_0_of_the_run_is_the_main_rank():
    ranks = [RankInfo(rank, 4, rank % 2, 2) for rank in range(4)]
    assert [rank_info.is_main_rank for rank_info in ranks] == [True, False, False, False]


def test_mpi_is_not_looked_for_when_told_so():
    assert rank_info_of({**MPI, **RENDEZVOUS}, mpi=False) == RankInfo()


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "1"}, "WORLD_SIZE is not set"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "ranks go from 0 to 1"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "'x', which is not a whole number"),
    ],
    ids=["no-world", "outside", "no-number"],
)
def test_a_broken_environment_is_refused_in_words(environ, words):
    with pytest.raises(LaunchError, match=words):
        rank_info_of(environ)


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, RunName("", 0)),
        ({"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "2"}, RunName("", 2)),
        ({"TORCHELASTIC_RUN_ID": "a", "ZEROSHARD_RUN_ID": "b"}, RunName("b", 0)),
    ],
    ids=["nothing", "torchrun", "ours"],
)
def test_run_and_attempt_are_the_launchers(environ, name):
    assert run_name(environ) == name


@pytest.fixture
def no_launcher(monkeypatch):
    for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(key, raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_without_a_launcher_the_process_is_its_own_only_rank(no_launcher):
    assert init_distributed(verbose=False) == RankInfo()
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)


def test_mpi_on_several_hosts_has_to_say_where_rank_0_is(no_launcher, monkeypatch):
    for key, value in MPI.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(LaunchError, match="2 of them on this host, and MASTER_ADDR"):
        init_distributed(verbose=False)


@pytest.mark.parametrize("launcher", ["mpi", "srun"])
def test_ranks_on_one_host_need_no_address(no_launcher, launcher, tmp_path):
    port = unused_port()
    program = (
        "import torch.distributed as dist\n"
        "from zeroshard.session.join import init_distributed\n"
        f"init_distributed(distributed_port={port}, verbose=False)\n"
        "print(dist.get_rank(), dist.get_world_size())\n"
        "dist.barrier(); dist.destroy_process_group()"
    )
    of_rank = {
        "mpi": lambda rank: {
            "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        },
        "srun": lambda rank: {
            "SLURM_JOB_ID": str(port), "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n1",
            "SLURM_NTASKS": "2", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank),
        },
    }  # fmt: skip
    ranks = [
        warm_python.WarmPython(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            env={**os.environ, **of_rank[launcher](rank)},
        )
        for rank in (0, 1)
    ]
    try:
        assert [rank.communicate(timeout=100)[0].strip() for rank in ranks] == ["0 2", "1 2"]
    finally:
        for rank in ranks:
            rank.close()


def test_an_initialised_group_is_left_as_it_is(no_launcher):
    init_distributed(verbose=False)
    group = dist.group.WORLD
    assert init_distributed(verbose=False).world_size == 1
    assert dist.group.WORLD is group


def test_a_group_that_must_exist_is_not_made(no_launcher):
    with pytest.raises(LaunchError, match="dist_init_required is False"):
        init_distributed(dist_init_required=False)


def test_trust_settings_come_from_the_config_and_the_environment():
    config = TrustConfig.model_validate({"frozen_s": 30, "watchdog": True})
    environ = {"ZEROSHARD_STALL_S": "3", "ZEROSHARD_WATCHDOG": "0", "ZEROSHARD_DUMP_DIR": "/d"}
    settings = WatchdogSettings.from_config(config).with_environment(environ)
    assert (settings.frozen_s, settings.watchdog, settings.dump_dir) == (30, False, "/d")
    assert settings.report_s() == 3
    assert settings.tick_s == 0.5


@pytest.mark.parametrize(("median_s", "first_s"), [(0.0, 20.0), (3.0, 30.0), (60.0, 45.0)])
def test_the_first_report_follows_the_pace_of_the_run(median_s, first_s):
    assert WatchdogSettings().report_s(median_s) == first_s


@pytest.mark.parametrize("text", ["soon", "-1"])
def test_a_stall_limit_that_is_no_time_is_refused(text):
    with pytest.raises(ConfigError, match="ZEROSHARD_STALL_S is"):
        WatchdogSettings().with_environment({"ZEROSHARD_STALL_S": text})
