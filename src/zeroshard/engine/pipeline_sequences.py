"""Sequence ranks inside a pipeline: cuts the micro-batches of a step over them, and averages the loss.

Ranks of one pipeline have the same number in their sequence groups, so what travels from stage to stage
are the hidden states of one rank's tokens, with the positions of these tokens.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zeroshard.comm.flight_recorder import rank_ranges
from zeroshard.comm.layer_calls import announced
from zeroshard.core.mesh import Mesh
from zeroshard.engine.draft import Draft
from zeroshard.errors import UsageError
from zeroshard.parallel.cut import OwnLoss
from zeroshard.parallel.split import PipelineModel

logger = logging.getLogger("zeroshard")


@dataclass
class CutBatches:
    """The micro-batches of a step for one rank, and what other ranks compare.

    ``num_whole``: how many the engine has cut. ``checksum``: of these, and of which they are.
    ``is_cut``: all whole ones could be cut.
    """

    batches: list[Any]
    num_whole: int
    checksum: int
    is_cut: bool = True


class SequenceCut:
    """Cuts micro-batches of whole sequences over the sequence ranks of ``rank``."""

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self._ranks = mesh.group(rank, {"sequence"})
        self._groups = mesh.groups({"sequence"})

    @property
    def group(self) -> Any:
        """The process group in which attention exchanges tokens and heads.

        Raises:
            UsageError: no attention does.
        """
        found = announced(self._ranks)
        if not found:
            raise UsageError(
                f"no attention is spread over {rank_ranges(self._ranks)}, which share the tokens of a "
                "sequence. Call zeroshard.sequence.register() before initialize(), or use "
                "DistributedAttention."
            )
        return min(found, key=lambda group: group.group_name)  # the same one on every rank

    def cut(self, batches: Sequence[Any]) -> CutBatches:
        """This rank's tokens of each micro-batch.

        A mapping with ``labels`` is a whole micro-batch, and gets ``shift_labels`` instead of them.
        Anything else has this rank's tokens already. The checksum reads all whole micro-batches on the
        host, at 1 to 3 GB/s.
        """
        from zeroshard.sequence.split_batches import digest, split_batch

        whole = [isinstance(batch, Mapping) and "labels" in batch for batch in batches]
        try:
            found = [
                split_batch(batch, self.group) if is_whole else batch
                for batch, is_whole in zip(batches, whole, strict=True)
            ]
        except UsageError as error:
            logger.error("%s", error)
            return CutBatches([], 0, 0, is_cut=False)
        checksum = zlib.crc32(bytes(whole))
        for batch, is_whole in zip(batches, whole, strict=True):
            if is_whole:
                checksum = digest(batch, checksum)
        return CutBatches(found, sum(whole), checksum)

    def compare(self, rows: Mapping[int, tuple[float, float]]) -> None:
        """Check that the ranks of each sequence group have the same micro-batches.

        ``rows``: the number of whole micro-batches and the checksum of each rank that has any.

        Raises:
            UsageError: they do not; the same on every rank.
        """
        for group in self._groups:
            ranks = [rank for rank in group if rank in rows]
            for rank in ranks:
                (whole, checksum), (first, expected) = rows[rank], rows[ranks[0]]
                if whole != first:
                    raise UsageError(
                        f"{rank_ranges(group)} share the tokens of the same samples. Rank {rank} got "
                        f"{int(whole)} whole micro-batches for this step, which the engine cuts "
                        f"(mappings with labels), and rank {ranks[0]} got {int(first)}. Pass whole ones "
                        "on all ranks, or this rank's tokens on all ranks, with shift_labels."
                    )
                if checksum != expected:
                    raise UsageError(
                        f"{rank_ranges(group)} share the tokens of the same samples, and rank {rank} got "
                        f"other micro-batches for this step than rank {ranks[0]}. Choose samples by "
                        "engine.dp_rank and engine.dp_size, which are equal in a sequence group, and "
                        "shuffle with equal seeds."
                    )

    def mean(self, loss: Tensor, labels: Tensor) -> Tensor:
        """The mean over the tokens of all sequence ranks. ``loss``: that of this rank's, 0-dim."""
        from zeroshard.sequence.all_to_all import mean_over_tokens

        return mean_over_tokens(loss, (labels != -100).sum(), self.group)


def share_sequences(draft: Draft) -> None:
    """Let a pipeline train on parts of sequences, if the mesh has sequence ranks; else on whole ones."""
    model, mesh = draft.model, draft.mesh
    if not isinstance(model, PipelineModel):
        return
    made = SequenceCut(mesh, draft.rank_info.rank) if mesh.sequence > 1 else None
    model.batch_cut = made
    if isinstance(model.loss_fn, OwnLoss):
        model.loss_fn.over_ranks = None if made is None else made.mean
