"""Where the tests that run the real DeepSpeed find it."""

from __future__ import annotations

import importlib.util
import os

import pytest

SITE = os.environ.get("ZEROSHARD_TEST_DEEPSPEED", "")
"""A folder with it; "": it is installed, or not there."""
KEYS = ("value", "exp_avg", "exp_avg_sq")
"""What a checkpoint has of each parameter."""

NEEDED = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not SITE and importlib.util.find_spec("deepspeed") is None,
        reason="DeepSpeed is not installed, and ZEROSHARD_TEST_DEEPSPEED names no folder with it",
    ),
]
