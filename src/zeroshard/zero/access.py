"""How does a user read and edit full values: parameters, gradients, optimizer state?

All functions that give full values are collective: every rank calls them, in the same order. Edits reach
the parameter, its shard and its master alike, so that they survive the next step at every stage and
precision. Names and meanings of ``safe_*`` are DeepSpeed's (``deepspeed.utils.tensor_fragment``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.errors import ShardedAccess, UsageError
from zeroshard.zero import guard
from zeroshard.zero.init import SpreadParameter
from zeroshard.zero.optimizer import OwnedFragment, ShardedOptimizer, Tile
from zeroshard.zero.unit import Unit, UnitState


@dataclass(frozen=True, eq=False)
class Training:
    """What the optimizer side knows of a unit."""

    optimizer: ShardedOptimizer | None
    tile: Tile
    grad_factor: Callable[[], float]  # from the reduced sum to the mean that the user means

    def fragments(self, param: nn.Parameter) -> Iterator[OwnedFragment]:
        """What this rank updates of the parameter (one piece or none)."""
        return (f for f in self.tile.fragments if f.param is param)

    def full(self, unit: Unit, param: nn.Parameter, tile_R: Tensor) -> Tensor:
        """A private full tensor of the parameter's shape from any flat tensor of the tile."""
        full_N = unit.gathered_copy(tile_R) if self.is_sharded else tile_R
        return unit.view(full_N, param).clone()

    @property
    def is_sharded(self) -> bool:
        return self.tile.low_R is not self.tile.unit.full_N


class GatheredParameters:
    """Full, readable and (with ``modifier_rank``) writable parameters inside a ``with`` block.

    ``params``: a parameter or any iterable; plain tensors, buffers and parameters that are full already
    are fine. ``modifier_rank``: the edits of this rank reach all ranks and the master at exit. Without
    it the values are for reading, and :class:`ShardedAccess` at exit says that an edit would be lost.
    Contexts may nest. Collective. (DeepSpeed: ``deepspeed.zero.GatheredParameters``.)
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
        items = [params] if isinstance(params, Tensor) else list(params) if enabled else []
        self.units: list[Unit] = []
        self.spread: list[tuple[nn.Parameter, SpreadParameter]] = []
        for param in items:
            owner = guard.owner_of(param) if isinstance(param, Tensor) else None
            if isinstance(owner, Unit) and owner not in self.units:
                self.units.append(owner)
            elif isinstance(owner, SpreadParameter):
                self.spread.append((param, owner))
        self._before: list[int] = []

    def __enter__(self) -> None:
        if not self.enabled:
            return
        for param, owner in self.spread:
            if owner.shard_S is not None:
                owner.open(param)
        for unit in self.units:
            unit.unshard()
        for unit in self.units:
            unit.wait()
            unit.pins += 1
        if self.modifier_rank is None:
            self._before = [_checksum(unit.full_N) for unit in self.units]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.enabled:
            return
        for unit in self.units:
            unit.pins -= 1
        try:
            if kind is None and self.modifier_rank is None:
                self._refuse_lost_edits()
            elif kind is None:
                for unit in self.units:
                    _adopt_edits(unit, self.modifier_rank)
        finally:
            for unit in self.units:
                unit.reshard()
            for param, owner in self.spread:
                if owner.shard_S is None:
                    owner.spread(param, self.modifier_rank or 0)

    def _refuse_lost_edits(self) -> None:
        for unit, before in zip(self.units, self._before, strict=True):
            after = _checksum(unit.full_N)
            vote = torch.tensor([before != after, after % 2**31], dtype=torch.float64)
            votes = unit.comm.gather_small(vote.to(unit.full_N.device), name=f"edits of {unit.name}")
            if not bool(votes[:, 0].any()):
                continue
            if unit.resident and bool((votes[:, 1] == votes[0, 1]).all()):
                _adopt_own(unit)  # the same edit on every rank of a whole unit is kept
                continue
            raise ShardedAccess(
                f"parameters of unit {unit.name!r} were edited inside GatheredParameters without "
                "modifier_rank; the edit would be lost, or differ between ranks. Pass "
                "modifier_rank=0 to send rank 0's edit to everybody."
            )


def _checksum(full_N: Tensor) -> int:
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[full_N.element_size()]
    return int(full_N.detach().view(bits).sum(dtype=torch.int64))


def _adopt_edits(unit: Unit, source: int | None) -> None:
    """The values of rank ``source`` become everybody's, in parameter, shard and master."""
    assert source is not None
    unit.comm.broadcast(unit.full_N, source, name=unit.name).wait()
    _adopt_own(unit)


def _adopt_own(unit: Unit) -> None:
    begin, end = unit.layout.shard_range(unit.comm.rank)
    if not unit.resident:
        unit.shard_S.copy_(unit.full_N[begin:end])
    if unit.training is not None:
        unit.training.tile.follow()


# ---------------------------------------------------------------------- full values


def _training_of(param: nn.Parameter) -> tuple[Unit, Training] | None:
    owner = guard.owner_of(param)
    if not isinstance(owner, Unit):
        raise UsageError(
            f"a tensor of shape {tuple(param.shape)} does not belong to any open engine. Pass a "
            "parameter of the model that was given to zeroshard.initialize()."
        )
    return None if owner.training is None else (owner, owner.training)


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """The master values of a trained parameter, ``[*shape]`` in the master dtype; None if frozen."""
    found = _training_of(param)
    if found is None:
        return None
    unit, training = found
    unit.wait()
    return training.full(unit, param, training.tile.master_R)


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """The averaged, unscaled gradient between backward and ``step``, fp32 ``[*shape]``; else None."""
    found = _training_of(param)
    if found is None:
        return None
    unit, training = found
    grad_S = training.tile.buffer.reduced_S
    if grad_S is None:
        return None
    full = unit.view(unit.gathered_copy(grad_S), param)
    return full.to(_at_least_fp32(full.dtype)) * training.grad_factor()


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Optimizer state ``[*shape]`` under a key such as ``exp_avg``; None before the first step."""
    found = _training_of(param)
    if found is None:
        return None
    unit, training = found
    tile_R, present, scalar = _state_tile(training, param, optim_state_key)
    votes = unit.comm.gather_small(
        torch.tensor([float(present), scalar], dtype=torch.float64, device=tile_R.device),
        name=f"state of {unit.name}",
    )
    if not bool(votes[:, 0].any()):
        return None
    if bool((votes[:, 0] == 2).any()):
        return votes[votes[:, 0] == 2][0, 1].to(torch.float32)
    return training.full(unit, param, tile_R)


def _state_tile(
    training: Training, param: nn.Parameter, key: str
) -> tuple[Tensor, int, float]:
    """The state laid out like the tile; 0, 1 or 2 for absent, tensor, scalar; the scalar."""
    tile_R = torch.zeros_like(training.tile.master_R)
    assert training.optimizer is not None
    for fragment in training.fragments(param):
        value = training.optimizer.state_of(fragment).get(key)
        if isinstance(value, Tensor) and value.shape == fragment.value.shape and value.dim():
            tile_R = tile_R.to(value.dtype)
            fragment.of(tile_R).copy_(value)
            return tile_R, 1, 0.0
        if value is not None:
            if fragment.value.dim() == 0:
                fragment.of(tile_R).copy_(torch.as_tensor(value))
                return tile_R, 1, 0.0
            return tile_R, 2, float(value)
    return tile_R, 0, 0.0


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set a parameter and its master to ``value`` (``[*shape]``, the same on every rank)."""
    unit, training = _trained(param, "safe_set_full_fp32_param")
    _check_shape(param.shape, value, "safe_set_full_fp32_param")
    _write_local(training, param, training.tile.master_R, value)
    unit.wait()
    training.tile.publish_master()
    if unit.resident and training.is_sharded:
        unit.publish()
    elif unit.state is UnitState.FULL and not unit.resident:
        unit.view(unit.full_N, param).copy_(value)


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace the averaged gradient before ``step``; ``value`` has the parameter's shape."""
    unit, training = _trained(param, "safe_set_full_grad")
    _check_shape(param.shape, value, "safe_set_full_grad")
    buffer = training.tile.buffer
    if buffer.reduced_S is None:
        raise UsageError(
            "safe_set_full_grad: there is no reduced gradient. Call it after the backward that "
            "completes a step and before step()."
        )
    raw = value.to(_at_least_fp32(buffer.reduced_S.dtype)) / training.grad_factor()
    if buffer.reduced_S.dtype != raw.dtype:  # 16-bit sums would round the edit
        buffer.reduced_S = buffer.reduced_S.to(raw.dtype)
        buffer.reduced_N = None
    slot = unit.layout.slots[unit.index(param)]
    begin, end = unit.layout.shard_range(unit.comm.rank)
    low, high = max(begin, slot.start), min(end, slot.stop)
    if low < high:
        buffer.reduced_S[low - begin : high - begin].copy_(
            raw.reshape(-1)[low - slot.start : high - slot.start]
        )


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Overwrite optimizer state after the first step; ``value`` has the parameter's shape."""
    _, training = _trained(param, "safe_set_full_optimizer_state")
    _check_shape(param.shape, value, "safe_set_full_optimizer_state")
    for fragment in training.fragments(param):
        target = _existing_state(training, fragment, optim_state_key)
        begin = _begin_of(training, fragment)
        target.view(-1).copy_(value.reshape(-1)[begin : begin + fragment.numel])


# ---------------------------------------------------------------------- this rank's part


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """This rank's piece of the master, 1-D (a view); None if it owns nothing of it."""
    return _local(param, lambda training, f: f.of(training.tile.master_R).view(-1))


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """This rank's piece of the averaged gradient, 1-D fp32 (a copy)."""

    def piece(training: Training, fragment: OwnedFragment) -> Tensor | None:
        tile = training.tile
        grad_R = tile.buffer.reduced_S if training.is_sharded else tile.buffer.reduced_N
        if grad_R is None or grad_R.numel() != tile.low_R.numel():
            return None
        values = fragment.of(grad_R).view(-1)
        return values.to(_at_least_fp32(values.dtype)) * training.grad_factor()

    return _local(param, piece)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """This rank's piece of optimizer state, 1-D (a view), or a scalar; None before the first step."""

    def piece(training: Training, fragment: OwnedFragment) -> Tensor | None:
        assert training.optimizer is not None
        value = training.optimizer.state_of(fragment).get(optim_state_key)
        if isinstance(value, Tensor) and value.numel() == fragment.numel:
            return value.view(-1)
        return None if value is None else torch.as_tensor(value)

    return _local(param, piece)


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set this rank's piece of the master and of the parameter; collective at stages 1 and 2."""
    unit, training = _trained(param, "safe_set_local_fp32_param")
    for fragment in training.fragments(param):
        _check_shape((fragment.numel,), value.view(-1), "safe_set_local_fp32_param")
        fragment.of(training.tile.master_R).view(-1).copy_(value.view(-1))
    unit.wait()
    training.tile.publish_master()
    if unit.resident and training.is_sharded:
        unit.publish()


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set this rank's piece of the averaged gradient before ``step``."""
    _, training = _trained(param, "safe_set_local_grad")
    buffer = training.tile.buffer
    for fragment in training.fragments(param):
        grad_R = buffer.reduced_S if training.is_sharded else buffer.reduced_N
        if grad_R is None:
            raise UsageError("safe_set_local_grad: there is no reduced gradient before backward.")
        _check_shape((fragment.numel,), value.view(-1), "safe_set_local_grad")
        fragment.of(grad_R).view(-1).copy_(value.view(-1) / training.grad_factor())


def safe_set_local_optimizer_state(
    param: nn.Parameter, value: Tensor, optim_state_key: str
) -> None:
    """Set this rank's piece of optimizer state after the first step."""
    _, training = _trained(param, "safe_set_local_optimizer_state")
    for fragment in training.fragments(param):
        _check_shape((fragment.numel,), value.view(-1), "safe_set_local_optimizer_state")
        _existing_state(training, fragment, optim_state_key).view(-1).copy_(value.view(-1))


def _local(
    param: nn.Parameter, piece: Callable[[Training, OwnedFragment], Tensor | None]
) -> Tensor | None:
    found = _training_of(param)
    if found is None:
        return None
    _, training = found
    return next((piece(training, f) for f in training.fragments(param)), None)


def _trained(param: nn.Parameter, what: str) -> tuple[Unit, Training]:
    found = _training_of(param)
    if found is None:
        raise UsageError(
            f"{what}: a parameter of shape {tuple(param.shape)} is frozen or has no optimizer, so it "
            "has no master, gradient or state to set. Use GatheredParameters(param, modifier_rank=0)."
        )
    return found


def _write_local(training: Training, param: nn.Parameter, tile_R: Tensor, value: Tensor) -> None:
    for fragment in training.fragments(param):
        begin = _begin_of(training, fragment)
        fragment.of(tile_R).view(-1).copy_(value.reshape(-1)[begin : begin + fragment.numel])


def _begin_of(training: Training, fragment: OwnedFragment) -> int:
    """Where the fragment starts in its parameter."""
    unit = training.tile.unit
    low = unit.layout.shard_range(unit.comm.rank)[0] if training.is_sharded else 0
    return low + fragment.at - unit.layout.slots[fragment.index].start


def _existing_state(training: Training, fragment: OwnedFragment, key: str) -> Tensor:
    assert training.optimizer is not None
    state = training.optimizer.state_of(fragment)
    value = state.get(key)
    if not isinstance(value, Tensor) or value.numel() != fragment.numel:
        raise UsageError(
            f"there is no optimizer state {key!r} to set; this optimizer has "
            f"{sorted(state) or 'none before its first step'}."
        )
    return value


def _check_shape(expected: Iterable[int], value: Tensor, what: str) -> None:
    if tuple(value.shape) != tuple(expected):
        raise UsageError(
            f"{what}: the value has shape {tuple(value.shape)}, expected {tuple(expected)}."
        )


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32
