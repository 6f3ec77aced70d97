"""Selects the ``deepspeed`` package that the ranks of the session import, and shares fixtures."""

from __future__ import annotations

from gpu_rehearsal import load  # noqa: F401
from programs import deepspeed_on_ranks  # noqa: F401
