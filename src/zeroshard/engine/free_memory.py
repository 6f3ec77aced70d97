"""Compares what a run plans to hold with free memory, before it allocates anything.

What surely cannot fit is an error on every rank, with changes of the configuration that free memory.
State in host memory and on disks, if the configuration moves some there, is checked by
:mod:`zeroshard.offload.capacity_check`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from zeroshard.comm.collectives import Comm
from zeroshard.comm.dtensors import local_of
from zeroshard.comm.host import host_number
from zeroshard.core.layout import UnitLayout
from zeroshard.core.ledger import Key
from zeroshard.core.sizes import size_text
from zeroshard.core.stages import Stage
from zeroshard.core.tiers import Tier
from zeroshard.device.choice import ops_of, read
from zeroshard.engine.remedies import Run, remedies
from zeroshard.errors import HostMemoryError
from zeroshard.memory.host_limits import host_limits
from zeroshard.precision.policy import DtypeRow
from zeroshard.zero.sharded_parameter import owner_of

TIGHT = 0.8
"""A larger part of the free memory for state alone leaves little for activations."""

_UNKNOWN_NBYTES = 1 << 52  # exact in float64


@dataclass(frozen=True, slots=True)
class Need:
    """One rank: its number, its host (a number), bytes that it will allocate, bytes that are free.

    ``held_nbytes``: those that it has already, of what it will have.
    """

    rank: int
    host: int
    new_nbytes: int
    free_nbytes: int
    held_nbytes: int = 0


def passing_nbytes(
    layout: UnitLayout, row: DtypeRow, stage: Stage, *, ranks: int, has_scratch: bool
) -> int:
    """Bytes on the device beside all states when the last unit of a backward is reduced, at least.

    That is the first unit of forward. The gradients of all others are complete then. It has its whole
    parameters where they are sharded, its whole gradient where gradients are, and a transport with memory
    of its own (``has_scratch``) a part of it that arrives or is read by others.
    """
    if ranks == 1:
        return 0
    nbytes = layout.full_numel * row.reduce.itemsize if stage.shards_grads else 0
    nbytes += layout.full_numel * row.param.itemsize if stage.shards_params else 0
    return nbytes + (layout.shard_numel * row.reduce.itemsize if has_scratch else 0)


def new_nbytes(
    planned: Mapping[Key, int], model: nn.Module, device: torch.device, passing: int = 0
) -> int:
    """Bytes on the device that the run needs beyond the model's own parameters there, at least.

    ``planned``: between steps; ``passing``: beside that, at one moment of a step.
    A parameter that is sharded already counts as whole: its shard is in memory, and not more than that.
    """
    kept: dict[int, int] = {}  # by storage, or by sharded parameter
    with torch._C.DisableTorchFunctionSubclass():
        for param in model.parameters():
            local = local_of(param)
            if local.device.type != device.type:
                continue
            if owner_of(param) is not None:
                kept[id(param)] = local.nbytes
            else:
                storage = local.untyped_storage()
                kept[storage._cdata] = storage.nbytes()
    total = sum(nbytes for (_, tier), nbytes in planned.items() if tier is Tier.DEVICE)
    return max(0, total + passing - sum(kept.values()))


@dataclass(frozen=True, slots=True)
class Shortage:
    """Ranks that share memory which surely does not suffice: bytes that they need, and that are free."""

    ranks: Sequence[Need]
    wanted_nbytes: int
    free_nbytes: int
    shared: bool

    @property
    def missing_nbytes(self) -> int:
        """Of each rank."""
        return -((self.free_nbytes - self.wanted_nbytes) // len(self.ranks))

    @property
    def room_nbytes(self) -> int:
        """What each rank can have at most, if all have as much."""
        return self.free_nbytes // len(self.ranks) + min(each.held_nbytes for each in self.ranks)

    @property
    def who(self) -> str:
        """The ranks in words."""
        if len(self.ranks) == 1:
            return f"rank {self.ranks[0].rank}"
        return f"{len(self.ranks)} ranks of one host (from rank {self.ranks[0].rank})"


def check_memory(
    wanted_nbytes: int,
    held_nbytes: int,
    comm: Comm,
    rank: int,
    device: torch.device,
    run: Run,
    search: Callable[[int], Sequence[str]],
) -> list[str]:
    """Refuse a run whose state does not fit. Collective.

    ``held_nbytes``: what the rank has of its state already. ``search``: lines that say how to look for a
    configuration that fits into so many bytes; the same on all ranks.
    Returns lines: nothing, or that the memory is tight.

    Raises:
        HostMemoryError: on all ranks, if one of the devices or hosts has too little memory.
    """
    on_cpu = device.type == "cpu"
    free = host_limits().free_nbytes if on_cpu else ops_of(device).allocatable_nbytes()
    room = _UNKNOWN_NBYTES if free is None else free
    row = [rank, host_number(), wanted_nbytes, room, held_nbytes]
    row_K = torch.tensor(row, dtype=torch.float64).to(device)
    rows = comm.all_gather_small(row_K, name="free memory")
    if isinstance(rows, FakeTensor):
        return []
    needs = [Need(*map(int, numbers)) for numbers in read(rows)]
    short, tight = verdict(needs, shared=on_cpu)
    if short is None:
        return tight
    raise HostMemoryError("\n".join([*_refusal(short, run), *search(short.room_nbytes)]))


def verdict(needs: Sequence[Need], *, shared: bool) -> tuple[Shortage | None, list[str]]:
    """The first ranks whose memory surely does not suffice, and a line if memory is tight.

    ``shared``: the ranks of a host share its memory.
    """
    places: dict[tuple[int, int], list[Need]] = defaultdict(list)
    for need in needs:
        places[need.host, 0 if shared else need.rank].append(need)
    tight: list[str] = []
    for ranks in places.values():
        wanted = sum(need.new_nbytes for need in ranks)
        found = Shortage(ranks, wanted, min(need.free_nbytes for need in ranks), shared)
        if wanted > found.free_nbytes:
            return found, []
        if wanted > TIGHT * found.free_nbytes:
            tight.append(
                f"state will take {size_text(wanted)} of the {size_text(found.free_nbytes)} that are "
                f"free for {found.who}; gathered parameters and activations come on top, and probably do "
                "not fit. `zeroshard plan` tells what the run needs."
            )
    return None, tight[:1]


def _refusal(short: Shortage, run: Run) -> Iterator[str]:
    memory = "host memory" if short.shared else "device memory"
    yield (
        "This run does not fit: parameters, gradients, optimizer state and their temporary copies "
        f"need another {size_text(short.wanted_nbytes)} of {memory} on {short.who}, and "
        f"{size_text(short.free_nbytes)} are free. Nothing was allocated."
    )
    found = remedies(run, short.missing_nbytes)
    if not found:
        yield "More ranks or hosts, or a smaller model, would help; a higher stage would not."
        return
    yield "Each of these frees memory, by arithmetic:"
    if found[0].freed_nbytes < short.missing_nbytes:
        yield "  (none of them alone is enough)"
    for number, each in enumerate(found, start=1):
        yield f"  {number}. {each.text}: about {size_text(each.freed_nbytes)} per rank"
        yield f"     {each.line}"
