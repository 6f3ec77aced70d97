"""Which parameters are those of experts: DeepSpeed's marks, which its programs set and ask for, too."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from zeroshard.errors import UsageError

_GROUP = re.compile(r"ep_size_([1-9]\d*)")


def mark(param: Tensor, size: int) -> None:
    """Note that ``param`` is that of an expert of a layer whose experts ``size`` ranks share."""
    marked: Any = param
    marked.allreduce = False
    marked.group_name = f"ep_size_{size}"


def is_expert(param: Any) -> bool:
    """Whether the parameter has the mark of an expert."""
    return not getattr(param, "allreduce", True)


def ranks_of_layer(param: Any, name: str = "") -> int:
    """How many ranks share the experts of the layer to which ``param`` belongs; 1: all hold the same.

    ``name``: of the parameter, for messages.

    Raises:
        UsageError: the mark names no such number.
    """
    if not is_expert(param):
        return 1
    found = _GROUP.fullmatch(str(getattr(param, "group_name", "")))
    if found is None:
        raise UsageError(
            f"parameter {name!r} has allreduce=False, the mark of an expert, but its group_name is "
            f"{getattr(param, 'group_name', None)!r}, so it is unknown which ranks hold the same expert. "
            "Set group_name to 'ep_size_N', where N ranks share the experts of the layer."
        )
    return int(found[1])
