"""Estimates the memory of a model's states: the tables that programs print to choose a stage.

The formulas are DeepSpeed's and leave out activations and temporaries. A plan has them, and chooses::

    zeroshard plan MODEL --config ds.json --ranks N --memory GIB --fit speed
"""

from __future__ import annotations

import sys

from torch import nn

from zeroshard.errors import PLAN_COMMAND

_GIB = 1 << 30


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Bytes of host memory per node and of device memory per GPU at stage 2 in mixed precision.

    Without activations; ``zeroshard plan MODEL --config ds.json --ranks N`` has them.
    """
    ranks = num_gpus_per_node * num_nodes
    if cpu_offload:
        device: float = 2 * total_params
        host = max(4 * ranks, 16) * total_params * additional_buffer_factor
    else:
        device = 2 * total_params + 18 * total_params / ranks
        host = 4 * total_params * num_gpus_per_node * additional_buffer_factor
    return int(host), int(device)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Bytes of host memory per node, of device memory per GPU, and of the largest layer at stage 3.

    Without activations; ``zeroshard plan MODEL --config ds.json --ranks N`` has them.
    """
    ranks = num_gpus_per_node * num_nodes
    layer = 4 * largest_layer_params
    if not cpu_offload:
        device = layer + 18 * total_params / ranks
        host = float(layer if zero_init else 4 * total_params) * num_gpus_per_node
    else:
        # Bytes per parameter whose state is in host memory.
        moved = 18 if cpu_offload_params else 16
        device = layer + (0 if cpu_offload_params else 2 * total_params / ranks)
        built = 0 if zero_init else 4 * num_gpus_per_node  # every rank first builds the whole model
        host = total_params * max(built, moved / num_nodes)
    return int(host * additional_buffer_factor), int(device), layer


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the table of stage 2 for a number of parameters, and name ``zeroshard plan``."""
    print(_heading(num_gpus_per_node, num_nodes, total_params))
    print("  per CPU  |  per GPU |   Options")
    for offload in (True, False):
        host, device = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
        )
        word = "cpu" if offload else "none"
        print(f" {host / _GIB:7.2f}GB | {device / _GIB:6.2f}GB | offload_optimizer={word}")
    _name_the_plan()


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the table of stage 3 for a number of parameters, in all and in the largest layer.

    Names ``zeroshard plan`` after it.
    """
    print(_heading(num_gpus_per_node, num_nodes, total_params, largest_layer_params))
    print("  per CPU  |  per GPU |   Options")
    for params, optimizer in ((True, True), (False, True), (False, False)):
        for zero_init in (True, False):
            host, device, _ = estimate_zero3_model_states_mem_needs(
                total_params, largest_layer_params, num_gpus_per_node, num_nodes, optimizer, params,
                zero_init, additional_buffer_factor,
            )  # fmt: skip
            words = (
                f"offload_param={'cpu ' if params else 'none'}, "
                f"offload_optimizer={'cpu ' if optimizer else 'none'}, zero_init={int(zero_init)}"
            )
            print(f" {host / _GIB:7.2f}GB | {device / _GIB:6.2f}GB | {words}")
    _name_the_plan()


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the table of stage 2 for a model, and name ``zeroshard plan``."""
    total, _ = _numbers(model)
    estimate_zero2_model_states_mem_needs_all_cold(
        total, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the table of stage 3 for a model, and name ``zeroshard plan``."""
    total, largest = _numbers(model)
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def _name_the_plan() -> None:
    """Print what to run on standard error: programs read the table on standard output."""
    print(
        "These are model states only. For activations, temporaries and what fits, run: "
        f"{PLAN_COMMAND}",
        file=sys.stderr,
    )


def _numbers(model: nn.Module) -> tuple[int, int]:
    """Number of parameters in all, each counted once, and of the module that holds most directly."""
    total = sum({id(p): p.numel() for p in model.parameters()}.values())
    largest = max(
        (sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules()),
        default=0,
    )
    return total, largest


def _heading(gpus: int, nodes: int, total: int, largest: int | None = None) -> str:
    layer = "" if largest is None else f", {largest / 1e6:.0f}M largest layer params"
    return (
        "Estimated memory needed for params, optim states and gradients for a:\n"
        f"HW: Setup with {nodes} node{'s' * (nodes > 1)}, {gpus} GPU{'s' * (gpus > 1)} per node.\n"
        f"SW: Model with {total / 1e6:.0f}M total params{layer}."
    )
