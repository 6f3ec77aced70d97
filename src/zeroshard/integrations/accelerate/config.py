"""Completes a configuration by what an ``Accelerator`` knows.

Pure functions on dicts. Accelerate decides accumulation, the loader's batch size, mixed precision, and
clipping by a call of the script. If the configuration has another value, that is an error, because one of
the two would be ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zeroshard.config.fields import is_auto
from zeroshard.errors import UsageError

MODES = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}  # section -> Accelerate's name
_AUTOCAST = {"bfloat16": "bf16", "float16": "fp16"}
_SCRIPT = "the Accelerator's"


@dataclass(frozen=True)
class Wishes:
    """What is known apart from the configuration.

    ``accumulation``: micro-batches per step. ``micro_batch``: samples per rank and forward; None if no
    loader knows it. ``mixed_precision``: Accelerate's name. ``names``: names of the first two in errors.
    """

    accumulation: int
    micro_batch: int | None
    mixed_precision: str
    names: tuple[str, str] = (f"{_SCRIPT} gradient_accumulation_steps", "the loader's batch size")


def precision_of(config: Mapping[str, Any]) -> str | None:
    """``"bf16"`` or ``"fp16"`` if the configuration enables it, also as autocast; else None."""
    for section, word in MODES.items():
        if _section(config, section).get("enabled") is True:
            return word
    autocast = _section(config, "torch_autocast")
    if autocast.get("enabled") is True:
        dtype = str(autocast.get("dtype", "bfloat16")).removeprefix("torch.")
        return _AUTOCAST.get(dtype, dtype)
    return None


def mixed_precision_for(config: Mapping[str, Any], asked: str | None) -> str | None:
    """The value for ``Accelerator(mixed_precision=...)``: the configuration's, else ``asked``.

    Raises:
        UsageError: both are given and differ.
    """
    named = precision_of(config)
    if named is not None and asked is not None and str(asked) != named:
        raise UsageError(
            f'mixed_precision="{asked}", but the configuration says {named}. Weights have one precision: '
            f'pass mixed_precision="{named}" (with the Trainer: TrainingArguments({named}=True)) or '
            "none, or change the configuration."
        )
    return named or asked


def completed(config: Mapping[str, Any], wishes: Wishes) -> dict[str, Any]:
    """``config`` with the values that Accelerate knows for keys that are absent or ``"auto"``.

    Clipping is off unless the configuration has a norm: the script clips.

    Raises:
        UsageError: values disagree. The text lists all of them.
    """
    full = dict(config)
    problems = []
    known = {
        "gradient_accumulation_steps": (wishes.accumulation, wishes.names[0]),
        "train_micro_batch_size_per_gpu": (wishes.micro_batch, wishes.names[1]),
    }
    for key, (value, name) in known.items():
        given = full.get(key)
        if value is None:
            continue
        if given is None or is_auto(given):
            full[key] = value
        elif given != value:
            problems.append(f'the configuration says "{key}": {given}, but {name} is {value}')
    if full.get("gradient_clipping") is None or is_auto(full["gradient_clipping"]):
        full["gradient_clipping"] = 0.0
    problems += _set_precision(full, wishes.mixed_precision)
    batch = ("train_batch_size", "train_micro_batch_size_per_gpu")
    if all(full.get(key) is None or is_auto(full[key]) for key in batch):
        full["train_micro_batch_size_per_gpu"] = 1  # only used to count samples
    if problems:
        raise UsageError(
            "; ".join(problems) + '. Both must agree: leave the key out, or write "auto".'
        )
    return full


def for_inference(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` without the sections that need trainable parameters."""
    return {key: value for key, value in config.items() if key not in ("optimizer", "scheduler")}


def _set_precision(full: dict[str, Any], word: str) -> list[str]:
    """Enable the mode that Accelerate asks for, and disable those that are "auto". Returns problems."""
    for key, value in MODES.items():
        if value != word and is_auto(_section(full, key).get("enabled")):
            full[key] = {**_section(full, key), "enabled": False}
    if word == "no" or precision_of(full) == word:
        return []
    section = next((key for key, value in MODES.items() if value == word and key in full), word)
    if _section(full, section).get("enabled") is False:
        return [
            f'the configuration says "{section}": {{"enabled": false}}, but mixed_precision is "{word}"'
        ]
    full[section] = {**_section(full, section), "enabled": True}
    return []


def _section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = config.get(key)
    return found if isinstance(found, Mapping) else {}
