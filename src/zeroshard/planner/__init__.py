"""What a run will need, found before it is started."""

from __future__ import annotations

from zeroshard.planner.simulate import simulate
from zeroshard.planner.simulated import Simulation, Traffic

__all__ = ["Simulation", "Traffic", "simulate"]
