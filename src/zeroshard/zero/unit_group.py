"""Units of one block that are gathered by one launch, and freed together.

Each large matrix of a block is a unit, so that its gradient needs no copy (``engine/unit_plan.py``).
Launches one by one would take longer: NCCL needs some ten microseconds of host time for each, and short
messages do not fill a link.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch

from zeroshard.comm.collectives import ProcessGroupComm, joining
from zeroshard.core.tiers import Tier
from zeroshard.offload.shard_store import MemoryShardStore
from zeroshard.zero.full_params import FullParams
from zeroshard.zero.unit import Unit, UnitState, begin_gathers, end_gathers, free, open_gathers


class UnitGroup:
    """Units that share a communicator, whose shards are in the memory of the device.

    Their stores have nothing to do when an all-gather begins or ends, and do not ask for edits.
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
        in_memory = type(unit.store) is MemoryShardStore and unit.store.tier is Tier.DEVICE
        if unit.group and in_memory and comm is not None:
            members[unit.group, comm].append(unit)
    return [UnitGroup(found, comm) for (_, comm), found in members.items() if len(found) > 1]
