"""The batch that comes with a model: what about it can be chosen, and how many samples it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from zeroshard.config.fields import is_auto
from zeroshard.errors import UsageError

MICRO_BATCH = "train_micro_batch_size_per_gpu"


def names_a_batch(config: Mapping[str, Any]) -> bool:
    """Whether a configuration says how many samples a micro-batch has."""
    given = (config.get(key) for key in (MICRO_BATCH, "train_batch_size"))
    return any(value is not None and not is_auto(value) for value in given)


def shared_size(batch: tuple[Any, Any], dim: int) -> int | None:
    """The size of a dimension, if all tensors of a batch share it. Numbers have no dimensions."""
    parts = [dict(part) if isinstance(part, Mapping) else part for part in batch]
    shapes = [leaf.shape for leaf in tree_leaves(parts) if isinstance(leaf, Tensor) and leaf.dim()]
    sizes = {shape[dim] if dim < len(shape) else None for shape in shapes}
    return sizes.pop() if len(sizes) == 1 else None


def refuse_options(model: str, micro_batch: int | None, length: int | None) -> None:
    """Refuse what a batch that comes with the model does not allow to choose.

    Raises:
        UsageError: an option is given.
    """
    for option, value in (("--batch", micro_batch), ("--seq", length)):
        if value is not None:
            raise UsageError(
                f"{option} is {value}, and {model} returns a batch of its own, which the option cannot "
                f"change. Leave {option} out and change the batch in the function, or let the function "
                "return the model only; the batch is then of input_ids and labels."
            )


def check_rows(model: str, batch: tuple[Any, Any], size: int) -> None:
    """Compare the samples of a batch that comes with the model with those of the configuration, ``size``.

    Samples are in the first dimension of all tensors, or in the second one. Where neither is shared,
    nothing is known.

    Raises:
        UsageError: they differ.
    """
    rows = shared_size(batch, 0)
    if rows in (None, size) or shared_size(batch, 1) == size:
        return
    raise UsageError(
        f"the batch that {model} returns has {rows} rows (the first dimension of all its tensors), and a "
        f"micro-batch of the configuration has {size} samples ({MICRO_BATCH}, or what the other batch "
        f"sizes give), so samples per second would be wrong. Write {rows} into the configuration, or "
        f"return a batch of {size} rows. Without batch sizes in the configuration, the rows are taken."
    )
