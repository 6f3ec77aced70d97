"""How fast is training state written to the disk and read back, and how long does training wait?

Every line holds the same bytes: fp32 weights and two moments, over two ranks. A save ends when its
bytes are on the disk (fsync), a load when they are where training uses them. Before a load the files
are dropped from the page cache: a run that resumes has not just written them.
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
from judging import Row, statistics
from places import no_disk
from systems import ADAMW, ClippedStep, shard_with_fsdp2
from teams import Clock, Say, Team, in_turns, running
from torch import Tensor, nn

TITLE = "A10  checkpoints: fp32 weights and two moments, stage 3, 2 ranks"
OWN = "ZeroShard"
BEHIND = "ZeroShard, in the background"
NBYTES_PER_PARAMETER = 12
ROUNDS = 11


class Net(nn.Module):
    """An embedding and a stack of equal matrices: large tensors, and small ones between them."""

    def __init__(self, width: int, depth: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 8)

    def groups(self) -> list[nn.Module]:
        """What FSDP2 gathers together."""
        return [self.embedding, *self.layers]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x)
        y: Tensor = self.head(x)
        return y


@dataclass(frozen=True)
class Subject:
    """``save`` and ``load`` move everything. ``copied``: what a snapshot would copy."""

    save: Callable[[], None]
    load: Callable[[], None]
    close: Callable[[], None]
    settle: Callable[[], None] = lambda: None  # wait for what goes on behind
    copied: Callable[[], list[Tensor]] = list


def own(model: Net, place: Path, *, behind: bool = False) -> Subject:
    """This library at stage 3, bf16 with fp32 masters."""
    from zeroshard import Engine

    engine = Engine(
        model,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 3},
            "checkpoint": {"asynchronous": behind},
        },
    )
    engine.backward(engine(_ids()).float().square().mean())
    engine.step()

    def held() -> list[Tensor]:
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

    return Subject(
        lambda: void(engine.save_checkpoint(place, "tag")),
        lambda: void(engine.load_checkpoint(place)),
        engine.close,
        engine.wait_for_checkpoint,
        held,
    )


def dcp(model: Net, place: Path) -> Subject:
    """FSDP2 with torch's distributed checkpoint, as its tutorial has it."""
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
            shutil.rmtree(place, ignore_errors=True)
        dist.barrier()
        library.save(states(), checkpoint_id=place)

    return Subject(save, lambda: library.load(states(), checkpoint_id=place), lambda: None)


def files(model: Net, place: Path) -> Subject:
    """Nothing but safetensors: a file per rank with a half of each tensor; fsync; copied back."""
    from safetensors.torch import load_file, save_file

    rank, world_size = dist.get_rank(), dist.get_world_size()
    halves = {
        f"{kind} {name}": torch.randn(-(-param.numel() // world_size))
        for name, param in model.named_parameters()
        for kind in ("value", "exp_avg", "exp_avg_sq")
    }
    path = place / f"{rank}.safetensors"
    place.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        save_file(halves, path)
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)

    def load() -> None:
        for name, values in load_file(path).items():
            halves[name].copy_(values)

    return Subject(save, load, lambda: None)


LINES: dict[str, tuple[Callable[..., Subject], str]] = {
    OWN: (own, "checksums, written past the page cache"),
    BEHIND: (lambda model, place: own(model, place, behind=True), '"asynchronous": true'),
    "FSDP2, torch.distributed.checkpoint": (dcp, "defaults: one file per rank, fsync"),
    "safetensors, a file per rank": (files, "save_file and fsync; load_file and copy_"),
}


@dataclass(frozen=True)
class CheckpointJob:
    """Build the line of this name."""

    line: str
    size: tuple[int, int, int]
    directory: str

    def prepare(self) -> None:
        """Nothing."""

    def open(self, rank: int) -> CheckpointSession:
        """Train one step, so that there is state."""
        del rank
        place = (
            Path(self.directory)
            / f"zeroshard-bench-{self.line.split(',')[0].lower()}-{len(self.line)}"
        )
        torch.manual_seed(1)
        return CheckpointSession(LINES[self.line][0](Net(*self.size), place), place)


class CheckpointSession:
    """``turn("save" | "load" | "copy" | "copy again")``: CPU and wall seconds of this rank."""

    def __init__(self, subject: Subject, place: Path) -> None:
        self._subject, self._place = subject, place
        self._buffers: list[Tensor] = []

    def turn(self, request: str) -> dict[str, float]:
        """One save or load; or a copy of what a snapshot copies, fresh or into memory that is there."""
        if request == "load":
            _forget(self._place)
        if request == "copy":
            self._buffers = []
        dist.barrier()
        clock = Clock()
        if request == "copy":
            self._buffers = [held.clone() for held in self._subject.copied()]
        elif request == "copy again":
            for buffer, held in zip(self._buffers, self._subject.copied(), strict=True):
                buffer.copy_(held)
        else:
            getattr(self._subject, request)()
        cpu, wall = clock.read()
        self._subject.settle()
        return {"cpu": cpu, "wall": wall}

    def close(self) -> None:
        """Remove the files."""
        self._subject.close()
        dist.barrier()
        shutil.rmtree(self._place, ignore_errors=True)


def run(say: Say, *, smoke: bool, rounds: int | None = None, directory: str) -> dict[str, Any]:
    """A row per line: time and bandwidth; of the line in the background, what training waits."""
    size = (64, 2, 512) if smoke else (2048, 16, 16384)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Net(*size).parameters())
    why_not = no_disk(directory)
    teams = [Team(name, CheckpointJob(name, size, directory)) for name in LINES]
    found: dict[str, dict[str, list[list[dict[str, float]]]]] = {
        name: {"save": [], "load": [], "copy": [], "copy again": []} for name in LINES
    }
    if not why_not:
        with running(teams, say):
            for number, team in in_turns(teams, 1 + (1 if smoke else rounds or ROUNDS)):
                say(f"round {number}: {team.name}")
                for request in (
                    ("save", "copy", "copy again") if team.name == BEHIND else ("save", "load")
                ):
                    answers = team.turn(request)
                    if number and answers:  # the first save makes files and memory
                        found[team.name][request].append(answers)
    nbytes = NBYTES_PER_PARAMETER * parameters
    rows: list[Row] = []
    for team in teams:
        row: Row = {
            "name": team.name,
            "version": _version(team.name),
            "setting": LINES[team.name][1],
        }
        excuse = {"absent": why_not} if why_not else {"error": team.error} if team.error else {}
        kinds = found[team.name]
        rows.append(row | (excuse or {k: _measured(v, nbytes) for k, v in kinds.items() if v}))
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
    """The slowest rank's wall time, the mean CPU time, GB/s of all ranks together."""
    wall = [1000 * max(rank["wall"] for rank in answers) for answers in rounds]
    cpu = [1000 * sum(rank["cpu"] for rank in answers) / len(answers) for answers in rounds]
    return {
        "wall_ms": statistics(wall),
        "cpu_ms": statistics(cpu),
        "gb_per_s": float(f"{nbytes / statistics(wall)['median'] / 1e6:.3g}"),
    }


def _forget(place: Path) -> None:
    """Drop the files of a directory from the page cache."""
    for path in place.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def _version(name: str) -> str:
    if name.startswith(OWN):
        return version("zeroshard")
    return version("safetensors" if name.startswith("safetensors") else "torch")


def _ids() -> Tensor:
    return torch.arange(8).view(1, 8)


def void(_result: object) -> None:
    """Drops what a call returns."""
