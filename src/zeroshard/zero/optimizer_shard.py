"""The optimizer shard: the part of a unit that this rank updates, cut into chunks that each have a tier.

[Note: what a rank updates]

*Letters.* ``R`` is the number of elements of one unit that this rank updates: S where optimizer state is
sharded, N at stage 0. ``C`` is the number of elements of one chunk.

*Vocabulary.* An :class:`OptimizerShard` is these ``R`` elements. It is cut into chunks. Master and
optimizer state of an :class:`OptimizerChunk` are stored in one tier, and the chunk is updated as a whole
(ADR 0008). Cuts are at multiples of 64 elements, so no bit of the result depends on the tier. An
:class:`OwnedFragment` is the part of one parameter in one chunk. The optimizer object sees fragments and
nothing else, and so need not know that parameters are sharded (ADR 0001).

*Who owns which memory.* ``param_R`` and ``param_C`` are the unit's memory: ``full_N`` at stage 0, else
``shard_S``. A chunk owns ``master_C`` if that is not the parameter itself. Where the parameter is used in
other memory than it is updated in (a GPU, or a delayed update on CPU ranks), the chunk has a
:class:`~zeroshard.offload.host_chunk.HostChunk`, which owns the copy of the parameter that the update
reads and writes. A tier may give a chunk memory for master and state
(:meth:`~zeroshard.offload.tier_stores.TierStores.chunk_memory`). ``master_C`` and ``state_C`` are then
views of it, and state that the optimizer allocates is moved there. On disk this memory is a pager slot.
Other chunks use the same slot, so the views are valid only while the chunk's page is open: inside
:meth:`OptimizerShard.visit` and inside the walk of an update. Outside, they show another chunk's values.

*Masters.* A master starts as the rounded parameter (ADR 0005). It is stored whole, not as a remainder
next to the 16-bit parameter (ADR 0009).

*Edits.* After an update each parameter equals its rounded master. An element that differs later was
written by the program. ``sync_from_param`` finds these elements and copies them into the master before
the next update. Without this, the update would overwrite the program's values. A master stored as a
remainder would make every parameter value look valid, and edits could not be found (ADR 0009).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from zeroshard.core.ledger import Ledger
from zeroshard.core.tiers import TIERS, Tier
from zeroshard.memory import storage
from zeroshard.offload.async_update import EarlyUpdates
from zeroshard.offload.grad_store import HostGradStore, nothing
from zeroshard.offload.host_chunk import HostChunk
from zeroshard.optim.fused_update import PIECE_NUMEL, sync_master_from_param
from zeroshard.optim.state_tree import flat, replace
from zeroshard.zero.clip import Cuts, measure
from zeroshard.zero.gradients import GradBuffer, Norms
from zeroshard.zero.held_grads import HeldGrad, assigned
from zeroshard.zero.master_piece import MasterPiece, PagedPiece
from zeroshard.zero.unit import Unit, offloaded_error

if TYPE_CHECKING:
    from zeroshard.offload.pager import Page, Pager


@dataclass(frozen=True, eq=False, slots=True)
class OwnedFragment:
    """The part of one parameter inside one chunk: ``chunk[at : at + numel]``."""

    param: nn.Parameter  # the model's parameter
    index: int  # the index of its slot in the unit
    group: int  # the index of its param group
    begin: int  # where the fragment starts in the flat parameter
    at: int
    numel: int
    value: Tensor  # what the optimizer sees: a view of the master
    master: Tensor  # the same view as a plain tensor
    shape: torch.Size  # of both

    def of(self, flat_C: Tensor) -> Tensor:
        """The fragment's part of a flat tensor ``[C]``, in the optimizer's shape."""
        return flat_C[self.at : self.at + self.numel].view(self.shape)


@contextlib.contextmanager
def opened(fragments: Sequence[OwnedFragment]) -> Iterator[None]:
    """``value`` of the fragments is a plain tensor inside the block. At its end ``.grad`` is None."""
    guards = [type(fragment.value) for fragment in fragments]
    for fragment, guard in zip(fragments, guards, strict=True):
        if issubclass(guard, MasterPiece):
            fragment.value.__class__ = Tensor
    try:
        yield
    finally:
        for fragment, guard in zip(fragments, guards, strict=True):
            fragment.value.grad = None
            if issubclass(guard, MasterPiece):
                fragment.value.__class__ = guard


@dataclass(eq=False, slots=True)
class OptimizerChunk:
    """Elements ``begin`` to ``begin + C`` of an optimizer shard. See [Note: what a rank updates].

    ``param_C`` is the unit's memory. ``master_C`` is what the optimizer updates: the parameter itself, or
    an fp32 copy for 16-bit parameters. ``host_chunk`` is set where parameter and update are in different
    memory, and copies between the two. ``state_C``: flat tensors of the tier for the optimizer state that
    has the parameter's shape, by name; empty if the tier gives none. With a ``page``, these and the
    master (if there is one) are valid only while the page is open.
    """

    begin: int
    numel: int  # C
    tier: Tier
    param_C: Tensor
    master_C: Tensor
    fragments: tuple[OwnedFragment, ...]
    page: Page | None = None
    state_C: dict[str, Tensor] = field(default_factory=dict)
    host_chunk: HostChunk | None = None

    @property
    def param_on_update_device(self) -> Tensor:
        """The parameter ``[C]`` on the device where the update runs."""
        return self.param_C if self.host_chunk is None else self.host_chunk.host_param_C

    @property
    def has_master(self) -> bool:
        return self.master_C is not self.param_on_update_device

    @property
    def master_nbytes(self) -> int:
        return self.master_C.nbytes if self.has_master else 0

    def round_master_into_param(self) -> None:
        """Round the master into the parameter memory."""
        if self.has_master:
            self.param_on_update_device.copy_(self.master_C)

    def sync_from_param(self) -> None:
        """Copy into the master each element of the parameter that differs from the rounded master.

        Does not wait for the device.
        """
        if self.has_master and not isinstance(self.param_C, FakeTensor):
            piece = (
                PIECE_NUMEL
                if self.param_on_update_device.device.type == "cpu"
                else max(1, self.numel)
            )
            for master, low in zip(
                self.master_C.split(piece), self.param_on_update_device.split(piece), strict=True
            ):
                sync_master_from_param(master, low)

    def adopt_state(self, state: dict[Tensor, dict[str, Any]]) -> None:
        """Move state that the optimizer allocated itself to :attr:`state_C`."""
        if not self.state_C:
            return
        for fragment in self.fragments:
            here = dict.get(state, fragment.value)
            if here:
                _seat(here, fragment, self.state_C)

    def sync_edits(self) -> None:
        """Copy into the master what the program wrote into the parameter, on either device."""
        if self.host_chunk is not None:
            self.host_chunk.sync_edits_from_device()
        self.sync_from_param()

    def guard(self, *, is_in_memory: bool) -> None:
        """Let what the program finds in the optimizer's groups refuse writes."""
        for fragment in self.fragments:
            if type(fragment.value) is Tensor:
                fragment.value.__class__ = MasterPiece if is_in_memory else PagedPiece

    def write_param(self) -> None:
        """Round the master into the parameter, on host and device, after a write outside a step."""
        if self.host_chunk is not None:
            self.host_chunk.wait_until_unused()
        self.round_master_into_param()
        if self.host_chunk is not None:
            self.param_C.copy_(self.param_on_update_device)
            self.host_chunk.update_fingerprint()

    def write(self, fragment: OwnedFragment, values: Tensor) -> None:
        """Set the fragment to 1-D ``values``, in master and parameter."""
        if self.host_chunk is not None:
            self.host_chunk.wait_until_unused()
        for flat_C in {
            id(t): t for t in (self.master_C, self.param_on_update_device, self.param_C)
        }.values():
            fragment.of(flat_C).view(-1).copy_(values)
        if self.host_chunk is not None:
            self.host_chunk.update_fingerprint()


@dataclass(eq=False, slots=True)
class OptimizerShard:
    """What this rank updates of one unit: ``R`` elements in chunks. See [Note: what a rank updates].

    ``own`` is ``(begin, end)`` of this rank's shard inside ``param_R``: the part whose norm this rank
    measures. ``owned`` is ``(slot, at, numel)`` of each parameter's part of ``param_R``. ``is_whole``:
    this rank updates the whole unit (stage 0).
    """

    unit: Unit
    buffer: GradBuffer
    param_R: Tensor
    is_whole: bool
    own: tuple[int, int]
    owned: tuple[tuple[int, int, int], ...]
    chunks: tuple[OptimizerChunk, ...]
    pager: Pager | None = None
    # Of "master" and "optimizer": what offload_states() moved to the host.
    is_offloaded: frozenset[str] = frozenset()
    has_new_state: bool = False  # the optimizer's own step ran, which may have allocated state
    settle: Callable[[], None] = nothing  # called before master and state are read or written
    # Of each parameter's part of ``own``: slot, begin and end. And the slots without elements.
    cuts: list[tuple[int, tuple[int, int]]] = field(init=False)
    empty: list[tuple[int, tuple[int, int]]] = field(init=False)

    def __post_init__(self) -> None:
        low, high = self.own
        places = [(slot, (max(low, at), min(high, at + numel))) for slot, at, numel in self.owned]
        self.cuts = [(slot, (begin, end)) for slot, (begin, end) in places if begin < end]
        slots = self.unit.layout.slots
        self.empty = [(index, (0, 0)) for index, slot in enumerate(slots) if slot.numel == 0]

    @property
    def fragments(self) -> tuple[OwnedFragment, ...]:
        return tuple(fragment for chunk in self.chunks for fragment in chunk.fragments)

    @property
    def is_updated_asynchronously(self) -> bool:
        """Whether the update of all chunks runs asynchronously: all are in host memory, none on disk."""
        on_host = all(chunk.host_chunk is not None and chunk.page is None for chunk in self.chunks)
        return on_host and not self.unit.store.tier.only_in_use

    def is_in_memory(self, chunk: OptimizerChunk) -> bool:
        """Whether master and state of the chunk are always in memory."""
        return chunk.page is None and not self.unit.store.tier.only_in_use

    def attach(self, *, stores_on_host: bool) -> None:
        """Guard what the optimizer's groups list, and let the buffer measure its reduced gradient here.

        ``stores_on_host``: and copy it to host memory, if :attr:`is_updated_asynchronously`.
        """
        for chunk in self.chunks:
            chunk.guard(is_in_memory=self.is_in_memory(chunk))
        self.buffer.measure = self.measure
        if stores_on_host and self.is_updated_asynchronously:
            self.buffer.store = self._grad_on_host()

    def begin_early(self, begin: Callable[[], None], early: EarlyUpdates) -> None:
        """``begin()`` the update when its gradient is complete. Reading master and state withdraws it."""
        self.settle = early.withdraw
        for fragment in self.fragments:
            if isinstance(fragment.value, MasterPiece):
                fragment.value.settle = early.withdraw
        host_chunks = [chunk.host_chunk for chunk in self.chunks if chunk.host_chunk is not None]
        stale = partial(early.withdraw_if_open, host_chunks)
        self.buffer.store = self._grad_on_host(begin, stale)

    def _grad_on_host(
        self, after: Callable[[], None] = nothing, stale: Callable[[], None] = nothing
    ) -> HostGradStore:
        parts = [
            (slice(chunk.begin, chunk.begin + chunk.numel), chunk.host_chunk)
            for chunk in self.chunks
            if chunk.host_chunk is not None
        ]
        # write() overwrites the gradient buffer, which the last update must have read.
        return HostGradStore(
            parts,
            numel=self.param_R.numel(),
            before=self.unit.wait_for_unshard,
            after=after,
            stale=stale,
        )

    def gradient_of(self, chunk: OptimizerChunk) -> Tensor:
        """The chunk's part ``[C]`` of the reduced gradient: a sum over ranks, still loss-scaled."""
        grad_R = self.buffer.reduced_N if self.is_whole else self.buffer.reduced_S
        assert grad_R is not None, "GradReducer.finish() comes before the update"
        if chunk.numel == grad_R.numel():
            return grad_R
        return grad_R[chunk.begin : chunk.begin + chunk.numel]

    def measure(self, grad_R: Tensor) -> Norms:
        """2-norms of this rank's fragments of a gradient ``[R]``."""
        return measure([(self.measured(), grad_R)])

    def measured(self) -> Cuts:
        """The fragments whose norms clipping adds up.

        On one rank these are the ones of ``clip_grad_norm_``: not parameters without gradient, but those
        without elements, whose norm is zero.
        """
        cuts, touched = self.cuts, self.buffer.has_grad
        if self.buffer.comm.size == 1:
            cuts = [cut for cut in (*cuts, *self.empty) if touched[cut[0]]]
        return [(self.unit.positions[index], place) for index, place in cuts]

    @contextlib.contextmanager
    def loaded(self) -> Iterator[None]:
        """Keeps ``param_R`` readable inside the block."""
        self.settle()
        self.unit.store.acquire()
        try:
            yield
        finally:
            self.unit.store.release()

    def prefetches(self) -> tuple[Callable[[], None], ...]:
        """Functions that start reading what an update of this shard needs; none if it is in memory."""
        wanted: list[Callable[[], None]] = []
        if self.unit.store.tier.only_in_use:
            wanted.append(self.unit.store.prefetch)
        if self.buffer.store is not None:
            wanted.append(self.buffer.prefetch)
        return tuple(wanted)

    def visit(self, *, changed: bool = False) -> Iterator[OptimizerChunk]:
        """Yield each chunk with its memory, which is valid until the next one.

        ``changed``: write pages back to disk.
        """
        with self.loaded():
            for chunk in self.chunks:
                if chunk.page is None:
                    yield chunk
                    continue
                assert self.pager is not None
                with self.pager.open(chunk.page, changed=changed):
                    yield chunk

    def flat(self, part: Callable[[OptimizerChunk], Tensor]) -> Tensor:
        """``part`` of every chunk as one flat tensor ``[R]``.

        No copy if the shard has one chunk and that is not on disk.
        """
        if len(self.chunks) == 1 and self.chunks[0].page is None:
            with self.loaded():
                return part(self.chunks[0])
        return torch.cat([part(chunk).clone() for chunk in self.visit()])

    def refuse_grad(self) -> None:
        """Refuse a gradient that the program assigned to ``.grad``: the step would ignore it.

        (The engine clears ``.grad`` when a gradient is ready.)

        Raises:
            UsageError: a parameter of the unit has such a ``.grad``.
        """
        if len(self.buffer.stand_ins.shown) == len(self.unit.params):
            return  # the engine has looked at them
        with torch._C.DisableTorchFunctionSubclass():
            strays = [
                i
                for i, param in enumerate(self.unit.params)
                if param.grad is not None and type(param.grad) is not HeldGrad
            ]
        if strays:
            raise assigned(self.unit.layout.slots[strays[0]].fqn)

    def sync_edits(self) -> None:
        """Copy into the masters what the program wrote into the parameters, in whatever way."""
        self.unit.wait_for_unshard()
        self.unit.write_back_edits()
        if "master" in self.is_offloaded:
            return  # the next update compares again
        for chunk in self.visit(changed=True):
            chunk.sync_edits()

    def check_not_offloaded(self) -> None:
        """Check that no state of the unit is offloaded by ``offload_states()``.

        Raises:
            UsageError: some is.
        """
        self.unit.check_not_offloaded()
        self.buffer.check_not_offloaded()
        if self.is_offloaded:
            raise offloaded_error(
                f"{' and '.join(sorted(self.is_offloaded))} state of {self.unit.name!r}"
            )

    def movable(
        self, category: str, state: Mapping[Tensor, Mapping[str, object]]
    ) -> Iterator[Tensor]:
        """Tensors of ``category`` ("master" or "optimizer") that are on the device and can leave it."""
        for chunk in self.chunks:
            if chunk.tier is not Tier.DEVICE:
                continue
            if category == "master":
                yield from [chunk.master_C] if chunk.has_master else []
                continue
            for fragment in chunk.fragments:
                for value in flat(state.get(fragment.value, {})).values():
                    if isinstance(value, Tensor) and value.device == self.param_R.device:
                        yield value

    def report(self, ledger: Ledger, state: Mapping[Tensor, Mapping[str, object]]) -> None:
        """Report bytes of masters and optimizer state to the ledger."""
        self.has_new_state = False
        held = dict.fromkeys([(c, t) for c in ("master", "optimizer") for t in TIERS.values()], 0)
        for chunk in self.chunks:
            held["master", self._now("master", chunk.tier)] += chunk.master_nbytes
            for fragment in chunk.fragments:
                for value in flat(state.get(fragment.value, {})).values():
                    if isinstance(value, Tensor):
                        tier = self._now("optimizer", self._tier_of(chunk, value))
                        held["optimizer", tier] += value.nbytes
        for (category, tier), nbytes in held.items():
            ledger.hold(category, self.unit.name, nbytes, tier)

    def _now(self, category: str, tier: Tier) -> Tier:
        return Tier.HOST if tier is Tier.DEVICE and category in self.is_offloaded else tier

    def _tier_of(self, chunk: OptimizerChunk, value: Tensor) -> Tier:
        """The tier of a tensor of state. Step counts are not in ``state_C``, but in host memory."""
        if chunk.page is None and not chunk.state_C:
            return chunk.tier
        is_there = any(storage.is_shared(value, flat_C) for flat_C in chunk.state_C.values())
        return chunk.tier if is_there else Tier.HOST


def _seat(here: dict[str, Any], fragment: OwnedFragment, state_C: Mapping[str, Tensor]) -> None:
    """Move a fragment's state into ``state_C``: each tensor into the place of its name if that is free.

    A queue gives a tensor another index in each step. It stays where it is, and the newest one gets the
    place of the one that has left.
    """
    shaped = _shaped(here, fragment, state_C)
    inside = {flat_C.untyped_storage()._cdata for flat_C in state_C.values()}
    moving = {n: v for n, v in shaped.items() if v.untyped_storage()._cdata not in inside}
    if not moving:
        return
    free = {
        name: flat_C
        for name, flat_C in state_C.items()
        if not any(_is_in(value, flat_C) for value in shaped.values())
    }
    places = _places(moving, free)
    for name in [name for name in moving if name not in places]:
        warnings.warn(
            f"the optimizer's state {name!r} was not there in the first steps of the probe, so no "
            "place on disk was planned for it. It stays in memory.",
            stacklevel=2,
        )
    seated = {name: fragment.of(place).copy_(moving[name]) for name, place in places.items()}
    replace(here, seated.get)


def _shaped(
    here: dict[str, Any], fragment: OwnedFragment, state_C: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The state that has the fragment's shape. Of one element, a count has this shape too."""
    return {
        name: value
        for name, value in flat(here).items()
        if isinstance(value, Tensor)
        and value.shape == fragment.shape
        and (fragment.numel > 1 or name in state_C)
    }


def _places(moving: Mapping[str, Tensor], free: dict[str, Tensor]) -> dict[str, Tensor]:
    """Where tensors of state go: the free place of their name, or else one of their dtype, if any."""
    places = {name: free.pop(name) for name in moving if name in free}
    for name in [name for name in moving if name not in places]:
        other = next((n for n, flat_C in free.items() if flat_C.dtype == moving[name].dtype), None)
        if other is not None:
            places[name] = free.pop(other)
    return places


def _is_in(value: Tensor, flat_C: Tensor) -> bool:
    """Whether ``value`` begins inside the memory of ``flat_C``."""
    if not storage.is_shared(value, flat_C):
        return False
    begin = flat_C.storage_offset() * flat_C.itemsize
    return begin <= value.storage_offset() * value.itemsize < begin + max(1, flat_C.nbytes)
