"""Updates a shard in one pass over memory (ADR 0007).

Unscaling, averaging, clipping, the optimizer's arithmetic and the rounding into the parameter are each
bound by memory. So the shard is updated in pieces that stay in cache: a piece goes through all of these
operations before the next one is read. For bf16 and AdamW this moves 30 bytes per element, instead of 58
in separate passes.

The bits are those of the optimizer's own ``step``: the same kernel runs on slices of the same tensors.
Slices start at multiples of 64 elements of their parameter, where SIMD lanes start too. If a compiled
kernel with the same bits is available (:mod:`~zeroshard.optim.native_adam`), it updates the whole shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeroshard.optim import native_adam

PIECE_NUMEL = 2**18
"""Elements of a piece. AdamW needs 5 MB for them, which the last-level cache holds."""

THREAD_NUMEL = 2**17
"""Elements that justify one more thread: 0.1 ms of work."""


def threads_for(numel: int, cores: int, local_ranks: int = 1, omp: int = 1) -> int:
    """The number of threads for an update of ``numel`` elements in host memory.

    ``cores``: those that this host's ``local_ranks`` ranks may use. ``omp``: threads that
    ``OMP_NUM_THREADS`` or ``torch.set_num_threads`` allow this rank. A number above 1 was chosen for this
    rank and is used (torch's own default leaves out cores that the rank may not use). 1 may have been set
    by torchrun without a choice by the user, so the rank then uses its share of the cores. At most one
    thread per ``THREAD_NUMEL`` elements.
    """
    wanted = omp if omp > 1 else cores // max(1, local_ranks)
    return max(1, min(wanted, numel // THREAD_NUMEL))


@dataclass(frozen=True)
class UpdateKernel:
    """An optimizer's arithmetic as a function, without the optimizer object.

    ``update(group, params, grads, state)`` changes lists of tensors in place; all lists have equal
    length. ``state`` maps names to such lists: the names in ``shaped``, and ``"step"`` (0-dim, already
    increased) if ``counts``. ``compiles``: this is Adam, and :mod:`zeroshard.optim.native_adam` may be
    used instead.
    """

    update: Callable[[Mapping[str, Any], list[Tensor], list[Tensor], dict[str, list[Tensor]]], None]
    shaped: tuple[str, ...]
    counts: bool
    compiles: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class _Members:
    """The tensors of one param group in one piece."""

    group: int
    params: list[Tensor]
    grads_at: list[tuple[int, int]]  # (begin, end) of their gradients in the piece
    state: dict[str, list[Tensor]]


@dataclass(frozen=True, eq=False, slots=True)
class _Piece:
    begin: int
    end: int
    members: list[_Members]


class FusedUpdate:
    """The pieces of one chunk, prepared once: views of its master and of the optimizer's state.

    ``fragments``: ``(group, at, value)`` in the order of the chunk. ``states``: the optimizer state of
    each, which must contain the kernel's names. ``param_R``: the parameter, which is ``master_R`` itself
    if it is its own master.
    """

    def __init__(
        self,
        kernel: UpdateKernel,
        fragments: Sequence[tuple[int, int, Tensor]],
        states: Sequence[Mapping[str, Any]],
        *,
        master_R: Tensor,
        param_R: Tensor,
    ) -> None:
        self._kernel = kernel
        self._master_R = master_R
        self._low_R = param_R
        self._sources = [[state[name] for name in kernel.shaped] for state in states]
        self._steps = [state["step"] for state in states] if kernel.counts else []
        numel = master_R.numel()
        self._pieces = [
            _piece(kernel, fragments, states, begin, min(begin + PIECE_NUMEL, numel))
            for begin in range(0, numel, PIECE_NUMEL)
        ]
        self._spans: native_adam.Spans | None = None
        self._base = self._addresses()
        self._tails: list[_Piece] = []
        if kernel.compiles and _spans_fit(param_R, master_R, states):
            self._spans = _spans(fragments, states, param_R if param_R is not master_R else None)
            self._tails = [
                _piece(kernel, fragments, states, begin, _round_up(at + value.numel()))
                for _, at, value in fragments
                if (begin := at + _round_down(value.numel())) < at + value.numel()
            ]

    def is_current(self, states: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the views are of these tensors. (Loading optimizer state replaces them.)"""
        shaped = self._kernel.shaped
        return all(
            state.get(name) is known
            for state, source in zip(states, self._sources, strict=True)
            for name, known in zip(shaped, source, strict=True)
        ) and (
            not self._kernel.counts
            or all(
                state.get("step") is known for state, known in zip(states, self._steps, strict=True)
            )
        )

    def run(
        self,
        grad_R: Tensor,
        factor: float,
        groups: Sequence[Mapping[str, Any]],
        *,
        threads: int | None = None,
    ) -> None:
        """Update master, state and parameter with ``grad_R * factor``. May overwrite ``grad_R``.

        Elements of the parameter that differ from the rounded master were written by the program, and are
        first copied into the master. ``threads``: the most that a compiled update may use; default: as
        many as torch's operations. The bits do not depend on it.
        """
        if self._steps:
            torch._foreach_add_(self._steps, 1)
        compiled = native_adam.compiled() if self._spans is not None else None
        if compiled is None or not compiled.takes(grad_R.dtype):
            self._run_pieces(self._pieces, grad_R, factor, groups)
            return
        assert self._spans is not None
        if self._base != (base := self._addresses()):
            self._spans.locate()
            self._base = base
        most = torch.get_num_threads() if threads is None else threads
        compiled.update(
            self._spans, grad_R, factor, groups, threads=threads_for(self._spans.numel, most)
        )
        self._run_pieces(self._tails, grad_R, factor, groups)

    def _addresses(self) -> tuple[int, int]:
        """Addresses of master and parameter. A shard on disk has other memory for each update."""
        return self._master_R.data_ptr(), self._low_R.data_ptr()

    def _run_pieces(
        self,
        pieces: Sequence[_Piece],
        grad_R: Tensor,
        factor: float,
        groups: Sequence[Mapping[str, Any]],
    ) -> None:
        update, master_R, param_R = self._kernel.update, self._master_R, self._low_R
        has_master, casts = master_R is not param_R, grad_R.dtype != master_R.dtype
        longest = max((piece.end - piece.begin for piece in pieces), default=0)
        wide = master_R.new_empty(longest) if casts else grad_R
        for piece in pieces:
            begin, end = piece.begin, piece.end
            grad = wide[: end - begin].copy_(grad_R[begin:end]) if casts else grad_R[begin:end]
            if factor != 1.0:
                grad.mul_(factor)
            if has_master:
                low, master = param_R[begin:end], master_R[begin:end]
                sync_master_from_param(master, low)
            for members in piece.members:
                grads = [
                    grad[a:b].view_as(param)
                    for (a, b), param in zip(members.grads_at, members.params, strict=True)
                ]
                update(groups[members.group], members.params, grads, members.state)
            if has_master:
                low.copy_(master)


def _piece(
    kernel: UpdateKernel,
    fragments: Sequence[tuple[int, int, Tensor]],
    states: Sequence[Mapping[str, Any]],
    begin: int,
    end: int,
) -> _Piece:
    by_group: dict[int, _Members] = {}
    for (group, at, value), state in zip(fragments, states, strict=True):
        low, high = max(begin, at), min(end, at + value.numel())
        if low >= high:
            continue
        members = by_group.setdefault(group, _Members(group, [], [], {}))
        cut = slice(low - at, high - at)
        members.params.append(value.view(-1)[cut])
        members.grads_at.append((low - begin, high - begin))
        for name in kernel.shaped:
            members.state.setdefault(name, []).append(state[name].view(-1)[cut])
        if kernel.counts:
            members.state.setdefault("step", []).append(state["step"])
    return _Piece(begin, end, list(by_group.values()))


def _round_down(numel: int) -> int:
    return numel // native_adam.SPAN_MULTIPLE * native_adam.SPAN_MULTIPLE


def _round_up(numel: int) -> int:
    return -(-numel // native_adam.SPAN_MULTIPLE) * native_adam.SPAN_MULTIPLE


def _spans_fit(param_R: Tensor, master_R: Tensor, states: Sequence[Mapping[str, Any]]) -> bool:
    if param_R is not master_R and param_R.dtype != torch.bfloat16:
        return False
    return all(
        native_adam.fits(master_R, state["exp_avg"], state["exp_avg_sq"], state["step"])
        for state in states
    )


def _spans(
    fragments: Sequence[tuple[int, int, Tensor]],
    states: Sequence[Mapping[str, Any]],
    param_R: Tensor | None,
) -> native_adam.Spans:
    spans = []
    for (group, at, value), state in zip(fragments, states, strict=True):
        if numel := _round_down(value.numel()):
            flat = [t.view(-1)[:numel] for t in (value, state["exp_avg"], state["exp_avg_sq"])]
            low = None if param_R is None else param_R[at : at + numel]
            spans.append(native_adam.Span(group, at, flat[0], flat[1], flat[2], state["step"], low))
    return native_adam.Spans(spans)


def sync_master_from_param(master: Tensor, low: Tensor) -> None:
    """Copy into ``master`` each element of ``low`` that differs from the rounded ``master``.

    The program wrote these. The other elements keep the bits that rounding drops. Both tensors have a
    multiple of 64 elements.
    """
    rounded = master.to(low.dtype)
    if low.device.type == "cpu" and torch.equal(_bits(rounded), _bits(low)):
        return  # comparing is cheaper than writing
    torch.where(rounded == low, master, low.to(master.dtype), out=master)


def _bits(flat: Tensor) -> Tensor:
    """The tensor as int64 words, for fast comparison."""
    return flat.view(torch.int64)
