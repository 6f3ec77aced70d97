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
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from zeroshard.device.choice import ops_of, read
from zeroshard.optim import native_adam
from zeroshard.optim.fragment_norms import norms_of
from zeroshard.zero.gradients import Norms

if TYPE_CHECKING:
    from zeroshard.comm.collectives import Comm
    from zeroshard.zero.gradients import GradBuffer, Norms

BITS = 48
"""Flags per number in a message. An fp64 represents integers below 2**53 exactly."""


@dataclass(frozen=True, eq=False, slots=True)
class GlobalNorm:
    """What all ranks know of the reduced gradient together. Tensors are 0-dim, on the device."""

    total: Tensor  # 2-norm of the sum over ranks, still loss-scaled
    found_inf: Tensor  # bool: the norm is not finite
    untouched: dict[int, frozenset[int]]  # by id(unit), slots without gradient on any rank
    lost_edit: Tensor | None = None  # the largest ``lost_edit`` of any rank
    loss: Tensor | None = None  # fp64 ``[2]``, see :class:`Exchanged`


@dataclass(frozen=True, eq=False, slots=True)
class Exchanged:
    """What a rank knows after an exchange."""

    squares: Tensor  # the sum of squares over all ranks, 0-dim fp64
    words_WK: Tensor  # the flags of the holders of this rank's shards
    lost_edit: Tensor | None  # the largest of all ranks
    loss: Tensor  # fp64 ``[2]``: the sum over ranks of weight times loss, and that of the weights
    apart: Sequence[
        tuple[Tensor, Sequence[bool]]
    ] = ()  # words of other holders, and of which flags


@dataclass(frozen=True, eq=False, slots=True)
class RankLoss:
    """The loss of one rank in a step. ``weight``: 0 if the rank has none; ``value``: fp64 ``[1]``."""

    value: Tensor | None = None
    weight: float = 0.0

    def on(self, device: torch.device) -> Tensor:
        """Weight times loss, fp64 ``[1]``."""
        if self.value is None:
            return torch.zeros(1, dtype=torch.float64, device=device)
        return self.value if self.weight == 1.0 else self.value * self.weight


NO_LOSS = RankLoss()


Divergence = Callable[["Comm", Sequence[int]], Exception]
"""Makes the error for the ranks of a communicator whose history differs, by position."""


class NormExchange(Protocol):
    """Exchanges what each rank measured. Collective."""

    def __call__(
        self,
        norms: Norms,
        words: Sequence[float],
        device: torch.device,
        lost_edit: Tensor | None = None,
        loss: RankLoss = NO_LOSS,
    ) -> Exchanged:
        """What all ranks measured.

        ``words``: K packed flags. ``lost_edit``: fp64 ``[1]`` on all ranks, or None on all. Raises
        :class:`~zeroshard.errors.RankDivergence` if ranks called different collectives.
        """


def local_sum_of_squares(norms: Sequence[Tensor], device: torch.device) -> Tensor:
    """The square of the norm of ``norms``, 0-dim fp64.

    The norm of norms is computed in the gradients' precision, as in PyTorch. Its square in fp64 is exact
    enough that its square root on one rank has PyTorch's bits.
    """
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    local: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)))
    return local.double().square()


def on_device(values: Sequence[float], device: torch.device) -> Tensor:
    """Host values on the device. A copy from pageable memory would block the host."""
    pinned = ops_of(device).is_async
    return torch.tensor(values, dtype=torch.float64, pin_memory=pinned).to(
        device, non_blocking=True
    )


class DataExchange:
    """The exchange without a mesh.

    Each rank sends ``[sum of squares, loss, history hash, weight of the loss, flags...]``, fp64.
    """

    def __init__(self, comm: Comm, divergence: Divergence) -> None:
        self._comm = comm
        self._divergence = divergence

    def __call__(
        self,
        norms: Norms,
        words: Sequence[float],
        device: torch.device,
        lost_edit: Tensor | None = None,
        loss: RankLoss = NO_LOSS,
    ) -> Exchanged:
        """See :class:`NormExchange`."""
        comm = self._comm
        sent = on_device([comm.recorder.hash32, loss.weight, *words], device)
        squares = local_sum_of_squares([norm for _, norm in norms], device)
        row = [squares.view(1), loss.on(device), sent]
        if lost_edit is not None:
            row.append(lost_edit)
        rows = comm.all_gather_small(torch.cat(row), name="norm")
        if odd := comm.recorder.diverging(rows[:, 2]):
            raise self._divergence(comm, odd)
        return Exchanged(
            rows[:, 0].sum(),
            rows[:, 4:],
            None if lost_edit is None else rows[:, -1].amax(),
            rows[:, 1:4:2].sum(0),
        )


def global_norm(
    norms: Norms,
    buffers: Sequence[GradBuffer],
    exchange: NormExchange,
    *,
    device: torch.device,
    dtype: torch.dtype,
    lost_edit: Tensor | None = None,
    loss: RankLoss = NO_LOSS,
) -> GlobalNorm:
    """The norm over all ranks, overflow, and parameters without gradient. Collective.

    ``norms``: of this rank's fragments. ``dtype``: of the result. ``lost_edit``: see
    :class:`NormExchange`.

    Raises:
        RankDivergence: ranks called different collectives since the last exchange.
    """
    flags = list(chain.from_iterable(buffer.has_grad for buffer in buffers))
    seen = exchange(norms, pack_flags(flags), device, lost_edit, loss)
    total = seen.squares.sqrt().to(dtype)
    untouched: dict[int, frozenset[int]] = {}
    if not all(flags):  # only a rank without some gradients needs the flags of the others
        fake = isinstance(seen.words_WK, FakeTensor)
        has_grad = flags if fake else unpack_any(seen.words_WK, len(flags))
        for words_WK, theirs in () if fake else seen.apart:
            found = unpack_any(words_WK, len(flags))
            has_grad = [f if own else h for f, own, h in zip(found, theirs, has_grad, strict=True)]
        untouched = _without_grad(buffers, has_grad)
    return GlobalNorm(total, total.isfinite().logical_not(), untouched, seen.lost_edit, seen.loss)


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


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """``max_norm / (norm + 1e-6)``, at most 1 (DeepSpeed key ``gradient_clipping``; 0: no clipping)."""
    if max_norm <= 0:
        return torch.ones_like(norm)
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def num_words(flags: int) -> int:
    """Numbers that :func:`pack_flags` makes of ``flags`` flags."""
    return -(-flags // BITS)


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
    for column in read(words_WK.t()):
        word = 0
        for value in column:
            word |= int(value)
        united.append(word)
    return [bool(united[i // BITS] >> (i % BITS) & 1) for i in range(count)]


Cuts = list[tuple[int, tuple[int, int]]]
"""Of fragments: the parameter's position in the model, and begin and end in the gradient."""


def measure(gradients: Sequence[tuple[Cuts, Tensor]]) -> Norms:
    """2-norms of the fragments of some gradients ``[R]``."""
    norms = norms_of(
        [(grad_R, [place for _, place in cuts]) for cuts, grad_R in gradients],
        native_adam.norms(),
    )
    positions = [position for cuts, _ in gradients for position, _ in cuts]
    return [*zip(positions, norms, strict=True)]
