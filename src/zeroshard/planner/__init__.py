"""What a run will need, found before it is started."""

from __future__ import annotations

from zeroshard.planner.simulate import Simulation, Traffic, simulate

__all__ = ["Simulation", "Traffic", "simulate"]
