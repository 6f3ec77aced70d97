"""Turns finished steps into events, each value at its own step, without waiting for the device.

Losses, norms and times of a step are still on the device when the step returns. Their copy to the host
is queued, and the event is sent at the end of the first later step at which the copy has arrived. On
the CPU that is at once. Only the thread of the program asks the device, because a query by another
thread could end a capture of a CUDA graph.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from zeroshard.comm.recorder import Recorder
from zeroshard.core.texts import GIB
from zeroshard.device.ops import DeviceOps, HostValues, Mark
from zeroshard.errors import DistributedError
from zeroshard.memory.host_limits import read_peak_rss_nbytes
from zeroshard.metrics.sinks import Event
from zeroshard.metrics.step_report import StepReport

PREFIX = "Train/Samples/"
MEMORY_EVERY = 10
"""Steps between two looks at the memory: torch's counters of a GPU cost the host about 0.1 ms."""


@dataclass(frozen=True)
class StepEvent:
    """The values of one step. ``samples`` counts from the start of the run, over all ranks.

    ``time_s``: when the step ended on the host, in seconds since 1970. ``values``: by name. Numbers that
    are not known are left out.
    """

    step: int
    samples: int
    time_s: float
    values: Mapping[str, float]

    @property
    def events(self) -> list[Event]:
        """The values as events of monitors, under DeepSpeed's prefix, over samples."""
        return [(PREFIX + name, value, self.samples) for name, value in self.values.items()]


@dataclass(eq=False)
class OpenStep:
    """A step whose numbers are not all on the host."""

    report: StepReport
    samples: int
    values: dict[str, float]  # those that the host knows
    numbers: HostValues
    ended: Mark
    before: Mark | None  # the end of the step before
    num_samples: int
    num_tokens: int
    flops: float  # of all ranks; 0: not known
    phases: Sequence[tuple[str, Mark, Mark]] = ()
    time_s: float = field(default_factory=time.time)

    def is_ready(self) -> bool:
        """Whether all numbers are on the host."""
        marks = [self.ended, *(end for _, _, end in self.phases)]
        return self.numbers.is_ready() and all(mark.is_reached() for mark in marks)


class StepStream:
    """Makes a :class:`StepEvent` of every step and passes it to ``emit``, in the order of the steps.

    ``dp_size``: ranks with samples of their own. ``flops_per_token``: operations of forward and backward
    for one token, until :meth:`flops_counted` gives a measured number; ``peak_flops``: what the devices
    of all ranks could do in a second; 0: not known. ``world_size``: all ranks.
    """

    def __init__(
        self,
        emit: Callable[[StepEvent], None],
        *,
        ops: DeviceOps,
        recorders: Sequence[Recorder],
        dp_size: int,
        world_size: int = 1,
        flops_per_token: float = 0.0,
        peak_flops: float = 0.0,
    ) -> None:
        self._emit = emit
        self.ops = ops
        self._recorders = recorders
        self._dp_size = dp_size
        self._world_size = world_size
        self._flops_per_token, self._peak_flops = flops_per_token, peak_flops
        self._flops_per_forward = 0.0  # of all ranks; of models without tokens, if it was counted
        self._forwards = 0
        self._open: deque[OpenStep] = deque()
        self._before: Mark | None = None
        self._samples = -1
        self._tokens = 0
        self._waited_s = 0.0

    def count_tokens(self, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Add one forward and its tokens."""
        if torch.is_grad_enabled():
            self._forwards += 1
            self._tokens += tokens_in(args, kwargs)

    def flops_counted(
        self, flops: int, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> float:
        """Take MFU from this count: ``flops`` are this rank's in one forward with these arguments.

        Backward counts as two forwards, and each rank as this one. Returns what the device of one rank
        could do in a second; 0: not known.
        """
        tokens = tokens_in(args, kwargs)
        if tokens:
            self._flops_per_token = 3.0 * flops * self._world_size / (tokens * self._dp_size)
        self._flops_per_forward = 0.0 if tokens else 3.0 * flops * self._world_size
        return self._peak_flops / self._world_size

    def end_step(self, report: StepReport, samples: int, next_lr: float) -> OpenStep | None:
        """The step has ended. Returns what :meth:`send` gets. None: a graph is captured.

        ``next_lr``: the learning rate after the step, unless it turns out to have been skipped.
        """
        ops = self.ops
        if ops.is_capturing():
            return None
        ended, before = ops.mark(), self._before
        taken = samples - self._samples if self._samples >= 0 else 0
        made = OpenStep(
            report,
            samples,
            {"lr": next_lr, **self._host_values(report.step)},
            ops.host_values(report.tensors()),
            ended,
            before,
            num_samples=max(0, taken),  # a checkpoint may set the count back
            num_tokens=self._tokens * self._dp_size,
            flops=self._flops_per_token * self._tokens * self._dp_size
            or self._flops_per_forward * self._forwards,
        )
        self._before, self._samples, self._tokens, self._forwards = ended, samples, 0, 0
        return made

    def send(self, step: OpenStep) -> None:
        """Queue a step, and emit all steps whose numbers have arrived."""
        self._open.append(step)
        self._emit_ready()

    def close(self, *, wait: bool) -> None:
        """Emit what is left. ``wait``: for the device; else numbers that are still there are lost.

        Those of steps in which a rank was lost are left out. The program's next call raises the reason.
        """
        if wait and self._open:
            self.ops.synchronize()
        with contextlib.suppress(DistributedError):
            self._emit_ready()
        self._open.clear()

    def _emit_ready(self) -> None:
        if self._open and self.ops.is_capturing():
            return
        while self._open and self._open[0].is_ready():
            self._emit(self._event(self._open.popleft()))

    def _host_values(self, step: int) -> dict[str, float]:
        found = {}
        waited_s = sum(recorder.blocked_s for recorder in self._recorders)
        if not self.ops.is_async:  # waits of a device do not block the host
            found["exposed_comm_ms"] = 1e3 * (waited_s - self._waited_s)
        self._waited_s = waited_s
        if step % MEMORY_EVERY == 1:
            if (peak := read_peak_rss_nbytes(os.getpid())) is not None:
                found["host_memory_peak_gib"] = peak / GIB
            if (in_use := self.ops.memory_in_use()) is not None:
                found["device_memory_gib"] = in_use[0] / GIB
                found["device_memory_peak_gib"] = in_use[1] / GIB
        return found

    def _event(self, step: OpenStep) -> StepEvent:
        values = step.report.values_of(step.numbers.read())
        values |= step.values
        if step.report.skipped:  # a schedule that had gone on was set back
            values["lr"] = step.report.lr
        values["skipped"] = float(step.report.skipped)
        seconds = 0.0 if step.before is None else step.ended.seconds_since(step.before)
        if seconds > 0:
            values["step_time_ms"] = 1e3 * seconds
            values["samples_per_second"] = step.num_samples / seconds
            if step.num_tokens:
                values["tokens_per_second"] = step.num_tokens / seconds
            if step.flops and self._peak_flops:
                values["mfu"] = step.flops / seconds / self._peak_flops
        for name, begin, end in step.phases:
            key = f"elapsed_time_ms_{name}"
            values[key] = values.get(key, 0.0) + 1e3 * end.seconds_since(begin)
        return StepEvent(step.report.step, step.samples, step.time_s, values)


def tokens_in(args: Sequence[object], kwargs: Mapping[str, object]) -> int:
    """Tokens in the arguments of a forward: elements of ``input_ids``, else of the first integer matrix.

    ``inputs_embeds`` counts by its first two dimensions. Padding counts. 0: the model has no tokens.

    >>> tokens_in((), {"input_ids": torch.zeros(2, 3, dtype=torch.long)})
    6
    >>> tokens_in((torch.zeros(2, 3),), {})
    0
    """
    named = kwargs.get("input_ids")
    if isinstance(named, torch.Tensor):
        return named.numel()
    embeds = kwargs.get("inputs_embeds")
    if isinstance(embeds, torch.Tensor) and embeds.dim() >= 2:
        return embeds.shape[0] * embeds.shape[1]
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.dim() == 2 and not value.is_floating_point():
            return value.numel() if value.dtype is not torch.bool else 0
    return 0
