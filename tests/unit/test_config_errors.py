"""Every wrong configuration raises one error with all mistakes, always in the same text."""

from __future__ import annotations

import copy
from enum import Enum, IntEnum
from typing import Any

import pytest
from config_cases import CASES, ONE, Case

from zeroshard.config import load_config
from zeroshard.errors import ConfigError

pytestmark = pytest.mark.smoke


def message_of(config: Any, **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(config, **{"world_size": 1, **kwargs})
    return str(caught.value)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_wrong_config_is_answered_with_its_message(case: Case) -> None:
    before = copy.deepcopy(case.config)
    assert message_of(case.config, world_size=case.world_size) == case.message
    assert case.config == before  # the caller's dict is left alone


def test_case_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


def test_the_order_of_keys_does_not_change_the_message() -> None:
    config = {"zero_optimization": {"stage": 9}, "fp16": {"enabled": "no"}, "lr": 1}
    assert message_of(config) == message_of(dict(reversed(config.items())))


def test_each_problem_stands_on_one_line() -> None:
    wrong = {**ONE, "log_level": "a\nb", "uneven": {"a": "b\nc"}, "zero\noptimization": 1}
    assert len(message_of(wrong).splitlines()) == 1 + 3


def test_a_long_value_is_cut() -> None:
    assert len(message_of({**ONE, "uneven": "x" * 5000})) < 200


def test_the_world_hint_follows_a_batch_error() -> None:
    hint = "world size is 1 because torch.distributed is not initialised, but WORLD_SIZE=8 is set"
    text = message_of({"train_batch_size": 3, "gradient_accumulation_steps": 2}, world_hint=hint)
    assert text.endswith(f"gradient_accumulation_steps 2 x world size 1: make it 2 or 4 ({hint})")


def test_the_world_hint_stays_out_of_other_errors() -> None:
    assert "WORLD_SIZE" not in message_of({**ONE, "lr": 1}, world_hint="WORLD_SIZE=8 is set")


def test_a_file_is_named_in_the_heading(tmp_path: Any) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 8, "lr": 1}')
    assert message_of(path).splitlines()[0] == f"1 problem in {path}:"


def test_unknown_keys_can_be_turned_into_notices() -> None:
    loaded = load_config({**ONE, "unknown_keys": "warn", "zero": {"stage": 3}}, world_size=1)
    assert any(line.startswith("unknown keys, ignored: zero") for line in loaded.notices)


def test_a_name_with_a_dot_is_told_where_it_belongs() -> None:
    text = message_of({**ONE, "zero_optimization.stage": 3})
    assert 'Write it inside "zero_optimization"' in text
    misspelt = message_of({**ONE, "zero_optimisation.stage": 3})
    assert 'zero_optimisation.stage: no such key. Write it inside "zero_optimization"' in misspelt


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"<script>alert(1.5)</script>": 1}, "<script>alert(1.5)</script>: no such key. docs/config.md"),
        ({"steps_per_print.x": 1}, 'steps_per_print.x: no such key. Did you mean "steps_per_print"?'),
        ({"csv_monitor": {"<b>.</b>": 1}}, "csv_monitor.<b>.</b>: no such key. csv_monitor knows"),
    ],
)  # fmt: skip
def test_a_dot_in_a_name_that_is_no_path_changes_no_advice(keys, line) -> None:
    text = message_of({**ONE, **keys})
    assert line in text and "inside" not in text


WILD = {
    "zero_optimization.reduce_bucket_size": 4096,
    "_comment": "for the big machine",
    "log": {"path": "x"},
    "_optimizer": {"type": "AdamW"},
    "tensor_parallel_size": 1,
    "aio": {"block": 1},
    "timers": {"throughput": {"every": 2}},
    "activation_checkpointing": {"enabled": True},
}


def test_where_deepspeed_ignores_unknown_keys_its_programs_get_one_notice() -> None:
    loaded = load_config({**ONE, **WILD}, world_size=1, as_deepspeed=True)
    (line,) = [line for line in loaded.notices if "unknown" in line]
    assert (
        "zero_optimization.reduce_bucket_size, _comment, log, _optimizer (" in line
        and "tensor_parallel_size" in line
    )
    assert "aio.block" in line and "timers.throughput.every" in line


@pytest.mark.parametrize(
    ("typo", "meant", "value"),
    [
        ("zero_optimisation", "zero_optimization", {"stage": 3}),
        ("Zero-Optimization", "zero_optimization", {"stage": 3}),
        ("bf_16", "bf16", {"enabled": True}),
        ("FP16", "fp16", {"enabled": True}),
        ("optimzer", "optimizer", {"type": "AdamW"}),
        ("schedular", "scheduler", {"type": "WarmupLR"}),
        ("gradient_accumulation_step", "gradient_accumulation_steps", 8),
        ("gradient_clip", "gradient_clipping", 0.5),
    ],
)
def test_a_misspelt_key_of_the_top_level_is_an_error_in_deepspeeds_name_too(
    typo: str, meant: str, value: Any
) -> None:
    text = message_of({**ONE, typo: value}, as_deepspeed=True)
    assert f'{typo}: no such key. Did you mean "{meant}"?' in text
    load_config({**ONE, typo: value, "unknown_keys": "warn"}, world_size=1, as_deepspeed=True)


@pytest.mark.parametrize("parked", ["_optimizer", "//optimizer", "optimizer2"])
def test_a_section_put_aside_is_a_notice_to_programs_of_deepspeed(parked: str) -> None:
    config = {**ONE, "optimizer": {"type": "Adam"}, parked: {"type": "AdamW"}}
    loaded = load_config(config, world_size=1, as_deepspeed=True)
    assert any(f"ignored: {parked} (did you mean" in line for line in loaded.notices)


def test_who_chose_zeroshard_is_told_of_each_unknown_key() -> None:
    text = message_of({**ONE, **WILD})
    assert text.startswith("8 problems")


def test_a_configuration_that_asks_for_errors_gets_them_in_deepspeeds_name_too() -> None:
    assert "log: no such key" in message_of(
        {**ONE, "log": 1, "unknown_keys": "error"}, as_deepspeed=True
    )


@pytest.mark.parametrize(
    "section", ["zero_optimization", "bf16", "fp16", "comms_logger", "tensorboard"]
)
def test_where_deepspeed_forbids_unknown_keys_they_stay_errors(section: str) -> None:
    assert "frobnicate: no such key" in message_of(
        {**ONE, section: {"frobnicate": 1}}, as_deepspeed=True
    )


def test_beside_type_and_params_deepspeed_ignores_keys_but_no_argument_is_lost() -> None:
    parts = {
        "optimizer": {"type": "AdamW", "legacy": 1},
        "scheduler": {"type": "WarmupLR", "by": 2},
    }
    loaded = load_config({**ONE, **parts}, world_size=1, as_deepspeed=True)
    assert "unknown keys, ignored: optimizer.legacy, scheduler.by" in loaded.notices
    for name in ("lr", "learning_rate", "parms", "Params"):
        lost = {**ONE, "optimizer": {"type": "AdamW", name: {}}}
        assert f"optimizer.{name}: no such key" in message_of(lost, as_deepspeed=True)


def test_a_member_of_an_enum_is_its_value() -> None:
    class Device(str, Enum):
        cpu = "cpu"

    class Stage(IntEnum):
        gradients = 2

    zero = {"stage": Stage.gradients, "offload_optimizer": {"device": Device.cpu}}
    config = load_config({**ONE, "zero_optimization": zero}, world_size=1).config.zero_optimization
    assert config.stage == 2 and config.offload_optimizer is not None
    assert config.offload_optimizer.device == "cpu"


def test_refused_keys_stay_errors_when_unknown_keys_only_warn() -> None:
    assert "amp: not supported" in message_of(
        {**ONE, "unknown_keys": "warn", "amp": {"enabled": True}}
    )


def test_a_key_that_is_gone_says_so_and_what_there_is_instead() -> None:
    text = message_of({**ONE, "trust": {"simulate_changes_s": 90}})
    assert "trust.simulate_changes_s: not supported" in text
    assert "its error has the command of zeroshard plan" in text
    load_config({**ONE, "trust": {"simulate_changes_s": 0}}, world_size=1)  # it was switched off


def test_config_given_twice_is_an_error() -> None:
    text = (
        "the configuration is given twice: as config= and as args.deepspeed_config; remove one of "
        "them"
    )
    assert message_of({}, args_config={}) == text


def test_an_empty_world_is_an_error() -> None:
    assert message_of(ONE, world_size=0) == "world_size must be at least 1, not 0"
