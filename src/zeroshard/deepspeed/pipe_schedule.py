"""Instructions of a pipeline, and schedules that list them (``deepspeed.runtime.pipe.schedule``).

A schedule is for one stage. ``steps()`` yields lists of instructions, which the engine runs in order. The
values are those of DeepSpeed 0.19.8, so that schedules of programs fit to them. Time is counted in steps
of one forward or backward: stage ``s`` of ``S`` runs the forward of micro-batch ``m`` at step ``2 m +
s``, and its backward at step ``2 (m + S) - 1 - s``. So neighbours are never at the same parity, and what
one of them sends after a step the other one receives before its next. An instruction that the two sides
need is in the lists of both at the same step, in an order in which sends that block would not wait for
each other.

An engine whose program does not change any of this runs other lists
(:mod:`zeroshard.parallel.schedules`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from zeroshard.errors import UsageError


class PipeInstruction:
    """One instruction. Keyword arguments become attributes, and arguments of what the engine calls.

    >>> ForwardPass(3), ForwardPass(3).buffer_id, ReduceGrads().name
    (ForwardPass(buffer_id=3), 3, 'ReduceGrads')
    """

    def __init__(self, **kwargs: Any) -> None:
        self.name = type(self).__name__
        self.kwargs = kwargs
        for key, value in kwargs.items():
            setattr(self, key, value)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.kwargs.items())})"


class OptimizerStep(PipeInstruction):
    """Update the parameters."""


class ReduceGrads(PipeInstruction):
    """Add the gradients of the data-parallel ranks of this stage."""


class ReduceTiedGrads(PipeInstruction):
    """Add the gradients of tied weights over their stages."""


class BufferOpInstruction(PipeInstruction):
    """An instruction for the micro-batch in buffer ``buffer_id``."""

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Take the next micro-batch from the data: inputs on the first stage, labels on the last one."""


class ForwardPass(BufferOpInstruction):
    """Run this stage forward."""


class BackwardPass(BufferOpInstruction):
    """Run this stage backward."""


class SendActivation(BufferOpInstruction):
    """Send the outputs to the next stage."""


class RecvActivation(BufferOpInstruction):
    """Receive the inputs from the stage before."""


class SendGrad(BufferOpInstruction):
    """Send the gradients of the inputs to the stage before."""


class RecvGrad(BufferOpInstruction):
    """Receive the gradients of the outputs from the next stage."""


class PipeSchedule(ABC):
    """The lists of instructions of stage ``stage_id`` out of ``stages``, for ``micro_batches``."""

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        super().__init__()
        self.micro_batches = micro_batches
        self.stages = stages
        self.stage_id = stage_id
        self.prev_stage, self.next_stage = stage_id - 1, stage_id + 1
        self.it: Iterator[list[PipeInstruction]] | None = None

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The list of instructions of each step."""

    def num_pipe_buffers(self) -> int:
        """How many micro-batches this stage holds at one time, at most."""
        return self.micro_batches

    @property
    def stage(self) -> int:
        """The number of the stage."""
        return self.stage_id

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        """The number of micro-batches."""
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        """Whether this is the first stage."""
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this is the last stage."""
        return self.stage_id == self.stages - 1

    def _valid_micro_batch(self, micro_batch_id: int) -> bool:
        return 0 <= micro_batch_id < self.micro_batches

    def _valid_stage(self, stage_id: int) -> bool:
        return 0 <= stage_id < self.stages

    def _buffer_idx(self, micro_batch_id: int) -> int:
        """The buffer of a micro-batch: they are used in turns."""
        if not self._valid_micro_batch(micro_batch_id):
            raise UsageError(
                f"{type(self).__name__}: micro-batch {micro_batch_id} of {self.micro_batches} has no "
                "buffer. Ask only for micro-batches of the step (_valid_micro_batch)."
            )
        return micro_batch_id % self.num_pipe_buffers()

    def __iter__(self) -> Iterator[list[PipeInstruction]]:
        self.it = None
        return self

    def __next__(self) -> list[PipeInstruction]:
        if self.it is None:
            self.it = self.steps()
        return next(self.it)


class TrainSchedule(PipeSchedule):
    """1F1B: a stage holds at most as many micro-batches as there are stages from it to the end.

    >>> list(TrainSchedule(micro_batches=1, stages=1, stage_id=0).steps())[1]
    [BackwardPass(buffer_id=0), ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
    """

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The list of instructions of each step."""
        count = 2 * (self.micro_batches + self.stages - 1)
        before = -1
        for step in range(count):
            now, is_forward = self._step_to_micro_batch(step)
            found = self._messages(before, now, is_forward=is_forward)
            if self._valid_micro_batch(now):
                buffer = self._buffer_idx(now)
                if is_forward and (self.is_first_stage or self.is_last_stage):
                    found.append(LoadMicroBatch(buffer))
                found.append(ForwardPass(buffer) if is_forward else BackwardPass(buffer))
            if step == count - 1:
                found += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            before = now
            yield found

    def _messages(self, before: int, now: int, *, is_forward: bool) -> list[PipeInstruction]:
        """What comes ahead of a step with micro-batch ``now``; the step before had ``before``.

        A forward follows a backward, whose gradients go to the stage before; and the other way round.
        """
        if not self._valid_stage(self.prev_stage if is_forward else self.next_stage):
            return []
        made: list[PipeInstruction] = []
        done, comes = self._valid_micro_batch(before), self._valid_micro_batch(now)
        if is_forward and done:
            made.append(SendGrad(self._buffer_idx(before)))
        if comes:
            made.append((RecvActivation if is_forward else RecvGrad)(self._buffer_idx(now)))
        if not is_forward and done:
            made.append(SendActivation(self._buffer_idx(before)))
        return made

    def num_pipe_buffers(self) -> int:
        """How many micro-batches this stage holds at one time, at most; at least 2."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def _step_to_micro_batch(self, step_id: int) -> tuple[int, bool]:
        """The micro-batch of a step, which may be none of the batch, and whether it goes forward."""
        is_forward = (step_id - self.stage_id) % 2 == 0
        if is_forward:
            return (step_id - self.stage_id) // 2, True
        return (step_id + self.stage_id + 1) // 2 - self.stages, False


class InferenceSchedule(PipeSchedule):
    """Forwards only: stage ``s`` runs micro-batch ``m`` at step ``m + s``, in two buffers by turns."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The list of instructions of each step."""
        for step in range(self.micro_batches + self.stages - 1):
            now, buffer = step - self.stage_id, (step + self.stage_id) % 2
            is_here = self._valid_micro_batch(now)
            sends = self._valid_stage(self.next_stage) and self._valid_micro_batch(now - 1)
            receives = self._valid_stage(self.prev_stage) and is_here
            found: list[PipeInstruction] = []
            if is_here and (self.is_first_stage or self.is_last_stage):
                found.append(LoadMicroBatch(buffer))
            messages: list[PipeInstruction] = [SendActivation(1 - buffer)] if sends else []
            if receives:  # of two neighbours the even one sends first
                messages.insert(
                    len(messages) if _is_even(self.stage_id) else 0, RecvActivation(buffer)
                )
            found += messages
            if is_here:
                found.append(ForwardPass(buffer))
            yield found

    def num_pipe_buffers(self) -> int:
        """2."""
        return 2


class DataParallelSchedule(PipeSchedule):
    """Gradient accumulation on one stage, with one buffer."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The list of instructions of each step."""
        for step in range(self.micro_batches):
            found: list[PipeInstruction] = [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)]
            if step == self.micro_batches - 1:
                found += [ReduceGrads(), OptimizerStep()]
            yield found

    def num_pipe_buffers(self) -> int:
        """1."""
        return 1


def _is_even(x: int) -> bool:
    return x % 2 == 0


def _is_odd(x: int) -> bool:
    return x % 2 != 0


PLAIN = tuple(
    (kind, name, function)
    for kind in (PipeSchedule, TrainSchedule, InferenceSchedule)
    for name, function in vars(kind).items()
    if isinstance(function, (FunctionType, property))
)
"""The functions of the schedules before a program has replaced one, which it may do before anything else
is imported."""
