"""What does this rank hold of one unit's parameters, and how does that change?

Letters: ``W`` ranks of the unit's group, ``N`` padded elements of the unit, ``S = N // W``. Suffixes of
flat tensors carry them: ``full_N``, ``shard_S``.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zeroshard.core.layout import UnitLayout
from zeroshard.errors import UnitStateError
from zeroshard.store import storage
from zeroshard.zero import guard

if TYPE_CHECKING:
    from zeroshard.comm.collectives import Comm, Handle
    from zeroshard.core.ledger import Ledger
    from zeroshard.precision.policy import DtypeRow
    from zeroshard.zero.access import Training


class UnitState(Enum):
    """What this rank holds of the unit's parameters.

        SHARDED --unshard()--> GATHERING --wait()--> FULL --reshard()--> SHARDED
                                   ^-----publish()-----'
    """

    SHARDED = "sharded"  # shard_S only: the resting state of stage 3
    GATHERING = "gathering"  # full_N allocated, its contents in flight: do not read
    FULL = "full"  # full_N valid, the module's parameters are views of it


_LEGAL = frozenset(
    [
        (UnitState.SHARDED, UnitState.GATHERING),
        (UnitState.GATHERING, UnitState.FULL),
        (UnitState.FULL, UnitState.SHARDED),
        (UnitState.FULL, UnitState.GATHERING),
    ]
)


class Unit:
    """Parameters of one dtype that are gathered together, in one flat storage that lives for ever.

    ``resident`` units (stages 0-2) stay whole: ``shard_S`` is a slice of ``full_N``. Other units own
    ``shard_S`` and fill ``full_N`` only around their use.
    """

    def __init__(
        self,
        name: str,
        layout: UnitLayout,
        params: Sequence[nn.Parameter],
        *,
        positions: Sequence[int],
        row: DtypeRow,
        trainable: bool,
        resident: bool,
        comm: Comm,
        ledger: Ledger,
        device: torch.device,
    ) -> None:
        self.name = name
        self.layout = layout
        self.params = tuple(params)
        self.positions = tuple(positions)  # of the parameters in ``model.parameters()``
        self.row = row
        self.trainable = trainable
        self.resident = resident
        self.comm = comm
        self.ledger = ledger
        self.state = UnitState.FULL
        self.training: Training | None = None  # what the optimizer side adds; None while frozen
        self.pins = 0  # readers inside GatheredParameters: not to be freed under them
        self._handle: Handle | None = None

        self.full_N = torch.zeros(layout.full_numel, dtype=row.param, device=device)
        for param, slot in zip(self.params, layout.slots, strict=True):
            self._adopt(param, self.full_N[slot.start : slot.stop].view(slot.shape))
        comm.broadcast(self.full_N, 0, name=name).wait()  # rank 0's values win
        begin, end = layout.shard_range(comm.rank)
        self.shard_S = self.full_N[begin:end] if resident else self.full_N[begin:end].clone()
        itemsize = self.full_N.element_size()
        held = layout.full_numel if resident else layout.shard_numel
        ledger.hold("parameters", name, held * itemsize)
        self._account_gathered()

    def _adopt(self, param: nn.Parameter, view: Tensor) -> None:
        with torch.no_grad():
            view.copy_(param.detach())  # a parameter built under Init is gathered here
        guard.show([param])
        param.data = view
        guard.owners[param] = self

    @property
    def full_nbytes(self) -> int:
        return storage.flat_nbytes(self.full_N)

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {self.state.value}, N={self.layout.full_numel})"

    # ------------------------------------------------------------------ edges of the state table

    def unshard(self) -> None:
        """Start gathering the full parameters; a no-op unless they are sharded."""
        if self.state is not UnitState.SHARDED:
            return
        self._move(UnitState.GATHERING)
        storage.allocate(self.full_N)
        self._account_gathered()
        self._handle = self.comm.all_gather(self.full_N, self.shard_S, name=self.name)

    def wait(self) -> None:
        """Finish the gather in flight, if there is one: parameters can be read afterwards."""
        if self.state is not UnitState.GATHERING:
            return
        assert self._handle is not None
        handle, self._handle = self._handle, None
        handle.wait()
        self._move(UnitState.FULL)
        guard.show(self.params)

    def reshard(self) -> None:
        """Free the full parameters, unless the unit is resident."""
        if self.resident or self.pins or self.state is UnitState.SHARDED:
            return
        self.wait()  # a gather in flight writes into the storage: it cannot be freed before
        self._move(UnitState.SHARDED)
        guard.hide(self.params)
        storage.release(self.full_N)
        self._account_gathered()

    def publish(self) -> None:
        """Start sending the updated own shard of a resident unit to the other ranks."""
        self.wait()  # nobody used the unit since it was published last
        self._move(UnitState.GATHERING)
        guard.hide(self.params)
        self._handle = self.comm.all_gather(self.full_N, self.shard_S, name=self.name)

    def _move(self, to: UnitState) -> None:
        if (self.state, to) not in _LEGAL:
            raise UnitStateError(
                f"unit {self.name!r} cannot go from {self.state.value} to {to.value}. A forward or "
                "backward hook ran out of order; please report the model's structure."
            )
        self.state = to

    def _account_gathered(self) -> None:
        held = 0 if self.resident or self.state is UnitState.SHARDED else self.full_nbytes
        self.ledger.hold("gathered", self.name, held)

    # ------------------------------------------------------------------ reading and writing

    def view(self, full_N: Tensor, param: nn.Parameter) -> Tensor:
        """The parameter's place in any tensor with the extent of ``full_N``."""
        slot = self.layout.slots[self.index(param)]
        return full_N[slot.start : slot.stop].view(slot.shape)

    def index(self, param: nn.Parameter) -> int:
        """The parameter's position among the unit's slots."""
        return next(i for i, own in enumerate(self.params) if own is param)

    def gathered_copy(self, shard_S: Tensor | None = None) -> Tensor:
        """A private gathered tensor ``[N]`` of the parameters, or of any other sharded state.

        Collective. The unit's own state does not change.
        """
        self.wait()
        source_S = self.shard_S if shard_S is None else shard_S
        full_N = torch.empty(self.layout.full_numel, dtype=source_S.dtype, device=source_S.device)
        self.comm.all_gather(full_N, source_S, name=self.name).wait()
        return full_N

    def read(self, param: nn.Parameter) -> Tensor:
        """See :class:`zeroshard.zero.guard.Owner`. Resident units answer with the parameter itself."""
        self.wait()
        if self.state is UnitState.FULL:
            values = self.view(self.full_N, param)
            return values if self.resident else values.clone()
        return self.view(self.gathered_copy(), param).clone()

    def admit(self, param: nn.Parameter) -> bool:
        """A resident unit in flight only has to arrive; sharded parameters are never written."""
        if self.resident:
            self.wait()
        return self.resident

    def close(self) -> None:
        """Give the bytes back. Resident parameters stay readable, sharded ones raise when read."""
        self.wait()
        self.pins = 0
        self.reshard()
        for param in self.params:
            guard.owners.pop(param, None)
        self.training = None
        if not self.resident:
            self.shard_S = torch.empty(0, dtype=self.shard_S.dtype)
        for category in ("parameters", "gathered"):
            self.ledger.hold(category, self.name, 0)
