"""What a rank tells its launcher of the diagnosis that ends it: who was the cause, and what they did.

The rank that raises a diagnosis is often not the one that it is about: the others waited for a rank that
was late, and gave up. So the launcher names the cause first, whoever ended first.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zeroshard.core.files import write_for_this_user
from zeroshard.errors import DistributedError

BLAME_VARIABLE = "ZEROSHARD_BLAME_FILE"
"""Names the file of a rank. The launcher sets it."""


@dataclass(frozen=True, slots=True)
class Blame:
    """``kind``: the class of the error. ``ranks``: the cause; empty: no rank is presumed to be it.

    ``what``: what they did (``rank 1 <what>``).
    """

    kind: str
    ranks: tuple[int, ...] = ()
    what: str = ""


def tell_launcher(error: DistributedError, environ: Mapping[str, str]) -> None:
    """Leave what ``error`` says for the launcher of this rank, if it has one that asks."""
    path = environ.get(BLAME_VARIABLE)
    if path:
        with contextlib.suppress(OSError):  # a full disk must not hide the error
            said = [type(error).__name__, error.ranks, error.did]
            write_for_this_user(Path(path), json.dumps(said))


def read_blame(path: Path) -> Blame | None:
    """What a rank has left in its file; None: nothing that can be read."""
    try:
        kind, ranks, what = json.loads(path.read_text())
        return Blame(str(kind), tuple(map(int, ranks)), str(what))
    except (OSError, ValueError, TypeError):
        return None
