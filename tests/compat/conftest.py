"""Which ``deepspeed`` do the ranks of the session find?"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from programs import COMPAT, finds_deepspeed

from zeroshard.testing.ranks import pool, run_ranks


@pytest.fixture(scope="module")
def deepspeed_on_ranks() -> Iterator[None]:
    """Ours. Accelerate and Transformers look once, when they are imported: ranks that imported them
    for other tests are replaced."""
    sys.path.insert(0, str(COMPAT))
    try:
        if not all(run_ranks(finds_deepspeed, 2, group=False)):
            pool().kill()
        yield
    finally:
        sys.path.remove(str(COMPAT))
