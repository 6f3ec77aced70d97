"""Finds valid values that contradict each other."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from zeroshard.config.hierarchy import hierarchy_contradictions, quantized_contradictions
from zeroshard.config.schema import (
    Config,
    OffloadConfig,
    OffloadOptimizerConfig,
    OffloadParamConfig,
    ZeroConfig,
)
from zeroshard.core.stages import STAGES
from zeroshard.core.tiers import TIERS

_ZERO = "zero_optimization"
_OF_NODES = (
    *(f"{_ZERO}.stage", f"{_ZERO}.hierarchy", f"{_ZERO}.zero_hpz_partition_size"),
    f"{_ZERO}.offload_param",
)


def contradictions(
    config: Config, *, given: Collection[str], unknown: Collection[str]
) -> Iterator[str]:
    """One line for each contradiction, in a fixed order.

    ``given``: dotted keys that the user wrote. ``unknown``: dotted keys without a known value to compare,
    because it was rejected or is still "auto".
    """
    yield from _of_precision(config)
    yield from _of_sizes(config, given)
    if f"{_ZERO}.stage" in unknown:
        yield from _of_paths(config.zero_optimization, unknown)
    else:
        yield from _of_offload(config.zero_optimization, unknown)
    if not any(path.startswith(_OF_NODES) for path in unknown):
        yield from hierarchy_contradictions(config.zero_optimization)
        yield from quantized_contradictions(config.zero_optimization)


def _of_precision(config: Config) -> Iterator[str]:
    fp16, bf16, types = config.fp16, config.bf16, config.data_types
    if fp16.enabled and bf16.enabled:
        yield "fp16.enabled, bf16.enabled: both are true, but parameters have one dtype; keep one of them"
    mode = "float16" if fp16.enabled else "bfloat16" if bf16.enabled else "float32"
    asked = config.trust.nan_policy
    if bf16.enabled and bf16.check_grad_overflow is False and asked is not None:
        yield (
            f'bf16.check_grad_overflow: false, so nothing is looked for that trust.nan_policy "{asked}" '
            "could act on; remove one of the two keys"
        )
    if types.param_dtype not in (None, mode):
        yield (
            f'data_types.param_dtype: "{types.param_dtype}" contradicts the enabled mode, which '
            f"makes parameters {mode}; change one of them"
        )
    if bf16.bf16_optimizer_states and not bf16.bf16_master_weights_and_grads:
        yield "bf16.bf16_optimizer_states: needs bf16.bf16_master_weights_and_grads: true as well"


def _of_sizes(config: Config, given: Collection[str]) -> Iterator[str]:
    clipping = "gradient_clipping" in given and config.gradient_clipping > 0
    if not config.zero_optimization.compute_grad_norm and clipping:
        yield (
            f"gradient_clipping: {config.gradient_clipping:g} needs the gradient norm, which "
            "zero_optimization.compute_grad_norm: false switches off; write gradient_clipping: 0, "
            "or compute_grad_norm: true"
        )
    if config.unit_min_numel > config.unit_max_numel:
        yield (
            f"unit_min_numel: {config.unit_min_numel} is above unit_max_numel "
            f"{config.unit_max_numel}; merged units would be split again"
        )


def _of_offload(zero: ZeroConfig, unknown: Collection[str]) -> Iterator[str]:
    optimizer, param = zero.offload_optimizer, zero.offload_param
    if optimizer is not None and f"{_ZERO}.offload_optimizer.device" not in unknown:
        if optimizer.device != "none" and not STAGES[zero.stage].shards_optimizer:
            yield (
                f'{_ZERO}.offload_optimizer.device: "{optimizer.device}" at stage {zero.stage}, '
                "where nothing is sharded: every rank of a host would store the whole optimizer "
                "state there; use stage 1, which gives the same result"
            )
        else:
            yield from _without_path("offload_optimizer", optimizer, unknown)
        if optimizer.delayed_update and optimizer.device != "cpu":
            yield (
                f"{_ZERO}.offload_optimizer.delayed_update: needs device cpu, not "
                f"{optimizer.device}: only an update in host memory can run at the same time as "
                "the next step"
            )
        elif optimizer.delayed_update and param is not None and param.device != "none":
            yield (
                f"{_ZERO}.offload_optimizer.delayed_update: needs parameters on the device, not "
                f'offload_param.device "{param.device}": the next step would read the memory that '
                "the update writes"
            )
        if optimizer.super_offload:
            yield from _of_early_updates(
                optimizer, param if STAGES[zero.stage].shards_params else None
            )
    if param is not None and STAGES[zero.stage].shards_params:
        yield from _without_path("offload_param", param, unknown)


def _of_early_updates(
    optimizer: OffloadOptimizerConfig, param: OffloadParamConfig | None
) -> Iterator[str]:
    path = f"{_ZERO}.offload_optimizer.super_offload"
    if optimizer.device != "cpu":
        yield (
            f"{path}: needs device cpu, not {optimizer.device}: only an update in host memory can begin "
            "in backward"
        )
    elif optimizer.delayed_update:
        yield (
            f"{path}: makes no sense with delayed_update, which runs the whole update during the next "
            "step; leave one of them out"
        )
    elif param is not None and param.device != "none":
        yield (
            f"{path}: needs parameters on the device, not offload_param.device "
            f'"{param.device}": backward may still read the memory that an early update writes'
        )


def _of_paths(zero: ZeroConfig, unknown: Collection[str]) -> Iterator[str]:
    for name, section in (
        ("offload_optimizer", zero.offload_optimizer),
        ("offload_param", zero.offload_param),
    ):
        if section is not None and f"{_ZERO}.{name}.device" not in unknown:
            yield from _without_path(name, section, unknown)


def _without_path(name: str, section: OffloadConfig, unknown: Collection[str]) -> Iterator[str]:
    path = f"{_ZERO}.{name}.nvme_path"
    if TIERS[section.device].needs_path and section.nvme_path is None and path not in unknown:
        yield (
            f'{path}: missing, and device "{section.device}" needs it; write a directory on a fast local '
            'disk, such as "/local_nvme"'
        )
