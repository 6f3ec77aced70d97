"""Starts and stops the launchers of several nodes: over ssh, with ``srun``, or with ``mpirun``.

Over ssh each host gets one ``zeroshard launch --no_ssh --node_rank R``, over ssh or, on this host,
directly. This process holds the standard input of each (its *leash*). The first line gives the variables
of the user's files (``.deepspeed_env``): in a command everyone on both hosts could read them. A line
``INT``, ``TERM`` or ``KILL`` asks the launcher to stop. The end of its input asks it to stop as well:
then this process died, or the connection broke. So no process is ever searched for and killed by name.

``srun`` and ``mpirun`` only start one launcher per host, so rendezvous, supervision and reports are the
same, and ranks need no MPI library.
"""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import TextIO

from zeroshard.errors import LaunchError
from zeroshard.launch.hosts import Host
from zeroshard.launch.rank_env import SECRET_VARIABLE
from zeroshard.launch.supervisor import (
    ShutdownTimeouts,
    WorkerProcess,
    WorkerSupervisor,
    signal_leader,
)
from zeroshard.run.exit_report import EXIT_SURVIVOR, ExitReport, RankExit

_TICK_S = 0.05
_SHOWN = (
    *("CUDA_", "DYLD_", "LD_", "MV2_", "NCCL_", "OMP_", "PATH", "PYTHON", "UCX_", "ZEROSHARD_"),
)
"""Beginnings of names of interpreters and communication libraries, which hold no secrets."""
_ENV = "ENV "
_ENV_S = 60.0
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class NodeCommand:
    """The command of one node's launcher, and the variables to add to its environment."""

    host: Host
    argv: tuple[str, ...]
    env: Mapping[str, str]
    is_here: bool

    def process_argv(self, *, cwd: str, ssh: Sequence[str]) -> list[str]:
        """The command to execute: the launcher itself, or ssh with the launcher as a shell line."""
        if self.is_here:
            return list(self.argv)
        line = f"cd {shlex.quote(cwd)} && exec {shlex.join(self.argv_with_env)}"
        return [*ssh, self.host.name, line]

    @property
    def argv_with_env(self) -> tuple[str, ...]:
        """The command of the launcher, with ``env`` to set the variables that others may read."""
        hidden = hidden_names(self.env)
        shown = (f"{name}={value}" for name, value in self.env.items() if name not in hidden)
        return ("env", *shown, *self.argv)


def hidden_names(env: Mapping[str, str]) -> list[str]:
    """The variables that may hold a secret, and stand in no command: ``ps`` shows those to everyone."""
    return [name for name in env if name == SECRET_VARIABLE or not name.startswith(_SHOWN)]


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
    """The launcher of each host. ``options`` are passed on; ``program`` is the script and its arguments.

    ``this_host``: the names of the machine that this process runs on. Node ranks follow the order of
    ``hosts``. ``flags``: ``--leash`` if this process holds the standard input of the launchers, else the
    options of :func:`mpi_flags`.
    """
    commands: list[NodeCommand] = []
    if master_addr is None and len(hosts) > 1:  # a single host meets on its loopback interface
        master_addr = hosts[0].name
    for rank, host in enumerate(hosts):
        numbers = {
            "--num_nodes": len(hosts),
            "--node_rank": rank,
            "--nproc": len(host.slots),
            "--master_addr": master_addr,
            "--master_port": master_port,
        }
        argv = [*launcher, "--no_ssh", *flags]
        for name, value in numbers.items():
            argv += [] if value is None else [name, str(value)]
        node_env = dict(env)
        if host.devices is not None:
            node_env["CUDA_VISIBLE_DEVICES"] = host.devices
        is_here = host.name in _LOCAL_NAMES or host.name in this_host
        commands.append(NodeCommand(host, (*argv, *options, "--", *program), node_env, is_here))
    return tuple(commands)


def ssh_words(port: int | None, extra: Sequence[str] = ()) -> list[str]:
    """The ``ssh`` command. A host that would ask for a password fails with the message of ssh.

    ``extra``: options of the user.
    """
    words = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", *extra]
    return words if port is None else [*words, "-p", str(port)]


def mpi_flags(kind: str) -> tuple[str, ...]:
    """The options that a launcher needs under this ``mpirun``.

    Open MPI ends all processes when one fails. Hydra (all others) does so only if a signal ended the
    process.
    """
    return () if kind == "openmpi" else ("--end-by-signal",)


def mpirun_command(
    kind: str,
    commands: Sequence[NodeCommand],
    extra: Sequence[str] = (),
    hidden: Sequence[str] = (),
) -> list[str]:
    """The ``mpirun`` command of this kind (one of :data:`MPI_LAUNCHERS`). ``extra``: options of the user.

    ``hidden``: variables of mpirun's own environment that the launchers get. Hydra passes on all.

    The options against binding are needed because a launcher and all its ranks would otherwise share the
    cores of one MPI rank.
    """
    sections = [list(command.argv_with_env) for command in commands]
    names = [command.host.name for command in commands]
    if kind == "openmpi":
        passed = [word for name in hidden for word in ("-x", name)]
        head = ["mpirun", "--bind-to", "none", *passed, *extra]
        parts = [
            ["-n", "1", "--host", name, *words] for name, words in zip(names, sections, strict=True)
        ]
    else:  # Hydra starts the processes on the hosts in the order of its list
        free = ["-genv", "I_MPI_PIN", "0"] if kind == "impi" else ["-bind-to", "none"]
        head = ["mpirun", "-hosts", ",".join(names), "-ppn", "1", *free, *extra]
        parts = [["-n", "1", *words] for words in sections]
    line = head + parts[0]
    for part in parts[1:]:
        line += [":", *part]
    return line


def srun_command(
    num_nodes: int, hosts: Sequence[str], launcher: Sequence[str], extra: Sequence[str] = ()
) -> list[str]:
    """The ``srun`` command that starts one launcher per node. Empty ``hosts``: any nodes of the job.

    ``extra``: options of the user.
    """
    command = ["srun", f"--nodes={num_nodes}", f"--ntasks={num_nodes}", "--ntasks-per-node=1"]
    if hosts:
        command.append(f"--nodelist={','.join(hosts)}")
    return [*command, "--kill-on-bad-exit=1", *extra, *launcher]


def run_nodes(
    commands: Sequence[NodeCommand],
    *,
    ssh: Sequence[str],
    timeouts: ShutdownTimeouts,
    console: TextIO,
) -> ExitReport:
    """Start all launchers and wait. The exit code is that of the first one that failed by itself.

    Raises:
        LaunchError: a command cannot be executed.
    """
    processes = _started(commands, ssh)
    supervisor = WorkerSupervisor(processes, timeouts=timeouts, send=_send, ask=_send)
    return _supervise(supervisor, timeouts, lambda failed: _failures(commands, failed), console)


def _started(
    commands: Sequence[NodeCommand], ssh: Sequence[str]
) -> dict[int, subprocess.Popen[bytes]]:
    """The launchers of all nodes. If one cannot be started, those before it are ended."""
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
        _pull(processes[rank], _ENV + json.dumps({} if command.is_here else dict(command.env)))
    return processes


def _failures(commands: Sequence[NodeCommand], failed: Sequence[RankExit]) -> Iterator[str]:
    """A line for each launcher that ended by itself and is no survivor of another node."""
    for death in failed:
        if not death.stopped and death.exitcode != EXIT_SURVIVOR:
            name = commands[death.rank].host.name
            is_ssh = not commands[death.rank].is_here and death.exitcode == 255
            reason = "; ssh itself failed" if is_ssh else ""
            yield f"node {death.rank} ({name}) ended with exit code {death.exitcode}{reason}."


def run_srun(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    timeouts: ShutdownTimeouts,
    console: TextIO,
) -> ExitReport:
    """Run ``srun`` in the environment ``env`` to its end. It gets SIGTERM for SIGINT, and forwards it.

    Raises:
        LaunchError: it cannot be executed.
    """
    try:
        process = subprocess.Popen(
            list(command), stdin=subprocess.DEVNULL, env=dict(env), start_new_session=True
        )
    except OSError as error:
        raise LaunchError(f"cannot execute {command[0]!r}: {error.strerror}.") from error

    def send(rank: int, process: WorkerProcess, number: signal.Signals) -> None:
        signal_leader(rank, process, signal.SIGTERM if number == signal.SIGINT else number)

    def lines_of(failed: Sequence[RankExit]) -> list[str]:
        return [f"srun ended with exit code {death.exitcode}." for death in failed]

    supervisor = WorkerSupervisor({0: process}, timeouts=timeouts, send=send, ask=send)
    return _supervise(supervisor, timeouts, lines_of, console)


def _supervise(
    supervisor: WorkerSupervisor,
    timeouts: ShutdownTimeouts,
    lines_of: Callable[[Sequence[RankExit]], Iterable[str]],
    console: TextIO,
) -> ExitReport:
    """Wait for the processes, pass signals on, and print ``lines_of`` those that failed."""
    _await(supervisor, timeouts)
    if supervisor.interrupted is not None:
        code = 0 if supervisor.has_saved else 128 + supervisor.interrupted
        return ExitReport((), None, "", code, interrupted=True)
    failed = [death for death in supervisor.deaths if death.exitcode != 0]
    lines = tuple(lines_of(failed))
    for line in lines:
        print(f"zeroshard: {line}", file=console)
    causes = [death for death in failed if death.exitcode != EXIT_SURVIVOR] or failed
    code = causes[0].exitcode if causes else 0
    code = code if code >= 0 else 128 - code
    return ExitReport(lines, None, "", code, interrupted=supervisor.is_asked_to_end)


def _await(supervisor: WorkerSupervisor, timeouts: ShutdownTimeouts) -> None:
    handled = [signal.SIGINT, signal.SIGTERM]
    if timeouts.save_s:
        handled.append(signal.SIGUSR1)

    def on_signal(number: int, _: FrameType | None) -> None:
        supervisor.interrupt(signal.Signals(number))

    before = [signal.signal(number, on_signal) for number in handled]
    try:
        while not supervisor.tick():
            time.sleep(_TICK_S)
    finally:
        for number, handler in zip(handled, before, strict=True):
            signal.signal(number, handler)


def environment_of_parent() -> dict[str, str]:
    """The variables that the first line on standard input gives. Reads nothing beyond that line.

    Raises:
        LaunchError: there is another line, or none within a minute.
    """
    line, until_s = b"", time.monotonic() + _ENV_S
    while not line.endswith(b"\n"):
        if not select.select([0], [], [], max(0.0, until_s - time.monotonic()))[0]:
            raise LaunchError(f"--leash: nothing came over standard input within {_ENV_S:.0f} s.")
        if not (byte := os.read(0, 1)):
            return {}  # the other launcher has ended: the leash says so
        line += byte
    text = line.decode(errors="replace")
    if not text.startswith(_ENV):
        raise LaunchError(f"--leash: standard input begins with {text[:40]!r}, not with {_ENV!r}.")
    return {str(name): str(value) for name, value in json.loads(text[len(_ENV) :]).items()}


def end_with_parent_pipe() -> None:
    """Turn the lines on standard input, and its end, into signals to this process.

    The launcher that started this one writes the lines. Standard input is replaced by ``/dev/null``, so
    that ranks cannot read them.
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

    threading.Thread(target=obey, name="zeroshard-leash", daemon=True).start()


def names_of_this_host(hostname: str, fqdn: str) -> tuple[str, ...]:
    """The names that a hostfile may use for the machine that this process runs on."""
    return (hostname, fqdn, hostname.split(".", 1)[0])


def this_launcher(venv_script: str | None = None) -> list[str]:
    """The command that starts this program on a host with the same installation.

    ``venv_script``: a file that the shell of the host reads first; then the ``python`` on its ``PATH`` is
    used, instead of the path of this interpreter.
    """
    if venv_script is None:
        return [sys.executable, "-m", "zeroshard.launch"]
    path = os.path.abspath(venv_script)  # a bare name would be searched on PATH
    return ["bash", "-c", '. "$0" && exec "$@"', path, "python", "-m", "zeroshard.launch"]


_WORDS = {
    signal.SIGINT: "INT",
    signal.SIGUSR1: "USR1",
    signal.SIGTERM: "TERM",
    signal.SIGKILL: "KILL",
}
_NUMBERS = {word: number for number, word in _WORDS.items()} | {"KILL": signal.SIGTERM}


def _obey(word: str) -> None:
    number = _NUMBERS.get(word)
    if number is not None:
        os.kill(os.getpid(), number)
        if word == "KILL":  # the second request kills
            os.kill(os.getpid(), number)


def _send(_: int, process: WorkerProcess, number: signal.Signals) -> None:
    """Ask a launcher to stop through its standard input; if that is closed, kill the local process."""
    if isinstance(process, subprocess.Popen):
        if process.stdin is None or process.stdin.closed:
            process.kill()
            return
        _pull(process, _WORDS.get(number, "TERM"))


def _pull(process: subprocess.Popen[bytes], word: str) -> None:
    if process.stdin is not None:
        with suppress(OSError, ValueError):
            process.stdin.write(f"{word}\n".encode())
            process.stdin.flush()
        if word == "KILL":
            with suppress(OSError):
                process.stdin.close()
