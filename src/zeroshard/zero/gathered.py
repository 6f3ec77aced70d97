"""``GatheredParameters``: full values of sharded parameters for a while, and edits of them."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.comm.collectives import Comm
from zeroshard.errors import DistributedError, ShardedAccess, UnsupportedError, UsageError
from zeroshard.experts.marks import ranks_of_layer
from zeroshard.memory.storage import WEIGHTS_NBYTES, weights_for
from zeroshard.zero import sharded_parameter
from zeroshard.zero.access import unit_optim_state
from zeroshard.zero.clip import pack_flags, unpack_any
from zeroshard.zero.param_bucket import BucketedParameter, ParamBucket, fingerprint_of
from zeroshard.zero.unit import Unit


class GatheredParameters:
    """Full, readable and (with ``modifier_rank``) writable parameters inside a ``with`` block.

    ``params``: a parameter, or an iterable of tensors in any order, also a set. The order may differ
    between ranks, but every rank has to name the same parameters. Plain tensors, buffers and parameters
    that are full already are allowed. ``modifier_rank``: edits of this rank reach all ranks and the
    masters at the end of the block, also if an exception ends it. Not on a mesh, where a DTensor is a
    DTensor in the block too. Without ``modifier_rank``, values are
    for reading. (Then resident parameters keep an edit that is the same on all ranks; inside
    ``zero.Init`` everything may be written.) Blocks may nest. Collective. Tensors that are taken in the
    block and share memory with parameters keep the values of the block: where parameters are sharded
    they do not follow later updates.
    (DeepSpeed: ``deepspeed.zero.GatheredParameters``.)

    Raises:
        ShardedAccess: at the end of the block, on every rank, for an edit without ``modifier_rank``.
        UsageError: ``params`` is a module or not iterable, or ``modifier_rank`` is not a rank.
    """

    def __init__(
        self,
        params: Any,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self.enabled = enabled
        self.modifier_rank = modifier_rank
        self.units: list[Unit] = []
        self.bucketed: list[tuple[nn.Parameter, BucketedParameter]] = []
        self._opened: list[Unit] = []  # units that this block unsharded, and will reshard
        for param in sharded_parameter.in_order(_items(params)) if enabled else []:
            owner = sharded_parameter.owner_of(param)
            if modifier_rank is not None and owner is not None:
                _refuse_experts(param)
            if isinstance(owner, Unit) and owner not in self.units[-1:]:
                self.units.append(owner)
            elif isinstance(owner, BucketedParameter):
                self.bucketed.append((param, owner))
        for unit in self.units:
            _check_rank(modifier_rank, _num_holders(unit.comm))
            if modifier_rank is not None and unit.has_copies:
                raise UnsupportedError(
                    "GatheredParameters(modifier_rank=...) on a mesh with tensor or pipeline "
                    "parallelism: one rank does not hold the whole parameter, so it cannot edit it for "
                    "all. Give every rank the global values with "
                    "zeroshard.zero.safe_set_full_fp32_param(param, value)."
                )

    def __enter__(self) -> None:
        if self.modifier_rank is not None:  # edits start from the values of the last step
            for optim_state in filter(None, map(unit_optim_state, self.units)):
                optim_state.all_gather_late()
        for _, owner in self.bucketed:
            owner.pin_count += 1
        for bucket in self._buckets():
            if bucket.shard_S is not None:
                bucket.context.open(bucket, to_read=self.modifier_rank is None)
        self._opened = [unit for unit in self.units if unit.is_sharded]
        for unit in self.units:
            unit.unshard()
        for unit in self.units:
            unit.wait_for_unshard()
            unit.rebind_storage()
        for unit in self.units:
            unit.pin_count += 1
            if self.modifier_rank is None and unit.fingerprint is None:
                unit.fingerprint = _fingerprints(unit)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            for unit in self.units:
                unit.rebind_storage()
            refused = self._close_buckets(error)
            if isinstance(error, DistributedError) or (kind and self.modifier_rank is None):
                pass  # the other ranks are lost, or there are no edits to keep
            elif self.modifier_rank is not None:
                for unit in self.units:
                    _adopt_edits(unit, self.modifier_rank)
            else:
                self._refuse_lost_edits(refused)
        finally:
            for unit in self.units:
                unit.pin_count = max(0, unit.pin_count - 1)
                if not unit.pin_count:
                    unit.fingerprint = None
                    if unit in self._opened:
                        unit.discard_unsharded(
                            for_keeping=True
                        )  # edits to keep are in the shards already

    def _buckets(self) -> list[ParamBucket]:
        return list(dict.fromkeys(owner.bucket for _, owner in self.bucketed if owner.bucket))

    def _close_buckets(self, error: BaseException | None) -> list[str]:
        """Shard the buckets that no other block uses. Returns names of edited read-only parameters."""
        for _, owner in self.bucketed:
            owner.pin_count = max(0, owner.pin_count - 1)
        refused: list[str] = []
        if isinstance(error, DistributedError):  # a collective would wait for a lost rank
            return refused
        for bucket in self._buckets():
            if bucket.shard_S is not None or bucket.is_pinned:
                continue
            if bucket.kept is None or self.modifier_rank is not None:
                bucket.context.close(bucket, self.modifier_rank or 0)
                continue
            refused += bucket.edited()
            bucket.put_back()
        if self.modifier_rank is not None:
            for param, owner in self.bucketed:
                if owner.is_sharded:
                    continue
                owner.send(param, self.modifier_rank)
                if owner.bucket is not None:
                    owner.bucket.kept = None  # an outer read-only block must keep the edit
        return refused

    def _refuse_lost_edits(self, refused: list[str]) -> None:
        """Give all ranks the same values, and raise if a parameter was edited or is in ``refused``."""
        for unit in self.units:
            edited, same_everywhere = _edits(unit)
            if not edited:
                continue
            if not unit.resident:
                unit.full_N.copy_(unit.gathered_copy())
                refused += edited
            elif same_everywhere:
                _adopt_own(unit)
            else:
                _adopt_edits(unit, 0)
                refused += edited
        if refused:
            raise ShardedAccess(
                f"{', '.join(map(repr, refused[:3]))}{'...' if len(refused) > 3 else ''} changed "
                "inside GatheredParameters without modifier_rank; the edit would be lost, or "
                "differ between ranks. Pass modifier_rank=0 to send rank 0's edit to all ranks."
            )


def _items(params: Any) -> list[Any]:
    if isinstance(params, Tensor):
        return [params]
    if isinstance(params, nn.Module) or not isinstance(params, Iterable):
        raise UsageError(
            f"GatheredParameters got a {type(params).__name__}. Pass a parameter or an iterable of "
            "parameters, for instance module.parameters()."
        )
    return [item for item in params if isinstance(item, Tensor)]


def _refuse_experts(param: Tensor) -> None:
    """Edits of one rank would reach its own experts only, and leave those of other ranks as they are."""
    if (shared := ranks_of_layer(param)) > 1:
        raise UnsupportedError(
            f"GatheredParameters(modifier_rank=...) of experts that {shared} ranks share: each of them "
            "holds other experts, so one rank cannot edit them for all. Leave experts out of the block. "
            "After initialize(), call zeroshard.zero.safe_set_full_fp32_param(param, value) on every "
            "rank, for its own experts, with equal values on ranks that hold the same ones; before it, "
            "initialize the experts in the function that makes them."
        )


def _check_rank(modifier_rank: int | None, size: int) -> None:
    if modifier_rank is not None and modifier_rank not in range(size):
        raise UsageError(
            f"modifier_rank={modifier_rank!r} is not one of the {size} ranks that share the "
            "parameter. Pass one of them, or None to read only."
        )


def _edits(unit: Unit) -> tuple[list[str], bool]:
    """Names of parameters that any rank edited inside the block; and whether all ranks have equal values.

    Collective.
    """
    if unit.fingerprint is None:  # a step inside the block changed all values
        return [], True
    after = _fingerprints(unit)
    slots = unit.layout.slots
    flags: list[bool] = (after != unit.fingerprint).tolist()
    digest = int(fingerprint_of(after)) % 2**48
    vote = torch.tensor([float(digest), *pack_flags(flags)], dtype=torch.float64)
    votes = unit.comm.all_gather_small(vote.to(after.device), name=f"edits of {unit.name}")
    any_rank = unpack_any(votes[:, 1:], len(flags))
    edited = [slot.fqn for slot, flag in zip(slots, any_rank, strict=True) if flag]
    return edited, bool((votes[:, 0] == votes[0, 0]).all())


def _fingerprints(unit: Unit) -> Tensor:
    """One fingerprint for each parameter, int64 ``[parameters]``. One that differs means a write."""
    flat_N = unit.full_N.detach()
    unit.ledger.count_peak("scratch", WEIGHTS_NBYTES)
    kept = weights_for(flat_N)
    found = [fingerprint_of(flat_N[slot.start : slot.stop]) for slot in unit.layout.slots]
    del kept
    return torch.stack(found)


def _num_holders(comm: Comm) -> int:
    """How many ranks :meth:`Comm.broadcast` reaches: those of all replicas of the shard group."""
    return comm.size * int(getattr(comm, "replicas", 1))


def _adopt_edits(unit: Unit, source: int) -> None:
    """Give parameter, shard and master on all ranks the values of rank ``source``."""
    unit.comm.broadcast(unit.full_N, source, name=unit.name).wait()
    _adopt_own(unit)


def _adopt_own(unit: Unit) -> None:
    unit.write_back_edits()
    if (optim_state := unit_optim_state(unit)) is not None:
        optim_state.shard.sync_edits()
    if unit.fingerprint is not None:
        unit.fingerprint = _fingerprints(unit)
