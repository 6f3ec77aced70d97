"""How does a program that says ``import deepspeed`` run on ZeroShard?

``install()`` at its top; or, without touching it, ``zeroshard launch --as-deepspeed program.py``, or
``eval "$(zeroshard compat)"`` before any other launcher.
"""

from __future__ import annotations

from zeroshard.deepspeed.install import DIRECTORY, install

__all__ = ["DIRECTORY", "install"]
