"""All keys of a configuration: type, default and meaning.

Names, defaults and meanings are DeepSpeed's, whose JSON is the format. ZeroShard's own keys come first in
``Config``. Sections that only observe, and those of other parallel dimensions, are in
:mod:`zeroshard.config.sections`. Sizes in *elements* count numbers, not bytes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from zeroshard.config import sections as side
from zeroshard.config.fields import (
    Amount,
    Count,
    Dtype,
    Flag,
    Fraction,
    Free,
    Int,
    Lower,
    Natural,
    Positive,
    Section,
    Text,
    Texts,
    TextsOrAuto,
    accept,
    honour,
    later,
    not_yet,
    refuse,
)

_EXPERTS = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)
_SAFE_MODULES = tuple(f"torch.nn.modules.{m}" for m in ("linear.Linear", *side.CONVOLUTIONS))


class FP16Config(Section):
    enabled: Flag = honour(False, "fp16 parameters and gradients, fp32 master; not with bf16.")
    auto_cast: Flag = honour(False, "Cast floating-point inputs of the model to fp16.")
    loss_scale: Amount = honour(0.0, "Fixed loss scale; 0 means dynamic.")
    initial_scale_power: Natural = honour(16, "First dynamic scale is 2 to this power.")
    loss_scale_window: Count = honour(1000, "Good steps in a row before the scale doubles.")
    hysteresis: Count = honour(2, "Number of overflows at which the scale halves.")
    consecutive_hysteresis: Flag = honour(False, "Start that count again after every good step.")
    min_loss_scale: Count = honour(1, "Floor of the dynamic scale; an overflow there is an error.")
    fp16_master_weights_and_grads: Flag = later(False, "Master weights and gradients in fp16.")


class BF16Config(Section):
    enabled: Flag = honour(
        False, 'bf16 parameters, fp32 master; not with fp16. "auto": if the hardware multiplies it.'
    )
    check_grad_overflow: Flag = honour(True, "Skip the update when a gradient is not finite.")
    immediate_grad_update: Flag = accept(False, "When the fp32 accumulator is filled.")
    bf16_master_weights_and_grads: Flag = honour(False, "Keep master and gradients in bf16 too.")
    bf16_optimizer_states: Flag = honour(
        False, "Moments in bf16; needs bf16_master_weights_and_grads."
    )


class AutocastConfig(Section):
    enabled: Flag = honour(False, "Run forward under torch.autocast; parameters keep their dtype.")
    dtype: Annotated[Literal["float16", "bfloat16"] | None, side.AUTOCAST_DTYPE] = honour(
        None, "bf16 or fp16; null means torch's default for the device."
    )
    lower_precision_safe_modules: Texts = honour(
        _SAFE_MODULES, "Module classes whose gradients may be reduced in the autocast dtype."
    )


class DataTypesConfig(Section):
    grad_accum_dtype: Dtype | None = honour(
        None, "Dtype in which micro-batches are summed; null means fp32 (fp64 for fp64 models)."
    )
    param_dtype: Dtype | None = honour(None, "A cross-check: must equal the enabled mode.")
    buffer_dtype: Dtype | None = honour(None, "Cast module buffers; null leaves them untouched.")
    keep_in_fp32_modules: TextsOrAuto = honour(
        "auto", "Buffers that stay fp32, as globs; auto asks the model."
    )


class OptimizerConfig(Section):
    type: Text = honour(
        ..., "Adam, AdamW, Adagrad, Lamb, Lion, Muon, SGD or any class of torch.optim."
    )
    params: Free = honour(dict, "Arguments of the optimizer; the tables below list them by type.")
    legacy_fusion: Flag = accept(False, "Choice between two kernels.")


class SchedulerConfig(Section):
    type: Text = honour(..., "One of the five below, or any class of torch.optim.lr_scheduler.")
    params: Free = honour(dict, "Arguments of the schedule; the tables below list them by type.")


class OffloadConfig(Section):
    device: Annotated[Literal["none", "cpu", "nvme"], side.DEVICE] = honour(
        "none", "Where it rests between its uses: on the device, in host memory or on disk."
    )
    nvme_path: Annotated[Text | None, side.DIRECTORY] = honour(
        None, "Directory on the disk, required for nvme; null and none: not given."
    )
    pin_memory: Flag = honour(True, "Page-locked host memory on a GPU machine.")
    buffer_count: Natural | None = accept(None, "Swap buffers; derived here.")


class OffloadParamConfig(OffloadConfig):
    buffer_size: Int = accept(100_000_000, "Elements of a swap buffer; derived here.")
    max_in_cpu: Natural = honour(
        0, "With nvme: elements per rank that stay in host memory; DeepSpeed's default is 1e9."
    )


class OffloadOptimizerConfig(OffloadConfig):
    ratio: Fraction = honour(
        1.0, "Share of the optimizer state that leaves the device, at any stage; 0: none of it."
    )
    max_in_cpu: Natural = honour(
        0,
        "With nvme: elements per rank whose state stays in host memory. ZeroShard's own key.",
    )
    delayed_update: Flag = honour(
        False,
        "The update runs beside the next step and reaches the parameters when that one ends: step t "
        "computes with the updates up to t-2. Changes the algorithm; needs device cpu. Own key.",
    )
    super_offload: Flag = refuse(
        False, "Offload for superchips.", why="it is tied to one kind of machine"
    )
    cpuadam_cores_perc: Fraction = accept(0.8, "Only with super_offload.")
    pipeline_read: Flag = accept(False, "Overlap reads with the update; always done.", done=True)
    pipeline_write: Flag = accept(False, "Overlap writes with the update; always done.", done=True)
    fast_init: Flag = accept(False, "Quicker start with nvme; always done.", done=True)


class LeafModuleConfig(Section):
    classes: Texts = honour(_EXPERTS, "Classes whose modules are gathered as one unit.")
    names: Texts = honour((), "Full module names gathered as one unit.")
    name_suffixes: Texts = honour((), "Endings of module names gathered as one unit.")


class ZeroConfig(Section):
    stage: Annotated[Literal[0, 1, 2, 3], side.STAGE] = honour(
        0, "What is sharded: 1 optimizer state, 2 also gradients, 3 also parameters."
    )
    reduce_bucket_size: Count = honour(
        500_000_000, "Upper limit in elements of gradients that are reduced together."
    )
    overlap_comm: Flag | None = honour(
        None, "Reduce while backward goes on, gather while the next forward does; null is true."
    )
    compute_grad_norm: Flag = honour(
        True, "false: the norm is None and gradient_clipping must be 0."
    )
    ignore_unused_parameters: Flag = honour(
        True, "false: a trainable parameter without gradient is an error that names it."
    )
    load_from_fp32_weights: Flag = not_yet(True, "On load, take the master from the fp32 copy.")
    stage3_prefetch_bucket_size: Natural = honour(
        50_000_000, "Upper limit in elements of parameters that are fetched ahead."
    )
    stage3_max_live_parameters: Natural = honour(
        1_000_000_000, "No parameters are fetched ahead or kept beyond this many gathered elements."
    )
    stage3_max_reuse_distance: Natural | None = honour(
        None,
        "Parameters stay full after forward if backward needs them again within this many elements; "
        "null: only those that it needs first.",
    )
    stage3_gather_16bit_weights_on_model_save: Flag = accept(
        False, "Allow save_16bit_model at stage 3, which works here in any case.", done=True
    )
    override_module_apply: Flag = honour(
        True, "Under zero.Init, Module.apply(fn) sees whole parameters."
    )
    leaf_module: LeafModuleConfig = honour(LeafModuleConfig, "Modules gathered as one unit.")
    offload_optimizer: OffloadOptimizerConfig | None = honour(
        None, "Optimizer state outside the device (stages 1-3)."
    )
    offload_param: OffloadParamConfig | None = honour(
        None, "Parameters outside the device (stage 3; no effect below)."
    )
    allgather_bucket_size: Natural = accept(
        500_000_000, "Parameters gathered together after a step; we gather unit by unit."
    )
    contiguous_gradients: Flag = accept(True, "Copy gradients into one buffer; always so here.")
    reduce_scatter: Flag = accept(True, "Reduce-scatter or all-reduce; we choose.")
    use_multi_rank_bucket_allreduce: Flag = accept(True, "Shape of the reduction; we choose.")
    allgather_partitions: Flag = accept(True, "All-gather or broadcasts; we choose.")
    memory_efficient_linear: Flag = accept(True, "A replacement of nn.Linear; not needed here.")
    round_robin_gradients: Flag = accept(False, "Which rank owns what; follows from the layout.")
    parameter_alignment: Flag = accept(
        False, "Layout hint; parameters are always aligned.", done=True
    )
    elastic_checkpoint: Flag = accept(False, "Legacy; checkpoints fit any world size.", done=True)
    pipeline_loading_checkpoint: Flag = accept(False, "Order of loading.")
    log_trace_cache_warnings: Flag = accept(False, "Log noise.")
    save_muon_momentum_buffer_in_memory: Flag = accept(False, "Muon together with nvme.")
    sub_group_size: Natural = accept(1_000_000_000, "Tile of the offloaded update; derived here.")
    stage3_param_persistence_threshold: Natural = accept(
        100_000, "Keep smaller parameters whole; here small ones share a unit."
    )
    stage3_model_persistence_threshold: Natural = accept(
        9_223_372_036_854_775_807, "Cap on the elements kept whole."
    )
    stage3_module_granularity_threshold: Natural = accept(0, "Treat fine-grained modules as one.")
    stage3_use_all_reduce_for_fetch_params: Flag = accept(False, "How to gather; we choose.")
    stage3_allgather_sequential: Flag = accept(False, "How to gather; we choose.")
    enable_sanity_checks: Flag = accept(False, "Extra checks; always on here.", done=True)
    cpu_offload_use_pin_memory: Flag | None = accept(None, "No effect in DeepSpeed either.")
    zero_hpz_partition_size: Count = later(1, "A second shard inside each node (ZeRO++).")
    zero_quantized_weights: Flag = later(False, "Quantized all-gather (ZeRO++).")
    zero_quantized_nontrainable_weights: Flag = later(False, "For frozen weights (ZeRO++).")
    zero_quantized_gradients: Flag = later(False, "Quantized gradient reduction (ZeRO++).")


class Config(Section):
    """A whole configuration. After ``load_config`` the three batch sizes are solved."""

    unknown_keys: Annotated[Literal["error", "warn"], Lower] = honour(
        "error",
        "What to do with a key that this page does not list. Programs that call `deepspeed` get a "
        "notice instead where DeepSpeed looks for no key: at the top level, unless the name is almost "
        "that of a key which is not given (`zero_optimisation`), and in the sections that it does not "
        "check.",
    )
    units: TextsOrAuto = honour(
        "auto", "Which modules are gathered as one: globs on their names or class names."
    )
    unit_max_numel: Count = honour(64 * 2**20, "Units above this many elements are split.")
    unit_min_numel: Natural = honour(256 * 2**10, "Units below this many elements are merged.")
    conditional_modules: Texts = honour(
        (), "Globs on names of modules that only some ranks run in a step (experts, image towers)."
    )
    keep_fp32: Texts = honour(
        (), "Globs on names of parameters that stay fp32 in a 16-bit mode, such as *.router.*"
    )
    uneven: Annotated[Literal["error", "join"], Lower] = honour(
        "error", "When some ranks run out of batches: stop with an error, or let the others finish."
    )
    transport: Annotated[Literal["auto", "shm", "p2p", "stock"], Lower] = honour(
        "auto",
        "How bytes travel on gloo: memory shared by ranks of one host, tagged sends and receives, "
        "or the process group's collectives.",
    )
    compile_update: Flag = honour(
        True, "Compile the CPU update of Adam and AdamW if a C++ compiler is there; same bits."
    )
    trust: side.TrustConfig = honour(
        side.TrustConfig, "How divergence and hangs of ranks are found and reported."
    )

    train_batch_size: Count | None = honour(
        None, "Samples per optimizer step over all data-parallel ranks."
    )
    train_micro_batch_size_per_gpu: Count | None = honour(None, "Samples per rank in one forward.")
    gradient_accumulation_steps: Count | None = honour(
        None, "Micro-batches per optimizer step; 1 when it cannot be derived."
    )
    managed_gradient_accumulation: Flag = honour(
        True, "false: every step() updates, and backward() only accumulates."
    )
    gradient_clipping: Amount = honour(1.0, "Largest global 2-norm of the gradient; 0 is off.")
    steps_per_print: Amount | None = honour(
        None, "Print a line every so many steps; null, 0 or inf: never."
    )
    communication_data_type: Dtype | None = honour(
        None, "Dtype of gradient reduction; null means that of the enabled mode."
    )
    seq_parallel_communication_data_type: Dtype = accept(
        "float32", "The same under sequence parallelism, which is not there yet."
    )
    prescale_gradients: Flag = honour(False, "Divide by the world size before reducing, not after.")
    gradient_predivide_factor: Positive = honour(
        1.0, "Divide by this before reducing, by the rest after; not with prescale_gradients."
    )
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], Lower] = honour(
        "mean", "sum: no division by the world size."
    )
    zero_allow_untested_optimizer: Flag = accept(
        False, "Every optimizer class is probed here instead of listed.", done=True
    )
    zero_force_ds_cpu_optimizer: Flag = accept(
        True, "Any optimizer class works with offload.", done=False
    )
    dataloader_drop_last: Flag = honour(False, "Drop the last incomplete batch of deepspeed_io.")
    dump_state: Flag = honour(False, "Print engine and configuration at start.")
    log_level: Annotated[Literal["debug", "info", "warning", "error", "critical"] | None, Lower] = (
        honour(None, "Level of the logger; null leaves it as it is.")
    )
    disable_python_gc: Flag = honour(
        False, "Switch the cyclic garbage collector off; the engine collects at step boundaries."
    )
    disable_allgather: Flag = accept(False, "Unused in DeepSpeed too.")
    vocabulary_size: Count | None = accept(None, "Only a hint about alignment.")

    optimizer: OptimizerConfig | None = honour(None, "The optimizer, unless one is passed in.")
    scheduler: SchedulerConfig | None = honour(None, "The schedule, unless one is passed in.")
    zero_optimization: ZeroConfig = honour(ZeroConfig, "What is sharded, and how it travels.")
    fp16: FP16Config = honour(FP16Config, "Half precision with loss scaling.")
    bf16: BF16Config = honour(BF16Config, "bfloat16; the section may also be called bfloat16.")
    torch_autocast: AutocastConfig = honour(AutocastConfig, "Mixed precision by torch.autocast.")
    data_types: DataTypesConfig = honour(DataTypesConfig, "Dtypes that differ from the mode's.")
    activation_checkpointing: side.ActivationConfig = not_yet(
        side.ActivationConfig, "Options of the checkpointing calls; nothing by themselves."
    )
    checkpoint: side.CheckpointConfig = honour(side.CheckpointConfig, "Saving and loading.")
    aio: side.AioConfig = accept(side.AioConfig, "Tuning of disk access; derived here.")
    wall_clock_breakdown: Flag = honour(False, "Time of each phase, without a sync per phase.")
    memory_breakdown: Flag = honour(False, "Memory at each phase.")
    timers: side.TimersConfig = accept(side.TimersConfig, "Timers; ours never sync.")
    comms_logger: side.CommsLoggerConfig = honour(side.CommsLoggerConfig, "Log of collectives.")
    flops_profiler: side.FlopsConfig = honour(
        side.FlopsConfig, "Operations of one forward: matrix products, convolutions, attention."
    )
    tensorboard: side.FileMonitorConfig = honour(side.FileMonitorConfig, "Events to TensorBoard.")
    csv_monitor: side.FileMonitorConfig = honour(side.FileMonitorConfig, "Events to CSV files.")
    wandb: side.WandbConfig = honour(side.WandbConfig, "Events to Weights & Biases.")
    comet: side.CometConfig = honour(side.CometConfig, "Events to Comet.")
    trackio: side.TrackioConfig = later(side.TrackioConfig, "Events to Trackio.")
    pipeline: side.PipelineConfig = not_yet(side.PipelineConfig, "Pipeline parallelism.")
    tensor_parallel: side.TensorParallelConfig = not_yet(
        side.TensorParallelConfig, "Tensor parallelism."
    )
    sequence_parallel_size: Count = later(1, "Ranks that share one sequence.")
    data_parallel_size: Count | None = honour(None, "A cross-check: must be the world size.")
    use_data_before_expert_parallelism: Flag = later(False, "Order of the expert groups.")
    expert_parallel: Free = later(dict, "Expert parallelism found in the model by itself.")
    compile: side.CompileConfig = accept(side.CompileConfig, "Options of DeepCompile.")
    inference: Any = accept(None, "Read by Transformers only.")


def section_type(annotation: Any) -> type[Section] | None:
    """The section class in a field's annotation (``X`` or ``X | None``), or None."""
    options = (annotation, *getattr(annotation, "__args__", ()))
    found = [o for o in options if isinstance(o, type) and issubclass(o, Section)]
    return found[0] if found else None
