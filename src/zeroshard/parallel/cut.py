"""The call that cuts a model into the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from zeroshard.errors import UsageError
from zeroshard.parallel.own_forward import cut_own_forward, own_loss
from zeroshard.parallel.schedules import SCHEDULES, SPLIT_BACKWARD
from zeroshard.parallel.split import PipelineModel, check_choice, check_traffic, cut_sequence


def pipeline(
    model: nn.Module,
    *,
    split: Sequence[str],
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    order: Sequence[str] | None = None,
    example: Mapping[str, Any] | None = None,
    schedule: str = "1F1B",
    gather: str = "micro_batch",
    reduce: str = "micro_batch",
    auto_limit_nbytes: int | None = None,
) -> PipelineModel:
    """Cut ``model`` into ``len(split) + 1`` stages. Pass the result to ``zeroshard.initialize``.

    ``split``: the name of the first piece of each stage but the first, for example ``["layers.8"]``.
    ``order``: the names of the submodules in the order in which they run, each on the output of the one
    before. A ``ModuleList`` in it stands for its entries.
    ``example``: without ``order``, inputs of a micro-batch by name. The model is run with their shapes on
    the meta device, and every stage runs the model's own forward around its blocks. A Transformers model
    needs neither ``order`` nor ``example``.
    ``loss_fn(output, labels)``: the mean loss of one micro-batch, called on the last stage. A
    Transformers model has one.
    ``schedule``: GPipe, 1F1B, Interleaved1F1B or LoopedBFS. Stage ``s`` is on pipeline rank ``s`` modulo
    their number; with several stages per rank, the schedule is one of the last two.
    ``gather``: at ZeRO stage 3 parameters are gathered for each forward and backward (``micro_batch``),
    or once per step and held through it (``step``).
    ``reduce``: at stages 2 and 3 gradients are reduced after each backward, or once per step. Then each
    rank holds whole gradients, as at stage 1. For both, ``auto`` takes what moves least among what fits.
    ``auto_limit_nbytes``: the most bytes that ``auto`` may hold more on each rank than ``micro_batch``
    holds. None: with the states that are to be allocated, at most half of the free memory.

    The model is taken apart and cannot be used by itself afterwards.

    Raises:
        UsageError: a name is not in the model, or the model cannot be cut there.
        UnsupportedError: without ``order``, the model does not run its blocks one after the other.
    """
    if schedule in SPLIT_BACKWARD:
        raise UsageError(
            f"pipeline(schedule={schedule!r}) is not implemented yet: it runs the two halves of a "
            "backward at different times, and ZeRO reduces a gradient when it arrives. Choose one of "
            f"{', '.join(SCHEDULES)}."
        )
    check_choice("pipeline(schedule", schedule, tuple(SCHEDULES))
    check_traffic("pipeline", gather, reduce, auto_limit_nbytes)
    if isinstance(split, str):
        raise UsageError(f"split={split!r} is one name. Give a list of names: [{split!r}].")
    keys: dict[str, Any] = {"schedule": schedule, "gather": gather, "reduce": reduce}
    keys["auto_limit_nbytes"] = auto_limit_nbytes
    if order is not None or type(model).forward is nn.Sequential.forward:
        return cut_sequence(model, list(split), order, loss_fn=loss_fn, **keys)
    if example is None and not isinstance(getattr(model, "dummy_inputs", None), Mapping):
        raise _needs_order(model)
    return cut_own_forward(model, split, example, loss_fn=loss_fn or own_loss(model), **keys)


def _needs_order(model: nn.Module) -> UsageError:
    children = ", ".join(name for name, _ in model.named_children())
    return UsageError(
        f"{type(model).__name__} has a forward of its own, and a pipeline needs the order in which "
        "its submodules run. If each takes the output of the one before, give their names, for "
        'example order=["embed", "layers", "head"]. If it runs a list of blocks in a forward that '
        "does more, give inputs of a micro-batch by name, example={...}: only their shapes and "
        f"dtypes are used. The children of {type(model).__name__} are {children}."
    )
