"""Updates a shard in one pass over memory (ADR 0007).

Unscaling, averaging, clipping, the optimizer's arithmetic and the rounding into the parameter are each
bound by memory. So the shard is updated in pieces that stay in cache: a piece goes through all of these
operations before the next one is read. For bf16 and AdamW this moves 30 bytes per element, instead of 58
in separate passes.

The bits are those of the optimizer's own ``step``: the same kernel runs on slices of the same tensors.
Slices start at multiples of 64 elements of their parameter, where SIMD lanes start too. If a compiled
kernel with the same bits is available (:mod:`~zeroshard.optim.native_adam`), it updates the whole shard
in one call.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeroshard.memory import host_memory

PIECE_NUMEL = 2**18
"""Elements of a piece. AdamW needs 5 MB for them, which the last-level cache holds."""

THREAD_NUMEL = 2**17
"""Elements that justify one more thread: 0.1 ms of work."""

THREAD_PIECE_NUMEL = 2**16
"""Elements that a thread takes at a time: about 50 microseconds, so no thread waits long for another."""

SPAN_MULTIPLE = 64
"""Spans have a multiple of this many elements. Torch computes the elements after it in scalar code."""


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


GRAD_DTYPES = {torch.bfloat16: "adam_bf16", torch.float32: "adam_fp32"}
"""Dtypes of gradients that the compiled Adam takes, and its function for each."""


class _Options(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_double) for name in ("lr", "beta1", "beta2", "weight_decay", "eps")),
        *((name, ctypes.c_int64) for name in ("decoupled", "maximize")),
    ]


class _Span(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("master", "exp_avg", "exp_avg_sq", "low", "step")),
        *((n, ctypes.c_int64) for n in ("grad_at", "numel", "group", "chunk")),
    ]


class FusedFragment(NamedTuple):
    """A fragment without the last elements beyond a multiple of 64. All tensors are contiguous."""

    group: int
    grad_at: int  # where its gradient starts in the chunk's gradient
    master: Tensor  # fp32, as the moments and the 0-dim step are
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    low: Tensor | None  # bf16: the parameter; None if that is the master itself
    chunk: int = 0  # the index of the chunk's gradient


class Spans:
    """Addresses for :meth:`CompiledAdam.update`. Keeps the tensors alive.

    ``bases``: those whose storages may be resized. A shard on disk has other memory for each update.
    """

    def __init__(self, spans: Iterable[FusedFragment], bases: Sequence[Tensor] = ()) -> None:
        self.kept = list(spans)
        self.bases = bases
        self.numel = sum(span.master.numel() for span in self.kept)
        self.tensors = [t for span in self.kept for t in span if isinstance(t, Tensor)]
        self.array = (_Span * len(self.kept))()
        self._bases_at: list[int] | None = None

    def locate(self) -> None:
        """Read the addresses of the tensors, unless those of ``bases`` are as they were."""
        bases_at = [base.data_ptr() for base in self.bases]
        if bases_at == self._bases_at:
            return
        self._bases_at = bases_at
        for entry, span in zip(self.array, self.kept, strict=True):
            assert span.master.numel() % SPAN_MULTIPLE == 0
            entry.master, entry.exp_avg = span.master.data_ptr(), span.exp_avg.data_ptr()
            entry.exp_avg_sq, entry.step = span.exp_avg_sq.data_ptr(), span.step.data_ptr()
            entry.low = None if span.low is None else span.low.data_ptr()
            entry.grad_at, entry.numel = span.grad_at, span.master.numel()
            entry.group, entry.chunk = span.group, span.chunk


class CompiledAdam:
    """Adam as a compiled library. :mod:`~zeroshard.optim.native_adam` builds and checks it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._calls = {dtype: getattr(library, name) for dtype, name in GRAD_DTYPES.items()}
        for call in self._calls.values():
            call.restype = None
            call.argtypes = [
                *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p),
                *(ctypes.c_float, ctypes.c_int64, ctypes.c_int64),
            ]

    def update(
        self,
        spans: Spans,
        grads: Sequence[Tensor],
        factor: float,
        groups: Sequence[Mapping[str, Any]],
        *,
        threads: int = 1,
        piece_numel: int = THREAD_PIECE_NUMEL,
    ) -> None:
        """One step of all spans with ``factor`` times their gradients.

        ``grads``: of the chunks, all of one dtype. Step counts must be increased already.

        The caller and up to ``threads - 1`` threads of the library share pieces of ``piece_numel``
        elements. The bits do not depend on the number of threads. The library's threads start with the
        first call that needs them, end some seconds after the last one, and do not delay a fork or an
        exit. May be called from several threads at once.
        """
        options = (_Options * len(groups))()
        for entry, group in zip(options, groups, strict=True):
            entry.lr, (entry.beta1, entry.beta2) = float(group["lr"]), map(float, group["betas"])
            entry.weight_decay, entry.eps = group["weight_decay"], group["eps"]
            entry.decoupled = group["decoupled_weight_decay"]
            entry.maximize = group["maximize"]
        addresses = (ctypes.c_void_p * len(grads))(*[grad.data_ptr() for grad in grads])
        spans.locate()
        if host_memory.listeners:
            host_memory.host_access(reads=[*grads], writes=spans.tensors)
        self._calls[grads[0].dtype](
            *(spans.array, len(spans.array), options, addresses, factor),
            *(max(1, threads), max(1, piece_numel)),
        )


@dataclass(frozen=True)
class DeviceForm:
    """How the Triton kernels do an optimizer's arithmetic (:mod:`~zeroshard.optim.triton_update`).

    ``kind``: the kernel's name for it. ``options(group)``: the numbers of a param group that the kernel
    reads. ``starts_at_zero``: in the first step the state is zeros, so no optimizer has to make it.
    """

    kind: str
    options: Callable[[Mapping[str, Any]], tuple[float, ...]]
    starts_at_zero: bool


@dataclass(frozen=True)
class UpdateKernel:
    """An optimizer's arithmetic as a function, without the optimizer object.

    ``update(group, params, grads, state)`` changes lists of tensors in place; all lists have equal
    length. ``state`` maps names to such lists: the names in ``shaped``, and ``"step"`` (0-dim, already
    increased) if ``counts``. ``compiled()``: this is Adam, and the function returns the compiled Adam if
    that is ready. It never waits; the first call starts compiling. ``device_form``: the same in device
    memory; None: the optimizer's own step runs there.
    """

    update: Callable[[Mapping[str, Any], list[Tensor], list[Tensor], dict[str, list[Tensor]]], None]
    shaped: tuple[str, ...]
    counts: bool
    compiled: Callable[[], CompiledAdam | None] | None = None
    device_form: DeviceForm | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all state of one parameter, in the order in which the optimizer makes it."""
        return ("step", *self.shaped) if self.counts else self.shaped

    def is_in(self, state: Mapping[str, Any]) -> bool:
        """Whether the optimizer has made the state that the kernel needs."""
        return all(name in state for name in self.shaped) and ("step" in state or not self.counts)


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
    if it is its own master. ``lend(nbytes)``: reports memory that is allocated inside the block.
    """

    def __init__(
        self,
        kernel: UpdateKernel,
        fragments: Sequence[tuple[int, int, Tensor]],
        states: Sequence[Mapping[str, Any]],
        *,
        master_R: Tensor,
        param_R: Tensor,
        lend: Callable[[int], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self._kernel = kernel
        self._master_R = master_R
        self._low_R = param_R
        self._lend = lend
        self.steps = [state["step"] for state in states] if kernel.counts else []
        self._states = states
        numel = master_R.numel()
        self._pieces = [
            _piece(kernel, fragments, states, begin, min(begin + PIECE_NUMEL, numel))
            for begin in range(0, numel, PIECE_NUMEL)
        ]
        self._library: CompiledAdam | None = None
        self.spans: Spans | None = None
        self._tails: list[_Piece] = []
        if kernel.compiled is not None and _spans_fit(param_R, master_R, states):
            self.spans = _spans(fragments, states, master_R, param_R)
            self._tails = [
                _piece(kernel, fragments, states, begin, begin + SPAN_MULTIPLE)
                for _, at, value in fragments
                if (begin := at + _round_down(value.numel())) < at + value.numel()
            ]

    def run(
        self,
        grad_R: Tensor,
        factor: float,
        groups: Sequence[Mapping[str, Any]],
        *,
        threads: int | None = None,
        keeps_grad: bool = False,
    ) -> None:
        """Update master, state and parameter with ``grad_R * factor``.

        May overwrite ``grad_R``, unless it ``keeps_grad``.

        Elements of the parameter that differ from the rounded master were written by the program, and are
        first copied into the master. ``threads``: the most that a compiled update may use; default: as
        many as torch's operations. The bits do not depend on it.
        """
        did = self.run_compiled(self.spans, self.steps, [grad_R], factor, groups, threads=threads)
        self.run_pieces(grad_R, factor, groups, keeps_grad=keeps_grad, tails=did)

    def run_compiled(
        self,
        spans: Spans | None,
        steps: list[Tensor],
        grads: Sequence[Tensor],
        factor: float,
        groups: Sequence[Mapping[str, Any]],
        *,
        threads: int | None = None,
    ) -> bool:
        """Increase ``steps``, and update ``spans`` if the compiled update can. Returns whether it can."""
        if steps:
            torch._foreach_add_(steps, 1)
        if spans is None or grads[0].dtype not in GRAD_DTYPES:
            return False
        if self._library is None:
            assert self._kernel.compiled is not None
            self._library = self._kernel.compiled()
        if self._library is None:
            return False
        threads = threads_for(spans.numel, torch.get_num_threads() if threads is None else threads)
        self._library.update(spans, grads, factor, groups, threads=threads)
        return True

    def changed(self) -> list[Tensor]:
        """Every tensor that :meth:`run` writes, apart from the gradient, once."""
        names = self._kernel.names
        flats = [self._master_R, self._low_R, *(s[name] for s in self._states for name in names)]
        return list({id(flat): flat for flat in flats}.values())

    def run_pieces(
        self,
        grad_R: Tensor,
        factor: float,
        groups: Sequence[Mapping[str, Any]],
        *,
        keeps_grad: bool,
        tails: bool,
    ) -> None:
        """Update piece by piece, each in the master's dtype. A copy needs memory for one piece.

        ``tails``: only what is left of each fragment after :attr:`spans`.
        """
        pieces = self._tails if tails else self._pieces
        if not pieces:
            return
        if grad_R.dtype == self._master_R.dtype and not keeps_grad:
            for piece in pieces:
                self._run_piece(piece, grad_R[piece.begin : piece.end], factor, groups)
            return
        longest = max(piece.end - piece.begin for piece in pieces)
        with self._lend(longest * self._master_R.element_size()):
            wide = self._master_R.new_empty(longest)
            for piece in pieces:
                grad = wide[: piece.end - piece.begin].copy_(grad_R[piece.begin : piece.end])
                self._run_piece(piece, grad, factor, groups)

    def _run_piece(
        self, piece: _Piece, grad: Tensor, factor: float, groups: Sequence[Mapping[str, Any]]
    ) -> None:
        begin, end = piece.begin, piece.end
        if factor != 1.0:
            grad.mul_(factor)
        has_master = self._master_R is not self._low_R
        if has_master:
            low, master = self._low_R[begin:end], self._master_R[begin:end]
            sync_master_from_param(master, low)
        for members in piece.members:
            grads = [
                grad[a:b].view_as(param)
                for (a, b), param in zip(members.grads_at, members.params, strict=True)
            ]
            self._kernel.update(groups[members.group], members.params, grads, members.state)
        if has_master:
            low.copy_(master)


class JointUpdate:
    """Fused updates of several chunks, by one call of the compiled library where that can be used.

    A call costs the host some ten microseconds, whatever it updates.
    """

    def __init__(self, updates: Sequence[FusedUpdate]) -> None:
        self.updates = list(updates)
        self._steps = [step for update in updates for step in update.steps]
        self._spans: Spans | None = None
        if all(update.spans is not None for update in updates):
            own = [update.spans for update in updates if update.spans is not None]
            self._spans = Spans(
                (
                    span._replace(chunk=chunk)
                    for chunk, some in enumerate(own)
                    for span in some.kept
                ),
                [base for some in own for base in some.bases],
            )

    def run(
        self, grads: Sequence[Tensor], factor: float, groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """:meth:`FusedUpdate.run` of each update, with the gradient of the same index."""
        pairs = list(zip(self.updates, grads, strict=True))
        if self._spans is None or len({grad.dtype for grad in grads}) > 1:
            for update, grad in pairs:
                update.run(grad, factor, groups)
            return
        did = self.updates[0].run_compiled(self._spans, self._steps, grads, factor, groups)
        for update, grad in pairs:
            update.run_pieces(grad, factor, groups, keeps_grad=False, tails=did)


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
    return numel // SPAN_MULTIPLE * SPAN_MULTIPLE


def _spans_fit(param_R: Tensor, master_R: Tensor, states: Sequence[Mapping[str, Any]]) -> bool:
    if param_R is not master_R and param_R.dtype != torch.bfloat16:
        return False
    names = "exp_avg", "exp_avg_sq", "step"
    wide = [master_R, *(state[name] for state in states for name in names)]
    return all(
        t.dtype == torch.float32 and t.device.type == "cpu" and t.is_contiguous() for t in wide
    )


def _spans(
    fragments: Sequence[tuple[int, int, Tensor]],
    states: Sequence[Mapping[str, Any]],
    master_R: Tensor,
    param_R: Tensor,
) -> Spans:
    spans = []
    for (group, at, value), state in zip(fragments, states, strict=True):
        if numel := _round_down(value.numel()):
            flat = [t.view(-1)[:numel] for t in (value, state["exp_avg"], state["exp_avg_sq"])]
            low = None if param_R is master_R else param_R[at : at + numel]
            spans.append(FusedFragment(group, at, flat[0], flat[1], flat[2], state["step"], low))
    return Spans(spans, [master_R, param_R])


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
