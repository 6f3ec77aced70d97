"""Sections of the configuration that do not change how ZeRO computes.

They are about observing (watchdog, monitors, timers), files, and other parallel dimensions. Most of their
keys are read, checked and kept; the verdict of each key says what it does.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from zeroshard.config.fields import (
    AboveOne,
    Amount,
    Count,
    CountOrAuto,
    Dtype,
    Flag,
    Float,
    Int,
    Lower,
    Natural,
    Positive,
    Section,
    Text,
    Texts,
    accept,
    honour,
    not_yet,
    refuse,
)


class TrustSectionsConfig(Section):
    setup: Positive = honour(1800.0, "Seconds that a rank may spend in set-up.")
    compile: Positive = honour(1800.0, "Seconds that a rank may spend compiling.")
    save: Positive = honour(1800.0, "Seconds that a rank may spend saving.")
    load: Positive = honour(1800.0, "Seconds that a rank may spend loading.")
    export: Positive = honour(1800.0, "Seconds that a rank may spend exporting weights.")
    eval: Positive = honour(3600.0, "Seconds that a rank may spend evaluating.")


class StragglersConfig(Section):
    ratio: AboveOne = honour(
        1.2,
        "A rank is reported if its own time of a step, without its waits for other ranks, is longer than "
        "the median by this factor, and the others wait for it.",
    )
    window: Count = honour(50, "Number of steps over which the speed is measured.")


class TrustConfig(Section):
    watchdog: Flag = honour(
        True,
        "Start the watchdog thread. false: collectives are recorded, but ranks are not watched.",
    )
    first_report_s: Positive | None = honour(
        None,
        "Seconds after which a stuck collective is first reported. null: the time of ten "
        "steps, at least 20 seconds.",
    )
    report_limit_s: Positive = honour(
        45.0, "Maximum of first_report_s if it is derived from the time of steps."
    )
    collective_timeout_s: Positive = honour(
        1800.0, "Seconds that a rank may stay outside of collectives before the run ends."
    )
    sections: TrustSectionsConfig = honour(TrustSectionsConfig, "The same limit for long phases.")
    frozen_s: Positive = honour(60.0, "Seconds after which a frozen rank ends the run.")
    grace_s: Amount = honour(
        20.0, "Seconds that a rank has to end by itself after a diagnosis that ends the run."
    )
    on_divergence: Annotated[Literal["raise"], Lower] = honour(
        "raise", "What happens if ranks call different collectives."
    )
    check_every: Count = accept(16, "Has no effect: every step compares the history hashes.")
    ring: Count = honour(256, "Number of last collectives that each rank remembers.")
    dump_dir: Text | None = honour(
        None,
        "Directory in which each run has a folder: its steps, and the evidence of stalls. null: one per "
        "user in the directory for temporary files, where the newest 50 runs stay.",
    )
    stacks: Flag = honour(True, "Reports contain the Python stacks of the ranks.")
    nan_policy: Annotated[Literal["error", "skip", "rollback"], Lower] | None = honour(
        None,
        "What follows a step whose gradient is not finite. The step is skipped. After that: raise an "
        "error, continue, or roll back to the last checkpoint saved or loaded. In fp16 only if a loss "
        "was not finite. null: skip in fp16; what bf16.check_grad_overflow says if it is given; else "
        "error, or nothing is looked for if zero_optimization.compute_grad_norm is false.",
    )
    max_rollbacks: Natural = honour(
        3, "With nan_policy rollback: how often a run goes back before it is an error."
    )
    report: Flag = honour(
        True,
        "Record every step in the folder of the run, for the command zeroshard report.",
    )
    stragglers: StragglersConfig = honour(StragglersConfig, "Which ranks are reported as slow.")


class PreemptionConfig(Section):
    enabled: Flag = honour(
        False,
        "After SIGTERM, SIGUSR1 or SIGINT to any rank, engine.preempted becomes true on all ranks "
        "after the same step. The program saves and ends.",
    )
    save_dir: Text | None = honour(
        None,
        "After such a signal the engine saves a checkpoint in this directory, and all ranks end with "
        "exit code 0.",
    )


class ActivationConfig(Section):
    cpu_checkpointing: Flag = honour(
        False,
        "Store checkpointed activations in host memory, after checkpointing.configure() has "
        "read this key.",
    )
    partition_activations: Flag = honour(
        False,
        "Each tensor rank keeps a part of the checkpointed activations, after "
        "checkpointing.configure() has read this key.",
    )
    contiguous_memory_optimization: Flag = accept(
        False, "Copy checkpointed activations into one buffer."
    )
    number_checkpoints: Count | None = accept(
        None, "Number of checkpoints that fit into that buffer."
    )
    synchronize_checkpoint_boundary: Flag = accept(
        False, "Synchronize the device at each checkpoint."
    )
    profile: Flag = accept(False, "Measure the time of each checkpoint.")


class WriterConfig(Section):
    type: Text | None = accept(None, "Kind of file writer.")
    io_buffer_size: Int | None = accept(None, "Size of the writer's buffer in bytes.")
    io_buffer_double: Flag | None = accept(None, "The writer uses two buffers.")
    io_multiplier: Int | None = accept(None, "Number of writers per rank.")
    data_parallel: Text | None = accept(None, "Which ranks write.")
    show_statistics: Flag | None = accept(None, "Print the speed of writing.")
    decoupled: Flag | None = accept(None, "Write in the background.")


class ParallelWriteConfig(Section):
    pipeline_stage: Flag = accept(False, "Pipeline stages write at the same time.")


class CheckpointConfig(Section):
    tag_validation: Annotated[Literal["ignore", "warn", "fail"], Lower] = honour(
        "warn",
        "What happens if ranks save under different tags. ignore and warn use the tag of rank 0.",
    )
    asynchronous: Flag = honour(
        False, "Write in the background, from a copy in host memory. Key of ZeroShard."
    )
    keep_last: Count | None = honour(
        None,
        "Number of newest checkpoints to keep in the directory. Older ones are removed. "
        "Default: all are kept. Key of ZeroShard.",
    )
    max_buffer_mb: Count = honour(
        512, "Host memory in MiB that saving and loading may use. Key of ZeroShard."
    )
    frozen: Annotated[Literal["once", "always", "reference"], Lower] = honour(
        "once",
        "When frozen weights are written. once: one time per directory. always: with every save. "
        "reference: never; loading then checks that the model has the same weights. Key of "
        "ZeroShard.",
    )
    allow_pickle: Flag = honour(
        False,
        "client_state may contain objects that only pickle can store. Loading pickled objects can "
        "run any code, so set this key only for checkpoints that you have written. Key of "
        "ZeroShard.",
    )
    load_universal: Flag = accept(
        False,
        "Load a converted checkpoint. Checkpoints of ZeroShard load without conversion.",
        done=True,
    )
    use_node_local_storage: Flag = accept(
        False,
        "The directory is not shared by the nodes. ZeroShard detects this when the first file is "
        "written.",
        done=True,
    )
    parallel_write: ParallelWriteConfig = accept(ParallelWriteConfig, "How DeepSpeed writes files.")
    checkpoint_serialization: Flag | None = accept(None, "How DeepSpeed writes files.")
    writer: WriterConfig | None = accept(None, "How DeepSpeed writes files.")


class AioConfig(Section):
    block_size: Count = accept(1_048_576, "Size of one request in bytes.")
    queue_depth: Count = accept(8, "Number of requests at the same time.")
    intra_op_parallelism: Count = accept(1, "Number of threads for one tensor.")
    thread_count: Count | None = accept(None, "Old name of intra_op_parallelism.")
    single_submit: Flag = accept(False, "Submit requests one by one.")
    overlap_events: Flag = accept(True, "Submit requests while others are in progress.")
    use_gds: Flag = accept(False, "Read directly into device memory.")


class ThroughputConfig(Section):
    enabled: Flag = accept(True, "Measure samples per second.")
    synchronized: Flag = accept(
        True, "Synchronize the device to measure. ZeroShard never does.", done=False
    )


class TimersConfig(Section):
    throughput: ThroughputConfig = accept(ThroughputConfig, "The timer of samples per second.")


class CommsLoggerConfig(Section):
    enabled: Flag = honour(False, "Count collectives, their bytes and times.")
    prof_all: Flag = honour(True, "Count all collectives. false: count only prof_ops.")
    prof_ops: Texts = honour((), "Names of the collectives to count.")
    verbose: Flag = honour(False, "Print each collective.")
    debug: Flag = honour(False, "Print the name of the caller too.")


class FlopsConfig(Section):
    enabled: Flag = honour(False, "Count the operations of one forward on rank 0.")
    profile_step: Int = honour(
        1, "Number of steps before the step that is counted. Its first micro-batch is counted."
    )
    module_depth: Int = honour(-1, "Maximum depth in the module tree. -1: no maximum.")
    top_modules: Int = honour(1, "Number of modules that are listed at each depth.")
    detailed: Flag = honour(True, "Print one line for each module.")
    output_file: Text | None = honour(None, "File for the output. null: the log.")
    recompute_fwd_factor: Float = accept(0.0, "Fraction of forward that runs twice.")


class PipelineConfig(Section):
    activation_checkpoint_interval: Natural = honour(
        0, "Layers of a PipelineModule in one activation checkpoint. 0: its argument decides."
    )
    use_reentrant: Flag = honour(
        True, "Which implementation of activation checkpointing is used, if the interval is given."
    )
    pipe_partitioned: Flag = accept(True, "Split activations over tensor-parallel ranks.")
    grad_partitioned: Flag = accept(
        True, "Split the gradients of activations over tensor-parallel ranks."
    )
    stages: Any = accept("auto", "Has no effect: an argument of PipelineModule decides.")
    partition: Any = accept("best", "Has no effect: an argument of PipelineModule decides.")
    seed_layers: Flag = accept(False, "Has no effect: an argument of PipelineModule decides.")


class ParallelConfig(Section):
    """Sizes of the mesh. Other sources may give them, too: see :mod:`zeroshard.core.mesh_sources`."""

    pipeline: Count = honour(
        1,
        "Number of ranks that share the layers. The model must be cut over them, by "
        "zeroshard.parallel.pipeline().",
    )
    tensor: Count = honour(
        1,
        "Number of ranks that share each layer. The model must be cut over them, by "
        "zeroshard.parallel.tensor_parallel() for example.",
    )
    sequence: Count = honour(1, "Number of ranks that share one sequence.")
    expert: Count = honour(1, "Number of ranks that share the experts of a layer.")
    data_replicate: Count = honour(1, "Number of copies of the sharded state.")
    data_shard: CountOrAuto = honour(
        "auto",
        "Number of ranks that share one copy of the sharded state. auto: the ranks that the other "
        "sizes leave.",
    )


class TensorParallelDetails(Section):
    tp_size: Natural = honour(1, "Another name of parallel.tensor. 0 and 1: not given.")
    tp_grain_size: Count = not_yet(1, "Layers are split at multiples of this number.")
    mpu: Any = not_yet(None, "Object that gives the process groups.")
    tp_group: Any = not_yet(None, "The process group.")


class TensorParallelConfig(Section):
    autotp_size: Natural = honour(
        0,
        "Number of ranks that share each layer. A model that is not cut is cut by its own plan, or by "
        "its structure. 0 and 1: not given.",
    )
    dtype: Dtype = not_yet("float16", "Dtype of the split layers.")
    tp: TensorParallelDetails = not_yet(TensorParallelDetails, "Details of the process groups.")
    tp_overlap_comm: Flag = not_yet(False, "Overlap collectives with computation.")
    partition_config: Any = not_yet(None, "How layers are split.")
    preset_model: Any = not_yet(None, "Predefined way to split one model family.")
    vocab_parallel_lm_head: Any = not_yet(None, "Split the output layer over the vocabulary.")
    vocab_parallel_ce_backend: Text = not_yet(
        "torch", "Implementation of the cross entropy over a split vocabulary."
    )
    injection_policy_tuple: Any = not_yet(None, "Layers that are replaced.")
    keep_module_on_host: Flag = not_yet(False, "Build the model in host memory first.")
    kernel_inject: Flag = not_yet(False, "Replace kernels.")


ROUTER = "The model's own router runs, so only the default is possible."


class ExpertParallelConfig(Section):
    enabled: Flag = honour(True, "false: the other keys of this section have no effect.")
    autoep_size: Count = honour(
        1,
        "Another name of parallel.expert: so many ranks share the experts of a Transformers model, by "
        "its own plan. 1: not given.",
    )
    expert_tensor_parallel_size: Count = honour(
        1, "Number of tensor ranks that share each expert. Only 1: each holds whole experts."
    )
    load_balance_coeff: Any = honour(None, ROUTER)
    top_k: Any = honour("auto", ROUTER)
    score_func: Any = honour("auto", ROUTER)
    score_apply: Any = honour("auto", ROUTER)
    route_norm: Any = honour(None, ROUTER)
    route_scale: Float = honour(1.0, ROUTER)
    routed_scaling_factor: Any = honour("auto", ROUTER)
    num_expert_groups: Any = honour(None, ROUTER)
    num_limited_groups: Any = honour(None, ROUTER)
    expert_activation: Any = honour(None, "The model's own experts run: only the default.")
    preset_model: Any = accept(None, "The model's own plan says where its experts are.")
    moe_layer_pattern: Any = accept(None, "As preset_model.")
    expert_pattern: Any = accept(None, "As preset_model.")
    router_pattern: Any = accept(None, "As preset_model.")
    expert_w1: Any = accept(None, "As preset_model.")
    expert_w2: Any = accept(None, "As preset_model.")
    expert_w3: Any = accept(None, "As preset_model.")
    num_experts_attr: Any = accept(None, "As preset_model.")
    top_k_attr: Any = accept(None, "As preset_model.")
    has_shared_experts: Any = accept(None, "As preset_model.")
    shared_experts_pattern: Any = accept(None, "As preset_model.")
    shared_experts_gate_pattern: Any = accept(None, "As preset_model.")
    use_grouped_mm: Flag = accept(True, "The model's own experts run.")
    disable_triton_grouped_mm: Flag = accept(False, "As use_grouped_mm.")
    gate_up_impl: Any = accept("separate", "As use_grouped_mm.")
    combine_impl: Any = accept("auto", "There is one way to add the results of experts.")
    row_weighting_impl: Any = accept("auto", "As combine_impl.")
    comm_backend: Any = accept("comm", "Tokens are exchanged by torch.distributed.")
    comm_num_sm: Any = accept(12, "As comm_backend.")
    comm_qp_margin: Any = accept(4, "As comm_backend.")
    comm_max_tokens_per_rank: Any = accept(0, "As comm_backend.")
    async_split_plan: Flag = accept(False, "As comm_backend.")
    validate_folding_routing: Flag = accept(
        False, "Each tensor rank routes all tokens of its group."
    )


class CompileConfig(Section):
    deepcompile: Flag = refuse(
        False,
        "DeepSpeed's compiler passes.",
        why="ZeroShard overlaps communication without rewriting the graph; use torch.compile on "
        "the model instead",
    )
    free_activation: Flag = accept(False, "Used only with deepcompile.")
    free_activation_threshold: Int = accept(10_485_760, "Used only with deepcompile.")
    offload_activation: Flag = accept(False, "Used only with deepcompile.")
    offload_opt_states: Flag = accept(False, "Used only with deepcompile.")
    offload_parameters: Flag = accept(False, "Used only with deepcompile.")
    double_buffer: Flag = accept(True, "Used only with deepcompile.")
    symmetric_memory: Flag = accept(False, "Used only with deepcompile.")
    debug_log: Flag = accept(False, "Used only with deepcompile.")
    sync_before_reduce: Flag = accept(False, "Used only with deepcompile.")
    sync_after_reduce: Flag = accept(False, "Used only with deepcompile.")
    sync_before_allgather: Flag = accept(False, "Used only with deepcompile.")
    sync_after_allgather: Flag = accept(False, "Used only with deepcompile.")
    keep_int_input_tensors: Flag = accept(True, "Used only with deepcompile.")
    keep_all_input_tensors: Flag = accept(False, "Used only with deepcompile.")
    passes: Any = accept(None, "Used only with deepcompile.")
    autoep_non_moe: Any = accept(None, "Used only with deepcompile.")


class FileMonitorConfig(Section):
    enabled: Flag = honour(False, "Write metrics.")
    output_path: Text = honour("", "Directory for the files. Empty: the working directory.")
    job_name: Text = honour("DeepSpeedJobName", "Name of the run's folder in that directory.")


class WandbConfig(Section):
    enabled: Flag = honour(False, "Send metrics. The package wandb must be installed.")
    group: Text | None = honour(None, "Group of the run.")
    team: Text | None = honour(None, "Entity of the run.")
    project: Text = honour("deepspeed", "Project of the run.")


class CometConfig(Section):
    enabled: Flag = honour(False, "Send metrics. The package comet_ml must be installed.")
    samples_log_interval: Count = honour(100, "Number of samples between two metrics.")
    project: Text | None = honour(None, "Project of the run.")
    workspace: Text | None = honour(None, "Workspace of the run.")
    api_key: Text | None = honour(None, "API key of the account. It is never printed.")
    experiment_name: Text | None = honour(None, "Name of the run.")
    experiment_key: Text | None = honour(None, "Unique key of the run.")
    online: Flag | None = honour(None, "true: send metrics. false: write them to disk.")
    mode: Text | None = honour(None, "Whether to start a new run or continue one.")


class TrackioConfig(Section):
    enabled: Flag = honour(False, "Write metrics. The package trackio must be installed.")
    project: Text = honour("zeroshard", "Project of the run.")
    space_id: Text | None = honour(None, "Space that shows the run. null: only files on this host.")


class MlflowConfig(Section):
    enabled: Flag = honour(False, "Send metrics. The package mlflow must be installed.")
    tracking_uri: Text | None = honour(
        None,
        "Server or database of the runs, for example sqlite:///runs.db. null: MLflow's own setting.",
    )
    experiment: Text = honour("zeroshard", "Experiment of the run.")
    run_name: Text | None = honour(None, "Name of the run. null: MLflow chooses one.")


class MonitorSections(Section):
    """Each key is one of ``metrics/sinks.py: SINKS``. Ranks may differ in them: many programs log on rank
    0 only."""

    tensorboard: FileMonitorConfig = honour(FileMonitorConfig, "Write metrics for TensorBoard.")
    csv_monitor: FileMonitorConfig = honour(FileMonitorConfig, "Write metrics to CSV files.")
    wandb: WandbConfig = honour(WandbConfig, "Send metrics to Weights & Biases.")
    comet: CometConfig = honour(CometConfig, "Send metrics to Comet.")
    trackio: TrackioConfig = honour(TrackioConfig, "Send metrics to Trackio.")
    mlflow: MlflowConfig = honour(MlflowConfig, "Send metrics to MLflow.")
