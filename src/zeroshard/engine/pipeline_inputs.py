"""The micro-batches of a pipeline: pairs of inputs and labels, and inputs by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def as_pair(batch: Any, key: str = "labels") -> Any:
    """A mapping with labels, as collators of Transformers make it, as ``(inputs, labels)``.

    ``key``: of the labels.
    """
    if isinstance(batch, Mapping) and key in batch:
        return {name: value for name, value in batch.items() if name != key}, batch[key]
    return batch


def named_inputs(inputs: Any, names: Sequence[str]) -> tuple[int, tuple[Tensor, ...]] | None:
    """Which of ``names`` are given, as the bits of a number, and the tensors in the order of ``names``.

    ``inputs``: a tensor or a tuple for the first names, or a mapping, in which None is as not given.
    None: they cannot be sent from stage to stage.

    >>> named_inputs({"b": None}, ["a", "b"])
    (0, ())
    """
    if isinstance(inputs, Mapping):
        given = {name: value for name, value in inputs.items() if value is not None}
    else:
        every = inputs if isinstance(inputs, tuple) else (inputs,)
        if len(every) > len(names):
            return None
        given = dict(zip(names, every, strict=False))
    if not given.keys() <= set(names) or not all(isinstance(v, Tensor) for v in given.values()):
        return None
    held = [name for name in names if name in given]
    return sum(1 << names.index(name) for name in held), tuple(given[name] for name in held)


def names_in(bits: int, names: Sequence[str]) -> tuple[str, ...]:
    """The names of the bits that are set.

    >>> names_in(5, ["a", "b", "c"])
    ('a', 'c')
    """
    return tuple(name for at, name in enumerate(names) if bits >> at & 1)
