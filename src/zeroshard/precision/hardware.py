"""Finds the 16-bit formats that a device multiplies in hardware; measures and reports the cost of others.

A CPU without bf16 instructions computes in bf16 all the same, in a loop 10 to 100 times slower than fp32.
"""

from __future__ import annotations

import functools
import logging
import os
import platform
import time
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from zeroshard.config.resolve import Hardware
from zeroshard.device.choice import ops_of
from zeroshard.precision.policy import Policy

logger = logging.getLogger("zeroshard")

_LIMITS = {"ONEDNN_MAX_CPU_ISA": "ALL", "DNNL_MAX_CPU_ISA": "ALL", "ATEN_CPU_CAPABILITY": ""}
"""Variables that keep torch, or its library of matrix products, from using instructions of the CPU."""
_BF16 = {"avx512_bf16": "AVX512-BF16", "amx_bf16": "AMX-BF16", "bf16": "BF16"}
_FP16 = {"avx512_fp16": "AVX512-FP16", "amx_fp16": "AMX-FP16", "asimdhp": "FP16"}
_MEASURE_S = 0.02  # the measurement ends with the first product that takes longer


def hardware_of(device: torch.device) -> Hardware:
    """What ``device`` multiplies: an accelerator is asked, a CPU is looked up. Measures nothing."""
    found = ops_of(device).multiplies_bf16()
    if found is None:
        return of_cpu(_cpu_flags(), os.environ, mkldnn=torch.backends.mkldnn.is_available())
    bf16, because = found
    return Hardware(bf16=bf16, fp16=True, because=because)


def of_cpu(flags: Collection[str], environ: Mapping[str, str], *, mkldnn: bool) -> Hardware:
    """What a CPU with these ``flags`` (from /proc/cpuinfo) multiplies, with the limits in ``environ``.

    ``mkldnn``: torch was built with the library that uses such instructions.
    """
    bf16 = next((name for flag, name in _BF16.items() if flag in flags), "")
    fp16 = any(flag in flags for flag in _FP16)
    limit = next((f"{key}={environ[key]}" for key in _LIMITS if _holds_back(key, environ)), "")
    if not mkldnn:
        because = "this build of torch multiplies bf16 without the CPU's instructions"
    elif not bf16:
        because = "this CPU has no bf16 instructions"
    elif limit:
        because = f"{limit} disables this CPU's {bf16}"
    else:
        return Hardware(bf16=True, fp16=fp16, because=f"this CPU has {bf16}")
    return Hardware(bf16=False, fp16=fp16 and mkldnn and not limit, because=because)


def _holds_back(key: str, environ: Mapping[str, str]) -> bool:
    """Whether this variable names an instruction set below bf16."""
    word = environ.get(key, "").upper()
    if key == "ATEN_CPU_CAPABILITY":
        return word in ("DEFAULT", "AVX2")
    allowed = ("", "ALL", "DEFAULT", "AVX512_CORE_BF16", "AVX512_CORE_FP16")
    return word not in allowed and "AMX" not in word


def _cpu_flags() -> frozenset[str]:
    """The processor's instruction sets. Where the system lists none, those that torch can detect."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    for line in text.splitlines():
        name, _, words = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(words.split())
    if platform.machine().lower() not in ("amd64", "x86_64"):
        return frozenset()  # Apple processors have bf16, but torch does not use it
    found = {"avx512_bf16": torch.cpu._is_avx512_bf16_supported()}
    return frozenset(flag for flag, is_there in found.items() if is_there)


def slowdown(dtype: torch.dtype) -> float:
    """By which factor a matrix product on this CPU takes longer in ``dtype`` than in fp32.

    Square matrices double in size until one product takes 20 ms. Takes at most a third of a second.
    """
    factor = 1.0
    for size in (64, 128, 256, 512):
        wide = torch.ones(size, size)
        narrow = wide.to(dtype)
        narrow_s = _product_s(narrow)
        factor = narrow_s / min(_product_s(wide) for _ in range(3))
        if narrow_s > _MEASURE_S:
            break
    return factor


def _product_s(x: torch.Tensor) -> float:
    """Seconds of two products: one as in a linear layer's forward and one as in its backward."""
    begin_s = time.perf_counter()
    torch.mm(x, x.t())
    torch.mm(x, x)
    return time.perf_counter() - begin_s


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
