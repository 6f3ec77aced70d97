"""Makes tensors of a simulation: they have shapes and no values, and modules of them can be converted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from zeroshard.errors import UsageError
from zeroshard.zero.materialize import exchange
from zeroshard.zero.sharded_parameter import owner_of


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """All tensors that are made inside are fake ones.

    :meth:`torch.nn.Module.to` exchanges fake parameters, and torch refuses that for tensors with weak
    references. All results of a fake mode have one, and so have parameters that ``zero.Init`` has
    sharded. So inside, the exchange is that of :func:`~zeroshard.zero.materialize.exchange`. Without it
    no model could be planned that converts itself while it is built, such as PEFT's.
    """
    with mock.patch.object(torch.utils, "swap_tensors", _exchange), FakeTensorMode() as fake:
        yield fake


def _exchange(param: Tensor, other: Tensor) -> None:
    if owner_of(param) is not None and param.dtype != other.dtype:
        raise UsageError(
            f"a parameter that zero.Init has sharded is converted from {param.dtype} to {other.dtype} "
            "while the model is built. Its values are not on this rank. Build the model in the dtype in "
            "which the configuration trains."
        )
    exchange(param, other)
