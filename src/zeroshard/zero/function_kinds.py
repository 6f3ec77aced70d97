"""What functions of torch need of a tensor that is their argument: its values, or only some facts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_T = torch.Tensor


def _named(names: str, *, of: Any = _T) -> list[Any]:
    return [getattr(of, name) for name in names.split() if hasattr(of, name)]


_PROPERTIES = _named(
    "shape dtype device layout ndim requires_grad grad grad_fn is_leaf is_sparse is_meta is_cuda is_cpu "
    "is_quantized is_nested names _version nbytes itemsize is_mps is_xpu is_mkldnn retains_grad _base "
    "output_nr _backward_hooks _post_accumulate_grad_hooks is_sparse_csr name _grad volatile is_xla "
    "is_vulkan is_ipu is_maia is_mtia grad_dtype"
)
_SETTABLE = _named(
    "requires_grad grad names _backward_hooks _post_accumulate_grad_hooks _grad grad_dtype"
)
METADATA: frozenset[Any] = frozenset(
    [p.__get__ for p in _PROPERTIES]
    + [p.__set__ for p in _SETTABLE]
    + [_T.grad.__delete__]  # type: ignore[union-attr]
    + _named(
        "size numel nelement dim ndimension element_size storage_offset is_floating_point is_complex "
        "is_signed is_inference is_shared is_same_size get_device __len__ requires_grad_ register_hook "
        "register_post_accumulate_grad_hook retain_grad has_names is_pinned is_conj is_neg sparse_dim "
        "dense_dim __hash__ _is_view"
    )
    + _named("is_floating_point is_complex numel is_same_size is_signed is_inference is_conj is_neg",
             of=torch)
)  # fmt: skip
LAYOUT: frozenset[Any] = frozenset(_named("stride is_contiguous dim_order"))
"""Answered for the full parameter, since a placeholder has other strides."""
LIKE: frozenset[Any] = frozenset(
    _named("zeros_like ones_like empty_like full_like rand_like randn_like randint_like", of=torch)
    + _named("new_zeros new_ones new_empty new_full new_tensor new_empty_strided")
)
"""Make new tensors of the parameter's shape, dtype and device: its values are not needed."""
CASTS: frozenset[Any] = frozenset(
    _named("to type cpu cuda float double half bfloat16 int long bool short byte char")
)
"""Give the parameter itself if nothing has to be cast."""

AUTOGRAD: frozenset[Any] = frozenset(
    [torch.autograd.grad, torch.autograd.backward, *_named("backward")]
)
"""Need to know which parameter it is, not its values."""
ADDRESSES = frozenset(_named("untyped_storage data_ptr storage _typed_storage"))
DATA_SET = _T.data.__set__  # type: ignore[attr-defined]
_RECEIVING = frozenset(
    [
        "all_reduce",
        "broadcast",
        "reduce",
        "recv",
        "irecv",
        "scatter",
        "all_gather",
        "all_gather_into_tensor",
        "all_to_all",
        "all_to_all_single",
        "reduce_scatter",
        "reduce_scatter_tensor",
    ]
)
"""Functions of ``torch.distributed`` that write their first argument."""


def _is_inplace(name: str) -> bool:
    if name.startswith("__"):
        return name.startswith("__i") and name not in (
            "__index__",
            "__invert__",
            "__int__",
            "__iter__",
        )
    return name.endswith("_") or name.startswith("_fused_")


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, str]]:
    """The arguments that a call is known to write, and how an error message describes the write."""
    name = getattr(func, "__name__", "")
    targets = args[0] if args else list(kwargs.values())  # torch.nn.init passes all by keyword
    if func == DATA_SET:
        yield targets, "given other values (.data = ...)"
    elif name == "__setitem__" or _is_inplace(name):
        yield targets, f"written in place ({name})"
    elif name in _RECEIVING and func.__module__.startswith("torch.distributed"):
        yield targets, f"written by {name}"
    yield kwargs.get("out"), f"written as out= of {name}"
