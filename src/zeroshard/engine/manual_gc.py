"""Runs the cyclic garbage collector at step boundaries only (key ``disable_python_gc``)."""

from __future__ import annotations

import gc


class ManualGC:
    """No cyclic garbage collection but at step boundaries (key ``disable_python_gc``)."""

    def __init__(self) -> None:
        self._was_on = gc.isenabled()
        gc.disable()

    def collect(self) -> None:
        """Collect what recent steps left; what has survived several collections is not looked at."""
        gc.collect(1)

    def close(self) -> None:
        """Give the interpreter its collector back."""
        if self._was_on:
            gc.enable()
