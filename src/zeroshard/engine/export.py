"""Writes the weights of a running engine to files for other libraries, at any stage.

Every rank takes part: units are gathered one by one, and rank 0 writes. All ranks exchange the outcome at
fixed points, so that a failure on rank 0 leaves no rank waiting.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.checkpoint.directory import check_directory
from zeroshard.checkpoint.export import Exporter, pieces_of, write_bins
from zeroshard.checkpoint.export_plan import (
    MAX_SHARD_SIZE,
    SAFETENSORS,
    Weight,
    loaded_name,
    parse_size,
    plan_shards,
)
from zeroshard.checkpoint.local_state import global_shape, persistent_buffers, state_names
from zeroshard.comm.agreement import run_on_all_ranks
from zeroshard.core.layout import Slot
from zeroshard.engine.expert_export import SharedExperts, find_shared, names_of_experts
from zeroshard.errors import UsageError
from zeroshard.zero.unit import Unit

LP_PARAMS = "lp_params"


def save_16bit_model(
    engine: Any,
    save_dir: str | Path,
    save_filename: str = SAFETENSORS,
    exclude_frozen_parameters: bool = False,
) -> bool:
    """Write all weights of the model, in the dtype in which it computes, to one file. Collective.

    Works at every stage. A file name that ends in ``.safetensors`` is written in pieces by rank 0. Any
    other name (DeepSpeed's is ``pytorch_model.bin``) is written with ``torch.save``: rank 0 then needs
    host memory for the whole model. Tied weights have one name in safetensors, and all their names in
    other files.

    Returns True.

    Raises:
        CheckpointError: on every rank, if rank 0 cannot write.
        UsageError: ``save_dir`` is no path, ``save_filename`` has a directory, or weights are offloaded.
    """
    call = "save_16bit_model"
    check_directory(save_dir, f"engine.{call}()")
    if Path(save_filename).name != str(save_filename):
        raise UsageError(
            f"{call}(save_filename={save_filename!r}): give a name without a directory."
        )
    weights = _weights_of(engine, exclude_frozen_parameters=exclude_frozen_parameters)
    with engine._watch.recorder.in_section("export"):
        if str(save_filename).endswith(".safetensors"):
            _write(engine, call, weights, save_dir, filename=save_filename, max_shard_size=None)
            return True
        state = _state_dict(engine, call, weights)
        agreed = _Agreed(engine, call)
        agreed.run(_write_bin, state, Path(save_dir), str(save_filename))
        agreed.settle()
    return True


def save_pretrained(
    engine: Any,
    save_dir: str | Path,
    max_shard_size: int | str | None = MAX_SHARD_SIZE,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write a directory that ``from_pretrained`` loads: safetensors and configuration. Collective.

    The dtype is that in which the model computes. Rank 0 needs host memory for one unit and a few pieces.
    Of a model with adapters (PEFT) only these are saved, by its own ``save_pretrained``, as without an
    engine.

    Raises:
        CheckpointError: on every rank, if rank 0 cannot write.
        UsageError: ``save_dir`` or ``max_shard_size`` is not understood, or weights are offloaded.
    """
    call = "save_pretrained"
    check_directory(save_dir, f"engine.{call}()")
    parse_size(max_shard_size)
    module = engine.module
    adapters = getattr(module, "peft_config", None)
    weights = _weights_of(
        engine,
        exclude_frozen_parameters=exclude_frozen_parameters,
        adapters=tuple(adapters) if adapters else None,
    )
    with engine._watch.recorder.in_section("export"):
        if adapters:
            state = _state_dict(engine, call, weights)
            agreed = _Agreed(engine, call)
            agreed.run(module.save_pretrained, str(save_dir), state_dict=state)
        else:
            agreed = _write(
                engine, call, weights, save_dir, filename=SAFETENSORS, max_shard_size=max_shard_size
            )
            agreed.run(_save_config, module, Path(save_dir), weights)
        agreed.settle()


def consolidated_16bit_state_dict(
    engine: Any, exclude_frozen_parameters: bool = False
) -> dict[str, Tensor] | None:
    """The full state dict on rank 0, in host memory; None on other ranks. Collective.

    Dtypes are those of the model. Keys and their order are those of ``module.state_dict()``. Tied weights
    are one tensor.
    """
    weights = _weights_of(engine, exclude_frozen_parameters=exclude_frozen_parameters)
    with engine._watch.recorder.in_section("export"):
        state = _state_dict(engine, "consolidated_16bit_state_dict", weights)
    return state if engine.is_main_rank else None


# ---------------------------------------------------------------------- which weights


@dataclass(frozen=True, slots=True)
class _Weights:
    """What an export writes.

    ``params``: those of this rank by first name, in the order of the units. ``names``: all names of each
    parameter of the whole model. ``buffers``: persistent ones, without those of ``experts``, which ranks
    share. ``planned``: descriptions of all tensors, in the order of :func:`_stream`. Every rank has
    rank 0's names.
    """

    params: dict[str, nn.Parameter]
    names: dict[str, tuple[str, ...]]
    buffers: dict[str, Tensor]
    experts: SharedExperts
    planned: list[Weight]


def _weights_of(
    engine: Any, *, exclude_frozen_parameters: bool, adapters: Sequence[str] | None = None
) -> _Weights:
    engine.life.check("saving weights", LP_PARAMS)
    module = engine.module
    names: dict[int, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    taken = {
        slot.fqn: param
        for unit in engine.runtime.units
        for slot, param in zip(unit.layout.slots, unit.params, strict=True)
        if _is_wanted(slot.fqn, param, exclude_frozen_parameters, adapters)
    }
    own = {fqn: _first(fqn, names[id(param)]) for fqn, param in taken.items()}
    buffers = persistent_buffers(module) if adapters is None else {}
    experts = find_shared(engine, own, buffers)
    if experts.buffers:
        apart = set(names_of_experts(module))
        buffers = {name: buffer for name, buffer in buffers.items() if name not in apart}
    tied = _tied_names(module)
    aliases: dict[str, tuple[str, ...]] = {}
    planned: list[Weight] = []
    for unit, slots in _slots_of(engine, taken):
        for slot, all_names in experts.named(unit, slots, own):
            aliases[all_names[0]] = all_names
            name = loaded_name(all_names, tied)
            planned.append(Weight(name, taken[slot.fqn].dtype, global_shape(slot)))
    planned += [Weight(name, each.dtype, tuple(each.shape)) for name, each in buffers.items()]
    planned += [Weight(b.name, getattr(torch, b.dtype), tuple(b.shape)) for b in experts.buffers]
    return _Weights(taken, aliases, buffers, experts, planned)


def _slots_of(engine: Any, taken: Collection[str]) -> Iterator[tuple[Unit, list[Slot]]]:
    """The units of which some parameters are exported, and these."""
    for unit in engine.runtime.units:
        if slots := [slot for slot in unit.layout.slots if slot.fqn in taken]:
            yield unit, slots


def _is_wanted(
    fqn: str, param: nn.Parameter, exclude_frozen: bool, adapters: Sequence[str] | None
) -> bool:
    """Whether the parameter is exported. With adapters: if it is trained, or belongs to an adapter."""
    if adapters is not None:
        return param.requires_grad or any(part in adapters for part in fqn.split("."))
    return param.requires_grad or not exclude_frozen


def _first(fqn: str, names: Sequence[str]) -> tuple[str, ...]:
    return (fqn, *(name for name in names if name != fqn))


def _tied_names(module: nn.Module) -> Iterable[str]:
    """For a Hugging Face model: patterns of the names that it ties to others after loading."""
    found: Any = getattr(module, "all_tied_weights_keys", None)  # includes those of submodules
    return found or getattr(module, "_tied_weights_keys", None) or ()


# ---------------------------------------------------------------------- gathered and written


def _stream(engine: Any, weights: _Weights) -> Generator[tuple[str, Tensor], None, None]:
    """Full values by first name, one unit in memory at a time, then the buffers. Collective."""
    engine._update.all_gather_late()
    for unit, slots in _slots_of(engine, weights.params):
        unit.wait_for_unshard()
        unit.write_back_edits()
        nbytes = 0 if unit.resident else unit.full_nbytes
        with engine.runtime.ledger.lend("saving weights", nbytes):
            full_N = unit.full_N if unit.resident else unit.gathered_copy()
            yield from weights.experts.values(unit, slots, full_N)
            del full_N
    yield from weights.buffers.items()
    yield from weights.experts.values_of_buffers(engine.module)


class _Agreed:
    """Runs work on rank 0. At :meth:`settle` all ranks learn whether it succeeded. Collective."""

    def __init__(self, engine: Any, call: str) -> None:
        engine.wait_for_checkpoint()  # an asynchronous save uses the same control group
        self._engine = engine
        self._call = call
        self._failure: Exception | None = None

    def run(self, work: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call ``work`` on rank 0, unless earlier work failed."""
        if not self._engine.is_main_rank or self._failure is not None:
            return None
        try:
            return work(*args, **options)
        except Exception as error:  # settle() raises it on all ranks
            self._failure = error
            return None

    def settle(self) -> None:
        """Exchange the outcome between all ranks.

        Raises:
            CheckpointError: on every rank, if work on rank 0 failed.
        """
        control_group = self._engine._watch.control_group

        def tell() -> None:
            if self._failure is not None:
                raise self._failure

        run_on_all_ranks(control_group, f"{self._call}() failed", "rank 0 writes weights", tell)


def _write(
    engine: Any,
    call: str,
    weights: _Weights,
    save_dir: str | Path,
    *,
    filename: str,
    max_shard_size: int | str | None,
) -> _Agreed:
    """Stream all weights into safetensors files. Every rank knows the plan, so also where files end."""
    planned = weights.planned
    shards = plan_shards(planned, filename=filename, max_nbytes=parse_size(max_shard_size))
    ends = {shard.weights[-1].name for shard in shards if shard.weights}
    names = iter(weight.name for weight in planned)
    agreed = _Agreed(engine, call)
    with ExitStack() as stack:

        def begin() -> Exporter:
            return stack.enter_context(
                Exporter(planned, save_dir, filename=filename, max_shard_size=max_shard_size)
            )

        exporter = agreed.run(begin)
        agreed.settle()
        for _, tensor in stack.enter_context(closing(_stream(engine, weights))):
            name = next(names)
            if exporter is not None:
                agreed.run(exporter.put, name, pieces_of(tensor))
            del tensor  # a view of its unit, which must be freed before the next one is gathered
            if name in ends:
                agreed.settle()
        if exporter is not None:
            agreed.run(exporter.finish)
        agreed.settle()
    return agreed


def _state_dict(engine: Any, call: str, weights: _Weights) -> dict[str, Tensor]:
    """Host copies under all names, ordered as in ``module.state_dict()``; empty on other ranks than 0."""
    agreed = _Agreed(engine, call)
    copies: dict[str, Tensor] = {}

    def keep(fqn: str, tensor: Tensor) -> None:
        copies[fqn] = tensor.to("cpu", copy=True)

    with closing(_stream(engine, weights)) as stream:
        for fqn, tensor in stream:
            agreed.run(keep, fqn, tensor)
            del tensor  # see _write
    agreed.settle()
    if not engine.is_main_rank:
        return {}
    canonical = {name: fqn for fqn, names in weights.names.items() for name in names}
    canonical |= {name: name for name in copies}
    return {
        name: copies[canonical[name]] for name in _state_order(engine, weights) if name in canonical
    }


def _state_order(engine: Any, weights: _Weights) -> Iterator[str]:
    for name in state_names(engine.module):
        yield name
        yield from weights.experts.after.get(name, ())


def _write_bin(state: dict[str, Tensor], save_dir: Path, filename: str) -> None:
    weights = [Weight(name, t.dtype, tuple(t.shape)) for name, t in state.items()]
    shards = plan_shards(weights, filename=filename, max_nbytes=None)
    write_bins(shards, save_dir, filename=filename, read=state.__getitem__)


# ---------------------------------------------------------------------- beside the weights


def _save_config(module: nn.Module, save_dir: Path, weights: _Weights) -> None:
    """Save the module's configuration, which ``from_pretrained`` reads first, if it has one."""
    config: Any = getattr(module, "config", None)
    if hasattr(config, "save_pretrained"):
        config = copy.deepcopy(config)
        config.architectures = [type(module).__name__]
        numels: Counter[torch.dtype] = Counter()
        for param in weights.params.values():
            numels[param.dtype] += param.numel()
        if numels:
            key = "dtype" if hasattr(config, "dtype") else "torch_dtype"
            setattr(config, key, str(max(numels, key=numels.__getitem__)).removeprefix("torch."))
        config.save_pretrained(str(save_dir))
    generation: Any = getattr(module, "generation_config", None)
    if hasattr(generation, "save_pretrained"):
        generation.save_pretrained(str(save_dir))
