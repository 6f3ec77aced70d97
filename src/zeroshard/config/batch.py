"""Solves the three batch sizes of a configuration for a number of data-parallel ranks.

If a run goes on with fewer ranks than it began with, ``train_batch_size`` stays: a step trains on the
same samples, in smaller or more micro-batches per rank. A micro-batch that the configuration gives is
kept, because programs make batches of that size. One that was derived becomes at most as large as before,
because memory was planned for it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from zeroshard.config.parse import Findings
from zeroshard.config.schema import Config
from zeroshard.core.mesh import Mesh

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def solve_batch(
    train: int | None,
    micro: int | None,
    gas: int | None,
    *,
    dp_size: int,
    require: bool = True,
    word: str = "world size",
    autos: Collection[str] = (),
) -> tuple[int, int, int] | str:
    """Solve train = micro x gas x dp_size for the sizes that are not given.

    Returns the three sizes, or a text that says why there is no solution. ``word``: what the text calls
    ``dp_size``. ``autos``: the sizes that the configuration left to a library.

    >>> solve_batch(8, None, None, dp_size=2)
    (8, 4, 1)
    >>> solve_batch(8, None, 3, dp_size=1)
    'train_batch_size 8 is not divisible by gradient_accumulation_steps 3 x world size 1: make it 6 or 9'
    """
    if train is None:
        if micro is None and require:
            return _no_size(autos)
        micro, gas = micro or 1, gas or 1
        return micro * gas * dp_size, micro, gas
    if micro is not None and gas is not None:
        product = micro * gas * dp_size
        if product == train:
            return train, micro, gas
        return (
            f"train_batch_size {train} is not train_micro_batch_size_per_gpu {micro} x "
            f"gradient_accumulation_steps {gas} x {word} {dp_size} = {product}; leave one of "
            "the three out, and it is computed from the others"
        )
    if micro is not None:
        if train % (micro * dp_size):
            by = f"train_micro_batch_size_per_gpu {micro} x {word} {dp_size}"
            return _indivisible(train, by, micro * dp_size)
        return train, micro, train // (micro * dp_size)
    steps = "" if gas is None else f"gradient_accumulation_steps {gas} x "
    gas = gas or 1
    if train % (gas * dp_size):
        return _indivisible(train, f"{steps}{word} {dp_size}", gas * dp_size)
    return train, train // (gas * dp_size), gas


def _indivisible(train: int, by: str, divisor: int) -> str:
    """That ``train`` is not divisible ``by`` factors whose product is ``divisor``, and what would be."""
    below = train // divisor * divisor
    near = " or ".join(str(size) for size in (below, below + divisor) if size)
    return f"train_batch_size {train} is not divisible by {by}: make it {near}"


def _no_size(autos: Collection[str]) -> str:
    left = " and ".join(f'{name} "auto"' for name in BATCH[:2] if name in autos)
    why = f" ({left}: nothing has replaced it, as Transformers or Accelerate do)" if left else ""
    return (
        f"no batch size is given{why}: write train_batch_size (samples per step over all ranks) "
        "or train_micro_batch_size_per_gpu (samples per rank per forward)"
    )


# ---------------------------------------------------------------- fewer ranks than before


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


def without_copies(config: Config, found: Findings, mesh: Mesh) -> Config:
    """``config`` with a ``train_batch_size`` that counts samples of tensor ranks once.

    Accelerate and Transformers write micro batch x steps x number of ranks, also where tensor ranks get
    the same samples.
    """
    train, micro, gas = (getattr(config, name) for name in BATCH)
    if mesh.tensor * mesh.sequence == 1 or None in (train, micro, gas):
        return config
    product = micro * gas * mesh.dp_size
    if (
        train == product
        or train != micro * gas * mesh.world_size
        or found.rejected.intersection(BATCH)
    ):
        return config
    found.warnings.append(
        f"train_batch_size: {train} counts the samples of all {mesh.world_size} ranks, but "
        f"{'sequence' if mesh.tensor == 1 else 'tensor'} ranks get the same samples, so it is {product}"
    )
    return config.model_copy(update={"train_batch_size": product})


def with_batch_of_run(config: Config, found: Findings, mesh: Mesh, run: RunBatch | None) -> Config:
    """``config`` with the batch that the run began with, if it has fewer ranks now."""
    if run is None:
        return config
    given = {name: getattr(config, name) for name in BATCH}
    dp_before = run.dp_size(mesh)
    if dp_before == mesh.dp_size or found.rejected.intersection(BATCH) or not any(given.values()):
        return config
    train, micro, gas = given.values()
    kept = keep_batch(train, micro, gas, dp_before=dp_before, dp_now=mesh.dp_size)
    if not isinstance(kept, str) and run.batches and kept[0] not in run.batches:
        began = ", ".join(map(str, run.batches))
        kept = (
            f"train_batch_size is {kept[0]} with the ranks that are left, and was {began} when the run "
            "began: give the batch of the whole run"
        )
    if isinstance(kept, str):
        found.errors.append(kept)
        return config
    found.notices.append(
        f"train_batch_size stays {kept[0]} with {mesh.dp_size} data-parallel ranks, before {dp_before}: "
        f"micro-batches of {kept[1]}, {kept[2]} per step"
    )
    return config.model_copy(update=dict(zip(BATCH, kept, strict=True)))
