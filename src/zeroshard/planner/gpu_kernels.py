"""Runs the operations of a model as a CUDA device runs them, on fake tensors of the CPU.

Most operations of torch allocate the same on both. Three do not, and they decide what backward keeps:
dropout has a mask of one byte per element; fused attention takes dropout and masks without keeping its
scores; autocast runs other operations in fp32. Inside :func:`kernels_of` these have kernels of their own
for tensors of the CPU, registered with torch.library and taken back afterwards. What they return and
keep is torch's own description of the CUDA operations, which needs no GPU.

L, S: tokens of the queries and of the keys.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

Target: TypeAlias = Literal["cpu", "cuda"]
Kernel: TypeAlias = Literal["flash", "efficient", "math"]

LOW = (torch.float16, torch.bfloat16)

WIDEST = 256
"""Elements of a head that the flash kernel takes at most."""

FLOAT32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal",
    "rsqrt", "sinh", "tan", "pow", "softplus", "layer_norm", "native_layer_norm", "group_norm",
    "cosine_similarity", "nll_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "kl_div",
    "binary_cross_entropy_with_logits", "dist", "cdist", "logsumexp", "prod", "softmax", "log_softmax",
    "cumprod", "cumsum", "sum", "norm", "frobenius_norm", "nuclear_norm", "linalg_vector_norm",
    "linalg_matrix_norm", "renorm", "pdist", "rms_norm", "upsample_nearest2d", "upsample_bilinear2d",
    "upsample_bicubic2d",
)  # fmt: skip
"""Operations that autocast runs in fp32 on CUDA (torch's list of them). On the CPU many keep bf16."""


@contextlib.contextmanager
def kernels_of(target: Target) -> Iterator[None]:
    """Inside the block, operations on tensors of the CPU keep what they keep on ``target``.

    Holds for the whole process, so nothing else may compute meanwhile.
    """
    if target == "cpu":
        yield
        return
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("scaled_dot_product_attention", _attention, "AutogradCPU")
        library.impl("dropout", _dropout, "AutogradCPU")
        for packet in (getattr(_ATEN, name) for name in FLOAT32):
            for overload in packet.overloads():
                _run_in_float32(library, getattr(packet, overload))
        yield


def attention_kernel(
    query: Tensor, key: Tensor, value: Tensor, *, masked: bool, causal: bool, grouped: bool
) -> Kernel:
    """The kernel that torch takes on CUDA for [B, H, L, D], [B, H', S, D], [B, H', S, V].

    ``grouped``: fewer heads of keys are allowed. Devices from compute capability 8.0 are meant. "math"
    keeps the scores, the others do not.
    """
    tensors = (query, key, value)
    widths = {tensor.shape[-1] for tensor in tensors}
    if any(tensor.dim() != 4 for tensor in tensors):
        return "math"
    same_heads = query.shape[1] == key.shape[1] == value.shape[1]
    takes_mask = not masked and (not causal or query.shape[2] == key.shape[2])
    if query.dtype in LOW and _are_narrow(widths) and takes_mask and (same_heads or grouped):
        return "flash"
    is_aligned = not any(width * query.element_size() % 16 for width in widths)
    is_efficient = query.dtype in (*LOW, torch.float32) and same_heads and is_aligned
    return "efficient" if is_efficient else "math"


def _are_narrow(widths: Collection[int]) -> bool:
    """Whether flash attention takes heads of these widths, which must be one."""
    return len(widths) == 1 and max(widths) <= WIDEST


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention of CUDA."""
    kernel = attention_kernel(
        query, key, value, masked=attn_mask is not None, causal=is_causal, grouped=enable_gqa
    )
    width = query.shape[-1]
    given: tuple[Any, ...]
    if kernel == "math":
        op, given = _ATEN._scaled_dot_product_attention_math, (query, key, value, attn_mask)
        rest: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    elif kernel == "flash":
        op = _ATEN._scaled_dot_product_flash_attention
        given = tuple(_padded(tensor, -width % 8) for tensor in (query, key, value))
        rest = {"scale": width**-0.5 if scale is None else scale}
    else:
        op = _ATEN._scaled_dot_product_efficient_attention
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        needs_grad = any(tensor.requires_grad for tensor in (query, key, value))
        given = (query, key, value, bias, needs_grad and torch.is_grad_enabled())
        rest = {"scale": scale}
    out: Tensor = op(*given, dropout_p, is_causal, **rest)[0]
    return out[..., :width] if out.shape[-1] > width == value.shape[-1] else out


_ATEN: Any = torch.ops.aten


def _padded(tensor: Tensor, columns: int) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, columns)) if columns else tensor


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask as the efficient kernel reads it: of the queries' dtype, with rows of a multiple of 16."""
    if mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=mask.device)
        mask = torch.where(mask, zero, float("-inf"))
    length = mask.shape[-1]
    if length % 16:
        mask = _padded(mask, -length % 16)[..., :length]
    return mask.expand(*query.shape[:-1], key.shape[-2])


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Dropout of CUDA, which keeps a mask of booleans."""
    if not train or p == 0 or not x.numel():
        return x
    if p == 1:
        return x * torch.zeros_like(x)
    out: Tensor = _ATEN.native_dropout(x, p, train)[0]
    return out


def _run_in_float32(library: Any, op: Any) -> None:
    """Let autocast of the CPU run ``op`` in fp32, if that of CUDA does and it has no own rule."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    name = op.name()
    if not torch._C._dispatch_has_kernel(name) or has(name, "AutocastCPU"):
        return  # an overload of TorchScript, or autocast of the CPU has a rule
    if not has(name, "AutocastCUDA"):
        return

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return op(*map(_float32, args), **kwargs)

    library.impl(name.partition("::")[2], run, "AutocastCPU")


def _float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in LOW else value
