"""The options of ``zeroshard launch``: each is declared once, as a field of :class:`LaunchRequest`.

The command line and the ``deepspeed`` runner (``cli/launch.py``), and the words for the launchers of
other nodes (:func:`passed_on`), are made from these declarations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

from zeroshard.errors import NO_TUNING
from zeroshard.launch.supervisor import ShutdownTimeouts

MPI_LAUNCHERS = ("openmpi", "mpich", "impi", "mvapich")
LAUNCHERS = ("ssh", "pdsh", "slurm", *MPI_LAUNCHERS)
"""The values of ``--launcher``: what starts the launchers of other hosts. ``pdsh`` means ssh."""

_VERBOSE_LEVELS = ("info", "debug", "trace")


@dataclass(frozen=True, slots=True)
class Option:
    """The command-line side of a field. ``names[0]`` is the name that launchers pass on.

    ``passed_on``: the launcher of every node gets the option as well. ``is_switch``: the command line has
    no value for it; the command fills in the value. ``refused``: why the option cannot be used.
    """

    names: tuple[str, ...]
    help: str = ""
    metavar: str | None = None
    hidden: bool = False
    passed_on: bool = False
    is_switch: bool = False
    refused: str = ""


def _option(default: Any, names: str, **how: Any) -> Any:
    return field(default=default, metadata={"option": Option(tuple(names.split()), **how)})


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """The options of ``zeroshard launch``, with DeepSpeed's names where DeepSpeed has them."""

    script: str
    args: tuple[str, ...] = ()
    nproc: int | None = _option(
        None,
        "--nproc --nproc_per_node --nproc-per-node --num_gpus --num-gpus --num_accelerators",
        help="Number of ranks on each node. Default: one for each visible GPU, or one without a GPU.",
    )
    hostfile: str | None = _option(
        None, "--hostfile -H", help="File with the hosts of the run. Each line is 'host slots=N'."
    )
    include: str = _option(
        "", "--include -i", help="Hosts and slots to use, for example 'host:0,1@host2'."
    )
    exclude: str = _option(
        "", "--exclude -e", help="Hosts and slots not to use, for example 'host:0,1@host2'."
    )
    num_nodes: int | None = _option(
        None,
        "--num_nodes --num-nodes --nnodes",
        help="Number of nodes. With --hostfile, its first hosts are used.",
    )
    node_rank: int | None = _option(
        None, "--node_rank --node-rank", help="Number of this node, from 0. Only with --no_ssh."
    )
    master_addr: str | None = _option(
        None, "--master_addr --master-addr", help="Address of node 0."
    )
    master_port: int | None = _option(
        None,
        "--master_port --master-port",
        help="Port on node 0 where the ranks meet. Default: 29500, or a free port on a single node.",
    )
    module: bool = _option(
        False,
        "--module -m",
        passed_on=True,
        help="SCRIPT is the name of a module. Ranks run python -m SCRIPT.",
    )
    no_python: bool = _option(
        False,
        "--no_python --no-python",
        passed_on=True,
        help="SCRIPT is an executable program. Ranks run it without python.",
    )
    pass_local_rank: bool = _option(
        False,
        "--pass_local_rank/--no_local_rank",
        passed_on=True,
        help="Pass --local_rank=N to the script, as the deepspeed command does.",
    )
    as_deepspeed: str = _option(  # directory that is put first on the ranks' PYTHONPATH
        "",
        "--as-deepspeed --as_deepspeed",
        passed_on=True,
        is_switch=True,
        help="In the script, `import deepspeed` imports ZeroShard.",
    )
    no_ssh: bool = _option(
        False,
        "--no_ssh --no-ssh",
        help="Run the ranks of this node only. You start the command on the other nodes yourself.",
    )
    ssh_port: int | None = _option(
        None, "--ssh_port --ssh-port", help="Port for ssh connections to the hosts."
    )
    launcher: str | None = _option(  # None: srun in a SLURM job, else ssh
        None,
        "--launcher",
        help=f"What starts the launchers of other hosts: {', '.join(LAUNCHERS)}. pdsh means ssh. "
        "Default: srun in a SLURM job, else ssh.",
    )
    launcher_args: str = _option(
        "", "--launcher_args --launcher-args", help="Options for ssh, srun or mpirun."
    )
    force_multi: bool = _option(
        False,
        "--force_multi --force-multi",
        help="Start a separate launcher on each host, also if there is only one host.",
    )
    venv_script: str | None = _option(
        None,
        "--venv_script --venv-script",
        metavar="FILE",
        help="Script that the shell of each host reads first, such as venv/bin/activate. Then the "
        "`python` on its PATH is used.",
    )
    bind_cores: bool = _option(
        False,
        "--bind_cores_to_rank --bind-cores-to-rank",
        passed_on=True,
        help=(
            "Bind each rank to its own physical cores. OMP_NUM_THREADS is set to their number, "
            "unless it is set already."
        ),
    )
    bind_core_list: str | None = _option(
        None,
        "--bind_core_list --bind-core-list",
        metavar="CORES",
        passed_on=True,
        help="Bind the ranks of a node to these cores, for example '0-3,8-11'.",
    )
    save_pid: bool = _option(
        False,
        "--save_pid --save-pid",
        help="During the run, the file /tmp/<id>.deepspeed contains this launcher's process id.",
    )
    each_rank_log: str | None = _option(
        None,
        "--enable_each_rank_log --enable-each-rank-log",
        metavar="DIR",
        passed_on=True,
        help="Write the output of each rank to DIR/rank<N>.log instead of the console.",
    )
    expect_memory_per_rank: str | None = _option(
        None,
        "--expect-memory-per-rank --expect_memory_per_rank",
        metavar="SIZE",
        passed_on=True,
        help="Host memory that each rank will need, for example 12GB. If it is not free, the run does "
        "not start.",
    )
    max_restarts: int = _option(
        0,
        "--max-restarts --max_restarts",
        help="Start the ranks again after a failure, at most this many times. The program loads its "
        "newest checkpoint: load_checkpoint(DIR, missing_ok=True). Needs --checkpoint-dir.",
    )
    checkpoint_dir: str | None = _option(
        None,
        "--checkpoint-dir --checkpoint_dir",
        metavar="DIR",
        help="Where the program saves checkpoints. Three attempts in a row without a newer one end the "
        "run. Only with --max-restarts.",
    )
    min_ranks: int | None = _option(
        None,
        "--min-ranks --min_ranks",
        metavar="M",
        help="Before a restart, leave out hosts that do not answer and slots that cannot be used, and go "
        "on with at least M ranks. train_batch_size stays the same. Only with --max-restarts. Default: "
        "every attempt has all ranks.",
    )
    check_slot: str | None = _option(
        None,
        "--check-slot --check_slot",
        metavar="COMMAND",
        help="With --min-ranks: a shell command that ends with exit code 0 if a slot can be used. It "
        "runs on the slot's host, with its number in ZEROSHARD_SLOT. Default: the slot's device is "
        "tried.",
    )
    grace_s: float = _option(
        ShutdownTimeouts().grace_s,
        "--grace-s",
        passed_on=True,
        help="Seconds that the other ranks have to end by themselves after a rank has failed.",
    )
    stop_s: float = _option(
        ShutdownTimeouts().stop_s,
        "--stop-s",
        passed_on=True,
        help="Seconds between the request to stop and SIGKILL.",
    )
    alone_s: float = _option(
        ShutdownTimeouts().alone_s,
        "--alone-s",
        passed_on=True,
        help="How long stopped ranks may stay once all others have ended, in seconds.",
    )
    preempt_save_s: float = _option(
        0.0,
        "--preempt-save-s --preempt_save_s",
        passed_on=True,
        help="Seconds that the ranks have to save after SIGTERM, SIGUSR1 or Ctrl-C. The signal goes to "
        "the ranks and not to their data-loader workers. If all ranks end with exit code 0, so does the "
        "launcher. A second signal stops the ranks. Default: a signal stops them at once.",
    )
    log_level: str = _option(
        "warning",
        "--log_level --log-level",
        passed_on=True,
        help="With info, debug or trace, messages of torch's elastic agent are printed too.",
    )
    quiet: bool = _option(
        False, "--quiet -q", passed_on=True, help="Print no warnings before the start."
    )
    leash: bool = _option(  # another launcher controls this one through its standard input
        False, "--leash", hidden=True
    )
    end_by_signal: bool = _option(  # a failed launcher ends by SIGTERM, for mpirun
        False, "--end-by-signal", hidden=True
    )

    @property
    def timeouts(self) -> ShutdownTimeouts:
        return ShutdownTimeouts(self.grace_s, self.stop_s, self.preempt_save_s, self.alone_s)

    @property
    def verbose(self) -> bool:
        return self.log_level.lower() in _VERBOSE_LEVELS


_NO_ELASTIC = (
    "the number of ranks does not change during a run; checkpoints load at any world size. Leave it "
    "out, and start again with other hosts."
)

_OF_THE_PROGRAM = (
    "it is an option of the program, and stands after it: zeroshard launch SCRIPT --config FILE, if the "
    "script reads it. The launcher reads no configuration."
)

WITHOUT_FIELD: dict[str, tuple[type, Option]] = {
    "no_ssh_check": (
        bool,
        Option(
            ("--no_ssh_check", "--no-ssh-check"),
            help="Has no effect: hosts are not checked. If ssh cannot reach a host, the start fails.",
        ),
    ),
    "autotuning": (
        str,
        Option(("--autotuning",), hidden=True, refused=f"{NO_TUNING}. Leave --autotuning out."),
    ),
    "config": (
        str,
        Option(
            ("--config", "--deepspeed_config", "--deepspeed-config", "--deepspeed"),
            hidden=True,
            refused=_OF_THE_PROGRAM,
        ),
    ),
    "elastic_training": (bool, Option(("--elastic_training",), hidden=True, refused=_NO_ELASTIC)),
    "min_elastic_nodes": (int, Option(("--min_elastic_nodes",), hidden=True, refused=_NO_ELASTIC)),
    "max_elastic_nodes": (int, Option(("--max_elastic_nodes",), hidden=True, refused=_NO_ELASTIC)),
}
"""Options of DeepSpeed's command, and of programs, that have no effect or are refused: name -> type and
option."""


def declared() -> Iterator[tuple[str, Any, Any, Option]]:
    """The name, type and default on the command line, and the option, of each declared option."""
    types = get_type_hints(LaunchRequest)
    for one in fields(LaunchRequest):
        option = one.metadata.get("option")
        if option is not None and option.is_switch:
            yield one.name, bool, False, option
        elif option is not None:
            yield one.name, types[one.name], one.default, option
    for name, (kind, option) in WITHOUT_FIELD.items():
        yield name, *((bool, False) if kind is bool else (kind | None, None)), option


def passed_on(request: LaunchRequest) -> list[str]:
    """The options that the launcher of every node needs as well, as words of its command line."""
    words: list[str] = []
    for one in fields(LaunchRequest):
        option, value = one.metadata.get("option"), getattr(request, one.name)
        if option is None or not option.passed_on or value == one.default:
            continue
        words.append(option.names[0].partition("/")[0])
        if not (option.is_switch or isinstance(value, bool)):
            words.append(str(value))
    return words
