"""Makes tensors of a simulation: they have shapes and no values, and modules of them can be converted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
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

    :func:`torch.nn.init.trunc_normal_` draws until all values are in bounds, which needs values. Inside,
    it draws twice. Without it no vision transformer of Transformers could be planned.

    :func:`torch.nn.functional.grouped_mm` multiplies any dtype on CPUs and GPUs, but its shapes are known
    for bf16 only. Inside, they are known for all. Without it no experts of Transformers could be planned
    in fp32 and fp16.
    """
    with (
        mock.patch.object(torch._meta_registrations, "_meta_grouped_mm_common", _grouped_in_bf16),
        mock.patch.object(torch.utils, "swap_tensors", _exchange),
        mock.patch.object(torch.nn.init, "_no_grad_trunc_normal_", _drawn_twice),
        FakeTensorMode() as fake,
    ):
        yield fake


@torch.no_grad()
def _drawn_twice(
    tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None
) -> Tensor:
    """Allocates what torch does if some of the first values are out of bounds."""
    first = tensor.normal_(mean, std, generator=generator)
    outside = (first < a) | (first > b)
    again = torch.empty_like(first).normal_(mean, std, generator=generator)
    return tensor.copy_(torch.where(outside, again, first))


_grouped = torch._meta_registrations._meta_grouped_mm_common


def _grouped_in_bf16(mat_a: Tensor, mat_b: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The shape of the product that torch gives for bf16, in the dtype of the two."""
    dtype = mat_a.dtype
    if dtype != mat_b.dtype or dtype not in (torch.float32, torch.float16):
        found: Tensor = _grouped(mat_a, mat_b, *args, **kwargs)
        return found
    made: Tensor = _grouped(mat_a.bfloat16(), mat_b.bfloat16(), *args, **kwargs)
    return made.to(dtype)


def _exchange(param: nn.Parameter, other: Tensor) -> None:
    owner = owner_of(param)
    # As in a run, a parameter that zero.Init has sharded is whole while it is converted.
    converted = owner is not None and param.dtype != other.dtype
    if converted and not owner.ensure_writable(param, ()):  # type: ignore[union-attr]
        raise UsageError(
            f"a parameter that zero.Init has sharded is converted from {param.dtype} to {other.dtype} "
            "after it was built. Its values are not on this rank. Build the model in the dtype in which "
            "the configuration trains."
        )
    exchange(param, other)
