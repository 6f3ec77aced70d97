"""What of a rank's state rests outside the device, and which stores serve it?

DeepSpeed's keys ``offload_optimizer`` and ``offload_param`` become a plan (pure, equal to what
:func:`zeroshard.core.nbytes.state_nbytes` counts) and then, once memory is made, the stores behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from zeroshard.config import Config
from zeroshard.core.layout import UnitLayout
from zeroshard.core.ledger import Ledger
from zeroshard.core.stages import STAGES
from zeroshard.core.tiers import Placement, Span, Tier, place
from zeroshard.store.bus import Bus, CudaBus
from zeroshard.store.disk import SwapFile
from zeroshard.store.heap import return_large_blocks
from zeroshard.store.pager import Pager, Timeline
from zeroshard.store.pinned import HostArena, slot_nbytes
from zeroshard.store.shards import InMemory, OnDisk, Rest, Saves
from zeroshard.zero.crossing import HostSide

_TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.DISK}


@dataclass(frozen=True)
class Resting:
    """Where state rests on this rank: by unit, spans of what it updates, and the tier of its shard."""

    spans: Mapping[str, Sequence[Span]] = field(default_factory=dict)
    params: Mapping[str, Tier] = field(default_factory=dict)

    @property
    def is_away(self) -> bool:
        """Does anything rest outside the device?"""
        return bool(self.spans or self.params)

    def spans_of(self, unit: str) -> Sequence[Span]:
        """Empty: all on the device."""
        return self.spans.get(unit, ())

    def tier_of(self, unit: str) -> Tier:
        """Of the unit's parameters."""
        return self.params.get(unit, Tier.DEVICE)


def optimizer_placement(config: Config) -> Placement:
    """DeepSpeed key ``zero_optimization.offload_optimizer``."""
    section = config.zero_optimization.offload_optimizer
    if section is None or not STAGES[config.zero_optimization.stage].shards_optimizer:
        return Placement()
    return Placement(_TIERS[section.device], section.ratio, section.max_in_cpu)


def param_placement(config: Config) -> Placement:
    """DeepSpeed key ``zero_optimization.offload_param``; it acts at stage 3 only."""
    section = config.zero_optimization.offload_param
    if section is None or not STAGES[config.zero_optimization.stage].shards_params:
        return Placement()
    return Placement(_TIERS[section.device], host_numel=section.max_in_cpu)


def plan_resting(
    layouts: Mapping[str, UnitLayout],
    trained: Iterable[str],
    config: Config,
    *,
    rank: int,
    whole: bool,
) -> Resting:
    """``layouts``: units in forward order. ``whole``: the optimizer's matrices are never cut."""
    optimizer, params = optimizer_placement(config), param_placement(config)
    spans: dict[str, Sequence[Span]] = {}
    if optimizer.is_away:
        chosen = {name: layouts[name] for name in trained}
        numels = [layout.shard_numel for layout in chosen.values()]
        cuts = [_starts(layout, rank) for layout in chosen.values()] if whole else None
        spans = dict(zip(chosen, place(numels, optimizer, cuts=cuts), strict=True))
    tiers = {}
    if params.is_away:
        numels = [layout.shard_numel for layout in layouts.values()]
        placed = place(numels, params, cuts=[() for _ in numels])
        tiers = {name: parts[0].tier for name, parts in zip(layouts, placed, strict=True) if parts}
    return Resting(spans, tiers)


def _starts(layout: UnitLayout, rank: int) -> list[int]:
    """Where parameters begin in the rank's shard."""
    low, high = layout.shard_range(rank)
    return [slot.start - low for slot in layout.slots if low < slot.start < high]


def make_bus(device: torch.device, *, copies: bool) -> Bus | None:
    """The way between ``device`` and host memory; None where that is one memory, unless ``copies``."""
    if device.type == "cuda":
        return CudaBus(device)
    return Bus() if copies else None


class Stores:
    """The files of one engine on this rank, one for each directory, and what is built on them.

    Under fake tensors nothing is opened: what would rest on disk stays fake.
    """

    def __init__(
        self, config: Config, ledger: Ledger, resting: Resting, device: torch.device
    ) -> None:
        zero = config.zero_optimization
        self._ledger = ledger
        self._saves = Saves()
        self._files: dict[str, SwapFile] = {}
        self._pager: Pager | None = None
        self._optimizer_path = zero.offload_optimizer.nvme_path if zero.offload_optimizer else None
        self._param_path = zero.offload_param.nvme_path if zero.offload_param else None
        self._resting = resting
        self._is_fake = isinstance(torch.empty(0), FakeTensor)
        self._device = device
        self._pins = zero.offload_optimizer is not None and zero.offload_optimizer.pin_memory
        self.is_delayed = (
            zero.offload_optimizer is not None and zero.offload_optimizer.delayed_update
        )
        self._arena: HostArena | None = None
        self.bus: Bus | None = None
        if device.type == "cpu" and Tier.DISK in resting.params.values():
            return_large_blocks()  # shards come and go between activations

    def _file(self, path: str | None) -> SwapFile:
        assert path is not None, "the configuration is resolved"
        if path not in self._files:
            self._files[path] = SwapFile(path)
        return self._files[path]

    def rest_of(self, unit: str) -> Callable[[Tensor], Rest]:
        """How the unit's shard becomes one that rests where the plan says."""
        tier = self._resting.tier_of(unit)
        if tier is not Tier.DISK or self._is_fake:
            return partial(InMemory, tier=tier)

        def on_disk(shard_S: Tensor) -> Rest:
            rest = OnDisk(
                shard_S, self._file(self._param_path), self._saves, ledger=self._ledger, name=unit
            )
            rest.save()
            rest.finish()  # construction holds one shard at a time
            return rest

        return on_disk

    def pager(self, page_nbytes: Iterable[int]) -> Pager | None:
        """A ring for pages of these sizes; None if there are none."""
        largest = max(page_nbytes, default=0)
        if not largest or self._is_fake:
            return None
        self._pager = Pager(self._file(self._optimizer_path), largest)
        return self._pager

    def host_side(
        self, sizes: Iterable[tuple[str, int, torch.dtype]], grad_itemsize: int
    ) -> HostSide | None:
        """What crosses the bus, and the memory for it; None where the device's memory is the host's.

        ``sizes``: everything that will be taken, by ledger category. Of CPU ranks only the delayed update needs it: what
        forward reads must not change meanwhile.
        """
        wanted = list(sizes)
        if not wanted or self._is_fake:
            return None
        self.bus = make_bus(self._device, copies=self.is_delayed)
        if self.bus is None:
            return None
        self._arena = HostArena(
            sum(slot_nbytes(numel, dtype) for _, numel, dtype in wanted), self._pins
        )
        crossing_nbytes = sum(
            slot_nbytes(numel, dtype) for what, numel, dtype in wanted if what == "scratch"
        )
        self._ledger.hold("scratch", "buffers of the bus", crossing_nbytes, Tier.HOST)
        return HostSide(self.bus, self._arena.take, grad_itemsize)

    @property
    def timeline(self) -> Timeline | None:
        """What the disk did while the last update ran; None if no optimizer state rests on it."""
        return None if self._pager is None else self._pager.timeline

    def close(self) -> None:
        """Give memory and disk back."""
        if self._arena is not None:
            self._arena.close()
        if self._pager is not None:
            self._pager.close()
        for file in self._files.values():
            file.close()
