"""What updates that begin in backward gain and cost (``super_offload``), where the host has idle cores.

    python benchmarks/early_update.py --rounds 15

One CPU rank with a pretended bus, as a GPU rank copies. Computation is replaced by sleeping, as a host
sleeps while a GPU computes, so only updates and copies use the cores. Three engines take turns: late
updates, early ones, and early ones of which every step is clipped. Prints medians of seconds and of CPU
seconds per step. It cannot show the rates of a bus, or kernels that use the host's memory meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import nn

import zeroshard
from zeroshard.device.copy_streams import CopyStreams
from zeroshard.engine import build_runtime
from zeroshard.offload import stores
from zeroshard.optim import native_adam


class _Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BD: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.seconds = backward_s
        time.sleep(forward_s)
        return x_BD.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return grads[0], None, None


class Block(nn.Module):
    """A matrix that is used without a product: its gradient is one number everywhere."""

    def __init__(self, width: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width, width), 0.1))
        self.seconds = forward_s, backward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleeps.apply(x, *self.seconds) + self.weight.mean()


@contextlib.contextmanager
def a_bus() -> Iterator[None]:
    """Copies between "device" and host memory. Both are host memory."""
    streams = CopyStreams()
    with (
        mock.patch.object(build_runtime, "has_copy_streams", return_value=True),
        mock.patch.object(stores, "make_copy_streams", return_value=streams),
    ):
        yield


def open_engine(args: argparse.Namespace, *, early: bool, clip: float) -> zeroshard.Engine:
    """An engine of its own model."""
    blocks = [Block(args.width, args.forward_s, args.backward_s) for _ in range(args.blocks)]
    host = {"device": "cpu", "super_offload": early}
    return zeroshard.Engine(
        nn.Sequential(*blocks),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "gradient_clipping": clip,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": 2, "offload_optimizer": host},
        },
    )


def step(engine: zeroshard.Engine) -> tuple[float, float]:
    """Seconds and CPU seconds of a step, without the update of the step before."""
    wall, cpu = time.perf_counter(), time.process_time()
    engine.backward(engine(torch.ones(1, dtype=torch.bfloat16)).sum().float())
    engine.step()
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    """Read the command line, measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("blocks", 12), ("width", 2048), ("rounds", 10), ("steps", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("forward-s", 0.01), ("backward-s", 0.02)):
        parser.add_argument(f"--{name}", type=float, default=value)
    args = parser.parse_args()
    native_adam.prepare()
    native_adam.wait()
    kinds = {"late": (False, 0.0), "early": (True, 0.0), "early, all clipped": (True, 1e-3)}
    with a_bus(), contextlib.ExitStack() as closing:
        engines = {
            name: closing.enter_context(open_engine(args, early=early, clip=clip))
            for name, (early, clip) in kinds.items()
        }
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
        for engine in engines.values():
            step(engine), step(engine)
        for at in range(args.rounds):
            for name in [*engines][:: 1 if at % 2 else -1]:
                measured = [step(engines[name]) for _ in range(args.steps)]
                end = time.perf_counter()
                engines[name].runtime.optimizer.wait_for_worker()
                wait_s = time.perf_counter() - end  # what is left belongs to the last step
                wall, cpu = (sum(column) for column in zip(*measured, strict=True))
                found[name].append(((wall + wait_s) / args.steps, cpu / args.steps))
        slept = args.blocks * (args.forward_s + args.backward_s)
        print(f"{args.blocks} x {args.width}^2 elements; {slept:.3f} s of sleep in a step")
        for name, rows in found.items():
            walls, cpus = zip(*rows, strict=True)
            print(f"{name:20s} {median(walls):.3f} s, CPU {median(cpus):.3f} s, {len(rows)} rounds")


if __name__ == "__main__":
    main()
