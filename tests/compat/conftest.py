"""Selects the ``deepspeed`` package that the ranks of the session import."""

from __future__ import annotations

from programs import deepspeed_on_ranks  # noqa: F401
