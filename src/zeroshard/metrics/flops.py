"""Counts the operations of one forward with torch's counter (``flops_profiler``)."""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from zeroshard.config.sections import FlopsConfig
from zeroshard.device.choice import ops_of

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

logger = logging.getLogger("zeroshard")


MOVES = frozenset(
    {
        "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "copy_", "_to_copy",
        "clone", "detach", "resize_", "set_", "_local_scalar_dense", "zeros", "zero_", "fill_", "cat",
    }
)  # fmt: skip
"""Operations that make or move memory and calculate nothing."""


class _Unknown(TorchDispatchMode):
    """Counts calls of operations that ``known`` has no formula for. They run as they are.

    Below a counter of torch, which takes operations apart where it can, it sees what is left of them.
    """

    def __init__(self, known: Mapping[Any, Any]) -> None:
        super().__init__()
        self._known = known
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name().partition("::")[2].partition(".")[0]
        if func.overloadpacket not in self._known and not func.is_view and name not in MOVES:
            self.calls[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


def counted(
    forward: Callable[..., Any],
    model: nn.Module,
    step: Callable[[], int],
    section: FlopsConfig,
    then: Callable[[int, Sequence[object], Mapping[str, object]], float] | None = None,
) -> Callable[..., Any]:
    """``forward``, which counts its first call at the section's ``profile_step``.

    ``step()`` returns the number of steps done. The counts are logged, or written to the section's file.
    ``then`` gets the count of a forward with gradients and its arguments, and returns what the device of
    this rank could do in a second; 0: not known. Other calls cost one comparison.
    """
    waits = True

    @functools.wraps(forward)
    def observed(*args: Any, **kwargs: Any) -> Any:
        nonlocal waits
        if not waits or step() != section.profile_step:
            return forward(*args, **kwargs)
        waits = False
        from torch.utils.flop_counter import FlopCounterMode  # imports Triton, if that is installed

        begin_s = now_s(model)
        counter = FlopCounterMode(display=False)
        with _Unknown(counter.flop_registry) as unknown, counter:
            output = forward(*args, **kwargs)
        seconds = now_s(model) - begin_s
        lines = report(
            f"forward after step {section.profile_step}", counter, parameters(model), seconds
        )
        flops, peak = counter.get_total_flops(), 0.0
        if then is not None and torch.is_grad_enabled():
            peak = then(flops, args, kwargs)
        lines += [rate(flops, seconds, peak), *without_formula(unknown.calls)]
        lines += most(counter, section.module_depth, section.top_modules)
        lines += table(counter, section.module_depth) if section.detailed else []
        if section.output_file is not None:
            show(lines, section.output_file)
        else:
            for line in lines:
                logger.info("%s", line)
        return output

    return observed


def parameters(model: nn.Module) -> int:
    """Elements of all parameters, also of sharded ones."""
    return sum(param.numel() for param in model.parameters())


def now_s(model: nn.Module) -> float:
    """The host's clock in seconds, read after the device has finished its work."""
    for device in {param.device for param in model.parameters()}:
        ops_of(device).synchronize()
    return time.perf_counter()


def report(what: str, counter: FlopCounterMode, params: int, seconds: float) -> list[str]:
    """A line with the totals."""
    flops = counter.get_total_flops()
    return [
        f"{what}: {words(flops, 'FLOPS')}, {words(flops // 2, 'MACs')}, "
        f"{words(params, 'parameters')}, {1e3 * seconds:.2f} ms"
    ]


def rate(flops: int, seconds: float, peak: float) -> str:
    """Operations in a second, and their part of what the device could do; 0: not known.

    >>> rate(3_000_000, 0.001, 12e9), rate(3_000_000, 0.001, 0.0)
    ('3.00 GFLOPS/s while counting, MFU 25.0%', '3.00 GFLOPS/s while counting')
    """
    text = f"{words(round(flops / seconds), 'FLOPS')}/s while counting"
    return f"{text}, MFU {flops / seconds / peak:.1%}" if peak else text


def without_formula(calls: Mapping[str, int]) -> list[str]:
    """A line that names the operations that count as 0, if there are any.

    >>> without_formula({"aten.tanh": 2, "aten.add": 1})
    ['counted as 0, because they have no formula: aten.add (1 call), aten.tanh (2 calls)']
    """
    each = [f"{name} ({n} call{'s' * (n != 1)})" for name, n in sorted(calls.items())]
    return [f"counted as 0, because they have no formula: {', '.join(each)}"] if each else []


def show(lines: Sequence[str], output_file: str | None) -> None:
    text = "\n".join(lines)
    if output_file is None:
        print(text)
    else:
        Path(output_file).write_text(text + "\n")


def by_module(counter: FlopCounterMode) -> dict[str, int]:
    """Operations of each module, including its submodules. "Global" is the total."""
    counts = counter.get_flop_counts().items()
    return {name: sum(by_operation.values()) for name, by_operation in counts}


def most(counter: FlopCounterMode, depth: int, top: int) -> list[str]:
    """The ``top`` modules with most operations at each depth, or at one depth."""
    by_depth: dict[int, list[tuple[int, str]]] = {}
    for name, flops in by_module(counter).items():
        if name != "Global":
            by_depth.setdefault(name.count("."), []).append((flops, name))
    return [
        f"most at depth {level}: "
        + ", ".join(f"{name} {words(n, 'FLOPS')}" for n, name in sorted(found)[::-1][:top])
        for level, found in sorted(by_depth.items())
        if depth < 0 or level == depth
    ]


def table(counter: FlopCounterMode, depth: int) -> list[str]:
    """A line for each module down to ``depth`` dots (-1: all), indented."""
    return [
        f"{'  ' * (0 if name == 'Global' else name.count('.'))}{name}: {words(flops, 'FLOPS')}"
        for name, flops in by_module(counter).items()
        if name == "Global" or depth < 0 or name.count(".") <= depth
    ]


def words(number: int, unit: str) -> str:
    """A number with a prefix, rounded, and its unit.

    >>> words(1_234_000, "FLOPS"), words(12, "MACs")
    ('1.23 MFLOPS', '12 MACs')
    """
    for letter, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.2f} {letter}{unit}"
    return f"{number} {unit}"
