"""Configurations in the spellings of projects that use DeepSpeed, from their documented forms.

``{name: (configuration, refusal)}``. An empty refusal means that the configuration is accepted; otherwise
it is a part of the reason. Where a value is "auto", the library fills it in: see ``FILLED``.
"""

from __future__ import annotations

from typing import Any

from zeroshard.errors import PLAN_COMMAND

FP16 = {
    "enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16,
    "hysteresis": 2, "min_loss_scale": 1,
}  # fmt: skip
BF16 = {"bf16": {"enabled": "auto"}}
BOTH = {"fp16": FP16, **BF16}
AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
ADAMW = {
    "type": "AdamW",
    "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
}
WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
}
DECAY = {"type": "WarmupDecayLR", "params": {**WARMUP["params"], "total_num_steps": "auto"}}
QUIET = {"steps_per_print": 2000, "wall_clock_breakdown": False}
Z2 = {
    "stage": 2, "allgather_partitions": True, "allgather_bucket_size": 2e8, "overlap_comm": True,
    "reduce_scatter": True, "reduce_bucket_size": 2e8, "contiguous_gradients": True,
}  # fmt: skip
Z3 = {
    "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9,
    "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True,
}  # fmt: skip
CPU = {"device": "cpu", "pin_memory": True}
NONE = {"device": "none", "nvme_path": None}
PLUGIN = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 1, "gradient_clipping": 1.0, "steps_per_print": float("inf"),
    "bf16": {"enabled": True}, "fp16": {"enabled": False}, "zero_allow_untested_optimizer": True,
}  # fmt: skip
CHAT = {
    "train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 10,
    "gradient_clipping": 1.0, "prescale_gradients": False, "wall_clock_breakdown": False,
    "bfloat16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"},
    "hybrid_engine": {
        "enabled": False, "max_out_tokens": 512, "inference_tp_size": 1,
        "release_inference_cache": False, "pin_parameters": True, "tp_gather_partition_size": 8,
    },
    "tensorboard": {"enabled": False, "output_path": "out/ds/", "job_name": "step3_tensorboard"},
}  # fmt: skip
CHAT_ZERO = {
    "stage": 3, "overlap_comm": True, "offload_param": {"device": "none"},
    "offload_optimizer": {"device": "none"}, "stage3_param_persistence_threshold": 1e4,
    "stage3_max_live_parameters": 3e7, "stage3_prefetch_bucket_size": 3e7,
    "memory_efficient_linear": False, "zero_quantized_nontrainable_weights": False,
    "zero_hpz_partition_size": 1,
}  # fmt: skip
RLHF = {
    "train_batch_size": 128, "train_micro_batch_size_per_gpu": 2, "steps_per_print": 100,
    "bf16": {"enabled": True}, "gradient_clipping": 1.0, "prescale_gradients": False,
    "wall_clock_breakdown": False, "data_types": {"grad_accum_dtype": "fp32"},
}  # fmt: skip
RLHF_ZERO = {
    "offload_param": {"device": "none"}, "offload_optimizer": CPU, "sub_group_size": "auto",
    "stage3_max_live_parameters": "auto", "stage3_max_reuse_distance": "auto",
    "stage3_param_persistence_threshold": "auto", "stage3_prefetch_bucket_size": "auto",
    "reduce_bucket_size": "auto", "zero_hpz_partition_size": 1, "zero_quantized_weights": False,
    "zero_quantized_gradients": False,
}  # fmt: skip
PLAIN = {"train_batch_size": 32}
ADAM = {
    "type": "Adam",
    "params": {"lr": 1e-3, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
}
MEGATRON = {
    "train_batch_size": 256, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 10,
    "gradient_clipping": 1.0, "prescale_gradients": True, "wall_clock_breakdown": False,
    "fp16": {
        "enabled": True, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2,
        "min_loss_scale": 1, "initial_scale_power": 11,
    },
}  # fmt: skip


def zero(*parts: dict[str, Any], **keys: Any) -> dict[str, Any]:
    section: dict[str, Any] = {}
    for part in parts:
        section |= part
    return {"zero_optimization": section | keys}


WILD: dict[str, tuple[dict[str, Any], str]] = {
    # ------------------------------------------------------------ Transformers
    "transformers zero 1": ({**AUTO, **BOTH, **zero(stage=1)}, ""),
    "transformers zero 2": (
        {**AUTO, "fp16": FP16, "optimizer": ADAMW, "scheduler": WARMUP, **QUIET,
         **zero(Z2, offload_optimizer=CPU)}, ""),
    "transformers zero 3": (
        {**AUTO, **BOTH, "optimizer": ADAMW, "scheduler": WARMUP, **QUIET, **zero(Z3)}, ""),
    "transformers zero 3 offload": (
        {**AUTO, "fp16": FP16, "optimizer": ADAMW, "scheduler": WARMUP, **QUIET,
         **zero(Z3, offload_optimizer=CPU, offload_param=CPU)}, ""),
    "transformers nvme": (
        {**AUTO, **BF16, **QUIET,
         "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False,
                 "overlap_events": True},
         **zero(Z3,
                offload_optimizer={"device": "nvme", "nvme_path": "/tmp", "pin_memory": True,
                                   "buffer_count": 4, "fast_init": False},
                offload_param={"device": "nvme", "nvme_path": "/tmp", "pin_memory": True,
                               "buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9})}, ""),
    "transformers old fp16 name": (
        {**AUTO, "fp16": FP16, **zero(stage=3, stage3_gather_fp16_weights_on_model_save=True)}, ""),
    "transformers old cpu offload": ({**AUTO, "fp16": FP16, **zero(Z2, cpu_offload=True)}, ""),
    "transformers amp left over": (
        {**AUTO, "amp": {"enabled": "auto", "opt_level": "auto"}, **zero(Z2)}, ""),
    "transformers activation checkpointing left over": (
        {**AUTO, **BF16, **zero(stage=2), "activation_checkpointing": {
            "partition_activations": False, "cpu_checkpointing": False,
            "contiguous_memory_optimization": False, "number_checkpoints": None,
            "synchronize_checkpoint_boundary": False, "profile": False}}, ""),
    # ------------------------------------------------------------ Accelerate
    "accelerate plugin 1": ({**PLUGIN, **zero(stage=1, offload_optimizer=NONE, offload_param=NONE)}, ""),
    "accelerate plugin 3": (
        {**PLUGIN, **zero(stage=3, offload_optimizer=NONE, offload_param=NONE,
                          stage3_gather_16bit_weights_on_model_save=True)}, ""),
    "accelerate zero 2 template": (
        {**AUTO, "fp16": {**FP16, "enabled": True}, "optimizer": {
            "type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True,
                                        "adam_w_mode": True}},
         "scheduler": WARMUP, "steps_per_print": 2000, "wall_clock_breakdown": False,
         **zero(stage=2, allgather_partitions=True, allgather_bucket_size=2e8, overlap_comm=True,
                reduce_scatter=True, reduce_bucket_size="auto", contiguous_gradients=True)}, ""),
    "accelerate zero 3 offload template": (
        {**AUTO, **BF16, "optimizer": ADAMW, "scheduler": DECAY, "steps_per_print": 2000,
         **zero(Z3, offload_optimizer=CPU, offload_param=CPU, sub_group_size=1e9,
                stage3_gather_16bit_weights_on_model_save="auto")}, ""),
    "accelerate nvme path none": (
        {**PLUGIN, **zero(stage=3, offload_optimizer={"device": "cpu", "nvme_path": "none"},
                          offload_param={"device": "cpu", "nvme_path": "none"})}, ""),
    # ------------------------------------------------------------ TRL
    "trl reference model": (
        {**PLUGIN, "train_batch_size": 4, "train_micro_batch_size_per_gpu": 2,
         "zero_optimization.reduce_bucket_size": 4096,
         "zero_optimization.stage3_param_persistence_threshold": 640,
         "zero_optimization.stage3_prefetch_bucket_size": 3686.4,
         **zero(stage=3, offload_param=NONE)}, ""),
    "trl reference model at stage 0": (
        {**PLUGIN, "train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, **zero(stage=0)}, ""),
    # ------------------------------------------------------------ LLaMA-Factory
    "llama-factory z0": (
        {**AUTO, **BOTH, "zero_allow_untested_optimizer": True,
         **zero(Z2, stage=0, allgather_bucket_size=5e8, round_robin_gradients=True)}, ""),
    "llama-factory z2": (
        {**AUTO, **BOTH, "zero_allow_untested_optimizer": True,
         **zero(Z2, overlap_comm=False, round_robin_gradients=True)}, ""),
    "llama-factory z2 offload": (
        {**AUTO, **BOTH, "zero_allow_untested_optimizer": True, **zero(Z2, offload_optimizer=CPU)}, ""),
    "llama-factory z3": (
        {**AUTO, **BOTH, "zero_allow_untested_optimizer": True, **zero(Z3, overlap_comm=False)}, ""),
    "llama-factory autotp": (
        {**AUTO, **BOTH, "tensor_parallel": {"autotp_size": 2}, **zero(stage=2)},
        ""),
    # ------------------------------------------------------------ ms-swift
    "ms-swift zero 1": (
        {**AUTO, **BOTH, **QUIET,
         **zero(Z2, stage=1, offload_optimizer={"device": "none", "pin_memory": True})}, ""),
    "ms-swift zero 3": (
        {**AUTO, **BOTH, **QUIET, **zero(Z3, zero_quantized_weights=False,
                                         zero_quantized_gradients=False)}, ""),
    "ms-swift zero++": (
        {**AUTO, **BOTH, **zero(Z3, zero_hpz_partition_size=8)}, "8 does not divide the 2 ranks"),
    "LLaVA-NeXT zero++": (
        {**AUTO, **BOTH, **zero(
            Z3, zero_quantized_weights=True, zero_hpz_partition_size=2,
            zero_quantized_gradients=True, offload_param={"device": "none", "pin_memory": True},
            offload_optimizer={"device": "none", "pin_memory": True})}, ""),
    "VILA zero++": (
        {**AUTO, **BOTH, **zero(Z3, zero_hpz_partition_size=2, reduce_bucket_size=1e6)}, ""),
    # ------------------------------------------------------------ axolotl
    "axolotl zero 1": (
        {**AUTO, **BF16, "fp16": {**FP16, "auto_cast": False, "initial_scale_power": 32},
         "wall_clock_breakdown": False, **zero(stage=1, overlap_comm=True)}, ""),
    "axolotl zero 3 bf16": (
        {**AUTO, "bf16": {"enabled": True}, "wall_clock_breakdown": False,
         **zero(stage=3, overlap_comm=True, contiguous_gradients=True, sub_group_size=0,
                reduce_bucket_size="auto", stage3_prefetch_bucket_size="auto",
                stage3_param_persistence_threshold="auto", stage3_max_live_parameters=0,
                stage3_max_reuse_distance=0, stage3_gather_16bit_weights_on_model_save=True)}, ""),
    "axolotl compile": (
        {**AUTO, **BF16, "compile": {"disable": False, "backend": "inductor"}, **zero(stage=1)},
        "compile.backend: no such key"),
    # ------------------------------------------------------------ Megatron-DeepSpeed, GPT-NeoX
    "megatron stage 1": ({**MEGATRON, **zero(stage=1)}, ""),
    "megatron bf16": (
        {**MEGATRON, "fp16": {"enabled": False}, "bf16": {"enabled": True},
         "data_types": {"grad_accum_dtype": "fp32"}, "zero_allow_untested_optimizer": True,
         "comms_logger": {"enabled": False, "verbose": False}, **zero(stage=1)}, ""),
    "megatron short names": (
        {**MEGATRON, **zero(stage=3, max_live_parameters=3e9, max_reuse_distance=3e9,
                            param_persistence_threshold=1e5, prefetch_bucket_size=5e7,
                            gather_16bit_weights_on_model_save=True)}, ""),
    "megatron curriculum": (
        {**MEGATRON, "curriculum_learning": {"enabled": True, "curriculum_type": "seqlen"}},
        "choose the order of the data in the data loader"),
    "megatron curriculum off": (
        {**MEGATRON, "curriculum_learning": {"enabled": False, "curriculum_type": "seqlen"}}, ""),
    "megatron data efficiency": (
        {**MEGATRON, "data_efficiency": {"enabled": True, "seed": 1234}}, "use the data loader"),
    "megatron random ltd off": (
        {**MEGATRON, "data_efficiency": {"enabled": False, "data_routing": {"enabled": False}}}, ""),
    "gpt-neox": (
        {**MEGATRON, "optimizer": {"type": "Adam", "params": {"lr": 6e-4, "betas": [0.9, 0.95],
                                                               "eps": 1e-8}},
         "fp16": {**MEGATRON["fp16"], "type": "bfloat16"}, **zero(Z2, stage=1)},
        "fp16.type: no such key"),
    "gpt-neox wandb": (
        {**MEGATRON, "steps_per_print": 10, "wandb": {"enabled": False, "group": "g", "team": None},
         "optimizer": ADAM, **zero(Z2, stage=1, allgather_bucket_size=500000000)}, ""),
    # ------------------------------------------------------------ DeepSpeed-Chat, OpenRLHF
    "deepspeed-chat actor": ({**CHAT, **zero(CHAT_ZERO)}, ""),
    "deepspeed-chat fp16": (
        {**{k: v for k, v in CHAT.items() if k != "bfloat16"},
         "fp16": {"enabled": True, "loss_scale_window": 100}, **zero(CHAT_ZERO, stage=2)}, ""),
    "deepspeed-chat reference": (
        {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 10,
         "bfloat16": {"enabled": True}, "gradient_clipping": 1.0, "prescale_gradients": False,
         "wall_clock_breakdown": False,
         **zero(stage=3, stage3_param_persistence_threshold=1e4, offload_param={"device": "cpu"},
                memory_efficient_linear=False)}, ""),
    "deepspeed-chat hybrid engine": (
        {**CHAT, "hybrid_engine": {**CHAT["hybrid_engine"], "enabled": True}, **zero(CHAT_ZERO)},
        "generation inside training is not part of ZeRO"),
    "openrlhf actor": ({**RLHF, **zero(RLHF_ZERO, stage=3), "compile": {"deepcompile": False}}, ""),
    "openrlhf stage 2": (
        {**RLHF, **zero(RLHF_ZERO, stage=2, round_robin_gradients=True),
         "tensor_parallel": {"autotp_size": 1}}, ""),
    "openrlhf reward": (
        {"train_batch_size": 128, "train_micro_batch_size_per_gpu": 2, "steps_per_print": 100,
         "bf16": {"enabled": True}, "gradient_clipping": 1.0, "prescale_gradients": False,
         "wall_clock_breakdown": False,
         **zero(stage=3, stage3_max_live_parameters="auto", stage3_max_reuse_distance="auto",
                stage3_param_persistence_threshold="auto", stage3_prefetch_bucket_size="auto",
                offload_param={"device": "cpu", "pin_memory": True})}, ""),
    # ------------------------------------------------------------ Alpaca, Vicuna, LLaVA, ChatGLM, Qwen
    "alpaca": ({**AUTO, **BF16, "optimizer": ADAMW, "scheduler": DECAY, "steps_per_print": 5,
                "wall_clock_breakdown": False,
                **zero(Z3, offload_optimizer=CPU, offload_param=CPU,
                       stage3_gather_16bit_weights_on_model_save=False)}, ""),
    "fastchat s2": (
        {"fp16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": "auto",
         "gradient_accumulation_steps": "auto",
         **zero(stage=2, offload_optimizer={"device": "cpu"}, contiguous_gradients=True,
                overlap_comm=True)}, ""),
    "fastchat s3": (
        {"fp16": FP16, "optimizer": ADAMW, "scheduler": WARMUP, **AUTO, **QUIET,
         **zero(Z3, offload_optimizer=CPU, offload_param=CPU, stage3_max_live_parameters=5e8,
                stage3_max_reuse_distance=5e8)}, ""),
    "llava zero 2": ({**AUTO, **BOTH, **zero(stage=2, overlap_comm=True, contiguous_gradients=True,
                                             sub_group_size=1e9, reduce_bucket_size="auto")}, ""),
    "chatglm": (
        {"train_micro_batch_size_per_gpu": "auto", "zero_allow_untested_optimizer": True, "fp16": FP16,
         **zero(Z2, allgather_bucket_size=5e8, overlap_comm=False)}, ""),
    "qwen zero 3": (
        {**AUTO, **BOTH, "optimizer": ADAMW, "scheduler": WARMUP, "steps_per_print": 100,
         "wall_clock_breakdown": False,
         **zero(Z3, offload_optimizer={"device": "none", "pin_memory": True},
                offload_param={"device": "none", "pin_memory": True})}, ""),
    "dolly": ({**AUTO, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}, "scheduler": DECAY,
               **zero(Z3)}, ""),
    # ------------------------------------------------------------ DeepSpeed's own examples and pages
    "deepspeed cifar": (
        {"train_batch_size": 16, "steps_per_print": 2000, "optimizer": ADAM,
         "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001,
                                                      "warmup_num_steps": 1000}},
         "gradient_clipping": 1.0, "prescale_gradients": False, "bf16": {"enabled": False},
         "fp16": {"enabled": True, "fp16_master_weights_and_grads": False, "loss_scale": 0,
                  "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1,
                  "initial_scale_power": 15},
         "wall_clock_breakdown": False,
         **zero(Z2, stage=0, allgather_bucket_size=50000000, cpu_offload=False)}, ""),
    "deepspeed hello": (
        {"train_batch_size": 8, "fp16": {"enabled": True}, "zero_optimization": True}, ""),
    "deepspeed 1-bit adam": (
        {**PLAIN, "optimizer": {"type": "OneBitAdam", "params": {"lr": 4e-4, "freeze_step": 23000}}},
        "OneBitAdam"),
    "deepspeed sparse attention": (
        {**PLAIN, "sparse_attention": {"mode": "fixed", "block": 16}}, "attention kernel"),
    "deepspeed flops profiler": (
        {**PLAIN, "flops_profiler": {"enabled": True, "profile_step": 1, "module_depth": -1,
                                     "top_modules": 1, "detailed": True, "output_file": None}}, ""),
    "deepspeed monitors": (
        {**PLAIN, "tensorboard": {"enabled": True, "output_path": "logs/", "job_name": "run"},
         "csv_monitor": {"enabled": True, "output_path": "logs/", "job_name": "run"}}, ""),
    "deepspeed comms logger": (
        {**PLAIN, "comms_logger": {"enabled": True, "verbose": False, "prof_all": True, "debug": False,
                                   "prof_ops": ["all_reduce"]}}, ""),
    "deepspeed checkpoint": (
        {**PLAIN, "checkpoint": {"tag_validation": "Warn", "load_universal": True,
                                 "use_node_local_storage": False,
                                 "parallel_write": {"pipeline_stage": False}}}, ""),
    "deepspeed elasticity": (
        {**PLAIN, "elasticity": {"enabled": True, "max_train_batch_size": 2000,
                                 "micro_batch_sizes": [2, 4, 6]}},
        "checkpoints load at any world size"),
    "deepspeed autotuning": (
        {**PLAIN, "autotuning": {"enabled": True, "fast": False}}, PLAN_COMMAND),
    "deepspeed autocast": (
        {**PLAIN, "torch_autocast": {"enabled": True, "dtype": "bfloat16",
                                     "lower_precision_safe_modules": ["torch.nn.Linear"]},
         **zero(stage=1)}, ""),
    "deepspeed lamb": (
        {**PLAIN, "optimizer": {"type": "Lamb", "params": {
            "lr": 11e-3, "weight_decay": 0.01, "bias_correction": False, "max_coeff": 0.3,
            "min_coeff": 0.01}},
         "fp16": {"enabled": True, "loss_scale": 0}, "prescale_gradients": False}, ""),
    "deepspeed muon": (
        {**PLAIN, "optimizer": {"type": "Muon", "params": {"lr": 0.02, "momentum": 0.9}},
         "bf16": {"enabled": True}, **zero(stage=2)}, ""),
    "deepspeed zenflow": ({**PLAIN, **zero(stage=2, zenflow={"topk_ratio": 0.05})}, "stale gradients"),
    "deepspeed superoffload": (
        {**PLAIN, **zero(stage=3, offload_optimizer={**CPU, "super_offload": True})}, ""),
    "deepspeed mics": ({**PLAIN, **zero(stage=3, mics_shard_size=8)}, '"shard_over": "inner"'),
    "deepspeed mics off": ({**PLAIN, **zero(stage=3, mics_shard_size=-1)}, ""),
    "deepspeed partial offload": (
        {**PLAIN, **zero(stage=3, offload_optimizer={**CPU, "ratio": 0.3})}, ""),
    "deepspeed bf16 masters": (
        {**PLAIN, "bf16": {"enabled": True, "bf16_master_weights_and_grads": True,
                           "bf16_optimizer_states": True}, **zero(stage=3)}, ""),
    "deepspeed misspelt section": (
        {**PLAIN, "zero_optimisation": {"stage": 3}}, 'Did you mean "zero_optimization"?'),
    "deepspeed section put aside": (
        {**PLAIN, **zero(stage=2), "_zero_optimization": {"stage": 3},
         "zero_optimization_nvme": {"stage": 3}}, ""),
    "deepspeed misspelt key": ({**PLAIN, **zero(stgae=3)}, 'Did you mean "stage"?'),
    # ------------------------------------------------------------ Lightning, and notes people leave
    "lightning stage 3 offload": (
        {"activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False},
         "aio": {"block_size": 1048576, "queue_depth": 8, "single_submit": False,
                 "overlap_events": True, "thread_count": 1},
         "zero_allow_untested_optimizer": True, "gradient_accumulation_steps": 1,
         "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "bf16": {"enabled": True},
         **zero(Z3, reduce_bucket_size=2e8, stage3_prefetch_bucket_size=5e7,
                stage3_param_persistence_threshold=1e5, sub_group_size=1e12,
                offload_optimizer={"device": "cpu", "nvme_path": "/local_nvme", "buffer_count": 4,
                                   "pin_memory": False},
                offload_param={"device": "cpu", "nvme_path": "/local_nvme", "buffer_count": 5,
                               "buffer_size": 1e8, "max_in_cpu": 1e9, "pin_memory": False})}, ""),
    "comments as keys": (
        {**PLAIN, "_comment": "for 8 GPUs", "//": "see the wiki", "log": {"wandb": True},
         **zero(stage=2)}, ""),
    "numbers as words": ({"train_batch_size": "32", "gradient_clipping": "1.0", **zero(stage="2")}, ""),
    "flags as words": ({**PLAIN, "fp16": {"enabled": "true"}}, "write true"),
    "old wall clock file": (
        {**PLAIN, "gradient_accumulation_steps": 2, "disable_allgather": False, "fp32_allreduce": False,
         "optimizer": {**ADAM, "legacy_fusion": False}, "dump_state": False,
         "zero_optimization": {"stage": 0}}, ""),
}  # fmt: skip

FILLED: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer.params.lr": 1e-4,
    "scheduler.params.total_num_steps": 100,
    "scheduler.params.warmup_num_steps": 10,
}
"""What the Trainer writes where a file says "auto"."""
