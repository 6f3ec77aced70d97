"""Finds the 16-bit formats that a device multiplies in hardware, and measures the cost of others.

A CPU without bf16 instructions computes in bf16 all the same, in a loop 10 to 100 times slower than fp32.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from zeroshard.config.resolve import Hardware

_LIMITS = {"ONEDNN_MAX_CPU_ISA": "ALL", "DNNL_MAX_CPU_ISA": "ALL", "ATEN_CPU_CAPABILITY": ""}
"""Variables that keep torch, or its library of matrix products, from using instructions of the CPU."""
_BF16 = {"avx512_bf16": "AVX512-BF16", "amx_bf16": "AMX-BF16", "bf16": "BF16"}
_FP16 = {"avx512_fp16": "AVX512-FP16", "amx_fp16": "AMX-FP16", "asimdhp": "FP16"}
_MEASURE_S = 0.02  # the measurement ends with the first product that takes longer


def hardware_of(device: torch.device) -> Hardware:
    """What ``device`` multiplies: a CUDA device is queried, a CPU looked up. Measures nothing."""
    if device.type == "cuda":
        return _of_gpu(torch.cuda.get_device_capability(device), rocm=torch.version.hip is not None)
    if device.type == "cpu":
        return of_cpu(_cpu_flags(), os.environ, mkldnn=torch.backends.mkldnn.is_available())
    return Hardware(bf16=True, fp16=True, because=f"a device of type {device.type}")


def _of_gpu(capability: tuple[int, int], *, rocm: bool) -> Hardware:
    major, minor = capability
    if rocm or major >= 8:
        return Hardware(bf16=True, fp16=True, because="this GPU multiplies bf16")
    return Hardware(
        bf16=False,
        fp16=True,
        because=f"this GPU (compute capability {major}.{minor}) has no bf16 instructions",
    )


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
        because = f"{limit} keeps torch from this CPU's {bf16}"
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
