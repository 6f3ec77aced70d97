"""The program that ``benchmarks/restarts.py`` starts: it trains, and breaks where it is told to.

    restart_program.py FOLDER JSON

The JSON has ``stage``, ``dropout``, ``steps`` and ``faults``. A fault is a mapping with ``attempt``,
``step``, ``rank`` and ``kind``: kill, stop, raise, save (killed at the point ``point`` of a save), or
slot (its slot is marked as broken first). Each rank writes into FOLDER which samples each of its steps
had; rank 0 writes the last weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import zeroshard

SAMPLES, BATCH, WIDTH = 60, 12, 6


class Samples(Dataset[Any]):
    """Numbered samples of random numbers."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return index, torch.randn(WIDTH, generator=generator, dtype=torch.float64)


class Faults:
    """The faults of this rank in this attempt."""

    def __init__(self, folder: Path, faults: list[dict[str, Any]], rank: int) -> None:
        self._folder = folder
        attempt = int(os.environ.get("ZEROSHARD_ATTEMPT", "0"))
        self._mine = [f for f in faults if f["attempt"] == attempt and f["rank"] == rank]

    def strike(self, step: int) -> None:
        """Break this process if it is to break before ``step``."""
        for fault in self._mine:
            if fault["step"] == step and fault["kind"] != "save":
                self._break(fault)

    def at_save(self, step: int, point: str) -> None:
        """End this process if it is to end at this point of the save after ``step``."""
        for fault in self._mine:
            if (fault["step"], fault["kind"], fault.get("point")) == (step, "save", point):
                os.kill(os.getpid(), signal.SIGKILL)

    def _break(self, fault: dict[str, Any]) -> None:
        if fault["kind"] == "raise":
            raise ValueError(f"fault of step {fault['step']}")
        if fault["kind"] == "slot":
            (self._folder / f"broken-{fault['slot']}").touch()
        number = signal.SIGSTOP if fault["kind"] == "stop" else signal.SIGKILL
        os.kill(os.getpid(), number)


def model_of(dropout: float) -> nn.Module:
    """A small network in fp64, always with the same first values."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1)]
    return nn.Sequential(*layers).double()


def main() -> None:
    """Train to the end, or break."""
    folder, given = Path(sys.argv[1]), json.loads(sys.argv[2])
    engine, _, loader, _ = zeroshard.initialize(
        model=(model := model_of(given["dropout"])),
        model_parameters=model.parameters(),
        training_data=Samples(),
        resume="auto",
        config={
            "train_batch_size": BATCH,
            "zero_optimization": {"stage": given["stage"]},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "trust": {"frozen_s": 6, "first_report_s": 3, "dump_dir": str(folder / "runs")},
        },
    )
    rank, attempt = engine.global_rank, os.environ.get("ZEROSHARD_ATTEMPT", "0")
    faults = Faults(folder, given["faults"], rank)
    engine._savers[0].watch_point = lambda point: faults.at_save(engine.global_steps, point)
    log = (folder / f"samples-{attempt}-{rank}.jsonl").open("w")
    port = os.environ.get("MASTER_PORT")
    first = {
        "pid": os.getpid(),
        "port": port,
        "from": engine.global_steps,
        "world": engine.world_size,
    }
    print(json.dumps(first), file=log, flush=True)
    used: list[int] = []
    while engine.global_steps < given["steps"]:
        loader.sampler.set_epoch(engine.global_samples // SAMPLES)
        for numbers, values in loader:
            if not used:
                faults.strike(engine.global_steps)
            before = engine.global_steps
            engine.backward(engine(values).square().mean())
            engine.step()
            used += numbers.tolist()
            if engine.global_steps == before:
                continue
            print(json.dumps([before, used]), file=log, flush=True)
            used = []
            if engine.global_steps % given["save_every"] == 0:
                engine.save_checkpoint(os.environ["ZEROSHARD_CHECKPOINT_DIR"])
            if engine.global_steps == given["steps"]:
                break
    with zeroshard.zero.GatheredParameters(list(model.parameters())):
        values = [p.detach().flatten().tolist() for p in model.parameters()]
        text = json.dumps(values)  # the repr of a float keeps every bit
    if rank == 0:
        digest = hashlib.sha256(text.encode()).hexdigest()
        (folder / "weights.json").write_text(json.dumps({"sha256": digest, "values": values}))
    engine.close()


if __name__ == "__main__":
    main()
