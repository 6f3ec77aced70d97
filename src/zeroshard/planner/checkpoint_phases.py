"""What saving and loading a checkpoint needs: the phases "save" and "load" of a simulated rank.

The files of the rank are laid out, and its state is filled, by the code that saves and loads. Tensors are
fake, so nothing is written, and files are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from zeroshard.checkpoint.blocks import edges_nbytes
from zeroshard.checkpoint.local_state import LocalState, global_shape, is_shaped
from zeroshard.checkpoint.manifest import VALUE, Dtype, SavedParameter, SavedTensor, dtype_name
from zeroshard.checkpoint.reader import Source
from zeroshard.checkpoint.restore import Loader
from zeroshard.core.tiers import Tier
from zeroshard.engine.engine import Engine
from zeroshard.optim.state_tree import flat
from zeroshard.planner.allocations import Allocations
from zeroshard.precision.loss_scaler import LossScaler
from zeroshard.zero.optimizer_shard import OptimizerShard
from zeroshard.zero.unit import Unit


@dataclass(frozen=True)
class CheckpointNeeds:
    """What this rank needs for a checkpoint. All memory is host memory.

    ``files``: bytes on disk by name. ``write_nbytes``: buffers that files are written from.
    ``copy_nbytes``: the copy of an asynchronous save, kept for the next one. ``read_nbytes``: the most
    that a load keeps of partly read blocks: of its own files, and of as many of other ranks where it
    needs whole parameters (stage 0).
    """

    files: Mapping[str, int]
    write_nbytes: int
    copy_nbytes: int
    read_nbytes: int


def checkpoint_phases(engine: Engine, watch: Allocations) -> CheckpointNeeds:
    """Measure the phases "save" and "load". Afterwards the engine can only be closed."""
    saver, local, ledger = engine._saver, engine._saver.local, engine.runtime.ledger
    watch.phase = "save"
    state = engine._training_state()
    with _disable_current_modes():  # generators have real tensors
        # The manifest has the loss scale as a number, which a tensor without values does not give.
        needs = saver.needs(replace(state, scaler=LossScaler()))
    whole = any(shard.is_whole for shard in _shards(local))
    readers = engine.mesh.world_size if whole else 1
    edges_of_files = [edges_nbytes(nbytes) for nbytes in needs.files.values()]
    found = CheckpointNeeds(
        needs.files, needs.write_nbytes, needs.copy_nbytes, readers * sum(edges_of_files)
    )
    nbytes = found.write_nbytes + found.copy_nbytes
    with ledger.lend("a checkpoint that is written", nbytes, Tier.HOST):
        buffers = torch.empty(nbytes, dtype=torch.uint8)
        for unit in local.units:
            for piece in local.visit(unit):
                _ = piece.values  # a copy if it joins several boxes
        del buffers
    watch.phase = "load"
    source = cast("Source", _NoFiles({}))
    for unit in local.units:
        source.parameters.update(_parameters(local, unit))  # type: ignore[attr-defined]
    with ledger.lend("a checkpoint that is read", found.read_nbytes, Tier.HOST):
        edges = torch.empty(found.read_nbytes, dtype=torch.uint8)
        names = {fqn: fqn for fqn in source.parameters}
        section = engine.settings.checkpoint
        Loader(
            local, source, names, with_state=local.optimizer is not None,
            max_buffer_nbytes=section.max_buffer_mb << 20,
        ).fill()  # fmt: skip
        del edges
    return found


def _shards(local: LocalState) -> list[OptimizerShard]:
    return [] if local.optimizer is None else local.optimizer.shards


@dataclass
class _NoFiles:
    """A checkpoint of this rank's parameters whose values are not read."""

    parameters: dict[str, SavedParameter]
    path = "a planned checkpoint"

    def fill(self, *_: object) -> None:
        """Values of fake tensors are not there."""


def _parameters(local: LocalState, unit: Unit) -> dict[str, SavedParameter]:
    """The unit's parameters as a checkpoint of this rank describes them."""
    shard = local.shard_of(unit)
    dtype = unit.row.param if shard is None else unit.row.master
    tensors: dict[str, dict[str, Dtype]] = {}
    scalars: dict[str, dict[str, tuple[Dtype | Literal["number"], float]]] = {}
    states = {} if local.optimizer is None else local.optimizer.inner.state
    for fragment in () if shard is None else shard.fragments:
        fqn = unit.layout.slots[fragment.index].fqn
        for name, value in flat(states.get(fragment.value, {})).items():
            if not isinstance(value, Tensor):
                continue
            kind = dtype_name(value.dtype, where=name)
            if is_shaped(name, value, fragment):
                tensors.setdefault(fqn, {})[name] = kind
            else:
                scalars.setdefault(fqn, {})[name] = kind, 1.0
    return {
        slot.fqn: SavedParameter(
            shape=global_shape(slot),
            trained=unit.trainable,
            tensors={
                name: SavedTensor(dtype=kind, fragments=())
                for name, kind in {
                    VALUE: dtype_name(dtype, where=slot.fqn),
                    **tensors.get(slot.fqn, {}),
                }.items()
            },
            scalars=scalars.get(slot.fqn, {}),
        )
        for slot in unit.layout.slots
    }
