"""Computes the parameters, operations and bytes of each model of the GPU protocols."""

from __future__ import annotations

from dataclasses import dataclass

STATE_NBYTES = 20
"""Bytes per parameter of the system that needs most: bf16 value and gradient, fp32 gradient, master and
two moments."""
_ACTIVATION_NBYTES = (
    34  # bytes per layer, token and unit of width; fused attention, no recomputation
)
_LOGIT_NBYTES = 10  # bytes per logit: bf16, its fp32 copy, the gradient of one of them
_RESERVE = 0.92  # the share of free memory that a run may use


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT with biases and one matrix for embedding and head. ``context``: tokens per row."""

    layers: int
    width: int
    heads: int
    context: int = 2048
    vocabulary: int = 50304

    @property
    def numel(self) -> int:
        """The exact number of parameters."""
        block = 12 * self.width**2 + 13 * self.width
        return (self.vocabulary + self.context + 2) * self.width + self.layers * block

    @property
    def flops_per_token(self) -> int:
        """FLOPs of forward and backward without recomputation. Causal attention counts half of the
        pairs."""
        matrices = self.numel - self.context * self.width
        return 6 * matrices + 6 * self.layers * self.width * self.context

    def train_nbytes(self, tokens: int) -> int:
        """An estimate of the memory of training with all state on the GPU and ``tokens`` per step."""
        activations = _ACTIVATION_NBYTES * self.layers * self.width * tokens
        return STATE_NBYTES * self.numel + activations + _LOGIT_NBYTES * self.vocabulary * tokens

    def fits(self, free_nbytes: int, tokens: int) -> bool:
        """Whether training is expected to fit into this much free GPU memory."""
        return self.train_nbytes(tokens) <= _RESERVE * free_nbytes


SHAPES = {
    "tiny": Shape(2, 64, 4, context=32, vocabulary=256),
    "0.1B": Shape(12, 768, 12, context=1024),
    "1.5B": Shape(28, 2048, 16),
    "3B": Shape(36, 2560, 20),
    "7B": Shape(34, 4096, 32),
    "10B": Shape(48, 4096, 32),
    "14B": Shape(44, 5120, 40),
    "16B": Shape(50, 5120, 40),
    "18B": Shape(56, 5120, 40),
    "8B-units": Shape(6, 4096, 32, vocabulary=128256),  # matrices as large as those of an 8B model
}

PEAK_TFLOPS = {"H200 NVL": 835.0, "H100 NVL": 835.0, "H100 PCIe": 756.0} | dict.fromkeys(
    ("H200", "H100", "GH200"), 989.0
) | {"A100": 312.0}  # fmt: skip
"""Dense bf16 throughput according to the vendor. The first name that is part of the GPU's name counts."""


def peak_tflops(gpu: str) -> float | None:
    """The vendor's dense bf16 TFLOP/s; None for a GPU that is not in the table.

    >>> peak_tflops("NVIDIA H100 80GB HBM3")
    989.0
    """
    return next((peak for name, peak in PEAK_TFLOPS.items() if name in gpu), None)


def mfu(shape: Shape, tokens_per_s: float, peak: float) -> float:
    """Model FLOPs utilization: the share of ``peak`` TFLOP/s that the model's arithmetic uses."""
    return shape.flops_per_token * tokens_per_s / (peak * 1e12)


def budgets(weights: dict[str, float], minutes: float) -> dict[str, float]:
    """Seconds for each protocol: ``minutes``, divided in proportion to the weights.

    >>> budgets({"B1": 3, "B6": 1}, 4)
    {'B1': 180.0, 'B6': 60.0}
    """
    whole = sum(weights.values())
    return {name: 60 * minutes * weight / whole for name, weight in weights.items()}
