"""Which sizes the axes of the mesh may have in a search, and which of them a model and a batch allow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import gcd
from typing import Any

from torch import nn

from zeroshard.config.machine_file import MachineFile
from zeroshard.core.mesh import DIMS
from zeroshard.errors import UnsupportedError, UsageError
from zeroshard.experts.layer import MoE
from zeroshard.experts.placement import expert_layers
from zeroshard.experts.stacked import planned_stacks
from zeroshard.parallel.split import PipelineModel
from zeroshard.parallel.tensor_plan import decide
from zeroshard.planner.candidates import SCHEDULE, Sizes
from zeroshard.planner.fakes import fake_tensors
from zeroshard.planner.model_source import cut_evenly

NODE_RANKS = 8
"""Ranks of a node, where no machine says how many."""

MOST_STAGES = 8
"""The most pipeline stages that are tried if no numbers are named."""

SEARCHED = ("tensor", "pipeline", "expert")
"""The axes of a mesh that can be searched."""

_SEARCHED = "The axes that can be searched are tensor, pipeline and expert."


def read_axes(text: str) -> dict[str, tuple[int, ...]]:
    """The axes that a search may choose, each with its sizes; no sizes: every one that divides the ranks.

    >>> read_axes("tensor"), read_axes("tensor=1,4,pipeline")
    ({'tensor': ()}, {'tensor': (1, 4), 'pipeline': ()})

    Raises:
        UsageError: an axis is not known or not searched, or a size is no whole number of at least 1.
    """
    axes: dict[str, list[int]] = {}
    name = ""
    for item in text.split(","):
        word = item.strip()
        if "=" in word or not word.isdigit():
            name, _, word = (part.strip() for part in word.partition("="))
            _check_name(name)
            axes[name] = []
            if word == "" and "=" not in item:
                continue
        if not name or not (word.isascii() and word.isdigit()) or int(word) < 1:
            raise UsageError(
                f"--fit-axes is {text!r}, of which {word!r} is not a number of ranks. Give an axis, and "
                "its sizes if not all shall be tried: tensor, or tensor=1,2,4."
            )
        axes[name].append(int(word))
    return {axis: tuple(sorted(set(sizes))) for axis, sizes in axes.items()}


def _check_name(name: str) -> None:
    if name in SEARCHED:
        return
    if name in DIMS:
        why = (
            "its size is not searched, so write it into the configuration (parallel.sequence)"
            if name == "sequence"
            else "how many ranks share the samples of a step follows from the other axes"
        )
        raise UsageError(f"--fit-axes names {name}: {why}. {_SEARCHED}")
    raise UsageError(f"--fit-axes names {name!r}, which is not an axis of a mesh. {_SEARCHED}")


def sizes_of(
    axes: Mapping[str, Sequence[int]],
    *,
    ranks: int,
    machine: MachineFile | None,
    ranks_per_node: int | None = None,
) -> list[Sizes]:
    """The meshes to try, those with fewer ranks for a copy of the model first, and of these pipelines.

    Of meshes that are equal in both, those in which fewer ranks share experts come first.

    ``axes``: as :func:`read_axes` gives them. ``ranks_per_node``: instead of those of the machine.
    """
    every: list[Sequence[int | None]] = [
        axis_sizes(axis, axes[axis], ranks=ranks, machine=machine, ranks_per_node=ranks_per_node)
        if axis in axes
        else (None,)
        for axis in SEARCHED
    ]
    found = [Sizes(*sizes) for sizes in product(*every)]
    return sorted(
        found,
        key=lambda own: (
            (own.tensor or 1) * (own.pipeline or 1), own.tensor or 1, own.expert or 1,
        ),
    )  # fmt: skip


_WHAT = {
    "tensor": "tensor ranks",
    "pipeline": "pipeline stages",
    "expert": "ranks that share experts",
}


def axis_sizes(
    axis: str,
    asked: Sequence[int],
    *,
    ranks: int,
    machine: MachineFile | None,
    ranks_per_node: int | None = None,
) -> tuple[int, ...]:
    """The sizes of an axis to try: ``asked``, or all that divide the run and a node.

    Pipeline stages need not divide a node, and are at most :data:`MOST_STAGES` if no numbers are asked
    for. Tensor ranks wait for each other in every layer, so they are inside a node, which has
    ``ranks_per_node`` or the devices of the machine. Where neither is given, the sizes that are asked for
    need only divide ``ranks``, and others divide :data:`NODE_RANKS` too.

    Raises:
        UsageError: a size does not divide the ranks of the run; of tensor ranks, those of a node.
    """
    node, named = ranks_per_node, "--ranks-per-node"
    if node is None and machine is not None and machine.devices_per_node is not None:
        node, named = round(machine.devices_per_node.value), repr(machine.name)
    for size in asked:
        if ranks % size:
            raise UsageError(
                f"--fit-axes: {size} {_WHAT[axis]} do not divide --ranks {ranks}. Sizes that do: "
                f"{_listed(_divisors(ranks))}."
            )
        if axis == "tensor" and node is not None and node % size:
            raise UsageError(
                f"--fit-axes: {size} tensor ranks do not divide the {node} devices of a node of {named}, "
                "and tensor ranks wait for each other in every layer. Sizes that do: "
                f"{_listed(_divisors(gcd(ranks, node)))}."
            )
    if axis == "pipeline":
        return tuple(asked) or tuple(size for size in _divisors(ranks) if size <= MOST_STAGES)
    return tuple(asked) or _divisors(gcd(ranks, node or NODE_RANKS))


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(size for size in range(1, number + 1) if number % size == 0)


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))


def check_axes_are_free(base: Mapping[str, Any], axes: Mapping[str, Sequence[int]]) -> None:
    """Check that nothing in a configuration fixes what follows from the axes."""
    parallel = base.get("parallel") or {}
    tensor = base.get("tensor_parallel") or {}
    fixed = [key for key in ("data_shard",) if parallel.get(key) not in (None, "auto")]
    named = [f"parallel.{key}" for key in fixed]
    if base.get("data_parallel_size") is not None:
        named.append("data_parallel_size")
    if named:
        raise UsageError(
            f"--fit-axes {','.join(axes)} tries several numbers of data-parallel ranks, and {named[0]} "
            "fixes one. Leave it out of the configuration."
        )
    own = parallel.get("tensor")
    if "tensor" not in axes or tensor.get("autotp_size") or tensor.get("tp"):
        return
    if own not in (None, "auto", 1):
        raise UsageError(
            f"--fit-axes tensor lets the engine cut the model, and with parallel.tensor {own} the "
            "program cuts it. Write tensor_parallel.autotp_size instead, if the engine can cut it."
        )


def samples_by_sizes(
    samples: int, sizes: Sequence[Sizes], ranks: int, *, tensor: int = 1
) -> tuple[dict[Sizes, int], dict[Sizes, str]]:
    """Samples of a data-parallel rank by mesh, and why a mesh cannot be used.

    ``samples``: of all ranks in a step. They stay. ``tensor``: tensor ranks where this axis stays.
    """
    found: dict[Sizes, int] = {}
    refused: dict[Sizes, str] = {}
    for each in sizes:
        stages, copy = each.pipeline or 1, (each.tensor or tensor) * (each.pipeline or 1)
        data = ranks // copy
        if ranks % copy:
            refused[each] = f"{copy} ranks for a copy of the model do not divide {ranks} ranks"
        elif samples % data:
            refused[each] = (
                f"{samples} samples of a step do not divide over {data} data-parallel ranks"
            )
        elif samples // data < stages:
            refused[each] = (
                f"a data-parallel rank has {samples // data} samples in a step, fewer than the "
                f"{stages} micro-batches that the schedule {SCHEDULE} needs"
            )
        else:
            found[each] = samples // data
    return found, refused


def refused_by_model(build: Callable[[], nn.Module], sizes: Sequence[Sizes]) -> dict[Sizes, str]:
    """The meshes over which a model cannot be cut, with the reason. The model has no memory."""
    found: dict[Sizes, str] = {}
    by_axis: dict[tuple[str, int], str] = {}
    with fake_tensors():
        model = build()
        for size in {each.expert for each in sizes if each.expert is not None}:
            by_axis["expert", size] = _expert_refusal(model, size)
        for axis, check in (("tensor", _tensor_refusal), ("pipeline", _pipeline_refusal)):
            for size in {each.by_axis.get(axis, 1) for each in sizes} - {1}:
                by_axis[axis, size] = check(model if axis == "tensor" else build(), size)
    for each in sizes:
        reasons = [by_axis.get(item, "") for item in each.by_axis.items()]
        if why := next(filter(None, reasons), ""):
            found[each] = why
    return found


def _expert_refusal(model: nn.Module, size: int) -> str:
    inner = model.inner if isinstance(model, PipelineModel) else model
    layers = [each for each in expert_layers(inner).values() if isinstance(each, MoE)]
    fixed = sorted({layer.ep_size for layer in layers})
    if fixed and fixed != [size]:
        return (
            f"the program gives its MoE layers ep_size {_listed(fixed)}, which a search cannot change; "
            "name that number, or change ep_size in the program"
        )
    stacks = planned_stacks(inner)
    if size > 1 and not fixed and not stacks:
        return "no layer of the model has experts that ranks can share"
    odd = [name for name, module in stacks.items() if int(module.num_experts) % size]  # type: ignore[arg-type]
    if odd:
        experts = inner.get_submodule(odd[0]).num_experts
        return f"{size} ranks cannot share the {experts} experts of {odd[0]} equally"
    return ""


def _tensor_refusal(model: nn.Module, size: int) -> str:
    try:
        decide(model.inner if isinstance(model, PipelineModel) else model, size, "auto")
    except (UsageError, UnsupportedError) as error:
        return str(error)
    return ""


def _pipeline_refusal(model: nn.Module, size: int) -> str:
    if isinstance(model, PipelineModel):
        if (model.schedule, len(model.stages)) == (SCHEDULE, size):
            return ""
        return (
            f"the model is cut into {len(model.stages)} stages with the schedule {model.schedule}. A "
            f"search takes one stage for each rank and {SCHEDULE}, with which a stage holds as many "
            "micro-batches for any accumulation. Return the model that is not cut, or plan it by itself"
        )
    try:
        cut_evenly(model, size)
    except (UsageError, UnsupportedError) as error:
        return str(error)
    return ""
