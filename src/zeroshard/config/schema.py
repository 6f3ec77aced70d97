"""All keys of a configuration: type, default and meaning.

Names, defaults and meanings are DeepSpeed's, whose JSON is the format. ZeroShard's own keys come first in
``Config``. Sections that only observe, and those of other parallel dimensions, are in
:mod:`zeroshard.config.sections`. Sizes in *elements* count numbers, not bytes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from zeroshard.config import sections as side
from zeroshard.config.fields import (
    DEVICE,
    DIRECTORY,
    STAGE,
    Amount,
    Count,
    CountOrAuto,
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
    not_yet,
)
from zeroshard.config.monitor_sections import MonitorSections
from zeroshard.config.params import OPTIMIZERS
from zeroshard.config.precision_sections import (
    AutocastConfig,
    BF16Config,
    DataTypesConfig,
    FP16Config,
)

_EXPERTS = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)


class OptimizerConfig(Section):
    type: Text = honour(..., f"{', '.join(OPTIMIZERS)}, or any class of torch.optim.")
    params: Free = honour(dict, "Arguments of the optimizer. The tables below list them by type.")
    legacy_fusion: Flag = accept(False, "Chooses between two kernels in DeepSpeed.")


class SchedulerConfig(Section):
    type: Text = honour(
        ..., "One of the five schedules below, or any class of torch.optim.lr_scheduler."
    )
    params: Free = honour(dict, "Arguments of the schedule. The tables below list them by type.")


class OffloadConfig(Section):
    device: Annotated[str, DEVICE] = honour(
        "none",
        "Where the state is stored while it is not in use: on the device (none), in host "
        "memory (cpu) or on disk (nvme).",
    )
    nvme_path: Annotated[Text | None, DIRECTORY] = honour(
        None, "Directory on a disk. Required for nvme. null and none: not given."
    )
    pin_memory: Flag = honour(True, "Use page-locked host memory if the ranks have GPUs.")
    buffer_count: Natural | None = accept(None, "Number of swap buffers. ZeroShard computes it.")


class OffloadParamConfig(OffloadConfig):
    buffer_size: Int = accept(
        100_000_000, "Elements of a swap buffer. ZeroShard computes the number."
    )
    max_in_cpu: Natural = honour(
        0,
        "With nvme: number of elements per rank that are stored in host memory instead of on "
        "disk. DeepSpeed's default is 1e9.",
    )


class OffloadOptimizerConfig(OffloadConfig):
    ratio: Fraction = honour(
        1.0,
        "Fraction of the optimizer state that is offloaded, at any stage. 0: nothing is offloaded.",
    )
    max_in_cpu: Natural = honour(
        0,
        "With nvme: number of elements per rank whose state is stored in host memory instead of "
        "on disk. Key of ZeroShard.",
    )
    delayed_update: Flag = honour(
        False,
        "The update runs at the same time as the next step. Parameters change when that step "
        "ends, so step t computes with the updates up to t-2. This changes the algorithm. Needs "
        "device cpu. Key of ZeroShard.",
    )
    super_offload: Flag = honour(
        False,
        "The update of a unit begins when its gradient arrives, and is undone and repeated if the "
        "step turns out to be clipped or skipped, with the same bits. Also with clipping and at "
        "stages 1 and 2, unlike DeepSpeed's. Needs device cpu; no effect on CPU ranks.",
    )
    super_offload_numel: Natural | None = honour(
        None,
        "With super_offload: number of elements per rank whose update may begin early; they need "
        "host memory for their old state, 14 bytes for bf16 and Adam. null: all. Key of ZeroShard.",
    )
    cpuadam_cores_perc: Fraction = accept(
        0.8, "Used only with super_offload. ZeroShard uses the cores that the rank may use."
    )
    pipeline_read: Flag = accept(
        False, "Overlap reads with the update. ZeroShard always does.", done=True
    )
    pipeline_write: Flag = accept(
        False, "Overlap writes with the update. ZeroShard always does.", done=True
    )
    fast_init: Flag = accept(False, "Faster start with nvme. ZeroShard always does it.", done=True)


class LeafModuleConfig(Section):
    classes: Texts = honour(_EXPERTS, "Classes whose modules are gathered as one unit.")
    names: Texts = honour((), "Full names of modules that are gathered as one unit.")
    name_suffixes: Texts = honour(
        (), "Modules whose names end in one of these are gathered as one unit."
    )


class ZeroConfig(Section):
    stage: Annotated[Literal[0, 1, 2, 3], STAGE] = honour(
        0,
        "What is sharded. 0: nothing. 1: masters and optimizer state. 2: also gradients. 3: "
        "also parameters.",
    )
    reduce_bucket_size: Count = honour(
        500_000_000,
        "Maximum number of elements of a message that sums gradients over copies of parameters, on a "
        "mesh. The gradients of a unit are reduced together, from the memory that they have.",
    )
    overlap_comm: Flag | None = honour(
        None,
        "Reduce gradients during backward, and gather updated parameters during the next "
        "forward. null: true.",
    )
    compute_grad_norm: Flag = honour(
        True, "Compute the gradient norm. false: the norm is None, and gradient_clipping must be 0."
    )
    ignore_unused_parameters: Flag = honour(
        True, "false: a trainable parameter without a gradient is an error that names it."
    )
    load_from_fp32_weights: Flag = not_yet(True, "On load, the master is taken from the fp32 copy.")
    stage3_prefetch_bucket_size: Natural = honour(
        50_000_000,
        "Prefetch limit, in parameter elements. The next module is always prefetched; 0 turns "
        "prefetching off.",
    )
    stage3_max_live_parameters: Natural = honour(
        1_000_000_000,
        "If this many parameter elements are gathered, only the next module is prefetched; 0: none. As "
        "many at most stay gathered from forward to backward.",
    )
    stage3_max_reuse_distance: Natural | None = honour(
        None,
        "Parameters stay gathered after forward if backward needs them again within this many "
        "elements. null: only the parameters that backward needs first.",
    )
    stage3_gather_16bit_weights_on_model_save: Flag = accept(
        False, "Allow save_16bit_model at stage 3. It is always allowed.", done=True
    )
    override_module_apply: Flag = accept(
        True, "Under zero.Init, parameters are always gathered for Module.apply(fn)."
    )
    leaf_module: LeafModuleConfig = honour(
        LeafModuleConfig, "Modules that are gathered as one unit."
    )
    offload_optimizer: OffloadOptimizerConfig | None = honour(
        None, "Where optimizer state is stored (stages 1 to 3)."
    )
    offload_param: OffloadParamConfig | None = honour(
        None, "Where parameters are stored (stage 3; no effect at lower stages)."
    )
    allgather_bucket_size: Natural = accept(
        500_000_000,
        "Number of parameter elements that are gathered together after a step. ZeroShard "
        "gathers one unit at a time.",
    )
    contiguous_gradients: Flag = accept(
        True, "Copy gradients into one buffer. ZeroShard always does."
    )
    reduce_scatter: Flag = accept(
        True, "Use reduce-scatter instead of all-reduce. ZeroShard chooses the collective."
    )
    use_multi_rank_bucket_allreduce: Flag = accept(
        True, "How gradients are reduced. ZeroShard chooses the collective."
    )
    allgather_partitions: Flag = accept(
        True, "Use all-gather instead of broadcasts. ZeroShard chooses the collective."
    )
    memory_efficient_linear: Flag = accept(
        True, "Replaces nn.Linear in DeepSpeed. ZeroShard does not need it."
    )
    round_robin_gradients: Flag = accept(
        False, "Which rank owns which gradients. In ZeroShard this follows from the layout."
    )
    parameter_alignment: Flag = accept(False, "Align parameters. ZeroShard always does.", done=True)
    elastic_checkpoint: Flag = accept(
        False,
        "Old format for other world sizes. Checkpoints of ZeroShard load at any world size.",
        done=True,
    )
    pipeline_loading_checkpoint: Flag = accept(False, "Order in which ranks load a checkpoint.")
    log_trace_cache_warnings: Flag = accept(False, "Log warnings about the trace of modules.")
    save_muon_momentum_buffer_in_memory: Flag = accept(
        False, "Where Muon's momentum is stored with nvme."
    )
    sub_group_size: Natural = accept(
        1_000_000_000,
        "Number of elements that an offloaded update processes at a time. ZeroShard computes it.",
    )
    stage3_param_persistence_threshold: Natural = accept(
        100_000,
        "Parameters with fewer elements are not sharded in DeepSpeed. In ZeroShard small "
        "parameters share a unit.",
    )
    stage3_model_persistence_threshold: Natural = accept(
        9_223_372_036_854_775_807, "Maximum number of elements that are not sharded."
    )
    stage3_module_granularity_threshold: Natural = accept(0, "Gather small modules as one.")
    stage3_use_all_reduce_for_fetch_params: Flag = accept(
        False, "How parameters are gathered. ZeroShard chooses the collective."
    )
    stage3_allgather_sequential: Flag = accept(
        False, "How parameters are gathered. ZeroShard chooses the collective."
    )
    enable_sanity_checks: Flag = accept(
        False, "Extra checks. In ZeroShard they are always on.", done=True
    )
    cpu_offload_use_pin_memory: Flag | None = accept(None, "Has no effect in DeepSpeed either.")
    zero_hpz_partition_size: Natural = honour(
        1,
        "Number of ranks of a node, each of which keeps a second shard of the parameters (hpZ of "
        "ZeRO++). Parameters are gathered over all ranks once per step, and then inside the node. The "
        "same as hierarchy.inner with hierarchy.shard_over hybrid. Stage 3. 0 and 1: off.",
    )
    hierarchy: side.HierarchyConfig = honour(
        side.HierarchyConfig, "Nodes, and which ranks share a state. Key of ZeroShard."
    )
    zero_quantized_weights: Flag = honour(
        False,
        "Parameters are gathered in 8 bits (qwZ of ZeRO++). Changes the results. Stage 3.",
    )
    zero_quantized_nontrainable_weights: Flag = honour(
        False,
        "Parameters that are not trained are gathered in 8 bits. Changes the results. Stage 3.",
    )
    zero_quantized_gradients: Flag = honour(
        False,
        "Gradients are added from 4 bits (qgZ of ZeRO++). Changes the results. Stage 3.",
    )


class _Keys(Section):
    """All keys but the sections of monitors."""

    unknown_keys: Annotated[Literal["error", "warn"], Lower] = honour(
        "error",
        "What to do with a key that this page does not list. Programs that call `deepspeed` get a "
        "notice instead of an error for keys that DeepSpeed does not check. These are keys in the "
        "sections that DeepSpeed does not check, and keys at the top level. (A top-level name is "
        "still an error if it is similar to a key that is not given, such as "
        "`zero_optimisation`.)",
    )
    units: TextsOrAuto = honour(
        "auto",
        "Modules to wrap: globs on their names or class names; large single modules beside them, such as "
        "embeddings, are wrapped too. auto: ZeroShard chooses them.",
    )
    compile_blocks: Flag = honour(
        False,
        "torch.compile the forward of each wrapped module, inside the hooks that gather its parameters. "
        "Blocks that are split (block_max_numel) are compiled in parts.",
    )
    block_max_numel: CountOrAuto = honour(
        "auto",
        "Blocks with more elements are gathered in parts, module by module. auto: on an accelerator, a "
        "block is whole if two of them take at most a sixteenth of the device's memory; else "
        "`unit_max_numel`.",
    )
    unit_max_numel: Count = honour(
        64 * 2**20,
        "Units with more elements are split. Where a larger block is gathered whole, each of its "
        "matrices is a unit, and all of them are sent together.",
    )
    unit_min_numel: Natural = honour(256 * 2**10, "Units with fewer elements are merged.")
    conditional_modules: Texts = honour(
        (),
        "Globs on names of modules that only some ranks run in a step, such as experts and "
        "image encoders.",
    )
    keep_fp32: Texts = honour(
        (), "Globs on names of parameters that stay fp32 in a 16-bit mode, such as *.router.*"
    )
    uneven: Annotated[Literal["error", "join"], Lower] = honour(
        "error",
        "What happens if some ranks have no batch left. error: the run stops. join: the other "
        "ranks finish.",
    )
    transport: Annotated[Literal["auto", "shm", "p2p", "stock"], Lower] = honour(
        "auto",
        "Implementation of the collectives on gloo. shm: shared memory of the ranks of one host, "
        "also for the messages of a pipeline. p2p: tagged sends and receives. stock: the collectives "
        "of the process group.",
    )
    registered_memory: Flag = honour(
        False,
        "Let NCCL gather and reduce in memory that it knows, from a pool of its own for each "
        "communicator. A line of the log says where that is possible, and why not elsewhere.",
    )
    compile_update: Flag = honour(
        True,
        "Compile the update: in host memory for Adam and AdamW, if there is a C++ compiler; in "
        "device memory for Adam, AdamW, SGD and Lion, with Triton. The results have the bits of "
        "torch's kernels; see ADR 0015 for devices.",
    )
    trust: side.TrustConfig = honour(
        side.TrustConfig, "How ranks that diverge or hang are detected and reported."
    )
    preemption: side.PreemptionConfig = honour(
        side.PreemptionConfig,
        "What happens if the run has to make room: after a signal all ranks stop at one step and save.",
    )
    parallel: side.ParallelConfig = honour(
        side.ParallelConfig,
        "The mesh of ranks: the number of ranks along each dimension. The product is the number of "
        "ranks. Other sources of the mesh must agree; an error names those that do not.",
    )

    train_batch_size: Count | None = honour(
        None, "Samples per optimizer step, over all data-parallel ranks."
    )
    train_micro_batch_size_per_gpu: Count | None = honour(
        None, "Samples of one rank in one forward."
    )
    gradient_accumulation_steps: Count | None = honour(
        None,
        "Micro-batches per optimizer step. 1 if it does not follow from the other batch sizes.",
    )
    managed_gradient_accumulation: Flag = honour(
        True,
        "The engine counts micro-batches. false: every step() updates, and backward() only "
        "accumulates.",
    )
    gradient_clipping: Amount = honour(
        1.0, "Maximum global 2-norm of the gradient. 0: no clipping."
    )
    steps_per_print: Amount | None = honour(
        None, "Number of steps between two printed lines. null, 0 or inf: nothing is printed."
    )
    communication_data_type: Dtype | None = honour(
        None, "Dtype in which gradients are reduced. null: the dtype of the enabled mode."
    )
    seq_parallel_communication_data_type: Dtype = accept(
        "float32",
        "The same for sequence parallelism. Gradients of all ranks are reduced in one dtype.",
    )
    prescale_gradients: Flag = honour(
        False,
        "Divide gradients by the data-parallel size before the reduction instead of after it. Sums "
        "in fp16 are always divided before (by gradient_predivide_factor, if it is not 1), since "
        "they overflow at 65,504.",
    )
    gradient_predivide_factor: Positive = honour(
        1.0,
        "Gradients are divided by this number before the reduction, and by the data-parallel size "
        "/ this number after it. Has no effect with prescale_gradients.",
    )
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], Lower] = honour(
        "mean", "mean: gradients are divided by the data-parallel size. sum: they are not."
    )
    zero_allow_untested_optimizer: Flag = accept(
        False,
        "Allow optimizers that DeepSpeed does not list. ZeroShard tests every optimizer class.",
        done=True,
    )
    zero_force_ds_cpu_optimizer: Flag = accept(
        True,
        "Require DeepSpeed's CPU optimizer for offload. In ZeroShard any optimizer class can "
        "be offloaded.",
        done=False,
    )
    dataloader_drop_last: Flag = honour(
        False, "deepspeed_io drops the last batch if it is incomplete."
    )
    dump_state: Flag = honour(False, "Print the engine and the configuration at the start.")
    log_level: Annotated[Literal["debug", "info", "warning", "error", "critical"] | None, Lower] = (
        honour(None, "Level of the logger. null: it is not changed.")
    )
    disable_python_gc: Flag = honour(
        False,
        "Switch Python's cyclic garbage collector off. The engine collects garbage between steps.",
    )
    disable_allgather: Flag = accept(False, "Has no effect in DeepSpeed either.")
    vocabulary_size: Count | None = accept(
        None, "Used by DeepSpeed for a warning about alignment only."
    )

    optimizer: OptimizerConfig | None = honour(
        None, "The optimizer, unless the program passes one."
    )
    scheduler: SchedulerConfig | None = honour(
        None, "The learning-rate schedule, unless the program passes one."
    )
    zero_optimization: ZeroConfig = honour(
        ZeroConfig, "What is sharded, where state is stored, and how ranks exchange it."
    )
    fp16: FP16Config = honour(FP16Config, "fp16 training with loss scaling.")
    bf16: BF16Config = honour(BF16Config, "bf16 training. The section may also be called bfloat16.")
    torch_autocast: AutocastConfig = honour(AutocastConfig, "Mixed precision with torch.autocast.")
    data_types: DataTypesConfig = honour(
        DataTypesConfig, "Dtypes that differ from those of the enabled mode."
    )
    activation_checkpointing: side.ActivationConfig = not_yet(
        side.ActivationConfig,
        "Options for calls of activation checkpointing. They have no effect without such calls.",
    )
    checkpoint: side.CheckpointConfig = honour(side.CheckpointConfig, "Saving and loading.")
    aio: side.AioConfig = accept(
        side.AioConfig, "Settings of disk access. ZeroShard computes them."
    )
    wall_clock_breakdown: Flag = honour(
        False,
        "Print the time of each phase, in the lines of steps_per_print. The device is not synchronized "
        "for it.",
    )
    memory_breakdown: Flag = honour(False, "Log the memory in use at each phase.")
    timers: side.TimersConfig = accept(
        side.TimersConfig, "Timers. ZeroShard's timers never synchronize the device."
    )
    comms_logger: side.CommsLoggerConfig = honour(side.CommsLoggerConfig, "Log of the collectives.")
    flops_profiler: side.FlopsConfig = honour(
        side.FlopsConfig,
        "Count the operations of one forward: matrix products, convolutions, attention.",
    )
    pipeline: side.PipelineConfig = honour(side.PipelineConfig, "Layers of a PipelineModule.")
    tensor_parallel: side.TensorParallelConfig = not_yet(
        side.TensorParallelConfig, "Tensor parallelism."
    )
    sequence_parallel_size: Count = honour(1, "Another name of parallel.sequence. 1: not given.")
    sequence_parallel_gradient: Annotated[Literal["mean", "sum"], Lower] = honour(
        "mean",
        "mean: gradients are divided by the data-parallel size x the number of sequence ranks. sum: by "
        "the data-parallel size, as DeepSpeed does at stages 0 to 2.",
    )
    data_parallel_size: Count | None = honour(
        None, "Number of ranks that train on different samples: data_replicate x data_shard."
    )
    use_data_before_expert_parallelism: Flag = honour(
        False,
        "Which ranks share the experts of a layer. false: neighbours; true: ranks that are as far apart "
        "as possible, so that neighbours hold the same experts.",
    )
    expert_parallel: side.ExpertParallelConfig = honour(
        side.ExpertParallelConfig, "Experts that ranks share (AutoEP)."
    )
    compile: side.CompileConfig = accept(side.CompileConfig, "Options of DeepCompile.")
    inference: Any = accept(None, "Read by Transformers only.")


class Config(MonitorSections, _Keys):
    """A whole configuration. After ``load_config`` the three batch sizes are solved."""
