"""Estimates what a model needs under DeepSpeed's names: memory of its states, and operations.

The formulas of memory are DeepSpeed's and leave out activations and temporaries. A plan has them, and
chooses::

    zeroshard plan MODEL --config ds.json --ranks N --memory GIB --fit speed
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zeroshard.errors import PLAN_COMMAND, UnsupportedError, UsageError
from zeroshard.metrics.flops import most, now_s, parameters, report, show, table, words

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode


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
    rows = []
    for offload in (True, False):
        needs = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
        )
        rows.append((*needs, f"offload_optimizer={'cpu' if offload else 'none'}"))
    _print(_heading(num_gpus_per_node, num_nodes, total_params), rows)


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
    rows = []
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
            rows.append((host, device, words))
    _print(_heading(num_gpus_per_node, num_nodes, total_params, largest_layer_params), rows)


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


def _print(heading: str, rows: Sequence[tuple[int, int, str]]) -> None:
    """Print a table, and on standard error what to run: programs read the table on standard output."""
    print(f"{heading}\n  per CPU  |  per GPU |   Options")
    for host, device, options in rows:
        print(f" {host / _GIB:7.2f}GB | {device / _GIB:6.2f}GB | {options}")
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


# ---------------------------------------------------------------------- operations


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Sequence[type[nn.Module]] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """Operations, multiply-adds and parameters of one call of ``model``, as texts or as numbers.

    Matrix products, convolutions and attention are counted (``torch.utils.flop_counter``), a multiply-add
    as two operations. Elementwise operations are not counted. ``input_shape``: the shape of the only
    argument; otherwise ``args`` and ``kwargs`` are used. ``mode``: "forward", or "generate" for
    ``model.generate``. The model first runs ``warm_up`` times; all calls are in eval mode.
    ``print_profile``: print a table by module, ``module_depth`` levels deep, and the ``top_modules`` with
    most operations at each depth, or write them to ``output_file``.

    Raises:
        UsageError: there is no input.
        UnsupportedError: ``ignore_modules`` is given.
    """
    _refuse_to_ignore("get_model_profile(ignore_modules=...)", ignore_modules)
    if input_shape is not None:
        like = next(model.parameters(), torch.empty(0))
        args, kwargs = [torch.ones(input_shape, dtype=like.dtype, device=like.device)], None
    if not args and not kwargs:
        raise UsageError("get_model_profile needs an input: pass input_shape, args or kwargs.")
    if mode not in ("forward", "generate"):
        raise UsageError(f'get_model_profile(mode={mode!r}): give "forward" or "generate".')
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton, if that is installed

    call: Any = model if mode == "forward" else model.generate
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            for _ in range(warm_up):
                call(*args, **(kwargs or {}))
            with FlopCounterMode(display=False) as counter:
                call(*args, **(kwargs or {}))
    finally:
        for module, was_training in modes.items():
            module.training = was_training
    flops = counter.get_total_flops()
    params = parameters(model)
    if print_profile:
        lines = [f"{words(flops, 'FLOPS')}, {words(params, 'parameters')}"]
        if detailed:
            lines += [*most(counter, module_depth, top_modules), *table(counter, module_depth)]
        show(lines, output_file)
    if not as_string:
        return flops, flops // 2, params
    return words(flops, "FLOPS"), words(flops // 2, "MACs"), words(params, "").strip()


class FlopsProfiler:
    """Counts operations between :meth:`start_profile` and :meth:`stop_profile`, whatever code runs them.

    Operations are counted as in :func:`get_model_profile`. A backward counts too, and so does a forward
    that checkpointing runs again, so ``recompute_fwd_factor`` and ``ds_engine`` are not needed. Under
    ZeRO each rank counts what it computes itself. Call both methods only on the steps that are to be
    counted: the counter makes each operation slower.
    """

    def __init__(
        self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0
    ) -> None:
        del ds_engine, recompute_fwd_factor
        self.model = model
        self.started = False
        self._counter: FlopCounterMode | None = None
        self._seconds = 0.0

    def start_profile(self, ignore_list: Sequence[type[nn.Module]] | None = None) -> None:
        """Start counting at zero.

        Raises:
            UnsupportedError: ``ignore_list`` is given.
        """
        _refuse_to_ignore("FlopsProfiler.start_profile(ignore_list=...)", ignore_list)
        from torch.utils.flop_counter import FlopCounterMode  # imports Triton, if that is installed

        self.end_profile()
        self._counter = FlopCounterMode(display=False)
        self._counter.__enter__()
        self.started = True
        self._seconds = -now_s(self.model)

    def stop_profile(self) -> None:
        """Stop counting. The counts stay until :meth:`end_profile` or the next start."""
        if self.started:
            self._seconds += now_s(self.model)
            self.started = False
            self._counted().__exit__(None, None, None)

    def reset_profile(self) -> None:
        """Reset the counts. If the profiler runs, it starts again at zero."""
        if self.started:
            self.start_profile()
        else:
            self._counter = None

    def end_profile(self) -> None:
        """Stop, and drop the counts."""
        self.stop_profile()
        self._counter = None

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Operations so far, as a number or as a text."""
        flops = self._counted().get_total_flops()
        return words(flops, "FLOPS") if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Multiply-adds so far: half of the operations."""
        macs = self._counted().get_total_flops() // 2
        return words(macs, "MACs") if as_string else macs

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Seconds from start to stop (or until now) on this host, including the device's work."""
        self._counted()
        seconds = self._seconds + (now_s(self.model) if self.started else 0.0)
        return f"{1e3 * seconds:.2f} ms" if as_string else seconds

    def get_total_params(self, as_string: bool = False) -> Any:
        """Number of parameters of the whole model, also if they are sharded."""
        params = parameters(self.model)
        return words(params, "").strip() if as_string else params

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print totals and, if ``detailed``, a table by module, or write them to ``output_file``."""
        counter = self._counted()
        lines = report(
            f"step {profile_step}", counter, self.get_total_params(), self.get_total_duration()
        )
        lines += most(counter, module_depth, top_modules)
        show(lines + table(counter, module_depth) if detailed else lines, output_file)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the modules with most operations at each depth, or at ``module_depth``."""
        show(most(self._counted(), module_depth, top_modules), None)

    def _counted(self) -> FlopCounterMode:
        if self._counter is None:
            raise UsageError(
                "FlopsProfiler has counted nothing yet: call start_profile() before the forward. "
                "Call end_profile() after you have read the numbers, because it deletes them."
            )
        return self._counter


def _refuse_to_ignore(call: str, ignored: Any) -> None:
    if ignored:
        raise UnsupportedError(
            f"{call}: the counter counts operations, not modules. Profile only the part of the "
            "model that you want to count."
        )
