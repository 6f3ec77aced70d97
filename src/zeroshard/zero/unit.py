"""The unit: parameters that are gathered together, their one storage, and their states.

[Note: units]

*Letters.* ``W`` ranks share the unit, ``N`` is its number of elements with padding, ``S = N // W`` is the
number of elements of one rank's shard. The name of a flat tensor ends in its extent: ``full_N``,
``shard_S``.

*Layout.* The shard of rank ``r`` is ``full_N[r * S : (r + 1) * S]``, and ``S`` is a multiple of 64
(ADR 0001). So collectives read and write the unit's memory without copies, and no cut splits what a SIMD
instruction does at once. Otherwise stages would not agree bit for bit.

*Who owns which memory.* The unit owns one storage, that of ``full_N``. Full parameters are views of it.
It is freed and filled by resizing, and not replaced by another storage (ADR 0002). Without this, tensors
that autograd saved in forward would keep every storage until backward. The exception is a storage that
somebody else may read (*Aliases*). In a *resident* unit ``shard_S`` is a slice of ``full_N``, and
``full_N`` is never freed. Units are resident at stages 0 to 2, and at stage 3 on one rank unless
parameters are offloaded. In other units ``shard_S`` has a storage of its own, and the
unit's shard store decides when it is in memory (:mod:`zeroshard.offload.shard_store`).

*States.* :class:`UnitState` names them. Each change goes through ``_transition``, which refuses an
edge that is not in ``_TRANSITIONS``. Values in ``full_N`` are valid in ``FULL`` only. In every other
state the parameters hold placeholders and their class is
:class:`~zeroshard.zero.sharded_parameter.ShardedParameter`. Without this, a kernel would read memory that
is freed (on CPU a segmentation fault) or that an all-gather is still writing.

*Versions.* In every state but ``FULL`` the autograd version of each parameter is higher than in ``FULL``
(ADR 0012). Autograd compares versions when backward reads a saved tensor, so backward through a
unit that was not unsharded is an error. Without this, it would read freed memory where no hook ran. An
update raises the versions for good: a graph from before ``step()`` is refused at every stage.

*Aliases.* A program may keep a tensor that shares the storage (``param.detach()``, a ``state_dict()``).
After its memory is freed, a read of it would end the process. So a storage is freed only if no more
tensors hold it than are known to be harmless (``expected_uses``): those of the unit, and views that
autograd has saved, whose versions it will compare (:mod:`zeroshard.zero.saved_views`). Otherwise the
storage stays, with its values, to those who hold it, and the unit takes a new one at its next use.

*Edits.* A program may write into full parameters. ``reshard`` hands this rank's part of them to the
shard store before it frees them, and says whether PyTorch has counted a write; ``discard_unsharded`` does
not, and is for the time after an update, when the shard is newer than ``full_N``. A program that assigns
``param.data`` takes a parameter out of the unit's storage; ``rebind_storage`` copies the values in and
restores the view.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.multiprocessing.reductions import StorageWeakRef

from zeroshard.comm.collectives import memory_of
from zeroshard.comm.dtensors import KINDS, distributed, local_of
from zeroshard.core.layout import Slot, UnitLayout
from zeroshard.core.tiers import Tier
from zeroshard.errors import DistributedError, UnitStateError, UsageError
from zeroshard.memory.storage import has_more_uses, resize, uses
from zeroshard.offload.shard_store import AllocateShard, ShardStore
from zeroshard.watchdog.rank_status import READ
from zeroshard.zero import sharded_parameter
from zeroshard.zero.full_params import FullParams
from zeroshard.zero.materialize import ParamScatterer

if TYPE_CHECKING:
    from zeroshard.comm.collectives import Comm, Handle
    from zeroshard.core.ledger import Ledger
    from zeroshard.precision.policy import DtypeRow


class UnitState(Enum):
    """What this rank holds of the unit's parameters.

    SHARDED --unshard()--> GATHERING --wait_for_unshard()--> FULL --reshard()--> SHARDED
    FULL --all_gather_updated()--> GATHERING, if the unit is resident or pinned
    FULL or SHARDED --all_gather_updated(updating)--> UPDATING --(next use)--> GATHERING or SHARDED
    SHARDED --offload()--> OFFLOADED --reload()--> SHARDED
    FULL --offload()--> OFFLOADED --reload()--> FULL, if the unit is resident
    """

    SHARDED = "sharded"  # only shard_S is valid: the state between uses at stage 3
    GATHERING = "gathering"  # full_N has memory that must not be read: values are incomplete
    UPDATING = "updating"  # an asynchronous update is writing shard_S: nothing is valid
    FULL = "full"  # full_N is valid, and the module's parameters are views of it
    OFFLOADED = "offloaded"  # offload_states() is in effect: the parameters must not be used

    __hash__ = object.__hash__  # that of Enum is Python code, which would run at each transition


_TRANSITIONS = frozenset(
    [
        (UnitState.SHARDED, UnitState.GATHERING),
        (UnitState.GATHERING, UnitState.FULL),
        (UnitState.FULL, UnitState.SHARDED),
        (UnitState.FULL, UnitState.GATHERING),
        (UnitState.FULL, UnitState.UPDATING),
        (UnitState.SHARDED, UnitState.UPDATING),
        (UnitState.UPDATING, UnitState.GATHERING),
        (UnitState.UPDATING, UnitState.SHARDED),
        (UnitState.SHARDED, UnitState.OFFLOADED),
        (UnitState.OFFLOADED, UnitState.SHARDED),
        (UnitState.FULL, UnitState.OFFLOADED),
        (UnitState.OFFLOADED, UnitState.FULL),
    ]
)


_BEFORE = {
    state: frozenset(before for before, after in _TRANSITIONS if after is state)
    for state in UnitState
}


_units: weakref.WeakSet[Unit] = weakref.WeakSet()  # all of this process


class Unit:
    """Parameters of one dtype that are gathered together, in one flat storage. See [Note: units].

    ``resident`` units are always whole. Other units keep ``shard_S`` and fill ``full_N`` only around
    their use. ``params`` are consumed one by one, in the order of the layout, so an iterator may create
    each parameter when it is asked for it. The values of rank 0 are used. ``store_of`` makes the shard
    store from ``shard_S``, which holds the first values at that time. ``room(numel, dtype)`` gives zeroed
    memory for ``shard_S``; None: memory of ``device``. ``has_copies``: ranks outside ``comm`` hold
    other parts of these parameters, or copies of them. ``group``: the name that units have which are
    gathered together (:mod:`zeroshard.zero.prefetch`).
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
        store_of: Callable[[Tensor], ShardStore] = ShardStore,
        room: AllocateShard | None = None,
        has_copies: bool = False,
        group: str = "",
    ) -> None:
        self.name = name
        self.group = group
        self.has_copies = has_copies
        self.order = sharded_parameter.count_owner()
        self.layout = layout
        self.positions = tuple(positions)  # of the unit's parameters in ``model.parameters()``
        self.row = row
        self.trainable = trainable
        self.resident = resident
        self.comm = comm
        self.ledger = ledger
        self.state = UnitState.FULL
        self.optim_state: object | None = None  # an ``access.UnitOptimState``; None while frozen
        self.is_lone_read: Callable[[str], bool] = _never_lone  # asked before a read gathers
        self.pin_count = 0  # open GatheredParameters blocks; above 0 the unit is not resharded
        self.is_aliased = False  # the program held a resident unit's storage when it was last asked
        self._own_uses = 0  # of a full resident unit's storage, by the engine
        self._uses_before = -1  # the update; -1: not counted
        self.fingerprint: Tensor | None = None  # of the values when GatheredParameters was entered
        self.handle: Handle | None = None  # of the all-gather in flight
        self._full_versions: tuple[int, ...] = ()  # of the parameters, when they became full
        self._wait_for_update: Callable[[], None] | None = None  # set while UPDATING
        self._end_in_order: Callable[[], None] | None = None  # called instead of end_update()
        self._update_failed = False  # the asynchronous update failed, and its error was raised
        self._versions: _unsafe_preserve_version_counter | None = None
        self._weak_self = weakref.ref(self)
        self._memory = memory_of(comm)  # for what collectives read and write
        room = room or (lambda numel, dtype: torch.zeros(numel, dtype=dtype, device=device))
        with self._memory.use():
            self._make_storage(device)
            part = self.full_N if resident else room(layout.shard_numel, row.param)
        low, high = layout.shard_range(comm.rank)
        scatterer = ParamScatterer(
            layout, part, 0 if resident else low, comm=comm, name=name, device=device
        )
        self._adopt_all(params, scatterer)
        self.shard_S = part[low:high] if resident else part
        self.store = store_of(self.shard_S)
        self._report_shard(self.store.tier)
        if not resident:
            free([self], self.full_params)

    def _make_storage(self, device: torch.device) -> None:
        """Make ``full_N`` and its views. It has memory from now on if the unit is resident."""
        layout = self.layout
        make = torch.zeros if self.resident else torch.empty
        self.full_N = make(layout.full_numel, dtype=self.row.param, device=device)
        self._views = [
            self.full_N[slot.start : slot.stop].view(slot.shape) for slot in layout.slots
        ]
        # Like all views, valid only while the storage has memory.
        self.own_part_S = self.full_N[slice(*layout.shard_range(self.comm.rank))]
        self.full_nbytes = self.full_N.nbytes
        # Fake tensors have no memory that could be read, and their mode holds some.
        is_fake = type(self.full_N) is FakeTensor
        self._uses: Callable[[int], int] = _too_many if is_fake else uses
        # Equal for every view of full_N.
        self.storage_id: int = self.full_N.untyped_storage()._cdata
        _units.add(self)
        self.storage_ids = {self.storage_id}  # a module's units share one set
        self._has_storage = True  # False after another holder got it
        self._left: StorageWeakRef | None = None  # what a forward left to another holder
        # Uses of the storage besides those of full parameters that do not forbid to free it.
        self.expected_uses = self._count_uses()
        self.is_allocated = True  # full_N has memory
        if not self.resident:
            self._free()  # memory was needed only to make the views

    def _adopt_all(self, params: Iterable[nn.Parameter], scatterer: ParamScatterer) -> None:
        """Take the parameters over, and note what tells later whether one is in its place."""
        self.params = tuple(
            self._adopt(param, slot, view, scatterer)
            for param, slot, view in zip(params, self.layout.slots, self._views, strict=True)
        )
        self.full_params = FullParams(self.params, self._views)
        # Full DTensors are the views themselves, other parameters hold the storage too.
        self.param_uses = len(self.params) - len(distributed(self.params))
        self.saved_of: dict[int, int] = {}  # new uses after a forward: views that autograd saved
        scatterer.finish()

    def _adopt(
        self, param: nn.Parameter, slot: Slot, view: Tensor, scatterer: ParamScatterer
    ) -> nn.Parameter:
        """Copy the parameter's values into the shards and make the parameter a view of ``full_N``."""
        with torch.no_grad():
            # gathers a parameter that was built under zero.Init
            scatterer.add(slot, local_of(param))
        kind = (
            nn.Parameter if isinstance(param, sharded_parameter.ShardedParameter) else type(param)
        )
        if type(param) in KINDS:
            self._views[self.layout.slots.index(slot)] = view = view.data
        sharded_parameter.mark_unsharded([param], [view], [kind])
        sharded_parameter.owners[param] = self._weak_self
        return param

    @property
    def is_sharded(self) -> bool:
        """Whether the next use must all-gather the unit: no full parameters, and none on their way."""
        return self.state is UnitState.SHARDED or (
            self.state is UnitState.UPDATING and not self.is_allocated
        )

    @property
    def is_full(self) -> bool:
        """Whether the parameters have their values."""
        return self.state is UnitState.FULL

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {self.state.value}, N={self.layout.full_numel})"

    # ------------------------------------------------------------------ edges of the state table

    def unshard(self) -> None:
        """Start the all-gather of the parameters. Does nothing unless the unit is sharded.

        Raises:
            UsageError: the parameters are offloaded.
            DiskError: the shard cannot be read; the unit stays sharded.
            torch.OutOfMemoryError: there is no memory for the full parameters; the unit stays sharded.
        """
        if self.open_gather():
            begin_gathers([self])
            self._start_gather()

    def open_gather(self) -> bool:
        """Allocate what the all-gather of a sharded unit fills. False: the unit is not sharded.

        Raises as :meth:`unshard` does.
        """
        if not self.prepare_gather():
            return False
        self._allocate()  # if this or the next line raises, the unit stays SHARDED
        try:
            self.store.open_gather()
        except BaseException:
            self.cancel_gather()
            raise
        return True

    def prepare_gather(self) -> bool:
        """Wait for an update that runs. False: the unit is not sharded. Raises as :meth:`unshard`."""
        if self.state is not UnitState.SHARDED:
            if not self.is_sharded:
                self.check_not_offloaded()
                return False
            self._end_update()
        return True

    def cancel_gather(self) -> None:
        """Undo :meth:`open_gather`. The all-gather was not started."""
        self._free()

    def _start_gather(self) -> None:
        self.handle = self.store.all_gather(self.comm, self.full_N, self.own_part_S, name=self.name)

    def wait_for_unshard(self) -> None:
        """Finish the all-gather in flight, so that the parameters can be read. Does nothing without one.

        Raises:
            UsageError: the parameters are offloaded.
            DistributedError: the all-gather failed, now or in an earlier call.
        """
        if self.state is UnitState.UPDATING:
            self._end_update()
        if self.state is not UnitState.GATHERING:
            if self.state is UnitState.OFFLOADED:
                self.check_not_offloaded()
            return
        if self.handle is None:
            raise DistributedError(
                f"the parameters of {self.name!r} are not complete, because their all-gather failed "
                "before. Close this engine and end the run; it continues from its last checkpoint."
            )
        handle, self.handle = self.handle, None
        handle.wait()
        self._full_versions = end_gathers([self], self.full_params)
        self.store.close_gather(self.own_part_S)

    def reshard(self) -> None:
        """Write back edits and free the full parameters, unless the unit is resident or pinned."""
        if not self.can_reshard():
            return
        versions = self.full_params.versions()
        edited = self.rebind_storage() or versions != self._full_versions
        self.store.write_back(self.own_part_S, edited=edited)
        free([self], self.full_params)

    def can_reshard(self) -> bool:
        """Whether :meth:`reshard` frees anything. Then the all-gather has ended, if there was one."""
        if self.resident or self.pin_count or not self.is_allocated:
            return False
        if self.state is UnitState.FULL:
            return True
        if self.state is UnitState.GATHERING and self.handle is None:
            return False  # the all-gather failed: other ranks may still write into the storage
        self.wait_for_unshard()  # until an all-gather has ended, it writes into the storage
        return True

    def discard_unsharded(self, *, for_keeping: bool = False) -> None:
        """Free the full parameters without writing back edits: the shard has the valid values.

        ``for_keeping``: whoever holds the storage took it to keep these values.
        """
        if self.resident or not self.is_allocated:
            return
        self.wait_for_unshard()
        free([self], self.full_params)
        if for_keeping:
            self._left = None

    def _allocate(self) -> None:
        """Give ``full_N`` memory, with undefined contents. See ``memory/storage.py``."""
        if self._has_storage:
            self._memory.resize(self.full_N, self.full_nbytes)
        else:
            self._take_storage()
        if not self.is_allocated:
            self.expected_uses = self._uses(self.storage_id)
            self.is_allocated = True

    def _free(self) -> None:
        """Free the memory of ``full_N``, unless another holder has it."""
        if self._has_storage:
            resize(self.full_N, 0)
        self.is_allocated = False

    def _count_uses(self) -> int:
        return self._uses(self.storage_id)

    def _leave_storage(self) -> None:
        """Leave the storage with its values to those who hold it. The next use takes another one."""
        self._left = StorageWeakRef(self.full_N.untyped_storage())
        for tensor in (self.full_N, self.own_part_S, *self._views):
            tensor.data = tensor.new_empty(0)
        self.storage_ids.discard(self.storage_id)
        self.storage_id = 0
        self._has_storage = False

    def forget_left(self) -> bool:
        """Whether the program still holds what a forward left to it. Then that is forgotten."""
        if self._left is None:
            return False
        is_held = not self._left.expired()
        self._left = None
        return is_held

    def _take_storage(self) -> None:
        layout = self.layout
        low, high = layout.shard_range(self.comm.rank)
        flat_N = self.full_N.new_empty(layout.full_numel)
        self.full_N.data, self.own_part_S.data = flat_N, flat_N[low:high]
        for view, slot in zip(self._views, layout.slots, strict=True):
            view.data = flat_N[slot.start : slot.stop].view(slot.shape)
        self.storage_id = flat_N.untyped_storage()._cdata
        self.storage_ids.add(self.storage_id)
        self._has_storage = True

    def increment_versions(self) -> None:
        """Make autograd refuse graphs from before the update, as it does after any optimizer's step."""
        if self._uses_before >= 0:
            self._own_uses += max(0, self._count_uses() - self._uses_before)
            self._uses_before = -1
        self.full_params.increment_versions()

    def all_gather_updated(
        self,
        updating: Callable[[], None] | None = None,
        *,
        in_order: Callable[[], None] | None = None,
    ) -> None:
        """Give the other ranks this rank's updated shard, if they hold the unit whole.

        A resident or pinned unit starts an all-gather. Any other unit frees its full parameters; its next
        ``unshard`` gathers the new values. ``updating``: a function that waits for the unit's
        asynchronous update, which still runs. It is called at the unit's next use, before the all-gather.
        ``in_order``: is called at the next use before that. It calls :meth:`end_update` of this unit and
        of others, in the order that their all-gathers have on every rank.
        """
        self.wait_for_unshard()  # if the unit was not used since the last update
        self.increment_versions()
        if updating is None:
            self.store.write()
        if self.resident or self.pin_count:
            self.fingerprint = None
            self._transition(UnitState.GATHERING if updating is None else UnitState.UPDATING)
            self.full_params.hide()
            if updating is None:
                self.store.open_gather()
                self._start_gather()
        else:
            self.discard_unsharded()
            if updating is not None:
                self._transition(UnitState.UPDATING)
        self._wait_for_update, self._end_in_order = updating, in_order

    def own_uses(self) -> None:
        """Take all tensors that share the storage of this resident unit for the engine's."""
        self._own_uses = self._count_uses()

    def note_uses(self) -> None:
        """Find out whether the program holds tensors on the storage of this resident unit.

        To be called before each update, in which the optimizer may make tensors of its own.
        """
        self.wait_for_unshard()
        self._uses_before = self._count_uses()
        self.is_aliased = self._uses_before > self._own_uses

    def _end_update(self) -> None:
        if self._end_in_order is not None:
            self._end_in_order()
        self.end_update()  # does nothing unless another unit's update has failed

    def end_update(self) -> None:
        """Wait for the asynchronous update. If full parameters are kept, start their all-gather.

        Does nothing if no update runs.

        Raises what the update raised, also at each later use: the unit stays ``UPDATING``, because its
        values are from two different steps.
        """
        if self.state is not UnitState.UPDATING:
            return
        assert self._wait_for_update is not None
        try:
            self._wait_for_update()
            self.store.write()
        except BaseException:
            self._update_failed = True
            raise
        self._wait_for_update = self._end_in_order = None
        if not self.is_allocated:
            self._transition(UnitState.SHARDED)
            return
        self._transition(UnitState.GATHERING)
        self.store.open_gather()
        self._start_gather()

    def _transition(self, to: UnitState) -> None:
        _transition([self], to)

    # ------------------------------------------------------------------ leaving the device

    def check_not_offloaded(self) -> None:
        """Check that the parameters are not offloaded.

        Raises:
            UsageError: they are.
        """
        if self.state is UnitState.OFFLOADED:
            raise offloaded_error(f"unit {self.name!r}")

    def offload(self) -> list[Tensor]:
        """Make the unit unusable until :meth:`reload`, so that its memory can leave the device.

        Returns the flat tensors on the device whose bytes must be kept, none if the shard is not stored
        there, or if the program holds its memory. The caller copies these bytes; it may release the
        storages, and fills the same storages again before it calls :meth:`reload`. Until then autograd
        refuses graphs that saved the parameters.
        """
        if self.state is UnitState.OFFLOADED:
            return []
        self.wait_for_unshard()
        self.rebind_storage()
        self.reshard()
        self.store.cancel_prefetch()
        self.is_aliased = self.resident and has_more_uses(self.storage_id, self._own_uses)
        self._versions = _unsafe_preserve_version_counter(self.full_params.versioned)
        self.full_params.increment_versions()
        if self.resident:
            self.full_params.hide()
        self._transition(UnitState.OFFLOADED)
        if self.store.tier is not Tier.DEVICE or self.is_aliased:
            return []
        self._report_shard(Tier.HOST)
        return [self.full_N] if self.resident else list(self.store.memories)

    def reload(self) -> None:
        """End :meth:`offload`. The bytes must be back in the same storages."""
        if self.state is not UnitState.OFFLOADED:
            return
        self._transition(UnitState.FULL if self.resident else UnitState.SHARDED)
        if self.resident:
            self._full_versions = self.full_params.show()
        assert self._versions is not None
        self._versions.__exit__()
        self._versions = None
        if self.store.tier is Tier.DEVICE:
            self._report_shard(Tier.DEVICE)

    def _report_shard(self, tier: Tier) -> None:
        held = (self.full_N,) if self.resident else self.store.memories
        nbytes = sum(memory.nbytes for memory in held)
        for other in dict.fromkeys((Tier.DEVICE, Tier.HOST, tier)):
            self.ledger.hold("parameters", self.name, nbytes if other is tier else 0, other)

    # ------------------------------------------------------------------ reading and writing

    def view(self, full_N: Tensor, param: nn.Parameter) -> Tensor:
        """The part of a flat tensor ``[N]`` that belongs to the parameter, in the parameter's shape."""
        slot = self.layout.slots[self.index(param)]
        return full_N[slot.start : slot.stop].view(slot.shape)

    def index(self, param: Tensor) -> int:
        """The index of the parameter's slot in the unit."""
        return next(i for i, own in enumerate(self.params) if own is param)

    def write_back_edits(self) -> None:
        """Take over what the program wrote into full parameters, in place or by ``param.data = ...``.

        For a unit that is not resident, this copies S elements whether or not anything was written; a
        shard on disk is fingerprinted instead where that is possible without waiting, and copied only
        where it differs.
        """
        self.rebind_storage()
        if self.state is UnitState.FULL and not self.resident:
            self.store.write_back(self.own_part_S, edited=True)

    def rebind_storage(self) -> bool:
        """Make parameters to which the program gave other memory views of ``full_N`` again.

        Their values are kept. Returns whether there were any.

        Raises:
            UsageError: the other memory has another shape or dtype, or is that of a parameter.
        """
        if self.state is not UnitState.FULL:
            return False
        moved = self.full_params.moved()
        if not moved:
            return False
        for index in moved:
            param, values = self.params[index], local_of(self.params[index])
            view, slot = self._views[index], self.layout.slots[index]
            _check_assigned(values, slot, view)
            storage_id = values.untyped_storage()._cdata
            if any(unit.storage_id == storage_id for unit in _units):
                raise UsageError(
                    f"parameter {slot.fqn!r} was given the memory of a parameter (.data = ...): "
                    "both would share it, but the engine updates each in a place of its own. "
                    "Assign a copy: param.data = other.data.clone()."
                )
            with torch.no_grad():
                view.copy_(values)
            sharded_parameter.mark_unsharded([param], [view], [type(param)])
        return True

    def gathered_copy(self, shard_S: Tensor | None = None) -> Tensor:
        """A new tensor ``[N]``, gathered from the parameters' shards or from ``shard_S``.

        Collective. The unit's state does not change.
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
        """Finish the all-gather of a resident unit. Sharded parameters cannot be written."""
        self.check_not_offloaded()
        if self.resident:
            self.wait_for_unshard()
        return self.resident

    def values_version(self, param: nn.Parameter) -> int:
        """See :class:`zeroshard.zero.sharded_parameter.Owner` and *Versions* in [Note: units]."""
        raised = {UnitState.FULL: 0, UnitState.OFFLOADED: 2}.get(self.state, 1)
        return param._version - raised

    def close(self, *, wait: bool = True) -> None:
        """Free the memory. Resident parameters stay readable, sharded ones raise when they are read.

        ``wait=False``: drop an all-gather in flight, because it will never finish. After an asynchronous
        update that failed nothing is waited for.
        """
        try:
            in_flight = self.state is UnitState.UPDATING or self.handle is not None
            if wait and in_flight and not self._update_failed:
                self.wait_for_unshard()
        finally:
            self._return_params()

    def _return_params(self) -> None:
        self._wait_for_update = self._end_in_order = None
        if self.state is UnitState.UPDATING:
            to = UnitState.GATHERING if self.is_allocated else UnitState.SHARDED
            self._transition(to)
        if self.state is UnitState.GATHERING:
            self.handle = None
            self._transition(UnitState.FULL)
            self.full_params.show()
        self.pin_count = 0
        self.discard_unsharded()
        for param in self.params:
            sharded_parameter.owners.discard(param)
        self.optim_state = None
        self.store.close()
        self.ledger.hold("parameters", self.name, 0, self.store.tier)
        if not self.resident:
            self.shard_S = torch.empty(0, dtype=self.shard_S.dtype)
            self.store = ShardStore(self.shard_S)


# ---------------------------------------------------------------------- several units at once
#
# A group of units passes through the edges of a step together (``zero/prefetch.py``). What is done for
# all of them in one call costs as much host time as for one. ``params``: those of all ``units``.


def begin_gathers(units: Sequence[Unit]) -> None:
    """Note that all-gathers of opened units begin. Until ``handle`` is set nobody can wait for them."""
    _transition(units, UnitState.GATHERING)
    units[0].ledger.hold_all("gathered", [(unit.name, unit.full_nbytes) for unit in units])


def open_gathers(units: Sequence[Unit]) -> None:
    """:meth:`Unit.open_gather` of sharded units whose stores are in memory. On an error, of none."""
    try:
        for unit in units:
            unit._allocate()
    except BaseException:
        for unit in units:
            unit.cancel_gather()
        raise


def end_gathers(units: Sequence[Unit], params: FullParams) -> tuple[int, ...]:
    """Make units full whose all-gathers have ended. Their stores are told by the caller.

    Returns the versions of the parameters.
    """
    _transition(units, UnitState.FULL)
    return params.show()


def free(units: Sequence[Unit], params: FullParams) -> None:
    """Free full parameters whose values the stores have."""
    _transition(units, UnitState.SHARDED)
    params.hide()
    for unit in units:
        if unit._has_storage:
            if uses(unit.storage_id) > unit.expected_uses and has_more_uses(
                unit.storage_id, unit.expected_uses
            ):
                unit._leave_storage()
            else:
                resize(unit.full_N, 0)
        unit.is_allocated = False
    units[0].ledger.hold_all("gathered", [(unit.name, 0) for unit in units])


def _transition(units: Sequence[Unit], to: UnitState) -> None:
    before = _BEFORE[to]
    for unit in units:
        if unit.state not in before:
            raise UnitStateError(
                f"unit {unit.name!r} cannot go from {unit.state.value} to {to.value}. A forward "
                "or backward hook ran in the wrong order. Please report this with the structure "
                "of the model."
            )
        unit.state = to


def _too_many(_address: int) -> int:
    return sys.maxsize


def _never_lone(_name: str) -> bool:
    """Default of ``is_lone_read``. A rank that reads alone waits, and the watchdog names it."""
    return False


def offloaded_error(what: str) -> UsageError:
    """The error for a use of ``what`` while it is offloaded."""
    return UsageError(
        f"{what} is in host memory: engine.offload_states() or engine.to('cpu') moved it there. Call "
        "engine.reload_states() first."
    )


def _check_assigned(param: Tensor, slot: Slot, view: Tensor) -> None:
    if (param.shape, param.dtype) != (view.shape, view.dtype):
        raise UsageError(
            f"parameter {slot.fqn!r} was given other memory (param.data = ..., module.to(...), "
            f"module.half()...): shape {tuple(param.shape)} and {param.dtype} instead of "
            f"{tuple(view.shape)} and {view.dtype}, for which the engine was built. Assign values of "
            "the same shape and dtype, or change the model before the engine is built."
        )
