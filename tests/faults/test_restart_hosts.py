"""Runs of several hosts start again, without a host that is lost: over ssh, with srun, and with --no_ssh.

The hosts are addresses of this machine. ``ssh`` and ``srun`` are programs that run their command here,
and fail for a host whose file ``down-HOST`` exists.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.covering import sampled
from warm_python import WarmPython, run

from zeroshard.run.address import unused_port

pytestmark = pytest.mark.timeout(120)

A, B = "127.0.0.2", "127.0.0.3"
LAUNCH = """
import runpy
from zeroshard.launch import meeting, restart

restart.FIRST_WAIT_S = 0.2  # seconds; five of a user's
meeting.BEAT_S, meeting.GONE_S = 0.2, 3.0
runpy.run_module("zeroshard.launch", run_name="__main__", alter_sys=True)
"""
# Every attempt saves a "checkpoint". In attempt 0, when all ranks have begun, rank LOST_RANK is lost, and
# so are the hosts that DOWN names.
PROGRAM = """
import os, pathlib, time
names = ("RANK", "WORLD_SIZE", "CROSS_SIZE", "MASTER_ADDR", "MASTER_PORT", "ZEROSHARD_RUN_ID")
rank, world, hosts, address, port, run = (os.environ[n] for n in names)
assert address == "127.0.0.1", "the store on this host, or the relay to it"
address = os.environ.get("ZEROSHARD_MASTER_ADDR", address)
attempt = os.environ["ZEROSHARD_ATTEMPT"]
print("attempt", attempt, "rank", rank, "of", world, "hosts", hosts, "at", address, port, run, flush=True)
folder = pathlib.Path(os.environ["HERE"])
pathlib.Path(os.environ["ZEROSHARD_CHECKPOINT_DIR"]).mkdir(exist_ok=True)
if attempt == "0":
    deadline = time.monotonic() + 60
    (folder / f"begun-{rank}").touch()
    if rank == "0":
        (folder / "ckpt" / "latest").write_text("step-1")
    if rank == os.environ["LOST_RANK"]:
        while len([*folder.glob("begun-*")]) < int(world) and time.monotonic() < deadline:
            time.sleep(0.02)
        for name in filter(None, os.environ["DOWN"].split(",")):
            (folder / f"down-{name}").touch()
        raise SystemExit("lost")
    while time.monotonic() < deadline: time.sleep(0.05)
"""


@pytest.fixture
def env(tmp_path) -> dict[str, str]:
    programs = tmp_path / "bin"
    programs.mkdir()
    down = f'[ -e "{tmp_path}/down-$host" ] && exit 255\n'
    (programs / "ssh").write_text(
        '#!/bin/sh\nwhile [ "$1" = -o ]; do shift 2; done\nhost=$1\n'
        + down
        + 'shift\nexec sh -c "$1"\n'
    )
    (programs / "srun").write_text(SRUN.format(python=sys.executable, folder=tmp_path))
    for program in programs.iterdir():
        program.chmod(0o755)
    (tmp_path / "hosts").write_text(f"{A} slots=1\n{B} slots=2\n")
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "launch.py").write_text(LAUNCH)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "ZEROSHARD_"))}
    path = f"{programs}{os.pathsep}{clean['PATH']}"
    return {**clean, "PATH": path, "HERE": str(tmp_path), "TMPDIR": str(tmp_path), "DOWN": ""}


# The nodes that --nodelist names (default: all), each with the launcher, in a step of their own.
SRUN = """#!{python}
import os, subprocess, sys, time
options = dict(w[2:].split("=", 1) for w in sys.argv[1:] if w.startswith("--") and "=" in w)
nodes = options.get("nodelist", os.environ["SLURM_JOB_NODELIST"]).split(",")
command = sys.argv[sys.argv.index({python!r}):]
if any(os.path.exists(f"{folder}/down-{{node}}") for node in nodes):
    sys.exit(1)
run = []
for number, node in enumerate(nodes):
    step = dict(SLURM_STEP_ID="0", SLURM_STEP_NODELIST=",".join(nodes), SLURM_NODEID=str(number))
    step |= dict(SLURM_STEP_NUM_TASKS=str(len(nodes)), SLURM_PROCID=str(number), SLURM_LOCALID="0")
    run.append(subprocess.Popen(command, env={{**os.environ, **step}}))
while any(each.poll() is None for each in run):  # --kill-on-bad-exit
    time.sleep(0.05)
    if any(each.poll() for each in run):
        [each.terminate() for each in run]
sys.exit(max(abs(each.wait()) for each in run))
"""


def restarted(*words: str) -> list[str]:
    limits = ["--grace-s", "0.3", "--stop-s", "1"]
    return ["--max-restarts", "2", "--checkpoint-dir", "ckpt", *limits, *words, "train.py"]


def launched(
    tmp_path: Path, env: dict[str, str], *words: str, **more: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(tmp_path / "launch.py"), *restarted(*words)]
    return run(command, cwd=tmp_path, env={**env, **more}, timeout=100)


def ranks(out: str, attempt: int) -> list[str]:
    """``rank of world`` of the ranks of an attempt."""
    return sorted(re.findall(rf"^attempt {attempt} rank (\d of \d)", out, re.MULTILINE))


@pytest.mark.parametrize(
    ("lost", "rank", "left"),
    sampled([(B, "2", "1"), ("", "1", "3"), (A, "0", "2")], every=3),
    ids=str,
)
def test_a_run_over_ssh_goes_on_with_the_hosts_that_answer(tmp_path, env, lost, rank, left):
    words = ["--hostfile", "hosts", "--master_port", str(unused_port()), "--min-ranks", "1"]
    done = launched(tmp_path, env, *words, LOST_RANK=rank, DOWN=lost)
    assert done.returncode == 0, done.stderr
    assert ranks(done.stdout, 0) == ["0 of 3", "1 of 3", "2 of 3"], done.stderr
    assert ranks(done.stdout, 1) == [f"{number} of {left}" for number in range(int(left))]
    assert (f"host {lost} does not answer, and is left out." in done.stderr) == bool(lost)
    met = re.findall(r"^attempt 1 .* at (\S+)", done.stdout, re.MULTILINE)
    assert {*met} == {A if lost == "" else "127.0.0.1"}  # nobody needs the address of a lone host
    assert len({*re.findall(r"(\S+)$", done.stdout, re.MULTILINE)}) == 1, "one id for all attempts"


def test_a_run_over_ssh_ends_if_too_few_ranks_are_left(tmp_path, env):
    words = ["--hostfile", "hosts", "--master_port", str(unused_port()), "--min-ranks", "2"]
    done = launched(tmp_path, env, *words, LOST_RANK="1", DOWN=B)
    assert done.returncode == 1
    assert ranks(done.stdout, 1) == []
    assert "not restarted: 1 rank of 3 can be used, and --min-ranks is 2." in done.stderr


def test_a_slot_that_fails_the_users_check_is_left_out(tmp_path, env):
    words = ["--hostfile", "hosts", "--master_port", str(unused_port()), "--min-ranks", "1"]
    words += ["--check-slot", f"test ! -e {tmp_path}/down-$ZEROSHARD_SLOT"]
    done = launched(tmp_path, env, *words, LOST_RANK="2", DOWN="1")
    assert done.returncode == 0, done.stderr
    assert ranks(done.stdout, 1) == ["0 of 2", "1 of 2"]
    assert f"slot 1 of host {B} cannot be used, and it is left out." in done.stderr


@pytest.mark.parametrize(("lost", "hosts"), sampled([(A, "1"), ("", "2")], every=2), ids=str)
def test_a_slurm_job_goes_on_with_the_nodes_that_answer(tmp_path, env, lost, hosts):
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": f"{A},{B}"}
    words = ["--nproc", "2", "--master_port", str(unused_port()), "--min-ranks", "2"]
    done = launched(tmp_path, env, *words, LOST_RANK="0", DOWN=lost, **job)
    assert done.returncode == 0, done.stderr
    world = 2 * int(hosts)
    assert ranks(done.stdout, 0) == [f"{number} of 4" for number in range(4)]
    assert ranks(done.stdout, 1) == [f"{number} of {world}" for number in range(world)]
    assert "srun ended with exit code" in done.stderr


class Together:
    """Two launchers that a user has started with ``--no_ssh``."""

    def __init__(self, tmp_path: Path, env: dict[str, str], *words: str) -> None:
        port = str(unused_port())
        self.nodes = [
            WarmPython(
                [
                    *(sys.executable, str(tmp_path / "launch.py"), "--no_ssh", "--num_nodes", "2"),
                    *("--node_rank", str(rank), "--nproc", str(rank + 1)),
                    *("--master_addr", "127.0.0.1", "--master_port", port, *restarted(*words)),
                ],
                cwd=tmp_path,
                env=env,
            )
            for rank in range(2)
        ]

    def ended(self) -> list[tuple[int | None, str, str]]:
        said = [node.communicate(timeout=60) for node in self.nodes]
        return [(n.returncode, *text) for n, text in zip(self.nodes, said, strict=True)]


def test_launchers_without_a_head_restart_together(tmp_path, env):
    both = Together(tmp_path, {**env, "LOST_RANK": "1"})
    (code_0, out_0, err_0), (code_1, out_1, err_1) = both.ended()
    assert (code_0, code_1) == (0, 0), err_0 + err_1
    assert ranks(out_0 + out_1, 0) == ranks(out_0 + out_1, 1) == ["0 of 3", "1 of 3", "2 of 3"]
    assert len({*re.findall(r"(\S+)$", out_0 + out_1, re.MULTILINE)}) == 1, "one id for all"
    ports = {re.findall(r"at \S+ (\d+)", line)[0] for line in (out_0 + out_1).splitlines()}
    assert len(ports) == 4, "each attempt has a port of its own on each host"
    assert "restart 1 of 2" in err_0 and "restart 1" not in err_1, "node 0 speaks for all"


def test_launchers_without_a_head_give_the_run_one_name(tmp_path, env):
    (tmp_path / "train.py").write_text("import os; print(os.environ['ZEROSHARD_RUN_ID'])")
    port = str(unused_port())
    words = ["--no_ssh", "--num_nodes", "2", "--nproc", "1", "--master_addr", "127.0.0.1"]
    command = [sys.executable, "-m", "zeroshard.launch", *words, "--master_port", port]
    nodes = [
        WarmPython([*command, "--node_rank", str(rank), "train.py"], cwd=tmp_path, env=env)
        for rank in range(2)
    ]
    said = [node.communicate(timeout=60)[0] for node in nodes]
    assert said[0] == said[1] == f"nodes-127.0.0.1-{port}\n"


def test_launchers_without_a_head_go_on_when_one_is_gone(tmp_path, env):
    both = Together(tmp_path, {**env, "LOST_RANK": "9"}, "--min-ranks", "1")
    both.nodes[1].stdout.readline()  # its ranks run
    os.kill(both.nodes[1].pid, 9)
    (code_0, out_0, err_0), _ = both.ended()
    assert code_0 == 0, err_0
    assert ranks(out_0, 1) == ["0 of 1"]
    assert "host node 1 does not answer, and is left out." in err_0
