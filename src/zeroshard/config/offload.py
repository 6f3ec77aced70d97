"""Finds offload settings that contradict each other or have no effect at the configured stage."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from zeroshard.config.schema import OffloadConfig, ZeroConfig
from zeroshard.core.stages import STAGES

_ZERO = "zero_optimization"


def contradictions(zero: ZeroConfig, unknown: Collection[str]) -> Iterator[str]:
    """One line for each contradiction. Dotted keys in ``unknown`` have no known value to compare."""
    optimizer, param = zero.offload_optimizer, zero.offload_param
    if f"{_ZERO}.stage" in unknown:
        return
    if optimizer is not None and f"{_ZERO}.offload_optimizer.device" not in unknown:
        if optimizer.device != "none" and not STAGES[zero.stage].shards_optimizer:
            yield (
                f'{_ZERO}.offload_optimizer.device: "{optimizer.device}" at stage {zero.stage}, '
                "where nothing is sharded: every rank of a host would keep the whole optimizer "
                "state there; take stage 1, which gives the same result"
            )
        else:
            yield from _without_path("offload_optimizer", optimizer, unknown)
        if optimizer.delayed_update and optimizer.device != "cpu":
            yield (
                f"{_ZERO}.offload_optimizer.delayed_update: needs device cpu, not "
                f"{optimizer.device}: only an update in host memory can run beside the next step"
            )
        elif optimizer.delayed_update and param is not None and param.device != "none":
            yield (
                f"{_ZERO}.offload_optimizer.delayed_update: needs parameters on the device, not "
                f'offload_param.device "{param.device}": the next step would read what the update '
                "writes"
            )
    if param is not None and STAGES[zero.stage].shards_params:
        yield from _without_path("offload_param", param, unknown)


def _without_path(name: str, section: OffloadConfig, unknown: Collection[str]) -> Iterator[str]:
    path = f"{_ZERO}.{name}.nvme_path"
    if section.device == "nvme" and section.nvme_path is None and path not in unknown:
        yield (
            f'{path}: device "nvme" needs it: write a directory on a fast local disk, such as '
            f'"/local_nvme"'
        )


def notices(zero: ZeroConfig) -> Iterator[str]:
    """Lines about settings that are valid and have no effect."""
    param = zero.offload_param
    if param is not None and param.device != "none" and not STAGES[zero.stage].shards_params:
        yield (
            f"{_ZERO}.offload_param: no effect at stage {zero.stage}, as in DeepSpeed: parameters "
            "are sharded at stage 3 only"
        )
