"""Reads and edits full values of parameters, gradients and optimizer state.

Functions for full values are collective: every rank calls them, in the same order. An edit reaches the
parameter, its shard and its master, so it survives the next step at every stage and precision. Names and
meanings of ``safe_*`` are DeepSpeed's (``deepspeed.utils.tensor_fragment``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zeroshard.comm.dtensors import local_part, whole_of
from zeroshard.errors import UsageError
from zeroshard.memory.storage import real_view
from zeroshard.optim.state_tree import flat
from zeroshard.zero import sharded_parameter
from zeroshard.zero.gradients import GradBuffer
from zeroshard.zero.optimizer import ShardedOptimizer
from zeroshard.zero.optimizer_shard import OptimizerChunk, OptimizerShard, OwnedFragment
from zeroshard.zero.unit import Unit


@dataclass(frozen=True, eq=False)
class UnitOptimState:
    """The optimizer state of one unit, for functions that start from a parameter."""

    optimizer: ShardedOptimizer | None
    shard: OptimizerShard
    # Returns the gradient [S] of the backwards since the last step.
    summed: Callable[[GradBuffer], Tensor | None]
    grad_factor: Callable[[], float]  # turns the reduced sum into the unscaled mean
    # Ends updates that run during the next step, and all-gathers what they updated. Collective.
    all_gather_late: Callable[[], None]

    def visit(
        self, param: nn.Parameter, *, changed: bool = False
    ) -> Iterator[tuple[OptimizerChunk, OwnedFragment]]:
        """Yield each chunk and fragment of the parameter; its memory is valid until the next one."""
        for chunk in self.shard.visit(changed=changed):
            yield from ((chunk, f) for f in chunk.fragments if f.param is param)

    def full(self, unit: Unit, param: nn.Parameter, shard_R: Tensor) -> Tensor:
        """A new tensor of the parameter's shape, gathered from a flat tensor ``[R]``."""
        full_N = unit.gathered_copy(shard_R) if self.is_sharded else shard_R
        return unit.view(full_N, param).clone()

    @property
    def is_sharded(self) -> bool:
        return not self.shard.is_whole


# ---------------------------------------------------------------------- full values


def unit_optim_state(unit: Unit) -> UnitOptimState | None:
    """The unit's optimizer state, with its type: the unit stores it without knowing the class."""
    assert unit.optim_state is None or isinstance(unit.optim_state, UnitOptimState)
    return unit.optim_state


def _optim_state_of(param: nn.Parameter) -> tuple[Unit, UnitOptimState] | None:
    owner = sharded_parameter.owner_of(param)
    if not isinstance(owner, Unit):
        raise UsageError(
            f"a tensor of shape {tuple(param.shape)} does not belong to any open engine. Pass a "
            "parameter of the model that was given to zeroshard.initialize()."
        )
    owner.check_not_offloaded()
    optim_state = unit_optim_state(owner)
    if optim_state is None:
        return None
    optim_state.shard.check_not_offloaded()
    buffer = optim_state.shard.buffer
    buffer.change(buffer.stand_ins.settle())
    if optim_state.optimizer is not None:
        optim_state.optimizer.life.check()
        optim_state.optimizer.wait_for_worker()
    return owner, optim_state


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """The master values of a trained parameter, ``[*shape]`` in the master dtype; None if frozen."""
    found = _optim_state_of(param)
    if found is None:
        return None
    unit, optim_state = found
    optim_state.shard.sync_edits()
    master = optim_state.full(unit, param, optim_state.shard.flat(lambda chunk: chunk.master_C))
    return whole_of(param, master)


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """The gradient of all backwards since the last step, fp32 ``[*shape]``; None before the first one.

    Averaged over the ranks and unscaled: the value of ``param.grad`` in plain PyTorch on the global
    batch. Zeros where no gradient arrived.
    """
    found = _optim_state_of(param)
    if found is None:
        return None
    unit, optim_state = found
    grad_S = optim_state.summed(optim_state.shard.buffer)
    if grad_S is None:
        return None
    full = whole_of(param, unit.view(unit.gathered_copy(grad_S), param))
    return full.to(_at_least_fp32(full.dtype)) * optim_state.grad_factor()


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Optimizer state ``[*shape]`` under a key such as ``exp_avg``; None before the first step."""
    found = _optim_state_of(param)
    if found is None:
        return None
    unit, optim_state = found
    shard_R, present, scalar = _state_shard(optim_state, param, optim_state_key)
    votes = unit.comm.all_gather_small(
        torch.tensor([float(present), scalar], dtype=torch.float64, device=shard_R.device),
        name=f"state of {unit.name}",
    )
    if not bool(votes[:, 0].any()):
        return None
    if bool((votes[:, 0] == 2).any()):
        return votes[votes[:, 0] == 2][0, 1].to(torch.float32)
    return whole_of(param, optim_state.full(unit, param, shard_R))


def _state_shard(
    optim_state: UnitOptimState, param: nn.Parameter, key: str
) -> tuple[Tensor, int, float]:
    """The state as a flat tensor ``[R]``; 0 (absent), 1 (tensor) or 2 (scalar); the scalar."""
    shard, (present, scalar) = optim_state.shard, (0, 0.0)
    shard_R = torch.zeros(
        shard.param_R.numel(), dtype=shard.unit.row.master, device=shard.chunks[0].master_C.device
    )
    assert optim_state.optimizer is not None
    for chunk, fragment in optim_state.visit(param):
        value = optim_state.optimizer.state_of(fragment).get(key)
        if value is None:
            continue
        place = fragment.of(shard_R[chunk.begin : chunk.begin + chunk.numel])
        if isinstance(value, Tensor) and value.shape == fragment.shape:
            place.copy_(value)
            present = 1
        elif len(fragment.shape) == 0:
            place.copy_(torch.as_tensor(value))
            present = 1
        else:
            present, scalar = 2, float(value)
    return shard_R, present, scalar


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set a parameter and its master to ``value`` (``[*shape]``, the same on every rank)."""
    unit, optim_state = _trained(param, "safe_set_full_fp32_param")
    _check_shape(param, _whole_shape(unit, param), value, "safe_set_full_fp32_param")
    optim_state.all_gather_late()
    optim_state.shard.sync_edits()  # earlier edits of other parameters must not be lost
    _write(unit, optim_state, param, _flat_part(unit, param, value))


def _whole_shape(unit: Unit, param: nn.Parameter) -> tuple[int, ...]:
    """The shape of the global tensor, of which a plain parameter may be a part too."""
    block = unit.layout.slots[unit.index(param)].block
    return tuple(param.shape) if block is None else block.shape


def _flat_part(unit: Unit, param: nn.Parameter, value: Tensor) -> Tensor:
    """What this rank's tensor coordinate holds of the global tensor ``value``, flat."""
    return local_part(unit.layout.slots[unit.index(param)], value).reshape(-1)


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace the averaged gradient before ``step``; ``value`` has the parameter's shape."""
    unit, optim_state = _trained(param, "safe_set_full_grad")
    _check_shape(param, _whole_shape(unit, param), value, "safe_set_full_grad")
    values = _flat_part(unit, param, value)
    _set_grad(unit, optim_state, unit.index(param), 0, values, "safe_set_full_grad")


def _set_grad(
    unit: Unit, optim_state: UnitOptimState, index: int, at: int, values: Tensor, what: str
) -> None:
    """Set ``param.flat[at : at + len(values)]`` of the gradient, where it is in this rank's shard.

    Raises:
        UsageError: there is no reduced gradient.
    """
    buffer = optim_state.shard.buffer
    if buffer.reduced_S is None:
        raise UsageError(
            f"{what}: there is no reduced gradient. Call it after the backward that completes a step "
            "and before step()."
        )
    dtype = _at_least_fp32(buffer.reduced_S.dtype)
    raw = values.resolve_conj().to(dtype, copy=True)
    real_view(raw).div_(optim_state.grad_factor())
    if buffer.reduced_S.dtype != raw.dtype:  # a 16-bit sum would round the values
        buffer.reduced_S = buffer.reduced_S.to(raw.dtype)
        buffer.reduced_N = None
    if (slots := buffer.slots_of(index)) is not None:
        raw = slots.counted(index, raw)
    buffer.has_grad[index] = True
    begin, end = unit.layout.shard_range(unit.comm.rank)
    start = unit.layout.slots[index].start + at
    low, high = max(begin, start), min(end, start + len(raw))
    if low < high:
        buffer.reduced_S[low - begin : high - begin].copy_(raw[low - start : high - start])
    buffer.store_reduced(complete=True)
    buffer.report()


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Overwrite optimizer state after the first step; ``value`` has the parameter's shape."""
    unit, optim_state = _trained(param, "safe_set_full_optimizer_state")
    _check_shape(param, _whole_shape(unit, param), value, "safe_set_full_optimizer_state")
    missing = _lacks_state(optim_state, param, optim_state_key)
    vote = torch.tensor([float(missing)], dtype=torch.float64).to(unit.full_N.device)
    if bool(unit.comm.all_gather_small(vote, name=unit.name).any()):
        # Raised on all ranks, also on those that own no part of the parameter.
        raise _no_state(optim_state, optim_state_key)
    _write_state(optim_state, param, optim_state_key, _flat_part(unit, param, value))


# ---------------------------------------------------------------------- this rank's part


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """This rank's part of the master, 1-D; None if it owns no part of the parameter.

    A view if the part is in one chunk in memory, else a copy.
    """
    return _local(param, lambda chunk, f: f.of(chunk.master_C).view(-1))


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """This rank's part of the gradient (see :func:`safe_get_full_grad`), 1-D fp32 (a copy).

    Collective while gradients are not reduced yet, at stage 0, and if the unit has gradients that are
    added over tensor ranks.
    """
    found = _optim_state_of(param)
    if found is None:
        return None
    unit, optim_state = found
    grad_R = optim_state.summed(optim_state.shard.buffer)
    if grad_R is None:
        return None
    if not optim_state.is_sharded:
        grad_R = unit.gathered_copy(grad_R)
    for index, at, numel in optim_state.shard.owned:
        if index == unit.index(param):
            values = grad_R[at : at + numel]
            return values.to(_at_least_fp32(values.dtype)) * optim_state.grad_factor()
    return None


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """This rank's part of optimizer state, 1-D, or a scalar; None before the first step.

    A view if the part is in one chunk in memory, else a copy.
    """
    found = _optim_state_of(param)
    if found is None or found[1].optimizer is None:
        return None
    optimizer = found[1].optimizer

    def piece(_: OptimizerChunk, fragment: OwnedFragment) -> Tensor | None:
        value = optimizer.state_of(fragment).get(optim_state_key)
        if isinstance(value, Tensor) and value.numel() == fragment.numel:
            is_count = len(fragment.shape) > 0 and not value.dim()  # beside a piece of one element
            return value if is_count else value.view(-1)
        return None if value is None else torch.as_tensor(value)

    return _local(param, piece)


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set this rank's part of the master and of the parameter. Collective at stages 1 and 2."""
    unit, optim_state = _trained(param, "safe_set_local_fp32_param")
    _check_piece(optim_state, param, value, "safe_set_local_fp32_param")
    optim_state.shard.sync_edits()
    _write(unit, optim_state, param, value.reshape(-1), offset=_begin_of(optim_state, param))


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set this rank's part of the averaged gradient before ``step``."""
    unit, optim_state = _trained(param, "safe_set_local_grad")
    if _check_piece(optim_state, param, value, "safe_set_local_grad"):
        begin = _begin_of(optim_state, param)
        _set_grad(
            unit, optim_state, unit.index(param), begin, value.reshape(-1), "safe_set_local_grad"
        )


def safe_set_local_optimizer_state(
    param: nn.Parameter, value: Tensor, optim_state_key: str
) -> None:
    """Set this rank's part of optimizer state after the first step."""
    _, optim_state = _trained(param, "safe_set_local_optimizer_state")
    if not _check_piece(optim_state, param, value, "safe_set_local_optimizer_state"):
        return
    if _lacks_state(optim_state, param, optim_state_key):
        raise _no_state(optim_state, optim_state_key)
    offset = _begin_of(optim_state, param)
    _write_state(optim_state, param, optim_state_key, value.reshape(-1), offset=offset)


def _local(
    param: nn.Parameter, piece: Callable[[OptimizerChunk, OwnedFragment], Tensor | None]
) -> Tensor | None:
    """This rank's part. If it is in several chunks, or on disk, a copy is made."""
    found = _optim_state_of(param)
    if found is None:
        return None
    _, optim_state = found
    if len(optim_state.shard.chunks) == 1 and optim_state.shard.pager is None:
        return next((piece(chunk, f) for chunk, f in optim_state.visit(param)), None)
    pieces = []
    for chunk, fragment in optim_state.visit(param):
        value = piece(chunk, fragment)
        if value is None or not value.dim():
            return value
        pieces.append(value.clone())
    return torch.cat(pieces) if pieces else None


def _trained(param: nn.Parameter, what: str) -> tuple[Unit, UnitOptimState]:
    found = _optim_state_of(param)
    if found is None:
        raise UsageError(
            f"{what}: a parameter of shape {tuple(param.shape)} is frozen or has no optimizer, so it "
            "has no master, gradient or state to set. Use GatheredParameters(param, modifier_rank=0)."
        )
    return found


def _write(
    unit: Unit, optim_state: UnitOptimState, param: nn.Parameter, flat: Tensor, *, offset: int = 0
) -> None:
    """Set master and parameter from element ``offset`` on, and give other ranks the new values."""
    with torch.no_grad(), optim_state.shard.loaded():
        for chunk, fragment in optim_state.visit(param, changed=True):
            begin = fragment.begin - offset
            values = flat[begin : begin + fragment.numel]
            chunk.write(fragment, values)
        if optim_state.is_sharded:
            unit.all_gather_updated()


def _write_state(
    optim_state: UnitOptimState, param: nn.Parameter, key: str, flat: Tensor, *, offset: int = 0
) -> None:
    for _, fragment in optim_state.visit(param, changed=True):
        target = _state(optim_state, fragment, key)
        assert target is not None
        begin = fragment.begin - offset
        target.view(-1).copy_(flat[begin : begin + fragment.numel])


def _begin_of(optim_state: UnitOptimState, param: nn.Parameter) -> int:
    """Where this rank's part starts in the parameter; 0 if it has none."""
    return min((f.begin for f in optim_state.shard.fragments if f.param is param), default=0)


def _check_piece(optim_state: UnitOptimState, param: nn.Parameter, value: Tensor, what: str) -> int:
    """The number of elements of this rank's part.

    Raises:
        UsageError: ``value`` is not a tensor of this size.
    """
    numel = sum(f.numel for f in optim_state.shard.fragments if f.param is param)
    if numel:
        flat = value.reshape(-1) if isinstance(value, Tensor) else value
        _check_shape(param, (numel,), flat, what)
    return numel


def _state(optim_state: UnitOptimState, fragment: OwnedFragment, key: str) -> Tensor | None:
    """The fragment's state tensor, if there is one with its number of elements."""
    assert optim_state.optimizer is not None
    value = optim_state.optimizer.state_of(fragment).get(key)
    return value if isinstance(value, Tensor) and value.numel() == fragment.numel else None


def _lacks_state(optim_state: UnitOptimState, param: nn.Parameter, key: str) -> bool:
    """Whether this rank has a fragment of the parameter without state ``key``."""
    found = [_state(optim_state, fragment, key) for _, fragment in optim_state.visit(param)]
    return any(state is None for state in found)


def _no_state(optim_state: UnitOptimState, key: str) -> UsageError:
    assert optim_state.optimizer is not None
    state = optim_state.optimizer.inner.state
    known = sorted(
        {name for key, s in state.items() if isinstance(key, Tensor) for name in flat(s)}
    )
    return UsageError(
        f"there is no optimizer state {key!r} to set; this optimizer has "
        f"{known or 'none before its first step'}."
    )


def _check_shape(param: Tensor, expected: Iterable[int], value: Tensor, what: str) -> None:
    if not isinstance(value, Tensor):
        raise UsageError(f"{what}: the value is a {type(value).__name__}, expected a tensor.")
    if tuple(value.shape) != tuple(expected):
        raise UsageError(
            f"{what}: the value has shape {tuple(value.shape)}, expected {tuple(expected)}."
        )
    if value.is_complex() and not param.is_complex():
        raise UsageError(
            f"{what}: the value is {value.dtype} and the parameter is real, so the imaginary part would "
            "be lost. Pass a real tensor, such as value.real."
        )


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.itemsize >= 4 else torch.float32
