"""Runs a module of ours in a process that is no rank of the run, and hands over bytes."""

from __future__ import annotations

import os
import re
import subprocess
import sys

_OF_A_RANK = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)$|MPI_LOCAL"
    r"|(ZEROSHARD|TORCHELASTIC|SLURM|OMPI|PMI|PMIX|MV2)_"
)
"""Variables that would make it a rank, or let it write into the folder of the run."""


def run_alone(module: str, given: bytes, *, limit_s: float) -> bytes:
    """What ``python -m module`` writes to its standard output when it reads ``given``.

    It sees no accelerator, has one thread, and is killed after ``limit_s`` seconds. What it writes to
    standard error is dropped.

    Raises:
        subprocess.TimeoutExpired: it took longer.
        OSError: it cannot be started.
    """
    env = {name: value for name, value in os.environ.items() if not _OF_A_RANK.match(name)}
    env |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", module], input=given, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, env=env, timeout=limit_s, check=False,
    )  # fmt: skip
    return done.stdout
