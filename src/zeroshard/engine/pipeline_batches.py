"""Takes the micro-batches of a pipeline's step, and lets all ranks agree that they can be used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from zeroshard.device.choice import read
from zeroshard.engine.optimizer_step import is_fake
from zeroshard.engine.pipeline_inputs import as_pair, named_inputs, names_in
from zeroshard.engine.pipeline_sequences import CutBatches
from zeroshard.errors import UsageError
from zeroshard.parallel.split import PipelineModel
from zeroshard.zero.hooks import tensors_in

_NO_DATA, _BAD_BATCH, _SHAPES_DIFFER, _BAD_INPUTS, _PART_BY_PART, _NOT_CUT = range(1, 7)
_TEXTS = {
    _NO_DATA: "got no data_iter. The ranks with the first and with the last stage need one",
    _BAD_BATCH: "got a batch that is not a pair (inputs, labels), and not a mapping with labels",
    _BAD_INPUTS: "got inputs that the model's forward does not take by name, that are not tensors, or "
    "whose names change in a step. All stages run the model's forward on the same inputs",
    _SHAPES_DIFFER: "got micro-batches of different shapes in one step. The next stage makes its "
    "buffers before it receives, so pad the micro-batches of a step to one shape",
    _PART_BY_PART: "runs the pipeline by instructions of its program, and other ranks do not, so they "
    "would wait for messages in different orders. Change instructions and schedules on every rank",
    _NOT_CUT: "got a micro-batch that cannot be cut over sequence ranks; its log says why. It needs "
    "input_ids and labels [samples, tokens], of which the ranks can divide the tokens, and padding after "
    "the samples only",
}


def agreed_batches(
    engine: Any, data_iter: Iterator[Any] | None, *, needs: bool = True, count: int | None = None
) -> list[Any]:
    """The micro-batches of a step, after all ranks have theirs. Collective.

    ``needs``: this rank cannot do without them. ``count``: their number; None: that of a training step.

    Raises:
        UsageError: a rank has none, too few, or such that cannot be used, or counts other micro-batches
            per step; the same on every rank.
        StopIteration: no rank has any.
    """
    count = engine.accumulation.steps if count is None else count
    model: PipelineModel = engine.module
    taken = _taken(model, data_iter, count)
    batches = taken.batches
    fault = _fault_of(batches) if taken.is_cut else _NOT_CUT
    if needs and data_iter is None:
        fault = _NO_DATA
    given, bits = batches, 0
    if model.input_names is not None and not fault:
        given, bits, fault = _by_name(batches, model.input_names)
    held = -1 if data_iter is None else len(batches)
    own = torch.tensor(
        [fault, held, count, bits, taken.num_whole, taken.checksum],
        dtype=torch.float64,
        device=engine.device,
    )
    rows = engine._watch.world.all_gather_small(own, name="batches of the step")
    if not is_fake(rows):
        _check_rows(model, read(rows), count)
    elif model.input_names is not None:
        model.given_names = names_in(bits, model.input_names)
    return [on_device(engine.device, batch) for batch in given]


def agree_on_parts(engine: Any, *, training: bool) -> None:
    """Check that all ranks run a step part by part, and train, or do not. Collective.

    It meets the exchange of :func:`agreed_batches` on ranks that do not.

    Raises:
        UsageError: ranks differ; the same on every rank.
    """
    own = torch.tensor(
        [_PART_BY_PART, training, 0, 0, 0, 0], dtype=torch.float64, device=engine.device
    )
    rows = engine._watch.world.all_gather_small(own, name="batches of the step")
    if is_fake(rows):
        return
    found = read(rows)
    if any(row[0] != _PART_BY_PART for row in found):
        _check_rows(engine.module, found, 0)
    trains = [bool(row[1]) for row in found]
    if len(set(trains)) > 1:
        raise UsageError(
            f"rank {trains.index(True)} runs instructions with gradients and rank {trains.index(False)} "
            "without. Run the schedule inside torch.no_grad() on every rank, or on none."
        )


def _check_rows(model: PipelineModel, rows: list[list[float]], count: int) -> None:
    """Raise what :func:`agreed_batches` raises.

    ``rows``: of each rank the fault, the number of batches, of micro-batches per step, the names of
    inputs as bits, the number of whole batches that were cut over sequence ranks, and their checksum.
    """
    for rank, (found, _, steps, *_) in enumerate(rows):
        if found:
            raise UsageError(f"rank {rank} {_TEXTS[int(found)]}.")
        if steps != rows[0][2]:
            raise UsageError(
                f"rank {rank} runs {int(steps)} micro-batches per step (gradient_accumulation_steps), "
                f"and rank 0 runs {int(rows[0][2])}, so one stage would wait for messages that another "
                "does not send. Set the same number on every rank."
            )
    counts = {rank: int(held) for rank, (_, held, *_) in enumerate(rows) if held >= 0}
    if not any(counts.values()):
        raise StopIteration
    for rank, held in counts.items():
        if held < count:
            raise UsageError(
                f"rank {rank} has {held} of the {count} micro-batches of the step "
                "(gradient_accumulation_steps): its data_iter has ended. Give every rank a multiple of "
                "this number, or drop the last, incomplete step."
            )
    if model.batch_cut is not None:
        model.batch_cut.compare({rank: (rows[rank][4], rows[rank][5]) for rank in counts})
    if model.input_names is not None:
        bits = {rank: int(rows[rank][3]) for rank in counts}
        _agree_on_names(model, model.input_names, bits)


def _by_name(batches: Sequence[Any], names: Sequence[str]) -> tuple[list[Any], int, int]:
    """The micro-batches with inputs in the order of ``names``, which are given as bits, and the fault."""
    found = [named_inputs(inputs, names) for inputs, _ in batches]
    bits = {each[0] for each in found if each is not None}
    if None in found or len(bits) > 1:
        return [], 0, _BAD_INPUTS
    given = [(each[1], labels) for each, (_, labels) in zip(found, batches, strict=True) if each]
    return given, bits.pop() if bits else 0, 0


def _agree_on_names(model: PipelineModel, names: Sequence[str], bits: Mapping[int, int]) -> None:
    """Note the names of the inputs of this step.

    Raises:
        UsageError: ranks got inputs of other names; the same on every rank.
    """
    first = next(iter(bits))
    model.given_names = names_in(bits[first], names)
    for rank, other in bits.items():
        if other != bits[first]:
            raise UsageError(
                f"rank {first} got the inputs {', '.join(model.given_names)}, and rank {rank} got "
                f"{', '.join(names_in(other, names))}. All ranks need the same inputs."
            )


def _taken(model: PipelineModel, data_iter: Iterable[Any] | None, count: int) -> CutBatches:
    """At most ``count`` micro-batches as pairs, cut over sequence ranks if there are any."""
    items = [batch for _, batch in zip(range(count), data_iter or (), strict=False)]
    if model.batch_cut is None:
        return CutBatches([as_pair(batch) for batch in items], 0, 0)
    found: CutBatches = model.batch_cut.cut(items)
    found.batches = [as_pair(batch, "shift_labels") for batch in found.batches]
    return found


def _fault_of(batches: Sequence[Any]) -> int:
    if not all(isinstance(batch, (tuple, list)) and len(batch) == 2 for batch in batches):
        return _BAD_BATCH
    shapes = {tuple((t.shape, t.dtype) for t in tensors_in(inputs)) for inputs, _ in batches}
    return _SHAPES_DIFFER if len(shapes) > 1 else 0


def on_device(device: torch.device, value: Any) -> Any:
    """``value`` with its tensors on the device. A call of ``tree_map`` takes 15 us."""
    if isinstance(value, Tensor):
        return _tensor_on(device, value)
    if type(value) is tuple:
        return tuple([on_device(device, each) for each in value])
    return tree_map(partial(_tensor_on, device), value)


def _tensor_on(device: torch.device, value: Any) -> Any:
    if not isinstance(value, Tensor) or value.device == device:
        return value
    return value.to(device, non_blocking=True)
