"""Solves the three batch sizes of a configuration for a number of data-parallel ranks."""

from __future__ import annotations

from collections.abc import Collection

SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu")


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
    left = " and ".join(f'{name} "auto"' for name in SIZES if name in autos)
    why = f" ({left}: nothing has replaced it, as Transformers or Accelerate do)" if left else ""
    return (
        f"no batch size is given{why}: write train_batch_size (samples per step over all ranks) "
        "or train_micro_batch_size_per_gpu (samples per rank per forward)"
    )
