"""Loads the values of a saved run into units, masters and optimizer state.

Each rank reads what it owns, by name, from whichever files have it. Units whose shards are whole
all-gather afterwards, as they do after an update. The layout is that of the engine; the checkpoint only
fills it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from zeroshard.checkpoint.boxes import Grid, whole
from zeroshard.checkpoint.local_state import (
    LocalState,
    digest_part,
    global_shape,
    is_shaped,
    ranges_of,
    slot_of,
    total_digests,
)
from zeroshard.checkpoint.manifest import (
    DTYPES,
    VALUE,
    Dtype,
    Manifest,
    SavedParameter,
    SavedTensor,
)
from zeroshard.checkpoint.reader import Source
from zeroshard.core.layout import Slot
from zeroshard.errors import CheckpointError
from zeroshard.zero.optimizer import ShardedOptimizer
from zeroshard.zero.optimizer_shard import OptimizerChunk, OptimizerShard, OwnedFragment
from zeroshard.zero.unit import Unit

_STAGING_NBYTES = 32 << 20


def match(
    source: Source,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    strict: bool,
    elsewhere: Collection[str] = (),
) -> dict[str, str]:
    """The model's name of each parameter that is loaded -> the checkpoint's name. Checks their shapes.

    ``shapes``: of whole parameters of the model.

    ``strict``: every parameter of both sides must have a partner. The partner of a frozen parameter
    may have a digest instead of values. ``elsewhere``: parameters that other ranks have (of other
    pipeline stages).

    Raises:
        CheckpointError: shapes differ or, with ``strict``, partners are missing. The text lists them.
    """
    by_name = _by_name(source.parameters)
    names = {
        fqn: saved
        for fqn in shapes
        if (saved := by_name.get(fqn)) is not None and _has_partner(source.parameters[saved])
    }
    wrong = [*_other_shapes(source, shapes, names)]
    left = [fqn for fqn in shapes if fqn not in names]
    taken = {*names.values(), *(by_name[fqn] for fqn in elsewhere if fqn in by_name)}
    surplus = [fqn for fqn in source.parameters if fqn not in taken]
    if strict:
        sides = (("the checkpoint", left), ("the model", surplus))
        wrong += [f"{side} does not have {_some(lacks)}" for side, lacks in sides if lacks]
    if wrong:
        raise _other_model(source, wrong, some_match=bool(left or surplus))
    return names


def _other_model(source: Source, wrong: Sequence[str], *, some_match: bool) -> CheckpointError:
    more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
    hint = " load_module_strict=False loads the parameters whose names match." if some_match else ""
    return CheckpointError(
        f"{source.path} was saved from another model: {'; '.join(wrong[:5])}{more}.{hint}"
    )


def _by_name(parameters: Mapping[str, SavedParameter]) -> dict[str, str]:
    """Every name of a parameter -> the one under which it was saved."""
    return {n: fqn for fqn, saved in parameters.items() for n in (fqn, *saved.aliases)}


def _has_partner(saved: SavedParameter) -> bool:
    """Whether a parameter of a model can be loaded from this one, or compared with it."""
    return VALUE in saved.tensors or saved.digest is not None


def _other_shapes(
    source: Source, shapes: Mapping[str, tuple[int, ...]], names: Mapping[str, str]
) -> Iterator[str]:
    for fqn, saved in names.items():
        there = source.parameters[saved].shape
        if tuple(there) != tuple(shapes[fqn]):
            yield f"{fqn!r} has shape {list(shapes[fqn])}, but was saved with {list(there)}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more


def needed_files(
    manifest: Manifest, local: LocalState, own: int, ranks: Collection[int]
) -> set[int]:
    """The files that this rank will read, as indices into the manifest's ``files``.

    ``own``: the saved rank whose buffers it reads. ``ranks``: the saved ranks whose state it reads.
    """
    by_name = _by_name(manifest.parameters)
    found = {manifest.shared_file} if manifest.files else set()
    found |= {manifest.rank_files[rank] for rank in ranks if manifest.rank_files}
    found |= {buffer.files[own % len(buffer.files)] for buffer in manifest.buffers.values()}
    for unit in local.units:
        shard, layout = local.shard_of(unit), unit.layout
        is_whole = shard is not None and shard.is_whole
        low, high = (0, layout.full_numel) if is_whole else layout.shard_range(unit.comm.rank)
        slots = {slot.fqn: slot for slot in layout.slots}
        for part in layout.fragments_between(low, high):
            slot = slots[part.fqn]
            saved = manifest.parameters.get(by_name.get(part.fqn, ""))
            if saved is None or saved.shape != global_shape(slot):
                continue  # nothing is read: match() refuses another shape
            for tensor in saved.tensors.values():
                found |= _files_of(tensor, slot, part.begin, part.begin + part.numel)
    return found


def _files_of(tensor: SavedTensor, slot: Slot, begin: int, end: int) -> set[int]:
    """The files with the elements ``begin`` to ``end`` of a slot."""
    shape = global_shape(slot)
    parts = tensor.parts(shape)
    grid = Grid([box for box, _ in parts])
    found: set[int] = set()
    for box, low, high, _ in ranges_of(slot, begin, end):
        for index, part in grid.overlaps(box or whole(shape), low, high):
            first, last = grid.boxes[index].span(part)
            found |= {
                f.file for f in parts[index][1] if f.begin < last and first < f.begin + f.numel
            }
    return found


class Loader:
    """Fills one engine's state on this rank. Every rank makes the same calls.

    ``with_state``: load optimizer state too. ``max_buffer_nbytes`` limits the memory for values that are
    converted or copied to a device. ``only_finite``: NaN or infinity in trained parameters and their
    optimizer state is a failure. ``failure``: the first error; the engine then holds values of two
    runs.
    """

    def __init__(
        self,
        local: LocalState,
        source: Source,
        names: Mapping[str, str],
        *,
        with_state: bool,
        max_buffer_nbytes: int,
        only_finite: bool = False,
    ) -> None:
        self._only_finite = only_finite
        self._local = local
        self._source = source
        self._names = names
        self._with_state = with_state
        self._staging_nbytes = max(64, min(_STAGING_NBYTES, max_buffer_nbytes // 4))
        self.failure: CheckpointError | None = None

    def fill(self) -> None:
        """Read everything, unit by unit.

        After a failure nothing more is read, but this rank still takes part in every collective. The
        failure is kept in ``failure``.
        """
        for unit in self._local.units:
            unit.wait_for_unshard()
            unit.discard_unsharded()
            unit.increment_versions()
            shard = self._local.shard_of(unit)
            if shard is None:
                self._fill_plain(unit)
            else:
                self._fill_shard(shard)
        if self._local.optimizer is not None:
            self._local.optimizer.discard_fused_updates()
            self._local.optimizer.report()

    def _fill_plain(self, unit: Unit) -> None:
        shard_S = unit.store.acquire()
        slots = {slot.fqn: slot for slot in unit.layout.slots}
        try:
            for part in unit.layout.fragments(unit.comm.rank):
                here = shard_S[part.at : part.at + part.numel]
                self._read(slots[part.fqn], VALUE, part.begin, here)
            unit.all_gather_updated()
        finally:
            unit.store.release()

    def _fill_shard(self, shard: OptimizerShard) -> None:
        for chunk in shard.visit(changed=True):
            for fragment in chunk.fragments:
                slot = slot_of(shard.unit, fragment)
                if slot.fqn in self._names:
                    self._read(slot, VALUE, fragment.begin, fragment.master.view(-1), trained=True)
            chunk.write_param()
            if self._with_state:
                self._fill_state(shard.unit, chunk)
            if chunk is shard.chunks[-1] and not shard.is_whole:
                shard.unit.all_gather_updated()

    def _fill_state(self, unit: Unit, chunk: OptimizerChunk) -> None:
        optimizer = self._local.optimizer
        assert optimizer is not None
        for fragment in chunk.fragments:
            slot = slot_of(unit, fragment)
            saved = self._source.parameters.get(self._names.get(slot.fqn, ""))
            if saved is None:
                continue
            state: dict[str, Any] = {}
            for name, (kind, number) in saved.scalars.items():
                state[name] = _number(kind, number, name, fragment, optimizer)
            for name in saved.tensors:
                if name != VALUE:
                    state[name] = here = _place(optimizer, chunk, fragment, name)
                    self._read(slot, name, fragment.begin, here.view(-1), trained=True)
            optimizer.seat_state(chunk, fragment, state)

    def _read(
        self, slot: Slot, tensor: str, begin: int, out: Tensor, *, trained: bool = False
    ) -> None:
        """Read values of a slot from ``begin`` on into ``out``, of any dtype on any device."""
        if self.failure is None:
            try:
                self._read_whole(slot, tensor, begin, out)
                if trained and self._only_finite and not _is_finite(out):
                    raise CheckpointError(
                        f"{self._source.path}: {slot.fqn!r} ({tensor}) has values that are not finite."
                    )
            except CheckpointError as error:
                self.failure = error

    def _read_whole(self, slot: Slot, tensor: str, begin: int, out: Tensor) -> None:
        name = self._names.get(slot.fqn)
        saved = self._source.parameters[name].tensors.get(tensor) if name is not None else None
        if name is None or saved is None:
            return
        dtype = DTYPES[saved.dtype]
        for box, low, high, strip in ranges_of(slot, begin, begin + out.numel()):
            if strip is None and out.device.type == "cpu" and out.dtype == dtype:
                self._source.fill(name, tensor, low, out, box)
                continue
            numel = min(high - low, self._staging_nbytes // dtype.itemsize)
            piece = torch.empty(numel, dtype=dtype)
            for at in range(low, high, max(1, numel)):
                part = piece[: high - at]
                self._source.fill(name, tensor, at, part, box)
                if strip is None:
                    out[at - low : at - low + part.numel()].copy_(part)
                else:
                    _scatter(part, strip.views(out, begin, at, at + part.numel()))


def _is_finite(values: Tensor) -> bool:
    has_others = values.is_floating_point() or values.is_complex()
    return not has_others or bool(values.isfinite().all())


def _scatter(values: Tensor, places: Iterable[Tensor]) -> None:
    """Write 1-D ``values`` into ``places``, one after another."""
    at = 0
    for place in places:
        place.copy_(values[at : at + place.numel()].view(place.shape))
        at += place.numel()


def _place(
    optimizer: ShardedOptimizer, chunk: OptimizerChunk, fragment: OwnedFragment, name: str
) -> Tensor:
    """Memory for one kind of state of a fragment: where it is now, on the chunk's page, or new."""
    if name in chunk.state_C:
        return fragment.of(chunk.state_C[name])
    there = optimizer.state_of(fragment).get(name)
    if is_shaped(name, there, fragment):
        assert isinstance(there, Tensor)
        return there
    return torch.empty_like(fragment.master)


def _number(
    kind: Dtype | Literal["number"],
    number: float | int | bool,
    name: str,
    fragment: OwnedFragment,
    optimizer: ShardedOptimizer,
) -> object:
    """A single number as the optimizer keeps it.

    ``step`` is on the device only where a kernel reads it there (``capturable``, ``fused``).
    """
    if kind == "number":
        return number
    group = optimizer.inner.param_groups[fragment.group]
    near = name != "step" or group.get("capturable") or group.get("fused")
    return torch.tensor(number, dtype=DTYPES[kind], device=fragment.value.device if near else "cpu")


def digests_to_compare(
    local: LocalState, parameters: Mapping[str, SavedParameter], names: Mapping[str, str]
) -> dict[str, int]:
    """This rank's part of the digests of parameters that were saved without values, by parameter.

    Parameters whose dtype has changed are left out: their bytes cannot be compared.
    """
    found: dict[str, int] = {}
    for unit in local.units:
        wanted = {
            slot.fqn
            for slot in unit.layout.slots
            if slot.fqn in names and _has_only_digest(parameters[names[slot.fqn]], unit.row.param)
        }
        for piece in local.visit(unit) if wanted else ():
            if piece.fqn in wanted and piece.tensor == VALUE:
                found[piece.fqn] = found.get(piece.fqn, 0) + digest_part(piece)
    return found


def _has_only_digest(saved: SavedParameter, dtype: torch.dtype) -> bool:
    return (
        VALUE not in saved.tensors
        and saved.digest is not None
        and DTYPES[saved.digest.dtype] == dtype
    )


def refuse_other_frozen(
    parts: Sequence[Mapping[str, int]],
    parameters: Mapping[str, SavedParameter],
    names: Mapping[str, str],
    *,
    path: object,
) -> None:
    """Check that frozen parameters without saved values equal those that the run was trained with.

    ``parts``: what :func:`digests_to_compare` returned on each rank. ``names``: of these parameters.

    Raises:
        CheckpointError: the values differ.
    """
    other = []
    for fqn, total in total_digests(parts).items():
        digest = parameters[names[fqn]].digest
        if digest is not None and total != digest.sum:
            other.append(fqn)
    if other:
        raise CheckpointError(
            f"{path} was saved without its frozen parameters, and this model has other ones: "
            f"{_some(other)}. Build the model from the same base weights. With "
            "load_module_strict=False the frozen parameters of this model are used."
        )
