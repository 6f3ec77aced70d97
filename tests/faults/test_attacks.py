"""Strangers on the machine's interfaces attack every port of a run, and the run does not notice."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import resource
import secrets
import socket
import stat
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import DistError, TCPStore
from warm_python import WarmPython

from zeroshard.launch import relay
from zeroshard.run.address import unused_port

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="needs Linux"),
]

# What a run makes must be private where the user's umask hides nothing. A usual limit of open files is
# 1024, which a thousand connections reach.
LAUNCHER = """
import os, resource, runpy
os.umask(0)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
runpy.run_module("zeroshard.launch", run_name="__main__", alter_sys=True)
"""
LAUNCH = [sys.executable, "-c", LAUNCHER]
FIRST = "127.0.0.2"  # the address of the first host; the second one has 127.0.0.1
PROGRAM = """
import json, os, sys
from pathlib import Path
import torch, torch.distributed as dist
import zeroshard

folder = Path(sys.argv[1])
zeroshard.init_distributed()
rank = dist.get_rank()
torch.manual_seed(0)
engine = zeroshard.Engine(
    torch.nn.Linear(8, 4),
    config={
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3},
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "trust": {"dump_dir": str(folder / "runs")},
    },
)
for step in range(100000):
    torch.manual_seed(2 * step + rank)
    engine.backward(engine(torch.randn(2, 8)).square().mean())
    engine.step()
    if step == 2:
        (folder / f"ready-{rank}").write_text(str(os.getpid()))
    if step % 20 == 19:  # meets and connects while strangers look for ports that open
        late = dist.new_group()
        dist.barrier(late)
        dist.destroy_process_group(late)
    is_over = torch.tensor([float((folder / "over").exists())])
    dist.all_reduce(is_over)
    if is_over:
        break
weight = engine.module.weight.detach().tolist()
if rank == 0:
    (folder / "done.json").write_text(json.dumps([step + 1, weight]))
engine.close()
dist.destroy_process_group()
"""


class Bomb:
    """A pickle that makes a file where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (os.system, (f"touch {self.path}",))


def processes_below(pid: int) -> set[int]:
    """A process and all that it has started, with what these have started."""
    found = {pid}
    with contextlib.suppress(OSError):
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, children.read_text().split()):
                found |= processes_below(child)
    return found


def listening(pid: int) -> set[tuple[str, int]]:
    """The addresses and ports that a process listens on."""
    opened, found = set(), set()
    with contextlib.suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                opened.add(os.readlink(fd))
        for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            address, port = local.split(":")
            if state == "0A" and f"socket:[{rest[5]}]" in opened:
                host = socket.inet_ntoa(bytes.fromhex(address)[::-1])
                found.add((host, int(port, 16)))
    return found


HELLO = b"\0" + (1015412686).to_bytes(4, "little")
"""What a client of torch's store says first."""


class Attack:
    """Attacks each port of ``launchers`` again and again in a thread, and holds silent connections.

    ``silent``: the number of connections, by place. At most 300 to one place are held, and to the first
    host's relay all: a process of torch keeps its ends of the others too.
    """

    def __init__(
        self, launchers: list[WarmPython], silent: dict[tuple[str, int], int], bomb: Path
    ) -> None:
        self._launchers = launchers
        self._silent = silent
        self._payloads = [
            pickle.dumps(Bomb(bomb)).ljust(200, b"."),
            secrets.token_bytes(1 << 16),
            b"GET / HTTP/1.1\r\nHost: node1\r\n\r\n".ljust(100),
            HELLO + b"\x01" + b"\xff" * 100,  # a key of 2 ** 64 - 1 bytes
            HELLO + b"\x06" + b"\xff" * 100,  # as many keys to wait for
        ]
        self._held: list[socket.socket] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Attack:
        for place, count in self._silent.items():
            for number in range(count):
                with contextlib.suppress(OSError):
                    client = self._connect(place)
                    if number < 300 or place[0] == FIRST:
                        self._held.append(client)
                    else:
                        client.close()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for client in self._held:
            client.close()

    def _run(self) -> None:
        while not self._over.wait(0.1):
            for place in ports_of(self._launchers):
                for payload in self._payloads:
                    with contextlib.suppress(OSError), self._connect(place) as client:
                        client.sendall(payload)
                        client.settimeout(0.05)
                        client.recv(1 << 10)
                with contextlib.suppress(OSError):
                    self._connect(place).close()

    def _connect(self, place: tuple[str, int]) -> socket.socket:
        return socket.create_connection(place, timeout=0.5)


def ports_of(launchers: list[WarmPython]) -> dict[tuple[str, int], int]:
    """Where the launchers and all that they have started listen, with the process."""
    pids = [pid for each in launchers for pid in processes_below(each.pid)]
    return {place: pid for pid in pids for place in listening(pid)}


def trained(steps: int) -> torch.Tensor:
    """The weight after the steps of PROGRAM, on the batches of both ranks at once.

    The learning rate is so small that a wrong step is seen after thousands of others.
    """
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(steps):
        batches = []
        for rank in (0, 1):
            torch.manual_seed(2 * step + rank)
            batches.append(torch.randn(2, 8))
        optimizer.zero_grad()
        model(torch.cat(batches)).square().mean().backward()
        optimizer.step()
    return model.weight.detach()


@contextlib.contextmanager
def launchers(folder: Path, num_hosts: int) -> Iterator[list[WarmPython]]:
    """The launchers of two ranks, on one host or on two."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "ZEROSHARD_"))}
    if num_hosts == 1:  # the launcher alone sees to it
        env.pop("GLOO_SOCKET_IFNAME", None)
    else:
        env["GLOO_SOCKET_IFNAME"] = "lo"
    env |= {"TMPDIR": str(folder), "ZEROSHARD_SECRET": "s" * 32}
    (folder / "train.py").write_text(PROGRAM)
    command = [*LAUNCH, "--nproc", str(2 // num_hosts)]
    if num_hosts > 1:
        port = str(unused_port(FIRST))
        command += ["--no_ssh", "--num_nodes", "2", "--master_addr", FIRST, "--master_port", port]
    with contextlib.ExitStack() as started:
        made = []
        for host in range(num_hosts):
            number = ["--node_rank", str(host)] if num_hosts > 1 else []
            words = [*command, *number, "train.py", str(folder)]
            made.append(WarmPython(words, cwd=folder, env=env, warm_ranks=True))
            started.callback(made[-1].close)
        yield made


def await_files(folder: Path, names: set[str], processes: list[WarmPython]) -> None:
    deadline_s = time.monotonic() + 90
    while not all((folder / name).exists() for name in names):
        assert time.monotonic() < deadline_s, [each.name for each in folder.iterdir()]
        assert all(each.poll() is None for each in processes), processes[0].communicate(10)
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("num_hosts", "count"),
    [
        (1, 300),
        (2, 300),
        pytest.param(1, 10_000, marks=pytest.mark.full),
        pytest.param(2, 10_000, marks=pytest.mark.full),
    ],
)
def test_a_run_trains_on_while_strangers_attack_all_its_ports(tmp_path, num_hosts, count):
    with launchers(tmp_path, num_hosts) as processes:
        await_files(tmp_path, {"ready-0", "ready-1"}, processes)
        places = ports_of(processes)
        outside = {place for place in places if place[0] == FIRST}
        assert len(outside) == num_hosts - 1, "the relay of the first host"
        assert {host for host, _ in {*places} - outside} == {"127.0.0.1"}
        ranks = {int((tmp_path / f"ready-{rank}").read_text()) for rank in (0, 1)}
        assert ranks <= {*places.values()}, "gloo"
        # As many connections to each process.
        ports = Counter(places.values())
        silent = {place: count // ports[pid] for place, pid in places.items()}
        attack = Attack(processes, silent, tmp_path / "ran")
        with open_files(300 * len(places) + count + 500), attack:
            until_s = time.monotonic() + relay.PROOF_S + 1.5 + count / 1000
            for place in outside:
                with pytest.raises(DistError):
                    TCPStore(*place, is_master=False, timeout=timedelta(seconds=1))
            time.sleep(max(0.0, until_s - time.monotonic()))  # of the attack
            (tmp_path / "over").touch()
            said = [each.communicate(timeout=60) for each in processes]
        assert [each.returncode for each in processes] == [0] * num_hosts, said
    assert not (tmp_path / "ran").exists()
    steps, weight = json.loads((tmp_path / "done.json").read_text())
    assert steps > 20
    torch.testing.assert_close(torch.tensor(weight), trained(steps))
    lines = [line for _, errors in said for line in errors.splitlines()]
    refused = [line for line in lines if "was refused: it" in line]
    kinds = ["showed a wrong proof", "ended without", "showed no proof", "the oldest of more than"]
    found = [sum(kind in line for line in refused) for kind in kinds]
    assert found == [num_hosts - 1] * 4, refused
    kinds = ["Invalid string size", "Too many keys being waited", "more such messages came to the"]
    found = [sum(kind in line for line in lines) for kind in kinds]
    assert found == [1, 1, 1], lines
    assert not [line for line in lines if "TCPStoreLibUvBackend" in line], lines


def test_only_its_user_can_read_what_a_run_makes(tmp_path):
    shared = Path("/dev/shm")
    others = {*shared.glob("zeroshard-*")}
    with launchers(tmp_path, 1) as (process,):
        await_files(tmp_path, {"ready-0", "ready-1"}, [process])
        folders = {*tmp_path.glob("zeroshard-*"), *shared.glob("zeroshard-*")} - others
        (run,) = (tmp_path / "runs").iterdir()
        found = modes(run, *folders)
        (tmp_path / "over").touch()
        said = process.communicate(timeout=60)
        assert process.returncode == 0, said
    found |= modes(run)
    names = " ".join(map(str, found))
    for made in ("/dev/shm/", "zeroshard-launch-", "ranks.json", "steps-"):
        assert made in names
    assert not {str(path): oct(mode) for path, mode in found.items() if mode & 0o077}


def modes(*folders: Path) -> dict[Path, int]:
    """The permissions of folders and of all that is in them."""
    every = [path for folder in folders for path in (folder, *folder.rglob("*"))]
    return {path: stat.S_IMODE(path.lstat().st_mode) for path in every}


@contextlib.contextmanager
def open_files(count: int) -> Iterator[None]:
    """A context in which this process may open so many files."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before, min(count, most)), most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))
