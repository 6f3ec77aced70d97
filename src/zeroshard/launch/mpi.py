"""Builds the ``mpirun`` command that starts a launcher on each host.

MPI only starts one process per host. That process runs the ranks of its host, as a launcher that ssh
started. So rendezvous, supervision and reports are the same as with ssh, and ranks need no MPI library.
Both families of MPI (Open MPI and Hydra) take one section of the command per host, separated by ``:``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zeroshard.core.launcher_variables import TORCHRUN, numbering_of
from zeroshard.errors import LaunchError
from zeroshard.launch.remote import NodeCommand

MPI_LAUNCHERS = ("openmpi", "mpich", "impi", "mvapich")


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


def mpi_rank_env(
    env: Mapping[str, str], master_addr: str | None, master_port: int | None
) -> dict[str, str] | None:
    """The variables of the rank that this process of ``mpirun`` becomes; None if it is the only one.

    Raises:
        LaunchError: there are several hosts, and no address of rank 0; or a number is missing.
    """
    row = numbering_of(env)
    if row is None or row.launcher != "mpi" or env.get(row.world_size) == "1":
        return None
    numbers = {name: env.get(name, "") for name in row[1:5]}
    if unknown := [name for name, text in numbers.items() if not text.isdigit()]:
        raise LaunchError(
            f"mpirun started this launcher as one of several processes, and {unknown[0]} is not set, so "
            "its rank is unknown. Start one launcher on each host with --no_ssh --node_rank, or use a "
            "hostfile."
        )
    address = master_addr or env.get("MASTER_ADDR")
    if address is None and env[row.world_size] != env[row.local_world_size]:
        raise LaunchError(
            f"mpirun started {env[row.world_size]} processes, {env[row.local_world_size]} of them on "
            "this host, and MASTER_ADDR is not set, so the ranks cannot find each other. Give "
            "--master_addr, the address of rank 0's host."
        )
    return {
        **dict(zip(TORCHRUN[1:5], numbers.values(), strict=True)),
        "MASTER_ADDR": address or "127.0.0.1",
        "MASTER_PORT": str(master_port or env.get("MASTER_PORT", 29500)),
    }
