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
from zeroshard.core.verdict import READ
from zeroshard.errors import UnitStateError, UsageError
from zeroshard.store import storage
from zeroshard.store.shards import InMemory, Rest, Room
from zeroshard.zero import guard
from zeroshard.zero.deal import Dealer

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
    AWAY = "away"  # nothing: the program wants the device for something else


_LEGAL = frozenset(
    [
        (UnitState.SHARDED, UnitState.GATHERING),
        (UnitState.GATHERING, UnitState.FULL),
        (UnitState.FULL, UnitState.SHARDED),
        (UnitState.FULL, UnitState.GATHERING),
        (UnitState.SHARDED, UnitState.AWAY),
        (UnitState.AWAY, UnitState.SHARDED),
        (UnitState.FULL, UnitState.AWAY),
        (UnitState.AWAY, UnitState.FULL),
    ]
)


_EMPTY = (UnitState.SHARDED, UnitState.AWAY)
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
        rest_of: Callable[[Tensor], Rest] = InMemory,
        room: Room | None = None,
    ) -> None:
        self.name = name
        self.order = guard.count_owner()
        self.layout = layout
        self.positions = tuple(positions)  # of the parameters in ``model.parameters()``
        self.row = row
        self.trainable = trainable
        self.resident = resident
        self.comm = comm
        self.ledger = ledger
        self.state = UnitState.FULL
        self.training: object | None = None  # an ``access.Training``; None while frozen
        self.reads_alone: Callable[[str], bool] = _is_never_alone  # asked before a read gathers
        self.pins = 0  # readers inside GatheredParameters: not to be freed under them
        self.seal: Tensor | None = None  # hashes of the values that a reader saw first
        self._handle: Handle | None = None
        self._source_S: Tensor | None = None  # what the gather in flight reads
        self._updating: Callable[[], None] | None = None  # waits for the update that runs behind
        self._lost_update = False  # it failed, and somebody was told
        self._versions: _unsafe_preserve_version_counter | None = None
        self._me = weakref.ref(self)

        low, high = layout.shard_range(comm.rank)
        make = torch.zeros if resident else torch.empty
        self.full_N = make(layout.full_numel, dtype=row.param, device=device)
        self._views = [
            self.full_N[slot.start : slot.stop].view(slot.shape) for slot in layout.slots
        ]
        self._own_part = self.full_N[
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
        dealer = Dealer(layout, part, 0 if resident else low, comm=comm, name=name, device=device)
        self.params = tuple(
            self._adopt(param, slot, view, dealer)
            for param, slot, view in zip(params, layout.slots, self._views, strict=True)
        )
        self._blanks = [guard.blank(param) for param in self.params]
        self._kinds = [type(param) for param in self.params]
        dealer.finish()
        self.shard_S = part[low:high] if resident else part
        self.rest = rest_of(self.shard_S)
        ledger.hold("parameters", name, storage.flat_nbytes(part), self.rest.tier)
        if not resident:
            self._drop()

    def _adopt(self, param: nn.Parameter, slot: Slot, view: Tensor, dealer: Dealer) -> nn.Parameter:
        """The parameter's values go to the shards, its memory becomes a view of the unit's."""
        with torch.no_grad():
            dealer.put(slot, param)  # a parameter built under Init is gathered here
        kind = nn.Parameter if isinstance(param, guard.ShardedParameter) else type(param)
        guard.show([param], [view], [kind])
        guard.owners[param] = self._me
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
            self.check_here()
            return
        self._finish_update()
        shard_S = self.rest.bring()  # may fail: the unit is sharded then, as it was
        self._move(UnitState.GATHERING)
        storage.allocate(self.full_N)
        self._account_gathered()
        self._gather(shard_S)

    def _gather(self, shard_S: Tensor) -> None:
        self._source_S = shard_S.to(self.full_N.device, non_blocking=True)
        self._handle = self.comm.all_gather(self.full_N, self._source_S, name=self.name)

    def wait(self) -> None:
        """Finish the gather in flight, if there is one: parameters can be read afterwards."""
        self._finish_update()
        if self.state is not UnitState.GATHERING:
            self.check_here()
            return
        assert self._handle is not None
        handle, self._handle = self._handle, None
        handle.wait()
        self._source_S = None
        self.rest.leave()
        self._move(UnitState.FULL)
        self.rest.gathered(self._own_part)
        self._show()

    def reshard(self) -> None:
        """Free the full parameters, unless the unit is resident; what was written into them stays."""
        if self.resident or self.pins or self.state in _EMPTY:
            return
        self.wait()  # a gather in flight writes into the storage: it cannot be freed before
        self.absorb()
        self._drop()

    def forget(self) -> None:
        """Free the full parameters without a look at them: the own shard is what counts."""
        if self.resident or self.state in _EMPTY:
            return
        self.wait()
        self._drop()

    def _drop(self) -> None:
        self._move(UnitState.SHARDED)
        self._hide()
        storage.release(self.full_N)
        self._account_gathered()

    def _hide(self) -> None:
        """Values are elsewhere: for programs, and for autograd.

        A graph that saved a parameter reads its memory without asking anybody. While the version is
        another one, autograd refuses to: backward through the unit before it is full again is an error,
        never a number.
        """
        guard.hide(self.params, self._blanks)
        torch.autograd.graph.increment_version(self.params)

    def _show(self) -> None:
        guard.show(self.params, self._views, self._kinds)
        _set_versions(self.params, tuple(param._version - 1 for param in self.params))

    def was_written(self) -> None:
        """An update wrote the parameters: graphs from before are refused, as after any optimizer."""
        torch.autograd.graph.increment_version(self.params)

    def publish(self, updating: Callable[[], None] | None = None) -> None:
        """The own shard was updated: send it to the other ranks if they hold the unit whole.

        ``updating``: it still is, and this waits for it. Whoever uses the unit next does so first.
        """
        self.wait()  # nobody used the unit since it was published last
        self.was_written()
        if updating is None:
            self.rest.save()
        if self.resident or self.pins:
            self._move(UnitState.GATHERING)
            self.seal = None
            self._hide()
            if updating is None:
                self._gather(self.rest.bring())
        else:
            self.forget()
        self._updating = updating

    def _finish_update(self) -> None:
        """Wait for the update that runs behind, if there is one, and go on where it was left."""
        if self._updating is None:
            return
        try:
            self._updating()
        except BaseException:
            self._lost_update = True
            raise  # and again for whoever uses the unit next: its values are not those of any step
        self._updating = None
        self.rest.save()
        if self.state is UnitState.GATHERING:
            self._gather(self.rest.bring())

    def _move(self, to: UnitState) -> None:
        if (self.state, to) not in _LEGAL:
            raise UnitStateError(
                f"unit {self.name!r} cannot go from {self.state.value} to {to.value}. A forward or "
                "backward hook ran out of order; please report the model's structure."
            )
        self.state = to

    def _account_gathered(self) -> None:
        held = 0 if self.resident or self.state in _EMPTY else self.full_nbytes
        self.ledger.hold("gathered", self.name, held)

    # ------------------------------------------------------------------ leaving the device

    def check_here(self) -> None:
        """Raise :class:`UsageError` while the parameters are away."""
        if self.state is UnitState.AWAY:
            raise away_error(f"unit {self.name!r}")

    def move_out(self) -> list[Tensor]:
        """Nobody uses the unit until :meth:`move_in`. Returns flat tensors on the device whose bytes the
        caller keeps meanwhile; he may release their storage.

        Autograd refuses graphs that saved the parameters, until they are back.
        """
        if self.state is UnitState.AWAY:
            return []
        self.wait()
        self.reclaim()
        self.reshard()
        self.rest.drop()
        self._versions = _unsafe_preserve_version_counter(self.params)
        torch.autograd.graph.increment_version(self.params)
        if self.resident:
            self._hide()
        self._move(UnitState.AWAY)
        if self.rest.tier is not Tier.DEVICE:
            return []
        self._account_own(Tier.HOST)
        return [self.full_N if self.resident else self.shard_S]

    def move_in(self) -> None:
        """The bytes are back, in the same storage."""
        if self.state is not UnitState.AWAY:
            return
        self._move(UnitState.FULL if self.resident else UnitState.SHARDED)
        if self.resident:
            self._show()
        assert self._versions is not None
        self._versions.__exit__()
        self._versions = None
        if self.rest.tier is Tier.DEVICE:
            self._account_own(Tier.DEVICE)

    def _account_own(self, tier: Tier) -> None:
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

    def absorb(self) -> None:
        """Take over what the program wrote into full parameters, in place or by ``param.data = ...``.

        Costs a copy of the own shard; nobody has to know whether anything was written.
        """
        self.reclaim()
        if self.state is UnitState.FULL and not self.resident:
            self.rest.keep(self._own_part)

    def reclaim(self) -> None:
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
        self.wait()
        source_S = (self.rest.bring() if shard_S is None else shard_S).to(self.full_N.device)
        full_N = self.full_N.new_empty(self.layout.full_numel, dtype=source_S.dtype)
        self.comm.all_gather(full_N, source_S, name=self.name + READ).wait()
        if shard_S is None:
            self.rest.leave()
        return full_N

    def read(self, param: nn.Parameter) -> Tensor | None:
        """See :class:`zeroshard.zero.guard.Owner`."""
        self.wait()
        if self.state is not UnitState.FULL and self.reads_alone(self.name):
            return None
        full_N = self.full_N if self.state is UnitState.FULL else self.gathered_copy()
        return self.view(full_N, param).clone()

    def agrees(self, fact: bool) -> bool:
        """See :class:`zeroshard.zero.guard.Owner`."""
        vote = torch.tensor([float(fact)], device=self.full_N.device)
        return bool(self.comm.gather_small(vote, name=self.name + READ).all())

    def admit(self, param: nn.Parameter, beside: Collection[Tensor]) -> bool:
        """A resident unit in flight only has to arrive; sharded parameters are never written."""
        self.check_here()
        if self.resident:
            self.wait()
        return self.resident

    def close(self, *, wait: bool = True) -> None:
        """Give the bytes back. Resident parameters stay readable, sharded ones raise when read.

        ``wait=False``: a gather in flight will never finish; it is dropped, as one is that failed.
        """
        try:
            if wait and not self._lost_update and (self._updating or self._handle):
                self.wait()
        finally:
            self._give_back()

    def _give_back(self) -> None:
        self._updating = None
        if self.state is UnitState.GATHERING:
            self._handle = self._source_S = None
            self._move(UnitState.FULL)
            self._show()
        self.pins = 0
        self.forget()
        for param in self.params:
            guard.owners.discard(param)
        self.training = None
        self.rest.close()
        self.ledger.hold("parameters", self.name, 0, self.rest.tier)
        self.ledger.hold("gathered", self.name, 0)
        if not self.resident:
            self.shard_S = torch.empty(0, dtype=self.shard_S.dtype)
            self.rest = InMemory(self.shard_S)


def _is_never_alone(_name: str) -> bool:
    """A program that reads on one rank alone waits for the others, and whoever watches them names it."""
    return False


def away_error(what: str) -> UsageError:
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
