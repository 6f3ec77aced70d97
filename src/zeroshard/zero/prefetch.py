"""Unshards units before their use in forward and backward, and reshards them after it.

The order of wrapped modules is recorded in every forward. From the second one on, the next modules are
gathered ahead of their use, in both directions. Forwards that have no module in common, such as those of
two stages of a pipeline, have each its own order. A wrong guess costs time and never gives a wrong value,
since every use waits for its own units.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from zeroshard.comm.process_group import ProcessGroupComm, joining
from zeroshard.core.tiers import Tier
from zeroshard.offload.shard_store import ShardStore
from zeroshard.zero.full_params import FullParams
from zeroshard.zero.unit import Unit, UnitState, begin_gathers, end_gathers, free, open_gathers


class UnitGroup:
    """Units of one block that are gathered by one launch, and freed together.

    Each large matrix of a block is a unit, so that its gradient needs no copy (``engine/unit_plan.py``).
    Launches one by one would take longer: NCCL needs some ten microseconds of host time for each, and
    short messages do not fill a link. The units share a communicator, and their shards are in the memory
    of the device. Their stores have nothing to do when an all-gather begins or ends, and do not ask for
    edits.
    """

    def __init__(self, units: Sequence[Unit], comm: ProcessGroupComm) -> None:
        self.name = units[0].group
        self.units = tuple(units)
        self._comm = comm
        self._params = FullParams.of_all(unit.full_params for unit in units)

    def unshard(self) -> None:
        """Start the all-gather of all units that are sharded, as one launch.

        Raises as :meth:`Unit.unshard` does; units that were sharded before are so after an error too.
        """
        sharded = [unit for unit in self.units if not unit.is_allocated]
        if not sharded:
            return
        for unit in sharded:
            if unit.state is not UnitState.SHARDED:
                unit.prepare_gather()
        open_gathers(sharded)
        begin_gathers(sharded)
        handle = self._comm.joint_all_gather(
            [unit.full_N for unit in sharded],
            [unit.store.shard_S for unit in sharded],
            name=self.name,
        )
        for unit in sharded:
            unit.handle = handle

    def wait_for_unshard(self) -> None:
        """Finish what :meth:`unshard` started: one wait for the launch.

        Raises as :meth:`Unit.wait_for_unshard` does.
        """
        waiting = [unit for unit in self.units if unit.state is not UnitState.FULL]
        if not waiting:
            return
        handle = waiting[0].handle
        if handle is None or [unit for unit in waiting if unit.handle is not handle]:
            for unit in waiting:  # gathered apart, or not at all
                unit.wait_for_unshard()
            return
        for unit in waiting:
            unit.handle = None
        handle.wait()
        end_gathers(waiting, self._params_of(waiting))

    def reshard(self) -> None:
        """Write back edits by one copy, and free the full parameters of all units that are not pinned."""
        leaving = [unit for unit in self.units if unit.is_allocated and unit.can_reshard()]
        if not leaving:
            return
        params = self._params_of(leaving)
        if params.moved():
            for unit in leaving:
                unit.rebind_storage()
        shards, parts = [u.store.shard_S for u in leaving], [u.own_part_S for u in leaving]
        torch._foreach_copy_(shards, parts)
        free(leaving, params)

    def _params_of(self, units: Sequence[Unit]) -> FullParams:
        """The parameters of some of this group's units, in the group's order."""
        if len(units) == len(self.units):
            return self._params
        return FullParams.of_all(unit.full_params for unit in units)


def groups_of(units: Iterable[Unit]) -> list[UnitGroup]:
    """The groups among these units. The others are gathered one by one."""
    members: dict[tuple[str, ProcessGroupComm], list[Unit]] = defaultdict(list)
    for unit in units:
        comm = joining(unit.comm)
        in_memory = type(unit.store) is ShardStore and unit.store.tier is Tier.DEVICE
        if unit.group and in_memory and comm is not None:
            members[unit.group, comm].append(unit)
    return [UnitGroup(found, comm) for (_, comm), found in members.items() if len(found) > 1]


@dataclass(eq=False)
class WrappedModule:
    """A module and the units that its forward needs: one unit for each dtype and trainability."""

    name: str
    module: nn.Module
    units: tuple[Unit, ...]
    sharded: tuple[Unit, ...] = field(init=False)  # the units that are not resident
    groups: tuple[UnitGroup, ...] = field(init=False)  # of those that are gathered together
    alone: tuple[Unit, ...] = field(init=False)  # those of ``units`` that are in no group
    storage_ids: set[int] = field(init=False)  # of their full parameters
    counts_views: bool = field(init=False)  # see ``saved_views.py``
    is_read_aside: bool = False  # backward reads it, and came through none of its outputs
    numel: int = field(init=False)  # elements to gather: those of ``sharded``
    is_in_new_graph: bool = False  # a graph that a backward recorded reads it: it stays full
    running: list[Any] = field(default_factory=list)  # calls inside forward; None: not recorded
    open_calls: int = 0  # forward calls that backward has not left yet
    trainable_units: int = field(init=False)
    missing_units: int = 0  # trainable units that wait for gradients of the running backward

    def __post_init__(self) -> None:
        self.sharded = tuple(unit for unit in self.units if not unit.resident)
        self.groups = tuple(groups_of(self.sharded))
        joined = {unit.name for group in self.groups for unit in group.units}
        self.alone = tuple(unit for unit in self.units if unit.name not in joined)
        self.storage_ids = {unit.storage_id for unit in self.sharded}
        for unit in self.sharded:
            unit.storage_ids = self.storage_ids
        is_fake = any(isinstance(unit.full_N, FakeTensor) for unit in self.sharded)
        self.counts_views = bool(self.sharded) and not is_fake
        self.numel = sum(unit.layout.full_numel for unit in self.sharded)
        self.trainable_units = sum(unit.trainable for unit in self.units)

    def unshard(self) -> None:
        for unit in self.alone:
            if not unit.is_allocated:
                unit.unshard()
        for group in self.groups:
            group.unshard()

    def prefetch_shards(self) -> None:
        """Start reading shards on disk, before their all-gather: a local read, and the longest part."""
        for unit in self.units:
            unit.store.prefetch_gather()

    def cancel_prefetch(self) -> None:
        """Free shards that were prefetched and not used."""
        for unit in self.units:
            unit.store.cancel_prefetch()

    def wait_for_unshard(self) -> None:
        """Finish what :meth:`unshard` started."""
        for unit in self.alone:
            if unit.state is not UnitState.FULL:
                unit.wait_for_unshard()
        for group in self.groups:
            group.wait_for_unshard()

    def reshard(self) -> None:
        if self.is_in_new_graph:
            return
        for unit in self.alone:
            if unit.is_allocated:
                unit.reshard()
        for group in self.groups:
            group.reshard()

    @property
    def is_read_in_backward(self) -> bool:
        """Whether backward reads the parameters. Backward of an embedding writes only a gradient."""
        return not self._is_plain(nn.Embedding, ["weight"])

    @property
    def is_read_once_in_backward(self) -> bool:
        """Whether backward reads no parameter after it has given all gradients of the module.

        So it is for a linear layer: one node of the graph reads the weight, for the gradients of weight
        and input.
        """
        return self._is_plain(nn.Linear, ["weight", "bias"]) and all(
            param is None or param.requires_grad for param in self.module._parameters.values()
        )

    def _is_plain(self, kind: type[nn.Module], params: list[str]) -> bool:
        """Whether the module computes what ``kind`` does, from its own ``params``, and nothing else.

        A parametrization or a weight norm computes the weight from other parameters.
        """
        module = self.module
        return (
            isinstance(module, kind)
            and type(module).forward is kind.forward
            and type(module).__call__ is kind.__call__
            and "forward" not in vars(module)
            and list(module._parameters) == params
            and not module._modules
            # One forward hook is ours. Backward of what another hook computes may read the parameters.
            and len(module._forward_hooks) == len(module._forward_pre_hooks) == 1
        )

    @property
    def is_sharded(self) -> bool:
        return any(not unit.is_allocated for unit in self.sharded)


class Prefetcher:
    """Unshards wrapped modules before their use, some ahead of it, and reshards them after.

    ``prefetch_numel``: nothing more is gathered ahead of its use when so many elements are
    (``stage3_prefetch_bucket_size``), so the next module is, whatever its size; 0: nothing is.
    ``live_numel``: with so many full elements, without those that stay full from forward to backward,
    only the next module is gathered (0: nothing); and the limit of those that stay
    (``stage3_max_live_parameters``). ``reuse_numel``: a module stays full after its forward if at most
    this many elements are used between it and its backward (``stage3_max_reuse_distance``). None: only
    the last module of forward stays full, because it would else be gathered twice in a row. 0: none.
    """

    def __init__(
        self,
        wrapped_modules: Sequence[WrappedModule],
        *,
        prefetch_numel: int,
        live_numel: int,
        reuse_numel: int | None = None,
    ) -> None:
        self.reuse_numel = reuse_numel
        self._kept: frozenset[int] = frozenset()
        self.wrapped_modules = list(wrapped_modules)
        self.root = self.wrapped_modules[-1]
        self._sharded = [wrapped for wrapped in self.wrapped_modules if wrapped.sharded]
        self.prefetch_numel = prefetch_numel if live_numel else 0
        self.live_numel = live_numel
        self._is_limited = sum(wrapped.numel for wrapped in self.wrapped_modules) > live_numel
        self._reads_disk = any(
            unit.store.tier.only_in_use
            for wrapped in self.wrapped_modules
            for unit in wrapped.sharded
        )
        # By id: the order of use in the last complete forward with this module, and its place in it.
        self._places: dict[int, tuple[list[WrappedModule], int]] = {}
        self._first: list[WrappedModule] = []  # the only order, if there is one
        self._recording: list[WrappedModule] = []
        self._seen: set[int] = set()
        # By id, modules whose shards were prefetched since the last reshard_all.
        self._reads_ahead: dict[int, WrappedModule] = {}

    def begin_forward(self) -> None:
        """Begin the root's forward: reshard what an abandoned step left full, and unshard the root."""
        self._recording, self._seen = [], set()
        self.reshard_all(but=self.root)
        self.unshard(self.root, forward=True)

    def end_forward(self) -> None:
        """End the root's forward: adopt the recorded order as the order to prefetch in."""
        recorded, self._recording = self._recording, []
        known = self._places.get(id(recorded[0]), ([], 0))[0] if recorded else []
        if [id(s) for s in recorded] == [id(s) for s in known]:
            return
        outdated = {id(self._places[id(s)][0]) for s in recorded if id(s) in self._places}
        places = {s: place for s, place in self._places.items() if id(place[0]) not in outdated}
        places.update({id(wrapped): (recorded, at) for at, wrapped in enumerate(recorded)})
        self._places = places
        orders = [*{id(order): order for order, _ in places.values()}.values()]
        self._first = orders[0] if len(orders) == 1 else []
        self._kept = frozenset(id(s) for order in orders for s in self._worth_keeping(order))

    def unshard(self, wrapped: WrappedModule, *, forward: bool, reads: bool = True) -> None:
        """Prepare the wrapped module's use. ``reads``: its parameters will be read, so wait for them.

        ``forward``: the running pass is forward. A recomputed forward belongs to backward.
        """
        if forward and id(wrapped) not in self._seen and wrapped is not self.root:
            self._seen.add(id(wrapped))
            self._recording.append(wrapped)
        if reads:
            wrapped.unshard()
        self._prefetch(wrapped, forward)
        if reads:
            wrapped.wait_for_unshard()

    @property
    def keeps_root(self) -> bool:
        """Whether the root stays full between forward and backward."""
        return self.reuse_numel != 0

    def keeps_for_backward(self, wrapped: WrappedModule) -> bool:
        """Whether the module stays full after its forward, because backward needs it soon."""
        return id(wrapped) in self._kept

    def _worth_keeping(self, order: Sequence[WrappedModule]) -> Iterator[WrappedModule]:
        """Modules that backward needs soon, last of forward first, as far as the memory limit allows.

        The last one is full when backward begins with it, so its memory is no more than without this.
        """
        if self.reuse_numel == 0:
            return
        live, distance = self.root.numel, 0
        for wrapped in reversed(order):
            live += wrapped.numel
            too_many = live > self.live_numel or distance > (self.reuse_numel or 0)
            if distance and too_many:
                return
            yield wrapped
            distance += 2 * wrapped.numel

    def reshard_all(self, but: WrappedModule | None = None) -> None:
        """Reshard every wrapped module except ``but``, and drop prefetched shards that were not used."""
        for wrapped in self._sharded:
            if wrapped is not but:
                wrapped.reshard()
        if self._reads_ahead:
            for wrapped in self._reads_ahead.values():
                wrapped.cancel_prefetch()
            self._reads_ahead.clear()

    def keep_for_new_graph(self, kept: bool) -> None:
        """Keep what is full now until the end of the backward that reads the graph just recorded.

        Forwards may come before it, as for a gradient penalty or an inner step of meta-learning.
        """
        for wrapped in self._sharded:
            wrapped.is_in_new_graph = kept and not wrapped.is_sharded

    def _prefetch(self, wrapped: WrappedModule, forward: bool) -> None:
        first = (self._first, -1) if forward and wrapped is self.root else None
        place = self._places.get(id(wrapped), first)
        if place is None:
            return
        order, at = place
        ahead = range(at + 1, len(order)) if forward else range(at - 1, -1, -1)
        numel_ahead, started = 0, False
        for position in ahead:
            if numel_ahead >= self.prefetch_numel:
                return
            if numel_ahead and self._is_limited and self.live() >= self.live_numel:
                return
            later = order[position]
            numel_ahead += later.numel
            if later.is_sharded and (forward or later.is_read_in_backward):
                if started:
                    later.prefetch_shards()
                    self._reads_ahead[id(later)] = later
                    return
                later.unshard()  # only one ahead: that hides its time and limits the memory
                if not self._reads_disk:
                    return
                started = True

    def live(self) -> int:
        """Elements of sharded units that are full or being gathered, and do not stay until backward."""
        return sum(
            unit.layout.full_numel
            for wrapped in self.wrapped_modules
            if wrapped is not self.root and id(wrapped) not in self._kept
            for unit in wrapped.sharded
            if unit.is_allocated
        )
