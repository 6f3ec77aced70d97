"""The test kit: ranks that start in milliseconds, and a check for what a test leaves behind."""

from __future__ import annotations

from zeroshard_testing.outcome import RankEnd
from zeroshard_testing.ranks import RanksFailed, on_ranks, run_ranks

__all__ = ["RankEnd", "RanksFailed", "on_ranks", "run_ranks"]
