"""The test kit: ranks that start in milliseconds, edge-case models, a PyTorch reference, leak checks."""

from __future__ import annotations

import zeroshard.testing.edge_case_networks  # noqa: F401 - completes CASES
from zeroshard.testing.edge_case_models import CASES, Case
from zeroshard.testing.outcome import RankEnd
from zeroshard.testing.ranks import RanksFailed, on_ranks, run_ranks

__all__ = ["CASES", "Case", "RankEnd", "RanksFailed", "on_ranks", "run_ranks"]
