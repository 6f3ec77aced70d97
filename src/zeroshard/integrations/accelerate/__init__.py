"""Accelerate's ``Accelerator`` under ZeroShard."""

from zeroshard.integrations.accelerate.accelerator import Accelerator
from zeroshard.integrations.accelerate.prepared import PreparedEngine

__all__ = ["Accelerator", "PreparedEngine"]
