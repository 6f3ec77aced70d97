"""``python -m zeroshard.launch``: the same as ``zeroshard launch``, without a program on ``PATH``."""

from __future__ import annotations

import sys

from zeroshard.cli.launch import standalone
from zeroshard.cli.telling import open_standard_streams

if __name__ == "__main__":
    open_standard_streams()
    standalone(args=sys.argv[1:], prog_name="zeroshard launch")
