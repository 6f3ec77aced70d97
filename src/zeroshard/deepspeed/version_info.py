"""Versions, op builders and facts about torch, under DeepSpeed's names."""

from __future__ import annotations

from typing import Any

import torch

from zeroshard.comm.env import default_timeout
from zeroshard.deepspeed.api_table import VERSION
from zeroshard.errors import UnsupportedError

version = __version__ = VERSION
__version_major__, __version_minor__, __version_patch__ = (
    int(part) for part in VERSION.partition("+")[0].split(".")
)
git_hash = __git_hash__ = "zeroshard"
git_branch = __git_branch__ = "zeroshard"

torch_info: dict[str, Any] = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "bf16_support": True,
    "cuda_version": torch.version.cuda or "0.0",
    "nccl_version": "0.0",
    "hip_version": "0.0",
}
default_pg_timeout = default_timeout()


class OpBuilder:
    """A builder that compiles nothing."""

    NAME = ""

    def __init__(self, name: str = "") -> None:
        self.name = name or self.NAME

    @staticmethod
    def is_rocm_pytorch() -> bool:
        """Whether torch was built for ROCm. Programs ask it of the class, without a builder."""
        return torch.version.hip is not None

    @staticmethod
    def is_sycl_enabled() -> bool:
        """False: no device of SYCL is supported."""
        return False

    def is_compatible(self, verbose: bool = False) -> bool:
        """True: nothing is compiled."""
        return True

    def load(self, verbose: bool = True) -> Any:
        """Not available: the optimizers call the kernels.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            f"{type(self).__name__}.load(): programs cannot call the kernels of ZeroShard. Use "
            "the optimizers of deepspeed.ops, or the engine; torch.utils.cpp_extension.load compiles "
            "sources of your own."
        )

    jit_load = load

    def builder(self) -> None:
        """Nothing: there is nothing to compile."""


_OPS = {
    "CPUAdamBuilder": "cpu_adam",
    "CPUAdagradBuilder": "cpu_adagrad",
    "CPULionBuilder": "cpu_lion",
    "FusedAdamBuilder": "fused_adam",
    "FusedLambBuilder": "fused_lamb",
    "FusedLionBuilder": "fused_lion",
    "AsyncIOBuilder": "async_io",
    "UtilsBuilder": "utils",
}
"""Class of a builder -> its ``NAME``. The classes are attributes of this module."""
_BUILDERS: dict[str, Any] = {
    kind: type(kind, (OpBuilder,), {"NAME": op, "__doc__": f"``{op}``.", "__module__": __name__})
    for kind, op in _OPS.items()
}
globals().update(_BUILDERS)
ALL_OPS: dict[str, OpBuilder] = {made.NAME: made() for made in _BUILDERS.values()}
compatible_ops: dict[str, bool] = dict.fromkeys(ALL_OPS, True)
installed_ops: dict[str, bool] = dict(compatible_ops)


def required_torch_version(
    min_version: float | str | None = None, max_version: float | str | None = None
) -> bool:
    """Whether torch's version is within the limits (such as ``2.1``). Only major and minor numbers count.

    Raises:
        ValueError: there is no limit.
    """
    if min_version is None and max_version is None:
        raise ValueError("required_torch_version() needs min_version or max_version")
    own = _numbers(torch.__version__)
    if min_version is not None and own < _numbers(str(min_version)):
        return False
    return max_version is None or own[:2] <= _numbers(str(max_version))


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.partition("+")[0].split(".")[:2]
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in parts)
