"""A rank of a tensor group dies, raises or freezes: every other rank ends with a verdict that names it.

The connection that breaks first is often that of a collective inside the layers, torch's own (a plan of
``parallelize_module``) or ours. Each rank is a process of its own, because a rank that waits in such a
collective can only be ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from support.tensor_networks import cut, loss_of, network, samples
from torch.distributed.device_mesh import init_device_mesh
from warm_python import WarmPython

import zeroshard
from zeroshard.core.mesh import Mesh
from zeroshard.parallel import tensor_parallel
from zeroshard.run.address import unused_port

LIMIT_S = 60
RANKS = 4


PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


def train(what: str, stage: int, style: str) -> None:
    """Train until rank 3 fails in the third step.

    ``style``: "torch" cuts with torch's plan and calls ``engine.backward``; "plain" cuts so too and calls
    ``loss.backward`` in a program that closes nothing; "own" is plain with a plan of ZeroShard.
    """
    config = {
        "train_micro_batch_size_per_gpu": 6,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "unit_min_numel": 1,
        "zero_optimization": {"stage": stage},
        "trust": {"frozen_s": 3.0, "grace_s": 3.0},
    }
    zeroshard.init_distributed()
    whole = network(32, torch.float32)
    if style == "own":
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        model = tensor_parallel(whole, grid, PLAN)
    else:
        model = cut(whole, 2)
    engine = zeroshard.Engine(model, config=config, mesh=Mesh(data_shard=2, tensor=2))
    with engine if style == "torch" else contextlib.nullcontext():
        for step in range(5):
            words = samples(step).chunk(2)[engine.dp_rank]
            loss = loss_of(engine(words), words)
            if step == 2 and engine.global_rank == 3:
                fail(what)
            (engine.backward if style == "torch" else torch.Tensor.backward)(loss)
            engine.step()


def fail(what: str) -> None:
    if what == "raised":
        raise ValueError("an error of the program")
    os.kill(os.getpid(), signal.SIGKILL if what == "killed" else signal.SIGSTOP)


@pytest.mark.parametrize(
    ("stage", "what", "style"),
    [
        (3, "raised", "torch"),
        (1, "killed", "plain"),
        (1, "frozen", "own"),
    ],
)
def test_every_rank_names_the_one_that_failed(stage, what, style):
    port = str(unused_port())
    began_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(RANKS):
            numbers = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": RANKS,
                "LOCAL_WORLD_SIZE": RANKS,
            }
            environ = os.environ | {name: str(number) for name, number in numbers.items()}
            environ["ZEROSHARD_STALL_S"] = "1"
            path = f"{Path(__file__).parents[1]}{os.pathsep}{environ.get('PYTHONPATH', '')}"
            process = WarmPython(
                [sys.executable, __file__, what, str(stage), style],
                cwd=Path.cwd(),
                env=environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": path},
            )
            stack.callback(process.close)
            ranks.append(process)
        outputs = ["".join(process.communicate(timeout=LIMIT_S)) for process in ranks[:3]]
        codes = [process.returncode for process in ranks[:3]]
    assert time.monotonic() - began_s < LIMIT_S
    kind = "RankFrozen" if what == "frozen" else "RankLost"
    for code, output in zip(codes, outputs, strict=True):
        assert code, output
        verdict = output[output.rindex(f"{kind} at step 2") :].splitlines()
        assert "  rank 3 (" in verdict[1], output
        if kind == "RankLost":
            assert "  The cause is in the output of rank 3;" in verdict[3], output


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]), sys.argv[3])
