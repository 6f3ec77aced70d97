"""The section ``zero_optimization``: what is sharded, where it is stored, and how ranks exchange it."""

from __future__ import annotations

from typing import Annotated, Literal

from zeroshard.config.fields import (
    DEVICE,
    DIRECTORY,
    STAGE,
    Count,
    Flag,
    Fraction,
    Int,
    Lower,
    Natural,
    Section,
    Text,
    Texts,
    accept,
    honour,
    not_yet,
)

_EXPERTS = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)


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


class HierarchyConfig(Section):
    """The nodes of a shard group: see :mod:`zeroshard.config.mesh_keys`."""

    inner: Count = honour(
        1,
        "Number of neighbouring ranks with a fast link among them, as those of a host. From 2 on, units "
        "are gathered and reduced in two hops: inside such a node, and between nodes. 1: one hop.",
    )
    shard_over: Annotated[Literal["all", "hybrid", "inner"], Lower] = honour(
        "all",
        "Which ranks share a state. all: all ranks share every state that the stage shards. hybrid: the "
        "ranks of a node share the parameters, at stage 3; all ranks share the other states. inner: the "
        "ranks of a node share every state, as with parallel.data_replicate.",
    )
    outer_reduce: Annotated[Literal["bucket", "boundary"], Lower] = honour(
        "bucket",
        "When gradients are added over nodes, or over the replicas of parallel.data_replicate. bucket: "
        "with each reduction, so in each micro-batch at stages 2 and 3. boundary: once per step (MiCS). "
        "A rank then holds the sums of its node between micro-batches. At stages 0 and 1 it is once "
        "per step anyway.",
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
    hierarchy: HierarchyConfig = honour(
        HierarchyConfig, "Nodes, and which ranks share a state. Key of ZeroShard."
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
