"""The exchange of a step on a mesh: each element counts once, and copies in a tensor group are compared.

Without a mesh each element has one owner. On a mesh a parameter that the tensor dimension does not cut
has one owner in each tensor coordinate; the owner with coordinate 0 counts it. Of tensor coordinates that
hold the same key/value heads the first counts them. Every element has an owner
in each replica; the owner in replica 0 counts it. Weights are 0 or 1, so the norm does not depend on
whether the copies are equal.

A unit that is tied over pipeline ranks is sharded over all their ranks, so each of its elements has one
owner, replicas included; so are experts if each rank of a replica has other ones. Its holders are more
ranks than the other units' holders, so they exchange its flags apart.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from zeroshard.core.mesh import HOLDERS, Mesh
from zeroshard.core.texts import rank_ranges
from zeroshard.device.choice import on_host, ops_of, read
from zeroshard.device.ops import Event
from zeroshard.errors import RankDivergence, UsageError
from zeroshard.zero.clip import (
    BITS,
    NO_LOSS,
    Divergence,
    Exchanged,
    RankLoss,
    local_sum_of_squares,
    on_device,
)

if TYPE_CHECKING:
    from zeroshard.comm.collectives import Comm
    from zeroshard.zero.gradients import Norms

_MULTIPLIER = 0x9E3779B97F4A7C15


class ModuleOrder:
    """The order in which a rank runs its wrapped modules, as a running hash over their forwards.

    The collectives inside modules that a tensor group shares are not ZeroShard's. If ranks of the group
    run modules in different orders, such a collective adds parts of unrelated layers: training goes on
    with wrong numbers and without an error. So each rank sends the hash with the norm.
    """

    def __init__(self) -> None:
        self._hash = 0

    @property
    def hash48(self) -> float:
        """The hash as a whole number that fp64 holds exactly."""
        return float(self._hash)

    def note(self, place: int) -> None:
        """Note a forward of the module at ``place`` of a list that all ranks share, from 1."""
        self._hash = (self._hash * _MULTIPLIER ^ place) % 2**BITS


@dataclass(frozen=True, eq=False)
class ExpertParts:
    """What this rank has of experts that some ranks share.

    ``comm`` connects the ranks that shard them. ``members``: the ranks that hold the same, those of all
    replicas. ``flags``: for each flag of this rank, whether it is that of a parameter that only these
    have.
    """

    comm: Comm
    members: Tensor
    flags: Sequence[bool]


@dataclass(frozen=True, eq=False)
class OtherHolders:
    """What this rank has of units with other holders: tied over pipeline ranks, and shared experts.

    ``hops``: for each group of such ranks in the model, the communicator and its ranks; None if this rank
    is not one of them. ``flags``: for each tied parameter of the model, the index of its flag among this
    rank's flags; None if it is not here or not trained. Both have the same length on every rank.
    ``positions``: of the parameters here that replicas shard together, in the model: tied ones, and some
    experts. ``experts``: equally many on every rank.
    """

    hops: Sequence[tuple[Comm, Tensor] | None] = ()
    flags: Sequence[int | None] = ()
    positions: frozenset[int] = frozenset()
    experts: Sequence[ExpertParts] = ()


#: After the sum of squares, the world's history, the order of modules, the sum over copies, and the loss
#: and its weight.
_FIRST_HOP = 6


class MeshExchange:
    """The exchange on a mesh, over all ranks.

    Each rank sends ``[sum of squares that it counts, hash of the world's history, hash of the order of
    modules, sum over copies, loss, its weight, hash of each hop's history, flags of tied parameters...,
    flags...]``, fp64.
    Copies are the gradients of parameters that every rank of a tensor group holds. The ranks compute them
    from the same numbers, so the sums must agree. They do not if the ranks train on different samples.

    ``holders`` reduces gradients. It has one hop; with replicas or nodes it has two. The ranks of a hop
    compare its history. ``others``: units with other holders.

    ``copied``: by position in the model, the names of parameters that the tensor dimension does not cut.
    ``uncounted``: positions of parameters that another rank of the tensor group counts.
    ``num_words``: packed flags of this rank. ``precision``: of the gradients that this rank reduces (0 if
    it trains none); sums of copies may differ by the square root of the coarsest one, since kernels may
    add in an order that varies. Collective: the ranks agree on it and on the length of the message.
    """

    def __init__(
        self,
        world: Comm,
        holders: Comm,
        mesh: Mesh,
        *,
        rank: int,
        copied: Mapping[int, str],
        uncounted: Collection[int],
        num_words: int,
        precision: float,
        device: torch.device,
        divergence: Divergence,
        order: ModuleOrder,
        others: OtherHolders = OtherHolders(),
    ) -> None:
        self._order = order
        self._others = others
        # [T, K]: what the flag of a tied parameter adds to the packed flags of this rank
        self._flag_words = torch.zeros(len(others.flags), num_words, dtype=torch.float64)
        for row, index in enumerate(others.flags):
            if index is not None:
                self._flag_words[row, index // BITS] = 2.0 ** (index % BITS)
        self._flag_words = self._flag_words.to(device)
        self._world, self._mesh = world, mesh
        self._copied, self._uncounted = copied, frozenset(uncounted)
        self._divergence = divergence
        self._members = torch.tensor(mesh.group(rank, HOLDERS), device=device)
        at = mesh.coordinate(rank)
        self._counts = at["data_replicate"] == 0
        hops: Sequence[Comm] = getattr(holders, "hops", (holders,))
        of_experts = [
            hop for part in others.experts for hop in getattr(part.comm, "hops", (part.comm,))
        ]
        shards: list[tuple[Comm, Tensor] | None] = [
            (hop, torch.tensor(getattr(hop, "ranks", (rank,)), device=device))
            for hop in (*hops, *of_experts)
        ]
        self._hops = [*shards, *others.hops]
        # on an accelerator: the sums of the step before on the host, and the event of their copy
        self._before: tuple[Tensor, Event] | None = None
        own = [float(num_words), float(len(copied)), precision]
        found = world.all_gather_small(
            torch.tensor(own, dtype=torch.float64, device=device), name="norm"
        )
        words, copies, coarsest = own if isinstance(found, FakeTensor) else read(found.amax(0))
        self._num_words, self._num_copied = int(words), int(copies)
        self._tolerance = coarsest**0.5

    def __call__(
        self,
        norms: Norms,
        words: Sequence[float],
        device: torch.device,
        lost_edit: Tensor | None = None,
        loss: RankLoss = NO_LOSS,
    ) -> Exchanged:
        """See :class:`~.clip.NormExchange`.

        Raises:
            UsageError: the copies of a parameter in a tensor group got different gradients.
        """
        world = self._world
        copies = [norm for at, norm in norms if at in self._copied]
        counted = [norm for at, norm in norms if self._is_counted(at)]
        padding = [0.0] * (self._num_words - len(words))
        hashes = [0.0 if hop is None else hop[0].recorder.hash32 for hop in self._hops]
        flags = [self._flag(words, index) for index in self._others.flags]
        host = on_device(
            [
                world.recorder.hash32, self._order.hash48, loss.weight,
                *hashes, *flags, *words, *padding,
            ],
            device,
        )  # fmt: skip
        of_copies = local_sum_of_squares(copies, device)
        row = torch.cat(
            [
                local_sum_of_squares(counted, device).view(1),
                host[:2],
                of_copies.view(1),
                loss.on(device),
                host[2:],
                *(() if lost_edit is None else (lost_edit,)),
            ]
        )
        rows = world.all_gather_small(row, name="norm")
        if odd := world.recorder.diverging(rows[:, 1]):
            raise self._divergence(world, odd)
        self._check_hops(rows)
        if self._mesh.tensor > 1 and not isinstance(rows, FakeTensor):
            self._check_copies(rows[:, 2:4], norms)
        first = _FIRST_HOP + len(hashes)
        words_WK = rows[self._members][:, first + len(flags) :]
        apart = [(rows[e.members][:, first + len(flags) :], e.flags) for e in self._others.experts]
        if flags:
            anywhere_T = rows[:, first : first + len(flags)].amax(0)
            shared_K = torch.zeros_like(words_WK[0])  # of which lost_edit may be the last
            shared_K[: len(words)] = anywhere_T @ self._flag_words[:, : len(words)]
            words_WK = torch.cat([words_WK, shared_K.view(1, -1)])
        return Exchanged(
            rows[:, 0].sum(),
            words_WK,
            None if lost_edit is None else rows[:, -1].amax(),
            rows[:, 4:6].sum(0),
            apart,
        )

    def _check_hops(self, rows: Tensor) -> None:
        """Compare the histories of the ranks of each smaller group."""
        for at, compared in enumerate(self._hops, _FIRST_HOP):
            if compared is None:
                continue
            hop, members = compared
            if odd := hop.recorder.diverging(rows[members][:, at]):
                raise self._divergence(hop, odd)

    def _is_counted(self, position: int) -> bool:
        """Whether this rank counts its part of a parameter, which another one may have as well."""
        in_replica = self._counts or position in self._others.positions
        return in_replica and position not in self._uncounted

    def _flag(self, words: Sequence[float], index: int | None) -> float:
        return 0.0 if index is None else float(int(words[index // BITS]) >> (index % BITS) & 1)

    def _check_copies(self, seen_W2: Tensor, norms: Norms) -> None:
        """Compare inside each tensor group. On an accelerator, what was sent in the step before."""
        ops = ops_of(seen_W2.device)
        if ops.is_async:
            before = self._before
            copy = torch.empty(seen_W2.shape, dtype=seen_W2.dtype, pin_memory=True)
            copy.copy_(seen_W2, non_blocking=True)
            self._before = copy, ops.event()
            self._before[1].record()
            if before is None:
                return
            seen_W2, copied = before
            copied.synchronize()  # not query(): every rank must come to the same conclusion
            ops.raise_if_aborted()
        orders, sums = seen_W2.reshape(-1, self._mesh.tensor, 2).unbind(-1)
        odd = (orders != orders[:, :1]).any(-1).nonzero().flatten().tolist()
        if odd:
            first = odd[0] * self._mesh.tensor
            raise RankDivergence(
                f"RankDivergence: {rank_ranges(range(first, first + self._mesh.tensor))}, which are one "
                "tensor group, ran modules in different orders since the last step. Each layer is spread "
                "over these ranks, so parts of different layers were added. Run the same modules in the "
                "same order on every rank of a tensor group, and draw random choices of layers from "
                "generators with equal seeds."
            )
        if bool(self._differ(sums).any()):
            raise UsageError(self._text(norms, seen_W2.device))

    def _differ(self, groups: Tensor) -> Tensor:
        """Whether the numbers of each row differ by more than rounding. Not finite ones do not count."""
        low, high = groups.amin(-1), groups.amax(-1)
        differ: Tensor = (high - low) > self._tolerance * high
        return differ

    def _text(self, norms: Norms, device: torch.device) -> str:
        """Names the first parameter whose copies differ. Collective: every rank has found them."""
        measured = {at: norm for at, norm in norms if at in self._copied}
        own = [float(measured.get(at, 0.0)) for at in sorted(self._copied)]
        own += [0.0] * (self._num_copied - len(own))
        sent = torch.tensor(own, dtype=torch.float64, device=device)
        tensor = self._mesh.tensor
        rows = on_host(self._world.all_gather_small(sent, name="norm of copies"))
        places = self._differ(rows.view(-1, tensor, len(own)).transpose(1, 2)).nonzero()
        names = [self._copied[at] for at in sorted(self._copied)]
        where = "parameters that the tensor group holds whole"
        seen = ""
        if len(places):
            group, index = places[0].tolist()
            values = rows.view(-1, tensor, len(own))[group, :, index].tolist()
            first = group * tensor
            if self._mesh.pipeline == 1:  # else it may be a parameter of another stage
                where = repr(names[index])
            seen = ", ".join(f"rank {first + at}: {value:.6g}" for at, value in enumerate(values))
            seen = f" (norms of its gradient: {seen})"
        return (
            f"The ranks of a tensor group got different gradients of {where}{seen}, although each of "
            "them computes the same gradient of it. They were given different samples, or drew "
            "different dropout masks. Choose samples by engine.dp_rank and engine.dp_size, which are "
            "equal in a tensor group, and seed the ranks of a tensor group alike. Or this parameter acts "
            "on what only one rank computes, between the cut layers: a norm over heads needs the style "
            "'head_norm' in the plan; other modules cannot be there. In a program that cuts its layers "
            "by itself, set param.sequence_parallel = True, before initialize(), on parameters whose "
            "gradient is a sum over the tensor group, and leave their gradients without hooks: "
            "one that has hooks of the program on all ranks is taken for the sum."
        )
