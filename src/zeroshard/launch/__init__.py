"""Starts a training program on all its ranks.

A thin layer on the agent of torch elastic, and on ``srun`` under SLURM. Importing it does not import
torch.
"""

from __future__ import annotations

from zeroshard.launch.launcher import launch
from zeroshard.launch.options import LAUNCHERS, LaunchRequest
from zeroshard.launch.supervisor import ShutdownTimeouts

__all__ = ["LAUNCHERS", "LaunchRequest", "ShutdownTimeouts", "launch"]
