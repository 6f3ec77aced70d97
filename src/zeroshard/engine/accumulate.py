"""Counts micro-batches: which backward completes an optimizer step, and by what the loss is divided.

The accumulation boundary has one source per run: the engine's counter, the caller's declaration, or every
``step()``.
"""

from __future__ import annotations

from zeroshard.errors import UsageError


class Accumulation:
    """Counts micro-batches of optimizer steps.

    ``steps``: micro-batches per optimizer step. ``managed``: DeepSpeed's key
    ``managed_gradient_accumulation``.
    """

    def __init__(self, steps: int, *, managed: bool) -> None:
        self.steps = steps
        self.managed = managed
        self.micro_steps = 0  # finished micro-batches of the current step
        self.declared: bool | None = None  # set_gradient_accumulation_boundary
        self.deferred = 0  # depth of no_sync
        self.uncounted = False  # a backward inside no_sync that no step() has counted yet
        self.divided: set[bool] = set()  # this step's backwards: was the loss divided before?
        self.backwards = 0  # in the current micro-batch
        self._has_warned = False

    def at_boundary(self) -> bool:
        """Is the current micro-batch the last of its optimizer step?"""
        if self.declared is not None:
            return self.declared
        return not self.managed or self.micro_steps + 1 >= self.steps

    def reduces_now(self) -> bool:
        """Does the backward that begins reduce its gradients? Only if no other backward can follow."""
        return self.managed and not self.deferred and self.at_boundary()

    def expects_more(self) -> bool:
        """Are gradients of several backwards summed before a step?"""
        return self.steps > 1 or not self.managed or self.declared is not None

    def note_backward(self, *, divided: bool) -> None:
        """A backward begins. ``divided``: the engine divided its loss.

        Raises:
            UsageError: divided and undivided losses are mixed in one step, which would weigh them
                differently.
        """
        self.uncounted = self.uncounted or self.deferred > 0
        self.backwards += 1
        self.divided.add(divided)
        if self.steps > 1 and len(self.divided) > 1:
            raise UsageError(
                f"engine.backward(loss) and loss.backward() were mixed in one step with "
                f"gradient_accumulation_steps={self.steps}: the first divides the loss before, the "
                "other is divided afterwards. Use one of them for all losses of a step."
            )

    @property
    def remaining_divisor(self) -> int:
        """The number by which the summed gradient is still to be divided."""
        return 1 if True in self.divided else self.steps

    def advance(self) -> None:
        """The current micro-batch ends."""
        self.micro_steps += 1
        self.uncounted, self.backwards = False, 0

    def seems_miscounted(self) -> bool:
        """Did one micro-batch have as many backwards as a step has micro-batches? True at most once.

        The caller then probably calls ``step()`` only at boundaries without declaring them, and would
        train with one update per ``steps**2`` backwards.
        """
        found = self.declared is None and self.backwards >= self.steps and not self._has_warned
        self._has_warned = self._has_warned or found
        return found

    def restart(self) -> None:
        """Count the next micro-batch as the first of an optimizer step."""
        self.micro_steps = self.backwards = 0
        self.uncounted = False
        self.divided.clear()
