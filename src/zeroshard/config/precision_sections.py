"""The sections of the configuration that choose dtypes."""

from __future__ import annotations

from typing import Annotated, Literal

from zeroshard.config import sections as side
from zeroshard.config.fields import (
    AUTOCAST_DTYPE,
    Amount,
    Count,
    Dtype,
    Flag,
    Natural,
    Section,
    Texts,
    TextsOrAuto,
    accept,
    honour,
    later,
)

_SAFE_MODULES = tuple(f"torch.nn.modules.{m}" for m in ("linear.Linear", *side.CONVOLUTIONS))


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
