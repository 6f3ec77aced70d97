"""Configurations in the spellings of programs that use DeepSpeed are accepted."""

from __future__ import annotations

import math
from typing import Any

import pytest
from program_configs import FILLED, WILD

from zeroshard.config import load_config
from zeroshard.errors import ConfigError

TRAINER_FILE: dict[str, Any] = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "offload_param": {"device": "none", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}


CHOSEN = {"optimizer.params.lr": 2e-5, "scheduler.params.warmup_num_steps": 9}


def strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for inner in value.values() for text in strings(inner)]
    return [value] if isinstance(value, str) else []


def test_a_trainer_file_full_of_autos_resolves() -> None:
    arguments = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, **CHOSEN}
    loaded = load_config(TRAINER_FILE, world_size=2, arguments=arguments, hidden_size=512)
    config = loaded.config
    assert config.train_batch_size == 16
    assert config.zero_optimization.reduce_bucket_size == 512 * 512
    assert config.optimizer.params == {"lr": 2e-5}
    assert config.scheduler.params == {"warmup_max_lr": 2e-5, "warmup_num_steps": 9}
    assert config.gradient_clipping == 1.0


def test_no_auto_is_left_but_the_words_of_some_keys() -> None:
    arguments = {"train_micro_batch_size_per_gpu": 4, **CHOSEN}
    dumped = load_config(TRAINER_FILE, world_size=2, arguments=arguments).config.model_dump()
    ours = [dumped.pop(key) for key in ("units", "block_max_numel", "transport")]
    buffers = dumped["data_types"].pop("keep_in_fp32_modules")
    dumped["pipeline"].pop("stages")  # a word that nothing reads
    dumped.pop("expert_parallel")  # as are those of its defaults
    assert [*ours, buffers] == ["auto"] * 4
    assert "auto" not in strings(dumped)


def test_the_dict_that_accelerates_plugin_builds() -> None:
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "none", "nvme_path": None},
            "offload_param": {"device": "none", "nvme_path": None},
            "stage3_gather_16bit_weights_on_model_save": False,
        },
        "gradient_clipping": 1.0,
        "steps_per_print": math.inf,
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
        "zero_allow_untested_optimizer": True,
    }
    loaded = load_config(config, world_size=2)
    assert loaded.config.train_batch_size == 4
    assert loaded.notices == ()


def test_the_dict_that_lightning_builds() -> None:
    config = {
        "activation_checkpointing": {
            "partition_activations": False,
            "cpu_checkpointing": False,
            "contiguous_memory_optimization": False,
            "synchronize_checkpoint_boundary": False,
        },
        "aio": {
            "block_size": 1048576,
            "queue_depth": 8,
            "single_submit": False,
            "overlap_events": True,
            "thread_count": 1,
        },
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 2,
            "contiguous_gradients": True,
            "overlap_comm": True,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 200_000_000,
            "reduce_bucket_size": 200_000_000,
            "sub_group_size": 1_000_000_000_000,
        },
        "gradient_accumulation_steps": 1,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "fp16": {
            "enabled": True,
            "loss_scale": 0,
            "initial_scale_power": 16,
            "loss_scale_window": 1000,
            "hysteresis": 2,
            "min_loss_scale": 1,
        },
    }
    assert load_config(config, world_size=1).notices == (
        "accepted, but without effect: aio.thread_count, zero_optimization.allgather_bucket_size, "
        "zero_optimization.sub_group_size",
    )


def test_an_old_file_that_switches_everything_off() -> None:
    config = {
        "train_batch_size": 8,
        "gradient_clipping": 1.0,
        "amp": {"enabled": False},
        "sparse_attention": None,
        "elasticity": {"enabled": False},
        "flops_profiler": {"enabled": False, "top_modules": 3},
        "tensorboard": {"enabled": False},
        "comms_logger": {"enabled": False, "verbose": False, "prof_all": True, "debug": False},
        "activation_checkpointing": {"number_checkpoints": False, "profile": False},
        "zero_optimization": {"stage": 1, "cpu_offload": False, "legacy_stage1": False},
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    assert load_config(config, world_size=1).notices == ()


@pytest.mark.parametrize("name", WILD)
def test_a_configuration_of_the_wild_is_accepted_or_refused_for_a_reason(name: str) -> None:
    config, refusal = WILD[name]
    filled = {path: value for path, value in FILLED.items() if at(config, path) == "auto"}
    options: Any = {"world_size": 2, "hidden_size": 64, "arguments": filled, "as_deepspeed": True}
    if refusal:
        with pytest.raises(ConfigError) as caught:
            load_config(config, **options)
        assert refusal in str(caught.value)
        return
    loaded = load_config(config, **options)
    assert loaded.config.train_batch_size % 2 == 0
    asked = at(config, "zero_optimization.stage")
    assert asked is None or loaded.config.zero_optimization.stage == int(asked)


def test_there_are_as_many_as_promised() -> None:
    assert len(WILD) >= 60


def at(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = config.get(name) if isinstance(config, dict) else None
    return config


FULFILLED = {
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {
        "stage": 3,
        "stage3_gather_16bit_weights_on_model_save": True,
        "elastic_checkpoint": True,
        "enable_sanity_checks": True,
        "contiguous_gradients": True,
        "offload_optimizer": {"device": "cpu", "pipeline_read": True, "fast_init": True},
    },
    "checkpoint": {"load_universal": True, "use_node_local_storage": True},
    "timers": {"throughput": {"synchronized": False}},
}


def test_a_wish_that_is_fulfilled_needs_no_notice() -> None:
    one = {"train_batch_size": 8, "gradient_clipping": 0}
    assert load_config({**one, **FULFILLED}, world_size=1).notices == ()
    other = {**one, "zero_optimization": {"stage": 2, "round_robin_gradients": True}}
    (line,) = load_config(other, world_size=1).notices
    assert line == "accepted, but without effect: zero_optimization.round_robin_gradients"
