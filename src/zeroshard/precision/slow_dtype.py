"""Warns if a run computes in a precision for which this CPU has no instructions."""

from __future__ import annotations

import functools
import logging

import torch

from zeroshard.config import Hardware
from zeroshard.precision.hardware import slowdown
from zeroshard.precision.policy import Policy

logger = logging.getLogger("zeroshard")

REMEDY = {
    "bf16": 'Write "bf16": {"enabled": "auto"}: fp32 here, bf16 where the hardware multiplies it.',
    "fp16": 'Write "fp16": {"enabled": false} here.',
    "autocast": 'Write "torch_autocast": {"enabled": false} here.',
}


def tell_if_slow(policy: Policy, hardware: Hardware) -> None:
    """Log the measured slowdown and the remedy if ``policy`` uses a dtype that is slow here.

    Logs once per process. ``hardware``: of the CPU that the run computes on. Takes at most a third of a
    second, and nothing if the dtype is not slow.
    """
    dtype = policy.autocast if policy.mode == "plain" else policy.param
    fits = {torch.bfloat16: hardware.bf16, torch.float16: hardware.fp16}
    if dtype is not None and not fits.get(dtype, True):
        _tell_once("autocast" if policy.mode == "plain" else policy.mode, dtype, hardware.because)


@functools.cache
def _tell_once(mode: str, dtype: torch.dtype, because: str) -> None:
    word = str(dtype).removeprefix("torch.")
    logger.warning(
        "%s on this CPU: a matrix product takes %.0f times as long as in fp32 (%s). %s",
        word, slowdown(dtype), because, REMEDY[mode],
    )  # fmt: skip
