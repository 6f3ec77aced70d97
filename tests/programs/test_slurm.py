"""Jobs of a real Slurm cluster: two nodes on this host, each with a ``slurmd`` of its own.

They need root, and the packages slurm-wlm and munge of Debian.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

DAEMONS = ("munged", "slurmctld", "slurmd", "srun", "salloc")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, DAEMONS)),
        reason="Slurm and munge are not installed, or this is not root",
    ),
]

CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
SlurmctldPidFile={folder}/control.pid
SlurmctldLogFile={folder}/control.log
SlurmdLogFile={folder}/%n.log
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=all Nodes=n0,n1 Default=YES State=UP
"""
PROGRAM = """
import torch, zeroshard

engine, *_ = zeroshard.initialize(
    model=torch.nn.Linear(4, 4),
    config={
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 3},
    },
)
loss = engine(torch.ones(1, 4)).sum()
engine.backward(loss)
engine.step()
print(f"rank {engine.global_rank} of {engine.world_size} ended", flush=True)
engine.close()
"""
LAUNCH = [sys.executable, "-m", "zeroshard.launch", "--master_addr", "127.0.0.2"]
JOBS = {
    "srun python": ["srun", "-N2", "--ntasks-per-node=1", sys.executable, "train.py"],
    "one launcher on each node": ["srun", "-N2", "--ntasks-per-node=1", *LAUNCH, "train.py"],
    "salloc and one launcher": ["salloc", "-N2", "--ntasks-per-node=1", *LAUNCH, "train.py"],
}


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def start_munge() -> None:
    """Let ``munged`` run, as Debian's service does."""
    if subprocess.run(["munge", "-n"], capture_output=True, check=False).returncode == 0:
        return
    Path("/run/munge").mkdir(exist_ok=True)
    shutil.chown("/run/munge", "munge", "munge")
    subprocess.run(["runuser", "-u", "munge", "--", shutil.which("munged"), "--force"], check=True)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[dict[str, str]]:
    """The environment of jobs. Nodes have names without addresses, so the first one's is given."""
    folder = tmp_path_factory.mktemp("slurm")
    start_munge()
    file = folder / "slurm.conf"
    host = socket.gethostname().partition(".")[0]
    file.write_text(CONFIG.format(host=host, folder=folder, ports=free_ports(3)))
    env = {
        **os.environ, "SLURM_CONF": str(file), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1",
        "ZEROSHARD_SECRET": "of this test, and of no other",
    }  # fmt: skip
    commands = [["slurmctld", "-D"], ["slurmd", "-D", "-N", "n0"], ["slurmd", "-D", "-N", "n1"]]
    daemons = [
        subprocess.Popen(each, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for each in commands
    ]
    try:
        deadline_s = time.monotonic() + 60
        while subprocess.check_output(["sinfo", "-h", "-o", "%D%T"], env=env).split() != [b"2idle"]:
            assert time.monotonic() < deadline_s, (folder / "control.log").read_text()[-2000:]
            time.sleep(0.5)
        yield env
    finally:
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in daemons:
            daemon.wait(30)


@pytest.mark.parametrize("job", JOBS)
def test_a_job_of_two_nodes_is_one_run(job, cluster, tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    done = subprocess.run(
        JOBS[job],
        cwd=tmp_path,
        env=cluster,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.endswith("ended")]
    assert sorted(lines) == ["rank 0 of 2 ended", "rank 1 of 2 ended"], done.stdout + done.stderr
