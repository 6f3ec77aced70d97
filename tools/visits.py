"""How many files a step, `initialize`, a save and a load visit: the numbers of ADR 0016.

    zeroshard launch --nproc 2 tools/visits.py

Counts Python calls into the package with ``sys.setprofile`` on each rank, in the thread of the program:
two blocks of 0.5 million parameters, stage 3, bf16, AdamW, shared memory. A *change* is a call in another
file than the call before. All modules are imported before, so that imports are not counted.
"""

from __future__ import annotations

import importlib
import itertools
import os
import pkgutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard
from zeroshard.optim import native_adam

ROOT = f"{Path(zeroshard.__file__).parent}{os.sep}"
APART = ("compat", "deepspeed", "integrations", "triton_kernels", "__main__")
WIDTH = 704  # a rank's shard is a multiple of 64 elements, so that the fused update does all of it
CONFIG = {
    "train_batch_size": 8,
    "unit_min_numel": 1,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3},
}


class Block(nn.Module):
    """A residual block of one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` and the result: (samples, WIDTH)."""
        result: Tensor = x + self.linear(x)
        return result


def visits(body: Callable[[], object]) -> list[str]:
    """The file of each call into the package while ``body`` runs, in order."""
    found: list[str] = []

    def note(frame: Any, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            found.append(frame.f_code.co_filename[len(ROOT) :])

    sys.setprofile(note)
    try:
        body()
    finally:
        sys.setprofile(None)
    return found


def line(name: str, files: list[str]) -> str:
    """Counts with the transport, and without it.

    >>> line("x", ["a.py", "comm/shm.py", "a.py"])
    'x: 3 calls, 2 files, 2 changes; without comm 1 files, 0 changes'
    """
    outside = [file for file in files if not file.startswith("comm/")]
    changes = [sum(a != b for a, b in itertools.pairwise(way)) for way in (files, outside)]
    return (
        f"{name}: {len(files)} calls, {len(set(files))} files, {changes[0]} changes; "
        f"without comm {len(set(outside))} files, {changes[1]} changes"
    )


def main() -> None:
    """Print the lines of rank 0, then those of rank 1; with ``--files`` the calls of each file too."""
    for module in pkgutil.walk_packages(zeroshard.__path__, "zeroshard."):
        if not any(part in APART for part in module.name.split(".")):
            importlib.import_module(module.name)
    ways: dict[str, list[str]] = {}
    made: list[Any] = []
    model = nn.Sequential(Block(), Block())
    ways["initialize"] = visits(
        lambda: made.append(zeroshard.initialize(model=model, config=CONFIG)[0])
    )
    engine = made[0]
    native_adam.wait()

    def step() -> None:
        loss = engine(torch.randn(4, WIDTH, dtype=torch.bfloat16)).float().square().mean()
        engine.backward(loss)
        engine.step()

    for _ in range(3):
        step()
    ways["step"] = visits(step)
    folder: list[Any] = [tempfile.mkdtemp() if engine.is_main_rank else None]
    dist.broadcast_object_list(folder)
    engine.save_checkpoint(folder[0], tag="first")
    ways["save"] = visits(lambda: engine.save_checkpoint(folder[0], tag="second"))
    ways["load"] = visits(lambda: engine.load_checkpoint(folder[0]))
    engine.close()
    for rank in range(engine.world_size):
        if rank == engine.global_rank:
            for name, files in ways.items():
                print(f"rank {rank} {line(name, files)}", flush=True)
                if "--files" in sys.argv:
                    for file, calls in Counter(files).most_common():
                        print(f"    {calls:5d} {file}", flush=True)
        dist.barrier()


if __name__ == "__main__":
    main()
