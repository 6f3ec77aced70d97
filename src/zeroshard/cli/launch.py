"""The ``zeroshard launch`` command: makes a :class:`LaunchRequest` from options and runs it."""

from __future__ import annotations

import signal
import sys
from typing import Annotated, Any

import typer

from zeroshard.cli.compat import warn_of_winner
from zeroshard.deepspeed.install import DIRECTORY
from zeroshard.errors import LaunchError
from zeroshard.launch import LAUNCHERS, LaunchRequest, ShutdownTimeouts, launch

# All words after the script are arguments of the script.
CONTEXT = {"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}


def _refused(reason: str) -> Any:
    """The callback of an option of DeepSpeed's command that is refused with ``reason``."""

    def check(value: Any) -> None:
        if value:
            raise typer.BadParameter(reason)

    return check


_NO_TUNING = _refused("nothing needs tuning: sizes are derived from the model. Leave it out.")
_NO_ELASTIC = _refused(
    "a run does not change its number of ranks; checkpoints load at any world size. Leave it out, and "
    "start again with other hosts."
)


def launch_command(
    script: Annotated[str, typer.Argument(help="The training program.")],
    args: Annotated[list[str] | None, typer.Argument(help="Its arguments.")] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            "--nproc",
            "--nproc_per_node",
            "--nproc-per-node",
            "--num_gpus",
            "--num-gpus",
            "--num_accelerators",
            help="Ranks per node; default: one per visible GPU, or one.",
        ),
    ] = None,
    hostfile: Annotated[
        str | None, typer.Option("--hostfile", "-H", help="Lines 'host slots=N'.")
    ] = None,
    include: Annotated[
        str, typer.Option("--include", "-i", help="What to use: 'host:0,1@host2'.")
    ] = "",
    exclude: Annotated[
        str, typer.Option("--exclude", "-e", help="What to leave out: 'host:0,1@host2'.")
    ] = "",
    num_nodes: Annotated[int | None, typer.Option("--num_nodes", "--num-nodes", "--nnodes")] = None,
    node_rank: Annotated[
        int | None, typer.Option("--node_rank", "--node-rank", help="This node, with --no_ssh.")
    ] = None,
    master_addr: Annotated[
        str | None, typer.Option("--master_addr", "--master-addr", help="Address of node 0.")
    ] = None,
    master_port: Annotated[
        int | None,
        typer.Option("--master_port", "--master-port", help="29500, or a free port on one node."),
    ] = None,
    module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is a module: python -m SCRIPT.")
    ] = False,
    no_python: Annotated[
        bool, typer.Option("--no_python", "--no-python", help="SCRIPT is a program of its own.")
    ] = False,
    pass_local_rank: Annotated[
        bool,
        typer.Option(
            "--pass_local_rank/--no_local_rank",
            help="Give the script --local_rank=N, as the deepspeed command does.",
        ),
    ] = False,
    as_deepspeed: Annotated[
        bool,
        typer.Option(
            "--as-deepspeed",
            "--as_deepspeed",
            help="Let the script's `import deepspeed` find ZeroShard.",
        ),
    ] = False,
    no_ssh: Annotated[
        bool, typer.Option("--no_ssh", "--no-ssh", help="Run this node only; I start the others.")
    ] = False,
    ssh_port: Annotated[int | None, typer.Option("--ssh_port", "--ssh-port")] = None,
    launcher: Annotated[
        str | None,
        typer.Option(
            "--launcher",
            help=f"What starts other hosts: {', '.join(LAUNCHERS)}. Default: srun in a SLURM job, "
            "else ssh. pdsh is a name for ssh.",
        ),
    ] = None,
    launcher_args: Annotated[
        str,
        typer.Option("--launcher_args", "--launcher-args", help="Options for ssh, srun or mpirun."),
    ] = "",
    force_multi: Annotated[
        bool,
        typer.Option(
            "--force_multi", "--force-multi", help="A launcher of its own also for a single host."
        ),
    ] = False,
    no_ssh_check: Annotated[
        bool,
        typer.Option(
            "--no_ssh_check",
            "--no-ssh-check",
            help="There is no check: a host that ssh cannot reach ends the start.",
        ),
    ] = False,
    venv_script: Annotated[
        str | None,
        typer.Option(
            "--venv_script",
            "--venv-script",
            metavar="FILE",
            help="What the shell of each host reads first; then its `python` is used.",
        ),
    ] = None,
    bind_cores: Annotated[
        bool,
        typer.Option(
            "--bind_cores_to_rank",
            "--bind-cores-to-rank",
            help="Give each rank its own physical cores, and OMP_NUM_THREADS to match.",
        ),
    ] = False,
    bind_core_list: Annotated[
        str | None,
        typer.Option(
            "--bind_core_list",
            "--bind-core-list",
            metavar="CORES",
            help="Bind the ranks of a node to these: '0-3,8-11'.",
        ),
    ] = None,
    save_pid: Annotated[
        bool,
        typer.Option(
            "--save_pid",
            "--save-pid",
            help="While it runs, /tmp/<id>.deepspeed holds this launcher's process id.",
        ),
    ] = False,
    each_rank_log: Annotated[
        str | None,
        typer.Option(
            "--enable_each_rank_log",
            "--enable-each-rank-log",
            metavar="DIR",
            help="Output of each rank to DIR/rank<N>.log instead of the console.",
        ),
    ] = None,
    expect_memory_per_rank: Annotated[
        str | None,
        typer.Option(
            "--expect-memory-per-rank",
            "--expect_memory_per_rank",
            metavar="SIZE",
            help="Host memory a rank will need, e.g. 12GB; refuse to start if it is not free.",
        ),
    ] = None,
    grace_s: Annotated[
        float, typer.Option("--grace-s", help="Seconds for survivors to end by themselves.")
    ] = ShutdownTimeouts().grace_s,
    stop_s: Annotated[
        float, typer.Option("--stop-s", help="Seconds between a request to stop and SIGKILL.")
    ] = ShutdownTimeouts().stop_s,
    log_level: Annotated[
        str, typer.Option("--log_level", "--log-level", help="info shows torch's agent as well.")
    ] = "warning",
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No warnings before the start.")
    ] = False,
    leash: Annotated[bool, typer.Option("--leash", hidden=True)] = False,
    end_by_signal: Annotated[bool, typer.Option("--end-by-signal", hidden=True)] = False,
    autotuning: Annotated[
        str | None, typer.Option("--autotuning", hidden=True, callback=_NO_TUNING)
    ] = None,
    elastic_training: Annotated[
        bool, typer.Option("--elastic_training", hidden=True, callback=_NO_ELASTIC)
    ] = False,
    min_elastic_nodes: Annotated[
        int | None, typer.Option("--min_elastic_nodes", hidden=True, callback=_NO_ELASTIC)
    ] = None,
    max_elastic_nodes: Annotated[
        int | None, typer.Option("--max_elastic_nodes", hidden=True, callback=_NO_ELASTIC)
    ] = None,
) -> None:
    """Run SCRIPT on all ranks: on this node, on the hosts of a hostfile, or on a SLURM job's nodes.

    Says why a rank died, shows the first traceback once, and ends with that rank's exit code.
    """
    # There is no ssh check to turn off. The callbacks have refused the other options.
    del no_ssh_check, autotuning, elastic_training, min_elastic_nodes, max_elastic_nodes
    if as_deepspeed and not quiet:
        warn_of_winner()
    request = LaunchRequest(
        script=script,
        args=tuple(args or ()),
        nproc=nproc,
        hostfile=hostfile,
        include=include,
        exclude=exclude,
        num_nodes=num_nodes,
        node_rank=node_rank,
        master_addr=master_addr,
        master_port=master_port,
        module=module,
        no_python=no_python,
        pass_local_rank=pass_local_rank,
        as_deepspeed=str(DIRECTORY) if as_deepspeed else "",
        no_ssh=no_ssh,
        ssh_port=ssh_port,
        launcher=launcher,
        launcher_args=launcher_args,
        force_multi=force_multi,
        venv_script=venv_script,
        bind_cores=bind_cores,
        bind_core_list=bind_core_list,
        save_pid=save_pid,
        each_rank_log=each_rank_log,
        expect_memory_per_rank=expect_memory_per_rank,
        timeouts=ShutdownTimeouts(grace_s, stop_s),
        quiet=quiet,
        verbose=log_level.lower() in ("info", "debug", "trace"),
        leash=leash,
    )
    try:
        code = launch(request)
    except LaunchError as error:
        print(f"zeroshard: {error}", file=sys.stderr)
        code = 2
    if code and end_by_signal:
        sys.stdout.flush()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)
    raise typer.Exit(code)


standalone = typer.Typer(add_completion=False, rich_markup_mode=None)
standalone.command(context_settings=CONTEXT)(launch_command)
