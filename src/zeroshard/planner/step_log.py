"""Writes down, in order, what a simulated rank does in one step: operations, collectives, memory.

The work of an operation is FLOP, bytes, and elements of slow functions. Only shapes and dtypes are read,
so tensors may be fake. FLOP of matrix products are torch's own formulas, and ours for the attention of
the CPU, which torch has none for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from zeroshard.comm.collectives import RecordedComm
from zeroshard.comm.recorder import Entry, Recorder
from zeroshard.comm.simulation import CallLog, Histories
from zeroshard.comm.stage_messages import StageMessages
from zeroshard.planner.allocations import Allocations, Held
from zeroshard.zero.unit import Unit


@dataclass(frozen=True, slots=True)
class Work:
    """One operation.

    ``op``: its name in torch, without the namespace. ``kind``: "matmul", "attention", "random", "special"
    or "memory": what limits it. ``flop`` and ``dtype``: of products and attention; else 0 and "".
    ``nbytes``: that it reads and writes; 0 for views. ``numel`` and ``largest_nbytes``: of its largest
    tensor. ``smallest``: the smallest of the three sizes of a product of matrices; 0: it is none.
    """

    op: str
    kind: str
    flop: int
    dtype: str
    nbytes: int
    numel: int
    largest_nbytes: int
    smallest: int = 0


def along(low: Work, high: Work, part: float) -> Work:
    """The work on the line through two works: ``low`` at 0, ``high`` at 1. Never below 0."""

    def at(before: int, after: int) -> int:
        return max(0, round(before + part * (after - before)))

    return Work(
        low.op, low.kind, at(low.flop, high.flop), low.dtype, at(low.nbytes, high.nbytes),
        at(low.numel, high.numel), at(low.largest_nbytes, high.largest_nbytes),
        at(low.smallest, high.smallest),
    )  # fmt: skip


SPECIAL = frozenset(
    {
        "exp", "log", "tanh", "tanh_backward", "sigmoid", "erf", "sin", "cos", "log1p",
        "log_sigmoid_forward", "gelu", "gelu_backward", "silu", "silu_backward", "softplus",
        "mish", "logsumexp", "_softmax", "_safe_softmax", "_softmax_backward_data",
        "_log_softmax", "_log_softmax_backward_data", "native_layer_norm",
        "native_layer_norm_backward", "pow",
    }
)  # fmt: skip
"""Operations that arithmetic may limit, not memory."""

RANDOM = frozenset(
    {"bernoulli", "bernoulli_", "native_dropout", "normal_", "uniform_", "rand_like"}
)
"""Operations that draw a random number for each element."""

ROWS = frozenset({"embedding", "index_select", "gather", "index", "nll_loss_forward"})
"""Operations that read as much of their input as they write."""

OVERWRITES = frozenset(
    {
        "copy_", "_foreach_copy_", "fill_", "zero_", "_foreach_zero_", "bernoulli_", "normal_",
        "uniform_", "nll_loss_backward",
    }
)  # fmt: skip
"""Operations that do not read the tensor that they write, or one like it."""

PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
"""Products of matrices. The last two inputs are the matrices."""

EMPTY = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"}
)
"""Operations that leave memory as it is."""


def work_of(func: Any, args: Sequence[Any], result: Any) -> Work:
    """The work of one call of the dispatcher."""
    op = func.name().partition("::")[2].partition(".")[0]
    inputs = list(_tensors(args))
    # operations on lists change the first list and return nothing
    results = list(_tensors((result,) if result is not None else args[:1]))
    numel = max((tensor.numel() for tensor in (*results, *inputs)), default=0)
    largest = max((tensor.nbytes for tensor in (*results, *inputs)), default=0)
    if op in EMPTY or _is_view(func, inputs, results):
        return Work(op, "memory", 0, "", 0, numel, largest)
    flop = _flop(func, args, result)
    written = sum(map(_nbytes, results))
    read = sum(map(_nbytes, inputs))
    if op in ROWS:  # as much as they write, and the numbers of the rows
        read = written + read - _nbytes(inputs[0])
    elif op in OVERWRITES:
        read -= written
    nbytes = written + read
    kind = "memory"
    if flop:
        kind = "attention" if "attention" in op else "matmul"
    elif op in RANDOM:
        kind = "random"
    elif op in SPECIAL:
        kind = "special"
    dtype = str(inputs[0].dtype).removeprefix("torch.") if flop else ""
    return Work(op, kind, flop, dtype, nbytes, numel, largest, _smallest(op, inputs))


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _nbytes(tensor: Tensor) -> int:
    """Bytes of memory that hold the elements: those of an expanded tensor are there once."""
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numel *= size if stride or not size else 1
    return numel * tensor.element_size()


def _is_view(func: Any, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> bool:
    """Whether all that the operation returns is memory of its inputs that it did not write."""
    if func._schema.is_mutable:
        return False
    own = {tensor.untyped_storage()._cdata for tensor in inputs}
    return all(tensor.untyped_storage()._cdata in own for tensor in results)


def _smallest(op: str, inputs: Sequence[Tensor]) -> int:
    """The smallest of rows, columns and what is summed, of a product of matrices."""
    if op not in PRODUCTS:
        return 0
    left, right = inputs[-2:]
    sizes: tuple[int, ...] = (*left.shape[-2:], right.shape[-1])
    return min(sizes)


def _flop(func: Any, args: Sequence[Any], result: Any) -> int:
    packet = getattr(func, "overloadpacket", None)
    if (known := ATTENTION.get(str(packet))) is not None:
        own, first = known
        return own(*args[first : first + 3])
    formula = flop_registry.get(packet)
    return int(formula(*args, out_val=result)) if formula is not None else 0


def attention_flop(query: Tensor, key: Tensor, value: Tensor) -> int:
    """FLOP of attention: scores and their product with the values, two for each multiplication.

    ``query`` [B, H, L, D], ``key`` [B, H', S, D], ``value`` [B, H', S, V]. All scores count, also masked
    ones, as torch counts them for other kernels.
    """
    batch, heads, length, width = query.shape
    return 2 * batch * heads * length * key.shape[-2] * (width + value.shape[-1])


def attention_backward_flop(query: Tensor, key: Tensor, value: Tensor) -> int:
    """FLOP of backward: scores again, and the gradients of values, scores, queries and keys."""
    batch, heads, length, width = query.shape
    scores = 2 * batch * heads * length * key.shape[-2]
    return scores * (3 * width + 2 * value.shape[-1])


ATTENTION: Mapping[str, tuple[Callable[[Tensor, Tensor, Tensor], int], int]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": (attention_flop, 0),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": (attention_backward_flop, 1),
}
"""Formulas that torch's registry does not have, and where in the arguments query, key and value are."""


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of torch. ``phase``: "forward", "backward" or "step". ``module``: "" if not known."""

    phase: str
    work: Work
    module: str = ""


@dataclass(frozen=True, slots=True)
class Begun:
    """A collective that starts. ``key``: the same for its :class:`Ended`, and in every step.

    ``op``: "all_gather", "reduce_scatter"... ``nbytes``: of the whole tensor. ``ranks``: of the group.
    Of a message between pipeline stages ``op`` is :data:`MESSAGE`, and ``ranks`` sender and receiver.
    """

    key: str
    op: str
    nbytes: int
    ranks: tuple[int, ...]

    @property
    def grows(self) -> bool:
        """Whether its bytes grow with the micro-batch: a message, or of a layer."""
        return self.op == MESSAGE or is_of_layers(self.key)


@dataclass(frozen=True, slots=True)
class Ended:
    """The device waits for the collective with this key that was begun last."""

    key: str


MESSAGE = "message"
"""The operation of a message between pipeline stages."""

StepEvent: TypeAlias = Operation | Begun | Ended | Held


@dataclass
class _Order:
    """Collectives over one group: how many, and a hash of their names, sizes and dtypes in order."""

    name: str
    ranks: tuple[int, ...]
    calls: int = 0
    hash: Any = field(default_factory=partial(hashlib.blake2b, digest_size=8))


@dataclass
class StepLog:
    """Events of a step, from the dispatcher and the recorders, and what layers call.

    The memory of the last step and the order of collectives are always logged, operations and collectives
    if they are asked for.
    """

    calls: CallLog = field(default_factory=CallLog)
    events: list[StepEvent] = field(default_factory=list)
    starts: list[int] = field(
        default_factory=list
    )  # of each micro-batch: the number of events before
    kept: set[str] = field(default_factory=set)  # units that are gathered when a backward begins
    _orders: dict[int, _Order] = field(default_factory=dict)  # by id of the recorder
    _watch: Allocations | None = None  # knows the phase
    _ranks: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by id of the recorder

    def begin(self, comms: Sequence[RecordedComm], watch: Allocations) -> None:
        """Log from now on what the device holds, and the order of the collectives of ``comms``."""
        watch.looked = self.events.append
        several = [comm for comm in comms if len(comm.ranks) > 1]
        self._orders = {
            id(comm.recorder): _Order(comm.recorder.group, comm.ranks) for comm in several
        }
        for comm in several:
            comm.recorder.listener = self

    def histories(self) -> Histories:
        """The collectives so far over each group, in order, as hashes."""
        return {(o.name, o.ranks): f"{o.calls}-{o.hash.hexdigest()}" for o in self._orders.values()}

    def begin_events(
        self, comms: Sequence[RecordedComm], watch: Allocations, messages: StageMessages | None
    ) -> None:
        """Log operations from now on, with what these communicators do. ``watch`` knows the phase.

        ``messages``: between pipeline stages.
        """
        listened = [(comm.recorder, comm.ranks) for comm in comms]
        if messages is not None:
            listened += [(made, tuple(channel)) for channel, made in messages.recorders.items()]
        self._ranks = {id(recorder): tuple(ranks) for recorder, ranks in listened}
        for recorder, _ in listened:
            recorder.listener = self
        self._watch = watch

    def begin_micro_batch(self) -> None:
        """The forward of a micro-batch begins."""
        self.starts.append(len(self.events))

    def begin_backward(self, units: Sequence[Unit]) -> None:
        """A backward begins. Those of ``units`` that are gathered now were kept from a forward."""
        self.kept.update(unit.name for unit in units if unit.is_allocated and not unit.resident)

    def note(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Log a call of the dispatcher."""
        called = self.calls.note(func, args, result)
        if self._watch is None:
            return
        if called is not None:
            self._note_layer(*called, work_of(func, args, result))
        elif func.namespace == "aten":
            work, module = work_of(func, args, result), self._watch.here().module
            self.events.append(Operation(self._watch.phase, work, module))

    def _note_layer(self, op: str, ranks: tuple[int, ...], work: Work) -> None:
        """A collective that a layer calls, and whose result the next operation reads."""
        key = f"{op}{_OF_LAYERS}"
        self.events += [Begun(key, op, work.largest_nbytes, ranks), Ended(key)]

    def entered(self, recorder: Recorder, entry: Entry) -> None:
        """A collective of the engine starts."""
        assert entry.dtype is not None  # set when it was entered
        if (order := self._orders.get(id(recorder))) is not None:
            order.calls += 1
            order.hash.update(f"{entry.op} {entry.name} {entry.numel} {entry.dtype}\n".encode())
        if self._watch is None:
            return
        op, size = entry.op.partition(" ")[0], entry.dtype.itemsize
        ranks = self._ranks[id(recorder)]
        self.events.append(Begun(_key(recorder, entry), op, entry.numel * size, ranks))

    def finished(self, recorder: Recorder, entry: Entry) -> None:
        """The device waits for a collective of the engine."""
        if self._watch is None:
            return
        self.events.append(Ended(_key(recorder, entry)))


_OF_LAYERS = " of layers"


def is_of_layers(key: str) -> bool:
    """Whether the key is of a collective that a layer calls, not the engine."""
    return key.endswith(_OF_LAYERS)


def _key(recorder: Recorder, entry: Entry) -> str:
    return f"{recorder.group}: {entry.op} {entry.name}"
