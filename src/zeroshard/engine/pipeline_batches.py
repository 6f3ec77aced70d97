"""Takes the micro-batches of a pipeline's step, and lets all ranks agree that they can be used.

With sequence ranks, micro-batches are cut over them, and the loss is averaged. Ranks of one pipeline have
the same number in their sequence groups, so what travels from stage to stage are the hidden states of one
rank's tokens, with the positions of these tokens.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.utils._pytree import tree_map

from zeroshard.comm.layer_calls import announced
from zeroshard.core.mesh import Mesh
from zeroshard.core.texts import rank_ranges
from zeroshard.device.choice import read
from zeroshard.errors import UsageError
from zeroshard.parallel.split import OwnLoss, PipelineModel
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


def share_sequences(model: PipelineModel, mesh: Mesh, rank: int) -> None:
    """Let a pipeline train on parts of sequences, if the mesh has sequence ranks; else on whole ones."""
    made = SequenceCut(mesh, rank) if mesh.sequence > 1 else None
    model.batch_cut = made
    if isinstance(model.loss_fn, OwnLoss):
        model.loss_fn.over_ranks = None if made is None else made.mean
