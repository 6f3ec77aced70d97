"""Compiles the extensions of DeepSpeed that the offload steps need, which takes a minute or two."""

from __future__ import annotations

import time
from typing import Any

import systems
from trainers import Job


def prebuild(_job: Job) -> dict[str, Any]:
    """Build DeepSpeed's CPU Adam into ``TORCH_EXTENSIONS_DIR``. Returns the seconds that it took."""
    begin_s = time.monotonic()
    systems.import_deepspeed()
    from deepspeed.ops.op_builder import CPUAdamBuilder

    CPUAdamBuilder().load(verbose=False)
    return {"built": "CPU Adam", "seconds": time.monotonic() - begin_s}
