"""A CPU rank returns large freed blocks to the system, unless the user chose otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
from support.covering import sampled

PROGRAM = """
    import ctypes, sys, torch, zeroshard
    from zeroshard.memory.host_memory import return_large_blocks

    class Info(ctypes.Structure):
        _fields_ = [(f"other{at}" if at != 4 else "hblkhd", ctypes.c_size_t) for at in range(10)]

    look = ctypes.CDLL(None).mallinfo2
    look.restype = Info

    def is_outside_the_heap(mib):
        before = look().hblkhd
        block = torch.empty(mib << 20, dtype=torch.uint8)
        return look().hblkhd - before >= block.nbytes

    torch.empty(24 << 20, dtype=torch.uint8)  # when it is freed, glibc raises its threshold
    print("found", is_outside_the_heap(20))
    model = torch.nn.Linear(8, 8)
    zeroshard.initialize(model=model, config={"train_batch_size": 1, "zero_optimization": {"stage": 3}})
    print("found", is_outside_the_heap(20), is_outside_the_heap(8))
    return_large_blocks(offloaded=True)
    return_large_blocks(offloaded=False)  # a second engine, without offload
    print("found", is_outside_the_heap(12), is_outside_the_heap(2))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the C library may not be glibc")
@pytest.mark.parametrize(
    ("chosen", "expected"),
    sampled([
        ({}, ["False", "True False", "True False"]),
        (
            {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=33554432"},
            ["False", "False False", "False False"],
        ),
        ({"MALLOC_MMAP_THRESHOLD_": "33554432"}, ["False", "False False", "False False"]),
        (
            {"MALLOC_TRIM_THRESHOLD_": "67108864"},
            ["True", "True True", "True True"],
        ),  # which fixes 128 KiB for both
    ], every=2),
)  # fmt: skip
def test_large_blocks_of_cpu_ranks_are_outside_the_heap(chosen, expected):
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        env={**os.environ, **chosen},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    found = [line[6:] for line in ended.stdout.splitlines() if line.startswith("found ")]
    assert found == expected, ended.stderr[-2000:]
