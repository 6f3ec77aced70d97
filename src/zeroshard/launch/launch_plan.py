"""Decides how a run is started.

:func:`plan_launch` makes one of four decisions from the options, the environment and the hostfile. This
process runs the ranks of this node (:class:`RunHere`), starts a launcher on each host over ssh or
``mpirun`` (:class:`RunNodes`), starts launchers through ``srun`` (:class:`RunSrun`), or becomes a rank
itself (:class:`ExecAsRank`).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zeroshard.core.launcher_variables import SlurmJob, read_slurm
from zeroshard.errors import LaunchError
from zeroshard.launch.hosts import Host, check_filters, parse_hostfile, select
from zeroshard.launch.options import (
    LAUNCHERS,
    MPI_LAUNCHERS,
    LaunchRequest,
    declared,
    passed_on,
)
from zeroshard.launch.rank_env import mpi_rank_env, slurm_rank_env
from zeroshard.launch.remote import srun_command, this_launcher

DEFAULT_PORT = 29500
_MANY_SLOTS = 1 << 10
_WHERE = ("nproc", "hostfile", "num_nodes")
"""Fields whose options decide how many ranks there are."""


@dataclass(frozen=True, slots=True)
class RunHere:
    """Run the ranks of this node. ``num_local`` None: one rank per visible GPU."""

    num_local: int | None
    num_nodes: int
    node_rank: int
    master_addr: str | None
    master_port: int | None
    devices: str | None


@dataclass(frozen=True, slots=True)
class RunNodes:
    """Start a launcher per host with ``starter``: "ssh", or one of :data:`MPI_LAUNCHERS`."""

    hosts: tuple[Host, ...]
    master_port: int
    starter: str = "ssh"


@dataclass(frozen=True, slots=True)
class RunSrun:
    """Start a launcher per node of the SLURM job. ``hosts``: the used ones, with equally many slots.

    ``nproc``: ranks per node; None: one per visible GPU. ``is_whole``: ``hosts`` are all of the job's.
    """

    command: tuple[str, ...]
    hosts: tuple[Host, ...] = ()
    port: int = 0
    nproc: int | None = None
    is_whole: bool = True


@dataclass(frozen=True, slots=True)
class ExecAsRank:
    """Become a rank: SLURM or MPI started one process per rank, and this is one of them."""

    env: Mapping[str, str]


LaunchPlan = RunHere | RunNodes | RunSrun | ExecAsRank


def plan_launch(
    request: LaunchRequest, env: Mapping[str, str], *, this_host: tuple[str, ...], has_srun: bool
) -> LaunchPlan:
    """Decide how the run is started. Reads the hostfile and no other file.

    Raises:
        LaunchError: the options cannot work, alone or in this environment.
    """
    check_request(request)
    decision = _plan(request, env, this_host=this_host, has_srun=has_srun)
    _check_effect(request, decision)
    return decision


def _plan(
    request: LaunchRequest, env: Mapping[str, str], *, this_host: tuple[str, ...], has_srun: bool
) -> LaunchPlan:
    if (rank := _mpi_rank(request, env)) is not None:
        return rank
    job = _slurm_job(request, env)
    if job is not None and job.one_rank_per_task:
        return _slurm_rank(request, job)
    if job is not None and (len(job.hosts) > 1 or job.in_step or request.force_multi):
        return _plan_slurm(request, job, has_srun)
    if request.hostfile is None:
        return _plan_without_hosts(request)
    return _plan_hosts(request, _listed_hosts(request, request.hostfile), this_host)


def _mpi_rank(request: LaunchRequest, env: Mapping[str, str]) -> ExecAsRank | None:
    """The rank that this process becomes if mpirun has started one process for each."""
    if request.no_ssh:
        return None
    started = mpi_rank_env(env, request.master_addr, request.master_port)
    if started is None:
        return None
    if request.nproc is not None:
        raise LaunchError(
            f"mpirun started {started['WORLD_SIZE']} processes, and each becomes one rank, so "
            f"--nproc {request.nproc} cannot be used. Leave it out, or let it start mpirun: "
            "zeroshard launch --launcher openmpi --hostfile FILE."
        )
    return ExecAsRank(started)


def _slurm_rank(request: LaunchRequest, job: SlurmJob) -> ExecAsRank:
    """The rank that this process becomes: SLURM has started one task for each."""
    if request.nproc is not None:
        raise LaunchError(
            f"SLURM started {job.num_tasks} tasks on {len(job.hosts)} nodes, and each becomes "
            f"one rank, so --nproc {request.nproc} cannot be used. Leave it out, or use "
            "--ntasks-per-node=1."
        )
    return ExecAsRank(
        slurm_rank_env(job, master_addr=request.master_addr, master_port=request.master_port)
    )


def _plan_hosts(
    request: LaunchRequest, hosts: tuple[Host, ...], this_host: tuple[str, ...]
) -> RunHere | RunNodes:
    """How the ranks of a hostfile are started."""
    if request.no_ssh:
        rank = _node_rank(request, len(hosts))
        address = request.master_addr or hosts[0].name
        return _here(request, hosts[rank], len(hosts), rank, address)
    local = (*this_host, "localhost", "127.0.0.1")
    if len(hosts) == 1 and hosts[0].name in local and not request.force_multi:
        return _here(request, hosts[0], 1, 0, request.master_addr)
    starter = request.launcher if request.launcher in MPI_LAUNCHERS else "ssh"
    return RunNodes(hosts, request.master_port or DEFAULT_PORT, starter)


def notices(request: LaunchRequest, decision: LaunchPlan) -> tuple[str, ...]:
    """One line for each option that does nothing here, or something else than its name says."""
    said: list[str] = []
    if isinstance(decision, RunNodes) and request.launcher == "pdsh":
        said.append("--launcher pdsh: hosts are reached over ssh, and pdsh is not used.")
    if isinstance(decision, RunHere) and request.launcher_args:
        said.append("--launcher_args has no effect: this run uses only this host.")
    own = {name for option in declared() if option[0] in _WHERE for name in option[3].names}
    if stray := next((word for word in request.args if word.partition("=")[0] in own), None):
        said.append(
            f"{stray} stands after the script, so the script gets it. An option of the launcher stands "
            f"before: zeroshard launch {stray} ... {request.script}"
        )
    return tuple(said)


def _slurm_job(request: LaunchRequest, env: Mapping[str, str]) -> SlurmJob | None:
    """The SLURM job to use: the one that was asked for, or the one found if there is no hostfile."""
    job = None if request.no_ssh else read_slurm(env)
    if request.launcher == "slurm":
        if job is None:
            raise LaunchError(
                "--launcher slurm: SLURM_JOB_ID is not set, so this is not a SLURM job. Start the "
                "command inside one (salloc, sbatch), or reach the hosts with --launcher ssh."
            )
        return job
    if request.hostfile:
        return None
    if job is not None and request.launcher and (len(job.hosts) > 1 or job.in_step):
        raise LaunchError(
            f"--launcher {request.launcher} in a SLURM job of {len(job.hosts)} nodes needs "
            "--hostfile with the hosts. Without --launcher, srun starts the nodes of the job."
        )
    return job


def _listed_hosts(request: LaunchRequest, hostfile: str) -> tuple[Host, ...]:
    return select(
        parse_hostfile(_read(hostfile), hostfile),
        include=request.include,
        exclude=request.exclude,
        num_nodes=request.num_nodes,
        num_slots=request.nproc,
    )


def _plan_without_hosts(request: LaunchRequest) -> RunHere:
    if request.force_multi:
        raise LaunchError(
            "--force_multi starts a launcher on each host, and no hosts are given. Give --hostfile."
        )
    num_nodes = request.num_nodes or 1
    if num_nodes > 1:
        if not request.no_ssh:
            raise LaunchError(
                f"--num_nodes {num_nodes} needs --hostfile, or --no_ssh --node_rank R on each node."
            )
        rank = _node_rank(request, num_nodes)
        if request.master_addr is None:
            raise LaunchError(
                "--no_ssh with several nodes needs --master_addr, the address of node 0."
            )
        port = request.master_port or DEFAULT_PORT
        return RunHere(request.nproc, num_nodes, rank, request.master_addr, port, None)
    devices = None
    nproc = request.nproc
    if request.include:
        listed = select([Host("localhost", tuple(range(_MANY_SLOTS)))], include=request.include)[0]
        if len(listed.slots) == _MANY_SLOTS:
            return RunHere(None, 1, 0, request.master_addr, request.master_port, None)
        nproc, devices = len(listed.slots), ",".join(map(str, listed.slots))
    elif request.exclude:
        raise LaunchError(
            "--exclude needs --hostfile. Without a hostfile, choose devices with --include."
        )
    return RunHere(nproc, 1, 0, request.master_addr, request.master_port, devices)


def _plan_slurm(request: LaunchRequest, job: SlurmJob, has_srun: bool) -> RunHere | RunSrun:
    if job.in_step:
        return _plan_step(request, job)
    if not has_srun:
        raise LaunchError(
            f"the SLURM job has {len(job.hosts)} nodes, but there is no srun on PATH; give "
            "--hostfile to use ssh, or run zeroshard launch under srun."
        )
    hosts, nproc = _slurm_hosts(request, job)
    port = request.master_port or job.port
    is_whole = len(hosts) == len(job.hosts)
    command = srun_words(
        request, hosts, port, nproc, is_whole=is_whole, master_addr=request.master_addr
    )
    return RunSrun(command, hosts, port, nproc, is_whole)


def _plan_step(request: LaunchRequest, job: SlurmJob) -> RunHere:
    """Inside a SLURM step every host has a launcher already."""
    if request.hostfile or request.force_multi:
        option = "--hostfile" if request.hostfile else "--force_multi"
        raise LaunchError(
            f"{option} inside a SLURM step: srun has chosen the hosts and started this launcher on "
            "one of them. Leave it out."
        )
    if len(job.hosts) == 1:
        return RunHere(request.nproc, 1, 0, request.master_addr, request.master_port, None)
    address, port = request.master_addr or job.hosts[0], request.master_port or job.port
    return RunHere(request.nproc, len(job.hosts), job.node_id, address, port, None)


def _slurm_hosts(request: LaunchRequest, job: SlurmJob) -> tuple[tuple[Host, ...], int | None]:
    """The hosts that srun starts a launcher on, and the ranks of each; None: it finds them."""
    nproc = request.nproc or job.tasks_per_node or None
    if request.hostfile:
        hosts = _in_order_of(job, _listed_hosts(request, request.hostfile))
        nproc = len(hosts[0].slots)
        slots = tuple(range(nproc))
    else:
        slots = tuple(range(nproc or _MANY_SLOTS))
        hosts = select(
            [Host(name, slots) for name in job.hosts],
            include=request.include,
            exclude=request.exclude,
            num_nodes=request.num_nodes,
        )
    if any(host.slots != slots for host in hosts):
        raise LaunchError(
            "under SLURM --include and --exclude choose whole nodes, with the same number of slots "
            "on each; choose devices with srun's options."
        )
    return hosts, nproc


def srun_words(
    request: LaunchRequest,
    hosts: tuple[Host, ...],
    port: int,
    nproc: int | None,
    *,
    is_whole: bool,
    master_addr: str | None = None,
) -> tuple[str, ...]:
    """The ``srun`` command that starts the launchers of ``hosts``.

    ``master_addr``: the address of the first one; None: its name.
    """
    launcher = [*this_launcher(request.venv_script)]
    if master_addr is not None or len(hosts) > 1:  # a single host meets on its loopback interface
        launcher += ["--master_addr", master_addr or hosts[0].name]
    launcher += ["--master_port", str(port)]
    if nproc is not None:
        launcher += ["--nproc", str(nproc)]
    launcher += [*passed_on(request), "--", request.script, *request.args]
    names = [] if is_whole else [host.name for host in hosts]
    return tuple(srun_command(len(hosts), names, launcher, shlex.split(request.launcher_args)))


def _in_order_of(job: SlurmJob, hosts: tuple[Host, ...]) -> tuple[Host, ...]:
    """The hosts in the order of SLURM's node numbers, since the ranks meet at node 0."""
    strange = [host.name for host in hosts if host.name not in job.hosts]
    if strange:
        raise LaunchError(
            f"--hostfile names {strange[0]!r}, which is not a node of the SLURM job "
            f"({', '.join(job.hosts)}). Filter with --include, or leave --hostfile out."
        )
    return tuple(sorted(hosts, key=lambda host: job.hosts.index(host.name)))


def _here(
    request: LaunchRequest, host: Host, num_nodes: int, rank: int, address: str | None
) -> RunHere:
    port = request.master_port or (DEFAULT_PORT if num_nodes > 1 else None)
    return RunHere(len(host.slots), num_nodes, rank, address, port, host.devices)


def check_request(request: LaunchRequest) -> None:
    """Check that the options do not contradict each other.

    Raises:
        LaunchError: they do.
    """
    if request.module and request.no_python:
        raise LaunchError("--module and --no_python cannot be given together; keep one of them.")
    check_filters(
        include=request.include,
        exclude=request.exclude,
        num_nodes=request.num_nodes,
        num_slots=request.nproc,
    )
    if request.node_rank is not None and not request.no_ssh:
        raise LaunchError(
            f"--node_rank {request.node_rank} is for one launcher per node; give --no_ssh with it."
        )
    if request.master_port is not None and not 0 < request.master_port < 1 << 16:
        raise LaunchError(
            f"--master_port is {request.master_port}; it must lie between 1 and 65535."
        )
    _check_restarts(request)
    _check_launcher(request)


def _check_restarts(request: LaunchRequest) -> None:
    if not 0 <= request.preempt_save_s < float("inf"):
        raise LaunchError(
            f"--preempt-save-s is {request.preempt_save_s}; give seconds from 0 (no time to save)."
        )
    if request.max_restarts < 0:
        raise LaunchError(
            f"--max-restarts is {request.max_restarts}; it must be 0 (no restart) or more."
        )
    if request.max_restarts and not request.checkpoint_dir:
        raise LaunchError(
            f"--max-restarts {request.max_restarts} needs --checkpoint-dir DIR, where the program saves. "
            "Newer checkpoints there show that an attempt got further than the one before."
        )
    if request.checkpoint_dir is not None and not request.max_restarts:
        raise LaunchError(
            f"--checkpoint-dir {request.checkpoint_dir!r} has no effect without --max-restarts N. Give "
            "both, or leave it out."
        )
    if request.min_ranks is not None:
        check_min_ranks(request.min_ranks, None)
        if not request.max_restarts:
            raise LaunchError(
                f"--min-ranks {request.min_ranks} has no effect without --max-restarts N. Give both, or "
                "leave it out."
            )
    elif request.check_slot is not None:
        raise LaunchError(
            f"--check-slot {request.check_slot!r} has no effect without --min-ranks M. Give both, or "
            "leave it out."
        )


def check_min_ranks(min_ranks: int, num_ranks: int | None) -> None:
    """Check ``--min-ranks``. ``num_ranks``: of the whole run; None if it is not known yet.

    Raises:
        LaunchError: it is below 1, or larger than ``num_ranks``.
    """
    if min_ranks < 1:
        raise LaunchError(f"--min-ranks is {min_ranks}; it must be at least 1.")
    if num_ranks is not None and min_ranks > num_ranks:
        raise LaunchError(
            f"--min-ranks {min_ranks} is more than the {num_ranks} rank{'s' if num_ranks > 1 else ''} of "
            "this run. Give a smaller number, or start more ranks."
        )


def _check_launcher(request: LaunchRequest) -> None:
    launcher = request.launcher
    if launcher is not None and launcher not in LAUNCHERS:
        raise LaunchError(f"--launcher {launcher!r} is unknown. Use one of {', '.join(LAUNCHERS)}.")
    for option, given in (("--launcher", launcher), ("--force_multi", request.force_multi)):
        if given and request.no_ssh:
            raise LaunchError(
                f"{option} and --no_ssh cannot be given together: with --no_ssh nothing is started on "
                "other hosts."
            )
    if request.ssh_port is not None and launcher not in (None, "ssh", "pdsh"):
        raise LaunchError(
            f"--ssh_port cannot be used with --launcher {launcher}, which does not use ssh. Leave "
            "it out."
        )
    if request.launcher_args and launcher in (None, "pdsh"):
        given = "--launcher pdsh" if launcher else "no --launcher"
        raise LaunchError(
            f"--launcher_args {request.launcher_args!r} with {given}: hosts are reached over ssh, "
            "which has other options than pdsh. Give options of ssh, with --launcher ssh."
        )
    try:
        shlex.split(request.launcher_args)
    except ValueError as error:
        raise LaunchError(
            f"--launcher_args {request.launcher_args!r} cannot be split into words: {error}."
        ) from error


def _check_effect(request: LaunchRequest, decision: LaunchPlan) -> None:
    """Check that no option would be without effect under ``decision``."""
    if request.venv_script is not None and isinstance(decision, (RunHere, ExecAsRank)):
        raise LaunchError(
            f"--venv_script {request.venv_script!r} is for launchers that are started on other hosts. "
            "Here, activate the environment before this command."
        )
    if request.max_restarts and isinstance(decision, ExecAsRank):
        raise LaunchError(
            f"--max-restarts {request.max_restarts}: SLURM or MPI started one process per rank, and a "
            "rank cannot start the others again. Use srun --ntasks-per-node=1, or run it without srun or "
            "mpirun."
        )
    if request.max_restarts and isinstance(decision, RunNodes) and decision.starter != "ssh":
        raise LaunchError(
            f"--max-restarts {request.max_restarts} with --launcher {decision.starter}: mpirun ends with "
            "the first host that fails. Reach the hosts with --launcher ssh."
        )
    binds = request.bind_cores or request.bind_core_list is not None
    if binds and isinstance(decision, ExecAsRank):
        raise LaunchError(
            "--bind_cores_to_rank: SLURM or MPI started one process per rank, and binds them itself. Use "
            "srun --cpu-bind=cores, mpirun --bind-to core, or srun --ntasks-per-node=1."
        )
    becomes = isinstance(decision, (RunSrun, ExecAsRank)) or (
        isinstance(decision, RunNodes) and decision.starter in MPI_LAUNCHERS
    )
    if request.save_pid and becomes:
        raise LaunchError(
            "--save_pid: this command becomes srun, mpirun or a rank, and could not remove its "
            "file. The process id does not change: use that id, or scancel."
        )


def _node_rank(request: LaunchRequest, num_nodes: int) -> int:
    rank = request.node_rank
    if rank is None:
        if num_nodes == 1:
            return 0
        raise LaunchError("--no_ssh with several nodes needs --node_rank, this node's number.")
    if not 0 <= rank < num_nodes:
        raise LaunchError(f"--node_rank {rank} is outside of 0..{num_nodes - 1}.")
    return rank


def _read(hostfile: str) -> str:
    try:
        return Path(hostfile).read_text()
    except OSError as error:
        raise LaunchError(
            f"--hostfile {hostfile!r} cannot be read: {error.strerror}. It must contain lines "
            "'host slots=N'."
        ) from error
