"""Computes before a turn whether a model fits into GPU and host memory.

A process that needs more host memory than there is gets killed by the kernel, and takes minutes until
then. The numbers are the least that a system needs, so that a refusal is always right.
"""

from __future__ import annotations

from dataclasses import dataclass

from shapes import Shape

GIB = 2**30
_USABLE = 0.95  # the share of free memory that a run may plan
_LOGIT_NBYTES = 10  # bytes per logit: bf16, its fp32 copy, the gradient of one of them


@dataclass(frozen=True)
class Held:
    """Bytes per parameter of one system that stores its optimizer state in host memory.

    ``gpu``, ``host``: with all state in host memory. ``back``: what a parameter whose state stays on the
    GPU needs there in addition; None if the system cannot keep a part there.
    """

    gpu: float
    host: float
    back: float | None = None


HELD = {
    # bf16 parameter; master, two moments, buffers for the gradient (fp32) and the parameter (bf16)
    "ZeroShard": Held(2, 18, 14),
    # the same; the parameter is in host memory, where it needs no buffer
    "ZeroShard with parameters": Held(0, 18),
    # bf16 parameter; fp32 master, gradient and two moments
    "DeepSpeed": Held(2, 16, 14),
    # nothing outside the group in use; fp32 parameter, gradient and two moments
    "FSDP2": Held(0, 16),
}


def activations_nbytes(shape: Shape, rows: int) -> int:
    """The least that forward and backward need with recomputation: inputs of the layers, and logits."""
    tokens = rows * shape.context
    return tokens * (2 * shape.layers * shape.width + _LOGIT_NBYTES * shape.vocabulary)


def ratio_for(system: str, stage: int, shape: Shape, host_free: int) -> float:
    """The share of the optimizer state that goes to the host: as much as fits, in steps of 0.05.

    DeepSpeed can keep a part on the GPU at stage 3 only.
    """
    held = HELD[system]
    fits = _USABLE * host_free / (held.host * shape.numel)
    if held.back is None or (system == "DeepSpeed" and stage < 3) or fits >= 1:
        return 1.0
    return int(20 * fits) / 20


def refusal(
    system: str, shape: Shape, rows: int, ratio: float, *, gpu_free: int, host_free: int
) -> str:
    """Why a model cannot be trained; "" if it may be possible."""
    held = HELD[system]
    host = ratio * held.host * shape.numel
    gpu = (held.gpu + (1 - ratio) * (held.back or 0)) * shape.numel + activations_nbytes(
        shape, rows
    )
    for what, needed, free in (("host", host, host_free), ("GPU", gpu, gpu_free)):
        if needed > _USABLE * free:
            return (
                f"needs {needed / GIB:.0f} GiB of {what} memory with ratio {ratio:g}, "
                f"{free / GIB:.0f} GiB are free"
            )
    return ""
