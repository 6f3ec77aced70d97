"""A process reads its rank from the environment of its launcher and joins the other ranks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
import torch.distributed as dist

from zeroshard.comm.env import (
    DataCoordinate,
    RankInfo,
    RunName,
    data_coordinate,
    rank_info_of,
    run_name,
)
from zeroshard.config.sections import TrustConfig
from zeroshard.errors import ConfigError, LaunchError
from zeroshard.watchdog.join import init_distributed
from zeroshard.watchdog.settings import WatchdogSettings

MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}
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
    ],
    ids=["nothing", "short", "torchrun", "mpi", "mpi-alone", "slurm", "slurm-shell"],
)
def test_the_rank_follows_from_the_launchers_variables(environ, rank_info):
    assert rank_info_of(environ) == rank_info


def test_each_rank_has_its_own_share_of_the_data():
    coordinates = [data_coordinate(RankInfo(rank, 4, rank % 2, 2)) for rank in range(4)]
    assert coordinates == [DataCoordinate(dp_rank, 4) for dp_rank in range(4)]


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


def test_mpi_on_one_host_needs_no_address(no_launcher):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = (
        "import torch.distributed as dist\n"
        "from zeroshard.watchdog.join import init_distributed\n"
        f"init_distributed(distributed_port={port}, verbose=False)\n"
        "print(dist.get_rank(), dist.get_world_size())\n"
        "dist.barrier(); dist.destroy_process_group()"
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2",
                 "OMPI_COMM_WORLD_LOCAL_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        )
        for rank in (0, 1)
    ]  # fmt: skip
    assert [rank.communicate(timeout=100)[0].strip() for rank in ranks] == ["0 2", "1 2"]


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
