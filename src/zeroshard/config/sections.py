"""Sections of the configuration that do not change how ZeRO computes.

They are about observing (watchdog, monitors, timers), files, and other parallel dimensions. Most of their
keys are read, checked and kept; the verdict of each key says what it does.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from zeroshard.config.fields import (
    DTYPES,
    Amount,
    Count,
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
    later,
    not_yet,
    problem,
    read_number,
    refuse,
    show,
)

CONVOLUTIONS = ("conv.Conv1d", "conv.Conv2d", "conv.Conv3d")


def _autocast_dtype(value: object) -> object:
    word = DTYPES.get(str(value).strip().lower())
    if value is not None and word not in ("float16", "bfloat16"):
        raise problem(f'must be "bfloat16" or "float16", not {show(value)}')
    return None if value is None else word


def _stage(value: object) -> object:
    number = read_number(value)
    return number if number not in (0, 1, 2, 3) else int(number)


def _device(value: object) -> object:
    return "none" if value is None else str(value).strip().lower()


def _directory(value: object) -> object:
    """None for null, "none" and "": launchers pass these when they have no path."""
    is_none = isinstance(value, str) and value.strip().lower() in ("", "none", "null")
    return None if is_none else value


AUTOCAST_DTYPE = BeforeValidator(_autocast_dtype)
STAGE = BeforeValidator(_stage)
DEVICE = BeforeValidator(_device)
DIRECTORY = BeforeValidator(_directory)


class TrustSectionsConfig(Section):
    setup: Positive = honour(1800.0, "Seconds a rank may spend in set-up.")
    compile: Positive = honour(1800.0, "Seconds a rank may spend compiling.")
    save: Positive = honour(1800.0, "Seconds a rank may spend saving.")
    load: Positive = honour(1800.0, "Seconds a rank may spend loading.")
    export: Positive = honour(1800.0, "Seconds a rank may spend exporting weights.")
    eval: Positive = honour(3600.0, "Seconds a rank may spend evaluating.")


class StragglersConfig(Section):
    ratio: Positive = not_yet(1.2, "A rank this much slower than the median is named.")
    window: Count = not_yet(50, "Steps over which it is measured.")


class TrustConfig(Section):
    watchdog: Flag = honour(True, "Watch the other ranks; false records but starts no thread.")
    first_report_s: Positive | None = honour(
        None, "Seconds until a stuck collective is first reported; null: ten steps, at least 20."
    )
    report_limit_s: Positive = honour(45.0, "Largest derived value of first_report_s.")
    collective_timeout_s: Positive = honour(
        1800.0, "Seconds a rank may stay outside collectives before the run ends."
    )
    sections: TrustSectionsConfig = honour(TrustSectionsConfig, "The same for long phases.")
    frozen_s: Positive = honour(60.0, "Seconds after which a frozen rank ends the run.")
    grace_s: Amount = honour(20.0, "Seconds a rank has to leave after a verdict.")
    on_divergence: Annotated[Literal["raise"], Lower] = honour(
        "raise", "What to do when ranks called different collectives."
    )
    check_every: Count = honour(16, "Steps between agreement checks when no norm is computed.")
    ring: Count = honour(256, "Collectives that each rank remembers.")
    dump_dir: Text | None = honour(None, "Directory for reports; null: a temporary one.")
    stacks: Flag = honour(True, "Collect Python stacks of the ranks in a report.")
    nan_policy: Annotated[Literal["error", "skip", "rollback"], Lower] = not_yet(
        "error", "What to do about a loss that is not finite."
    )
    max_rollbacks: Natural = not_yet(3, "How often nan_policy rollback may act.")
    stragglers: StragglersConfig = not_yet(StragglersConfig, "Which ranks count as slow.")
    report: Flag = not_yet(True, "Write a report at the end of the run.")


class ActivationConfig(Section):
    cpu_checkpointing: Flag = honour(
        False, "Keep checkpointed activations on the host, once checkpointing.configure() reads it."
    )
    partition_activations: Flag = accept(False, "Split them over tensor-parallel ranks.")
    contiguous_memory_optimization: Flag = accept(False, "Copy them into one buffer.")
    number_checkpoints: Count | None = accept(None, "Size of that buffer.")
    synchronize_checkpoint_boundary: Flag = accept(False, "Sync at each checkpoint.")
    profile: Flag = accept(False, "Time each checkpoint.")


class WriterConfig(Section):
    type: Text | None = accept(None, "Kind of file writer.")
    io_buffer_size: Int | None = accept(None, "Bytes of its buffer.")
    io_buffer_double: Flag | None = accept(None, "Two buffers.")
    io_multiplier: Int | None = accept(None, "Writers per rank.")
    data_parallel: Text | None = accept(None, "Who writes.")
    show_statistics: Flag | None = accept(None, "Print speeds.")
    decoupled: Flag | None = accept(None, "Write in the background.")


class ParallelWriteConfig(Section):
    pipeline_stage: Flag = accept(False, "Pipeline stages write at once.")


class CheckpointConfig(Section):
    tag_validation: Annotated[Literal["ignore", "warn", "fail"], Lower] = honour(
        "warn", "What to do when ranks save under different tags; rank 0's is used."
    )
    asynchronous: Flag = honour(
        False, "Own key: write in the background, from a copy in host memory."
    )
    keep_last: Count | None = honour(
        None, "Own key: remove older checkpoints of the directory; default: keep all."
    )
    max_buffer_mb: Count = honour(
        512, "Own key: MiB of host memory that saving and loading may take."
    )
    frozen: Annotated[Literal["once", "always", "reference"], Lower] = honour(
        "once",
        "Own key: frozen weights are written once per directory, with every save, or never (then "
        "loading checks that the model has the same ones).",
    )
    allow_pickle: Flag = honour(
        False,
        "Own key: client_state may hold objects that only pickle can store. Loading those runs "
        "code: set it only for checkpoints that you wrote.",
    )
    load_universal: Flag = accept(
        False, "Load a converted checkpoint; ours need no conversion.", done=True
    )
    use_node_local_storage: Flag = accept(
        False,
        "Directories that nodes do not share are noticed when the first file is written.",
        done=True,
    )
    parallel_write: ParallelWriteConfig = accept(ParallelWriteConfig, "How DeepSpeed writes.")
    checkpoint_serialization: Flag | None = accept(None, "How DeepSpeed writes.")
    writer: WriterConfig | None = accept(None, "How DeepSpeed writes.")


class AioConfig(Section):
    block_size: Count = accept(1_048_576, "Bytes of one request.")
    queue_depth: Count = accept(8, "Requests in flight.")
    intra_op_parallelism: Count = accept(1, "Threads for one tensor.")
    thread_count: Count | None = accept(None, "Older name of intra_op_parallelism.")
    single_submit: Flag = accept(False, "Submit requests one by one.")
    overlap_events: Flag = accept(True, "Overlap submitting and waiting.")
    use_gds: Flag = accept(False, "Read straight into device memory.")


class ThroughputConfig(Section):
    enabled: Flag = accept(True, "Measure samples per second.")
    synchronized: Flag = accept(True, "Sync the device for it; never done here.", done=False)


class TimersConfig(Section):
    throughput: ThroughputConfig = accept(ThroughputConfig, "Samples per second.")


class CommsLoggerConfig(Section):
    enabled: Flag = honour(False, "Count collectives, their bytes and times.")
    prof_all: Flag = honour(True, "All of them; false: only prof_ops.")
    prof_ops: Texts = honour((), "Names of the collectives to count.")
    verbose: Flag = honour(False, "Print each one.")
    debug: Flag = honour(False, "Add the caller's name.")


class FlopsConfig(Section):
    enabled: Flag = honour(False, "Count one forward on rank 0.")
    profile_step: Int = honour(1, "After how many steps; its first micro-batch is counted.")
    module_depth: Int = honour(-1, "How deep into the module tree; -1 is all.")
    top_modules: Int = honour(1, "How many modules to name at each depth.")
    detailed: Flag = honour(True, "One line per module.")
    output_file: Text | None = honour(None, "Where to; null logs.")
    recompute_fwd_factor: Float = accept(0.0, "Share of forward that runs twice.")


class FileMonitorConfig(Section):
    enabled: Flag = honour(False, "Write events.")
    output_path: Text = honour("", "Directory; empty means the working directory.")
    job_name: Text = honour("DeepSpeedJobName", "Folder of this run.")


class WandbConfig(Section):
    enabled: Flag = honour(False, "Write events; the package wandb must be installed.")
    group: Text | None = honour(None, "Group of the run.")
    team: Text | None = honour(None, "Entity of the run.")
    project: Text = honour("deepspeed", "Project of the run.")


class CometConfig(Section):
    enabled: Flag = honour(False, "Write events; the package comet_ml must be installed.")
    samples_log_interval: Count = honour(100, "Samples between two events.")
    project: Text | None = honour(None, "Project of the run.")
    workspace: Text | None = honour(None, "Workspace of the run.")
    api_key: Text | None = honour(None, "Key of the account; never printed.")
    experiment_name: Text | None = honour(None, "Name of the run.")
    experiment_key: Text | None = honour(None, "Identity of the run.")
    online: Flag | None = honour(None, "Send at once or write to disk.")
    mode: Text | None = honour(None, "Start a new run, continue one, or either.")


class TrackioConfig(Section):
    enabled: Flag = later(False, "Write events.")
    project: Text | None = later(None, "Project of the run.")
    space_id: Text | None = later(None, "Where to show it.")


class PipelineConfig(Section):
    activation_checkpoint_interval: Natural = not_yet(0, "Layers per checkpoint; 0 is off.")
    use_reentrant: Flag = not_yet(True, "Kind of checkpointing.")
    pipe_partitioned: Flag = accept(True, "Split activations over tensor-parallel ranks.")
    grad_partitioned: Flag = accept(True, "Split their gradients likewise.")
    stages: Any = accept("auto", "The PipelineModule decides.")
    partition: Any = accept("best", "The PipelineModule decides.")
    seed_layers: Flag = accept(False, "The PipelineModule decides.")


class TensorParallelDetails(Section):
    tp_size: Natural = not_yet(1, "Ranks that share one layer.")
    tp_grain_size: Count = not_yet(1, "Granularity of the cut.")
    mpu: Any = not_yet(None, "Object that knows the groups.")
    tp_group: Any = not_yet(None, "The group itself.")


class TensorParallelConfig(Section):
    autotp_size: Natural = not_yet(0, "Ranks that share one layer, found in the model by itself.")
    dtype: Dtype = not_yet("float16", "Dtype of the cut layers.")
    tp: TensorParallelDetails = not_yet(TensorParallelDetails, "Details of the groups.")
    tp_overlap_comm: Flag = not_yet(False, "Overlap its collectives with compute.")
    partition_config: Any = not_yet(None, "How layers are cut.")
    preset_model: Any = not_yet(None, "Ready-made way for one model family.")
    vocab_parallel_lm_head: Any = not_yet(None, "Cut the output layer over the vocabulary.")
    vocab_parallel_ce_backend: Text = not_yet("torch", "Cross entropy over a cut vocabulary.")
    injection_policy_tuple: Any = not_yet(None, "Layers to replace.")
    keep_module_on_host: Flag = not_yet(False, "Build on the host first.")
    kernel_inject: Flag = not_yet(False, "Replace kernels.")


class CompileConfig(Section):
    deepcompile: Flag = refuse(
        False,
        "DeepSpeed's compiler passes.",
        why="ZeroShard overlaps without rewriting the graph; torch.compile the model instead",
    )
    free_activation: Flag = accept(False, "Only with deepcompile.")
    free_activation_threshold: Int = accept(10_485_760, "Only with deepcompile.")
    offload_activation: Flag = accept(False, "Only with deepcompile.")
    offload_opt_states: Flag = accept(False, "Only with deepcompile.")
    offload_parameters: Flag = accept(False, "Only with deepcompile.")
    double_buffer: Flag = accept(True, "Only with deepcompile.")
    symmetric_memory: Flag = accept(False, "Only with deepcompile.")
    debug_log: Flag = accept(False, "Only with deepcompile.")
    sync_before_reduce: Flag = accept(False, "Only with deepcompile.")
    sync_after_reduce: Flag = accept(False, "Only with deepcompile.")
    sync_before_allgather: Flag = accept(False, "Only with deepcompile.")
    sync_after_allgather: Flag = accept(False, "Only with deepcompile.")
    keep_int_input_tensors: Flag = accept(True, "Only with deepcompile.")
    keep_all_input_tensors: Flag = accept(False, "Only with deepcompile.")
    passes: Any = accept(None, "Only with deepcompile.")
    autoep_non_moe: Any = accept(None, "Only with deepcompile.")
