"""Reads a checkpoint that DeepSpeed wrote, without DeepSpeed.

With data parallelism only, a tag of ``W`` ranks is a directory of these files:

    stage 0      mp_rank_00_model_states.pt                        weights, the optimizer's state
    stage 1, 2   mp_rank_00_model_states.pt                        weights (compute dtype), names, shapes
                 [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt  masters and state of rank R
    stage 3      zero_pp_rank_R_mp_rank_00_model_states.pt         names, shapes, shards of frozen weights
                 [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt  masters and state of rank R

Of a model with layers of experts (``MoE``; DeepSpeed trains them at stages 0 to 2), also these. The file
of the model then has no expert, and optimizers have those of their rank:

    layer_L_expert_E_mp_rank_00_model_states.pt                    weights of expert E of layer L
    stage 0      expp_rank_P_mp_rank_00_optim_states.pt            the optimizer of a rank at place P

:mod:`zeroshard.checkpoint.deepspeed.slots` knows where in them each parameter is. All files are mapped
and described when the directory is opened. Of their tensors, only the pages are read that
:meth:`DeepSpeedReader.fill` needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from zeroshard.checkpoint import boxes
from zeroshard.checkpoint.boxes import Box, Grid, whole
from zeroshard.checkpoint.deepspeed.files import (
    RankFiles,
    are_odd,
    check_complete,
    check_ranks,
    files_of,
    is_data_first,
    is_of_expert,
    names_of_groups,
    partitions_of,
    refuse_parallel,
    tensors_of_experts,
    without_number,
)
from zeroshard.checkpoint.deepspeed.slots import (
    Chain,
    DeepSpeedSlot,
    FlatSpan,
    check_owners,
    like_master,
    places,
    shape_of,
    sharded_slots,
    whole_place,
    whole_slots,
)
from zeroshard.checkpoint.deepspeed.unpickle import (
    Likeness,
    check_values,
    checked_copy,
    load_plain,
    unread_in,
)
from zeroshard.checkpoint.manifest import VALUE, SavedParameter, SavedTensor, dtype_name
from zeroshard.errors import CheckpointError


class ZeroStageEnum(IntEnum):
    """DeepSpeed's names of the stages."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


_LIKENESSES = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": Likeness,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": Likeness,
    "deepspeed.runtime.zero.config.ZeroStageEnum": ZeroStageEnum,
    "deepspeed.utils.tensor_fragment.fragment_address": Likeness,
}
_OWN = frozenset({
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
    "skipped_steps", "global_steps", "global_samples", "micro_steps", "dp_world_size", "mp_world_size",
    "checkpoint_parallel_dimensions", "universal_checkpoint_info", "ds_config", "ds_version",
    "num_experts", "ds_autoep_layers", "autoep_layers", "folding",
})  # fmt: skip
"""Keys that DeepSpeed puts next to those of the program's ``client_state``."""
_COUNTERS = ("global_steps", "micro_steps", "global_samples", "skipped_steps")
_SCALER = {"cur_scale": "scale", "cur_iter": "step", "last_overflow_iter": "last_overflow"}


# ---------------------------------------------------------------------- what is beside parameters


def _shared(
    model: Mapping[str, Any], options: Sequence[Mapping[str, Any]], wrapper: Mapping[str, Any]
) -> dict[str, Any]:
    """The shared state; parts that were not saved are missing."""
    found: dict[str, Any] = {
        "counters": {name: int(model[name]) for name in _COUNTERS if name in model},
        "client_state": {key: item for key, item in model.items() if key not in _OWN},
    }
    schedule = model.get("lr_scheduler")
    if schedule is not None:
        found["scheduler"] = dict(schedule)
    if options:
        found["groups"] = _options(options)
    if wrapper.get("dynamic_loss_scale") is True:
        found["scaler"] = _scaler(wrapper)
    return found


def _options(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The options of each group, without its parameters and without state."""
    found = []
    for row in rows:
        kept = {key: item for key, item in row.items() if key not in ("params", "step")}
        found.append({key: _number(item) for key, item in kept.items() if not key.startswith("_")})
    return found


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _scaler(wrapper: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a dynamic loss scale. A static one is in the configuration."""
    theirs = vars(wrapper["loss_scaler"]) if "loss_scaler" in wrapper else wrapper
    found = {ours: _number(theirs[name]) for name, ours in _SCALER.items()}
    return {**found, "budget": _number(theirs.get("cur_hysteresis", 1))}  # stage 0 has none


# ---------------------------------------------------------------------- the source


class DeepSpeedReader:
    """One tag that DeepSpeed saved with data parallelism only, as a ``Source``.

    ``groups``: the names of the trained parameters in each group of the optimizer, in its order. The
    files of stages 1 to 3 contain them. Those of stage 0 do not, so they are needed unless one group has
    all parameters. ``left_behind``: one text for each thing that the files hold and that is not loaded.
    ``parameters`` have no ``fragments``: :meth:`fill` knows where values are.

    Raises:
        CheckpointError: files are missing, damaged or of different saves; another kind of parallelism was
            used; or something other than ``client_state`` needs unpickling.
    """

    def __init__(self, path: str | Path, *, groups: Sequence[Sequence[str]] | None = None) -> None:
        self.path, self.mesh = Path(path), ""
        self.left_behind: Sequence[str] = []
        self._places: dict[tuple[str, str], FlatSpan] = {}
        files = files_of(self.path)
        self._models = [load_file(file) for file in files.model]
        optims = [load_file(file) for file in files.optim]
        try:
            _check_own(self.path, self._models)
            check_complete(self.path, files.experts, self._models[0].get("num_experts"))
            self._experts = tensors_of_experts(
                {file: load_file(file) for _, file in sorted(files.experts.items())}
            )
            self._weights = self._read_weights()
            slots, options, wrapper = self._optimizer(files, optims, groups)
            self.parameters: Mapping[str, SavedParameter] = self._describe(slots)
            if optims and not slots[0].is_cut and not _is_round_robin(self._models[0]):
                wrappers = [optim["optimizer_state_dict"] for optim in optims]
                check_owners(files.optim, slots, wrappers)
            self._buffers = [self._buffers_of(model) for model in self._models]
            self.dp_ranks: Sequence[int] = range(len(self._buffers))  # whose buffers were saved
            self._shared = _shared(self._models[0], options, wrapper)
            for key in ("data_sampler", "random_ltd"):
                if self._models[0].get(key) is not None:
                    self._leave(f"the state of {key!r}")
        except CheckpointError:
            raise
        except Exception as error:  # the values under known keys can be of any type
            raise CheckpointError(
                f"{self.path} does not have the layout of DeepSpeed 0.19 ({type(error).__name__}: "
                f"{_first_line(error)}). Load it with the release that wrote it and save it with "
                "0.19."
            ) from error

    def fill(self, fqn: str, tensor: str, begin: int, out: Tensor, box: Box | None = None) -> None:
        """See ``Source``."""
        place, stored = self._places[fqn, tensor], whole(self.parameters[fqn].shape)
        if box is None or box == stored:
            place.read(begin, out)
        else:
            boxes.fill(
                out, Grid([stored]), box, begin, lambda _, first, memory: place.read(first, memory)
            )

    def buffers(self, rank: int) -> dict[str, Tensor]:
        """See ``Source``. Stages 0 to 2 save those of rank 0 only."""
        own = self._buffers[rank % len(self._buffers)]
        for buffer in own.values():
            check_values(buffer)
        return {name: buffer.clone() for name, buffer in own.items()}

    def shared(self, *, allow_pickle: bool = False) -> dict[str, Any]:
        """See ``Source``. Nothing is unpickled, even with ``allow_pickle``.

        An object in ``client_state`` becomes an :class:`~zeroshard.checkpoint.deepspeed.unpickle.Unread`,
        which raises when it is used.
        """
        return checked_copy(self._shared)  # its tensors are mapped; files may be closed first

    def ranks(self) -> list[dict[str, Any]]:
        """See ``Source``. Empty: DeepSpeed saves no generators."""
        return []

    def probe(self, rank: int) -> None:
        """See ``Source``. Nothing to do: small values were read when the directory was opened."""

    def close(self) -> None:
        """See ``Source``."""
        self._places.clear()
        self._models.clear()
        self._weights.clear()
        self._experts.clear()
        self._buffers.clear()

    # ------------------------------------------------------------------ once, at the start

    def _optimizer(
        self, files: RankFiles, optims: list[dict[str, Any]], groups: Sequence[Sequence[str]] | None
    ) -> tuple[list[DeepSpeedSlot], list[dict[str, Any]], Mapping[str, Any]]:
        """The optimizer's slots, its groups' options, and the state of DeepSpeed's wrapper around it."""
        model = self._models[0]
        if files.places and optims:
            raise CheckpointError(
                f"{files.places[0]} is of stage 0, and the others are not: they belong to different "
                "saves under one tag. Remove the older files."
            )
        if model["param_shapes"] is None:
            if optims:
                raise ValueError("no shapes of parameters")
            wrapper = model["optimizer"]
            if files.places and wrapper is not None:
                return self._optimizers_of_places(files)
            if wrapper is None and files.model[0].name.startswith("zero_"):
                raise CheckpointError(
                    f"{self.path} was saved at stage 3 by an engine without an optimizer, which "
                    "does not save weights. Load the weights from the source that this engine "
                    "used."
                )
            if wrapper is None:
                return [], [], {}
            wrapper = dict(wrapper)
            return (*whole_slots(self.path, wrapper, self._weights, groups), wrapper)
        ranks = int(model["dp_world_size"])
        check_ranks(self.path, files.optim, "optim", ranks)
        wrappers = [dict(optim["optimizer_state_dict"]) for optim in optims]
        shapes = model["param_shapes"]
        first = partitions_of(wrappers[0], shapes)
        for file, wrapper in zip(files.optim, wrappers, strict=True):
            if partitions_of(wrapper, shapes) != first or are_odd(first, shapes, ranks):
                raise CheckpointError(
                    f"{file} says that state is split into {wrapper['partition_count']} parts, but "
                    f"{files.model[0].name} was saved by {ranks} ranks. They belong to different "
                    "saves, or groups of ranks have copies of the state, which is not supported."
                )
        # Only stage 1 has the optimizer for bf16 with fp32 gradients, which does not save a stage.
        is_cut = int(wrappers[0].get("zero_stage", 1)) == 3
        check_ranks(self.path, files.model, "model", ranks if is_cut else 1)
        slots, options = sharded_slots(
            wrappers, shapes, is_cut=is_cut, partitions=first, data_first=is_data_first(model)
        )
        return slots, options, wrappers[0]

    def _optimizers_of_places(
        self, files: RankFiles
    ) -> tuple[list[DeepSpeedSlot], list[dict[str, Any]], Mapping[str, Any]]:
        """Of stage 0 with experts. Each optimizer has those of its place, and all that is no expert."""
        wrappers = [dict(load_file(file)["optimizer"]) for file in files.places]
        dense = [name for name in self._weights if name not in self._experts]
        experts = [name for name in self._weights if name in self._experts]
        found: list[DeepSpeedSlot] = []
        for place, wrapper in enumerate(wrappers):
            inner = wrapper if "param_groups" in wrapper else dict(wrapper["optimizer_state_dict"])
            names = names_of_groups(
                self.path, inner["param_groups"], dense, experts, place, len(wrappers)
            )
            slots, options = whole_slots(self.path, wrapper, self._weights, names)
            found += [slot for slot in slots if not place or all(map(is_of_expert, slot.shapes))]
        return found, options, wrappers[0]

    def _read_weights(self) -> dict[str, Tensor]:
        """The parameters in the first model file, without aliases, and of all experts."""
        model = self._models[0]
        aliases, buffers = _aliases(model), set(model["buffer_names"])
        found = {}
        for name, item in model["module"].items():
            if not isinstance(item, Tensor):
                self._leave(f"{name!r} of the module, which is not a tensor")
            elif name not in buffers and name not in aliases:
                found[name] = item
        own = {without_number(name) for name in buffers}
        found |= {n: item for n, item in self._experts.items() if without_number(n) not in own}
        return found

    def _buffers_of(self, model: Mapping[str, Any]) -> dict[str, Tensor]:
        """The buffers in a model file, and those of all experts."""
        module, names = model["module"], set(model["buffer_names"])
        own = {n: b for n, b in module.items() if n in names and isinstance(b, Tensor)}
        return own | {n: b for n, b in self._experts.items() if n not in self._weights}

    def _describe(self, slots: Sequence[DeepSpeedSlot]) -> dict[str, SavedParameter]:
        """All parameters, in the module's order. Fills ``_places`` with where each tensor is."""
        rows: dict[str, dict[str, Any]] = {}
        for slot in slots:
            scalars = self._place_slot(slot)
            for fqn, shape in slot.shapes.items():
                rows[fqn] = {"shape": shape, "group": slot.group, "scalars": scalars}
        has_optimizer = bool(slots)
        for fqn, (shape, place) in self._others(slots, rows).items():
            rows[fqn] = {"shape": shape}
            self._places[fqn, VALUE] = place
        other_names: dict[str, list[str]] = {}
        for alias, fqn in _aliases(self._models[0]).items():
            other_names.setdefault(fqn, []).append(alias)
        tensors: dict[str, dict[str, SavedTensor]] = {fqn: {} for fqn in rows}
        for (fqn, key), place in self._places.items():
            dtype = dtype_name(place.dtype, where=f"{key} of {fqn!r}")
            tensors[fqn][key] = SavedTensor(dtype=dtype, fragments=())
        in_order = dict.fromkeys([*self._models[0]["module"], *self._experts])
        order = {name: at for at, name in enumerate(in_order)}
        return {
            fqn: SavedParameter(
                trained="group" in rows[fqn] or not has_optimizer,
                aliases=tuple(other_names.get(fqn, ())),
                tensors=tensors[fqn],
                **rows[fqn],
            )
            for fqn in sorted(rows, key=lambda fqn: order.get(fqn, len(order)))
        }

    def _place_slot(self, slot: DeepSpeedSlot) -> dict[str, Any]:
        """Note where the tensors of a slot's parameters are. Returns the slot's single numbers."""
        tensors: dict[str, list[Tensor]] = {VALUE: slot.masters}
        scalars: dict[str, Any] = {}
        for key in slot.states[0]:
            found = [state[key] for state in slot.states]
            like = [
                like_master(key, *row)
                for row in zip(found, slot.masters, slot.padding, strict=True)
            ]
            pieces = [piece for piece in like if piece is not None]
            if len(pieces) == len(found):
                tensors[key] = pieces
                continue
            numbers = [_number(item) for item in found]
            if isinstance(numbers[0], (bool, int, float)):
                what = f"{key!r} of {next(iter(slot.shapes))!r}"
                kind = "F32" if key == "step" else "number"  # as in torch's optimizers
                if isinstance(found[0], Tensor):
                    kind = dtype_name(found[0].dtype, where=what)
                scalars[key] = (kind, self._agreed(what, numbers))
            elif numbers[0] is not None:
                self._leave(
                    f"{key!r} of the optimizer, whose shape differs from that of its parameter"
                )
        for key, pieces in tensors.items():
            for fqn, place in places(self.path, slot, pieces):
                self._places[fqn, key] = place
        return scalars

    def _others(
        self, slots: Sequence[DeepSpeedSlot], rows: Mapping[str, Any]
    ) -> dict[str, tuple[tuple[int, ...], FlatSpan]]:
        """Parameters that the optimizer does not have: frozen ones."""
        if not (slots and slots[0].is_cut):
            found = self._weights.items()
            return {fqn: (shape_of(w.shape), whole_place(w)) for fqn, w in found if fqn not in rows}
        others = {}
        for fqn, size in (self._models[0]["frozen_param_shapes"] or {}).items():
            shape = shape_of(size)
            pieces = [model["frozen_param_fragments"][fqn] for model in self._models]
            part = -(-prod(shape) // len(pieces))
            if any(piece.numel() != part or piece.dtype != pieces[0].dtype for piece in pieces):
                raise CheckpointError(
                    f"{self.path}: the frozen parameter {fqn!r} of shape {list(shape)} is saved "
                    f"in pieces of {[piece.numel() for piece in pieces][:8]} elements, not of "
                    f"{part}. Files may belong to different saves. Or the parameter was on NVMe, "
                    "and is not in these files."
                )
            chains = [Chain([piece]) for piece in pieces]
            others[fqn] = (shape, FlatSpan(chains, 0, part, pieces[0].dtype))
        return others

    def _agreed(self, what: str, numbers: Sequence[Any]) -> Any:
        """The number, which all ranks must have saved alike."""
        for rank, number in enumerate(numbers):
            if number != numbers[0]:
                raise CheckpointError(
                    f"{self.path}: {what} is {numbers[0]} in the file of rank 0 and {number} in "
                    f"that of rank {rank}: they belong to different saves."
                )
        return numbers[0]

    def _leave(self, text: str) -> None:
        if text not in self.left_behind:
            self.left_behind = [*self.left_behind, text]


def load_file(path: Path) -> dict[str, Any]:
    """The content of one file.

    Only ``client_state``, the module and ``ds_config`` may hold objects that were not unpickled.

    Raises:
        CheckpointError: the file is damaged, holds no dict, or needs unpickling elsewhere.
    """
    found = load_plain(path, _LIKENESSES)
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} does not contain a dict, unlike the files of DeepSpeed.")
    own = {key: item for key, item in found.items() if key in _OWN | {"optimizer_state_dict"}}
    for key in own.keys() - {"module", "ds_config"}:
        for unread in unread_in(own[key]):
            unread.refuse()
    return found


def _check_own(path: Path, models: Sequence[Mapping[str, Any]]) -> None:
    """Check that the files are of one save, with data parallelism and experts only."""
    first = models[0]
    for rank, model in enumerate(models):
        if model["global_steps"] != first["global_steps"]:
            raise CheckpointError(
                f"{path}: the model file of rank 0 is of step {first['global_steps']}, that of "
                f"rank {rank} of step {model['global_steps']}: they belong to different saves."
            )
    sizes = {"mp_world_size": first.get("mp_world_size", 1)}
    sizes |= first.get("checkpoint_parallel_dimensions") or {}
    parallel = [f"{name} {size}" for name, size in sizes.items() if size != 1]
    parallel += [key for key in ("ds_autoep_layers", "autoep_layers") if first.get(key) is not None]
    if parallel:
        refuse_parallel(path, ", ".join(parallel))


def _is_round_robin(model: Mapping[str, Any]) -> bool:
    """Whether ``round_robin_gradients`` was on. DeepSpeed then notes places of parameters that are not
    those where it keeps them."""
    config = model.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    return isinstance(zero, Mapping) and bool(zero.get("round_robin_gradients"))


def _aliases(model: Mapping[str, Any]) -> dict[str, str]:
    """Other names of parameters (tied weights) -> the name under which they are saved."""
    module = model["module"]
    if model["shared_params"] is not None:
        return {
            alias: fqn
            for alias, fqn in model["shared_params"].items()
            if alias not in module
            or module[alias].shape == module[fqn].shape  # else two empty tensors may look tied
        }
    seen: dict[tuple[Any, ...], str] = {}  # stage 0 does not list them; they share one storage
    found = {}
    for name, item in module.items():
        if isinstance(item, Tensor) and item.numel():
            first = seen.setdefault((item.data_ptr(), item.shape, item.stride()), name)
            if first != name:
                found[name] = first
    return found


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
