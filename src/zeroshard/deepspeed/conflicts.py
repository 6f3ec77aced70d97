"""Finds contradictions between a program, the library that runs it and the configuration.

What cannot work is an error. What works but is probably a mistake is one line on rank 0. Libraries do
unusual but valid things here, and a false alarm costs more than a missing line.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from zeroshard.engine.optimizer_step import Accumulation
from zeroshard.precision.policy import Policy
from zeroshard.zero.unit import Unit

# ---------------------------------------------------------------------- dtypes


_NUMBER = re.compile(r"(?<=\.deepspeed_experts\.)\d+")


def dtypes_by_name(model: Any) -> dict[str, torch.dtype]:
    """The dtype of each parameter of a module; experts of a layer have one name, without their number."""
    named = model.named_parameters() if isinstance(model, nn.Module) else ()
    return {_NUMBER.sub("*", name): param.dtype for name, param in named}


def trained_dtypes(
    came_in: Mapping[str, torch.dtype], units: Iterable[Unit]
) -> Counter[torch.dtype]:
    """Elements of each floating dtype among trained parameters.

    ``came_in``: what :func:`dtypes_by_name` gave before the engine cast parameters and numbered experts.
    """
    found: Counter[torch.dtype] = Counter()
    for unit in units:
        for slot in unit.layout.slots if unit.trainable else ():
            dtype = came_in[_NUMBER.sub("*", slot.fqn)]
            if dtype.is_floating_point:
                found[dtype] += slot.numel
    return found


def precision_notice(dtypes: Mapping[torch.dtype, int], policy: Policy) -> str:
    """A warning if the configured precision loses accuracy of the trained parameters; else "".

    ``dtypes``: number of elements of each dtype that the parameters had before the engine cast them.

    >>> precision_notice({torch.float32: 8, torch.bfloat16: 0}, Policy())
    ''
    """
    narrow = {dtype: numel for dtype, numel in dtypes.items() if dtype.itemsize == 2 and numel}
    if policy.mode == "plain" and narrow:
        dtype = max(narrow, key=lambda dtype: narrow[dtype])
        word = str(dtype).removeprefix("torch.")
        mode = "fp16" if dtype == torch.float16 else "bf16"
        return (
            f"{narrow[dtype]:,} trained elements of the model are {word}, and the configuration "
            f"enables neither bf16 nor fp16. They are updated in {word}, so small updates are "
            f'lost to rounding. Write "{mode}": {{"enabled": true}} for float32 masters, or load '
            "the model in float32."
        )
    if policy.mode == "fp16" and narrow.get(torch.bfloat16):
        return (
            f"{narrow[torch.bfloat16]:,} trained elements of the model are bfloat16, and the "
            "configuration enables fp16. In fp16, weights and activations above 65504 are "
            'infinite. Train models made for bfloat16 with "bf16": {"enabled": true}.'
        )
    return ""


# ---------------------------------------------------------------------- who wrote a number

ACCELERATE = {
    "train_micro_batch_size_per_gpu": "the DataLoader's batch_size",
    "gradient_accumulation_steps": "Accelerator(gradient_accumulation_steps=)",
    "fp16.enabled": "mixed_precision",
    "bf16.enabled": "mixed_precision",
    "optimizer.params.lr": "DummyOptim",
    "optimizer.params.weight_decay": "DummyOptim",
    "scheduler.params.warmup_num_steps": "DummyScheduler",
    "scheduler.params.total_num_steps": "DummyScheduler",
}
TRAINER = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps of TrainingArguments",
    "gradient_clipping": "max_grad_norm",
    "fp16.enabled": "fp16 of TrainingArguments",
    "bf16.enabled": "bf16 of TrainingArguments",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.betas": "adam_beta1 and adam_beta2",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "scheduler.params.total_num_steps": "max_steps, or epochs times batches",
}
"""What the library writes where a configuration has "auto": dotted key -> source of the value."""


def writers(text: str, config: Any) -> str:
    """Which library wrote the values that an error's ``text`` names. Empty if none passed ``config``."""
    library, sources = _writer(config)
    named = [f"{key} from {source}" for key, source in sources.items() if key in text]
    if not named:
        return ""
    return f'(where the file says "auto", {library} filled in {", ".join(named)})'


def without_idle_schedule(config: Any, optimizer: Any) -> Any:
    """``config`` without a schedule, if a library passed it and there is no optimizer; else ``config``.

    The Trainer leaves a schedule of 0 steps in the configuration of an engine that only evaluates.
    """
    library, _ = _writer(config)
    if not library or optimizer is not None or config.get("optimizer") is not None:
        return config
    return {key: value for key, value in config.items() if key != "scheduler"}


def parallelism_of(config: Any) -> Any:
    """Accelerate's ``ParallelismConfig``, if Accelerate passed ``config`` and it asks for a mesh.

    If it has only ``dp_replicate_size``, it means plain data parallelism, which is no mesh here.
    """
    library, _ = _writer(config)
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    asked = getattr(state, "_shared_state", {}).get("parallelism_config") if library else None
    sizes = ("dp_shard_size", "tp_size", "cp_size", "sp_size")
    return asked if any(getattr(asked, size, 1) != 1 for size in sizes) else None


def without_wrapper(optimizer: Any) -> Any:
    """The program's optimizer. With tensor ranks Accelerate wraps it before it calls ``initialize``."""
    is_wrapped = type(optimizer).__name__ == "AcceleratedOptimizer"
    return optimizer.optimizer if is_wrapped else optimizer


def _writer(config: Any) -> tuple[str, Mapping[str, str]]:
    """The library that passed ``config``, and its table; both empty if none did.

    It is recognized by Accelerate's plugins, which hold the same dict object.
    """
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    plugins = getattr(state, "_shared_state", {}).get("deepspeed_plugins")
    several: list[Any] = list(plugins.values()) if isinstance(plugins, Mapping) else [plugins]
    for plugin in several:
        if config is not None and getattr(plugin, "deepspeed_config", None) is config:
            by_trainer = type(plugin.hf_ds_config).__name__ == "HfTrainerDeepSpeedConfig"
            return ("the Trainer", TRAINER) if by_trainer else ("Accelerate", ACCELERATE)
    return "", {}


# ---------------------------------------------------------------------- the length of a step

PATIENCE = 3
"""Short steps in a row before a warning: the last step of an epoch may be short."""


class ShortSteps:
    """Detects a program that ends steps itself, after fewer backwards than the engine divides by."""

    def __init__(self) -> None:
        self._backwards = 0
        self._divides = True
        self._in_a_row = 0

    def saw_backward(self, *, divides: bool) -> None:
        """Count a backward. ``divides``: the engine divided its loss by the number of micro-batches."""
        self._backwards += 1
        self._divides = divides

    def saw_step(self, accumulation: Accumulation) -> str:
        """Called before ``step()`` acts. Returns a warning once, in most cases an empty text."""
        if not accumulation.at_boundary():
            return ""
        seen, self._backwards = self._backwards, 0
        is_short = accumulation.declared is True and self._divides and 0 < seen < accumulation.steps
        self._in_a_row = self._in_a_row + 1 if is_short else 0
        if self._in_a_row != PATIENCE:
            return ""
        self._in_a_row = PATIENCE + 1  # the warning is given once
        return (
            f"{PATIENCE} steps in a row had {seen} backward(s), and each loss was divided by "
            f"gradient_accumulation_steps={accumulation.steps}: gradients are too small. "
            "Accumulate gradients (with Accelerate: inside accelerator.accumulate(model)), or set "
            "gradient_accumulation_steps to the number of backwards in a step."
        )
