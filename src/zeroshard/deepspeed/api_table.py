"""The table of DeepSpeed's Python names, with what ZeroShard does with each.

Imports, error messages, ``docs/compat.md`` and tests are made from it. *works*: does what DeepSpeed's
name does. *accepted*: may be called or passed, and has no effect here. *refused*: does not exist here,
with the reason. *later*: planned, and refused until then. Refused and later names can be imported if
programs import them at the top of a file; using them raises.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import product
from typing import Literal

from zeroshard.deepspeed.api_rows import HERE, TO_FP32, WORKING
from zeroshard.errors import NO_TUNING

Verdict = Literal["works", "accepted", "refused", "later"]

VERSION = "0.19.8+zeroshard"
"""The version in ``importlib.metadata`` and ``deepspeed.__version__``. Libraries compare the number."""


@dataclass(frozen=True, slots=True)
class Name:
    """One row of the table.

    ``path``: the name without ``deepspeed.``. ``home``: ``module:name`` of the implementation, empty if
    there is none. ``why``: the reason, the alternative, or the difference.
    """

    path: str
    verdict: Verdict
    home: str = ""
    why: str = ""


_NO_EFFECT: Mapping[str, str] = {
    "comm.configure": "collectives are always recorded; comms_logger in the configuration prints them",
    "comm.reset_log": "see comm.configure",
    "comm.log_summary": "the engine prints a summary of the collectives (comms_logger)",
    "comm.comm.configure": "see comm.configure",
    "comm.comm.log_summary": "see comm.log_summary",
    "set_autotp_mode": "a cut model trains and evaluates alike",
    "runtime.activation_checkpointing.checkpointing.reset": "no state is kept between steps",
    "runtime.activation_checkpointing.checkpointing.set_num_layers": "no buffer depends on it",
    "runtime.zero.TiledLinear": "a plain nn.Linear: the size of units limits what is gathered",
    "runtime.zero.tiling.TiledLinear": "a plain nn.Linear: the size of units limits what is gathered",
    "runtime.zero.register_external_parameter": "checks its arguments; reading a parameter gathers it",
    "runtime.zero.partition_parameters.register_external_parameter": (
        "checks its arguments; reading a parameter gathers it"
    ),
    "runtime.zero.partition_parameters.unregister_external_parameter": "checks its arguments",
    "runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer": "only a type, for isinstance",
    "runtime.fp16.loss_scaler.LossScaler": "only a type, for isinstance",
    "runtime.fp16.loss_scaler.DynamicLossScaler": "only a type, for isinstance",
    "runtime.fp16.loss_scaler.LossScalerBase": "only a type, for isinstance",
    "checkpoint.ds_to_universal.main": "copies the checkpoint: it needs no conversion",
}
"""Names that can be used and have no effect."""

_DIFFERENCES: Mapping[str, str] = {
    "tp_model_init": (
        "the cut is derived from the model; keys of config that say how are refused. "
        "zeroshard.parallel.tensor_parallel() takes a plan"
    ),
    "runtime.checkpoint_engine.TorchCheckpointEngine": (
        "reads only plain data and tensors: loading does not run code from the file"
    ),
    "profiling.flops_profiler.get_model_profile": (
        "counts matrix products, convolutions and attention, but no elementwise operations"
    ),
    "profiling.flops_profiler.FlopsProfiler": (
        "counts like get_model_profile, all operations between start and stop, including backward"
    ),
    "runtime.utils.partition_balanced": "the weight of the heaviest part is minimal",
    "runtime.zero.Init": "without a configuration and without dtype, parameters keep their dtype",
    "runtime.zero.partition_parameters.zero_wrapper_for_fp_tensor_constructor": (
        "tensor constructors are never changed; the name exists so that programs can replace it"
    ),
    "utils.set_z3_leaf_modules": "call it before initialize()",
}
"""Where a working name differs from DeepSpeed's in more than its error messages."""

_PIPE = (
    "its schedule is not offered; use PipelineModule, or zeroshard.parallel.pipeline() with another "
    "schedule"
)
_DATA = "it changes the data and the model; use the data loader"
_COMPRESS = "compress the model outside of training"
_INFERENCE = (
    "ZeroShard has no inference engine. Call the model, or use "
    "zero.unwrap_model_for_generation(engine)"
)

SCRIPTS = {"utils.zero_to_fp32": TO_FP32}
"""Modules whose ``__file__`` programs copy, and the module that is this file."""

_STUBS: tuple[tuple[Verdict, str, str, str], ...] = (  # importable; using them raises
    ("refused", "", "init_inference default_inference_config DeepSpeedHybridEngine "
                    "InferenceEngine DeepSpeedInferenceConfig", _INFERENCE),
    ("refused", "", "DeepSpeedTransformerLayer DeepSpeedTransformerConfig",
     "it is a CUDA implementation of one BERT layer; use "
     "torch.nn.functional.scaled_dot_product_attention"),
    ("refused", "runtime.pipe.schedule", "DualPipeVSchedule CommitP2P", _PIPE),
    ("refused", "runtime.data_pipeline.curriculum_scheduler", "CurriculumScheduler", _DATA),
    ("refused", "runtime.data_pipeline.data_routing.helper",
     "convert_to_random_ltd remove_random_ltd_state_dict", _DATA),
    ("refused", "sequence.fpdt_layer", "FPDT_InputConstruct FPDT_Attention FPDT_FFN FPDT_LogitsLoss",
     "it computes long sequences in parts on one device; use sequence parallelism (docs/sequence.md)"),
    ("refused", "compression.compress", "init_compression redundancy_clean", _COMPRESS),
    ("later", "linear", "OptimizedLinear LoRAConfig QuantizationConfig",
     "quantized LoRA layers are not implemented yet; use PEFT"),
    ("refused", "checkpoint", "DeepSpeedCheckpoint",
     "it reads the files of DeepSpeed; zeroshard.Engine.load_checkpoint loads them, and "
     "`zeroshard ckpt` shows their contents"),
)  # fmt: skip

_ABSENT: tuple[tuple[Verdict, str, str], ...] = (  # no such name; the error gives the reason
    ("refused", "inference", _INFERENCE),
    ("refused", "module_inject", _INFERENCE),
    ("refused", "model_implementations", _INFERENCE),
    ("refused", "runtime.hybrid_engine", _INFERENCE),
    ("refused", "autotuning", NO_TUNING),
    ("refused", "compression.init_compression", _COMPRESS),
    ("refused", "compression.scheduler", _COMPRESS),
    ("refused", "elasticity.elastic_agent", "the number of ranks does not change during a run; "
     "checkpoints load at any world size"),
    ("refused", "nebula", "DeepSpeed has removed it; save checkpoints with engine.save_checkpoint()"),
    ("refused", "datastates", "its checkpoints depend on one external engine; use "
     '"checkpoint": {"asynchronous": true}'),
    ("refused", "runtime.data_pipeline.data_sampling", _DATA),
    ("refused", "runtime.data_pipeline.data_routing.basic_layer", _DATA),
    ("refused", "runtime.data_pipeline.data_routing.scheduler", _DATA),
    ("refused", "runtime.zenflow", "it updates with stale gradients, which changes the result"),
    ("refused", "runtime.superoffload", "use the key offload_optimizer.super_offload"),
    ("refused", "runtime.domino", "it cuts batches in two to hide collectives of tensor parallelism; use "
     "zeroshard.parallel.tensor_parallel()"),
    ("refused", "runtime.eigenvalue", "the only feature that used it was removed from DeepSpeed"),
    ("refused", "runtime.progressive_layer_drop", "drop layers in the code of the model"),
    ("refused", "runtime.swap_tensor",
     "the engine manages state on disk; see offload_optimizer and offload_param"),
    ("refused", "ops.sparse_attention", "use an attention kernel inside the model"),
    ("refused", "ops.transformer", "use torch.nn.functional.scaled_dot_product_attention"),
    ("refused", "ops.fp_quantizer", "quantize the model outside of training"),
    ("refused", "ops.deepspeed4science", "use torch.nn.functional.scaled_dot_product_attention"),
    ("refused", "compile", 'DeepCompile is not offered; use engine.compile(), or "compile_update"'),
    ("refused", "DualPipeVModule", _PIPE),
    ("refused", "DualPipeVEngine", _PIPE),
    ("later", "io", "files are written by the engine; see docs/checkpoints.md"),
)  # fmt: skip

SAME_MODULE: Mapping[str, str] = {
    "zero": "runtime.zero",
    "dist": "comm",
    "checkpointing": "runtime.activation_checkpointing.checkpointing",
}
"""Short name -> the module that it stands for."""


LIVE = frozenset({"utils.groups.mpu"})
"""Names whose value changes: it is that of the mesh in use."""


_MEMBERS: tuple[tuple[Verdict, str, str, str], ...] = (  # verdict, of which object, names, why
    ("works", "engine",
     "forward backward step set_gradient_accumulation_boundary is_gradient_accumulation_boundary "
     "get_global_grad_norm was_step_applied get_lr get_mom get_type train eval zero_grad no_sync "
     "module device config optimizer basic_optimizer lr_scheduler training_dataloader "
     "save_checkpoint load_checkpoint save_16bit_model save_fp16_model module_state_dict "
     "load_module_state_dict zero_gather_16bit_weights_on_model_save "
     "_zero3_consolidated_16bit_state_dict _consolidated_16bit_state_dict compile is_compiled "
     "destroy offload_states reload_states empty_partition_cache coalesce_grad_reduction "
     "deepspeed_io set_train_batch_size set_train_micro_batch_size scale global_steps "
     "global_samples micro_steps skipped_steps local_rank global_rank world_size dp_world_size "
     "mp_world_size data_parallel_group monitor timers param_names mpu has_moe_layers "
     "inside_no_sync_ctxt train_batch_size train_micro_batch_size_per_gpu "
     "gradient_accumulation_steps gradient_clipping steps_per_print zero_optimization "
     "zero_optimization_stage zero_optimization_partition_gradients "
     "zero_optimization_partition_weights zero_offload_optimizer zero_offload_param fp16_enabled "
     "bfloat16_enabled dynamic_loss_scale loss_scale get_data_types optimizer_name scheduler_name "
     "optimizer_params scheduler_params get_data_parallel_rank get_model_parallel_rank "
     "get_sequence_parallel_group get_batch_info wall_clock_breakdown get_wall_clock_timers "
     "memory_breakdown communication_data_type prescale_gradients postscale_gradients "
     "gradient_predivide_factor dataloader_drop_last torch_autocast_enabled "
     "torch_autocast_dtype fp16_auto_cast aio_config zero_cpu_offload zero_use_cpu_optimizer "
     "zero_nvme_offload_optimizer zero_partial_offload zero_overlap_comm zero_reduce_bucket_size "
     "zero_sub_group_size zero_prefetch_bucket_size zero_max_live_parameters "
     "initial_dynamic_scale dynamic_loss_scale_args is_sanity_checks_enabled",
     ""),
    ("accepted", "engine", "allreduce_gradients clip_fp32_gradients losses tput_timer",
     "gradients are reduced during backward and clipped in step(); the engine starts no timer"),
    ("refused", "engine", "set_data_post_process_func set_custom_curriculum_learning_schedule "
     "curriculum_learning_enabled data_efficiency_enabled random_ltd_enabled random_ltd_config "
     "data_efficiency_config", "it changes the data and the model; use collate_fn and the data loader"),
    ("refused", "engine", "sparse_allreduce sparse_all_gather allreduce_bucket "
     "buffered_allreduce_fallback allreduce_no_retain allreduce_and_copy",
     "gradients are reduced during backward, and are never sparse"),
    ("refused", "engine", "autotuning_enabled autotuning_metric", NO_TUNING),
    ("refused", "engine", "register_compile_pass get_compile_time",
     "DeepCompile is not offered; use engine.compile()"),
    ("works", "engine", "train_batch eval_batch",
     "for a PipelineModule or a model made by zeroshard.parallel.pipeline()"),
    ("works", "engine of a PipelineModule", "train_batch eval_batch set_dataloader set_dataiterator "
     "set_batch_fn is_first_stage is_last_stage get_pipeline_parallel_rank grid stage_id num_stages "
     "prev_stage next_stage micro_batches micro_batch_size data_iterator batch_fn agg_train_loss "
     "is_pipe_parallel is_data_parallel is_model_parallel "
     "running_instructions pipe_buffers num_pipe_buffers fwd_outputs loss total_loss grad_layer outputs "
     "eval_return_logits is_pipe_partitioned is_grad_partitioned using_bf16_optimizer _compute_loss "
     "_INSTRUCTION_MAP _exec_schedule _exec_load_micro_batch _exec_forward_pass _exec_backward_pass "
     "_exec_send_activations _exec_recv_activations _exec_send_grads _exec_recv_grads "
     "_exec_reduce_grads _exec_optimizer_step _train_schedule _inference_schedule _next_batch "
     "_reserve_pipe_buffers _aggregate_total_loss _reduce_outputs _bcast_pipe_scalar "
     "_scale_loss_by_gas _build_data_iter", ""),
    ("accepted", "engine of a PipelineModule", "_exec_reduce_tied_grads",
     "_exec_reduce_grads reduces tied weights, after all others"),
    ("accepted", "engine of a PipelineModule", "mem_status", "engine.memory_report() has the bytes held"),
    ("accepted", "engine of a PipelineModule", "reset_activation_shape set_has_attention_mask",
     "each step sends the shapes and dtypes of what its stages pass on"),
    ("works", "PipelineModule", "topology mpu num_pipeline_stages forward set_checkpoint_interval "
     "forward_funcs parts num_stages stage_id tied_modules tied_weight_attrs micro_offset curr_layer "
     "base_seed seed_layers seed_fn loss_fn activation_checkpoint_interval activation_checkpoint_func "
     "checkpointable_layers get_additional_losses", ""),
    ("accepted", "PipelineModule", "allreduce_tied_weight_gradients dynamic_shape",
     "the engine adds the gradients of tied weights; shapes may always differ from step to step"),
    ("works", "engine", "num_experts load_moe_state_dict", ""),
    ("works", "engine", "_config _global_grad_norm", ""),
    ("works", "optimizer", "param_groups optimizer state state_dict load_state_dict step zero_grad "
     "backward overflow defaults loss_scale cur_scale loss_scaler dynamic_loss_scale clip_grad "
     "_global_grad_norm get_lr set_lr dp_process_group single_partition_of_fp32_groups "
     "fp32_partitioned_groups_flat loss_scale_config", ""),
    ("works", "optimizer at stage 3", "parameter_offload", ""),
    ("refused", "optimizer", "fp16_groups averaged_gradients fp16_partitioned_groups",
     "there are no such buffers; use the functions deepspeed.utils.safe_get_* and safe_set_*"),
    ("works", "scheduler", "step get_lr get_last_lr state_dict load_state_dict", ""),
    ("works", "schedules by name", "min_lrs max_lrs "
     "warmup_num_steps warmup_type total_num_steps org_lrs warmup_min_ratio cos_min_ratio min_lr "
     "step_size step_rate staircase first_step_size second_step_size step_ratio total_size", ""),
    ("works", "parameter", "ds_id ds_numel ds_shape ds_status ds_tensor ds_persist "
     "ds_process_group ds_summary partition_numel all_gather partition ds_active_sub_modules", ""),
)  # fmt: skip


def _rows() -> Iterator[Name]:
    for modules, home, words in WORKING:
        for module, word in product(modules.split(","), words.split()):
            theirs, _, ours = word.partition("=")
            path = _below(module, theirs)
            verdict: Verdict = "accepted" if path in _NO_EFFECT else "works"
            why = _NO_EFFECT.get(path, _DIFFERENCES.get(path, ""))
            yield Name(path, verdict, f"{home}:{ours or theirs}", why)
    for short, module in SAME_MODULE.items():
        yield Name(short, "works", module, f"the module {module}")
    for verdict, module, words, why in _STUBS:
        for word in words.split():
            path = _below(module, word)
            yield Name(path, verdict, f"{HERE}symbols:{path.replace('.', '/')}", why)
    for verdict, path, why in _ABSENT:
        yield Name(path, verdict, "", why)


def _below(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


NAMES: tuple[Name, ...] = tuple(_rows())
_BY_PATH: Mapping[str, Name] = {row.path: row for row in NAMES}

MODULES: frozenset[str] = frozenset(
    ".".join(parts[:end])
    for row in NAMES
    if row.home and row.path not in SAME_MODULE
    for parts in [row.path.split(".")]
    for end in range(1, len(parts))
)
"""Every name that can be imported, without ``deepspeed.``."""

DUNDERS = frozenset(
    row.path.rpartition(".")[2] for row in NAMES if row.path.rpartition(".")[2].startswith("__")
)
"""Names that look like Python's special names and are DeepSpeed's."""


MEMBERS: tuple[Name, ...] = tuple(
    Name(f"{owner}.{name}", verdict, owner if verdict in ("works", "accepted") else "", why)
    for verdict, owner, words, why in _MEMBERS
    for name in words.split()
)
"""Attributes and methods of the objects that ``initialize`` returns, and of parameters at stage 3."""
_MEMBER: Mapping[str, Name] = {row.path: row for row in MEMBERS}


def find_member(owner: str, name: str) -> Name | None:
    """The row of a member, or None."""
    return _MEMBER.get(f"{owner}.{name}")


def reason_of(row: Name) -> str:
    """Why a name does not work.

    >>> reason_of(find_member("engine", "train_batch"))[:40]
    'engine.train_batch is not in ZeroShard y'
    """
    what = "refused by ZeroShard" if row.verdict == "refused" else "not in ZeroShard yet"
    return f"{row.path} is {what}: {row.why}"


def find(path: str) -> Name | None:
    """The row of a name, or None. The path may use a short module name (``zero.Init``)."""
    head, dot, rest = path.partition(".")
    if dot and head in SAME_MODULE:
        path = f"{SAME_MODULE[head]}.{rest}"
    return _BY_PATH.get(path)


def reason(path: str) -> str:
    """Why a name does not exist, in one sentence, with the remedy.

    >>> reason("nebula.x")  # doctest: +ELLIPSIS
    'deepspeed.nebula is refused by ZeroShard: DeepSpeed has removed it; save ...'
    """
    if path in SAME_MODULE:
        return f"deepspeed.{path} is an attribute; the module is deepspeed.{SAME_MODULE[path]}."
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        row = find(".".join(parts[:end]))
        if row is not None and row.verdict in ("refused", "later"):
            return f"deepspeed.{reason_of(row)}"
    parent, _, name = path.rpartition(".")
    homes = {row.path.rpartition(".")[2].lower(): row.path for row in reversed(NAMES)}
    near = get_close_matches(name.lower(), homes, n=1, cutoff=0.8)
    hint = f"; there is deepspeed.{homes[near[0]]}" if near else ""
    where = f"deepspeed.{parent}" if parent else "deepspeed"
    return (
        f"ZeroShard provides {where}, but no {name!r} in it{hint}. docs/compat.md lists every name."
    )
