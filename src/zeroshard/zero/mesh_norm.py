"""The exchange of a step on a mesh: each element counts once, and copies in a tensor group are compared.

Without a mesh each element has one owner. On a mesh a parameter that the tensor dimension does not cut
has one owner in each tensor coordinate; the owner with coordinate 0 counts it. Weights are 0 or 1, so the
norm does not depend on whether the copies are equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from zeroshard.core.mesh import HOLDERS, Mesh
from zeroshard.device.choice import ops_of
from zeroshard.device.ops import Event
from zeroshard.errors import UsageError
from zeroshard.zero.clip import Divergence, local_sum_of_squares, on_device

if TYPE_CHECKING:
    from zeroshard.comm.collectives import Comm
    from zeroshard.zero.gradients import Norms

_FIRST_WORD = 4  # after the sum of squares, the two hashes and the sum over copies


class MeshExchange:
    """The exchange on a mesh, over all ranks.

    Each rank sends ``[sum of squares that it counts, hash of the world's history, hash of its holders'
    history, sum of squares of what it holds as every rank of its tensor group does, flags...]``, fp64.
    The ranks of a tensor group compute the gradients of such parameters from the same numbers, so these
    sums must agree. They do not if the ranks train on different samples or run modules in another order.

    ``copied``: by position in the model, the names of parameters that the tensor dimension does not cut.
    ``num_words``: packed flags of this rank. ``dtype``: in which gradients are reduced; sums of copies
    may differ by the square root of its precision, since kernels may add in an order that varies.
    Collective: the ranks agree on the length of the message.
    """

    def __init__(
        self,
        world: Comm,
        holders: Comm,
        mesh: Mesh,
        *,
        rank: int,
        copied: Mapping[int, str],
        num_words: int,
        dtype: torch.dtype,
        device: torch.device,
        divergence: Divergence,
    ) -> None:
        self._world, self._holders, self._mesh = world, holders, mesh
        self._copied = copied
        self._divergence = divergence
        self._tolerance = torch.finfo(dtype).eps ** 0.5
        self._members = torch.tensor(mesh.group(rank, HOLDERS), device=device)
        self._counts_copies = mesh.coordinate(rank)["tensor"] == 0
        # on an accelerator: the sums of the step before on the host, and the event of their copy
        self._before: tuple[Tensor, Event] | None = None
        sizes = world.all_gather_small(
            torch.tensor([num_words, len(copied)], dtype=torch.float64, device=device), name="norm"
        )
        widest = (
            [num_words, len(copied)] if isinstance(sizes, FakeTensor) else sizes.amax(0).tolist()
        )
        self._num_words, self._num_copied = map(int, widest)

    def __call__(
        self, norms: Norms, words: Sequence[float], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """See :class:`~.clip.NormExchange`.

        Raises:
            UsageError: the copies of a parameter in a tensor group got different gradients.
        """
        world, holders = self._world, self._holders
        copies = [norm for at, norm in norms if at in self._copied]
        counted = [n for at, n in norms if self._counts_copies or at not in self._copied]
        padding = [0.0] * (self._num_words - len(words))
        hashes = on_device(
            [world.recorder.hash32, holders.recorder.hash32, *words, *padding], device
        )
        of_copies = local_sum_of_squares(copies, device)
        row = torch.cat(
            [
                local_sum_of_squares(counted, device).view(1),
                hashes[:2],
                of_copies.view(1),
                hashes[2:],
            ]
        )
        rows = world.all_gather_small(row, name="norm")
        if odd := world.recorder.diverging(rows[:, 1]):
            raise self._divergence(world, odd)
        own = rows[self._members]
        if odd := holders.recorder.diverging(own[:, 2]):
            raise self._divergence(holders, odd)
        if not isinstance(rows, FakeTensor):
            self._check_copies(rows[:, 3], norms)
        return rows[:, 0].sum(), own[:, _FIRST_WORD:]

    def _check_copies(self, sums_W: Tensor, norms: Norms) -> None:
        """Compare inside each tensor group. On an accelerator, the sums of the step before."""
        ops = ops_of(sums_W.device)
        if ops.is_async:
            before = self._before
            copy = torch.empty(sums_W.shape, dtype=sums_W.dtype, pin_memory=True)
            copy.copy_(sums_W, non_blocking=True)
            self._before = copy, ops.event()
            self._before[1].record()
            if before is None:
                return
            sums_W, copied = before
            copied.synchronize()  # not query(): every rank must come to the same conclusion
        groups = sums_W.view(-1, self._mesh.tensor)
        if not bool(self._differ(groups).any()):
            return
        raise UsageError(self._text(norms, sums_W.device))

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
        rows = self._world.all_gather_small(sent, name="norm of copies").cpu()
        places = self._differ(rows.view(-1, tensor, len(own)).transpose(1, 2)).nonzero()
        names = [self._copied[at] for at in sorted(self._copied)]
        where = "parameters that the tensor group holds whole"
        seen = ""
        if len(places):
            group, index = places[0].tolist()
            values = rows.view(-1, tensor, len(own))[group, :, index].tolist()
            first = group * tensor
            where = repr(names[index]) if index < len(names) else where
            seen = ", ".join(f"rank {first + at}: {value:.6g}" for at, value in enumerate(values))
            seen = f" (norms of its gradient: {seen})"
        return (
            f"The ranks of a tensor group got different gradients of {where}{seen}, although each of "
            "them computes the same gradient of it. They were given different samples, ran modules in a "
            "different order, or drew different dropout masks. Choose samples by engine.dp_rank and "
            "engine.dp_size, which are equal in a tensor group, and seed the ranks of a tensor group "
            "alike."
        )
