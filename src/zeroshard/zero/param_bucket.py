"""Holds sharded parameters before they belong to a unit.

A *bucket* holds parameters that were sharded together, in one broadcast. They are gathered together as
well, and sharded again in the same layout. Letters as in :mod:`zeroshard.zero.unit`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import TensorWeakRef

from zeroshard.comm.collectives import Comm
from zeroshard.core.layout import Slot, pack
from zeroshard.memory.storage import fingerprint
from zeroshard.zero import materialize, sharded_parameter
from zeroshard.zero.clip import pack_flags, unpack_any


class Construction(Protocol):
    """What a bucket asks of the ``zero.Init`` block that built its parameters."""

    comm: Comm
    device: torch.device
    dtype: torch.dtype | None

    @property
    def active(self) -> bool:
        """Whether the program is inside the block."""

    def reopen(self, bucket: ParamBucket, beside: Collection[Tensor]) -> None:
        """Make a bucket whole that is used again."""

    def open(self, bucket: ParamBucket, *, to_read: bool = False) -> None:
        """Make a bucket whole."""

    def close(self, bucket: ParamBucket, source: int) -> None:
        """Spread a bucket again, with the values of rank ``source``."""

    def was_hidden(self, bucket: ParamBucket) -> None:
        """Its parameters show placeholders in the dtype of construction."""

    def keep_read(self, bucket: ParamBucket) -> None:
        """It keeps what was gathered for a reader."""


_NOWHERE = Slot("", (), 0)


class BucketedParameter:
    """The owner of one parameter before it belongs to a unit. Knows its bucket and slot."""

    __slots__ = (
        "__weakref__",
        "bucket",
        "context",
        "name",
        "numel",
        "order",
        "pin_count",
        "slot",
    )

    def __init__(
        self, param: nn.Parameter, holder: nn.Module, leaf: str, context: Construction
    ) -> None:
        self.name = f"{type(holder).__name__}.{leaf}"
        self.order = sharded_parameter.count_owner()
        self.context = context
        self.numel = param.numel()
        self.bucket: ParamBucket | None = None
        self.slot = _NOWHERE
        self.pin_count = 0  # open GatheredParameters blocks; above 0 it is not sharded
        sharded_parameter.owners[param] = self.itself

    def itself(self) -> BucketedParameter:
        """The value in :data:`~.sharded_parameter.owners`. It lives as long as the parameter."""
        return self

    @property
    def is_sharded(self) -> bool:
        """Whether the values are sharded."""
        return self.bucket is not None and self.bucket.shard_S is not None

    def own_part(self) -> tuple[int, int]:
        """``(begin, end)`` of the parameter in this rank's shard of the bucket; (0, 0): not in it."""
        if self.bucket is None:
            return 0, 0
        begin, end = self.bucket.layout.shard_range(self.context.comm.rank)
        low, high = max(begin, self.slot.start), min(end, self.slot.stop)
        return (low - begin, high - begin) if low < high else (0, 0)

    def index(self, param: Tensor) -> int:
        """See :class:`zeroshard.zero.sharded_parameter.Owner`."""
        return 0

    def read(self, param: nn.Parameter) -> Tensor:
        """See :class:`zeroshard.zero.sharded_parameter.Owner`."""
        assert self.bucket is not None
        return self.bucket.read(self.slot)

    def is_collective_read(self, fact: bool) -> bool:
        """See :class:`zeroshard.zero.sharded_parameter.Owner`."""
        vote = torch.tensor([float(fact)], device=self.context.device)
        return bool(self.context.comm.all_gather_small(vote, name=self.name).all())

    def ensure_writable(self, param: nn.Parameter, beside: Collection[Tensor]) -> bool:
        """Inside the context, make the parameter whole, so that it may be written."""
        if self.context.active and self.is_sharded:
            assert self.bucket is not None
            self.context.reopen(self.bucket, beside)
        return self.context.active

    def values_version(self, param: nn.Parameter) -> int | None:
        """See :class:`zeroshard.zero.sharded_parameter.Owner`. While a model is built, none is kept."""
        return None

    def send(self, param: nn.Parameter, source: int) -> None:
        """Give all ranks the whole values of rank ``source``. Collective."""
        values = param.data.contiguous().to(self.context.device)
        self.context.comm.broadcast(values, source, name=self.name).wait()
        param.data.copy_(values)


class Kept(NamedTuple):
    """The state to which parameters that are whole for reading return."""

    shard_S: Tensor
    prints: dict[Slot, int]


class ParamBucket:
    """Parameters that are sharded together. ``shard_S`` is this rank's 1/W of their flat whole.

    ``built_as`` is the dtype and device in which they were built, and in which their constructors and
    initialisers work. The bucket does not keep parameters alive. The slot of one that was freed stays
    empty.
    """

    def __init__(
        self,
        context: Construction,
        owners: Sequence[BucketedParameter],
        params: Sequence[nn.Parameter],
    ) -> None:
        self.context = context
        self.built_as = dtype, _ = params[0].dtype, params[0].device
        self.dtype = context.dtype if context.dtype and dtype.is_floating_point else dtype
        self.layout = pack(
            [(owner.name, param.shape) for owner, param in zip(owners, params, strict=True)],
            num_shards=context.comm.size,
        )
        self.name = f"{owners[0].name} and {len(owners) - 1} more" if owners[1:] else owners[0].name
        self.numel = sum(param.numel() for param in params)
        self.shard_S: Tensor | None = None  # None while the parameters are whole
        self._read_N: Tensor | None = None  # gathered for the last reader
        self.kept: Kept | None = None  # while the parameters are whole for reading only
        self._refs = [TensorWeakRef(param) for param in params]
        for owner, slot in zip(owners, self.layout.slots, strict=True):
            owner.bucket, owner.slot = self, slot

    def members(self) -> Iterator[tuple[Slot, nn.Parameter, BucketedParameter]]:
        """The parameters that still exist, with slots and owners."""
        for slot, ref in zip(self.layout.slots, self._refs, strict=True):
            param = ref()
            owner = None if param is None else sharded_parameter.owner_of(param)
            if isinstance(owner, BucketedParameter) and owner.bucket is self:
                yield slot, param, owner

    @property
    def is_pinned(self) -> bool:
        return any(owner.pin_count for _, _, owner in self.members())

    def close(self, source: int = 0) -> None:
        """Keep this rank's 1/W of rank ``source``'s values, in the training dtype, and free the rest."""
        context = self.context
        kept, changed = [], []
        for slot, param, owner in self.members():
            if (param.shape, param.dtype, param.device) == (slot.shape, *self.built_as):
                kept.append((slot, param))
            else:
                changed.append((owner, param))  # the program changed its shape, dtype or device
        shard_S = materialize.scatter(
            self.layout,
            [(slot, param.data) for slot, param in kept],
            dtype=self.dtype,
            device=context.device,
            comm=context.comm,
            name=self.name,
            source=source,
        )
        for owner, param in changed:
            owner.numel = param.numel()
            ParamBucket(context, [owner], [param]).close(source)
        self.shard_S, self.kept = shard_S, None
        self._hide(kept)

    def show_training_dtype(self) -> None:
        """Give the placeholders the training dtype, at the end of the context."""
        if self.shard_S is not None and self.dtype != self.built_as[0]:
            self._hide([(slot, param) for slot, param, _ in self.members()])

    def _hide(self, members: Sequence[tuple[Slot, nn.Parameter]]) -> None:
        """Put placeholders into parameters: inside the context in the dtype that they were built in."""
        dtype, device = self.built_as
        shown = dtype if self.context.active else self.dtype
        nothing = sharded_parameter.nan_placeholder(torch.empty((), dtype=shown, device=device))
        placeholders = {
            shape: nothing.expand(shape) for shape in {slot.shape for slot, _ in members}
        }
        for slot, param in members:
            if isinstance(param, FakeTensor):  # keeps its class: it has no values to guard
                param.data = placeholders[slot.shape]
            else:
                param.__class__ = nn.Parameter
        hidden = [placeholders[slot.shape] for slot, _ in members]
        sharded_parameter.mark_sharded([param for _, param in members], hidden)
        if self.context.active:
            self.context.was_hidden(self)

    def open(self, *, to_read: bool = False) -> None:
        """Make the parameters whole, in the dtype that they were built in. Collective.

        ``to_read``: until :meth:`put_back`, which restores the present values.
        """
        dtype, device = self.built_as
        alone = len(self._refs) == 1
        full_N = self._gather(dtype if alone else self.dtype)
        shard_S = self.shard_S
        self.shard_S = self._read_N = None
        params, values = [], []
        for slot, param, _ in self.members():
            view = full_N[slot.start : slot.stop].view(slot.shape)
            params.append(param)
            values.append(view.to(device, dtype, copy=not alone))  # memory of its own for each
        sharded_parameter.mark_unsharded(params, values, [nn.Parameter] * len(params))
        if to_read and shard_S is not None:
            self.kept = Kept(shard_S, self._prints())

    def edited(self) -> list[str]:
        """Names of parameters that any rank edited since :meth:`open` for reading. Collective."""
        assert self.kept is not None
        before, after = self.kept.prints, self._prints()
        flags = [after.get(slot) not in (None, before.get(slot)) for slot in self.layout.slots]
        vote = torch.tensor(pack_flags(flags), dtype=torch.float64, device=self.context.device)
        votes = self.context.comm.all_gather_small(vote, name=f"edits of {self.name}")
        any_rank = unpack_any(votes, len(flags))
        return [slot.fqn for slot, flag in zip(self.layout.slots, any_rank, strict=True) if flag]

    def _prints(self) -> dict[Slot, int]:
        """A fingerprint of each whole parameter. One that differs means a write."""
        return {slot: int(fingerprint_of(param.detach())) for slot, param, _ in self.members()}

    def put_back(self) -> None:
        """Shard the parameters again, with the values that they had before :meth:`open`."""
        assert self.kept is not None
        self.shard_S, self.kept = self.kept.shard_S, None
        self._hide([(slot, param) for slot, param, _ in self.members()])

    def read(self, slot: Slot) -> Tensor:
        """A private copy of one parameter's values.

        Collective, unless the last parameter that was read is in this bucket too: the gathered copy is
        kept, since an engine takes parameters one by one.
        """
        full_N = self._gather(self.dtype) if self._read_N is None else self._read_N
        values = full_N[slot.start : slot.stop].view(slot.shape)
        if len(self._refs) > 1:
            self.context.keep_read(self)
            self._read_N, values = full_N, values.clone()
        return values.to(self.built_as[0]) if self.context.active else values

    def forget_read(self) -> None:
        """Free the gathered copy."""
        self._read_N = None

    def _gather(self, dtype: torch.dtype) -> Tensor:
        assert self.shard_S is not None
        comm = self.context.comm
        full_N = self.shard_S.new_empty(self.layout.full_numel, dtype=dtype)
        own_S = full_N[slice(*self.layout.shard_range(comm.rank))].copy_(self.shard_S)
        comm.all_gather(full_N, own_S, name=self.name).wait()
        return full_N


def whole_values(param: nn.Parameter) -> Tensor:
    """The values of a parameter that a block of ``zero.Init`` sharded, and that is plain from now on.

    Collective, unless no block sharded it.
    """
    owner = sharded_parameter.owner_of(param)
    if isinstance(owner, BucketedParameter):
        if owner.is_sharded:
            sharded_parameter.mark_unsharded([param], [owner.read(param)], [nn.Parameter])
        sharded_parameter.owners.discard(param)
    return param.data


def fingerprint_of(values: Tensor) -> Tensor:
    """The fingerprint of values of any shape and dtype, 0-dim int64."""
    flat = values.reshape(-1).view(torch.uint8)
    if len(flat) % 8 or flat.storage_offset() % 8 or not len(flat):
        flat = nn.functional.pad(flat, (0, -len(flat) % 8 or 8))
    return fingerprint(flat)
