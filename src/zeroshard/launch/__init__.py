"""How does a training program get onto its ranks?

A thin layer on torch elastic's agent (and on ``srun`` under SLURM). Importing it does not import
torch.
"""

from __future__ import annotations

from zeroshard.launch.launcher import launch
from zeroshard.launch.plan import LAUNCHERS, LaunchRequest
from zeroshard.launch.supervisor import ShutdownTimeouts

__all__ = ["LAUNCHERS", "LaunchRequest", "ShutdownTimeouts", "launch"]
