"""The test kit: ranks in milliseconds, awkward models, a plain-PyTorch oracle, leak checks."""

from __future__ import annotations

import zeroshard.testing.networks  # noqa: F401 - completes CASES
from zeroshard.testing.models import CASES, Case
from zeroshard.testing.ranks import RanksFailed, on_ranks, run_ranks
from zeroshard.testing.verdict import RankEnd

__all__ = ["CASES", "Case", "RankEnd", "RanksFailed", "on_ranks", "run_ranks"]
