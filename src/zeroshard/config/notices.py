"""Says which values programs rely on that readers may not expect."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from zeroshard.config.fields import Verdict, is_off
from zeroshard.config.hierarchy import QUANTIZED
from zeroshard.config.keys import KEYS, get
from zeroshard.config.parse import Findings
from zeroshard.config.schema import Config
from zeroshard.core.stages import STAGES

FILLED_IN = (
    *("bf16.enabled", "fp16.enabled", "gradient_clipping", "optimizer.params.weight_decay"),
)
"""Keys whose "auto" libraries replace by their user's choice. If it is left, a default may surprise."""


def notices(
    config: Config, found: Findings, *, resolved: Collection[str], as_deepspeed: bool = False
) -> Iterator[str]:
    """One line for each such value, in a fixed order. ``resolved``: keys whose "auto" became a value.

    ``as_deepspeed``: the program was written for DeepSpeed.
    """
    if found.ignored:
        yield f"unknown keys, ignored: {', '.join(found.ignored)}"
    yield from _of_defaults(config, found, resolved)
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


def _of_defaults(config: Config, found: Findings, resolved: Collection[str]) -> Iterator[str]:
    if "gradient_clipping" not in found.given | found.autos and config.gradient_clipping:
        yield (
            "gradient_clipping is not given: gradients are clipped at norm 1.0, as DeepSpeed does; "
            "0 switches clipping off"
        )
    has_mode = config.fp16.enabled or config.bf16.enabled
    left = [path for path in FILLED_IN if path in found.autos and path not in resolved]
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
    if accepted := found.hints.union(_used(config, found, "accept")):
        yield f"accepted, but without effect: {', '.join(sorted(accepted))}"
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
