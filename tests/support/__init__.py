"""What tests compare with: models with edge cases, a PyTorch reference, a communicator with faults."""

from __future__ import annotations

import support.edge_case_networks  # noqa: F401 - completes CASES
from support.edge_case_models import CASES, Case

__all__ = ["CASES", "Case"]
