"""The names of DeepSpeed that work here, and where their implementations are."""

from __future__ import annotations

HERE = "zeroshard.deepspeed."
_ENGINE, _OPTIMIZER, _SYMBOLS = HERE + "engine", HERE + "optimizer", HERE + "symbols"
_ZERO_INIT, _HELPERS, _DEVICE = HERE + "zero_init", HERE + "helpers", HERE + "device"
_OPS, _VERSION_INFO, _GROUPS = HERE + "ops_optimizers", HERE + "version_info", HERE + "groups"
_ACTIVATIONS, _MONITORS, _LOGS = HERE + "activations", HERE + "monitors", HERE + "logs"
_ESTIMATES, _CKPT_FILES, _CONFIG = (
    HERE + "estimates",
    HERE + "checkpoint_files",
    HERE + "config_model",
)
_DISTRIBUTED, _COMM, _RANKS = HERE + "distributed", HERE + "collectives", HERE + "parallel_init"
_TOPOLOGY, _LAYERS = HERE + "topology", HERE + "pipeline_layers"
_PIPE_MODULE, _PIPE_ENGINE = HERE + "pipeline_module", HERE + "pipeline_engine"
_PIPE_SCHEDULE, _EXPERTS = HERE + "pipe_schedule", "zeroshard.experts."
_SEQUENCE, _ACCESS = "zeroshard.sequence.", "zeroshard.zero.access"
_SCHEDULES, _POOLS = "zeroshard.optim.schedulers", "zeroshard.launch.hosts"
TO_FP32 = "zeroshard.checkpoint.zero_to_fp32"
SAFE = " ".join(
    f"safe_{verb}_{extent}_{what}"
    for verb in ("get", "set")
    for extent in ("full", "local")
    for what in ("fp32_param", "grad", "optimizer_state")
)


def _getters(*kinds: str) -> list[str]:
    """The names of the functions that tell a group of ranks."""
    asked = ("group", "world_size", "rank")
    return [f"get_{kind}_parallel_{what}" for kind in kinds for what in asked]


_OF_PLAIN_MESHES = _getters("data", "model", "tensor_model")
_OF_SEQUENCES = _getters("sequence", "sequence_data")

# Keys of configurations and files. Each constant is its name in small letters.
CONFIG_KEYS = (
    "TRAIN_BATCH_SIZE TRAIN_MICRO_BATCH_SIZE_PER_GPU GRADIENT_ACCUMULATION_STEPS GRADIENT_CLIPPING "
    "OPTIMIZER SCHEDULER FP16"
)
SCHEDULE_KEYS = (
    "LR_SCHEDULE LR_RANGE_TEST_MIN_LR LR_RANGE_TEST_STEP_RATE LR_RANGE_TEST_STEP_SIZE "
    "LR_RANGE_TEST_STAIRCASE CYCLE_FIRST_STEP_SIZE CYCLE_FIRST_STAIR_COUNT CYCLE_SECOND_STEP_SIZE "
    "CYCLE_SECOND_STAIR_COUNT DECAY_STEP_SIZE CYCLE_MIN_LR CYCLE_MAX_LR DECAY_LR_RATE CYCLE_MIN_MOM "
    "CYCLE_MAX_MOM DECAY_MOM_RATE WARMUP_MIN_LR WARMUP_MAX_LR WARMUP_NUM_STEPS WARMUP_TYPE "
    "WARMUP_MIN_RATIO COS_MIN_RATIO TOTAL_NUM_STEPS"
)
CHECKPOINT_KEYS = (
    "OPTIMIZER_STATE_DICT FP32_GROUPS FP32_FLAT_GROUPS BASE_OPTIMIZER_STATE BASE_OPTIMIZER_STATE_STEP "
    "SINGLE_PARTITION_OF_FP32_GROUPS PARAM_GROUPS GROUP_PADDINGS PARAM_ALIGNMENT_PADDINGS "
    "PARTITION_COUNT ZERO_STAGE CLIP_GRAD LOSS_SCALER PARAM PARAM_SHAPES BUFFER_NAMES "
    "FROZEN_PARAM_SHAPES FROZEN_PARAM_FRAGMENTS DS_VERSION UNIVERSAL_CHECKPOINT_INFO VOCAB_TENSOR "
    "PADDED_VOCAB_SIZE ORIGINAL_VOCAB_SIZE PARAM_SLICE_MAPPINGS CAT_DIM PARAM_N_SUB_PARAMS "
    "SUB_PARAM_SHAPE SUB_PARAMS_SHAPE VOCABULARY_PARAMETER_PATTERNS "
    "PIPELINE_REPLICATED_PARAMETER_PATTERNS PARAMETER_TO_AVERAGE_PATTERNS "
    "PARAMETER_WITH_ROW_PARALLELISM_PATTERNS TP_REPLICATED_PARAMETER_PATTERNS "
    "PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 PARAMETER_WITH_SUB_PARAMS"
)
WORKING: tuple[tuple[str, str, str], ...] = (  # modules, home, names; "theirs=ours" where they differ
    ("", HERE + "entry", "initialize"),
    (",runtime.pipe.engine,runtime.engine", _ENGINE, "DeepSpeedEngine"),
    (",runtime.pipe.engine", _PIPE_ENGINE, "PipelineEngine"),
    (",pipe,runtime.pipe,runtime.pipe.module,runtime.pipe.engine", _PIPE_MODULE, "PipelineModule"),
    ("pipe,runtime.pipe,runtime.pipe.module", _LAYERS, "LayerSpec TiedLayerSpec"),
    ("runtime.pipe.module,runtime.pipe.engine", "zeroshard.errors", "PipelineError=UsageError"),
    ("runtime.pipe.engine", _MONITORS,
     "BATCH_INPUT_TIMER TRAIN_BATCH_TIMER PIPE_SEND_OUTPUT_TIMER PIPE_SEND_GRAD_TIMER "
     "PIPE_RECV_INPUT_TIMER PIPE_RECV_GRAD_TIMER"),
    ("monitor.monitor", _MONITORS, "Monitor MonitorMaster"),
    ("monitor.monitor,monitor.tensorboard", _MONITORS, "TensorBoardMonitor"),
    ("monitor.monitor,monitor.wandb", _MONITORS, "WandbMonitor"),
    ("monitor.monitor,monitor.csv_monitor", _MONITORS, "csvMonitor"),
    ("monitor.monitor,monitor.comet", _MONITORS, "CometMonitor"),
    ("monitor.config", _MONITORS, "get_monitor_config DeepSpeedMonitorConfig"),
    ("utils.timer", _MONITORS,
     "SynchronizedWallClockTimer NoopTimer ThroughputTimer FORWARD_MICRO_TIMER FORWARD_GLOBAL_TIMER "
     "BACKWARD_MICRO_TIMER BACKWARD_GLOBAL_TIMER BACKWARD_INNER_MICRO_TIMER "
     "BACKWARD_INNER_GLOBAL_TIMER BACKWARD_REDUCE_MICRO_TIMER BACKWARD_REDUCE_GLOBAL_TIMER "
     "STEP_MICRO_TIMER STEP_GLOBAL_TIMER"),
    ("runtime.pipe.engine", _PIPE_SCHEDULE, "is_even=_is_even"),
    ("runtime.pipe.schedule", _PIPE_SCHEDULE,
     "PipeInstruction BufferOpInstruction LoadMicroBatch ForwardPass BackwardPass SendActivation "
     "RecvActivation SendGrad RecvGrad ReduceGrads ReduceTiedGrads OptimizerStep PipeSchedule "
     "TrainSchedule InferenceSchedule DataParallelSchedule _is_even _is_odd"),
    ("runtime.pipe.p2p", _TOPOLOGY, "init_process_groups can_send_recv send recv"),
    ("runtime.pipe,runtime.pipe.topology", _TOPOLOGY, "ProcessTopology"),
    ("runtime.pipe.topology", _TOPOLOGY,
     "PipeDataParallelTopology PipeModelDataParallelTopology PipelineParallelGrid"),
    ("", "zeroshard.engine.initialize", "add_config_arguments"),
    (",comm,comm.comm", _DISTRIBUTED, "init_distributed"),
    ("comm,comm.comm", _DISTRIBUTED, "is_initialized configure log_summary mpi_discovery"),
    ("comm", _DISTRIBUTED, "reset_log"),
    (",runtime.base_optimizer", _OPTIMIZER, "DeepSpeedOptimizer"),
    ("runtime.base_optimizer", _OPTIMIZER, "ZeROOptimizer"),
    ("runtime.bf16_optimizer", _OPTIMIZER, "BF16_Optimizer"),
    ("runtime.fp16.fused_optimizer", _OPTIMIZER, "FP16_Optimizer"),
    ("runtime.fp16.unfused_optimizer", _OPTIMIZER, "FP16_UnfusedOptimizer"),
    ("runtime.fp16.loss_scaler", _OPTIMIZER, "LossScalerBase LossScaler DynamicLossScaler"),
    ("runtime.zero.stage3", _OPTIMIZER, "DeepSpeedZeroOptimizer_Stage3"),
    ("runtime.zero.stage_1_and_2", _OPTIMIZER, "DeepSpeedZeroOptimizer"),
    ("runtime.zero,runtime.zero.parameter_offload", _OPTIMIZER, "DeepSpeedZeRoOffload"),
    (",runtime.config", _SYMBOLS, "DeepSpeedConfigError"),
    ("runtime.config", _SYMBOLS,
     "ADAGRAD_OPTIMIZER ADAM_OPTIMIZER ADAMW_OPTIMIZER LAMB_OPTIMIZER LION_OPTIMIZER MUON_OPTIMIZER "
     "MUADAM_OPTIMIZER MUADAMW_OPTIMIZER MUSGD_OPTIMIZER DEEPSPEED_OPTIMIZERS"),
    ("runtime.zero.config", _SYMBOLS, "ZeroStageEnum"),
    ("runtime.zero.offload_config", _SYMBOLS, "OffloadDeviceEnum OffloadStateTypeEnum"),
    ("runtime.zero.utils", _SYMBOLS, "ZeRORuntimeException"),
    ("runtime.zero,runtime.zero.partition_parameters", _SYMBOLS,
     "ZeroParamStatus ZeroParamType DeepSpeedTensorOverride"),
    ("runtime.lr_schedules", _SYMBOLS, SCHEDULE_KEYS +
     " LR_RANGE_TEST ONE_CYCLE WARMUP_LR WARMUP_DECAY_LR WARMUP_COSINE_LR WARMUP_LOG_RATE "
     "WARMUP_LINEAR_RATE"),
    ("runtime.constants", _SYMBOLS, CONFIG_KEYS +
     " ROUTE_TRAIN ROUTE_EVAL ROUTE_PREDICT ROUTE_ENCODE BFLOAT16"),
    ("runtime.constants,constants", _SYMBOLS, "TORCH_DISTRIBUTED_DEFAULT_PORT"),
    ("utils.tensor_fragment", _SYMBOLS, "fragment_address"),
    ("checkpoint,checkpoint.constants", _SYMBOLS, CHECKPOINT_KEYS +
     " FP32_WEIGHT_KEY MODEL_FILE_PREFIX ZERO_FILE_PREFIX BF16_ZERO_FILE_PREFIX FP16_ZERO_FILE_PREFIX "
     "LAYER_FILE_PREFIX OPTIM_FILE_SUFFIX MODEL_FILE_SUFFIX CHECKPOINT_PARALLEL_DIMS "
     "CHECKPOINT_PP_DEGREE CHECKPOINT_TP_DEGREE UNIVERSAL_CHECKPOINT_VERSION_KEY "
     "UNIVERSAL_CHECKPOINT_VERSION_VALUE"),
    (",utils,utils.init_on_device", _HELPERS, "OnDevice"),
    ("runtime.utils", _HELPERS,
     "move_to_device see_memory_usage clip_grad_norm_ get_global_norm ensure_directory_exists "
     "set_random_seed all_gather_dp_groups PartitionedTensor partition_uniform partition_balanced"),
    ("compression.helper,utils.module_utils", _HELPERS, "recursive_getattr recursive_setattr"),
    ("utils,utils.tensor_fragment", _HELPERS, "safe_update_full_grad_vectorized"),
    ("utils,runtime.dataloader", _HELPERS, "RepeatingLoader"),
    ("utils,utils.nvtx", _HELPERS, "instrument_w_nvtx"),
    ("utils.numa", _HELPERS, "parse_range_list"),
    ("checkpoint.utils", _HELPERS, "clone_tensors_for_torch_save"),
    ("", _RANKS, "tp_model_init set_autotp_mode"),
    ("runtime.sequence_parallel.ulysses_sp", _RANKS, "UlyssesSPAttentionHF"),
    ("runtime.sequence_parallel.parallel_state_sp", _RANKS, "initialize_sequence_parallel"),
    (",utils,utils.logging", _LOGS, "log_dist logger"),
    ("utils,utils.logging", _LOGS, "log_dist_once set_log_level_from_string"),
    ("utils.logging", _LOGS, "LoggerFactory get_current_level"),
    (",runtime.zero.partition_parameters,accelerator,accelerator.real_accelerator", _DEVICE,
     "get_accelerator"),
    ("accelerator", _DEVICE, "is_current_accelerator_supported"),
    ("accelerator,accelerator.abstract_accelerator", _DEVICE, "DeepSpeedAccelerator"),
    ("", _VERSION_INFO,
     "__version__ __version_major__ __version_minor__ __version_patch__ __git_hash__ __git_branch__"),
    (",git_version_info", _VERSION_INFO, "version git_hash git_branch"),
    ("git_version_info", _VERSION_INFO, "torch_info installed_ops compatible_ops"),
    ("utils.torch", _VERSION_INFO, "required_torch_version"),
    ("ops", _VERSION_INFO, "__compatible_ops__=compatible_ops __installed_ops__=installed_ops"),
    ("ops.op_builder", _VERSION_INFO,
     "CPUAdamBuilder CPUAdagradBuilder CPULionBuilder FusedAdamBuilder FusedLionBuilder "
     "FusedLambBuilder UtilsBuilder ALL_OPS"),
    ("ops.op_builder,ops.aio", _VERSION_INFO, "AsyncIOBuilder"),
    ("ops.op_builder.builder", _VERSION_INFO, "OpBuilder"),
    ("constants", _VERSION_INFO, "default_pg_timeout"),
    ("runtime.zero.stage3", _ESTIMATES,
     "estimate_zero3_model_states_mem_needs estimate_zero3_model_states_mem_needs_all_live "
     "estimate_zero3_model_states_mem_needs_all_cold"),
    ("runtime.zero.stage_1_and_2", _ESTIMATES,
     "estimate_zero2_model_states_mem_needs estimate_zero2_model_states_mem_needs_all_live "
     "estimate_zero2_model_states_mem_needs_all_cold"),
    ("profiling.flops_profiler,profiling.flops_profiler.profiler", _ESTIMATES,
     "get_model_profile FlopsProfiler"),
    (",runtime.config", _CONFIG, "DeepSpeedConfig"),
    ("runtime.config_utils", _CONFIG, "DeepSpeedConfigModel"),
    ("runtime.zero.config", _CONFIG, "DeepSpeedZeroConfig"),
    ("runtime.zero.offload_config", _CONFIG,
     "DeepSpeedZeroOffloadParamConfig DeepSpeedZeroOffloadOptimizerConfig"),
    ("elasticity,elasticity.elasticity", _CONFIG, "compute_elastic_config elasticity_enabled"),
    ("runtime.checkpoint_engine,runtime.checkpoint_engine.torch_checkpoint_engine", _CKPT_FILES,
     "CheckpointEngine TorchCheckpointEngine"),
    ("runtime.checkpoint_engine.checkpoint_engine", _CKPT_FILES,
     "CheckpointEngine CheckpointCommitInfo"),
    ("utils.zero_to_fp32", _CKPT_FILES,
     "convert_zero_checkpoint_to_fp32_state_dict convert_zero_checkpoint_to_state_dict "
     "get_model_state_file get_optim_files get_model_state_files parse_optim_states"),
    ("checkpoint.ds_to_universal", _CKPT_FILES, "main=copy_as_universal"),
    ("runtime.sequence_parallel.ulysses_sp", _SEQUENCE + "split_batches",
     "UlyssesSPDataLoaderAdapter=SequenceLoader"),
    ("runtime.sequence_parallel.ulysses_sp", _SEQUENCE + "tiled",
     "TiledMLP TiledFusedLogitsLoss SequenceTiledCompute sequence_tiled_compute"),
    ("runtime.sequence_parallel.parallel_state_sp", _GROUPS,
     " ".join(f"{name}=_{name}" for name in _OF_SEQUENCES)),
    ("utils.groups", _GROUPS, " ".join([
        "mpu", "_get_broadcast_src_rank", *_OF_PLAIN_MESHES,
        *(f"_{name}" for name in (*_OF_PLAIN_MESHES, *_OF_SEQUENCES, *_getters("expert", "expert_data"))),
    ])),
    ("sequence.layer", _SEQUENCE + "attention", "DistributedAttention"),
    ("runtime.zero.utils,runtime.zero.partition_parameters", _ZERO_INIT, "is_zero_param"),
    ("runtime.zero,runtime.zero.partition_parameters", _ZERO_INIT,
     "Init GatheredParameters register_external_parameter"),
    ("runtime.zero", _ZERO_INIT, "unwrap_model_for_generation"),
    ("runtime.zero,runtime.zero.tiling", _ZERO_INIT, "TiledLinear"),
    ("runtime.zero.partition_parameters", _ZERO_INIT,
     "unregister_external_parameter zero_wrapper_for_fp_tensor_constructor _orig_torch_arange"),
    ("utils,utils.z3_leaf_module", _ZERO_INIT,
     "set_z3_leaf_modules unset_z3_leaf_modules get_z3_leaf_modules set_z3_leaf_module "
     "set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix z3_leaf_parameter"),
    ("utils.z3_leaf_module", _ZERO_INIT, "z3_leaf_module"),
    ("runtime.lr_schedules", _SCHEDULES,
     "VALID_LR_SCHEDULES LRRangeTest OneCycle WarmupLR WarmupDecayLR WarmupCosineLR"),
    ("monitor.config", "zeroshard.config.sections",
     "TensorBoardConfig=FileMonitorConfig WandbConfig CSVConfig=FileMonitorConfig CometConfig"),
    ("runtime.dataloader", "zeroshard.data.data_loader", "DeepSpeedDataLoader=ResumableLoader"),
    ("runtime.activation_checkpointing.checkpointing", _ACTIVATIONS,
     "configure is_configured reset checkpoint non_reentrant_checkpoint CheckpointFunction "
     "get_cuda_rng_tracker model_parallel_cuda_manual_seed model_parallel_reconfigure_tp_seed "
     "partition_activations_in_checkpoint set_num_layers detach_variable _CUDA_RNG_STATE_TRACKER "
     "_MODEL_PARALLEL_RNG_TRACKER_NAME _set_cuda_rng_state"),
    ("utils,utils.tensor_fragment", _ACCESS, SAFE),
    ("utils.zero_to_fp32", TO_FP32,
     "get_fp32_state_dict_from_zero_checkpoint load_state_dict_from_zero_checkpoint main"),
    ("moe.layer", _EXPERTS + "layer", "MoE"),
    ("moe.experts", _EXPERTS + "layer", "Experts"),
    ("moe.sharded_moe", _EXPERTS + "layer", "MOELayer"),
    ("moe.sharded_moe", _EXPERTS + "gate", "TopKGate"),
    ("moe.utils", HERE + "experts",
     "split_params_into_different_moe_groups_for_optimizer is_moe_param has_moe_layers "
     "is_moe_param_group split_params_into_shared_and_expert_params "
     "split_params_grads_into_shared_and_expert_params configure_moe_param_groups"),
    ("comm,comm.comm", _COMM,
     "is_available get_rank get_world_size get_local_rank get_global_rank get_world_group new_group "
     "destroy_process_group barrier broadcast all_reduce all_gather all_gather_into_tensor "
     "reduce_scatter_tensor all_to_all_single ReduceOp"),
    ("comm", _COMM,
     "get_all_ranks_from_group monitored_barrier broadcast_object_list inference_all_reduce "
     "all_reduce_coalesced all_gather_object all_gather_coalesced allgather_fn reduce reduce_scatter "
     "reduce_scatter_fn all_to_all gather scatter send recv isend irecv batch_isend_irecv P2POp "
     "ProcessGroup initialize_mesh_device has_all_gather_into_tensor has_reduce_scatter_tensor "
     "has_coalescing_manager has_all_reduce_coalesced"),
    ("ops.adam,ops.adam.cpu_adam", _OPS, "DeepSpeedCPUAdam"),
    ("ops.adam,ops.adam.fused_adam", _OPS, "FusedAdam"),
    ("ops.adagrad,ops.adagrad.cpu_adagrad", _OPS, "DeepSpeedCPUAdagrad"),
    ("ops.lamb,ops.lamb.fused_lamb", _OPS, "FusedLamb"),
    ("ops.lion,ops.lion.cpu_lion", _OPS, "DeepSpeedCPULion"),
    ("ops.lion,ops.lion.fused_lion", _OPS, "FusedLion"),
    ("launcher.runner", "zeroshard.launch.rank_env", "DEEPSPEED_ENVIRONMENT_NAME"),
    ("launcher.runner", _POOLS, "fetch_hostfile parse_inclusion_exclusion EXPORT_ENVS DLTS_HOSTFILE"),
    ("launcher.runner", "zeroshard.cli.launch", "main"),
    ("env_report", HERE + "install", "main=report cli_main=report"),
)  # fmt: skip
