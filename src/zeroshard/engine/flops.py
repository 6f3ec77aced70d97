"""Counts the operations of one forward with torch's counter (``flops_profiler``)."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from zeroshard.config.sections import FlopsConfig
from zeroshard.device.choice import ops_of

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

logger = logging.getLogger("zeroshard")


def counted(
    forward: Callable[..., Any], model: nn.Module, step: Callable[[], int], section: FlopsConfig
) -> Callable[..., Any]:
    """``forward``, which counts its first call at the section's ``profile_step``.

    ``step()`` returns the number of steps done. The counts are logged, or written to the section's file.
    Other calls cost one comparison.
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
        with FlopCounterMode(display=False) as counter:
            output = forward(*args, **kwargs)
        lines = report(
            f"forward after step {section.profile_step}",
            counter,
            parameters(model),
            now_s(model) - begin_s,
        )
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
