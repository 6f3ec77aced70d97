"""Rows that are not as expected, and what is seen instead. A row here that is right fails."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    seen: str  # a regular expression
    stages: tuple[int, ...] = (0, 1, 2, 3)
    ranks: tuple[int, ...] = (1, 2)


_SWAPPED = Fault("UsageError: parameter 'first.weight'")

NOT_YET: dict[str, Fault] = {
    # a hook of a parameter that runs after its gradient has left .grad
    "parameter_hook_after_accumulation_scales": Fault("NoneType"),
    # documented: a tensor on the memory of a sharded parameter keeps the values of its time
    "parameter_data_is_kept_over_a_step": Fault("differs by", (3,), (2,)),
    # other tensors in place of parameters, while gradients are enabled
    "calls_statelessly": _SWAPPED,
    "functional_call_with_an_inner_step": _SWAPPED,
    "functional_call_with_other_values": _SWAPPED,
}
