"""Which ``deepspeed`` do the ranks of the session find?"""

from __future__ import annotations

from programs import deepspeed_on_ranks  # noqa: F401
