"""Lets the launcher and its ranks have many connections.

Whoever reaches a port of torch's store, or of gloo, can open connections to it. Without a descriptor for
one more, the store accepts no rank, and gloo ends its process.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator

_MOST = 1 << 16
"""Some programs have a table with a row for each descriptor that they might open."""


@contextlib.contextmanager
def many_open_files() -> Iterator[None]:
    """A context in which this process, and those that it starts, may open as many files as is allowed."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if most == resource.RLIM_INFINITY else min(most, _MOST)
    if before == resource.RLIM_INFINITY or before >= wanted:
        yield
        return
    with contextlib.suppress(OSError, ValueError):  # some systems have a lower limit than they say
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))
