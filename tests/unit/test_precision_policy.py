"""The dtypes that a configuration gives to each parameter."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import bfloat16, float16, float32, float64, nn

from zeroshard.precision.policy import DtypeRow, Policy, policy_from


def config(**keys: object) -> SimpleNamespace:
    """A resolved configuration with dotted keys changed."""
    values = {
        "fp16": {"enabled": False},
        "bf16": {
            "enabled": False,
            "bf16_master_weights_and_grads": False,
            "bf16_optimizer_states": False,
        },
        "data_types": {"grad_accum_dtype": None, "param_dtype": None, "buffer_dtype": None},
        "torch_autocast": {
            "enabled": False,
            "dtype": None,
            "lower_precision_safe_modules": ("torch.nn.modules.linear.Linear",),
        },
        "communication_data_type": None,
        "keep_fp32": (),
    }
    for key, value in keys.items():
        section, _, name = key.partition("__")
        if name:
            values[section][name] = value
        else:
            values[section] = value
    return SimpleNamespace(
        **{k: SimpleNamespace(**v) if isinstance(v, dict) else v for k, v in values.items()}
    )


BF16 = {"bf16__enabled": True}
FP16 = {"fp16__enabled": True}


@pytest.mark.parametrize("dtype", [float32, float64, bfloat16])
def test_a_plain_run_keeps_each_parameters_own_dtype(dtype):
    row = policy_from(config()).row_for("w", dtype)
    assert row == DtypeRow(dtype, dtype, dtype, dtype, dtype)
    assert not row.has_master


@pytest.mark.parametrize(
    ("keys", "row"),
    [
        (BF16, DtypeRow(bfloat16, float32, bfloat16, float32, float32)),
        (FP16, DtypeRow(float16, float32, float16, float32, float32)),
        (
            {**BF16, "communication_data_type": "float32"},
            DtypeRow(bfloat16, float32, float32, float32, float32),
        ),
        (
            {**BF16, "data_types__grad_accum_dtype": "bfloat16"},
            DtypeRow(bfloat16, bfloat16, bfloat16, float32, float32),
        ),
        (
            {**BF16, "bf16__bf16_master_weights_and_grads": True},
            DtypeRow(bfloat16, bfloat16, bfloat16, bfloat16, float32),
        ),
        (
            {
                **BF16,
                "bf16__bf16_master_weights_and_grads": True,
                "bf16__bf16_optimizer_states": True,
            },
            DtypeRow(bfloat16, bfloat16, bfloat16, bfloat16, bfloat16),
        ),
    ],
)
@pytest.mark.parametrize("dtype", [float32, float64, bfloat16])
def test_a_16_bit_mode_does_not_ask_how_the_parameter_came(keys, row, dtype):
    assert policy_from(config(**keys)).row_for("w", dtype) == row


def test_a_plain_run_may_send_and_sum_in_other_dtypes():
    policy = policy_from(
        config(communication_data_type="bfloat16", data_types__grad_accum_dtype="float64")
    )
    assert policy.row_for("w", float32) == DtypeRow(float32, float64, bfloat16, float32, float32)


@pytest.mark.parametrize("mode", [BF16, FP16])
@pytest.mark.parametrize("dtype", [float32, bfloat16])
def test_kept_parameters_are_float32_throughout(mode, dtype):
    policy = policy_from(
        config(**mode, keep_fp32=("*.router.*",), communication_data_type="bfloat16")
    )
    row = policy.row_for("layers.0.router.weight", dtype)
    assert row == DtypeRow(float32, float32, float32, float32, float32)
    assert policy.row_for("layers.0.mlp.weight", dtype).param != float32


def test_a_plain_run_does_not_narrow_kept_parameters():
    policy = policy_from(config(keep_fp32=("*",)))
    assert policy.row_for("w", float64).param == float64


def test_integer_parameters_are_left_alone():
    row = policy_from(config(**BF16)).row_for("quantized", torch.uint8)
    assert row.param == torch.uint8
    assert not row.has_master


def test_autocast_sends_gradients_of_the_listed_modules_in_its_dtype():
    policy = policy_from(config(torch_autocast__enabled=True, torch_autocast__dtype="float16"))
    assert policy.row_for("w", float32, nn.Linear(1, 1)).reduce == float16
    assert policy.row_for("w", float32, nn.LayerNorm(1)).reduce == float32
    assert policy.row_for("w", float32).reduce == float32
    assert policy.row_for("w", float32, nn.Linear(1, 1)).param == float32


def test_a_communication_dtype_wins_over_autocast():
    policy = policy_from(config(torch_autocast__enabled=True, communication_data_type="float32"))
    assert policy.row_for("w", float32, nn.Linear(1, 1)).reduce == float32


def test_autocast_without_a_dtype_means_bfloat16():
    assert policy_from(config(torch_autocast__enabled=True)).autocast == bfloat16


def test_buffers_are_touched_only_when_asked():
    assert policy_from(config(**BF16)).buffer is None
    assert policy_from(config(data_types__buffer_dtype="float16")).buffer == float16


def test_the_table_names_every_kind_of_number():
    policy = policy_from(config(**BF16, keep_fp32=("*.router.*",)))
    assert policy.table().splitlines() == [
        "precision: bf16",
        "parameters             bfloat16",
        "gradient accumulation  float32",
        "reduction              bfloat16",
        "master                 float32",
        "optimizer state        float32",
        "buffers                untouched",
        "float32 throughout     *.router.*",
    ]


def test_the_table_says_when_there_is_no_master():
    keys = {**BF16, "bf16__bf16_master_weights_and_grads": True}
    table = policy_from(config(**keys)).table()
    assert "master                 none: bfloat16 parameters are updated in place" in table
    assert "master                 none: parameters are updated in place" in Policy().table()
