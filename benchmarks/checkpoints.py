"""A10: the time to save and load checkpoints, and the time that training waits for an asynchronous save.

Every line has the same bytes of state: fp32 weights and two moments, over two ranks. A save ends when its
bytes are on the disk (fsync). A load ends when they are in the tensors that training uses. Before a load
the files are dropped from the page cache, because a run that resumes has not just written them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from comparability import Row, statistics
from interleaving import Clock, Say, WorkerGroup, interleaved, running
from systems import ADAMW, ClippedStep, shard_with_fsdp2
from tiers import disk_problem
from torch import Tensor, nn

TITLE = "A10  checkpoints: fp32 weights and two moments, stage 3, 2 ranks"
ZEROSHARD = "ZeroShard"
ASYNCHRONOUS = "ZeroShard, in the background"
NBYTES_PER_PARAMETER = 12
ROUNDS = 11


class Net(nn.Module):
    """An embedding and a stack of equal linear layers: large tensors with small ones between them."""

    def __init__(self, width: int, depth: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 8)

    def groups(self) -> list[nn.Module]:
        """The modules that FSDP2 shards one by one."""
        return [self.embedding, *self.layers]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x)
        y: Tensor = self.head(x)
        return y


@dataclass(frozen=True)
class CheckpointCalls:
    """The calls of one library. ``wait`` ends when an asynchronous save has ended. ``snapshot``
    returns the tensors that an asynchronous save copies."""

    save: Callable[[], None]
    load: Callable[[], None]
    close: Callable[[], None]
    wait: Callable[[], None] = lambda: None
    snapshot: Callable[[], list[Tensor]] = list


def zeroshard(model: Net, directory: Path, *, asynchronous: bool = False) -> CheckpointCalls:
    """ZeroShard at stage 3, bf16 with fp32 masters."""
    from zeroshard import Engine

    engine = Engine(
        model,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 3},
            "checkpoint": {"asynchronous": asynchronous},
        },
    )
    engine.backward(engine(_ids()).float().square().mean())
    engine.step()

    def state_tensors() -> list[Tensor]:
        shards = engine.runtime.optimizer.shards if engine.runtime.optimizer else []
        chunks = [chunk for shard in shards for chunk in shard.chunks]
        state = engine.optimizer.state if engine.optimizer is not None else {}
        moments = [
            state[f.value][name]
            for chunk in chunks
            for f in chunk.fragments
            for name in ("exp_avg", "exp_avg_sq")
        ]
        return [chunk.master_C for chunk in chunks] + moments

    return CheckpointCalls(
        lambda: void(engine.save_checkpoint(directory, "tag")),
        lambda: void(engine.load_checkpoint(directory)),
        engine.close,
        engine.wait_for_checkpoint,
        state_tensors,
    )


def dcp(model: Net, directory: Path) -> CheckpointCalls:
    """FSDP2 with ``torch.distributed.checkpoint``, used as its tutorial does."""
    import torch.distributed.checkpoint as library
    from torch.distributed.checkpoint.state_dict import get_state_dict

    shard_with_fsdp2(model, reshard=True)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, fused=True, **ADAMW)
    step = ClippedStep(params, optimizer)
    model(_ids()).float().square().mean().backward()
    step()

    def states() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments}

    def save() -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(directory, ignore_errors=True)
        dist.barrier()
        library.save(states(), checkpoint_id=directory)

    return CheckpointCalls(
        save, lambda: library.load(states(), checkpoint_id=directory), lambda: None
    )


def files(model: Net, directory: Path) -> CheckpointCalls:
    """Safetensors alone: one file per rank with its share of each tensor, and fsync. A load copies the
    values back."""
    from safetensors.torch import load_file, save_file

    rank, world_size = dist.get_rank(), dist.get_world_size()
    shares = {
        f"{kind} {name}": torch.randn(-(-param.numel() // world_size))
        for name, param in model.named_parameters()
        for kind in ("value", "exp_avg", "exp_avg_sq")
    }
    path = directory / f"{rank}.safetensors"
    directory.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        save_file(shares, path)
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)

    def load() -> None:
        for name, values in load_file(path).items():
            shares[name].copy_(values)

    return CheckpointCalls(save, load, lambda: None)


LINES: dict[str, tuple[Callable[..., CheckpointCalls], str]] = {
    ZEROSHARD: (zeroshard, "checksums, written without the page cache"),
    ASYNCHRONOUS: (
        lambda model, directory: zeroshard(model, directory, asynchronous=True),
        '"asynchronous": true',
    ),
    "FSDP2, torch.distributed.checkpoint": (dcp, "defaults: one file per rank, fsync"),
    "safetensors, a file per rank": (files, "save_file and fsync; load_file and copy_"),
}


@dataclass(frozen=True)
class CheckpointJob:
    """Measure the line of this name."""

    line: str
    size: tuple[int, int, int]
    directory: str

    def prepare(self) -> None:
        """Nothing."""

    def open(self, rank: int) -> CheckpointSession:
        """Train one step, so that there is optimizer state."""
        del rank
        directory = (
            Path(self.directory)
            / f"zeroshard-bench-{self.line.split(',')[0].lower()}-{len(self.line)}"
        )
        torch.manual_seed(1)
        return CheckpointSession(LINES[self.line][0](Net(*self.size), directory), directory)


class CheckpointSession:
    """``turn("save" | "load" | "copy" | "copy again")`` returns CPU and wall seconds of this rank."""

    def __init__(self, calls: CheckpointCalls, directory: Path) -> None:
        self._calls, self._directory = calls, directory
        self._buffers: list[Tensor] = []

    def turn(self, request: str) -> dict[str, float]:
        """One save, one load, or one copy of the snapshot: into new memory, or again into the same
        memory."""
        if request == "load":
            _drop_from_page_cache(self._directory)
        if request == "copy":
            self._buffers = []
        dist.barrier()
        clock = Clock()
        if request == "copy":
            self._buffers = [held.clone() for held in self._calls.snapshot()]
        elif request == "copy again":
            for buffer, held in zip(self._buffers, self._calls.snapshot(), strict=True):
                buffer.copy_(held)
        else:
            getattr(self._calls, request)()
        cpu, wall = clock.read()
        self._calls.wait()
        return {"cpu": cpu, "wall": wall}

    def close(self) -> None:
        """Remove the files."""
        self._calls.close()
        dist.barrier()
        shutil.rmtree(self._directory, ignore_errors=True)


def run(say: Say, *, smoke: bool, rounds: int | None = None, directory: str) -> dict[str, Any]:
    """One row per line: times and bandwidth. For the asynchronous line, the time that training waits."""
    size = (64, 2, 512) if smoke else (2048, 16, 16384)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Net(*size).parameters())
    problem = disk_problem(directory)
    groups = [WorkerGroup(name, CheckpointJob(name, size, directory)) for name in LINES]
    found: dict[str, dict[str, list[list[dict[str, float]]]]] = {
        name: {"save": [], "load": [], "copy": [], "copy again": []} for name in LINES
    }
    if not problem:
        with running(groups, say):
            for number, group in interleaved(groups, 1 + (1 if smoke else rounds or ROUNDS)):
                say(f"round {number}: {group.name}")
                for request in (
                    ("save", "copy", "copy again")
                    if group.name == ASYNCHRONOUS
                    else ("save", "load")
                ):
                    answers = group.turn(request)
                    if number and answers:  # the first round creates files and buffers
                        found[group.name][request].append(answers)
    nbytes = NBYTES_PER_PARAMETER * parameters
    rows: list[Row] = []
    for group in groups:
        row: Row = {
            "name": group.name,
            "version": _version(group.name),
            "setting": LINES[group.name][1],
        }
        unavailable = (
            {"absent": problem} if problem else {"error": group.error} if group.error else {}
        )
        kinds = found[group.name]
        rows.append(row | (unavailable or {k: _measured(v, nbytes) for k, v in kinds.items() if v}))
    return {
        "title": TITLE,
        "settings": {
            "parameters": parameters,
            "nbytes": nbytes,
            "directory": directory,
            "adamw": ADAMW,
        },
        "rows": rows,
    }


def _measured(rounds: list[list[dict[str, float]]], nbytes: int) -> dict[str, Any]:
    """Wall time of the slowest rank, mean CPU time, GB/s of all ranks together."""
    wall = [1000 * max(rank["wall"] for rank in answers) for answers in rounds]
    cpu = [1000 * sum(rank["cpu"] for rank in answers) / len(answers) for answers in rounds]
    return {
        "wall_ms": statistics(wall),
        "cpu_ms": statistics(cpu),
        "gb_per_s": float(f"{nbytes / statistics(wall)['median'] / 1e6:.3g}"),
    }


def _drop_from_page_cache(directory: Path) -> None:
    """Drop the files of a directory from the page cache."""
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def _version(name: str) -> str:
    if name.startswith(ZEROSHARD):
        return version("zeroshard")
    return version("safetensors" if name.startswith("safetensors") else "torch")


def _ids() -> Tensor:
    return torch.arange(8).view(1, 8)


def void(_result: object) -> None:
    """Discard the result of a call."""
