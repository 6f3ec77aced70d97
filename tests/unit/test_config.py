"""A valid configuration is resolved to the right values, each with its origin."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from zeroshard.config import KEYS, LoadedConfig, load_config
from zeroshard.errors import ConfigError

pytestmark = pytest.mark.smoke

ONE: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}


def load(config: dict[str, Any], **kwargs: Any) -> LoadedConfig:
    return load_config(config, **{"world_size": 1, **kwargs})


def value(config: dict[str, Any], path: str, **kwargs: Any) -> Any:
    found: Any = load({**ONE, **config}, **kwargs).config
    for name in path.split("."):
        found = found[name] if isinstance(found, dict) else getattr(found, name)
    return found


def mentions(loaded: LoadedConfig, *words: str) -> list[str]:
    return [line for line in loaded.notices if all(word in line for word in words)]


# Batch sizes


@pytest.mark.parametrize(
    ("given", "world_size", "solved"),
    [
        ({"train_batch_size": 16}, 2, (16, 8, 1)),
        ({"train_micro_batch_size_per_gpu": 4}, 2, (8, 4, 1)),
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}, 2, (24, 4, 3)),
        ({"train_batch_size": 24, "gradient_accumulation_steps": 3}, 2, (24, 4, 3)),
        ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4}, 2, (24, 4, 3)),
        (
            {
                "train_batch_size": 24,
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": 3,
            },
            2,
            (24, 4, 3),
        ),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 4}, 3, (12, 4, 1)),
        ({"train_batch_size": 6.0, "gradient_accumulation_steps": "auto"}, 3, (6, 2, 1)),
    ],
)
def test_batch_sizes_follow_from_what_is_given(
    given: dict[str, Any], world_size: int, solved: tuple[int, int, int]
) -> None:
    config = load(given, world_size=world_size).config
    assert solved == (
        config.train_batch_size,
        config.train_micro_batch_size_per_gpu,
        config.gradient_accumulation_steps,
    )


def test_batch_sizes_may_be_missing_where_nothing_is_trained() -> None:
    config = load({"train_batch_size": "auto"}, world_size=4, for_training=False).config
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == (4, 1)


def test_an_unresolved_schedule_is_left_alone_where_nothing_is_trained() -> None:
    scheduler = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}
    assert load({"scheduler": scheduler}, for_training=False).config.scheduler is None


def test_no_source_is_an_empty_configuration() -> None:
    assert load_config(None, world_size=1, arguments={"train_batch_size": 2}).config == (
        load({"train_batch_size": 2}).config
    )


# Values


@pytest.mark.parametrize(
    ("word", "dtype"),
    [
        ("fp32", "float32"),
        ("float", "float32"),
        ("torch.float32", "float32"),
        ("half", "float16"),
        ("FP16", "float16"),
        ("bf16", "bfloat16"),
        ("torch.bfloat16", "bfloat16"),
        ("double", "float64"),
    ],
)
def test_dtype_words_are_normalised(word: str, dtype: str) -> None:
    assert value({"communication_data_type": word}, "communication_data_type") == dtype


def test_floats_are_taken_for_whole_numbers() -> None:
    size = value(
        {"zero_optimization": {"reduce_bucket_size": 5e8}}, "zero_optimization.reduce_bucket_size"
    )
    assert (size, type(size)) == (500_000_000, int)


@pytest.mark.parametrize(
    ("section", "path", "number"),
    [
        ({"steps_per_print": "10"}, "steps_per_print", 10),
        ({"zero_optimization": {"stage": "3"}}, "zero_optimization.stage", 3),
        (
            {"zero_optimization": {"reduce_bucket_size": "5e8"}},
            "zero_optimization.reduce_bucket_size",
            500_000_000,
        ),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "5e-5"}}}, "optimizer.params.lr", 5e-5),
        ({"optimizer": {"type": "RMSprop", "params": {"lr": "1e-4"}}}, "optimizer.params.lr", 1e-4),
    ],
)
def test_strings_that_are_numbers_are_read_with_a_notice(
    section: dict[str, Any], path: str, number: float
) -> None:
    assert value(section, path) == number
    assert len(mentions(load({**ONE, **section}), path, "was read as a number")) == 1


@pytest.mark.parametrize("steps", [math.inf, "inf"])
def test_steps_per_print_may_be_infinite(steps: Any) -> None:
    assert value({"steps_per_print": steps}, "steps_per_print") == math.inf


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_overlap_is_on_by_default(stage: int) -> None:
    zero = {"zero_optimization": {"stage": stage}}
    assert value(zero, "zero_optimization.overlap_comm") is True


def test_overlap_can_be_switched_off_at_stage_3() -> None:
    zero = {"zero_optimization": {"stage": 3, "overlap_comm": False}}
    assert value(zero, "zero_optimization.overlap_comm") is False


def test_clipping_is_off_when_no_norm_is_computed() -> None:
    assert value({"zero_optimization": {"compute_grad_norm": False}}, "gradient_clipping") == 0


def test_words_of_our_own_keys() -> None:
    config = load(
        {
            **ONE,
            "units": ["model.layers.*"],
            "keep_fp32": ["*.router.*"],
            "conditional_modules": ["vision.*"],
            "uneven": "join",
            "transport": "stock",
            "trust": {"first_report_s": "auto", "sections": {"save": 60}},
        }
    ).config
    assert (config.units, config.keep_fp32) == (("model.layers.*",), ("*.router.*",))
    assert (config.conditional_modules, config.uneven) == (("vision.*",), "join")
    assert (config.trust.first_report_s, config.trust.sections.save) == (None, 60)


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        load(ONE).config.train_batch_size = 3  # type: ignore[misc]


# Old spellings


@pytest.mark.parametrize(
    ("section", "path", "expected"),
    [
        ({"zero_optimization": True}, "zero_optimization.stage", 1),
        ({"bfloat16": {"enabled": True}}, "bf16.enabled", True),
        (
            {"zero_optimization": {"stage3_gather_fp16_weights_on_model_save": True}},
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
            True,
        ),
        (
            {"zero_optimization": {"stage": 1, "cpu_offload": True}},
            "zero_optimization.offload_optimizer.device",
            "cpu",
        ),
        (
            {"zero_optimization": {"stage": 3, "cpu_offload_param": True}},
            "zero_optimization.offload_param.device",
            "cpu",
        ),
    ],
)
def test_old_spellings_are_read_with_a_notice(
    section: dict[str, Any], path: str, expected: Any
) -> None:
    assert value(section, path) == expected
    assert mentions(load({**ONE, **section}), "read as")


def test_zero_optimization_false_is_stage_0() -> None:
    assert value({"zero_optimization": False}, "zero_optimization.stage") == 0


# Features that are switched off


@pytest.mark.parametrize(
    "section",
    [
        {"amp": {"enabled": False, "opt_level": "O1"}},
        {"elasticity": {"enabled": False, "max_train_batch_size": 64}},
        {
            "compression_training": {
                "weight_quantization": {"shared_parameters": {"enabled": False}}
            }
        },
        {"sparse_gradients": False},
        {"eigenvalue": None},
        {"nebula": {}},
        {"data_efficiency": "auto"},
        {
            "zero_optimization": {
                "mics_shard_size": 0,
                "zenflow": None,
                "zero_hpz_partition_size": 1,
            }
        },
        {"zero_optimization": {"mics_shard_size": -1}},
        {"zero_optimization": {"zero_hpz_partition_size": 0, "zero_quantized_weights": False}},
        {"zero_optimization": {"offload_param": {"device": "none", "nvme_path": "none"}}},
        {"zero_optimization": {"stage": 3, "offload_param": None, "cpu_offload": False}},
        {"zero_optimization": {"offload_optimizer": {"device": None, "super_offload": False}}},
        {"compile": {"deepcompile": False, "offload_activation": False, "double_buffer": True}},
        {"tensor_parallel": {"autotp_size": 1, "tp": {"tp_size": 1}}},
        {"sequence_parallel_size": 1, "data_parallel_size": 1, "expert_parallel": {}},
        {"trackio": {"enabled": False, "project": "x"}},
        {"activation_checkpointing": {"number_checkpoints": False, "cpu_checkpointing": False}},
        {"fp16": {"enabled": False}, "bf16": {"enabled": False}},
        {"fp16": None, "optimizer": None, "scheduler": {}, "aio": False, "timers": None},
        {"optimizer": {"type": "AdamW", "params": {"max_grad_norm": None}}},
    ],
    ids=lambda section: next(iter(section)),
)
def test_a_feature_that_is_off_is_accepted_in_silence(section: dict[str, Any]) -> None:
    notices = load({**ONE, "gradient_clipping": 1.0, **section}).notices
    assert notices == ()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_offloaded_parameters_below_stage_3_only_give_a_notice(stage: int) -> None:
    zero = {"stage": stage, "offload_param": {"device": "nvme"}}
    loaded = load({**ONE, "gradient_clipping": 1.0, "zero_optimization": zero})
    assert loaded.notices == (
        f"zero_optimization.offload_param: no effect at stage {stage}, as in DeepSpeed: "
        "parameters are sharded at stage 3 only",
    )


# Offloading


@pytest.mark.parametrize(
    ("stage", "section"),
    [
        (1, {"offload_optimizer": {"device": "cpu", "ratio": 0.3, "pin_memory": False}}),
        (2, {"offload_optimizer": {"device": "nvme", "nvme_path": "/d", "max_in_cpu": 1e6}}),
        (3, {"offload_optimizer": {"device": "CPU", "delayed_update": True}}),
        (3, {"offload_param": {"device": "cpu", "max_in_cpu": 1e9}}),
        (3, {"offload_param": {"device": "nvme", "nvme_path": Path("/d")}}),
    ],
)
def test_offload_settings_that_act_are_accepted_in_silence(
    stage: int, section: dict[str, Any]
) -> None:
    zero = {"stage": stage, **section}
    assert load({**ONE, "gradient_clipping": 1.0, "zero_optimization": zero}).notices == ()


def test_offload_settings_arrive_as_written() -> None:
    optimizer = {
        "device": "nvme",
        "nvme_path": "/d",
        "pin_memory": False,
        "ratio": "0.25",
        "max_in_cpu": 5e8,
    }
    zero = {"stage": 1, "offload_optimizer": optimizer}
    section = load({**ONE, "zero_optimization": zero}).config.zero_optimization.offload_optimizer
    assert section is not None
    assert (section.device, section.nvme_path, section.pin_memory) == ("nvme", "/d", False)
    assert (section.ratio, section.max_in_cpu) == (0.25, 500_000_000)


@pytest.mark.parametrize("name", ["offload_optimizer", "offload_param"])
def test_everything_leaves_for_the_disk_unless_asked(name: str) -> None:
    path = f"zero_optimization.{name}.max_in_cpu"
    zero = {"stage": 3, name: {"device": "nvme", "nvme_path": "/d"}}
    assert value({"zero_optimization": zero}, path) == 0


def test_the_whole_optimizer_state_leaves_unless_a_ratio_is_given() -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    assert value({"zero_optimization": zero}, "zero_optimization.offload_optimizer.ratio") == 1.0


@pytest.mark.parametrize("word", [None, "none", "None", "null", "", "auto"])
def test_words_for_no_path(word: str | None) -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "nvme_path": word}}
    path = "zero_optimization.offload_optimizer.nvme_path"
    assert value({"zero_optimization": zero}, path) is None


def test_tuning_of_swap_buffers_is_accepted_with_a_notice() -> None:
    inner = {"device": "nvme", "nvme_path": "/d", "buffer_count": 9}
    zero = {
        "stage": 3,
        "sub_group_size": 1e8,
        "offload_optimizer": {**inner, "pipeline_read": True, "pipeline_write": True},
        "offload_param": {**inner, "buffer_size": 1e7},
    }
    names = [
        *("offload_optimizer.buffer_count", "offload_param.buffer_count"),
        *("offload_param.buffer_size", "sub_group_size"),
    ]
    loaded = load({**ONE, "gradient_clipping": 1.0, "zero_optimization": zero})
    listed = ", ".join(f"zero_optimization.{name}" for name in names)
    assert loaded.notices == (f"accepted, but without effect: {listed}",)


@pytest.mark.parametrize(
    "zero",
    [
        {"stage": "auto", "offload_optimizer": {"device": "cpu"}},
        {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "auto"}},
    ],
)
def test_what_is_still_auto_is_not_judged_before_training(zero: dict[str, Any]) -> None:
    load({"zero_optimization": zero}, for_training=False)
    with pytest.raises(ConfigError, match=r"offload_|zero_optimization.stage: \"auto\" is left"):
        load({**ONE, "zero_optimization": zero})


def test_the_page_says_that_a_delayed_update_changes_the_algorithm() -> None:
    doc = KEYS["zero_optimization.offload_optimizer.delayed_update"].doc
    assert "step t computes with the updates up to t-2. This changes the algorithm" in doc


# Notices


def test_accepted_keys_share_one_line() -> None:
    section = {
        "zero_optimization": {"allgather_bucket_size": 2e8, "contiguous_gradients": True},
        "aio": {"thread_count": 2},
        "optimizer": {"type": "AdamW", "params": {"foreach": True}},
    }
    assert mentions(load({**ONE, **section}), "without effect") == [
        "accepted, but without effect: aio.thread_count, optimizer.params.foreach, "
        "zero_optimization.allgather_bucket_size"
    ]


def test_defaults_written_out_give_no_notice() -> None:
    section = {"zero_optimization": {"allgather_bucket_size": 5e8, "reduce_scatter": True}}
    assert not mentions(load({**ONE, **section}), "no effect")


def test_details_of_a_feature_that_is_off_give_no_notice() -> None:
    section = {"flops_profiler": {"enabled": False, "profile_step": 5}}
    assert not mentions(load({**ONE, **section}), "no effect")


def test_keys_of_calls_that_are_not_there_yet_are_kept_with_a_notice() -> None:
    section = {"zero_optimization": {"load_from_fp32_weights": False}}
    assert mentions(load({**ONE, **section}), "not implemented yet", "load_from_fp32_weights")


def test_saving_whole_weights_needs_no_key() -> None:
    section = {"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": True}}
    assert not mentions(load({**ONE, **section}), "no effect", "16bit_weights_on_model_save")


def test_default_clipping_is_announced() -> None:
    loaded = load(ONE)
    assert loaded.config.gradient_clipping == 1.0
    assert len(mentions(loaded, "gradient_clipping is not given", "1.0")) == 1


@pytest.mark.parametrize("clipping", [0, 1.0])
def test_chosen_clipping_is_not_announced(clipping: float) -> None:
    assert not mentions(load({**ONE, "gradient_clipping": clipping}), "gradient_clipping")


@pytest.mark.parametrize(
    ("kind", "params", "announced"),
    [
        ("Adam", {}, 1),
        ("adam", {}, 1),
        ("Adam", {"adam_w_mode": False}, 0),
        ("AdamW", {}, 0),
    ],
)
def test_adam_is_announced_as_adamw(kind: str, params: dict[str, Any], announced: int) -> None:
    optimizer = {"optimizer": {"type": kind, "params": params}}
    assert len(mentions(load({**ONE, **optimizer}), "Adam is AdamW")) == announced


def test_a_default_schedule_that_replaces_the_learning_rate_is_announced() -> None:
    section = {
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-7}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10}},
    }
    assert mentions(load({**ONE, **section}), "warmup_max_lr", "0.001 replaces", "5e-07")


# Optimizers and schedules


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad", "Lion", "Muon", "SGD"])
def test_optimizer_names_ignore_case(name: str) -> None:
    assert value({"optimizer": {"type": name.lower()}}, "optimizer.type") == name


def test_optimizer_params_hold_only_what_was_given() -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-4, "eps": "auto", "set_grad_none": True}}
    assert value({"optimizer": optimizer}, "optimizer.params") == {"lr": 1e-4}


def test_arguments_of_a_torch_optimizer_are_passed_on() -> None:
    params = {"lr": 1e-3, "alpha": 0.9, "centered": True}
    assert value({"optimizer": {"type": "RMSprop", "params": params}}, "optimizer.params") == params


def test_a_torch_class_that_we_have_not_heard_of_is_left_to_torch() -> None:
    assert value({"optimizer": {"type": "Zyxwv"}}, "optimizer.type") == "Zyxwv"


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("WarmupLR", {"warmup_num_steps": 0, "warmup_max_lr": [1e-3, 1e-4]}),
        ("WarmupDecayLR", {"total_num_steps": 100}),
        ("WarmupCosineLR", {"total_num_steps": 100, "warmup_num_steps": 10}),
        ("LRRangeTest", {"lr_range_test_staircase": True}),
        ("OneCycle", {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "last_batch_iteration": -1}),
        ("CosineAnnealingLR", {"T_max": 100}),
    ],
)
def test_schedules_keep_their_arguments(kind: str, params: dict[str, Any]) -> None:
    read = value({"scheduler": {"type": kind, "params": params}}, "scheduler.params")
    assert {key: list(v) if isinstance(v, tuple) else v for key, v in read.items()} == params


# "auto"


def test_auto_sizes_follow_the_width_of_the_model() -> None:
    names = (
        "reduce_bucket_size",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
    )
    zero = load(
        {**ONE, "zero_optimization": dict.fromkeys(names, "auto")}, hidden_size=100
    ).config.zero_optimization
    assert [getattr(zero, name) for name in names] == [10_000, 9_000, 1_000]


def test_auto_sizes_have_their_default_when_the_width_is_unknown() -> None:
    zero = {"zero_optimization": {"reduce_bucket_size": "auto"}}
    assert value(zero, "zero_optimization.reduce_bucket_size") == 500_000_000


def test_auto_precision_is_off() -> None:
    section = {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}
    config = load({**ONE, **section}).config
    assert (config.fp16.enabled, config.bf16.enabled) == (False, False)


def test_auto_top_learning_rate_is_the_optimizers() -> None:
    section = {
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-7}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": 10, "warmup_max_lr": "auto"},
        },
    }
    assert value(section, "scheduler.params.warmup_max_lr") == 5e-7


def left_auto(**sections: Any) -> list[str]:
    return [line for line in load({**ONE, **sections}).notices if line.startswith('"auto" was')]


def test_an_auto_that_no_library_replaced_is_named_where_a_default_may_surprise() -> None:
    adamw = {"type": "AdamW", "params": {"eps": "auto", "weight_decay": "auto"}}
    assert left_auto(optimizer=adamw, fp16={"enabled": "auto"}, gradient_clipping="auto") == [
        '"auto" was not replaced by a value, so defaults are used: fp16.enabled, '
        "gradient_clipping, optimizer.params.weight_decay"
    ]


def test_an_auto_mode_beside_one_that_is_on_surprises_nobody() -> None:
    assert left_auto(fp16={"enabled": "auto"}, bf16={"enabled": True}) == []


def test_auto_sizes_and_batches_surprise_nobody() -> None:
    assert left_auto(train_batch_size="auto", zero_optimization={"sub_group_size": "auto"}) == []


def test_the_warm_up_ends_at_the_rate_of_a_programs_own_optimizer() -> None:
    params = {"total_num_steps": 10, "warmup_max_lr": "auto"}
    scheduler = {"type": "WarmupDecayLR", "params": params}
    config = load({**ONE, "scheduler": scheduler}, replaced=["optimizer"]).config
    assert config.scheduler.params["warmup_max_lr"] is None


# Origins of values


def test_every_value_has_an_origin(tmp_path: Any) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        '{"train_batch_size": 8, "gradient_accumulation_steps": "auto",'
        ' "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},'
        ' "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}'
    )
    origins = load_config(path, world_size=2, arguments={"bf16.enabled": True}).origins
    file = f"file {path}"
    expected = {
        "train_batch_size": file,
        "train_micro_batch_size_per_gpu": "derived",
        "gradient_accumulation_steps": "auto",
        "zero_optimization.stage": file,
        "zero_optimization.reduce_bucket_size": "auto",
        "optimizer.params.lr": file,
        "bf16.enabled": "argument",
        "fp16.enabled": "default",
    }
    assert {key: origins[key] for key in expected} == expected


def test_an_argument_wins_over_the_file_and_says_so() -> None:
    loaded = load({"train_batch_size": 8}, arguments={"train_batch_size": 16, "uneven": None})
    assert loaded.config.train_batch_size == 16
    assert mentions(loaded, "train_batch_size: the argument 16 replaces 8")


def test_an_argument_may_be_a_whole_section() -> None:
    loaded = load(ONE, arguments={"optimizer": {"type": "SGD", "params": {"lr": 1.0}}})
    assert loaded.origins["optimizer.params.lr"] == "argument"


def test_an_argument_fills_auto_in_silence() -> None:
    loaded = load({"train_batch_size": "auto"}, arguments={"train_batch_size": 16})
    assert not mentions(loaded, "replaces")


def test_the_table_shows_what_was_chosen() -> None:
    rows = [line.split() for line in load({"train_batch_size": 8}).table().splitlines()]
    assert ["train_batch_size", "8", "config"] in rows
    assert ["gradient_accumulation_steps", "1", "derived"] in rows
    assert ["zero_optimization.stage", "0", "default"] in rows
    assert not any(row[0] == "fp16.enabled" for row in rows)


def test_the_table_can_show_every_key() -> None:
    table = load(ONE).table(every_key=True)
    assert "fp16.enabled" in table
    assert "other keys" not in table


def test_the_table_hides_secrets() -> None:
    table = load({**ONE, "comet": {"enabled": True, "api_key": "s3cret"}}).table()
    assert "comet.api_key" in table
    assert "s3cret" not in table


def test_equal_configurations_have_one_fingerprint() -> None:
    one = load({"train_batch_size": 8, "zero_optimization": {"stage": 3}})
    same = load({"zero_optimization": {"stage": "3"}, "train_micro_batch_size_per_gpu": 8.0})
    assert one.fingerprint() == same.fingerprint()


def test_ranks_may_differ_in_what_only_watches() -> None:
    one = load({**ONE, "tensorboard": {"enabled": True}, "steps_per_print": 10})
    assert one.fingerprint() == load(ONE).fingerprint()


def test_agreed_values_are_named_by_their_key() -> None:
    agreed = load({**ONE, "zero_optimization": {"stage": 2}}).agreed()
    assert agreed["zero_optimization.stage"] == "2"


@pytest.mark.parametrize(
    "other",
    [{"train_batch_size": 16}, {"train_batch_size": 8, "bf16": {"enabled": True}}],
)
def test_different_configurations_have_different_fingerprints(other: dict[str, Any]) -> None:
    assert load({"train_batch_size": 8}).fingerprint() != load(other).fingerprint()
