"""The names of DeepSpeed that work here, and where their implementations are."""

from __future__ import annotations

from zeroshard.deepspeed.checkpoint_constants import WORDS

HERE = "zeroshard.deepspeed."
_ENGINE, _OPTIMIZER = HERE + "engine", HERE + "optimizer"
_ZERO_INIT, _PARAMS, _SYMBOLS = HERE + "zero_init", HERE + "parameters", HERE + "symbols"
_OPS, _DEVICE, _VERSION_INFO = HERE + "ops_optimizers", HERE + "device", HERE + "version_info"
_ACTIVATIONS, _HELPERS, _LEAF_MODULES = (
    HERE + "activations",
    HERE + "helpers",
    HERE + "leaf_modules",
)
_HOOK_HANDLES, _PARTITION, _MODULE_PATHS = (
    HERE + "hook_handles",
    HERE + "partition",
    HERE + "module_paths",
)
_MONITORS, _CONFIG_MODEL, _POOLS = (
    HERE + "monitors",
    HERE + "config_model",
    "zeroshard.launch.hosts",
)
_CHECKPOINT_ENGINE, _PROFILING = HERE + "checkpoint_engine", HERE + "flops"
_SEQUENCE = "zeroshard.sequence."
_CHECKPOINT_CONSTANTS, _DISTRIBUTED = HERE + "checkpoint_constants", HERE + "distributed"
_CONSOLIDATE, _TIMERS = HERE + "consolidate", HERE + "timers"
_ESTIMATES, _LOGS, _GROUPS = HERE + "estimates", HERE + "logs", HERE + "groups"
_TOPOLOGY, _LAYER_SPECS = HERE + "topology", HERE + "layer_specs"
_PIPE_MODULE, _PIPE_ENGINE = HERE + "pipeline_module", HERE + "pipeline_engine"
_PIPE_SCHEDULE = HERE + "pipe_schedule"
_COMM, _ACCESS = "zeroshard.deepspeed.collectives", "zeroshard.zero.access"
_SCHEDULES = "zeroshard.optim.schedulers"
TO_FP32 = "zeroshard.checkpoint.zero_to_fp32"
SAFE = " ".join(
    f"safe_{verb}_{extent}_{what}"
    for verb in ("get", "set")
    for extent in ("full", "local")
    for what in ("fp32_param", "grad", "optimizer_state")
)
WORKING: tuple[tuple[str, str, str], ...] = (  # module, home, names; "theirs=ours" where they differ
    ("", HERE + "entry", "initialize"),
    ("", _ENGINE, "DeepSpeedEngine"),
    ("", _PIPE_ENGINE, "PipelineEngine"),
    ("", _PIPE_MODULE, "PipelineModule"),
    ("pipe", _PIPE_MODULE, "PipelineModule"),
    ("pipe", _LAYER_SPECS, "LayerSpec TiedLayerSpec"),
    ("runtime.pipe", _PIPE_MODULE, "PipelineModule"),
    ("runtime.pipe", _LAYER_SPECS, "LayerSpec TiedLayerSpec"),
    ("runtime.pipe.module", _PIPE_MODULE, "PipelineModule"),
    ("runtime.pipe.module", _LAYER_SPECS, "LayerSpec TiedLayerSpec"),
    ("runtime.pipe.module", "zeroshard.errors", "PipelineError=UsageError"),
    ("runtime.pipe.engine", _PIPE_ENGINE, "PipelineEngine"),
    ("runtime.pipe.engine", _ENGINE, "DeepSpeedEngine"),
    ("runtime.pipe.engine", _PIPE_MODULE, "PipelineModule"),
    ("runtime.pipe.engine", "zeroshard.errors", "PipelineError=UsageError"),
    ("runtime.pipe.engine", _TIMERS, "BATCH_INPUT_TIMER TRAIN_BATCH_TIMER PIPE_SEND_OUTPUT_TIMER "
                                     "PIPE_SEND_GRAD_TIMER PIPE_RECV_INPUT_TIMER PIPE_RECV_GRAD_TIMER"),
    ("runtime.pipe.engine", _PIPE_SCHEDULE, "is_even=_is_even"),
    ("runtime.pipe.schedule", _PIPE_SCHEDULE, "PipeInstruction BufferOpInstruction LoadMicroBatch "
     "ForwardPass BackwardPass SendActivation RecvActivation SendGrad RecvGrad ReduceGrads "
     "ReduceTiedGrads OptimizerStep PipeSchedule TrainSchedule InferenceSchedule DataParallelSchedule "
     "_is_even _is_odd"),
    ("runtime.pipe.p2p", HERE + "p2p", "init_process_groups can_send_recv send recv"),
    ("", "zeroshard.engine.initialize", "add_config_arguments"),
    ("", HERE + "distributed", "init_distributed"),
    ("", _OPTIMIZER, "DeepSpeedOptimizer"),
    ("", _SYMBOLS, "DeepSpeedConfigError"),
    ("", _HELPERS, "OnDevice DeepSpeedConfig"),
    ("", HERE + "tensor_parallel", "tp_model_init set_autotp_mode"),
    ("", _LOGS, "log_dist logger"),
    ("", _DEVICE, "get_accelerator"),
    ("", _VERSION_INFO, "__version__ __version_major__ __version_minor__ __version_patch__ "
                 "__git_hash__ __git_branch__ version git_hash git_branch"),
    ("git_version_info", _VERSION_INFO, "version git_hash git_branch torch_info installed_ops "
                                 "compatible_ops"),
    ("runtime.engine", _ENGINE, "DeepSpeedEngine"),
    ("runtime.base_optimizer", _OPTIMIZER, "DeepSpeedOptimizer ZeROOptimizer"),
    ("runtime.bf16_optimizer", _OPTIMIZER, "BF16_Optimizer"),
    ("runtime.fp16.fused_optimizer", _OPTIMIZER, "FP16_Optimizer"),
    ("runtime.fp16.unfused_optimizer", _OPTIMIZER, "FP16_UnfusedOptimizer"),
    ("runtime.fp16.loss_scaler", _OPTIMIZER, "LossScalerBase LossScaler DynamicLossScaler"),
    ("runtime.zero.stage3", _OPTIMIZER, "DeepSpeedZeroOptimizer_Stage3"),
    ("runtime.zero.stage3", _ESTIMATES, "estimate_zero3_model_states_mem_needs "
                                     "estimate_zero3_model_states_mem_needs_all_live "
                                     "estimate_zero3_model_states_mem_needs_all_cold"),
    ("runtime.zero.stage_1_and_2", _OPTIMIZER, "DeepSpeedZeroOptimizer"),
    ("runtime.zero.stage_1_and_2", _ESTIMATES, "estimate_zero2_model_states_mem_needs "
                                            "estimate_zero2_model_states_mem_needs_all_live "
                                            "estimate_zero2_model_states_mem_needs_all_cold"),
    ("runtime.config", _SYMBOLS, "DeepSpeedConfigError"),
    ("runtime.config", _HELPERS, "DeepSpeedConfig"),
    ("runtime.config", _SYMBOLS,
     "ADAGRAD_OPTIMIZER ADAM_OPTIMIZER ADAMW_OPTIMIZER LAMB_OPTIMIZER LION_OPTIMIZER "
     "MUON_OPTIMIZER MUADAM_OPTIMIZER MUADAMW_OPTIMIZER MUSGD_OPTIMIZER DEEPSPEED_OPTIMIZERS"),
    ("runtime.config_utils", _CONFIG_MODEL, "DeepSpeedConfigModel"),
    ("runtime.checkpoint_engine", _CHECKPOINT_ENGINE, "CheckpointEngine TorchCheckpointEngine"),
    ("runtime.checkpoint_engine.checkpoint_engine", _CHECKPOINT_ENGINE, "CheckpointEngine "
                                                            "CheckpointCommitInfo"),
    ("runtime.checkpoint_engine.torch_checkpoint_engine", _CHECKPOINT_ENGINE, "TorchCheckpointEngine "
                                                                  "CheckpointEngine"),
    ("runtime.sequence_parallel.ulysses_sp", HERE + "ulysses", "UlyssesSPAttentionHF"),
    ("runtime.sequence_parallel.ulysses_sp", _SEQUENCE + "split_batches",
     "UlyssesSPDataLoaderAdapter=SequenceLoader"),
    ("runtime.sequence_parallel.ulysses_sp", _SEQUENCE + "tiled",
     "TiledMLP TiledFusedLogitsLoss SequenceTiledCompute sequence_tiled_compute"),
    ("runtime.sequence_parallel.parallel_state_sp", HERE + "ulysses", "initialize_sequence_parallel"),
    ("runtime.sequence_parallel.parallel_state_sp", _GROUPS, " ".join(
        f"get_{word}_parallel_{what}=_get_{word}_parallel_{what}"
        for word in ("sequence", "sequence_data")
        for what in ("group", "world_size", "rank")
    )),
    ("sequence.layer", _SEQUENCE + "attention", "DistributedAttention"),
    ("runtime.zero.config", _SYMBOLS, "ZeroStageEnum"),
    ("runtime.zero.config", _HELPERS, "DeepSpeedZeroConfig"),
    ("runtime.zero.offload_config", _SYMBOLS, "OffloadDeviceEnum OffloadStateTypeEnum"),
    ("runtime.zero.offload_config", _HELPERS, "DeepSpeedZeroOffloadParamConfig "
                                              "DeepSpeedZeroOffloadOptimizerConfig"),
    ("runtime.zero.utils", _SYMBOLS, "ZeRORuntimeException"),
    ("runtime.zero.utils", _PARAMS, "is_zero_param"),
    ("runtime.zero", _ZERO_INIT, "Init GatheredParameters register_external_parameter "
                                "unwrap_model_for_generation TiledLinear"),
    ("runtime.zero", _HOOK_HANDLES, "DeepSpeedZeRoOffload"),
    ("runtime.zero", _SYMBOLS, "ZeroParamStatus ZeroParamType DeepSpeedTensorOverride"),
    ("runtime.zero.partition_parameters", _ZERO_INIT,
     "Init GatheredParameters register_external_parameter unregister_external_parameter "
     "zero_wrapper_for_fp_tensor_constructor _orig_torch_arange"),
    ("runtime.zero.partition_parameters", _SYMBOLS, "ZeroParamStatus ZeroParamType "
                                                  "DeepSpeedTensorOverride"),
    ("runtime.zero.partition_parameters", _PARAMS, "is_zero_param"),
    ("runtime.zero.partition_parameters", _DEVICE, "get_accelerator"),
    ("runtime.zero.parameter_offload", _HOOK_HANDLES, "DeepSpeedZeRoOffload"),
    ("runtime.zero.tiling", _ZERO_INIT, "TiledLinear"),
    ("runtime.lr_schedules", _SCHEDULES, "VALID_LR_SCHEDULES LRRangeTest OneCycle WarmupLR "
                                         "WarmupDecayLR WarmupCosineLR"),
    ("runtime.lr_schedules", _SYMBOLS,
     "LR_SCHEDULE LR_RANGE_TEST ONE_CYCLE WARMUP_LR WARMUP_DECAY_LR WARMUP_COSINE_LR "
     "LR_RANGE_TEST_MIN_LR LR_RANGE_TEST_STEP_RATE LR_RANGE_TEST_STEP_SIZE "
     "LR_RANGE_TEST_STAIRCASE CYCLE_FIRST_STEP_SIZE CYCLE_FIRST_STAIR_COUNT "
     "CYCLE_SECOND_STEP_SIZE CYCLE_SECOND_STAIR_COUNT DECAY_STEP_SIZE CYCLE_MIN_LR CYCLE_MAX_LR "
     "DECAY_LR_RATE CYCLE_MIN_MOM CYCLE_MAX_MOM DECAY_MOM_RATE WARMUP_MIN_LR WARMUP_MAX_LR "
     "WARMUP_NUM_STEPS WARMUP_TYPE WARMUP_LOG_RATE WARMUP_LINEAR_RATE WARMUP_MIN_RATIO "
     "COS_MIN_RATIO TOTAL_NUM_STEPS"),
    ("runtime.utils", _HELPERS, "move_to_device see_memory_usage clip_grad_norm_ get_global_norm "
                                "ensure_directory_exists set_random_seed"),
    ("runtime.utils", _PARTITION, "all_gather_dp_groups PartitionedTensor partition_uniform "
                              "partition_balanced"),
    ("compression.helper", _MODULE_PATHS, "recursive_getattr recursive_setattr"),
    ("utils.module_utils", _MODULE_PATHS, "recursive_getattr recursive_setattr"),
    ("elasticity", HERE + "elastic", "compute_elastic_config elasticity_enabled"),
    ("elasticity.elasticity", HERE + "elastic", "compute_elastic_config elasticity_enabled"),
    ("monitor.monitor", _MONITORS, "Monitor MonitorMaster TensorBoardMonitor WandbMonitor "
                                   "csvMonitor CometMonitor"),
    ("monitor.tensorboard", _MONITORS, "TensorBoardMonitor"),
    ("monitor.wandb", _MONITORS, "WandbMonitor"),
    ("monitor.csv_monitor", _MONITORS, "csvMonitor"),
    ("monitor.comet", _MONITORS, "CometMonitor"),
    ("monitor.config", _MONITORS, "get_monitor_config DeepSpeedMonitorConfig"),
    ("monitor.config", "zeroshard.config.sections",
     "TensorBoardConfig=FileMonitorConfig WandbConfig CSVConfig=FileMonitorConfig CometConfig"),
    ("profiling.flops_profiler", _PROFILING, "get_model_profile FlopsProfiler"),
    ("profiling.flops_profiler.profiler", _PROFILING, "get_model_profile FlopsProfiler"),
    ("runtime.dataloader", "zeroshard.data.data_loader", "DeepSpeedDataLoader=ResumableLoader"),
    ("runtime.dataloader", _HELPERS, "RepeatingLoader"),
    ("runtime.constants", _SYMBOLS, "ROUTE_TRAIN ROUTE_EVAL ROUTE_PREDICT ROUTE_ENCODE "
                                  "TRAIN_BATCH_SIZE TRAIN_MICRO_BATCH_SIZE_PER_GPU "
                                  "GRADIENT_ACCUMULATION_STEPS GRADIENT_CLIPPING OPTIMIZER "
                                  "SCHEDULER FP16 BFLOAT16 TORCH_DISTRIBUTED_DEFAULT_PORT"),
    ("runtime.activation_checkpointing.checkpointing", _ACTIVATIONS,
     "configure is_configured reset checkpoint non_reentrant_checkpoint CheckpointFunction "
     "get_cuda_rng_tracker model_parallel_cuda_manual_seed model_parallel_reconfigure_tp_seed "
     "partition_activations_in_checkpoint set_num_layers detach_variable "
     "_CUDA_RNG_STATE_TRACKER _MODEL_PARALLEL_RNG_TRACKER_NAME _set_cuda_rng_state"),
    ("utils", _LOGS, "logger log_dist log_dist_once set_log_level_from_string"),
    ("utils.logging", _LOGS, "logger log_dist log_dist_once set_log_level_from_string LoggerFactory "
                             "get_current_level"),
    ("utils", _ACCESS, SAFE),
    ("utils", _HELPERS, "safe_update_full_grad_vectorized OnDevice RepeatingLoader "
                        "instrument_w_nvtx"),
    ("utils.tensor_fragment", _ACCESS, SAFE),
    ("utils.tensor_fragment", _HELPERS, "safe_update_full_grad_vectorized"),
    ("utils.tensor_fragment", _SYMBOLS, "fragment_address"),
    ("utils.nvtx", _HELPERS, "instrument_w_nvtx"),
    ("utils.torch", _VERSION_INFO, "required_torch_version"),
    ("utils.numa", _HELPERS, "parse_range_list"),
    ("utils.timer", _TIMERS, "SynchronizedWallClockTimer NoopTimer ThroughputTimer "
                             "FORWARD_MICRO_TIMER FORWARD_GLOBAL_TIMER BACKWARD_MICRO_TIMER "
                             "BACKWARD_GLOBAL_TIMER BACKWARD_INNER_MICRO_TIMER "
                             "BACKWARD_INNER_GLOBAL_TIMER BACKWARD_REDUCE_MICRO_TIMER "
                             "BACKWARD_REDUCE_GLOBAL_TIMER STEP_MICRO_TIMER STEP_GLOBAL_TIMER"),
    ("utils.init_on_device", _HELPERS, "OnDevice"),
    ("utils", _LEAF_MODULES, "set_z3_leaf_modules unset_z3_leaf_modules get_z3_leaf_modules "
                       "set_z3_leaf_module set_z3_leaf_modules_by_name "
                       "set_z3_leaf_modules_by_suffix z3_leaf_parameter"),
    ("utils.z3_leaf_module", _LEAF_MODULES, "set_z3_leaf_modules unset_z3_leaf_modules "
                                      "get_z3_leaf_modules set_z3_leaf_module "
                                      "set_z3_leaf_modules_by_name "
                                      "set_z3_leaf_modules_by_suffix z3_leaf_module "
                                      "z3_leaf_parameter"),
    ("utils.groups", _GROUPS,
     "_get_sequence_parallel_group _get_sequence_parallel_world_size _get_sequence_parallel_rank "
     "_get_data_parallel_group _get_data_parallel_world_size _get_data_parallel_rank "
     "_get_sequence_data_parallel_group _get_sequence_data_parallel_world_size "
     "_get_sequence_data_parallel_rank "
     "_get_model_parallel_group _get_model_parallel_world_size _get_model_parallel_rank "
     "_get_tensor_model_parallel_group _get_tensor_model_parallel_world_size "
     "_get_tensor_model_parallel_rank _get_expert_parallel_group _get_expert_parallel_world_size "
     "_get_expert_parallel_rank _get_expert_data_parallel_group _get_expert_data_parallel_rank "
     "_get_expert_data_parallel_world_size _get_broadcast_src_rank mpu "
     "get_data_parallel_group get_data_parallel_world_size get_data_parallel_rank "
     "get_model_parallel_group get_model_parallel_world_size get_model_parallel_rank "
     "get_tensor_model_parallel_group get_tensor_model_parallel_world_size "
     "get_tensor_model_parallel_rank"),
    ("runtime.pipe", _TOPOLOGY, "ProcessTopology"),
    ("runtime.pipe.topology", _TOPOLOGY, "ProcessTopology PipeDataParallelTopology "
                                         "PipeModelDataParallelTopology PipelineParallelGrid"),
    ("utils.zero_to_fp32", TO_FP32,
     "get_fp32_state_dict_from_zero_checkpoint load_state_dict_from_zero_checkpoint main"),
    ("utils.zero_to_fp32", _CONSOLIDATE, "convert_zero_checkpoint_to_fp32_state_dict "
                                     "convert_zero_checkpoint_to_state_dict get_model_state_file "
                                     "get_optim_files get_model_state_files parse_optim_states"),
    ("moe.layer", "zeroshard.experts.layer", "MoE"),
    ("moe.experts", "zeroshard.experts.layer", "Experts"),
    ("moe.sharded_moe", "zeroshard.experts.layer", "MOELayer"),
    ("moe.sharded_moe", "zeroshard.experts.gate", "TopKGate"),
    ("moe.utils", HERE + "experts", "split_params_into_different_moe_groups_for_optimizer "
                                     "is_moe_param has_moe_layers is_moe_param_group "
                                     "split_params_into_shared_and_expert_params "
                                     "split_params_grads_into_shared_and_expert_params "
                                     "configure_moe_param_groups"),
    ("checkpoint.utils", _HELPERS, "clone_tensors_for_torch_save"),
    ("checkpoint.ds_to_universal", _CONSOLIDATE, "main=copy_as_universal"),
    ("checkpoint", _CHECKPOINT_CONSTANTS, " ".join(WORDS)),
    ("checkpoint.constants", _CHECKPOINT_CONSTANTS, " ".join(WORDS)),
    ("comm", _COMM,
     "is_available get_rank get_world_size get_local_rank get_global_rank "
     "get_world_group get_all_ranks_from_group new_group destroy_process_group barrier "
     "monitored_barrier broadcast broadcast_object_list all_reduce inference_all_reduce "
     "all_reduce_coalesced all_gather all_gather_object all_gather_into_tensor "
     "all_gather_coalesced allgather_fn reduce reduce_scatter reduce_scatter_tensor "
     "reduce_scatter_fn all_to_all all_to_all_single gather scatter send recv isend irecv "
     "batch_isend_irecv P2POp ProcessGroup ReduceOp initialize_mesh_device "
     "has_all_gather_into_tensor has_reduce_scatter_tensor has_coalescing_manager "
     "has_all_reduce_coalesced"),
    ("comm", HERE + "distributed", "init_distributed is_initialized configure log_summary reset_log"),
    ("comm.comm", _COMM,
     "is_available get_rank get_world_size get_local_rank get_global_rank "
     "get_world_group new_group destroy_process_group barrier broadcast all_reduce all_gather "
     "all_gather_into_tensor reduce_scatter_tensor all_to_all_single ReduceOp"),
    ("comm", _DISTRIBUTED, "mpi_discovery"),
    ("comm.comm", _DISTRIBUTED, "mpi_discovery"),
    ("comm.comm", HERE + "distributed", "init_distributed is_initialized configure log_summary"),
    ("accelerator", _DEVICE, "get_accelerator is_current_accelerator_supported "
                             "DeepSpeedAccelerator"),
    ("accelerator.real_accelerator", _DEVICE, "get_accelerator"),
    ("accelerator.abstract_accelerator", _DEVICE, "DeepSpeedAccelerator"),
    ("ops.adam", _OPS, "DeepSpeedCPUAdam FusedAdam"),
    ("ops.adam.cpu_adam", _OPS, "DeepSpeedCPUAdam"),
    ("ops.adam.fused_adam", _OPS, "FusedAdam"),
    ("ops.adagrad", _OPS, "DeepSpeedCPUAdagrad"),
    ("ops.adagrad.cpu_adagrad", _OPS, "DeepSpeedCPUAdagrad"),
    ("ops.lamb", _OPS, "FusedLamb"),
    ("ops.lamb.fused_lamb", _OPS, "FusedLamb"),
    ("ops.lion", _OPS, "DeepSpeedCPULion FusedLion"),
    ("ops.lion.cpu_lion", _OPS, "DeepSpeedCPULion"),
    ("ops.lion.fused_lion", _OPS, "FusedLion"),
    ("ops", _VERSION_INFO, "__compatible_ops__=compatible_ops __installed_ops__=installed_ops"),
    ("ops.op_builder", _VERSION_INFO, "CPUAdamBuilder CPUAdagradBuilder CPULionBuilder FusedAdamBuilder "
                               "FusedLionBuilder FusedLambBuilder AsyncIOBuilder UtilsBuilder "
                               "ALL_OPS"),
    ("ops.op_builder.builder", _VERSION_INFO, "OpBuilder"),
    ("ops.aio", _VERSION_INFO, "AsyncIOBuilder"),
    ("launcher.runner", "zeroshard.launch.rank_env", "DEEPSPEED_ENVIRONMENT_NAME"),
    ("launcher.runner", _POOLS, "fetch_hostfile parse_inclusion_exclusion EXPORT_ENVS "
                                    "DLTS_HOSTFILE"),
    ("launcher.runner", "zeroshard.cli.launch", "main"),
    ("env_report", HERE + "command", "main=report cli_main=report"),
    ("constants", _SYMBOLS, "TORCH_DISTRIBUTED_DEFAULT_PORT"),
    ("constants", _VERSION_INFO, "default_pg_timeout"),
)  # fmt: skip
