"""Hooks of the program that run after a gradient was accumulated, and what they find in ``.grad``.

As in plain data-parallel PyTorch they run before the ranks' gradients are added: ``.grad`` is this
rank's, with its loss scale. They may read, change, replace or drop it. The engine's own hook takes it
after the last of them.

Two things would give another answer than plain PyTorch, and raise. From the second gradient of a step on,
``.grad`` is a sum there, of which only the last addend may be here; then a stand-in refuses its use. And
on several ranks an optimizer that steps inside a hook would give each rank other parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from zeroshard.errors import UsageError
from zeroshard.zero.gradients import GradBuffer
from zeroshard.zero.held_grads import HeldGrad

Table = dict[int, Callable[..., Any]]
"""The hooks of a parameter, by number, in the order in which they run."""

_GUARD = -1
"""The number of the guard, which runs before all others."""


@dataclass
class _Run:
    """One run of a parameter's hooks. ``held``: the stand-in and the gradient it hides."""

    version: int
    held: tuple[HeldGrad, Tensor] | None = None


class ProgramHooks:
    """The hooks of the program on the trained parameters, which have numbers.

    :meth:`begin` and :meth:`end` enclose a backward. ``guarded``: by number, the runs of parameters with
    such hooks; None before a run.
    """

    def __init__(self) -> None:
        self._tables: list[Table] = []
        self._own: list[int] = []  # by number of the parameter, that of the engine's hook
        self._places: list[tuple[GradBuffer, int]] = []
        self.guarded: dict[int, _Run | None] = {}
        self.late: list[int] = []  # gradients to be taken at the end of backward

    def add(self, table: Table, own: int, buffer: GradBuffer, index: int) -> None:
        """Add the next parameter. ``own``: the number of the engine's hook in its table."""
        self._tables.append(table)
        self._own.append(own)
        self._places.append((buffer, index))

    def begin(self) -> None:
        """Let the engine's hook run last where the program has hooks."""
        if sum(map(len, self._tables)) == len(self._tables):
            return  # the engine's, unless a pipeline has removed some
        me = weakref.ref(self)
        for number, (table, own) in enumerate(zip(self._tables, self._own, strict=True)):
            if has_others(table, own):
                put_first(table, _GUARD, partial(_guard, me, number))
                if own in table:
                    table[own] = table.pop(own)
                self.guarded[number] = None
                buffer, index = self._places[number]
                if (slots := buffer.slots_of(index)) is not None:
                    slots.note_hook(index)

    def end(self) -> None:
        """Forget the runs of a backward."""
        for number, run in self.guarded.items():
            self._tables[number].pop(_GUARD, None)
            buffer, index = self._places[number]
            if run is not None and run.held is not None:
                buffer.unit.params[index].grad = None
        self.guarded.clear()
        self.late.clear()

    def delay(self, number: int, param: nn.Parameter) -> None:
        """Take the gradient at the end of backward, because hooks of the program may still run.

        They were ordered while this gradient was on its way.

        Raises:
            UsageError: the hooks do not find the sum of this step.
        """
        buffer, index = self._places[number]
        if buffer.holds_more(index):
            raise _second(buffer.unit.layout.slots[index].fqn)
        self.guarded[number] = _Run(param._version)
        self.late.append(number)

    def check(self, number: int, param: nn.Parameter) -> None:
        """Check what the hooks did, after the last one.

        Raises:
            UsageError: they dropped a part of a sum, or wrote the parameter on several ranks.
        """
        run, self.guarded[number] = self.guarded[number], None
        if run is None:
            return
        buffer, index = self._places[number]
        fqn = buffer.unit.layout.slots[index].fqn
        if run.held is not None:
            stand_in, grad = run.held
            is_same, param.grad = param.grad is stand_in, grad
            if not is_same:
                raise _second(fqn)
        if buffer.comm.size > 1 and param._version != run.version:
            raise UsageError(
                f"a hook that runs after accumulation wrote parameter {fqn!r} during backward, as an "
                "optimizer that steps inside backward does. It has the gradient of its own rank "
                "only, so parameters would differ between ranks. Let engine.step() update the "
                "parameters, with the optimizer that was given to initialize()."
            )


def has_others(table: Table, own: int) -> bool:
    """Whether the program has hooks beside the engine's."""
    return len(table) > (own in table)


def put_first(table: Table, number: int, hook: Callable[..., Any]) -> None:
    """Add a hook that runs before those of the table, in which it is not.

    C++ reads the table as a dict, so ``OrderedDict.move_to_end`` has no effect on it.
    """
    others = dict(table)
    table.clear()
    table[number] = hook
    table.update(others)


def _guard(me: weakref.ref[ProgramHooks], number: int, param: nn.Parameter) -> None:
    """Runs before the hooks of the program. It refers to a buffer by number, as gradient hooks do."""
    hooks = me()
    if hooks is None or number not in hooks.guarded:
        return
    buffer, index = hooks._places[number]
    hooks.guarded[number] = run = _Run(param._version)
    grad = param.grad
    if grad is not None and buffer.holds_more(index):
        fqn = buffer.unit.layout.slots[index].fqn
        stand_in = HeldGrad.of(param, fqn, None, index, [])
        stand_in.refusal = _second(fqn)
        run.held, param.grad = (stand_in, grad), stand_in


def _second(fqn: str) -> UsageError:
    return UsageError(
        f".grad of {fqn!r} was used by a hook that runs after accumulation, in a backward that adds to "
        "a gradient of this step. In plain PyTorch the hook finds the sum; here .grad has the last "
        "addend only. Change the sum before the step (zeroshard.zero.safe_get_full_grad, "
        "safe_set_full_grad), or each addend with param.register_hook(), or set "
        "gradient_accumulation_steps to 1. To clip, use the key gradient_clipping."
    )
