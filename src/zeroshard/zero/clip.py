"""Computes the norm of the gradient over all ranks, and the factor that clips it.

Each element counts once: a rank measures the shards that it owns, fragment by fragment, as
``torch.nn.utils.clip_grad_norm_`` measures parameters. One small all-gather exchanges the ranks' sums,
which are added in rank order. All values stay in 0-dim tensors. The same all-gather tells the ranks which
parameters got a gradient, and whether all ranks called the same collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from zeroshard.device.choice import ops_of

if TYPE_CHECKING:
    from zeroshard.comm.collectives import Comm
    from zeroshard.zero.gradients import GradBuffer

BITS = 48
"""Flags per number in a message. An fp64 represents integers below 2**53 exactly."""


@dataclass(frozen=True, eq=False, slots=True)
class GlobalNorm:
    """What all ranks know of the reduced gradient together. Tensors are 0-dim, on the device."""

    total: Tensor  # 2-norm of the sum over ranks, still loss-scaled
    found_inf: Tensor  # bool: the norm is not finite
    untouched: dict[int, frozenset[int]]  # by id(unit), slots without gradient on any rank
    facts: Tensor | None = None  # [F]: the largest value of each fact on any rank


def global_norm(
    norms: Sequence[Tensor],
    buffers: Sequence[GradBuffer],
    comm: Comm,
    *,
    device: torch.device,
    dtype: torch.dtype,
    divergence: Callable[[list[int]], Exception],
    facts: Tensor | None = None,
) -> GlobalNorm:
    """The norm over all ranks, overflow, and parameters without gradient. Collective.

    ``norms``: 0-dim, of this rank's fragments. ``dtype``: of the result. ``divergence`` makes the error
    for ranks with another history. ``facts``: fp64 ``[F]``, more that all ranks shall know, as
    long on every rank. Each rank sends ``[sum of squares, history hash, gradient flags..., facts...]`` in
    fp64.

    Raises:
        RankDivergence: ranks called different collectives since the last exchange.
    """
    flags = list(chain.from_iterable(buffer.has_grad for buffer in buffers))
    words = torch.tensor(
        [comm.recorder.hash32, *pack_flags(flags)],
        dtype=torch.float64,
        pin_memory=ops_of(device).is_async,  # a copy from pageable memory blocks the host
    ).to(device, non_blocking=True)
    squares = local_sum_of_squares(norms, device)
    sent = [squares.view(1), words] if facts is None else [squares.view(1), words, facts]
    rows = comm.all_gather_small(torch.cat(sent), name="norm")
    if odd := comm.recorder.diverging(rows[:, 1]):
        raise divergence(odd)
    total = rows[:, 0].sum().sqrt().to(dtype)
    untouched: dict[int, frozenset[int]] = {}
    if not all(flags):  # only a rank without some gradients needs the flags of the others
        fake = isinstance(rows, FakeTensor)
        untouched = _without_grad(buffers, flags if fake else unpack_any(rows[:, 2:], len(flags)))
    known = None if facts is None else rows[:, rows.shape[1] - len(facts) :].amax(0)
    return GlobalNorm(total, total.isfinite().logical_not(), untouched, known)


def _without_grad(
    buffers: Sequence[GradBuffer], has_grad: Sequence[bool]
) -> dict[int, frozenset[int]]:
    seen = iter(has_grad)
    untouched = {}
    for buffer in buffers:
        missing = frozenset(i for i in range(len(buffer.has_grad)) if not next(seen))
        if missing:
            untouched[id(buffer.unit)] = missing
    return untouched


def local_sum_of_squares(norms: Sequence[Tensor], device: torch.device) -> Tensor:
    """The square of the norm of ``norms``, 0-dim fp64.

    The norm of norms is computed in the gradients' precision, as in PyTorch. Its square in fp64 is exact
    enough that its square root on one rank has PyTorch's bits.
    """
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    local: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)))
    return local.double().square()


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """``max_norm / (norm + 1e-6)``, at most 1 (DeepSpeed key ``gradient_clipping``; 0: no clipping)."""
    if max_norm <= 0:
        return torch.ones_like(norm)
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def pack_flags(flags: Sequence[bool]) -> list[float]:
    """Flags as whole numbers, first flag in the lowest bit.

    >>> pack_flags([True, False, True])
    [5.0]
    """
    words = []
    for at in range(0, len(flags), BITS):
        part = flags[at : at + BITS]
        # Nearly always all are set, and then no flag is visited in Python.
        word = (
            (1 << len(part)) - 1
            if all(part)
            else sum(1 << i for i, flag in enumerate(part) if flag)
        )
        words.append(float(word))
    return words


def unpack_any(words_WK: Tensor, count: int) -> list[bool]:
    """The flags that are set on any of W ranks. Waits for the device."""
    united = []
    for column in words_WK.t().tolist():
        word = 0
        for value in column:
            word |= int(value)
        united.append(word)
    return [bool(united[i // BITS] >> (i % BITS) & 1) for i in range(count)]
