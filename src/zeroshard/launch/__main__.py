"""``python -m zeroshard.launch``: the same as ``zeroshard launch``, without a program on ``PATH``."""

from __future__ import annotations

import sys

from zeroshard.cli.launch import standalone

if __name__ == "__main__":
    standalone(args=sys.argv[1:], prog_name="zeroshard launch")
