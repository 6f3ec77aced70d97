"""How are the launchers of several nodes started and stopped, without SLURM?

One ``zeroshard launch --no_ssh --node_rank R`` per host, over ssh or, on this host, directly. The
standard input of each is its leash: a line ``INT``, ``TERM`` or ``KILL`` asks it to stop, and its
end (this process died, the connection broke) does so too. So nothing is ever searched for and
killed by name.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import TextIO

from zeroshard.errors import LaunchError
from zeroshard.launch.exit_report import EXIT_SURVIVOR
from zeroshard.launch.hosts import Host
from zeroshard.launch.supervisor import ShutdownTimeouts, WorkerProcess, WorkerSupervisor

_TICK_S = 0.05
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class NodeCommand:
    """One node's launcher. ``remote`` is the same command seen through ssh, None on this host."""

    host: Host
    argv: tuple[str, ...]
    env: Mapping[str, str]
    is_here: bool

    def process_argv(self, *, cwd: str, ssh: Sequence[str]) -> list[str]:
        """What we execute: the launcher itself, or ssh with the launcher as a shell line."""
        if self.is_here:
            return list(self.argv)
        line = f"cd {shlex.quote(cwd)} && exec {shlex.join(self.argv_with_env)}"
        return [*ssh, self.host.name, line]

    @property
    def argv_with_env(self) -> tuple[str, ...]:
        """The launcher for a shell that knows nothing of our variables."""
        return ("env", *(f"{name}={value}" for name, value in self.env.items()), *self.argv)


def node_commands(
    hosts: Sequence[Host],
    *,
    launcher: Sequence[str],
    master_addr: str | None,
    master_port: int,
    options: Sequence[str],
    program: Sequence[str],
    env: Mapping[str, str],
    this_host: Sequence[str],
    flags: Sequence[str] = ("--leash",),
) -> tuple[NodeCommand, ...]:
    """The launcher of each host; ``options`` are passed on, ``program`` is script and arguments.

    ``this_host`` holds the names of the machine we are on. Node ranks follow the order of
    ``hosts``. ``flags``: how each is told that it is to end, or tells that it does; a leash, where we
    hold its standard input.
    """
    commands: list[NodeCommand] = []
    for rank, host in enumerate(hosts):
        numbers = {
            "--num_nodes": len(hosts),
            "--node_rank": rank,
            "--nproc": len(host.slots),
            "--master_addr": master_addr or hosts[0].name,
            "--master_port": master_port,
        }
        argv = [*launcher, "--no_ssh", *flags]
        argv += [word for name, value in numbers.items() for word in (name, str(value))]
        node_env = dict(env)
        if host.devices is not None:
            node_env["CUDA_VISIBLE_DEVICES"] = host.devices
        is_here = host.name in _LOCAL_NAMES or host.name in this_host
        commands.append(NodeCommand(host, (*argv, *options, "--", *program), node_env, is_here))
    return tuple(commands)


def ssh_words(port: int | None, extra: Sequence[str] = ()) -> list[str]:
    """``ssh`` without questions: a host that would ask for a password fails with its message.

    ``extra``: words of the user for it.
    """
    words = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", *extra]
    return words if port is None else [*words, "-p", str(port)]


def run_nodes(
    commands: Sequence[NodeCommand],
    *,
    ssh: Sequence[str],
    timeouts: ShutdownTimeouts,
    console: TextIO,
) -> int:
    """Start all launchers and wait; gives the exit code of the first one that failed by itself."""
    processes: dict[int, subprocess.Popen[bytes]] = {}
    for rank, command in enumerate(commands):
        argv = command.process_argv(cwd=os.getcwd(), ssh=ssh)
        env = {**os.environ, **command.env} if command.is_here else None
        try:
            processes[rank] = subprocess.Popen(
                argv, stdin=subprocess.PIPE, env=env, start_new_session=True
            )
        except OSError as error:
            for started in processes.values():
                _pull(started, "KILL")
            raise LaunchError(
                f"node {rank} ({command.host.name}): cannot execute {argv[0]!r}: {error.strerror}."
            ) from error
    supervisor = WorkerSupervisor(processes, timeouts=timeouts, send=_send)
    handled = (signal.SIGINT, signal.SIGTERM)

    def on_signal(number: int, _: FrameType | None) -> None:
        supervisor.interrupt(signal.Signals(number))

    before = [signal.signal(number, on_signal) for number in handled]
    try:
        while not supervisor.tick():
            time.sleep(_TICK_S)
    finally:
        for number, handler in zip(handled, before, strict=True):
            signal.signal(number, handler)
    if supervisor.interrupted is not None:
        return 128 + supervisor.interrupted
    failed = [death for death in supervisor.deaths if death.exitcode != 0]
    for death in failed:
        if not death.stopped and death.exitcode != EXIT_SURVIVOR:
            name = commands[death.rank].host.name
            reason = (
                "; ssh itself failed"
                if _is_ssh_failure(commands[death.rank], death.exitcode)
                else ""
            )
            print(
                f"zeroshard: node {death.rank} ({name}) ended with exit code "
                f"{death.exitcode}{reason}.",
                file=console,
            )
    causes = [death for death in failed if death.exitcode != EXIT_SURVIVOR] or failed
    code = causes[0].exitcode if causes else 0
    return code if code >= 0 else 128 - code


def end_with_parent_pipe() -> threading.Thread:
    """Obey the launcher that started this one: its words, and its end, become signals to us.

    Takes the standard input away from the ranks, which would otherwise read the words.
    """
    leash = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def obey() -> None:
        pending = b""
        while chunk := os.read(leash, 64):
            *words, pending = (pending + chunk).split(b"\n")
            for word in words:
                _obey(word.decode(errors="replace"))
        _obey("TERM")

    thread = threading.Thread(target=obey, name="zeroshard-leash", daemon=True)
    thread.start()
    return thread


def names_of_this_host(hostname: str, fqdn: str) -> tuple[str, ...]:
    """Names by which a hostfile may mean the machine we are on."""
    return (hostname, fqdn, hostname.split(".", 1)[0])


def this_launcher(venv_script: str | None = None) -> list[str]:
    """The words that start this program on a host with the same installation.

    ``venv_script``: a file that the host's shell reads first; its ``python`` is taken, instead of the
    path of ours.
    """
    if venv_script is None:
        return [sys.executable, "-m", "zeroshard.launch"]
    path = os.path.abspath(venv_script)  # a bare name would be searched on PATH
    return ["bash", "-c", '. "$0" && exec "$@"', path, "python", "-m", "zeroshard.launch"]


def _obey(word: str) -> None:
    number = {"INT": signal.SIGINT, "TERM": signal.SIGTERM, "KILL": signal.SIGTERM}.get(word)
    if number is not None:
        os.kill(os.getpid(), number)
        if word == "KILL":  # the second request kills
            os.kill(os.getpid(), number)


def _send(_: int, process: WorkerProcess, number: signal.Signals) -> None:
    """Pull a launcher's leash; once it was let go and that did not help, kill our end of it."""
    if isinstance(process, subprocess.Popen):
        if process.stdin is None or process.stdin.closed:
            process.kill()
            return
        _pull(process, {signal.SIGINT: "INT", signal.SIGKILL: "KILL"}.get(number, "TERM"))


def _pull(process: subprocess.Popen[bytes], word: str) -> None:
    if process.stdin is not None:
        with suppress(OSError, ValueError):
            process.stdin.write(f"{word}\n".encode())
            process.stdin.flush()
        if word == "KILL":
            with suppress(OSError):
                process.stdin.close()


def _is_ssh_failure(command: NodeCommand, exitcode: int) -> bool:
    return not command.is_here and exitcode == 255
