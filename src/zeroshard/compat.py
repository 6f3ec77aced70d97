"""Runs programs that ``import deepspeed`` on ZeroShard.

Call :func:`install` at the top of the program. Without a change of the program, start it with
``zeroshard launch --as-deepspeed program.py``, or run ``eval "$(zeroshard compat)"`` in the shell before
any other launcher.
"""

from __future__ import annotations

from zeroshard.deepspeed.install import DIRECTORY, install

__all__ = ["DIRECTORY", "install"]
