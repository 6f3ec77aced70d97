"""When do gradients complete an optimizer step, and by what is the loss divided?

One owner of the boundary per run: the engine's counter, the caller's word, or every ``step()``.
"""

from __future__ import annotations

from zeroshard.errors import UsageError


class Accumulation:
    """Counts micro-batches. ``steps``: micro-batches per optimizer step; ``managed``: DeepSpeed key
    ``managed_gradient_accumulation``.
    """

    def __init__(self, steps: int, *, managed: bool) -> None:
        self.steps = steps
        self.managed = managed
        self.micro_steps = 0  # complete micro-batches of the running step
        self.declared: bool | None = None  # set_gradient_accumulation_boundary
        self.deferred = 0  # depth of no_sync
        self.uncounted = False  # a backward inside no_sync that no step() has counted yet
        self.divided: set[bool] = set()  # of this step's backwards: was the loss divided already?
        self.backwards = 0  # in the running micro-batch
        self._has_warned = False

    def at_boundary(self) -> bool:
        """Is the micro-batch in progress the last of its optimizer step?"""
        if self.declared is not None:
            return self.declared
        return not self.managed or self.micro_steps + 1 >= self.steps

    def reduces_now(self) -> bool:
        """May the backward that begins reduce at once? Not while more are certain to come."""
        return self.managed and not self.deferred and self.at_boundary()

    def expects_more(self) -> bool:
        """Are gradients of several backwards summed before a step?"""
        return self.steps > 1 or not self.managed or self.declared is not None

    def note_backward(self, *, divided: bool) -> None:
        """A backward begins. Mixing both kinds in one step would weigh them differently."""
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
        """What the summed gradient still has to be divided by."""
        return 1 if True in self.divided else self.steps

    def advance(self) -> None:
        """A micro-batch is over."""
        self.micro_steps += 1
        self.uncounted, self.backwards = False, 0

    def seems_miscounted(self) -> bool:
        """Did one micro-batch have as many backwards as a whole step has micro-batches? Asked once:
        a caller who steps only at boundaries, without saying so, would train on every steps**2-th.
        """
        found = self.declared is None and self.backwards >= self.steps and not self._has_warned
        self._has_warned = self._has_warned or found
        return found

    def restart(self) -> None:
        """The next micro-batch is the first of an optimizer step."""
        self.micro_steps = self.backwards = 0
        self.uncounted = False
        self.divided.clear()
