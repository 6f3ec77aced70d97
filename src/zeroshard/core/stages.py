"""The state that each ZeRO stage shards.

The stages are four rows of data. The code of a step reads these rows and does not compare stage numbers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """One row of the ZeRO table (ZeRO paper, section 5; DeepSpeed key ``zero_optimization.stage``).

    >>> STAGES[2].shards_grads, STAGES[2].volume
    (True, 2)
    """

    number: int
    shards_optimizer: bool
    shards_grads: bool
    shards_params: bool

    @property
    def volume(self) -> int:
        """Elements that pass through collectives per step, as a multiple of the model's size.

        Below stage 3: a reduce-scatter and an all-gather. At stage 3: one more all-gather (ZeRO paper,
        section 7).
        """
        return 3 if self.shards_params else 2


STAGES = {  #        optimizer  gradients  parameters
    0: Stage(0, False, False, False),
    1: Stage(1, True, False, False),
    2: Stage(2, True, True, False),
    3: Stage(3, True, True, True),
}
