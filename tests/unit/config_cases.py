"""Wrong configurations, each with the whole text of its error.

The table is the specification of the messages: what is wrong, which value, why it matters or what to do.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from zeroshard.config.params import OPTIMIZERS
from zeroshard.config.sections import MonitorSections


class Case(NamedTuple):
    """A wrong configuration for ``world_size`` ranks and the lines that answer it."""

    name: str
    config: dict[str, Any]
    world_size: int
    lines: tuple[str, ...]

    @property
    def message(self) -> str:
        count = "1 problem" if len(self.lines) == 1 else f"{len(self.lines)} problems"
        return "\n  ".join([f"{count} in the configuration:", *self.lines])


ONE: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}


def case(name: str, config: dict[str, Any], world_size: int, *lines: str) -> Case:
    return Case(name, config, world_size, lines)


def zero(name: str, section: dict[str, Any], *lines: str) -> Case:
    return Case(name, {**ONE, "zero_optimization": section}, 1, lines)


def optimizer(name: str, type_: str, params: dict[str, Any], *lines: str) -> Case:
    return Case(name, {**ONE, "optimizer": {"type": type_, "params": params}}, 1, lines)


def schedule(name: str, type_: str, params: dict[str, Any], *lines: str) -> Case:
    return Case(name, {**ONE, "scheduler": {"type": type_, "params": params}}, 1, lines)


def other(name: str, value: object, meant: str) -> Case:
    key = f'"{meant}"' if "." not in meant else meant
    line = f"{name}: no such key. Did you mean {key}?"
    return Case(f"other_{name}", {**ONE, name: value}, 1, (line,))


LEFT = (
    '"auto" is left: libraries such as Transformers and Accelerate replace it, here nothing did, and a '
    "default would decide what is trained; write "
)

CASES: tuple[Case, ...] = (
    # Batch sizes
    case(
        "no_batch_size",
        {},
        1,
        (
            "no batch size is given: write train_batch_size (samples per step over all ranks) or "
            "train_micro_batch_size_per_gpu (samples per rank per forward)"
        ),
    ),
    case(
        "only_accumulation",
        {"gradient_accumulation_steps": 4},
        2,
        (
            "no batch size is given: write train_batch_size (samples per step over all ranks) or "
            "train_micro_batch_size_per_gpu (samples per rank per forward)"
        ),
    ),
    case(
        "train_not_divisible_by_gas",
        {"train_batch_size": 8, "gradient_accumulation_steps": 3},
        1,
        "train_batch_size 8 is not divisible by gradient_accumulation_steps 3 x world size 1: make it "
        "6 or 9",
    ),
    case(
        "train_not_divisible_by_micro",
        {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3},
        2,
        (
            "train_batch_size 8 is not divisible by train_micro_batch_size_per_gpu 3 x world size 2: "
            "make it 6 or 12"
        ),
    ),
    case(
        "train_not_divisible_by_world",
        {"train_batch_size": 8},
        3,
        "train_batch_size 8 is not divisible by world size 3: make it 6 or 9",
    ),
    case(
        "three_sizes_that_do_not_agree",
        {
            "train_batch_size": 256,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 8,
        },
        1,
        (
            "train_batch_size 256 is not train_micro_batch_size_per_gpu 4 x "
            "gradient_accumulation_steps 8 x world size 1 = 32; leave one of the three out, and "
            "it is computed from the others"
        ),
    ),
    case(
        "zero_micro_batch",
        {"train_micro_batch_size_per_gpu": 0},
        1,
        "train_micro_batch_size_per_gpu: must be greater than 0, not 0",
    ),
    case(
        "negative_batch",
        {"train_batch_size": -8},
        1,
        "train_batch_size: must be greater than 0, not -8",
    ),
    case(
        "fractional_batch",
        {"train_batch_size": 8.5},
        1,
        "train_batch_size: must be a whole number, not 8.5",
    ),
    case(
        "batch_is_a_word",
        {"train_batch_size": "eight"},
        1,
        'train_batch_size: must be a whole number, not "eight"',
    ),
    case(
        "batch_is_a_boolean",
        {"train_batch_size": True},
        1,
        "train_batch_size: must be a whole number, not true",
    ),
    case(
        "batch_is_a_list",
        {"train_batch_size": [8]},
        1,
        "train_batch_size: must be a whole number, not [8]",
    ),
    # Unknown keys
    case(
        "misspelt_section",
        {**ONE, "zero_optimisation": {"stage": 3}},
        1,
        'zero_optimisation: no such key. Did you mean "zero_optimization"?',
    ),
    zero(
        "misspelt_key",
        {"reduce_buket_size": 1000},
        'zero_optimization.reduce_buket_size: no such key. Did you mean "reduce_bucket_size"?',
    ),
    zero(
        "misspelt_case", {"Stage": 3}, 'zero_optimization.Stage: no such key. Did you mean "stage"?'
    ),
    case(
        "stage_at_top_level",
        {**ONE, "stage": 3},
        1,
        "stage: no such key. It belongs to zero_optimization.",
    ),
    zero(
        "clipping_in_zero",
        {"gradient_clipping": 1.0},
        "zero_optimization.gradient_clipping: no such key. It belongs at the top level.",
    ),
    optimizer(
        "clipping_in_optimizer",
        "AdamW",
        {"max_grad_norm": 1.0},
        (
            "optimizer.params.max_grad_norm: no such key. The engine clips: write "
            "gradient_clipping at the top level."
        ),
    ),
    optimizer(
        "clipping_in_a_torch_optimizer",
        "RMSprop",
        {"max_grad_norm": 1.0},
        (
            "optimizer.params.max_grad_norm: no such key. The engine clips: write "
            "gradient_clipping at the top level."
        ),
    ),
    case(
        "lr_at_top_level",
        {**ONE, "lr": 0.0001},
        1,
        "lr: no such key. It belongs to optimizer.params.",
    ),
    zero(
        "bf16_in_zero",
        {"bf16": {"enabled": True}},
        "zero_optimization.bf16: no such key. It belongs at the top level.",
    ),
    zero(
        "aio_in_zero",
        {"aio": {"thread_count": 2}},
        "zero_optimization.aio: no such key. It belongs at the top level.",
    ),
    case(
        "auto_cast_in_bf16",
        {**ONE, "bf16": {"enabled": True, "auto_cast": True}},
        1,
        (
            "bf16.auto_cast: no such key. Only the section fp16 has it; cast the inputs, or use "
            "torch_autocast."
        ),
    ),
    case(
        "monitor_config",
        {**ONE, "monitor_config": {"enabled": True}},
        1,
        (
            "monitor_config: no such key. Write its parts at the top level: "
            f"{', '.join(MonitorSections.model_fields)}."
        ),
    ),
    case(
        "moe_section",
        {**ONE, "moe": {"enabled": True}},
        1,
        (
            "moe: no such key. Experts are modules of the model; list modules that only some "
            "ranks run in conditional_modules."
        ),
    ),
    case(
        "batch_size",
        {"batch_size": 8},
        1,
        (
            "batch_size: no such key. Write train_batch_size (samples of all ranks) or "
            "train_micro_batch_size_per_gpu (samples of one rank)."
        ),
        (
            "no batch size is given: write train_batch_size (samples per step over all ranks) or "
            "train_micro_batch_size_per_gpu (samples per rank per forward)"
        ),
    ),
    case(
        "word_like_no_other",
        {**ONE, "frobnicate": 1},
        1,
        (
            'frobnicate: no such key. docs/config.md lists all keys; "unknown_keys": "warn" makes'
            " this a notice."
        ),
    ),
    case(
        "unknown_in_small_section",
        {**ONE, "csv_monitor": {"enabled": True, "folder": "x"}},
        1,
        "csv_monitor.folder: no such key. csv_monitor knows enabled, job_name, output_path.",
    ),
    case(
        "unknown_deep",
        {**ONE, "trust": {"sections": {"sve": 60}}},
        1,
        'trust.sections.sve: no such key. Did you mean "save"?',
    ),
    case(
        "key_of_another_section",
        {**ONE, "fp16": {"check_grad_overflow": True}},
        1,
        "fp16.check_grad_overflow: no such key. It belongs to bf16.",
    ),
    zero(
        "offload_device_one_level_up",
        {"device": "cpu"},
        (
            "zero_optimization.device: no such key. It belongs to "
            "zero_optimization.offload_optimizer or to zero_optimization.offload_param."
        ),
    ),
    # Values of the wrong type or out of range
    case(
        "string_true",
        {**ONE, "fp16": {"enabled": "true"}},
        1,
        'fp16.enabled: must be true or false, not the string "true"; write true',
    ),
    case(
        "number_one_for_true",
        {**ONE, "bf16": {"enabled": 1}},
        1,
        "bf16.enabled: must be true or false, not the number 1; write true",
    ),
    case(
        "string_for_bool",
        {**ONE, "wall_clock_breakdown": "sometimes"},
        1,
        'wall_clock_breakdown: must be true or false, not "sometimes"',
    ),
    case(
        "null_for_bool",
        {**ONE, "prescale_gradients": None},
        1,
        (
            "prescale_gradients: must be true or false, not null; leave the key out for its "
            "default, false"
        ),
    ),
    case(
        "null_clipping",
        {**ONE, "gradient_clipping": None},
        1,
        ("gradient_clipping: must be a number, not null; leave the key out for its default, 1.0"),
    ),
    case(
        "negative_clipping",
        {**ONE, "gradient_clipping": -1},
        1,
        "gradient_clipping: must be at least 0, not -1",
    ),
    zero("unknown_stage", {"stage": 4}, "zero_optimization.stage: must be 0, 1, 2 or 3, not 4"),
    zero(
        "stage_as_boolean",
        {"stage": True},
        "zero_optimization.stage: must be 0, 1, 2 or 3, not true",
    ),
    case(
        "zero_is_a_number",
        {**ONE, "zero_optimization": 2},
        1,
        'zero_optimization: must be an object such as {"stage": 2}, not 2',
    ),
    case(
        "section_is_true",
        {**ONE, "fp16": True},
        1,
        'fp16: must be an object such as {"enabled": true}, not true',
    ),
    zero(
        "bucket_of_nothing",
        {"stage": 2, "reduce_bucket_size": 0},
        "zero_optimization.reduce_bucket_size: must be greater than 0, not 0",
    ),
    zero(
        "fraction_of_an_element",
        {"stage": 2, "reduce_bucket_size": 0.5},
        "zero_optimization.reduce_bucket_size: must be a whole number, not 0.5",
    ),
    zero(
        "infinite_bucket",
        {"stage": 2, "reduce_bucket_size": math.inf},
        "zero_optimization.reduce_bucket_size: must be a whole number, not Infinity",
    ),
    case(
        "unknown_dtype",
        {**ONE, "communication_data_type": "fp8"},
        1,
        'communication_data_type: must be a dtype such as "fp32", "fp16" or "bf16", not "fp8"',
    ),
    case(
        "autocast_dtype",
        {**ONE, "torch_autocast": {"enabled": True, "dtype": "float32"}},
        1,
        'torch_autocast.dtype: must be "bfloat16" or "float16", not "float32"',
    ),
    case(
        "negative_loss_scale",
        {**ONE, "fp16": {"enabled": True, "loss_scale": -1}},
        1,
        "fp16.loss_scale: must be at least 0, not -1",
    ),
    case(
        "one_pattern_without_list",
        {**ONE, "keep_fp32": "*.router.*"},
        1,
        'keep_fp32: must be a list of strings; write ["*.router.*"]',
    ),
    case(
        "patterns_are_numbers",
        {**ONE, "units": [1, 2]},
        1,
        "units: must be a list of strings, not [1, 2]",
    ),
    case(
        "unknown_choice",
        {**ONE, "uneven": "drop"},
        1,
        'uneven: must be "error" or "join", not "drop"',
    ),
    case(
        "unknown_transport",
        {**ONE, "transport": "nccl"},
        1,
        'transport: must be "auto", "shm", "p2p" or "stock", not "nccl"',
    ),
    case(
        "path_is_a_number",
        {**ONE, "tensorboard": {"enabled": True, "output_path": 5}},
        1,
        "tensorboard.output_path: must be a string, not 5",
    ),
    zero(
        "unknown_device",
        {"stage": 2, "offload_optimizer": {"device": "gpu"}},
        ('zero_optimization.offload_optimizer.device: must be "none", "cpu" or "nvme", not "gpu"'),
    ),
    case(
        "unknown_tag_validation",
        {**ONE, "checkpoint": {"tag_validation": "strict"}},
        1,
        'checkpoint.tag_validation: must be "ignore", "warn" or "fail", not "strict"',
    ),
    case(
        "zero_timeout",
        {**ONE, "trust": {"collective_timeout_s": 0}},
        1,
        "trust.collective_timeout_s: must be greater than 0, not 0",
    ),
    # Values that cannot hold together
    case(
        "two_precisions",
        {**ONE, "fp16": {"enabled": True}, "bf16": {"enabled": True}},
        1,
        "fp16.enabled, bf16.enabled: both are true, but parameters have one dtype; keep one of "
        "them",
    ),
    case(
        "param_dtype_against_mode",
        {**ONE, "bf16": {"enabled": True}, "data_types": {"param_dtype": "fp16"}},
        1,
        (
            'data_types.param_dtype: "float16" contradicts the enabled mode, which makes '
            "parameters bfloat16; change one of them"
        ),
    ),
    case(
        "bf16_states_without_master",
        {**ONE, "bf16": {"enabled": True, "bf16_optimizer_states": True}},
        1,
        "bf16.bf16_optimizer_states: needs bf16.bf16_master_weights_and_grads: true as well",
    ),
    case(
        "clipping_without_norm",
        {
            **ONE,
            "zero_optimization": {"stage": 2, "compute_grad_norm": False},
            "gradient_clipping": 1.0,
        },
        1,
        (
            "gradient_clipping: 1 needs the gradient norm, which "
            "zero_optimization.compute_grad_norm: false switches off; write gradient_clipping: 0, "
            "or compute_grad_norm: true"
        ),
    ),
    case(
        "unit_limits_crossed",
        {**ONE, "unit_min_numel": 100, "unit_max_numel": 10},
        1,
        ("unit_min_numel: 100 is above unit_max_numel 10; merged units would be split again"),
    ),
    case(
        "data_parallel_size_of_another_world",
        {**ONE, "data_parallel_size": 2},
        4,
        (
            "mesh: data_shard 2 (data_parallel_size) = 2 ranks, but 4 were started; the nearest sizes "
            "that fit are data_shard 4"
        ),
    ),
    case(
        "old_and_new_spelling",
        {**ONE, "bfloat16": {"enabled": True}, "bf16": {"enabled": False}},
        1,
        "bfloat16: another name of bf16, which is given too; keep one of them",
    ),
    zero(
        "old_switch_is_a_word",
        {"stage": 2, "cpu_offload": "yes"},
        'zero_optimization.cpu_offload: must be true or false, not "yes"',
    ),
    # Offloading
    zero(
        "offload_at_stage_0",
        {"stage": 0, "offload_optimizer": {"device": "cpu"}},
        (
            'zero_optimization.offload_optimizer.device: "cpu" at stage 0, where nothing is '
            "sharded: every rank of a host would store the whole optimizer state there; use stage "
            "1, which gives the same result"
        ),
    ),
    zero(
        "old_cpu_offload_without_stage",
        {"cpu_offload": True},
        (
            'zero_optimization.offload_optimizer.device: "cpu" at stage 0, where nothing is '
            "sharded: every rank of a host would store the whole optimizer state there; use stage "
            "1, which gives the same result"
        ),
    ),
    zero(
        "wrong_stage_hides_what_follows_from_it",
        {"stage": 7, "offload_optimizer": {"device": "cpu"}},
        "zero_optimization.stage: must be 0, 1, 2 or 3, not 7",
    ),
    zero(
        "wrong_device_hides_what_follows_from_it",
        {"stage": 2, "offload_optimizer": {"device": "disk", "delayed_update": True}},
        'zero_optimization.offload_optimizer.device: must be "none", "cpu" or "nvme", not "disk"',
    ),
    zero(
        "nvme_without_path",
        {
            "stage": 3,
            "offload_optimizer": {"device": "nvme"},
            "offload_param": {"device": "nvme", "nvme_path": "none"},
        },
        (
            'zero_optimization.offload_optimizer.nvme_path: missing, and device "nvme" needs it; '
            'write a directory on a fast local disk, such as "/local_nvme"'
        ),
        (
            'zero_optimization.offload_param.nvme_path: missing, and device "nvme" needs it; '
            'write a directory on a fast local disk, such as "/local_nvme"'
        ),
    ),
    zero(
        "nvme_path_is_a_number",
        {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": 5}},
        "zero_optimization.offload_optimizer.nvme_path: must be a string, not 5",
    ),
    zero(
        "ratio_in_percent",
        {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 50}},
        "zero_optimization.offload_optimizer.ratio: must be at most 1, not 50",
    ),
    zero(
        "negative_max_in_cpu",
        {"stage": 3, "offload_param": {"device": "cpu", "max_in_cpu": -1}},
        "zero_optimization.offload_param.max_in_cpu: must be at least 0, not -1",
    ),
    zero(
        "delayed_update_on_disk",
        {
            "stage": 2,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/d", "delayed_update": True},
        },
        (
            "zero_optimization.offload_optimizer.delayed_update: needs device cpu, not nvme: only "
            "an update in host memory can run at the same time as the next step"
        ),
    ),
    zero(
        "delayed_update_on_the_device",
        {"stage": 2, "offload_optimizer": {"delayed_update": True}},
        (
            "zero_optimization.offload_optimizer.delayed_update: needs device cpu, not none: only "
            "an update in host memory can run at the same time as the next step"
        ),
    ),
    zero(
        "delayed_update_of_parameters_in_host_memory",
        {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "delayed_update": True},
            "offload_param": {"device": "cpu"},
        },
        (
            "zero_optimization.offload_optimizer.delayed_update: needs parameters on the device, "
            'not offload_param.device "cpu": the next step would read the memory that the update '
            "writes"
        ),
    ),
    # Nodes
    zero(
        "hpz_below_stage_3",
        {"stage": 2, "zero_hpz_partition_size": 8},
        (
            "zero_optimization.zero_hpz_partition_size: 8 at stage 2, where every rank has all "
            "parameters and backward gathers none; use stage 3, or leave the key out "
            "(zero_optimization.hierarchy.inner gives collectives two hops at every stage)"
        ),
    ),
    zero(
        "two_sizes_of_a_node",
        {"stage": 3, "zero_hpz_partition_size": 8, "hierarchy": {"inner": 4}},
        (
            "zero_optimization.zero_hpz_partition_size: 8, but zero_optimization.hierarchy.inner is 4; "
            "both are the ranks of a node: keep one of them"
        ),
    ),
    zero(
        "hpz_of_replicas",
        {"stage": 3, "zero_hpz_partition_size": 8, "hierarchy": {"shard_over": "inner"}},
        (
            'zero_optimization.zero_hpz_partition_size: 8 with hierarchy.shard_over "inner", where no '
            "parameter leaves its node; keep one of the two keys"
        ),
    ),
    zero(
        "node_size_auto",
        {"stage": 3, "hierarchy": {"inner": "auto"}},
        (
            'zero_optimization.hierarchy.inner: "auto" is not possible: how many ranks of a shard group '
            "share a host is not known from the configuration; write the number, such as 8 for hosts of "
            "8 GPUs without tensor ranks"
        ),
    ),
    zero(
        "hierarchy_without_nodes",
        {"stage": 3, "hierarchy": {"shard_over": "hybrid"}},
        (
            'zero_optimization.hierarchy.shard_over: "hybrid" needs the number of ranks of a node; write '
            "it in zero_optimization.hierarchy.inner"
        ),
    ),
    zero(
        "sums_at_the_boundary_that_are_quantized",
        {
            "stage": 3,
            "hierarchy": {"inner": 2, "outer_reduce": "boundary"},
            "zero_quantized_gradients": True,
        },
        (
            'zero_optimization.hierarchy.outer_reduce: "boundary" with zero_quantized_gradients: true, '
            "but sums that wait for the last micro-batch are not quantized; leave one of the two out"
        ),
    ),
    zero(
        "hpz_of_offloaded_parameters",
        {"stage": 3, "zero_hpz_partition_size": 8, "offload_param": {"device": "cpu"}},
        (
            "zero_optimization.zero_hpz_partition_size: the second shards stay on the device, but "
            'offload_param.device "cpu" moves the parameters away from it; leave one of them out'
        ),
    ),
    zero(
        "quantized_gradients_below_stage_3",
        {"stage": 2, "zero_quantized_gradients": True},
        (
            "zero_optimization.zero_quantized_gradients: true at stage 2, but only the gathers and "
            "reductions of stage 3 can be quantized; use stage 3, or leave the key out"
        ),
    ),
    zero(
        "quantized_weights_in_host_memory",
        {"stage": 3, "zero_quantized_weights": True, "offload_param": {"device": "cpu"}},
        (
            'zero_optimization.zero_quantized_weights: true, but offload_param.device "cpu" keeps the '
            "parameters away from the device that would quantize them; leave one of the two out"
        ),
    ),
    # Known, but not there (yet)
    case(
        "nan_policy_without_a_look",
        {
            **ONE,
            "bf16": {"enabled": True, "check_grad_overflow": False},
            "trust": {"nan_policy": "rollback"},
        },
        1,
        "bf16.check_grad_overflow: false, so nothing is looked for that trust.nan_policy "
        '"rollback" could act on; remove one of the two keys',
    ),
    case(
        "mlflow",
        {**ONE, "mlflow": {"enabled": True, "tracking_url": "sqlite:///x.db"}},
        1,
        'mlflow.tracking_url: no such key. Did you mean "tracking_uri"?',
    ),
    case(
        "amp",
        {**ONE, "amp": {"enabled": True, "opt_level": "O1"}},
        1,
        'amp: not supported: DeepSpeed has removed it; use "bf16" or "fp16", or "torch_autocast"',
    ),
    case(
        "elasticity",
        {**ONE, "elasticity": {"enabled": True}},
        1,
        "elasticity: not supported: DeepSpeed has removed it; checkpoints load at any world size",
    ),
    case(
        "curriculum",
        {**ONE, "data_efficiency": {"enabled": True}},
        1,
        (
            "data_efficiency: not supported: it changes the data and the model, which ZeRO does "
            "not; use the data loader"
        ),
    ),
    case(
        "deepcompile",
        {**ONE, "compile": {"deepcompile": True}},
        1,
        (
            "compile.deepcompile: not supported: ZeroShard overlaps communication without "
            "rewriting the graph; use torch.compile on the model instead; it is true, leave it "
            "out"
        ),
    ),
    zero(
        "mics",
        {"stage": 3, "mics_shard_size": 8},
        "zero_optimization.mics_shard_size: not supported: DeepSpeed has removed it; its sharding is "
        '"hierarchy": {"inner": the same number, "shard_over": "inner"}',
    ),
    zero(
        "zenflow",
        {"stage": 2, "zenflow": {"topk_ratio": 0.1}},
        (
            "zero_optimization.zenflow: not supported: it updates with stale gradients, which "
            "changes the result"
        ),
    ),
    case(
        "sparse_gradients",
        {**ONE, "sparse_gradients": True},
        1,
        "sparse_gradients: not supported: DeepSpeed has removed it; use dense embeddings",
    ),
    zero(
        "super_offload_on_the_device",
        {"stage": 3, "offload_optimizer": {"super_offload": True}},
        (
            "zero_optimization.offload_optimizer.super_offload: needs device cpu, not none: only an "
            "update in host memory can begin in backward"
        ),
    ),
    zero(
        "super_offload_of_a_delayed_update",
        {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "super_offload": True, "delayed_update": True},
        },
        (
            "zero_optimization.offload_optimizer.super_offload: makes no sense with delayed_update, "
            "which runs the whole update during the next step; leave one of them out"
        ),
    ),
    zero(
        "super_offload_of_parameters_in_host_memory",
        {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "super_offload": True},
            "offload_param": {"device": "cpu"},
        },
        (
            "zero_optimization.offload_optimizer.super_offload: needs parameters on the device, not "
            'offload_param.device "cpu": backward may still read the memory that an early update '
            "writes"
        ),
    ),
    # Optimizers
    optimizer(
        "misspelt_optimizer",
        "Adamm",
        {},
        'optimizer.type: there is no optimizer "Adamm". Did you mean "Adam"?',
    ),
    optimizer(
        "torch_optimizer_in_small_letters",
        "rmsprop",
        {},
        'optimizer.type: there is no optimizer "rmsprop". Did you mean "RMSprop"?',
    ),
    optimizer(
        "optimizer_that_is_no_name",
        "torch.optim.SGD",
        {},
        (
            'optimizer.type: there is no optimizer "torch.optim.SGD"; write the name of '
            "a class of torch.optim"
        ),
    ),
    case(
        "optimizer_without_type",
        {**ONE, "optimizer": {"params": {"lr": 0.001}}},
        1,
        (
            f"optimizer.type: missing, and it has no default: {', '.join(OPTIMIZERS)}, or any class of "
            "torch.optim."
        ),
    ),
    case(
        "optimizer_is_a_string",
        {**ONE, "optimizer": "AdamW"},
        1,
        'optimizer: must be an object such as {"type": "AdamW"}, not "AdamW"',
    ),
    case(
        "params_are_a_list",
        {**ONE, "optimizer": {"type": "AdamW", "params": [0.001]}},
        1,
        'optimizer.params: must be an object such as {"lr": 0.001}, not [0.001]',
    ),
    optimizer(
        "lamb_with_amsgrad",
        "lamb",
        {"lr": 0.001, "amsgrad": True},
        "optimizer.params.amsgrad: must be False, not true",
    ),
    optimizer(
        "one_bit_adam",
        "OneBitAdam",
        {"lr": 0.001},
        'optimizer.type: "OneBitAdam" is not supported: DeepSpeed has removed it; use AdamW',
    ),
    optimizer(
        "misspelt_argument",
        "AdamW",
        {"wieght_decay": 0.1},
        'optimizer.params.wieght_decay: no such key. Did you mean "weight_decay"?',
    ),
    optimizer(
        "argument_of_another_optimizer",
        "Lion",
        {"eps": 1e-08},
        "optimizer.params.eps: no such key. This type takes betas, lr, weight_decay.",
    ),
    optimizer(
        "one_beta",
        "AdamW",
        {"betas": [0.9]},
        ("optimizer.params.betas: must be two numbers in [0, 1), such as [0.9, 0.999], not [0.9]"),
    ),
    optimizer(
        "beta_of_one",
        "AdamW",
        {"betas": [0.9, 1.0]},
        (
            "optimizer.params.betas: must be two numbers in [0, 1), such as [0.9, 0.999], not "
            "[0.9, 1.0]"
        ),
    ),
    optimizer(
        "lr_is_a_word", "AdamW", {"lr": "fast"}, 'optimizer.params.lr: must be a number, not "fast"'
    ),
    optimizer(
        "negative_lr",
        "AdamW",
        {"lr": -0.001},
        "optimizer.params.lr: must be at least 0, not -0.001",
    ),
    optimizer(
        "per_head_muon",
        "Muon",
        {"per_head_muon": True},
        "optimizer.params.per_head_muon: planned, not implemented yet; it is true, leave it out",
    ),
    # Schedules
    schedule(
        "misspelt_schedule",
        "WarmupDecay",
        {"total_num_steps": 10},
        'scheduler.type: there is no scheduler "WarmupDecay". Did you mean "WarmupDecayLR"?',
    ),
    schedule(
        "schedule_in_small_letters",
        "warmuplr",
        {},
        'scheduler.type: there is no scheduler "warmuplr". Did you mean "WarmupLR"?',
    ),
    schedule(
        "missing_total",
        "WarmupDecayLR",
        {},
        (
            "scheduler.params.total_num_steps: missing, and it has no default: Number of "
            "optimizer steps in the whole run."
        ),
    ),
    schedule(
        "auto_total",
        "WarmupDecayLR",
        {"total_num_steps": "auto"},
        (
            'scheduler.params.total_num_steps: "auto" is not possible: the number cannot be '
            "computed; write it"
        ),
    ),
    schedule(
        "misspelt_schedule_argument",
        "WarmupLR",
        {"warmup_steps": 10},
        'scheduler.params.warmup_steps: no such key. Did you mean "warmup_num_steps"?',
    ),
    schedule(
        "argument_of_another_schedule",
        "WarmupLR",
        {"total_num_steps": 10},
        (
            "scheduler.params.total_num_steps: no such key. This type takes last_batch_iteration,"
            " warmup_max_lr, warmup_min_lr, warmup_num_steps, warmup_type."
        ),
    ),
    schedule(
        "empty_first_half_cycle",
        "OneCycle",
        {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 0},
        "scheduler.params.cycle_first_step_size: must be greater than 0, not 0",
    ),
    # "auto" that no library has replaced
    optimizer("auto_lr", "AdamW", {"lr": "auto"}, "optimizer.params.lr: " + LEFT + "a number"),
    optimizer(
        "auto_lr_of_torch", "RMSprop", {"lr": "auto"}, "optimizer.params.lr: " + LEFT + "a number"
    ),
    zero("auto_stage", {"stage": "auto"}, "zero_optimization.stage: " + LEFT + "0, 1, 2 or 3"),
    schedule(
        "auto_warm_up",
        "WarmupLR",
        {"warmup_num_steps": "auto"},
        "scheduler.params.warmup_num_steps: " + LEFT + "a whole number",
    ),
    case(
        "auto_batch",
        {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"},
        2,
        'no batch size is given (train_batch_size "auto" and train_micro_batch_size_per_gpu "auto": '
        "nothing has replaced it, as Transformers or Accelerate do): write train_batch_size (samples "
        "per step over all ranks) or train_micro_batch_size_per_gpu (samples per rank per forward)",
    ),
    # What other libraries call it
    other("per_device_train_batch_size", 4, "train_micro_batch_size_per_gpu"),
    other("micro_batch_size", 4, "train_micro_batch_size_per_gpu"),
    other("global_batch_size", 4, "train_batch_size"),
    other("accumulate_grad_batches", 4, "gradient_accumulation_steps"),
    other("max_grad_norm", 1.0, "gradient_clipping"),
    other("learning_rate", 1e-4, "optimizer.params.lr"),
    other("zero_stage", 3, "zero_optimization.stage"),
    other("mixed_precision", "bf16", "bf16.enabled or fp16.enabled"),
    other("warmup_steps", 10, "scheduler.params.warmup_num_steps"),
    other("tensor_parallel_size", 2, "parallel.tensor"),
    optimizer(
        "learning_rate_in_params",
        "AdamW",
        {"learning_rate": 1e-4},
        'optimizer.params.learning_rate: no such key. Did you mean "lr"?',
    ),
    optimizer(
        "trainers_adamw",
        "adamw_torch",
        {},
        'optimizer.type: there is no optimizer "adamw_torch". Did you mean "AdamW"?',
    ),
    optimizer(
        "fused_adam",
        "FusedAdam",
        {},
        'optimizer.type: there is no optimizer "FusedAdam". Did you mean "Adam"?',
    ),
    schedule(
        "trainers_cosine",
        "cosine",
        {},
        'scheduler.type: there is no scheduler "cosine". Did you mean "WarmupCosineLR"?',
    ),
    case(
        "zero_is_a_stage",
        {**ONE, "zero_optimization": 3},
        1,
        'zero_optimization: must be an object such as {"stage": 3}, not 3',
    ),
    zero(
        "offload_is_a_device",
        {"stage": 2, "offload_optimizer": "cpu"},
        'zero_optimization.offload_optimizer: must be an object such as {"device": "cpu"}, not "cpu"',
    ),
    # All problems at once
    case(
        "several_at_once",
        {
            "train_batch_size": 8,
            "gradient_accumulation_steps": 3,
            "fp16": {"enabled": "true"},
            "zero_optimization": {"stage": 3, "stge": 1},
            "optimizer": {"type": "Adamm"},
            "scheduler": {
                "type": "OneCycle",
                "params": {"cycle_min_lr": "auto", "cycle_max_lr": "auto"},
            },
        },
        1,
        'fp16.enabled: must be true or false, not the string "true"; write true',
        'optimizer.type: there is no optimizer "Adamm". Did you mean "Adam"?',
        (
            'scheduler.params.cycle_max_lr: "auto" is not possible: the number cannot be '
            "computed; write it"
        ),
        (
            'scheduler.params.cycle_min_lr: "auto" is not possible: the number cannot be '
            "computed; write it"
        ),
        "train_batch_size 8 is not divisible by gradient_accumulation_steps 3 x world size 1: make it "
        "6 or 9",
        'zero_optimization.stge: no such key. Did you mean "stage"?',
    ),
)
