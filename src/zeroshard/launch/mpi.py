"""Which ``mpirun`` line starts a launcher on each host?

MPI only starts them: one process per host, which runs the ranks of its host like one that ssh started.
So ranks meet, are watched and are reported as ever, and need no MPI library. Both families take one
section per host, separated by ``:``.
"""

from __future__ import annotations

from collections.abc import Sequence

from zeroshard.launch.remote import NodeCommand

MPI_LAUNCHERS = ("openmpi", "mpich", "impi", "mvapich")


def mpi_flags(kind: str) -> tuple[str, ...]:
    """Of a launcher under this ``mpirun``. Open MPI ends all processes when one fails; Hydra (the others)
    does so only for one that a signal ended."""
    return () if kind == "openmpi" else ("--end-by-signal",)


def mpirun_command(
    kind: str, commands: Sequence[NodeCommand], extra: Sequence[str] = ()
) -> list[str]:
    """``mpirun`` of this kind (one of :data:`MPI_LAUNCHERS`); ``extra`` are words of the user for it.

    Without the words about binding, a launcher and all its ranks would share the cores of one MPI rank.
    """
    sections = [list(command.argv_with_env) for command in commands]
    names = [command.host.name for command in commands]
    if kind == "openmpi":
        head = ["mpirun", "--bind-to", "none", *extra]
        parts = [
            ["-n", "1", "--host", name, *words] for name, words in zip(names, sections, strict=True)
        ]
    else:  # Hydra starts processes on the hosts of its list in their order
        free = ["-genv", "I_MPI_PIN", "0"] if kind == "impi" else ["-bind-to", "none"]
        head = ["mpirun", "-hosts", ",".join(names), "-ppn", "1", *free, *extra]
        parts = [["-n", "1", *words] for words in sections]
    line = head + parts[0]
    for part in parts[1:]:
        line += [":", *part]
    return line
