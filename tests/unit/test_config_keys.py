"""Every key of DeepSpeed is known, the docs agree with the code, the layer uses neither torch nor
os.environ."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from config_page import page

from zeroshard.config import KEYS, load_config
from zeroshard.config.keys import ALIASES, RENAMED, advice
from zeroshard.errors import ConfigError

ROOT = Path(__file__).parents[2]

# Every key that DeepSpeed 0.19 reads or once read; {a b} stands for both.
DEEPSPEED = """
train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps
managed_gradient_accumulation gradient_clipping steps_per_print communication_data_type
seq_parallel_communication_data_type prescale_gradients gradient_predivide_factor
gradient_allreduce_op zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
dataloader_drop_last dump_state log_level disable_python_gc disable_allgather vocabulary_size
fp16.{enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis}
fp16.{consecutive_hysteresis min_loss_scale fp16_master_weights_and_grads}
bf16.{enabled check_grad_overflow immediate_grad_update bf16_master_weights_and_grads}
bf16.bf16_optimizer_states bfloat16
torch_autocast.{enabled dtype lower_precision_safe_modules}
data_types.{grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules}
optimizer.{type params legacy_fusion} scheduler.{type params}
optimizer.params.{lr betas eps weight_decay bias_correction amsgrad adam_w_mode torch_adam}
optimizer.params.{fp32_optimizer_states foreach set_grad_none momentum ns_method muon_lr adam_lr}
optimizer.params.per_head_muon
scheduler.params.{warmup_min_lr warmup_max_lr warmup_num_steps warmup_type total_num_steps}
scheduler.params.{warmup_min_ratio cos_min_ratio lr_range_test_min_lr lr_range_test_step_size}
scheduler.params.{lr_range_test_step_rate lr_range_test_staircase cycle_min_lr cycle_max_lr}
scheduler.params.{decay_lr_rate cycle_first_step_size cycle_second_step_size}
scheduler.params.{cycle_first_stair_count cycle_second_stair_count decay_step_size}
scheduler.params.{cycle_momentum cycle_min_mom cycle_max_mom decay_mom_rate}
zero_optimization.{stage reduce_bucket_size allgather_bucket_size contiguous_gradients}
zero_optimization.{reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions}
zero_optimization.{memory_efficient_linear overlap_comm compute_grad_norm round_robin_gradients}
zero_optimization.{parameter_alignment elastic_checkpoint pipeline_loading_checkpoint}
zero_optimization.{log_trace_cache_warnings save_muon_momentum_buffer_in_memory}
zero_optimization.{ignore_unused_parameters load_from_fp32_weights legacy_stage1 sub_group_size}
zero_optimization.{stage3_prefetch_bucket_size stage3_max_live_parameters}
zero_optimization.{stage3_max_reuse_distance stage3_param_persistence_threshold}
zero_optimization.{stage3_model_persistence_threshold stage3_gather_16bit_weights_on_model_save}
zero_optimization.{stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params}
zero_optimization.{stage3_allgather_sequential override_module_apply enable_sanity_checks}
zero_optimization.leaf_module.{classes names name_suffixes}
zero_optimization.{zero_hpz_partition_size zero_quantized_weights zero_quantized_gradients}
zero_optimization.{zero_quantized_nontrainable_weights zenflow mics_shard_size}
zero_optimization.{mics_hierarchical_params_gather zeropp_loco_param cpu_offload}
zero_optimization.{cpu_offload_param stage3_gather_fp16_weights_on_model_save}
zero_optimization.cpu_offload_use_pin_memory
zero_optimization.offload_param.{device nvme_path pin_memory buffer_count buffer_size max_in_cpu}
zero_optimization.offload_optimizer.{device nvme_path pin_memory buffer_count pipeline_read}
zero_optimization.offload_optimizer.{pipeline_write fast_init ratio super_offload}
zero_optimization.offload_optimizer.cpuadam_cores_perc
checkpoint.{tag_validation load_universal use_node_local_storage checkpoint_serialization}
checkpoint.parallel_write.pipeline_stage
checkpoint.writer.{type io_buffer_size io_buffer_double io_multiplier data_parallel}
checkpoint.writer.{show_statistics decoupled}
aio.{block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds}
aio.thread_count
activation_checkpointing.{cpu_checkpointing partition_activations number_checkpoints profile}
activation_checkpointing.{contiguous_memory_optimization synchronize_checkpoint_boundary}
datastates_ckpt wall_clock_breakdown memory_breakdown timers.throughput.{enabled synchronized}
comms_logger.{enabled prof_all prof_ops verbose debug}
flops_profiler.{enabled profile_step module_depth top_modules detailed output_file}
flops_profiler.recompute_fwd_factor
tensorboard.{enabled output_path job_name} csv_monitor.{enabled output_path job_name}
wandb.{enabled group team project}
comet.{enabled samples_log_interval project workspace api_key experiment_name experiment_key}
comet.{online mode}
pipeline.{activation_checkpoint_interval use_reentrant pipe_partitioned grad_partitioned stages}
pipeline.{partition seed_layers}
tensor_parallel.{autotp_size dtype tp_overlap_comm partition_config preset_model}
tensor_parallel.{vocab_parallel_lm_head vocab_parallel_ce_backend injection_policy_tuple}
tensor_parallel.{keep_module_on_host kernel_inject}
tensor_parallel.tp.{tp_size tp_grain_size mpu tp_group}
sequence_parallel_size data_parallel_size use_data_before_expert_parallelism
expert_parallel.{enabled autoep_size expert_tensor_parallel_size load_balance_coeff top_k score_func}
expert_parallel.{score_apply route_norm route_scale routed_scaling_factor num_expert_groups}
expert_parallel.{num_limited_groups expert_activation preset_model moe_layer_pattern expert_pattern}
expert_parallel.{router_pattern expert_w1 expert_w2 expert_w3 num_experts_attr top_k_attr}
expert_parallel.{has_shared_experts shared_experts_pattern shared_experts_gate_pattern}
expert_parallel.{use_grouped_mm disable_triton_grouped_mm gate_up_impl combine_impl}
expert_parallel.{row_weighting_impl comm_backend comm_num_sm comm_qp_margin async_split_plan}
expert_parallel.{comm_max_tokens_per_rank validate_folding_routing}
compile.{deepcompile offload_activation free_activation double_buffer symmetric_memory}
compile.{sync_before_reduce sync_after_reduce keep_int_input_tensors debug_log passes}
compile.{offload_parameters offload_opt_states keep_all_input_tensors autoep_non_moe}
data_efficiency autotuning hybrid_engine weight_quantization amp nebula compression_training
quantize_training sparse_gradients eigenvalue sparse_attention elasticity graph_harvesting
curriculum_learning progressive_layer_drop msamp inference
"""


def expand(text: str) -> list[str]:
    keys: list[str] = []
    for prefix, group, single in re.findall(r"([\w.]+)\{([^}]*)\}|([\w.]+)", text):
        keys += [single] if single else [prefix + name for name in group.split()]
    return keys


def test_every_key_of_deepspeed_has_a_row() -> None:
    assert [key for key in expand(DEEPSPEED) if key not in KEYS] == []


def test_every_row_says_what_the_key_means_or_why_it_is_refused() -> None:
    rows = KEYS.values()
    silent = [r.path for r in rows if not (r.reason if r.verdict == "refuse" else r.doc)]
    assert silent == []


def test_the_committed_page_is_fresh() -> None:
    committed = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert committed == page(), "run: python tools/config_page.py > docs/config.md"


def test_the_page_tells_of_every_key() -> None:
    told = set(re.findall(r"`([\w.]+)`", page()))
    assert [key for key in KEYS if not {key, key.rpartition(".")[2]} & told] == []


def test_advice_prefers_the_place_where_the_same_name_belongs() -> None:
    assert advice("fp16.stage", ["enabled"]) == "It belongs to zero_optimization."


def test_the_layer_imports_neither_torch_nor_the_environment() -> None:
    allowed = {
        *(
            "__future__",
            "base64",
            "binascii",
            "bisect",
            "collections",
            "dataclasses",
            "difflib",
            "enum",
        ),
        *("hashlib", "io", "itertools", "json", "math", "numbers", "os", "pathlib", "pydantic"),
        *("pydantic_core", "re", "rich", "sys", "tomli", "tomllib", "typing", "zeroshard"),
    }
    for path in sorted((ROOT / "src" / "zeroshard" / "config").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {name.split(".")[0] for name in names} <= allowed, path
        assert "environ" not in text, path


@pytest.mark.parametrize("short", ALIASES)
def test_deepspeeds_short_spelling_of_a_stage_3_key_is_that_key(short: str) -> None:
    value = True if short.startswith(("gather", "use", "allgather")) else 4096
    zero = {"stage": 3, short: value}
    loaded = load_config({"train_batch_size": 1, "zero_optimization": zero}, world_size=1)
    assert getattr(loaded.config.zero_optimization, f"stage3_{short}") == value
    twice = {**zero, f"stage3_{short}": value}
    assert load_config({"train_batch_size": 1, "zero_optimization": twice}, world_size=1)
    twice[f"stage3_{short}"] = not value
    with pytest.raises(ConfigError, match="is given too; keep one"):
        load_config({"train_batch_size": 1, "zero_optimization": twice}, world_size=1)


def test_another_spelling_of_a_key_has_its_verdict() -> None:
    assert [old for old, new in RENAMED.items() if KEYS[old].verdict != KEYS[new].verdict] == []
    assert KEYS["zero_optimization.param_persistence_threshold"].verdict == "accept"


@pytest.mark.parametrize("key", ["sub_group_size", "allgather_bucket_size"])
def test_sizes_without_a_meaning_here_may_be_0(key: str) -> None:
    zero = {"stage": 2, key: 0}
    load_config({"train_batch_size": 1, "zero_optimization": zero}, world_size=1)
