"""Keeps ``train_batch_size`` when a run goes on with fewer ranks than it began with.

Pure. A step then trains on the same samples, in smaller or more micro-batches per rank. A micro-batch
that the configuration gives is kept, because programs make batches of that size. One that was derived
becomes at most as large as before, because memory was planned for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zeroshard.config.batch import solve_batch
from zeroshard.core.mesh import Mesh


@dataclass(frozen=True, slots=True)
class RunBatch:
    """What the launcher knows of a run that may have lost ranks: with how many it began, and the
    ``train_batch_size`` of its engines (empty: not known)."""

    num_ranks: int
    batches: tuple[int, ...] = ()

    def dp_size(self, now: Mesh) -> int:
        """The data-parallel ranks with which the run began. ``now``: the mesh of those that are left."""
        others = now.world_size // now.data_shard
        return replace(now, data_shard=max(1, self.num_ranks // others)).dp_size


def keep_batch(
    train: int | None, micro: int | None, gas: int | None, *, dp_before: int, dp_now: int
) -> tuple[int, int, int] | str:
    """``train_batch_size``, micro-batch and accumulation of ``dp_now`` data-parallel ranks.

    The given sizes are those of a configuration for ``dp_before`` ranks. Returns a text with the numbers
    if the batch cannot be kept.

    >>> keep_batch(12, 4, None, dp_before=3, dp_now=1), keep_batch(12, None, None, dp_before=3, dp_now=2)
    ((12, 4, 3), (12, 3, 2))
    """
    before = solve_batch(train, micro, gas, dp_size=dp_before)
    if isinstance(before, str):
        if train is None or micro is None:
            return f"{before}; the run began with {dp_before} data-parallel ranks"
        product = f"train_micro_batch_size_per_gpu {micro}"
        product += f" x gradient_accumulation_steps {gas}" if gas is not None else ""
        wanted = micro * (gas or 1) * dp_before
        return (
            f"the run began with {dp_before} data-parallel ranks, and for these train_batch_size {train} "
            f"is not {product} x {dp_before} = {wanted}. If the program computes it from the number of "
            f"ranks, that number is {dp_now} now, and a step would have fewer samples: give the batch of "
            "the whole run"
        )
    whole, largest, _ = before
    share, rest = divmod(whole, dp_now)
    if rest:
        return (
            f"train_batch_size {whole} is not divisible by {dp_now} data-parallel ranks; the run began "
            f"with {dp_before}"
        )
    if micro is None:
        micro = max(size for size in range(1, largest + 1) if share % size == 0)
    if share % micro:
        return (
            f"train_batch_size {whole} is not divisible by train_micro_batch_size_per_gpu {micro} x "
            f"{dp_now} data-parallel ranks; the run began with {dp_before}. Leave "
            "train_micro_batch_size_per_gpu out if the program does not need this size"
        )
    return whole, micro, share // micro


def fitting_sizes(
    train: int, micro: int | None, *, mesh: Mesh, is_shard_given: bool
) -> tuple[int, ...]:
    """The numbers of ranks, up to those of ``mesh``, with which :func:`keep_batch` succeeds.

    ``micro``: None if it was derived. Only ``data_shard`` shrinks, unless ``is_shard_given``.
    """
    smallest = mesh.data_shard if is_shard_given else 1
    meshes = [replace(mesh, data_shard=size) for size in range(smallest, mesh.data_shard + 1)]
    return tuple(
        one.world_size
        for one in meshes
        if train % (one.dp_size * (micro or 1)) == 0
        and (one.data_replicate == 1 or one.data_shard * one.sequence > 1)
    )
