"""How many operations does a model take?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from zeroshard.errors import UnsupportedError, UsageError


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Sequence[type[nn.Module]] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """Operations, multiply-adds and parameters of one call of ``model``, as words or as numbers.

    Counted are matrix products, convolutions and attention (``torch.utils.flop_counter``), a multiply-add
    as two operations; what is elementwise is not. ``input_shape``: the shape of the only argument,
    else ``args`` and ``kwargs``. ``mode``: "forward", or "generate" for ``model.generate``. The model
    runs ``warm_up`` times before, in eval mode. ``print_profile``: a table by module, ``module_depth``
    levels deep, to ``output_file`` if that is given.

    Raises :class:`UsageError` without an input, :class:`UnsupportedError` for ``ignore_modules``.
    """
    if ignore_modules:
        raise UnsupportedError(
            "get_model_profile(ignore_modules=...): the counter sees operations, not modules. Profile "
            "the part of the model that you mean."
        )
    if input_shape is not None:
        like = next(model.parameters(), torch.empty(0))
        args, kwargs = [torch.ones(input_shape, dtype=like.dtype, device=like.device)], None
    if not args and not kwargs:
        raise UsageError("get_model_profile needs an input: pass input_shape, args or kwargs.")
    if mode not in ("forward", "generate"):
        raise UsageError(f'get_model_profile(mode={mode!r}): give "forward" or "generate".')
    call: Any = model if mode == "forward" else model.generate
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            for _ in range(warm_up):
                call(*args, **(kwargs or {}))
            with FlopCounterMode(display=False) as counter:
                call(*args, **(kwargs or {}))
    finally:
        for module, was_training in modes.items():
            module.training = was_training
    flops = counter.get_total_flops()
    params = sum(param.numel() for param in model.parameters())
    if print_profile:
        head = f"{_words(flops, 'FLOPS')}, {_words(params, 'parameters')}"
        text = f"{head}\n{_table(counter, module_depth)}" if detailed else head
        if output_file is None:
            print(text)
        else:
            Path(output_file).write_text(text + "\n")
    if not as_string:
        return flops, flops // 2, params
    return _words(flops, "FLOPS"), _words(flops // 2, "MACs"), _words(params, "").strip()


def _table(counter: FlopCounterMode, depth: int) -> str:
    """A line for each module down to ``depth`` dots (-1: all), indented."""
    lines = []
    for name, by_operation in counter.get_flop_counts().items():
        level = 0 if name == "Global" else name.count(".")
        if name != "Global" and 0 <= depth < level:
            continue
        lines.append(f"{'  ' * level}{name}: {_words(sum(by_operation.values()), 'FLOPS')}")
    return "\n".join(lines)


def _words(number: int, unit: str) -> str:
    """
    >>> _words(1_234_000, "FLOPS"), _words(12, "MACs")
    ('1.23 MFLOPS', '12 MACs')
    """
    for letter, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.2f} {letter}{unit}"
    return f"{number} {unit}"
