"""Adds the gradients of copies over the ranks that hold them, once per optimizer step.

See [Note: addends] in ``zero/addends.py``.

Letters: as in :mod:`zeroshard.zero.unit`; K elements in the fragments of one shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from zeroshard.comm.collectives import sum_in_rank_order
from zeroshard.comm.dtensors import KINDS, addends_of, is_copy
from zeroshard.device.choice import read
from zeroshard.zero.addends import AddendSlots
from zeroshard.zero.clip import on_device

if TYPE_CHECKING:
    from zeroshard.comm.collectives import Comm
    from zeroshard.zero.gradients import GradBuffer


class CopySums:
    """Sums over one group of ranks with the same parts, for all buffers of an engine.

    ``copies`` connects them: a tensor group, or the ranks of one that share key/value heads. ``holders``
    connects the ranks whose gradients are reduced together. All of them need the same slots.
    ``message_numel``: messages end at the unit with which they have this many elements, so that key/value
    heads of a large model do not need a second copy of all their gradients.
    """

    def __init__(
        self, copies: Comm, holders: Comm, buffers: Sequence[GradBuffer], message_numel: int
    ) -> None:
        self._copies, self._holders = copies, holders
        self._message_numel = message_numel
        self._pairs: list[tuple[GradBuffer, AddendSlots]] = []
        self._plain: list[tuple[AddendSlots, int, Tensor]] = []  # of layers that a program has cut
        ranks = tuple(getattr(copies, "ranks", ()))
        for buffer in buffers:
            known = {
                index: addends_of(param)
                for index, param in enumerate(buffer.unit.params)
                if is_copy(param, ranks)
            }
            if known:
                layout, params = buffer.unit.layout, buffer.unit.params
                plain = [at for at, adds in known.items() if adds and type(params[at]) not in KINDS]
                slots = AddendSlots(
                    known,
                    layout,
                    layout.shard_range(buffer.comm.rank),
                    counts=copies.rank == 0,
                    plain=plain,
                )
                buffer.addends.append(slots)
                self._pairs.append((buffer, slots))
                self._plain += [(slots, at, params[at]) for at in plain]
        self._is_done = False  # the sums of this step are complete
        self._learned: list[set[int]] | None = None
        self._is_learning = any(
            adds is None for slots in self._slots() for adds in slots.known.values()
        )

    def _slots(self) -> list[AddendSlots]:
        return [slots for _, slots in self._pairs]

    def finish(self) -> None:
        """Complete the reduced gradients of this step. Collective over the ranks with the same parts.

        A gradient that is in its store is read, changed and stored again.
        """
        if self._is_done:
            return
        self._is_done = True
        if self._is_learning and self._learned is None:
            self._exchange_seen()
        for slots in self._slots():
            slots.is_summed = True
        message: list[tuple[GradBuffer, AddendSlots]] = []
        numel = 0
        for buffer, slots in self._pairs:
            if not slots.numel:
                continue
            message.append((buffer, slots))
            numel += slots.numel
            if numel >= self._message_numel:
                self._complete(message)
                message, numel = [], 0
        if message:
            self._complete(message)

    def _complete(self, pairs: Sequence[tuple[GradBuffer, AddendSlots]]) -> None:
        """Complete the gradients of these buffers by one message."""
        parts: list[Tensor] = []
        for buffer, slots in pairs:
            parts += _parts_of(buffer, slots)
        with pairs[0][0].ledger.lend("gradients of copies", self._message_nbytes(parts)):
            sums = self._added([slots for _, slots in pairs], parts)
            at = 0
            for buffer, slots in pairs:
                self._put(buffer, slots, sums[at : at + slots.numel])
                at += slots.numel

    def begin_backward(self) -> None:
        """Let more addends come in the same step: the sums so far become what the first rank adds.

        What a hook of the program has added stays on all ranks, on which it will add what comes.
        """
        for slots, index, param in self._plain:
            if param._backward_hooks:
                slots.note_hook(index)
        if not self._is_done:
            return
        self._is_done = False
        for buffer, slots in self._pairs:
            slots.is_summed = False
            if slots.counts or not slots.numel or not buffer.is_reduced:
                continue
            was_stored, values_S = buffer.is_stored, buffer.reduced_S
            assert values_S is not None
            flags = [] if slots.whole is None else read(slots.whole)
            whole = [index for index, flag in zip(slots.plain, flags, strict=False) if flag]
            if parts := slots.parts(values_S, but=whole):
                torch._foreach_zero_(parts)
            if was_stored:
                buffer.store_reduced(complete=True)

    def added(self, buffer: GradBuffer, values_S: Tensor) -> Tensor:
        """A reduced gradient ``[S]`` with the sums over the copies; itself if it has them."""
        slots = next((slots for other, slots in self._pairs if other is buffer), None)
        if slots is None or slots.is_summed or not slots.numel:
            return values_S
        copy_S = values_S.clone()
        parts = slots.parts(copy_S)
        sums = self._added([slots], parts).split([part.numel() for part in parts])
        torch._foreach_copy_(parts, list(sums))
        return copy_S

    def reset(self) -> None:
        """Begin a new step."""
        self._is_done = False
        for slots in self._slots():
            slots.reset()
        if self._learned is not None:
            for slots, indices in zip(self._slots(), self._learned, strict=True):
                slots.learn(indices)
            self._learned, self._is_learning = None, False

    # ------------------------------------------------------------------ messages

    def _message_nbytes(self, parts: Sequence[Tensor]) -> int:
        itemsize = max(part.element_size() for part in parts)
        return (self._copies.size + 1) * itemsize * sum(part.numel() for part in parts)

    def _added(self, several: Sequence[AddendSlots], parts: Sequence[Tensor]) -> Tensor:
        """The sum over the copies of all parts, flat, in the widest of their dtypes."""
        own_K = torch.cat(list(parts))  # promotes
        hooked = [float(at in slots.hooked) for slots in several for at in slots.plain]
        if not hooked:
            rows = self._copies.all_gather_small(own_K, name="gradients of copies")
            sum_in_rank_order(rows.unbind(), own_K)
            return own_K
        flags = on_device(hooked, own_K.device).to(own_K.dtype)
        rows = self._copies.all_gather_small(torch.cat([own_K, flags]), name="gradients of copies")
        rows, flags_WF = rows.split([len(own_K), len(hooked)], dim=1)
        whole = flags_WF.amin(0) > 0
        masks: list[Tensor] = []
        for slots, own in zip(several, whole.split([len(s.plain) for s in several]), strict=True):
            slots.whole = own
            masks += slots.mask(own)
        sums_K = torch.empty_like(own_K)
        sum_in_rank_order([row.contiguous() for row in rows], sums_K)
        return torch.where(torch.cat(masks), own_K, sums_K)

    def _put(self, buffer: GradBuffer, slots: AddendSlots, sums_K: Tensor) -> None:
        was_stored, values_S = buffer.is_stored, buffer.reduced_S
        assert values_S is not None
        places = slots.parts(values_S)
        torch._foreach_copy_(places, list(sums_K.split([place.numel() for place in places])))
        if was_stored:
            buffer.store_reduced(complete=True)

    def _exchange_seen(self) -> None:
        """Learn which slots of unknown kind are addends on any holder. They are from the next step on."""
        flags = [
            float(index in slots.seen)
            for slots in self._slots()
            for index, adds in slots.known.items()
            if adds is None
        ]
        own = torch.tensor(flags, dtype=torch.float64, device=self._pairs[0][0].unit.full_N.device)
        rows = self._holders.all_gather_small(own, name="kinds of gradients")
        any_rank = flags if isinstance(rows, FakeTensor) else read(rows.amax(0))
        united = iter(any_rank)
        self._learned = [
            {index for index, adds in slots.known.items() if adds is None and next(united)}
            for slots in self._slots()
        ]


def _parts_of(buffer: GradBuffer, slots: AddendSlots) -> list[Tensor]:
    if buffer.is_stored:
        assert slots.kept_K is not None
        return [slots.kept_K]
    values_S = buffer.reduced_S
    assert values_S is not None, "the buffers are reduced first"
    return slots.parts(values_S)
