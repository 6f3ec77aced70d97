"""A5: peak memory of all ranks at stage 3, while the model is built and while it trains.

Each library builds the model in the way that suits it best: FSDP2 on the meta device, DeepSpeed and
ZeroShard inside their ``zero.Init``. Memory that a process has before does not count: libraries,
connections, and what is left of one tiny model.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from comparability import Row
from interleaving import Say, WorkerGroup, running
from models import GPT, GPTTask, Shape
from protocols import COMPUTE
from systems import (
    ADAMW,
    Trainer,
    deepspeed_config,
    deepspeed_line,
    fsdp2_line,
    fused_step,
    import_deepspeed,
    shard_with_fsdp2,
    zeroshard_config,
    zeroshard_line,
)

TITLE = "A5  memory of a model with a large vocabulary: stage 3, 2 ranks"
NBYTES_PER_PARAMETER = 16
"""bf16: parameter and gradient in bf16, master and two moments in fp32. fp32: parameter, gradient and two
moments. Sharded: the sum over all ranks."""

BIG = Shape(vocabulary=65536, width=512, layers=4, context=64)
TINY = Shape(vocabulary=256, width=64, layers=2, heads=2, context=16)
SMOKE = Shape(vocabulary=1024, width=64, layers=2, heads=2, context=16)


def _fsdp2(shape: Shape) -> Trainer:
    with torch.device("meta"):
        model = GPT(shape)
    shard_with_fsdp2(model, reshard=True, compute=COMPUTE)
    model.to_empty(device="cpu")
    for module in model.modules():
        reset: Any = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
    return Trainer(model, torch.autograd.backward, fused_step(model))


def _deepspeed(shape: Shape) -> Trainer:
    library = import_deepspeed()
    config = deepspeed_config(3, compute=COMPUTE)
    with library.zero.Init(config_dict_or_path=config):
        model = GPT(shape)
    engine, *_ = library.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), fused=True, **ADAMW),
        config=config,
        dist_init_required=False,
    )
    return Trainer(engine, engine.backward, engine.step, engine.destroy)


def _zeroshard(shape: Shape) -> Trainer:
    from zeroshard import Engine
    from zeroshard.zero import Init

    config = zeroshard_config(3, compute=COMPUTE)
    with Init(config_dict_or_path=config):
        model = GPT(shape)
    engine = Engine(model, config=config)
    return Trainer(engine, engine.backward, engine.step, engine.close)


SYSTEMS = {
    "FSDP2": (fsdp2_line(True, compute=COMPUTE), _fsdp2),
    "DeepSpeed": (deepspeed_line(3, compute=COMPUTE), _deepspeed),
    "ZeroShard": (zeroshard_line(3, compute=COMPUTE), _zeroshard),
}


@dataclass(frozen=True)
class MemoryJob:
    """Build and train a GPT of ``shape``."""

    system: str
    shape: Shape

    def prepare(self) -> None:
        """Train one tiny model, so that imports, connections and kernels exist before the measurement."""
        session = MemorySession(SYSTEMS[self.system][1](TINY), GPTTask(TINY).data(0, 2))
        session.turn(2)
        session.close()

    def open(self, rank: int) -> MemorySession:
        """Build the model that is measured."""
        data = GPTTask(self.shape).data(rank, 2)
        return MemorySession(SYSTEMS[self.system][1](self.shape), data)


@dataclass
class MemorySession:
    """``turn(n)`` trains n steps and returns their losses."""

    trainer: Trainer
    data: list[Any] = field(default_factory=list)

    def turn(self, request: int) -> list[float]:
        """The losses of the steps."""
        losses = []
        for number in range(request):
            loss = self.trainer.forward(*self.data[number % len(self.data)])
            self.trainer.backward(loss)
            self.trainer.step()
            losses.append(float(loss.detach()))
        return losses

    def close(self) -> None:
        """Close the system."""
        self.trainer.close()


def run(say: Say, *, smoke: bool, rounds: int | None = None) -> dict[str, Any]:
    """One row per library: MiB of all ranks together above what the processes had before.

    Libraries do not take turns here, so that only one of them is in memory.
    """
    del rounds
    shape, steps = (SMOKE, 9) if smoke else (BIG, 6)  # with 9 steps the last batch is the first one
    with torch.device("meta"):
        parameters = sum(p.numel() for p in GPT(shape).parameters())
    rows: list[Row] = []
    for name, (line, _) in SYSTEMS.items():
        row: Row = {"name": name, "version": line.version, "setting": line.setting, "stage": 3}
        rows.append(
            row | ({"absent": line.absent} if line.absent else _measure(name, shape, steps, say))
        )
    return {
        "title": TITLE,
        "settings": {"task": asdict(GPTTask(shape)), "parameters": parameters, "steps": steps},
        "formula_mib": round(NBYTES_PER_PARAMETER * parameters / 2**20, 1),
        "rows": rows,
    }


def _measure(name: str, shape: Shape, steps: int, say: Say) -> Row:
    group = WorkerGroup(name, MemoryJob(name, shape))
    with running([group], say, interval_s=0.005):
        say(f"training {name}")
        if not group.error:
            with group.sampling_memory("training", 0.005):
                answers = group.turn(steps)
    if group.error:
        return {"error": group.error}
    losses = [sum(of_ranks) / len(of_ranks) for of_ranks in zip(*answers, strict=True)]
    return {
        "peak_mib": {phase: round(n / 2**20, 1) for phase, n in group.peak_nbytes.items()},
        "losses": losses,
        "learns": losses[-1] < losses[0],
    }
