"""All keys of a configuration: type, default and meaning.

Names, defaults and meanings are DeepSpeed's, whose JSON is the format. ZeroShard's own keys come first in
``Config``. Sections that only observe, and those of other parallel dimensions, are in
:mod:`zeroshard.config.sections`. Sizes in *elements* count numbers, not bytes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from zeroshard.config import sections as side
from zeroshard.config.fields import (
    AUTOCAST_DTYPE,
    Amount,
    Count,
    CountOrAuto,
    Dtype,
    Flag,
    Free,
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
)
from zeroshard.config.params import OPTIMIZERS
from zeroshard.config.zero_section import ZeroConfig


class OptimizerConfig(Section):
    type: Text = honour(..., f"{', '.join(OPTIMIZERS)}, or any class of torch.optim.")
    params: Free = honour(dict, "Arguments of the optimizer. The tables below list them by type.")
    legacy_fusion: Flag = accept(False, "Chooses between two kernels in DeepSpeed.")


class SchedulerConfig(Section):
    type: Text = honour(
        ..., "One of the five schedules below, or any class of torch.optim.lr_scheduler."
    )
    params: Free = honour(dict, "Arguments of the schedule. The tables below list them by type.")


_CONVOLUTIONS = ("conv.Conv1d", "conv.Conv2d", "conv.Conv3d")
_SAFE_MODULES = tuple(f"torch.nn.modules.{m}" for m in ("linear.Linear", *_CONVOLUTIONS))


class FP16Config(Section):
    enabled: Flag = honour(
        False,
        "Train with fp16 parameters and gradients and fp32 masters. Cannot be combined with bf16.",
    )
    auto_cast: Flag = honour(False, "Cast floating-point inputs of the model to fp16.")
    loss_scale: Amount = honour(0.0, "Fixed loss scale. 0: the loss scale is dynamic.")
    initial_scale_power: Natural = honour(16, "The dynamic loss scale starts at 2 to this power.")
    loss_scale_window: Count = honour(
        1000, "Number of consecutive steps without overflow after which the loss scale doubles."
    )
    hysteresis: Count = honour(2, "Number of overflows after which the loss scale halves.")
    consecutive_hysteresis: Flag = honour(
        False, "Set the count of overflows back after every step without overflow."
    )
    min_loss_scale: Count = honour(
        1, "Minimum of the dynamic loss scale. An overflow at the minimum is an error."
    )
    fp16_master_weights_and_grads: Flag = later(False, "Master weights and gradients in fp16.")


class BF16Config(Section):
    enabled: Flag = honour(
        False,
        'Train with bf16 parameters and fp32 masters. Cannot be combined with fp16. "auto": '
        "true if the hardware has bf16 instructions.",
    )
    check_grad_overflow: Flag | None = honour(
        None,
        "true: skip a step whose gradient is not finite. false: do not look for such steps. null: "
        "trust.nan_policy decides.",
    )
    immediate_grad_update: Flag = accept(False, "When gradients are added to the fp32 accumulator.")
    bf16_master_weights_and_grads: Flag = honour(
        False, "Masters and accumulated gradients are bf16 too."
    )
    bf16_optimizer_states: Flag = honour(
        False, "Moments are bf16. Needs bf16_master_weights_and_grads."
    )


class AutocastConfig(Section):
    enabled: Flag = honour(False, "Run forward under torch.autocast. Parameters keep their dtype.")
    dtype: Annotated[Literal["float16", "bfloat16"] | None, AUTOCAST_DTYPE] = honour(
        None, "bf16 or fp16. null: torch's default for the device."
    )
    lower_precision_safe_modules: Texts = honour(
        _SAFE_MODULES, "Module classes whose gradients may be reduced in the autocast dtype."
    )


class DataTypesConfig(Section):
    grad_accum_dtype: Dtype | None = honour(
        None,
        "Dtype in which the gradients of micro-batches are added up. null: fp32 (fp64 for "
        "fp64 models).",
    )
    param_dtype: Dtype | None = honour(
        None, "For a check only: must be the parameter dtype of the enabled mode."
    )
    buffer_dtype: Dtype | None = honour(
        None, "Cast module buffers to this dtype. null: buffers are not cast."
    )
    keep_in_fp32_modules: TextsOrAuto = honour(
        "auto", "Globs on names of buffers that stay fp32. auto: the model's own list."
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


class Config(side.MonitorSections, _Keys):
    """A whole configuration. After ``load_config`` the three batch sizes are solved."""
