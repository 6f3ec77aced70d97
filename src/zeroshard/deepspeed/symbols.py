"""DeepSpeed's enums, exceptions and constants, and placeholders for names that cannot be used.

A placeholder is a class, so that ``isinstance`` works. Calling it, or a class method of it, raises
:class:`UnsupportedError` with the reason from the table.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

from zeroshard.checkpoint.deepspeed import reader
from zeroshard.deepspeed import api_table
from zeroshard.deepspeed.api_rows import CHECKPOINT_KEYS, CONFIG_KEYS, SCHEDULE_KEYS
from zeroshard.errors import ConfigError, UnsupportedError

DeepSpeedConfigError = ConfigError
ZeroStageEnum = reader.ZeroStageEnum


class ZeRORuntimeException(Exception):
    """An exception that programs catch around calls of ZeRO."""


class OffloadDeviceEnum(str, Enum):
    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """Values for ``engine.offload_states(include=)``."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class ZeroParamType(Enum):
    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(Enum):
    """What a rank holds of a parameter: all of it, its shard, or its shard during an all-gather."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class DeepSpeedTensorOverride(Enum):
    dtype = "dtype"
    device = "device"


class fragment_address(NamedTuple):
    """The range of a fragment in a flat tensor."""

    numel: int
    start: int


# ---------------------------------------------------------------------- constants

DEEPSPEED_OPTIMIZERS = [
    *("adagrad", "adam", "adamw", "lamb", "muadam", "muadamw", "musgd", "lion", "muon")
]
_KEYS = f"{CONFIG_KEYS} {SCHEDULE_KEYS} {CHECKPOINT_KEYS}".split()
globals().update(
    {name: name.lower() for name in _KEYS},
    **{f"{name.upper()}_OPTIMIZER": name for name in DEEPSPEED_OPTIMIZERS},
    **{f"ROUTE_{route.upper()}": route for route in ("train", "eval", "predict", "encode")},
    TORCH_DISTRIBUTED_DEFAULT_PORT=29500,
    BFLOAT16="bf16",
    LR_RANGE_TEST="LRRangeTest",
    ONE_CYCLE="OneCycle",
    WARMUP_LR="WarmupLR",
    WARMUP_DECAY_LR="WarmupDecayLR",
    WARMUP_COSINE_LR="WarmupCosineLR",
    WARMUP_LOG_RATE="log",
    WARMUP_LINEAR_RATE="linear",
    FP32_WEIGHT_KEY="fp32",
    MODEL_FILE_PREFIX="mp_rank_",
    ZERO_FILE_PREFIX="zero_pp_rank_",
    BF16_ZERO_FILE_PREFIX="bf16_zero_pp_rank_",
    FP16_ZERO_FILE_PREFIX="fp16_zero_pp_rank_",
    LAYER_FILE_PREFIX="layer_",
    OPTIM_FILE_SUFFIX="_optim_states.pt",
    MODEL_FILE_SUFFIX="_model_states.pt",
    CHECKPOINT_PARALLEL_DIMS="checkpoint_parallel_dimensions",
    CHECKPOINT_PP_DEGREE="pp_degree",
    CHECKPOINT_TP_DEGREE="tp_degree",
    UNIVERSAL_CHECKPOINT_VERSION_KEY="universal_checkpoint_version",
    UNIVERSAL_CHECKPOINT_VERSION_VALUE=0.4,
)
"""Each constant is an attribute of this module. Most keys are their names in small letters."""


# ---------------------------------------------------------------------- placeholders


class _Stub(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(api_table.reason(cls.__qualname__))

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls  # stands for a class method: calling it raises


def __getattr__(name: str) -> Any:
    path = name.replace("/", ".")
    row = api_table.find(path)
    if row is None or row.verdict not in ("refused", "later"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = _Stub(path.rpartition(".")[2], (), {"__doc__": row.why, "__qualname__": path})
    globals()[name] = made
    return made
