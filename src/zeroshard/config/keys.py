"""The table of all known keys, with what ZeroShard does with each one.

``KEYS`` has one row per key: keys of the schema, keys that are known and refused, and old spellings.
Suggestions for misspelt keys, notices and ``docs/config.md`` are derived from it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from zeroshard.config.fields import Key, Section, key_of, section_type
from zeroshard.config.params import ARGUMENTS
from zeroshard.config.schema import Config
from zeroshard.config.sections import MonitorSections
from zeroshard.errors import NO_TUNING

REMOVED = "DeepSpeed has removed it; "

REFUSED: dict[str, str] = {
    "amp": REMOVED + 'use "bf16" or "fp16", or "torch_autocast"',
    "nebula": REMOVED + "save checkpoints with engine.save_checkpoint()",
    "compression_training": REMOVED + "compress the model outside of training",
    "quantize_training": REMOVED + "quantize the model outside of training",
    "sparse_gradients": REMOVED + "use dense embeddings",
    "eigenvalue": REMOVED + "it was used only by quantize_training",
    "sparse_attention": REMOVED + "use an attention kernel inside the model",
    "elasticity": REMOVED + "checkpoints load at any world size",
    "graph_harvesting": REMOVED + "use torch.compile on the model",
    "curriculum_learning": REMOVED + "choose the order of the data in the data loader",
    "progressive_layer_drop": REMOVED + "drop layers in the code of the model",
    "data_efficiency": "it changes the data and the model, which ZeRO does not; use the data loader",
    "autotuning": NO_TUNING,
    "hybrid_engine": "generation inside training is not part of ZeRO",
    "weight_quantization": "it is for inference",
    "datastates_ckpt": "its checkpoints depend on one external engine",
    "msamp": 'it changes code of DeepSpeed; use "bf16"',
    "zero_optimization.legacy_stage1": "there is one implementation of stage 1",
    "zero_optimization.zenflow": "it updates with stale gradients, which changes the result",
    "zero_optimization.mics_shard_size": REMOVED
    + 'its sharding is "hierarchy": {"inner": the same number, "shard_over": "inner"}',
    "zero_optimization.mics_hierarchical_params_gather": REMOVED + "leave it out",
    "zero_optimization.zeropp_loco_param": REMOVED + "leave it out",
    "trust.simulate_changes_s": "a rank that is out of memory simulates nothing any more; its error has "
    "the command of zeroshard plan that does",
}
"""Keys without a field. They are errors with this reason, unless the value switches them off."""

OFF: dict[str, object] = {"zero_optimization.mics_shard_size": -1}
"""A value that also switches a refused key off: its default, which old files contain."""

ALIASES = (
    *("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold"),
    *("max_live_parameters", "max_reuse_distance", "gather_16bit_weights_on_model_save"),
    *("module_granularity_threshold", "use_all_reduce_for_fetch_params", "allgather_sequential"),
)
"""Keys of ``zero_optimization`` that DeepSpeed also accepts without the prefix ``stage3_``."""

RENAMED: dict[str, str] = {
    "bfloat16": "bf16",
    "zero_optimization.cpu_offload": "zero_optimization.offload_optimizer",
    "zero_optimization.cpu_offload_param": "zero_optimization.offload_param",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
    **{f"zero_optimization.{name}": f"zero_optimization.stage3_{name}" for name in ALIASES},
}
"""Old or short spelling -> the key that it is read as."""

STRAY: dict[str, str] = {
    "bf16.auto_cast": "Only the section fp16 has it; cast the inputs, or use torch_autocast.",
    "zero_optimization.grad_hooks": "Gradient hooks are always used; leave it out.",
    "monitor_config": f"Write its parts at the top level: {', '.join(MonitorSections.model_fields)}.",
    "moe": "Experts are modules of the model; list modules that only some ranks run in "
    "conditional_modules.",
    "batch_size": "Write train_batch_size (samples of all ranks) or "
    "train_micro_batch_size_per_gpu (samples of one rank).",
    "gas": "Write gradient_accumulation_steps.",
    "optimizer.params.max_grad_norm": "The engine clips: write gradient_clipping at the top level.",
}
"""Unknown keys seen in programs -> advice. The nearest known name would be wrong for them."""


MEANT: dict[str, str] = {
    name: key
    for key, names in {
        "train_micro_batch_size_per_gpu": "per_device_train_batch_size per_gpu_train_batch_size mbs "
        "per_device_batch_size micro_batch_size micro_batch_size_per_gpu train_micro_batch_size "
        "local_batch_size device_batch_size",
        "train_batch_size": "global_batch_size total_batch_size effective_batch_size gbs",
        "gradient_accumulation_steps": "accumulate_grad_batches accumulation_steps grad_accum "
        "grad_accum_steps grad_acc_steps gradient_accumulation",
        "gradient_clipping": "max_grad_norm clip_grad grad_clip gradient_clip_val clip_grad_norm",
        "optimizer.params.lr": "learning_rate base_lr",
        "optimizer.params.betas": "adam_beta1 adam_beta2",
        "optimizer.params.eps": "adam_epsilon",
        "optimizer.params.weight_decay": "wd",
        "optimizer.type": "optim optimizer_type optimizer_name",
        "scheduler.type": "lr_scheduler_type lr_scheduler scheduler_type",
        "scheduler.params.warmup_num_steps": "warmup_steps lr_warmup_steps num_warmup_steps",
        "scheduler.params.total_num_steps": "max_steps total_steps num_training_steps",
        "zero_optimization.stage": "zero_stage zero zero_level sharding_strategy",
        "bf16.enabled or fp16.enabled": "mixed_precision precision dtype torch_dtype param_dtype half "
        "use_amp",
        "steps_per_print": "logging_steps log_every_n_steps log_interval",
        "parallel.tensor": "tensor_parallel_size tensor_model_parallel_size",
        "parallel.pipeline": "pipeline_parallel_size pipeline_model_parallel_size",
        "zero_optimization.offload_param": "offload_params offload_parameters param_offload",
        "zero_optimization.offload_optimizer": "offload_optim optimizer_offload "
        "offload_optimizer_device",
    }.items()
    for name in names.split()
}
"""Names that other libraries have for a key, in small letters -> the key. The nearest name would be
another one, for example a batch of all ranks for a batch of one."""


UNCHECKED = frozenset(
    (
        *("", "activation_checkpointing", "aio", "checkpoint", "data_types", "flops_profiler"),
        *("optimizer", "pipeline", "scheduler", "timers", "timers.throughput"),
    )
)
"""Sections in which DeepSpeed ignores unknown keys. The empty name is the top level."""


def _rows(model: type[Section], prefix: str) -> list[Key]:
    rows: list[Key] = []
    for name, field in model.model_fields.items():
        path = prefix + name
        rows.append(key_of(path, field))
        inner = section_type(field.annotation)
        if inner is not None:
            rows.extend(_rows(inner, f"{path}."))
    return rows


def _all_keys() -> dict[str, Key]:
    rows = _rows(Config, "")
    for section, types in ARGUMENTS.items():
        for declared in types.values():
            rows.extend(_rows(declared.arguments, f"{section}.params."))
    table: dict[str, Key] = {}
    for row in rows:
        table.setdefault(row.path, row)
    for path, why in REFUSED.items():
        table[path] = Key(path, "refuse", why, "")
    for path, new in RENAMED.items():
        word = "short" if path.rpartition(".")[2] in ALIASES else "old"
        table[path] = Key(
            path,
            table[new].verdict,
            f"{word} spelling of {new}",
            f"{word.capitalize()} spelling of `{new}`.",
        )
    return table


KEYS: Mapping[str, Key] = _all_keys()


def advice(path: str, siblings: list[str]) -> str:
    """What to write instead of the unknown key ``path``. ``siblings``: the keys that its section knows.

    >>> advice("zero_optimization.stge", ["stage", "overlap_comm"])
    'Did you mean "stage"?'
    >>> advice("zero_optimization.gradient_clipping", ["stage"])
    'It belongs at the top level.'
    """
    if path in STRAY:
        return STRAY[path]
    parent, _, name = path.rpartition(".")
    if meant := MEANT.get(name.lower()):
        inside, _, short = meant.rpartition(".")
        return f'Did you mean "{short}"?' if inside == parent else f"Did you mean {meant}?"
    if path in KEYS:  # an argument of another optimizer or schedule
        return f"This type takes {', '.join(sorted(siblings))}."
    homes = sorted({key.rpartition(".")[0] for key in _called(name)})
    if 0 < len(homes) <= 3:
        return f"It belongs {' or '.join(f'to {home}' if home else _TOP for home in homes)}."
    if close := nearest(name, siblings):
        return f'Did you mean "{close}"?'
    elsewhere = nearest(name, [key.rpartition(".")[2] for key in KEYS], cutoff=SURE)
    if 0 < len(similar := _called(elsewhere)) <= 3:
        return f"Did you mean {' or '.join(similar)}?"
    if len(siblings) <= 8:
        return f"{parent or 'The top level'} knows {', '.join(sorted(siblings))}."
    return 'docs/config.md lists all keys; "unknown_keys": "warn" makes this a notice.'


def _called(name: str | None) -> list[str]:
    """The keys whose last part is ``name``."""
    return sorted(key for key in KEYS if key.rpartition(".")[2] == name)


_TOP = "at the top level"


SURE = 0.85
"""A cutoff for :func:`nearest`: names that are at least this similar mean the same key."""


def nearest(name: str, known: list[str], cutoff: float = 0.7) -> str | None:
    """The known name most similar to ``name``, without regard to case; None below ``cutoff``."""
    lowered = {word.lower(): word for word in sorted(known, reverse=True)}
    close = get_close_matches(name.lower(), sorted(lowered), n=1, cutoff=cutoff)
    return lowered[close[0]] if close else None


def is_misspelt(name: str, value: object, given: Collection[str]) -> bool:
    """Whether this unknown key of the top level is a misspelt known key, not a key of another library.

    A name that does not begin with a letter is not: such keys were commented out. Neither is one whose
    known key is in ``given``, too, nor a plain value where the known key is a section.

    >>> is_misspelt("zero_optimisation", {"stage": 3}, []), is_misspelt("_optimizer", {}, [])
    (True, False)
    >>> is_misspelt("tensor_parallel_size", 1, [])
    False
    """
    if "." in name or not name[:1].isalpha():
        return False
    close = nearest(name, list(Config.model_fields), cutoff=SURE)
    if close is None or close in given:
        return False
    return isinstance(value, (Mapping, bool)) or not KEYS[close].is_section


def is_argument(section: str, name: str) -> bool:
    """Whether this unknown key of ``optimizer`` or ``scheduler`` is an argument, or its list, misplaced.

    >>> is_argument("optimizer", "lr"), is_argument("optimizer", "parms")
    (True, True)
    >>> is_argument("optimizer", "fused_by")
    False
    """
    meant = MEANT.get(name.lower(), f"{section}.params.{name}")
    return meant in KEYS or nearest(name, ["type", "params"], cutoff=SURE) is not None


def get(config: Section, path: str) -> Any:
    """The value at a dotted path. None if a section on the path is None."""
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name) if isinstance(value, Section) else None
    return value
