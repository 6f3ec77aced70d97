"""The functions of ``deepspeed.launcher.runner`` that programs call to learn about hosts."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

from zeroshard.launch.hosts import Host, parse_hostfile, select
from zeroshard.launch.rank_env import ALSO_EXPORTED, EXPORTED

_log = logging.getLogger(__name__)

DLTS_HOSTFILE = "/job/hostfile"
EXPORT_ENVS = [*EXPORTED]
"""Prefixes of the variables that ranks of other hosts get too. What a program appends has effect on the
runs that it starts (:func:`launcher_environment`)."""


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
