"""Finds valid values that contradict each other, and those that readers may not expect."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from zeroshard.config.fields import Verdict, is_off
from zeroshard.config.keys import KEYS, get
from zeroshard.config.mesh_keys import (
    HPZ,
    INNER,
    OUTER,
    QUANTIZED,
    ZERO,
    node_size,
    shares_params_in_nodes,
)
from zeroshard.config.parse import Findings
from zeroshard.config.schema import Config
from zeroshard.config.zero_section import (
    OffloadConfig,
    OffloadOptimizerConfig,
    OffloadParamConfig,
    ZeroConfig,
)
from zeroshard.core.stages import STAGES
from zeroshard.core.tiers import TIERS

_OF_NODES = (
    *(f"{ZERO}.stage", f"{ZERO}.hierarchy", f"{ZERO}.zero_hpz_partition_size"),
    f"{ZERO}.offload_param",
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
    if f"{ZERO}.stage" in unknown:
        yield from _of_paths(config.zero_optimization, unknown)
    else:
        yield from _of_offload(config.zero_optimization, unknown)
    if not any(path.startswith(_OF_NODES) for path in unknown):
        yield from _of_nodes(config.zero_optimization)
        yield from _of_quantized(config.zero_optimization)


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
    if optimizer is not None and f"{ZERO}.offload_optimizer.device" not in unknown:
        if optimizer.device != "none" and not STAGES[zero.stage].shards_optimizer:
            yield (
                f'{ZERO}.offload_optimizer.device: "{optimizer.device}" at stage {zero.stage}, '
                "where nothing is sharded: every rank of a host would store the whole optimizer "
                "state there; use stage 1, which gives the same result"
            )
        else:
            yield from _without_path("offload_optimizer", optimizer, unknown)
        if optimizer.delayed_update and optimizer.device != "cpu":
            yield (
                f"{ZERO}.offload_optimizer.delayed_update: needs device cpu, not "
                f"{optimizer.device}: only an update in host memory can run at the same time as "
                "the next step"
            )
        elif optimizer.delayed_update and param is not None and param.device != "none":
            yield (
                f"{ZERO}.offload_optimizer.delayed_update: needs parameters on the device, not "
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
    path = f"{ZERO}.offload_optimizer.super_offload"
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
        if section is not None and f"{ZERO}.{name}.device" not in unknown:
            yield from _without_path(name, section, unknown)


def _without_path(name: str, section: OffloadConfig, unknown: Collection[str]) -> Iterator[str]:
    path = f"{ZERO}.{name}.nvme_path"
    if TIERS[section.device].needs_path and section.nvme_path is None and path not in unknown:
        yield (
            f'{path}: missing, and device "{section.device}" needs it; write a directory on a fast local '
            'disk, such as "/local_nvme"'
        )


def _of_quantized(zero: ZeroConfig) -> Iterator[str]:
    """One line for each key of ZeRO++ that rounds, and has nothing to round or rounds what is exact."""
    param = zero.offload_param
    if zero.zero_quantized_gradients and zero.hierarchy.outer_reduce == "boundary":
        yield (
            f'{OUTER}: "boundary" with {QUANTIZED[2]}: true, but sums that wait for the last '
            "micro-batch are not quantized; leave one of the two out"
        )
    for name in QUANTIZED:
        if not getattr(zero, name):
            continue
        if not STAGES[zero.stage].shards_params:
            yield (
                f"{ZERO}.{name}: true at stage {zero.stage}, but only the gathers and reductions of "
                "stage 3 can be quantized; use stage 3, or leave the key out"
            )
        elif param is not None and param.device != "none" and name != QUANTIZED[2]:
            yield (
                f'{ZERO}.{name}: true, but offload_param.device "{param.device}" keeps the parameters '
                "away from the device that would quantize them; leave one of the two out"
            )


def _of_nodes(zero: ZeroConfig) -> Iterator[str]:
    """One line for each contradiction among the keys of nodes, whatever the number of ranks."""
    hpz, inner, over = (
        zero.zero_hpz_partition_size, zero.hierarchy.inner, zero.hierarchy.shard_over,
    )  # fmt: skip
    if hpz > 1 and not STAGES[zero.stage].shards_params:
        yield (
            f"{HPZ}: {hpz} at stage {zero.stage}, where every rank has all parameters and backward "
            f"gathers none; use stage 3, or leave the key out ({INNER} gives collectives two hops at "
            "every stage)"
        )
    if hpz > 1 and inner not in (1, hpz):
        yield f"{HPZ}: {hpz}, but {INNER} is {inner}; both are the ranks of a node: keep one of them"
    if hpz > 1 and over == "inner":
        yield (
            f'{HPZ}: {hpz} with hierarchy.shard_over "inner", where no parameter leaves its node; keep '
            "one of the two keys"
        )
    if max(hpz, inner) == 1 and over != "all":
        yield (
            f'{ZERO}.hierarchy.shard_over: "{over}" needs the number of ranks of a node; write it in '
            f"{INNER}"
        )
    param = zero.offload_param
    if shares_params_in_nodes(zero) and param is not None and param.device != "none":
        yield (
            f"{node_size(zero)[1]}: the second shards stay on the device, but offload_param.device "
            f'"{param.device}" moves the parameters away from it; leave one of them out'
        )


# ---------------------------------------------------------------- notices and warnings


FILLED_IN = (
    *("bf16.enabled", "fp16.enabled", "gradient_clipping", "optimizer.params.weight_decay"),
)
"""Keys whose "auto" libraries replace by their user's choice. If it is left, a default may surprise."""


def notices(config: Config, found: Findings) -> Iterator[str]:
    """One line for each such value that changes no number of the training, in a fixed order."""
    if accepted := found.hints.union(_used(config, found, "accept")):
        yield f"accepted, but without effect: {', '.join(sorted(accepted))}"


def warnings(config: Config, found: Findings, *, as_deepspeed: bool) -> Iterator[str]:
    """One line for each such value that changes what is trained, or where, in a fixed order.

    ``as_deepspeed``: the program was written for DeepSpeed.
    """
    if found.ignored:
        yield f"unknown keys, ignored: {', '.join(found.ignored)}"
    yield from _of_defaults(config, found)
    yield from _of_optimizer(config)
    if as_deepspeed and config.parallel.sequence > 1:
        yield from _of_sequences(config, found)
    yield from _of_rounding(config)
    yield from _without_effect(config, found)


def _of_rounding(config: Config) -> Iterator[str]:
    if asked := [name for name in QUANTIZED if getattr(config.zero_optimization, name)]:
        yield (
            f"{', '.join(asked)}: this is another computation than without these keys. Parameters travel "
            "in 8 bits and gradients in 4, rounded in blocks of 64 elements, so losses and parameters "
            "differ from those of plain PyTorch, and of other stages"
        )


def _of_sequences(config: Config, found: Findings) -> Iterator[str]:
    if "sequence_parallel_gradient" not in found.given:
        yield (
            "sequence_parallel_gradient is not given: gradients are means over data and sequence ranks "
            f"at every stage. At stages 0 to 2 DeepSpeed's are {config.parallel.sequence} times as "
            'large, which changes what gradient_clipping does; "sum" gives those'
        )


def _of_defaults(config: Config, found: Findings) -> Iterator[str]:
    if "gradient_clipping" not in found.given | found.autos and config.gradient_clipping:
        yield (
            "gradient_clipping is not given: gradients are clipped at norm 1.0, as DeepSpeed does; "
            "0 switches clipping off"
        )
    has_mode = config.fp16.enabled or config.bf16.enabled
    left = [path for path in FILLED_IN if path in found.autos and path not in found.reasons]
    if left := [path for path in left if not (has_mode and path.endswith(".enabled"))]:
        yield f'"auto" was not replaced by a value, so defaults are used: {", ".join(left)}'


def _of_optimizer(config: Config) -> Iterator[str]:
    optimizer, scheduler = config.optimizer, config.scheduler
    params = optimizer.params if optimizer is not None else {}
    if optimizer is not None and optimizer.type == "Adam" and params.get("adam_w_mode", True):
        yield (
            "optimizer Adam is AdamW (decoupled weight decay), as in DeepSpeed; "
            '"adam_w_mode": false gives L2 Adam'
        )
    if scheduler is None or scheduler.type != "WarmupDecayLR":
        return
    lr = params.get("lr")
    if "warmup_max_lr" not in scheduler.params and isinstance(lr, float) and lr != 1e-3:
        yield (
            "scheduler.params.warmup_max_lr is not given: its default 0.001 replaces "
            f"the optimizer's lr {lr:g}"
        )


def _without_effect(config: Config, found: Findings) -> Iterator[str]:
    zero = config.zero_optimization
    param, stage = zero.offload_param, zero.stage
    if param is not None and param.device != "none" and not STAGES[stage].shards_params:
        yield (
            f"zero_optimization.offload_param: no effect at stage {stage}, as in DeepSpeed: parameters "
            "are sharded at stage 3 only"
        )
    if later := sorted(_used(config, found, "not yet")):
        yield (
            f"keys of features that are not implemented yet, without effect now: {', '.join(later)}"
        )


def _used(config: Config, found: Findings, verdict: Verdict) -> Iterator[str]:
    """The keys of this verdict that the user gave, and that would have an effect."""
    for path in found.given.intersection(KEYS):
        row = KEYS[path]
        if row.field is not None and row.verdict == verdict and _is_used(config, path, row.field):
            yield path


def _is_used(config: Config, path: str, field: FieldInfo) -> bool:
    """Whether a key has another value than its default, in a section that is not switched off."""
    extra: Any = field.json_schema_extra
    section, value = path.rpartition(".")[0], get(config, path)
    if value in (field.get_default(call_default_factory=True), extra["done"]):
        return False
    if isinstance(value, Mapping) and is_off(value):
        return False
    return not (section and _is_idle(config, section))


def _is_idle(config: Config, section: str) -> bool:
    """Whether this section is a feature that is switched off. Its other keys need no notice."""
    if section.startswith("tensor_parallel") and config.parallel.tensor == 1:
        return True
    inside = get(config, section)
    return getattr(inside, "enabled", True) is False or (getattr(inside, "device", "") == "none")
