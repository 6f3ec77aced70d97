"""The programs here run in the same way as those of ``tests/compat``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "compat"))

from programs import deepspeed_on_ranks  # noqa: F401
