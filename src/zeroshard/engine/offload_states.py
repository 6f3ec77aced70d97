"""Moves an engine's state between device and host memory (``offload_states``, ``reload_states``).

Programs that alternate training and generation need the device's memory for both. State that the
configuration keeps in host memory or on disk is not moved.

[Note: who owns offloaded state]
The owners of state are units (parameters), the optimizer (masters, optimizer state) and gradient buffers.
:meth:`StateOffloader.offload` asks them for the flat tensors on the device (``_leave``), copies the bytes
into a :class:`~zeroshard.offload.swapped_storage.HostBuffer`, and releases the device's storage.
The bytes of parameters, masters and optimizer state belong to one
:class:`~zeroshard.offload.swapped_storage.SwappedStorages` per kind; a gradient buffer keeps its own.

* Tensors stay the same objects; their storages are resized (ADR 0002). Without that, the views that
  modules and the inner optimizer hold would point to freed memory after a reload.
* While a kind is offloaded, its use is refused (:meth:`zeroshard.zero.life.Life.check` and the
  owners' own checks). Without that, a read of a released storage would fail with an unrelated error, and
  a write would be lost.
* ``Life.offloaded`` is extended before the first byte moves, so that :meth:`StateOffloader.reload` can
  undo an offload that failed in the middle.
* Every rank must move the same kinds at the same point of the program: the next collective needs the
  parameters of all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zeroshard.core.tiers import Tier
from zeroshard.device.choice import ops_of
from zeroshard.device.ops import DeviceOps
from zeroshard.engine.build_runtime import ZeroRuntime
from zeroshard.errors import UsageError
from zeroshard.offload.swapped_storage import HostBuffer, SwappedStorages, distinct
from zeroshard.zero.hooks import StepHooks, in_backward
from zeroshard.zero.life import KINDS, Life

logger = logging.getLogger("zeroshard")

OPTIM_STATES, HP_PARAMS, LP_PARAMS, LP_GRADS = KINDS

NAMES = (*KINDS, "contiguous_grad_buffer")
"""DeepSpeed's names: optimizer state, masters, parameters (with their own masters, in fp32), gradients
that wait for ``step()``. The last names a buffer that does not exist here."""

_MOVING = frozenset(KINDS)
_CATEGORIES = {OPTIM_STATES: "optimizer", HP_PARAMS: "master"}
HELD = (
    "offload_states() leaves the parameters of %d units (%d bytes) where they are: the program holds "
    "tensors that share their memory (param.data, state_dict(), the graph of a loss). Delete these first."
)
_OWNER = "host memory for offloaded states"


@dataclass(eq=False)
class StateOffloader:
    """Moves one engine's state between device and host memory.

    It communicates nothing, but every rank must call it: the next collective needs all parameters.
    """

    _runtime: ZeroRuntime
    _hooks: StepHooks
    _device: torch.device
    _swapped: dict[str, SwappedStorages] = field(default_factory=dict)
    _rooms: list[HostBuffer] = field(default_factory=list)
    _spare: HostBuffer | None = None  # page-locked memory, kept for the next offload
    _guards: list[Any] = field(default_factory=list)

    @property
    def _life(self) -> Life:
        return self._runtime.life

    @property
    def _ops(self) -> DeviceOps:
        return ops_of(self._device)

    # ------------------------------------------------------------------ there and back

    def offload(self, include: Any, device: Any, *, pin_memory: bool, non_blocking: bool) -> None:
        """See :meth:`zeroshard.engine.engine.Engine.offload_states`."""
        kinds = (kinds_of(include) & _MOVING) - self._life.offloaded
        if _target(device) == "none":
            logger.warning('offload_states(device="none") moves nothing')
            return
        self._check_idle()
        if not kinds:
            return
        # Before anything moves: reload() then also brings back what a failed offload has moved.
        self._life.offload(kinds)
        leaving = {kind: distinct(tensors) for kind, tensors in self._leave(kinds)}
        room = self._room([here for parts in leaving.values() for here in parts], pin_memory)
        for kind, parts in leaving.items():
            if kind == LP_GRADS:
                for buffer in self._runtime.reducer.buffers:
                    buffer.move(Tier.HOST, room.copy_in)
                continue
            swapped = self._swapped[kind] = SwappedStorages()
            for here in parts:
                swapped.swap_out(here, room)
        self._guard_optimizer()
        del leaving, parts
        if not non_blocking:
            self._ops.synchronize()
            self._ops.empty_cache()

    def reload(self, *, non_blocking: bool = False) -> None:
        """See :meth:`zeroshard.engine.engine.Engine.reload_states`."""
        if not self._life.offloaded:
            return
        for swapped in self._swapped.values():
            swapped.swap_in()
        for buffer in self._runtime.reducer.buffers:
            buffer.move(Tier.DEVICE, self._to_device)
        for unit in self._runtime.units:
            unit.reload()
        if self._runtime.optimizer is not None:
            self._runtime.optimizer.reload()
        self._arrived()
        if not non_blocking:
            self._ops.synchronize()

    def close(self) -> None:
        """Bring parameters back, so that whole ones stay readable. Drop the other state."""
        if LP_PARAMS in self._swapped:
            self._swapped[LP_PARAMS].swap_in()
        for unit in self._runtime.units:
            unit.reload()
        self._arrived()
        self.forget_spare()

    def forget_spare(self) -> None:
        """Free the page-locked memory that is kept for the next offload."""
        spare, self._spare = self._spare, None
        if spare is not None:
            self._ops.synchronize()
            spare.close()
            self._runtime.ledger.hold("scratch", _OWNER, 0, Tier.HOST)

    # ------------------------------------------------------------------ how

    def _check_idle(self) -> None:
        if in_backward() or self._hooks.forward_depth:
            raise UsageError(
                "engine.offload_states() inside forward or backward: call it outside of them."
            )
        self._hooks.recover()
        for unit in self._runtime.units:
            if unit.pin_count:
                raise UsageError(
                    f"engine.offload_states() while unit {unit.name!r} is gathered by "
                    "GatheredParameters: leave the context first."
                )

    def _leave(self, kinds: Iterable[str]) -> Iterator[tuple[str, list[Tensor]]]:
        """Tell the owners that state is offloaded. Yields each kind, and its tensors on the device."""
        runtime = self._runtime
        if LP_PARAMS in kinds:
            yield LP_PARAMS, [flat for unit in runtime.units for flat in unit.offload()]
            if held := [unit for unit in runtime.units if unit.is_aliased]:
                logger.warning(HELD, len(held), sum(unit.full_nbytes for unit in held))
        for kind, category in _CATEGORIES.items():
            if kind in kinds and runtime.optimizer is not None:
                yield kind, runtime.optimizer.offload(category)
        if LP_GRADS in kinds:
            yield LP_GRADS, [held for b in runtime.reducer.buffers for held in b.held()]

    def _room(self, leaving: list[Tensor], pin: bool) -> HostBuffer:
        spare = self._spare
        if spare is not None and spare.clear_for(leaving):
            self._spare = None
            self._runtime.ledger.hold("scratch", _OWNER, 0, Tier.HOST)
            room = spare
        else:
            self.forget_spare()
            room = HostBuffer(leaving, pin=pin and self._ops.is_async)
        self._rooms.append(room)
        return room

    def _to_device(self, there: Tensor) -> Tensor:
        here = torch.empty(there.numel(), dtype=torch.uint8, device=self._device)
        return here.copy_(there, non_blocking=True)

    def _arrived(self) -> None:
        """Note that all state is back. Keep the largest pinned buffer for the next offload.

        Locking memory takes longer than copying it.
        """
        self._life.reload()
        self._swapped = {}
        for guard in self._guards:
            guard.remove()
        self._guards = []
        rooms, self._rooms = self._rooms, []
        pinned = sorted((r for r in rooms if r.is_pinned), key=lambda room: room.nbytes)
        if pinned:
            self.forget_spare()
            *others, self._spare = pinned
            if others:
                self._ops.synchronize()
            for room in others:
                room.close()
            self._runtime.ledger.hold("scratch", _OWNER, self._spare.nbytes, Tier.HOST)

    def _guard_optimizer(self) -> None:
        """Refuse to save or replace the optimizer's state while its storages are released."""
        sharded = self._runtime.optimizer
        if self._guards or sharded is None:
            return
        inner = sharded.inner
        self._guards = [
            inner.register_state_dict_pre_hook(self._refusal("optimizer.state_dict()")),
            inner.register_load_state_dict_pre_hook(self._refusal("optimizer.load_state_dict()")),
        ]

    def _refusal(self, call: str) -> Callable[..., None]:
        return lambda *_: self._life.check(call, OPTIM_STATES, HP_PARAMS, LP_PARAMS)


def kinds_of(include: Any) -> frozenset[str]:
    """The kinds in ``include``: a name or enum member, or several; None is all.

    >>> sorted(kinds_of(["lp_grads", "hp_params"]))
    ['hp_params', 'lp_grads']
    """
    if include is None:
        return frozenset(NAMES)
    given = [include] if isinstance(include, str) or hasattr(include, "value") else list(include)
    names = [getattr(item, "value", item) for item in given]
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise UsageError(
            f"offload_states(include=...): {unknown[0]!r} is not a kind of state. Use "
            f"{', '.join(NAMES)}."
        )
    return frozenset(names)


def _target(device: Any) -> str:
    name = str(getattr(device, "value", device))
    if name not in ("cpu", "none"):
        raise UsageError(
            f"offload_states(device={name!r}): states can be moved to host memory only, with "
            "device='cpu'. To store optimizer state on disk for the whole run, use "
            '"offload_optimizer": {"device": "nvme"}.'
        )
    return name


def is_return(device: torch.device, home: torch.device) -> bool:
    """Whether ``engine.to(device)`` returns to the engine's device ``home``. False: it offloads.

    On CPU ranks both are the same place, and the answer is True.

    Raises:
        UsageError: another device.

    >>> is_return(torch.device("cuda"), torch.device("cuda", 0))
    True
    >>> is_return(torch.device("cpu"), torch.device("cuda", 0))
    False
    """
    if device.type == home.type and device.index in (None, home.index):
        return True
    if device.type == "cpu":
        return False
    raise UsageError(
        f"engine.to({str(device)!r}): this engine was built for {home}. It can move to 'cpu' and "
        "back; for another device, build another engine."
    )


def asked_of_to(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.device | None, torch.dtype | None]:
    """The device and the dtype that ``engine.to(...)`` was called with; None for one that is missing.

    Raises:
        UsageError: a memory format, which is fixed when the engine is built.
    """
    device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    if memory_format is not None:
        raise UsageError(
            f"engine.to({memory_format}): parameters lie in flat buffers, whose memory format is "
            "fixed when the engine is built. Change the model before you build the engine, or "
            "change the inputs."
        )
    return device, dtype


def check_keeps(
    change: Callable[[Tensor], Tensor], params: Iterable[Tensor], device: torch.device
) -> None:
    """Check that ``change``, from ``engine.half()`` and the like, leaves every parameter as it is.

    Raises:
        UsageError: it would change a dtype or the device.
    """
    for dtype in {param.dtype for param in params}:
        changed = change(torch.empty(0, dtype=dtype, device=device))
        if changed.dtype != dtype:
            raise UsageError(
                f"an engine whose parameters are {dtype} cannot be cast to {changed.dtype}: "
                "masters, optimizer state and the shards of other ranks would keep their dtypes. "
                'Dtypes are fixed when the engine is built: write "bf16": {"enabled": true} or '
                '"fp16" in the configuration, or cast the model before you build the engine.'
            )
        if changed.device != device:
            raise UsageError(
                f"this engine was built for {device} and cannot move to {changed.device}. It can "
                "move to 'cpu' and back (engine.to(\"cpu\")); for another device, build another "
                "engine."
            )
