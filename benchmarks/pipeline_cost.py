"""Measures the CPU time of a pipeline step, beside torch's schedule over DistributedDataParallel.

    python benchmarks/pipeline_cost.py [--rounds N] [--out FILE]

Four ranks: two pipeline stages, each on two data-parallel ranks. Both systems run the same 1F1B schedule
with the same model, data, clipping and fused AdamW in fp32, and take turns. The measure is the CPU time
of all ranks together in one step. DDP clips by the norm of one stage; ZeroShard clips by that of the
whole model, which costs one more exchange.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from interleaving import Clock, step_ms
from machine import describe

if TYPE_CHECKING:
    from torch import Tensor, nn

RANKS, STAGES, BLOCKS, ROWS, MICRO_BATCHES = 4, 2, 8, 16, 8
CLIP, LR = 1.0, 1e-3
WIDTHS = (64, 512)
SYSTEMS = ("torch", "ZeroShard stage 0", "ZeroShard stage 1", "ZeroShard stage 2, reduced per step")


@dataclass(frozen=True)
class Training:
    """A job: one system at one width."""

    system: str
    width: int

    def prepare(self) -> None:
        """Import both systems."""
        import torch.distributed.pipelining

        import zeroshard.engine.initialize

        assert torch.distributed.pipelining
        assert zeroshard.engine.initialize

    def open(self, rank: int) -> OfTorch | OfZeroShard:
        """Build the system."""
        return OfTorch(self.width) if self.system == "torch" else OfZeroShard(self)


def blocks(width: int) -> list[nn.Module]:
    """The model: perceptrons with a norm. Equal on all ranks."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    return [
        nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        for _ in range(BLOCKS)
    ]


def data(width: int, share: int) -> tuple[Tensor, Tensor]:
    """The samples of one data-parallel rank in each step."""
    import torch

    made = torch.Generator().manual_seed(1 + share)
    x, y = (torch.randn(MICRO_BATCHES * ROWS, width, generator=made) for _ in range(2))
    return x, y


class OfTorch:
    """torch's Schedule1F1B; each stage is wrapped in DDP."""

    def __init__(self, width: int) -> None:
        import torch
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B
        from torch.nn.parallel import DistributedDataParallel

        mesh = init_device_mesh("cpu", (STAGES, RANKS // STAGES), mesh_dim_names=("pipe", "data"))
        self.at = mesh.get_local_rank("pipe")
        share = BLOCKS // STAGES
        part = nn.Sequential(*blocks(width)[share * self.at : share * (self.at + 1)])
        module = DistributedDataParallel(part, process_group=mesh.get_group("data"))
        self.params = list(module.parameters())
        self.optimizer = torch.optim.AdamW(self.params, lr=LR, fused=True)
        stage = PipelineStage(
            module, self.at, STAGES, torch.device("cpu"), group=mesh.get_group("pipe")
        )
        self.schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
        self.x, self.y = data(width, mesh.get_local_rank("data"))

    def turn(self, steps: int) -> list[float]:
        """CPU seconds of each step."""
        return [self._step() for _ in range(steps)]

    def _step(self) -> float:
        from torch import nn

        clock = Clock()
        if self.at == 0:
            self.schedule.step(self.x)
        else:
            self.schedule.step(target=self.y, losses=[])
        nn.utils.clip_grad_norm_(self.params, CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return clock.read()[0]

    def close(self) -> None:
        """Nothing is open."""


class OfZeroShard:
    """An engine with a pipeline."""

    def __init__(self, job: Training) -> None:
        import torch
        from torch import nn

        import zeroshard

        share = BLOCKS // STAGES
        model = zeroshard.parallel.pipeline(
            nn.Sequential(*blocks(job.width)),
            split=[str(share * at) for at in range(1, STAGES)],
            loss_fn=nn.functional.mse_loss,
            reduce="step",
        )
        self.engine = zeroshard.Engine(
            model,
            config={
                "train_micro_batch_size_per_gpu": ROWS,
                "gradient_accumulation_steps": MICRO_BATCHES,
                "gradient_clipping": CLIP,
                "optimizer": {"type": "AdamW", "params": {"lr": LR}},
                "zero_optimization": {"stage": int(job.system.split()[2].rstrip(","))},
                "parallel": {"pipeline": STAGES},
            },
        )
        x, y = data(job.width, self.engine.dp_rank)
        self.batches: list[tuple[torch.Tensor, torch.Tensor]] = list(
            zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True)
        )

    def turn(self, steps: int) -> list[float]:
        """CPU seconds of each step."""
        return [self._step() for _ in range(steps)]

    def _step(self) -> float:
        clock = Clock()
        self.engine.train_batch(iter(self.batches))
        return clock.read()[0]

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()


def measure(width: int, rounds: int, burst: int) -> dict[str, float]:
    """See :func:`step_ms`."""
    jobs = {name: Training(name, width) for name in SYSTEMS}
    return step_ms(jobs, ranks=RANKS, rounds=rounds, burst=burst)


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--burst", type=int, default=5)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    machine, result = describe(), {}
    for width in WIDTHS:
        found = result[f"width {width}"] = measure(width, given.rounds, given.burst)
        for name, ms in found.items():
            print(f"width {width:<5} {name:<36} {ms:8.2f} ms  {ms / found['torch']:.2f} of torch's")
    if given.out:
        text = {"machine": machine, "rounds": given.rounds, "milliseconds": result}
        given.out.write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()
