"""Builds the ``mpirun`` command that starts a launcher on each host.

MPI only starts one process per host. That process runs the ranks of its host, as a launcher that ssh
started. So rendezvous, supervision and reports are the same as with ssh, and ranks need no MPI library.
Both families of MPI (Open MPI and Hydra) take one section of the command per host, separated by ``:``.
"""

from __future__ import annotations

from collections.abc import Sequence

from zeroshard.launch.remote import NodeCommand

MPI_LAUNCHERS = ("openmpi", "mpich", "impi", "mvapich")


def mpi_flags(kind: str) -> tuple[str, ...]:
    """The options that a launcher needs under this ``mpirun``.

    Open MPI ends all processes when one fails. Hydra (all others) does so only if a signal ended the
    process.
    """
    return () if kind == "openmpi" else ("--end-by-signal",)


def mpirun_command(
    kind: str, commands: Sequence[NodeCommand], extra: Sequence[str] = ()
) -> list[str]:
    """The ``mpirun`` command of this kind (one of :data:`MPI_LAUNCHERS`). ``extra``: options of the user.

    The options against binding are needed because a launcher and all its ranks would otherwise share the
    cores of one MPI rank.
    """
    sections = [list(command.argv_with_env) for command in commands]
    names = [command.host.name for command in commands]
    if kind == "openmpi":
        head = ["mpirun", "--bind-to", "none", *extra]
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
