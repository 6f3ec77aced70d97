"""What does this rank hold of one unit's parameters, and how does that change?

Letters: ``W`` ranks of the unit's group, ``N`` padded elements of the unit, ``S = N // W``. Suffixes of
flat tensors carry them: ``full_N``, ``shard_S``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from zeroshard.core.layout import Slot, UnitLayout
from zeroshard.core.tiers import Tier
from zeroshard.errors import UnitStateError, UsageError
from zeroshard.memory import storage
from zeroshard.offload.shard_store import AllocateShard, MemoryShardStore, ShardStore
from zeroshard.watchdog.diagnosis import READ
from zeroshard.zero import sharded_parameter
from zeroshard.zero.scatter import ParamScatterer

_set_versions = torch._C._autograd._unsafe_set_version_counter

if TYPE_CHECKING:
    from zeroshard.comm.collectives import Comm, Handle
    from zeroshard.core.ledger import Ledger
    from zeroshard.precision.policy import DtypeRow


class UnitState(Enum):
    """What this rank holds of the unit's parameters.

    SHARDED --unshard()--> GATHERING --wait()--> FULL --reshard()--> SHARDED
                               ^-----publish()-----'
    SHARDED, and FULL where it rests whole --move_out()--> AWAY --move_in()--> as it was
    """

    SHARDED = "sharded"  # shard_S only: the resting state of stage 3
    GATHERING = "gathering"  # full_N allocated, its contents in flight: do not read
    FULL = "full"  # full_N valid, the module's parameters are views of it
    OFFLOADED = "away"  # nothing: the program wants the device for something else


_TRANSITIONS = frozenset(
    [
        (UnitState.SHARDED, UnitState.GATHERING),
        (UnitState.GATHERING, UnitState.FULL),
        (UnitState.FULL, UnitState.SHARDED),
        (UnitState.FULL, UnitState.GATHERING),
        (UnitState.SHARDED, UnitState.OFFLOADED),
        (UnitState.OFFLOADED, UnitState.SHARDED),
        (UnitState.FULL, UnitState.OFFLOADED),
        (UnitState.OFFLOADED, UnitState.FULL),
    ]
)


_WITHOUT_FULL = (UnitState.SHARDED, UnitState.OFFLOADED)
"""There is nothing to free."""


class Unit:
    """Parameters of one dtype that are gathered together, in one flat storage that lives for ever.

    ``resident`` units (stages 0-2) stay whole: ``shard_S`` is a slice of ``full_N``. Other units own
    ``shard_S`` and fill ``full_N`` only around their use. ``params`` are taken one by one, in the order
    of the layout: each may come into being when its turn comes. Rank 0's values win. ``rest_of`` says
    where ``shard_S``, with its first values in it, rests from now on; ``room(numel, dtype)`` gives
    it zeroed memory, default on ``device``.
    """

    def __init__(
        self,
        name: str,
        layout: UnitLayout,
        params: Iterable[nn.Parameter],
        *,
        positions: Sequence[int],
        row: DtypeRow,
        trainable: bool,
        resident: bool,
        comm: Comm,
        ledger: Ledger,
        device: torch.device,
        rest_of: Callable[[Tensor], ShardStore] = MemoryShardStore,
        room: AllocateShard | None = None,
    ) -> None:
        self.name = name
        self.order = sharded_parameter.count_owner()
        self.layout = layout
        self.positions = tuple(positions)  # of the parameters in ``model.parameters()``
        self.row = row
        self.trainable = trainable
        self.resident = resident
        self.comm = comm
        self.ledger = ledger
        self.state = UnitState.FULL
        self.optim_state: object | None = None  # an ``access.Training``; None while frozen
        self.is_lone_read: Callable[[str], bool] = _never_lone  # asked before a read gathers
        self.pin_count = 0  # readers inside GatheredParameters: not to be freed under them
        self.fingerprint: Tensor | None = None  # hashes of the values that a reader saw first
        self._handle: Handle | None = None
        self._source_S: Tensor | None = None  # what the gather in flight reads
        self._pending_update: Callable[[], None] | None = (
            None  # waits for the update that runs behind
        )
        self._update_failed = False  # it failed, and somebody was told
        self._versions: _unsafe_preserve_version_counter | None = None
        self._weak_self = weakref.ref(self)

        low, high = layout.shard_range(comm.rank)
        make = torch.zeros if resident else torch.empty
        self.full_N = make(layout.full_numel, dtype=row.param, device=device)
        self._views = [
            self.full_N[slot.start : slot.stop].view(slot.shape) for slot in layout.slots
        ]
        self._own_part_S = self.full_N[
            low:high
        ]  # like all views, valid whenever the storage has bytes
        if not resident:
            storage.release(self.full_N)  # making views needed the bytes, construction does not
        part = self.full_N
        if not resident:
            part = (
                torch.zeros(layout.shard_numel, dtype=row.param, device=device)
                if room is None
                else room(layout.shard_numel, row.param)
            )
        scatterer = ParamScatterer(
            layout, part, 0 if resident else low, comm=comm, name=name, device=device
        )
        self.params = tuple(
            self._adopt(param, slot, view, scatterer)
            for param, slot, view in zip(params, layout.slots, self._views, strict=True)
        )
        self._placeholders = [sharded_parameter.nan_placeholder(param) for param in self.params]
        self._kinds = [type(param) for param in self.params]
        scatterer.finish()
        self.shard_S = part[low:high] if resident else part
        self.store = rest_of(self.shard_S)
        ledger.hold("parameters", name, storage.flat_nbytes(part), self.store.tier)
        if not resident:
            self._free_unsharded()

    def _adopt(
        self, param: nn.Parameter, slot: Slot, view: Tensor, scatterer: ParamScatterer
    ) -> nn.Parameter:
        """The parameter's values go to the shards, its memory becomes a view of the unit's."""
        with torch.no_grad():
            scatterer.add(slot, param)  # a parameter built under Init is gathered here
        kind = (
            nn.Parameter if isinstance(param, sharded_parameter.ShardedParameter) else type(param)
        )
        sharded_parameter.mark_unsharded([param], [view], [kind])
        sharded_parameter.owners[param] = self._weak_self
        return param

    @property
    def full_nbytes(self) -> int:
        return storage.flat_nbytes(self.full_N)

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {self.state.value}, N={self.layout.full_numel})"

    # ------------------------------------------------------------------ edges of the state table

    def unshard(self) -> None:
        """Start gathering the full parameters; a no-op unless they are sharded."""
        if self.state is not UnitState.SHARDED:
            self.check_not_offloaded()
            return
        self._wait_for_update()
        shard_S = self.store.acquire()  # may fail: the unit is sharded then, as it was
        self._transition(UnitState.GATHERING)
        storage.allocate(self.full_N)
        self._report_unsharded()
        self._all_gather(shard_S)

    def _all_gather(self, shard_S: Tensor) -> None:
        self._source_S = shard_S.to(self.full_N.device, non_blocking=True)
        self._handle = self.comm.all_gather(self.full_N, self._source_S, name=self.name)

    def wait_for_unshard(self) -> None:
        """Finish the gather in flight, if there is one: parameters can be read afterwards."""
        self._wait_for_update()
        if self.state is not UnitState.GATHERING:
            self.check_not_offloaded()
            return
        assert self._handle is not None
        handle, self._handle = self._handle, None
        handle.wait()
        self._source_S = None
        self.store.release()
        self._transition(UnitState.FULL)
        self.store.on_unshard(self._own_part_S)
        self._mark_unsharded()

    def reshard(self) -> None:
        """Free the full parameters, unless the unit is resident; what was written into them stays."""
        if self.resident or self.pin_count or self.state in _WITHOUT_FULL:
            return
        self.wait_for_unshard()  # a gather in flight writes into the storage: it cannot be freed before
        self.write_back_edits()
        self._free_unsharded()

    def discard_unsharded(self) -> None:
        """Free the full parameters without a look at them: the own shard is what counts."""
        if self.resident or self.state in _WITHOUT_FULL:
            return
        self.wait_for_unshard()
        self._free_unsharded()

    def _free_unsharded(self) -> None:
        self._transition(UnitState.SHARDED)
        self._mark_sharded()
        storage.release(self.full_N)
        self._report_unsharded()

    def _mark_sharded(self) -> None:
        """Values are elsewhere: for programs, and for autograd.

        A graph that saved a parameter reads its memory without asking anybody. While the version is
        another one, autograd refuses to: backward through the unit before it is full again is an error,
        never a number.
        """
        sharded_parameter.mark_sharded(self.params, self._placeholders)
        torch.autograd.graph.increment_version(self.params)

    def _mark_unsharded(self) -> None:
        sharded_parameter.mark_unsharded(self.params, self._views, self._kinds)
        _set_versions(self.params, tuple(param._version - 1 for param in self.params))

    def increment_versions(self) -> None:
        """An update wrote the parameters: graphs from before are refused, as after any optimizer."""
        torch.autograd.graph.increment_version(self.params)

    def all_gather_updated(self, updating: Callable[[], None] | None = None) -> None:
        """The own shard was updated: send it to the other ranks if they hold the unit whole.

        ``updating``: it still is, and this waits for it. Whoever uses the unit next does so first.
        """
        self.wait_for_unshard()  # nobody used the unit since it was published last
        self.increment_versions()
        if updating is None:
            self.store.write()
        if self.resident or self.pin_count:
            self._transition(UnitState.GATHERING)
            self.fingerprint = None
            self._mark_sharded()
            if updating is None:
                self._all_gather(self.store.acquire())
        else:
            self.discard_unsharded()
        self._pending_update = updating

    def _wait_for_update(self) -> None:
        """Wait for the update that runs behind, if there is one, and go on where it was left."""
        if self._pending_update is None:
            return
        try:
            self._pending_update()
        except BaseException:
            self._update_failed = True
            raise  # and again for whoever uses the unit next: its values are not those of any step
        self._pending_update = None
        self.store.write()
        if self.state is UnitState.GATHERING:
            self._all_gather(self.store.acquire())

    def _transition(self, to: UnitState) -> None:
        if (self.state, to) not in _TRANSITIONS:
            raise UnitStateError(
                f"unit {self.name!r} cannot go from {self.state.value} to {to.value}. A forward or "
                "backward hook ran out of order; please report the model's structure."
            )
        self.state = to

    def _report_unsharded(self) -> None:
        held = 0 if self.resident or self.state in _WITHOUT_FULL else self.full_nbytes
        self.ledger.hold("gathered", self.name, held)

    # ------------------------------------------------------------------ leaving the device

    def check_not_offloaded(self) -> None:
        """Raise :class:`UsageError` while the parameters are away."""
        if self.state is UnitState.OFFLOADED:
            raise offloaded_error(f"unit {self.name!r}")

    def offload(self) -> list[Tensor]:
        """Nobody uses the unit until :meth:`move_in`. Returns flat tensors on the device whose bytes the
        caller keeps meanwhile; he may release their storage.

        Autograd refuses graphs that saved the parameters, until they are back.
        """
        if self.state is UnitState.OFFLOADED:
            return []
        self.wait_for_unshard()
        self.rebind_storage()
        self.reshard()
        self.store.cancel_prefetch()
        self._versions = _unsafe_preserve_version_counter(self.params)
        torch.autograd.graph.increment_version(self.params)
        if self.resident:
            self._mark_sharded()
        self._transition(UnitState.OFFLOADED)
        if self.store.tier is not Tier.DEVICE:
            return []
        self._report_shard(Tier.HOST)
        return [self.full_N if self.resident else self.shard_S]

    def reload(self) -> None:
        """The bytes are back, in the same storage."""
        if self.state is not UnitState.OFFLOADED:
            return
        self._transition(UnitState.FULL if self.resident else UnitState.SHARDED)
        if self.resident:
            self._mark_unsharded()
        assert self._versions is not None
        self._versions.__exit__()
        self._versions = None
        if self.store.tier is Tier.DEVICE:
            self._report_shard(Tier.DEVICE)

    def _report_shard(self, tier: Tier) -> None:
        nbytes = storage.flat_nbytes(self.full_N if self.resident else self.shard_S)
        for other in (Tier.DEVICE, Tier.HOST):
            self.ledger.hold("parameters", self.name, nbytes if other is tier else 0, other)

    # ------------------------------------------------------------------ reading and writing

    def view(self, full_N: Tensor, param: nn.Parameter) -> Tensor:
        """The parameter's place in any tensor with the extent of ``full_N``."""
        slot = self.layout.slots[self.index(param)]
        return full_N[slot.start : slot.stop].view(slot.shape)

    def index(self, param: Tensor) -> int:
        """The parameter's position among the unit's slots."""
        return next(i for i, own in enumerate(self.params) if own is param)

    def write_back_edits(self) -> None:
        """Take over what the program wrote into full parameters, in place or by ``param.data = ...``.

        Costs a copy of the own shard; nobody has to know whether anything was written.
        """
        self.rebind_storage()
        if self.state is UnitState.FULL and not self.resident:
            self.store.write_back_if_changed(self._own_part_S)

    def rebind_storage(self) -> None:
        """Parameters to which the program gave other memory are views of ``full_N`` again."""
        if self.state is not UnitState.FULL:
            return
        for param, view, slot in zip(self.params, self._views, self.layout.slots, strict=True):
            if not storage.is_shared(param, view):
                _check_assigned(param, slot, view)
                with torch.no_grad():
                    view.copy_(param)
                param.data = view

    def gathered_copy(self, shard_S: Tensor | None = None) -> Tensor:
        """A private gathered tensor ``[N]`` of the parameters, or of any other sharded state.

        Collective. The unit's own state does not change.
        """
        self.wait_for_unshard()
        source_S = (self.store.acquire() if shard_S is None else shard_S).to(self.full_N.device)
        full_N = self.full_N.new_empty(self.layout.full_numel, dtype=source_S.dtype)
        self.comm.all_gather(full_N, source_S, name=self.name + READ).wait()
        if shard_S is None:
            self.store.release()
        return full_N

    def read(self, param: nn.Parameter) -> Tensor | None:
        """See :class:`zeroshard.zero.sharded_parameter.Owner`."""
        self.wait_for_unshard()
        if self.state is not UnitState.FULL and self.is_lone_read(self.name):
            return None
        full_N = self.full_N if self.state is UnitState.FULL else self.gathered_copy()
        return self.view(full_N, param).clone()

    def is_collective_read(self, fact: bool) -> bool:
        """See :class:`zeroshard.zero.sharded_parameter.Owner`."""
        vote = torch.tensor([float(fact)], device=self.full_N.device)
        return bool(self.comm.all_gather_small(vote, name=self.name + READ).all())

    def ensure_writable(self, param: nn.Parameter, beside: Collection[Tensor]) -> bool:
        """A resident unit in flight only has to arrive; sharded parameters are never written."""
        self.check_not_offloaded()
        if self.resident:
            self.wait_for_unshard()
        return self.resident

    def close(self, *, wait: bool = True) -> None:
        """Give the bytes back. Resident parameters stay readable, sharded ones raise when read.

        ``wait=False``: a gather in flight will never finish; it is dropped, as one is that failed.
        """
        try:
            if wait and not self._update_failed and (self._pending_update or self._handle):
                self.wait_for_unshard()
        finally:
            self._return_params()

    def _return_params(self) -> None:
        self._pending_update = None
        if self.state is UnitState.GATHERING:
            self._handle = self._source_S = None
            self._transition(UnitState.FULL)
            self._mark_unsharded()
        self.pin_count = 0
        self.discard_unsharded()
        for param in self.params:
            sharded_parameter.owners.discard(param)
        self.optim_state = None
        self.store.close()
        self.ledger.hold("parameters", self.name, 0, self.store.tier)
        self.ledger.hold("gathered", self.name, 0)
        if not self.resident:
            self.shard_S = torch.empty(0, dtype=self.shard_S.dtype)
            self.store = MemoryShardStore(self.shard_S)


def _never_lone(_name: str) -> bool:
    """A program that reads on one rank alone waits for the others, and whoever watches them names it."""
    return False


def offloaded_error(what: str) -> UsageError:
    """For whoever needs what is not on the device."""
    return UsageError(
        f"{what} is in host memory: engine.offload_states() or engine.to('cpu') moved it there. Call "
        "engine.reload_states() first."
    )


def _check_assigned(param: nn.Parameter, slot: Slot, view: Tensor) -> None:
    if (param.shape, param.dtype) != (view.shape, view.dtype):
        raise UsageError(
            f"parameter {slot.fqn!r} was given other memory (param.data = ..., module.to(...), "
            f"module.half()...): shape {tuple(param.shape)} and {param.dtype} instead of "
            f"{tuple(view.shape)} and {view.dtype}, for which the engine was built. Assign values of "
            "the same shape and dtype, or change the model before the engine is built."
        )
