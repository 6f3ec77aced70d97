"""Which sizes the axes of the mesh may have in a search, and which of them a model and a batch allow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import gcd
from typing import Any

from torch import nn

from zeroshard.config.machine_file import MachineFile
from zeroshard.core.mesh import DIMS
from zeroshard.errors import UnsupportedError, UsageError
from zeroshard.parallel.tensor_plan import decide
from zeroshard.planner.fakes import fake_tensors

NODE_RANKS = 8
"""Ranks of a node, where no machine says how many."""

PIPELINE = (
    "--fit-axes names pipeline, and --fit does not search with a pipeline: how many micro-batches a "
    "stage holds depends on what is searched. Leave pipeline out, and plan configurations with "
    "parallel.pipeline one by one."
)


def read_axes(text: str) -> dict[str, tuple[int, ...]]:
    """The axes that a search may choose, each with its sizes; no sizes: every one that divides the ranks.

    >>> read_axes("tensor"), read_axes("tensor=1,4")
    ({'tensor': ()}, {'tensor': (1, 4)})

    Raises:
        UsageError: an axis is not known or not searched, or a size is no whole number of at least 1.
        UnsupportedError: the axis is the pipeline.
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
    if name == "tensor":
        return
    if name == "pipeline":
        raise UnsupportedError(PIPELINE)
    if name in DIMS:
        why = (
            "sequence parallelism does not exist yet"
            if name == "sequence"
            else "how many ranks share the samples of a step follows from the other axes"
        )
        raise UsageError(
            f"--fit-axes names {name}: {why}. The axis that can be searched is tensor."
        )
    raise UsageError(
        f"--fit-axes names {name!r}, which is not an axis of a mesh. The axis that can be searched is "
        "tensor."
    )


def tensor_sizes(
    asked: Sequence[int], *, ranks: int, machine: MachineFile | None
) -> tuple[int, ...]:
    """The numbers of tensor ranks to try: ``asked``, or all that divide the run and a node.

    Tensor ranks wait for each other in every layer, so they are inside a node. Without a machine the
    sizes that are asked for need only divide ``ranks``, and others divide :data:`NODE_RANKS` too.

    Raises:
        UsageError: a size does not divide the ranks of the run or of a node.
    """
    node = None
    if machine is not None and machine.devices_per_node is not None:
        node = round(machine.devices_per_node.value)
    for size in asked:
        if ranks % size:
            raise UsageError(
                f"--fit-axes: {size} tensor ranks do not divide --ranks {ranks}. Sizes that do: "
                f"{_listed(_divisors(ranks))}."
            )
        if node is not None and node % size:
            raise UsageError(
                f"--fit-axes: {size} tensor ranks do not divide the {node} devices of a node of "
                f"{machine.name!r}, and tensor ranks wait for each other in every layer. Sizes that do: "  # type: ignore[union-attr]
                f"{_listed(_divisors(gcd(ranks, node)))}."
            )
    return tuple(asked) or _divisors(gcd(ranks, node or NODE_RANKS))


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(size for size in range(1, number + 1) if number % size == 0)


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))


def check_axis_is_free(base: Mapping[str, Any]) -> None:
    """Check that nothing in a configuration fixes what follows from the number of tensor ranks.

    Raises:
        UsageError: a key does.
    """
    parallel = base.get("parallel") or {}
    tensor = base.get("tensor_parallel") or {}
    fixed = [key for key in ("data_shard",) if parallel.get(key) not in (None, "auto")]
    named = [f"parallel.{key}" for key in fixed]
    if base.get("data_parallel_size") is not None:
        named.append("data_parallel_size")
    if named:
        raise UsageError(
            f"--fit-axes tensor tries several numbers of data-parallel ranks, and {named[0]} fixes one. "
            "Leave it out of the configuration."
        )
    own = parallel.get("tensor")
    if own not in (None, "auto", 1) and not (tensor.get("autotp_size") or tensor.get("tp")):
        raise UsageError(
            f"--fit-axes tensor lets the engine cut the model, and with parallel.tensor {own} the "
            "program cuts it. Write tensor_parallel.autotp_size instead, if the engine can cut it."
        )


def samples_by_size(
    samples: int, sizes: Sequence[int], ranks: int
) -> tuple[dict[int | None, int], dict[int, str]]:
    """Samples of a data-parallel rank by number of tensor ranks, and why a number cannot be used.

    ``samples``: of all ranks in a step. They stay.
    """
    found: dict[int | None, int] = {}
    refused: dict[int, str] = {}
    for size in sizes:
        data = ranks // size
        if samples % data:
            refused[size] = (
                f"{samples} samples of a step do not divide over {data} data-parallel ranks"
            )
        else:
            found[size] = samples // data
    return found, refused


def refused_by_model(build: Callable[[], nn.Module], sizes: Sequence[int]) -> dict[int, str]:
    """The numbers of tensor ranks over which the engine cannot cut a model, with the reason.

    Nothing is cut, and the model has no memory.
    """
    found: dict[int, str] = {}
    with fake_tensors():
        model = build()
        for size in sizes:
            try:
                if size > 1:
                    decide(model, size, "auto")
            except (UsageError, UnsupportedError) as error:
                found[size] = str(error)
    return found
