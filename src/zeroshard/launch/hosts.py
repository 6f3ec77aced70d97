"""Selects the hosts of a run, and the slots on them.

Reads the text of a hostfile (lines ``host slots=N``) and applies the filters ``--include`` and
``--exclude`` (``host:0,1@host2``), which have DeepSpeed's meaning. At the end are the functions of
``deepspeed.launcher.runner`` that programs call to learn about hosts.
"""

from __future__ import annotations

import logging
import os
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from zeroshard.errors import LaunchError
from zeroshard.launch.rank_env import ALSO_EXPORTED, EXPORTED

_log = logging.getLogger(__name__)

DLTS_HOSTFILE = "/job/hostfile"
EXPORT_ENVS = [*EXPORTED]
"""Prefixes of the variables that ranks of other hosts get too. What a program appends has effect on the
runs that it starts (:func:`launcher_environment`)."""

_LINE = re.compile(r"(?P<name>\S+)\s+slots=(?P<slots>\d+)")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]*")


@dataclass(frozen=True, slots=True)
class Host:
    """A machine, and the device indices that are used on it: one rank per slot, in this order."""

    name: str
    slots: tuple[int, ...]

    @property
    def devices(self) -> str | None:
        """The value for ``CUDA_VISIBLE_DEVICES``; None if the ranks use devices 0, 1, 2, ... anyway."""
        if self.slots == tuple(range(len(self.slots))):
            return None
        return ",".join(map(str, self.slots))


def parse_hostfile(text: str, source: str) -> tuple[Host, ...]:
    """The hosts of a hostfile, in its order. ``source`` names the file in messages.

    Raises:
        LaunchError: names all bad lines, as ``source:line``.
    """
    hosts: dict[str, Host] = {}
    first_line: dict[str, int] = {}
    problems: list[str] = []
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.split("#", 1)[0].strip()
        if not line:
            continue
        match = _LINE.fullmatch(line)
        if match is None or not _NAME.fullmatch(match["name"]):
            problems.append(f"{source}:{number}: {line!r} is not of the form 'host slots=N'.")
            continue
        name, count = match["name"], int(match["slots"])
        if name in hosts:
            problems.append(
                f"{source}:{number}: host {name!r} is already on line {first_line[name]}; "
                "write it once, with all its slots."
            )
        elif count == 0:
            problems.append(f"{source}:{number}: host {name!r} has no slots; remove the line.")
        else:
            hosts[name] = Host(name, tuple(range(count)))
            first_line[name] = number
    if not hosts and not problems:
        problems.append(f"{source} contains no host; expected lines of the form 'host slots=N'.")
    if problems:
        raise LaunchError("\n".join(problems))
    return tuple(hosts.values())


def parse_filter(text: str, option: str) -> dict[str, tuple[int, ...] | None]:
    """The slots that a filter names, by host. None: every slot of the host.

    >>> parse_filter("a:0,2@b", "--include")
    {'a': (0, 2), 'b': None}

    Raises:
        LaunchError: the text is not of this form, or names a host or a slot twice.
    """
    wanted: dict[str, tuple[int, ...] | None] = {}
    for part in text.split("@"):
        name, colon, indices = part.strip().partition(":")
        slots = [index.strip() for index in indices.split(",")] if colon else []
        if not _NAME.fullmatch(name) or not all(index.isdigit() for index in slots):
            raise LaunchError(
                f"{option} {text!r}: {part!r} is not of the form 'host' or 'host:0,1'; "
                "hosts are separated by '@'."
            )
        if name in wanted:
            raise LaunchError(f"{option} {text!r}: host {name!r} is named twice.")
        numbers = tuple(sorted({int(index) for index in slots}))
        if len(numbers) != len(slots):
            raise LaunchError(f"{option} {text!r}: a slot of host {name!r} is named twice.")
        wanted[name] = numbers if colon else None
    return wanted


def select(
    hosts: Iterable[Host],
    *,
    include: str = "",
    exclude: str = "",
    num_nodes: int | None = None,
    num_slots: int | None = None,
) -> tuple[Host, ...]:
    """The hosts and slots of a run.

    ``include`` keeps only what it names; ``exclude`` drops what it names. ``num_nodes`` keeps the first
    hosts, ``num_slots`` the first slots of each host.

    Raises:
        LaunchError: a filter names an unknown host or slot or leaves none, a number is too large, or the
            options contradict each other.
    """
    chosen = tuple(hosts)
    check_filters(include=include, exclude=exclude, num_nodes=num_nodes, num_slots=num_slots)
    if include:
        chosen = _apply(chosen, parse_filter(include, "--include"), "--include", keep=True)
    if exclude:
        chosen = _apply(chosen, parse_filter(exclude, "--exclude"), "--exclude", keep=False)
        if not chosen:
            raise LaunchError(f"--exclude {exclude!r} leaves no slot to run on.")
    if num_nodes is not None:
        if num_nodes > len(chosen):
            names = ", ".join(host.name for host in chosen)
            raise LaunchError(
                f"--num_nodes {num_nodes}: there are only {len(chosen)} hosts ({names})."
            )
        chosen = chosen[:num_nodes]
    if num_slots is not None:
        for host in chosen:
            if num_slots > len(host.slots):
                raise LaunchError(
                    f"--nproc {num_slots}: host {host.name!r} has only {len(host.slots)} slots."
                )
        chosen = tuple(Host(host.name, host.slots[:num_slots]) for host in chosen)
    return chosen


def check_filters(
    *, include: str, exclude: str, num_nodes: int | None, num_slots: int | None
) -> None:
    """Check that the options do not contradict each other.

    Raises:
        LaunchError: two filters, a filter together with a number, or a number below 1.
    """
    if include and exclude:
        raise LaunchError("--include and --exclude cannot be given together; keep one of them.")
    if (include or exclude) and (num_nodes is not None or num_slots is not None):
        option = "--include" if include else "--exclude"
        number = "--num_nodes" if num_nodes is not None else "--nproc/--num_gpus"
        raise LaunchError(
            f"{option} already says which slots are used; it cannot be given with {number}."
        )
    for number, count in (("--num_nodes", num_nodes), ("--nproc/--num_gpus", num_slots)):
        if count is not None and count < 1:
            raise LaunchError(f"{number} is {count}; it must be at least 1.")


def _apply(
    hosts: tuple[Host, ...],
    wanted: Mapping[str, tuple[int, ...] | None],
    option: str,
    *,
    keep: bool,
) -> tuple[Host, ...]:
    _check_names(hosts, wanted, option)
    result: list[Host] = []
    for host in hosts:
        listed = wanted.get(host.name, ())
        named = [slot for slot in host.slots if listed is None or slot in listed]
        if slots := tuple(slot for slot in host.slots if (slot in named) == keep):
            result.append(Host(host.name, slots))
    return tuple(result)


def _check_names(
    hosts: tuple[Host, ...], wanted: Mapping[str, tuple[int, ...] | None], option: str
) -> None:
    known = {host.name: host for host in hosts}
    for name, slots in wanted.items():
        if name not in known:
            raise LaunchError(
                f"{option} names host {name!r}, which is not among the hosts ({', '.join(known)})."
            )
        unknown = sorted(set(slots or ()) - set(known[name].slots))
        if unknown:
            raise LaunchError(
                f"{option} names slot {unknown[0]} of host {name!r}, which has slots "
                f"{', '.join(map(str, known[name].slots))}."
            )


def launcher_environment() -> dict[str, str]:
    """The environment for a launcher that exports what the program appended to :data:`EXPORT_ENVS`."""
    more = [name for name in EXPORT_ENVS if name not in EXPORTED]
    return {**os.environ, ALSO_EXPORTED: ",".join(more)} if more else dict(os.environ)


def fetch_hostfile(hostfile_path: str) -> OrderedDict[str, int] | None:
    """Host -> number of slots, in the order of the file; None, with a warning, if there is no such file.

    Raises:
        LaunchError: names every bad line.
    """
    path = Path(hostfile_path)
    if not path.is_file():
        _log.warning("there is no hostfile %s: only this host is used", path)
        return None
    hosts = parse_hostfile(path.read_text(), str(path))
    return OrderedDict((host.name, len(host.slots)) for host in hosts)


def parse_inclusion_exclusion(
    resource_pool: Mapping[str, int], inclusion: str, exclusion: str
) -> OrderedDict[str, list[int]]:
    """Host -> used slots. The filters are those of ``--include`` and ``--exclude``.

    >>> parse_inclusion_exclusion({"a": 2, "b": 2}, "", "a:0")
    OrderedDict([('a', [1]), ('b', [0, 1])])

    Raises:
        LaunchError: a host or slot is not in the pool, or both filters are given.
    """
    pool = (Host(name, tuple(range(slots))) for name, slots in resource_pool.items())
    chosen = select(pool, include=inclusion, exclude=exclusion)
    return OrderedDict((host.name, list(host.slots)) for host in chosen)
