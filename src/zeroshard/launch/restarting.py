"""Carries out the attempts of a run that restarts: on one host, over ssh, and with ``srun``.

The process that started the run starts every attempt: with a new agent, a new store and, for the hosts
that are left, new launchers.
"""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TextIO

from zeroshard.errors import LaunchError
from zeroshard.launch.hosts import Host
from zeroshard.launch.launch_plan import RunHere, RunNodes, RunSrun, srun_words
from zeroshard.launch.options import LaunchRequest, passed_on
from zeroshard.launch.rank_env import devices_of
from zeroshard.launch.remote import (
    NodeCommand,
    mpi_flags,
    node_commands,
    run_nodes,
    run_srun,
    srun_command,
    ssh_words,
    this_launcher,
)
from zeroshard.launch.restart import Answers, Team
from zeroshard.launch.supervisor import ShutdownTimeouts
from zeroshard.launch.usable import ask_hosts, usable_slots
from zeroshard.run.exit_report import ExitReport
from zeroshard.run.run_folder import RUN_ID_VARIABLE

if TYPE_CHECKING:
    from zeroshard.launch.agent import NodeRun


def restart_here(
    request: LaunchRequest, here: RunHere, node: NodeRun, *, run_id: str, console: TextIO
) -> int:
    """Run the attempts of a run on this host alone. Returns the exit code of the last one."""
    from zeroshard.launch.agent import run_node

    host = host_of("localhost", here, node)

    def ask() -> Answers:
        return {host.name: usable_slots(host.slots, request.check_slot)}

    team = Team(request, [host], ask, run_id=run_id, console=console)

    def run(number: int) -> ExitReport:
        if here.master_port is not None:
            check_port(here.master_port)
        part = on_slots(node, host, team.now[0].slots)
        env = {**part.env, **team.env(number)}
        return run_node(replace(part, env=env, log_dir=team.log_dir(number)), console)

    return team.run(run)


def restart_nodes(
    request: LaunchRequest,
    decision: RunNodes,
    env: Mapping[str, str],
    this_host: Sequence[str],
    console: TextIO,
) -> int:
    """Run the attempts of a run whose launchers are started over ssh."""

    def ask() -> Answers:
        return ask_hosts(_questions(request, decision, env, this_host))

    run_id = env[RUN_ID_VARIABLE]
    team = Team(request, decision.hosts, ask, run_id=run_id, console=console)

    def run(number: int) -> ExitReport:
        logs = team.log_dir(number)
        asked = replace(request, each_rank_log=None if logs is None else str(logs))
        port = decision.master_port if request.master_port else decision.master_port + number
        attempt = replace(decision, hosts=team.now, master_port=port)
        if len(team.now) == 1 or team.now[0].name != decision.hosts[0].name:
            # It is the address of a host that is left out, or one that no other host needs now.
            asked = replace(asked, master_addr=None)
        commands = commands_of(asked, attempt, {**env, **team.env(number)}, this_host)
        return start_nodes(asked, commands, console)

    return team.run(run)


def restart_srun(request: LaunchRequest, decision: RunSrun, *, run_id: str, console: TextIO) -> int:
    """Run the attempts of a run whose launchers are started by ``srun``.

    Raises:
        LaunchError: the number of ranks of a node is not known before the start.
    """
    if request.min_ranks is not None and decision.nproc is None:
        raise LaunchError(
            f"--min-ranks {request.min_ranks} in a SLURM job needs --nproc, the ranks of a node."
        )
    slots = tuple(range(decision.nproc or 1))
    hosts = [Host(host.name, slots) for host in decision.hosts]
    extra = shlex.split(request.launcher_args)
    program = _usable_words(request, slots)

    def ask() -> Answers:
        return ask_hosts({h.name: srun_command(1, [h.name], program, extra) for h in hosts})

    team = Team(request, hosts, ask, run_id=run_id, console=console, whole_hosts=True)

    def run(number: int) -> ExitReport:
        logs = team.log_dir(number)
        is_first = team.now[0].name == hosts[0].name and len(team.now) > 1
        command = srun_words(
            replace(request, each_rank_log=None if logs is None else str(logs)),
            team.now,
            decision.port if request.master_port else decision.port + number,
            decision.nproc,
            is_whole=decision.is_whole and team.is_complete,
            master_addr=request.master_addr if is_first else None,
        )
        env = {**os.environ, RUN_ID_VARIABLE: run_id, **team.env(number)}
        return run_srun(command, env=env, timeouts=outer_timeouts(request), console=console)

    return team.run(run)


def commands_of(
    request: LaunchRequest, decision: RunNodes, env: Mapping[str, str], this_host: Sequence[str]
) -> tuple[NodeCommand, ...]:
    """The launchers of the hosts of ``decision``, with the variables ``env``."""
    return node_commands(
        decision.hosts,
        launcher=this_launcher(request.venv_script),
        master_addr=request.master_addr,
        master_port=decision.master_port,
        options=passed_on(request),
        program=(request.script, *request.args),
        env=env,
        this_host=this_host,
        flags=("--leash",) if decision.starter == "ssh" else mpi_flags(decision.starter),
    )


def start_nodes(
    request: LaunchRequest, commands: Sequence[NodeCommand], console: TextIO
) -> ExitReport:
    """Start the launchers over ssh, and wait for their end."""
    return run_nodes(
        commands,
        ssh=ssh_words(request.ssh_port, shlex.split(request.launcher_args)),
        timeouts=outer_timeouts(request),
        console=console,
    )


def outer_timeouts(request: LaunchRequest) -> ShutdownTimeouts:
    """Time limits for launchers of hosts, which need time to end their ranks and to report."""
    return ShutdownTimeouts(
        request.grace_s + 5,
        request.stop_s + 10,
        request.preempt_save_s and request.preempt_save_s + 5,
    )


def _usable_words(request: LaunchRequest, slots: Sequence[int]) -> list[str]:
    """The command that prints which of ``slots`` of its host can be used."""
    words = [*this_launcher(request.venv_script)[:-1], "zeroshard.launch.usable"]
    command = [] if request.check_slot is None else [request.check_slot]
    return [*words, ",".join(map(str, slots)), *command]


def host_of(name: str, here: RunHere, node: NodeRun) -> Host:
    """This host, with the devices of its ranks as slots."""
    if here.devices is None:
        return Host(name, tuple(range(node.num_local)))
    return Host(name, tuple(int(device) for device in here.devices.split(",")))


def on_slots(node: NodeRun, host: Host, slots: tuple[int, ...]) -> NodeRun:
    """``node`` with ranks on some of the slots of ``host``, each on the cores that it had."""
    if slots == host.slots:
        return node
    at = [host.slots.index(slot) for slot in slots]
    env = {**node.env, "LOCAL_SIZE": str(len(slots))}
    visible = env.get("CUDA_VISIBLE_DEVICES") and dict(env)  # --include: slots are devices
    devices = devices_of(at, visible or os.environ)
    if devices is not None:
        env["CUDA_VISIBLE_DEVICES"] = devices
    cpus = tuple(node.cpus[index] for index in at) if node.cpus else ()
    return replace(node, num_local=len(slots), env=env, cpus=cpus)


def check_port(port: int) -> None:
    """Check that ``port`` is free, instead of letting all nodes run into a timeout.

    Raises:
        LaunchError: it is not.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise LaunchError(
                f"port {port} cannot be used on this host ({error.strerror}). Give another one "
                "with --master_port, or end the program that uses it."
            ) from error


def _questions(
    request: LaunchRequest, decision: RunNodes, env: Mapping[str, str], this_host: Sequence[str]
) -> dict[str, list[str]]:
    """The command for each host that prints its usable slots."""
    ssh = ssh_words(request.ssh_port, shlex.split(request.launcher_args))
    started = commands_of(request, decision, env, this_host)
    return {
        command.host.name: replace(
            command, argv=tuple(_usable_words(request, command.host.slots))
        ).process_argv(cwd=os.getcwd(), ssh=ssh)
        for command in started
    }
