"""How many operations does a model take?"""

from __future__ import annotations

import time
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
    levels deep, and the ``top_modules`` that take most at each depth, to ``output_file`` if given.

    Raises :class:`UsageError` without an input, :class:`UnsupportedError` for ``ignore_modules``.
    """
    _refuse_to_ignore("get_model_profile(ignore_modules=...)", ignore_modules)
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
        lines = [f"{_words(flops, 'FLOPS')}, {_words(params, 'parameters')}"]
        if detailed:
            lines += [*_most(counter, module_depth, top_modules), *_table(counter, module_depth)]
        _show(lines, output_file)
    if not as_string:
        return flops, flops // 2, params
    return _words(flops, "FLOPS"), _words(flops // 2, "MACs"), _words(params, "").strip()


class FlopsProfiler:
    """Counts what runs between :meth:`start_profile` and :meth:`stop_profile`, whoever calls it.

    Counted as in :func:`get_model_profile`. A backward in between counts too, and so does a forward
    that checkpointing runs again, so ``recompute_fwd_factor`` is not needed, and neither is
    ``ds_engine``. Under ZeRO each rank counts what it computes itself. Call both on every step that
    is to be counted and on no other: the counter slows each operation down.
    """

    def __init__(
        self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0
    ) -> None:
        del ds_engine, recompute_fwd_factor
        self.model = model
        self.started = False
        self._counter: FlopCounterMode | None = None
        self._seconds = 0.0

    def start_profile(self, ignore_list: Sequence[type[nn.Module]] | None = None) -> None:
        """Count from here on, beginning at zero. :class:`UnsupportedError` for ``ignore_list``."""
        _refuse_to_ignore("FlopsProfiler.start_profile(ignore_list=...)", ignore_list)
        self.end_profile()
        self._counter = FlopCounterMode(display=False)
        self._counter.__enter__()
        self.started = True
        self._seconds = -self._now_s()

    def stop_profile(self) -> None:
        """Count no more. What was counted stays until :meth:`end_profile` or the next start."""
        if self.started:
            self._seconds += self._now_s()
            self.started = False
            self._counted().__exit__(None, None, None)

    def reset_profile(self) -> None:
        """Forget what was counted and, while it runs, count anew."""
        if self.started:
            self.start_profile()
        else:
            self._counter = None

    def end_profile(self) -> None:
        """Stop, and forget what was counted."""
        self.stop_profile()
        self._counter = None

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Operations so far, as a number or in words."""
        flops = self._counted().get_total_flops()
        return _words(flops, "FLOPS") if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Multiply-adds so far: half of the operations."""
        macs = self._counted().get_total_flops() // 2
        return _words(macs, "MACs") if as_string else macs

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Seconds from start to stop (or to now) on this host, the device's work included."""
        self._counted()
        seconds = self._seconds + (self._now_s() if self.started else 0.0)
        return f"{1e3 * seconds:.2f} ms" if as_string else seconds

    def get_total_params(self, as_string: bool = False) -> Any:
        """Parameters of the whole model, also where they are sharded."""
        params = sum(param.numel() for param in self.model.parameters())
        return _words(params, "").strip() if as_string else params

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print totals and, if ``detailed``, a table by module, or write them to ``output_file``."""
        counter = self._counted()
        totals = (
            f"step {profile_step}: {self.get_total_flops(True)}, {self.get_total_macs(True)}, "
            f"{self.get_total_params(True)} parameters, {self.get_total_duration(True)}"
        )
        lines = [totals, *_most(counter, module_depth, top_modules)]
        _show([*lines, *_table(counter, module_depth)] if detailed else lines, output_file)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print which modules take most at each depth, or at ``module_depth``."""
        _show(_most(self._counted(), module_depth, top_modules), None)

    def _counted(self) -> FlopCounterMode:
        if self._counter is None:
            raise UsageError(
                "FlopsProfiler has counted nothing yet: call start_profile() before the forward, and "
                "end_profile(), which forgets the numbers, after you have read them."
            )
        return self._counter

    def _now_s(self) -> float:
        if any(param.is_cuda for param in self.model.parameters()):
            torch.cuda.synchronize()
        return time.perf_counter()


def _refuse_to_ignore(call: str, ignored: Any) -> None:
    if ignored:
        raise UnsupportedError(
            f"{call}: the counter sees operations, not modules. Profile the part of the model that "
            "you mean."
        )


def _show(lines: Sequence[str], output_file: str | None) -> None:
    text = "\n".join(lines)
    if output_file is None:
        print(text)
    else:
        Path(output_file).write_text(text + "\n")


def _by_module(counter: FlopCounterMode) -> dict[str, int]:
    """Operations of each module with what is in it; "Global" is everything."""
    counts = counter.get_flop_counts().items()
    return {name: sum(by_operation.values()) for name, by_operation in counts}


def _most(counter: FlopCounterMode, depth: int, top: int) -> list[str]:
    """The ``top`` modules of each depth, or of one, with the most operations."""
    by_depth: dict[int, list[tuple[int, str]]] = {}
    for name, flops in _by_module(counter).items():
        if name != "Global":
            by_depth.setdefault(name.count("."), []).append((flops, name))
    return [
        f"most at depth {level}: "
        + ", ".join(f"{name} {_words(n, 'FLOPS')}" for n, name in sorted(found)[::-1][:top])
        for level, found in sorted(by_depth.items())
        if depth < 0 or level == depth
    ]


def _table(counter: FlopCounterMode, depth: int) -> list[str]:
    """A line for each module down to ``depth`` dots (-1: all), indented."""
    return [
        f"{'  ' * (0 if name == 'Global' else name.count('.'))}{name}: {_words(flops, 'FLOPS')}"
        for name, flops in _by_module(counter).items()
        if name == "Global" or depth < 0 or name.count(".") <= depth
    ]


def _words(number: int, unit: str) -> str:
    """
    >>> _words(1_234_000, "FLOPS"), _words(12, "MACs")
    ('1.23 MFLOPS', '12 MACs')
    """
    for letter, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.2f} {letter}{unit}"
    return f"{number} {unit}"
