"""Carries out a launch plan: runs the ranks of this node, starts other launchers, or becomes a rank."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from zeroshard.errors import LaunchError
from zeroshard.launch.launch_plan import (
    ExecAsRank,
    RunHere,
    RunNodes,
    RunSrun,
    notices,
    plan_launch,
)
from zeroshard.launch.meeting import restart_together
from zeroshard.launch.options import LaunchRequest
from zeroshard.launch.rank_env import (
    DEEPSPEED_ENVIRONMENT_NAME,
    MASTER_VARIABLE,
    SECRET_VARIABLE,
    check_secret,
    exported,
    new_secret,
    rank_defaults,
    read_exports,
    with_directory_first,
)
from zeroshard.launch.remote import (
    end_with_parent_pipe,
    environment_of_parent,
    hidden_names,
    mpirun_command,
    names_of_this_host,
)
from zeroshard.launch.resources import (
    Shares,
    check_memory,
    parse_core_list,
    parse_nbytes,
    read_cpus,
    share_cores,
    share_listed,
)
from zeroshard.launch.restarting import (
    check_port,
    commands_of,
    restart_here,
    restart_nodes,
    restart_srun,
    start_nodes,
)
from zeroshard.memory.host_limits import host_limits, read_shm_nbytes
from zeroshard.run.address import check_address, gloo_on_loopback
from zeroshard.run.run_folder import ATTEMPT_VARIABLE, RUN_ID_VARIABLE, new_run_id

if TYPE_CHECKING:
    from zeroshard.launch.agent import NodeRun

_PID_FOLDER = Path("/tmp")  # not TMPDIR: programs look for the file here


def launch(request: LaunchRequest, console: TextIO | None = None) -> int:
    """Run a training program on all its ranks and return the exit code of the first rank that failed.

    The exit code is 128 + N for a rank that died of signal N, and for a launcher that was stopped by
    signal N.

    Raises:
        LaunchError: the options cannot work. Raised before anything is started.
    """
    console = console or sys.stderr
    # Looking up a full name may take seconds, so look it up only where it is needed.
    fqdn = socket.getfqdn() if request.hostfile else ""
    this_host = names_of_this_host(socket.gethostname(), fqdn)
    decision = plan_launch(
        request, os.environ, this_host=this_host, has_srun=shutil.which("srun") is not None
    )
    _check_script(request)
    for text in () if request.quiet else notices(request, decision):
        print(f"zeroshard: {text}", file=console)
    if isinstance(decision, ExecAsRank):
        program, arguments = _program(request)
        local_rank = int(decision.env["LOCAL_RANK"])
        if request.pass_local_rank:
            arguments.insert(_local_rank_at(request), f"--local_rank={local_rank}")
        # SLURM binds each task to its cores.
        master = (decision.env["MASTER_ADDR"], decision.env["MASTER_PORT"])
        run_id = _common_run_id(*master)
        defaults = rank_defaults(os.environ, cores=_cores(), num_local=1, run_id=run_id)
        path = with_directory_first(os.environ, request.as_deepspeed)
        os.execvpe(
            program, [program, *arguments], {**os.environ, **defaults, **decision.env, **path}
        )
    if isinstance(decision, RunSrun):
        os.environ |= new_secret(os.environ)  # srun passes the environment on
        if request.max_restarts:
            return restart_srun(request, decision, run_id=_run_id(), console=console)
        os.execvp(decision.command[0], list(decision.command))
    with _pid_file() if request.save_pid else nullcontext():
        if isinstance(decision, RunNodes):
            return _run_nodes(request, decision, this_host, console)
        return _run_here(request, decision, console)


def _run_nodes(
    request: LaunchRequest, decision: RunNodes, this_host: tuple[str, ...], console: TextIO
) -> int:
    env = {RUN_ID_VARIABLE: _run_id(), **exported(os.environ), **_exports_of_files()}
    env |= new_secret(env)
    if decision.starter != "ssh":
        commands = commands_of(request, decision, env, this_host)
        hidden = hidden_names(env)
        os.environ.update({name: env[name] for name in hidden})
        words = shlex.split(request.launcher_args)
        line = mpirun_command(decision.starter, commands, words, hidden)
        if shutil.which(line[0]) is None:
            raise LaunchError(
                f"--launcher {decision.starter}: there is no {line[0]} on PATH. Load the MPI module, or "
                "reach the hosts with --launcher ssh."
            )
        os.execvp(line[0], line)
    if request.max_restarts:
        return restart_nodes(request, decision, env, this_host, console)
    commands = commands_of(request, decision, env, this_host)
    return start_nodes(request, commands, console).exitcode


@contextmanager
def _pid_file() -> Iterator[None]:
    """A context in which ``/tmp/<id>.deepspeed`` holds this process's id, as with DeepSpeed."""
    path = _PID_FOLDER / f"{os.getpid()}.deepspeed"
    try:
        path.unlink(missing_ok=True)  # left by a killed launcher that had the same process id
        with path.open("x") as file:
            file.write(str(os.getpid()))
    except OSError as error:
        raise LaunchError(
            f"--save_pid: {str(path)!r} cannot be written: {error.strerror}. Free some space "
            "there, or leave the option out."
        ) from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _run_here(request: LaunchRequest, here: RunHere, console: TextIO) -> int:
    if request.leash:
        os.environ.update(environment_of_parent())
        end_with_parent_pipe()
    secret = check_secret(os.environ)
    os.environ.pop(SECRET_VARIABLE, None)
    if here.num_nodes > 1 and here.master_addr is not None:
        check_address(here.master_addr, here.master_port)
    num_local = here.num_local or _visible_gpus()
    expected = request.expect_memory_per_rank
    warnings = check_memory(
        host_limits(),
        num_local=num_local,
        expected_nbytes=parse_nbytes(expected, "--expect-memory-per-rank") if expected else None,
        shm_nbytes=read_shm_nbytes(),
    )
    if not request.quiet:
        for text in (*warnings, *_shadow_warning(request), *_secret_warning(here, secret)):
            print(f"zeroshard: {text}", file=console)
    from zeroshard.launch.agent import run_node

    node = _node_run(request, here, num_local, secret)
    if request.max_restarts and here.num_nodes > 1:
        return restart_together(request, here, node, run_id=_run_id(), console=console)
    if here.master_port is not None and here.node_rank == 0:
        check_port(here.master_port)
    if request.max_restarts:
        return restart_here(request, here, node, run_id=_run_id(), console=console)
    return run_node(node, console).exitcode


def _node_run(request: LaunchRequest, here: RunHere, num_local: int, secret: str) -> NodeRun:
    """What the ranks of this node need."""
    from zeroshard.launch.agent import NodeRun

    program, arguments = _program(request)
    shares = _shares(request, num_local)
    cores = _cores() if shares is None else shares.num_threads * num_local
    return NodeRun(
        program=program,
        arguments=tuple(arguments),
        num_local=num_local,
        num_nodes=here.num_nodes,
        node_rank=here.node_rank,
        master_addr=here.master_addr,
        master_port=here.master_port,
        secret=secret,
        attempt=os.environ.get(ATTEMPT_VARIABLE, "0"),
        pass_local_rank_at=_local_rank_at(request) if request.pass_local_rank else None,
        env=_rank_environment(request, here, num_local, cores),
        cpus=() if shares is None else shares.cpus,
        log_dir=Path(request.each_rank_log) if request.each_rank_log else None,
        timeouts=request.timeouts,
        verbose=request.verbose,
    )


def _rank_environment(
    request: LaunchRequest, here: RunHere, num_local: int, cores: int
) -> dict[str, str]:
    """What the ranks of this node get besides the environment of the launcher."""
    is_alone = here.num_nodes == 1
    env = rank_defaults(
        os.environ,
        cores=cores,
        num_local=num_local,
        node_rank=here.node_rank,
        num_nodes=here.num_nodes,
        run_id=_run_id() if is_alone else _common_run_id(here.master_addr, here.master_port),
    )
    env |= with_directory_first(os.environ, request.as_deepspeed)
    if here.devices is not None:
        env["CUDA_VISIBLE_DEVICES"] = here.devices
    if is_alone:
        env |= {n: value for n, value in gloo_on_loopback().items() if n not in os.environ}
    elif here.master_addr is not None:
        env[MASTER_VARIABLE] = here.master_addr
    return env


def _common_run_id(address: str | None, port: int | str | None) -> str:
    """The same name for all launchers of a run, also if a user or MPI has started each of them: ranks of
    other names do not find each other."""
    if RUN_ID_VARIABLE in os.environ or "SLURM_JOB_ID" in os.environ:
        return _run_id()
    return re.sub(r"[^A-Za-z0-9._-]+", "-", f"nodes-{address}-{port}")


@functools.cache
def _run_id() -> str:
    """The same name for all tasks of a Slurm job, which have a launcher each."""
    if given := os.environ.get(RUN_ID_VARIABLE):
        return given
    job, step = (os.environ.get(f"SLURM_{name}_ID") for name in ("JOB", "STEP"))
    return new_run_id() if job is None else f"slurm-{job}-{step or 0}"


def _exports_of_files() -> dict[str, str]:
    found: dict[str, str] = {}
    for path in (Path.home() / DEEPSPEED_ENVIRONMENT_NAME, Path(DEEPSPEED_ENVIRONMENT_NAME)):
        if path.is_file():
            found |= read_exports(path.read_text(), str(path))
    return found


def _program(request: LaunchRequest) -> tuple[str, list[str]]:
    """The program that a rank executes, and its arguments."""
    if request.no_python:
        return request.script, list(request.args)
    mode = ["-m"] if request.module else []
    return sys.executable, ["-u", *mode, request.script, *request.args]


def _local_rank_at(request: LaunchRequest) -> int:
    """The position of ``--local_rank=N`` among the arguments: right after the script."""
    return 0 if request.no_python else 2 + request.module


def _check_script(request: LaunchRequest) -> None:
    """Check that the script or program exists: one error here instead of one per rank."""
    if request.no_python:
        if shutil.which(request.script) is None:
            raise LaunchError(
                f"program {request.script!r} is not found or not executable; with --no_python, "
                "ranks execute it directly."
            )
    elif not request.module and not Path(request.script).is_file():
        if Path(request.script).is_dir():
            raise LaunchError(f"script {request.script!r} is a folder. Name the program in it.")
        hint = ""
        if Path(*request.script.split(".")).with_suffix(".py").is_file():
            hint = " To run it as a module, give --module."
        raise LaunchError(f"script {request.script!r} is not found in {os.getcwd()}.{hint}")


def _shadow_warning(request: LaunchRequest) -> tuple[str, ...]:
    if request.no_python:
        return ()
    # Python puts the script's directory, or the working one for a module, before PYTHONPATH.
    home = Path() if request.module else Path(request.script).parent
    return tuple(
        f"{str(found)!r} is in the directory of the script, so 'import deepspeed' imports it "
        "instead of ZeroShard. Rename it."
        for found in (home / "deepspeed", home / "deepspeed.py")
        if found.exists()
    )


def _secret_warning(here: RunHere, secret: str) -> tuple[str, ...]:
    if secret or here.num_nodes == 1 or here.node_rank:
        return ()
    return (
        f"this run has no secret, so everyone who reaches {here.master_addr}:{here.master_port} can end "
        f"it or send its ranks to other addresses. Set {SECRET_VARIABLE} to the same random text on all "
        "hosts (docs/security.md).",
    )


def _shares(request: LaunchRequest, num_local: int) -> Shares | None:
    """The cores of each local rank; None if ranks are not to be bound."""
    if request.bind_core_list is not None:
        listed = parse_core_list(request.bind_core_list)
        return share_listed(read_cpus(), listed, num_local)
    return share_cores(read_cpus(), num_local) if request.bind_cores else None


def _visible_gpus() -> int:
    from zeroshard.device.choice import visible_devices

    return max(1, visible_devices())


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
